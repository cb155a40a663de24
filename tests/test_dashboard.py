"""The Grafana dashboard asks for metrics and labels that `/metrics` really has."""

import json
import re
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loraplex.engine.client.fake import FakeEngine
from loraplex.engine.protocol import ADAPTER_BUCKETS, ROW_BUCKETS, Service, Stats
from loraplex.platform.metrics import Metrics
from loraplex.platform.usage import Entry

FILE = Path(__file__).resolve().parents[1] / "docs" / "grafana" / "loraplex.json"
SCRAPED = {"instance"}  # labels that Prometheus adds


class Engine(FakeEngine):
    stats = Stats(
        rows_per_step=(0,) * (len(ROW_BUCKETS) + 1),
        adapters_per_step=(0,) * ADAPTER_BUCKETS,
        tenants=(Service("ten_1", 1.0, 1, 1, 1, 1, 1, 1),),
    )


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Labels of every metric, of a server that has seen a little of everything."""
    metrics = Metrics(Engine(), tenants=1, adapters=1)
    metrics.count_request("POST", "/v1/completions", 200, 0.1)
    metrics.count_limited("tenant", "requests_per_minute")
    metrics.observe_first_token(0.1)
    metrics.show_uploads({"ready": 1})
    metrics.count_generation(
        Entry(
            tenant_id="ten_1",
            request_id="req_1",
            key_id="key_1",
            model="a@1",
            adapter="a",
            outcome="stop",
            completion_tokens=3,
            first_token_ms=1.0,
            queue_ms=1.0,
            load_ms=1.0,
            total_ms=9.0,
            created_at=datetime.now(UTC),
        )
    )
    found = defaultdict(set)
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found


def queries() -> list[str]:
    panels = json.loads(FILE.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


@pytest.mark.parametrize("query", queries())
def test_every_query_names_metrics_and_labels_that_are_there(
    query: str, exposed: dict[str, set[str]]
) -> None:
    asked = re.findall(r"(loraplex_\w+)\{([^}]*)\}", query)
    assert len(asked) == query.count("loraplex_") > 0
    grouped = {
        label.strip() for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(",")
    }
    for name, selector in asked:
        assert name in exposed, f"/metrics has no {name}"
        wanted = grouped | set(re.findall(r"(\w+)=~?\"", selector))
        assert wanted <= exposed[name] | SCRAPED, f"{name} lacks {wanted - exposed[name]}"
        is_counter = name.endswith(("_total", "_bucket", "_sum"))
        assert is_counter == (f"rate({name}{{" in query), f"a rate is for counters: {query}"


def test_nothing_in_it_is_of_one_installation() -> None:
    dashboard = json.loads(FILE.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    sources = {
        json.dumps(target["datasource"])
        for p in dashboard["panels"]
        for target in p.get("targets", ())
    }
    assert sources == {'{"type": "prometheus", "uid": "${datasource}"}'}
