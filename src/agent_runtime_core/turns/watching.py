"""Looking at files until they have changed and lie still; and what is wrong with them, said once."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Protocol

from .._clock import Clock
from .._refusals import is_number
from ..errors import InvalidArgument, brief
from ..portal import in_thread
from .files import Mark

log: logging.Logger = logging.getLogger("agent_runtime_core")

#: Seconds for which files must lie still before they are read: who writes one in parts is let finish.
STILL = 0.1
#: How often they are asked whether they do, before they are read all the same.
PATIENCE = 50


class Reloads(Protocol):
    """Something made of files."""

    def marks(self) -> dict[Path, Mark]: ...
    def reload(self) -> bool: ...


async def watch(source: Reloads, interval: float, clock: Clock) -> None:
    """Reload `source` whenever its files have changed; files are looked at in a thread, never on the loop."""
    if not is_number(interval) or not 0 < interval < math.inf:
        raise InvalidArgument(f"interval={brief(interval)} cannot be used: it must be a number of seconds above 0")
    seen: dict[Path, Mark] | None = None
    while True:
        marks = await in_thread(source.marks)
        for _ in range(PATIENCE):
            if marks == seen:
                break
            await clock.sleep(STILL)
            seen, marks = marks, await in_thread(source.marks)
        await in_thread(source.reload)
        await clock.sleep(interval)


class Problems:
    """Logs what is wrong with something once for as long as it stays so. `last` is it, or None."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said: object = None
        self.last: InvalidArgument | None = None

    def tell(self, error: InvalidArgument, content: object = None) -> None:
        """This is wrong, with that content of the files."""
        self.last = error
        if self._said != (said := (str(error), content)):
            self._said = said
            log.warning("%s cannot be used and the last good ones are kept: %s", self._what, error)

    def over(self) -> None:
        """All is well again."""
        self.last = self._said = None
