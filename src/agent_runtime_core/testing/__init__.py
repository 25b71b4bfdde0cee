"""Doubles that drive an agent in a test, with no runner, no store and no model."""

from __future__ import annotations

from .context import MockRunContext, create_test_context, run_agent_test

__all__ = ["MockRunContext", "create_test_context", "run_agent_test"]
