"""A request as the engine sees it, and its sequences: their tokens and where their KV lies.

A request has one sequence until its prompt is computed, and then one for each choice. This file
knows ints and times; it refuses to know tensors, sockets and how images are fetched.
"""

from dataclasses import dataclass, field

from loraplex.engine.beam import BeamSearch
from loraplex.engine.guidance import Matcher
from loraplex.engine.ngram import Lookup
from loraplex.engine.prefix_cache import Chain, namespace
from loraplex.engine.protocol import (
    Finished,
    FinishReason,
    Generate,
    Policy,
    Sampling,
    TokenLogprob,
)

SEED_MASK = (1 << 63) - 1


@dataclass(eq=False, slots=True)
class Request:
    """What a request's sequences share. Times are `time.monotonic()` seconds, None for not yet."""

    request_id: str
    prompt_len: int
    sampling: Sampling
    image: str | None
    tenant: str
    scope: str
    policy: Policy
    priority: int
    choices: int
    arrived: float
    ends: frozenset[int]  # tokens that end a sequence
    barred: tuple[int, ...]  # those and others that may not come before `min_tokens` are there
    loaded: float | None = None
    scheduled: float | None = None
    first_token: float | None = None
    cached: int = 0  # tokens of the prompt that were found in the prefix cache
    turn: int = 0  # how many requests had asked for an image before it
    generated: int = 0  # tokens of all choices that were told
    search: BeamSearch | None = None
    alive: "list[Sequence]" = field(default_factory=list)
    reasons: dict[int, FinishReason] = field(default_factory=dict)  # of the choices that ended
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some of the prompt's log-probabilities are asked for and not known yet."""
        wanted = self.sampling.prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < self.prompt_len - 1


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of a request, or one beam: a stream of tokens, and the blocks that hold its KV."""

    request: Request
    token_ids: list[int]  # the prompt, then what was generated
    index: int = 0  # which choice it is
    slots: int = 1  # sequences that it will have become once its prompt is computed
    adapter_start: int | None = 0  # tokens before run on the bare base; None: all do
    drafts: list[int] = field(default_factory=list)  # guesses that follow `token_ids`
    ahead: int = 0  # tokens after `token_ids` that a device has or will have and nobody has read
    fed: int = 0  # what stands in a batch for the newest of these
    block_table: list[int] = field(default_factory=list)
    computed: int = 0  # leading tokens whose KV is in the blocks
    host_slots: list[int] = field(default_factory=list)  # where its blocks are when swapped out
    chain: Chain | None = None  # how its blocks are named; None while its image is loading
    hashes: list[bytes] = field(default_factory=list)  # of its leading full blocks
    stored: int = 0  # of these, how many the prefix cache was told of
    matcher: Matcher | None = None
    lookup: Lookup | None = None
    tops: list[tuple[int, float]] = field(default_factory=list)  # of a beam that has just run

    @property
    def tenant(self) -> str:
        """Whose request it is."""
        return self.request.tenant

    @property
    def image(self) -> str | None:
        """The digest of its image; None is the bare base."""
        return self.request.image

    @property
    def priority(self) -> int:
        """Its place among the tenant's own, the lowest first."""
        return self.request.priority

    @property
    def arrived(self) -> float:
        """When its request came."""
        return self.request.arrived

    @property
    def seed(self) -> int:
        """Its own seed: choices differ by theirs alone."""
        return (self.request.sampling.seed + self.index) & SEED_MASK

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.request.prompt_len

    @property
    def pending(self) -> int:
        """Tokens that are not computed yet, guesses and unread ones among them."""
        return len(self.token_ids) + self.ahead + len(self.drafts) - self.computed

    @property
    def is_steered(self) -> bool:
        """Whether its tokens are not its own to choose, so that guesses would not pay."""
        return self.matcher is not None or self.request.search is not None

    @property
    def unit(self) -> "list[Sequence]":
        """Those that must run together: all beams of a search, or it alone."""
        return self.request.alive if self.request.search else [self]

    def fork(self, index: int) -> "Sequence":
        """Another sequence with the same tokens in the same blocks, not counted there yet."""
        return Sequence(
            self.request,
            list(self.token_ids),
            index,
            adapter_start=self.adapter_start,
            block_table=list(self.block_table),
            computed=self.computed,
            chain=self.chain,
            hashes=list(self.hashes),
            stored=self.stored,
            matcher=self.matcher and self.matcher.fork(),
        )


def from_request(message: Generate, now: float, eos: tuple[int, ...], model_len: int) -> Sequence:
    """The first sequence of a request that arrived at `now`; a base one has nothing to load."""
    count, sampling = len(message.token_ids), message.sampling
    request = Request(
        request_id=message.request_id,
        prompt_len=count,
        sampling=sampling,
        image=message.image,
        tenant=message.tenant,
        scope=message.scope or f"tenant {message.tenant}",  # nobody shares unless told to
        policy=message.policy,
        priority=message.priority,
        choices=message.choices,
        arrived=now,
        ends=_ends(sampling, eos),
        barred=(*sampling.stop_token_ids, *eos) if sampling.min_tokens else (),
        loaded=now if message.image is None else None,
    )
    slots = message.choices
    if message.beams is not None:
        most = min(sampling.max_tokens, model_len - count)
        request.search = BeamSearch(
            message.beams,
            message.choices,
            request.ends,
            most,
            barred=frozenset(request.barred),
            min_tokens=sampling.min_tokens,
        )
        slots = message.beams.width
    sequence = Sequence(request, list(message.token_ids), slots=slots)
    request.alive.append(sequence)
    return sequence


def name_blocks(sequence: Sequence, base: str) -> None:
    """Decide whose blocks the sequence may share, once it is known where its adapter starts."""
    request, start = sequence.request, sequence.adapter_start
    plain = namespace(base, None, request.scope)
    own = plain if request.image is None else namespace(base, request.image, request.scope)
    never = len(sequence.token_ids) + request.sampling.max_tokens
    sequence.chain = Chain(plain, own, never if start is None else start)


def _ends(sampling: Sampling, eos: tuple[int, ...]) -> frozenset[int]:
    """The tokens that end a sequence; one that follows a guide must end where its text does."""
    minds_eos = not sampling.ignore_eos or sampling.guide is not None
    return frozenset(sampling.stop_token_ids).union(eos if minds_eos else ())


def finish_reason(sequence: Sequence, max_model_len: int) -> FinishReason | None:
    """Why the sequence ends with its last token, or None when it goes on."""
    if sequence.token_ids[-1] in sequence.request.ends:
        return "stop"
    if sequence.matcher is not None and sequence.matcher.is_complete:
        return "stop"
    full = len(sequence.token_ids) >= max_model_len
    most = sequence.request.sampling.max_tokens
    return "length" if full or sequence.generated >= most else None


def finished(request: Request, reason: FinishReason, now: float) -> Finished:
    """The terminal event of a request that ends at `now`."""

    def since(time: float | None) -> float:
        return 0.0 if time is None else time - request.arrived

    return Finished(
        request.request_id,
        reason,
        prompt_tokens=request.prompt_len,
        completion_tokens=request.generated,
        cached_tokens=request.cached,
        load_s=since(request.loaded),
        queue_s=since(request.scheduled),
        first_token_s=since(request.first_token),
        total_s=now - request.arrived,
    )
