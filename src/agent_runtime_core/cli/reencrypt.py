"""`agent-runtime reencrypt`: encrypt all stored contents with the current key of the payload codec."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final
from urllib.parse import unquote

from ..config import get_config
from ..errors import InvalidArgument, brief
from ..registry import Registry
from ..runner.reencryption import Reencryption
from ..runner.reencryption import reencrypt as encrypt_again
from .output import counted, print_json, print_line, warn
from .store import open_store, require_file

_FILES: Final = "files:///"
_NAMED: Final = 5  # runs that a message names


async def reencrypt(args: Namespace) -> int:
    """Encrypt the contents of a store again; return 1 if some are left as they are."""
    sys.path.insert(0, args.agent_path)  # the codec may be a module of the application
    url = args.store or args.url or get_config().backend_url or ""
    if url.startswith(_FILES):
        _require_directory(url)
        found = await encrypt_again(url, batch=args.batch)
    else:
        require_file(url, "Check the path")
        async with open_store(url or None, Registry()) as runner:
            found = await encrypt_again(runner, batch=args.batch, compact=args.compact)
    if args.json:
        print_json(asdict(found))
    else:
        _print(found)
    return _warn(found)


def _require_directory(url: str) -> None:
    if not os.path.isdir(unquote(url.removeprefix(_FILES))):
        raise InvalidArgument(f"directory {brief(url, 500)} not found. Check the path")


def _print(found: Reencryption) -> None:
    print_line(f"{counted(found.texts, 'text')} re-encrypted")
    for key_id, count in found.keys.items():
        role = " (current)" if key_id == found.current else ""
        hint = "" if count or role or found.not_supported else ", so it can be removed from the codec"
        if hint and key_id == found.digest_key_id:
            hint += " if you pass digest_key"
        print_line(f"key {key_id!r}{role}: {counted(count, 'text')}{hint}")
    if found.plain:
        print_line(f"not encrypted: {counted(found.plain, 'text')}")


def _warn(found: Reencryption) -> int:
    """Write what was left as it is, and return the exit code."""
    if found.skipped:
        runs = "1 run is owned by a worker and was" if len(found.skipped) == 1 else "runs are owned by workers and were"
        count = "" if len(found.skipped) == 1 else f"{len(found.skipped)} "
        warn(f"{count}{runs} skipped: {_named(found.skipped)}. Run the command again later")
    for name, reason in found.not_supported.items():
        warn(f"{name} cannot be re-encrypted: {reason}")
    for reason in [*found.unreadable.values()][:_NAMED]:
        warn(reason)
    if len(found.unreadable) > _NAMED:
        warn(f"{len(found.unreadable) - _NAMED} more texts cannot be read. Use --json to list them")
    return 1 if found.skipped or found.not_supported or found.unreadable else 0


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more (--json lists them)" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more
