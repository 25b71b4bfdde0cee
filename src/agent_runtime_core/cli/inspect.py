"""`agent-runtime inspect`: serve the page of the inspector for a store, which is opened read-only."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import cast

from .._core.lazy_import import load
from ..config import get_config
from ..errors import InvalidArgument
from ..inspector.local_server import LocalServer
from ..registry import Registry
from .output import json_line, print_line
from .store import contents_only_shown, display_name, open_store, require_file


async def inspect(args: Namespace) -> int:
    """Print a line with the URL when ready; serve the page until SIGTERM or SIGINT."""
    url = args.store or get_config().backend_url
    if url is None:
        raise InvalidArgument("store must be a file or a URL, got none. Example: agent-runtime inspect agents.db")
    require_file(url, "Check the path")
    with _stop_on_signals() as stopped, contents_only_shown():
        async with open_store(url, Registry(), read_only=True) as runner:
            await runner.queue.next_due()  # raises for an unreadable store before the ready line
            place = display_name(runner, url)
            async with LocalServer(runner, args.port) as server:
                if args.json:
                    json_line({"ready": True, "url": server.url, "store": place})
                else:
                    print_line(f"inspecting {place} on {server.url}")
                    sys.stdout.flush()
                if args.open_browser:
                    # In a daemon thread: some browsers run until their window is closed, and must not delay the end.
                    open_page = cast("Callable[[str], bool]", load("webbrowser:open"))
                    threading.Thread(target=open_page, args=(server.url,), daemon=True).start()
                await stopped.wait()
    return 0


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[asyncio.Event]:
    """Yield an event that SIGTERM or SIGINT sets."""
    # By the loop, which wakes up for a signal. A handler of `signal` would wait for an event if another thread got it.
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stopped.set)
    try:
        yield stopped
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
