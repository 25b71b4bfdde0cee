"""Notifications of commits to a Redis server, over a pub/sub connection."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from ..._core.log import log
from ..notifier import Notifier
from .connection import connection, reconnect_delay
from .url import RedisAddress

QUIET = 5.0  # seconds without a message after which the server is sent a PING
_POLL = 1.0  # seconds between checks whether the notifier was closed


class PubSubNotifier(Notifier):
    """Wakes listeners for messages of the server, and all listeners after each reconnect.

    Errors of the connection are logged once for each type. The notifier subscribes to the topics that have listeners.
    Over TLS it subscribes to all topics, because only its own thread may use a TLS connection.
    """

    def __init__(self, place: RedisAddress, channel: str) -> None:
        super().__init__()
        self._place = place
        self._channel = channel
        self._conn: Any = None  # with the subscriptions
        self._logged: set[type] = set()

    def _topic_added(self, topic: str) -> None:
        self._send("SUBSCRIBE", topic)

    def _topic_removed(self, topic: str) -> None:
        self._send("UNSUBSCRIBE", topic)

    def _send(self, command: str, topic: str) -> None:
        if self._conn is not None and not self._place.tls:
            with contextlib.suppress(Exception):  # of any type, if the thread drops the connection now
                self._conn.send_command(command, self._channel_of(topic))

    def _channel_of(self, topic: str) -> str:
        """Return the channel of a topic. One for each, so that topics without listeners do not wake the thread."""
        return f"{self._channel}:{topic}"

    def _subscribe(self, conn: Any) -> None:
        with self._lock:
            channels = [self._channel] if self._place.tls else [self._channel, *map(self._channel_of, self._listeners)]
            conn.send_command("SUBSCRIBE", *channels)
            self._conn = conn
        for _ in channels:
            conn.read_response()
        if self._place.tls:
            conn.send_command("PSUBSCRIBE", _escaped(self._channel_of("")) + "*")
            conn.read_response()

    def _run(self) -> None:
        while not self._closed:
            conn = connection(self._place)
            try:
                conn.connect()
                self._subscribe(conn)
                self.wake()  # messages before the subscription were missed
                self._receive(conn)
            except Exception as error:  # noqa: BLE001 - of any type: a listener's thread may drop the connection now
                self._log(error)
                reconnect_delay(0.2)
            finally:
                with self._lock:
                    self._conn = None
                with contextlib.suppress(Exception):
                    conn.disconnect()

    def _log(self, error: Exception) -> None:
        if not self._closed and type(error) not in self._logged:
            self._logged.add(type(error))
            reason = f"{type(error).__name__}: {error}"
            log.warning("%s sends no notifications until it is reconnected (%s); logged once", self._place, reason)

    def _receive(self, conn: Any) -> None:
        quiet, asked, sock = 0.0, False, conn._sock
        while not self._closed:
            if conn._sock is not sock:
                # A listener's thread dropped it. redis-py would reconnect by itself, without the subscriptions.
                raise OSError("the connection was lost")
            if not conn.can_read(_POLL):
                quiet += _POLL
                if quiet >= QUIET and not asked:
                    conn.send_command("PING")
                    asked = True
                elif quiet >= 2 * QUIET:
                    raise OSError("no word from the server")
                continue
            quiet, asked = 0.0, False
            message = conn.read_response()
            if isinstance(message, list) and message[0] in (b"message", b"subscribe", b"pmessage"):
                # A confirmed subscription wakes too: messages on a new channel were missed until now.
                self.wake([message[-2].decode()[len(self._channel) + 1 :]])


def _escaped(channel: str) -> str:
    """Return a pattern that matches this channel only."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", channel)
