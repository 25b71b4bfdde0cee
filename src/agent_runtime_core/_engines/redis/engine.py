"""The engine on one Redis or Valkey server, for many processes on many machines.

A call of one Lua script applies a batch of commits, each of them whole or not at all. The module `pipeline` sends the
batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, cast

from ..._core.clock import SYSTEM, Clock
from ..._core.log import log
from ..._core.per_loop import PerLoop
from ..._core.validation import Shown, must
from ...errors import LeaseLost, StorageBusy, StorageError
from ..backend import OnEngine, hold_shared, known_options
from ..base import Backend, Guard, Op, OperationSet, Outcome, moved
from ..commit_request import CommitRequest, LoopBatch, PendingCommits, wait_in_thread
from ..shared_engine import Process, SafetyFinding, SharedEngine
from .connection import Connection, NotSent, ServerRefused, driver, refused
from .notifier import PubSubNotifier, Subscription
from .pipeline import CommitPipeline, ScriptCall
from .safety_checks import ASKED, DAY, check, identity, log_daily, parsed_config, parsed_info
from .script import Codec, RedisOperationSet, Script, as_list, joined, packed, prepared, unpacked
from .url import RedisAddress, redis_place

COMMIT_TIMEOUT = 3.0  # seconds that a commit may take in all; well under a third of the shortest sensible lease


class RedisEngine(SharedEngine):
    """The engine of a process on one server and prefix. Use `RedisEngine.open(url)`, which shares it."""

    kind = "redis"
    buffer_delay: float = 0.002

    _open: ClassVar[dict[tuple[Any, ...], RedisEngine]] = {}
    _open_lock = threading.Lock()

    @classmethod
    def open(cls, url: str, *, clock: Clock = SYSTEM) -> RedisEngine:
        driver()  # a missing package is reported before a wrong URL
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
        #: Lease and wall times are the server's, unless a test passes its own clock.
        self.by_server: bool = clock is SYSTEM
        self.timeout: float = COMMIT_TIMEOUT
        self._prefix = place.tag
        self._codecs: dict[str, Codec] = {}
        self._refusals: dict[str, Callable[[], Exception]] = {}
        self._operation_sets: dict[str, RedisOperationSet] = {}
        self._batches: PerLoop[LoopBatch] = PerLoop(self._new_batch)
        #: The unsafe settings of the server, as they were at the last connect.
        self.safety_findings: list[SafetyFinding] = []
        self._servers: dict[tuple[str, int], str] = {}  # identity of the server at an address
        self._connection_ids: dict[tuple[str, int], Any] = {}  # client id of our last connection
        self._script: Script = self._prepared()
        self._connection = Connection(place, self._connected, lambda: self._script)
        self._pipeline = CommitPipeline(self._connection, self._set_outcome, lambda: self.timeout)
        self._notifier = PubSubNotifier(place, f"{self._prefix}:bell")

    def _prepared(self) -> Script:
        return prepared(
            joined(list(self._operation_sets.values())), f"{self._prefix}:", "server" if self.by_server else ""
        )

    def lease_now(self) -> float:
        return 0.0 if self.by_server else self.clock.boot()

    def add(self, operation_set: OperationSet) -> None:
        if operation_set.name in self._operation_sets:
            return
        if not isinstance(operation_set, RedisOperationSet):
            raise must(f"operation set {operation_set.name!r}", "be a RedisOperationSet", operation_set)
        self._codecs.update(operation_set.codecs)
        self._refusals.update(operation_set.refusals)
        self._operation_sets[operation_set.name] = operation_set
        self._script = self._prepared()

    # -- for callers

    def _call(self, guard: Guard | None, ops: Sequence[Op]) -> ScriptCall:
        self._ensure_open()
        return ScriptCall(guard, ops, packed(guard, ops, self._codecs), self)

    def commit(self, guard: Guard | None, ops: Sequence[Op]) -> CommitRequest:
        return self._call(guard, ops)

    def pending(self, loop: asyncio.AbstractEventLoop) -> PendingCommits:
        self._ensure_open()
        return self._batches[loop].pending

    def _new_batch(self, loop: asyncio.AbstractEventLoop) -> LoopBatch:
        return LoopBatch(loop, str(self.place), self._caller_timeout, partial(self._pipeline.send, loop))

    def _caller_timeout(self) -> float:
        """Seconds a caller waits. More than the pipeline waits, whose error says more."""
        return self.timeout * 1.2

    def commit_from_thread(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return wait_in_thread(self._call(guard, ops), self.submit, str(self.place), self._caller_timeout())

    def commit_nowait(self, guard: Guard | None, ops: Sequence[Op]) -> Outcome:
        call = self._call(guard, ops)
        with contextlib.suppress(RuntimeError):
            self._batches.here().send(call)
            return call
        self.submit(call)
        return call

    def submit(self, request: CommitRequest) -> None:
        """Pass on a commit, to be applied after every earlier one of the same caller."""
        assert isinstance(request, ScriptCall)
        if request.loop is not None:
            self._batches[request.loop].send(request)
        else:
            self._pipeline.put([request])

    async def ask(self, what: str, *args: Any) -> Any:
        """Return the result of one reading operation, which is repeated once if its answer is lost early."""
        began = time.monotonic()
        try:
            return (await self.commit(None, [Op(what, args)]))[0]
        except StorageBusy:
            if time.monotonic() - began > self.timeout / 3:
                raise
        return (await self.commit(None, [Op(what, args)]))[0]

    async def fence_of(self, key: str) -> str | None:
        token: str | None = await self.ask("fence.of", key)
        return token

    async def store_wall(self) -> float:
        return float(await self.ask("fence.now")) if self.by_server else self.clock.wall()

    async def ids(self, **kinds: str) -> list[str]:
        """Return the ids that have keys of these kinds. The value of a kind is the type of its keys."""
        cursor, found = "0", set[str]()  # a scan may return a key twice
        while True:
            cursor, ids = await self.ask("fence.ids", cursor, kinds)
            found.update(as_list(ids))
            if cursor == "0":
                return sorted(found)

    async def read(self, fn: Callable[..., Any], *args: Any) -> Any:
        return await fn(self, *args)

    # -- answers

    def _set_outcome(self, call: ScriptCall, answer: bytes) -> None:
        reply = answer.decode("utf-8", "surrogatepass")
        if reply.startswith("["):
            call.result = unpacked(reply, call.ops, self._codecs)
        else:
            call.error = self._refusal(reply, call.guard)

    def _refusal(self, reply: str, guard: Guard | None) -> Exception:
        word, _, about = reply[1:].partition(" ")
        if word == "LOST":
            key, _, token = about.rpartition(" ")
            return LeaseLost(key, token)
        if word == "MARKED":
            return moved(str(self.place), about)
        if word in self._refusals:
            return self._refusals[word]()
        return refused(f"{self.place}: {about or word}")

    def _connected(self, line: Connection) -> None:
        """Check the server after a connect."""
        info = parsed_info(line.ask("INFO"))
        try:
            settings = parsed_config(*(line.ask("CONFIG GET", name) for name in ASKED))
        except driver().error_reply:  # the user may not ask for settings
            settings = None
        if self._servers and info.get("role") == "slave":
            raise NotSent(f"{self.place} is a replica now, and the master is not known here")
        found = self.safety_findings = check(info, settings, self.place)
        self._check_channel(line)
        self._check_rights(line)
        log_daily(found, info, self.place, partial(self._first_today, line))
        where, server = (line.place.host, line.place.port), identity(info)
        if self._servers.get(where, server) != server:
            log.warning(
                "%s was restarted or replaced by another server: checking all claims of this process", self.place
            )
            self._notifier.wake()
            self._connection_ids.pop(where, None)
        number = self._kill_last(line, where)
        self._servers[where], self._connection_ids[where] = server, number

    def _first_today(self, line: Connection, setting: str) -> bool:
        """Return whether no process logged a warning about this setting of the server in the last 24 hours."""
        try:
            return line.ask("SET", f"{self._prefix}:warned:{setting}", "1", "NX", "EX", DAY) is not None
        except driver().error_reply:  # a full or read-only server, or no right to write: each process logs it
            return True

    def _check_channel(self, line: Connection) -> None:
        """Check that our user may publish, which a new user of Redis 7 may not. No process would be notified."""
        channel = f"{self._prefix}:bell"
        try:
            line.ask("PUBLISH", f"{channel}:", "")
        except driver().error_reply as error:
            raise StorageError(
                f"{self.place}: the user may not publish ({error!s:.300}). Run: "
                f"ACL SETUSER … &{channel} &{channel}:* +publish +subscribe +unsubscribe +psubscribe"
            ) from error

    def _check_rights(self, line: Connection) -> None:
        """Check that the user may run all commands of the script. Otherwise some commits would be partially written."""
        try:
            [answer] = line.call(f"[{packed(None, [Op('rights', ())], {})}]".encode())
        except ServerRefused as refusal:
            if str(refusal).startswith(("MOVED ", "ASK ")):
                return  # the next call is refused too, and then another node is tried
            raise NotSent(f"{self.place}: {refusal}") from refusal
        [forbidden] = json.loads(answer)
        if forbidden:
            needed = " ".join(f"+{command.lower()}" for command in forbidden)
            raise StorageError(
                f"{self.place}: the user may not write with {', '.join(forbidden)}. Run: "
                f"ACL SETUSER … ~{self._prefix}:* {needed}"
            )

    def _kill_last(self, line: Connection, where: tuple[str, int]) -> Any:
        """Make the server drop our last connection, and return the client id of this connection.

        Requests of the last connection that are still on the network would be applied after their own repeats, and
        after later writes.
        """
        try:
            number = line.ask("CLIENT ID")
            if self._connection_ids.get(where) is not None:
                line.ask("CLIENT KILL", "ID", self._connection_ids[where])
        except driver().error_reply:  # the user may not run CLIENT
            return None
        return number

    # -- other processes on this server

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        return self._notifier.listen(topic, wake)

    def subscription(self, topic: str, take: Callable[[bytes], None], lost: Callable[[], None]) -> Subscription:
        """Return a subscription to a topic for one event loop, not connected yet.

        In a cluster it connects to the node that ran the script last.
        """
        return Subscription(lambda: self._connection.place, f"{self._prefix}:bell:{topic}", take, lost)

    # -- the end

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        self._batches[loop].flush(everything=True)
        self._pipeline.leave(loop)

    def _close_now(self) -> None:
        def wake_thread() -> None:
            with contextlib.suppress(Exception):
                Connection(self.place, lambda line: None, lambda: self._script).ask(
                    "PUBLISH", f"{self._prefix}:bell", ""
                )

        self._notifier.close(wake_thread, self.timeout)
        self._pipeline.close()


class RedisBackend(OnEngine, Backend):
    """A backend on one Redis or Valkey server, which all processes that reach it share."""

    engine: RedisEngine

    def __init__(
        self, url: str | None = None, *, redis_url: str | None = None, engine: RedisEngine | None = None,
        clock: Clock = SYSTEM, **options: Any,
    ) -> None:  # fmt: skip
        with known_options(type(self), options):
            cast(Any, super()).__init__(clock=getattr(engine, "clock", clock), **options)
        if url is not None and redis_url is not None and url != redis_url:
            raise must("url and redis_url", "not both be passed", Shown("two different URLs"), "Pass url alone")
        where = url or redis_url
        if engine is None and where is None:
            fix = "Pass url='redis://host:6379/0', or call configure(redis_url=...)"
            raise must("the url of a Redis backend", "be passed or configured", None, fix)
        hold_shared(self, engine, lambda: RedisEngine.open(where or "", clock=clock))
