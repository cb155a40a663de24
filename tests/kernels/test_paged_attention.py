"""`paged_attention` and the cache beneath it, against a loop over keys."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from loraplex.kernels.attention_plan import Context, plan_attention, tile_keys
from loraplex.kernels.kv_cache import BlockLayout, KVCache, token_blocks
from loraplex.kernels.kv_rows import dequantise, quantise
from loraplex.kernels.paged_attention import paged_attention

Randn = Callable[..., Tensor]

LAYERS, LAYER = 3, 1


class Paged:
    """Sequences whose KV lies in shuffled blocks of a cache, all else in which is NaN."""

    def __init__(
        self, lengths: Sequence[int], heads: tuple[int, int], dim: int, block_size: int,
        dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.heads, self.kv_heads, self.dim = *heads, dim
        generator = torch.Generator().manual_seed(1)
        self.q = [torch.randn(n, heads[0], dim, generator=generator).to(dtype) for n in lengths]
        self.kv = [torch.randn(n, 2, heads[1], dim, generator=generator).to(dtype) for n in lengths]
        counts = [math.ceil(n / block_size) for n in lengths]
        kv = BlockLayout(LAYERS, heads[1], block_size, dim, kv_dtype or dtype)
        self.cache = KVCache(sum(counts) + 2, kv)
        for tensor in (self.cache.data, self.cache.scales):
            tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
        order = np.random.default_rng(0).permutation(sum(counts) + 2).astype(np.int32)
        self.tables = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])

    def run(self, *parts: tuple[int, int, int], window: int | None = None) -> list[Tensor]:
        """One step: of each part's sequence, tokens [start, stop); their outputs."""
        contexts, rows = [], 0
        for sequence, start, stop in parts:
            contexts.append(Context(rows, rows + stop - start, stop, self.tables[sequence]))
            rows += stop - start
        tables = [self.tables[sequence] for sequence, _, _ in parts]
        positions = [np.arange(start, stop) for _, start, stop in parts]
        blocks, offsets = token_blocks(tables, positions, self.cache.block_size)
        self.cache.clear(torch.from_numpy(blocks[offsets == 0].astype(np.int64)))
        new = torch.cat([self.kv[s][start:stop] for s, start, stop in parts])
        self.cache.write(LAYER, self.cache.slot_index(blocks, offsets), new)
        plan = plan_attention(contexts, self.cache, self.heads // self.kv_heads, window)
        q = torch.cat([self.q[s][start:stop] for s, start, stop in parts])
        out = paged_attention(q, self.cache, LAYER, plan, self.dim**-0.5)
        return list(out.split([stop - start for _, start, stop in parts]))

    def whole(self, sequence: int, window: int | None = None) -> Tensor:
        """Output of all tokens, in one step alone."""
        return self.run((sequence, 0, len(self.q[sequence])), window=window)[0]

    def expected(self, sequence: int, row: int, window: int | None) -> Tensor:
        """Attention of one token, head by head and key by key, in fp64."""
        first = 0 if window is None else max(0, row - window + 1)
        q, kv = self.q[sequence][row].double(), self.kv[sequence][first : row + 1].double()
        group, out = self.heads // self.kv_heads, torch.zeros(self.heads, self.dim).double()
        for head in range(self.heads):
            scores = [float(q[head] @ k[head // group]) * self.dim**-0.5 for k in kv[:, 0]]
            weights = [math.exp(s - max(scores)) for s in scores]
            for weight, value in zip(weights, kv[:, 1], strict=True):
                out[head] += weight / sum(weights) * value[head // group]
        return out


@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (6, 1), (2, 2)])
@pytest.mark.parametrize(("dim", "block_size"), [(64, 16), (20, 5), (8, 1), (128, 32)])
@pytest.mark.parametrize("window", [None, 7, 150])
def test_loop(heads: tuple[int, int], dim: int, block_size: int, window: int | None) -> None:
    lengths = [1, 3, 131, 300]
    paged = Paged(lengths, heads, dim, block_size)
    for sequence, length in enumerate(lengths):
        out = paged.whole(sequence, window)
        for row in {0, length // 2, length - 1}:
            expected = paged.expected(sequence, row, window)
            torch.testing.assert_close(out[row].double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 7, 130])
def test_any_chunking_gives_the_same_bits(window: int | None) -> None:
    paged = Paged([400], (9, 3), 64, 16)
    whole = paged.whole(0, window)
    for sizes in ([1] * 5, [127, 1, 2], [128, 129], [3, 250, 5, 100], [399]):
        start = 0
        for size in [*sizes, 400 - sum(sizes)]:
            out = paged.run((0, start, start + size), window=window)[0]
            assert torch.equal(out, whole[start : start + size]), (sizes, start)
            start += size


@pytest.mark.parametrize("window", [None, 40])
def test_any_company_gives_the_same_bits(threads: int, window: int | None) -> None:
    lengths = [5, 128, 129, 77, 260, 16, 33]
    paged = Paged(lengths, (9, 3), 64, 16)
    alone = [paged.whole(s, window) for s in range(len(lengths))]
    decodes = [(s, lengths[s] - 1, lengths[s]) for s in (4, 0, 2)]
    mixed = [(1, 0, 100), *decodes, (3, 0, 77), (5, 9, 16), (6, 0, 33)]
    for (sequence, start, stop), out in zip(mixed, paged.run(*mixed, window=window), strict=True):
        assert torch.equal(out, alone[sequence][start:stop])


def test_threads_do_not_matter(threads: int) -> None:
    """The first of the thread counts computes what the others must repeat."""
    out = Paged([300], (6, 2), 20, 16).whole(0)
    assert torch.equal(out, _ONCE.setdefault("out", out))


_ONCE: dict[str, Tensor] = {}


def test_bfloat16_keeps_sums_in_fp32() -> None:
    paged = Paged([140], (4, 2), 32, 16, torch.bfloat16)
    out = paged.whole(0)
    assert out.dtype == torch.bfloat16
    expected = torch.stack([paged.expected(0, row, None) for row in range(140)])
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
def test_int8_rows_are_read_as_what_they_stand_for(window: int | None) -> None:
    """To the bit, whole, in chunks and in company."""
    lengths = [5, 200, 130]
    plain, found = (Paged(lengths, (9, 3), 64, 16, kv_dtype=d) for d in (None, torch.int8))
    plain.kv = [dequantise(*quantise(kv)) for kv in plain.kv]
    expected = [plain.whole(sequence, window) for sequence in range(3)]
    assert all(torch.equal(found.whole(s, window), expected[s]) for s in range(3))
    for parts in ([(1, 0, 130), (0, 0, 5)], [(2, 0, 130), (1, 130, 199)], [(1, 199, 200)]):
        for (sequence, start, stop), out in zip(
            parts, found.run(*parts, window=window), strict=True
        ):
            assert torch.equal(out, expected[sequence][start:stop])


def test_other_layers_and_blocks_are_not_touched() -> None:
    paged = Paged([20, 20], (2, 1), 16, 8)
    paged.run((0, 0, 20))
    own, others = paged.tables[0].tolist(), paged.tables[1].tolist()
    assert paged.cache.data[others].isnan().all()
    written = paged.cache.data[own]
    assert torch.equal(written[:, [0, 2]], torch.zeros_like(written[:, [0, 2]]))
    keys = written[:, LAYER, 0, 0].reshape(-1, 16)
    assert torch.equal(keys[:20], paged.kv[0][:, 0, 0]) and not keys[20:].any()


@pytest.mark.parametrize("block_size", [1, 5, 16, 24, 100, 128, 200])
def test_tile_holds_whole_blocks(block_size: int) -> None:
    assert tile_keys(block_size) >= 128
    assert tile_keys(block_size) % block_size == tile_keys(block_size) % 16 == 0
