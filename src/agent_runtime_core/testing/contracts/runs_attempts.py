"""Cases of the attempts of a run, and of a finished run."""

from __future__ import annotations

import asyncio
from typing import Any

from ...errors import IllegalTransition, NotSupported, UnknownRun
from ...status import RunStatus
from ...steps.executor import StepExecutor
from ...steps.model import Step
from .checks import Cases, refused, same
from .runs_fixtures import LEASE, Case, Make, Scripted, opened, steps

CASES: Cases[Case] = Cases()


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
        same(await runner.run_once(), True, "run_once with a pending run")
        same(await runner.run_once(), False, "run_once without a pending run")
        step = ["step.started", "progress.update", "step.completed"]
        types = ["run.started", *step, *step, "hello", "state.checkpoint", "run.succeeded"]
        same(await bench.event_types(run_id), types, "the events of the run")
        await bench.ended(run_id, "succeeded", {"one": "one", "two": "two", "state": {"n": 2}})
        same(await bench.state.get_checkpoint(run_id), {"n": 2}, "the checkpoint")
        same(log, ["one", "two"], "the executed steps")


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
            same(await runner.run_once(), False, "run_once before the back-off has passed")
            bench.clock.advance(2**attempt)
        await runner.run_once()
        await bench.ended(run_id, "succeeded", 3)
        same(log, ["one"], "the executed steps")
        types = await bench.event_types(run_id)
        same([kind for kind in types if kind.startswith("run.")], ["run.started"] * 3 + ["run.succeeded"], "its events")


@CASES
async def what_an_agent_emits_about_its_run_is_stored_with_a_mark(make: Make) -> None:
    async with opened(make) as bench:
        lies = ["run.succeeded", "run.failed", "run.started", "run.heartbeat"]

        async def body(ctx: Any) -> Any:
            for kind in lies:
                await ctx.emit(kind, {"attempt": 7})
            if ctx.attempt < 2:
                raise RuntimeError("the first attempt")
            return await ctx.step("inside", ctx.emit, "run.cancelled", {})

        runner = bench.runner(Scripted("agent", body), retry_backoff_base=0)
        run_id = await runner.submit("agent")
        await runner.run_once()
        await runner.run_once()
        await bench.ended(run_id, "succeeded")
        events = [each for each in await bench.bus.get_events(run_id) if each.event_type.startswith("run.")]
        marked = [each.event_type for each in events if each.from_agent]
        same(marked, [*lies, *lies, "run.cancelled"], "the marked events")
        true = [each.event_type for each in events if not each.from_agent]
        same(true, ["run.started", "run.started", "run.succeeded"], "the other events")
        same(next(each.payload for each in events if each.from_agent), {"attempt": 7}, "the payload of a marked event")


@CASES
async def the_last_attempt_ends_the_run_as_failed(make: Make) -> None:
    async with opened(make) as bench:

        async def body(ctx: Any) -> Any:
            raise RuntimeError("boom")

        runner = bench.runner(Scripted("agent", body), retry_backoff_base=0)
        run_id = await runner.submit("agent")
        for _ in range(3):
            same(await runner.run_once(), True, "run_once with attempts left")
        same(await runner.run_once(), False, "run_once after the last attempt")
        await bench.ended(run_id, "failed")
        events = await bench.bus.get_events(run_id)
        same([event.event_type for event in events], ["run.started"] * 3 + ["run.failed"], "its events")
        error = (events[-1].payload["type"], events[-1].payload["message"])
        same(error, ("RuntimeError", "boom"), "the error in its last event")


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
        first.heartbeat.stop()
        bench.clock.advance(LEASE + 1)
        same(await second.run_once(), True, "run_once of the second worker")
        await bench.ended(run_id, "succeeded", "third")
        types, journal = await bench.event_types(run_id), await bench.state.records(run_id)
        wake.set()
        await driving
        same(log, ["one", "two"], "the executed recorded steps")
        same(await bench.event_types(run_id), types, "the events after the crashed worker continued")
        same(await bench.state.records(run_id), journal, "the journal after it continued")
        same(await bench.state.get_checkpoint(run_id), {"attempt": 2}, "the checkpoint after it continued")
        await bench.ended(run_id, "succeeded", "third")
        same([kind for kind in types if not kind.startswith(("step.", "progress."))],
             ["run.started", "run.started", "after", "state.checkpoint", "run.succeeded"], "its events")  # fmt: skip


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
            runner.heartbeat.stop()
            bench.clock.advance(LEASE + 1)
        runner = bench.runner(Scripted("agent", body))
        same(await runner.run_once(), True, "run_once after three crashes")
        await bench.ended(run_id, "dead")
        types = await bench.event_types(run_id)
        same(types[-1], "run.failed", "its last event")
        same([info.run_id for info in await runner.runs("dead")], [run_id], "the dead runs")
        crash = False
        wake.set()
        await asyncio.gather(*driving)
        await bench.ended(run_id, "dead")
        await runner.requeue(run_id)
        same(await runner.run_once(), True, "run_once after it was requeued")
        await bench.ended(run_id, "succeeded", "well")


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
        same(sorted(log), list(range(6)), "the executed items")
        await bench.event_types(run_id)


@CASES
async def a_transaction_needs_a_store_that_can(make: Make) -> None:
    async with opened(make) as bench:

        async def body(ctx: Any) -> Any:
            return await ctx.transaction("count", lambda conn: conn.execute("SELECT 40 + 2").fetchone()[0])

        runner = bench.runner(Scripted("agent", body))
        result = await runner.execute("agent")
        if bench.state.transacts:
            same(result.final_output, {"answer": 42}, "the result of a transaction")
            types = await bench.event_types(result.run_id)
            same(types, ["run.started", "step.completed", "run.succeeded"], "the events of a transaction")
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
        same(await runner.vacuum({"succeeded": 60}), 0, "the number of runs deleted before their retention")
        bench.clock.advance(61)
        live = await runner.submit("agent")
        same(await runner.vacuum({"succeeded": 60}), 1, "the number of runs deleted after their retention")
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
        with refused(IllegalTransition, "discard of an unfinished run"):
            await runner.discard(run_id)
        same(await bench.state.get_checkpoint(run_id), {"n": 1}, "the checkpoint after the rejected discard")
        await runner.signal(run_id, "go", 1)
        await runner.run_once()
        await bench.ended(run_id, "succeeded", 1)
        await runner.discard(run_id)
        with refused(UnknownRun, "discard of a deleted run"):
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
            signal = await ctx.wait_for_signal("go")
            await ctx.step("three", log.append, "three")
            await ctx.checkpoint({"n": 3})
            return {**results, "signal": signal}

        runner = bench.runner(Scripted("agent", body))
        source = await runner.submit("agent")
        await runner.signal(source, "go", "on")
        await runner.run_once()
        expected = {"one": "one", "two": "two", "signal": "on"}
        await bench.ended(source, "succeeded", expected)
        before = (await bench.state.records(source), await bench.event_types(source))
        for after, executed, checkpoint in (
            ("one", ["two", "three"], None),
            ("signal:go", ["three"], {"n": 2}),
            (None, [], {"n": 3}),
        ):
            log.clear()
            new = await runner.fork(source, after)
            same(await runner.fork(source, after, new_run_id=new), new, "the same fork again")
            same(await bench.state.get_checkpoint(new), checkpoint, f"the checkpoint of a fork after {after}")
            same(await bench.event_types(new), [], "the events of a fork that has not started")
            await runner.signal(new, "go", "on")
            same(await runner.run_once(), True, "run_once with a pending fork")
            await bench.ended(new, "succeeded", expected)
            same(log, executed, f"the steps executed after {after}")
            same((await bench.event_types(new))[0], "run.started", "the first event of a fork")
        same((await bench.state.records(source), await bench.event_types(source)), before, "all of the source run")


@CASES
async def a_fork_repeats_no_effect(make: Make) -> None:
    async with opened(make) as bench:
        log: list[str] = []

        async def body(ctx: Any) -> Any:
            await ctx.step("one", lambda: 1)
            await ctx.step("pay", log.append, "paid", on_in_doubt="fail")
            return await ctx.step("three", lambda: 3)

        runner = bench.runner(Scripted("agent", body))
        source = await runner.submit("agent")
        await runner.run_once()
        forks = []
        for effects, status, times in (("refuse", "failed", 1), ("reuse", "succeeded", 1), ("repeat", "succeeded", 2)):
            new = await runner.fork(source, "one", effects=effects)
            forks.append(new)
            await runner.run_once()
            same((await runner.get_run(new)).status, status, f"the status of a fork with effects={effects!r}")
            same(len(log), times, f"how often the step was executed after a fork with effects={effects!r}")
            same((await bench.event_types(new)).count("step.effect"), 1, "the number of its step.effect events")
        for each in (source, *forks[:2]):
            await runner.discard(each)
        new = await runner.fork(forks[2], "one")
        await runner.run_once()
        same((await runner.get_run(new)).status, "failed", "the status of a fork of the last run of its lineage")
