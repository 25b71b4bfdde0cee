"""One connection to a Redis server, over the connection class of redis-py.

Nothing is ever sent twice by itself: a request that got no answer may have been carried out, and only
who made it knows whether it can be repeated. Whatever goes wrong between a request and its answer drops
the connection, so that no answer is taken for that of another request.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .._load import load
from ..errors import StorageError, StorageFull
from .redis_url import Place

_made: Any = load("redis.connection", needed_by="a Redis backend")
_wrong: Any = load("redis.exceptions")
_retry: Any = load("redis.retry:Retry")
_no_pause: Any = load("redis.backoff:NoBackoff")
#: What goes wrong on the way, and what the server itself says.
BROKEN: tuple[type[Exception], ...] = (_wrong.RedisError, OSError)
SAID: type[Exception] = _wrong.ResponseError

ANSWER = 2.0  # seconds a server may take for one answer
_ANSWERS_LATER = ("LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "NOREPLICAS")


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
        "socket_connect_timeout": ANSWER, "retry": _retry(_no_pause(), 0), "health_check_interval": 0, "protocol": 2,
        "client_name": "agent-runtime", **options,
    }  # fmt: skip
    if place.unix_socket is not None:
        return _made.UnixDomainSocketConnection(path=place.unix_socket, **about)
    kind = _made.SSLConnection if place.tls else _made.Connection
    return kind(host=place.host, port=place.port, socket_keepalive=True, **about)


class Line:
    """A connection, made when it is needed; `connected(line)` looks at each new one."""

    def __init__(self, place: Place, connected: Callable[[Line], None]) -> None:
        self.place: Place = place
        self._home = place
        self._connected = connected
        self._conn: Any = None
        self._script = self._sha = ""

    @property
    def up(self) -> bool:
        return self._conn is not None

    def use(self, script: str) -> None:
        """What `evaluate` runs from now on."""
        self._script, self._sha = script, hashlib.sha1(script.encode()).hexdigest()

    # -- the script: sent by one thread, its answers read by another

    def send(self, *args: str | bytes) -> None:
        """Ask for the script to be run with one key and arguments; what goes wrong is told by `answers`."""
        conn = self._conn
        if conn is not None:
            try:
                # In one piece: redis-py would send the large ones of its arguments one by one.
                conn.send_packed_command([b"".join(conn.pack_command("EVALSHA", self._sha, 1, *args))])
            except BROKEN:
                conn.disconnect()  # not forgotten: its answer is what fails

    def answers(self) -> list[bytes]:
        """What the script answers to the first call that was not answered yet."""
        try:
            answers: list[bytes] = self._read()
            return answers
        except SAID as error:
            said = str(error)
            if isinstance(error, _wrong.NoScriptError) or said.startswith(("MOVED ", "ASK ", *_ANSWERS_LATER)):
                raise NotCarriedOut(said) from error
            raise refused(f"{self.place}: {error}") from error

    def evaluate(self, *args: str | bytes) -> list[bytes]:
        """Run the script and wait for its answers; Unsent where it was not, Unanswered where nobody knows."""
        for _ in range(3):
            if self._conn is None:
                self._connect()
            self.send(*args)
            try:
                return self.answers()
            except NotCarriedOut as told:
                self.mend(told)
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

    # -- other commands

    def ask(self, *command: Any) -> Any:
        """One command and its answer; `SAID` is the server's own word."""
        if self._conn is None:
            self._connect()
        assert self._conn is not None
        try:
            self._conn.send_command(*command)
        except BROKEN as error:
            self.drop()
            raise Unanswered(f"{self.place}: {error!s:.300}") from error
        return self._read()

    def _read(self) -> Any:
        conn = self._conn
        if conn is None:
            raise Unanswered(f"{self.place}: the connection was lost")
        try:
            return conn.read_response()
        except SAID:
            raise
        except BROKEN as error:
            self.drop()
            raise Unanswered(f"{self.place}: {error!s:.300}") from error
        except BaseException:
            self.drop()
            raise

    def _connect(self) -> None:
        conn = connection(self.place)
        try:
            conn.connect()
        except (_wrong.AuthenticationError, _wrong.NoPermissionError) as error:
            conn.disconnect()
            raise StorageError(f"{self.place} does not let us in: {error}; is the user or password right?") from error
        except BROKEN as error:
            conn.disconnect()
            self.place = self._home
            raise Unsent(f"{self.place} cannot be reached: {error!s:.300}") from error
        self._conn = conn
        try:
            self.ask("SCRIPT LOAD", self._script)
            self._connected(self)
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            with contextlib.suppress(Exception):
                conn.disconnect()


def refused(said: str) -> StorageError:
    """The error of ours for what a server says."""
    if "OOM" in said:
        return StorageFull(f"{said}; nothing acknowledged is lost: free some memory, or raise maxmemory, and go on")
    return StorageError(said)


def pause(seconds: float = 0.05) -> None:
    """Before the server is tried again."""
    time.sleep(seconds)
