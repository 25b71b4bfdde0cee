"""Doubles that drive an agent in a test, with no runner, no store and no model, and a clock to move by hand."""

from __future__ import annotations

from .clock import VirtualClock
from .context import MockRunContext, create_test_context, run_agent_test

__all__ = ["MockRunContext", "VirtualClock", "create_test_context", "run_agent_test"]
