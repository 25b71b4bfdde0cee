"""The contract of a storage engine: commits of operations, all or nothing, under a fence.

A *fence* is the current token of a key. It is a row of the engine itself, or a column in a row of an operation set. A
`Guard` names the token that its writer expects. A commit whose guard does not match changes nothing and raises
`LeaseLost`. If each of its operations was applied before, because the reply of an earlier try was lost, it succeeds.

Tokens are ULIDs and grow for each key. `INSTALL` accepts only a greater token. It copies a claim that was made on one
engine to another engine, before the claim's first read or write there.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol, Self

from .._core.clock import Clock
from .._core.threads import started
from .._core.validation import Shown, must, type_name
from ..errors import MOST_NAMED, LeaseLost, StorageMoved

if TYPE_CHECKING:
    from .._core.redaction import Redaction


class Op(NamedTuple):
    """One write: the name of a registered operation and its plain arguments.

    Attributes:
        name: The name of a registered operation.
        args: Its arguments.
    """

    name: str
    args: tuple[Any, ...] = ()


class Guard(NamedTuple):
    """Commit only while `token` is the fence of `key`.

    Attributes:
        key: What the fence is of, such as a run id.
        token: The fence of the writer.
    """

    key: str
    token: str


class NotApplied(Exception):
    """Raised by a replay: this write was not applied before."""


class FunctionFailed(Exception):
    """What a user's function raised inside of a commit. The engine raises `error` to its caller, and repeats nothing.

    Without it, an engine takes an error of the user's own statements, or a failed connection to another server, for an
    error of the store.

    Args:
        error: What the function raised.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Batch(NamedTuple):
    """Applies commits of one shape, at most one for each run, with as few statements as possible.

    `apply(engine, requests)` is a generator. It yields a list of statements with their values, and gets a list with the
    rows of each, once they are committed. It sets `result` of each request that it applied, and returns the others, of
    which it must have stored nothing. The engine applies those by the operations themselves.

    Attributes:
        apply: Applies the requests; see above.
        fits: Whether a request is of the usual kind that `apply` is for. Others are applied by the operations, in their
            turn.
        topics: The topics whose listeners are woken after the commit.
    """

    apply: Callable[[Any, Sequence[Any]], Any]
    fits: Callable[[Any], bool]
    topics: frozenset[str] = frozenset()


@dataclass(frozen=True, repr=False, eq=False)
class OperationSet:
    r"""The operations of one component (queue, events, state, documents) for an engine.

    `operations[name](tx, *args)` runs inside the transaction and must be idempotent by its own identity.
    `replays[name](tx, *args)` returns the result of a write that was applied before, or raises NotApplied.
    `migrations[i]` changes the schema from version i to i + 1; its statements are separated by ";\n".

    Attributes:
        name: The name of the component.
        operations: The operations by name.
        replays: The replays by name.
        migrations: The statements that change the schema, one text for each version.
        tables: Names of the dicts that the memory engine keeps for it.
        not_repeatable: Operations that run a user's function. A group with such an operation must not simply be
            repeated after a failure.
        slow: Whether an operation may be slow with these arguments. It would block the event loop, so a thread applies
            it.
        fence: On SQLite: `fence(tx, key)` returns the fence of a key from a row of this set, or None. It overrides the
            engine's own fence.
        short_reads: On SQLite: what reads a few rows by their key, by the function of a read. It returns None if there
            is too much to read for the event loop. To hand a read to a thread takes ten times as long as such a read.
        one_statement: On a `ThreadedEngine`: functions of reads that execute one statement, and so need no transaction.
        batches: On a `ThreadedEngine`: what applies many commits of one shape with one statement, by the names of their
            operations without repeats. See `Batch`.
        lock: On a `ThreadedEngine`: `lock(tx, requests)` locks the rows that these requests will lock, in an order that
            is the same in every process. It is called before the first of them is applied.
    """

    name: str
    operations: Mapping[str, Callable[..., Any]]
    replays: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    migrations: Sequence[str] = ()
    tables: Sequence[str] = ()
    not_repeatable: frozenset[str] = frozenset()
    slow: Mapping[str, Callable[..., bool]] = field(default_factory=dict)
    fence: Callable[[Any, str], str | None] | None = None
    short_reads: Mapping[Callable[..., Any], Callable[..., Any]] = field(default_factory=dict)
    one_statement: frozenset[Callable[..., Any]] = frozenset()
    batches: Mapping[tuple[str, ...], Batch] = field(default_factory=dict)
    lock: Callable[[Any, Sequence[Any]], None] | None = None


def always(*args: Any) -> bool:
    """For `OperationSet.slow`: an operation that may be slow with any arguments."""
    return True


class Committer(Protocol):
    """What applies commits: an engine, or a third party's backend that is its own engine."""

    def commit(self, guard: Guard | None, ops: Sequence[Op]) -> Awaitable[list[Any]]: ...


#: The fence of a whole store that is moved. Only a commit whose guard is this mark is applied; see `moving_mark`.
MARK: Final = "moved"
INSTALL = "fence.install"
FORGET = "fence.forget"
LOWEST_TOKEN = "0" * 26  # lower than the token of every claim
READER_SECONDS: Final = 2.0  # for which the report of a reader of events counts


class Outcome(Protocol):
    """The outcome of a commit that nobody waits for; both are None until it is known."""

    result: list[Any] | None
    error: BaseException | None


class Engine(ABC):
    """A store of the operation sets of several backends, shared by all backends on the same location."""

    kind: str
    clock: Clock
    #: Seconds that a write without a waiting caller may be buffered, to be sent with the next commit.
    buffer_delay: float = 0.0
    process_id: str = ""
    """Names this process to others on the same store; "" if the store cannot detect that a process died."""
    location: str = "memory"
    """The file or server in error messages, without a password."""
    read_only: bool = False
    """Whether every commit raises NotSupported."""

    @abstractmethod
    def commit(self, guard: Guard | None, ops: Sequence[Op]) -> Awaitable[list[Any]]:
        """Apply all of `ops` or none; await the return value for their results in order, once they are durable.

        A cancellation of the caller is raised after the outcome is known, so the transaction stays whole.

        Args:
            guard: Apply them only if this claim is valid. If None, always.
            ops: The operations.

        Returns:
            The result of each operation.
        """

    @abstractmethod
    def commit_from_thread(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        """Commit from a thread without an event loop, and return the results.

        Args:
            guard: Apply them only if this claim is valid. If None, always.
            ops: The operations.

        Returns:
            The result of each operation.
        """

    @abstractmethod
    def commit_nowait(self, guard: Guard | None, ops: Sequence[Op]) -> Outcome | None:
        """Queue a commit ahead of every later commit without waiting for it, and raise none of its errors.

        Only for writes that may be applied twice.

        Args:
            guard: Apply them only if this claim is valid. If None, always.
            ops: The operations.

        Returns:
            What later contains its error or its results; None if the caller cannot learn of them.
        """

    @abstractmethod
    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Return `fn(view, *args)`, on a consistent view of the committed data.

        Args:
            fn: A function of a view and `args`.
            *args: Further arguments of `fn`.
        """

    @abstractmethod
    async def fence_of(self, key: str) -> str | None:
        """Return the token of a key that the engine itself stores.

        Args:
            key: The key.
        """

    async def store_wall(self) -> float:
        """Return the time on the wall clock that decides which runs are due."""
        return self.clock.wall()

    @abstractmethod
    def add(self, operation_set: OperationSet) -> None:
        """Register an operation set; a second time does nothing.

        Args:
            operation_set: The operation set.

        Raises:
            StorageTooNew: The stored schema is newer than the set's migrations.
        """

    @abstractmethod
    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake()`, from any thread, after commits that notify `topic`; return a function that stops it.

        Args:
            topic: The topic.
            wake: Called after each of these commits.

        Returns:
            A function that stops it.
        """

    def beat(self, fn: Callable[[], None], interval: float) -> Callable[[], None]:
        """Call `fn()` every `interval` seconds from a thread, which a busy event loop cannot delay.

        Args:
            fn: The function.
            interval: Seconds between two calls.

        Returns:
            A function that stops the calls.
        """
        return every(fn, interval)

    @abstractmethod
    async def close(self) -> None:
        """End the use of this engine; the last user closes it."""

    def lease_now(self) -> float:
        """Return the time in which leases are stored, which is the same for all processes on this store."""
        return self.clock.boot()


class Backend(ABC):
    """What queues, event buses, state stores and document stores share, both built-in and third-party."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        if lacks := sorted(cls.__abstractmethods__):
            kind = next(each for each in cls.__mro__ if Backend in each.__bases__)
            fix = f"Since 0.6.0, {type_name(kind)} inherits the rest: see docs/guide/write-a-backend.md"
            more = f" and {len(lacks) - MOST_NAMED} more" if len(lacks) > MOST_NAMED else ""
            names = f"{', '.join(lacks[:MOST_NAMED])}{more}"
            raise must(cls.__name__, f"define {names}", Shown("a class without that"), fix)
        return super().__new__(cls)

    @abstractmethod
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        """Apply all of `ops` or none while `guard` holds; return their results in order, once they are durable.

        Args:
            guard: Apply them only if this claim is valid. If None, always.
            ops: The operations.

        Returns:
            The result of each operation.
        """

    async def close(self) -> None:
        """Close what this backend holds. A second call does nothing."""
        held, self._held_engine = self._held_engine, None
        if held is not None:  # the engine counts its users: it ends with the last user
            await held.close()

    #: The engine that a built-in backend opened or shares. It counts as one user until `close`.
    _held_engine: Engine | None = None

    sink_redaction: Redaction | None = None
    """Redacts what leaves the process, as logs and traces do; None without `redact`."""
    redaction: Redaction | None = None
    """Redacts what this backend stores; None without `redact_stored`."""
    payloads: Any = None
    """The `Payloads` that encode what this backend stores; None without a codec."""
    #: The `PayloadFields` of this component: the contents in its operations.
    payload_fields: ClassVar[Any]
    rewrites: ClassVar[bool] = False
    """Whether this backend has the operations and reads with which `agent-runtime reencrypt` encodes contents again."""
    copies: ClassVar[bool] = False
    """Whether this backend has the operations and reads with which `agent-runtime copy` moves its contents."""

    @property
    def commits(self) -> Committer:
        """What writes for this backend: the engine it shares with others, or itself."""
        engine: Committer = getattr(self, "engine", self)
        payloads = self.payloads
        committer: Committer = engine if payloads is None else payloads.committer(engine, self.payload_fields)
        return committer


def every(fn: Callable[[], None], interval: float) -> Callable[[], None]:
    """Call `fn()` every `interval` seconds from a daemon thread until the returned function is called."""
    stopped = threading.Event()

    def loop() -> None:
        while not stopped.wait(interval):
            fn()

    started(loop, "agent-runtime-beat")
    return stopped.set


def install(tx: Any, key: str, token: str) -> bool:
    """Make `token` the fence of `key`, or raise LeaseLost if the present fence is greater."""
    present = tx.fenced(key)
    if present is not None and present > token:
        raise LeaseLost(key, token)
    if present != token:
        tx.fence(key, token)
    return True


def forget(tx: Any, key: str) -> None:
    tx.fence(key, None)


def installed(tx: Any, key: str, token: str) -> bool:
    """The replay of `install`: the fence of `key` is that token, or a greater token."""
    present = tx.fenced(key)
    if present is None or present < token:
        raise NotApplied
    return True


def moving_mark(token: str, **about: object) -> str:
    """Return the mark of a store that is moved. `token` grows with each mark of the same store.

    Args:
        token: The id of the move and its phase.
        about: The other store, as `to` or as `source`, and what a repeated move needs.
    """
    return f"{token} {json.dumps(about)}"


def about_mark(mark: str) -> dict[str, Any]:
    """Return what `moving_mark` was told."""
    about: dict[str, Any] = json.loads(mark.partition(" ")[2])
    return about


def moved(location: str, mark: str) -> StorageMoved:
    """Return the error of a commit on a marked store."""
    about = about_mark(mark)
    if "to" not in about:
        return StorageMoved(
            f"{location} must be complete before it is used, got a copy of {about['source']} that has not ended. Wait "
            f"for agent-runtime copy, or run it again"
        )
    fix = "" if about["done"] else f", or give up the copy with: agent-runtime copy {location} --undo"
    return StorageMoved(
        f"{location} was moved to {about['to']}, so it accepts no writes. Use that store{fix}", about["to"]
    )


FENCE_OPS: Mapping[str, Callable[..., Any]] = {INSTALL: install, FORGET: forget}
FENCE_REPLAYS: Mapping[str, Callable[..., Any]] = {INSTALL: installed}


def end_fence(key: str, token: str) -> Op:
    """Return the write that ends the claim `token` of `key`, and every earlier claim.

    None of their writes is applied after this write. Later claims use greater tokens.
    """
    return Op(INSTALL, (key, f"{token}!"))
