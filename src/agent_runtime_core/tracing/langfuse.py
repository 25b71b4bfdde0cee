"""A trace sink that sends runs to Langfuse, with their model calls and tools."""

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
OPEN = 10_000  # runs that may be open at the same time
METADATA = 60  # keys; a span with more than 128 attributes of all kinds loses the first ones
SHORT = 200  # characters that Langfuse allows in the attributes of a trace

#: Events with the same information as a generation, a tool or the run itself, or with progress only.
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
    """The observation for one claim of a run."""

    span: Any
    context: Any
    trace: dict[str, Any]


class LangfuseTraceSink(TraceSink):
    """Sends runs to Langfuse (version 5 of its package).

        runner = AgentRunner(trace_sinks=[LangfuseTraceSink(content=True)])

    Each run is one trace, also when it is resumed. Each process that executes it adds an "agent" observation, with a
    "generation" for each model call and a "tool" for each tool call. Other events, such as an agent's own, are "event"
    observations. The runs of a conversation share its id as their session.

    Args:
        public_key: By default the setting langfuse_public_key, else Langfuse's own variable.
        secret_key: By default the setting langfuse_secret_key, else Langfuse's own variable.
        host: By default the setting langfuse_host, else Langfuse's own variable.
        client: A Langfuse client to use, instead of a new one.
        environment: The environment of the traces, by default LANGFUSE_TRACING_ENVIRONMENT.
        content: Whether to send inputs, outputs and event payloads, by default the setting langfuse_content. A file in
            a message is sent as its type and size; other texts are cut at 200,000 characters.
        clock: Source of time, for tests.

    A process has one Langfuse client for each public key: a second sink with that key sends to the server of the first.

    Raises:
        NotConfigured: There is no key.
        MissingDependency: The langfuse package is not installed.
    """

    #: The service, so that each one gets a run only once.
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

    # -- called by the tracer

    def start_run(self, run_id: UUID, metadata: dict[str, Any]) -> None:
        previous = self._runs.pop(run_id, None)
        if previous is not None:
            self._end(
                previous, metadata, level="WARNING", status_message="claimed again before the previous execution ended"
            )
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
        details = {"run_id": str(run_id), "agent_key": agent, "attempt": metadata.get("attempt")}
        attributes = {
            **trace,
            # Its parent only carries the trace id and is never sent.
            "langfuse.internal.as_root": True,
            **_described(details | _mapping(metadata.get("metadata")) | details),
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
            attributes = _described({"step_id": payload.get("step_id")}) | self._contents(input=payload)
            now = self._clock.wall()
            self._observe(run_id, event_type, "event", attributes, {"started_at": now, "ended_at": now}, **level)

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
        """Send finished observations and wait for the reply: some seconds if the server is not available."""
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
        attributes = _described({"step_id": call.get("step_id"), "tool_call_id": call.get("tool_call_id")})
        attributes |= self._contents(input=call.get("input"), output=call.get("output"))
        name = str(call.get("tool_name") or "tool")
        # The error text may repeat arguments and results, so without `content` it is not sent.
        error = call.get("error") and (call["error"] if self._content else "the call failed")
        self._observe(run_id, name, "tool", attributes, call, **_level(error))

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
        """Return the context of observations without a parent in the trace of this run."""
        trace = int(self.client.create_trace_id(seed=str(run_id)), 16)
        # Only the trace id matters; its first half is the parent id, the same one for every claim of the run.
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
        is_time = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        return int((seconds if is_time else self._clock.wall()) * 1_000_000_000)


def _connect(public_key: str | None, secret_key: str | None, host: str | None) -> Any:
    config = get_config()
    public = public_key or config.langfuse_public_key or os.environ.get("LANGFUSE_PUBLIC_KEY")
    secret = secret_key or config.langfuse_secret_key or os.environ.get("LANGFUSE_SECRET_KEY")
    if not public or not secret:
        lacking = [name for name, key in (("public_key", public), ("secret_key", secret)) if not key]
        raise NotConfigured(
            f"LangfuseTraceSink has no {' and no '.join(lacking)}. Pass "
            + " and ".join(
                f"{name}=, configure(langfuse_{name}=...) or AGENT_RUNTIME_LANGFUSE_{name.upper()}" for name in lacking
            )
        )
    make: Any = load("langfuse:Langfuse", needed_by="LangfuseTraceSink")
    provider: Any = load("opentelemetry.sdk.trace:TracerProvider", needed_by="LangfuseTraceSink")
    client = make(
        public_key=public,
        secret_key=secret,
        base_url=host or config.langfuse_host,
        # Without a provider of its own the client would replace the one of the process.
        tracer_provider=(own := provider(shutdown_on_exit=False)),
        flush_at=BATCH,
    )
    resources = getattr(client, "_resources", None)
    if resources is not None and resources.tracer_provider is own:
        # At exit the client would wait without limit for a server that is down. The tracer calls flush() instead.
        atexit.unregister(resources.shutdown)
    return client


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """Return the counts as Langfuse expects them: they do not include each other."""
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
    """Return an error, in any form, as one line."""
    if isinstance(error, ErrorInfo):
        error = dataclasses.asdict(error)
    if not isinstance(error, Mapping):
        return str(error or "")
    message = str(error.get("message") or error.get("error") or "")
    kind = str(error.get("type") or "")
    return f"{kind}: {message}" if kind and message else kind or message


def _described(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the attributes for metadata of an observation; Langfuse expects their values as JSON."""
    items = [(name, value) for name, value in metadata.items() if value is not None][:METADATA]
    return {f"langfuse.observation.metadata.{_encodable(str(name))}": _text(_json(value)) for name, value in items}


def _present(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _short(value: Any) -> str | None:
    return None if value is None else _encodable(str(value))[:SHORT]


def _json(value: Any) -> Any:
    return None if value is None else json.dumps(value, ensure_ascii=False, skipkeys=True, default=str)


def _text(text: str) -> str:
    """Return a text as it is sent: without files, not too long, and valid UTF-8."""
    if "base64," in text:
        text = _INLINE.sub(lambda found: f"data:{found[1]} ({len(found[2])} characters left out)", text)
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}… ({len(text) - LONGEST} more characters)"
    return _encodable(text)


def _encodable(text: str) -> str:
    """Return the text without lone surrogates: one drops an attribute, or in a span's name the whole batch."""
    return text.encode("utf-8", "replace").decode("utf-8")
