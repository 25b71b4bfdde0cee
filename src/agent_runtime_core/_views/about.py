"""What a page has to know about its server before it shows anything, and whether the server is ready."""

from __future__ import annotations

import asyncio
import platform
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, Final

from .._core.lazy_import import load
from ..errors import AgentRuntimeError
from ..runner.run_client import RunClient

STORE_SECONDS: Final = 2.0  # for the store to answer


def about_view(runner: RunClient, scopes: Iterable[str], *, hide_store: bool = False) -> dict[str, Any]:
    """Return the store, the versions and what the caller may do.

    Args:
        runner: The runner on the store.
        scopes: The scopes of the caller.
        hide_store: Leave out the location of the store.

    Returns:
        {"version", "python", "sqlite", "store", "backend", "durability", "read_only", "scopes"}.
        `durability` is "full" or "normal" for a SQLite file, else None.
    """
    engine = runner.queue.commits
    return {
        "version": load("agent_runtime_core:__version__"), "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "store": None if hide_store else str(getattr(engine, "path", type(runner.queue).__name__)),
        "backend": type(runner.queue).__name__.removesuffix("Queue"),
        "durability": getattr(engine, "durability", None), "read_only": bool(getattr(engine, "read_only", False)),
        "scopes": sorted(scopes),
    }  # fmt: skip


def health_view(runner: RunClient, problems: Sequence[str], streams: int = 0) -> dict[str, Any]:
    """Return what a caller with the scope read gets to know about the health of a server."""
    return {
        "version": load("agent_runtime_core:__version__"), "python": platform.python_version(),
        "worker": runner.config.worker_id, "queue": type(runner.queue).__name__,
        "agents": len(runner.registry.keys()), "streams": streams, "problems": problems,
    }  # fmt: skip


async def store_problem(runner: RunClient) -> str:
    """Return why the store does not answer, or ""."""
    try:
        async with asyncio.timeout(STORE_SECONDS):
            await runner.queue.next_due()
    except (AgentRuntimeError, TimeoutError) as error:
        return f"the store does not answer: {type(error).__name__}"
    return ""
