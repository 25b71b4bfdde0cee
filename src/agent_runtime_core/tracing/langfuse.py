"""Traces of runs in Langfuse: a trace for each run, with its model calls and its tools."""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import UUID

from .._core.clock import SYSTEM, Clock
from .._core.event_types import EventType
from .._core.lazy_import import load
from ..config import get_config
from ..errors import NotConfigured
from ..interfaces import ErrorInfo, TraceSink

LONGEST = 200_000  # characters of an input or output that are sent
BATCH = 100  # spans in a request; with LONGEST it keeps below the exporter's limit of 64 MiB
OPEN = 10_000  # runs whose end is waited for
METADATA = 60  # keys; beyond 128 attributes of all kinds a span loses its first ones
SHORT = 200  # characters Langfuse allows in the attributes of a trace

#: Events that say what a generation, a tool or the run itself says too, or how far it is.
_SHOWN_OTHERWISE = frozenset(each.value for each in EventType) - {
    EventType.RUN_RESUMED.value,
    EventType.STEP_FAILED.value,
    EventType.STEP_RETRYING.value,
    EventType.PROGRESS_UPDATE.value,
}
_WARNINGS = frozenset({EventType.STEP_FAILED.value, EventType.STEP_RETRYING.value})
_FAILURES = frozenset({"failed", "timed_out", "dead"})
_INLINE = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,([A-Za-z0-9+/=_-]{64,})")


class _Root(NamedTuple):
    """The observation that stands for one claim of a run."""

    span: Any
    context: Any
    trace: dict[str, Any]


class LangfuseTraceSink(TraceSink):
    """Sends runs to Langfuse (the package's version 5).

    A run is a trace of its own, the same one when it is resumed; each process that takes it up adds an "agent"
    observation, with a "generation" for each model call and a "tool" for each tool below it. Runs of a
    conversation share its id as their session. What has no observation of its own, as an agent's own events, is
    an "event". Inputs, outputs and event payloads are sent only with `content=True`, or by the setting
    langfuse_content: a file within a message as its kind and size, other texts cut at 200,000 characters.

    What is not given comes from the configuration (langfuse_public_key, langfuse_secret_key, langfuse_host), then
    from Langfuse's own variables. There is one Langfuse client for each public key in a process: a second sink
    with that key sends where the first one does. `client` is a Langfuse client of your own, with its own settings.

    NotConfigured: there is no key. MissingDependency: the package is not installed.
    """

    #: Whom it sends to, so that nobody is told twice.
    service: str = "langfuse"

    def __init__(
        self,
        public_key: str | None = None,
        secret_key: str | None = None,
        host: str | None = None,
        *,
        client: Any = None,
        environment: str | None = None,
        content: bool | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        #: The Langfuse client, for scores, prompts and the like.
        self.client: Any = client if client is not None else _connect(public_key, secret_key, host)
        self._tracer: Any = self.client._otel_tracer
        self._otel: Any = load("opentelemetry.trace", needed_by="LangfuseTraceSink")
        self._environment = environment or os.environ.get("LANGFUSE_TRACING_ENVIRONMENT")
        self._content = get_config().langfuse_content if content is None else content
        self._clock = clock
        self._runs: dict[UUID, _Root] = {}

    # -- what a tracer calls

    def start_run(self, run_id: UUID, metadata: dict[str, Any]) -> None:
        before = self._runs.pop(run_id, None)
        if before is not None:
            self._end(before, metadata, level="WARNING", status_message="taken up again before it was let go")
        elif len(self._runs) >= OPEN:
            self._end(self._runs.pop(next(iter(self._runs))), metadata)
        agent = str(metadata.get("agent_key") or "agent")
        trace = _present(
            {
                "langfuse.trace.name": _short(agent),
                "langfuse.environment": self._environment,
                "session.id": _short(metadata.get("conversation_id")),
            }
        )
        context = self._trace_of(run_id)
        told = {"run_id": str(run_id), "agent_key": agent, "attempt": metadata.get("attempt")}
        attributes = {
            **trace,
            # Its parent stands for the trace and is never sent.
            "langfuse.internal.as_root": True,
            **_described(told | _mapping(metadata.get("metadata")) | told),
            **self._contents(input=metadata.get("input")),
        }
        span = self._span(context, agent, "agent", attributes, metadata.get("time"))
        self._runs[run_id] = _Root(span, self._otel.set_span_in_context(span, context), trace)

    def log_event(self, run_id: UUID, event_type: str, payload: dict[str, Any]) -> None:
        if event_type == "llm.call":
            self._generation(run_id, payload)
        elif event_type == "tool.done":
            self._tool(run_id, payload)
        elif event_type not in _SHOWN_OTHERWISE:
            level = {"level": "WARNING", "status_message": _reason(payload)} if event_type in _WARNINGS else {}
            told = _described({"step_id": payload.get("step_id")}) | self._contents(input=payload)
            now = self._clock.wall()
            self._observe(run_id, event_type, "event", told, {"started_at": now, "ended_at": now}, **level)

    def end_run(self, run_id: UUID, outcome: str, metadata: dict[str, Any] | None = None) -> None:
        root = self._runs.pop(run_id, None)
        if root is None:
            return
        about = metadata or {}
        root.span.set_attributes(
            _described({"outcome": outcome, "usage": about.get("usage") or None})
            | self._contents(output=about.get("output"))
        )
        message = _reason(about.get("error"))
        if outcome in _FAILURES:
            self._end(root, about, level="ERROR", status_message=message or outcome)
        elif message or outcome == "cancelled":
            self._end(root, about, level="WARNING", status_message=message or outcome)
        else:
            self._end(root, about)

    def flush(self) -> None:
        """Send what is finished and wait for the answer, which takes some seconds where the server is away."""
        self.client.flush()

    # -- observations

    def _generation(self, run_id: UUID, call: dict[str, Any]) -> None:
        model = _encodable(str(call.get("model") or ""))
        cost = call.get("cost_usd")
        attributes = _present(
            {
                "langfuse.observation.model.name": model or None,
                "langfuse.observation.model.parameters": _json(call.get("model_parameters") or None),
                "langfuse.observation.usage_details": _json(_usage(_mapping(call.get("usage"))) or None),
                "langfuse.observation.cost_details": None if cost is None else _json({"total": cost}),
                **_described({"step_id": call.get("step_id"), "provider": call.get("provider")}),
                **self._contents(input=call.get("input"), output=call.get("output")),
            }
        )
        self._observe(run_id, model or "llm", "generation", attributes, call, **_level(call.get("error")))

    def _tool(self, run_id: UUID, call: dict[str, Any]) -> None:
        told = _described({"step_id": call.get("step_id"), "tool_call_id": call.get("tool_call_id")})
        told |= self._contents(input=call.get("input"), output=call.get("output"))
        name = str(call.get("tool_name") or "tool")
        # Why it failed is what the model is told: it repeats arguments, and what the tool says is its result.
        error = call.get("error") and (call["error"] if self._content else "the call failed")
        self._observe(run_id, name, "tool", told, call, **_level(error))

    def _observe(
        self, run_id: UUID, name: str, kind: str, attributes: dict[str, Any], times: Mapping[str, Any], **level: str
    ) -> None:
        root = self._runs.get(run_id)
        context, trace = (self._trace_of(run_id), {}) if root is None else (root.context, root.trace)
        span = self._span(context, name, kind, trace | attributes, times.get("started_at"))
        self._finish(span, times.get("ended_at"), **level)

    def _span(self, context: Any, name: str, kind: str, attributes: dict[str, Any], started: Any) -> Any:
        return self._tracer.start_span(
            _encodable(name),
            context=context,
            attributes={"langfuse.observation.type": kind, **attributes},
            start_time=self._nanoseconds(started),
        )

    def _end(self, root: _Root, about: Mapping[str, Any], **level: str) -> None:
        self._finish(root.span, about.get("time"), **level)

    def _finish(self, span: Any, ended: Any, *, level: str = "", status_message: str = "") -> None:
        if level:
            text = _text(status_message)
            span.set_attributes(
                {
                    "langfuse.observation.level": level,
                    "langfuse.observation.status_message": text,
                }
            )
            if level == "ERROR":
                span.set_status(self._otel.Status(self._otel.StatusCode.ERROR, text))
        span.end(end_time=self._nanoseconds(ended))

    def _trace_of(self, run_id: UUID) -> Any:
        """The context of what has no parent in the trace of this run."""
        trace = int(self.client.create_trace_id(seed=str(run_id)), 16)
        # Only the trace id counts; its first half makes the same parent for every claim of the run.
        about = self._otel.SpanContext(trace, trace >> 64, is_remote=False, trace_flags=self._otel.TraceFlags(1))
        return self._otel.set_span_in_context(self._otel.NonRecordingSpan(about))

    def _contents(self, **values: Any) -> dict[str, str]:
        if not self._content:
            return {}
        return {
            f"langfuse.observation.{name}": _text(value if isinstance(value, str) else _json(value))
            for name, value in values.items()
            if value is not None
        }

    def _nanoseconds(self, seconds: Any) -> int:
        told = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        return int((seconds if told else self._clock.wall()) * 1_000_000_000)


def _connect(public_key: str | None, secret_key: str | None, host: str | None) -> Any:
    config = get_config()
    public = public_key or config.langfuse_public_key or os.environ.get("LANGFUSE_PUBLIC_KEY")
    secret = secret_key or config.langfuse_secret_key or os.environ.get("LANGFUSE_SECRET_KEY")
    if not public or not secret:
        lacking = [name for name, key in (("public_key", public), ("secret_key", secret)) if not key]
        raise NotConfigured(
            f"LangfuseTraceSink has no {' and no '.join(lacking)}: "
            + ", ".join(
                f"configure(langfuse_{name}=…) or set AGENT_RUNTIME_LANGFUSE_{name.upper()}" for name in lacking
            )
        )
    make: Any = load("langfuse:Langfuse", needed_by="LangfuseTraceSink")
    provider: Any = load("opentelemetry.sdk.trace:TracerProvider", needed_by="LangfuseTraceSink")
    client = make(
        public_key=public,
        secret_key=secret,
        base_url=host or config.langfuse_host,
        # Without one of its own it would make itself the whole process's.
        tracer_provider=(own := provider(shutdown_on_exit=False)),
        flush_at=BATCH,
    )
    resources = getattr(client, "_resources", None)
    if resources is not None and resources.tracer_provider is own:
        # At exit it would wait for a server that is away, however long that takes: flush() is the tracer's to call.
        atexit.unregister(resources.shutdown)
    return client


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Langfuse's counts, which do not include each other as ours do."""
    count = {name: value for name, value in usage.items() if isinstance(value, int) and not isinstance(value, bool)}
    parts = {
        "cache_read_input_tokens": count.get("cached_tokens", 0),
        "cache_creation_input_tokens": count.get("cache_write_tokens", 0),
        "output_reasoning_tokens": count.get("reasoning_tokens", 0),
    }
    details = {name: value for name, value in parts.items() if value}
    read, written, reasoned = parts.values()
    if "prompt_tokens" in count:
        details["input"] = max(count["prompt_tokens"] - read - written, 0)
    if "completion_tokens" in count:
        details["output"] = max(count["completion_tokens"] - reasoned, 0)
    if "total_tokens" in count:
        details["total"] = count["total_tokens"]
    return details


def _level(error: Any) -> dict[str, str]:
    return {} if not error else {"level": "ERROR", "status_message": _reason(error)}


def _reason(error: Any) -> str:
    """An error as one line, however it was told."""
    if isinstance(error, ErrorInfo):
        error = dataclasses.asdict(error)
    if not isinstance(error, Mapping):
        return str(error or "")
    message = str(error.get("message") or error.get("error") or "")
    kind = str(error.get("type") or "")
    return f"{kind}: {message}" if kind and message else kind or message


def _described(told: Mapping[str, Any]) -> dict[str, str]:
    """Metadata of an observation; its values are JSON to Langfuse."""
    kept = [(name, value) for name, value in told.items() if value is not None][:METADATA]
    return {f"langfuse.observation.metadata.{_encodable(str(name))}": _text(_json(value)) for name, value in kept}


def _present(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _short(value: Any) -> str | None:
    return None if value is None else _encodable(str(value))[:SHORT]


def _json(value: Any) -> Any:
    return None if value is None else json.dumps(value, ensure_ascii=False, skipkeys=True, default=str)


def _text(text: str) -> str:
    """A text as it is sent: no files in it, not too long, and in UTF-8."""
    if "base64," in text:
        text = _INLINE.sub(lambda found: f"data:{found[1]} ({len(found[2])} characters left out)", text)
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}… ({len(text) - LONGEST} more characters)"
    return _encodable(text)


def _encodable(text: str) -> str:
    """A lone surrogate costs an attribute, and in the name of a span its whole batch."""
    return text.encode("utf-8", "replace").decode("utf-8")
