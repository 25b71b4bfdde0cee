"""Fixtures for the cases of a queue."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from ...queue.base import RunQueue
from ...queue.records import QueuedRun, RunRow
from ..clock import VirtualClock
from . import checks
from .checks import same

Make = Callable[..., RunQueue]
Case = Callable[[Make], Awaitable[None]]

LEASE = 60.0


@contextlib.asynccontextmanager
async def opened(make: Make, **options: Any) -> AsyncIterator[tuple[RunQueue, VirtualClock]]:
    clock = VirtualClock()
    async with checks.opened(make, clock=clock, **options) as queue:
        yield queue, clock


def margin(queue: RunQueue) -> float:
    """Return seconds by which the lease clock of a server may go on by itself during a case. 0 without such a clock."""
    return 5.0 if "lease_now" in vars(queue) else 0.0


def names(runs: Sequence[QueuedRun | RunRow]) -> list[str]:
    return [run.agent_key if isinstance(run, QueuedRun) else run.agent for run in runs]


async def add(queue: RunQueue, *agents: str, **options: Any) -> list[str]:
    """Enqueue one run for each agent and return the run ids."""
    return [str((await queue.enqueue(None, agent, {}, **options)).run_id) for agent in agents]


async def one(queue: RunQueue, worker: str, lease: float = LEASE, **options: Any) -> RunRow:
    """Claim one run; a run must be there."""
    rows = await queue.claim_rows(worker, lease, **options)
    same(len(rows), 1, f"the number of runs claimed by worker {worker!r}")
    return rows[0]


async def claim_new(queue: RunQueue, agent: str = "agent", **options: Any) -> RunRow:
    """Enqueue a run and claim it as worker "w"."""
    await add(queue, agent, **options)
    return await one(queue, "w", LEASE, agent_keys=[agent])


async def drain(queue: RunQueue, worker: str = "w") -> list[QueuedRun]:
    """Claim all claimable runs."""
    found: list[QueuedRun] = []
    seen: set[str] = set()
    while (run := await queue.claim(worker)) is not None:
        once(seen, str(run.run_id), run.agent_key)
        found.append(run)
    return found


def once(seen: set[str], run_id: str, agent: str) -> None:
    """Add a run to the claimed runs. A run that can be claimed twice would make the caller loop for ever."""
    if run_id in seen:
        raise AssertionError(f"run {run_id} of agent {agent!r} was claimed again, but was not released")
    seen.add(run_id)


async def settle(queue: RunQueue, row: RunRow, status: str, **changes: Any) -> RunRow:
    return await queue.settle(row.run_id, queue.unchanged_update(row, row.claim_id)._replace(status=status, **changes))
