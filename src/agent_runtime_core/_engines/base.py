"""What an engine is: the one place that writes, all or nothing, under a fence.

A *fence* is a row (key, token) of the engine itself, or what a concern's own row says of that key. A
`Guard` names the token its writer believes in; a commit whose guard does not hold changes nothing and
raises `LeaseLost`, unless every one of its operations finds that it has been applied before (a lost
reply), which is success.

Tokens are ULIDs, made to grow for each key. `INSTALL` accepts only a greater token: it carries a
claim made on one engine to another one before the claim's first read or write there.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar, cast

from .._core.clock import Clock
from .._core.threads import started
from .._core.validation import type_name
from ..errors import InvalidArgument, LeaseLost


class Op(NamedTuple):
    """One write, as a value: the name of a registered operation and its plain arguments."""

    name: str
    args: tuple[Any, ...] = ()


class Guard(NamedTuple):
    """Commit only while `token` is the fence of `key`."""

    key: str
    token: str


class NotApplied(Exception):
    """Raised by an operation's `applied` twin: this write has not happened yet."""


@dataclass(frozen=True, repr=False, eq=False)
class OperationSet:
    """What a concern brings to an engine.

    `ops[name](tx, *args)` runs inside the transaction and must be idempotent by its own identity.
    `applied[name](tx, *args)` answers for a write that already happened, or raises NotApplied.
    `migrations[i]` lifts the concern's schema from version i to i + 1, statements parted by ";\\n".
    """

    name: str
    operations: Mapping[str, Callable[..., Any]]
    replays: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    migrations: Sequence[str] = ()
    #: Names of the dicts it needs on the memory engine.
    tables: Sequence[str] = ()
    #: Operations that run somebody's function, so that a group that fails may not simply be tried again.
    not_repeatable: frozenset[str] = frozenset()
    #: Operations that may take more than a moment, with these arguments, so that no event loop is to carry them out.
    slow: Mapping[str, Callable[..., bool]] = field(default_factory=dict)
    #: On SQLite: the fence of a key by a row of its own, `fence(tx, key)`, whatever is stored beside it; or None.
    fence: Callable[[Any, str], str | None] | None = None


def always(*args: Any) -> bool:
    """Whatever the arguments are."""
    return True


class Committer(Protocol):
    """Anything that takes writes: an engine, or a third party's backend that is its own engine."""

    def commit(self, guard: Guard | None, ops: Sequence[Op]) -> Awaitable[list[Any]]: ...


INSTALL = "fence.install"
FORGET = "fence.forget"
LOWEST_TOKEN = "0" * 26  # a token below that of every claim


class Engine(ABC):
    """A durable (or not) home of several concerns, shared by all that name the same place."""

    kind: str
    clock: Clock
    #: Seconds that writes nobody waits for are worth holding back, to travel with the next one.
    buffer_delay: float = 0.0
    #: Names this process to others on the same store; "" where nobody can tell a dead one.
    process_id: str = ""

    @abstractmethod
    def commit(self, guard: Guard | None, ops: Sequence[Op]) -> Awaitable[list[Any]]:
        """Apply all of `ops` or none; what to await for their results in order, once they are durable.

        Cancelling the caller never tears the transaction: the cancellation is raised after the
        outcome is known.
        """

    @abstractmethod
    def commit_from_thread(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        """The same for a thread without an event loop."""

    @abstractmethod
    def commit_nowait(self, guard: Guard | None, ops: Sequence[Op]) -> None:
        """Queue a commit ahead of every later one without waiting for it; a refusal is dropped.

        Only for writes whose loss a later commit would repeat or does not need, and that may be carried out twice.
        """

    @abstractmethod
    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(view, *args)` on a consistent view of what has been committed."""

    @abstractmethod
    def add(self, concern: OperationSet) -> None:
        """Register a concern once; a newer stored schema is refused with StorageTooNew."""

    @abstractmethod
    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake()`, from any thread, after commits that rang `topic`; returns the way to stop."""

    def beat(self, fn: Callable[[], None], interval: float) -> Callable[[], None]:
        """Call `fn()` every `interval` seconds from a thread no event loop can starve; returns the way to stop."""
        return every(fn, interval)

    @abstractmethod
    async def close(self) -> None:
        """Let go; the last one to let go of a place closes it."""

    def lease_now(self) -> float:
        """The clock that leases are written in, common to all processes on this store."""
        return self.clock.boot()


EngineT = TypeVar("EngineT", bound=Engine)
_Method = TypeVar("_Method", bound=Callable[..., Any])


class EngineStore(Generic[EngineT]):
    """What a built-in backend holds: its engine, which others may share, and its reads by name.

    `close` closes the engine once for this backend; the engine counts its users.
    """

    __slots__ = ("closed", "engine", "reads")

    def __init__(
        self, engine: EngineT, operation_sets: Sequence[OperationSet], reads: Mapping[str, Callable[..., Any]]
    ) -> None:
        for operation_set in operation_sets:
            engine.add(operation_set)
        self.engine: EngineT = engine
        self.reads: Mapping[str, Callable[..., Any]] = reads
        self.closed: bool = False

    def read(self, what: str, *args: Any) -> Awaitable[Any]:
        return self.engine.read(self.reads[what], *args)

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        return self.engine.listen(topic, wake)

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            await self.engine.close()


def needs_engine(method: _Method) -> _Method:
    """Mark a method that every backend without an engine store must override."""
    cast(Any, method).needs_engine = True
    return method


class Backend(ABC):  # noqa: B024 - the bases for third parties have abstract methods
    """What queues, event buses, state stores and document stores share.

    A built-in backend names its `operation_sets` and holds an `EngineStore`. A third party's backend overrides the
    methods that need one.
    """

    _engine_store: EngineStore[Any] | None = None

    def __new__(cls, *args: Any, **options: Any) -> Self:
        lacks = set(cls.__abstractmethods__)
        if not hasattr(cls, "operation_sets"):
            inherited = ((name, getattr(cls, name, None)) for name in ("commit", "read"))
            lacks.update(name for name, method in inherited if getattr(method, "needs_engine", False))
        if lacks:
            kind = next(each for each in cls.__mro__ if Backend in each.__bases__)
            raise InvalidArgument(
                f"{cls.__name__} lacks {', '.join(sorted(lacks))}: since 0.6.0 {type_name(kind)} brings these and "
                "inherits the rest; docs/how-to/write-a-backend.md says what they do"
            )
        return super().__new__(cls)

    @needs_engine
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        """Apply all of `ops` or none while `guard` holds; return their results in order, once they are durable."""
        return cast("list[Any]", await self._held_store().engine.commit(guard, ops))

    @property
    def commits(self) -> Committer:
        """What writes for this backend: the engine it shares with others, or itself."""
        return cast(Committer, getattr(self, "engine", self))

    async def close(self) -> None:
        """Close the engine store, if this backend holds one. A second call does nothing."""
        if self._engine_store is not None:
            await self._engine_store.close()

    def _held_store(self) -> EngineStore[Any]:
        if self._engine_store is None:
            raise NotImplementedError(f"{type(self).__name__} must override this method, because it holds no engine")
        return self._engine_store


def every(fn: Callable[[], None], interval: float) -> Callable[[], None]:
    """Call `fn()` each `interval` seconds from a daemon thread until the returned function is called."""
    stopped = threading.Event()

    def loop() -> None:
        while not stopped.wait(interval):
            fn()

    started(loop, "agent-runtime-beat")
    return stopped.set


def install(tx: Any, key: str, token: str) -> bool:
    """Make `token` the fence of `key` if it is greater than the one there, or the same."""
    held = tx.fenced(key)
    if held is not None and held > token:
        raise LeaseLost(key, token)
    if held != token:
        tx.fence(key, token)
    return True


def forget(tx: Any, key: str) -> None:
    tx.fence(key, None)


def installed(tx: Any, key: str, token: str) -> bool:
    """Whether that token, or a greater one, came to be the fence of `key`: its outcome."""
    held = tx.fenced(key)
    if held is None or held < token:
        raise NotApplied
    return True


FENCE_OPS: Mapping[str, Callable[..., Any]] = {INSTALL: install, FORGET: forget}
FENCE_REPLAYS: Mapping[str, Callable[..., Any]] = {INSTALL: installed}


def end_fence(key: str, token: str) -> Op:
    """Have the claim `token` be over for `key`, and those before it: no write of theirs lands behind this one. Later
    claims are greater."""
    return Op(INSTALL, (key, f"{token}!"))
