"""`agent-runtime dead`: list dead letters, give them back to workers, or delete them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any

from ..errors import IllegalTransition, InvalidArgument, UnknownRun
from ..runner.runner import AgentRunner
from .output import print_json, print_line, table, warn
from .store import existing_store, named_limits, require_run, rows_of, summary

_COLUMNS = ("id", "key", "agent", "attempt", "ended", "reason", "error")


async def listed(args: Namespace) -> int:
    async with existing_store(args) as runner:
        found = [await summary(runner, row, end=True) async for row in rows_of(runner, args.status)]
    if args.json:
        print_json(found)
    else:
        table([{**each, "error": (each["error"] or {}).get("message")} for each in found], _COLUMNS)
    return 0


async def requeued(args: Namespace) -> int:
    return await _each(args, "requeued", lambda runner, run_id: runner.requeue(run_id, limits=named_limits(args)))


async def discarded(args: Namespace) -> int:
    return await _each(args, "discarded", lambda runner, run_id: runner.discard(run_id))


async def _each(args: Namespace, done: str, act: Callable[[AgentRunner, str], Awaitable[Any]]) -> int:
    """Do it to every run that was named, and say which ones are not there or not of that status."""
    if bool(args.ids) == args.all:
        raise InvalidArgument(
            "name the runs by their ids, or give --all" if not args.ids else "give ids or --all, not both"
        )
    acted, refused = list[str](), dict[str, str]()
    async with existing_store(args) as runner:
        ids = [row.run_id async for row in rows_of(runner, args.status)] if args.all else list(dict.fromkeys(args.ids))
        for run_id in ids:
            try:
                status = (await require_run(runner, run_id)).status
                if status != args.status:
                    refused[run_id] = f"run {run_id} is {status}, not {args.status}"
                    continue
                await act(runner, run_id)
                acted.append(run_id)
            except (UnknownRun, IllegalTransition) as error:
                refused[run_id] = str(error)
    if args.json:
        print_json({done: acted, "refused": refused})
    else:
        print_line(f"{len(acted)} {'run' if len(acted) == 1 else 'runs'} {done}")
    for why in refused.values():
        warn(why)
    return 1 if refused else 0
