"""Test doubles for agents: run context, model clients, tools, a manual clock, and a crash test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy_import import lazily

if TYPE_CHECKING:
    from .cassettes import Cassette, CassetteMiss, Exchange, RecordingLLMClient, ReplayLLMClient
    from .clock import VirtualClock
    from .context import MockRunContext, create_test_context, run_agent_test
    from .crash_test import CrashReport, crash_everywhere
    from .models import LLMEvaluator, MockLLMClient, MockLLMResponse
    from .recordings import record
    from .tools import MockTool

__all__ = [
    "Cassette",
    "CassetteMiss",
    "CrashReport",
    "Exchange",
    "LLMEvaluator",
    "MockLLMClient",
    "MockLLMResponse",
    "MockRunContext",
    "MockTool",
    "RecordingLLMClient",
    "ReplayLLMClient",
    "VirtualClock",
    "crash_everywhere",
    "create_test_context",
    "record",
    "run_agent_test",
]

_MODULES = {
    ".cassettes": "Cassette CassetteMiss Exchange RecordingLLMClient ReplayLLMClient",
    ".clock": "VirtualClock",
    ".context": "MockRunContext create_test_context run_agent_test",
    ".crash_test": "CrashReport crash_everywhere",
    ".models": "LLMEvaluator MockLLMClient MockLLMResponse",
    ".recordings": "record",
    ".tools": "MockTool",
}
_LAZY = {name: f"{module}:{name}" for module, names in _MODULES.items() for name in names.split()}


# Lazy, because every pytest process imports this package for the plugin and must not pay for the other modules.
def __getattr__(name: str) -> object:
    return lazily(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return sorted(__all__)
