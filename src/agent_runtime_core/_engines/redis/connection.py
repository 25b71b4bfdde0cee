"""One connection to a Redis server, over the connection class of redis-py.

A request is never sent twice here. A request without an answer may have been applied, and only its caller knows whether
it can be repeated. Each error between a request and its answer drops the connection, so that no answer is read for
another request.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from ..._core.lazy_import import load
from ...errors import StorageError, StorageFull
from .script import Script, bulk
from .url import RedisAddress

PIECE = 1 << 16  # bytes of an answer that a loop reads, at most
ANSWER = 2.0  # seconds a server may take for one answer
IDLE = 0.5  # seconds after which a connection is checked before it is used again
_ANSWERS_LATER = ("LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "NOREPLICAS")
#: Replies to the number of a database that does not exist; in a cluster only 0 exists.
_NO_DATABASE = ("DB index", "SELECT is not allowed")
# First words of error replies that some versions of redis-py turn into the type of the error.
_WORDS = {
    "MovedError": "MOVED", "AskError": "ASK", "TryAgainError": "TRYAGAIN", "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN", "ReadOnlyError": "READONLY", "NoScriptError": "NOSCRIPT",
    "OutOfMemoryError": "OOM",
}  # fmt: skip


class Driver(NamedTuple):
    """The parts of redis-py that this library uses."""

    connections: Any  # its module of connections
    no_retry: Any
    broken: tuple[type[Exception], ...]  # the connection failed
    error_reply: type[Exception]  # an error reply of the server
    loading: type[Exception]
    shut_out: tuple[type[Exception], ...]


@cache
def driver() -> Driver:
    """Import redis-py, or raise MissingDependency."""
    connections: Any = load("redis.connection", needed_by="a Redis backend")
    wrong: Any = load("redis.exceptions")
    retry: Any = load("redis.retry:Retry")
    pause: Any = load("redis.backoff:NoBackoff")
    return Driver(
        connections, retry(pause(), 0), (wrong.RedisError, OSError), wrong.ResponseError, wrong.BusyLoadingError,
        (wrong.AuthenticationError, wrong.NoPermissionError),
    )  # fmt: skip


class NotSent(Exception):
    """Nothing was applied; the request may be repeated."""


class NoReply(Exception):
    """Whether the request was applied is unknown."""


class ServerRefused(Exception):
    """The server refused the request: it lacks the script, or another node holds the key."""


def connection(place: RedisAddress, **options: Any) -> Any:
    """Return a Connection of redis-py (whose methods have no types) that never retries by itself."""
    about: dict[str, Any] = {
        "db": place.db, "username": place.username, "password": place.password, "socket_timeout": ANSWER,
        "socket_connect_timeout": ANSWER, "retry": driver().no_retry, "health_check_interval": 0, "protocol": 2,
        "client_name": "agent-runtime", **options,
    }  # fmt: skip
    made = driver().connections
    if place.unix_socket is not None:
        return made.UnixDomainSocketConnection(path=place.unix_socket, **about)
    kind = made.SSLConnection if place.tls else made.Connection
    return kind(host=place.host, port=place.port, socket_keepalive=True, **about)


class LoopSocket:
    """A connection as one event loop uses it: it never waits.

    It uses a separate descriptor, because a thread may close the descriptor of the connection at any moment.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, conn: Any, readable: Callable[[], None]) -> None:
        self.loop: asyncio.AbstractEventLoop = loop
        self.conn: Any = conn
        self.watched: bool = False  # a timer looks whether an answer is late
        self._socket: socket.socket = conn._sock.dup()
        try:
            self._socket.setblocking(False)
            loop.add_reader(self._socket, readable)
        except BaseException:
            self._socket.close()
            raise

    def send(self, request: bytes) -> bytes:
        """Send what the socket takes, and return the rest."""
        try:
            return request[self._socket.send(request) :]
        except OSError:  # reported to the thread, which sends the rest
            return request

    def answer(self) -> list[bytes] | None:
        """Return the answer of the script, or None if something else arrived, or only a part. Then it is not read.

        Raises:
            BlockingIOError: Nothing arrived.
        """
        try:
            data = self._socket.recv(PIECE, socket.MSG_PEEK)
        except BlockingIOError:
            raise
        except OSError:
            return None
        at = data.find(b"\r\n")
        if data[:1] != b"*" or at < 0:
            return None
        texts: list[bytes] = []
        for _ in range(int(data[1:at])):
            at += 2
            start = data.find(b"\r\n", at) + 2
            if start < 2 or data[at : at + 1] != b"$":
                return None
            at = start + int(data[at + 1 : start - 2])
            texts.append(data[start:at])
        if len(data) < at + 2:
            return None
        self._socket.recv(at + 2)
        return texts

    def close(self) -> None:
        """End the use, on the loop or if the loop does not run."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.remove_reader(self._socket)
        self._socket.close()


class Connection:
    """A connection that is made when it is needed. One thread uses it at a time.

    Args:
        place: The server's address.
        connected: Called with this object after each connect, to check the server.
        script: Returns the script that `evaluate` runs.
    """

    def __init__(
        self, place: RedisAddress, connected: Callable[[Connection], None], script: Callable[[], Script]
    ) -> None:
        self.place: RedisAddress = place
        self._home = place
        self._connected = connected
        self._script = script
        self.conn: Any = None  # of redis-py
        self._used = 0.0

    # -- the script

    def evaluate(self, last: bytes, unsent: bytes | None = None) -> list[bytes]:
        """Run the script with `last` as its last argument.

        With `unsent`, an event loop already sent the request except for these bytes.

        Raises:
            NotSent: The script did not run.
            NoReply: Whether it ran is unknown.
        """
        for _ in range(3):
            if unsent is None and not self.fresh():
                self.drop()
                self._connect()
            try:
                return self.call(last) if unsent is None else self._call(unsent)
            except ServerRefused as refusal:
                try:
                    self.mend(refusal)
                except NoReply as error:
                    raise NotSent(str(error)) from error
                unsent = None
        raise NotSent(f"{self.place} sends us elsewhere again and again, or forgets the script")

    def call(self, last: bytes) -> list[bytes]:
        """Run the script once over the present connection; ServerRefused if `mend` can help."""
        return self._call(self.request(last))

    def request(self, last: bytes) -> bytes:
        """Return a call of the script, in one piece: redis-py would join it from its words each time."""
        return self._script().call + bulk(last)

    def _call(self, request: bytes) -> list[bytes]:
        try:
            self.conn.send_packed_command([request])
        except Exception as error:
            # Dropped, or redis-py would reconnect by itself and a later answer would be read as the answer to this.
            self.drop()
            raise NoReply(f"{self.place}: {error!s:.300}") from error
        try:
            answers: list[bytes] = self._read()
        except driver().error_reply as error:
            if (reply := full_error_text(error)).startswith(("NOSCRIPT", "MOVED ", "ASK ")):
                raise ServerRefused(reply) from error
            raise refused(f"{self.place}: {reply}") from error
        return answers

    def mend(self, refusal: ServerRefused) -> None:
        """Load the script, or go to the node that the server names."""
        reply = str(refusal)
        if reply.startswith(("MOVED ", "ASK ")):
            host, _, port = reply.split()[2].rpartition(":")
            self.drop()
            self.place = replace(self._home, host=host or self.place.host, port=int(port))
        else:
            self.ask("SCRIPT LOAD", self._script().text)

    def fresh(self) -> bool:
        """Whether there is a connection that was not closed while it was idle. No request may be in flight."""
        if self.conn is None:
            return False
        if time.monotonic() - self._used < IDLE:
            return True
        try:
            return not self.conn.can_read(0)
        except driver().broken:
            return False

    # -- on an event loop

    def on_loop(self, loop: asyncio.AbstractEventLoop, readable: Callable[[], None]) -> LoopSocket | None:
        """Return the present connection as this loop can use it; `readable` is called when something arrives.

        None over TLS, on a loop that cannot watch sockets, and if the connection ended.
        """
        with contextlib.suppress(*driver().broken, AttributeError, NotImplementedError):
            if not (self.place.tls or self.conn.can_read(0)):
                return LoopSocket(loop, self.conn, readable)
        return None

    def used(self) -> None:
        """Note that the server answered just now."""
        self._used = time.monotonic()

    # -- other commands

    def ask(self, *command: Any) -> Any:
        """Send one command and return its answer; an error reply raises `driver().error_reply`."""
        if self.conn is None:
            self._connect()
        try:
            self.conn.send_command(*command)
        except driver().broken as error:
            self.drop()
            raise NoReply(f"{self.place}: {error!s:.300}") from error
        return self._read()

    def _read(self) -> Any:
        try:
            answer = self.conn.read_response()
            self._used = time.monotonic()
            return answer
        except driver().error_reply as error:
            if (reply := full_error_text(error)).startswith(_ANSWERS_LATER):
                if reply.startswith("READONLY"):
                    self.drop()  # the master is another server now
                raise NotSent(f"{self.place}: {reply:.300}") from error
            raise
        except driver().loading as error:
            self.drop()
            raise NotSent(f"{self.place} is still loading its data") from error
        except Exception as error:
            # Any error: no later answer may be read as the answer to this request.
            self.drop()
            raise NoReply(f"{self.place}: {error!s:.300}") from error
        except BaseException:
            self.drop()
            raise

    def _connect(self) -> None:
        conn = connection(self.place)
        try:
            conn.connect()
        except driver().shut_out as error:
            conn.disconnect()
            raise StorageError(
                f"{self.place} rejected the login: {error}. Check the user and the password in the URL"
            ) from error
        except driver().broken as error:
            conn.disconnect()
            self.place = self._home
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise StorageError(
                    f"{self.place} has a certificate that is not trusted ({error!s:.300}). Set "
                    "SSL_CERT_FILE to the certificates to trust"
                ) from error
            if isinstance(error, driver().error_reply) and any(word in str(error) for word in _NO_DATABASE):
                raise StorageError(
                    f"{self.place} has no database {self.place.db} ({error!s:.300}). Use another number in the URL"
                ) from error
            raise NotSent(f"{self.place} cannot be reached ({error!s:.300})") from error
        self.conn = conn
        try:
            self.ask("SCRIPT LOAD", self._script().text)
            self._connected(self)
        except NoReply as error:
            self.drop()
            raise NotSent(str(error)) from error
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        conn, self.conn = self.conn, None
        if conn is not None:
            with contextlib.suppress(Exception):
                conn.disconnect()


def full_error_text(error: Exception) -> str:
    """Return an error reply with its first word, which some versions of redis-py remove."""
    reply, word = str(error), _WORDS.get(type(error).__name__, "")
    return reply if reply.startswith(word) else f"{word} {reply}"


def refused(reply: str) -> StorageError:
    """Return the storage error for an error reply."""
    if "MISCONF" in reply:  # the server's disk is full, in most cases
        return StorageFull(
            f"{reply.rstrip('.')}. Acknowledged writes are kept. Let the server write to its disk again, then continue"
        )
    if "OOM" in reply:
        return StorageFull(
            f"{reply.rstrip('.')}. Acknowledged writes are kept. Free memory or raise maxmemory, then continue"
        )
    return StorageError(reply)


def reconnect_delay(seconds: float = 0.05) -> None:
    """Wait before the next attempt to reach the server."""
    time.sleep(seconds)
