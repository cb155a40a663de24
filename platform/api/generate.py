"""The two generating routes: chats and plain completions, as OpenAI defines them.

Each turns its body into token ids; everything after that is the same job.
"""

import time
from itertools import accumulate
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends
from starlette.responses import Response

from loraplex.platform.api.answer import Answer
from loraplex.platform.api.auth import allow, own_tenant
from loraplex.platform.api.chat import ChatRequest
from loraplex.platform.api.chat_form import ChatForm
from loraplex.platform.api.completion_form import CompletionForm
from loraplex.platform.api.context import Context, Ctx, RequestId
from loraplex.platform.api.forms import Identity
from loraplex.platform.api.generation import Echo
from loraplex.platform.api.job import Caller, Inputs, Prompt, make_job
from loraplex.platform.api.requests import CompletionRequest, GenerationRequest
from loraplex.platform.api.structured import guide_of
from loraplex.platform.api.target import find_target
from loraplex.platform.api.tools import forced, told
from loraplex.platform.errors import BadRequest
from loraplex.platform.hermes import CLOSE
from loraplex.platform.keys import Principal
from loraplex.platform.text import Vocabulary, pieces_of

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
    inputs = await to_thread.run_sync(_read_chat, ctx, body)
    identity = _identity("chatcmpl", caller, body)
    names = frozenset(tool.function.name for tool in body.callable_tools)
    form = ChatForm(identity, ctx.vocabulary, names)
    return Answer(ctx, make_job(ctx, caller, body, inputs, form))


@router.post("/completions", responses=STREAM)
async def create_completion(
    principal: Inferring, ctx: Ctx, request_id: RequestId, body: CompletionRequest
) -> Response:
    """Continue one prompt or several; streams if `stream` is true."""
    caller = await _caller(ctx, principal, request_id, body)
    inputs = await to_thread.run_sync(_read_prompts, ctx, body)
    identity = _identity("cmpl", caller, body)
    form = CompletionForm(identity, ctx.vocabulary)
    return Answer(ctx, make_job(ctx, caller, body, inputs, form))


async def _caller(
    ctx: Context, principal: Principal, request_id: str, body: GenerationRequest
) -> Caller:
    tenant_id = own_tenant(principal)
    target = await find_target(ctx, tenant_id, body)
    return Caller(request_id, principal, tenant_id, target)


def _identity(prefix: str, caller: Caller, body: GenerationRequest) -> Identity:
    _, _, unique = caller.request_id.partition("_")
    return Identity(
        id=f"{prefix}-{unique}",
        model=caller.target.model_id,
        created=int(time.time()),
        logprobs=body.top_logprobs_wanted,
        prompt_logprobs=body.prompt_logprobs,
    )


def _read_chat(ctx: Context, body: ChatRequest) -> Inputs:
    """The one prompt that a conversation is, and the form of its answer."""
    if ctx.template is None:
        raise BadRequest(
            "This base has no chat template, so it cannot chat; use /v1/completions.", param="model"
        )
    text = ctx.template.render([message.told() for message in body.messages], told(body))
    prompt = Prompt(ctx.vocabulary.encode(text, special=False))
    stops = (CLOSE,) if body.callable_tools and body.one_call else ()
    return Inputs([prompt], forced(body) or guide_of(body), stops)


def _read_prompts(ctx: Context, body: CompletionRequest) -> Inputs:
    prompts = [_prompt(ctx.vocabulary, prompt, body.echoes) for prompt in body.prompts]
    return Inputs(prompts, guide_of(body))


def _prompt(vocabulary: Vocabulary, prompt: str | list[int], echoes: bool) -> Prompt:
    ids = vocabulary.encode(prompt, special=True) if isinstance(prompt, str) else prompt
    if not echoes:
        return Prompt(ids)
    pieces = pieces_of(vocabulary, ids)
    text = prompt if isinstance(prompt, str) else "".join(pieces)
    starts = [0, *accumulate(map(len, pieces))][:-1]
    return Prompt(ids, Echo(text, [min(start, len(text)) for start in starts]))
