"""`agent-runtime tenant`: give stored runs to a tenant."""

from __future__ import annotations

import signal
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict

from ..errors import MOST_NAMED, InvalidArgument
from ..runner.tenants import Assignment, assign_runs
from .output import escaped, print_json, print_line, warn
from .store import existing_store, wanted_runs

_FILTERS = ("status", "agent", "since", "until", "conversation", "concurrency_key", "prefix")


async def set_tenant(args: Namespace) -> int:
    """Give runs to a tenant; return 1 if some are left."""
    source = "without a tenant" if args.source is None else f"of tenant {args.source!r}"
    chosen = args.yes or args.dry_run or any(getattr(args, name) is not None for name in _FILTERS)
    if not chosen and not _confirmed(f"Give all runs {source} to tenant {args.tenant!r}?"):
        warn("nothing was done")
        return 1
    async with existing_store(args) as runner:
        wanted = wanted_runs(args)
        found = await assign_runs(runner, args.tenant, wanted, source=args.source, dry_run=args.dry_run)
    if args.json:
        print_json({**asdict(found), "dry_run": args.dry_run})
    else:
        _print(found, args.dry_run)
    for reasons, more in ((found.skipped, "Run the command again later"), (found.taken, ""), (found.kept, "")):
        _warn(reasons, more)
    return 1 if found.skipped or found.taken or found.kept else 0


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise InvalidArgument(
            "no filter is given, so all runs would be chosen. Use --yes, or a filter such as --prefix"
        )
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the event loop would not see Ctrl-C here
    try:
        sys.stderr.write(f"{escaped(question)} [y/N] ")
        sys.stderr.flush()
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    finally:
        signal.signal(signal.SIGINT, before)


def _print(found: Assignment, dry_run: bool) -> None:
    counts = [_counted(found.runs, "run"), _counted(found.child_runs, "child run")]
    counts.append(_counted(found.conversations, "conversation"))
    would = "would belong" if dry_run else "given"
    print_line(f"{counts[0]} {would} to tenant {found.tenant!r}, with {counts[1]} and {counts[2]}")


def _warn(reasons: Mapping[str, str], hint: str) -> None:
    lines = [*reasons.values()]
    for each in lines[:MOST_NAMED]:
        warn(f"{each}. {hint}" if hint else each)
    if len(lines) > MOST_NAMED:
        warn(f"{len(lines) - MOST_NAMED} more. Use --json to list them")


def _counted(count: int, what: str) -> str:
    return f"{count} {what if count == 1 else what + 's'}"
