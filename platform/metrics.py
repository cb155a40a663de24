"""What Prometheus is told of requests: how many, how they ended, how long each part took.

Names are vLLM's where they mean the same, with the prefix `loraplex_`. Labels come from small fixed
sets (methods, route templates, statuses, limits), but for the tenants and adapters that are used
most, as many as the operator wants; no key is in one. Each `Metrics` has a registry of its own, so
that two apps in one process do not mix.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from loraplex.engine.client import EngineClient
from loraplex.platform.busiest import Busiest
from loraplex.platform.engine_metrics import EngineCollector
from loraplex.platform.usage import Entry

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKENS = (1, 10, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 50_000, 100_000)
BASE = "(base)"  # no adapter may have such a name
AMOUNTS = (
    ("requests", "Generations"),
    ("prompt_tokens", "Prompt tokens charged"),
    ("completion_tokens", "Tokens generated"),
)
HISTOGRAMS = (
    ("time_to_first_token_seconds", "From admission to a generation's first token.", SECONDS),
    ("e2e_request_latency_seconds", "From admission to the end of a generation.", SECONDS),
    ("request_queue_time_seconds", "From the engine's acceptance to the first step.", SECONDS),
    ("image_load_seconds", "From the engine's acceptance until the image was there.", SECONDS),
    (
        "request_time_per_output_token_seconds",
        "Mean time between the tokens of a generation.",
        (0.001, 0.0025, *SECONDS),
    ),
    ("request_prompt_tokens", "Prompt tokens of a generation.", TOKENS),
    ("request_generation_tokens", "Tokens that a generation made.", TOKENS),
)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counters of one app, and a view of its engine's statistics.

    `tenants` and `adapters` are how many of each are shown by name.
    """

    def __init__(self, engine: EngineClient, tenants: int = 0, adapters: int = 0) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "loraplex_http_requests",
            "HTTP requests by route template and status; 499: the caller left first.",
            ("method", "route", "status"),
            registry=registry,
        )
        self._seconds = Histogram(
            "loraplex_http_request_seconds",
            "Seconds from a request's first byte to its answer's last.",
            ("route",),
            buckets=SECONDS,
            registry=registry,
        )
        self._limited = Counter(
            "loraplex_limited_requests",
            "Generations refused by a limit: whose it is, and which.",
            ("bucket", "limit"),
            registry=registry,
        )
        self._outcomes = Counter(
            "loraplex_requests",
            "Generations that were admitted, by how they ended: a finish reason or an error.",
            ("outcome",),
            registry=registry,
        )
        self._parts = {
            name: Histogram(f"loraplex_{name}", text, buckets=buckets, registry=registry)
            for name, text, buckets in HISTOGRAMS
        }
        self._degraded = Gauge(
            "loraplex_quota_backend_degraded",
            "1 while Redis is away and limits are held by this process alone.",
            registry=registry,
        )
        self._uploads = Gauge(
            "loraplex_uploads", "Upload jobs by state.", ("state",), registry=registry
        )
        self._tenants, self._adapters = Busiest(tenants), Busiest(adapters)
        registry.register(EngineCollector(engine, tenants))
        registry.register(UseCollector(self._tenants, self._adapters))

    def count_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one HTTP request; `route` is a template, not a path."""
        known = method if method in METHODS else "other"
        self._requests.labels(known, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def count_limited(self, bucket: str, limit: str) -> None:
        """Count a refusal by one of a bucket's limits."""
        self._limited.labels(bucket, limit).inc()

    def observe_first_token(self, seconds: float) -> None:
        """Note how long a generation took to its first token."""
        self._parts["time_to_first_token_seconds"].observe(seconds)

    def count_generation(self, entry: Entry) -> None:
        """Count a generation as the ledger has it."""
        self._outcomes.labels(entry.outcome).inc()
        amounts = (1, entry.prompt_tokens, entry.completion_tokens)
        tokens = entry.prompt_tokens + entry.completion_tokens
        self._tenants.add((entry.tenant_id,), tokens, amounts)
        self._adapters.add((entry.tenant_id, entry.adapter or BASE), tokens, amounts)
        self._parts["request_prompt_tokens"].observe(entry.prompt_tokens)
        self._parts["request_generation_tokens"].observe(entry.completion_tokens)
        for name, milliseconds in _times(entry):
            if milliseconds is not None:
                self._parts[name].observe(milliseconds / 1000)

    def watch_quotas(self, is_degraded: Callable[[], bool]) -> None:
        """Say from now on whether limits are held without Redis."""
        self._degraded.set_function(lambda: float(is_degraded()))

    def show_uploads(self, by_state: Mapping[str, int]) -> None:
        """Say how many upload jobs there are of each state."""
        self._uploads.clear()
        for state, count in by_state.items():
            self._uploads.labels(state).set(count)

    def refusals(self) -> dict[str, int]:
        """How many generations each limit has refused: "key requests_per_minute" and so on."""
        return {
            f"{sample.labels['bucket']} {sample.labels['limit']}": int(sample.value)
            for family in self._limited.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        }

    def first_tokens(self) -> tuple[tuple[float, float], ...]:
        """How many generations had their first token within so many seconds, bound by bound."""
        histogram = self._parts["time_to_first_token_seconds"]
        return tuple(
            (float(sample.labels["le"]), sample.value)
            for family in histogram.collect()
            for sample in family.samples
            if sample.name.endswith("_bucket")
        )

    def exposition(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        return generate_latest(self._registry)


def _times(entry: Entry) -> Iterator[tuple[str, float | None]]:
    yield "e2e_request_latency_seconds", entry.total_ms
    yield "request_queue_time_seconds", entry.queue_ms
    yield "image_load_seconds", entry.load_ms
    if entry.total_ms is not None and entry.first_token_ms is not None:
        between = entry.completion_tokens - 1
        spent = max(entry.total_ms - entry.first_token_ms, 0.0)
        yield "request_time_per_output_token_seconds", spent / between if between > 0 else None


class UseCollector(Collector):
    """Shows who is served most: tenants by id, adapters by tenant and name, and all others."""

    def __init__(self, tenants: Busiest, adapters: Busiest) -> None:
        self._of = {("tenant",): tenants, ("tenant", "adapter"): adapters}

    def collect(self) -> Iterator[Metric]:
        """Counters since the server started."""
        for labels, busiest in self._of.items():
            shown = busiest.shown()
            for index, (name, text) in enumerate(AMOUNTS):
                by = " and ".join(labels)
                family = CounterMetricFamily(
                    f"loraplex_{labels[-1]}_served_{name}", f"{text}, by {by}.", labels=labels
                )
                for key, amounts in shown.items():
                    family.add_metric(key, amounts[index])
                yield family
