"""What a run has to do with others: what it waits for, its children, and those who ask for it, stop it or follow it."""

from __future__ import annotations

import asyncio
from typing import Any

from ...errors import IdempotencyConflict
from ...status import RunStatus
from ...steps.executor import StepExecutor
from .checks import Cases, refused, same
from .runs_fixtures import Case, Make, Scripted, opened, steps

CASES: Cases[Case] = Cases()


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
