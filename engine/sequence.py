"""A request as the engine sees it: its tokens, how far they are computed, where their KV lies.

This file knows ints and times; it refuses to know tensors, sockets and how images are fetched.
"""

from dataclasses import dataclass, field

from loraplex.engine.protocol import Finished, FinishReason, Generate, Sampling


@dataclass(eq=False, slots=True)
class Sequence:
    """One request's state. Times are `time.monotonic()` seconds; None means not yet."""

    request_id: str
    token_ids: list[int]  # the prompt, then what was generated
    prompt_len: int
    sampling: Sampling
    image: str | None
    tenant: str
    arrived: float
    block_table: list[int] = field(default_factory=list)
    computed: int = 0  # leading tokens whose KV is in the blocks
    loaded: float | None = None
    scheduled: float | None = None
    first_token: float | None = None

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_len

    @property
    def pending(self) -> int:
        """Known tokens that are not computed yet."""
        return len(self.token_ids) - self.computed


def from_request(request: Generate, now: float) -> Sequence:
    """A fresh sequence for a request that arrived at `now`; a base request has nothing to load."""
    return Sequence(
        request_id=request.request_id,
        token_ids=list(request.token_ids),
        prompt_len=len(request.token_ids),
        sampling=request.sampling,
        image=request.image,
        tenant=request.tenant,
        arrived=now,
        loaded=now if request.image is None else None,
    )


def finish_reason(
    sequence: Sequence, eos_token_ids: tuple[int, ...], max_model_len: int
) -> FinishReason | None:
    """Why the sequence ends with its last token, or None when it goes on."""
    sampling, last = sequence.sampling, sequence.token_ids[-1]
    if last in sampling.stop_token_ids or (not sampling.ignore_eos and last in eos_token_ids):
        return "stop"
    full = len(sequence.token_ids) >= max_model_len
    return "length" if full or sequence.generated >= sampling.max_tokens else None


def finished(sequence: Sequence, reason: FinishReason, now: float) -> Finished:
    """The terminal event of a sequence that ends at `now`."""

    def since(time: float | None) -> float:
        return 0.0 if time is None else time - sequence.arrived

    return Finished(
        sequence.request_id,
        reason,
        prompt_tokens=sequence.prompt_len,
        completion_tokens=sequence.generated,
        load_s=since(sequence.loaded),
        queue_s=since(sequence.scheduled),
        first_token_s=since(sequence.first_token),
        total_s=now - sequence.arrived,
    )
