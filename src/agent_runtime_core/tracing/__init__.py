"""Trace sinks by name, and the tracer that calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._core.lazy_import import lazily, pick
from ..config import get_config

if TYPE_CHECKING:
    from ..interfaces import TraceSink
    from .langfuse import LangfuseTraceSink
    from .logs import JsonFormatter, RunFields
    from .opentelemetry import OpenTelemetrySink
    from .prometheus import PrometheusSink
    from .tracer import NoopTraceSink, Tracer

__all__ = [
    "TRACING",
    "JsonFormatter",
    "LangfuseTraceSink",
    "NoopTraceSink",
    "OpenTelemetrySink",
    "PrometheusSink",
    "RunFields",
    "TraceSink",
    "Tracer",
    "get_trace_sink",
]

TRACING = {
    "noop": ".tracer:NoopTraceSink",
    "langfuse": ".langfuse:LangfuseTraceSink",
    "opentelemetry": ".opentelemetry:OpenTelemetrySink",
    "prometheus": ".prometheus:PrometheusSink",
}

_LAZY = {
    "JsonFormatter": ".logs:JsonFormatter",
    "RunFields": ".logs:RunFields",
    "TraceSink": "..interfaces:TraceSink",
    "Tracer": ".tracer:Tracer",
} | {dotted.partition(":")[2]: dotted for dotted in TRACING.values()}


def get_trace_sink(backend: str | None = None, **options: Any) -> TraceSink:
    """Create a trace sink.

    Args:
        backend: "noop", "langfuse", "opentelemetry", "prometheus" or `"their_package.module:Class"`. None for the
            configured tracing_backend, else "langfuse" if langfuse_enabled is set, else "noop".
        **options: Arguments of the sink's constructor.

    Raises:
        InvalidArgument: There is no such sink (also a ValueError).
    """
    if backend is None:
        config = get_config()
        backend = config.tracing_backend or ("langfuse" if config.langfuse_enabled else "noop")
    sink: TraceSink = pick(TRACING, backend, package=__name__, what="trace sink")(**options)
    return sink


def __getattr__(name: str) -> object:
    return lazily(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return sorted(__all__)
