"""One connection to a Redis server, over the connection class of redis-py.

Nothing is ever sent twice here: a request that got no answer may have been carried out, and only
who made it knows whether it can be repeated. Whatever goes wrong between a request and its answer drops
the connection, so that no answer is taken for that of another request.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from .._load import load
from ..errors import StorageError, StorageFull
from .redis_answers import Answers
from .redis_url import Place

PIECE = 1 << 16  # bytes read at once, at most
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


class Unsent(Exception):
    """Nothing was carried out; it may be tried again."""


class Unanswered(Exception):
    """Whether it was carried out is not known."""


class NotCarriedOut(Exception):
    """The server says so, and why: it does not know the script, it is not the one to ask, or not now."""


def connection(place: Place, **options: Any) -> Any:
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


class Line:
    """A connection, made when it is needed; `connected(line)` looks at each new one.

    `first` are the arguments of its script before the last one: the first of them is a key.
    """

    def __init__(self, place: Place, connected: Callable[[Line], None], first: Sequence[str] = ()) -> None:
        self.place: Place = place
        self._home = place
        self._connected = connected
        self._first = first
        self._conn: Any = None
        self._arrived = Answers()
        self._script = ""
        self._asks = b""  # what each call of the script begins with
        self._cut = False  # what is sent goes nowhere any more
        self._used = 0.0

    @property
    def up(self) -> bool:
        return self._conn is not None and not self._cut

    @property
    def conn(self) -> Any:
        """The connection there is, to be told from others."""
        return self._conn if self.up else None

    @property
    def duplex(self) -> bool:
        """Whether one thread may send while another reads: not over TLS, of which both change the state."""
        return not self.place.tls

    @property
    def fileno(self) -> int | None:
        """Of its socket, where what can be read is what was sent."""
        try:
            return int(self._conn._sock.fileno()) if self.duplex else None
        except AttributeError:  # there is none, or none any more
            return None

    def use(self, script: str) -> None:
        """What `evaluate` runs from now on."""
        words = ("EVALSHA", hashlib.sha1(script.encode()).hexdigest(), "1", *self._first)
        self._script = script
        self._asks = b"*%d\r\n" % (len(words) + 1) + b"".join(map(_text, map(str.encode, words)))

    # -- the script: sent by one thread, its answers read by another

    def send(self, last: bytes) -> None:
        """Ask for the script to be run with that as its last argument; what goes wrong is told by `answers`."""
        conn = self._conn
        if conn is not None and not self._cut:
            try:
                # In one piece: redis-py would make it of its words anew each time, and send the large ones one by one.
                conn.send_packed_command([self._asks + _text(last)])
            except Exception:  # noqa: BLE001 - it is told by `answers`
                # Not sent to again, or it would connect by itself and its next answer be taken for this one's.
                self._cut = True
                conn.disconnect()

    def answers(self) -> list[bytes]:
        """What the script answers to the first call that was not answered yet; waits for it."""
        while (answer := self._arrived.take()) is None:
            self.receive()
        if isinstance(answer, str):
            if answer.startswith(("NOSCRIPT", "MOVED ", "ASK ", *_ANSWERS_LATER)):
                raise NotCarriedOut(answer)
            raise refused(f"{self.place}: {answer}")
        return answer

    def arrived(self) -> list[bytes] | None:
        """The same, where that is a plain answer and here already."""
        answer = None if self._arrived.complains else self._arrived.take()
        return None if isinstance(answer, str) else answer

    @property
    def complains(self) -> bool:
        """Whether what the server says next is no plain answer."""
        return self._arrived.complains

    def receive(self) -> None:
        """Wait for what the server says next, or a piece of it."""
        sock = getattr(self._conn, "_sock", None)  # once: the loop may be dropping the connection at this moment
        try:
            if self._cut or sock is None:
                raise OSError("the connection was lost")
            self.take_in(sock.recv(PIECE))
        except Exception as error:
            # Of any kind: it may be dropped while it is read.
            self.drop()
            raise Unanswered(f"{self.place}: {error!s:.300}") from error
        except BaseException:
            self.drop()
            raise

    def take_in(self, data: bytes) -> None:
        """What was read of the connection."""
        if not data:
            raise OSError("the server has closed the connection")
        self._arrived.add(data)
        self._used = time.monotonic()

    def evaluate(self, last: bytes) -> list[bytes]:
        """Run the script and wait for its answers; Unsent where it was not, Unanswered where nobody knows."""
        for _ in range(3):
            if not self.fresh():
                self.drop()
                self._connect()
            self.send(last)
            try:
                return self.answers()
            except NotCarriedOut as told:
                try:
                    self.mend(told)
                except Unanswered as error:
                    raise Unsent(str(error)) from error
        raise Unsent(f"{self.place} sends us elsewhere again and again, or forgets the script")

    def mend(self, told: NotCarriedOut) -> None:
        """Do what the server says is missing; Unsent where only time helps."""
        said = str(told)
        if said.startswith(("MOVED ", "ASK ")):
            host, _, port = said.split()[2].rpartition(":")
            self.drop()
            self.place = replace(self._home, host=host or self.place.host, port=int(port))
        elif said.startswith(_ANSWERS_LATER):
            if said.startswith("READONLY"):
                self.drop()  # the master is another one now
            raise Unsent(f"{self.place}: {said}")
        else:
            self.ask("SCRIPT LOAD", self._script)

    def fresh(self) -> bool:
        """Whether there is a connection, and nobody ended it while it was idle. Nothing may be under way."""
        if not self.up:
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
        if not self.up:
            self.drop()
            self._connect()
        try:
            self._conn.send_command(*command)
        except driver().broken as error:
            self.drop()
            raise Unanswered(f"{self.place}: {error!s:.300}") from error
        return self._read()

    def _read(self) -> Any:
        conn = self._conn
        if conn is None or self._cut:
            self.drop()
            raise Unanswered(f"{self.place}: the connection was lost")
        try:
            answer = conn.read_response()
            self._used = time.monotonic()
            return answer
        except driver().said as error:
            if (said := in_full(error)).startswith(_ANSWERS_LATER):
                raise Unsent(f"{self.place}: {said:.300}") from error
            raise
        except driver().loading as error:
            self.drop()
            raise Unsent(f"{self.place} is still loading its data") from error
        except Exception as error:
            # Of any kind: the loop may be dropping the connection at this moment.
            self.drop()
            raise Unanswered(f"{self.place}: {error!s:.300}") from error
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
            raise Unsent(f"{self.place} cannot be reached: {error!s:.300}") from error
        self._conn, self._cut, self._arrived = conn, False, Answers()
        try:
            self.ask("SCRIPT LOAD", self._script)
            self._connected(self)
        except Unanswered as error:
            self.drop()
            raise Unsent(str(error)) from error
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            with contextlib.suppress(Exception):
                conn.disconnect()


def _text(word: bytes) -> bytes:
    """A word of a command, as it is sent."""
    return b"$%d\r\n%s\r\n" % (len(word), word)


def in_full(error: Exception) -> str:
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


def pause(seconds: float = 0.05) -> None:
    """Before the server is tried again."""
    time.sleep(seconds)
