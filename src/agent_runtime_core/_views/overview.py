"""The state of a store and its server: the queue, the workers, the agents, the versions and the health."""

from __future__ import annotations

import asyncio
import inspect
import math
import platform
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from .._core.lazy_import import load
from ..errors import AgentRuntimeError
from ..interfaces import AgentRuntime
from ..queue.records import QUEUED_BEHIND, RunFilter, RunRow
from ..registry import Registry
from ..runner.processes import processes
from ..runner.run_client import RunClient
from ..tools.confirmation import shown_confirmation
from ..tools.registry import ToolRegistry
from .plain import iso_time

_MOST_ROWS: Final = 400  # rows of each status that are read for workers and concurrency keys

STORE_SECONDS: Final = 2.0  # for the store to answer


async def queue_view(runner: RunClient, tenant: str | None = None) -> dict[str, Any]:
    """Return the state of the queue.

    Args:
        runner: The runner on the store.
        tenant: Only runs of this tenant, and the workers that execute them; None for all runs.

    Returns:
        {"total", "by_status", "by_agent", "oldest_pending_at", "oldest_pending_seconds", "due_later", "waiting",
        "concurrency_keys", "workers", "complete"}. `by_agent` has the numbers of runs by status for each agent, and
        `waiting` the numbers of waiting runs by reason. A concurrency key has the run that is active and the number of
        runs queued behind it; a worker has its runs and when the first and the last of their leases end. The oldest
        pending run is the oldest run that has waited for a worker since it was stored, as in `RunCounts`. Keys and
        workers come from the first 400 rows of each status, and `complete` says whether there are no more rows.
    """
    queue = runner.queue
    counts, now = await queue.counts(tenant), queue.clock.wall()
    by_status: Counter[str] = Counter()
    by_agent: dict[str, dict[str, int]] = {}
    for (status, agent), count in counts.runs.items():
        by_status[status] += count
        by_agent.setdefault(agent, {})[status] = count
    running, waiting, pending = [
        await queue.find_runs(RunFilter((status,), tenant=tenant, limit=_MOST_ROWS, light=True))
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


async def pools_view(runner: RunClient, tenant: str | None = None) -> list[dict[str, Any]]:
    """Return the pools that count something now, by name, with the field names of `PoolInfo`."""
    return [
        {**asdict(each), "ends_at": each.ends_at and each.ends_at.isoformat()}
        for each in await runner.pools(tenant=tenant)
    ]


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
            "state": None, "queued": 0,
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
                "worker": worker,
                "runs": len(rows),
                "agents": dict(Counter(row.agent for row in rows)),
                "lease_ends_at": iso_time(min(ends, default=None)),
                "last_lease_ends_at": iso_time(max(ends, default=None)),
                "expired": sum(end < now for end in ends),
            }
        )
    return workers


async def agents_view(runner: RunClient, registry: Registry, tenant: str | None = None) -> list[dict[str, Any]]:
    """Return the agents that are registered here, and those that only have runs in the store, or of a tenant.

    Each is {"key", "registered", "description", "tools", "input_schema", "runs"}. `tools` are {"name", "description",
    "parameters", "requires_confirmation"}; the last is True, False or "conditional". `input_schema` is the
    schema of the agent's input, if the agent declares it, and `runs` are the numbers of its runs by state.
    """
    counts: dict[str, dict[str, int]] = {}
    for (status, agent), count in (await runner.queue.counts(tenant)).runs.items():
        counts.setdefault(agent, {})[status] = count
    keys = registry.keys()
    found = [_agent(key, registry.get(key), counts.get(key, {})) for key in keys]
    return found + [_agent(key, None, counts[key]) for key in sorted(counts.keys() - set(keys))]


def _agent(key: str, agent: AgentRuntime | None, runs: dict[str, int]) -> dict[str, Any]:
    schema = _attribute(agent, "input_schema")
    return {
        "key": key, "registered": agent is not None, "description": _description(agent), "tools": _tools(agent),
        "input_schema": schema if isinstance(schema, dict) else None, "runs": runs,
    }  # fmt: skip


def _description(agent: AgentRuntime | None) -> str | None:
    """Return the `description` of an agent, or the first paragraph of its class's own docstring."""
    if agent is None:
        return None
    given = _attribute(agent, "description")
    if isinstance(given, str) and given:
        return given
    text = inspect.cleandoc(type(agent).__doc__ or "").partition("\n\n")[0]
    return " ".join(text.split()) or None


def _tools(agent: AgentRuntime | None) -> list[dict[str, Any]]:
    tools = _attribute(agent, "tools")
    if not isinstance(tools, ToolRegistry):
        return []
    return [
        {
            "name": each.name,
            "description": each.description,
            "parameters": each.parameters,
            "requires_confirmation": shown_confirmation(each.requires_confirmation),
        }
        for each in tools.list_tools()
    ]


def _attribute(agent: AgentRuntime | None, name: str) -> Any:
    """Return an attribute of an agent, None if it is missing or its property fails, perhaps because it needs a run."""
    try:
        return getattr(agent, name, None)
    except Exception:  # noqa: BLE001 - a property of the application may raise anything
        return None


def about_view(runner: RunClient, scopes: Iterable[str], *, hide_store: bool = False) -> dict[str, Any]:
    """Return the store, the versions and what the caller may do.

    Args:
        runner: The runner on the store.
        scopes: The scopes of the caller.
        hide_store: Leave out the location of the store.

    Returns:
        {"version", "python", "sqlite", "store", "backend", "durability", "read_only", "scopes"}.
        `durability` is "full" or "normal" for a SQLite file, else None.
    """
    engine = runner.queue.commits
    return {
        "version": load("agent_runtime_core:__version__"),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "store": None if hide_store else str(getattr(engine, "path", type(runner.queue).__name__)),
        "backend": type(runner.queue).__name__.removesuffix("Queue"),
        "durability": getattr(engine, "durability", None),
        "read_only": bool(getattr(engine, "read_only", False)),
        "scopes": sorted(scopes),
    }


def health_view(runner: RunClient, problems: Sequence[str], streams: int = 0) -> dict[str, Any]:
    """Return what a caller with the scope read gets to know about the health of a server."""
    return {
        "version": load("agent_runtime_core:__version__"), "python": platform.python_version(),
        "worker": runner.config.worker_id, "queue": type(runner.queue).__name__,
        "agents": len(runner.registry.keys()), "streams": streams, "problems": problems,
    }  # fmt: skip


async def store_problem(runner: RunClient) -> str:
    """Return why the store does not answer, or ""."""
    try:
        async with asyncio.timeout(STORE_SECONDS):
            await runner.queue.next_due()
    except (AgentRuntimeError, TimeoutError) as error:
        return f"the store does not answer: {type(error).__name__}"
    return ""
