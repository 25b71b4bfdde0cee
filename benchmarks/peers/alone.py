"""What holds in every process that measures, or that is measured."""

from __future__ import annotations

import os
import sys
import threading


def alone() -> None:
    """Without hiredis, which redis-py takes wherever it is installed and the bars are set without."""
    sys.modules["hiredis"] = None  # type: ignore[assignment]


def end_with_the_parent() -> None:
    """End this process at once when its input does."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
