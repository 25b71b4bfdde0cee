"""A step that was begun and whose end nobody recorded: recognised, and its policy applied, behind every door."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core._execution.step import AlreadyDone
from agent_runtime_core.errors import InvalidArgument, LeaseLost
from agent_runtime_core.interfaces import RunContext
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.fault_runs import KINDS, consistent, drop, eventually, settings, status, store, until

COLD = settings(park_after=0)
DOORS = ("chain", "map", "step")

Effect = Callable[[], Awaitable[Any]]

pytestmark = pytest.mark.parametrize("kind", KINDS)


def behind(door: str, effect: Effect, policy: Any) -> Callable[[Any], Awaitable[Any]]:
    """An agent whose second step has the effect."""

    async def chain(ctx: Any) -> Any:
        async def first(ctx: Any, state: Any) -> int:
            return 0

        async def pay(ctx: Any, state: Any) -> Any:
            return await effect()

        done = await StepExecutor(ctx).run([Step("first", first), Step("pay", pay, on_in_doubt=policy)])
        return done["pay"]

    async def fan_out(ctx: Any) -> Any:
        async def pay(n: int) -> Any:
            return await effect() if n else 0

        return (await StepExecutor(ctx, max_concurrency=1).map("pay", pay, [0, 1], on_in_doubt=policy))[1]

    async def imperative(ctx: Any) -> Any:
        await ctx.step("first", lambda: 0)
        return await ctx.step("pay", effect, on_in_doubt=policy)

    return {"chain": chain, "map": fan_out, "step": imperative}[door]


class Payments:
    """An effect that the first processes, as many as `lives` says, do not live to record."""

    def __init__(self, lives: int = 1) -> None:
        self.made, self.lives = 0, lives
        self.returns = True

    async def __call__(self) -> str:
        self.made += 1
        if self.made <= self.lives:
            await asyncio.get_running_loop().create_future()
        return f"paid {self.made}"


@asynccontextmanager
async def crowd() -> AsyncIterator[set[asyncio.Future[Any]]]:
    """Workers that are as good as dead, until the test is over."""
    dead: set[asyncio.Future[Any]] = set()
    try:
        yield dead
    finally:
        for each in dead:
            each.cancel()
        await asyncio.wait(dead)


@asynccontextmanager
async def crashed(kind: str, path: Path, door: str, policy: Any) -> AsyncIterator[tuple[AgentRunner, UUID, Payments]]:
    """A run whose worker died inside its second step, ready for the next worker."""
    clock, payments = VirtualClock(), Payments()
    async with store(kind, path, clock) as here:
        here.agent("a", behind(door, payments.__call__, policy))
        first = here.runner(COLD)
        run_id = await first.submit("a")
        dead = asyncio.ensure_future(first.run_once())
        await until(lambda: payments.made == 1)
        await written(first, run_id)
        await drop(first, dead, run_id)
        clock.advance(61)
        try:
            yield here.runner(COLD), run_id, payments
        finally:
            dead.cancel()
            await asyncio.wait({dead})


async def written(runner: AgentRunner, run_id: UUID) -> None:
    """Until the start of the second step is in the journal: it travels behind, or with the end of the first."""

    async def begun() -> bool:
        return any(
            (r.kind == "started" and r.name == "pay" and r.key != "m:0") or '"pay"' in (r.next or "")
            for r in await runner.state_store.records(run_id)
        )

    await eventually(begun)


@pytest.mark.parametrize("door", DOORS)
async def test_by_default_it_runs_again(kind: str, door: str, tmp_path: Path) -> None:
    async with crashed(kind, tmp_path, door, "retry") as (runner, run_id, payments):
        assert await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": "paid 2"}
        assert payments.made == 2
        started = [
            e.payload
            for e in await runner.event_bus.get_events(run_id)
            if e.event_type == "step.started"
            and (e.payload["step_name"], e.payload["step_index"] != 0) == ("pay", True)
        ]
        assert len(started) == 2
        assert len({each["step_id"] for each in started}) == 1, "one step, one idempotency key"
        assert [each.get("in_doubt", False) for each in started] == [False, True]
        await consistent(runner, run_id)


@pytest.mark.parametrize("door", DOORS)
async def test_fail_ends_the_run(kind: str, door: str, tmp_path: Path) -> None:
    async with crashed(kind, tmp_path, door, "fail") as (runner, run_id, payments):
        assert await runner.run_once()
        result = await runner.wait(run_id)
        assert result.status is RunStatus.FAILED
        assert result.error is not None
        assert result.error.type == "StepInDoubt"
        assert "'pay'" in result.error.message
        assert payments.made == 1
        assert not await runner.run_once(), "it is not retried"
        await consistent(runner, run_id)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("answer", [{"outcome": "done", "result": "paid by hand"}, "retry", "failed"])
async def test_review_parks_the_run_until_somebody_looked(kind: str, door: str, answer: Any, tmp_path: Path) -> None:
    async with crashed(kind, tmp_path, door, "review") as (runner, run_id, payments):
        assert await runner.run_once()
        info = await runner.get_run(run_id)
        assert (info.status.value, info.reason) == ("waiting", "in_doubt")
        [asked] = [e.payload for e in await runner.event_bus.get_events(run_id) if e.event_type == "step.in_doubt"]
        assert (asked["step_name"], asked["signal"]) == ("pay", "in_doubt:pay")
        assert payments.made == 1
        await runner.signal(run_id, asked["signal"], answer)
        while await runner.run_once():
            pass
        result = await runner.wait(run_id)
        if answer == "failed":
            assert result.status is RunStatus.FAILED
            assert payments.made == 1
        elif answer == "retry":
            assert result.final_output == {"value": "paid 2"}
        else:
            assert result.final_output == {"value": "paid by hand"}
            assert payments.made == 1
        await consistent(runner, run_id)


@pytest.mark.parametrize("door", DOORS)
async def test_an_answer_is_about_one_start(kind: str, door: str, tmp_path: Path) -> None:
    """The worker that was told to run it again dies inside the step too: somebody is asked again."""
    clock, payments = VirtualClock(), Payments(lives=2)
    async with store(kind, tmp_path, clock) as here, crowd() as dead:
        here.agent("a", behind(door, payments.__call__, "review"))
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        for life in (1, 2):
            dead.add(worker := asyncio.ensure_future(runner.run_once()))
            await until(lambda life=life: payments.made == life)  # type: ignore[misc]
            await drop(runner, worker, run_id)
            clock.advance(61)
            runner = here.runner(COLD)
            assert await runner.run_once()
            assert (await runner.get_run(run_id)).reason == "in_doubt"
            asked = [e for e in await runner.event_bus.get_events(run_id) if e.event_type == "step.in_doubt"]
            assert (len(asked), payments.made) == (life, life)
            await runner.signal(run_id, "in_doubt:pay", "retry")
        while await runner.run_once():
            pass
        assert (await runner.wait(run_id)).final_output == {"value": "paid 3"}
        await consistent(runner, run_id)


async def test_two_items_in_doubt_have_an_answer_each(kind: str, tmp_path: Path) -> None:
    clock, payments = VirtualClock(), Payments(lives=2)

    async def both(ctx: Any) -> Any:
        async def pay(n: int) -> str:
            return await payments()

        return await StepExecutor(ctx).map("pay", pay, [0, 1], on_in_doubt="review")

    async with store(kind, tmp_path, clock) as here, crowd() as dead:
        here.agent("a", both)
        first = here.runner(COLD)
        run_id = await first.submit("a")
        dead.add(worker := asyncio.ensure_future(first.run_once()))
        await until(lambda: payments.made == 2)
        await drop(first, worker, run_id)
        clock.advance(61)
        runner = here.runner(COLD)
        for each in ("the one", "the other"):
            assert await runner.run_once()
            assert (await runner.get_run(run_id)).reason == "in_doubt"
            await runner.signal(run_id, "in_doubt:pay", {"outcome": "done", "result": each})
        while await runner.run_once():
            pass
        assert (await runner.wait(run_id)).final_output == {"value": ["the one", "the other"]}
        assert payments.made == 2
        await consistent(runner, run_id)


async def test_a_run_is_not_parked_while_a_check_function_looks(kind: str, tmp_path: Path) -> None:
    clock, payments, asked, known = VirtualClock(), Payments(), list[str](), asyncio.Event()

    async def check(ctx: RunContext) -> Any:
        asked.append("asked")
        await known.wait()
        return AlreadyDone("paid before")

    async def both(ctx: Any) -> Any:
        return await asyncio.gather(ctx.step("pay", payments, on_in_doubt=check), ctx.wait_for_signal("go"))

    async with store(kind, tmp_path, clock) as here, crowd() as dead:
        here.agent("a", both)
        first = here.runner(COLD)
        run_id = await first.submit("a")
        dead.add(worker := asyncio.ensure_future(first.run_once()))
        await until(lambda: payments.made == 1)
        await drop(first, worker, run_id)
        clock.advance(61)
        runner = here.runner(COLD)
        dead.add(working := asyncio.ensure_future(runner.run_once()))
        await until(lambda: bool(asked))
        await asyncio.sleep(0.1)
        assert await status(runner, run_id) == "running"
        known.set()
        assert await working
        assert await status(runner, run_id) == "waiting"
        await runner.signal(run_id, "go", "gone")
        assert await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": ["paid before", "gone"]}
        assert (asked, payments.made) == (["asked"], 1)
        await consistent(runner, run_id)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("happened", [True, False])
async def test_a_check_function_is_asked(kind: str, door: str, happened: bool, tmp_path: Path) -> None:
    asked: list[str] = []

    async def check(ctx: RunContext) -> Any:
        asked.append(str(ctx.idempotency_key))
        return AlreadyDone("paid before") if happened else None

    async with crashed(kind, tmp_path, door, check) as (runner, run_id, payments):
        assert await runner.run_once()
        result = await runner.wait(run_id)
        assert result.final_output == {"value": "paid before" if happened else "paid 2"}, result.error
        assert payments.made == (1 if happened else 2)
        assert len(asked) == 1
        ids = {
            e.payload["step_id"]
            for e in await runner.event_bus.get_events(run_id)
            if e.event_type == "step.completed" and e.payload["step_name"] == "pay" and e.payload["step_index"] != 0
        }
        assert asked == [f"{run_id}:{step}" for step in ids], "the key the first try had"
        await consistent(runner, run_id)


async def test_a_check_function_that_answers_something_else(kind: str, tmp_path: Path) -> None:
    async with crashed(kind, tmp_path, "step", lambda: "yes") as (runner, run_id, payments):
        assert await runner.run_once()
        result = await runner.wait(run_id)
        assert result.status is RunStatus.FAILED
        assert result.error is not None
        assert result.error.type == InvalidArgument.__name__
        assert "'yes'" in result.error.message
        assert payments.made == 1


@pytest.mark.parametrize("door", DOORS)
async def test_a_step_that_was_never_begun_is_in_no_doubt(kind: str, door: str, tmp_path: Path) -> None:
    """The worker dies in the first step; the second one, whose policy is to fail, runs for the first time."""
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        hang = [True]
        reached: list[str] = []

        async def first(*_: Any) -> int:
            reached.append("first")
            if hang:
                hang.clear()
                await asyncio.get_running_loop().create_future()
            return 0

        async def pay(*_: Any) -> str:
            reached.append("pay")
            return "paid"

        async def chain(ctx: Any) -> Any:
            steps = [Step("first", first), Step("pay", pay, on_in_doubt="fail")]
            return (await StepExecutor(ctx).run(steps))["pay"]

        async def fan_out(ctx: Any) -> Any:
            await StepExecutor(ctx).map("first", first, [0])
            return (await StepExecutor(ctx).map("pay", pay, [0], on_in_doubt="fail"))[0]

        async def imperative(ctx: Any) -> Any:
            await ctx.step("first", first)
            return await ctx.step("pay", pay, on_in_doubt="fail")

        here.agent("a", {"chain": chain, "map": fan_out, "step": imperative}[door])
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        dead = asyncio.ensure_future(runner.run_once())
        await until(lambda: reached == ["first"])
        await drop(runner, dead, run_id)
        clock.advance(61)
        assert await here.runner(COLD).run_once()
        assert (await runner.wait(run_id)).final_output == {"value": "paid"}
        assert reached == ["first", "first", "pay"]
        dead.cancel()
        await asyncio.wait({dead})


@pytest.mark.parametrize("door", DOORS)
async def test_a_step_that_failed_is_in_no_doubt(kind: str, door: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        tries = 0

        async def pay() -> str:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise ValueError("not yet")
            return "paid"

        here.agent("a", behind(door, pay, "fail"))
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        while await runner.run_once():
            pass
        assert (await runner.wait(run_id)).final_output == {"value": "paid"}
        assert tries == 3


@pytest.mark.parametrize("door", DOORS)
async def test_the_dead_one_that_comes_back_writes_nothing(kind: str, door: str, tmp_path: Path) -> None:
    """It was only slow: when its step ends, the run is another worker's, or over."""
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        gate, made = asyncio.Event(), 0
        refused: list[str] = []

        async def pay() -> str:
            nonlocal made
            made += 1
            mine = made
            if mine == 1:
                await gate.wait()
            return f"paid {mine}"

        code = behind(door, pay, "retry")

        async def watched(ctx: Any) -> Any:
            try:
                return await code(ctx)
            except LeaseLost:
                with pytest.raises(LeaseLost) as lost:
                    await ctx.emit("late", {})
                refused.append(lost.value.key)
                with pytest.raises(LeaseLost) as lost:
                    await ctx.checkpoint({"late": 1})
                refused.append(lost.value.key)
                raise

        here.agent("a", watched)
        slow = here.runner(COLD)
        run_id = await slow.submit("a")
        working = asyncio.ensure_future(slow.run_once())
        await until(lambda: made == 1)
        await written(slow, run_id)
        slow.heartbeat.drop(str(run_id))
        clock.advance(61)
        quick = here.runner(COLD)
        assert await quick.run_once()
        assert (await quick.wait(run_id)).final_output == {"value": "paid 2"}
        before = len(await quick.state_store.records(run_id))
        gate.set()
        await working
        assert refused == [str(run_id)] * 2
        assert len(await quick.state_store.records(run_id)) == before
        assert await status(quick, run_id) == "succeeded"
        await consistent(quick, run_id)
