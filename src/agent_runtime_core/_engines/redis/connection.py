"""One connection to a Redis server, over the connection class of redis-py.

Nothing is ever sent twice here: a request that got no answer may have been carried out, and only
who made it knows whether it can be repeated. Whatever goes wrong between a request and its answer drops
the connection, so that no answer is taken for that of another request.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from ..._core.lazy_import import load
from ...errors import StorageError, StorageFull
from .script import Script, bulk
from .url import RedisAddress

ANSWER = 2.0  # seconds a server may take for one answer
IDLE = 0.5  # seconds after which a connection is looked at before it is used again
_ANSWERS_LATER = ("LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "NOREPLICAS")
#: What a server says to a number of a database that it has not, and a cluster to any but 0.
_NO_DATABASE = ("DB index", "SELECT is not allowed")
# The first words of a server that versions of redis-py put into the type of the error.
_WORDS = {
    "MovedError": "MOVED", "AskError": "ASK", "TryAgainError": "TRYAGAIN", "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN", "ReadOnlyError": "READONLY", "NoScriptError": "NOSCRIPT",
    "OutOfMemoryError": "OOM",
}  # fmt: skip


class Driver(NamedTuple):
    """What is used of redis-py."""

    connections: Any  # its module of connections
    no_retry: Any
    broken: tuple[type[Exception], ...]  # what goes wrong on the way
    said: type[Exception]  # what the server itself says
    loading: type[Exception]
    shut_out: tuple[type[Exception], ...]


@cache
def driver() -> Driver:
    """redis-py; MissingDependency."""
    connections: Any = load("redis.connection", needed_by="a Redis backend")
    wrong: Any = load("redis.exceptions")
    retry: Any = load("redis.retry:Retry")
    pause: Any = load("redis.backoff:NoBackoff")
    return Driver(
        connections, retry(pause(), 0), (wrong.RedisError, OSError), wrong.ResponseError, wrong.BusyLoadingError,
        (wrong.AuthenticationError, wrong.NoPermissionError),
    )  # fmt: skip


class NotSent(Exception):
    """Nothing was carried out; it may be tried again."""


class NoReply(Exception):
    """Whether it was carried out is not known."""


class ServerRefused(Exception):
    """The server says so, and why: it does not know the script, it is not the one to ask, or not now."""


def connection(place: RedisAddress, **options: Any) -> Any:
    """A Connection of redis-py (whose methods have no types) that never tries anything again by itself."""
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


class Connection:
    """A connection, made when it is needed; `connected(line)` looks at each new one. One thread uses it at a time.

    `script()` gives what `evaluate` runs.
    """

    def __init__(
        self, place: RedisAddress, connected: Callable[[Connection], None], script: Callable[[], Script]
    ) -> None:
        self.place: RedisAddress = place
        self._home = place
        self._connected = connected
        self._script = script
        self._conn: Any = None
        self._used = 0.0

    # -- the script

    def evaluate(self, last: bytes) -> list[bytes]:
        """Run the script with that as its last argument; NotSent where it was not, NoReply where nobody knows."""
        for _ in range(3):
            if not self.fresh():
                self.drop()
                self._connect()
            try:
                return self.call(last)
            except ServerRefused as told:
                try:
                    self.mend(told)
                except NoReply as error:
                    raise NotSent(str(error)) from error
        raise NotSent(f"{self.place} sends us elsewhere again and again, or forgets the script")

    def call(self, last: bytes) -> list[bytes]:
        """The same once, over the connection there is; ServerRefused where the server says what is missing."""
        try:
            # In one piece: redis-py would make it of its words each time, and send the large ones one by one.
            self._conn.send_packed_command([self._script().call + bulk(last)])
        except Exception as error:
            # Not sent to again, or redis-py would connect by itself, and a later answer be taken for this one's.
            self.drop()
            raise NoReply(f"{self.place}: {error!s:.300}") from error
        try:
            answers: list[bytes] = self._read()
        except driver().said as error:
            if (said := full_error_text(error)).startswith(("NOSCRIPT", "MOVED ", "ASK ")):
                raise ServerRefused(said) from error
            raise refused(f"{self.place}: {said}") from error
        return answers

    def mend(self, told: ServerRefused) -> None:
        """Do what the server says is missing."""
        said = str(told)
        if said.startswith(("MOVED ", "ASK ")):
            host, _, port = said.split()[2].rpartition(":")
            self.drop()
            self.place = replace(self._home, host=host or self.place.host, port=int(port))
        else:
            self.ask("SCRIPT LOAD", self._script().text)

    def fresh(self) -> bool:
        """Whether there is a connection, and nobody ended it while it was idle. Nothing may be under way."""
        if self._conn is None:
            return False
        if time.monotonic() - self._used < IDLE:
            return True
        try:
            return not self._conn.can_read(0)
        except driver().broken:
            return False

    # -- other commands

    def ask(self, *command: Any) -> Any:
        """One command and its answer; `driver().said` is the server's own word."""
        if self._conn is None:
            self._connect()
        try:
            self._conn.send_command(*command)
        except driver().broken as error:
            self.drop()
            raise NoReply(f"{self.place}: {error!s:.300}") from error
        return self._read()

    def _read(self) -> Any:
        try:
            answer = self._conn.read_response()
            self._used = time.monotonic()
            return answer
        except driver().said as error:
            if (said := full_error_text(error)).startswith(_ANSWERS_LATER):
                if said.startswith("READONLY"):
                    self.drop()  # the master is another one now
                raise NotSent(f"{self.place}: {said:.300}") from error
            raise
        except driver().loading as error:
            self.drop()
            raise NotSent(f"{self.place} is still loading its data") from error
        except Exception as error:
            # Of any kind: no later answer may be taken for this one's.
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
            raise StorageError(f"{self.place} does not let us in: {error}; is the user or password right?") from error
        except driver().broken as error:
            conn.disconnect()
            self.place = self._home
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise StorageError(
                    f"{self.place} is not trusted: {error!s:.300}; set SSL_CERT_FILE to the certificates to trust"
                ) from error
            if isinstance(error, driver().said) and any(word in str(error) for word in _NO_DATABASE):
                raise StorageError(f"{self.place} has no database {self.place.db}: {error!s:.300}") from error
            raise NotSent(f"{self.place} cannot be reached: {error!s:.300}") from error
        self._conn = conn
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
        conn, self._conn = self._conn, None
        if conn is not None:
            with contextlib.suppress(Exception):
                conn.disconnect()


def full_error_text(error: Exception) -> str:
    """What a server said, with its first word, whatever version of redis-py heard it."""
    said, word = str(error), _WORDS.get(type(error).__name__, "")
    return said if said.startswith(word) else f"{word} {said}"


def refused(said: str) -> StorageError:
    """The error of ours for what a server says."""
    if "MISCONF" in said:  # its disk is full, in most cases
        return StorageFull(f"{said}; nothing acknowledged is lost: have the server write to its disk again, and go on")
    if "OOM" in said:
        return StorageFull(f"{said}; nothing acknowledged is lost: free some memory, or raise maxmemory, and go on")
    return StorageError(said)


def reconnect_delay(seconds: float = 0.05) -> None:
    """Before the server is tried again."""
    time.sleep(seconds)
