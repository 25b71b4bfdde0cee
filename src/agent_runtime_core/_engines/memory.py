"""The engine that keeps its data in dicts of this process. The data is lost when the process ends."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .._core.clock import SYSTEM, Clock
from ..errors import LeaseLost
from .base import FENCE_OPS, FENCE_REPLAYS, MARK, Engine, Guard, NotApplied, Op, OperationSet, Outcome, moved

_MISSING = object()
_names = itertools.count()


class MemoryTx:
    """A transaction on dicts, with an undo log."""

    __slots__ = ("notified", "tables", "undo")

    def __init__(self, tables: dict[str, dict[Any, Any]]) -> None:
        self.tables: dict[str, dict[Any, Any]] = tables
        self.undo: list[tuple[dict[Any, Any] | list[Any], Any, Any]] = []
        self.notified: list[str] = []

    def put(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        self.undo.append((table, key, table.get(key, _MISSING)))
        table[key] = value

    def add(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        """Put a key that is known to be missing."""
        self.undo.append((table, key, _MISSING))
        table[key] = value

    def dict_in(self, table: dict[Any, Any], key: Any) -> dict[Any, Any]:
        """Return the dict that is the value of a key, a new dict if the key is missing."""
        found: dict[Any, Any] | None = table.get(key)
        if found is None:
            found = {}
            self.add(table, key, found)
        return found

    def drop(self, table: dict[Any, Any], key: Any) -> None:
        if key in table:
            self.undo.append((table, key, table.pop(key)))

    def pop(self, heap: list[Any]) -> Any:
        """Remove and return the smallest entry of a heap; a rollback restores it."""
        least = heapq.heappop(heap)
        self.undo.append((heap, None, least))
        return least

    def notify(self, topic: str) -> None:
        self.notified.append(topic)

    def fence(self, key: str, token: str | None) -> None:
        fences = self.tables["fence"]
        if token is None:
            self.drop(fences, key)
        else:
            self.put(fences, key, token)

    def fenced(self, key: str) -> str | None:
        token: str | None = self.tables["fence"].get(key)
        return token

    def rollback(self) -> None:
        for table, key, old in reversed(self.undo):
            if isinstance(table, list):
                heapq.heappush(table, old)
            elif old is _MISSING:
                table.pop(key, None)
            else:
                table[key] = old


class MemoryEngine(Engine):
    """Shared by the backends that get it as `engine`. One lock makes it thread-safe."""

    kind = "memory"

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        self.name: str = f"memory-{next(_names)}"
        self.tables: dict[str, dict[Any, Any]] = {"fence": {}}
        self._operations: dict[str, Callable[..., Any]] = {}
        self._replays: dict[str, Callable[..., Any]] = {}
        #: The reports of readers: for each run, the sequence and the boot time of each reader.
        self.readers: dict[str, dict[str, tuple[int, float]]] = {}
        self._lock = threading.RLock()
        self._listeners: dict[str, list[Callable[[], None]]] = {}
        self.add(OperationSet("fence", FENCE_OPS, FENCE_REPLAYS))

    def add(self, operation_set: OperationSet) -> None:
        self._operations.update(operation_set.operations)
        self._replays.update(operation_set.replays)
        for table in operation_set.tables:
            self.tables.setdefault(table, {})

    def apply(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        """Apply a commit immediately. The simulator calls this when a commit arrives."""
        tx = MemoryTx(self.tables)
        with self._lock:
            if guard is not None and self.tables["fence"].get(guard.key) != guard.token:
                return self._replay(tx, guard, ops)
            if MARK in self.tables["fence"] and (guard is None or guard.key != MARK):
                raise moved(self.location, self.tables["fence"][MARK])
            results = []
            try:
                for name, args in ops:
                    results.append(self._operations[name](tx, *args))
            except BaseException:
                tx.rollback()
                raise
        for topic in tx.notified:
            if topic in self._listeners:
                self.notify(topic)
        return results

    def _replay(self, tx: MemoryTx, guard: Guard, ops: Sequence[Op]) -> list[Any]:
        try:
            return [self._replays[name](tx, *args) for name, args in ops]
        except (KeyError, NotApplied):
            raise LeaseLost(guard.key, guard.token) from None

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return self.apply(guard, ops)

    def commit_from_thread(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return self.apply(guard, ops)

    def commit_nowait(self, guard: Guard | None, ops: Sequence[Op]) -> Outcome | None:
        try:  # faster than contextlib.suppress, and each step comes through here
            self.apply(guard, ops)
        except LeaseLost:
            return None
        return None

    async def fence_of(self, key: str) -> str | None:
        token: str | None = await self.read(MemoryTx.fenced, key)
        return token

    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        with self._lock:
            return fn(MemoryTx(self.tables), *args)

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        listeners = self._listeners.setdefault(topic, [])
        listeners.append(wake)

        def stop() -> None:
            if wake in listeners:
                listeners.remove(wake)

        return stop

    def notify(self, topic: str) -> None:
        if listeners := self._listeners.get(topic):
            for wake in tuple(listeners):
                try:
                    wake()
                except RuntimeError:  # the event loop of that listener is closed
                    continue

    async def close(self) -> None:
        """Do nothing: other backends on this engine may still read it."""
