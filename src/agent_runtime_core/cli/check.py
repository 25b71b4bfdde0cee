"""`agent-runtime check`: find live runs that the present code cannot resume."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from ..errors import InvalidArgument
from ..queue.records import LIVE, RunRow
from ..registry import Registry
from ..runner.resume_check import FAILS, MISMATCH, RESUMES, UNKNOWN, check_resume
from ..runner.runner import AgentRunner
from ..status import TERMINAL
from .app_loader import agents_of
from .output import only_logged, print_columns, print_json, print_line, prints_on_stderr, warn
from .store import existing_store, refuse_url, require_run, rows_of

_AT_ONCE = 16  # runs that are replayed concurrently, as a worker would
_SHOWN = 5  # runs that are named for each reason
_RESUMABLE = tuple(each for each in TERMINAL if each != "succeeded")


async def check(args: Namespace) -> int:
    """Replay each live run; print those that cannot resume. Return 1 if any cannot."""
    with only_logged(), prints_on_stderr():
        found = agents_of(args.target, args.agent_path)
        if isinstance(found, AgentRunner):
            refuse_url(args)
            async with found:
                checks = await _check_all(args, found, found.registry)
                unknown = await _unknown_agents(args, found, found.registry)
        else:
            async with existing_store(args) as runner:
                checks = await _check_all(args, runner, found)
                unknown = await _unknown_agents(args, runner, found)
    counts = Counter(each["outcome"] for each in checks)
    if args.json:
        totals = {name: counts[name] for name in (RESUMES, MISMATCH, FAILS, UNKNOWN)}
        print_json({"runs": checks, "schedules": unknown, **totals})
    else:
        _print(checks, counts)
    for each in unknown:
        warn(f"schedule {each['id']!r} starts runs of agent {each['agent']!r}, which no worker knows")
    return 1 if counts[MISMATCH] or counts[FAILS] else 0


async def _check_all(args: Namespace, runner: AgentRunner, registry: Registry) -> list[dict[str, Any]]:
    free = asyncio.Semaphore(_AT_ONCE)

    async def checked(row: RunRow) -> dict[str, Any]:
        agent = registry.get(row.agent)
        assert agent is not None
        try:
            result = await check_resume(runner, row, agent, args.timeout)
        finally:
            free.release()
        about = {"run_id": row.run_id, "run_key": row.run_key, "tenant": row.tenant or None}
        return {**about, "agent_key": row.agent, "status": row.status, **asdict(result)}

    checks = list[asyncio.Task[dict[str, Any]]]()
    try:
        async for row in _rows(args, runner, registry):
            await free.acquire()
            checks.append(asyncio.create_task(checked(row)))
        return await asyncio.gather(*checks)
    finally:
        for each in checks:
            each.cancel()


async def _unknown_agents(args: Namespace, runner: AgentRunner, registry: Registry) -> list[dict[str, Any]]:
    """Return the schedules whose agents are neither checked nor known to a living worker."""
    known = {*registry.keys(), *(key for each in await runner.processes() if each.living for key in each.agents)}
    found = [] if args.run is not None else await runner.schedules.list(tenant=args.tenant)
    return [
        {"id": each.id, "tenant": each.tenant, "agent": each.agent}
        for each in found
        if not each.paused and each.agent not in known
    ]


async def _rows(args: Namespace, runner: AgentRunner, registry: Registry) -> AsyncIterator[RunRow]:
    """Yield the runs of the agents in the registry: these are checked."""
    if args.run is not None:
        row = await require_run(runner, args.run, args.tenant)
        if registry.get(row.agent) is None:
            raise InvalidArgument(f"{args.target} must have agent {row.agent!r} of run {args.run!r}, got others")
        yield row
        return
    keys = registry.keys()
    for key in keys:
        for status in (*LIVE, *(_RESUMABLE if args.failed else ())):
            async for row in rows_of(runner, status, key, tenant=args.tenant):
                yield row


def _print(checks: list[dict[str, Any]], counts: Counter[str]) -> None:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for each in checks:
        if each["outcome"] != RESUMES or each["reason"] not in (None, "no step has started"):
            group = each["agent_key"], each["outcome"], each["reason"], each["cure"]
            groups.setdefault(group, []).append(each["run_key"] or each["run_id"])
    words = {MISMATCH: "cannot resume", FAILS: "cannot resume", UNKNOWN: "not checked", RESUMES: "resumes, but"}
    for (agent, outcome, reason, cure), names in groups.items():
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        print_line(f"{words[outcome]}: {', '.join(names[:_SHOWN])}{more} (agent {agent}): {reason}")
        if cure is not None:
            print_columns(("", 2), (f"cure: {cure}", 0))
    cannot = counts[MISMATCH] + counts[FAILS]
    print_line(
        f"{len(checks)} {'run' if len(checks) == 1 else 'runs'} checked: {counts[RESUMES]} can resume, "
        f"{cannot} cannot, {counts[UNKNOWN]} unknown"
    )
