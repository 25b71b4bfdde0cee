"""Test doubles for agents: run context, model clients, tools, a manual clock, and a crash test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy_import import lazily

if TYPE_CHECKING:
    from .cassettes import Cassette as Cassette
    from .cassettes import CassetteMiss as CassetteMiss
    from .cassettes import Exchange as Exchange
    from .cassettes import RecordingLLMClient as RecordingLLMClient
    from .cassettes import ReplayLLMClient as ReplayLLMClient
    from .clock import VirtualClock as VirtualClock
    from .context import MockRunContext as MockRunContext
    from .context import create_test_context as create_test_context
    from .context import run_agent_test as run_agent_test
    from .crash_test import CrashReport as CrashReport
    from .crash_test import crash_everywhere as crash_everywhere
    from .models import LLMEvaluator as LLMEvaluator
    from .models import MockLLMClient as MockLLMClient
    from .models import MockLLMResponse as MockLLMResponse
    from .recordings import record as record
    from .tools import MockTool as MockTool

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

if not TYPE_CHECKING:  # type checkers see the imports above
    __all__ = sorted(_LAZY)


# Lazy, because every pytest process imports this package for the plugin and must not pay for the other modules.
def __getattr__(name: str) -> object:
    return lazily(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return sorted(_LAZY)
