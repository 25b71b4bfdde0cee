"""Limits of requests, failed logins and streams, counted in this process."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Final

from .._core.clock import Clock
from ..queue.base import RunQueue
from .errors import Problem
from .settings import ServerSettings

MOST_NAMES = 10_000  # callers or addresses that are counted; the least recent one is forgotten
MOST_REJECTED = 100  # sockets of unknown clients that wait for the end of their connection
FAILURES_WINDOW = 60.0  # seconds
RETRY_SECONDS: Final = 5  # after a full queue
_COUNT_SECONDS: Final = 1.0  # age of the number of pending runs at which it is read again
IS_SPARE = "agent_runtime.spare"  # in the state of the ASGI scope: the connection is beyond the limit


class Buckets:
    """Token buckets by name: `burst` at the same time, `rate` per second after that."""

    def __init__(self, rate: float, burst: float, clock: Clock) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name: what was left, and when

    def take(self, name: str) -> float:
        """Take a token; return 0, or the seconds until there is a token."""
        now = self._clock.boot()
        left, then = self._left.pop(name, (self._burst, now))
        left = min(self._burst, left + (now - then) * self._rate)
        wait = 0.0 if left >= 1 else (1 - left) / self._rate
        self._left[name] = (left if wait else left - 1, now)
        if len(self._left) > MOST_NAMES:
            self._left.popitem(last=False)
        return wait


class Limits:
    """The limits of one server."""

    def __init__(self, settings: ServerSettings, clock: Clock) -> None:
        self._settings = settings
        self._requests = Buckets(settings.requests_per_second, settings.request_burst, clock)
        per_minute = settings.failed_logins_per_minute
        self._failures = Buckets(max(per_minute, 1) / FAILURES_WINDOW, per_minute, clock)
        self._streams: Counter[str] = Counter()
        self._waits: Counter[str] = Counter()
        self._unread: dict[str, set[asyncio.WriteTransport]] = {}  # by caller, where answers may have unsent bytes
        self._unwritten: Counter[str] = Counter()  # bytes of answers that wait for earlier ones of their connection
        #: Event streams and sockets that are open now.
        self.open_streams: int = 0
        #: Those of them that are sockets.
        self.open_sockets: int = 0
        #: Those that were closed because their client accepted nothing, since the start.
        self.streams_cut: int = 0
        #: Sockets that were rejected, and whose clients have not closed them yet.
        self.rejected_sockets: int = 0

    def request(self, caller: str) -> None:
        """Count a request of a caller, or raise Problem 429."""
        if wait := self._requests.take(caller):
            raise _too_many("This token has made too many requests.", wait)

    def failed_login(self, address: str) -> None:
        """Count a wrong token, or raise Problem 429 if there were too many from this address."""
        if wait := self._failures.take(address):
            raise _too_many("There were too many wrong tokens from this address.", wait)

    def no_wait(self, caller: str) -> Problem | None:
        """Return why no further request may wait for a run: 429 for too many of this caller, 503 for too many."""
        if self._waits[caller] >= self._settings.max_waits_per_caller:
            return _too_many("This caller has too many requests that wait for runs.", 5)
        if self._waits.total() >= max(1, self._settings.max_connections // 2):
            return Problem.of(503, "The server has too many requests that wait for runs.", headers={"Retry-After": "5"})
        return None

    @contextlib.contextmanager
    def wait(self, caller: str) -> Iterator[None]:
        """Count a request that waits for a run. Raises the problem of `no_wait`."""
        if (problem := self.no_wait(caller)) is not None:
            raise problem
        self._waits[caller] += 1
        try:
            yield
        finally:
            self._waits[caller] -= 1
            if not self._waits[caller]:
                del self._waits[caller]

    def unread(self, caller: str) -> Problem | None:
        """Return Problem 429 for a caller that has not read too many bytes of earlier answers."""
        transports = self._unread.get(caller, set())
        sizes = {each: each.get_write_buffer_size() for each in transports}
        transports.intersection_update(each for each, size in sizes.items() if size)
        if not transports:
            self._unread.pop(caller, None)
        if sum(sizes.values()) + self._unwritten[caller] > self._settings.max_unsent_bytes_per_caller:
            return _too_many("This caller has not read the answers to its earlier requests.", 5)
        return None

    @contextlib.contextmanager
    def answer(self, caller: str, transport: asyncio.WriteTransport, size: int) -> Iterator[None]:
        """Count an answer of so many bytes until it is written to a transport, and then until the client reads it."""
        if len(self._unread) >= MOST_NAMES:
            read = {name: {one for one in each if one.get_write_buffer_size()} for name, each in self._unread.items()}
            self._unread = {name: each for name, each in read.items() if each}
        self._unwritten[caller] += size
        try:
            yield
        finally:
            self._unread.setdefault(caller, set()).add(transport)
            self._unwritten[caller] -= size
            if not self._unwritten[caller]:
                del self._unwritten[caller]

    @contextlib.contextmanager
    def rejected_socket(self) -> Iterator[None]:
        """Count a rejected socket. Raises Problem 503 for too many, as anybody can open them."""
        if self.rejected_sockets >= MOST_REJECTED:
            raise Problem.of(503, "The server closes too many sockets.", headers={"Retry-After": "5"})
        self.rejected_sockets += 1
        try:
            yield
        finally:
            self.rejected_sockets -= 1

    @contextlib.contextmanager
    def stream(self, caller: str, *, socket: bool = False) -> Iterator[None]:
        """Count an open stream or socket. Raises Problem 503 for too many, 429 for too many of this caller."""
        if self.open_streams >= self._settings.max_streams:
            raise Problem.of(503, "The server has too many open streams.", headers={"Retry-After": "5"})
        if self._streams[caller] >= self._settings.max_streams_per_caller:
            raise _too_many("This caller has too many open streams.", 5)
        self.open_streams += 1
        self.open_sockets += socket
        self._streams[caller] += 1
        try:
            yield
        finally:
            self.open_streams -= 1
            self.open_sockets -= socket
            self._streams[caller] -= 1
            if not self._streams[caller]:
                del self._streams[caller]


def too_many_connections() -> Problem:
    """Return the problem of a connection beyond the limit."""
    return Problem.of(503, "The server has too many connections.", headers={"Retry-After": "1"})


def _too_many(detail: str, seconds: float) -> Problem:
    return Problem.of(429, detail, headers={"Retry-After": str(max(1, math.ceil(seconds)))})


class PendingRuns:
    """How many runs are pending: read at most once per second, plus those stored here since."""

    def __init__(self) -> None:
        self._count = 0
        self._until = 0.0
        self._counting = asyncio.Lock()

    async def check(self, queue: RunQueue, most: int | None) -> None:
        """Count one more, or raise Problem 429 if `most` runs are pending."""
        if most is None:
            return
        async with self._counting:  # the others wait for the number, or they would count on an older one
            now = queue.clock.boot()
            if now >= self._until:
                counts = await queue.counts()
                self._count = sum(number for (status, _), number in counts.runs.items() if status == "pending")
                self._until = now + _COUNT_SECONDS
        if self._count >= most:
            raise Problem.of(
                429,
                f"The queue is full: {most} {'run is' if most == 1 else 'runs are'} pending. Repeat the request later.",
                type="urn:agent-runtime:queue-full",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )
        self._count += 1

    def release(self) -> None:
        """Count one less: the run that `check` has counted was not stored."""
        self._count = max(self._count - 1, 0)
