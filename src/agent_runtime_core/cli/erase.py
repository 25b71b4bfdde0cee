"""`agent-runtime erase`: erase what a tenant, a conversation or runs have stored."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

from ..config import get_config
from ..errors import MOST_NAMED
from ..registry import Registry
from ..runner.erasure import Erasure
from .consent import asks, confirmed
from .output import counted, print_json, print_line, warn
from .store import display_name, open_store, require_file

_COUNTS = (
    ("records", "journal records"), ("events", "events"), ("messages", "mailbox messages"),
    ("effects", "results of guarded steps (their digests stay)"), ("topic_events", "events of topics"),
    ("blanked", "messages in conversations that stay (their text is replaced)"),
)  # fmt: skip


async def erase(args: Namespace) -> int:
    """Erase, and print the counts; return 1 if something is left."""
    url = args.store or args.url or get_config().backend_url
    require_file(url or "", "Check the path")
    target = {"tenant": args.tenant, "conversation": args.conversation, "run_ids": args.run}
    async with open_store(url, Registry()) as runner:
        if asks(args):
            found = await runner.erase(**target, dry_run=True)
            counts = f"{counted(found.runs, 'run')} and {counted(sum(found.documents.values()), 'document')}"
            if not confirmed(f"erase {counts} from {display_name(runner, url)}"):
                return 1
        found = await runner.erase(
            **target, cancel=args.cancel, dry_run=args.dry_run, compact=True if args.compact else None
        )
    if args.json:
        print_json(asdict(found))
    else:
        _print(found)
    for name in found.unknown:
        warn(f"run {name!r} not found. What named it is erased. Check its name, and its --tenant")
    left = [f"{place}: {reason}" for place, reason in found.left.items()]
    for line in left[:MOST_NAMED]:
        warn(line)
    if len(left) > MOST_NAMED:
        warn(f"{len(left) - MOST_NAMED} more. Use --json to list them")
    if not (found.audited or found.dry_run):
        warn("no audit store is configured, so there is no record of this erasure")
    return 1 if left else 0


def _print(found: Erasure) -> None:
    live = f" ({found.live} not finished)" if found.live else ""
    print_line(f"{'would erase' if found.dry_run else 'erased'}:")
    print_line(f"runs, with child runs and forks: {found.runs}{live}")
    for name, what in _COUNTS:
        print_line(f"{what}: {getattr(found, name)}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.documents.items()))
    print_line(f"documents: {sum(found.documents.values())}{f' ({kinds})' if kinds else ''}")
