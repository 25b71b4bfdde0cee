"""The step that code is running in, as a context variable. Imports next to nothing: the logger needs it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol


class StepToken(Protocol):
    """Identifies the journal that a step is recorded in."""

    run_id: str


class Step(Protocol):
    """One attempt of a step."""

    token: StepToken
    name: str
    attempt: int
    outer: Any  # the enclosing step, or None

    @property
    def step_id(self) -> str: ...


#: The step that code is running in; the innermost, if steps are nested.
CURRENT_STEP: ContextVar[Step | None] = ContextVar("agent_runtime_step", default=None)


def step_position(step_id: str | None) -> dict[str, Any]:
    """Return the fields by which a trace names a step that the calling code is in: with its attempt and parent."""
    scope = CURRENT_STEP.get()
    if step_id is None or scope is None or scope.step_id != step_id:
        return {"step_id": step_id, "parent_id": None, "attempt": None}
    return {"step_id": step_id, "parent_id": _parent_of(scope), "attempt": scope.attempt}


def _parent_of(scope: Step) -> str | None:
    """Return the enclosing step of the same run."""
    outer = scope.outer
    return outer.step_id if outer is not None and outer.token is scope.token else None
