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


def batch(*rows: int, first_token: int = 5, of: tuple[str | None, ...] = (None, *KINDS)) -> Batch:
    """Sequences of some rows each, of the base and of each image in turn; all wanted."""
    ends = np.cumsum(rows)
    starts = ends - rows
    names = [of[n % len(of)] for n in range(len(rows))]
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


class Steps:
    """Stands in for an executor that fails at its last step, if any, for want of memory."""

    def __init__(self, last: int | None = None) -> None:
        self.batches: list[Batch] = []
        self._last = last

    def execute(self, batch: Batch) -> Any:
        self.batches.append(batch)
        if len(self.batches) == self._last:
            raise torch.OutOfMemoryError
        return SimpleNamespace()

    def rehearse(self, batch: Batch, kind: str) -> None:
        assert kind == "bf16"
        self.execute(batch)

    def launch(self, batch: Batch, draws: list[None]) -> Any:
        self.execute(batch)
        return SimpleNamespace(result=list)


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


def test_an_image_for_which_there_is_no_scratch_takes_nothing(
    executor: GpuExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine takes it for failed and forgets it: no byte, line or graph may be lost."""
    scratch, free = executor._scratch, executor._images._arena.free_bytes

    def none(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("loraplex.engine.gpu.executor.sgmv_scratch", none)
    with pytest.raises(torch.OutOfMemoryError):
        add(executor, "most", "bf16", FIRST_RANKS + 1)
    assert executor._images._arena.free_bytes == free and "most" not in executor._images.places
    assert executor._scratch is scratch and executor.graphs.cleared == 0


def test_warming_up_captures_each_bucket_with_and_without_images(
    executor: GpuExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []

    def launch(batch: Batch, draws: list[None]) -> Any:
        executor.execute(batch)
        launched.extend(batch.token_ids.tolist())
        return SimpleNamespace(result=lambda: [None] * len(draws))

    monkeypatch.setattr(executor, "launch", launch)
    warm_up(executor, LIMITS, 84)
    kinds: list[tuple[str, ...]] = [(), ("bf16",)]
    assert set(executor.graphs.keys) == {(bucket, kind) for bucket in (16, 32) for kind in kinds}
    assert launched == [0, -1], "the second token is the first's choice"
    assert not executor.graphs.watch.strangers


class Programs:
    """Takes down which programs of each kernel are launched, as Triton tells them apart."""

    def __init__(self) -> None:
        self.launched: set[Any] = set()

    def run(self, kernel: InterpretedFunction, *args: Any, **named: Any) -> None:
        for ignored in ("grid", "warmup"):
            named.pop(ignored)
        alike = kernel.kwargs.get("do_not_specialize") or ()
        known = kernel.fn.__annotations__ | named  # constants, and options of the compiler
        bound = dict(zip(kernel.arg_names, args, strict=False)) | named
        kinds = (
            (name, value if name in known else self._kind(value))
            for name, value in bound.items()
            if name not in alike
        )
        self.launched.add((kernel.__name__, *kinds))

    @staticmethod
    def _kind(value: Any) -> Any:
        """What a value is known for: an int of a launch that is 1 or a multiple of 16."""
        if isinstance(value, Tensor):
            return value.dtype, value.storage_offset() * value.itemsize % 16 == 0
        if type(value) is int:
            return value if value == 1 else value % 16 == 0
        return None if isinstance(value, float) else value


def test_no_step_of_base_or_usual_images_waits_for_a_compiler(
    executor: GpuExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its size: warming up has launched every program before."""
    programs = Programs()
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda *args, **named: programs.run(*args, **named)
    )
    monkeypatch.setattr(
        executor, "launch", lambda step, _: executor.execute(step) and Steps().launch(step, [])
    )
    warm_up(executor, LIMITS, 84)
    warm = set(programs.launched)
    assert len({name for name, *_ in warm}) > 8
    for rows in ([1], [1] * 3, [1] * 16, [1] * 20, [2], [9, 1, 1], [64] * 10, [16] * 16, [50, 7]):
        for of in ((None,), (None, "bf16"), ("bf16",)):
            for token in (5, -1):
                executor.execute(batch(*rows, first_token=token, of=of))
    assert programs.launched == warm
    executor.execute(batch(1, of=("int8",)))
    assert programs.launched > warm


@pytest.mark.parametrize(
    ("limits", "rows"),
    [
        (LIMITS, [64] * 10 + [60]),
        (Limits(2, 700, 64, 16), [64, 64]),
        (Limits(64, 512, 4096, 16), [512]),
    ],
)
def test_the_largest_step_is_tried_beside_what_graphs_take(limits: Limits, rows: list[int]) -> None:
    """Many sequences fill it where they are short; as many rows as ever want logits."""
    steps = Steps()
    warm_up(steps, limits, 84)
    largest = steps.batches[-3]
    assert len(largest.token_ids) == max(len(batch.token_ids) for batch in steps.batches)
    assert [span.end - span.start for span in largest.spans] == rows
    assert len(largest.token_ids) == largest.spans[-1].end == sum(rows)
    assert largest.wanted.tolist() == list(range(sum(rows) - 84, sum(rows)))


@pytest.mark.parametrize("step", [1, 4, 6, 7])
def test_a_step_that_has_no_memory_is_told_before_there_are_requests(step: int) -> None:
    with pytest.raises(SettingsError, match="lower memory_utilization"):
        warm_up(Steps(step), LIMITS, 84)
