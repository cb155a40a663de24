"""What one step does: which tokens run, and which KV blocks move before they do.

The moves come in an order: first blocks are swapped out, then copied, then swapped in; only then do
the tokens run. This file knows sequences and numbers; it refuses to know why they were chosen.
"""

from dataclasses import dataclass, field

from loraplex.engine.sequence import Sequence

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Tokens `[start, start + count)` of a sequence run, its guesses among them.

    The logits of the last `wanted` of them are computed.
    """

    sequence: Sequence
    start: int
    count: int
    wanted: int

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + self.count


@dataclass(frozen=True)
class Plan:
    """One step, and who lost its blocks to make room for it."""

    scheduled: tuple[Scheduled, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    swap_out: Pairs = ()  # (block, host slot)
    copies: Pairs = ()  # (block, block), one after the other
    swap_in: Pairs = ()  # (host slot, block)

    def mark(self, now: float) -> None:
        """Note with the requests that run for the first time when that was."""
        for part in self.scheduled:
            if part.sequence.request.scheduled is None:
                part.sequence.request.scheduled = now


@dataclass
class Draft:
    """A plan in the making. `wanted` rows may still have their logits computed."""

    budget: int
    wanted: int
    decodes: int = 0  # sequences with one token to run that have not had it yet
    scheduled: list[Scheduled] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)

    def finish(self) -> Plan:
        """The plan."""
        return Plan(
            tuple(self.scheduled),
            tuple(self.preempted),
            tuple(self.swap_out),
            tuple(self.copies),
            tuple(self.swap_in),
        )
