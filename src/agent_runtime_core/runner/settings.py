"""Settings of a runner, and the description of a run that it returns."""

from __future__ import annotations

import datetime as _dt
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any
from uuid import UUID

from .._core.arguments import checked_name
from .._core.clock import aware
from .._core.codec.json import decode_dict
from .._core.ids import known_uuid
from .._core.settings import DURATION, SECONDS, TRUTH, SettingType, check_all, with_known_names
from .._core.validation import must
from ..config import SETTINGS, RuntimeConfig
from ..errors import InvalidArgument
from ..limits import RunLimits
from ..queue.records import RunRow, open_questions
from ..status import TERMINAL, RunStatus

SHUTDOWN_SECONDS = 2.0  # seconds that cancelled runs have to stop after the grace


@with_known_names
@dataclass(frozen=True)
class RunnerConfig:
    """Settings of a runner. Times are in seconds.

    Attributes:
        worker_id: Names the worker in claims, logs and `RunInfo.worker`.
        run_timeout_seconds: Time limit of one attempt. Time that the run waits does not count.
        heartbeat_interval_seconds: Time between two extensions of a lease; at most a third of the lease.
        lease_ttl_seconds: Time after which another worker takes over the runs of a worker that has crashed.
        max_retries: Failed attempts after which a run has failed, the first one included. Crashes do not count.
        max_crashes: Crashes of its worker in a row, without a new recorded step, after which a run is `dead`. With 1,
            the other runs of that worker are dead too. From 2 on, the run is executed alone before its last crash.
        retry_backoff_base: Base of the exponential delay before the next attempt.
        retry_backoff_max: Longest delay before the next attempt.
        park_after: How long a run waits in memory before it is parked.
        grace_seconds: Time for active runs to finish on shutdown, for a `cancel` hook to release what its run
            holds, and for an audit store to answer.
        retention: How long `vacuum` keeps finished runs, by status.
        limits: Limits of the agent loop of each run. An agent and a run can only set stricter ones.
        keep_unanswered: Whether a run that failed or timed out leaves in its conversation also the user's messages that
            no complete turn follows, marked as unanswered.
        max_unsent_bytes: How many bytes of an answer a reader with `stream(…, backpressure=True)` may lag.
    """

    worker_id: str = "worker-1"
    run_timeout_seconds: float = 300
    heartbeat_interval_seconds: float = 30
    lease_ttl_seconds: float = 60
    max_retries: int = 3
    max_crashes: int = 3
    retry_backoff_base: float = 2
    retry_backoff_max: float = 300
    park_after: float = 5.0
    grace_seconds: float = 25.0
    retention: Mapping[str, float] = field(default_factory=dict)
    limits: RunLimits | None = None
    max_unsent_bytes: int = 131072
    keep_unanswered: bool = True

    def __post_init__(self) -> None:
        for name, kind in _SETTINGS.items():
            kind.check(name, getattr(self, name))
        check_all(self.retention, dict.fromkeys(TERMINAL, DURATION), "retention", "final status")

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between two heartbeats: a third of the lease at most."""
        return min(self.heartbeat_interval_seconds, self.lease_ttl_seconds / 3)

    @classmethod
    def of(cls, config: RuntimeConfig) -> RunnerConfig:
        """Return the settings of a runner that the process's configuration has."""
        return cls(**{name: getattr(config, name) for name in _OF_PROCESS})


class _Name(SettingType):
    """A name that every store can keep, whose error says what is wrong with it."""

    def check(self, called: str, value: Any) -> None:
        try:
            checked_name(called, value)
        except InvalidArgument:
            if self.shown(value) == value:
                raise
            raise must(called, f"be {self.wanted}", self.shown(value)) from None


#: The settings that a runner takes from those of the process.
_OF_PROCESS = [each.name for each in fields(RunnerConfig) if each.name in SETTINGS]
_SETTINGS = {
    "worker_id": _Name("a string of 1 to 512 characters without control characters", lambda value: True),
    **{name: SETTINGS[name] for name in _OF_PROCESS},
    "grace_seconds": SECONDS,
    "keep_unanswered": TRUTH,
    "limits": SettingType("RunLimits(...) or None", lambda value: value is None or isinstance(value, RunLimits)),
    "retention": SettingType("a dict of seconds by final status", lambda value: isinstance(value, Mapping)),
}


@dataclass(frozen=True)
class RunInfo:
    """A run as `get_run` and `runs` return it. Times are aware datetimes in UTC."""

    run_id: UUID
    run_key: str | None
    agent_key: str
    status: RunStatus
    attempt: int
    generation: int
    input: dict[str, Any]
    metadata: dict[str, Any]
    priority: int
    created_at: _dt.datetime
    scheduled_at: _dt.datetime | None
    started_at: _dt.datetime | None
    ended_at: _dt.datetime | None
    deadline: _dt.datetime | None
    #: What a waiting run waits for, or why a finished run finished.
    reason: str
    #: The worker that executes the run, or executed it last.
    worker: str | None
    parent_run_id: UUID | None
    cancel_requested: bool
    concurrency_key: str | None
    #: The run is queued behind another run with its concurrency key.
    held: bool
    #: The names of the questions that the run asks people now; see `runner.approvals`.
    open_approvals: tuple[str, ...] = ()
    #: Whose run it is. Run keys, idempotency keys, concurrency keys and conversations are names within a tenant.
    tenant: str | None = None

    @classmethod
    def of(cls, row: RunRow) -> RunInfo:
        """Return the description of a stored run."""

        def when(seconds: float | None) -> _dt.datetime | None:
            return aware(seconds) if seconds else None

        decoded = row.decoded
        return cls(
            run_id=decoded("run_id", known_uuid),
            run_key=row.run_key,
            agent_key=row.agent,
            status=decoded("status", RunStatus),
            attempt=row.attempt,
            generation=row.generation,
            input=decoded("input", partial(decode_dict, known=True)),
            metadata=decoded("metadata", partial(decode_dict, known=True)),
            priority=row.priority,
            created_at=decoded("created_at", aware),
            scheduled_at=decoded("due_at", when),
            started_at=decoded("started_at", when),
            ended_at=decoded("ended_at", when),
            deadline=decoded("deadline", when),
            reason=row.reason,
            worker=row.worker or None,
            parent_run_id=None if row.parent_id is None else decoded("parent_id", UUID),
            cancel_requested=row.cancel_at is not None,
            concurrency_key=row.concurrency_key,
            held=row.blocked > 0,
            open_approvals=tuple(question.name for question in open_questions(row)),
            tenant=row.tenant or None,
        )
