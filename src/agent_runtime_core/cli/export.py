"""`agent-runtime export`: write a run with all that is stored of it."""

from __future__ import annotations

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import TextIO

from .._core.validation import Shown, must
from .._views.export import export as exported
from ..errors import InvalidArgument, StorageError, brief
from ..inspector.export import run_html
from ..queue.records import RunRow
from ..runner.runner import AgentRunner
from .output import json_line, warn
from .store import existing_store, require_run


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
    """Write a file in UTF-8, also on a console with another encoding."""
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
