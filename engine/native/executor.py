"""The executor that runs a whole step in one call of the native library.

A row's logits have the same bits whatever else is in its batch, however its prefill was cut and on
any number of threads. This file knows batches and digests; it refuses to know requests, sampling
and where images come from.
"""

import ctypes
import os
import weakref
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.engine.batch import Batch
from loraplex.engine.images import ImageHeader
from loraplex.engine.model.adapter import projection_sizes
from loraplex.engine.native.arena import Arena
from loraplex.engine.native.batch import Staged, address
from loraplex.engine.native.images import PackedImage, pack_image, resident_bytes
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
    """A packed base, its KV cache of `num_blocks` blocks, and packed images.

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
        max_rows: int,
        max_wanted: int,
        team: Team,
        image_budget_bytes: int = 0,
    ) -> None:
        self.name, self.dtype = f"native {library.isa}", base.precision.name
        self.block_size, self.num_blocks = block_size, num_blocks
        self.image_budget_bytes = image_budget_bytes
        self.seconds: NDArray[np.float64] = np.zeros(len(PHASES))  # of all steps, phase by phase
        self._base, self._library = base, library
        self._max_rows, self._max_wanted = max_rows, max_wanted
        self._cache = self._make_cache()
        self._images: dict[str, PackedImage] = {}
        self._adapters: dict[str, int] = {}
        self._logits = torch.empty(max_wanted, base.config.vocab_size)
        self._likeliest = np.empty(max_wanted, np.int32)
        self._peak = torch.empty(max_wanted)
        self._handle = library.start(base.struct, max_rows, max_wanted, team.threads, team.cores)
        self._stop = weakref.finalize(self, library.stop, self._handle)
        if team.cores:  # or what this thread starts later would share its one core
            os.sched_setaffinity(0, team.cores)

    def add_image(self, digest: str, header: ImageHeader, block: bytearray) -> None:
        """Make an image resident; raises `ImageError` when it does not fit the base."""
        config = self._base.config
        sizes = projection_sizes(config)
        image = pack_image(header, block, config.num_layers, sizes, self._library)
        self._images[digest] = image
        self._adapters[digest] = ctypes.addressof(image.struct)

    def remove_image(self, digest: str) -> None:
        """Forget a resident image."""
        del self._images[digest], self._adapters[digest]

    def image_bytes(self, header: ImageHeader) -> int:
        """Bytes of memory that an image takes once it is resident."""
        return resident_bytes(header, self._library)

    def execute(self, batch: Batch) -> Outcome:
        """The outcome of the wanted rows, valid until the next step; writes all rows' KV."""
        staged, wanted = Staged(batch, self._adapters), len(batch.wanted)
        if len(batch.token_ids) > self._max_rows or wanted > self._max_wanted:
            raise ValueError(f"a step has at most {self._max_rows} rows, {self._max_wanted} wanted")
        staged.struct.logits = self._logits.data_ptr()
        staged.struct.likeliest = address(self._likeliest)
        staged.struct.peak = self._peak.data_ptr()
        staged.struct.seconds = address(self.seconds)
        self._library.step(self._handle, staged.struct)
        likeliest = torch.from_numpy(self._likeliest[:wanted].astype(np.int64))
        return Outcome(self._logits[:wanted], likeliest, self._peak[:wanted])

    def close(self) -> None:
        """End the threads; no step can run any more."""
        self._stop()

    def _make_cache(self) -> Arena:
        struct = self._base.struct
        struct.block_size, struct.blocks = self.block_size, self.num_blocks
        cache = Arena(self.num_blocks * self._library.kv_block_bytes(struct))
        struct.kv = cache.address
        return cache
