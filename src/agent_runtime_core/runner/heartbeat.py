"""Extend the leases of all claims of a runner, and pass cancellations, messages and lost leases on to their runs.

The leases are extended by a thread, so that a blocked event loop cannot lose them. The monotonic clock measures how
long a loop is blocked, a run may take and a store is silent, so that a suspend of the machine ends none of the claims.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from .._core.context_vars import start_helper
from .._core.log import log
from .._core.per_loop import call_in_loop
from .._engines.base import Guard, Op
from .._engines.outages import OUTAGE, StoreOutage
from .._execution.run_control import RunControl
from ..queue.base import RunQueue
from ..queue.records import RunRow, RunUpdate
from .settings import RunnerConfig

LOOP_STALL_SECONDS = 60.0  # seconds of a blocked event loop after which its leases are not extended any more
NEWS_INTERVAL = 0.1  # seconds between two reads of a queue that cannot notify


class LeasedRun(Protocol):
    """A claim of this process. Its methods are called in the loop of its run, except `unchanged_release`.

    Attributes:
        ends: Monotonic time after which the lease is not extended any more.
        reported_at: Monotonic time of the last call of `publish_heartbeat`.
        seen: Number of the last mailbox message that the run was notified of.
        owner: The task that the run was opened in.
        extended_at: Boot time at which the lease was last extended.
        answered_at: Monotonic time of the last answer of the store about the claim.
    """

    row: RunRow
    control: RunControl
    loop: asyncio.AbstractEventLoop
    ends: float
    reported_at: float
    seen: int
    owner: asyncio.Task[Any] | None
    extended_at: float
    answered_at: float

    def cancel(self) -> None:
        """Note that the run was cancelled."""

    def lose(self, claim_id: str) -> None:
        """Note that the claim with this id was lost."""

    def stop_for_outage(self, claim_id: str) -> None:
        """Stop the code under the claim with this id: the store does not answer, and the lease may end."""

    def publish_heartbeat(self) -> None:
        """Publish that the lease was extended; called at most once per `heartbeat_interval_seconds`."""

    def unchanged_release(self) -> RunUpdate:
        """Return the update that releases the claim, if no code executes it any more."""


#: A claim and its id, which another attempt of the run replaces.
_Claim = tuple[LeasedRun, str]


def _claims(held: Iterable[LeasedRun]) -> list[_Claim]:
    return [(each, each.row.claim_id) for each in held]


class Heartbeat:
    """Extends the leases of a runner while it holds any.

    Args:
        queue: Where the claims are.
        config: Settings of the runner.
        renewal: Returns the operations that renew the row of the runner, for the commit that extends the leases.
    """

    def __init__(self, queue: RunQueue, config: RunnerConfig, renewal: Callable[[], list[Op]] = list) -> None:
        self.queue: RunQueue = queue
        self._queue, self._config, self._clock, self._renewal = queue, config, queue.clock, renewal
        self._outage = StoreOutage.of(queue.commits, queue.clock)
        self._leased: dict[str, LeasedRun] = {}
        self._lock = threading.Lock()
        self._stop_timer: Callable[[], None] | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._has_thread = True  # else coroutines extend the leases
        self._ticks: dict[asyncio.AbstractEventLoop, float] = {}
        self._watchers: dict[asyncio.AbstractEventLoop, tuple[asyncio.Event, asyncio.Task[None]]] = {}
        #: For a queue that only coroutines can write to: one task in each loop with claims.
        self._beaters: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}
        #: Claims whose event loop stopped while they were executed. They are to be released.
        self._abandoned: list[LeasedRun] = []
        queue.live_claims.add(self)

    @property
    def interval(self) -> float:
        """Seconds between two extensions of the leases."""
        return self._config.heartbeat_interval

    # -- claims

    def hold(self, held: LeasedRun) -> None:
        """Extend the lease of this claim from now on."""
        with self._lock:
            self._leased[held.row.run_id] = held
            if self._stop_timer is None:
                with contextlib.ExitStack() as undo:
                    stop_listening = self._queue.listen("mail", self._mail)
                    if stop_listening is not None:
                        undo.callback(stop_listening)
                    self._stop_timer, self._stop_listening = self._start_beating(), stop_listening
                    undo.pop_all()
                self._queue.cancel_listeners.add(self._cancelled)
        if (known := self._watchers.get(held.loop)) is None or known[1].done():
            self._watch(held.loop)
        if not self._has_thread:
            self._beat_in(held.loop)

    def drop(self, run_id: str, held: LeasedRun | None = None) -> None:
        """Stop extending the lease of a run; with `held` only the lease of this claim, and not of a later claim."""
        with self._lock:
            if run_id in self._leased and held in (None, self._leased[run_id]):
                del self._leased[run_id]

    def abandon(self, held: LeasedRun) -> None:
        """Release a claim whose event loop is stopped, with the next beat or before the next claim of this process."""
        with self._lock:
            if self._leased.get(held.row.run_id) is held:
                self._abandoned.append(self._leased.pop(held.row.run_id))

    def abandoned(self, run_id: str | None = None) -> list[tuple[str, RunUpdate]]:
        """Remove the claims that no code executes any more, and return what releases them.

        Args:
            run_id: A run that is about to be taken. Its claim is removed too if the task that opened it ended: the
                caller opens it again, as when a cell of a notebook is executed again.
        """
        if not self._leased and not self._abandoned:
            return []
        with self._lock:
            gone = [held for held in self._leased.values() if held.loop.is_closed()]
            held = self._leased.get(run_id or "")
            if held is not None and held not in gone and held.owner is not None and held.owner.done():
                gone.append(held)
                call_in_loop(held.loop, held.lose, held.row.claim_id)
            for each in gone:
                del self._leased[each.row.run_id]
            gone += self._abandoned
            self._abandoned = []
        return [(each.row.run_id, each.unchanged_release()) for each in gone]

    def unextended(self) -> list[tuple[str, str]]:
        """Return run id and claim id of the live claims whose lease may have run out, as after a suspend.

        After `stop`, there are none: nothing extends the leases.
        """
        if not self._leased or self._stop_timer is None:
            return []
        since = self._clock.boot() - self._config.silence_seconds
        return [(held.row.run_id, held.row.claim_id) for held in self._alive() if held.extended_at < since]

    def stop(self) -> None:
        """Stop the thread, the tasks and the listener."""
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
        self._has_thread = beat is not None
        if beat is None:
            return lambda: None
        stop: Callable[[], None] = beat(self.beat, self._config.heartbeat_interval)
        return stop

    def _beat_in(self, loop: asyncio.AbstractEventLoop) -> None:
        known = self._beaters.get(loop)
        if known is None or known.done():
            self._beaters[loop] = start_helper(self._beat_here(loop), "agent-runtime-beat")

    # -- leases

    def beat(self) -> None:
        """Extend all leases once. Called by the thread."""
        self._release_abandoned()
        if held := _claims(self._alive()):
            commit: Any = self._queue.commits
            began, asked = self._clock.boot(), self._clock.monotonic()
            try:
                answers = commit.commit_from_thread(None, [self._extends(held), *self._renewal()])[0]
            except Exception as error:  # noqa: BLE001 - an error that leaves this method would end the thread
                self._heartbeat_failed(held, error)
            else:
                self._apply_replies(held, answers, began, asked)

    def _release_abandoned(self) -> None:
        self._queue.live_claims.suspended()  # compares the clocks
        commit: Any = self._queue.commits
        for run_id, how in (*self.abandoned(), *self._queue.live_claims.owed_releases()):
            try:
                commit.commit_from_thread(Guard(run_id, how.claim_id), [Op("queue.settle", (run_id, how))])
            except OUTAGE:
                self._queue.live_claims.owe_release(run_id, how)
            except Exception as error:  # noqa: BLE001 - its lease ends later, or it was released or lost since
                log.debug("run %s was not released: %s", run_id, error)

    def _extends(self, held: list[_Claim]) -> Op:
        claims = [(each.row.run_id, claim_id) for each, claim_id in held]
        return Op("queue.beat", (claims, self._queue.lease_now() + self._config.lease_ttl_seconds))

    async def _beat_here(self, loop: asyncio.AbstractEventLoop) -> None:
        """Extend the leases of the claims in this loop while there are any."""
        try:
            while any(held.loop is loop for held in tuple(self._leased.values())):
                await self._clock.sleep(self._config.heartbeat_interval)
                await self._beat_once(loop)
        finally:
            if self._beaters.get(loop) is asyncio.current_task():
                del self._beaters[loop]

    async def _beat_once(self, loop: asyncio.AbstractEventLoop) -> None:
        if held := _claims(each for each in self._alive() if each.loop is loop):
            began, asked = self._clock.boot(), self._clock.monotonic()
            try:
                answers = (await self._queue.commits.commit(None, [self._extends(held), *self._renewal()]))[0]
            except Exception as error:  # noqa: BLE001 - a custom queue may raise any error; the next beat tries again
                self._heartbeat_failed(held, error)
            else:
                self._apply_replies(held, answers, began, asked)

    def _alive(self) -> list[LeasedRun]:
        """Return the claims whose leases are extended: their event loop runs, and their time is not up."""
        now = self._clock.monotonic()
        with self._lock:
            return [
                h
                for h in self._leased.values()
                if not h.loop.is_closed() and now < h.ends and now - self._ticks.get(h.loop, now) < LOOP_STALL_SECONDS
            ]

    def _apply_replies(self, held: list[_Claim], answers: list[tuple[bool, bool]], began: float, asked: float) -> None:
        now = self._clock.monotonic()
        self._outage.answered(began=asked)
        for (each, claim_id), (ok, cancel) in zip(held, answers, strict=True):
            each.extended_at, each.answered_at = began, now
            if not ok:
                call_in_loop(each.loop, each.lose, claim_id)
            elif cancel:
                call_in_loop(each.loop, each.cancel)
            elif now - each.reported_at >= self._config.heartbeat_interval_seconds:
                each.reported_at = now
                call_in_loop(each.loop, each.publish_heartbeat)

    def _heartbeat_failed(self, held: list[_Claim], error: Exception) -> None:
        now = self._clock.monotonic()
        if isinstance(error, OUTAGE):
            self._outage.noticed(error)
        silent = now - min(each.answered_at for each, _ in held)
        level = logging.DEBUG if isinstance(error, OUTAGE) else logging.WARNING
        log.log(level, "heartbeat failed for %.1f s: %s", silent, error)
        for each, claim_id in held:
            if now - each.answered_at > self._config.silence_seconds:
                call_in_loop(each.loop, each.stop_for_outage, claim_id)

    # -- notifications

    def _cancelled(self, run_id: str) -> None:
        """Cancel a run that code of this process, in any event loop, cancelled."""
        held = self._leased.get(run_id)
        if held is None:
            return
        if held.loop is asyncio.get_running_loop():
            held.cancel()
        else:
            call_in_loop(held.loop, held.cancel)

    def _mail(self) -> None:
        """Have every loop with claims read its runs, because there is a new message in a mailbox."""
        for loop, (changed, _) in tuple(self._watchers.items()):
            call_in_loop(loop, changed.set)

    def look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the runs of this loop read soon."""
        if (known := self._watchers.get(loop)) is not None:
            known[0].set()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        changed = asyncio.Event()
        task = start_helper(self._follow(loop, changed), "agent-runtime-news")
        self._watchers[loop] = (changed, task)

    async def _follow(self, loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> None:
        notifies = self._stop_listening is not None
        try:
            while True:
                self._ticks[loop] = self._clock.monotonic()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0 if notifies else NEWS_INTERVAL):
                        await changed.wait()
                # A copy, because the threads of other loops add and drop claims.
                with self._lock:
                    mine = [h for h in tuple(self._leased.values()) if h.loop is loop]
                if not mine:
                    return
                if changed.is_set() or not notifies:
                    changed.clear()
                    await self._look(mine)
                del mine  # until the next read it would keep the objects of all runs that end
        finally:
            self._ticks.pop(loop, None)
            if self._watchers.get(loop, (None,))[0] is changed:
                del self._watchers[loop]

    async def _look(self, mine: list[LeasedRun]) -> None:
        claims = _claims(mine)
        try:
            snapshots = await self._queue.snapshots([h.row.run_id for h in mine])
        except OUTAGE as error:
            self._outage.noticed(error)
            return
        except Exception as error:  # noqa: BLE001 - a custom queue may raise any error; the next read tries again
            log.warning("reading mailbox updates failed, will retry: %s", error)
            return
        for held, claim_id in claims:
            new = snapshots.get(held.row.run_id)
            if held.control.closed:
                continue
            if new is None or new.claim_id != claim_id or new.status != "running":
                held.lose(claim_id)
            elif new.cancelled and held.control.cancel_hook is None:
                held.cancel()
            elif new.mail_seq > held.seen:  # a `cancel` hook may wait for messages, too
                held.seen = new.mail_seq
                held.control.mail.set()
