"""`agent-runtime inspect` and `export`: show runs in a browser, and write a run with all that is stored of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import TextIO, cast

from .._core.lazy_import import load
from .._core.validation import Shown, must
from .._views.export import export as exported
from ..config import get_config
from ..errors import InvalidArgument, StorageError, brief
from ..inspector.export import run_html
from ..inspector.local_server import LocalServer
from ..queue.records import RunRow
from ..registry import Registry
from ..runner.runner import AgentRunner
from .output import json_line, print_line, warn
from .store import contents_only_shown, display_name, existing_store, open_store, require_file, require_run


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


async def export(args: Namespace) -> int:
    if args.redact and not args.html:
        warn("--redact needs --html")
        return 2
    async with existing_store(args, reads=True) as runner:
        row = await require_run(runner, args.id, args.tenant)
        _check_output(runner, args.output)
        if args.html:
            _write(await run_html(runner, row.run_id, redact=args.redact), args.output)
        else:
            with _output_to(args.output):
                await _write_lines(runner, row)
    return 0


def _check_output(runner: AgentRunner, path: str | None) -> None:
    store = getattr(runner.queue.commits, "path", None)
    if path is None or store is None or not os.path.exists(path):
        return
    # A closed store has no log, but the worker of another process may have one.
    if any(os.path.exists(each) and os.path.samefile(path, each) for each in (store, f"{store}-wal", f"{store}-shm")):
        raise InvalidArgument("--output must not be the file of the store. Use another name, such as run.html")


def _write(text: str, path: str | None) -> None:
    """Write text in UTF-8 to a file or to stdout, whatever the encoding of the console is."""
    if path is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())
    else:
        with _written(path), _opened(path) as file:
            file.write(text)


@contextlib.contextmanager
def _output_to(path: str | None) -> Iterator[None]:
    if path is None:
        yield
    else:
        with _written(path), _opened(path) as file, contextlib.redirect_stdout(file):
            yield


@contextlib.contextmanager
def _written(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise must("--output", "be a file that can be written", Shown(f"{brief(path, 500)}: {error.strerror}"),
                   "Choose another path") from error  # fmt: skip


def _opened(path: str) -> TextIO:
    return open(path, "w", encoding="utf-8", newline="\n")


async def _write_lines(runner: AgentRunner, row: RunRow) -> None:
    async with contextlib.aclosing(exported(runner, row)) as lines:
        async for each in lines:
            json_line(each, flush=False)
