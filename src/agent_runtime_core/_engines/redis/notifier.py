"""Hearing of commits to a Redis server: a connection that follows one channel."""

from __future__ import annotations

import contextlib
import logging
import re
from typing import Any

from ..notifier import Notifier
from .connection import connection, reconnect_delay
from .url import RedisAddress

log: logging.Logger = logging.getLogger("agent_runtime_core")

QUIET = 5.0  # seconds without a word, after which the server is asked for one
_TURN = 1.0  # seconds between looks whether it is over


class PubSubNotifier(Notifier):
    """After a time without a connection all are woken. Why it has none is logged once for each kind of error.

    It follows the topics that somebody here listens to, and over TLS all of them: only its own thread may
    use such a connection.
    """

    def __init__(self, place: RedisAddress, channel: str) -> None:
        super().__init__()
        self._place = place
        self._channel = channel
        self._conn: Any = None  # where what is rung can be heard
        self._said: set[type] = set()

    def _topic_added(self, topic: str) -> None:
        self._say("SUBSCRIBE", topic)

    def _topic_removed(self, topic: str) -> None:
        self._say("UNSUBSCRIBE", topic)

    def _say(self, command: str, topic: str) -> None:
        if self._conn is not None and not self._place.tls:
            with contextlib.suppress(Exception):  # of any kind, where its thread drops it now; that notices
                self._conn.send_command(command, self._of(topic))

    def _of(self, topic: str) -> str:
        """The channel of a topic: those that nobody here listens to wake no thread here."""
        return f"{self._channel}:{topic}"

    def _subscribe(self, conn: Any) -> None:
        with self._lock:
            channels = [self._channel] if self._place.tls else [self._channel, *map(self._of, self._listeners)]
            conn.send_command("SUBSCRIBE", *channels)
            self._conn = conn
        for _ in channels:
            conn.read_response()
        if self._place.tls:
            conn.send_command("PSUBSCRIBE", _literally(self._of("")) + "*")
            conn.read_response()

    def _run(self) -> None:
        while not self._closed:
            conn = connection(self._place)
            try:
                conn.connect()
                self._subscribe(conn)
                self.wake()  # what was rung meanwhile was not heard
                self._hear(conn)
            except Exception as error:  # noqa: BLE001 - of any kind: a listener's thread may be dropping the connection at this moment
                self._tell(error)
                reconnect_delay(0.2)
            finally:
                with self._lock:
                    self._conn = None
                with contextlib.suppress(Exception):
                    conn.disconnect()

    def _tell(self, error: Exception) -> None:
        if not self._closed and type(error) not in self._said:
            self._said.add(type(error))
            said = f"{type(error).__name__}: {error}"
            log.warning("%s is not heard until it is connected anew (%s); that is said once", self._place, said)

    def _hear(self, conn: Any) -> None:
        quiet, asked, sock = 0.0, False, conn._sock
        while not self._closed:
            if conn._sock is not sock:
                # A listener's thread has dropped it. redis-py would connect by itself, without the subscriptions.
                raise OSError("the connection was lost")
            if not conn.can_read(_TURN):
                quiet += _TURN
                if quiet >= QUIET and not asked:
                    conn.send_command("PING")
                    asked = True
                elif quiet >= 2 * QUIET:
                    raise OSError("no word from the server")
                continue
            quiet, asked = 0.0, False
            said = conn.read_response()
            if isinstance(said, list) and said[0] in (b"message", b"subscribe", b"pmessage"):
                # A channel that is new was not heard until now.
                self.wake([said[-2].decode()[len(self._channel) + 1 :]])


def _literally(channel: str) -> str:
    """A pattern that is this channel and no other."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", channel)
