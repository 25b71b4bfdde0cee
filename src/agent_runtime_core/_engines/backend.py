"""What backends over our own engines share: how they are opened and closed."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from .._core.clock import SYSTEM, Clock
from .._core.settings import check_known
from ..errors import InvalidArgument, brief
from .base import Engine, Guard, Op, OperationSet
from .memory import MemoryEngine
from .shared_engine import SharedEngine
from .sqlite.engine import SQLiteEngine

DEFAULT_PATH = "agent_runtime.db"


class EngineStore:
    """A backend whose writes are operations of an engine it may share with others."""

    engine: Engine
    operation_sets: ClassVar[Sequence[OperationSet]]
    _let_go = False
    reads: ClassVar[Mapping[str, Callable[..., Any]]]

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)  # the base of the concern is next in line
        except TypeError:
            for name in options:
                check_known(name, _options_of(type(self)))
            raise

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await self.engine.commit(guard, ops)

    async def read(self, what: str, *args: Any) -> Any:
        return await self.engine.read(self.reads[what], *args)

    async def close(self) -> None:
        if not self._let_go:
            self._let_go = True
            await self.engine.close()


def _options_of(kind: type) -> set[str]:
    """What its constructor takes, and those of its bases, by name."""
    taken = {name for base in kind.__mro__ for name in inspect.signature(vars(base).get("__init__", object)).parameters}
    return taken - {"self", "args", "kwargs", "options"}


class OnMemory(EngineStore):
    """In this process, gone when it ends."""

    def __init__(self, *, engine: MemoryEngine | None = None, clock: Clock = SYSTEM, **options: Any) -> None:
        if engine is not None and not isinstance(engine, Engine):
            raise InvalidArgument(f"engine is a MemoryEngine, not {brief(engine)}: leave it out for one of its own")
        super().__init__(clock=engine.clock if engine is not None else clock, **options)
        self.engine: MemoryEngine = engine or MemoryEngine(clock)
        for concern in self.operation_sets:
            self.engine.add(concern)


class OnShared(EngineStore):
    """On an engine that is shared: the one given, or else what `opened()` gives."""

    engine: SharedEngine

    def __init__(
        self, engine: SharedEngine | None, opened: Callable[[], SharedEngine], clock: Clock, options: dict[str, Any]
    ) -> None:
        if engine is not None and not hasattr(engine, "share"):
            raise InvalidArgument(f"engine is one that is open, not {brief(engine)}: give a path or a URL instead")
        # Bad options are refused before anything is opened.
        super().__init__(clock=engine.clock if engine is not None else clock, **options)
        self.engine = engine.share() if engine is not None else opened()
        try:
            for concern in self.operation_sets:
                self.engine.add(concern)
        except BaseException:
            self.engine.close_now()
            raise


class OnSQLite(OnShared):
    """In one SQLite file, shared by all processes on this machine."""

    engine: SQLiteEngine

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        db_path: str | os.PathLike[str] | None = None,
        durability: str = "full",
        engine: SQLiteEngine | None = None,
        clock: Clock = SYSTEM,
        **options: Any,
    ) -> None:
        if path is not None and db_path is not None:
            raise InvalidArgument(
                f"path={brief(path, 500)} and db_path={brief(db_path, 500)} name the same thing; give one"
            )
        where = path if path is not None else db_path if db_path is not None else DEFAULT_PATH
        super().__init__(engine, lambda: SQLiteEngine.open(where, durability=durability, clock=clock), clock, options)
