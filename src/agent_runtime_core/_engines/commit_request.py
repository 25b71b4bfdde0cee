"""Commits on their way to the thread that carries them out, and their callers, who do not wait for ever."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Protocol

from .._core.per_loop import call_in_loop
from ..errors import StorageBusy
from .base import Guard, Op

FIRST_RESOLVED, MAX_RESOLVED = (
    8,
    64,
)  # callers told in one turn of their loop: at first, and where they do not take long
TURN_SECONDS = 0.001  # seconds that they may take together
LOST = 0.01  # seconds after which a loop is asked to flush once more: Ctrl-C may have come just before it did


class CommitExecutor(Protocol):
    """What carries commits out: an engine, or a store that is its own."""

    def callers(self, loop: asyncio.AbstractEventLoop) -> PendingCommits:
        """Those of that loop; StorageClosed where nothing is carried out any more."""

    def submit(self, request: CommitRequest) -> None:
        """Pass a commit on to be carried out, behind all that its callers passed on before."""


class CommitRequest:
    """One commit on its way to be carried out and back. To await it is to have it carried out, and gives its results.

    A coroutine around a future around this would be two more objects for each commit that is under way, and two more
    frames to go through when it is told.
    """

    __slots__ = (
        "callers", "carrier", "done", "error", "future", "guard", "loop", "ops", "result", "told", "withdrawn",
    )  # fmt: skip

    def __init__(self, guard: Guard | None, ops: Sequence[Op], carrier: CommitExecutor | None = None) -> None:
        self.guard: Guard | None = guard
        self.ops: Sequence[Op] = ops
        self.carrier: CommitExecutor | None = carrier
        self.result: list[Any] | None = None
        self.error: BaseException | None = None
        self.callers: PendingCommits | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.future: asyncio.Future[None] | None = None
        self.done: threading.Event | None = None
        self.withdrawn: bool = False
        self.told: bool = False  # on its loop: the outcome is known, not only computed

    def outcome(self) -> list[Any]:
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    def __await__(self) -> Generator[Any, None, list[Any]]:
        """A cancellation is raised when the outcome is known."""
        assert self.carrier is not None
        self.loop = loop = asyncio.get_running_loop()
        self.callers = callers = self.carrier.callers(loop)
        self.future = asyncio.Future(loop=loop)  # what loop.create_future() makes, which each step would call
        try:
            callers.add(self)
            self.carrier.submit(self)
            yield from self.future
        except asyncio.CancelledError:
            while not self.told:  # through more cancellations
                self.future = loop.create_future()
                with contextlib.suppress(asyncio.CancelledError):
                    yield from self.future
            raise
        finally:
            callers.waiting.pop(self, None)
        return self.outcome()


def resolve(requests: list[CommitRequest], at_once: int = FIRST_RESOLVED, since: float = 0.0) -> None:
    """Tell callers of one loop, on that loop; so many were told at `since`, and had their turn meanwhile."""
    # Each wakes a task: all at once they would hold the loop for as long as all of them take.
    later: Callable[[], object] | None = None
    if len(requests) > FIRST_RESOLVED and (loop := requests[0].loop) is not None:
        now = loop.time()
        if since:
            at_once = max(
                FIRST_RESOLVED, min(2 * at_once, MAX_RESOLVED, int(at_once * TURN_SECONDS / (now - since + 1e-9)))
            )
        if len(requests) > at_once:
            later = partial(loop.call_soon, resolve, requests[at_once:], at_once, now)
            requests = requests[:at_once]
    for request in requests:
        request.told = True
        if request.future is not None and not request.future.done():
            request.future.set_result(None)
    if later is not None:
        later()  # behind the tasks that were woken


def resolve_all(batch: Sequence[CommitRequest], here: asyncio.AbstractEventLoop | None = None) -> None:
    """Tell all callers: those of the loop that runs here, if one does, at once; one wake-up for each other loop."""
    loops: dict[asyncio.AbstractEventLoop, list[CommitRequest]] = {}
    for request in batch:
        if request.loop is not None:
            loops.setdefault(request.loop, []).append(request)
        elif request.done is not None:
            request.done.set()
    for loop, requests in loops.items():
        if loop is here:
            resolve(requests)
            continue
        call_in_loop(loop, resolve, requests)


def wait_in_thread(
    request: CommitRequest, send: Callable[[CommitRequest], None], what: str, patience: float
) -> list[Any]:
    """Have a commit carried out for a thread that has no loop."""
    request.done = threading.Event()
    send(request)
    if not request.done.wait(patience):
        request.withdrawn = True
        raise StorageBusy(f"{what} did not answer within {patience:g} s")
    return request.outcome()


class PendingCommits:
    """The callers of one event loop who wait for an outcome; `all_told` is called when there are none left."""

    __slots__ = ("_all_told", "_patience", "_what", "loop", "waiting", "watched")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, what: str, patience: Callable[[], float], all_told: Callable[[], object]
    ) -> None:
        self.loop: asyncio.AbstractEventLoop = loop
        self.waiting: dict[CommitRequest, float] = {}  # since when, by the time of the loop
        self.watched: bool = False
        self._what = what
        self._patience = patience
        self._all_told = all_told

    def add(self, request: CommitRequest) -> None:
        """Have its caller told in time, whether it is answered or not: one timer for all of the loop."""
        self.waiting[request] = self.loop.time()
        if not self.watched:
            self.watched = True
            self.loop.call_later(self._patience() / 4, self._watch)

    def _watch(self) -> None:
        now, patience = self.loop.time(), self._patience()
        for request, since in tuple(self.waiting.items()):
            if since + patience < now and request.error is None and request.result is None:
                request.withdrawn = True
                request.error = StorageBusy(
                    f"{self._what} did not answer within {patience:g} s; "
                    "whether the write landed is unknown, repeating it is safe"
                )
                resolve([request])
        self.watched = bool(self.waiting)
        if self.watched:
            self.loop.call_later(patience / 4, self._watch)
        else:
            self._all_told()


class LoopBatch(PendingCommits):
    """The commits that one event loop asks for in one iteration: `carry_out` gets them together, at its end."""

    __slots__ = ("_asked", "_carry_out", "turn")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, what: str, patience: Callable[[], float],
        carry_out: Callable[[list[Any]], None], all_told: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        super().__init__(loop, what, patience, all_told)
        self.turn: list[CommitRequest] = []
        self._carry_out = carry_out
        self._asked: float = 0.0  # when the loop was asked to flush

    def send(self, request: CommitRequest) -> None:
        """Carry out the commit together with the others of this iteration."""
        now = self.loop.time()
        if not self.turn or now - self._asked > LOST:
            self._asked = now
            self.loop.call_soon(self.flush)
        self.turn.append(request)

    def flush(self) -> None:
        """Carry out what this iteration asked for so far."""
        batch, self.turn = self.turn, []
        if batch:
            self._carry_out(batch)
