"""Anthropic's face: /v1/messages, and how many tokens such a message would have.

The same path as a chat's under another form: `model` names adapters, limits and usage are the same,
and only the shape of bodies, events and errors is Anthropic's.
"""

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Body, Header
from pydantic import BaseModel, Field
from starlette.responses import Response

from loraplex.platform.api import examples
from loraplex.platform.api.answer import Answer
from loraplex.platform.api.answer_schemas import Message
from loraplex.platform.api.context import Ctx, RequestId
from loraplex.platform.api.conversation import Conversation
from loraplex.platform.api.inputs import Explain, Inferring, count_tokens, find_caller, read_chat
from loraplex.platform.api.job import make_job
from loraplex.platform.api.limited_route import LimitedRoute
from loraplex.platform.api.messages_errors import error_body
from loraplex.platform.api.messages_form import Asked, MessagesForm
from loraplex.platform.api.messages_request import CountRequest, MessagesRequest
from loraplex.platform.errors import BadRequest

HARMLESS_BETAS: Final = (
    "claude-code-",
    "context-1m-",
    "extended-cache-ttl-",
    "fine-grained-tool-streaming-",
    "interleaved-thinking-",
    "max-tokens-",
    "output-128k-",
    "output-300k-",
    "prompt-caching-",
    "structured-outputs-",
    "token-counting-",
    "token-efficient-tools-",
)
BETA: Final = f"({'|'.join(HARMLESS_BETAS)})[0-9-]{{1,10}}"


class MessagesRoute(LimitedRoute):
    """A route whose errors have Anthropic's shape."""

    error_body = staticmethod(error_body)


Version = Annotated[
    Literal["2023-06-01", "2026-10-21"] | None,
    Header(
        alias="anthropic-version",
        description="Both are served alike: sampling parameters, which the newer one took away, "
        "work under either, because the base has them.",
    ),
]
Betas = Annotated[
    str | None,
    Header(
        alias="anthropic-beta",
        max_length=1_024,
        description="Betas, separated by commas; those that would change an answer are refused.",
        examples=["prompt-caching-2024-07-31"],
        json_schema_extra={"pattern": f"^{BETA}(, ?{BETA})*$"},
    ),
]

router = APIRouter(prefix="/v1/messages", tags=["messages"], route_class=MessagesRoute)
MESSAGE = examples.answered(
    Message,
    examples.MESSAGE_ANSWER,
    "Message",
    "message_start with a message without content, then content_block_start, "
    "content_block_delta and content_block_stop for each block, message_delta with the reason and "
    "the usage, message_stop; an error in mid-stream is an event of the type error.",
    'event: message_start\ndata: {"type": "message_start", "message": {…}}\n\n',
)


class TokensOut(BaseModel):
    """How many tokens a prompt has."""

    input_tokens: Annotated[int, Field(examples=[42])]


@router.post("", responses={200: MESSAGE})
async def create_message(
    principal: Inferring,
    ctx: Ctx,
    request_id: RequestId,
    body: Annotated[MessagesRequest, Body(openapi_examples=examples.named(examples.MESSAGES))],
    explain: Explain = None,
    conversation: Conversation = None,
    version: Version = None,
    betas: Betas = None,
) -> Response:
    """Answer a conversation as Anthropic's API does.

    Text, tools and JSON of a schema; images, documents, thinking and server tools are refused by
    name. `cache_control` is accepted and changes nothing: every prefix is cached.
    """
    _check_betas(betas)
    chat = body.chat()
    caller = await find_caller(ctx, principal, request_id, chat, explain, conversation)
    inputs = await read_chat(ctx, chat)
    asked = Asked(
        request_id=request_id,
        id=f"msg_{request_id.partition('_')[2]}",
        model=caller.target.model_id,
        prompt_tokens=inputs.tokens,
        tools=frozenset(tool.function.name for tool in chat.callable_tools),
        stops=frozenset(body.stop_sequences or ()),
    )
    return Answer(ctx, make_job(ctx, caller, chat, inputs, MessagesForm(asked)))


@router.post("/count_tokens")
async def count_message_tokens(
    principal: Inferring,
    ctx: Ctx,
    request_id: RequestId,
    body: Annotated[CountRequest, Body(openapi_examples=examples.named(examples.COUNTS))],
    version: Version = None,
    betas: Betas = None,
) -> TokensOut:
    """Count the tokens of a prompt without running it: exact, and free of charge."""
    _check_betas(betas)
    return TokensOut(input_tokens=await count_tokens(ctx, principal, request_id, body.chat()))


def _check_betas(betas: str | None) -> None:
    """Raise `BadRequest` for a beta that would change what is answered."""
    for beta in filter(None, map(str.strip, (betas or "").split(","))):
        if not beta.startswith(HARMLESS_BETAS):
            raise BadRequest(
                f"The beta {beta[:64]!r} is not served here; leave it out of anthropic-beta.",
                param="anthropic-beta",
            )
