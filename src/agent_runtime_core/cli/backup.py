"""`agent-runtime backup`, `verify` and `copy`: copy a SQLite file while workers use it, check or move a store."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from .._core.validation import Shown, must, redacted_url
from ..config import get_config
from ..errors import brief
from ..registry import Registry
from ..runner.moving import give_up_move, move_store
from ..runner.verification import Verification, confirm_restored, mark_restored, verify_store
from .output import counted, print_json, print_line, report, warn
from .store import contents_only_shown, existing_store, file_of, open_store, require_file, require_run

_SHOWN: Final = 20  # places that are printed


async def backup(args: Namespace) -> int:
    """Copy a SQLite file, check the copy, and print what it contains; return 1 if something in it is damaged."""
    _refuse_server("FILE", args.source, "Back up")
    require_file(args.source, "Check the path")
    with _new_file("COPY", args.copy) as part:
        await _copy(args.source, part)
        found = await _verified(part)
    if not args.json:
        print_line(f"copied {args.source} to {args.copy}")
    return _report(found, args.json)


async def restore(args: Namespace) -> int:
    """Make a store of a copy, in which the runs that had not ended are marked; return 1 if something is damaged."""
    _refuse_server("COPY", args.copy, "Restore")
    _refuse_server("FILE", args.file, "Restore")
    require_file(args.copy, "Check the path")
    with _new_file("FILE", args.file) as part:
        await _copy(args.copy, part)
        async with open_store(part, Registry()) as runner:
            marked = await mark_restored(runner, force=True)
        found = await _verified(part)
    if not args.json:
        print_line(f"restored {args.file} from {args.copy}; {_marked(marked)}")
    return _report(found, args.json)


def _refuse_server(called: str, store: str, verb: str) -> None:
    """Refuse a store that is no file, and name what copies it."""
    if not file_of(store):
        fix = (
            f"{verb} a PostgreSQL store with pg_dump and pg_restore, and a Redis store with the snapshots of its "
            "server. After a restore, run: agent-runtime mark-restored --url URL"
        )
        raise must(called, "be a SQLite file", Shown(brief(redacted_url(store), 500)), fix)


async def mark(args: Namespace) -> int:
    """Mark the runs of a store that was restored by other means."""
    async with existing_store(args) as runner:
        marked = await mark_restored(runner, force=args.force, dry_run=args.dry_run)
    return report(args, {"marked": marked, "dry_run": args.dry_run}, _marked(marked, dry_run=args.dry_run))


async def restored(args: Namespace) -> int:
    """Confirm that a restored store lacks nothing of a run, or say whether that must be confirmed."""
    async with existing_store(args) as runner:
        row = await require_run(runner, args.id, args.tenant)
        resumed = False
        if args.confirm:
            resumed = await confirm_restored(runner, row.run_id, by=args.by, tenant=args.tenant)
        is_open = await runner.queue.may_lack_steps(row.run_id)
    words = "lacks nothing more" if not is_open else "may have done more than the store knows. Confirm with --confirm"
    return report(args, {"confirmed": not is_open, "resumed": resumed}, f"run {args.id} {words}")


def _marked(number: int, *, dry_run: bool = False) -> str:
    marked = "would be marked" if dry_run else "marked: guarded steps without a record are in doubt"
    return f"{counted(number, 'run')} that had not ended {marked}"


async def _copy(source: str, part: str) -> None:
    async with open_store(source, Registry(), read_only=True) as runner:
        engine: Any = runner.queue.commits
        engine.back_up(part)


@contextlib.contextmanager
def _new_file(called: str, name: str) -> Iterator[str]:
    """Create an empty file, and give it its name once the block has filled it; delete it if the block fails."""
    path = os.path.abspath(name)
    if os.path.lexists(path):
        raise must(called, "be a file that does not exist", Shown(brief(name, 500)), "Choose another name")
    part = f"{path}.part"
    os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))  # what is in it may be secret
    try:
        yield part
        _flush(part)
        os.rename(part, path)
        _flush(os.path.dirname(path))
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        raise


async def verify(args: Namespace) -> int:
    """Read everything in a store, and print what it contains; return 1 if something is damaged."""
    url = args.store or args.url or get_config().backend_url
    require_file(url or "", "Check the path")
    return _report(await _verified(url), args.json)


async def _verified(url: str | None) -> Verification:
    with contents_only_shown():
        async with open_store(url, Registry(), read_only=True) as runner:
            return await verify_store(runner)


async def copy(args: Namespace) -> int:
    """Move a store to another store, or give up a move that was not finished."""
    require_file(args.source, "Check the path")
    if args.undo == (args.target is not None):
        raise must("TO", "be passed, or --undo instead of it", args.target)
    async with open_store(args.source, Registry()) as source:
        if args.undo:
            await give_up_move(source)
            print_line(f"{args.source} accepts writes again. Delete what was copied from it")
            return 0
        async with open_store(args.target, Registry()) as target:
            move = await move_store(source, target, force=args.force)
    if args.json:
        print_json(asdict(move))
        return 0
    print_line(f"moved {move.source} to {move.target}" if move.counts else f"{move.source} was moved before")
    for kind, count in move.counts.items():
        print_line(f"{kind}: {count}")
    return 0


def _flush(path: str) -> None:
    """Make the system write a file or a directory to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _report(found: Verification, as_json: bool) -> int:
    if as_json:
        print_json(asdict(found))
    else:
        statuses = ", ".join(f"{count} {status}" for status, count in found.runs.items())
        print_line(f"runs: {sum(found.runs.values())}{f' ({statuses})' if statuses else ''}")
        for name in ("records", "events", "messages"):
            print_line(f"{name}: {getattr(found, name)}")
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.documents.items()))
        print_line(f"documents: {sum(found.documents.values())}{f' ({kinds})' if kinds else ''}")
        print_line(f"damaged: {len(found.damaged)}")
    for place, reason in [*found.damaged.items()][:_SHOWN]:
        warn(f"{place}: {reason}")
    if len(found.damaged) > _SHOWN:
        warn(f"{len(found.damaged) - _SHOWN} more. Use --json to list them")
    return 1 if found.damaged else 0
