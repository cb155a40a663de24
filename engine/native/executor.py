"""The executor that runs a whole step in one call of the native library.

A row's logits have the same bits whatever else is in its batch, however its prefill was cut and on
any number of threads. This file knows batches and digests; it refuses to know requests, sampling
and where images come from.
"""

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.engine.batch import Batch
from loraplex.engine.draw import Draw
from loraplex.engine.executor import Pairs
from loraplex.engine.images import ImageHeader
from loraplex.engine.model.adapter import projection_sizes
from loraplex.engine.native.batch import Staged, address
from loraplex.engine.native.draws import draw_rows
from loraplex.engine.native.images import pack_image, packed_bytes
from loraplex.engine.native.memory import Bytes, Memory
from loraplex.engine.native.region import Region
from loraplex.engine.native.weights import PackedBase
from loraplex.engine.outcome import Outcome
from loraplex.kernels.cpu.library import PHASES, Library


@dataclass(frozen=True)
class Team:
    """The threads of a step, each pinned to one of `cores` unless these are none.

    The first is the caller's; between steps it may use all of them.
    """

    threads: int = 1
    cores: tuple[int, ...] = ()


class NativeExecutor:
    """A packed base, and a region of `memory_bytes` that KV blocks and packed images share.

    At most `max_rows` rows run in a step, and at most `max_wanted` of them are wanted.
    """

    device = "cpu"

    def __init__(
        self,
        base: PackedBase,
        library: Library,
        *,
        block_size: int,
        num_blocks: int,
        memory_bytes: int,
        swap_slots: int = 0,
        max_rows: int,
        max_wanted: int,
        team: Team,
    ) -> None:
        self.name, self.dtype = f"native {library.isa}", base.precision.name
        self.block_size, self.num_blocks = block_size, num_blocks
        self.memory_bytes, self.swap_slots = memory_bytes, swap_slots
        self.weight_bytes = base.arena.used
        self.seconds: NDArray[np.float64] = np.zeros(len(PHASES))  # of all steps, phase by phase
        self._base, self._library, self._team = base, library, team
        self._max_rows, self._max_wanted = max_rows, max_wanted
        base.struct.block_size, base.struct.blocks = block_size, num_blocks
        self.block_bytes = library.kv_block_bytes(base.struct)
        layers = base.config.num_layers
        self._region = Region(memory_bytes, self.block_bytes, num_blocks, layers)
        self._host = Memory(swap_slots * self.block_bytes)
        self._slots = self._host.bytes[: swap_slots * self.block_bytes].reshape(
            -1, self.block_bytes
        )
        base.struct.kv = self._region.address
        self._logits = torch.empty(max_wanted, base.config.vocab_size)
        self._likeliest = np.empty(max_wanted, np.int32)
        self._peak = torch.empty(max_wanted)
        self._handle = library.start(base.struct, max_rows, max_wanted, team.threads, team.cores)
        self._stop = weakref.finalize(self, library.stop, self._handle)
        if team.cores:  # or what this thread starts later would share its one core
            os.sched_setaffinity(0, team.cores)

    def touch_blocks(self, nbytes: int) -> None:
        """Take the pages of the first blocks, up to `nbytes`: before the first step, or never."""
        self._region.touch(nbytes, self._team.threads)

    def set_blocks(self, count: int) -> None:
        """See `Executor`."""
        self._region.set_blocks(count)

    def prepare_image(self, header: ImageHeader, block: bytearray) -> Bytes:
        """See `Executor`."""
        config = self._base.config
        sizes = projection_sizes(config)
        return pack_image(header, block, config.num_layers, sizes, self._library)

    def add_image(self, digest: str, prepared: Bytes) -> None:
        """See `Executor`."""
        self._region.add(digest, prepared)

    def remove_image(self, digest: str) -> None:
        """See `Executor`."""
        self._region.remove(digest)

    def image_bytes(self, header: ImageHeader) -> int:
        """See `Executor`."""
        config = self._base.config
        return packed_bytes(header, config.num_layers, projection_sizes(config), self._library)

    def copy_blocks(self, pairs: Pairs) -> None:
        """See `Executor`."""
        _copy(self._region.blocks, self._region.blocks, pairs)

    def swap_out(self, pairs: Pairs) -> None:
        """See `Executor`."""
        _copy(self._region.blocks, self._slots, pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """See `Executor`."""
        _copy(self._slots, self._region.blocks, pairs)

    def execute(self, batch: Batch) -> Outcome:
        """The outcome of the wanted rows, valid until the next step; writes all rows' KV."""
        staged, wanted = Staged(batch, self._region.adapters), len(batch.wanted)
        if len(batch.token_ids) > self._max_rows or wanted > self._max_wanted:
            raise ValueError(f"a step has at most {self._max_rows} rows, {self._max_wanted} wanted")
        staged.struct.logits = self._logits.data_ptr()
        staged.struct.likeliest = address(self._likeliest)
        staged.struct.peak = self._peak.data_ptr()
        staged.struct.seconds = address(self.seconds)
        self._library.step(self._handle, staged.struct)
        likeliest = torch.from_numpy(self._likeliest[:wanted].astype(np.int64))
        return Outcome(self._logits[:wanted], likeliest, self._peak[:wanted], self._draw)

    def close(self) -> None:
        """End the threads; no step can run any more."""
        self._stop()

    def _draw(self, outcome: Outcome, draws: Sequence[Draw | None]) -> list[int | None]:
        return draw_rows(self._library, self._handle, outcome, draws)


def _copy(source: Bytes, target: Bytes, pairs: Pairs) -> None:
    """Copy blocks `[n, block bytes]` by (place, goal), one after the other."""
    for place, goal in pairs:
        target[goal] = source[place]
