"""What happens in a seed's world: its hosts, its runs, what goes wrong, and what must be true at its end."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agent_runtime_core._engines.sqlite_tx import UserTransaction
from agent_runtime_core._ids import run_uuid
from agent_runtime_core.context import Context
from agent_runtime_core.errors import StorageBusy, WaitTimeout
from agent_runtime_core.events.base import Event
from agent_runtime_core.interfaces import AgentRuntime, RunResult
from agent_runtime_core.journal.record import DONE
from agent_runtime_core.queue.row import LIVE, RunFilter
from agent_runtime_core.steps.executor import StepExecutor
from agent_runtime_core.steps.model import Step

from .ablations import without
from .loop import HOST, Deadlock
from .store import Faults, SimClock
from .world import Host, World

T = TypeVar("T")

COLLECT = 20  # worlds between collections of their garbage: within one there is little
PATIENCE = 120.0  # virtual seconds after the last fault in which every run must have ended
CTX: ContextVar[Context] = ContextVar("simulated_run")

#: Ways a run that was not cancelled may fail for: what the scenario itself puts in.
INJECTED = {"StepExecutionError", "StorageBusy", "RunFailed"}


class Injected(Exception):
    """A step fails because the seed says so."""


@dataclass
class RunPlan:
    """A run: `items` is what its agent does, as (kind, name, number) triples."""

    run_id: str
    items: list[list[Any]]
    inline: bool = False
    at: float = 0.0
    delay: float = 0.0
    priority: int = 0
    followed: bool = False


@dataclass
class Scenario:
    """All of a seed's choices but those made on the way."""

    seed: int
    backend: str
    workers: int
    runs: list[RunPlan]
    faults: Faults
    actions: list[tuple[float, str, Any]]
    world: dict[str, Any]
    failing: float = 0.0
    longest: float = 0.2
    edited: bool = False
    ablated: Sequence[str] = field(default=())


def build(seed: int, ablated: Sequence[str] = ()) -> Scenario:
    """The scenario of a seed. Each draws its own mix of faults, so that rare ones meet often enough."""
    chance = random.Random(f"scenario {seed}")
    backend = "memory" if chance.random() < 0.65 else "sqlite"
    workers = chance.choice((2, 2, 2, 3))
    edited = chance.random() < 0.1

    def some(most: float, rate: float = 0.35) -> float:
        return chance.random() * most if chance.random() < rate else 0.0

    faults = Faults(
        latency=chance.choice((0.002, 0.01, 0.04)),
        lost=some(0.08),
        unanswered=some(0.08),
        doubled=some(0.3),
        dropped=some(0.2),
        crash=some(0.04),
        late_bell=some(0.5),
    )
    runs = [_run(chance, i, edited) for i in range(chance.choice((2, 2, 2, 2, 3, 3, 4, 6)))]
    if chance.random() < 0.08:
        runs.append(RunPlan("poison", [["step", "first", 0], ["poison", "boom", 0], ["step", "never", 0]]))
    return Scenario(
        seed=seed,
        backend=backend,
        workers=workers,
        runs=runs,
        faults=faults,
        actions=_actions(chance, workers, runs),
        world={
            "liveness": chance.random() < 0.6,
            "park_after": chance.choice((0.0, 0.1, 0.5)),
            "skew": some(2.0, 0.3),
            "shuffle": chance.random() < 0.5,
        },
        failing=some(0.3),
        longest=3.0 if chance.random() < 0.05 else 0.2,
        edited=edited,
        ablated=ablated,
    )


def _run(chance: random.Random, number: int, edited: bool) -> RunPlan:
    items: list[list[Any]] = []
    for i in range(chance.choice((3, 3, 3, 4, 5))):
        kinds = ("step", "step", "chain", "map", "signal", "sleep", "emit", "call", "late", "transaction")
        kind = chance.choice(("step", "step", "chain") if edited else kinds)
        count = chance.choice((2, 2, 3))
        items.append([kind, f"{kind}{i}", round(chance.uniform(0.02, 1.2), 3) if kind in ("sleep", "late") else count])
    return RunPlan(
        f"run-{number}",
        items,
        inline=chance.random() < 0.2,
        at=chance.uniform(0, 0.5),
        delay=chance.uniform(0.1, 1) if chance.random() < 0.15 else 0.0,
        priority=chance.choice((0, 0, 5)),
        followed=chance.random() < 0.25,
    )


def _actions(chance: random.Random, workers: int, runs: list[RunPlan]) -> list[tuple[float, str, Any]]:
    """What is done to the world, and when."""
    names = [f"worker{i}" for i in range(workers)] + ["executor"] * any(run.inline for run in runs)
    actions: list[tuple[float, str, Any]] = []
    for kind, rate, most in (("kill", 0.6, 4), ("pause", 0.5, 2), ("stop", 0.2, 1), ("jump", 0.1, 1)):
        if chance.random() < rate:
            for _ in range(chance.randint(1, most)):
                at = chance.uniform(0.01, 2.0)
                actions.append((at, kind, chance.choice(names)))
                if kind == "pause":
                    actions.append((at + chance.choice((0.3, 1.5, 3.5)), "go on", actions[-1][2]))
    if chance.random() < 0.35:
        actions.append((chance.uniform(0.05, 2.5), "cancel", chance.choice(runs).run_id))
    for run in runs:
        for kind, name, number in run.items:
            count = number if kind == "signal" else chance.choice((0, 1)) if kind == "late" else 0
            for i in range(count):
                actions.append((run.at + chance.uniform(0.05, 2.0), "signal", (run.run_id, name, i)))
    return sorted(actions, key=lambda action: action[0])


class Script(AgentRuntime):
    """Does what its input says, and tells the watch about it."""

    key = "script"

    def __init__(self, world: World, scenario: Scenario) -> None:
        self.world, self.scenario = world, scenario
        self.chance = random.Random(f"steps {scenario.seed}")

    async def run(self, ctx: Any) -> RunResult:
        CTX.set(ctx)
        self.world.watch.enter(ctx._row)
        out = []
        for kind, name, number in self._version(ctx.input["items"]):
            out.append(await self._item(ctx, kind, name, number))
        return RunResult({"out": out})

    def _version(self, items: list[list[Any]]) -> list[list[Any]]:
        """In an edited scenario each odd incarnation of a host runs code with another order."""
        if not self.scenario.edited or int(HOST.get().rpartition(".")[2]) % 2 == 0:
            return items
        return [items[1], items[0], *items[2:]]

    async def _item(self, ctx: Any, kind: str, name: str, number: Any) -> Any:
        match kind:
            case "step":
                return self._mine(name, await ctx.step(name, self.effect, name, retries=1, retry_delay=0.05))
            case "chain":
                steps = [
                    Step(f"{name}.{i}", self.link, checkpoint=i != 1, retries=1, retry_delay=0.05)
                    for i in range(number)
                ]
                results = await StepExecutor(ctx, checkpoint_key=name).run(steps)
                return [self._mine(step.name, results[step.name].partition(" ")[0]) for step in steps] + [
                    results[steps[-1].name]
                ]
            case "map":
                return await StepExecutor(ctx, max_concurrency=2).map(
                    name, self.effect, [f"{name}.{i}" for i in range(number)], retries=1, retry_delay=0.05
                )
            case "transaction" if self.scenario.backend == "memory":
                return self._mine(name, await ctx.step(name, self.effect, name))
            case "transaction":
                return self._mine(name, await ctx.transaction(name, write_effect, str(ctx.run_id), name))
            case "signal":
                return [await ctx.wait_for_signal(name) for _ in range(number)]
            case "late":
                try:
                    return await ctx.wait_for_signal(name, timeout=number)
                except WaitTimeout:
                    return "late"
            case "sleep":
                await ctx.sleep(number)
                return None
            case "emit":
                await ctx.emit("hello", {"from": name})
                await ctx.checkpoint({"at": name})
                return None
            case "call":
                return (
                    await ctx.call("child", {"items": [["step", f"{name}.{i}", 0] for i in range(number)]})
                ).final_output
            case "poison":
                return await ctx.step(name, self.poison)
        raise AssertionError(kind)

    def _mine(self, name: str, result: str) -> str:
        if result != f"{name}!":
            self.world.watch.wrong(f"step {name} was answered with {result!r}")
        return result

    async def _happen(self, name: str) -> str:
        """The effect of a step, which takes its time and may fail."""
        ctx = CTX.get()
        key = ctx.idempotency_key
        assert ctx.step_id is not None
        assert key is not None
        self.world.watch.begin(ctx._row, name, ctx.step_id, key)
        await asyncio.sleep(self.chance.random() * self.scenario.longest)
        if not self.world.calm and self.chance.random() < self.scenario.failing:
            self.world.watch.failures[key] += 1
            raise Injected(name)
        return f"{name}!"

    async def effect(self, name: str) -> str:
        return await self._happen(name)

    async def link(self, ctx: Any, state: Any) -> str:
        """A step of a chain: its result tells how many links there were before it."""
        frame = ctx._frame
        state["links"] = state.get("links", 0) + 1
        links = state["links"]
        return f"{await self._happen(frame.name)} {links}"

    async def poison(self) -> str:
        await self._happen("boom")
        self.world.kill(HOST.get())
        await asyncio.get_running_loop().create_future()
        raise AssertionError


def write_effect(conn: UserTransaction, run_id: str, name: str) -> str:
    """The effect of a transaction: a row beside the journal."""
    conn.execute("CREATE TABLE IF NOT EXISTS effects (run_id TEXT, name TEXT)")
    conn.execute("INSERT INTO effects VALUES (?, ?)", (run_id, name))
    return f"{name}!"


def read_effects(view: sqlite3.Connection) -> Counter[tuple[str, str]]:
    if not view.execute("SELECT 1 FROM sqlite_master WHERE name = 'effects'").fetchone():
        return Counter()
    return Counter(view.execute("SELECT run_id, name FROM effects"))


class Child(Script):
    key = "child"


def expected(items: list[list[Any]]) -> list[Any]:
    """What a run of these items gives, whatever happens to it; None stands for anything."""
    out: list[Any] = []
    for kind, name, number in items:
        match kind:
            case "step" | "transaction":
                out.append(f"{name}!")
            case "chain":
                out.append([*(f"{name}.{i}!" for i in range(number)), f"{name}.{number - 1}! {number}"])
            case "map":
                out.append([f"{name}.{i}!" for i in range(number)])
            case "call":
                out.append({"out": [f"{name}.{i}!" for i in range(number)]})
            case _:
                out.append(None)
    return out


class Play:
    """One seed, played."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.world = World(
            scenario.seed, backend=scenario.backend, faults=scenario.faults, ablated=scenario.ablated, **scenario.world
        )
        self.watch = self.world.watch
        self.world.agents = [Script(self.world, scenario), Child(self.world, scenario)]
        self.submitted: set[str] = set()
        self.told: dict[str, RunResult] = {}
        self.followed: dict[str, list[Event]] = {}

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
        row = self.watch.status.get(self._uuid(run))
        if row in ("failed", "cancelled", "dead", "timed_out"):
            return  # another call would begin a new generation
        execute = host.runner.execute
        self.told[run.run_id] = await self._patiently(lambda: execute("script", run.run_id, {"items": run.items}))

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
        self.client = world.host("client", self._idle)
        tasks = [self._as_client(self._submit(run)) for run in scenario.runs if not run.inline]
        tasks += [asyncio.ensure_future(self._act(*action)) for action in scenario.actions]
        await asyncio.sleep(max((at for at, *_ in scenario.actions), default=0.0) + 0.3)
        world.calm_down()
        await self._unless_over(self._rest())
        if tasks:
            await self._unless_over(asyncio.wait(tasks, timeout=5.0))
        if not self.watch.problems and not all(task.done() for task in tasks):
            self.watch.wrong(f"a client waits for ever: {[task for task in tasks if not task.done()]}")
        if not self.watch.problems:
            await self._unless_over(self._as_client(self._check()))
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is not None and not self.watch.problems:
                self.watch.wrong(f"a client's call failed: {task.exception()!r}")

    def _as_client(self, work: Any) -> asyncio.Task[Any]:
        return self.world.loop.create_task(work, context=self.client.context.copy())

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
                self.watch.wrong(f"not at rest after {PATIENCE:g} s: {self.watch.live()}")
                return

    def _at_rest(self) -> bool:
        return all(self._uuid(run) in self.watch.status for run in self.scenario.runs) and not self.watch.live()

    async def _submit(self, run: RunPlan) -> None:
        await asyncio.sleep(run.at)
        runner = self.client.runner
        await self._patiently(
            lambda: runner.submit(
                "script", {"items": run.items}, run_id=run.run_id, delay=run.delay, priority=run.priority
            )
        )
        self.submitted.add(run.run_id)
        if run.followed:
            async with aclosing(runner.stream(run.run_id)) as events:  # type: ignore[type-var]
                self.followed[run.run_id] = [event async for event in _all(events)]

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
            case "stop":
                host = world.hosts[about]
                if host.alive and about != "executor":
                    world.trace("stop", host.label)
                    host.context.run(host.runner.stop)
            case "jump":
                clock = world.hosts[about].engine.clock
                assert isinstance(clock, SimClock)
                clock.skew += world.chance.uniform(-3, 3)
            case "cancel":
                await self._as_client(self._cancel(about))
            case "signal":
                await self._as_client(self._signal(*about))

    def _uuid(self, run: RunPlan | str) -> str:
        return str(run_uuid(run if isinstance(run, str) else run.run_id, self.client.engine.clock)[0])

    def _known(self, run_id: str) -> bool:
        """Whether the run was stored by now; nobody would cancel or signal another."""
        return self._uuid(run_id) in self.watch.status

    async def _cancel(self, run_id: str) -> None:
        if self._known(run_id):
            await self._patiently(lambda: self.client.runner.cancel(run_id))

    async def _signal(self, run_id: str, name: str, number: int) -> None:
        while not self._known(run_id):  # noqa: ASYNC110 - the watch has no event for it
            await asyncio.sleep(0.3)
        payload = _payload(run_id, name, number)
        await self._patiently(lambda: self.client.runner.signal(run_id, name, payload, message_id=payload))

    # -- what must be true at rest

    async def _check(self) -> None:
        watch, runner = self.watch, self.client.runner
        rows = {row.run_id: row for row in await runner.queue.find(RunFilter())}
        by_uuid = {self._uuid(run): run for run in self.scenario.runs}
        for run_id in self.submitted:
            if self._uuid(run_id) not in rows:
                watch.wrong(f"run {run_id} was accepted and is not there")
        if self.scenario.backend == "sqlite":
            await self._check_effects(rows)
        for run, row in rows.items():
            if row.status != watch.status.get(run):
                watch.wrong(f"run {run} is stored as {row.status}, last heard was {watch.status.get(run)}")
            records = await runner.state_store.records(run)
            watch.check_journal(run, records)
            self.world.loop.note(f"{row} {records}")
            events = await runner.event_bus.get_events(run)
            if row.status in LIVE:
                continue
            watch.check_events(run, row.status, records, events, await runner.event_bus.head(run))
            plan = by_uuid.get(run)
            if plan is not None:
                await self._check_result(plan, row, events)

    async def _check_effects(self, rows: dict[str, Any]) -> None:
        """A transaction's effect is there exactly as often as its record is."""
        there: Counter[tuple[str, str]] = await self.client.engine.read(read_effects)
        due: Counter[tuple[str, str]] = Counter()
        for run in rows:
            for record in await self.client.runner.state_store.records(run):
                if record.kind == DONE and record.name.startswith("transaction"):
                    due[run, record.name] += 1
        if there != due:
            self.watch.wrong(f"effects are {there}, their records say {due}")

    async def _check_result(self, plan: RunPlan, row: Any, events: list[Event]) -> None:
        watch = self.watch
        result = await self.client.runner.wait(plan.run_id)
        told = self.told.get(plan.run_id, result)
        if (told.status, told.final_output) != (result.status, result.final_output):
            watch.wrong(f"run {plan.run_id} is {result}, its caller was told {told}")
        followed = self.followed.get(plan.run_id)
        if followed is not None and [_told(e) for e in followed] != [_told(e) for e in events]:
            watch.wrong(
                f"a follower of {plan.run_id} saw {len(followed)} events that differ from the {len(events)} kept"
            )
        match row.status:
            case "succeeded":
                self._check_output(plan, result.final_output["out"])
            case "failed":
                allowed = INJECTED | ({"JournalMismatch"} if self.scenario.edited else set())
                if result.error is None or result.error.type not in allowed:
                    watch.wrong(f"run {plan.run_id} failed: {result.error}")
            case "cancelled":
                if ("cancel", plan.run_id) not in {(what, about) for _, what, about in self.scenario.actions}:
                    watch.wrong(f"run {plan.run_id} is cancelled, and nobody asked for it")
            case "dead":
                return
            case _:
                watch.wrong(f"run {plan.run_id} is {row.status}")

    def _check_output(self, plan: RunPlan, out: list[Any]) -> None:
        due = expected(plan.items)
        if self.scenario.edited:
            due.sort(key=json.dumps)
            out = sorted(out, key=json.dumps)
        for (kind, name, number), want, got in zip(plan.items, due, out, strict=True):
            if kind == "signal":  # each of them, once
                got, want = sorted(got), [_payload(plan.run_id, name, i) for i in range(number)]
            elif kind == "late":
                want = got if got == "late" else _payload(plan.run_id, name, 0)
            if want != got:
                self.watch.wrong(f"run {plan.run_id} has {got!r} for {kind} {name}, not {want!r}")


def _payload(run_id: str, name: str, number: int) -> str:
    return f"{name}.{number} of {run_id}"


def _told(event: Event) -> tuple[int, str, str]:
    return event.sequence, event.event_type, json.dumps(event.payload, sort_keys=True, default=str)


async def _all(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    async for event in events:
        yield event


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

    def __str__(self) -> str:
        told, without = "\n".join(self.lines), "".join(f" --without {name}" for name in self.ablated)
        return (
            f"seed {self.seed}: {'; '.join(self.problems) or 'nothing wrong'}\n{told}\n"
            f"again: python -m tests.simulation --seeds {self.seed}:{self.seed + 1} --trace{without}"
        )


def play(seed: int, ablated: Sequence[str] = ()) -> Outcome:
    """Play one seed, with the named safeguards taken away."""
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
            piece = Play(build(seed, ablated))
            problems = piece.run()
    finally:
        if collects:
            gc.enable()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    loop = piece.world.loop
    return Outcome(seed, problems, loop.digest, loop.turns, loop.now, piece.world.last_lines(), ablated)


def wrong_ones(seeds: Sequence[int], ablated: Sequence[str] = ()) -> list[Outcome]:
    """Those of the seeds in which something was wrong."""
    return [outcome for seed in seeds if (outcome := play(seed, ablated)).problems]
