"""Send finished spans through the OpenTelemetry SDK, with ids and times of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .._core.ids import TraceParent
from .._core.lazy_import import load

_SCOPE: Final = "agent_runtime_core"
NANOSECONDS: Final = 1_000_000_000


class SpanSender:
    """Hands finished spans to a span processor. It uses a tracer provider of its own, never the one of the process.

    Args:
        processor: An OpenTelemetry span processor.
        resource: Describes this process. None: as the environment variables of OpenTelemetry say.
        needed_by: Names the sink in the error when the SDK is not installed.

    Raises:
        MissingDependency: The OpenTelemetry SDK is not installed.
    """

    def __init__(self, processor: Any, *, resource: Any = None, needed_by: str) -> None:
        self.api: Any = load("opentelemetry.trace", needed_by=needed_by)
        self._context: Any = load("opentelemetry.context:Context", needed_by=needed_by)
        sdk: Any = load("opentelemetry.sdk.trace", needed_by=needed_by)
        generators: Any = load("opentelemetry.sdk.trace.id_generator", needed_by=needed_by)
        sampling: Any = load("opentelemetry.sdk.trace.sampling", needed_by=needed_by)

        class Ids(generators.IdGenerator):  # type: ignore[misc] # its module is loaded above
            """Gives each span the ids that are derived from its run."""

            following: TraceParent

            def generate_span_id(self) -> int:
                return self.following.span_id

            def generate_trace_id(self) -> int:
                return self.following.trace_id

        self._ids = Ids()
        options = {} if resource is None else {"resource": resource}
        provider = sdk.TracerProvider(
            id_generator=self._ids, sampler=sampling.ParentBased(sampling.ALWAYS_ON), shutdown_on_exit=False, **options
        )
        provider.add_span_processor(processor)
        self._provider, self._tracer = provider, provider.get_tracer(_SCOPE)

    def context_of(self, span: TraceParent) -> Any:
        """Return an OpenTelemetry context in which this span is the current one."""
        return self.api.set_span_in_context(self.api.NonRecordingSpan(self._span_context(span)), self._context())

    def send(
        self, name: str, at: TraceParent, parent: TraceParent | None, start: float, end: float,
        attributes: Mapping[str, Any], *, client: bool = False, links: Sequence[TraceParent] = (),
        error: str | None = None,
    ) -> None:  # fmt: skip
        """Send a span. `error` is the text of its error status; None: it has none."""
        if not at.sampled:
            return
        self._ids.following = at
        kinds = self.api.SpanKind
        span = self._tracer.start_span(
            name, context=self._context() if parent is None else self.context_of(parent),
            kind=kinds.CLIENT if client else kinds.INTERNAL,
            attributes={key: value for key, value in attributes.items() if value is not None},
            links=[self.api.Link(self._span_context(link)) for link in links], start_time=int(start * NANOSECONDS),
        )  # fmt: skip
        if error is not None:
            span.set_status(self.api.Status(self.api.StatusCode.ERROR, error or None))
        span.end(end_time=int(max(start, end) * NANOSECONDS))

    def flush(self, seconds: float) -> None:
        """Send what is buffered, waiting for at most that long."""
        self._provider.force_flush(int(seconds * 1000))

    def _span_context(self, span: TraceParent) -> Any:
        flags = self.api.TraceFlags(1 if span.sampled else 0)
        return self.api.SpanContext(span.trace_id, span.span_id, is_remote=True, trace_flags=flags)
