"""The last quarter of an hour as a series of samples: what the engine did, and what was refused.

Samples are totals; what happened between two of them is their difference. Knows numbers and the
times that it is told; refuses to know a clock and where the numbers come from.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

EVERY_S: Final = 5.0
KEPT: Final = 180


@dataclass(frozen=True)
class Totals:
    """Counts since the start, and two gauges; `first_token` are cumulative counts by bound."""

    generated: int = 0
    prompt: int = 0
    cache_queried: int = 0
    cache_hit: int = 0
    running: int = 0
    waiting: int = 0
    first_token: tuple[tuple[float, float], ...] = ()  # upper bound in seconds, count


@dataclass(frozen=True)
class Span:
    """What happened in the `seconds` before `at` (seconds since the epoch)."""

    at: float
    seconds: float
    before: Totals
    after: Totals

    def rate(self, name: str) -> float:
        """How much of a count came in a second; none where the engine began anew."""
        before: int = getattr(self.before, name)
        after: int = getattr(self.after, name)
        return max(0, after - before) / self.seconds

    @property
    def hit_share(self) -> float | None:
        """Of prompt tokens that were looked up, those that the prefix cache had; 0 to 1."""
        queried = self.after.cache_queried - self.before.cache_queried
        return (self.after.cache_hit - self.before.cache_hit) / queried if queried > 0 else None

    @property
    def first_token_s(self) -> float | None:
        """The median time to the first token, as near as the bounds tell."""
        return median(self.before.first_token, self.after.first_token)


@dataclass
class History:
    """The last samples, `KEPT` of them."""

    _samples: deque[tuple[float, Totals]] = field(default_factory=lambda: deque(maxlen=KEPT + 1))

    def take(self, at: float, totals: Totals) -> None:
        """Add a sample, unless the last one is too young."""
        if not self._samples or at - self._samples[-1][0] >= 0.9 * EVERY_S:
            self._samples.append((at, totals))

    def spans(self) -> Iterator[Span]:
        """What happened between each two samples, the oldest first."""
        pairs = [*self._samples]
        for (t0, before), (t1, after) in pairwise(pairs):
            yield Span(t1, t1 - t0, before, after)


def median(
    before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]
) -> float | None:
    """The median of what was counted between two cumulative histograms, interpolated.

    None where nothing was, or where it lies beyond the last bound.
    """
    known = dict(before)
    counts = [count - known.get(bound, 0) for bound, count in after]
    if not counts or counts[-1] <= 0:
        return None
    half = counts[-1] / 2
    index = bisect_left(counts, half)
    lower, less = (after[index - 1][0], counts[index - 1]) if index else (0.0, 0.0)
    upper = after[index][0]
    if upper == float("inf"):
        return lower
    return lower + (upper - lower) * (half - less) / (counts[index] - less)
