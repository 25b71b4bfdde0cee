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
    request: Request, state: ServerState, row: RunRow, seconds: float, *, required: bool = False, cancels: bool = False
) -> RunRow:
    """Return the run once it has finished, as it is after `seconds`, or when the client or the server leaves.

    Args:
        request: The request.
        state: The state of the server.
        row: The run.
        seconds: How long to wait.
        required: A caller that has used its share of waits gets Problem 429. Otherwise it gets the run immediately.
        cancels: The run is being cancelled, and is ended as `runner.cancel(wait=True)` does.
    """
    if row.status not in LIVE or seconds <= 0:
        return row
    caller = request.scope[CALLER].name
    if not required and state.limits.no_wait(caller) is not None:
        return row  # what the request asked for is stored, so it must not fail
    with state.limits.wait(caller):
        return await _waited(request, state, row.run_id, seconds, cancels)


async def _waited(request: Request, state: ServerState, run_id: str, seconds: float, cancels: bool) -> RunRow:
    runner = state.runner
    end = start_helper(runner.cancel(run_id, wait=True) if cancels else runner.watcher.until_ended(run_id, None))
    others = [start_helper(_disconnected(request)), start_helper(state.draining.wait())]
    try:
        await asyncio.wait([end, *others], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        found = end.result() if end.done() else None
        return found if isinstance(found, RunRow) else await runner.queue.require(run_id)
    finally:
        for task in (end, *others):
            task.cancel()
        await asyncio.gather(end, *others, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
