"""The agent loop: `run_turn_loop` and what it works with."""

from __future__ import annotations

from .calling import agent_tool
from .core import run_turn_loop
from .state import CancellationToken, Hooks, LoopResult, TurnState

__all__ = ["CancellationToken", "Hooks", "LoopResult", "TurnState", "agent_tool", "run_turn_loop"]
