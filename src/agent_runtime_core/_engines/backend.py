"""Open the engine store that a built-in backend holds."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from .._core.clock import SYSTEM, Clock
from .._core.settings import check_known
from .._core.validation import Shown, must
from ..errors import brief
from .base import Engine, EngineStore, OperationSet
from .memory import MemoryEngine
from .shared_engine import SharedEngine
from .sqlite.engine import SQLiteEngine

DEFAULT_PATH = "agent_runtime.db"

Reads = Mapping[str, Callable[..., Any]]
SharedT = TypeVar("SharedT", bound=SharedEngine)


@contextlib.contextmanager
def known_options(backend: type, options: Mapping[str, Any]) -> Iterator[None]:
    """Raise UnknownSetting, with the nearest name, where the block rejects an option that no constructor takes."""
    try:
        yield
    except TypeError:
        for name in options:
            check_known(name, _options_of(backend))
        raise


def _options_of(backend: type) -> set[str]:
    """Return the names of the arguments of its constructor and of those of its bases."""
    constructors = [vars(base).get("__init__", object) for base in backend.__mro__]
    return {name for each in constructors for name in inspect.signature(each).parameters} - {
        "self", "args", "kwargs", "options",
    }  # fmt: skip


def memory_store(
    operation_sets: Sequence[OperationSet], reads: Reads, *, engine: MemoryEngine | None = None, clock: Clock = SYSTEM
) -> EngineStore[MemoryEngine]:
    """Open a store on `engine`, or on a new one in this process."""
    if engine is not None and not isinstance(engine, Engine):
        raise must("engine", "be a MemoryEngine", engine, "Leave it out for a new one")
    return EngineStore(engine or MemoryEngine(clock), operation_sets, reads)


def shared_store(
    operation_sets: Sequence[OperationSet], reads: Reads, engine: SharedT | None, open_engine: Callable[[], SharedT]
) -> EngineStore[SharedT]:
    """Open a store on `engine`, or on the one that `open_engine` returns."""
    if engine is not None and not hasattr(engine, "share"):
        raise must("engine", "be an open engine", engine, "Pass a path or a URL instead")
    held = engine.share() if engine is not None else open_engine()
    try:
        return EngineStore(held, operation_sets, reads)
    except BaseException:
        held.close_now()
        raise


def sqlite_store(
    operation_sets: Sequence[OperationSet], reads: Reads, path: str | os.PathLike[str] | None = None, *,
    db_path: str | os.PathLike[str] | None = None, durability: str = "full", engine: SQLiteEngine | None = None,
    clock: Clock = SYSTEM,
) -> EngineStore[SQLiteEngine]:  # fmt: skip
    """Open a store in one SQLite file, which all processes on this machine share."""
    if path is not None and db_path is not None:
        got = Shown(f"{brief(path, 500)} and {brief(db_path, 500)}")
        raise must("path and db_path", "not both be passed", got, "Pass path alone")
    where = path if path is not None else db_path if db_path is not None else DEFAULT_PATH
    return shared_store(
        operation_sets, reads, engine, lambda: SQLiteEngine.open(where, durability=durability, clock=clock)
    )
