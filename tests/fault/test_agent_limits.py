"""An agent's own limits of time replace its runner's; an attempt that records nothing for too long ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import CircuitOpen, StorageFull
from agent_runtime_core.interfaces import AgentRuntime, RunResult
from agent_runtime_core.runner import AgentRunner, open_run
from agent_runtime_core.runner.settings import RunnerConfig
from agent_runtime_core.status import RunStatus
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.fault_runs import KINDS, Agent, Store, settings, store, until, until_status

INF = float("inf")
BASE: dict[str, Any] = {"run_timeout_seconds": 100.0, "max_retries": 1, "lease_ttl_seconds": 1e6}
kinds = pytest.mark.parametrize("kind", KINDS)
by_worker = pytest.mark.parametrize("by_worker", [False, True], ids=["execute", "worker"])


async def passes(ctx: Any, clock: VirtualClock, seconds: float) -> None:
    """So much time passes while the code awaits something. A limit that is reached in it cancels the code here."""
    clock.advance(seconds)
    ctx.control.notify()  # as the timer does on a clock that moves by itself
    for _ in range(10):
        await asyncio.sleep(0)


def taking(clock: VirtualClock, seconds: float) -> Callable[[Any], Awaitable[str]]:
    async def code(ctx: Any) -> str:
        await passes(ctx, clock, seconds)
        return "done"

    return code


def limited(here: Store, key: str, code: Any, **limits: float) -> Agent:
    agent = here.agent(key, code)
    for name, value in limits.items():
        setattr(agent, name, value)
    return agent


async def ended(runner: AgentRunner, agent: str, by_worker: bool, run_id: str = "r", **options: Any) -> RunResult:
    if not by_worker:
        return await runner.execute(agent, run_id, **options)
    await runner.submit(agent, options.get("input_data"), run_id=run_id)
    assert await runner.run_once()
    return await runner.wait(run_id, timeout=10)


def message(result: RunResult, kind: str) -> str:
    assert result.status is RunStatus.TIMED_OUT, result
    assert result.error is not None
    assert (result.error.type, result.error.retriable) == (kind, False)
    return result.error.message


# -- the limit of an attempt


@kinds
@by_worker
async def test_the_limit_of_an_agent_is_above_or_below_its_runners(kind: str, by_worker: bool, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        limited(here, "none", taking(clock, 101))
        limited(here, "more", taking(clock, 500), run_timeout_seconds=501)
        limited(here, "less", taking(clock, 50), run_timeout_seconds=49)
        limited(here, "endless", taking(clock, 1e8), run_timeout_seconds=INF)
        runner = here.runner(settings(**BASE))
        late = await ended(runner, "none", by_worker, "1")
        assert message(late, "TimedOut") == "the attempt took more than 100 s (run_timeout_seconds of the runner)"
        assert (await ended(runner, "more", by_worker, "2")).status is RunStatus.SUCCEEDED
        early = await ended(runner, "less", by_worker, "3")
        assert message(early, "TimedOut") == "the attempt took more than 49 s (run_timeout_seconds of the agent)"
        assert (await ended(runner, "endless", by_worker, "4")).status is RunStatus.SUCCEEDED
        events = await runner.event_bus.get_events("3")
        assert (events[-1].event_type, events[-1].payload) == ("run.timed_out", {"timeout_seconds": 49})


@kinds
@by_worker
async def test_register_sets_limits_before_the_attributes(kind: str, by_worker: bool, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        agent = Agent("a", taking(clock, 60))
        agent.run_timeout_seconds = 10.0
        here.agents.register(agent, run_timeout_seconds=50)
        runner = here.runner(settings(**BASE))
        assert "more than 50 s" in message(await ended(runner, "a", by_worker, "1"), "TimedOut")
        here.agents.register(agent, run_timeout_seconds=70)
        assert (await ended(runner, "a", by_worker, "2")).status is RunStatus.SUCCEEDED
        here.agents.register(agent)
        assert "more than 10 s" in message(await ended(runner, "a", by_worker, "3"), "TimedOut")


async def test_execute_of_an_agent_object_uses_the_limits_of_its_registration(tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store("memory", tmp_path, clock) as here:
        here.agents.register(Agent("a", taking(clock, 500)), run_timeout_seconds=INF)
        runner = here.runner(settings(**BASE))
        assert (await runner.execute(Agent("a", taking(clock, 500)))).status is RunStatus.SUCCEEDED
        assert (await runner.execute(Agent("b", taking(clock, 500)))).status is RunStatus.TIMED_OUT


@kinds
@by_worker
async def test_a_child_has_the_limits_of_its_own_agent(kind: str, by_worker: bool, tmp_path: Path) -> None:
    clock = VirtualClock()

    async def parent(ctx: Any) -> Any:
        return (await ctx.call("child", {})).final_output["value"]

    async def late_parent(ctx: Any) -> Any:
        return (await ctx.call("late child", {})).final_output["value"]

    async with store(kind, tmp_path, clock) as here:
        limited(here, "parent", parent)
        limited(here, "late parent", late_parent, run_timeout_seconds=INF)
        limited(here, "child", taking(clock, 500), run_timeout_seconds=INF)
        limited(here, "late child", taking(clock, 30), run_timeout_seconds=20)
        runner = here.runner(settings(**BASE, park_after=0))
        for agent, status in (("parent", RunStatus.SUCCEEDED), ("late parent", RunStatus.FAILED)):
            if by_worker:
                await runner.submit(agent, run_id=agent)
                while await runner.run_once():
                    pass
                result = await runner.wait(agent, timeout=10)
            else:
                result = await runner.execute(agent, agent)
            assert result.status is status, result
        assert result.error is not None
        assert "more than 20 s (run_timeout_seconds of the agent)" in result.error.message


@kinds
@pytest.mark.parametrize("how", ["only waits", "waits in a step", "works"])
@pytest.mark.parametrize("limit", ["run_timeout_seconds", "stall_timeout_seconds"])
async def test_a_run_that_waits_for_a_child_in_its_process_uses_no_time(
    kind: str, limit: str, how: str, tmp_path: Path
) -> None:
    """As under a worker: the child has limits of its own. A run that works beside it does use its time."""
    clock, works = VirtualClock(), how == "works"

    async def child(ctx: Any) -> str:
        if not works:  # it is known soon after the parent has called its child
            await until(lambda: all(each.control.paused_at is not None for each in held() if each.row.agent == "a"))
        for each in held():
            each.control.notify()
        await passes(ctx, clock, 500)
        return "done"

    async def code(ctx: Any) -> str:
        beside = asyncio.ensure_future(asyncio.sleep(1e6)) if works else None
        try:
            call = ctx.step("ask", ctx.call, "child", {}) if how == "waits in a step" else ctx.call("child", {})
            value = (await call).final_output["value"]
        finally:
            if beside is not None:
                beside.cancel()
        await passes(ctx, clock, 60)
        return str(value)

    async with store(kind, tmp_path, clock) as here:
        limited(here, "a", code, **{"run_timeout_seconds": INF, limit: 100})
        limited(here, "child", child, run_timeout_seconds=INF)
        runner = here.runner(settings(**BASE))

        def held() -> list[Any]:
            return list(runner.heartbeat._leased.values())

        result = await runner.execute("a", "r")
        if works:
            message(result, "TimedOut" if limit == "run_timeout_seconds" else "Stalled")
        else:
            assert result.final_output == {"value": "done"}, result.error


@kinds
async def test_a_runner_that_is_closed_lets_the_child_of_a_run_finish(kind: str, tmp_path: Path) -> None:
    """The parent only waits, and is not released before its child, which works."""
    entered, gate = asyncio.Event(), asyncio.Event()

    async def child(ctx: Any) -> str:
        entered.set()
        await until(lambda: all(each.control.paused_at is not None for each in held() if each.row.agent == "a"))
        await gate.wait()
        return "done"

    async def code(ctx: Any) -> str:
        return str((await ctx.call("child", {})).final_output["value"])

    async with store(kind, tmp_path) as here:
        here.agent("a", code)
        here.agent("child", child)
        runner = here.runner(settings(**BASE, grace_seconds=60))

        def held() -> list[Any]:
            return list(runner.heartbeat._leased.values())

        executing = asyncio.ensure_future(runner.execute("a", "r"))
        await entered.wait()
        await until(lambda: any(each.control.paused_at is not None for each in held()))
        closing = asyncio.ensure_future(runner.close())
        for _ in range(10):
            await asyncio.sleep(0)
        gate.set()
        assert (await executing).final_output == {"value": "done"}
        await closing


@kinds
@by_worker
@pytest.mark.parametrize("deferred", [40, 60])
async def test_deferrals_count_against_the_limit_of_the_agent(
    kind: str, by_worker: bool, deferred: float, tmp_path: Path
) -> None:
    clock, raised = VirtualClock(), [CircuitOpen("down", after=deferred)]

    async def code(ctx: Any) -> str:
        if raised:
            raise raised.pop()
        return "done"

    async with store(kind, tmp_path, clock) as here:
        limited(here, "a", code, run_timeout_seconds=50)
        runner = here.runner(settings(**{**BASE, "run_timeout_seconds": 10}))
        if by_worker:
            await runner.submit("a", run_id="r")
            assert await runner.run_once()
            clock.advance(50)
            await runner.run_once()
            result = await runner.wait("r", timeout=10)
        else:
            executing = asyncio.ensure_future(runner.execute("a", "r"))
            await until(lambda: executing.done() or clock.next_due is not None)
            clock.advance(50)
            result = await executing
        if deferred < 50:
            assert result.status is RunStatus.SUCCEEDED, result
        else:
            assert "within run_timeout_seconds=50 of the agent: CircuitOpen" in message(result, "TimedOut")


@kinds
async def test_without_a_limit_a_run_is_deferred_as_often_as_it_takes(kind: str, tmp_path: Path) -> None:
    clock, raised = VirtualClock(), [CircuitOpen("down", after=1e5) for _ in range(5)]

    async def code(ctx: Any) -> str:
        if raised:
            raise raised.pop()
        return "done"

    async with store(kind, tmp_path, clock) as here:
        limited(here, "a", code, run_timeout_seconds=INF, stall_timeout_seconds=100)
        runner = here.runner(settings(**BASE))
        await runner.submit("a", run_id="r")
        while await runner.run_once():
            clock.advance(2e5)
        assert (await runner.wait("r", timeout=10)).final_output == {"value": "done"}


@kinds
@by_worker
async def test_limits_of_a_run_only_lower_it(kind: str, by_worker: bool, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        agent = limited(here, "a", taking(clock, 60), run_timeout_seconds=50)
        agent.limits = {"run_timeout": 1000}  # type: ignore[attr-defined]
        runner = here.runner(settings(**BASE))
        late = await ended(runner, "a", by_worker, input_data={"limits": {"run_timeout": 1000}})
        assert "more than 50 s" in message(late, "TimedOut")


# -- the stall limit

STALLED = (
    "agent 'a' recorded nothing for 100 s (stall_timeout_seconds of the {owner}). Divide its work into shorter steps, "
    "call ctx.emit in a long step, or raise the limit"
)


@kinds
@by_worker
@pytest.mark.parametrize("owner", ["agent", "runner"])
@pytest.mark.parametrize("inside", ["run", "step"])
async def test_an_attempt_that_records_nothing_ends(
    kind: str, by_worker: bool, owner: str, inside: str, tmp_path: Path
) -> None:
    clock, passed = VirtualClock(), list[float]()

    async def work(ctx: Any) -> str:
        for seconds in (60, 39, 2):
            await passes(ctx, clock, seconds)
            passed.append(seconds)
        return "late"

    async def code(ctx: Any) -> str:
        await ctx.step("first", lambda: 1)
        if inside == "run":
            return await work(ctx)
        return str(await ctx.step("work", work, ctx, retries=3))

    async with store(kind, tmp_path, clock) as here:
        limits = {"stall_timeout_seconds": 100.0}
        limited(here, "a", code, run_timeout_seconds=INF, **(limits if owner == "agent" else {}))
        runner = here.runner(settings(**BASE, **(limits if owner == "runner" else {})))
        result = await ended(runner, "a", by_worker)
        assert message(result, "Stalled") == STALLED.format(owner=owner)
        assert passed == [60, 39]
        info = await runner.get_run("r")
        assert (info.status, info.reason, info.attempt) == (RunStatus.TIMED_OUT, "Stalled", 1)
        events = await runner.event_bus.get_events("r")
        assert (events[-1].event_type, events[-1].payload) == ("run.timed_out", {"stall_timeout_seconds": 100})


async def _step(ctx: Any, number: int, clock: VirtualClock) -> None:
    await ctx.step("item", lambda: number)


async def _start(ctx: Any, number: int, clock: VirtualClock) -> None:
    await ctx.step("item", passes, ctx, clock, 90)


async def _item(ctx: Any, number: int, clock: VirtualClock) -> None:
    async def item(each: int) -> None:
        await passes(ctx, clock, 90)

    await StepExecutor(ctx, max_concurrency=1).map(f"items {number}", item, range(3))


async def _list(ctx: Any, number: int, clock: VirtualClock) -> None:
    """The ends of the first steps are written with the last one."""

    async def work(ctx: Any, state: Any) -> None:
        await passes(ctx, clock, 60)

    steps = [Step(f"{number}.{each}", work, checkpoint=each == 3) for each in range(4)]
    await StepExecutor(ctx).run(steps)


async def _failure(ctx: Any, number: int, clock: VirtualClock) -> None:
    failed = list[int]()

    async def fails_twice() -> None:
        await passes(ctx, clock, 90)
        if len(failed) < 2:
            failed.append(1)
            raise ValueError("x")

    await ctx.step("item", fails_twice, retries=2, retry_delay=0)


async def _value(ctx: Any, number: int, clock: VirtualClock) -> None:
    await ctx.random()


async def _event(ctx: Any, number: int, clock: VirtualClock) -> None:
    await ctx.emit("ticked", {"number": number})


async def _event_in_a_step(ctx: Any, number: int, clock: VirtualClock) -> None:
    async def streams() -> None:
        for part in range(3):
            await passes(ctx, clock, 90)
            await ctx.emit("assistant.delta", {"delta": f"{part}"})

    await ctx.step("stream", streams)


async def _checkpoint(ctx: Any, number: int, clock: VirtualClock) -> None:
    await ctx.checkpoint({"number": number})


async def _signal(ctx: Any, number: int, clock: VirtualClock) -> None:
    await ctx.messages()


RECORDS = [_step, _start, _item, _list, _failure, _value, _event, _event_in_a_step, _checkpoint, _signal]


@kinds
@by_worker
@pytest.mark.parametrize("records", RECORDS)
async def test_whatever_an_attempt_records_restarts_the_count(
    kind: str, by_worker: bool, records: Any, tmp_path: Path
) -> None:
    clock = VirtualClock()

    async def code(ctx: Any) -> str:
        for number in range(4):
            await records(ctx, number, clock)
            await passes(ctx, clock, 90)
        return "done"

    async with store(kind, tmp_path, clock) as here:
        limited(here, "a", code, run_timeout_seconds=INF, stall_timeout_seconds=100)
        result = await ended(here.runner(settings(**BASE)), "a", by_worker)
        assert result.final_output == {"value": "done"}, result.error
        assert clock.boot() >= 360


@kinds
@by_worker
async def test_the_time_limit_ends_an_attempt_that_is_busy(kind: str, by_worker: bool, tmp_path: Path) -> None:
    clock = VirtualClock()

    async def code(ctx: Any) -> None:
        while True:
            await ctx.step("item", passes, ctx, clock, 30)

    async with store(kind, tmp_path, clock) as here:
        limited(here, "a", code, stall_timeout_seconds=40)
        result = await ended(here.runner(settings(**BASE)), "a", by_worker)
        assert "more than 100 s (run_timeout_seconds of the runner)" in message(result, "TimedOut")


@kinds
@pytest.mark.parametrize("how", ["in memory", "parked", "inside a step"])
async def test_time_that_a_run_only_waits_does_not_count(kind: str, how: str, tmp_path: Path) -> None:
    clock = VirtualClock()

    async def code(ctx: Any) -> Any:
        await passes(ctx, clock, 90)
        waiting = ctx.wait_for_signal
        answer = await (ctx.step("ask", waiting, "go") if how == "inside a step" else waiting("go"))
        await passes(ctx, clock, 90)
        return answer

    async with store(kind, tmp_path, clock) as here:
        limited(here, "a", code, stall_timeout_seconds=100, run_timeout_seconds=INF)
        runner = here.runner(settings(**BASE, park_after=0.0 if how == "parked" else 1e9))
        await runner.submit("a", run_id="r")
        working = asyncio.ensure_future(runner.run_loop(0.01, handle_signals=False))
        if how == "parked":
            await until_status(runner, "r", "waiting")
            clock.advance(1e5)
        else:
            held = runner.heartbeat._leased
            await until(lambda: any(each.control.paused_at is not None for each in held.values()))
            clock.advance(1e5)
            for each in held.values():
                each.control.notify()
            for _ in range(10):
                await asyncio.sleep(0)
        await runner.signal("r", "go", 7)
        result = await runner.wait("r", timeout=10)
        assert result.final_output == {"value": 7}, result.error
        runner.stop()
        await working


@kinds
async def test_an_outage_of_the_store_does_not_count(kind: str, tmp_path: Path) -> None:
    """Nothing can be recorded in it. The lease is so long that the code never learns of the outage."""
    clock, refused = VirtualClock(), list[float]()

    async def code(ctx: Any) -> str:
        await ctx.step("before", int)
        refused.append(0.0)
        await ctx.step("during", int)
        return "done"

    async with store(kind, tmp_path, clock) as here:
        commit = here.engine.commit

        async def full(guard: Any, ops: Any) -> Any:
            if 0 < len(refused) < 10 and guard is not None:
                refused.append(clock.monotonic())
                raise StorageFull("no space")
            return await commit(guard, ops)

        here.engine.commit = full
        limited(here, "a", code, stall_timeout_seconds=100, run_timeout_seconds=110)
        runner = here.runner(settings(**BASE))
        await runner.submit("a", run_id="r")
        working = asyncio.ensure_future(runner.run_once())
        while not working.done():
            await asyncio.sleep(0.001)
            if refused:
                clock.advance(30)
                for held in tuple(runner.heartbeat._leased.values()):
                    held.control.notify()
        result = await runner.wait("r", timeout=10)
        assert result.final_output == {"value": "done"}, result.error
        assert refused[-1] - refused[1] > 200


@kinds
async def test_a_wait_that_the_code_gives_up_does_not_count(kind: str, tmp_path: Path) -> None:
    """Nothing is recorded at its end."""
    clock, limits = VirtualClock(), list[asyncio.Timeout]()

    async def code(ctx: Any) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                limits.append(limit)
                await ctx.wait_for_signal("go")
        await passes(ctx, clock, 90)
        return "done"

    async with store(kind, tmp_path, clock) as here:
        limited(here, "a", code, stall_timeout_seconds=100, run_timeout_seconds=INF)
        runner = here.runner(settings(**BASE))
        executing = asyncio.ensure_future(runner.execute("a", "r"))
        held = runner.heartbeat._leased
        await until(lambda: any(each.control.paused_at is not None for each in held.values()))
        clock.advance(1e5)
        limits[0].reschedule(asyncio.get_running_loop().time())
        assert (await executing).final_output == {"value": "done"}


@kinds
@by_worker
async def test_a_run_that_stalls_after_a_wait_is_ended(kind: str, by_worker: bool, tmp_path: Path) -> None:
    """The runner looks at the stall limit again, although no other limit is near."""
    clock = VirtualClock()

    async def code(ctx: Any) -> None:
        await ctx.wait_for_signal("go")
        clock.advance(101)
        await asyncio.Event().wait()  # nothing wakes the runner but its own timer

    async with store(kind, tmp_path, clock) as here:
        limited(here, "a", code, stall_timeout_seconds=100, run_timeout_seconds=INF)
        here.agents.register(here.agents.get("a"), stall_timeout_seconds=0.2)  # type: ignore[arg-type]
        runner = here.runner(settings(**BASE, park_after=1e9))
        if by_worker:
            await runner.submit("a", run_id="r")
            working: asyncio.Task[Any] = asyncio.ensure_future(runner.run_once())
        else:
            working = asyncio.ensure_future(runner.execute("a", "r"))
        held = runner.heartbeat._leased
        await until(lambda: any(each.control.paused_at is not None for each in held.values()))
        for each in held.values():
            each.control.notify()  # during the wait, the runner looks at the limits
        for _ in range(10):
            await asyncio.sleep(0)
        await runner.signal("r", "go")
        async with asyncio.timeout(10):
            await working
        assert "recorded nothing for 0.2 s" in message(await runner.wait("r", timeout=10), "Stalled")


@kinds
@by_worker
async def test_a_replay_is_no_stall(kind: str, by_worker: bool, tmp_path: Path) -> None:
    clock, fails = VirtualClock(), [True]

    async def code(ctx: Any) -> str:
        for _ in range(5):
            await ctx.step("item", lambda: 1)
            await passes(ctx, clock, 90)
        if fails.pop():
            raise ConnectionError("cut")
        return "done"

    async with store(kind, tmp_path, clock) as here:
        limited(here, "a", code, stall_timeout_seconds=100, run_timeout_seconds=INF)
        runner = here.runner(settings(**BASE))
        assert (await ended(runner, "a", by_worker)).status is RunStatus.FAILED
        fails.append(False)
        await runner.resume("r")
        assert await runner.run_once()
        assert (await runner.wait("r", timeout=10)).final_output == {"value": "done"}


@kinds
@by_worker
@pytest.mark.parametrize("again", ["requeue", "resume", "execute"])
async def test_a_stalled_run_resumes_from_its_saved_results(
    kind: str, by_worker: bool, again: str, tmp_path: Path
) -> None:
    clock, stalls, made = VirtualClock(), [True], list[int]()

    async def code(ctx: Any) -> str:
        await ctx.step("first", made.append, 1)
        if stalls:
            stalls.pop()
            await passes(ctx, clock, 101)
        return "done"

    async with store(kind, tmp_path, clock) as here:
        limited(here, "a", code, stall_timeout_seconds=100, run_timeout_seconds=INF)
        runner = here.runner(settings(**BASE))
        message(await ended(runner, "a", by_worker), "Stalled")
        if again == "execute":
            result = await runner.execute("a", "r")
        else:
            await getattr(runner, again)("r")
            assert await runner.run_once()
            result = await runner.wait("r", timeout=10)
        assert (result.final_output, made) == ({"value": "done"}, [1])


@kinds
async def test_code_of_a_failed_attempt_keeps_no_later_one_alive(kind: str, tmp_path: Path) -> None:
    clock, leftovers = VirtualClock(), list[Any]()

    async def code(ctx: Any) -> None:
        if ctx.attempt == 1:
            leftovers.append(ctx)
            raise ConnectionError("cut")
        await passes(ctx, clock, 60)
        with pytest.raises(Exception, match=r"."):
            await leftovers[0].emit("late", {})
        await passes(ctx, clock, 60)

    async with store(kind, tmp_path, clock) as here:
        limited(here, "a", code, stall_timeout_seconds=100, run_timeout_seconds=INF)
        message(await here.runner(settings(**{**BASE, "max_retries": 2})).execute("a", "r"), "Stalled")


@kinds
@by_worker
async def test_on_error_and_the_end_have_time_of_their_own(kind: str, by_worker: bool, tmp_path: Path) -> None:
    """The code has ended, so what follows is no stall of it."""
    clock, hooked = VirtualClock(), list[str]()

    async def on_error(ctx: Any, error: BaseException) -> None:
        await passes(ctx, clock, 90)
        hooked.append("to its end")

    async def code(ctx: Any) -> None:
        await passes(ctx, clock, 90)
        raise ValueError("its own error")

    async with store(kind, tmp_path, clock) as here:
        agent = here.agent("a", code, on_error)
        agent.stall_timeout_seconds = 100
        agent.run_timeout_seconds = INF
        result = await ended(here.runner(settings(**BASE)), "a", by_worker)
        assert result.status is RunStatus.FAILED
        assert result.error is not None
        assert (result.error.message, hooked) == ("its own error", ["to its end"])


class Plain(AgentRuntime):
    key = "plain"
    run_timeout_seconds = INF
    stall_timeout_seconds = 0.05

    def run(self, ctx: Any) -> RunResult:
        ctx.step("first", int)
        ctx.step("stays", asyncio.Event().wait)
        return RunResult()


@kinds
@by_worker
async def test_a_plain_run_stalls_too(kind: str, by_worker: bool, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        here.agents.register(Plain())
        result = await ended(here.runner(settings(**BASE)), "plain", by_worker)
        assert "agent 'plain' recorded nothing for 0.05 s" in message(result, "Stalled")


@kinds
async def test_an_agent_can_be_without_the_stall_limit_of_its_runner(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        limited(here, "a", taking(clock, 90), stall_timeout_seconds=INF)
        assert (await here.runner(settings(**BASE, stall_timeout_seconds=50)).execute("a")).status is (
            RunStatus.SUCCEEDED
        )


async def test_the_block_of_open_run_has_no_limits_and_its_child_has(tmp_path: Path) -> None:
    class Stays(AgentRuntime):
        key = "stays"
        stall_timeout_seconds = 0.05

        async def run(self, ctx: Any) -> RunResult:
            await asyncio.Event().wait()
            return RunResult()

    config = RunnerConfig(stall_timeout_seconds=0.01)
    async with open_run(tmp_path / "runs.db", "r", config=config) as ctx:
        await asyncio.sleep(0.1)
        with pytest.raises(Exception, match=r"agent 'stays' recorded nothing for 0\.05 s"):
            await ctx.call(Stays(), {})
        assert await ctx.step("next", lambda: 1) == 1
