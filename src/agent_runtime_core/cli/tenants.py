"""`agent-runtime tenant`: give stored runs to a tenant."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict

from ..errors import MOST_NAMED
from ..runner.tenants import Assignment, assign_runs
from .consent import asks, confirmed
from .output import counted, print_json, print_line, warn
from .store import existing_store, wanted_runs

_FILTERS = ("status", "agent", "since", "until", "conversation", "concurrency_key", "prefix")


async def set_tenant(args: Namespace) -> int:
    """Give runs to a tenant; return 1 if some are left."""
    source = "without a tenant" if args.source is None else f"of tenant {args.source!r}"
    wanted = wanted_runs(args)
    async with existing_store(args) as runner:
        if asks(args) and not any(getattr(args, name) is not None for name in _FILTERS):
            found = await assign_runs(runner, args.tenant, wanted, source=args.source, dry_run=True)
            if not confirmed(f"give {counted(found.runs, 'run')} {source} to tenant {args.tenant!r}"):
                return 1
        found = await assign_runs(runner, args.tenant, wanted, source=args.source, dry_run=args.dry_run)
    if args.json:
        print_json({**asdict(found), "dry_run": args.dry_run})
    else:
        _print(found, args.dry_run)
    for reasons, more in ((found.skipped, "Run the command again later"), (found.taken, ""), (found.kept, "")):
        _warn(reasons, more)
    return 1 if found.skipped or found.taken or found.kept else 0


def _print(found: Assignment, dry_run: bool) -> None:
    counts = [counted(found.runs, "run"), counted(found.child_runs, "child run")]
    counts.append(counted(found.conversations, "conversation"))
    would = "would belong" if dry_run else "given"
    print_line(f"{counts[0]} {would} to tenant {found.tenant!r}, with {counts[1]} and {counts[2]}")


def _warn(reasons: Mapping[str, str], hint: str) -> None:
    lines = [*reasons.values()]
    for each in lines[:MOST_NAMED]:
        warn(f"{each}. {hint}" if hint else each)
    if len(lines) > MOST_NAMED:
        warn(f"{len(lines) - MOST_NAMED} more. Use --json to list them")
