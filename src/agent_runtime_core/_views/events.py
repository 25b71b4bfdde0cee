"""A page of the events of a run as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import Final

from ..events.base import EventBus
from ..events.event import Event
from .problems import Problem
from .wire import event_json, without_stacks

FURTHEST: Final = 2**53  # JavaScript represents integers exactly up to here
PAGE_BYTES: Final = (1 << 20) - 100  # of a page, unless its first event is larger
MOST_TYPES: Final = 20  # patterns of event types
MOST_READ: Final = 8192  # events that one page reads, if the patterns of types remove most of them

Chosen = Callable[[Event], bool]


def sequence_of(name: str, text: str | None) -> int | None:
    """Return the sequence number in a parameter or header; None for None.

    Raises:
        Problem: It is none.
    """
    if text is None:
        return None
    if text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= FURTHEST:
        return int(text)
    message = f"{name} must be an integer from 0 to 2^53."
    raise Problem.of(400, message, errors=[{"field": name, "message": message}])


def type_filter(types: Sequence[str] | None) -> Chosen | None:
    """Return a function that selects the events whose type fits one of the patterns; None without patterns.

    Raises:
        Problem: There are too many.
    """
    if not types:
        return None
    if len(types) > MOST_TYPES:  # each event is compared with all of them
        message = f"There must be at most {MOST_TYPES} of them."
        raise Problem.of(422, f"types: {message}", type="urn:agent-runtime:invalid-argument",
                         errors=[{"field": "types", "message": message}])  # fmt: skip
    fits = re.compile("|".join(map(fnmatch.translate, dict.fromkeys(types)))).match
    return lambda event: fits(event.event_type) is not None


async def events_page(
    bus: EventBus, run_id: str, start: int, chosen: Chosen | None = None, *, stacks: bool = True
) -> bytes:  # fmt: skip
    """Return {"items", "next"} with the events from `start` on, as JSON.

    `next` is the value of `after` for the next page, null at the end of the log. Without `stacks`, failures have none.
    """
    stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    stored.set_result(None)
    items: list[bytes] = []
    size, read, position = 0, 0, start
    async with contextlib.aclosing(bus.pages(run_id, start, until=stored)) as pages:
        async for page in pages:
            if read >= MOST_READ:
                return _page_of(items, position - 1)
            for event in page if stacks else without_stacks(page):
                if chosen is None or chosen(event):
                    encoded = event_json(event)
                    if items and size + len(encoded) > PAGE_BYTES:
                        return _page_of(items, position - 1)
                    items.append(encoded)
                    size += len(encoded) + 1
                position = event.sequence + 1
            read += len(page)
    return _page_of(items, None)


def _page_of(items: Sequence[bytes], position: int | None) -> bytes:
    after = b"null" if position is None else b"%d" % position
    return b'{"items":[%b],"next":%b}' % (b",".join(items), after)
