"""What the built-in backends of a technology share: the constructor, and the methods that their engine carries out.

A backend is such a class, the base class of its role, and two tables:

    class SQLiteQueue(SQLiteBackend, RunQueue):
        operation_sets: ClassVar[OperationSets] = (...)
        reads: ClassVar[Reads] = {"row": ..., "find": ...}
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

from .._core.clock import SYSTEM, Clock
from .._core.settings import check_known
from .._core.validation import Shown, must
from ..errors import brief
from .base import Backend, Engine, Guard, Op, OperationSet
from .memory import MemoryEngine
from .shared_engine import SharedEngine
from .sqlite.engine import SQLiteEngine
from .threaded import ThreadedEngine

DEFAULT_PATH = "agent_runtime.db"

OperationSets = Sequence[OperationSet]
Reads = Mapping[str, Callable[..., Any]]


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
    """Return the names of the arguments of its constructor and of its bases' constructors."""
    constructors = [vars(base).get("__init__", object) for base in backend.__mro__]
    return {name for each in constructors for name in inspect.signature(each).parameters} - {
        "self", "args", "kwargs", "options",
    }  # fmt: skip


class OnEngine:
    """The methods of a backend that its engine carries out."""

    operation_sets: ClassVar[OperationSets]
    reads: ClassVar[Reads] = {}
    """The functions that read, by the name of what they read."""
    rewrites: ClassVar[bool] = True
    copies: ClassVar[bool] = True
    engine: Any

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        """Commit on the engine; see `Backend.commit`.

        Args:
            guard: Apply them only if this claim is valid. If None, always.
            ops: The operations.

        Returns:
            The result of each operation.
        """
        return cast("list[Any]", await self.engine.commit(guard, ops))

    async def read(self, what: str, *args: Any) -> Any:
        """Read from the engine. The base class of the backend says what there is to read.

        Args:
            what: What to read.
            *args: Its arguments.

        Returns:
            What the base class of the backend describes for it.
        """
        return await self.engine.read(self.reads[what], *args)

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Listen on the engine; see `Engine.listen`.

        Args:
            topic: The topic.
            wake: Called after commits that notify the topic.

        Returns:
            A function that removes the listener; None if callers must poll.
        """
        return cast("Callable[[], None]", self.engine.listen(topic, wake))


def hold(backend: Any, engine: Engine) -> None:
    """Make an engine, which counts `backend` as a user, the engine of the backend."""
    try:
        for operation_set in backend.operation_sets:
            engine.add(operation_set)
    except BaseException:
        cast(SharedEngine, engine).close_now()
        raise
    backend.engine = backend._held_engine = engine


def hold_shared(backend: Any, engine: Any, open_engine: Callable[[], SharedEngine]) -> None:
    """Hold `engine`, or without it the engine that `open_engine` returns."""
    if engine is not None and not hasattr(engine, "share"):
        raise must("engine", "be an open engine", engine, "Pass a path or a URL instead")
    hold(backend, engine.share() if engine is not None else open_engine())


class MemoryBackend(OnEngine, Backend):
    """A backend in the memory of this process."""

    engine: MemoryEngine

    def __init__(self, *, engine: MemoryEngine | None = None, clock: Clock = SYSTEM, **options: Any) -> None:
        with known_options(type(self), options):
            cast(Any, super()).__init__(clock=getattr(engine, "clock", clock), **options)
        if engine is not None and not isinstance(engine, Engine):
            raise must("engine", "be a MemoryEngine", engine, "Leave it out for a new one")
        hold(self, engine or MemoryEngine(clock))


class SQLiteBackend(OnEngine, Backend):
    """A backend in one SQLite file, which all processes on this machine share."""

    engine: SQLiteEngine

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, db_path: str | os.PathLike[str] | None = None,
        durability: str = "full", engine: SQLiteEngine | None = None, clock: Clock = SYSTEM, **options: Any,
    ) -> None:  # fmt: skip
        with known_options(type(self), options):
            cast(Any, super()).__init__(clock=getattr(engine, "clock", clock), **options)
        if path is not None and db_path is not None:
            got = Shown(f"{brief(path, 500)} and {brief(db_path, 500)}")
            raise must("path and db_path", "not both be passed", got, "Pass path alone")
        where = path if path is not None else db_path if db_path is not None else DEFAULT_PATH
        hold_shared(self, engine, lambda: SQLiteEngine.open(where, durability=durability, clock=clock))


class EngineBackend(OnEngine, Backend):
    """The base class of a backend on your own `ThreadedEngine`, in front of `RunQueue`, `EventBus` or `StateStore`.

    Your class sets `engine_class`, `operation_sets` and `reads`. The backends of a process that are opened at one place
    share one engine, which the last `close` closes.

    Args:
        place: Where the store is; see `ThreadedEngine.open`.
        engine: An open engine, in place of `place`.
        clock: The clock of a new engine.
        **options: Arguments of the other base class, such as `max_retries` of a queue.

    Raises:
        UnknownSetting: if no base class takes an option.
        InvalidArgument: Neither `place` nor `engine` is passed.
    """

    #: The class of the engine.
    engine_class: ClassVar[type[ThreadedEngine]]
    #: The operations of this backend.
    operation_sets: ClassVar[OperationSets] = ()
    #: Functions by what `read` is asked for. Each gets a connection in a transaction, and the arguments.
    reads: ClassVar[Reads] = {}
    rewrites = copies = False
    engine: ThreadedEngine

    def __init__(
        self, place: Any = None, *, engine: ThreadedEngine | None = None, clock: Clock = SYSTEM, **options: Any
    ) -> None:
        with known_options(type(self), options):
            cast(Any, super()).__init__(clock=getattr(engine, "clock", clock), **options)
        if engine is None and place is None:
            raise must("place", "be passed", Shown("none"), "Pass the path or URL of the store")
        cls = self.engine_class
        hold_shared(self, engine, lambda: cls.open(place, clock=clock))

    def listen(self, topic: str, wake: Callable[[], None]) -> Any:
        """Listen on the engine if it hears other processes; else as the other base class does, which polls.

        Args:
            topic: The topic.
            wake: Called after commits that notify the topic.

        Returns:
            A function that removes the listener; None if callers must poll.
        """
        return self.engine.listen(topic, wake) or cast(Any, super(OnEngine, self)).listen(topic, wake)

    def lease_now(self) -> float:
        """Return the time on the clock that leases are measured by: the engine's."""
        return self.engine.lease_now()
