"""The agents that jobs work with, and the runner over one, two or three SQLite files or Redis URLs they work on."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_runtime_core import AgentRunner, AgentRuntime, RunnerConfig, RunResult, StepExecutor
from agent_runtime_core._core.clock import Clock
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.queue import get_queue
from agent_runtime_core.registry import Registry
from agent_runtime_core.state import get_state_store
from agent_runtime_core.steps import AlreadyDone, Step
from tests.fault.jobs.effects import effect


class Later(Clock):
    """A clock whose wall time is some seconds ahead."""

    def __init__(self, ahead: float) -> None:
        super().__init__()
        self.ahead = ahead

    def wall(self) -> float:
        return super().wall() + self.ahead


class Noop(AgentRuntime):
    key = "noop"

    async def run(self, ctx: Any) -> RunResult:
        effect_ = ctx.params.get("effects")
        if effect_:
            fd = os.open(effect_, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(fd, f"{ctx.run_id} {os.getpid()}\n".encode())
            os.close(fd)
        return RunResult({"run": str(ctx.run_id)})


class Steps(AgentRuntime):
    """`n` steps of `pause` seconds each; with `say`, an event in each and one behind each, and a checkpoint.

    The step with the number `held` goes on when there is a file `gate`.
    """

    key = "steps"

    async def run(self, ctx: Any) -> RunResult:
        p = ctx.params

        async def one(ctx: Any, i: int) -> int:
            if p.get("effects"):
                effect(p["effects"], ctx.run_id, f"s{i}", os.getpid(), time.monotonic(), ctx.idempotency_key)
            if p.get("say"):
                await ctx.emit("inside", {"i": i})
            await asyncio.sleep(p.get("pause", 0))
            while i == p.get("held") and not os.path.exists(p["gate"]):  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.005)
            return i * i

        out = []
        for i in range(p["n"]):
            out.append(await ctx.step(f"s{i}", one, ctx, i))
            if p.get("say"):
                await ctx.emit("behind", {"i": i})
                await ctx.checkpoint({"i": i})
        return RunResult({"out": out})


class Parks(AgentRuntime):
    """A step, a wait that parks the run, another step."""

    key = "parks"

    async def run(self, ctx: Any) -> RunResult:
        p = ctx.params
        run_id = ctx.run_id

        def leave(word: str) -> str:
            effect(p["effects"], run_id, word)
            return word

        before = await ctx.step("before", leave, "before")
        if p["wait"] == "sleep":
            await ctx.sleep(p["seconds"])
            told: Any = None
        else:
            told = await ctx.wait_for_signal("go")
        after = await ctx.step("after", leave, "after")
        return RunResult({"before": before, "told": told, "after": after})


class Sleeper(AgentRuntime):
    """A step that does nothing until it is cancelled, and says when that was."""

    key = "sleeper"

    async def run(self, ctx: Any) -> RunResult:
        p, run_id = ctx.params, ctx.run_id

        async def wait() -> None:
            effect(p["effects"], run_id, "in", time.monotonic())
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                effect(p["effects"], run_id, "out", time.monotonic())
                raise

        await ctx.step("wait", wait)
        return RunResult()


class Writer(AgentRuntime):
    """Emits, checkpoints and does steps until it is stopped."""

    key = "writer"

    async def run(self, ctx: Any) -> RunResult:
        effects = ctx.params["effects"]
        try:
            for i in range(1_000_000):
                await ctx.step(f"w{i}", lambda i=i: i)
                await ctx.emit("tick", {"i": i})
                await ctx.checkpoint({"i": i})
                if i == 3:
                    effect(effects, "writing", os.getpid())
        finally:
            effect(effects, "stopped", os.getpid())
        return RunResult()


class Poison(AgentRuntime):
    """Two steps, then one that ends its process as long as there is no file `cure`."""

    key = "poison"

    async def run(self, ctx: Any) -> RunResult:
        p, run_id = ctx.params, ctx.run_id

        async def step(i: int) -> int:
            effect(p["effects"], run_id, f"s{i}")
            if i == 2 and not os.path.exists(p["cure"]):
                await asyncio.sleep(0.05)  # so that what was queued before this is written
                os._exit(3)
            return i

        return RunResult({"out": [await ctx.step(f"s{i}", step, i) for i in range(3)]})


class Doubt(AgentRuntime):
    """Three steps by `door`, the middle one of which ends its process the first time; `policy` says what then."""

    key = "doubt"

    async def run(self, ctx: Any) -> RunResult:
        p = ctx.params
        door, policy, effects = p["door"], p["policy"], p["effects"]

        async def act(ctx: Any, i: int) -> int:
            effect(effects, f"s{i}", ctx.idempotency_key)
            if i == 1 and Path(effects).read_text().count("s1 ") == 1:
                await asyncio.sleep(0.1)  # what was queued before this is written
                os.kill(os.getpid(), 9)
            return i

        def happened() -> AlreadyDone | None:
            effect(effects, "asked")
            return AlreadyDone(41) if policy == "happened" else None

        how: Any = happened if policy in ("happened", "again") else policy
        if door == "chain":

            def step(i: int) -> Step:
                async def fn(ctx: Any, state: Any) -> int:
                    return await act(ctx, i)

                return Step(f"s{i}", fn, on_in_doubt=how)

            out = await StepExecutor(ctx).run([step(i) for i in range(3)])
            return RunResult({"out": list(out.values())})
        if door == "map":

            async def item(i: int) -> int:
                return await act(ctx, i)

            executor = StepExecutor(ctx, max_concurrency=1)
            return RunResult({"out": await executor.map("s", item, range(3), on_in_doubt=how)})
        return RunResult({"out": [await ctx.step(f"s{i}", act, ctx, i, on_in_doubt=how) for i in range(3)]})


class Pays(AgentRuntime):
    """A payment between two other steps; `policy` says what follows if nobody knows whether it was made."""

    key = "pays"

    async def run(self, ctx: Any) -> RunResult:
        bank, order = ctx.params["bank"], str(ctx.params["order"])

        async def pay() -> str:
            effect(bank, order)
            await asyncio.sleep(0.03)
            return "paid"

        def check() -> AlreadyDone | None:
            paid = Path(bank).exists() and f"{order} " in Path(bank).read_text()
            return AlreadyDone("paid") if paid else None

        policy: Any = check if ctx.params["policy"] == "check" else ctx.params["policy"]
        await ctx.step("before", asyncio.sleep, 0.01)
        paid = await ctx.step("pay", pay, on_in_doubt=policy)
        await ctx.step("after", asyncio.sleep, 0.01)
        return RunResult({"paid": paid})


def registry() -> Registry:
    known = Registry()
    for agent in (Noop(), Steps(), Parks(), Sleeper(), Writer(), Poison(), Doubt(), Pays()):
        known.register(agent)
    return known


def open_runner(places: Sequence[object], ahead: float = 0.0, **config: Any) -> AgentRunner:
    """A runner whose queue, event bus and state store are on these three files or URLs, which may be the same."""
    clock = Later(ahead)
    settings = RunnerConfig(**{"retry_backoff_base": 0, **config})

    def at(place: str) -> dict[str, Any]:
        if "://" in place:
            # Its time is the server's unless it is given a clock.
            backend = "redis" if place.startswith("redis") else "postgres"
            return {"backend": backend, "url": place, **({"clock": clock} if ahead else {})}
        return {"backend": "sqlite", "path": place, "clock": clock}

    queue, bus, state = map(str, places)
    return AgentRunner(
        get_queue(**at(queue), max_retries=settings.max_retries),
        get_event_bus(**at(bus)),
        get_state_store(**at(state)),
        settings,
        registry=registry(),
    )
