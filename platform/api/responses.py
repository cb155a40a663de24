"""OpenAI's newer face: /v1/responses, of which nothing is stored, and how long its prompt would be.

The same path as a chat's under another form: `model` names adapters, limits and usage are the same,
and only the shape of bodies and events is another. There is nothing to get, delete or cancel.
"""

import time
from typing import Annotated

from fastapi import APIRouter, Body
from starlette.responses import Response

from loraplex.platform.api import examples
from loraplex.platform.api.answer import Answer
from loraplex.platform.api.context import Ctx, RequestId
from loraplex.platform.api.conversation import Conversation
from loraplex.platform.api.inputs import Explain, Inferring, count_tokens, find_caller, read_chat
from loraplex.platform.api.job import make_job
from loraplex.platform.api.limited_route import LimitedRoute
from loraplex.platform.api.responses_form import Asked, ResponsesForm
from loraplex.platform.api.responses_request import ResponsesRequest
from loraplex.platform.api.responses_schemas import InputTokenCount, ResponseObject

router = APIRouter(prefix="/v1", tags=["generation"], route_class=LimitedRoute)
RESPONSE = examples.answered(
    ResponseObject,
    examples.RESPONSE_ANSWER,
    "ResponseEvent",
    "response.created and response.in_progress, the events of each item, and one of "
    "response.completed, response.incomplete and response.failed, before which an error is told.",
    'event: response.created\ndata: {"type": "response.created", "response": {…}}\n\n',
)


@router.post("/responses", responses={200: RESPONSE})
async def create_response(
    principal: Inferring,
    ctx: Ctx,
    request_id: RequestId,
    body: Annotated[ResponsesRequest, Body(openapi_examples=examples.named(examples.RESPONSES))],
    explain: Explain = None,
    conversation: Conversation = None,
) -> Response:
    """Answer a conversation as OpenAI's Responses API does.

    Text, functions and JSON of a schema; images, files, stored conversations and the server's own
    tools are refused by name. Nothing is stored, whatever `store` says.
    """
    chat = body.chat()
    caller = await find_caller(ctx, principal, request_id, chat, explain, conversation)
    inputs = await read_chat(ctx, chat)
    asked = Asked(
        unique=request_id.partition("_")[2],
        model=caller.target.model_id,
        settings=body.settings(),
        now=time.time,
        tools=frozenset(tool.function.name for tool in chat.callable_tools),
    )
    form = ResponsesForm(asked, ctx.vocabulary)
    return Answer(ctx, make_job(ctx, caller, chat, inputs, form))


@router.post("/responses/input_tokens")
async def count_input_tokens(
    principal: Inferring,
    ctx: Ctx,
    request_id: RequestId,
    body: Annotated[ResponsesRequest, Body(openapi_examples=examples.named(examples.INPUTS))],
) -> InputTokenCount:
    """Count the tokens of a response's prompt without running it: exact, and free of charge.

    The body is the response's own; what only its generation needs may be left out.
    """
    tokens = await count_tokens(ctx, principal, request_id, body.chat())
    return InputTokenCount(object="response.input_tokens", input_tokens=tokens)
