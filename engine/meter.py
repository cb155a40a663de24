"""Counts what an engine's steps did, and says with what its parts hold how things are: `Stats`.

It refuses to know what the numbers are for.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from loraplex.engine.block_pool import BlockPool
from loraplex.engine.host_slots import HostSlots
from loraplex.engine.plan import Plan
from loraplex.engine.protocol import ADAPTER_BUCKETS, MAX_TOLD, ROW_BUCKETS, Stats
from loraplex.engine.residency import Residency
from loraplex.engine.scheduler import Scheduler


@dataclass
class Meter:
    """Totals since the engine started; see `Stats` for what each means."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    rows_total: int = 0
    sequences_max: int = 0
    adapters_max: int = 0
    rows: list[int] = field(default_factory=lambda: [0] * (len(ROW_BUCKETS) + 1))
    adapters: list[int] = field(default_factory=lambda: [0] * ADAPTER_BUCKETS)
    swapped_out: int = 0
    swapped_in: int = 0
    drafted: int = 0
    accepted: int = 0

    def count_step(self, plan: Plan) -> None:
        """Count a step."""
        self.swapped_out += len(plan.swap_out)
        self.swapped_in += len(plan.swap_in)
        rows = sum(part.count for part in plan.scheduled)
        adapters = len({part.sequence.image for part in plan.scheduled} - {None})
        self.steps += 1
        self.rows_total += rows
        self.preemptions += len(plan.preempted)
        self.rows[bisect_left(ROW_BUCKETS, rows)] += 1
        self.adapters[min(adapters, ADAPTER_BUCKETS - 1)] += 1
        self.sequences_max = max(self.sequences_max, len(plan.scheduled))
        self.adapters_max = max(self.adapters_max, adapters)

    def count_guesses(self, drafted: int, accepted: int) -> None:
        """Count guesses that were checked, and those that held."""
        self.drafted += drafted
        self.accepted += accepted

    def stats(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        host: HostSlots,
        residency: Residency,
        waiting: int,
    ) -> Stats:
        """The counts, and what the engine's parts hold now."""
        return Stats(
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            preemptions=self.preemptions,
            running=len(scheduler.running),
            waiting=waiting,
            loading=scheduler.loading,
            kv_blocks_used=pool.used_count,
            kv_blocks_total=pool.limit,
            images_resident=residency.resident_count,
            image_bytes=residency.resident_bytes,
            image_budget_bytes=residency.budget_bytes,
            sequences_per_step_max=self.sequences_max,
            adapters_per_step_max=self.adapters_max,
            rows_total=self.rows_total,
            rows_per_step=tuple(self.rows),
            adapters_per_step=tuple(self.adapters),
            kv_blocks_cached=pool.cached_count,
            cache_queried_tokens=pool.queried_tokens,
            cache_hit_tokens=pool.hit_tokens,
            cache_evicted_blocks=pool.evicted_blocks,
            blocks_swapped_out=self.swapped_out,
            blocks_swapped_in=self.swapped_in,
            swap_blocks_used=host.used_count,
            swap_blocks_total=host.used_count + host.free_count,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            images_pinned=residency.pinned_count,
            tenants=tuple(
                msgspec.structs.replace(each, image_bytes=residency.tenant_bytes(each.tenant))
                for each in scheduler.services()
            ),
            resident=tuple(islice(residency.resident_digests(), MAX_TOLD)),
        )
