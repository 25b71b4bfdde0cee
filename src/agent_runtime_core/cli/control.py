"""`agent-runtime cancel`, `signal`, `approve`, `resume`, `fork`, `vacuum` and `carry-over`: change what is stored."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

from ..errors import IllegalTransition, InvalidArgument
from ..persistence.carry_over import carry_over
from ..queue.records import LIVE, RunRow
from ..runner.runner import AgentRunner
from .output import print_json, print_line, warn
from .runs import waits_of
from .store import existing_store, named_limits, require_run


async def cancel(args: Namespace) -> int:
    async with existing_store(args) as runner:
        row = await require_run(runner, args.id)
        recorded = await runner.cancel(row.run_id)
        status = (await require_run(runner, args.id)).status
    if args.json:
        print_json({"id": row.run_id, "recorded": bool(recorded), "status": status})
    elif recorded:
        print_line(
            f"run {args.id} is cancelled"
            if status == "cancelled"
            else f"run {args.id} is asked to stop; it is {status}"
        )
    if not recorded:
        warn(f"run {args.id} is over: it is {status}")
    return 0 if recorded else 1


async def signal(args: Namespace) -> int:
    """Store a signal. It may come before the run waits for it, so its name is not checked."""
    async with existing_store(args) as runner:
        stored = await runner.signal(args.id, args.name, args.payload)
        row = await require_run(runner, args.id)
    finished = f"run {args.id!r} was finished when the signal came. Send it again"  # it was resumed since
    return _posted(args, row, "signal", None if stored else _finished(args, row) or finished)


async def approve(args: Namespace) -> int:
    """Answer an approval that the run asked for; with `--force` also one that it may ask for later."""
    async with existing_store(args) as runner:
        row = await require_run(runner, args.id)
        refusal = _finished(args, row) or (None if args.force else await _not_asked(runner, row, args))
        if refusal is None and not await runner.approve(args.id, args.name, args.payload):
            row = await require_run(runner, args.id)
            refusal = _finished(args, row) or f"{args.name!r} was answered before"
        row = await require_run(runner, args.id)
    return _posted(args, row, "the answer to", refusal)


def _posted(args: Namespace, row: RunRow, what: str, refusal: str | None) -> int:
    if args.json:
        print_json({"id": row.run_id, "name": args.name, "stored": refusal is None, "status": row.status})
    elif refusal is None:
        print_line(f"{what} {args.name!r} is stored for run {args.id}")
    if refusal is not None:
        warn(refusal)
    return 0 if refusal is None else 1


def _finished(args: Namespace, row: RunRow) -> str | None:
    """Return why a finished run takes no message, None if it takes one."""
    if row.status in LIVE:
        return None
    way_out = "" if row.status == "succeeded" else f". To continue it, use agent-runtime resume {args.id}"
    return f"run {args.id!r} has finished ({row.status}) and takes no message{way_out}"


async def _not_asked(runner: AgentRunner, row: RunRow, args: Namespace) -> str | None:
    """Return why an answer of that name would not be taken now, None if the run asked for it."""
    waits, asked = await waits_of(runner, row)
    if args.name in asked or any(each["name"] == args.name for each in waits):
        return None
    if waits:
        names = ", ".join(f"{each['kind']} {each['name']!r}" for each in waits[:5])
        state = f"waiting for {names}{', …' if len(waits) > 5 else ''}, got {args.name!r}"
    else:
        state = f"{row.status} and has not asked for {args.name!r}"
    return f"run {args.id!r} is {state}. Use --force to store an answer for {args.name!r}"


async def resume(args: Namespace) -> int:
    refused = None
    async with existing_store(args) as runner:
        try:
            await runner.resume(args.id, limits=named_limits(args))
        except IllegalTransition as error:
            refused = str(error)
        row = await require_run(runner, args.id)
    if args.json:
        print_json({"id": row.run_id, "resumed": refused is None, "status": row.status, "generation": row.generation})
    elif refused is None:
        print_line(f"run {args.id} is {row.status}, in generation {row.generation}")
    if refused is not None:
        warn(refused)
    return 0 if refused is None else 1


async def fork(args: Namespace) -> int:
    async with existing_store(args) as runner:
        row = await require_run(runner, args.id)
        new = await runner.fork(args.id, args.after, new_run_id=args.new_run_id, effects=args.effects)
    if args.json:
        print_json({"id": str(new), "forked_from": row.run_id, "after": args.after})
    else:
        where = f"where run {args.id} stands" if args.after is None else f"after step {args.after!r} of run {args.id}"
        print_line(f"run {new} begins {where}")
    return 0


async def vacuum(args: Namespace) -> int:
    async with existing_store(args) as runner:
        deleted = await runner.vacuum(dict(args.retention))
    if args.json:
        print_json({"deleted": deleted})
    else:
        print_line(f"{deleted} {'run' if deleted == 1 else 'runs'} deleted")
    return 0


async def carried(args: Namespace) -> int:
    if "://" in (args.directory or ""):  # as a path it would lose a slash, and its password would be shown
        raise InvalidArgument(f"DIR must be a directory, got {args.directory}. Name the directory of .agent_runtime")
    found = await carry_over(args.directory)
    if args.json:
        print_json(asdict(found))
    else:
        print_line(f"{found.directory}: {_counted(found.carried)} carried over")
        if found.kept:
            print_line(f"{_counted(found.kept)} of them there already, and left as they are")
    for name, why in found.unreadable.items():
        warn(f"{found.directory}/{name} is left as it is, for it cannot be read ({why})")
    if not found.opens:
        warn(f"{found.directory} opens once these are repaired or moved away and the command was run again")
    elif found.unreadable:
        warn(f"{found.directory} opens without these tasks. Repair them and run the command again to add them")
    return 1 if found.unreadable else 0


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(counts.items())) or "nothing"
