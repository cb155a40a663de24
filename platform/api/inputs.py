"""From a checked body to what runs: whose job it is, its prompts as token ids, and its stops.

Knows bodies, templates and the tokenizer; refuses to know how answers are written.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Annotated, Final

from anyio import to_thread
from fastapi import Depends, Header

from loraplex.platform.api.auth import allow, own_tenant
from loraplex.platform.api.chat import ChatRequest
from loraplex.platform.api.context import Context
from loraplex.platform.api.forms import Identity
from loraplex.platform.api.generation import Echo
from loraplex.platform.api.job import Caller, Inputs, Prompt
from loraplex.platform.api.requests import CompletionRequest, GenerationRequest, StreamOptions
from loraplex.platform.api.structured import guide_of
from loraplex.platform.api.target import find_target
from loraplex.platform.api.tools import held, told
from loraplex.platform.errors import BadRequest
from loraplex.platform.hermes import CLOSE
from loraplex.platform.keys import Principal
from loraplex.platform.text import Vocabulary, pieces_of

SHORT: Final = 1_000  # characters
NO_OPTIONS: Final = StreamOptions()
Inferring = Annotated[Principal, Depends(allow("infer"))]
Explain = Annotated[
    bool | None,
    Header(
        alias="x-loraplex-explain",
        description="1: the answer says how it came about, as with the field `loraplex`.",
    ),
]


async def find_caller(
    ctx: Context,
    principal: Principal,
    request_id: str,
    body: GenerationRequest,
    explain: bool | None,
    conversation: str | None = None,
) -> Caller:
    """Who calls, and what runs for them; raises what `own_tenant` and `find_target` raise."""
    tenant_id = own_tenant(principal)
    target = await find_target(ctx, principal, body, conversation)
    return Caller(request_id, principal, tenant_id, target, bool(explain))


def identify(prefix: str, caller: Caller, body: GenerationRequest, inputs: Inputs) -> Identity:
    """What is the same in all of an answer; its id is the request's under another prefix."""
    _, _, unique = caller.request_id.partition("_")
    options = body.stream_options or NO_OPTIONS
    counts = (len(prompt.token_ids) for prompt in inputs.prompts for _ in range(body.returned))
    return Identity(
        id=f"{prefix}{unique}",
        model=caller.target.model_id,
        created=int(time.time()),
        logprobs=body.top_logprobs_wanted,
        prompt_logprobs=body.prompt_logprobs,
        include_usage=bool(options.include_usage),
        counted=tuple(counts) if options.continuous_usage_stats else (),
    )


async def read_chat(ctx: Context, body: ChatRequest) -> Inputs:
    """The one prompt that a conversation is, and the form of its answer."""
    length = sum(len(message.content) for message in body.messages)
    is_bare = body.tools is None and body.chat_template_kwargs is None
    is_quick = length <= SHORT and is_bare and not any(body.asked())
    return await _read(ctx, partial(_read_chat, ctx, body), is_quick)


async def count_tokens(
    ctx: Context, principal: Principal, request_id: str, body: ChatRequest
) -> int:
    """Tokens of a chat's prompt, which is read but not run; raises what running it would."""
    await find_caller(ctx, principal, request_id, body, explain=False)
    inputs = await read_chat(ctx, body)
    return inputs.tokens


async def read_prompts(ctx: Context, body: CompletionRequest) -> Inputs:
    """The prompts of plain completions, and the form of their answers."""
    is_quick = sum(map(len, body.prompts)) <= SHORT and not any(body.asked())
    return await _read(ctx, partial(_read_prompts, ctx, body), is_quick)


async def _read(ctx: Context, reader: Callable[[], Inputs], is_quick: bool) -> Inputs:
    """Read on a thread, beside other requests, what takes longer than the way there and back."""
    with ctx.traces.step("tokenize"):
        return reader() if is_quick else await to_thread.run_sync(reader)


def _read_chat(ctx: Context, body: ChatRequest) -> Inputs:
    if ctx.template is None:
        raise BadRequest(
            "This base has no chat template, so it cannot chat; use /v1/completions.", param="model"
        )
    messages = [message.told() for message in body.messages]
    text = ctx.template.render(messages, told(body), body.rendering)
    prompt = Prompt(ctx.vocabulary.encode(text, special=False))
    stops = (CLOSE,) if body.callable_tools and body.one_call else ()
    schema = body.response_format.wanted if body.response_format is not None else None
    form = guide_of(body)
    return Inputs([prompt], held(body, schema) or form, stops)


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
