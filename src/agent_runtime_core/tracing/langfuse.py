"""A trace sink that sends runs to Langfuse, with their model calls and tools."""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from .._core.clock import SYSTEM, Clock
from .._core.event_types import EventType
from .._core.lazy_import import load
from .._core.validation import redacted
from ..config import get_config
from ..errors import NotConfigured
from ..interfaces import TraceSink
from .conventions import encodable
from .spans import Span, SpanBuilder, SpanSender, shown

LONGEST = 200_000  # characters of an input or output that are sent
BATCH = 100  # spans in a request; with LONGEST it keeps below the exporter's limit of 64 MiB
SEND_SECONDS = 2  # for one request; a server that does not answer must not hold up the end of the process
FLUSH_SECONDS = 1.5  # less than the tracer waits for its sinks at exit
CLOUD = "https://cloud.langfuse.com"
METADATA = 60  # keys; a span with more than 128 attributes of all kinds loses the first attributes
SHORT = 200  # characters that Langfuse allows in the attributes of a trace

#: Events with the same information as a step, a generation, a tool or the run itself.
_SHOWN_OTHERWISE = frozenset(each.value for each in EventType) - {
    EventType.RUN_RESUMED.value,
    EventType.PROGRESS_UPDATE.value,
}
_FAILURES = frozenset({"failed", "timed_out", "dead"})
_ODD = frozenset({"cancelled", "superseded"})  # outcomes of executions that neither succeeded nor failed
_INLINE = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,([A-Za-z0-9+/=_-]{64,})")


class LangfuseTraceSink(TraceSink):
    """Sends runs to Langfuse (version 5 of its package).

        runner = AgentRunner(trace_sinks=[LangfuseTraceSink(content=True)])

    Each run is one trace, even if it is resumed. Each execution of it adds an "agent" observation, with a "span" for
    each step, a "generation" for each model call and a "tool" for each tool call. Other events, such as an agent's own,
    are "event" observations. The runs of a conversation share its id as their session.

    Args:
        public_key: By default the setting langfuse_public_key, else Langfuse's own variable.
        secret_key: By default the setting langfuse_secret_key, else Langfuse's own variable.
        host: By default the setting langfuse_host, else Langfuse's own variable.
        client: What `client` returns, instead of a new Langfuse client. The sink itself sends without a client.
        environment: The environment of the traces, by default LANGFUSE_TRACING_ENVIRONMENT.
        content: Whether to send inputs, outputs and event payloads, by default the setting langfuse_content. A file in
            a message is sent as its type and size; other texts are cut at 200,000 characters.
        clock: Source of time, for tests.

    Raises:
        NotConfigured: There is no key.
        MissingDependency: The langfuse package is not installed.
    """

    #: The service, so that each service gets a run only once.
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
        public, secret = _keys(public_key, secret_key)
        self._host = (host or get_config().langfuse_host or _variable("HOST", "BASE_URL") or CLOUD).rstrip("/")
        package: Any = load("langfuse:Langfuse", needed_by="LangfuseTraceSink")
        self._create_trace_id = package.create_trace_id
        # A closure, because an attribute would show the secret in vars().
        self._new_client: Callable[[], Any] = lambda: package(
            # It sends no spans: with a tracer provider it would replace the provider of the process.
            public_key=public, secret_key=secret, base_url=self._host, tracing_enabled=False,
        )  # fmt: skip
        self._client = client
        self._environment = environment or os.environ.get("LANGFUSE_TRACING_ENVIRONMENT")
        self.content: bool = get_config().langfuse_content if content is None else content
        self._clock = clock
        self._builder = SpanBuilder()
        self._sender = SpanSender(_processor(f"{public}:{secret}", self._host), needed_by="LangfuseTraceSink")

    @property
    def client(self) -> Any:
        """A Langfuse client with the same keys, for scores, prompts and the like; created at the first use."""
        if self._client is None:
            self._client = self._new_client()
        return self._client

    # -- called by the tracer

    def trace(self, event: dict[str, Any]) -> None:  # type: ignore[override] # the tracer awaits only what is awaitable
        """Send the observations that end with this event."""
        for span in self._builder.spans(event):
            if span.kind != "event" or span.name not in _SHOWN_OTHERWISE:
                self._send(span)

    def flush(self) -> None:
        """Send finished observations and wait for the reply, for at most 1.5 seconds."""
        self._sender.flush(FLUSH_SECONDS)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(host={redacted(self._host)!r})"

    # -- observations

    def _send(self, span: Span) -> None:
        span = shown(span, content=self.content)
        trace_id = int(self._create_trace_id(seed=span.run_id), 16)
        type_, own = _OBSERVATIONS[span.kind]
        attributes = {
            "langfuse.observation.type": type_,
            "langfuse.trace.name": _short(span.run.get("agent_key") or None),
            "langfuse.environment": self._environment,
            "session.id": _short(span.run.get("conversation_id")),
            **own(span),
            **self._contents(span),
        }
        level, message = self._level(span)
        if level:
            attributes["langfuse.observation.level"] = level
            attributes["langfuse.observation.status_message"] = message
        parent = None if span.kind == "agent" or span.parent is None else span.parent._replace(trace_id=trace_id)
        self._sender.send(
            encodable(span.name), span.at._replace(trace_id=trace_id, sampled=True), parent, span.start, span.end,
            attributes, error=message if level == "ERROR" else None,
        )  # fmt: skip

    def _level(self, span: Span) -> tuple[str, str]:
        """Return the level of an observation and the reason for it; both are empty for a success."""
        outcome = str(span.about.get("outcome") or "") if span.kind == "agent" else ""
        if span.error is None and outcome not in _ODD:
            return "", ""
        message = outcome if span.error is None else span.error.text
        is_warning = outcome not in _FAILURES if span.kind == "agent" else "retry_delay" in span.about
        return "WARNING" if is_warning else "ERROR", _text(message)

    def _contents(self, span: Span) -> dict[str, str]:
        if not self.content:
            return {}
        about = span.about
        values: dict[str, Any] = {name: about.get(name) for name in ("input", "output")}
        if span.kind == "event":
            values = {"input": about}
        elif span.kind == "chat":
            values["model.parameters"] = about.get("model_parameters") or None
        return {
            f"langfuse.observation.{name}": _text(value if isinstance(value, str) else _json(value))
            for name, value in values.items()
            if value is not None
        }


def _keys(public_key: str | None, secret_key: str | None) -> tuple[str, str]:
    config = get_config()
    public = public_key or config.langfuse_public_key or os.environ.get("LANGFUSE_PUBLIC_KEY")
    secret = secret_key or config.langfuse_secret_key or os.environ.get("LANGFUSE_SECRET_KEY")
    if public and secret:
        return public, secret
    lacking = [name for name, key in (("public_key", public), ("secret_key", secret)) if not key]
    raise NotConfigured(
        f"LangfuseTraceSink has no {' and no '.join(lacking)}. Pass "
        + " and ".join(
            f"{name}=, configure(langfuse_{name}=...) or AGENT_RUNTIME_LANGFUSE_{name.upper()}" for name in lacking
        )
    )


def _variable(*names: str) -> str | None:
    return next((found for name in names if (found := os.environ.get(f"LANGFUSE_{name}"))), None)


def _processor(keys: str, host: str) -> Any:
    """Return a span processor that sends to the OpenTelemetry endpoint of Langfuse."""
    make: Any = load(
        "opentelemetry.exporter.otlp.proto.http.trace_exporter:OTLPSpanExporter", needed_by="LangfuseTraceSink"
    )
    batch: Any = load("opentelemetry.sdk.trace.export:BatchSpanProcessor", needed_by="LangfuseTraceSink")
    basic = base64.b64encode(keys.encode()).decode()
    headers = {"Authorization": f"Basic {basic}", "x-langfuse-ingestion-version": "4"}
    exporter = make(f"{host}/api/public/otel/v1/traces", headers=headers, timeout=SEND_SECONDS)
    return batch(exporter, max_export_batch_size=BATCH)


def _agent(span: Span) -> dict[str, Any]:
    about = span.about
    details = {"run_id": span.run_id, "agent_key": span.name, "attempt": about.get("attempt")}
    known = {"outcome": about.get("outcome"), "usage": about.get("usage") or None}
    if about.get("tenant"):  # else the metadata of the application may have that name
        known["tenant"] = about["tenant"]
    return _described(details | known | _mapping(about.get("metadata")) | details | known)


def _generation(span: Span) -> dict[str, Any]:
    call = span.about
    model, cost = encodable(str(call.get("model") or "")), call.get("cost_usd")
    return {
        "langfuse.observation.model.name": model or None,
        "langfuse.observation.model.parameters": _json(_counts(call.get("model_parameters")) or None),
        "langfuse.observation.usage_details": _json(_usage(_mapping(call.get("usage"))) or None),
        "langfuse.observation.cost_details": None if cost is None else _json({"total": cost}),
        **_described({"step_id": call.get("step_id"), "provider": call.get("provider")}),
    }


def _counts(parameters: Any) -> dict[str, Any]:
    """Return the parameters that are numbers. Texts and schemas may quote contents."""
    return {name: value for name, value in _mapping(parameters).items() if isinstance(value, int | float)}


def _with(*names: str) -> Callable[[Span], dict[str, Any]]:
    return lambda span: _described({name: span.about.get(name) for name in names})


#: The type of the observation for a kind of span, and its attributes.
_OBSERVATIONS: Mapping[str, tuple[str, Callable[[Span], dict[str, Any]]]] = {
    "agent": ("agent", _agent),
    "chat": ("generation", _generation),
    "tool": ("tool", _with("step_id", "tool_call_id")),
    "step": ("span", _with("step_id", "attempt", "step_index")),
    "event": ("event", _with("step_id")),
}


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


def _described(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the attributes for metadata of an observation; Langfuse expects their values as JSON."""
    items = [(name, value) for name, value in metadata.items() if value is not None][:METADATA]
    return {f"langfuse.observation.metadata.{encodable(str(name))}": _text(_json(value)) for name, value in items}


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _short(value: Any) -> str | None:
    return None if value is None else encodable(str(value))[:SHORT]


def _json(value: Any) -> Any:
    return None if value is None else json.dumps(value, ensure_ascii=False, skipkeys=True, default=str)


def _text(text: str) -> str:
    """Return a text as it is sent: without files, not too long, and valid UTF-8."""
    if "base64," in text:
        text = _INLINE.sub(lambda found: f"data:{found[1]} ({len(found[2])} characters left out)", text)
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}… ({len(text) - LONGEST} more characters)"
    return encodable(text)
