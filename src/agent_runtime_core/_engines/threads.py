"""The threads of an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..errors import StorageBusy


def started(target: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread that runs; StorageBusy where the system has none to give now."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise StorageBusy(
            f"{error}: nothing was written, try again when this process may have more memory or threads"
        ) from error
    return thread
