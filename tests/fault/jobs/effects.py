"""What jobs leave behind for the test to see, whatever becomes of them."""

from __future__ import annotations

import os
import sys


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
