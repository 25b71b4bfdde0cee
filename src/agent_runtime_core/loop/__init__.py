"""The agent loop: `run_turn_loop` and the values that it uses."""

from __future__ import annotations

from .state import CancellationToken, Hooks, LoopResult, TurnState
from .tool_calls import agent_tool
from .turn_loop import run_turn_loop

__all__ = ["CancellationToken", "Hooks", "LoopResult", "TurnState", "agent_tool", "run_turn_loop"]
