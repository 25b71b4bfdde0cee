"""`agent-runtime carry-over`: the files of version 0.5.2, put into the stores of today."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

from ..errors import InvalidArgument
from ..persistence.carry_over import carry_over
from .text import say, tell, warn


async def carried(args: Namespace) -> int:
    if "://" in (args.directory or ""):  # as a path it would lose a slash, and its password would be shown
        raise InvalidArgument(f"DIR must be a directory, got {args.directory}. Name the directory of .agent_runtime")
    found = await carry_over(args.directory)
    if args.json:
        tell(asdict(found))
    else:
        say(f"{found.directory}: {_counted(found.carried)} carried over")
        if found.kept:
            say(f"{_counted(found.kept)} of them there already, and left as they are")
    for name, why in found.unreadable.items():
        warn(f"{found.directory}/{name} is left as it is, for it cannot be read ({why})")
    if not found.opens:
        warn(f"{found.directory} opens once these are repaired or moved away and the command was run again")
    elif found.unreadable:
        warn(f"{found.directory} opens without these tasks. Repair them and run the command again to add them")
    return 1 if found.unreadable else 0


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(counts.items())) or "nothing"
