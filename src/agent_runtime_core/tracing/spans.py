"""Build finished spans from what a trace sink receives, for any tracing system.

A run is a trace. Each execution of it is a span, and so is each step attempt, model call and tool call. Nothing stays
open while a run waits: the execution that resumes it links to the execution before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, NamedTuple, cast

from .._core.event_types import EventType
from .._core.ids import RunTrace, TraceParent, span_id
from .._core.lazy_import import load
from ..interfaces import ErrorInfo

_SCOPE: Final = "agent_runtime_core"
NANOSECONDS: Final = 1_000_000_000


class SpanSender:
    """Hands finished spans to a span processor. It uses a separate tracer provider, never the provider of the process.

    Args:
        processor: An OpenTelemetry span processor.
        resource: Describes this process. If None, as the environment variables of OpenTelemetry say.
        needed_by: Names the sink in the error when the SDK is not installed.

    Raises:
        MissingDependency: The OpenTelemetry SDK is not installed.
    """

    def __init__(self, processor: Any, *, resource: Any = None, needed_by: str) -> None:
        self.api: Any = load("opentelemetry.trace", needed_by=needed_by)
        self._context = cast("Any", load("opentelemetry.context:Context", needed_by=needed_by))
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
        self._parent: tuple[TraceParent | None, Any] = (None, self._context())  # the last parent, of most spans

    def context_of(self, span: TraceParent) -> Any:
        """Return an OpenTelemetry context in which this span is the current span."""
        return self.api.set_span_in_context(self.api.NonRecordingSpan(self._span_context(span)), self._context())

    def send(
        self, name: str, at: TraceParent, parent: TraceParent | None, start: float, end: float,
        attributes: Mapping[str, Any], *, client: bool = False, links: Sequence[TraceParent] = (),
        error: str | None = None,
    ) -> None:  # fmt: skip
        """Send a span. `error` is the text of its error status, or None without an error."""
        if not at.sampled:
            return
        self._ids.following = at
        if parent != self._parent[0]:
            self._parent = (parent, self._context() if parent is None else self.context_of(parent))
        kinds = self.api.SpanKind
        span = self._tracer.start_span(
            name,
            context=self._parent[1],
            kind=kinds.CLIENT if client else kinds.INTERNAL,
            attributes={key: value for key, value in attributes.items() if value is not None},
            links=[self.api.Link(self._span_context(link)) for link in links],
            start_time=int(start * NANOSECONDS),
        )
        if error is not None:
            span.set_status(self.api.Status(self.api.StatusCode.ERROR, error or None))
        span.end(end_time=int(max(start, end) * NANOSECONDS))

    def flush(self, seconds: float) -> None:
        """Send what is buffered, waiting for at most that long."""
        self._provider.force_flush(int(seconds * 1000))

    def _span_context(self, span: TraceParent) -> Any:
        flags = self.api.TraceFlags(1 if span.sampled else 0)
        return self.api.SpanContext(span.trace_id, span.span_id, is_remote=True, trace_flags=flags)


MAX_OPEN: Final = 10_000  # executions of this process that may be open at the same time

Kind = Literal["agent", "chat", "tool", "step", "event"]

_STEP_STARTED, _RUN_STARTED = EventType.STEP_STARTED.value, EventType.RUN_STARTED.value
_STEP_ENDS: Final = frozenset(
    {EventType.STEP_COMPLETED.value, EventType.STEP_FAILED.value, EventType.STEP_RETRYING.value}
)
_ENVELOPE: Final = frozenset({"type", "run_id", "time"})
FAILURES: Final = frozenset({"failed", "timed_out", "dead", "crashed"})
UNKNOWN_TOOL: Final = "unknown_tool"  # `ToolAnswer.error` of a call of a tool that does not exist
OTHER_ERROR: Final = "error"  # the type of an error that is reported without a type
_FINAL: Final = frozenset({"succeeded", "cancelled", "failed", "timed_out", "dead"})


class SpanError(NamedTuple):
    """Why a span failed. `shown` decides what a sink sends of it.

    Attributes:
        kind: The name of the error's class, or a word of this library, such as "timed_out".
        text: The type and the message, which may quote contents.
    """

    kind: str
    text: str


def error_of(error: Any, kind: Any = None) -> SpanError | None:
    """Return the error of a trace.

    Args:
        error: A message, or an error with `type` and `message`.
        kind: The type that belongs to a message. A type is never read from a message.
    """
    if isinstance(error, ErrorInfo):
        error = asdict(error)
    if isinstance(error, Mapping):
        message, kind = str(error.get("message") or error.get("error") or ""), error.get("type") or kind
    else:
        message = str(error or "")
    if not message and not kind:
        return None
    named = str(kind or "")
    type_ = named if named.replace(".", "_").isidentifier() else OTHER_ERROR
    if not message or message == named:
        return SpanError(type_, named)
    return SpanError(type_, message if not named or message.startswith(f"{named}:") else f"{named}: {message}")


class Span(NamedTuple):
    """A finished span.

    Attributes:
        run_id: Its run.
        run: What `start_run` said about the execution.
        at: Its trace and its id.
        parent: The parent span; None for a root.
        kind: What it is about.
        name: Name of the agent, model, tool, step or event.
        start: Seconds since 1970.
        end: Seconds since 1970.
        about: The payload of its event; of an execution, what `start_run` and `end_run` said.
        links: Related spans.
        error: Why it failed. An execution that did not fail may report an error too, such as an execution that is
            retried.
        failed: Whether it failed.
    """

    run_id: str
    run: Mapping[str, Any]
    at: TraceParent
    parent: TraceParent | None
    kind: Kind
    name: str
    start: float
    end: float
    about: Mapping[str, Any]
    links: Sequence[TraceParent] = ()
    error: SpanError | None = None
    failed: bool = False


def shown(span: Span, *, content: bool) -> Span:
    """Return a span as a sink may send it: without `content`, an error is its type.

    The message of an error may quote arguments, results and prompts. This is also true for messages of this library,
    because they contain messages of tools, models and frameworks. The name of a tool that does not exist is a text of
    the model.
    """
    if content or span.error is None:
        return span
    kind = span.error.kind
    invented = span.kind == "tool" and kind == UNKNOWN_TOOL
    return span._replace(name="unknown" if invented else span.name, error=SpanError(kind, kind))


@dataclass
class _Execution:
    """An execution whose end was not reported yet."""

    trace: RunTrace
    run: Mapping[str, Any]
    start: float
    links: Sequence[TraceParent] = ()
    steps: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # the start events of open steps, by step id
    others: int = 0  # spans that are no execution and no step

    def __post_init__(self) -> None:
        self.own: TraceParent = self.trace.execution  # the span of the execution, made once

    @property
    def attempt(self) -> int:
        return self.run.get("attempt") or 1

    def step(self, step_id: str, attempt: Any) -> TraceParent:
        return self.trace.step(step_id, attempt if isinstance(attempt, int) else 1)

    def enclosing(self, step_id: Any) -> TraceParent:
        """Return the span of the open step with that id, else the span of the execution."""
        known = self.steps.get(step_id) if isinstance(step_id, str) else None
        return self.own if known is None else self.step(step_id, known.get("attempt"))

    def another(self) -> TraceParent:
        """Return a span that nothing refers to."""
        self.others += 1
        return self.own._replace(span_id=span_id(f"{self.own.span_id:x}", str(self.others)))

    def span(self, at: TraceParent, parent: TraceParent | None, kind: Kind, name: Any, times: tuple[float, float],
             about: Mapping[str, Any], error: SpanError | None = None) -> Span:  # fmt: skip
        run, named = self.run, str(name or kind)
        return Span(self.trace.run_id, run, at, parent, kind, named, *times, about, (), error, error is not None)

    def ended(self, time: float, about: Mapping[str, Any]) -> Span:
        """Return the span of the execution itself."""
        name, known = str(self.run.get("agent_key") or "agent"), {**self.run, **about}
        outcome = str(about.get("outcome") or "")
        failed = outcome in FAILURES
        error = error_of(about.get("error")) or (SpanError(outcome, outcome) if failed else None)
        span = self.span(self.own, self.trace.parent, "agent", name, (self.start, time), known, error)
        return span._replace(links=self.links, failed=failed)


class SpanBuilder:
    """Builds the spans of one process. Not thread-safe: the tracer calls its sinks from one thread."""

    def __init__(self) -> None:
        self._open: dict[str, _Execution] = {}

    def spans(self, event: Mapping[str, Any]) -> list[Span]:
        """Return the spans that end with this trace.

        Args:
            event: What `TraceSink.trace` receives.
        """
        kind, run_id, time = event["type"], str(event["run_id"]), event["time"]
        payload = event.get("payload") or {name: each for name, each in event.items() if name not in _ENVELOPE}
        if kind == "start_run":
            return self._start(run_id, time, payload)
        if kind == "end_run":
            return self._end(run_id, time, payload)
        execution = self._open.get(run_id) or _Execution(RunTrace(run_id), {}, time)
        if kind == _RUN_STARTED and payload.get("attempt", 1) > execution.attempt:
            return self._retried(run_id, time, payload["attempt"])
        if kind == _STEP_STARTED and "step_id" in payload:
            execution.steps[payload["step_id"]] = {**payload, "time": time}
            return []
        if kind in _STEP_ENDS and "step_id" in payload:
            return [_step_ended(execution, kind, payload, time)]
        if kind == "llm.call":
            return [_call(execution, payload, time, "chat", payload.get("model"))]
        if kind == "tool.done":
            return [_call(execution, payload, time, "tool", payload.get("tool_name"))]
        parent = execution.enclosing(payload.get("step_id"))
        return [execution.span(execution.another(), parent, "event", kind, (time, time), payload)]

    # -- executions

    def _start(self, run_id: str, time: float, run: Mapping[str, Any]) -> list[Span]:
        # The end of this execution was not reported: its process continues, and another process took the run over.
        spans = self._end(run_id, time, {"outcome": "superseded"})
        if len(self._open) >= MAX_OPEN:
            spans += self._end(next(iter(self._open)), time, {"outcome": "not finished"})
        previous = run.get("previous")
        links = []
        if previous is not None:
            links.append(previous["trace"].execution)
            if previous["crashed"] and not spans:  # reported by the execution that resumes the run
                known = {**run, "attempt": (run.get("attempt") or 2) - 1}
                crashed = _Execution(previous["trace"], known, previous["started_at"])
                spans.append(crashed.ended(previous["ended_at"], {"outcome": "crashed"}))
        self._open[run_id] = _Execution(run.get("trace") or RunTrace(run_id), run, time, links)
        return spans

    def _retried(self, run_id: str, time: float, attempt: int) -> list[Span]:
        """Return the span of an attempt that failed and is repeated in the same process."""
        failed = self._open.get(run_id)
        if failed is None:
            return []
        trace = failed.trace._replace(failures=failed.trace.failures + attempt - failed.attempt, resumes=0)
        spans = self._end(run_id, time, {"outcome": "failed"})
        self._open[run_id] = _Execution(trace, {**failed.run, "attempt": attempt}, time, [failed.trace.execution])
        return spans

    def _end(self, run_id: str, time: float, about: Mapping[str, Any]) -> list[Span]:
        execution = self._open.pop(run_id, None)
        if execution is None:
            return []
        outcome = str(about.get("outcome") or "")
        if outcome == "lost":  # the execution that took the run over reports this execution
            return []
        spans = []
        if outcome in _FINAL:  # else the same attempts of the open steps are made again
            for step_id, start in execution.steps.items():
                parent = execution.enclosing(start.get("parent_id"))
                at = execution.step(step_id, start.get("attempt"))
                times = (start["time"], time)
                spans.append(
                    execution.span(
                        at, parent, "step", start.get("step_name"), times, start, SpanError(outcome, outcome)
                    )
                )
        return [*spans, execution.ended(time, about)]


def _step_ended(execution: _Execution, kind: str, payload: Mapping[str, Any], time: float) -> Span:
    step_id = payload["step_id"]
    start = execution.steps.pop(step_id, None) or {"time": time - (payload.get("duration_ms") or 0) / 1000}
    attempt = start.get("attempt") or payload.get("attempt") or payload.get("attempts")
    error = error_of(payload.get("error"), payload.get("error_type"))
    if error is None and kind != EventType.STEP_COMPLETED:
        error = SpanError("failed", "failed")
    return execution.span(
        execution.step(step_id, attempt), execution.enclosing(start.get("parent_id")), "step",
        payload.get("step_name"), (start["time"], time), {**start, **payload, "attempt": attempt}, error,
    )  # fmt: skip


def _call(execution: _Execution, payload: Mapping[str, Any], time: float, kind: Kind, name: Any) -> Span:
    """Return the span of a model call or tool call: the span of its step, or a span inside a step of the user."""
    step_id, start, end = payload.get("step_id"), payload.get("started_at"), payload.get("ended_at")
    if isinstance(step_id, str) and step_id not in execution.steps:
        at, parent = execution.step(step_id, payload.get("attempt")), execution.enclosing(payload.get("parent_id"))
    else:
        at, parent = execution.another(), execution.enclosing(step_id)
    times = (time if start is None else start, time if end is None else end)
    error = payload.get("error") and error_of(payload["error"], payload.get("error_type"))
    return execution.span(at, parent, kind, name, times, payload, error or None)
