"""Traces of requests by OpenTelemetry, where an operator wants them: a span each, and one a step.

Names follow OpenTelemetry's conventions for HTTP servers and for generative AI (`gen_ai.*`), and
W3C Trace Context: a caller's `traceparent` is continued, and `traceresponse` names our span. No
prompt and no answer is in a span. Off, OpenTelemetry is not imported here and a step is nothing.
"""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span, Tracer

VARIABLES: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PATH: Final = "/v1/traces"
OPERATIONS: Final = {  # by route
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
ATTRIBUTES: Final = {  # what a route notes of a request, as the conventions name it
    "requested_model": "gen_ai.request.model",
    "model": "gen_ai.response.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
}


class TracesMissing(RuntimeError):
    """Traces are wanted, but OpenTelemetry is not installed."""


class Step:
    """One step of a request; as it is here, of one that nobody traces."""

    def passed(self, seconds: Mapping[str, float]) -> None:
        """Note moments by name, each so many seconds after the step's start."""


class TracedStep(Step):
    """A step that is a span."""

    def __init__(self, span: "Span", started_ns: int) -> None:
        self._span, self._started_ns = span, started_ns

    def passed(self, seconds: Mapping[str, float]) -> None:
        """Add an event for each moment."""
        for name, after in seconds.items():
            self._span.add_event(name, timestamp=self._started_ns + round(after * 1e9))


class Served:
    """A request; as it is here, one that nobody traces."""

    header: str | None = None  # W3C's `traceresponse`

    def end(self, method: str, route: str, status: int, facts: Mapping[str, Any]) -> None:
        """Note how the request ended."""


class TracedRequest(Served):
    """A request that is a server's span."""

    def __init__(self, span: "Span") -> None:
        self._span = span
        found = span.get_span_context()
        flags = int(found.trace_flags)
        self.header = f"00-{found.trace_id:032x}-{found.span_id:016x}-{flags:02x}"

    def end(self, method: str, route: str, status: int, facts: Mapping[str, Any]) -> None:
        """Name the span and give it its attributes."""
        self._span.update_name(f"{method} {route}")
        self._span.set_attributes(dict(_attributes(method, route, status, facts)))
        if status >= 500:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR)


def _attributes(
    method: str, route: str, status: int, facts: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    yield "http.request.method", method
    yield "http.route", route
    yield "http.response.status_code", status
    if status >= 500:
        yield "error.type", str(status)
    if operation := OPERATIONS.get(route):
        yield "gen_ai.operation.name", operation
        yield "gen_ai.provider.name", "loraplex"
    for name, value in facts.items():
        if name == "outcome":
            yield "gen_ai.response.finish_reasons", [value]
        else:
            yield ATTRIBUTES.get(name, f"loraplex.{name}"), value


_NO_STEP: Final = nullcontext(Step())
_NO_REQUEST: Final = nullcontext(Served())


class Traces:
    """Off until `start`; then the maker of spans."""

    def __init__(self) -> None:
        self._tracer: Tracer | None = None
        self._provider: TracerProvider | None = None

    def start(self, processor: "SpanProcessor") -> None:
        """Make spans from now on, and hand them to `processor`."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create({"service.version": version("loraplex")} | _service())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("loraplex")

    def stop(self) -> None:
        """Send what is left, which may take seconds, and make no more spans."""
        provider, self._provider, self._tracer = self._provider, None, None
        if provider is not None:
            provider.shutdown()

    def request(self, headers: Iterable[tuple[bytes, bytes]]) -> AbstractContextManager[Served]:
        """A span for the block, which continues the trace that the headers name."""
        return _NO_REQUEST if self._tracer is None else _request(self._tracer, headers)

    def step(self, name: str) -> AbstractContextManager[Step]:
        """A span for the block, below the one that it runs in."""
        return _NO_STEP if self._tracer is None else _step(self._tracer, name)


@contextmanager
def _request(tracer: "Tracer", headers: Iterable[tuple[bytes, bytes]]) -> Iterator[Served]:
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carried = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in headers
        if name in (b"traceparent", b"tracestate")
    }
    context = TraceContextTextMapPropagator().extract(carried)
    with tracer.start_as_current_span(
        "request", context, SpanKind.SERVER, record_exception=False
    ) as span:
        yield TracedRequest(span)


@contextmanager
def _step(tracer: "Tracer", name: str) -> Iterator[Step]:
    started = time.time_ns()
    with tracer.start_as_current_span(name, start_time=started, record_exception=False) as span:
        yield TracedStep(span, started)


def wanted(endpoint: str | None) -> bool:
    """Whether a setting or OpenTelemetry's own variables ask for traces."""
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not disabled and bool(endpoint or any(os.environ.get(name) for name in VARIABLES))


def exporter(endpoint: str | None) -> "SpanProcessor":
    """What sends spans in batches to `endpoint`, else to where OpenTelemetry's variables say.

    Raises `TracesMissing`.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracesMissing("Traces need OpenTelemetry: pip install 'loraplex[otel]'.") from error
    url = endpoint and f"{endpoint.rstrip('/').removesuffix(PATH)}{PATH}"
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=url))


def _service() -> dict[str, str]:
    return {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "loraplex"}
