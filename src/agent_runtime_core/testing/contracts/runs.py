"""What a run must do over any queue, event bus and state store together; `await case(make)` for each of `CASES`.

`make(clock=clock)` gives a queue, a bus and a store, new and empty each time, on that clock. Where the three
break the contract a case raises AssertionError, or the error that they raised and should not have;
`check(make)` runs them all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ...errors import IdempotencyConflict, IllegalTransition, NotSupported, UnknownRun
from ...events.base import EventBus
from ...interfaces import AgentRuntime, RunResult
from ...queue.base import RunQueue
from ...registry import Registry
from ...runner.core import AgentRunner
from ...runner.settings import RunnerConfig
from ...state.base import StateStore
from ...status import RunStatus
from ...steps.executor import StepExecutor
from ...steps.model import Step
from ..clock import VirtualClock
from .checks import PATIENCE, Cases, refused, same

Make = Callable[..., tuple[RunQueue, EventBus, StateStore]]
Case = Callable[[Make], Awaitable[None]]

CASES: Cases[Case] = Cases()
check: Callable[[Make], Awaitable[None]] = CASES.check

LEASE = 60.0


class Scripted(AgentRuntime):
    """An agent whose run is a function of the case."""

    def __init__(self, key: str, body: Callable[[Any], Awaitable[Any]]) -> None:
        self._key, self._body = key, body

    @property
    def key(self) -> str:
        return self._key

    async def run(self, ctx: Any) -> RunResult:
        return RunResult(final_output={"answer": await self._body(ctx)})


class PolledClock(VirtualClock):
    """One that stands still until it is moved, and lets whoever polls by it go on: after so many real seconds too."""

    async def sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await super().sleep(seconds)


class Bench:
    """Three backends, and as many runners on them as a case wants; each stands for a process."""

    def __init__(self, make: Make) -> None:
        self.clock: VirtualClock = PolledClock()
        self.backends: tuple[RunQueue, EventBus, StateStore] = make(clock=self.clock)
        self.queue: RunQueue
        self.bus: EventBus
        self.state: StateStore
        self.queue, self.bus, self.state = self.backends
        self.runners: list[AgentRunner] = []

    def runner(self, *agents: Scripted, **settings: Any) -> AgentRunner:
        registry = Registry()
        for agent in agents:
            registry.register(agent)
        config = RunnerConfig(
            worker_id=f"w{len(self.runners)}", park_after=0, grace_seconds=0.2, lease_ttl_seconds=LEASE, **settings
        )
        runner = AgentRunner(*self.backends, config, registry=registry)
        self.runners.append(runner)
        return runner

    async def told(self, run_id: Any) -> list[str]:
        """The types of the run's events, whose numbers must have no gap."""
        found = await self.bus.get_events(run_id)
        same([event.sequence for event in found], list(range(len(found))), "the sequences of a run's events")
        return [event.event_type for event in found]

    async def ended(self, run_id: Any, status: str, answer: Any = None) -> None:
        """The queue, the journal, the state and the result agree on how a run ended."""
        row = await self.queue.must_get(run_id)
        record = await self.state.ending(str(run_id))
        same((row.status, record and record.name), (status, status), "the end in the queue and in the journal")
        same(await self.state.get_run_status(run_id), status, "the status in the state store")
        result = await self.runners[-1].wait(run_id)
        same(result.status, RunStatus(status), "the status of the result")
        if status == "succeeded":
            same(result.final_output, {"answer": answer}, "the result")


@contextlib.asynccontextmanager
async def opened(make: Make) -> AsyncIterator[Bench]:
    bench = Bench(make)
    try:
        async with asyncio.timeout(PATIENCE):
            yield bench
    finally:
        for runner in bench.runners:
            await runner.close()


def steps(log: list[str], *names: str) -> list[Step]:
    """Steps that note themselves in `log` and give their own name."""

    def step(name: str) -> Step:
        async def fn(ctx: Any, state: Any) -> str:
            log.append(name)
            return name

        return Step(name, fn)

    return [step(name) for name in names]


@CASES
async def a_run_of_steps_tells_and_records_all_of_it(make: Make) -> None:
    async with opened(make) as bench:
        log: list[str] = []

        async def body(ctx: Any) -> Any:
            same(await ctx.get_state(), None, "the state of a new run")
            results = await StepExecutor(ctx).run(steps(log, "one", "two"))
            await ctx.emit("hello", {"n": 1})
            await ctx.checkpoint({"n": 2})
            return {**results, "state": await ctx.get_state()}

        runner = bench.runner(Scripted("agent", body))
        run_id = await runner.submit("agent", {"messages": []})
        same(await runner.run_once(), True, "run_once with a run to do")
        same(await runner.run_once(), False, "run_once with none")
        step = ["step.started", "progress.update", "step.completed"]
        same(await bench.told(run_id), ["run.started", *step, *step, "hello", "state.checkpoint", "run.succeeded"],
             "the events of the run")  # fmt: skip
        await bench.ended(run_id, "succeeded", {"one": "one", "two": "two", "state": {"n": 2}})
        same(await bench.state.get_checkpoint(run_id), {"n": 2}, "the checkpoint")
        same(log, ["one", "two"], "the steps that ran")


@CASES
async def a_failed_attempt_is_retried_and_keeps_its_steps(make: Make) -> None:
    async with opened(make) as bench:
        log: list[str] = []

        async def body(ctx: Any) -> Any:
            await StepExecutor(ctx).run(steps(log, "one"))
            await ctx.emit("between", {})
            if ctx.attempt < 3:
                raise RuntimeError(f"attempt {ctx.attempt}")
            return ctx.attempt

        runner = bench.runner(Scripted("agent", body))
        run_id = await runner.submit("agent")
        for attempt in (1, 2):
            await runner.run_once()
            same(await bench.state.get_run_status(run_id), "pending", f"the status after attempt {attempt}")
            same(await runner.run_once(), False, "run_once before the back-off is over")
            bench.clock.advance(2**attempt)
        await runner.run_once()
        await bench.ended(run_id, "succeeded", 3)
        same(log, ["one"], "the steps that ran")
        told = await bench.told(run_id)
        same([kind for kind in told if kind.startswith("run.")], ["run.started"] * 3 + ["run.succeeded"], "its life")


@CASES
async def the_last_attempt_ends_the_run_as_failed(make: Make) -> None:
    async with opened(make) as bench:

        async def body(ctx: Any) -> Any:
            raise RuntimeError("boom")

        runner = bench.runner(Scripted("agent", body), retry_backoff_base=0)
        run_id = await runner.submit("agent")
        for _ in range(3):
            same(await runner.run_once(), True, "run_once with an attempt left")
        same(await runner.run_once(), False, "run_once after the last attempt")
        await bench.ended(run_id, "failed")
        events = await bench.bus.get_events(run_id)
        same([event.event_type for event in events], ["run.started"] * 3 + ["run.failed"], "its events")
        same((events[-1].payload["type"], events[-1].payload["message"]), ("RuntimeError", "boom"), "why it failed")


@CASES
async def a_run_that_waits_is_parked_and_goes_on_once(make: Make) -> None:
    async with opened(make) as bench:
        log: list[str] = []

        async def body(ctx: Any) -> Any:
            await StepExecutor(ctx).run(steps(log, "before"))
            await ctx.sleep(30 * 86400)
            log.append("slept")
            answer = await ctx.wait_for_signal("go")
            log.append("heard")
            return answer

        runner = bench.runner(Scripted("agent", body))
        run_id = await runner.submit("agent")
        await runner.run_once()
        same((await runner.get_run(run_id)).status, RunStatus.WAITING, "the status while it sleeps")
        bench.clock.advance(30 * 86400 - 1)
        same(await runner.run_once(), False, "run_once before its time")
        bench.clock.advance(1)
        await runner.run_once()
        same((await runner.get_run(run_id)).reason, "signal go", "what it waits for")
        same(await runner.signal(run_id, "other", 1), True, "a signal it does not wait for")
        await runner.run_once()
        same(await runner.signal(run_id, "go", {"n": 7}, message_id="m1"), True, "the signal")
        same(await runner.signal(run_id, "go", {"n": 8}, message_id="m1"), True, "the signal once more")
        await runner.run_once()
        await bench.ended(run_id, "succeeded", {"n": 7})
        same([log.count(name) for name in ("before", "heard")], [1, 1], "how often code after a record ran")
        same((await runner.get_run(run_id)).attempt, 1, "the attempts that waiting used")
        told = await bench.told(run_id)
        same((told[0], told[-1], told.count("run.started"), told.count("run.resumed")),
             ("run.started", "run.succeeded", 1, 3), "its life")  # fmt: skip


@CASES
async def a_child_is_run_once_and_answers_its_parent(make: Make) -> None:
    async with opened(make) as bench:
        log: list[str] = []

        async def parent(ctx: Any) -> Any:
            return (await ctx.call("child", {"params": {"n": 20}})).final_output["answer"] + 1

        async def child(ctx: Any) -> Any:
            log.append("child")
            return ctx.params["n"] + 1

        runner = bench.runner(Scripted("parent", parent), Scripted("child", child))
        run_id = await runner.submit("parent")
        while await runner.run_once():
            same(len(log) <= 1, True, "that the child runs once")
        await bench.ended(run_id, "succeeded", 22)
        [row] = await bench.queue.children(str(run_id))
        await bench.ended(row.run_id, "succeeded", 21)


@CASES
async def a_cancelled_run_takes_its_children_along(make: Make) -> None:
    async with opened(make) as bench:

        async def parent(ctx: Any) -> Any:
            await ctx.call("child", {})

        async def child(ctx: Any) -> Any:
            await ctx.wait_for_signal("never")

        runner = bench.runner(Scripted("parent", parent), Scripted("child", child))
        run_id = await runner.submit("parent")
        for _ in range(9):  # parent and child, once each: a queue that gives them out for ever shall not hang
            if not await runner.run_once():
                break
        [row] = await bench.queue.children(str(run_id))
        same(row.status, "waiting", "the child's status")
        same(await runner.cancel(run_id), True, "cancel of a waiting run")
        for each in (run_id, row.run_id):
            await bench.ended(each, "cancelled")
            same((await bench.told(each))[-1], "run.cancelled", "its last event")
        same(await runner.run_once(), False, "what is left to do")
        same(await runner.cancel(run_id), False, "cancel of a run that is over")


@CASES
async def a_running_step_is_stopped_by_another_runner(make: Make) -> None:
    async with opened(make) as bench:
        inside, log = asyncio.Event(), []

        async def body(ctx: Any) -> Any:
            async def endless() -> None:
                inside.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    log.append("stopped")

            await ctx.step("endless", endless)

        worker, other = bench.runner(Scripted("agent", body)), bench.runner()
        run_id = await other.submit("agent")
        driving = asyncio.ensure_future(worker.run_once())
        await inside.wait()
        same(await other.cancel(run_id, wait=True), RunStatus.CANCELLED, "the answer to cancel")
        await driving
        await bench.ended(run_id, "cancelled")
        same(log, ["stopped"], "what became of the step")
        same((await bench.told(run_id))[-1], "run.cancelled", "its last event")


@CASES
async def a_dead_worker_is_followed_by_another_and_refused_when_it_wakes(make: Make) -> None:
    async with opened(make) as bench:
        log: list[str] = []
        inside, wake = asyncio.Event(), asyncio.Event()

        def agent(sleeps: bool) -> Scripted:
            async def body(ctx: Any) -> Any:
                async def third(*_: Any) -> str:
                    if sleeps:
                        inside.set()
                        await wake.wait()
                    return "third"

                results = await StepExecutor(ctx).run([*steps(log, "one", "two"), Step("three", third)])
                await ctx.emit("after", {"attempt": ctx.attempt})
                await ctx.checkpoint({"attempt": ctx.attempt})
                return results["three"]

            return Scripted("agent", body)

        first, second = bench.runner(agent(True)), bench.runner(agent(False))
        run_id = await first.submit("agent")
        driving = asyncio.ensure_future(first.run_once())
        await inside.wait()
        first.heart.stop()
        bench.clock.advance(LEASE + 1)
        same(await second.run_once(), True, "run_once of the one who takes over")
        await bench.ended(run_id, "succeeded", "third")
        told, journal = await bench.told(run_id), await bench.state.records(run_id)
        wake.set()
        await driving
        same(log, ["one", "two"], "the recorded steps that ran")
        same(await bench.told(run_id), told, "the events after the dead one woke up")
        same(await bench.state.records(run_id), journal, "the journal after it woke up")
        same(await bench.state.get_checkpoint(run_id), {"attempt": 2}, "the checkpoint after it woke up")
        await bench.ended(run_id, "succeeded", "third")
        same([kind for kind in told if not kind.startswith(("step.", "progress."))],
             ["run.started", "run.started", "after", "state.checkpoint", "run.succeeded"], "its life")  # fmt: skip


@CASES
async def three_crashes_without_progress_make_a_dead_letter(make: Make) -> None:
    async with opened(make) as bench:
        crash, inside, wake = True, asyncio.Event(), asyncio.Event()

        async def body(ctx: Any) -> Any:
            if crash:
                inside.set()
                await wake.wait()
            return "well"

        run_id = await bench.runner().submit("agent")
        driving = []
        for _ in range(3):
            inside.clear()
            runner = bench.runner(Scripted("agent", body))
            driving.append(asyncio.ensure_future(runner.run_once()))
            await inside.wait()
            runner.heart.stop()
            bench.clock.advance(LEASE + 1)
        runner = bench.runner(Scripted("agent", body))
        same(await runner.run_once(), True, "run_once after three crashes")
        await bench.ended(run_id, "dead")
        told = await bench.told(run_id)
        same(told[-1], "run.failed", "its last event")
        same([info.run_id for info in await runner.runs("dead")], [run_id], "the dead letters")
        crash = False
        wake.set()
        await asyncio.gather(*driving)
        await bench.ended(run_id, "dead")
        await runner.requeue(run_id)
        same(await runner.run_once(), True, "run_once after it was put back")
        await bench.ended(run_id, "succeeded", "well")


@CASES
async def what_is_asked_for_twice_is_done_once(make: Make) -> None:
    async with opened(make) as bench:
        log: list[str] = []

        async def body(ctx: Any) -> Any:
            log.append("ran")
            return len(log)

        runner = bench.runner(Scripted("agent", body))
        first = await runner.submit("agent", {"n": 1}, idempotency_key="key-1")
        same(await runner.submit("agent", {"n": 1}, idempotency_key="key-1"), first, "the id of the second submit")
        with refused(IdempotencyConflict, "the key with another input"):
            await runner.submit("agent", {"n": 2}, idempotency_key="key-1")
        await runner.run_once()
        same(await runner.run_once(), False, "what is left to do")
        for _ in range(2):
            result = await runner.execute("agent", "nightly", {"n": 3})
            same((result.status, result.final_output), (RunStatus.SUCCEEDED, {"answer": 2}), "execute under one id")
        same(log, ["ran", "ran"], "what ran")


@CASES
async def a_fan_out_goes_on_where_it_stopped(make: Make) -> None:
    async with opened(make) as bench:
        log: list[int] = []
        broken = True

        async def body(ctx: Any) -> Any:
            def square(n: int) -> int:
                if broken and n == 3:
                    raise RuntimeError("boom")
                log.append(n)
                return n * n

            return await StepExecutor(ctx).map("square", square, range(6))

        runner = bench.runner(Scripted("agent", body), retry_backoff_base=0)
        run_id = await runner.submit("agent")
        await runner.run_once()
        broken = False
        await runner.run_once()
        await bench.ended(run_id, "succeeded", [0, 1, 4, 9, 16, 25])
        same(sorted(log), list(range(6)), "the items that ran")
        await bench.told(run_id)


@CASES
async def a_stream_replays_and_ends_with_its_run(make: Make) -> None:
    async with opened(make) as bench:
        inside, go = asyncio.Event(), asyncio.Event()

        async def body(ctx: Any) -> Any:
            await ctx.emit("first", {})
            inside.set()
            await go.wait()
            await ctx.emit("second", {})

        runner = bench.runner(Scripted("agent", body))
        run_id = await runner.submit("agent")

        async def follow() -> list[str]:
            return [event.event_type async for event in runner.stream(run_id)]

        early = asyncio.ensure_future(follow())
        driving = asyncio.ensure_future(runner.run_once())
        await inside.wait()
        late = asyncio.ensure_future(follow())
        go.set()
        await driving
        told = ["run.started", "first", "second", "run.succeeded"]
        same((await early, await late, await follow()), (told, told, told), "what three followers saw")


@CASES
async def a_transaction_needs_a_store_that_can(make: Make) -> None:
    async with opened(make) as bench:

        async def body(ctx: Any) -> Any:
            return await ctx.transaction("count", lambda conn: conn.execute("SELECT 40 + 2").fetchone()[0])

        runner = bench.runner(Scripted("agent", body))
        result = await runner.execute("agent")
        if bench.state.transacts:
            same(result.final_output, {"answer": 42}, "the result of a transaction")
            told = await bench.told(result.run_id)
            same(told, ["run.started", "step.completed", "run.succeeded"], "the events of a transaction")
        else:
            same(result.error and result.error.type, NotSupported.__name__, "the error of a transaction")


@CASES
async def what_is_old_is_forgotten_everywhere(make: Make) -> None:
    async with opened(make) as bench:

        async def body(ctx: Any) -> Any:
            await ctx.checkpoint({"n": 1})
            return await ctx.step("one", lambda: 1)

        runner = bench.runner(Scripted("agent", body))
        run_id = await runner.submit("agent")
        await runner.run_once()
        same(await runner.vacuum({"succeeded": 60}), 0, "runs deleted before their time")
        bench.clock.advance(61)
        live = await runner.submit("agent")
        same(await runner.vacuum({"succeeded": 60}), 1, "runs deleted at their time")
        same(await bench.queue.row(run_id), None, "its row")
        same((await bench.state.records(run_id), await bench.state.get_checkpoint(run_id)), ([], None), "its state")
        same(await bench.bus.get_events(run_id), [], "its events")
        same((await runner.get_run(live)).status, RunStatus.PENDING, "a live run")


@CASES
async def an_ended_run_is_discarded_and_a_live_one_is_not(make: Make) -> None:
    async with opened(make) as bench:

        async def body(ctx: Any) -> Any:
            await ctx.checkpoint({"n": 1})
            await ctx.step("one", lambda: 1)
            return await ctx.wait_for_signal("go")

        runner = bench.runner(Scripted("agent", body))
        run_id = await runner.submit("agent")
        await runner.run_once()
        with refused(IllegalTransition, "discard of a run that has not ended"):
            await runner.discard(run_id)
        same(await bench.state.get_checkpoint(run_id), {"n": 1}, "the checkpoint of a run that was not discarded")
        await runner.signal(run_id, "go", 1)
        await runner.run_once()
        await bench.ended(run_id, "succeeded", 1)
        await runner.discard(run_id)
        with refused(UnknownRun, "discard of a run that is gone"):
            await runner.discard(run_id)
        same((await bench.state.records(run_id), await bench.state.get_checkpoint(run_id)), ([], None), "its state")
        same(await bench.bus.get_events(run_id), [], "its events")


@CASES
async def a_fork_goes_on_from_a_step(make: Make) -> None:
    async with opened(make) as bench:
        log: list[str] = []

        async def body(ctx: Any) -> Any:
            results = await StepExecutor(ctx).run(steps(log, "one", "two"))
            await ctx.checkpoint({"n": 2})
            told = await ctx.wait_for_signal("go")
            await ctx.step("three", log.append, "three")
            await ctx.checkpoint({"n": 3})
            return {**results, "told": told}

        runner = bench.runner(Scripted("agent", body))
        source = await runner.submit("agent")
        await runner.signal(source, "go", "on")
        await runner.run_once()
        answer = {"one": "one", "two": "two", "told": "on"}
        await bench.ended(source, "succeeded", answer)
        before = (await bench.state.records(source), await bench.told(source))
        for after, ran, kept in (
            ("one", ["two", "three"], None),
            ("signal:go", ["three"], {"n": 2}),
            (None, [], {"n": 3}),
        ):
            log.clear()
            new = await runner.fork(source, after)
            same(await runner.fork(source, after, new_run_id=new), new, "the same fork again")
            same(await bench.state.get_checkpoint(new), kept, f"the checkpoint of a fork after {after}")
            same(await bench.told(new), [], "the events of a fork that was not begun")
            await runner.signal(new, "go", "on")
            same(await runner.run_once(), True, "run_once with a fork to do")
            await bench.ended(new, "succeeded", answer)
            same(log, ran, f"the steps that ran after {after}")
            same((await bench.told(new))[0], "run.started", "the first event of a fork")
        same((await bench.state.records(source), await bench.told(source)), before, "the run that was forked")
