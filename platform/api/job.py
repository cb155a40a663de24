"""From a checked request and its prompts to the engine requests that answer it.

Fits token limits to the context and the tenant, draws seeds, and refuses ids that the base does not
have. Knows parameters and token ids; refuses to know HTTP and where text came from.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from loraplex.engine.protocol import Generate, Guide, Policy, Sampling
from loraplex.platform.api.buckets import buckets_of
from loraplex.platform.api.choice import Choice
from loraplex.platform.api.context import Context
from loraplex.platform.api.forms import Form
from loraplex.platform.api.generation import Echo, Run
from loraplex.platform.api.requests import GenerationRequest
from loraplex.platform.api.target import Target
from loraplex.platform.errors import BadRequest, ContextLengthExceeded
from loraplex.platform.keys import Principal
from loraplex.platform.limit_standing import cap_max_tokens
from loraplex.platform.quotas import Bucket
from loraplex.platform.text import Decoder, StopStrings

MAX_TOTAL_CHOICES = 32
SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class Caller:
    """Whose job it is, and what it runs on."""

    request_id: str
    principal: Principal
    tenant_id: str
    target: Target
    explain: bool = False  # whether they asked by header

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Whose limits hold the job."""
        return buckets_of(self.principal, self.tenant_id, self.target.uses)


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and how it opens its answers, where it does."""

    token_ids: Sequence[int]
    echo: Echo | None = None


@dataclass(frozen=True)
class Inputs:
    """What a body comes to once its texts are read: prompts, a form to match, and stop strings."""

    prompts: Sequence[Prompt]
    guide: Guide | None = None
    stops: tuple[str, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


@dataclass(frozen=True)
class Job:
    """One API request, ready to be admitted and run."""

    caller: Caller
    runs: Sequence[Run]
    returned: int  # choices of each run that are answered with
    estimate: int  # the most tokens that it can use
    stream: bool
    explain: bool  # in the answer too, not in headers alone
    form: Form


def make_job(
    ctx: Context, caller: Caller, body: GenerationRequest, inputs: Inputs, form: Form
) -> Job:
    """Plan an engine request for each prompt, of `n` choices or as many as `best_of` says.

    Raises `BadRequest` where the prompts, ids or limits cannot be served.
    """
    _check_prompts(inputs, body, ctx.base.vocab_size)
    max_tokens = _fit(ctx, caller, body, inputs)
    sampling = _sampling(body, max_tokens, inputs.guide, ctx.base.vocab_size)
    if inputs.guide is not None and body.use_beam_search:
        raise BadRequest("Beam search cannot hold an answer to a form.", param="use_beam_search")
    return Job(
        caller=caller,
        runs=_runs(ctx, caller, body, inputs, sampling),
        returned=body.returned,
        estimate=inputs.tokens + len(inputs.prompts) * body.width * max_tokens,
        stream=bool(body.stream),
        explain=caller.explain or bool(body.loraplex),
        form=form,
    )


def _check_prompts(inputs: Inputs, body: GenerationRequest, vocab_size: int) -> None:
    prompts, width = inputs.prompts, body.width
    if len(prompts) * width > MAX_TOTAL_CHOICES:
        param = "best_of" if body.best_of else "n"
        raise BadRequest(
            f"{len(prompts)} prompts with {param}={width} are more than {MAX_TOTAL_CHOICES} "
            f"completions in one request. Send fewer prompts or lower {param}.",
            param=param,
        )
    for prompt in prompts:
        if not prompt.token_ids:
            raise BadRequest("A prompt must have at least one token.", param=body.prompt_param)
        _known_ids(prompt.token_ids, vocab_size, body.prompt_param)


def _fit(ctx: Context, caller: Caller, body: GenerationRequest, inputs: Inputs) -> int:
    """Tokens that each completion may have: what was asked for, or what fits."""
    room = ctx.context_tokens - inputs.longest
    asked, param = body.token_limit
    if room < (asked or 1):
        param = param if asked and room > 0 else body.prompt_param
        raise ContextLengthExceeded(ctx.context_tokens, inputs.longest, asked or 1, param)
    choices = len(inputs.prompts) * body.width
    return cap_max_tokens(caller.buckets, inputs.tokens, asked, room, choices)


def _sampling(
    body: GenerationRequest, max_tokens: int, guide: Guide | None, vocab_size: int
) -> Sampling:
    return Sampling(
        max_tokens=max_tokens,
        temperature=0.0 if body.use_beam_search else _or(body.temperature, 1.0),
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
        min_tokens=_min_tokens(body, max_tokens),
        logprobs=_logprobs(body),
        prompt_logprobs=_prompt_logprobs(body),
        guide=guide,
        draft_tokens=body.speculative_tokens,
    )


def _min_tokens(body: GenerationRequest, max_tokens: int) -> int:
    if (asked := body.min_tokens or 0) > max_tokens:
        raise BadRequest(
            f"min_tokens is {asked}, but this completion has {max_tokens} tokens at most. "
            "Lower min_tokens, or let the completion have more.",
            param="min_tokens",
        )
    return asked


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logprobs(body: GenerationRequest) -> int | None:
    """What the caller wants to see, or what it takes to choose the best."""
    chosen = body.width > body.returned and not body.use_beam_search
    return 0 if body.top_logprobs_wanted is None and chosen else body.top_logprobs_wanted


def _prompt_logprobs(body: GenerationRequest) -> int | None:
    wanted = [body.prompt_logprobs, body.top_logprobs_wanted if body.echoes else None]
    return max((count for count in wanted if count is not None), default=None)


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


def _runs(
    ctx: Context, caller: Caller, body: GenerationRequest, inputs: Inputs, sampling: Sampling
) -> list[Run]:
    """For each prompt in turn, its engine request and the choices to come."""
    beams, target, limits = body.beams, caller.target, caller.principal.limits
    count = body.returned if beams else body.width
    scope = ctx.scopes.of(caller.tenant_id, target.digest, target.public)
    policy = Policy(limits.weight, limits.max_running, limits.kv_share, limits.resident_bytes)
    runs = []
    for index, prompt in enumerate(inputs.prompts):
        request = Generate(
            request_id=f"{caller.request_id}-{index}",
            token_ids=tuple(prompt.token_ids),
            sampling=sampling,
            image=target.digest,
            tenant=caller.tenant_id,
            scope=scope,
            policy=policy,
            priority=body.priority or 0,
            choices=count,
            beams=beams,
            parts=target.parts,
        )
        stops = (*(body.stop or ()), *inputs.stops)
        choices = _choices(ctx, sampling, stops, range(index * count, (index + 1) * count))
        runs.append(Run(request, choices, prompt.echo))
    return runs


def _choices(
    ctx: Context, sampling: Sampling, stops: tuple[str, ...], indices: range
) -> list[Choice]:
    ends = () if sampling.ignore_eos else ctx.base.eos_token_ids
    silent = frozenset((*sampling.stop_token_ids, *ends))
    least = sampling.min_tokens
    return [Choice(i, Decoder(ctx.vocabulary, silent), StopStrings(stops), least) for i in indices]
