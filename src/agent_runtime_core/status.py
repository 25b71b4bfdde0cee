"""The states of runs and steps, and the one table of the ways between them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum
from types import MappingProxyType

from .errors import IllegalTransition

__all__ = ["TERMINAL", "TRANSITIONS", "RunStatus", "StepStatus", "check"]


class RunStatus(StrEnum):
    """Status of a run; `waiting` means that it is parked until a timer, a signal or a child run."""

    PENDING = "pending"
    RUNNING = "running"
    WAITING = "waiting"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    DEAD = "dead"


class StepStatus(str, Enum):  # noqa: UP042
    """Where a step stands."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"


TERMINAL = frozenset({RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.TIMED_OUT, RunStatus.DEAD})

_AGAIN = {RunStatus.PENDING: True, RunStatus.RUNNING: True}

#: From, to, and whether it takes an explicit door: `resume` and `requeue` (to pending), `execute` and
#: `open_run` (to running). A run that succeeded stays so: the same id answers with its record.
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
        RunStatus.FAILED: _AGAIN,
        RunStatus.CANCELLED: _AGAIN,
        RunStatus.TIMED_OUT: _AGAIN,
        RunStatus.DEAD: _AGAIN,
    }
)


def check(old: RunStatus | str, new: RunStatus | str, *, reopen: bool = False) -> None:
    """Raise IllegalTransition unless a run may go from `old` to `new`; `reopen` marks an explicit door."""
    before, after = RunStatus(old), RunStatus(new)
    explicit = TRANSITIONS[before].get(after)
    if explicit is None:
        ways = ", ".join(status.value for status in TRANSITIONS[before])
        raise IllegalTransition(
            f"a run may not go from {before.value} to {after.value}: from {before.value} "
            + (f"it may go to {ways}" if ways else "there is no way on")
        )
    if explicit and not reopen:
        raise IllegalTransition(
            f"a run goes from {before.value} to {after.value} only by resume, requeue, execute or open_run"
        )
