"""Health, metrics, the first page, and the description of all routes."""

import anyio
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loraplex.engine.client.fake import FakeEngine
from loraplex.engine.protocol import ADAPTER_BUCKETS, ROW_BUCKETS, Service, Stats
from loraplex.platform.api.health import CHECKS
from loraplex.platform.db.models import Upload
from loraplex.platform.metrics import Metrics
from loraplex.platform.quotas import TenantLimits
from loraplex.web.pages import Welcome, render

pytestmark = pytest.mark.anyio


async def test_the_process_is_healthy_whatever_is_down(world):
    world.engine.die()
    async with world.client(None) as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}


async def test_readiness_names_each_part(world):
    async with world.client(None) as client:
        ready = await client.get("/readyz")
        world.engine.die()
        down = await client.get("/readyz")
    assert ready.status_code == 200
    assert ready.json() == {
        "status": "ready",
        "parts": {"database": "ok", "redis": "ok", "engine": "ok"},
    }
    assert down.status_code == 503
    assert down.json()["parts"] == {"database": "ok", "redis": "ok", "engine": "down"}


async def test_head_answers_as_get_without_a_body(world):
    async with world.listening() as url, httpx.AsyncClient(base_url=url) as client:
        for engine, status in ((world.engine.revive, 200), (world.engine.die, 503)):
            engine()
            for path, expected in (("/healthz", 200), ("/readyz", status)):
                head, get = await client.head(path), await client.get(path)
                assert (head.status_code, head.content) == (get.status_code, b"")
                assert head.status_code == expected
                assert head.headers["content-length"] == get.headers["content-length"]
        refused = await client.post("/healthz")
    assert refused.headers["allow"] == "GET, HEAD"


async def test_a_part_that_does_not_answer_is_down(world, monkeypatch):
    async def hang(_: object) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr("loraplex.platform.api.health.CHECK_S", 0.05)
    monkeypatch.setitem(CHECKS, "redis", hang)
    async with world.client(None) as client:
        answer = await client.get("/readyz")
    assert answer.json()["parts"]["redis"] == "down"


def samples(text):
    """Samples of an exposition by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_requests_are_counted_by_template_and_status(world):
    async with world.client("acme") as client:
        await client.post("/v1/completions", json={"model": "tiny-base", "prompt": "a"})
        await client.get("/v1/adapters/nobody")
        await client.get("/v1/adapters/somebody")
        await client.get("/nothing/here")
        await client.request("BREW", "/v1/models")
    async with world.client(None) as client:
        text = (await client.get("/metrics")).text
    found = samples(text)

    def count(method, route, status):
        labels = (("method", method), ("route", route), ("status", status))
        return found.get(("loraplex_http_requests_total", labels))

    assert count("POST", "/v1/completions", "200") == 1
    assert count("GET", "/v1/adapters/{name}", "404") == 2
    assert count("GET", "unmatched", "404") == 1
    assert count("other", "/v1/models", "405") == 1
    assert found[("loraplex_num_requests_running", ())] == 0
    assert found[("loraplex_engine_up", ())] == 1
    assert "acme" not in text
    assert "nobody" not in text


async def test_refusals_are_counted_by_whose_limit_it_was_and_which(world):
    await world.add_tenant("slow", TenantLimits(requests_per_minute=1))
    async with world.client("slow") as client:
        for _ in range(3):
            await client.post("/v1/completions", json={"model": "tiny-base", "prompt": "a"})
        found = samples((await client.get("/metrics", headers={"authorization": ""})).text)
    labels = (("bucket", "tenant"), ("limit", "requests_per_minute"))
    assert found[("loraplex_limited_requests_total", labels)] == 2


async def test_generations_are_counted_by_outcome_and_by_who_is_served_most(world):
    world.app.state.context.metrics._tenants._most = 1  # of the two that are served
    await world.add_adapter("acme", "pirate")
    body = {"prompt": "abc", "max_tokens": 4}
    async with world.client("acme") as client:
        for model in ("tiny-base", "pirate", "pirate"):
            await client.post("/v1/completions", json=body | {"model": model})
        await client.post("/v1/completions", json={"model": "none", "prompt": "a"})
        world.engine.fail = "overloaded"
        await client.post("/v1/completions", json=body | {"model": "pirate"})
        world.engine.fail = None
    async with world.client("globex") as client:
        await client.post("/v1/completions", json=body | {"model": "tiny-base"})
    async with world.client(None) as client:
        found = samples((await client.get("/metrics")).text)
    acme, globex = world.tenants["acme"], world.tenants["globex"]

    def served(of, amount, **labels):
        return found.get((f"loraplex_{of}_served_{amount}_total", tuple(sorted(labels.items()))))

    assert found[("loraplex_requests_total", (("outcome", "length"),))] == 4
    assert found[("loraplex_requests_total", (("outcome", "overloaded"),))] == 1
    assert served("tenant", "requests", tenant=acme) == 4
    assert served("tenant", "requests", tenant="other") == 1
    assert served("tenant", "requests", tenant=globex) is None
    assert served("adapter", "completion_tokens", tenant=acme, adapter="pirate") == 8
    assert served("adapter", "requests", tenant=acme, adapter="(base)") == 1
    assert found[("loraplex_request_prompt_tokens_count", ())] == 5
    assert found[("loraplex_e2e_request_latency_seconds_count", ())] == 5
    assert found[("loraplex_quota_backend_degraded", ())] == 0


async def test_upload_jobs_are_shown_by_state(world):
    async with world.db.session(None) as session:
        for state in ("uploading", "ready", "ready"):
            session.add(
                Upload(
                    tenant_id=world.tenants["acme"],
                    name="a",
                    state=state,
                    options={},
                    parts={},
                    created_by="system",
                )
            )
    async with world.client(None) as client:
        found = samples((await client.get("/metrics")).text)
    assert found[("loraplex_uploads", (("state", "ready"),))] == 2
    assert found[("loraplex_uploads", (("state", "uploading"),))] == 1


async def test_a_server_that_stops_is_not_ready_at_once_and_takes_nothing_new(world):
    drain = world.app.state.context.drain
    world.tap(1)
    body = {"model": "tiny-base", "prompt": "abc", "max_tokens": 2}
    async with world.client("acme") as client, anyio.create_task_group() as group:
        answers = []

        async def ask():
            answers.append(await client.post("/v1/completions", json=body))

        group.start_soon(ask)
        await world.engine.wait_in_flight(1)
        drain.begin()
        unready = await client.get("/readyz")
        alive = await client.get("/healthz")
        refused = await client.post("/v1/completions", json=body)
        world.engine.hold.release()
        assert await drain.idle(20)
    assert (unready.status_code, unready.json()["status"]) == (503, "stopping")
    assert alive.status_code == 200
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stopping")
    assert "retry-after" in refused.headers
    assert refused.headers["connection"] == "close"
    assert answers[0].status_code == 200
    assert answers[0].headers["connection"] == "close"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_has_had_its_time_ends_with_an_error_and_is_charged(world, stream):
    await world.add_tenant("cut")
    world.tap(2)
    body = {"model": "tiny-base", "prompt": "abc", "max_tokens": 5, "stream": stream}
    async with world.client("cut") as client, anyio.create_task_group() as group:
        answers = []

        async def ask():
            answers.append(await client.post("/v1/completions", json=body))

        group.start_soon(ask)
        await world.until(lambda: world.engine.stats.generated_tokens == 2)
        world.app.state.context.drain.cut()
    answer = answers[0]
    if stream:
        last = answer.text.rstrip("\n").rpartition("\n\n")[2]
        assert last.startswith("data: ") and "server_stopping" in last
        assert "[DONE]" not in answer.text
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_stopping")
    assert world.engine.in_flight == set()
    (row,) = await world.records(world.tenants["cut"])
    assert (row.outcome, row.completion_tokens) == ("server_stopping", 2)


def test_engine_statistics_have_vllms_names_and_add_up():
    class Engine(FakeEngine):
        stats = Stats(
            steps=6,
            running=3,
            waiting=2,
            kv_blocks_used=5,
            kv_blocks_total=20,
            rows_total=900,
            rows_per_step=(1, 2, *(0,) * (len(ROW_BUCKETS) - 2), 3),
            adapters_per_step=(2, 0, 3, *(0,) * (ADAPTER_BUCKETS - 4), 1),
        )

    found = samples(Metrics(Engine()).exposition().decode())

    def bucket(name, bound):
        return found[(f"loraplex_{name}_bucket", (("le", bound),))]

    assert found[("loraplex_num_requests_running", ())] == 3
    assert found[("loraplex_num_requests_waiting", ())] == 2
    assert found[("loraplex_kv_cache_usage_perc", ())] == 0.25
    assert [bucket("iteration_tokens_total", b) for b in ("1", "2", "2048", "+Inf")] == [1, 3, 3, 6]
    assert found[("loraplex_iteration_tokens_total_sum", ())] == 900
    assert [bucket("step_adapters", b) for b in ("0", "1", "2", "15", "+Inf")] == [2, 2, 5, 5, 6]
    assert found[("loraplex_step_adapters_sum", ())] == 2 * 3 + 16


def test_the_cache_swap_and_speculation_are_shown():
    class Engine(FakeEngine):
        stats = Stats(
            kv_blocks_cached=4,
            cache_queried_tokens=100,
            cache_hit_tokens=60,
            cache_evicted_blocks=7,
            blocks_swapped_out=9,
            blocks_swapped_in=8,
            swap_blocks_used=1,
            swap_blocks_total=4,
            drafted_tokens=30,
            accepted_tokens=20,
            images_pinned=2,
        )

    found = samples(Metrics(Engine()).exposition().decode())
    shown = {
        "kv_blocks_cached": 4,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 60,
        "prefix_cache_evicted_blocks_total": 7,
        "swapped_out_blocks_total": 9,
        "swapped_in_blocks_total": 8,
        "swap_usage_perc": 0.25,
        "spec_decode_num_draft_tokens_total": 30,
        "spec_decode_num_accepted_tokens_total": 20,
        "images_pinned": 2,
    }
    assert {name: found[(f"loraplex_{name}", ())] for name in shown} == shown


@pytest.mark.parametrize("most", [0, 2])
def test_as_many_tenants_are_shown_as_the_operator_wants(most):
    class Engine(FakeEngine):
        stats = Stats(
            tenants=tuple(Service(f"ten_{i}", 9.5 - i, 8, 7, 6, 5, 4, 3) for i in range(5))
        )

    found = samples(Metrics(Engine(), most).exposition().decode())
    assert {labels for name, labels in found if "tenant" in name} == {
        (("tenant", f"ten_{i}"),) for i in range(most)
    }
    if most:
        first = {name: value for (name, labels), value in found.items() if "ten_0" in str(labels)}
        assert first == {
            "loraplex_tenant_service": 9.5,
            "loraplex_tenant_prompt_tokens_total": 8,
            "loraplex_tenant_generation_tokens_total": 7,
            "loraplex_tenant_cached_tokens_total": 6,
            "loraplex_tenant_requests_running": 5,
            "loraplex_tenant_requests_waiting": 4,
            "loraplex_tenant_kv_blocks": 3,
            "loraplex_tenant_image_bytes": 0,
        }


async def test_metrics_are_for_this_machine_and_for_operators(world):
    async with world.client(None) as client:
        assert (await client.get("/metrics")).status_code == 200
        proxied = {"x-forwarded-for": "203.0.113.9"}
        assert (await client.get("/metrics", headers=proxied)).status_code == 401
    for key, status in (("acme", 403), ("operator", 200)):
        async with world.client(key) as client:
            assert (await client.get("/metrics")).status_code == status


async def test_the_first_page_says_what_this_is_and_runs_nothing(world):
    async with world.client(None) as client:
        page = await client.get("/")
        style = await client.get("/static/loraplex.css")
        world.engine.die()
        starting = await client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "tiny-base" in page.text
    assert "curl http://localhost/v1/chat/completions" in page.text
    assert "ready on cpu" in page.text
    assert "starting" in starting.text
    assert "<script" not in page.text
    assert "style=" not in page.text
    assert style.headers["content-type"].startswith("text/css")


def test_a_page_escapes_what_it_shows():
    page = render(Welcome("1", "<script>x</script>", 'http://"', 10, None))
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


async def test_the_routes_are_described(world):
    async with world.client(None) as client:
        described = (await client.get("/openapi.json")).json()
    chat = described["paths"]["/v1/chat/completions"]["post"]
    assert {"HTTPBearer": []} in chat["security"]
    upload = described["paths"]["/v1/adapters"]["post"]["requestBody"]["content"]
    parts = upload["multipart/form-data"]["schema"]["properties"]
    assert set(parts) == {"name", "adapter_config", "adapter_model", "archive"}
    schema = described["components"]["schemas"]["ChatRequest"]["properties"]
    assert schema["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
