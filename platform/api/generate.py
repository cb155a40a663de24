"""The two generating routes that OpenAI defines: chats and plain completions.

Each turns its body into token ids; everything after that is the same job.
"""

from typing import Annotated

from fastapi import APIRouter, Body
from starlette.responses import Response

from loraplex.platform.api import examples
from loraplex.platform.api.answer import Answer
from loraplex.platform.api.answer_schemas import ChatCompletion, TextCompletion
from loraplex.platform.api.chat import ChatRequest
from loraplex.platform.api.chat_form import ChatForm
from loraplex.platform.api.completion_form import CompletionForm
from loraplex.platform.api.context import Ctx, RequestId
from loraplex.platform.api.conversation import Conversation
from loraplex.platform.api.inputs import (
    Explain,
    Inferring,
    find_caller,
    identify,
    read_chat,
    read_prompts,
)
from loraplex.platform.api.job import make_job
from loraplex.platform.api.limited_route import LimitedRoute
from loraplex.platform.api.requests import CompletionRequest

router = APIRouter(prefix="/v1", tags=["generation"], route_class=LimitedRoute)
CHAT = examples.answered(
    ChatCompletion,
    examples.CHAT_ANSWER,
    "ChatChunk",
    "Each is `data: ` and a chunk, the last is `data: [DONE]`; an error comes instead of it.",
    'data: {"id": "chatcmpl-…", "object": "chat.completion.chunk", …}\n\ndata: [DONE]\n\n',
)
COMPLETION = examples.answered(
    TextCompletion,
    examples.COMPLETION_ANSWER,
    "TextCompletion",
    "Each is `data: ` and a part of a completion, the last is `data: [DONE]`.",
    'data: {"id": "cmpl-…", "object": "text_completion", …}\n\ndata: [DONE]\n\n',
)


@router.post("/chat/completions", responses={200: CHAT})
async def create_chat_completion(
    principal: Inferring,
    ctx: Ctx,
    request_id: RequestId,
    body: Annotated[ChatRequest, Body(openapi_examples=examples.named(examples.CHATS))],
    explain: Explain = None,
    conversation: Conversation = None,
) -> Response:
    """Answer a conversation with the base or an adapter.

    OpenAI's chat, with tools, `response_format`, log-probabilities and `n`; vLLM's sampling
    parameters and `guided_*` are served too. Fields that are not served are refused by name.
    """
    caller = await find_caller(ctx, principal, request_id, body, explain, conversation)
    inputs = await read_chat(ctx, body)
    names = frozenset(tool.function.name for tool in body.callable_tools)
    form = ChatForm(identify("chatcmpl-", caller, body, inputs), ctx.vocabulary, names)
    return Answer(ctx, make_job(ctx, caller, body, inputs, form))


@router.post("/completions", responses={200: COMPLETION})
async def create_completion(
    principal: Inferring,
    ctx: Ctx,
    request_id: RequestId,
    body: Annotated[CompletionRequest, Body(openapi_examples=examples.named(examples.COMPLETIONS))],
    explain: Explain = None,
    conversation: Conversation = None,
) -> Response:
    """Continue one prompt or several: texts, or lists of token ids."""
    caller = await find_caller(ctx, principal, request_id, body, explain, conversation)
    inputs = await read_prompts(ctx, body)
    form = CompletionForm(identify("cmpl-", caller, body, inputs), ctx.vocabulary)
    return Answer(ctx, make_job(ctx, caller, body, inputs, form))
