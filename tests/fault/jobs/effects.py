"""What jobs leave behind for the test to see, whatever becomes of them."""

from __future__ import annotations

import os
import signal
import sys
import threading

WIDTH = 256
"""Bytes of a line, which divide a page: the kernel writes page by page, and a line over two is read in halves."""


def effect(path: str, *words: object) -> None:
    """Append a line, durably, and whole or not at all, whoever reads or kills meanwhile."""
    line = " ".join(map(str, words)).encode().ljust(WIDTH - 1) + b"\n"
    assert len(line) == WIDTH, f"a longer line than {WIDTH} bytes: {line!r}"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, line)
        os.fsync(fd)
    finally:
        os.close(fd)


def say(line: str) -> None:
    os.write(sys.stdout.fileno(), f"{line}\n".encode())


def ready() -> None:
    """Say so; if LIFE is set, SIGKILL comes that many seconds later, however busy those are who wait for it."""
    say("ready")
    if life := os.environ.get("LIFE"):
        end = threading.Timer(float(life), os.kill, (os.getpid(), signal.SIGKILL))
        end.daemon = True
        end.start()
