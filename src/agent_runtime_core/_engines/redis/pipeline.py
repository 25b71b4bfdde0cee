"""Send commits to a Redis server and read their outcomes, in one thread with one connection.

One call of the script is in flight at a time. Commits that are requested during a call are sent together in the next.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from ..._core.threads import started
from ...errors import AgentRuntimeError, StorageBusy, StorageClosed, StorageError, brief
from ..base import Guard, Op
from ..commit_request import CommitExecutor, CommitRequest, resolve_all
from .connection import Connection, NoReply, NotSent, reconnect_delay, refused

BATCH = 64  # commits in one call of the script
LARGE = 1_000_000  # characters after which no more are added to a call
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
        """Whether no caller waits for it. Such a commit may be applied twice, and must precede later ones."""
        return self.future is None and self.done is None


def joined(batch: Sequence[ScriptCall]) -> bytes:
    """Encode a batch as the last argument of the script."""
    return f"[{','.join([call.text for call in batch])}]".encode("utf-8", "surrogatepass")


class CommitPipeline:
    """Sends the commits of a process over one connection, from one thread, in the order in which they were asked for.

    `read_answer(call, answer)` stores the outcome of one commit.
    """

    def __init__(
        self, line: Connection, read_answer: Callable[[ScriptCall, bytes], None], timeout: Callable[[], float]
    ) -> None:
        self._connection = line
        self._read_answer = read_answer
        self._timeout = timeout
        self._inbox: SimpleQueue[ScriptCall | None] = SimpleQueue()  # None: the thread ends
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._answered_at = -math.inf  # when the server last answered a batch

    def put(self, batch: Sequence[ScriptCall]) -> None:
        """Have the thread send these commits, after those that were put before."""
        try:
            with self._lock:
                if self._thread is None:
                    self._thread = started(self._run, "agent-runtime-redis")
                for call in batch:
                    self._inbox.put(call)
        except StorageError as error:  # no thread can be started
            self._failed(batch, error)

    def close(self) -> None:
        """Send what was put before, then end the thread and the connection."""
        self._closed = True
        with self._lock:
            self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(self._timeout() * 2)

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
        """Apply the next batch. True: it was the last one."""
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
        self._apply(batch)
        return call is None

    def _apply(self, batch: list[ScriptCall]) -> None:
        """Apply a batch and wake the callers. Blocks until then, or until the time limit of the batch."""
        while batch := [call for call in batch if not call.timed_out]:
            try:
                answers = self._evaluated(batch)
            except (NotSent, NoReply) as error:
                if batch := self._given_up(batch, error):
                    reconnect_delay()
            except Exception as error:  # noqa: BLE001 - raised to these callers; the thread serves others
                self._failed(batch, error)
                return
            else:
                self._answered(batch, answers)
                return

    def _evaluated(self, batch: Sequence[ScriptCall]) -> list[bytes]:
        """Return the answers of the script, or raise NotSent if the server could not be reached in time."""
        until = min(map(self._until, batch))
        while True:
            try:
                return self._connection.evaluate(joined(batch))
            except NotSent:
                if time.monotonic() >= until or self._closed:
                    raise
                reconnect_delay()

    def _until(self, call: ScriptCall) -> float:
        # A call that waited for its turn has its time from the answer to the last batch.
        return max(call.born, self._answered_at) + self._timeout() * (POSTED if call.posted else 1)

    def _given_up(self, batch: Sequence[ScriptCall], error: Exception) -> list[ScriptCall]:
        """Fail the commits with waiting callers and return the posted ones, which are sent again.

        A caller's commit that were sent again here could be applied twice without the caller's knowledge.
        """
        now = time.monotonic()
        again = [call for call in batch if call.posted and now < self._until(call) and not self._closed]
        self._failed([call for call in batch if call not in again], error)
        return again

    def _answered(self, batch: Sequence[ScriptCall], answers: Sequence[bytes]) -> None:
        self._answered_at = time.monotonic()
        if not isinstance(answers, list) or len(answers) != len(batch):
            self._failed(batch, NoReply(f"{self._connection.place} answers something else: {brief(answers, 300)}"))
            return
        for call, answer in zip(batch, answers, strict=True):
            try:
                self._read_answer(call, answer)
            except Exception as error:  # noqa: BLE001 - an unreadable answer fails one commit only
                call.error = refused(f"{self._connection.place}: an answer that makes no sense: {error!r}")
        resolve_all(batch)

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
