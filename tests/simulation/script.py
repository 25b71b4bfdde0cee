"""The agent of the simulated runs: it does what its input says, and tells the watch about it."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

from agent_runtime_core._engines.sqlite.user_transaction import UserTransaction
from agent_runtime_core._execution.context import Context
from agent_runtime_core.errors import AgentRuntimeError, WaitTimeout
from agent_runtime_core.interfaces import AgentRuntime, RunResult
from agent_runtime_core.steps.executor import StepExecutor
from agent_runtime_core.steps.model import Step

from .loop import HOST
from .plans import CHECKED, LIMITED, Scenario

if TYPE_CHECKING:
    from .world import World

CTX: ContextVar[Context] = ContextVar("simulated_run")


class Injected(Exception):
    """A step fails because the seed says so."""


class Script(AgentRuntime):
    """Does what its input says, and tells the watch about it."""

    key = "script"

    def __init__(self, world: World, scenario: Scenario) -> None:
        self.world, self.scenario = world, scenario
        self.chance = random.Random(f"steps {scenario.seed}")

    async def run(self, ctx: Any) -> RunResult:
        CTX.set(ctx)
        self.world.watch.enter(ctx._row)
        try:
            with self._reported("the script"):
                items = self._version(ctx.input["items"])
                return RunResult({"out": [await self._item(ctx, kind, name, number) for kind, name, number in items]})
        finally:
            self.world.watch.leave(ctx._row)

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        """Report an error of the script itself: the run would only fail, as one fails whose step was to."""
        try:
            yield
        except (Injected, AgentRuntimeError):
            raise
        except Exception as error:
            if self.world.loop.is_running():  # else it comes from closing what was left at the end
                self.world.watch.wrong(f"{what} raised {error!r}")
            raise

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
            case "graph":
                steps = [
                    Step(
                        f"{name}.{i}", self.node, checkpoint=i != 1, depends_on=[f"{name}.{j}" for j in needs_of(i)],
                        retries=1, retry_delay=0.05,
                    )
                    for i in range(number)
                ]  # fmt: skip
                results = await StepExecutor(ctx, checkpoint_key=name, max_concurrency=2).run(steps)
                return [results[step.name] for step in steps]
            case "transaction" if "sqlite" not in self.scenario.layout[2]:
                return self._mine(name, await ctx.step(name, self.effect, name))
            case "transaction":
                return self._mine(name, await ctx.transaction(name, self.write, str(ctx.run_id), name))
            case "signal":
                return [await ctx.wait_for_signal(name) for _ in range(number)]
            case "hear":
                return [each["content"] for each in await ctx.messages()]
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
            case "owe":  # the child pays, and asks nobody
                return (await ctx.call("child", {"items": [["owed", name, number]]})).final_output
            case "pay" | "owed":
                if kind == "pay" and not await ctx.approve(f"may {name}"):
                    raise Injected(name)
                return await self._paid(ctx, name, number)
            case "poison":
                return await ctx.step(name, self.poison)
        raise AssertionError(kind)

    async def _paid(self, ctx: Any, name: str, how: int) -> str:
        """A guarded step; `how` adds up `CHECKED` and `LIMITED`."""
        doubt = partial(self._unknown, name) if how & CHECKED else "fail"
        limit = 0.1 if how & LIMITED else None
        paid = await ctx.step(name, self.pay, name, retries=1, retry_delay=0.05, on_in_doubt=doubt, timeout=limit)
        return self._mine(name, paid)

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
        with self._reported(name):
            return await self._happen(name)

    def write(self, conn: UserTransaction, run_id: str, name: str) -> str:
        with self._reported(name):
            return write_effect(conn, run_id, name)

    async def pay(self, name: str) -> str:
        """A payment, which is made unless this raises."""
        with self._reported(name):
            return await self._pay(name)

    async def _pay(self, name: str) -> str:
        if not self.world.calm and self.chance.random() < self.scenario.failing:
            raise Injected(name)
        ctx = CTX.get()
        self.world.watch.pay(str(ctx.run_id), name)
        await asyncio.sleep(self.chance.random() * self.scenario.longest)
        return f"{name}!"

    async def _unknown(self, name: str) -> None:
        """What became of a payment: a check that says it may be made again. A plain function would run in a thread."""
        self.world.watch.again[name] += 1

    async def link(self, ctx: Any, state: Any) -> str:
        """A step of a chain: its result tells how many links there were before it."""
        with self._reported("a link"):
            return await self._link(ctx, state)

    async def _link(self, ctx: Any, state: Any) -> str:
        frame = ctx._scope
        state["links"] = state.get("links", 0) + 1
        links = state["links"]
        return f"{await self._happen(frame.name)} {links}"

    async def node(self, ctx: Any, state: Any) -> str:
        """A step of a graph: its result tells what it read, and what it had recorded while others ran."""
        with self._reported("a node"):
            return await self._node(ctx, state)

    async def _node(self, ctx: Any, state: Any) -> str:
        mine = ctx._scope.name
        name, _, place = mine.rpartition(".")
        needs = [f"{name}.{i}" for i in needs_of(int(place))]
        durable = [(each, ctx._scope.key) for each in needs if each[-2:] != ".1"]  # which has no checkpoint
        self.world.watch.depends(ctx._row, mine, durable)
        if int(place) % 3 == 0:
            await ctx.sleep(0.05)
        inside = await ctx.step("inside", _same, mine)
        if inside != mine:
            self.world.watch.wrong(f"a step inside {mine} is answered with that of {inside}")
        read = "".join(state.results[each] for each in needs)
        return f"({read}){await self._happen(mine)}"

    async def poison(self) -> str:
        with self._reported("boom"):
            await self._happen("boom")
        self.world.kill(HOST.get())
        await asyncio.get_running_loop().create_future()
        raise AssertionError


async def _same(value: str) -> str:
    return value


def needs_of(place: int) -> list[int]:
    """What a step of a simulated graph depends on: two begin at once, later ones wait for one or two before them."""
    return sorted({(place - 2) // 2, place - 2}) if place > 1 else []


def _node(name: str, place: int) -> str:
    return f"({''.join(_node(name, other) for other in needs_of(place))}){name}.{place}!"


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
            case "step" | "transaction" | "pay":
                out.append(f"{name}!")
            case "chain":
                out.append([*(f"{name}.{i}!" for i in range(number)), f"{name}.{number - 1}! {number}"])
            case "map":
                out.append([f"{name}.{i}!" for i in range(number)])
            case "graph":
                out.append([_node(name, i) for i in range(number)])
            case "call":
                out.append({"out": [f"{name}.{i}!" for i in range(number)]})
            case "owe":
                out.append({"out": [f"{name}!"]})
            case _:
                out.append(None)
    return out


def payload_of(run_id: str, name: str, number: int) -> str:
    return f"{name}.{number} of {run_id}"
