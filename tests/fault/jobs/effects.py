"""What jobs leave behind for the test to see, whatever becomes of them."""

from __future__ import annotations

import os
import signal
import sys
import threading


def effect(path: str, *words: object) -> None:
    """Append a line, durably."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, (" ".join(map(str, words)) + "\n").encode())
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
