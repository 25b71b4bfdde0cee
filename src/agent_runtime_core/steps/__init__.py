"""Durable steps: `StepExecutor` runs lists of `Step` and fan-outs, and saves each result once.

A context of a runner saves results in the journal of its run. Any other context with `emit`, `checkpoint`, `get_state`
and `cancelled` saves them in its checkpoint.
"""

from __future__ import annotations

from .._core.codec.typed import register_type
from .._execution.step import AlreadyDone
from ..errors import StepCancelledError, StepExecutionError, StepInDoubt
from ..retry import Backoff
from ..status import StepStatus
from .executor import StepExecutor
from .model import ExecutionState, State, Step, StepResult

__all__ = [
    "AlreadyDone",
    "Backoff",
    "ExecutionState",
    "Happened",
    "State",
    "Step",
    "StepCancelledError",
    "StepExecutionError",
    "StepExecutor",
    "StepInDoubt",
    "StepResult",
    "StepStatus",
    "register_type",
]

Happened = AlreadyDone
"""The name of `AlreadyDone` in 0.6.0."""
