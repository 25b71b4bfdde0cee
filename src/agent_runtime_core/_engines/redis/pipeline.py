"""Send commits to a Redis server and read their outcomes over one connection.

One call of the script is in flight at a time. Commits that are requested during a call are sent together in the next.

To hand a commit to a thread and to get its outcome wakes a sleeping thread twice, which takes longer than most calls.
So an event loop sends small calls and reads small answers itself: `CommitPipeline._is_for` states when. It never waits
for the server. Everything that takes time or goes wrong is left to the thread, which takes the call in flight over.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from ..._core.threads import started
from ...errors import AgentRuntimeError, StorageBusy, StorageClosed, StorageError, brief
from ..base import Guard, Op
from ..commit_request import CommitExecutor, CommitRequest, resolve, resolve_all
from ..shared_engine import Process
from .connection import Connection, LoopSocket, NoReply, NotSent, reconnect_delay, refused

BATCH = 64  # commits in one call of the script
LARGE = 1_000_000  # characters after which no more are added to a call
ON_LOOP = 32_000  # characters of the commits in a call that a loop sends: a socket takes them without waiting
LATE = 0.1  # seconds after which the thread waits for an answer instead of the loop
POSTED = 4.0  # times the timeout, for a commit without a waiting caller, who could repeat it


class ScriptCall(CommitRequest):
    """A commit on its way to the server."""

    __slots__ = ("born", "text")

    def __init__(
        self, guard: Guard | None, ops: Sequence[Op], text: str, executor: CommitExecutor | None = None
    ) -> None:
        super().__init__(guard, ops, executor)
        self.text: str = text
        self.born: float = time.monotonic()

    @property
    def posted(self) -> bool:
        """Whether no caller waits for it. Such a commit may be applied twice, and must precede later commits."""
        return self.future is None and self.done is None


def joined(batch: Sequence[ScriptCall]) -> bytes:
    """Encode a batch as the last argument of the script."""
    return f"[{','.join([call.text for call in batch])}]".encode("utf-8", "surrogatepass")


def _resolve_here(batch: Sequence[ScriptCall]) -> None:
    """Wake the callers of a call that the running loop sent."""
    resolve([call for call in batch if call.future is not None])


#: In the inbox of the thread: it is to take over the call in flight.
_TAKE_OVER = ScriptCall(None, [], "")


class CommitPipeline:
    """Sends the commits of a process over one connection in the order in which they were asked for.

    `read_answer(call, answer)` stores the outcome of one commit.
    """

    def __init__(
        self, line: Connection, read_answer: Callable[[ScriptCall, bytes], None], timeout: Callable[[], float]
    ) -> None:
        self._connection = line
        self._read_answer = read_answer
        self._timeout = timeout
        self._inbox: SimpleQueue[ScriptCall | None] = SimpleQueue()  # None ends the thread
        self._lock = threading.Lock()  # of all below; who holds it waits for nothing
        self._thread: threading.Thread | None = None
        self._closed = False
        self._forks = Process.forks
        self._answered_at = -math.inf  # when the server last answered a batch
        self._queued = 0  # entries of the inbox that the thread did not finish: it uses the connection
        self._socket: LoopSocket | None = None  # of the loop that may use the connection while the thread does not
        self._in_flight: Sequence[ScriptCall] | None = None  # sent by that loop and not answered
        self._unsent = b""  # what the socket did not take of them
        self._sent_at = -math.inf
        self._next: list[ScriptCall] = []  # requested on that loop since then, for its next call

    def put(self, batch: Sequence[ScriptCall]) -> None:
        """Have the thread send these commits, after those that were requested before."""
        try:
            with self._lock:
                self._put(batch)
        except StorageError as error:  # no thread can be started
            self._failed(batch, error)

    def _put(self, batch: Sequence[ScriptCall]) -> None:
        if self._thread is None:
            self._thread = started(self._run, "agent-runtime-redis")
        before, self._next = self._next, []
        self._queued += len(before) + len(batch)
        for call in (*before, *batch):
            self._inbox.put(call)

    def close(self) -> None:
        """Send what was requested before, then end the thread and the connection."""
        with self._lock:
            self._closed = True
            if self._next:
                self._put(())
            self._inbox.put(None)
            if self._socket is not None and not self._socket.loop.is_running():
                self._leave()  # a running loop leaves when it sees the end of the connection
        if self._thread is not None:
            self._thread.join(self._timeout() * 2)

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the use of the connection by the running loop."""
        with self._lock:
            if self._socket is not None and self._socket.loop is loop:
                if self._in_flight is None:
                    self._leave()
                else:
                    self._hand_over()

    # -- on an event loop

    def send(self, loop: asyncio.AbstractEventLoop, batch: Sequence[ScriptCall]) -> None:
        """Send what one iteration of the running loop requested, or have the thread send it."""
        with self._lock:
            if is_mine := self._is_for(loop):
                self._next += batch
                if self._in_flight is None:
                    self._send_next()
        if not is_mine:
            self.put(batch)

    def _is_for(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether the running loop may use the connection itself.

        The thread must have nothing to send, or it would be overtaken. The connection must be up, and looked sound when
        it was last used, because the loop cannot wait for a new connection. It must be without TLS, which may have to
        read before it can write. No other open loop may use it: answers wake the loop that holds the socket. And the
        last call of the loop must not be late.
        """
        if self._queued or self._closed:
            return False
        if self._in_flight is not None:
            assert self._socket is not None
            return self._socket.loop is loop and time.monotonic() - self._sent_at < LATE
        if not self._connection.fresh():
            return False
        if self._socket is not None:
            if self._socket.loop is loop and self._socket.conn is self._connection.conn:
                return True
            if self._socket.loop is not loop and not self._socket.loop.is_closed():
                return False
            self._leave()
        self._socket = self._connection.on_loop(loop, self._readable)
        return self._socket is not None

    def _send_next(self) -> None:
        """Send the next call from the loop."""
        assert self._socket is not None
        batch: list[ScriptCall] = []
        size = 0
        for call in self._next:
            size += len(call.text)
            if size > ON_LOOP or len(batch) == BATCH:
                break
            batch.append(call)
        if not batch:  # the first request is large
            self._put(())
            return
        del self._next[: len(batch)]
        self._sent_at = time.monotonic()
        self._in_flight, self._unsent = batch, self._connection.request(joined(batch))
        if not self._socket.watched:
            self._socket.watched = True
            self._socket.loop.call_later(LATE, self._look, self._socket)
        self._unsent = self._socket.send(self._unsent)
        if self._unsent:
            self._hand_over()

    def _readable(self) -> None:
        """Read the answer to the call in flight, on the loop."""
        batch: Sequence[ScriptCall] | None = None
        try:
            with self._lock:
                answers = self._arrived()
                if answers is None:
                    return
                batch, self._in_flight = self._in_flight, None
                if self._next and not self._queued:
                    self._send_next()
        finally:
            if batch is not None:
                self._answered(batch, answers or (), _resolve_here)

    def _arrived(self) -> list[bytes] | None:
        """Return the answers, if they are the plain answers to the call in flight."""
        if self._socket is None or self._forks != Process.forks:
            return None
        if self._queued or self._closed or self._socket.conn is not self._connection.conn:
            self._leave()  # the thread reads it, and must not wake the loop with each answer
            return None
        try:
            answers = self._socket.answer()
        except BlockingIOError:  # the thread read it
            return None
        if self._in_flight is None:  # the server ended the connection, or sends what nobody asked for
            self._connection.drop()
            self._leave()
            return None
        if answers is None:
            self._hand_over()
        else:
            self._connection.used()
        return answers

    def _look(self, socket: LoopSocket) -> None:
        """Leave a late answer to the thread."""
        with self._lock:
            socket.watched = socket is self._socket and self._in_flight is not None
            if not socket.watched:
                return
            if time.monotonic() - self._sent_at >= LATE:
                self._hand_over()
            else:
                socket.loop.call_later(LATE, self._look, socket)

    def _hand_over(self) -> None:
        """Have the thread take over the call in flight, and what comes after it."""
        self._leave()
        self._put((_TAKE_OVER,))

    def _leave(self) -> None:
        """End the use of the connection by the loop."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # -- the thread

    def _run(self) -> None:
        while not self._next_is_last():  # a waiting thread keeps no batch alive
            pass
        self._connection.drop()
        with contextlib.suppress(Empty):
            while True:  # commits that were put after the end
                if (call := self._inbox.get_nowait()) is not None:
                    self._failed([call], StorageClosed(f"{self._connection.place} was closed. Open it again"))

    def _next_is_last(self) -> bool:
        """Apply the next batch. True if it was the last batch."""
        batch: list[ScriptCall] = []
        size = 0
        call = self._inbox.get()
        with contextlib.suppress(Empty):
            while call is not None:
                batch.append(call)
                size += len(call.text)
                if len(batch) == BATCH or size >= LARGE:
                    break
                call = self._inbox.get_nowait()
        with self._lock:
            in_flight, self._in_flight = self._in_flight, None
        if in_flight:
            self._apply(in_flight, self._unsent)
        self._apply([each for each in batch if each is not _TAKE_OVER])
        with self._lock:
            self._queued -= len(batch)
        return call is None

    def _apply(self, batch: Sequence[ScriptCall], unsent: bytes | None = None) -> None:
        """Apply a batch and wake the callers. Blocks until then, or until the time limit of the batch.

        With `unsent` it is in flight, except for these bytes.
        """
        while batch := [call for call in batch if unsent is not None or not call.timed_out]:
            try:
                answers = self._evaluated(batch, unsent)
            except (NotSent, NoReply) as error:
                unsent = None
                if batch := self._given_up(batch, error):
                    reconnect_delay()
            except Exception as error:  # noqa: BLE001 - raised to these callers; the thread serves others
                self._failed(batch, error)
                return
            else:
                self._answered(batch, answers)
                return

    def _evaluated(self, batch: Sequence[ScriptCall], unsent: bytes | None) -> list[bytes]:
        """Return the answers of the script, or raise NotSent if the server could not be reached in time."""
        until = min(map(self._until, batch))
        while True:
            try:
                return self._connection.evaluate(joined(batch), unsent)
            except NotSent:
                unsent = None
                if time.monotonic() >= until or self._closed:
                    raise
                reconnect_delay()

    def _until(self, call: ScriptCall) -> float:
        # A call that waited for its turn gets its time from the answer to the last batch.
        return max(call.born, self._answered_at) + self._timeout() * (POSTED if call.posted else 1)

    def _given_up(self, batch: Sequence[ScriptCall], error: Exception) -> list[ScriptCall]:
        """Fail the commits with waiting callers and return the posted commits, which are sent again.

        A caller's commit that were sent again here could be applied twice without the caller's knowledge.
        """
        now = time.monotonic()
        again = [call for call in batch if call.posted and now < self._until(call) and not self._closed]
        self._failed([call for call in batch if call not in again], error)
        return again

    def _answered(
        self,
        batch: Sequence[ScriptCall],
        answers: Sequence[bytes],
        wake: Callable[[Sequence[ScriptCall]], None] = resolve_all,
    ) -> None:
        self._answered_at = time.monotonic()
        if not isinstance(answers, list) or len(answers) != len(batch):
            self._failed(batch, NoReply(f"{self._connection.place} answers something else: {brief(answers, 300)}"))
            return
        for call, answer in zip(batch, answers, strict=True):
            try:
                self._read_answer(call, answer)
            except Exception as error:  # noqa: BLE001 - an unreadable answer fails one commit only
                call.error = refused(f"{self._connection.place}: an answer that makes no sense: {error!r}")
        wake(batch)

    def _failed(self, batch: Sequence[ScriptCall], error: Exception) -> None:
        if isinstance(error, NoReply):
            error = StorageBusy(f"{error}. The outcome of the write is unknown. Repeat it: every write is idempotent")
        elif isinstance(error, NotSent):
            error = StorageBusy(f"{error}. Nothing was written. Try again")
        elif not isinstance(error, AgentRuntimeError):
            error = refused(f"{self._connection.place}: {type(error).__name__}: {error}")
        for call in batch:
            call.error = call.error or error
        resolve_all(batch)
