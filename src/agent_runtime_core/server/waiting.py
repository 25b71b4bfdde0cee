"""Wait for the end of a run within a request."""

from __future__ import annotations

import asyncio
import re
from typing import Final

from fastapi import Request

from .._core.context_vars import start_helper
from ..queue.records import LIVE, RunRow
from .access import CALLER
from .state import ServerState

MAX_WAIT: Final = 60
_PREFERRED: Final = re.compile(r'(?:^|[,;\s])wait\s*=\s*"?([0-9]{1,9})"?\s*(?=[,;]|$)', re.IGNORECASE)


def preferred_wait(header: str | None) -> int:
    """Return the seconds of `Prefer: wait=SECONDS`, at most 60; 0 without it. Other preferences are ignored."""
    found = _PREFERRED.search(header or "")
    return min(int(found[1]), MAX_WAIT) if found else 0


async def after_wait(
    request: Request, state: ServerState, row: RunRow, seconds: float, *, required: bool = False
) -> RunRow:  # fmt: skip
    """Return the run once it has finished, as it is after `seconds`, or when the client or the server leaves.

    A caller that has used its share of waits gets the run immediately, or with `required` Problem 429.
    """
    if row.status not in LIVE or seconds <= 0:
        return row
    caller = request.scope[CALLER].name
    if not required and state.limits.no_wait(caller) is not None:
        return row  # what the request asked for is stored, so it must not fail
    with state.limits.wait(caller):
        return await _waited(request, state, row, seconds)


async def _waited(request: Request, state: ServerState, row: RunRow, seconds: float) -> RunRow:
    end = start_helper(state.runner.watcher.until_ended(row.run_id, seconds))
    others = [start_helper(_disconnected(request)), start_helper(state.draining.wait())]
    try:
        await asyncio.wait([end, *others], return_when=asyncio.FIRST_COMPLETED)
        return (end.result() if end.done() else None) or await state.runner.queue.require(row.run_id)
    finally:
        for task in (end, *others):
            task.cancel()
        await asyncio.gather(end, *others, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
