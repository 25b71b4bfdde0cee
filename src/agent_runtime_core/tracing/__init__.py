"""Trace sinks by name, and the tracer that calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._core.lazy_exports import lazy_exports
from .._core.lazy_import import pick
from ..config import get_config

if TYPE_CHECKING:
    from ..interfaces import TraceSink as TraceSink
    from .langfuse import LangfuseTraceSink as LangfuseTraceSink
    from .logs import JsonFormatter as JsonFormatter
    from .logs import RunFields as RunFields
    from .opentelemetry import OpenTelemetrySink as OpenTelemetrySink
    from .prometheus import PrometheusSink as PrometheusSink
    from .tracer import NoopTraceSink as NoopTraceSink
    from .tracer import Tracer as Tracer
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "..interfaces": "TraceSink",
            ".langfuse": "LangfuseTraceSink",
            ".logs": "JsonFormatter RunFields",
            ".opentelemetry": "OpenTelemetrySink",
            ".prometheus": "PrometheusSink",
            ".tracer": "NoopTraceSink Tracer",
        },
        "TRACING get_trace_sink",
    )


TRACING = {
    "noop": ".tracer:NoopTraceSink",
    "langfuse": ".langfuse:LangfuseTraceSink",
    "opentelemetry": ".opentelemetry:OpenTelemetrySink",
    "prometheus": ".prometheus:PrometheusSink",
}
"""The classes of the built-in trace sinks by their names."""


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
