"""A trace sink that sends the spans of runs with OpenTelemetry."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

from .._core.ids import TraceParent, parsed
from .._core.lazy_import import load
from .._core.validation import Shown, must
from ..interfaces import TraceSink
from .conventions import LONGEST, attributes_of, contents_of, encodable
from .spans import Span, SpanBuilder, SpanSender, shown

FLUSH_SECONDS: Final = 1.5  # less than the tracer waits for its sinks at exit


class OpenTelemetrySink(TraceSink):
    """Sends each execution of a run, step, model call and tool call as a span, with the GenAI attributes.

        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        runner = AgentRunner.open("agents.db", trace_sinks=[OpenTelemetrySink(OTLPSpanExporter())])

    Your own spans inside a run are children of the span of their step. A run that is submitted inside a span belongs to
    the trace of that span. The sink does not change the tracer provider of the process.

    Args:
        exporter: Sends batches of spans. If None, the OTLP exporter for HTTP, with the settings of its environment
            variables.
        processor: A span processor to use instead of the batch processor of the library.
        resource: Describes this process. If None, as OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say.
        content: Whether to send prompts, answers, arguments, results and the texts of errors. Each is cut at 65,536
            characters.

    Raises:
        MissingDependency: The OpenTelemetry SDK, or the default exporter, is not installed.
        InvalidArgument: Both an exporter and a processor are passed.
    """

    service: str = "opentelemetry"

    def __init__(
        self, exporter: Any = None, *, processor: Any = None, resource: Any = None, content: bool = False
    ) -> None:
        if exporter is not None and processor is not None:
            raise must("exporter and processor", "not both be passed", Shown("both"))
        if processor is None:
            batch: Any = load("opentelemetry.sdk.trace.export:BatchSpanProcessor", needed_by="OpenTelemetrySink")
            processor = batch(_default_exporter() if exporter is None else exporter)
        self._sender = SpanSender(processor, resource=resource, needed_by="OpenTelemetrySink")
        self._builder = SpanBuilder()
        self.content = content

    # -- called by the tracer

    def trace(self, event: dict[str, Any]) -> None:  # type: ignore[override] # the tracer awaits only what is awaitable
        """Send the spans that end with this event."""
        for span in self._builder.spans(event):
            self._send(span)

    def flush(self) -> None:
        """Send what is buffered, waiting for at most 1.5 seconds."""
        self._sender.flush(FLUSH_SECONDS)

    # -- called by the run

    def activate(self, traceparent: str) -> AbstractContextManager[object] | None:
        """Make this span the current span."""
        span = parsed(traceparent)
        if span is None:
            return None
        api = self._sender.api
        current: AbstractContextManager[object] = api.use_span(
            api.get_current_span(self._sender.context_of(span)), record_exception=False, set_status_on_exception=False
        )
        return current

    def current_traceparent(self) -> str | None:
        """Return the current span of the calling code."""
        found = self._sender.api.get_current_span().get_span_context()
        if not found.is_valid:
            return None
        return TraceParent(found.trace_id, found.span_id, bool(found.trace_flags & 1)).text

    # -- spans

    def _send(self, span: Span) -> None:
        span = shown(span, content=self.content)
        found = attributes_of(span)
        if found is None:
            return
        name, attributes = found
        if self.content:
            attributes |= contents_of(span)
        error = None
        if span.failed and span.error is not None:
            attributes["error.type"] = span.error.kind
            error = encodable(span.error.text[:LONGEST])
        self._sender.send(
            encodable(name), span.at, span.parent, span.start, span.end, attributes, client=span.kind == "chat",
            links=span.links, error=error,
        )  # fmt: skip


def _default_exporter() -> Any:
    make: Any = load(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter:OTLPSpanExporter",
        needed_by="OpenTelemetrySink without exporter=",
    )
    return make()
