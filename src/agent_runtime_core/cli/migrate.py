"""`agent-runtime migrate`: create or update the schema of a PostgreSQL store, and grant it to roles."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from .._core.lazy_import import load
from .._core.validation import Shown, must, redacted_url
from ..config import get_config
from ..errors import brief
from .output import print_json, print_line
from .store import is_postgres


async def migrate(args: Namespace) -> int:
    """Create or update the schema; with `--dry-run` print the statements that would do that."""
    url = args.store or args.url or get_config().backend_url or ""
    if not is_postgres(url):
        shown = Shown(brief(redacted_url(url), 500)) if url else Shown("none")
        fix = "A SQLite file and a Redis store are updated when a process opens them"
        raise must("STORE", "be postgresql://host:5432/database", shown, fix)
    migrate_store: Any = load(".._engines.postgres.migration:migrate_store", package=__package__)
    place, statements = await asyncio.to_thread(
        migrate_store, url, role=args.role, reader=args.reader, dry_run=args.dry_run
    )
    if args.json:
        print_json({"store": place, "dry_run": args.dry_run, "statements": statements})
    elif args.dry_run:
        for each in statements:
            print_line(f"{each};")
    elif statements:
        print_line(f"migrated {place}")
    else:
        print_line(f"{place} is up to date")
    return 0
