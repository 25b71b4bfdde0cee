"""`agent-runtime dead`: list, requeue or delete dead-letter runs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

from .._views.runs import summary
from ..errors import IllegalTransition, InvalidArgument, UnknownRun
from ..runner.runner import AgentRunner
from .output import print_json, print_line, table, warn, with_human_times
from .store import existing_store, limits_from, require_run, rows_of

_COLUMNS = ("run_id", "run_key", "tenant", "agent_key", "attempt", "ended_at", "reason", "error")


async def list_dead(args: Namespace) -> int:
    async with existing_store(args, reads=True) as runner:
        found = [await summary(runner, row, end=True) async for row in rows_of(runner, args.status, tenant=args.tenant)]
    if args.json:
        print_json(found)
    else:
        rows = [{**each, "error": (each["error"] or {}).get("message")} for each in found]
        table([with_human_times(each, local=False) for each in rows], _COLUMNS, optional=("tenant",))
    return 0


async def requeue(args: Namespace) -> int:
    return await _apply_to_runs(
        args, "requeued", lambda runner, run_id: runner.requeue(run_id, limits=limits_from(args))
    )


async def discard(args: Namespace) -> int:
    return await _apply_to_runs(args, "discarded", lambda runner, run_id: runner.discard(run_id))


async def _apply_to_runs(args: Namespace, done: str, act: Callable[[AgentRunner, str], Awaitable[Any]]) -> int:
    """Apply `act` to every named run; warn about those that do not exist or have another status."""
    if bool(args.ids) == args.all:
        raise InvalidArgument("pass run ids or --all" if not args.ids else "pass either run ids or --all, not both")
    changed, refused = list[str](), dict[str, str]()
    async with existing_store(args) as runner:
        rows = rows_of(runner, args.status, tenant=args.tenant)
        ids = [row.run_id async for row in rows] if args.all else list(dict.fromkeys(args.ids))
        for run_id in ids:
            try:
                row = await require_run(runner, run_id, args.tenant)
                if row.status != args.status:
                    refused[run_id] = f"run {run_id!r} must be {args.status}, got {row.status}"
                    continue
                await act(runner, row.run_id)
                changed.append(run_id)
            except (UnknownRun, IllegalTransition) as error:
                refused[run_id] = str(error)
    for reason in refused.values():
        warn(reason)
    if args.json:
        print_json({done: changed, "refused": refused})
    else:
        print_line(f"{len(changed)} {'run' if len(changed) == 1 else 'runs'} {done}")
    return 1 if refused else 0
