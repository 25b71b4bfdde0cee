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
from typing import Any, NamedTuple, Protocol, Self, cast

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


class Backend(ABC):
    """What a queue, an event bus and a state store have in common, ours and a third party's."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        if lacks := ", ".join(sorted(cls.__abstractmethods__)):
            kind = next(each for each in cls.__mro__ if Backend in each.__bases__)
            raise InvalidArgument(
                f"{cls.__name__} lacks {lacks}: since 0.6.0 {type_name(kind)} brings these and inherits the rest; "
                "docs/how-to/write-a-backend.md says what they do"
            )
        return super().__new__(cls)

    @abstractmethod
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        """Apply all of `ops` or none while `guard` holds; their results in order, once they are durable."""

    @property
    def commits(self) -> Committer:
        """What writes for this backend: the engine it shares with others, or itself."""
        return cast(Committer, getattr(self, "engine", self))


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
