"""How a runner runs, and what it tells about a run."""

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
from .._core.settings import DURATION, SECONDS, SettingType, check_all, with_known_names
from ..config import SETTINGS, RuntimeConfig
from ..limits import RunLimits
from ..queue.records import RunRow
from ..status import TERMINAL, RunStatus

SHUTDOWN_SECONDS = 2.0  # seconds that cancelled work has to stop after the grace


@with_known_names
@dataclass(frozen=True)
class RunnerConfig:
    """Times are seconds. `max_retries` counts failures: the third of 3 ends the run; crashes are none.

    `run_timeout_seconds` is time under a claim in one attempt, waiting left out. `park_after` is how
    long a wait stays in place before the run is parked. `grace_seconds` is what running work gets when
    the worker is told to stop, a `cancel` hook to let go of what its run held, and an audit store to
    answer. `retention` says per status how long ended runs are kept by `vacuum`.
    """

    worker_id: str = "worker-1"
    run_timeout_seconds: float = 300
    heartbeat_interval_seconds: float = 30
    lease_ttl_seconds: float = 60
    max_retries: int = 3
    retry_backoff_base: float = 2
    retry_backoff_max: float = 300
    park_after: float = 5.0
    grace_seconds: float = 25.0
    retention: Mapping[str, float] = field(default_factory=dict)
    #: What the agent loop of one run may use; an agent and a run can only be stricter.
    limits: RunLimits | None = None
    #: Bytes of an answer that an attached output (`stream(…, backpressure=True)`) may be behind.
    max_unsent_bytes: int = 131072

    def __post_init__(self) -> None:
        checked_name("a worker_id", self.worker_id)
        for name, kind in _SETTINGS.items():
            kind.check(name, getattr(self, name))
        check_all(self.retention, dict.fromkeys(TERMINAL, DURATION), "retention", "final status")

    @property
    def heartbeat_interval(self) -> float:
        return min(self.heartbeat_interval_seconds, self.lease_ttl_seconds / 3)

    @classmethod
    def of(cls, config: RuntimeConfig) -> RunnerConfig:
        """The runner's part of the process's configuration."""
        return cls(**{name: getattr(config, name) for name in _OF_PROCESS})


#: The settings that a runner takes from those of the process.
_OF_PROCESS = [each.name for each in fields(RunnerConfig) if each.name in SETTINGS]
_SETTINGS = {
    **{name: SETTINGS[name] for name in _OF_PROCESS},
    "grace_seconds": SECONDS,
    "limits": SettingType("RunLimits(...) or None", lambda value: value is None or isinstance(value, RunLimits)),
    "retention": SettingType("a dict of seconds by final status", lambda value: isinstance(value, Mapping)),
}


@dataclass(frozen=True)
class RunInfo:
    """A run as `get_run` and `runs` tell it; datetimes are aware UTC."""

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
    #: What a waiting run waits for, or why an ended one ended.
    reason: str
    #: Who holds it now, or held it last.
    worker: str | None
    parent_run_id: UUID | None
    cancel_requested: bool
    concurrency_key: str | None
    #: It is pending behind another run of its concurrency key.
    held: bool

    @classmethod
    def of(cls, row: RunRow) -> RunInfo:
        def when(seconds: float | None) -> _dt.datetime | None:
            return aware(seconds) if seconds else None

        told = row.decoded
        return cls(
            run_id=told("run_id", known_uuid),
            run_key=row.run_key,
            agent_key=row.agent,
            status=told("status", RunStatus),
            attempt=row.attempt,
            generation=row.generation,
            input=told("input", partial(decode_dict, known=True)),
            metadata=told("metadata", partial(decode_dict, known=True)),
            priority=row.priority,
            created_at=told("created_at", aware),
            scheduled_at=told("due_at", when),
            started_at=told("started_at", when),
            ended_at=told("ended_at", when),
            deadline=told("deadline", when),
            reason=row.reason,
            worker=row.worker or None,
            parent_run_id=None if row.parent_id is None else told("parent_id", UUID),
            cancel_requested=row.cancel_at is not None,
            concurrency_key=row.lane,
            held=row.held > 0,
        )
