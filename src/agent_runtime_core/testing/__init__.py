"""Test doubles for agents: run context, model clients, tools, a manual clock, and a crash test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy_exports import lazy_exports

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
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".cassettes": "Cassette CassetteMiss Exchange RecordingLLMClient ReplayLLMClient",
            ".clock": "VirtualClock",
            ".context": "MockRunContext create_test_context run_agent_test",
            ".crash_test": "CrashReport crash_everywhere",
            ".models": "LLMEvaluator MockLLMClient MockLLMResponse",
            ".recordings": "record",
            ".tools": "MockTool",
        },
    )
