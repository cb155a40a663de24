"""Moves the boundary between KV blocks and images, between two steps, where demand wants it.

Neither side takes what the other holds: blocks come from those that are free or only cached, images
give up those that no request holds. This file knows who has to be told of a move, and in which
order; it refuses to know how memory is laid out.
"""

from loraplex.engine.block_pool import BlockPool
from loraplex.engine.boundary import Boundary
from loraplex.engine.executor import Executor
from loraplex.engine.images import BaseManifest
from loraplex.engine.residency import Residency
from loraplex.engine.scheduler import Scheduler
from loraplex.engine.settings import EngineSettings
from loraplex.engine.sizing import sure_blocks


class MemoryShare:
    """One region of an executor's memory, shared by the blocks of a pool and resident images."""

    def __init__(
        self,
        executor: Executor,
        pool: BlockPool,
        residency: Residency,
        scheduler: Scheduler,
        boundary: Boundary,
    ) -> None:
        self._executor, self._pool, self._residency = executor, pool, residency
        self._scheduler, self._boundary = scheduler, boundary
        executor.set_blocks(boundary.blocks)
        residency.set_budget(boundary.image_bytes)

    def balance(self) -> bool:
        """Move the boundary if one side lacks what the other can spare; whether it has moved."""
        residency, pool, boundary = self._residency, self._pool, self._boundary
        if residency.lacking_bytes:
            blocks = boundary.give_to_images(residency.lacking_bytes, pool.free_count)
            if blocks < pool.limit:
                self._shrink_blocks(blocks)
                return True
        elif self._scheduler.lacking_blocks:
            lacking = self._scheduler.lacking_blocks
            blocks = boundary.give_to_blocks(lacking, residency.spare_bytes)
            if blocks > pool.limit:
                self._grow_blocks(blocks)
                return True
        return False

    def _shrink_blocks(self, blocks: int) -> None:
        moves = self._pool.resize(blocks)
        self._executor.copy_blocks(moves)
        self._scheduler.renumber(moves)
        self._executor.set_blocks(blocks)
        self._residency.set_budget(self._boundary.image_bytes)

    def _grow_blocks(self, blocks: int) -> None:
        self._residency.set_budget(self._boundary.image_bytes)
        self._executor.set_blocks(blocks)
        self._pool.resize(blocks)


def model_len(executor: Executor, settings: EngineSettings, manifest: BaseManifest) -> int:
    """Tokens that a sequence may have; raises `SettingsError` for what cannot fit."""
    sure = sure_blocks(
        settings,
        num_blocks=executor.num_blocks,
        block_bytes=executor.block_bytes,
        memory_bytes=executor.memory_bytes,
    )
    capacity = sure * executor.block_size
    return settings.fit_model_len(manifest.max_position_embeddings, capacity)


def divide(executor: Executor, settings: EngineSettings, manifest: BaseManifest) -> Boundary:
    """Where blocks end and images begin at first; the longest sequence always has its blocks.

    A cache whose bytes the operator gave keeps them. Raises `SettingsError` for what cannot fit.
    """
    most = executor.num_blocks
    pinned = settings.kv_cache_bytes is not None
    longest = model_len(executor, settings, manifest)
    least = most if pinned else -(-longest // executor.block_size)
    return Boundary(executor.memory_bytes, executor.block_bytes, least, most)
