"""Notifications of commits to a PostgreSQL database.

A notification in the transaction of a step would make all commits of the server wait for each other. So a thread of
each process sends the topics that changed over its own connection. If the process is killed before that, the others
wake all their listeners: they look every second whether the server lost a client.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from ..._core.clock import SYSTEM
from ..._core.ids import new_ulid
from ..._core.log import log
from ..._core.threads import started
from ...errors import StorageError
from .url import PostgresAddress, driver

INTERVAL: Final = 0.02  # seconds between two notifications of a process, at least
TEST_EVERY: Final = 10.0  # seconds between two tests of the listening connection
HEARD_WITHIN: Final = 2.0  # seconds in which it must hear its own notification
POLL: Final = 1.0  # seconds between two wakes of all listeners while no notification is heard
RETRY: Final = 0.2  # seconds after which notifications that failed are sent again
_CHANNEL: Final = "arc"
#: How many clients have gone without taking leave; NULL on PostgreSQL 13.
_GONE: Final = (
    "SELECT (to_jsonb(d) ->> 'sessions_abandoned')::bigint FROM pg_stat_database d WHERE datname = current_database()"
)
_TEST: Final = ""  # the topic of a test


class PostgresNotifier:
    """Sends the topics that this process changed, and hears the topics of other processes.

    Args:
        place: The database.
        wake: Wakes the listeners of topics in this process; all listeners without an argument.
    """

    def __init__(self, place: PostgresAddress, wake: Callable[..., None]) -> None:
        self._place, self._wake = place, wake
        self.channel: str = f"{_CHANNEL}_{place.schema}"
        self._lock = threading.Condition()
        self._topics: set[str] = set()
        self._own = new_ulid(SYSTEM)
        self._sender: threading.Thread | None = None
        self._hearer: threading.Thread | None = None
        self._closed = threading.Event()
        #: Whether the listening connection was found to hear.
        self.hears: bool = False

    def start(self) -> None:
        """Begin to listen. A second call does nothing."""
        with self._lock:
            if self._hearer is None and not self._closed.is_set():
                self._hearer = started(self._hear, "agent-runtime-bell")

    def send(self, topics: set[str]) -> None:
        """Have the thread tell other processes of these topics."""
        with self._lock:
            self._topics |= topics
            if self._sender is None:
                with contextlib.suppress(StorageError):
                    self._sender = started(self._send, "agent-runtime-notifier")
            self._lock.notify()

    def _send(self) -> None:
        conn: Any = None
        while True:
            with self._lock:
                while not self._topics and not self._closed.is_set():
                    self._lock.wait()
                topics, self._topics = self._topics, set()
            if not topics:
                break
            try:
                if conn is None:
                    conn = driver().connect(
                        self._place.conninfo,
                        autocommit=True,
                        connect_timeout=5,
                        prepare_threshold=None,
                        application_name="agent-runtime notifier",
                    )
                conn.execute(_notify(self.channel, [f"{self._own} {topic}" for topic in sorted(topics)]))
            except driver().Error:
                with contextlib.suppress(Exception):
                    if conn is not None:
                        conn.close()
                conn = None
                with self._lock:  # sent again, because others wait for nothing else
                    self._topics |= topics
                self._closed.wait(RETRY)
                if self._closed.is_set():
                    break
            self._closed.wait(INTERVAL)
        if conn is not None:
            conn.close()

    def _hear(self) -> None:
        failures = 0
        while not self._closed.is_set():
            conn: Any = None
            try:
                if not self._place.listen_conninfo:
                    raise OSError("the URL has pooler=1 and no listen_url=")
                conn = driver().connect(
                    self._place.listen_conninfo,
                    autocommit=True,
                    connect_timeout=5,
                    prepare_threshold=None,
                    application_name="agent-runtime listener",
                )
                conn.execute(_listen(self.channel))
                self._wake()  # what was notified before was missed
                self._receive(conn)
            except (driver().Error, OSError) as error:
                failures = 1 if self.hears else failures + 1
                if failures == 2 and not self._closed.is_set():
                    hint = "A pooler such as PgBouncer does that: add listen_url= with the URL of the server itself"
                    log.warning(
                        "%s sends no notifications (%s), so its runs are found by polling, up to %g s later. %s",
                        self._place,
                        " ".join(f"{error!s:.200}".split()),
                        POLL,
                        hint if isinstance(error, OSError) else "They are sent again when it answers",
                    )
            finally:
                self.hears = False
                if conn is not None:
                    with contextlib.suppress(Exception):
                        conn.close()
            self._wake()
            self._closed.wait(POLL)

    def _receive(self, conn: Any) -> None:
        """Wake listeners for notifications until the connection is found to be deaf."""
        tested_at, asked_at, looked_at = 0.0, 0.0, 0.0
        gone: tuple[int | None] | None = None
        while not self._closed.is_set():
            now = time.monotonic()
            if now - looked_at > POLL:
                # A process that was killed had no time for its last notifications. Behind a pooler nobody sees that.
                before, gone, looked_at = gone, conn.execute(_GONE).fetchone(), now
                if before != gone or gone == (None,) or self._place.pooler:
                    self._wake()
            if asked_at and now - asked_at > HEARD_WITHIN:
                raise OSError(f"its own notification was not heard within {HEARD_WITHIN:g} s")
            if not asked_at and now - tested_at > TEST_EVERY:
                # By the other connection. A pooler may run two statements of one client on one connection of the
                # server, which hears itself then and nobody else.
                self.send({_TEST})
                asked_at = now
            for notice in conn.notifies(timeout=0.25, stop_after=1):
                word, _, topic = notice.payload.partition(" ")
                if word != self._own:
                    if topic != _TEST:
                        self._wake({topic})
                elif topic == _TEST:
                    self.hears, tested_at, asked_at = True, now, 0.0

    def close(self, timeout: float) -> None:
        """End the threads."""
        self._closed.set()
        with self._lock:
            self._lock.notify()
        for thread in (self._sender, self._hearer):
            if thread is not None:
                thread.join(timeout)


def _listen(channel: str) -> str:
    return f"LISTEN {channel}"


def _notify(channel: str, payloads: Sequence[str]) -> str:
    """Return statements that take no parameters: NOTIFY, whose payloads are ids and topics of this library."""
    notices = "; ".join(f"NOTIFY {channel}, '{payload}'" for payload in payloads)
    return f"BEGIN; SET LOCAL synchronous_commit = off; {notices}; COMMIT"
