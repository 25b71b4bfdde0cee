"""The rule by which a command asks before it deletes.

A command that deletes or changes more runs than its arguments name accepts `--dry-run`. If nothing can undo it, the
command also asks on a terminal, and needs `--yes` without a terminal.
"""

from __future__ import annotations

import signal
import sys
from argparse import Namespace
from typing import Final

from ..errors import InvalidArgument
from .output import escaped, warn

#: The commands that delete or change more runs than their arguments name, and whether they ask. A run that was requeued
#: can be cancelled, and `restored --confirm` removes a mark. `vacuum` deletes by a retention that somebody has written
#: down, and a crontab has no terminal.
MANY: Final = {
    "dead discard": True, "dead requeue": False, "erase": True, "mark-restored": False, "tenant set": True,
    "vacuum": False,
}  # fmt: skip


def asks(args: Namespace) -> bool:
    """Return whether the command must ask before it does what it does to many runs."""
    return MANY[args.parser.prog.partition(" ")[2]] and not (args.yes or args.dry_run)


def confirmed(what: str) -> bool:
    """Ask whether to do `what`, such as "delete 2 dead runs", and return the answer.

    Raises:
        InvalidArgument: There is no terminal to ask on.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise InvalidArgument(f"there is no terminal to confirm this on. Add --yes to {what}, or --dry-run to try it")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # the event loop would not see Ctrl-C here
    try:
        sys.stderr.write(f"{escaped(f'{what[:1].upper()}{what[1:]}?')} [y/N] ")
        sys.stderr.flush()
        answer = sys.stdin.readline().strip().lower() in ("y", "yes")
    finally:
        signal.signal(signal.SIGINT, before)
    if not answer:
        warn("nothing was done")
    return answer
