"""Traces: spans of a request and its steps under the conventions' names, and nothing when off."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from loraplex.platform import parts, traces
from loraplex.platform.boot import StartError
from loraplex.platform.settings import Settings
from loraplex.platform.traces import Traces

pytestmark = pytest.mark.anyio
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET_PROMPT = "do not tell anyone"


@pytest.fixture
def exporter(world) -> Iterator[InMemorySpanExporter]:
    kept = InMemorySpanExporter()
    made = world.app.state.context.traces
    made.start(SimpleSpanProcessor(kept))
    yield kept
    made.stop()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_generation_is_a_server_span_with_its_steps_below(world, exporter, stream) -> None:
    world.engine.cached_tokens = 2
    carried = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {
        "model": "tiny-base",
        "messages": [{"role": "user", "content": SECRET_PROMPT}],
        "max_tokens": 3,
        "stream": stream,
    }
    async with world.client("acme") as client:
        answer = await client.post("/v1/chat/completions", json=body, headers=carried)
    assert answer.status_code == 200
    spans = by_name(exporter)
    assert set(spans) == {
        "POST /v1/chat/completions",
        "tokenize",
        "admission",
        "engine",
        "settle",
    }
    server = spans.pop("POST /v1/chat/completions")
    assert server.kind is SpanKind.SERVER
    assert f"{server.context.trace_id:032x}" == TRACE
    assert f"{server.parent.span_id:016x}" == PARENT
    assert answer.headers["traceresponse"] == f"00-{TRACE}-{server.context.span_id:016x}-01"
    assert {span.parent.span_id for span in spans.values()} == {server.context.span_id}
    expected = {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "loraplex",
        "gen_ai.response.model": "tiny-base",
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ("length",),
        "loraplex.tenant_id": world.tenants["acme"],
        "loraplex.request_id": answer.headers["x-request-id"],
    }
    assert {name: server.attributes.get(name) for name in expected} == expected
    assert server.attributes["gen_ai.usage.input_tokens"] > 3
    events = {event.name: event.timestamp for event in spans["engine"].events}
    assert set(events) == {"image loaded", "scheduled", "first token"}
    assert min(events.values()) >= spans["engine"].start_time
    told = "".join(span.to_json() for span in exporter.get_finished_spans())
    assert SECRET_PROMPT not in told and SECRET_PROMPT[::-1][:3] not in told
    assert world.keys["acme"] not in told


async def test_a_fault_marks_its_span_and_a_refusal_does_not(world, exporter) -> None:
    body = {"model": "tiny-base", "prompt": "a"}
    async with world.client("acme") as client:
        assert (await client.post("/v1/completions", json=body | {"n": -1})).status_code == 400
        world.engine.die()
        assert (await client.post("/v1/completions", json=body)).status_code == 503
    refused, failed = (
        span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER
    )
    assert refused.status.status_code is StatusCode.UNSET
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes["error.type"] == "503"
    assert failed.attributes["gen_ai.response.finish_reasons"] == ("engine_unavailable",)


async def test_a_caller_who_names_no_trace_gets_one(world, exporter) -> None:
    async with world.client("acme") as client:
        broken = {"traceparent": "00-zz-1-01"}
        answers = [await client.get("/v1/models", headers=h) for h in ({}, broken)]
    found = {answer.headers["traceresponse"].split("-")[1] for answer in answers}
    assert len(found) == 2
    assert found == {f"{span.context.trace_id:032x}" for span in exporter.get_finished_spans()}


async def test_off_it_leaves_no_mark(world) -> None:
    async with world.client("acme") as client:
        answer = await client.get("/v1/models", headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    assert "traceresponse" not in answer.headers
    off = Traces()
    assert off.step("a") is off.step("b")
    assert off.request([]) is off.request([])


def test_off_it_is_not_imported_and_torch_never_is() -> None:
    """Redis' client imports OpenTelemetry's interfaces where they are installed; we do not."""
    code = (
        "import sys, loraplex.platform.opening, loraplex.platform.cli.serve\n"
        "heavy = {'opentelemetry.sdk.trace', 'opentelemetry.exporter', 'torch'} & {*sys.modules}\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("variables", "setting", "expected"),
    [
        ({}, None, False),
        ({}, "http://localhost:4318", True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, None, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4318/v1/traces"}, None, True),
        ({"OTEL_SDK_DISABLED": "true"}, "http://localhost:4318", False),
    ],
)
def test_a_setting_or_a_standard_variable_turns_it_on(
    variables, setting, expected, monkeypatch
) -> None:
    for name in (*traces.VARIABLES, "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert traces.wanted(setting) is expected


def test_without_the_package_the_start_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    settings = Settings(data_dir=tmp_path, otlp_endpoint="http://localhost:4318")
    with pytest.raises(StartError, match=r"pip install 'loraplex\[otel\]'"):
        parts.open_traces(settings, AsyncExitStack())


class Collector(HTTPServer):
    """What an OTLP collector hears over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Hearing)
        self.heard: list[tuple[str, bytes]] = []


class _Hearing(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.heard.append((self.path, body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
async def test_spans_are_sent_to_a_collector_when_the_server_ends(tmp_path, path) -> None:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{collector.server_port}{path}"
        settings = Settings(data_dir=tmp_path, otlp_endpoint=url)
        async with AsyncExitStack() as stack:
            made = parts.open_traces(settings, stack)
            with made.request([(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode())]) as served:
                with made.step("engine") as step:
                    step.passed({"first token": 0.5})
                served.end("POST", "/v1/completions", 200, {"model": "a@1"})
        collector.shutdown()
        thread.join()
    ((where, body),) = collector.heard
    assert where == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    named = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert named["service.name"] == "loraplex"
    spans = {span.name: span for span in resource.scope_spans[0].spans}
    assert set(spans) == {"engine", "POST /v1/completions"}
    assert spans["engine"].trace_id.hex() == TRACE
    assert spans["engine"].events[0].name == "first token"
