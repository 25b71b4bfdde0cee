"""Keeping claims alive from a thread no event loop can starve, and hearing what happens to them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._core.context_vars import start_helper
from .._core.per_loop import call_in_loop
from .._engines.base import Op
from .._execution.run_control import RunControl
from ..queue.base import RunQueue
from ..queue.records import RunRow
from .settings import RunnerConfig

log: logging.Logger = logging.getLogger("agent_runtime_core")

LOOP_STALL_SECONDS = 60.0  # seconds without a tick of its loop after which a run is no longer kept alive
NEWS_INTERVAL = 0.1  # seconds between looks where the queue cannot ring


@dataclass(eq=False, repr=False)
class LeasedRun:
    """A claim this process holds."""

    row: RunRow
    control: RunControl
    loop: asyncio.AbstractEventLoop
    ends: float
    cancel: Callable[[], None]
    lose: Callable[[], None]
    on_heartbeat: Callable[[], None]  # adds a heartbeat to the log of the run
    reported_at: float  # when that last happened
    seen: int  # number of the last message that is known


class Heartbeat:
    """Beats for all claims of a runner while there are any."""

    def __init__(self, queue: RunQueue, config: RunnerConfig) -> None:
        self._queue, self._config, self._clock = queue, config, queue.clock
        self._leased: dict[str, LeasedRun] = {}
        self._lock = threading.Lock()
        self._stop_timer: Callable[[], None] | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._ticks: dict[asyncio.AbstractEventLoop, float] = {}
        self._watchers: dict[asyncio.AbstractEventLoop, tuple[asyncio.Event, asyncio.Task[None]]] = {}
        #: Where the queue can only be reached from a loop: one that beats in each loop with claims.
        self._beaters: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}
        self._answered = self._clock.boot()

    # -- holding

    def hold(self, held: LeasedRun) -> None:
        with self._lock:
            self._leased[held.row.run_id] = held
            if self._stop_timer is None:
                self._answered = self._clock.boot()
                with contextlib.ExitStack() as undo:
                    stop_listening = self._queue.listen("mail", self._mail)
                    if stop_listening is not None:
                        undo.callback(stop_listening)
                    self._stop_timer, self._stop_listening = self._start_beating(), stop_listening
                    undo.pop_all()
                self._queue.cancel_listeners.add(self._cancelled)
        self._watch(held.loop)
        self._beat_in(held.loop)

    def drop(self, run_id: str, claim_id: str | None = None) -> None:
        """Keep the run no longer; with `claim_id` only that claim: here may be a later one already."""
        with self._lock:
            held = self._leased.get(run_id)
            if held is not None and claim_id in (None, held.row.claim_id):
                del self._leased[run_id]

    def stop(self) -> None:
        with self._lock:
            for stop in (self._stop_timer, self._stop_listening):
                if stop is not None:
                    stop()
            self._stop_timer = self._stop_listening = None
            self._queue.cancel_listeners.discard(self._cancelled)
        for task in (*(task for _, task in tuple(self._watchers.values())), *tuple(self._beaters.values())):
            call_in_loop(task.get_loop(), task.cancel)
        self._watchers.clear()
        self._beaters.clear()

    def _start_beating(self) -> Callable[[], None]:
        beat = getattr(self._queue.commits, "beat", None)
        if beat is None:
            return lambda: None
        stop: Callable[[], None] = beat(self.beat, self._config.heartbeat_interval)
        return stop

    def _beat_in(self, loop: asyncio.AbstractEventLoop) -> None:
        if getattr(self._queue.commits, "beat", None) is not None:
            return
        known = self._beaters.get(loop)
        if known is None or known.done():
            self._beaters[loop] = start_helper(self._beat_here(loop), "agent-runtime-beat")

    # -- beating

    def beat(self) -> None:
        """One beat, from the beat thread."""
        if held := self._alive():
            commit: Any = self._queue.commits
            try:
                answers = commit.commit_from_thread(None, [self._extends(held)])[0]
            except Exception as error:  # noqa: BLE001 - an error that leaves this method would end the thread
                self._heartbeat_failed(held, error)
            else:
                self._apply_replies(held, answers)

    def _extends(self, held: list[LeasedRun]) -> Op:
        claims = [(each.row.run_id, each.row.claim_id) for each in held]
        return Op("queue.beat", (claims, self._queue.lease_now() + self._config.lease_ttl_seconds))

    async def _beat_here(self, loop: asyncio.AbstractEventLoop) -> None:
        """For a queue that can only be reached from a loop: beat for the claims of this one while there are any."""
        try:
            while any(held.loop is loop for held in tuple(self._leased.values())):
                await self._clock.sleep(self._config.heartbeat_interval)
                await self._beat_once(loop)
        finally:
            if self._beaters.get(loop) is asyncio.current_task():
                del self._beaters[loop]

    async def _beat_once(self, loop: asyncio.AbstractEventLoop) -> None:
        if held := [each for each in self._alive() if each.loop is loop]:
            try:
                answers = (await self._queue.commits.commit(None, [self._extends(held)]))[0]
            except Exception as error:  # noqa: BLE001 - a custom queue may raise any error; the next beat tries again
                self._heartbeat_failed(held, error)
            else:
                self._apply_replies(held, answers)

    def _alive(self) -> list[LeasedRun]:
        """Return the claims to extend: their loop still runs, and their time is not up."""
        now = self._clock.boot()
        with self._lock:
            return [
                h
                for h in self._leased.values()
                if now < h.ends and now - self._ticks.get(h.loop, now) < LOOP_STALL_SECONDS
            ]

    def _apply_replies(self, held: list[LeasedRun], answers: list[tuple[bool, bool]]) -> None:
        self._answered = self._clock.boot()
        for each, (ok, cancel) in zip(held, answers, strict=True):
            if not ok:
                call_in_loop(each.loop, each.lose)
            elif cancel:
                call_in_loop(each.loop, each.cancel)
            elif self._answered - each.reported_at >= self._config.heartbeat_interval_seconds:
                each.reported_at = self._answered
                call_in_loop(each.loop, each.on_heartbeat)

    def _heartbeat_failed(self, held: list[LeasedRun], error: Exception) -> None:
        silent = self._clock.boot() - self._answered
        log.warning("heartbeat failed for %.1f s: %s", silent, error)
        if silent > self._config.lease_ttl_seconds * 2 / 3:
            for each in held:
                call_in_loop(each.loop, each.lose)

    # -- hearing

    def _cancelled(self, run_id: str) -> None:
        """Somebody in this process, on some loop, asked for a run to be cancelled."""
        held = self._leased.get(run_id)
        if held is None:
            return
        if held.loop is asyncio.get_running_loop():
            held.cancel()
        else:
            call_in_loop(held.loop, held.cancel)

    def _mail(self) -> None:
        """Some mailbox got a message: every loop with claims looks."""
        for loop, (news, _) in tuple(self._watchers.items()):
            call_in_loop(loop, news.set)

    def look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have it seen soon what came for the claims of that loop."""
        if (known := self._watchers.get(loop)) is not None:
            known[0].set()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        known = self._watchers.get(loop)
        if known is None or known[1].done():
            news = asyncio.Event()
            task = start_helper(self._follow(loop, news), "agent-runtime-news")
            self._watchers[loop] = (news, task)

    async def _follow(self, loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
        rings = self._stop_listening is not None
        try:
            while True:
                self._ticks[loop] = self._clock.boot()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0 if rings else NEWS_INTERVAL):
                        await news.wait()
                # A copy: other loops hold and drop claims meanwhile, from their threads.
                with self._lock:
                    mine = [h for h in tuple(self._leased.values()) if h.loop is loop]
                if not mine:
                    return
                if news.is_set() or not rings:
                    news.clear()
                    await self._look(mine)
        finally:
            self._ticks.pop(loop, None)
            if self._watchers.get(loop, (None,))[0] is news:
                del self._watchers[loop]

    async def _look(self, mine: list[LeasedRun]) -> None:
        try:
            news = await self._queue.snapshots([h.row.run_id for h in mine])
        except Exception as error:  # noqa: BLE001 - the same
            log.warning("could not look for messages: %s", error)
            return
        for held in mine:
            new = news.get(held.row.run_id)
            if held.control.closed:
                continue
            if new is None or new.claim_id != held.row.claim_id or new.status != "running":
                held.lose()
            elif new.cancelled:
                held.cancel()
            elif new.mail_seq > held.seen:
                held.seen = new.mail_seq
                held.control.mail.set()
