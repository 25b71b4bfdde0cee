"""`agent-runtime cancel`, `signal`, `approve`, `resume`, `fork` and `vacuum`: what the runner does to stored runs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable, Callable

from ..errors import IllegalTransition
from ..queue.row import LIVE
from ..runner.core import AgentRunner
from .place import looked_at, named_limits, row_of
from .text import say, tell, warn


async def cancel(args: Namespace) -> int:
    async with looked_at(args) as runner:
        row = await row_of(runner, args.id)
        recorded = await runner.cancel(row.run_id)
        status = (await row_of(runner, args.id)).status
    if args.json:
        tell({"id": row.run_id, "recorded": bool(recorded), "status": status})
    elif recorded:
        say(
            f"run {args.id} is cancelled"
            if status == "cancelled"
            else f"run {args.id} is asked to stop; it is {status}"
        )
    if not recorded:
        warn(f"run {args.id} is over: it is {status}")
    return 0 if recorded else 1


async def signal(args: Namespace) -> int:
    return await _posted(args, "signal", lambda runner: runner.signal(args.id, args.name, args.payload))


async def approve(args: Namespace) -> int:
    return await _posted(args, "the answer to", lambda runner: runner.approve(args.id, args.name, args.payload))


async def _posted(args: Namespace, what: str, post: Callable[[AgentRunner], Awaitable[bool]]) -> int:
    async with looked_at(args) as runner:
        stored = await post(runner)
        row = await row_of(runner, args.id)
    if args.json:
        tell({"id": row.run_id, "name": args.name, "stored": stored, "status": row.status})
    elif stored:
        say(f"{what} {args.name!r} is stored for run {args.id}")
    if not stored:
        over = row.status not in LIVE
        warn(f"run {args.id} is over: it is {row.status}" if over else f"{args.name!r} was answered before")
    return 0 if stored else 1


async def resume(args: Namespace) -> int:
    refused = None
    async with looked_at(args) as runner:
        try:
            await runner.resume(args.id, limits=named_limits(args))
        except IllegalTransition as error:
            refused = str(error)
        row = await row_of(runner, args.id)
    if args.json:
        tell({"id": row.run_id, "resumed": refused is None, "status": row.status, "generation": row.generation})
    elif refused is None:
        say(f"run {args.id} is {row.status}, in generation {row.generation}")
    if refused is not None:
        warn(refused)
    return 0 if refused is None else 1


async def fork(args: Namespace) -> int:
    async with looked_at(args) as runner:
        row = await row_of(runner, args.id)
        new = await runner.fork(args.id, args.after, new_run_id=args.new_run_id)
    if args.json:
        tell({"id": str(new), "forked_from": row.run_id, "after": args.after})
    else:
        where = f"where run {args.id} stands" if args.after is None else f"after step {args.after!r} of run {args.id}"
        say(f"run {new} begins {where}")
    return 0


async def vacuum(args: Namespace) -> int:
    async with looked_at(args) as runner:
        deleted = await runner.vacuum(dict(args.retention))
    if args.json:
        tell({"deleted": deleted})
    else:
        say(f"{deleted} {'run' if deleted == 1 else 'runs'} deleted")
    return 0
