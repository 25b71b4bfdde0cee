"""Where traces of runs go: trace sinks by name, and what hands them the traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._core.lazy_import import lazily, pick
from ..config import get_config

if TYPE_CHECKING:
    from ..interfaces import TraceSink
    from .langfuse import LangfuseTraceSink
    from .noop import NoopTraceSink
    from .tracer import Tracer

__all__ = ["TRACING", "LangfuseTraceSink", "NoopTraceSink", "TraceSink", "Tracer", "get_trace_sink"]

TRACING = {"noop": ".noop:NoopTraceSink", "langfuse": ".langfuse:LangfuseTraceSink"}

_LAZY = {
    "TraceSink": "..interfaces:TraceSink",
    "Tracer": ".tracer:Tracer",
} | {dotted.partition(":")[2]: dotted for dotted in TRACING.values()}


def get_trace_sink(backend: str | None = None, **options: Any) -> TraceSink:
    """A trace sink by its name, or by `"their_package.module:Class"`; `options` go to its constructor.

    None is the configured tracing_backend, else "langfuse" where langfuse_enabled is set, else "noop".
    InvalidArgument (a ValueError): there is no such sink.
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
