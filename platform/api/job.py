"""From a checked request and its prompts to the engine requests that answer it.

Fits token limits to the context and the tenant, draws seeds, and refuses ids that the base does not
have. Knows parameters and token ids; refuses to know HTTP and where text came from.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from loraplex.engine.protocol import Generate, Sampling
from loraplex.platform.api.context import Context
from loraplex.platform.api.forms import Form
from loraplex.platform.api.generation import Choice
from loraplex.platform.api.requests import GenerationRequest
from loraplex.platform.errors import BadRequest, ContextLengthExceeded
from loraplex.platform.keys import Principal
from loraplex.platform.limits import cap_max_tokens
from loraplex.platform.registry import Resolved
from loraplex.platform.text import Decoder, StopStrings

MAX_TOTAL_CHOICES = 32
SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class Caller:
    """Whose job it is, and what it runs on."""

    request_id: str
    principal: Principal
    tenant_id: str
    target: Resolved


@dataclass(frozen=True)
class Job:
    """One API request, ready to be admitted and run."""

    caller: Caller
    choices: list[Choice]
    prompt_tokens: int  # of all prompts, each counted once
    max_tokens: int  # of each choice
    stream: bool
    include_usage: bool
    form: Form

    @property
    def estimate(self) -> int:
        """The most tokens that the job can use."""
        return self.prompt_tokens + len(self.choices) * self.max_tokens


def make_job(
    ctx: Context,
    caller: Caller,
    body: GenerationRequest,
    prompts: Sequence[Sequence[int]],
    form: Form,
) -> Job:
    """Plan the engine requests: for each prompt in turn, `n` choices with seeds one apart.

    Raises `BadRequest` where the prompts, ids or limits cannot be served.
    """
    n = body.n or 1
    _check_prompts(prompts, n, ctx.base.vocab_size, body.prompt_param)
    max_tokens = _fit(ctx, caller, body, prompts)
    sampling = _sampling(body, max_tokens, ctx.base.vocab_size)
    requests = _engine_requests(caller, sampling, prompts, n)
    options = body.stream_options
    return Job(
        caller=caller,
        choices=_choices(ctx, body.stop or [], requests),
        prompt_tokens=sum(map(len, prompts)),
        max_tokens=max_tokens,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        form=form,
    )


def _check_prompts(prompts: Sequence[Sequence[int]], n: int, vocab_size: int, param: str) -> None:
    if len(prompts) * n > MAX_TOTAL_CHOICES:
        raise BadRequest(
            f"{len(prompts)} prompts with n={n} are more than {MAX_TOTAL_CHOICES} completions in "
            "one request. Send fewer prompts or lower n.",
            param="n",
        )
    for prompt in prompts:
        if not prompt:
            raise BadRequest("A prompt must have at least one token.", param=param)
        if max(prompt) >= vocab_size:
            raise BadRequest(
                f"A prompt has token id {max(prompt)}; this model's ids end at {vocab_size - 1}.",
                param=param,
            )


def _fit(
    ctx: Context, caller: Caller, body: GenerationRequest, prompts: Sequence[Sequence[int]]
) -> int:
    """Tokens that each completion may have: what was asked for, or what fits."""
    longest = max(map(len, prompts))
    room = ctx.context_tokens - longest
    asked, param = body.token_limit
    if room < (asked or 1):
        param = param if asked and room > 0 else body.prompt_param
        raise ContextLengthExceeded(ctx.context_tokens, longest, asked or 1, param)
    total, choices = sum(map(len, prompts)), len(prompts) * (body.n or 1)
    return cap_max_tokens(caller.principal.limits, total, asked, room, choices)


def _sampling(body: GenerationRequest, max_tokens: int, vocab_size: int) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=min(max(body.top_k or 0, 0), vocab_size),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_biases(body.logit_bias or {}, vocab_size),
        seed=secrets.randbits(63) if body.seed is None else body.seed & SEED_MASK,
        stop_token_ids=_known_ids(body.stop_token_ids or [], vocab_size, "stop_token_ids"),
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.top_logprobs_wanted,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _biases(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not all(key.isascii() and key.isdecimal() and len(key) < 10 for key in biases):
        raise BadRequest("The keys of logit_bias are token ids.", param="logit_bias")
    ids = _known_ids([int(key) for key in biases], vocab_size, "logit_bias")
    return tuple(zip(ids, biases.values(), strict=True))


def _known_ids(ids: Sequence[int], vocab_size: int, param: str) -> tuple[int, ...]:
    if ids and max(ids) >= vocab_size:
        raise BadRequest(
            f"{param} has token id {max(ids)}; this model's ids end at {vocab_size - 1}.",
            param=param,
        )
    return tuple(ids)


def _engine_requests(
    caller: Caller, sampling: Sampling, prompts: Sequence[Sequence[int]], n: int
) -> list[Generate]:
    """For each prompt in turn, `n` requests whose seeds are one apart."""
    seeded = [
        msgspec.structs.replace(sampling, seed=(sampling.seed + i) & SEED_MASK) for i in range(n)
    ]
    wanted = [(tuple(prompt), each) for prompt in prompts for each in seeded]
    return [
        Generate(
            request_id=f"{caller.request_id}-{index}",
            token_ids=prompt,
            sampling=each,
            image=caller.target.digest,
            tenant=caller.tenant_id,
        )
        for index, (prompt, each) in enumerate(wanted)
    ]


def _choices(ctx: Context, stops: Sequence[str], requests: Sequence[Generate]) -> list[Choice]:
    sampling = requests[0].sampling
    ends = () if sampling.ignore_eos else ctx.base.eos_token_ids
    silent = frozenset((*sampling.stop_token_ids, *ends))
    return [
        Choice(index, request, Decoder(ctx.vocabulary, silent), StopStrings(tuple(stops)))
        for index, request in enumerate(requests)
    ]
