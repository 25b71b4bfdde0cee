"""The state of a queue: how many runs wait for what, which workers execute runs, and which processes claim them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Final

from ..queue.records import QUEUED_BEHIND, RunFilter, RunRow
from ..runner.processes import processes
from ..runner.run_client import RunClient
from .plain import iso_time

_MOST_ROWS: Final = 400  # rows of each status that are read for workers and concurrency keys


async def queue_view(runner: RunClient, tenant: str | None = None) -> dict[str, Any]:
    """Return the state of the queue.

    Args:
        runner: The runner on the store.
        tenant: Only runs of this tenant, and the workers that execute them; None for all runs.

    Returns:
        {"total", "by_status", "by_agent", "oldest_pending_at", "oldest_pending_seconds", "due_later", "waiting",
        "concurrency_keys", "workers", "complete"}. `by_agent` has the numbers of runs by status for each agent, and
        `waiting` those of waiting runs by reason. A concurrency key has the run that is active and the number of runs
        queued behind it; a worker has its runs and when the first and the last of their leases end. These two come
        from the first 400 rows of each status, and `complete` says whether those are all.
    """
    queue = runner.queue
    counts, now = await queue.counts(tenant), queue.clock.wall()
    by_status: Counter[str] = Counter()
    by_agent: dict[str, dict[str, int]] = {}
    for (status, agent), count in counts.runs.items():
        by_status[status] += count
        by_agent.setdefault(agent, {})[status] = count
    running, waiting, pending = [
        await queue.find(RunFilter((status,), tenant=tenant, limit=_MOST_ROWS, light=True))
        for status in ("running", "waiting", "pending")
    ]
    oldest = min(counts.oldest_pending.values(), default=None)
    return {
        "total": sum(by_status.values()), "by_status": dict(by_status), "by_agent": by_agent,
        "oldest_pending_at": iso_time(oldest),
        "oldest_pending_seconds": None if oldest is None else round(max(now - oldest, 0.0), 3),
        "due_later": counts.due_later, "waiting": counts.waiting,
        "concurrency_keys": _concurrency_keys([*running, *waiting, *pending]),
        "workers": _workers(runner, running, now),
        "complete": all(by_status[status] <= _MOST_ROWS for status in ("running", "waiting", "pending")),
    }  # fmt: skip


async def workers_view(runner: RunClient) -> list[dict[str, Any]]:
    """Return the processes that claim runs, the oldest first, with the field names of `ProcessInfo`."""
    return [
        {
            "process_id": each.process_id, "worker": each.worker, "host": each.host, "pid": each.pid,
            "living": each.living, "slots": each.slots, "agents": list(each.agents), "version": each.version,
            "started_at": each.started_at.isoformat(timespec="milliseconds"),
            "last_seen_at": each.last_seen_at.isoformat(timespec="milliseconds"),
        }
        for each in await processes(runner.queue)
    ]  # fmt: skip


def _concurrency_keys(live: list[RunRow]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in live:
        if row.concurrency_key is None:
            continue
        each = found.setdefault((row.concurrency_key, row.tenant), {
            "concurrency_key": row.concurrency_key, "tenant": row.tenant or None, "run_id": None, "key": None,
            "state": None,
            "queued": 0,
        })  # fmt: skip
        if row.blocked == 0:
            each |= {"run_id": row.run_id, "key": row.run_key, "state": row.status}
        elif row.blocked == QUEUED_BEHIND:
            each["queued"] += 1
    return sorted(found.values(), key=lambda each: (-each["queued"], each["concurrency_key"], each["tenant"] or ""))


def _workers(runner: RunClient, running: list[RunRow], now: float) -> list[dict[str, Any]]:
    found: dict[str, list[RunRow]] = {}
    for row in running:
        found.setdefault(row.worker, []).append(row)
    # Leases are in boot time, or in the time of a server.
    offset = now - lease_now if (lease_now := runner.queue.lease_now()) else 0.0
    workers = []
    for worker, rows in sorted(found.items()):
        # A lease without an end: the run waits in memory.
        ends = [row.lease_until + offset for row in rows if row.lease_until < math.inf]
        workers.append(
            {
                "worker": worker, "runs": len(rows), "agents": dict(Counter(row.agent for row in rows)),
                "lease_ends_at": iso_time(min(ends, default=None)),
                "last_lease_ends_at": iso_time(max(ends, default=None)),
                "expired": sum(end < now for end in ends),
            }
        )  # fmt: skip
    return workers
