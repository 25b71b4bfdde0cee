"""A seed's world, played: its hosts, its runs, and what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from agent_runtime_core._core.clock import Duration
from agent_runtime_core._core.ids import run_uuid
from agent_runtime_core._execution.parking import TIMED_OUT, Find, Parking
from agent_runtime_core.errors import (
    IdempotencyConflict,
    IllegalTransition,
    InvalidArgument,
    StorageBusy,
    StorageClosed,
    UnknownRun,
)
from agent_runtime_core.events.event import Event
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.queue.records import LIVE
from tests.simulation.leftovers import Rest

from .ablations import without
from .checks import Watch
from .hosts import Host
from .loop import Deadlock
from .plans import PAYS, ForkPlan, RunPlan, Scenario, build
from .script import Child, Script, payload_of
from .world import World

T = TypeVar("T")
WAIT = Parking.wait

CLIENTS = ("client0", "client1")

COLLECT = 20  # worlds between collections of their garbage: within one there is little
#: Seeds that miss a safeguard for which the search from 0 takes long. Where they miss it no more, the search is made.
SEEDS_TRIED_FIRST = {
    "adopt": (518,), "alone": (30,), "child": (14,), "count": (10,), "cursor": (3,), "defer": (23,), "delayed": (124,),
    "digests": (50,), "effects": (3,), "inside": (32,), "limit": (18,), "liveness": (157,), "member": (105,),
    "once": (81,), "order": (2,), "own": (79,), "publish": (52,), "rollback": (10,), "set back": (455,),
    "terminal": (100,), "woken": (459,),
}  # fmt: skip

PATIENCE = 120.0  # virtual seconds after the last fault in which every run must have ended


class Play:
    """One seed, played."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = World(
            scenario.seed, layout=scenario.layout, faults=scenario.faults, ablated=scenario.ablated, **scenario.world
        )
        self.watch = self.world.watch
        self.world.agents = [Script(self.world, scenario), Child(self.world, scenario)]
        self.submitted: dict[str, set[str]] = {}  # run ids as clients were told
        self.told: dict[str, RunResult] = {}
        self.accepted: dict[str, list[str]] = defaultdict(list)  # messages to the agent of each run
        self.forked: set[str] = set()
        self.unforked: set[str] = set()  # forks that came to nothing
        self.followed: dict[str, list[Event]] = {}
        self.calls: list[asyncio.Future[None]] = []  # of clients

    def run(self) -> list[str]:
        """What was wrong."""
        try:
            self.world.loop.run_until_complete(self._main())
        except Deadlock as error:
            self.watch.wrong(f"deadlock {error}")
        finally:
            self.world.close()
        return [*self.watch.problems, *(f"a callback fell: {error}" for error in self.world.loop.fallen)]

    # -- hosts

    async def _work(self, host: Host) -> None:
        await host.runner.run_loop(self.world.poll, concurrency=6, handle_signals=False)
        await host.runner.close()
        host.up_since = None
        self.world.trace("stopped", host.label)
        self.world.restart(host, 0.2)

    async def _execute(self, host: Host) -> None:
        mine = [run for run in self.scenario.runs if run.inline]
        await asyncio.gather(*(self._execute_one(host, run) for run in mine))

    async def _execute_one(self, host: Host, run: RunPlan) -> None:
        await asyncio.sleep(run.at)
        # Of one that has ended, another call would begin a new generation.
        while self.watch.status.get(self.uuid(run.run_id)) not in ("failed", "cancelled", "dead", "timed_out"):
            with contextlib.suppress(StorageBusy):
                self.told[run.run_id] = await host.runner.execute("script", run.run_id, {"items": run.items})
                return
            await asyncio.sleep(0.05)

    async def _idle(self, host: Host) -> None:
        """The client is driven from outside."""

    async def _patiently(self, verb: Callable[[], Awaitable[T]]) -> T:
        """Repeat what the store did not answer, as its error says is safe."""
        while True:
            try:
                return await verb()
            except StorageBusy:
                await asyncio.sleep(0.05)

    # -- the plot

    async def _main(self) -> None:
        world, scenario = self.world, self.scenario
        for i in range(scenario.workers):
            world.host(f"worker{i}", self._work)
        if any(run.inline for run in scenario.runs):
            world.host("executor", self._execute)
        clients = [world.host(name, self._idle) for name in CLIENTS]
        submitted = [run for run in scenario.runs if not run.inline]
        tasks = self.calls
        tasks += [self._as(clients[0], self._submit(clients[0], run, run.run_id)) for run in submitted]
        tasks += [
            self._as(clients[1], self._submit(clients[1], run, f"{run.run_id}-b")) for run in submitted if run.twice
        ]
        acting = [asyncio.ensure_future(self._act(*action)) for action in scenario.actions]
        tasks += acting
        if scenario.forks:
            payers = ["payer", *(fork.run_id for fork in scenario.forks)]
            tasks += [self._as(clients[1], self._approve(clients[1], run_id)) for run_id in payers]
        await asyncio.sleep(max((at for at, *_ in scenario.actions), default=0.0) + 0.3)
        world.calm_down()
        if acting:  # a fork may have to wait for its source
            await self._unless_over(asyncio.wait(acting, timeout=PATIENCE))
        await self._unless_over(self._rest())
        if tasks:
            await self._unless_over(asyncio.wait(tasks, timeout=5.0))
        if not self.watch.problems and not all(task.done() for task in tasks):
            self.watch.wrong(f"a client waits for ever: {[task for task in tasks if not task.done()]}")
        if not self.watch.problems:
            await self._unless_over(self._as(clients[0], Rest(self).check()))
        self._check_calls()

    def _check_calls(self) -> None:
        for call in self.calls:
            if call.done() and not call.cancelled() and call.exception() is not None and not self.watch.problems:
                self.watch.wrong(f"a client's call failed: {call.exception()!r}")

    def _as(self, host: Host, work: Any) -> asyncio.Task[Any]:
        return self.world.loop.create_task(work, context=host.context.copy())

    async def _unless_over(self, work: Any) -> None:
        """Until that is done, or something is wrong."""
        task, over = asyncio.ensure_future(work), asyncio.ensure_future(self.world.over.wait())
        await asyncio.wait({task, over}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if task.done():
            task.result()

    async def _rest(self) -> None:
        """Until every run has ended, and those who thought they held one had time to say so."""
        until = self.world.loop.now + PATIENCE
        while True:
            if self._at_rest():
                await asyncio.sleep(0.5)
                if self._at_rest():
                    return
            self.world.some_ended.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self.world.some_ended.wait()
            except TimeoutError:
                self._check_calls()  # a run may wait for what that client does next
                self.watch.wrong(f"not at rest after {PATIENCE:g} s: {self.watch.live()}")
                return

    def _at_rest(self) -> bool:
        return all(self.uuid(run.run_id) in self.watch.status for run in self.scenario.runs) and not self.watch.live()

    async def _submit(self, client: Host, run: RunPlan, run_id: str) -> None:
        await asyncio.sleep(run.at)
        submit, key = client.runner.submit, f"key of {run.run_id}" if run.twice else None
        uuid = await self._patiently(
            lambda: submit(
                "script", {"items": run.items}, run_id=run_id, idempotency_key=key, delay=run.delay,
                priority=run.priority,
            )
        )  # fmt: skip
        self.submitted.setdefault(run.run_id, set()).add(str(uuid))
        if run.followed and run_id == run.run_id:
            await self._follow(client, run.run_id, uuid)

    async def _follow(self, client: Host, run_id: str, uuid: UUID) -> None:
        """To the end, going on from where the stream broke off."""
        seen: list[Event] = []

        async def follow() -> None:
            async with aclosing(client.runner.stream(uuid, len(seen))) as events:
                async for event in events:
                    seen.append(event)

        await self._patiently(follow)
        self.followed[run_id] = seen

    async def _act(self, at: float, what: str, about: Any) -> None:
        world = self.world
        await asyncio.sleep(at)
        match what:
            case "kill":
                world.kill(world.hosts[about].label)
            case "pause":
                world.pause(world.hosts[about])
            case "go on":
                world.go_on(world.hosts[about])
            case "wake":
                world.wake(world.hosts[about])
            case "stop":
                if about != "executor":
                    self._stop(world.hosts[about])
            case "encrypt":  # whoever starts from now on
                world.encrypts = True
                for host in world.hosts.values():
                    if host.name.startswith("worker"):
                        self._stop(host)
            case "suspend":
                world.suspend(world.hosts[about])
            case "jump":
                world.hosts[about].clock.skew += world.chance.uniform(-3, 3)
                world.stepped[world.hosts[about].label] = world.loop.now
            case "step":
                world.step(world.hosts[about[0]], about[1])
            case "cut":
                world.cut(world.hosts[about[0]], about[1])
            case "cancel":
                run_id, by = about
                asked = self._as(world.hosts[by], self._cancel(world.hosts[by], run_id))
                if by in CLIENTS:  # another may die in the middle of it
                    await asked
            case "fork":
                await self._as(world.hosts["client0"], self._fork(world.hosts["client0"], about))
            case "discard":
                await self._as(world.hosts["client0"], self._discard(world.hosts["client0"], *about))
            case "send":
                *rest, by = about
                await self._as(world.hosts[by], self._send(world.hosts[by], *rest))
            case "signal":
                *rest, by = about
                await self._as(world.hosts[by], self._signal(world.hosts[by], *rest))

    def _stop(self, host: Host) -> None:
        if host.alive:
            self.world.trace("stop", host.label)
            host.context.run(host.runner.stop)

    def uuid(self, run_id: str) -> str:
        """The id under which that run is stored, as far as anybody knows."""
        known = self.submitted.get(run_id)
        return min(known) if known else str(run_uuid(run_id, self.world.hosts["client0"].clock)[0])

    def _known(self, run_id: str) -> bool:
        """Whether the run was stored by now; nobody would cancel or signal another."""
        return self.uuid(run_id) in self.watch.status

    async def _cancel(self, host: Host, run_id: str) -> None:
        if self._known(run_id) and host.alive:
            with suppress(StorageClosed):  # a worker that stops in the meantime
                await self._patiently(lambda: host.runner.cancel(self.uuid(run_id)))

    async def _fork(self, host: Host, fork: ForkPlan) -> None:
        """Fork, as soon as the source has that step; never where it ends without it."""
        watch, source, mine = self.watch, self.uuid(fork.source), self.uuid(fork.run_id)
        if fork.effects == "repeat":
            watch.permits.update(name for kind, name, _ in fork.items if kind in PAYS)
        elif fork.effects != "reuse":
            watch.must_ask.add(mine)
        while True:
            over = watch.status.get(source, "pending") not in LIVE or fork.source in self.unforked
            with suppress(InvalidArgument, UnknownRun):
                with suppress(IdempotencyConflict):  # it was begun, not finished, and its source has gone on
                    await self._patiently(
                        lambda: host.runner.fork(source, fork.after, new_run_id=fork.run_id, effects=fork.effects)
                    )
                    self.forked.add(fork.run_id)
                    return
                break
            if over:
                break
            await asyncio.sleep(0.2)
        if source in watch.deleted:  # a call before may have been unanswered, or may still arrive
            await asyncio.sleep(1.0)
        (self.forked if self._known(fork.run_id) else self.unforked).add(fork.run_id)

    async def _discard(self, host: Host, run_id: str, children: bool) -> None:
        """Delete a run once it has finished, or its children."""
        watch, mine = self.watch, self.uuid(run_id)
        while watch.status.get(mine, "pending") in LIVE:
            if run_id in self.unforked:
                return
            await asyncio.sleep(0.2)
        for run in [row.run_id for row in watch.rows.values() if row.parent_id == mine] if children else [mine]:
            with suppress(UnknownRun, IllegalTransition):  # it is deleted, or was left by its caller
                await self._patiently(partial(host.runner.discard, run))

    async def _approve(self, host: Host, run_id: str) -> None:
        """Give the run all approvals that it asks for; what it asks because of its policy gets the planned answer."""
        run = self.uuid(run_id)
        plan = next((fork for fork in self.scenario.forks if fork.run_id == run_id), None)
        given = set[str]()
        while self.watch.status.get(run, "pending") in LIVE and run_id not in self.unforked:
            await asyncio.sleep(0.1)
            if run not in self.watch.status:
                continue
            for event in await self._patiently(lambda: host.runner.event_bus.get_events(run)):
                request = str(event.payload.get("request_id"))
                if event.event_type != "approval.requested" or request in given:
                    continue
                given.add(request)
                name = event.payload["name"]
                answer = plan is None or plan.answer or not name.startswith("repeat:")
                if answer and name.startswith("repeat:"):
                    self.watch.permits[name.removeprefix("repeat:")] += 1
                self.watch.answered[run] += 1
                give = partial(host.runner.approve, run, name, answer, request_id=request)
                await self._patiently(give)

    async def _signal(self, host: Host, run_id: str, name: str, number: int) -> None:
        while not self._known(run_id):  # noqa: ASYNC110 - the watch has no event for it
            await asyncio.sleep(0.3)
        payload = payload_of(run_id, name, number)
        await self._patiently(lambda: host.runner.signal(self.uuid(run_id), name, payload, message_id=payload))

    async def _send(self, host: Host, run_id: str, number: int) -> None:
        while not self._known(run_id):  # noqa: ASYNC110 - the watch has no event for it
            await asyncio.sleep(0.3)
        text = payload_of(run_id, "message", number)
        with suppress(IllegalTransition):  # the run has finished
            await self._patiently(lambda: host.runner.send(self.uuid(run_id), text, message_id=text))
            self.accepted[run_id].append(text)


@dataclass(frozen=True)
class Outcome:
    """What came of a seed; two runs of it agree in `digest`."""

    seed: int
    problems: list[str]
    digest: int
    turns: int
    seconds: float
    lines: list[str]
    ablated: Sequence[str] = ()
    stolen: int = 0  # claims of runs that somebody alive was at work on

    def __str__(self) -> str:
        told, without = "\n".join(self.lines), "".join(f" --without {name}" for name in self.ablated)
        return (
            f"seed {self.seed}: {'; '.join(self.problems) or 'nothing wrong'}\n{told}\n"
            f"again: python -m tests.simulation --seeds {self.seed}:{self.seed + 1} --trace{without}"
        )


@contextmanager
def watch_waits(watch: Watch) -> Iterator[None]:
    """Inside the block, have the watch see each wait that ends by its time limit."""

    async def wait(self: Parking, find: Find, limit: Duration | None, reason: str) -> Any:
        began = watch.world.loop.now
        message = await WAIT(self, find, limit, reason)
        if message is TIMED_OUT and limit is not None:
            watch.timed_out(limit, began)
        return message

    Parking.wait = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        Parking.wait = WAIT  # type: ignore[method-assign]


def play(seed: int, ablated: Sequence[str] = ()) -> Outcome:
    """Play one seed, with the named safeguards taken away."""
    return played(build(seed, ablated))


def played(scenario: Scenario) -> Outcome:
    seed, ablated = scenario.seed, scenario.ablated
    if seed % COLLECT == 0:
        gc.collect()
    loggers = [logging.getLogger(name) for name in ("agent_runtime_core", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    collects = gc.isenabled()
    gc.disable()
    try:
        with without(ablated):
            piece = Play(scenario)
            with watch_waits(piece.watch):
                problems = piece.run()
    finally:
        if collects:
            gc.enable()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    loop = piece.world.loop
    return Outcome(
        seed, problems, loop.digest, loop.turns, loop.now, piece.world.last_lines(), ablated, piece.watch.stolen
    )


def wrong_ones(seeds: Sequence[int], ablated: Sequence[str] = ()) -> list[Outcome]:
    """Those of the seeds in which something was wrong."""
    return [outcome for seed in seeds if (outcome := play(seed, ablated)).problems]


def first_without(safeguard: str, seeds: int = 2000) -> int | None:
    """The first of so many seeds in which something is wrong without that safeguard; None where none is."""
    order = (*SEEDS_TRIED_FIRST.get(safeguard, ()), *range(seeds))
    return next((seed for seed in order if play(seed, (safeguard,)).problems), None)
