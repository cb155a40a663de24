"""Images and KV blocks move while the device computes: no bit of any logits may change.

The host never waits: a move is given to the device behind steps that it has not begun, as in an
engine that runs ahead. Results are compared at the end.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from gpu_compare import Check, unequal
from gpu_model import BLOCK_SIZE, batch_of, random_image
from torch import Tensor

from loraplex.engine.batch import Batch
from loraplex.engine.executor import Executor
from loraplex.engine.gpu.executor import FIRST_RANKS, GpuExecutor
from loraplex.engine.gpu.graphs import NoGraphs
from loraplex.engine.model.config import ModelConfig

KINDS = ("bf16", "int8", "fp32")
RANKS = (3, 0, 16, 33)
CONTEXT = 2 * BLOCK_SIZE + 3
STEPS_UNDER_WAY = 16  # behind which a move is given to a device; in the interpreter none
NAN_BYTE = 0xFF  # all floats of nothing else are NaN


def add(executor: Executor, config: ModelConfig, kind: str) -> None:
    """Add the random image of a dtype, under its name; that of bf16 has gains and biases."""
    image = random_image(config, kind, RANKS, KINDS.index(kind), rows=kind == "bf16")
    executor.add_image(kind, executor.prepare_image(*image))


def compact(executor: GpuExecutor) -> None:
    """Raise the floor as far as images allow, so that gaps close, and lower it again."""
    images, arena = executor._images, executor._images._arena
    floor = arena.floor
    images.set_floor(floor + arena.free_bytes)
    images.set_floor(floor)


class Moves:
    """Decodes of the base and of images, before and after moves."""

    def __init__(self, executor: GpuExecutor, config: ModelConfig) -> None:
        self._executor, self._config = executor, config
        self._under_way = STEPS_UNDER_WAY if executor.device != "cpu" else 0

    def images(self) -> Iterator[Check]:
        """Images leave, come back elsewhere, move up, and make scratch and graphs be replaced."""
        before = self._logits(self._decodes())
        moved = [
            ("images added and removed", self._after(self._swap_places)),
            ("images moved", self._after(self._close_a_gap)),
            ("images' scratch replaced", self._after(self._add_a_large_one)),
        ]
        for what, logits in moved:
            yield Check(f"{what}, then base rows", unequal(logits[0], before[0]))
            yield Check(f"{what}, then images' rows", unequal(logits[1:], before[1:]))
        large = self._decodes("large")
        replayed = self._logits(large)
        graphs, self._executor.graphs = self._executor.graphs, NoGraphs()
        yield Check("large rank's graph", unequal(self._logits(large), replayed))
        self._executor.graphs = graphs
        self._executor.remove_image("large")

    def blocks(self) -> Iterator[Check]:
        """Blocks are copied, go to the host and come back; where they were is NaN."""
        executor, batch = self._executor, batch_of([(1, CONTEXT)], [None], self._config.vocab_size)
        before = self._logits(batch)
        first, second, last = batch.block_tables[0].tolist()
        spare, other = last + 1, last + 2
        self._busy(batch)
        executor.copy_blocks([(first, spare), (spare, other)])
        self._lose(first, spare)
        copied = self._logits(with_table(batch, other, second, last))
        executor.swap_out([(other, 0), (second, 1)])
        self._lose(other, second)
        executor.swap_in([(0, first), (1, spare)])
        swapped = self._logits(with_table(batch, first, spare, last))
        executor.copy_blocks([(spare, second), (first, other)])
        yield Check("blocks copied", unequal(copied, before))
        yield Check("blocks swapped", unequal(swapped, before))
        yield Check("blocks back in place", unequal(self._logits(batch), before))

    def _after(self, move: Callable[[], None]) -> Tensor:
        self._busy(self._decodes())
        move()
        return self._logits(self._decodes())

    def _swap_places(self) -> None:
        """Two images change places and lines of the tables; a third was where they were."""
        config, executor = self._config, self._executor
        first, second, _ = KINDS
        image = random_image(config, first, (8,), 9)
        for kind in (first, second):
            executor.remove_image(kind)
        executor.add_image("between", executor.prepare_image(*image))
        for kind in (second, first):
            add(executor, config, kind)
        executor.remove_image("between")

    def _close_a_gap(self) -> None:
        """The image that lies highest leaves; the others move up, and it comes back below."""
        executor = self._executor
        places = {name: image.begin for name, image in executor._images._images.items()}
        highest = max(places, key=places.__getitem__)
        executor.remove_image(highest)
        compact(executor)
        add(executor, self._config, highest)

    def _add_a_large_one(self) -> None:
        image = random_image(self._config, "bf16", (FIRST_RANKS,), 7)
        self._executor.add_image("large", self._executor.prepare_image(*image))

    def _lose(self, *blocks: int) -> None:
        for block in blocks:
            self._executor._blocks[block].fill_(NAN_BYTE)

    def _decodes(self, *images: str) -> Batch:
        names = (None, *(images or KINDS))
        return batch_of([(1, CONTEXT)] * len(names), names, self._config.vocab_size)

    def _busy(self, batch: Batch) -> None:
        for _ in range(self._under_way):
            self._executor.execute(batch)

    def _logits(self, batch: Batch) -> Tensor:
        return self._executor.execute(batch).logits.clone()


def with_table(batch: Batch, *table: int) -> Batch:
    """The same sequence in other blocks."""
    return replace(batch, block_tables=(np.array(table, np.int32),))
