"""Paged attention in Triton against plain attention, and against itself cut in other ways."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from loraplex.kernels.kv_rows import quantise
from loraplex.kernels.triton.attention_work import SPLIT_KEYS, AttentionLayout
from loraplex.kernels.triton.paged_attention import (
    AttentionStep,
    attention_scratch,
    paged_attention,
)

LAYERS, LAYER = 2, 1
Part = tuple[int, int, int]  # a sequence, and its tokens [start, stop)
MIXED = [(0, 39, 40), (1, 5, 12), (2, 2, 3), (3, 0, 20)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Paged:
    """Sequences whose KV lies in shuffled blocks of a cache, all else in which is NaN."""

    def __init__(
        self, lengths: Sequence[int], heads: tuple[int, int] = (6, 2), dim: int = 64,
        block_size: int = 16, dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.heads, self.kv_heads, self.dim = *heads, dim
        generator = torch.Generator().manual_seed(1)
        counts = [math.ceil(n / block_size) for n in lengths]
        blocks, order = sum(counts) + 2, np.random.default_rng(0).permutation(sum(counts) + 2)
        self.tables = np.split(order[:-2].astype(np.int32), np.cumsum(counts)[:-1])
        self.q = [torch.randn(n, heads[0], dim, generator=generator).to(dtype) for n in lengths]
        shape = (blocks, LAYERS, 2, heads[1], block_size, dim)
        kv = torch.full(shape, torch.nan)
        self.lines = [
            self._lines(n, t, block_size) for n, t in zip(lengths, self.tables, strict=True)
        ]
        for block, offset in self.lines:
            new = torch.randn(len(block), 2, heads[1], dim, generator=generator)
            kv[block, LAYER, :, :, offset] = new
        self.scales = None
        if kv_dtype is None:
            self.cache = kv.to(dtype)
            self.values = self.cache.double()
        else:
            self.cache, self.scales = quantise(kv) if kv_dtype == torch.int8 else as_fp8(kv)
            self.values = self.cache.double() * self.scales[..., None].double()

    @staticmethod
    def _lines(length: int, table: np.ndarray, block_size: int) -> tuple[Tensor, Tensor]:
        token = torch.arange(length)
        return torch.from_numpy(table).long()[token // block_size], token % block_size

    def run(
        self, parts: Sequence[Part], partial_rows: int = 0, height: int = 32,
        window: int | None = None, softcap: float | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """One step; the outputs of each part."""
        ends = np.cumsum([stop - start for _, start, stop in parts]).tolist()
        spans = [(end - p[2] + p[1], end, p[2]) for end, p in zip(ends, parts, strict=True)]
        tables = [self.tables[sequence] for sequence, _, _ in parts]
        group, blocks = self.heads // self.kv_heads, sum(map(len, tables))
        layout = AttentionLayout(group, len(parts) + 1, ends[-1], partial_rows, blocks, height)
        work = np.full(layout.size, 1 << 30, np.int32)
        layout.write(work, spans, tables)
        scratch = attention_scratch(layout, self.kv_heads, self.dim, "cpu")
        for tensor in scratch:
            tensor.fill_(torch.nan)
        q = torch.cat([self.q[s][start:stop] for s, start, stop in parts])
        out = paged_attention(
            q, self.cache, LAYER, AttentionStep(layout, torch.from_numpy(work), *scratch),
            self.dim**-0.5, window=window, softcap=softcap, scales=self.scales,
        )  # fmt: skip
        return list(out.split([stop - start for _, start, stop in parts]))

    def expected(self, part: Part, window: int | None, softcap: float | None) -> Tensor:
        """Plain attention of one part, in fp64."""
        sequence, start, stop = part
        block, offset = (line[:stop] for line in self.lines[sequence])
        k, v = self.values[block, LAYER, :, :, offset].unbind(1)
        group = self.heads // self.kv_heads
        k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        q = self.q[sequence][start:stop].double().transpose(0, 1)
        scores = q @ k.transpose(1, 2) * self.dim**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        place, key = torch.arange(start, stop)[:, None], torch.arange(stop)
        hidden = key > place
        if window is not None:
            hidden |= key <= place - window
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)

    def check(
        self, parts: Sequence[Part], partial_rows: int = 0, height: int = 32,
        window: int | None = None, softcap: float | None = None,
    ) -> None:  # fmt: skip
        out = self.run(parts, partial_rows, height, window, softcap)
        tolerance = TOLERANCE[self.q[0].dtype]
        for part, found in zip(parts, out, strict=True):
            expected = self.expected(part, window, softcap)
            torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def as_fp8(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as fp8, and their scales."""
    scales = kv.abs().amax(-1) / 448
    return (kv / scales[..., None]).to(torch.float8_e4m3fn), scales


LENGTHS = [40, 12, 3, 20]
STORED = pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["own", "int8"])


@STORED
@pytest.mark.parametrize("heads", [(2, 2), (9, 3), (6, 1), (16, 1)])
def test_heads(heads: tuple[int, int], kv_dtype: torch.dtype | None) -> None:
    Paged(LENGTHS, heads, kv_dtype=kv_dtype).check(MIXED)


@STORED
@pytest.mark.parametrize(
    ("dim", "block_size"), [(8, 1), (64, 16), (80, 5), (96, 32), (128, 16), (256, 5)]
)
def test_head_dims_and_block_sizes(dim: int, block_size: int, kv_dtype: torch.dtype | None) -> None:
    Paged(LENGTHS, (4, 2), dim, block_size, kv_dtype=kv_dtype).check(MIXED)


@STORED
@pytest.mark.parametrize(
    ("window", "softcap"), [(1, None), (7, 2.0), (64, None), (70, 2.0), (None, 2.0)]
)
def test_window_and_softcap(
    window: int | None, softcap: float | None, kv_dtype: torch.dtype | None
) -> None:
    paged = Paged([150, 3], (2, 1), kv_dtype=kv_dtype)
    paged.check([(0, 100, 150), (1, 2, 3)], window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    paged = Paged(LENGTHS, (4, 2), dtype=dtype, kv_dtype=kv_dtype)
    assert (paged.scales is None) == (kv_dtype is None)
    paged.check(MIXED)


@pytest.mark.parametrize("height", [16, 64])
def test_heights(height: int) -> None:
    Paged(LENGTHS).check(MIXED, height=height)


LONG = 2 * SPLIT_KEYS + 50
DECODES = [(0, LONG - 1, LONG), (1, 529, 530), (2, 3, 5)]


@STORED
@pytest.mark.parametrize("window", [None, 90])
def test_cutting_changes_no_bit(window: int | None, kv_dtype: torch.dtype | None) -> None:
    """None, one or all of a step's long contexts are cut."""
    paged = Paged([LONG, 530, 5], (2, 1), 16, kv_dtype=kv_dtype)
    whole = paged.run(DECODES, window=window)
    for partial_rows in (3, 5):
        cut = paged.run(DECODES, partial_rows, window=window)
        assert all(map(torch.equal, cut, whole))
    paged.check(DECODES, 5, window=window)


@pytest.mark.usefixtures("even_products")
@pytest.mark.parametrize(("window", "kv_dtype"), [(None, None), (70, None), (None, torch.int8)])
def test_chunks_and_company_change_no_bit(window: int | None, kv_dtype: torch.dtype | None) -> None:
    """Prefilled at once, in chunks or token by token, beside others or alone, cut or not."""
    length = SPLIT_KEYS + 40
    paged = Paged([length, 50], (2, 1), 16, kv_dtype=kv_dtype)
    first = length - 20
    whole = paged.run([(0, first, length)], window=window)[0]
    for sizes in ([1, 8, 11], [17, 3]):
        start = first
        for size in sizes:
            parts = [(1, 40, 50), (0, start, start + size)]
            out = paged.run(parts, 2 * size, window=window)[1]
            assert torch.equal(out, whole[start - first :][:size]), (sizes, start)
            start += size


def test_a_step_without_rows_writes_nothing() -> None:
    layout = AttentionLayout(3, 4, 0, 0, 8)
    work = np.full(layout.size, 1 << 30, np.int32)
    assert layout.write(work, [], []) == layout.tables_at
    paged = Paged([5])
    scratch = attention_scratch(layout, paged.kv_heads, paged.dim, "cpu")
    step = AttentionStep(layout, torch.from_numpy(work), *scratch)
    assert paged_attention(paged.q[0][:0], paged.cache, LAYER, step, 1.0).shape == (0, 6, 64)
