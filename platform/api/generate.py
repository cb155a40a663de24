"""The two generating routes: chats and plain completions, as OpenAI defines them.

Each turns its body into token ids; everything after that is the same job.
"""

import time
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends
from starlette.responses import Response

from loraplex.platform.api.answer import Answer
from loraplex.platform.api.auth import allow, own_tenant
from loraplex.platform.api.context import Context, Ctx, RequestId
from loraplex.platform.api.forms import ChatForm, CompletionForm, Identity
from loraplex.platform.api.job import Caller, make_job
from loraplex.platform.api.requests import ChatRequest, CompletionRequest, GenerationRequest
from loraplex.platform.api.target import find_target
from loraplex.platform.errors import BadRequest
from loraplex.platform.keys import Principal

router = APIRouter(prefix="/v1", tags=["generation"])
Inferring = Annotated[Principal, Depends(allow("infer"))]
STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}, "application/json": {}}}
}


@router.post("/chat/completions", responses=STREAM)
async def create_chat_completion(
    principal: Inferring, ctx: Ctx, request_id: RequestId, body: ChatRequest
) -> Response:
    """Answer a conversation with the base or an adapter; streams if `stream` is true."""
    caller = await _caller(ctx, principal, request_id, body)
    prompt = await to_thread.run_sync(_encode_chat, ctx, body)
    identity = _identity("chatcmpl", caller, body)
    form = ChatForm(identity, ctx.vocabulary)
    return Answer(ctx, make_job(ctx, caller, body, [prompt], form))


@router.post("/completions", responses=STREAM)
async def create_completion(
    principal: Inferring, ctx: Ctx, request_id: RequestId, body: CompletionRequest
) -> Response:
    """Continue one prompt or several; streams if `stream` is true."""
    caller = await _caller(ctx, principal, request_id, body)
    prompts = await to_thread.run_sync(_encode_prompts, ctx, body)
    identity = _identity("cmpl", caller, body)
    form = CompletionForm(identity, ctx.vocabulary)
    return Answer(ctx, make_job(ctx, caller, body, prompts, form))


async def _caller(
    ctx: Context, principal: Principal, request_id: str, body: GenerationRequest
) -> Caller:
    tenant_id = own_tenant(principal)
    target = await find_target(ctx, tenant_id, body.model, body.adapter_id)
    return Caller(request_id, principal, tenant_id, target)


def _identity(prefix: str, caller: Caller, body: GenerationRequest) -> Identity:
    _, _, unique = caller.request_id.partition("_")
    return Identity(
        id=f"{prefix}-{unique}",
        model=caller.target.model_id,
        created=int(time.time()),
        logprobs=body.top_logprobs_wanted is not None,
    )


def _encode_chat(ctx: Context, body: ChatRequest) -> list[int]:
    if ctx.template is None:
        raise BadRequest(
            "This base has no chat template, so it cannot chat; use /v1/completions.", param="model"
        )
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    return ctx.vocabulary.encode(ctx.template.render(messages), special=False)


def _encode_prompts(ctx: Context, body: CompletionRequest) -> list[list[int]]:
    return [
        ctx.vocabulary.encode(prompt, special=True) if isinstance(prompt, str) else prompt
        for prompt in body.prompts
    ]
