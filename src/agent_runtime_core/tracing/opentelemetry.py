"""A trace sink that sends the spans of runs with OpenTelemetry."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

from .._core.ids import TraceParent, parsed
from .._core.lazy_import import load
from .._core.validation import Shown, must
from ..interfaces import TraceSink
from .spans import Span, SpanBuilder, SpanSender

FLUSH_SECONDS: Final = 1.5  # less than the tracer waits for its sinks at exit
LONGEST: Final = 64 * 1024  # characters of a content attribute

#: Attribute names of the GenAI conventions (github.com/open-telemetry/semantic-conventions-genai, "Development", as of
#: November 2026). The constants of the Python package are deprecated, so the names are strings here.
SETTINGS: Final = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
USAGE: Final = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "cache_write_tokens": "gen_ai.usage.cache_creation.input_tokens",
    "reasoning_tokens": "gen_ai.usage.reasoning.output_tokens",
}
OPERATION: Final = "gen_ai.operation.name"
AGENT: Final = "invoke_agent"
WORKFLOW: Final = "invoke_workflow"


class OpenTelemetrySink(TraceSink):
    """Sends each execution of a run, step, model call and tool call as a span, with the GenAI attributes.

        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        runner = AgentRunner.open("agents.db", trace_sinks=[OpenTelemetrySink(OTLPSpanExporter())])

    Your own spans inside a run are children of the span of their step. A run that is submitted inside a span belongs to
    the trace of that span. The sink does not change the tracer provider of the process.

    Args:
        exporter: Sends batches of spans. None: the OTLP exporter for HTTP, with the settings of its environment
            variables.
        processor: A span processor to use instead of a batch of our own.
        resource: Describes this process. None: as OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say.
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
        self._content = content

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
        """Make this span the current one."""
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
        make = _ATTRIBUTES.get(span.kind)
        if make is None:
            return
        name, attributes = make(span)
        if self._content:
            attributes |= _contents(span)
        error = None
        if span.error:
            kind = _error_type(span.error)
            attributes["error.type"] = kind
            error = span.error[:LONGEST] if self._content else kind
        self._sender.send(
            _encodable(name), span.at, span.parent, span.start, span.end, attributes, client=span.kind == "chat",
            links=span.links, error=error,
        )  # fmt: skip


def _default_exporter() -> Any:
    make: Any = load(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter:OTLPSpanExporter",
        needed_by="OpenTelemetrySink without exporter=",
    )
    return make()


def _agent(span: Span) -> tuple[str, dict[str, Any]]:
    about = span.about
    operation = about.get("operation") or AGENT
    attributes = {
        OPERATION: operation,
        "gen_ai.agent.name" if operation == AGENT else "gen_ai.workflow.name": span.name,
        "gen_ai.conversation.id": _text(about.get("conversation_id")),
        "agent_runtime.run_id": span.run_id,
        "agent_runtime.tenant": _text(about.get("tenant")),
        "agent_runtime.attempt": about.get("attempt"),
        "agent_runtime.outcome": _text(about.get("outcome")),
    }
    return f"{operation} {span.name}", attributes | _usage(about.get("usage"))


def _chat(span: Span) -> tuple[str, dict[str, Any]]:
    about = span.about
    settings = about.get("model_parameters") or {}
    attributes = {
        OPERATION: "chat",
        "gen_ai.provider.name": _text(about.get("provider")),
        "gen_ai.request.model": _text(settings.get("model") or about.get("model")),
        "gen_ai.response.model": None if about.get("error") else _text(about.get("model")),
        "agent_runtime.cost_usd": _number(about.get("cost_usd")),
        "agent_runtime.step.id": _text(about.get("step_id")),
    }
    attributes |= {name: _number(settings.get(key)) for key, name in SETTINGS.items()}
    return f"chat {span.name}", attributes | _usage(about.get("usage"))


def _tool(span: Span) -> tuple[str, dict[str, Any]]:
    about = span.about
    attributes = {
        OPERATION: "execute_tool",
        "gen_ai.tool.name": span.name,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": _text(about.get("tool_call_id")),
        "agent_runtime.step.id": _text(about.get("step_id")),
    }
    return f"execute_tool {span.name}", attributes


def _step(span: Span) -> tuple[str, dict[str, Any]]:
    about = span.about
    attributes: dict[str, Any] = {
        "agent_runtime.step.name": span.name,
        "agent_runtime.step.id": _text(about.get("step_id")),
        "agent_runtime.step.attempt": about.get("attempt") or about.get("attempts"),
    }
    if span.name == "plan" and span.run.get("operation") == WORKFLOW:
        attributes[OPERATION] = "plan"
    return span.name, attributes


#: The name and the attributes of a span, by its kind. Other events are no spans.
_ATTRIBUTES: Final[Mapping[str, Callable[[Span], tuple[str, dict[str, Any]]]]] = {
    "agent": _agent, "chat": _chat, "tool": _tool, "step": _step,
}  # fmt: skip


def _usage(usage: Any) -> dict[str, Any]:
    given = usage if isinstance(usage, Mapping) else {}
    counts = {name: _number(given.get(key)) for key, name in USAGE.items()}
    cost = _number(given.get("cost_usd"))
    return counts if cost is None else counts | {"agent_runtime.cost_usd": cost}


def _contents(span: Span) -> dict[str, Any]:
    about = span.about
    names = {
        "agent": ("gen_ai.input.messages", "gen_ai.output.messages"),
        "chat": ("gen_ai.input.messages", "gen_ai.output.messages"),
        "tool": ("gen_ai.tool.call.arguments", "gen_ai.tool.call.result"),
    }.get(span.kind)
    if names is None:
        return {}
    return {name: _json(about.get(key)) for name, key in zip(names, ("input", "output"), strict=True)}


def _json(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, skipkeys=True, default=str)
    return _encodable(text[:LONGEST])


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return None if value is None else _encodable(str(value)[:LONGEST])


def _encodable(text: str) -> str:
    """Return the text without lone surrogates, with which a whole batch could not be sent."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _error_type(reason: str) -> str:
    """Return the type of an error, without its message, which may quote contents."""
    kind = reason.partition(":")[0]
    return kind if kind.replace(".", "_").isidentifier() else "error"
