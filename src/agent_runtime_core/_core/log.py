"""The logger of this library. Its records have the fields of the run and the step that the code belongs to."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, Protocol


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
    return position_of(CURRENT_STEP.get(), step_id)


def position_of(scope: Step | None, step_id: str | None) -> dict[str, Any]:
    """Return `step_position` for code that runs in the step `scope`."""
    if step_id is None or scope is None or scope.step_id != step_id:
        return {"step_id": step_id, "parent_id": None, "attempt": None}
    return {"step_id": step_id, "parent_id": _parent_of(scope), "attempt": scope.attempt}


def _parent_of(scope: Step) -> str | None:
    """Return the enclosing step of the same run."""
    outer = scope.outer
    return outer.step_id if outer is not None and outer.token is scope.token else None


log: Final = logging.getLogger("agent_runtime_core")


class LoggedRun(NamedTuple):
    """The run that log records of the current task are about."""

    run_id: str
    attempt: int
    tenant: str = ""


#: Set while a run is executed, including the helper tasks of the library.
LOGGED_RUN: ContextVar[LoggedRun | None] = ContextVar("agent_runtime_logged_run", default=None)

#: The id of the conversation turn that the current task executes a part of.
LOGGED_TURN: ContextVar[str | None] = ContextVar("agent_runtime_logged_turn", default=None)

FIELDS: Final = ("run_id", "tenant", "turn_id", "step", "step_id", "attempt", "trace_id")


def about_run(
    run_id: str, attempt: int | None = None, tenant: str = "", *, turn_id: str | None = None
) -> dict[str, Any]:
    """Return the fields of a run, as `extra` of a log call whose task does not execute that run."""
    return {
        "run_id": run_id, "tenant": tenant or None, "turn_id": turn_id, "step": None, "step_id": None,
        "attempt": attempt, "trace_id": run_id.replace("-", ""),
    }  # fmt: skip


def current_fields() -> dict[str, Any]:
    """Return the fields of the run and the step that the calling code belongs to; None for unknown fields."""
    step, run, turn_id = CURRENT_STEP.get(), LOGGED_RUN.get(), LOGGED_TURN.get()
    if step is not None:  # of a child run in the same process, if that is the inner one
        tenant = run.tenant if run is not None and run.run_id == step.token.run_id else ""
        fields = about_run(step.token.run_id, step.attempt, tenant, turn_id=turn_id)
        return {**fields, "step": step.name, "step_id": step.step_id}
    return dict.fromkeys(FIELDS) if run is None else about_run(*run, turn_id=turn_id)


class RunFields(logging.Filter):
    """Adds `run_id`, `tenant`, `turn_id`, `step`, `step_id`, `attempt` and `trace_id` to log records.

        handler.addFilter(RunFields())

    The records of this library contain these fields without it. On a handler it also adds them to what your own loggers
    log inside a run. In a record that is not about a run, each field is None.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields that the record does not have, and let it pass."""
        fields = record.__dict__
        if "run_id" not in fields:
            fields.update({name: fields.get(name, value) for name, value in current_fields().items()})
        return True


log.addFilter(RunFields())
