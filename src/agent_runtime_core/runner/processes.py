"""The row of a runner in the store of its queue, from which others see that it claims runs."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from .._core.clock import aware
from .._core.context_vars import start_helper
from .._core.ids import new_ulid
from .._core.lazy_import import load
from .._core.log import log
from .._engines.base import Op
from .._engines.outages import OUTAGE, StoreOutage
from ..errors import AgentRuntimeError
from ..queue.base import RunQueue
from ..queue.records import ProcessRow
from .settings import SHUTDOWN_SECONDS, RunnerConfig

KEPT_SECONDS: Final = 86_400.0  # for which the row of a process is kept that does not renew it any more
RETRY_SECONDS: Final = 1.0  # after which a row is renewed again that was not stored
LIVING_INTERVALS: Final = 2  # heartbeat intervals after which a process counts as ended


@dataclass(frozen=True)
class ProcessInfo:
    """A process that claims runs, as `runner.processes()` returns it. Times are aware datetimes in UTC.

    Attributes:
        process_id: Identifies the runner: a process with several runners is listed for each of them.
        worker: The `worker_id` of the runner.
        host: The host name of the machine.
        pid: The id of the process on its machine.
        started_at: When the runner was created.
        version: The version of this library.
        agents: The keys of the agents that it registered.
        slots: How many runs its `run_loop` executes at the same time; 0 if it executes only its own runs.
        last_seen_at: When the process last renewed its row.
        living: Whether it was seen within two of its heartbeat intervals and, on SQLite, its process still exists.
    """

    process_id: str
    worker: str
    host: str
    pid: int
    started_at: datetime
    version: str
    agents: tuple[str, ...]
    slots: int
    last_seen_at: datetime
    living: bool

    def claims(self, agent: str) -> bool:
        """Return whether its `run_loop` executes runs of this agent.

        Args:
            agent: The key of the agent.
        """
        return self.slots > 0 and agent in self.agents


class ListedProcess:
    """Keeps the row of one runner. A queue that keeps no rows of processes gets none.

    Args:
        queue: The queue that the runner claims from.
        config: Settings of the runner.
        agents: Returns the keys of its agents.
    """

    def __init__(self, queue: RunQueue, config: RunnerConfig, agents: Callable[[], Sequence[str]]) -> None:
        self._queue, self._config, self._agents = queue, config, agents
        self._process_id = ""
        self._started_at: float = queue.clock.wall()
        self._shown: tuple[str, ...] = ()  # the agents in the row
        self._renewed_at: float | None = None  # boot time; if None, the row is not stored
        self._retry_at: float = 0.0  # boot time
        self.slots: int = 0

    @property
    def process_id(self) -> str:
        """The id of the row, even before the row is stored."""
        self._process_id = self._process_id or new_ulid(self._queue.clock)
        return self._process_id

    def operations(self) -> list[Op]:
        """Return what stores or renews the row. The heartbeat adds it to its commits, from its thread."""
        queue, config = self._queue, self._config
        if not queue.keeps_processes:
            return []
        self._shown, self._renewed_at = tuple(self._agents()), queue.clock.boot()
        row = ProcessRow(
            self.process_id, config.worker_id, socket.gethostname(), os.getpid(), self._started_at,
            str(load("agent_runtime_core:__version__")), self._shown, self.slots, queue.holder, queue.clock.wall(),
            queue.lease_now() + LIVING_INTERVALS * config.heartbeat_interval,
        )  # fmt: skip
        return [Op("queue.save_process", (row, KEPT_SECONDS))]

    def seconds_left(self) -> float:
        """Return the seconds until the loop must renew the row, 0 if its agents have changed."""
        if not self._queue.keeps_processes:
            return float("inf")
        if self._renewed_at is None:
            return max(self._retry_at - self._queue.clock.boot(), 0.0)
        if self._shown != tuple(self._agents()):
            return 0.0
        return max(self._renewed_at + self._config.heartbeat_interval - self._queue.clock.boot(), 0.0)

    async def renew(self) -> None:
        """Store or renew the row. If the store is not available, the next call does it."""
        if not (operations := self.operations()):
            return
        clock = self._queue.clock
        outage, began = StoreOutage.of(self._queue.commits, clock), clock.monotonic()
        try:
            await self._queue.commits.commit(None, operations)
            outage.answered(began=began)
        except OUTAGE as error:
            self._renewed_at = None
            outage.noticed(error)
        except AgentRuntimeError as error:
            self._renewed_at, self._retry_at = None, self._queue.clock.boot() + RETRY_SECONDS
            log.warning("the row of worker %s was not renewed: %s; retrying", self._config.worker_id, error)

    async def leave(self) -> None:
        """Delete the row, if it is stored. A store that does not reply is not waited for."""
        self.slots = 0
        if self._renewed_at is None:
            return
        self._renewed_at = None
        await asyncio.wait({start_helper(self._drop())}, timeout=SHUTDOWN_SECONDS)

    async def _drop(self) -> None:
        try:
            await self._queue.commits.commit(None, [Op("queue.drop_process", (self._process_id,))])
        except AgentRuntimeError as error:
            log.info("the row of worker %s stays for a day: %s", self._config.worker_id, error)


async def processes(queue: RunQueue) -> list[ProcessInfo]:
    """Return the processes that have a row, the oldest first."""
    rows: list[ProcessRow] = await queue.read("processes") if queue.keeps_processes else []
    now = queue.lease_now()
    ended = ended_processes(queue, [row.holder for row in rows if row.alive_until >= now])
    return [
        ProcessInfo(
            *row[:4], aware(row.started_at), row.version, row.agents, row.slots, aware(row.seen_at),
            living=row.alive_until >= now and row.holder not in ended,
        )
        for row in sorted(rows, key=lambda row: (row.started_at, row.process_id))
    ]  # fmt: skip


def ended_processes(queue: RunQueue, holders: Sequence[str]) -> set[str]:
    """Return the processes, as `RunRow.holder` names them, of which the store knows that they ended."""
    dead_holders = getattr(getattr(queue, "engine", None), "dead_holders", None)
    return set() if dead_holders is None else set(dead_holders(holders))


async def may_be_claimed(queue: RunQueue, agent: str) -> bool:
    """Return whether a living process claims runs of this agent. True if the queue keeps no rows of processes."""
    if not queue.keeps_processes:
        return True
    return any(each.living and each.claims(agent) for each in await processes(queue))
