"""Commands that change the store: `cancel`, `send`, `signal`, `approve`, `resume`, `fork`, `vacuum`, `carry-over`."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

from .._views.runs import waits_of
from ..errors import IllegalTransition, InvalidArgument
from ..persistence.carry_over import carry_over
from ..queue.records import LIVE, RunRow
from ..runner.runner import AgentRunner
from .output import counted, print_json, print_line, report, warn
from .store import existing_store, limits_from, require_run


async def cancel(args: Namespace) -> int:
    async with existing_store(args) as runner:
        row = await require_run(runner, args.id, args.tenant)
        recorded = await runner.cancel(row.run_id)
        now = await runner.queue.row(row.run_id)  # none if it was a schedule
        status = "cancelled" if now is None else now.status
    data = {"run_id": row.run_id, "recorded": bool(recorded), "status": status}
    requested = f"requested cancellation of run {args.id}, which is {status}"
    refusal = None if recorded else f"run {args.id!r} has finished ({status}) and cannot be cancelled"
    return report(args, data, f"run {args.id} cancelled" if status == "cancelled" else requested, refusal)


async def signal(args: Namespace) -> int:
    """Store a signal. Its name is not checked, because the run may wait for it later."""
    async with existing_store(args) as runner:
        waits, _ = await waits_of(runner, await require_run(runner, args.id, args.tenant))
        stored = await runner.signal(args.id, args.name, args.payload, tenant=args.tenant)
        row = await require_run(runner, args.id, args.tenant)
    if stored and waits and not any(each["name"] == args.name for each in waits):
        names = ", ".join(f"{each['kind']} {each['name']!r}" for each in waits[:5])
        warn(f"run {args.id!r} is waiting for {names}. Signal {args.name!r} is kept until the run waits for it")
    # The run was resumed after the signal was rejected.
    finished = f"run {args.id!r} had finished when the signal arrived. Send it again"
    return _report_message(args, row, "signal", None if stored else _finished_reason(args, row, "signal") or finished)


async def send(args: Namespace) -> int:
    """Send a message to the agent of a run."""
    sent, refusal = None, None
    async with existing_store(args) as runner:
        await require_run(runner, args.id, args.tenant)
        try:
            when = "interrupt" if args.interrupt else "next_turn"
            sent = await runner.send(args.id, args.text, when=when, message_id=args.message_id, tenant=args.tenant)
        except IllegalTransition as error:
            refusal = str(error)
        row = await require_run(runner, args.id, args.tenant)
    data = {"id": row.run_id, "message_id": sent, "stored": sent is not None, "status": row.status}
    return report(args, data, f"the message is stored for run {args.id}", refusal)


async def approve(args: Namespace) -> int:
    """Answer an approval that the run has requested; with `--force` also an approval that it may request later."""
    async with existing_store(args) as runner:
        row = await require_run(runner, args.id, args.tenant)
        refusal = _finished_reason(args, row, "answer") or (
            None if args.force else await _not_requested(runner, row, args)
        )
        try:
            if refusal is None and not await runner.approve(
                args.id, args.name, args.payload, request_id=args.request_id, tenant=args.tenant
            ):
                row = await require_run(runner, args.id, args.tenant)
                refusal = (
                    _finished_reason(args, row, "answer")
                    or f"approval {args.name!r} of run {args.id!r} was already answered"
                )
        except IllegalTransition as closed:
            refusal = str(closed)
        row = await require_run(runner, args.id, args.tenant)
    return _report_message(args, row, "the answer to", refusal)


def _report_message(args: Namespace, row: RunRow, what: str, refusal: str | None) -> int:
    data = {"run_id": row.run_id, "name": args.name, "stored": refusal is None, "status": row.status}
    return report(args, data, f"{what} {args.name!r} is stored for run {args.id}", refusal)


def _finished_reason(args: Namespace, row: RunRow, what: str) -> str | None:
    """Return why a run accepts no answer or signal, None if it does."""
    if row.status in LIVE:
        return None
    hint = "" if row.status == "succeeded" else f". To continue it, use agent-runtime resume {args.id}"
    return f"run {args.id!r} has finished ({row.status}), so it accepts no {what}{hint}"


async def _not_requested(runner: AgentRunner, row: RunRow, args: Namespace) -> str | None:
    """Return why the run would not receive an answer of that name now, None if it has requested it."""
    waits, requested = await waits_of(runner, row)
    if args.name in requested or any(each["name"] == args.name for each in waits):
        return None
    if waits:
        names = ", ".join(f"{each['kind']} {each['name']!r}" for each in waits[:5])
        state = f"waiting for {names}{', …' if len(waits) > 5 else ''}, got {args.name!r}"
    else:
        state = f"{row.status} and has not requested {args.name!r}"
    return f"run {args.id!r} is {state}. Use --force to store an answer for {args.name!r}"


async def resume(args: Namespace) -> int:
    refused = None
    async with existing_store(args) as runner:
        await require_run(runner, args.id, args.tenant)
        try:
            await runner.resume(args.id, limits=limits_from(args), tenant=args.tenant, code_version=args.code_version)
        except IllegalTransition as error:
            refused = str(error)
        row = await require_run(runner, args.id, args.tenant)
    data = {"run_id": row.run_id, "resumed": refused is None, "status": row.status, "generation": row.generation}
    return report(args, data, f"run {args.id} is {row.status}, in generation {row.generation}", refused)


async def fork(args: Namespace) -> int:
    async with existing_store(args) as runner:
        row = await require_run(runner, args.id, args.tenant)
        new = await runner.fork(
            args.id, args.after, new_run_id=args.new_run_id, effects=args.effects, tenant=args.tenant
        )
        key = (await require_run(runner, str(new), None)).run_key
    position = "the present state" if args.after is None else f"the state after step {args.after!r}"
    data = {
        "run_id": str(new), "run_key": key, "tenant": row.tenant or None, "forked_from": row.run_id,
        "after_step": args.after,
    }  # fmt: skip
    return report(args, data, f"run {key or new} starts from {position} of run {args.id}")


async def vacuum(args: Namespace) -> int:
    async with existing_store(args) as runner:
        deleted = await runner.vacuum(dict(args.retention), dry_run=args.dry_run)
    would = "would be " if args.dry_run else ""
    return report(args, {"deleted": deleted, "dry_run": args.dry_run}, f"{counted(deleted, 'run')} {would}deleted")


async def migrate_files(args: Namespace) -> int:
    if "://" in (args.directory or ""):  # a Path would drop a slash, so the password in a URL would not be redacted
        raise InvalidArgument(f"DIR must be a directory, got {args.directory}. Name the directory of .agent_runtime")
    found = await carry_over(args.directory)
    if args.json:
        print_json(asdict(found))
    else:
        print_line(f"{found.directory}: {_counted(found.carried)} carried over")
        if found.kept:
            print_line(f"{_counted(found.kept)} already present and not modified")
    for name, reason in found.unreadable.items():
        warn(f"{found.directory}/{name} cannot be read and is not modified ({reason})")
    if not found.opens:
        warn(f"{found.directory} does not open yet. Repair or move these files, then run the command again")
    elif found.unreadable:
        warn(f"{found.directory} opens without these tasks. Repair them and run the command again to add them")
    return 1 if found.unreadable else 0


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(counts.items())) or "nothing"
