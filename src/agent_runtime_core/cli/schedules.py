"""`agent-runtime schedule`: list, show, store, pause, run and delete schedules."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

from .._views.schedules import last_runs, schedule_detail, schedule_items, schedule_view
from ..errors import UnknownRun
from ..queue.records import RunRow
from ..registry import Registry
from ..runner.runner import AgentRunner
from ..runner.schedules import Schedule
from .output import field, print_json, print_line, report, table, with_human_times
from .store import existing_store, open_store

_COLUMNS = ("id", "tenant", "agent", "ticks", "paused", "next_tick", "last_tick", "last_state", "skipped", "error")
_RUNS = ("run_id", "run_key", "status")


async def list_schedules(args: Namespace) -> int:
    async with existing_store(args, reads=True) as runner:
        found = await schedule_items(runner, await runner.schedules.rows(tenant=args.tenant))
    if args.json:
        print_json(found)
    else:
        table(
            [with_human_times(_with_ticks(each), local=False) for each in found], _COLUMNS, optional=("tenant", "error")
        )
    return 0


def _with_ticks(found: dict[str, Any]) -> dict[str, Any]:
    if found["error"]:
        return found
    ticks = f"every {found['every']:g} s" if found["cron"] is None else f"{found['cron']} {found['timezone']}"
    return {**found, "ticks": ticks, "paused": "yes" if found["paused"] else "no"}


async def show(args: Namespace) -> int:
    async with existing_store(args, reads=True) as runner:
        row = await _required(runner, args)
        found = await schedule_detail(runner, row)
        rows = await last_runs(runner, row)
        runs = [{"run_id": each.run_id, "run_key": each.run_key, "status": each.status} for each in rows]
    if args.json:
        print_json({**found, "runs": runs})
        return 0
    for name, value in with_human_times(found).items():
        field(name, ", ".join(value) if isinstance(value, list) else value)
    print_line("")
    print_line("last runs" if runs else "no runs")
    if runs:
        table(runs, _RUNS)
    return 0


async def put(args: Namespace) -> int:
    async with open_store(args.url, Registry()) as runner:
        found = await runner.schedules.put(
            args.id, args.agent, args.input, cron=args.cron, every=args.every, timezone=args.timezone,
            catch_up=args.catch_up, overlap=args.overlap, jitter=args.jitter, start=args.start, end=args.end,
            paused=args.paused, metadata=args.metadata, priority=args.priority, tenant=args.tenant,
            concurrency_key=args.concurrency_key, concurrency_limit=args.concurrency_limit, tags=args.tag,
        )  # fmt: skip
    return _stored(args, found, "stored")


def _stored(args: Namespace, found: Schedule, what: str) -> int:
    following = "no tick follows" if found.next_tick is None else f"the next tick is {found.next_tick.isoformat()}"
    return report(args, schedule_view(found), f"schedule {args.id} {what}; {following}")


async def pause(args: Namespace) -> int:
    return await _changed(args, lambda runner: runner.schedules.pause(args.id, tenant=args.tenant), "paused")


async def resume(args: Namespace) -> int:
    return await _changed(args, lambda runner: runner.schedules.resume(args.id, tenant=args.tenant), "resumed")


async def _changed(args: Namespace, change: Callable[[AgentRunner], Awaitable[Schedule]], what: str) -> int:
    async with existing_store(args) as runner:
        found = await change(runner)
    return _stored(args, found, what)


async def run(args: Namespace) -> int:
    async with existing_store(args) as runner:
        run_id = str(await runner.schedules.run_now(args.id, tenant=args.tenant))
    return report(args, {"id": args.id, "run_id": run_id}, f"run {run_id} of schedule {args.id} submitted")


async def delete(args: Namespace) -> int:
    async with existing_store(args) as runner:
        deleted = await runner.schedules.delete(args.id, tenant=args.tenant)
    data = {"id": args.id, "deleted": deleted}
    return report(args, data, f"schedule {args.id} deleted", None if deleted else _not_found(args.id))


async def next_ticks(args: Namespace) -> int:
    async with existing_store(args, reads=True) as runner:
        ticks = await runner.schedules.next_ticks(args.id, args.count, after=args.after, tenant=args.tenant)
    found = [each.isoformat() for each in ticks]
    if args.json:
        print_json({"id": args.id, "ticks": found})
    for each in () if args.json else found:
        print_line(each)
    return 0


async def _required(runner: AgentRunner, args: Namespace) -> RunRow:
    row = await runner.schedules.row(args.id, tenant=args.tenant)
    if row is None:
        raise UnknownRun(_not_found(args.id))
    return row


def _not_found(id: str) -> str:
    return f"schedule {id!r} not found. List the schedules with: agent-runtime schedule list"
