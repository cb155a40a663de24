"""Counts what an engine's steps did, for `Stats`. It refuses to know whose requests they were."""

from bisect import bisect_left
from dataclasses import dataclass, field

from loraplex.engine.protocol import ADAPTER_BUCKETS, ROW_BUCKETS
from loraplex.engine.scheduler import Plan


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

    def count_step(self, plan: Plan) -> None:
        """Count a step that ran."""
        rows = sum(part.count for part in plan.scheduled)
        adapters = len({part.sequence.image for part in plan.scheduled} - {None})
        self.steps += 1
        self.rows_total += rows
        self.preemptions += len(plan.preempted)
        self.rows[bisect_left(ROW_BUCKETS, rows)] += 1
        self.adapters[min(adapters, ADAPTER_BUCKETS - 1)] += 1
        self.sequences_max = max(self.sequences_max, len(plan.scheduled))
        self.adapters_max = max(self.adapters_max, adapters)
