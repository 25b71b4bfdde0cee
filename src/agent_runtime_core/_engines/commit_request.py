"""A commit between its caller and the thread that applies it, and the limit on how long a caller waits."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import ref

from .._core.per_loop import call_in_loop
from ..errors import StorageBusy
from .base import Guard, Op

FIRST_RESOLVED = 8  # callers resolved in one loop iteration, at first
MAX_RESOLVED = 64  # the same once they turned out to be quick
RESOLVE_SECONDS = 0.001  # seconds that they may take together
#: Commits of one loop that are sent and not answered, at most. The others wait in the loop, so that a commit of another
#: thread, such as a heartbeat, never needs to wait for all of them.
MAX_IN_FLIGHT = 2048
#: How long, and how many times, a task commits in its own calls before the other tasks of its loop run. The number is
#: for a loop whose time stands still, as in a simulation.
NOW_SECONDS, MOST_NOW = 0.001, 32
FLUSH_RETRY = 0.01  # seconds after which a loop is asked to flush once more: Ctrl-C may have come just before it did


class CommitExecutor(Protocol):
    """What applies commits: an engine, or a store that is its own engine."""

    def pending(self, loop: asyncio.AbstractEventLoop) -> PendingCommits:
        """Return the pending commits of that loop, or raise StorageClosed."""

    def submit(self, request: CommitRequest) -> None:
        """Pass on a commit, to be applied after every earlier one of the same caller."""


class CommitRequest:
    """A commit to be applied. Awaiting it submits it and returns its results.

    It is its own awaitable: a coroutine and a future around it would cost each commit two objects and two frames.

    Args:
        guard: Apply them only if this claim is valid. If None, always.
        ops: The operations.
        executor: What applies the commit.
    """

    __slots__ = (
        "done", "error", "executor", "future", "guard", "loop", "ops", "repeats", "resolved", "result", "timed_out",
    )  # fmt: skip

    def __init__(self, guard: Guard | None, ops: Sequence[Op], executor: CommitExecutor | None = None) -> None:
        self.guard: Guard | None = guard
        self.ops: Sequence[Op] = ops
        self.executor: CommitExecutor | None = executor
        self.result: list[Any] | None = None
        self.error: BaseException | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.future: asyncio.Future[None] | None = None
        self.done: threading.Event | None = None
        self.timed_out: bool = False
        self.repeats: bool = False  # whether it may have been applied before, without a reply
        self.resolved: bool = False  # set on the loop, after `result` or `error`

    def outcome(self) -> list[Any]:
        """Return the results of the operations, or raise the error of the commit."""
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    def __await__(self) -> Generator[Any, None, list[Any]]:
        """Wait for the outcome. A cancellation is raised once the outcome is known."""
        assert self.executor is not None
        self.loop = loop = asyncio.get_running_loop()
        pending = self.executor.pending(loop)
        if pending.commit_now is not None and pending.commit_now(self):
            return self.outcome()
        self.future = asyncio.Future(loop=loop)  # as loop.create_future(), without the call in each step
        try:
            pending.add(self)
            self.executor.submit(self)
            yield from self.future
        except asyncio.CancelledError:
            while not self.resolved:  # further cancellations must not end the wait either
                self.future = loop.create_future()
                with contextlib.suppress(asyncio.CancelledError):
                    yield from self.future
            raise
        finally:
            pending.waiting.pop(self, None)
            if pending.on_answer is not None:
                pending.on_answer()
        return self.outcome()


def resolve(requests: list[CommitRequest], count: int = FIRST_RESOLVED, since: float = 0.0) -> None:
    """Wake the callers of one loop, on that loop, at most `count` of them in this iteration.

    Each wakes a task, and all together would block the loop for as long as all tasks take. `count` grows while the
    tasks woken at `since` were quick.
    """
    later: Callable[[], object] | None = None
    if len(requests) > FIRST_RESOLVED and (loop := requests[0].loop) is not None:
        now = loop.time()
        if since:
            count = max(
                FIRST_RESOLVED, min(2 * count, MAX_RESOLVED, int(count * RESOLVE_SECONDS / (now - since + 1e-9)))
            )
        if len(requests) > count:
            later = partial(loop.call_soon, resolve, requests[count:], count, now)
            requests = requests[:count]
    for request in requests:
        request.resolved = True
        if request.future is not None and not request.future.done():
            request.future.set_result(None)
    if later is not None:
        later()  # scheduled after the tasks that were woken


def resolve_all(batch: Sequence[CommitRequest]) -> None:
    """Wake all callers, with one call for each loop."""
    loops: dict[asyncio.AbstractEventLoop, list[CommitRequest]] = {}
    for request in batch:
        if request.loop is not None:
            loops.setdefault(request.loop, []).append(request)
        elif request.done is not None:
            request.done.set()
    for loop, requests in loops.items():
        call_in_loop(loop, resolve, requests)


def wait_in_thread(
    request: CommitRequest, send: Callable[[CommitRequest], None], store: str, timeout: float
) -> list[Any]:
    """Send a commit from a thread without an event loop and wait at most `timeout` seconds for its results."""
    request.done = threading.Event()
    send(request)
    if not request.done.wait(timeout):
        request.timed_out = True
        raise StorageBusy(f"{store} did not answer within {timeout:g} s. Try again")
    return request.outcome()


class PendingCommits:
    """The commits of one event loop whose callers wait, with one timer for all of them.

    A store answers in the order of the requests. So a caller's time does not start while the store answers earlier
    requests: 100,000 commits that were requested together take longer than the limit, and none of them is stuck.

    Args:
        loop: The event loop of the callers.
        store: Names the store in errors.
        timeout: Returns the seconds that a caller waits for a store that answers nothing.
        on_idle: Called when the timer finds no pending commit.
    """

    __slots__ = (
        "_first", "_moved_at", "_on_idle", "_store", "_timeout", "commit_now", "is_slow", "loop", "on_answer",
        "waiting", "watched",
    )  # fmt: skip

    def __init__(
        self, loop: asyncio.AbstractEventLoop, store: str, timeout: Callable[[], float], on_idle: Callable[[], object]
    ) -> None:
        self.loop: asyncio.AbstractEventLoop = loop
        self.waiting: dict[CommitRequest, float] = {}  # with the loop time at which each was added
        self.watched: bool = False
        self.on_answer: Callable[[], object] | None = None  # called after each answer
        self.commit_now: Callable[[CommitRequest], bool] | None = None  # see `LoopBatch.commit_now`
        self.is_slow: Callable[[], bool] | None = None  # whether callers wait for a function of a user
        self._first: CommitRequest | None = None  # was the first in line when the timer last looked
        self._moved_at = -math.inf  # loop time at which the store last answered, or got its first request
        self._store = store
        self._timeout = timeout
        self._on_idle = on_idle

    def add(self, request: CommitRequest) -> None:
        """Make sure that the caller gets an outcome in time, even if the store does not answer."""
        self.waiting[request] = self.loop.time()
        if not self.watched:
            self.watched = True
            self._first = request
            self.loop.call_later(self._timeout() / 4, self._watch)

    def line_began(self) -> None:
        """Start the time of the callers: the store handled all earlier requests.

        A loop that is asked for very many commits together needs longer than the limit before it can send the first.
        """
        self._moved_at = self.loop.time()

    def _watch(self) -> None:
        now, timeout = self.loop.time(), self._timeout()
        first = self._first
        # A request that ended because the store does not answer is no answer.
        if first is not None and (first.result is not None or not isinstance(first.error, StorageBusy | None)):
            self._moved_at = now
        if self.is_slow is not None and self.is_slow():
            self._moved_at = now
        late = tuple(self.waiting.items()) if self._moved_at + timeout < now else ()
        for request, since in late:
            if since + timeout < now and request.error is None and request.result is None:
                request.timed_out = True
                request.error = StorageBusy(
                    f"{self._store} did not answer within {timeout:g} s. The outcome of the write is unknown. "
                    "Repeat it: every write is idempotent"
                )
                resolve([request])
        self._first = next(iter(self.waiting), None)
        self.watched = self._first is not None
        if self.watched:
            self.loop.call_later(timeout / 4, self._watch)
        else:
            self._on_idle()


class LoopBatch:
    """Collects the commits of one iteration of an event loop; `commit_batch` gets them together, at its end.

    While `MAX_IN_FLIGHT` commits are not answered, later commits stay here. With `try_commit`, which executes a commit
    if it can, a task that alone commits does not wait for the end of each iteration: see `commit_now`.
    """

    __slots__ = (
        "_commit_batch", "_flush_requested_at", "_left", "_loop", "_task", "_try_commit", "_until", "pending",
        "requests",
    )  # fmt: skip

    def __init__(
        self, loop: asyncio.AbstractEventLoop, store: str, timeout: Callable[[], float],
        commit_batch: Callable[[list[Any]], None], on_idle: Callable[[], object] = lambda: None,
        try_commit: Callable[[list[CommitRequest]], bool] | None = None,
    ) -> None:  # fmt: skip
        self.pending: PendingCommits = PendingCommits(loop, store, timeout, on_idle)
        if try_commit is not None:
            self.pending.commit_now = self.commit_now
            self._try_commit = try_commit
        self._task: Callable[[], asyncio.Task[Any] | None] = lambda: None  # the last task that requested a commit
        self._left, self._until = 0, 0.0  # commits in calls until the next flush, and until when they are allowed
        self.requests: list[CommitRequest] = []
        self._loop = loop
        self._commit_batch = commit_batch
        self._flush_requested_at: float = 0.0

    def commit_now(self, request: CommitRequest) -> bool:
        """Commit in the call that requests it; False, with nothing done, if the end of the iteration must do it.

        All of this must hold:

        * The same task requested the last commit of this loop. Commits of several tasks are better as one group.
        * No other commit of this loop is open, so that all land in the order of the requests.
        * Since the last flush, which is a callback of the loop, less than `NOW_SECONDS` have passed and fewer than
          `MOST_NOW` commits were executed in calls. A task that only commits never pauses otherwise, and no other task,
          timer or cancellation gets its turn.
        * `try_commit` can execute it now: no thread or process is writing, and it is short.
        """
        task = asyncio.current_task(self._loop)
        if task is None or task is not self._task():
            if task is not None:
                self._task = ref(task)
            return False
        if self.requests or self.pending.waiting or not self._left or self._loop.time() > self._until:
            return False
        self._left -= 1
        return self._try_commit([request])

    def send(self, request: CommitRequest) -> None:
        """Commit the request together with the others of this iteration."""
        now = self._loop.time()
        if not self.requests or now - self._flush_requested_at > FLUSH_RETRY:
            self._flush_requested_at = now
            self._loop.call_soon(self.flush)
        self.requests.append(request)

    def flush(self, *, everything: bool = False) -> None:
        """Commit what was requested so far; at most `MAX_IN_FLIGHT` commits, unless `everything` is set."""
        self._left, self._until = MOST_NOW, self._loop.time() + NOW_SECONDS
        batch, free = self.requests, self._free()
        if everything or len(batch) <= free:
            self.requests, self.pending.on_answer = [], None
        else:
            self.pending.on_answer = self._flush_if_free
            if free < MAX_IN_FLIGHT // 2:  # a few at a time would copy a long list each time
                return
            batch, self.requests = batch[:free], batch[free:]
        if batch:
            if free == MAX_IN_FLIGHT:
                self.pending.line_began()
            self._commit_batch(batch)

    def _free(self) -> int:
        return MAX_IN_FLIGHT - max(len(self.pending.waiting) - len(self.requests), 0)

    def _flush_if_free(self) -> None:
        if self._free() >= MAX_IN_FLIGHT // 2:
            self._loop.call_soon(self.flush)
