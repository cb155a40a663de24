"""One step's work as arrays: which tokens run, where their KV lies, under which image.

Rows are ordered so that all sequences of one image are neighbours, base sequences first. This file
knows ints; it refuses to know torch, and why these sequences were chosen.
"""

from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class Tokens(Protocol):
    """What is needed of a sequence."""

    token_ids: list[int]
    block_table: list[int]
    image: str | None


class Part(Protocol):
    """Tokens `[start, start + count)` of a sequence, to run in this step."""

    @property
    def sequence(self) -> Tokens: ...  # noqa: D102

    @property
    def start(self) -> int: ...  # noqa: D102

    @property
    def count(self) -> int: ...  # noqa: D102


P = TypeVar("P", bound=Part)


class Segment(NamedTuple):
    """Rows `[start, end)` run under `image`; rows in no segment run on the bare base."""

    image: str
    start: int
    end: int


class Span(NamedTuple):
    """One sequence's rows `[start, end)`; `context` tokens have KV after the step."""

    start: int
    end: int
    context: int


@dataclass(frozen=True)
class Batch:
    """A step. Spans are in row order; segments are sorted and disjoint."""

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    spans: tuple[Span, ...]
    block_tables: tuple[Ints, ...]  # [ceil(context / block size)] for each span
    segments: tuple[Segment, ...]
    wanted: Ints  # [W] rows whose logits are wanted


def build(scheduled: Sequences[P], block_size: int) -> tuple[Batch, list[P]]:
    """The batch of what is scheduled, and the same parts in row order.

    The last row of a part is wanted when it is its sequence's last token; the i-th wanted row
    belongs to the i-th such part in that order.
    """
    order = sorted(scheduled, key=lambda part: part.sequence.image or "")
    spans = _spans(order)
    batch = Batch(
        token_ids=_ints(
            [t for p in order for t in p.sequence.token_ids[p.start : p.start + p.count]]
        ),
        positions=_ints([i for p in order for i in range(p.start, p.start + p.count)]),
        spans=spans,
        block_tables=tuple(
            _ints(part.sequence.block_table[: -(-span.context // block_size)])
            for part, span in zip(order, spans, strict=True)
        ),
        segments=_segments(order, spans),
        wanted=_wanted(order, spans),
    )
    return batch, order


def _wanted(order: Sequences[Part], spans: tuple[Span, ...]) -> Ints:
    pairs = zip(order, spans, strict=True)
    return _ints([s.end - 1 for p, s in pairs if s.context == len(p.sequence.token_ids)])


def _ints(numbers: list[int]) -> Ints:
    return np.array(numbers, np.int32)


def _spans(order: Sequences[Part]) -> tuple[Span, ...]:
    ends = accumulate(part.count for part in order)
    return tuple(
        Span(end - part.count, end, part.start + part.count)
        for part, end in zip(order, ends, strict=True)
    )


def _segments(order: Sequences[Part], spans: tuple[Span, ...]) -> tuple[Segment, ...]:
    pairs = zip(order, spans, strict=True)
    runs = [(image, [s for _, s in run]) for image, run in groupby(pairs, _image)]
    return tuple(Segment(image, run[0].start, run[-1].end) for image, run in runs if image)


def _image(pair: tuple[Part, Span]) -> str | None:
    return pair[0].sequence.image
