"""What a step gives to a device can be captured: it reads nothing back and takes nothing from here.

The executor is on torch's device without memory, where reading a number is an error, and kernels
are not run. What the captured part calls is watched.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from loraplex.engine.batch import Batch, Segment, Span
from loraplex.engine.gpu.executor import FIRST_RANKS, GpuExecutor
from loraplex.engine.gpu.linear import TILES, TiledLinear
from loraplex.engine.gpu.step_layout import KINDS, Limits
from loraplex.engine.gpu.warm_up import warm_up
from loraplex.engine.images import Entry, ImageHeader, Slice
from loraplex.engine.model.config import ModelConfig, RopeConfig
from loraplex.engine.model.decoder import Decoder
from loraplex.engine.outcome import Outcome
from loraplex.engine.settings import SettingsError

META = "meta"
LIMITS = Limits(sequences=20, tokens=700, length=64, block_size=16)
CONFIG = ModelConfig(
    97, 32, 48, 2, 4, 2, 16, 64, 1e-5, RopeConfig(1e4), (None, 9),
    tied=False, qk_norm=True, qkv_bias=True, o_bias=False, mlp_bias=True,
)  # fmt: skip


class Weights:
    """Weights without numbers."""

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    def skip(self, suffix: str) -> None:
        """There is nothing to leave unread."""

    def close(self) -> None:
        """Nothing is left over."""


class Watch(TorchDispatchMode):
    """Finds calls that have to do with a tensor that is not on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.strangers: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.seen.append(str(func))
        tensors = [x for x in tree_leaves((args, kwargs, found)) if isinstance(x, Tensor)]
        if any(tensor.device.type != META for tensor in tensors):
            self.strangers.append(str(func))
        return found


class Captures:
    """Stands in for graphs: watches what would be captured."""

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self.watch = Watch()
        self.cleared = 0

    def run(self, key: Any, compute: Callable[[], Outcome]) -> Outcome:
        self.keys.append(key)
        with self.watch:
            return compute()

    def clear(self) -> None:
        self.cleared += 1


@pytest.fixture(params=[None, torch.int8], ids=["own KV", "int8 KV"])
def executor(request: pytest.FixtureRequest) -> Iterator[GpuExecutor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", lambda *args, **named: None)
        decoder = Decoder(
            CONFIG, Weights(), torch.bfloat16, 64, lambda weight: TiledLinear(weight, TILES)
        )
        made = GpuExecutor(
            decoder, LIMITS, num_blocks=60, memory_bytes=1 << 22, swap_slots=2,
            kv_dtype=request.param, graphs=False,
        )  # fmt: skip
        made.graphs = Captures()
        for kind in KINDS:
            add(made, kind, kind, 3)
        yield made


def add(executor: GpuExecutor, digest: str, kind: str, rank: int) -> None:
    """An image of one linear."""
    part = Slice(rank, 32, 1 << 15)
    entry = Entry(1, "o", 64, 0, 1 << 17, (part,))
    header = ImageHeader("f" * 64, kind, 1 << 18, (entry,))
    executor.add_image(digest, executor.prepare_image(header, bytearray(1 << 18)))


def batch(*rows: int, first_token: int = 5) -> Batch:
    """Sequences of some rows each, of the base and of each image in turn; all wanted."""
    ends = np.cumsum(rows)
    starts = ends - rows
    names = [(None, *KINDS)[n % 4] for n in range(len(rows))]
    total = int(ends[-1])
    bounds = list(zip(starts.tolist(), ends.tolist(), strict=True))
    return Batch(
        np.full(total, first_token, np.int32),
        np.concatenate([np.arange(n) for n in rows]).astype(np.int32),
        tuple(Span(start, end, end - start) for start, end in bounds),
        tuple(np.arange(-(-n // 16), dtype=np.int32) for n in rows),
        tuple(Segment(x, *at) for x, at in zip(names, bounds, strict=True) if x),
        np.arange(total, dtype=np.int32),
    )


@pytest.mark.parametrize("count", [1, 4, 16, 17])
def test_a_captured_step_reads_nothing_back_and_takes_nothing_from_the_host(
    executor: GpuExecutor, count: int
) -> None:
    outcome = executor.execute(batch(*[1] * count))
    assert outcome.logits.shape == (count, CONFIG.vocab_size)
    assert executor.graphs.keys == [(16 if count <= 16 else 32, KINDS[: 0 if count == 1 else 3])]
    watch = executor.graphs.watch
    assert "aten.index_select.default" in watch.seen
    assert not watch.strangers


def test_a_step_that_is_not_captured_reads_nothing_back_either(executor: GpuExecutor) -> None:
    """Rows in several tiles of products, and tokens that only the device knows."""
    outcome = executor.execute(batch(60, 1, 50, 2))
    assert outcome.logits.shape == (113, CONFIG.vocab_size)
    assert executor.execute(batch(1, 1, first_token=-1)).logits.shape == (2, CONFIG.vocab_size)
    assert len(executor.graphs.keys) == 1, "a step in which all have one row"


def test_images_and_blocks_move_without_anything_being_read(executor: GpuExecutor) -> None:
    executor.remove_image("int8")
    executor.set_blocks(40)
    add(executor, "int8", "int8", 3)
    executor.copy_blocks([(1, 2)])
    executor.swap_in([(0, 3)])
    executor.execute(batch(1, 1, 1, 1))
    assert executor.graphs.cleared == 0


def test_graphs_are_forgotten_when_a_buffer_of_theirs_is_replaced(executor: GpuExecutor) -> None:
    before = executor._scratch
    add(executor, "more", "bf16", FIRST_RANKS)
    assert (executor.graphs.cleared, executor._scratch is before) == (0, True)
    add(executor, "most", "bf16", FIRST_RANKS + 1)
    assert (executor.graphs.cleared, executor._scratch is before) == (1, False)


def test_warming_up_captures_each_bucket_of_base_rows(
    executor: GpuExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []

    def launch(batch: Batch, draws: list[None]) -> Any:
        executor.execute(batch)
        launched.extend(batch.token_ids.tolist())
        return SimpleNamespace(result=lambda: [None] * len(draws))

    monkeypatch.setattr(executor, "launch", launch)
    warm_up(executor, LIMITS)
    assert set(executor.graphs.keys) == {(16, ()), (32, ())}
    assert launched == [0, -1], "the second token is the first's choice"
    assert not executor.graphs.watch.strangers


def test_a_step_that_has_no_memory_is_told_before_there_are_requests(
    executor: GpuExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest prompt is tried first."""

    def execute(batch: Batch) -> Outcome:
        assert len(batch.token_ids) == LIMITS.length
        raise torch.OutOfMemoryError

    monkeypatch.setattr(executor, "execute", execute)
    with pytest.raises(SettingsError, match="lower memory_utilization"):
        warm_up(executor, LIMITS)
