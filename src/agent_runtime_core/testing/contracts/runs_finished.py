"""Finished runs: vacuum, discard and fork."""

from __future__ import annotations

from typing import Any

from ...errors import IllegalTransition, UnknownRun
from ...status import RunStatus
from ...steps.executor import StepExecutor
from .checks import Cases, refused, same
from .runs_fixtures import Case, Make, Scripted, opened, steps

CASES: Cases[Case] = Cases()


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
        same(
            (await bench.state.records(source), await bench.event_types(source)),
            before,
            "the records and events of the source run",
        )


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
