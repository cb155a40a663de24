"""What the prefix cache did for a tenant's requests, in numbers that add up.

Knows what the engine says of a finished request; refuses to know Redis and which blocks there are.
"""

from dataclasses import dataclass
from typing import Final

from loraplex.engine.protocol import Finished

_MEMORY: Final = 0.99  # of what was measured, what still counts after one more request


@dataclass(frozen=True)
class Counts:
    """Sums over requests whose prompts were looked up."""

    requests: int = 0
    hits: int = 0  # requests of which a part was found
    queried_tokens: int = 0
    cached_tokens: int = 0
    saved_us: int = 0  # microseconds of prefill
    evicted_blocks: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.requests + other.requests,
            self.hits + other.hits,
            self.queried_tokens + other.queried_tokens,
            self.cached_tokens + other.cached_tokens,
            self.saved_us + other.saved_us,
            self.evicted_blocks + other.evicted_blocks,
        )

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were found, 0 to 1."""
        return self.cached_tokens / self.queried_tokens if self.queried_tokens else 0.0


class PrefillMeter:
    """Seconds that a prompt token takes to compute, as late requests show it.

    From a request's first step to its first token, divided by the tokens that were computed: a
    ratio of sums in which older requests count less and less.
    """

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    @property
    def seconds_per_token(self) -> float:
        """0 until something was measured."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def observe(self, finished: Finished) -> None:
        """Learn from a request, if it computed any of its prompt."""
        tokens = finished.prompt_tokens - finished.cached_tokens
        seconds = finished.first_token_s - finished.queue_s
        if tokens > 0 and seconds > 0:
            self._seconds = self._seconds * _MEMORY + seconds
            self._tokens = self._tokens * _MEMORY + tokens


def counts_of(finished: Finished, meter: PrefillMeter) -> Counts | None:
    """What a request adds; None for one that ended before its prompt was computed."""
    if finished.reason == "abort" and not finished.completion_tokens:
        return None
    meter.observe(finished)
    cached = finished.cached_tokens
    return Counts(
        requests=1,
        hits=int(cached > 0),
        queried_tokens=finished.prompt_tokens,
        cached_tokens=cached,
        saved_us=round(cached * meter.seconds_per_token * 1e6),
    )
