"""One step's work as arrays: which tokens run, where their KV lies, under which image.

Rows are ordered so that all sequences of one image are neighbours, base sequences first. An adapter
may begin inside a sequence (activated LoRA, Greenewald et al. 2025): its segment covers the rows
from there on. This file knows ints; it refuses to know torch, and why these sequences were chosen.
"""

from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


class Tokens(Protocol):
    """What is needed of a sequence: its tokens, drafts that follow them, and where its KV lies.

    Without drafts the token that follows is one that a device has chosen and that nobody has read:
    `fed` stands for it. `image` is its adapter's; tokens before `adapter_start` run on the bare
    base, and all of them when it is None.
    """

    token_ids: list[int]
    drafts: list[int]
    fed: int
    block_table: list[int]
    adapter_start: int | None

    @property
    def image(self) -> str | None: ...  # noqa: D102


class Part(Protocol):
    """Tokens `[start, start + count)` of a sequence and its drafts, to run in this step.

    The logits of the last `wanted` of them are wanted. `start` is no draft.
    """

    @property
    def sequence(self) -> Tokens: ...  # noqa: D102

    @property
    def start(self) -> int: ...  # noqa: D102

    @property
    def count(self) -> int: ...  # noqa: D102

    @property
    def wanted(self) -> int: ...  # noqa: D102


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
    """A step. Spans are in row order; segments are sorted and disjoint.

    A segment may begin inside a span, and an image may have several. The token id -1 - r stands for
    what row r of the wanted rows of the step launched before chooses.
    """

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    spans: tuple[Span, ...]
    block_tables: tuple[Ints, ...]  # [ceil(context / block size)] for each span
    segments: tuple[Segment, ...]
    wanted: Ints  # [W] rows whose logits are wanted, rising


def build(scheduled: Sequences[P], block_size: int) -> tuple[Batch, list[P]]:
    """The batch of what is scheduled, and the same parts in row order.

    Wanted rows belong to these parts in turn, to each as many as it wants.
    """
    order = sorted(scheduled, key=_active_image)
    token_ids: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    wanted: list[int] = []
    for part in order:
        begin, context = len(token_ids), part.start + part.count
        known = part.sequence.token_ids
        token_ids += known[part.start : context]
        if context > len(known):
            token_ids += part.sequence.drafts[: context - len(known)] or [part.sequence.fed]
        positions += range(part.start, context)
        spans.append(Span(begin, len(token_ids), context))
        wanted += range(len(token_ids) - part.wanted, len(token_ids))
    batch = Batch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        spans=tuple(spans),
        block_tables=_block_tables(order, spans, block_size),
        segments=_segments(order, spans),
        wanted=np.array(wanted, np.int32),
    )
    return batch, order


def _active_image(part: Part) -> str:
    """The image under which any of the part's rows run, or "" for none."""
    sequence = part.sequence
    image, start = sequence.image, sequence.adapter_start
    if image is None or start is None or start >= part.start + part.count:
        return ""
    return image


def _block_tables(
    order: Sequences[Part], spans: Sequences[Span], block_size: int
) -> tuple[Ints, ...]:
    """Views of one array, as one a sequence would cost more than the numbers in it."""
    joined: list[int] = []
    ends = [0]
    for part, span in zip(order, spans, strict=True):
        joined += part.sequence.block_table[: -(-span.context // block_size)]
        ends.append(len(joined))
    blocks = np.array(joined, np.int32)
    return tuple(blocks[start:end] for start, end in pairwise(ends))


def _segments(order: Sequences[Part], spans: Sequences[Span]) -> tuple[Segment, ...]:
    """Neighbours of one image are one segment, unless base rows lie between them."""
    images: list[str] = []
    starts: list[int] = []
    ends: list[int] = []
    for part, (start, end, _) in zip(order, spans, strict=True):
        image = _active_image(part)
        if not image:
            continue
        start += max(0, (part.sequence.adapter_start or 0) - part.start)
        if ends and ends[-1] == start and images[-1] == image:
            ends[-1] = end
        else:
            images.append(image)
            starts.append(start)
            ends.append(end)
    return tuple(map(Segment, images, starts, ends))
