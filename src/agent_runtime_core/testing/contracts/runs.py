"""Conformance tests for runs on a queue, an event bus and a state store together.

Run one of `CASES` with `await case(make)`, or all with `await check(make)`. `make(clock=clock)` returns a new and
empty queue, bus and store with this clock. A failing case raises AssertionError, or the unexpected error of a backend.

With `again`, a function that opens three other objects on the store of a queue, bus and store, runs of several
processes, and on objects that were opened one after the other, are checked too: `await check(make, again=again)`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from ...errors import IdempotencyConflict, InvalidArgument
from ...events.base import EventBus
from ...queue.base import RunQueue
from ...state.base import StateStore
from ...status import RunStatus
from ...steps.executor import StepExecutor
from .checks import Cases, refused, same
from .runs_attempts import CASES as ATTEMPTS
from .runs_fixtures import LEASE, Bench, Case, Make, Scripted, opened, steps

OTHERS: Cases[Case] = Cases()


@OTHERS
async def a_run_that_waits_is_parked_and_goes_on_once(make: Make) -> None:
    async with opened(make) as bench:
        log: list[str] = []

        async def body(ctx: Any) -> Any:
            await StepExecutor(ctx).run(steps(log, "before"))
            await ctx.sleep(30 * 86400)
            log.append("slept")
            answer = await ctx.wait_for_signal("go")
            log.append("received")
            return answer

        runner = bench.runner(Scripted("agent", body))
        run_id = await runner.submit("agent")
        await runner.run_once()
        same((await runner.get_run(run_id)).status, RunStatus.WAITING, "the status while it sleeps")
        bench.clock.advance(30 * 86400 - 1)
        same(await runner.run_once(), False, "run_once before the sleep has passed")
        bench.clock.advance(1)
        await runner.run_once()
        same((await runner.get_run(run_id)).reason, "signal go", "the reason of the parked run")
        same(await runner.signal(run_id, "other", 1), True, "a signal it does not wait for")
        await runner.run_once()
        same(await runner.signal(run_id, "go", {"n": 7}, message_id="m1"), True, "the signal")
        same(await runner.signal(run_id, "go", {"n": 7}, message_id="m1"), True, "the signal again")
        await runner.run_once()
        await bench.ended(run_id, "succeeded", {"n": 7})
        executed = [log.count(name) for name in ("before", "received")]
        same(executed, [1, 1], "how often code before and after the waits was executed")
        same((await runner.get_run(run_id)).attempt, 1, "the attempt after waiting")
        types = await bench.event_types(run_id)
        same((types[0], types[-1], types.count("run.started"), types.count("run.resumed")),
             ("run.started", "run.succeeded", 1, 3), "its events")  # fmt: skip


@OTHERS
async def a_message_id_belongs_to_one_message(make: Make) -> None:
    async with opened(make) as bench:

        async def body(ctx: Any) -> Any:
            go = await ctx.wait_for_signal("go")
            return [go, [each["content"] for each in await ctx.messages()]]

        runner = bench.runner(Scripted("agent", body))
        run_id = await runner.submit("agent")
        same(await runner.signal(run_id, "go", {"n": 7, "of": [1]}, message_id="m1"), True, "the signal")
        same(await runner.signal(run_id, "go", {"of": [1], "n": 7}, message_id="m1"), True, "its keys in another order")
        for name, payload in (("go", {"n": 8, "of": [1]}), ("go", None), ("stop", {"n": 7, "of": [1]})):
            with refused(IdempotencyConflict, f"the signal {name} {payload} with the same message id"):
                await runner.signal(run_id, name, payload, message_id="m1")
        same(await runner.send(run_id, "hello", message_id="m1"), "m1", "a message with the id of a signal")
        same(await runner.send(run_id, "hello", message_id="m1"), "m1", "the message again")
        for text, when in (("goodbye", "next_turn"), ("hello", "interrupt")):
            with refused(IdempotencyConflict, f"the message {text!r} ({when}) with the same message id"):
                await runner.send(run_id, text, when=when, message_id="m1")
        await runner.run_once()
        await bench.ended(run_id, "succeeded", [{"n": 7, "of": [1]}, ["hello"]])
        with refused(IdempotencyConflict, "another message to the finished run with that id"):
            await runner.send(run_id, "goodbye", message_id="m1")


@OTHERS
async def who_acts_on_a_run_is_stored(make: Make) -> None:
    async with opened(make) as bench:

        async def body(ctx: Any) -> Any:
            return [await ctx.approve("early"), await ctx.approve("asked")]

        runner = bench.runner(Scripted("agent", body))

        async def acts(run_id: Any) -> list[tuple[str, str]]:
            mail = await runner.queue.mail(str(run_id))
            return [(each.name, each.payload) for each in mail if each.kind == "acted"]

        run_id = await runner.submit("agent")
        same(await runner.approve(run_id, "early", 1, by="ada"), True, "an answer before the question")
        await runner.run_once()
        same(await runner.approve(run_id, "asked", 2, by="ben"), True, "an answer to the question")
        await runner.run_once()
        await bench.ended(run_id, "succeeded", [1, 2])
        same(await acts(run_id), [("answer", '{"by":"ada"}'), ("answer", '{"by":"ben"}')], "who answered")
        waiting, pending, silent = [await runner.submit("agent") for _ in range(3)]
        await runner.run_once()
        for each in (waiting, pending):
            same(await runner.cancel(each, by="ada"), True, "a cancellation")
            same((await runner.get_run(each)).status, RunStatus.CANCELLED, "the status of the cancelled run")
            same(await runner.cancel(each, by="ben"), False, "a cancellation of a finished run")
            same((await runner.resume(each, by="carl")).status, RunStatus.PENDING, "the status of the resumed run")
            same(await acts(each), [("cancel", '{"by":"ada"}'), ("resume", '{"by":"carl"}')], "who acted")
        fork = await runner.fork(waiting, by="dora")
        same((await runner.get_run(fork)).metadata["forked_from"]["by"], "dora", "who forked")
        await runner.cancel(silent)
        same(await acts(silent), [], "who acted, without a name")


@OTHERS
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
            same(len(log) <= 1, True, "whether the child is executed once")
        await bench.ended(run_id, "succeeded", 22)
        [row] = await bench.queue.children(str(run_id))
        await bench.ended(row.run_id, "succeeded", 21)


@OTHERS
async def a_cancelled_run_takes_its_children_along(make: Make) -> None:
    async with opened(make) as bench:

        async def parent(ctx: Any) -> Any:
            await ctx.call("child", {})

        async def child(ctx: Any) -> Any:
            await ctx.wait_for_signal("never")

        runner = bench.runner(Scripted("parent", parent), Scripted("child", child))
        run_id = await runner.submit("parent")
        for _ in range(9):  # bounded, so that a queue that returns the same run for ever does not hang the case
            if not await runner.run_once():
                break
        [row] = await bench.queue.children(str(run_id))
        same(row.status, "waiting", "the child's status")
        same(await runner.cancel(run_id), True, "cancel of a waiting run")
        for each in (run_id, row.run_id):
            await bench.ended(each, "cancelled")
            same((await bench.event_types(each))[-1], "run.cancelled", "its last event")
        same(await runner.run_once(), False, "run_once without a pending run")
        same(await runner.cancel(run_id), False, "cancel of a finished run")


@OTHERS
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
        same(await other.cancel(run_id, wait=True), RunStatus.CANCELLED, "the result of cancel")
        await driving
        await bench.ended(run_id, "cancelled")
        same(log, ["stopped"], "the log of the cancelled step")
        same((await bench.event_types(run_id))[-1], "run.cancelled", "its last event")


@OTHERS
async def what_is_asked_for_twice_is_done_once(make: Make) -> None:
    async with opened(make) as bench:
        log: list[str] = []

        async def body(ctx: Any) -> Any:
            log.append("ran")
            return len(log)

        runner = bench.runner(Scripted("agent", body))
        first = await runner.submit("agent", {"n": 1}, idempotency_key="key-1")
        same(await runner.submit("agent", {"n": 1}, idempotency_key="key-1"), first, "the id of the second submit")
        with refused(IdempotencyConflict, "the idempotency key with another input"):
            await runner.submit("agent", {"n": 2}, idempotency_key="key-1")
        await runner.run_once()
        same(await runner.run_once(), False, "run_once without a pending run")
        for _ in range(2):
            result = await runner.execute("agent", "nightly", {"n": 3})
            found = (result.status, result.final_output)
            same(found, (RunStatus.SUCCEEDED, {"answer": 2}), "the result of execute with the same run id")
        same(log, ["ran", "ran"], "the executions")


@OTHERS
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
        types = ["run.started", "first", "second", "run.succeeded"]
        same((await early, await late, await follow()), (types, types, types), "the events of three subscribers")


Three = tuple[RunQueue, EventBus, StateStore]
Again = Callable[[Three], Three]


@contextlib.asynccontextmanager
async def two_processes(make: Make, again: Again) -> AsyncIterator[tuple[Bench, Bench]]:
    """Open two benches on one store with one clock."""
    async with opened(make) as first, opened(lambda **_: again(first.backends)) as second:
        second.clock = first.clock
        yield first, second


PROCESSES: Cases[Callable[[Make, Again], Awaitable[None]]] = Cases()


@PROCESSES
async def a_run_of_one_process_is_executed_by_another(make: Make, again: Again) -> None:
    async with two_processes(make, again) as (first, second):
        log: list[str] = []

        async def body(ctx: Any) -> Any:
            await ctx.step("one", log.append, "one")
            await ctx.emit("hello", {"n": 1})
            return await ctx.wait_for_signal("go")

        sender, worker = first.runner(Scripted("agent", body)), second.runner(Scripted("agent", body))
        run_id = await sender.submit("agent")
        same(await worker.run_once(), True, "run_once of the other process")
        same((await sender.get_run(run_id)).status, "waiting", "the status that the first process reads")
        await sender.signal(run_id, "go", 7)
        same(await worker.run_once(), True, "run_once of the other process after the signal")
        for bench in (first, second):
            await bench.ended(run_id, "succeeded", 7)
        same(log, ["one"], "the executed steps")
        same(await first.event_types(run_id), await second.event_types(run_id), "the events that both processes read")


@PROCESSES
async def a_run_of_a_crashed_process_is_resumed_by_another(make: Make, again: Again) -> None:
    async with two_processes(make, again) as (first, second):
        log: list[str] = []
        inside, wake = asyncio.Event(), asyncio.Event()

        def agent(sleeps: bool) -> Scripted:
            async def body(ctx: Any) -> Any:
                await ctx.step("one", log.append, "one")
                if sleeps:
                    inside.set()
                    await wake.wait()
                await ctx.step("two", lambda: ctx.attempt)
                await ctx.checkpoint({"attempt": ctx.attempt})
                return ctx.attempt

            return Scripted("agent", body)

        crashed, worker = first.runner(agent(True)), second.runner(agent(False))
        run_id = await crashed.submit("agent")
        driving = asyncio.ensure_future(crashed.run_once())
        await inside.wait()
        crashed.heartbeat.stop()
        first.clock.advance(LEASE + 1)
        same(await worker.run_once(), True, "run_once of the other process")
        await second.ended(run_id, "succeeded", 2)
        types, journal = await second.event_types(run_id), await second.state.records(run_id)
        wake.set()
        await driving
        same(log, ["one"], "how often the recorded step was executed")
        for bench in (first, second):
            same(await bench.event_types(run_id), types, "the events after the crashed process continued")
            same(await bench.state.records(run_id), journal, "the journal after it continued")
            same(await bench.state.get_checkpoint(run_id), {"attempt": 2}, "the checkpoint after it continued")
            await bench.ended(run_id, "succeeded", 2)


SEPARATE: Cases[Callable[[Make, Again], Awaitable[None]]] = Cases()


@SEPARATE
async def separate_objects_run_or_are_refused(make: Make, again: Again) -> None:
    """They keep the promises of a run, or are refused before the first run, which is not StorageCorrupt."""
    originals: list[Three] = []

    def separately(**options: Any) -> Three:
        queue = make(**options)
        bus, state = again(queue), again(queue)
        originals.extend((queue, bus, state))
        return queue[0], bus[1], state[2]

    try:
        async with opened(separately) as bench:
            log: list[str] = []

            async def body(ctx: Any) -> Any:
                await StepExecutor(ctx).run(steps(log, "one"))
                if ctx.attempt < 3:
                    raise RuntimeError(f"attempt {ctx.attempt}")
                return ctx.attempt

            async def at_once(ctx: Any) -> Any:
                return await StepExecutor(ctx).run(steps(log, "two"))

            agents = Scripted("agent", body), Scripted("inline", at_once)
            try:
                first, second = bench.runner(*agents), bench.runner(*agents)
                run_id = await first.submit("agent")
                for number, worker in enumerate((first, second, first), 1):
                    same(await worker.run_once(), True, f"run_once of attempt {number} on separate objects")
                    bench.clock.advance(LEASE)
                inline = await second.execute("inline", raise_on_error=False)
            except InvalidArgument:
                return
            await bench.ended(run_id, "succeeded", 3)
            same(log, ["one", "two"], "the executed steps")
            same(inline.final_output, {"answer": {"two": "two"}}, "the result of a run of execute")
    finally:
        for each in originals:
            for backend in each:
                await backend.close()


__all__ = ["CASES", "Case", "Make", "check"]

CASES: Cases[Case] = Cases([*ATTEMPTS, *OTHERS], several=[*SEPARATE, *PROCESSES])
check: Callable[..., Awaitable[None]] = CASES.check
