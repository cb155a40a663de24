"""What the engine says of itself, as Prometheus is told it.

Names are vLLM's where they mean the same, with the prefix `loraplex_`. Knows `Stats`; refuses to
know requests.
"""

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from loraplex.engine.client import EngineClient
from loraplex.engine.protocol import ROW_BUCKETS, Service, Stats

TENANT_GAUGES = (  # name, text, field of `Service`
    ("requests_running", "Sequences of a tenant in the batch.", "running"),
    ("requests_waiting", "Requests of a tenant that wait.", "waiting"),
    ("kv_blocks", "KV-cache blocks that a tenant's sequences hold.", "kv_blocks"),
    ("image_bytes", "Bytes of a tenant's images in the engine.", "image_bytes"),
    ("service", "Virtual tokens: cost over weight, lifted after idleness.", "counter"),
)
TENANT_COUNTERS = (
    ("prompt_tokens", "Prompt tokens computed for a tenant.", "prompt_tokens"),
    ("generation_tokens", "Tokens generated for a tenant.", "generated_tokens"),
    ("cached_tokens", "A tenant's prompt tokens found in the cache.", "cached_tokens"),
)


class EngineCollector(Collector):
    """Reads the engine's last `Stats` whenever Prometheus asks."""

    def __init__(self, engine: EngineClient, tenants: int) -> None:
        self._engine, self._tenants = engine, tenants

    def describe(self) -> Iterable[Metric]:
        """Names are taken from `collect`, since no engine need be up for it."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Gauges of the moment, counters and histograms since the engine started."""
        stats = self._engine.stats
        up = self._engine.info is not None
        yield GaugeMetricFamily("loraplex_engine_up", "1 while an engine is ready.", float(up))
        for name, text, gauge in _gauges(stats):
            yield GaugeMetricFamily(f"loraplex_{name}", text, gauge)
        for name, text, count in _counters(stats):
            yield CounterMetricFamily(f"loraplex_{name}", text, count)
        yield from _histograms(stats)
        yield from _by_tenant(stats.tenants[: self._tenants])


def _gauges(stats: Stats) -> list[tuple[str, str, float]]:
    used = _share(stats.kv_blocks_used, stats.kv_blocks_total)
    swapped = _share(stats.swap_blocks_used, stats.swap_blocks_total)
    return [
        ("num_requests_running", "Requests in the engine's batch.", stats.running),
        ("num_requests_waiting", "Requests waiting for room in the batch.", stats.waiting),
        ("num_requests_loading", "Requests waiting for their adapter's image.", stats.loading),
        ("kv_cache_usage_perc", "Share of KV-cache blocks in use, 0 to 1.", used),
        ("kv_blocks", "KV-cache blocks now; images may take some.", stats.kv_blocks_total),
        ("kv_blocks_cached", "Blocks that only the prefix cache holds.", stats.kv_blocks_cached),
        ("swap_usage_perc", "Share of the host's blocks in use, 0 to 1.", swapped),
        ("images_pinned", "Adapter images that are never evicted.", stats.images_pinned),
        ("images_resident", "Adapter images in the engine's memory.", stats.images_resident),
        ("image_bytes", "Bytes of those images.", stats.image_bytes),
        ("image_budget_bytes", "Bytes that images may take.", stats.image_budget_bytes),
        ("step_sequences_max", "Most sequences in one step.", stats.sequences_per_step_max),
        ("step_adapters_max", "Most distinct adapters in one step.", stats.adapters_per_step_max),
    ]


def _counters(stats: Stats) -> list[tuple[str, str, float]]:
    return [
        ("engine_steps", "Steps of the engine.", stats.steps),
        ("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
        ("generation_tokens", "Tokens generated.", stats.generated_tokens),
        (
            "num_preemptions",
            "Times a running request had to give up its blocks.",
            stats.preemptions,
        ),
        (
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            stats.cache_queried_tokens,
        ),
        ("prefix_cache_hits", "Prompt tokens found in it.", stats.cache_hit_tokens),
        ("prefix_cache_evicted_blocks", "Blocks it gave up.", stats.cache_evicted_blocks),
        ("swapped_out_blocks", "Blocks copied to the host's memory.", stats.blocks_swapped_out),
        ("swapped_in_blocks", "Blocks copied back.", stats.blocks_swapped_in),
        (
            "spec_decode_num_draft_tokens",
            "Tokens that were looked up and tried.",
            stats.drafted_tokens,
        ),
        ("spec_decode_num_accepted_tokens", "Those that were right.", stats.accepted_tokens),
    ]


def _by_tenant(services: tuple[Service, ...]) -> Iterator[Metric]:
    """What each tenant has and had of the engine."""
    for name, text, field in TENANT_GAUGES:
        family = GaugeMetricFamily(f"loraplex_tenant_{name}", text, labels=("tenant",))
        for service in services:
            family.add_metric((service.tenant,), getattr(service, field))
        yield family
    for name, text, field in TENANT_COUNTERS:
        counter = CounterMetricFamily(f"loraplex_tenant_{name}", text, labels=("tenant",))
        for service in services:
            counter.add_metric((service.tenant,), getattr(service, field))
        yield counter


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _histograms(stats: Stats) -> Iterator[Metric]:
    yield HistogramMetricFamily(
        "loraplex_iteration_tokens_total",
        "Rows (tokens) in a step.",
        buckets=_cumulative([str(bound) for bound in ROW_BUCKETS], stats.rows_per_step),
        sum_value=stats.rows_total,
    )
    adapters = stats.adapters_per_step
    yield HistogramMetricFamily(
        "loraplex_step_adapters",
        "Distinct adapters in a step; in the sum, 16 and more count as 16.",
        buckets=_cumulative([str(i) for i in range(max(len(adapters) - 1, 0))], adapters),
        sum_value=sum(i * count for i, count in enumerate(adapters)),
    )


def _cumulative(bounds: list[str], counts: tuple[int, ...]) -> list[tuple[str, float]]:
    """Counts of single buckets as Prometheus wants them: each with all below it, then +Inf."""
    total, buckets = 0, []
    for bound, count in zip(bounds, counts, strict=False):
        total += count
        buckets.append((bound, float(total)))
    return [*buckets, ("+Inf", float(sum(counts)))]
