"""Notifications of commits to a Redis server over a pub/sub connection, and one channel for one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable
from typing import Any

from ..._core.log import log
from ..._core.threads import in_thread, started
from ...errors import StorageError
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


class Subscription:
    """A connection that follows one channel. A separate thread reads it.

    On the loop that called `follow`, `take` is called with each message, and `lost` when no more can come.
    """

    def __init__(
        self, place: Callable[[], RedisAddress], channel: str, take: Callable[[bytes], None], lost: Callable[[], None]
    ) -> None:
        self.channel: str = channel
        self._place = place
        self._take = take
        self._lost = lost
        self._conn: Any = None
        self._closed = False

    async def follow(self) -> None:
        """Return when the server confirms the subscription. Raises any error of the driver."""
        await in_thread(self._connect)
        loop = asyncio.get_running_loop()
        try:
            started(lambda: self._read(loop), "agent-runtime-subscription")
        except BaseException:
            self._conn.disconnect()
            raise

    def _connect(self) -> None:
        conn = connection(self._place())
        try:
            conn.connect()
            conn.send_command("SUBSCRIBE", self.channel)
            conn.read_response()
            conn._sock.settimeout(None)  # the next message may take any time
        except BaseException:
            conn.disconnect()
            raise
        self._conn = conn
        if self._closed:
            self.close()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            try:
                while not self._closed:
                    reply = self._conn.read_response()
                    if reply[0] == b"message":
                        loop.call_soon_threadsafe(self._deliver, reply[2])
            except Exception:  # noqa: BLE001 - after any error nothing can be read any more
                if not self._closed:
                    loop.call_soon_threadsafe(self._ended)
            finally:
                self._conn.disconnect()

    def _deliver(self, message: bytes) -> None:
        if not self._closed:
            try:
                self._take(message)
            except (StorageError, ValueError):  # unreadable, and later messages may be too
                self._ended()

    def _ended(self) -> None:
        if not self._closed:
            self.close()
            self._lost()

    def close(self) -> None:
        """Stop following, even while a thread connects."""
        self._closed = True
        with contextlib.suppress(AttributeError, OSError):  # not connected yet, or not any more
            self._conn._sock.shutdown(socket.SHUT_RDWR)  # which wakes the thread that reads it
