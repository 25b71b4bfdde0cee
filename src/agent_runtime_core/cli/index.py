"""`agent-runtime index`: build or delete the full-text index of a store."""

from __future__ import annotations

from argparse import Namespace

from .output import counted, print_json, print_line
from .store import display_name, existing_store


async def index(args: Namespace) -> int:
    """Index the contents of runs, or delete the index."""
    async with existing_store(args) as runner:
        store = display_name(runner, args.url)
        if args.drop:
            dropped = await runner.search_index.drop()
            found: dict[str, int] = {"dropped": dropped}
            line = f"{store} {'has no index now' if dropped else 'had no index'}"
        else:
            number = await runner.search_index.build()
            found, line = {"indexed": number}, f"{counted(number, 'run')} indexed in {store}"
    if args.json:
        print_json(found)
    else:
        print_line(line)
    return 0
