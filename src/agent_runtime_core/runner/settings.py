"""How a runner runs, and what it tells about a run."""

from __future__ import annotations

import datetime as _dt
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

from .._clock import aware
from .._ids import known_uuid
from .._json import mapped
from .._refusals import is_number
from ..config import RuntimeConfig, spelt
from ..errors import InvalidArgument, brief
from ..limits import RunLimits
from ..queue.given import named, whole
from ..queue.row import RunRow
from ..status import TERMINAL, RunStatus


@spelt
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
        named("a worker_id", self.worker_id)
        for name in ("run_timeout_seconds", "heartbeat_interval_seconds", "lease_ttl_seconds"):
            self._number(name, above=True)
        for name in ("retry_backoff_base", "retry_backoff_max", "park_after", "grace_seconds"):
            self._number(name)
        if isinstance(self.max_retries, bool) or not isinstance(self.max_retries, int) or self.max_retries < 1:
            raise InvalidArgument(f"max_retries counts failures and is at least 1, not {brief(self.max_retries)}")
        whole("max_unsent_bytes", self.max_unsent_bytes)
        if self.limits is not None and not isinstance(self.limits, RunLimits):
            raise InvalidArgument(f"limits are RunLimits(...) or None, not {brief(self.limits)}")
        if not isinstance(self.retention, Mapping):
            raise InvalidArgument(f"retention is a dict of seconds per final status, not {brief(self.retention)}")
        for status, kept in self.retention.items():
            if status not in TERMINAL:
                raise InvalidArgument(f"retention is per final status ({', '.join(TERMINAL)}), not {brief(status)}")
            if not is_number(kept) or not kept >= 0:
                raise InvalidArgument(f"retention of {brief(status)} is a number of seconds, not {brief(kept)}")

    def _number(self, name: str, *, above: bool = False) -> None:
        value = getattr(self, name)
        fits = is_number(value) and math.isfinite(value)
        if not fits or value < 0 or (above and value == 0):
            raise InvalidArgument(
                f"{name} is a number of seconds {'above' if above else 'of at least'} 0, not {brief(value)}"
            )

    @property
    def beat_interval(self) -> float:
        return min(self.heartbeat_interval_seconds, self.lease_ttl_seconds / 3)

    @classmethod
    def of(cls, config: RuntimeConfig) -> RunnerConfig:
        """The runner's part of the process's configuration."""
        return cls(
            run_timeout_seconds=config.run_timeout_seconds,
            heartbeat_interval_seconds=config.heartbeat_interval_seconds,
            lease_ttl_seconds=config.lease_ttl_seconds,
            max_retries=config.max_retries,
            retry_backoff_base=config.retry_backoff_base,
            retry_backoff_max=config.retry_backoff_max,
            park_after=config.park_after,
            max_unsent_bytes=config.max_unsent_bytes,
        )


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

        told = row.told
        return cls(
            run_id=told("run_id", known_uuid),
            run_key=row.run_key,
            agent_key=row.agent,
            status=told("status", RunStatus),
            attempt=row.attempt,
            generation=row.generation,
            input=told("input", partial(mapped, known=True)),
            metadata=told("metadata", partial(mapped, known=True)),
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
