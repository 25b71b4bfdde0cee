"""How commits get to the server and back: in calls of the script, several of which may be on their way at once.

What callers of an event loop ask for in one of its turns is sent at the end of that turn, by the loop
itself as long as the line is up and little is under way; it reads the plain answers too (`redis_ear`).
A thread does all that may take time: connecting, waiting for a server that is away, sending what is
large, and reading what does not come at once or says that something is wrong. Over TLS, where sending
and reading may not overlap, it does all there is. Whatever the loop cannot send goes to the thread's
inbox; nothing is sent past what waits there, so that commits are carried out in the order in which they
were asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from ..errors import AgentRuntimeError, StorageBusy, StorageClosed, StorageError, brief
from .base import Guard, Op
from .redis_line import Line, NotCarriedOut, Unanswered, Unsent, pause, refused
from .requests import Carrier, Request, deliver
from .threads import started

BATCH = 64  # commits in one call of the script
LARGE = 1_000_000  # characters after which no more are added to it
UNDER_WAY = 4  # calls that a loop sends before the first of them is answered, at most
SMALL = 32_000  # bytes of them together: a server that stands still leaves them in the socket, which takes few more
POSTED = 4.0  # times the patience for a commit that nobody waits for, and nobody would repeat


class Call(Request):
    """A commit on its way to the server."""

    __slots__ = ("born", "sent", "text")

    def __init__(self, guard: Guard | None, ops: Sequence[Op], text: str, carrier: Carrier | None = None) -> None:
        super().__init__(guard, ops, carrier)
        self.text: str = text
        self.born: float = time.monotonic()
        self.sent: int = 0  # bytes, of the first of those that a loop sent in one call

    @property
    def posted(self) -> bool:
        """Whether nobody waits for it. It may be carried out twice, and has to come before what came after it."""
        return self.future is None and self.done is None


def joined(batch: Sequence[Call]) -> bytes:
    return f"[{','.join([call.text for call in batch])}]".encode("utf-8", "surrogatepass")


class Pipe:
    """The line to one server, shared by the loops and threads of a process. `tell(call, answer)` reads an answer."""

    def __init__(self, line: Line, tell: Callable[[Call, bytes], None], patience: Callable[[], float]) -> None:
        self._line = line
        self._tell = tell
        self._patience = patience
        #: Calls for the thread; None: an answer is to be read; a word: the end.
        self._inbox: SimpleQueue[Call | str | None] = SimpleQueue()
        self._under_way: deque[list[Call]] = deque()
        self._waiting = 0  # in the inbox, or in the thread's hands
        self._lock = threading.Lock()
        self._reads = threading.Lock()  # whose holder reads what the server says
        self._fetching = False  # the thread was told to
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether the server has nothing to do for us."""
        return not self._under_way and not self._waiting

    def put(self, batch: Sequence[Call]) -> None:
        """Have the thread carry them out."""
        with self._lock:
            try:
                self._start()
            except StorageError as error:
                self._failed(list(batch), error)
                return
            self._waiting += len(batch)
        for call in batch:
            self._inbox.put(call)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = started(self._run, "agent-runtime-redis")

    def send(self, batch: list[Call]) -> bool:
        """Send the commits of one turn of a loop: whether they are under way now, and the answer has to be read."""
        if len(batch) <= BATCH and sum(len(call.text) for call in batch) <= SMALL:
            asked = joined(batch)
            with self._lock:
                if self._can_send(len(asked)):
                    batch[0].sent = len(asked)
                    self._under_way.append(batch)
                    self._line.send(asked)
                    return True
        self.put(batch)
        return False

    def _can_send(self, size: int) -> bool:
        if self._waiting or not (self._line.up and self._line.duplex) or len(self._under_way) >= UNDER_WAY:
            return False
        if size + sum(batch[0].sent for batch in self._under_way) > SMALL:
            return False
        return bool(self._under_way) or self._line.fresh()

    def fetch(self) -> None:
        """Have the thread read the next answer; where none can be started, this is asked for again."""
        with self._lock, contextlib.suppress(StorageError):
            if not self._fetching:
                self._start()
                self._fetching = True
                self._inbox.put(None)

    def waits(self) -> float | None:
        """Seconds since the first of what is under way was asked for."""
        with self._lock:
            return time.monotonic() - self._under_way[0][0].born if self._under_way else None

    def arrived(self, loop: asyncio.AbstractEventLoop, conn: Any, read: Callable[[], bytes]) -> bool:
        """Something can be read of `conn`: tell those whose answer that is. False where the thread has to see to it."""
        if not self._reads.acquire(blocking=False):
            return True  # it does
        try:
            if self._line.conn is not conn:
                return True
            self._line.take_in(read())
            if self._unasked():
                return True
            while self._under_way and (answers := self._line.arrived()) is not None:
                batch = self._under_way[0]
                self._done()
                self._told(batch, answers, loop)
            return not self._line.complains
        except BlockingIOError:
            return True  # somebody else has read it
        except (OSError, StorageError):
            self._line.drop()
            return False
        finally:
            self._reads.release()

    def _unasked(self) -> bool:
        """Whether nobody waits for an answer: then this connection is at its end, or not to be trusted."""
        with self._lock:
            if self._under_way:
                return False
            self._line.drop()
            return True

    def close(self) -> None:
        """Carry out what was handed over, and end the thread."""
        self._closed = True
        if self._thread is not None:
            self._inbox.put("end")
            self._thread.join(self._patience() * 2)

    # -- the thread

    def _run(self) -> None:
        while not self._next_is_last():  # and holds nothing of one while it waits for the next
            pass
        with self._reads:
            self._read_all()
            self._line.drop()
        self._turn_away()

    def _next_is_last(self) -> bool:
        """Carry out what comes next; whether it is the end."""
        item = self._inbox.get()
        with self._reads:
            if item is None:
                self._fetching = False
                self._read()
            elif isinstance(item, Call):
                batch, item = self._together(item)
                # Nobody sends while something waits, so what is under way now is all there will be.
                self._read_all()
                self._carry_out(batch)
                with self._lock:
                    self._waiting -= len(batch)
        return item == "end"

    def _turn_away(self) -> None:
        """Those who came after the end."""
        with contextlib.suppress(Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, Call):
                    self._failed([item], StorageClosed(f"{self._line.place} was closed"))

    def _together(self, first: Call) -> tuple[list[Call], Call | str | None]:
        batch, size = [first], len(first.text)
        with contextlib.suppress(Empty):
            while len(batch) < BATCH and size < LARGE:
                item = self._inbox.get_nowait()
                if item is None:
                    self._fetching = False
                    continue  # what is under way is read before
                if isinstance(item, str):
                    return batch, item
                batch.append(item)
                size += len(item.text)
        return batch, None

    def _read_all(self) -> None:
        while self._under_way:
            self._read()

    def _read(self) -> None:
        """Tell those whose answer is the next one."""
        with self._lock:
            if not self._under_way:
                return
            batch = self._under_way[0]
        try:
            answers = self._line.answers()
        except NotCarriedOut as told:
            # Those behind it were sent after it: all of them go again, in their order, as far as they were not either.
            self._again(self._behind, told)
        except StorageError as error:
            # The server's own word on this one call: the line is as it was.
            self._done()
            self._failed(batch, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, this thread has to go on for the others
            self._again(self._lost, error)
        else:
            self._done()
            self._told(batch, answers)

    def _again(self, which: Callable[[Any], list[Call]], error: Exception) -> None:
        """Carry some of what was under way out once more, before anything else is sent."""
        with self._lock:
            self._waiting += 1
        self._carry_out(which(error))
        with self._lock:
            self._waiting -= 1

    def _done(self) -> None:
        with self._lock:
            self._under_way.popleft()

    def _behind(self, told: NotCarriedOut) -> list[Call]:
        """The first of what is under way, and what was not carried out either of the rest."""
        again = self._under_way.popleft()
        while self._under_way:
            batch = self._under_way[0]
            try:
                answers = self._line.answers()
            except NotCarriedOut:
                again = again + self._under_way.popleft()
            except Exception as error:  # noqa: BLE001
                again = again + self._lost(error)
            else:
                self._under_way.popleft()
                self._told(batch, answers)
        with contextlib.suppress(Exception):  # what is wrong is told when they go again
            self._line.mend(told)
        return again

    def _lost(self, error: Exception) -> list[Call]:
        """The connection is gone, and with it the answers to all that is under way; what of it goes again."""
        with self._lock:
            self._line.drop()
            batches, self._under_way = list(self._under_way), deque()
        if isinstance(error, Unsent):  # that was one of them
            error = Unanswered(str(error))
        return [call for batch in batches for call in self._given_up(batch, error)]

    def _carry_out(self, batch: list[Call]) -> None:
        while batch := [call for call in batch if not call.withdrawn]:
            try:
                answers = self._evaluated(batch)
            except (Unsent, Unanswered) as error:
                if batch := self._given_up(batch, error):
                    pause()
            except Exception as error:  # noqa: BLE001
                self._failed(batch, error)
                return
            else:
                self._told(batch, answers)
                return

    def _given_up(self, batch: list[Call], error: Exception) -> list[Call]:
        """Those that go again: posted ones, or what is repeated by who waits would land without what came before it."""
        now = time.monotonic()
        again = [call for call in batch if call.posted and now < self._until(call) and not self._closed]
        self._failed([call for call in batch if call not in again], error)
        return again

    def _until(self, call: Call) -> float:
        return call.born + self._patience() * (POSTED if call.posted else 1)

    def _evaluated(self, batch: list[Call]) -> list[bytes]:
        """The script's answers, once the server can be reached; Unsent after a time without it."""
        until = min(map(self._until, batch))
        while True:
            try:
                return self._line.evaluate(joined(batch))
            except Unsent:
                if time.monotonic() >= until or self._closed:
                    raise
                pause()

    def _told(self, batch: list[Call], answers: Sequence[bytes], loop: asyncio.AbstractEventLoop | None = None) -> None:
        if not isinstance(answers, list) or len(answers) != len(batch):
            self._failed(batch, Unanswered(f"{self._line.place} answers something else: {brief(answers, 300)}"))
            return
        for call, answer in zip(batch, answers, strict=True):
            try:
                self._tell(call, answer)
            except Exception as error:  # noqa: BLE001 - one answer that cannot be read is no other's
                call.error = refused(f"{self._line.place}: an answer that makes no sense: {error!r}")
        deliver(batch, loop)

    def _failed(self, batch: list[Call], error: Exception) -> None:
        if isinstance(error, Unanswered):
            error = StorageBusy(f"{error}; whether the write landed is unknown, repeating it is safe")
        elif isinstance(error, Unsent):
            error = StorageBusy(f"{error}; nothing was written, try again")
        elif not isinstance(error, AgentRuntimeError):
            error = refused(f"{self._line.place}: {type(error).__name__}: {error}")
        for call in batch:
            call.error = call.error or error
        deliver(batch)
