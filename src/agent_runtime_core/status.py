"""The statuses of runs and steps, and the table of legal transitions between run statuses."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from types import MappingProxyType

from .errors import IllegalTransition

__all__ = ["TERMINAL", "TRANSITIONS", "RunStatus", "StepStatus", "check"]


class RunStatus(StrEnum):
    """Status of a run. The value of a member is its name in lower case.

    Attributes:
        PENDING: The run is stored and waits for a worker, including between attempts and while it is deferred.
        RUNNING: A worker executes the run.
        WAITING: The run is parked until a timer, a signal, an approval or a child run. No process claims it.
        SUCCEEDED: The run finished with a result.
        FAILED: The last attempt of the run failed, or its error allows no other attempt.
        CANCELLED: The run was stopped by a request.
        TIMED_OUT: An attempt took too long or stalled, the deadline passed, or the run did not start in time.
        DEAD: The run crashed its workers too often in a row without progress. It is in the dead-letter queue.

    Examples:
        >>> from agent_runtime_core import RunStatus
        >>> RunStatus("timed_out").name
        'TIMED_OUT'
        >>> RunStatus.FAILED == "failed"
        True
    """

    PENDING = "pending"
    RUNNING = "running"
    WAITING = "waiting"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    DEAD = "dead"


class StepStatus(str, Enum):  # noqa: UP042
    """Status of a step. The value of a member is its name in lower case.

    Attributes:
        PENDING: The step is not started.
        RUNNING: The step is executing.
        COMPLETED: The result of the step is saved.
        FAILED: The step failed after its last attempt.
        SKIPPED: The step was not executed.
        CANCELLED: The step was cancelled.
    """

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"


TERMINAL = frozenset({RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.TIMED_OUT, RunStatus.DEAD})
"""The statuses of runs that have finished."""

_PAST: Mapping[str, str] = {
    RunStatus.SUCCEEDED: "has succeeded",
    RunStatus.FAILED: "failed",
    RunStatus.CANCELLED: "was cancelled",
    RunStatus.TIMED_OUT: "timed out",
}


def status_words(status: str) -> str:
    """Return what a message says of a run with this status: `was cancelled`, `is pending`."""
    return _PAST.get(status, f"is {status}")


_FOUR_WORDS = {"pending": "pending", "running": "running", "waiting": "running", "succeeded": "completed"}


def short_status(status: str) -> str:
    """Return pending, running, completed or failed: the status of a run in the four words of `Orchestrator`."""
    return _FOUR_WORDS.get(status, "failed")


def failure_reason(status: str, kind: str | None, message: str) -> str:
    """Return why a run failed: the error's type, or the run status if that is not `failed`, and the message."""
    if status == "failed":
        return "failed" if kind is None else f"{kind}: {message}"
    return f"{status}: {message}" if message else status


_REOPEN = {RunStatus.PENDING: True, RunStatus.RUNNING: True}

TRANSITIONS: Mapping[RunStatus, Mapping[RunStatus, bool]] = MappingProxyType(
    {
        RunStatus.PENDING: {RunStatus.RUNNING: False, RunStatus.CANCELLED: False},
        RunStatus.RUNNING: {
            RunStatus.WAITING: False,
            RunStatus.PENDING: False,
            **dict.fromkeys(sorted(TERMINAL), False),
        },
        RunStatus.WAITING: {RunStatus.PENDING: False, RunStatus.CANCELLED: False, RunStatus.RUNNING: True},
        RunStatus.SUCCEEDED: {},
        RunStatus.FAILED: _REOPEN,
        RunStatus.CANCELLED: _REOPEN,
        RunStatus.TIMED_OUT: _REOPEN,
        RunStatus.DEAD: _REOPEN,
    }
)
"""Old status, new status, and whether the transition needs an explicit call: `resume` or `requeue` (to pending),
`execute` or `open_run` (to running). A run that succeeded keeps its status: the same id returns its saved result."""


def check(old: RunStatus | str, new: RunStatus | str, *, reopen: bool = False) -> None:
    """Raise unless a run may change its status from `old` to `new`.

    Args:
        old: The present status.
        new: The next status.
        reopen: Whether the change is an explicit call, such as `resume`.

    Raises:
        IllegalTransition: There is no such transition in the table, or it needs an explicit call.

    Examples:
        >>> from agent_runtime_core.status import check
        >>> check("pending", "running")
        >>> check("failed", "pending", reopen=True)
    """
    present, wanted = RunStatus(old), RunStatus(new)
    explicit = TRANSITIONS[present].get(wanted)
    if explicit is None:
        allowed = ", ".join(status.value for status in TRANSITIONS[present])
        raise IllegalTransition(
            f"a run cannot change from {present.value} to {wanted.value}: "
            + (f"{present.value} allows {allowed}" if allowed else f"{present.value} is final")
        )
    if explicit and not reopen:
        raise IllegalTransition(
            f"a run changes from {present.value} to {wanted.value} only by resume, requeue, execute or open_run"
        )
