"""An engine over one Redis or Valkey server, for many processes on many machines.

Every commit is a part of a call of one Lua script, which decides it and writes it whole; `redis_pipe`
says how commits get there and back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ..._core.clock import SYSTEM, Clock
from ..._core.per_loop import PerLoop
from ...errors import InvalidArgument, LeaseLost, StorageBusy, StorageError
from ..backend import Reads, shared_store
from ..base import EngineStore, Guard, Op, OperationSet
from ..commit_request import CommitRequest, LoopBatch, PendingCommits, wait_in_thread
from ..shared_engine import Process, SharedEngine
from .connection import Connection, NotSent, ServerRefused, driver, refused
from .notifier import PubSubNotifier
from .pipeline import CommitPipeline, ScriptCall
from .safety_checks import ASKED, check, identity, parsed_config, parsed_info
from .script import Codec, RedisOperationSet, Script, joined, packed, prepared, unpacked
from .subscription import Subscription
from .url import RedisAddress, redis_place

log: logging.Logger = logging.getLogger("agent_runtime_core")

PATIENCE = 3.0  # seconds for all that a commit may take; well under a third of the shortest sensible lease


class RedisEngine(SharedEngine):
    """Use `RedisEngine.open(url)`: all backends of a process on one server and prefix share one engine."""

    kind = "redis"
    buffer_delay: float = 0.002

    _open: ClassVar[dict[tuple[Any, ...], RedisEngine]] = {}
    _open_lock = threading.Lock()

    @classmethod
    def open(cls, url: str, *, clock: Clock = SYSTEM) -> RedisEngine:
        driver()  # said before anything else
        place = redis_place(url)
        key = (place, id(clock), Process.forks)
        with cls._open_lock:
            engine = cls._open.get(key)
            if engine is None:
                engine = cls._open[key] = cls(key, place, clock)
            return engine.share()

    def __init__(self, key: tuple[Any, ...], place: RedisAddress, clock: Clock) -> None:
        super().__init__(key, str(place), clock)
        self.place: RedisAddress = place
        #: Lease and wall times are the server's, but for a clock that a test has in its hand.
        self.by_server: bool = clock is SYSTEM
        self.patience: float = PATIENCE
        self._prefix = place.tag
        self._codecs: dict[str, Codec] = {}
        self._refusals: dict[str, Callable[[], Exception]] = {}
        self._concerns: dict[str, RedisOperationSet] = {}
        self._desks: PerLoop[LoopBatch] = PerLoop(self._desk)
        self._met: dict[tuple[str, int], str] = {}  # which life of which server is where
        self._last: dict[tuple[str, int], Any] = {}  # what that calls our last connection to it
        self._script: Script = self._prepared()
        self._line = Connection(place, self._connected, lambda: self._script)
        self._pipe = CommitPipeline(self._line, self._tell, lambda: self.patience)
        self._bell = PubSubNotifier(place, f"{self._prefix}:bell")

    def _prepared(self) -> Script:
        return prepared(joined(list(self._concerns.values())), f"{self._prefix}:", "server" if self.by_server else "")

    def lease_now(self) -> float:
        return 0.0 if self.by_server else self.clock.boot()

    def add(self, concern: OperationSet) -> None:
        if concern.name in self._concerns:
            return
        if not isinstance(concern, RedisOperationSet):
            raise InvalidArgument(f"the concern {concern.name!r} has no operations for Redis")
        self._codecs.update(concern.codecs)
        self._refusals.update(concern.refusals)
        self._concerns[concern.name] = concern
        self._script = self._prepared()

    # -- the callers' side

    def _call(self, guard: Guard | None, ops: Sequence[Op]) -> ScriptCall:
        self._ensure_open()
        return ScriptCall(guard, ops, packed(guard, ops, self._codecs), self)

    def commit(self, guard: Guard | None, ops: Sequence[Op]) -> CommitRequest:
        return self._call(guard, ops)

    def pending(self, loop: asyncio.AbstractEventLoop) -> PendingCommits:
        self._ensure_open()
        return self._desks[loop].pending

    def _desk(self, loop: asyncio.AbstractEventLoop) -> LoopBatch:
        return LoopBatch(loop, str(self.place), self._in_all, self._pipe.put)

    def _in_all(self) -> float:
        """Seconds a caller waits: the thread gives up before, and says more."""
        return self.patience * 1.2

    def commit_from_thread(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return wait_in_thread(self._call(guard, ops), self.submit, str(self.place), self._in_all())

    def commit_nowait(self, guard: Guard | None, ops: Sequence[Op]) -> None:
        call = self._call(guard, ops)
        with contextlib.suppress(RuntimeError):
            self._desks.here().send(call)
            return
        self.submit(call)

    def submit(self, request: CommitRequest) -> None:
        """Pass a commit on to be carried out, after all that this caller passed on before."""
        assert isinstance(request, ScriptCall)
        if request.loop is not None:
            self._desks[request.loop].send(request)
        else:
            self._pipe.put([request])

    async def ask(self, what: str, *args: Any) -> Any:
        """The answer of one reading operation, which is asked for again if it gets lost."""
        began = time.monotonic()
        try:
            return (await self.commit(None, [Op(what, args)]))[0]
        except StorageBusy:
            if time.monotonic() - began > self.patience / 3:
                raise
        return (await self.commit(None, [Op(what, args)]))[0]

    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        return await fn(self, *args)

    # -- the answers

    def _tell(self, call: ScriptCall, answer: bytes) -> None:
        said = answer.decode("utf-8", "surrogatepass")
        if said.startswith("["):
            call.result = unpacked(said, call.ops, self._codecs)
        else:
            call.error = self._refusal(said, call.guard)

    def _refusal(self, said: str, guard: Guard | None) -> Exception:
        word, _, about = said[1:].partition(" ")
        if word == "LOST":
            key, _, token = about.rpartition(" ")
            return LeaseLost(key, token)
        if word in self._refusals:
            return self._refusals[word]()
        return refused(f"{self.place}: {about or word}")

    def _connected(self, line: Connection) -> None:
        """Look at a server we have just connected to."""
        info = parsed_info(line.ask("INFO"))
        try:
            settings = parsed_config(*(line.ask("CONFIG GET", name) for name in ASKED))
        except driver().said:  # it tells nobody
            settings = None
        if self._met and info.get("role") == "slave":
            raise NotSent(f"{self.place} is a replica now, and the master is not known here")
        check(info, settings, self.place)
        self._try_bell(line)
        self._try_rights(line)
        where, server = (line.place.host, line.place.port), identity(info)
        if self._met.get(where, server) != server:
            log.warning("%s was restarted, or is another server now: all claims held here are looked at", self.place)
            self._bell.wake()
            self._last.pop(where, None)
        number = self._end_last(line, where)
        self._met[where], self._last[where] = server, number

    def _try_bell(self, line: Connection) -> None:
        """Redis 7 gives a new user no channel: nobody would hear of our commits."""
        bell = f"{self._prefix}:bell"
        try:
            line.ask("PUBLISH", f"{bell}:", "")
        except driver().said as error:
            raise StorageError(
                f"{self.place} does not let our user ring: {error!s:.300}; "
                f"ACL SETUSER … &{bell} &{bell}:* +publish +subscribe +unsubscribe +psubscribe"
            ) from error

    def _try_rights(self, line: Connection) -> None:
        """A user who may not use all commands would leave half of what some commits write."""
        try:
            [answer] = line.call(f"[{packed(None, [Op('rights', ())], {})}]".encode())
        except ServerRefused as told:
            if str(told).startswith(("MOVED ", "ASK ")):
                return  # so is what comes next, and then another connection is tried
            raise NotSent(f"{self.place}: {told}") from told
        [forbidden] = json.loads(answer)
        if forbidden:
            needed = " ".join(f"+{command.lower()}" for command in forbidden)
            raise StorageError(
                f"{self.place} does not let our user write with {', '.join(forbidden)}; "
                f"ACL SETUSER … ~{self._prefix}:* {needed}"
            )

    def _end_last(self, line: Connection, where: tuple[str, int]) -> Any:
        """Have the server carry out no more of what was sent over the last connection; what it calls this one.

        What the network has of it yet would come behind its own repeat, and behind what was written since.
        """
        try:
            number = line.ask("CLIENT ID")
            if self._last.get(where) is not None:
                line.ask("CLIENT KILL", "ID", self._last[where])
        except driver().said:  # our user may not
            return None
        return number

    # -- others on this server

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        return self._bell.listen(topic, wake)

    def subscription(self, topic: str, take: Callable[[bytes], None], lost: Callable[[], None]) -> Subscription:
        """What is said on that topic and meant for one loop, which has still to be connected: of a cluster, to the node
        that ran the script last."""
        return Subscription(lambda: self._line.place, f"{self._prefix}:bell:{topic}", take, lost)

    # -- the end

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        self._desks[loop].flush()

    def _close_now(self) -> None:
        def ring() -> None:
            with contextlib.suppress(Exception):
                Connection(self.place, lambda line: None, lambda: self._script).ask(
                    "PUBLISH", f"{self._prefix}:bell", ""
                )

        self._bell.close(ring, self.patience)
        self._pipe.close()


def redis_store(
    operation_sets: Sequence[OperationSet], reads: Reads, url: str | None = None, *, redis_url: str | None = None,
    engine: RedisEngine | None = None, clock: Clock = SYSTEM,
) -> EngineStore[RedisEngine]:  # fmt: skip
    """Open a store on one Redis or Valkey server, which all processes that reach it share."""
    if url is not None and redis_url is not None and url != redis_url:
        raise InvalidArgument("url= and redis_url= name the same thing; give one")
    where = url or redis_url
    if engine is None and where is None:
        raise InvalidArgument("a Redis backend needs url='redis://host:6379/0', or configure(redis_url=...)")
    return shared_store(operation_sets, reads, engine, lambda: RedisEngine.open(where or "", clock=clock))
