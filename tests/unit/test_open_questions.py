"""Open questions to people: when a run asks one, when it is closed, and how all of them are listed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import InvalidArgument, LeaseLost, WaitTimeout
from agent_runtime_core.queue.records import CLOSED, QUESTION, answer_id
from agent_runtime_core.runner import AgentRunner, ApprovalRequest
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.backends import SERVERS
from tests.support.fault_runs import KINDS, SERVER, Store, consistent, drop, eventually, settings, status, store

HOT, COLD = settings(park_after=1e6), settings(park_after=0)
SCHEMA = {"type": "object", "required": ["ok"]}

pytestmark = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _on_server(request: pytest.FixtureRequest, kind: str) -> None:
    if kind in SERVERS:
        SERVER["url"] = request.getfixturevalue(f"{kind}_url")


@dataclass
class Receipt:
    number: int


async def pays(ctx: Any) -> Any:
    return await ctx.approve("pay", {"amount": 12}, schema=SCHEMA)


async def names(runner: AgentRunner, run_id: Any) -> tuple[str, ...]:
    return (await runner.get_run(run_id)).open_approvals


async def asked(runner: AgentRunner, run_id: Any, *wanted: str) -> None:
    """Until these are the open questions of the run."""

    async def are_asked() -> bool:
        return await names(runner, run_id) == wanted

    await eventually(are_asked)


async def messages(runner: AgentRunner, run_id: Any) -> list[str]:
    return [each.kind for each in await runner.queue.mail(str((await runner.get_run(run_id)).run_id))]


async def parked(here: Store, code: Callable[[Any], Awaitable[Any]], **options: Any) -> tuple[AgentRunner, Any]:
    """A run of this code that has been parked."""
    here.agent("a", code)
    runner = here.runner(COLD)
    run_id = await runner.submit("a", **options)
    await runner.run_once()
    assert await status(runner, run_id) == "waiting"
    return runner, run_id


# -- asked


async def test_a_question_is_open_while_the_run_waits_in_memory(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        here.agent("a", pays)
        runner = here.runner(HOT)
        run_id = await runner.submit("a", run_id="r")
        working = asyncio.ensure_future(runner.run_once())
        await asked(runner, run_id, "pay")
        assert await status(runner, run_id) == "running"
        [event] = [e for e in await runner.event_bus.get_events(run_id) if e.event_type == "approval.requested"]
        [request] = await runner.approvals()
        assert request == ApprovalRequest(
            run_id, "r", "a", "pay", event.payload["request_id"], {"amount": 12}, SCHEMA, request.asked_at, None,
            request.cursor,
        )  # fmt: skip
        assert request.asked_at == event.timestamp
        assert await runner.approve(run_id, "pay", {"ok": True})
        assert await names(runner, run_id) == ()
        assert await runner.approvals() == []
        await working
        assert (await runner.wait(run_id)).final_output == {"value": {"ok": True}}
        assert await messages(runner, run_id) == [QUESTION, "signal"]
        await consistent(runner, run_id)


async def test_a_parked_run_asks_until_it_is_answered(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        runner, run_id = await parked(here, pays)
        assert await names(runner, run_id) == ("pay",)
        [request] = await runner.approvals()
        with pytest.raises(InvalidArgument, match="must match the schema"):
            await runner.approve(run_id, "pay", True)
        assert await names(runner, run_id) == ("pay",)
        assert await runner.approve(run_id, "pay", {"ok": 1}, request_id=request.request_id)
        assert not await runner.approve(run_id, "pay", {"ok": 2}, request_id=request.request_id)
        assert await runner.approvals() == []
        await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": {"ok": 1}}


async def test_concurrent_questions_are_asked_at_once(kind: str, tmp_path: Path) -> None:
    async def several(ctx: Any) -> Any:
        return await asyncio.gather(*(ctx.approve(f"pay {i}") for i in range(3)), ctx.approve("pay 1"))

    async with store(kind, tmp_path) as here:
        runner, run_id = await parked(here, several)
        assert sorted(await names(runner, run_id)) == ["pay 0", "pay 1", "pay 1", "pay 2"]
        first, second = [each for each in await runner.approvals() if each.name == "pay 1"]
        with pytest.raises(InvalidArgument, match=f"Known: {first.request_id}, {second.request_id}"):
            await runner.approve(run_id, "pay 1", "which?")
        assert await runner.approve(run_id, "pay 1", "second", request_id=second.request_id)
        assert [each.request_id for each in await runner.approvals() if each.name == "pay 1"] == [first.request_id]
        assert not await runner.approve(run_id, "pay 1", "x", request_id=second.request_id)
        for name in ("pay 1", "pay 0", "pay 2"):
            assert await runner.approve(run_id, name, name)
        await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": ["pay 0", "pay 1", "pay 2", "second"]}


async def test_children_and_plain_agents_ask_too(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def calls(ctx: Any) -> Any:
            return (await ctx.call("child", {})).final_output

        here.agent("child", pays)
        runner, run_id = await parked(here, calls)
        await runner.run_once()
        [request] = await runner.approvals()
        assert (request.agent_key, await names(runner, run_id)) == ("child", ())
        assert [each.agent_key for each in await runner.approvals(agent="child")] == ["child"]
        assert await runner.approvals(agent="a") == []
        assert await runner.approve(request.run_id, "pay", {"ok": 1})
        await runner.run_once()
        await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": {"value": {"ok": 1}}}


async def test_a_run_in_this_process_asks_too(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        runner = here.runner()
        going = asyncio.ensure_future(runner.execute(here.agent("a", pays), "r"))

        async def listed() -> bool:
            return [each.run_key for each in await runner.approvals()] == ["r"]

        await eventually(listed)
        assert await runner.approve("r", "pay", {"ok": 1})
        assert (await going).final_output == {"value": {"ok": 1}}


async def test_a_fork_asks_anew(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        runner, run_id = await parked(here, pays)
        await runner.approve(run_id, "pay", {"ok": 1})
        await runner.run_once()
        fork = await runner.fork(run_id, new_run_id="fork", input={"n": 2})
        assert await names(runner, fork) == ()
        await runner.run_once()
        waiting = await runner.submit("a", run_id="open")
        await runner.run_once()
        other = await runner.fork(waiting, new_run_id="other")
        assert await names(runner, other) == ()
        await runner.run_once()
        assert await names(runner, other) == ("pay",)
        assert len({each.request_id for each in await runner.approvals()}) == 2


async def test_a_question_stays_open_for_the_next_generation(kind: str, tmp_path: Path) -> None:
    broken = True

    async def fails(ctx: Any) -> Any:
        first = asyncio.create_task(pays(ctx))
        await ctx.wait_for_signal("go")
        if broken:
            first.cancel()
            raise ValueError("broken")
        return await first

    async with store(kind, tmp_path) as here:
        runner, run_id = await parked(here, fails)
        [request] = await runner.approvals()
        await runner.signal(run_id, "go")
        while await runner.run_once():
            pass
        assert await status(runner, run_id) in ("failed", "dead")
        assert await names(runner, run_id) == ()
        assert await runner.approvals() == []
        assert not await runner.approve(run_id, "pay", {"ok": 0}), "it has finished"
        broken = False
        await runner.resume(run_id)
        await runner.run_once()
        assert await runner.approvals() == [request]
        assert await runner.approve(run_id, "pay", {"ok": 1})
        await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": {"ok": 1}}


async def test_a_new_try_of_a_step_asks_again_for_a_wait_that_was_cancelled(kind: str, tmp_path: Path) -> None:
    tries = 0

    async def work(ctx: Any) -> Any:
        nonlocal tries
        tries += 1
        asking = asyncio.create_task(ctx.approve("pay"))
        if tries == 1:
            await asked(runner, run_id, "pay")
            asking.cancel()
            await asked(runner, run_id)
            raise ValueError("again")
        return await asking

    async def steps(ctx: Any) -> Any:
        return await ctx.step("work", work, ctx, retries=1)

    async with store(kind, tmp_path) as here:
        here.agent("a", steps)
        runner = here.runner(HOT)
        run_id = await runner.submit("a")
        working = asyncio.ensure_future(runner.run_once())

        async def second() -> bool:
            return tries == 2

        await eventually(second)
        await asked(runner, run_id, "pay")
        assert await runner.approve(run_id, "pay", "yes")
        await working
        assert (await runner.wait(run_id)).final_output == {"value": "yes"}
        assert await messages(runner, run_id) == [QUESTION, CLOSED, QUESTION, "signal"]


# -- closed


async def test_a_time_limit_closes_the_question(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:

        async def patient(ctx: Any) -> Any:
            try:
                return await ctx.approve("pay", timeout=30)
            except WaitTimeout:
                return await ctx.wait_for_signal("go")

        here.agent("a", patient)
        runner = here.runner(HOT)
        run_id = await runner.submit("a")
        working = asyncio.ensure_future(runner.run_once())
        await asked(runner, run_id, "pay")
        [request] = await runner.approvals()
        await clock.until_sleeping()
        clock.advance(30)
        await asked(runner, run_id)
        assert await runner.approvals() == []
        assert not await runner.approve(run_id, "pay", True)
        assert not await runner.approve(run_id, "pay", True, request_id=request.request_id, message_id="m")
        assert await runner.signal(run_id, "go", "no answer")
        await working
        assert (await runner.wait(run_id)).final_output == {"value": "no answer"}
        assert await messages(runner, run_id) == [QUESTION, CLOSED, "signal"]
        await consistent(runner, run_id)


@pytest.mark.parametrize("message_id", [None, "m"])
async def test_an_answer_before_the_close_is_taken(kind: str, message_id: str | None, tmp_path: Path) -> None:
    """The run has seen that its time is up, and the answer comes before it says so."""
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:

        async def patient(ctx: Any) -> Any:
            return await ctx.approve("pay", timeout=30)

        here.agent("a", patient)
        runner, other = here.runner(HOT), here.runner()
        run_id = await runner.submit("a")
        answered: list[bool] = []
        commit = runner.queue.commits.commit

        async def closes_late(guard: Any, ops: Any) -> Any:
            if any(op.name == "queue.post" and op.args[1].kind == CLOSED for op in ops) and not answered:
                answered.append(True)
                answered[0] = await other.approve(run_id, "pay", "just in time", message_id=message_id)
            return await commit(guard, ops)

        working = asyncio.ensure_future(runner.run_once())
        await asked(runner, run_id, "pay")
        await clock.until_sleeping()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(runner.queue.commits), "commit", lambda _, guard, ops: closes_late(guard, ops))
            clock.advance(30)
            await working
        assert answered == [True]
        assert (await runner.wait(run_id)).final_output == {"value": "just in time"}
        await consistent(runner, run_id)


async def test_a_plain_signal_closes_the_question(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:

        async def pays_and_waits(ctx: Any) -> Any:
            return [await pays(ctx), await ctx.wait_for_signal("go")]

        runner, run_id = await parked(here, pays_and_waits)
        await runner.signal(run_id, "pay", {"no": "answer"})
        await runner.run_once()
        assert await names(runner, run_id) == ("pay",), "that was no answer to it"
        await runner.signal(run_id, "pay", {"ok": 1})
        assert await names(runner, run_id) == ("pay",), "the run has not taken it yet"
        await runner.run_once()
        assert await names(runner, run_id) == ()
        assert not await runner.approve(run_id, "pay", {"ok": 2})
        await runner.signal(run_id, "go", 3)
        await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": [{"ok": 1}, 3]}


async def test_an_answer_from_before_the_question_closes_it(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        here.agent("a", pays)
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        assert await runner.approve(run_id, "pay", {"ok": 1})
        await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": {"ok": 1}}
        assert await messages(runner, run_id) == ["signal", QUESTION, CLOSED]


async def test_the_questions_of_ended_and_deleted_runs_are_not_open(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        runner, run_id = await parked(here, pays)
        assert len(await runner.approvals()) == 1
        await runner.cancel(run_id, wait=True)
        assert await runner.approvals() == []
        assert await names(runner, run_id) == ()
        assert not await runner.approve(run_id, "pay", {"ok": 1})
        await runner.discard(run_id)
        assert await runner.approvals() == []


# -- answered


def answer_at_once(*clients: AgentRunner) -> None:
    """Make each of these clients post its next answer only when all have read the mailbox."""
    read = asyncio.Barrier(len(clients))

    def held_back(client: AgentRunner) -> None:
        post = client._post

        async def together(*args: Any) -> Any:
            client._post = post  # type: ignore[method-assign]
            await read.wait()
            return await post(*args)

        client._post = together  # type: ignore[method-assign, assignment]

    for each in clients:
        held_back(each)


async def test_of_two_answers_at_once_one_counts(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        runner, run_id = await parked(here, pays)
        clients = [here.runner(), here.runner(), here.runner()]
        answer_at_once(*clients)
        taken = await asyncio.gather(*(each.approve(run_id, "pay", {"ok": i}) for i, each in enumerate(clients)))
        assert sorted(taken) == [False, False, True]
        await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": {"ok": taken.index(True)}}


async def test_the_reply_to_an_answer_given_again_is_the_same(kind: str, tmp_path: Path) -> None:
    async def twice(ctx: Any) -> Any:
        return [await ctx.approve("pay"), await ctx.approve("pay")]

    async with store(kind, tmp_path) as here:
        runner, run_id = await parked(here, twice)
        clients = [here.runner(), here.runner()]
        answer_at_once(*clients)

        async def answer(i: int) -> bool:
            return await clients[i].approve(run_id, "pay", i, message_id=f"m-{i}")

        taken = list(await asyncio.gather(answer(0), answer(1)))
        assert sorted(taken) == [False, True]
        await runner.run_once()
        assert await names(runner, run_id) == ("pay",)
        assert [await answer(0), await answer(1)] == taken, "it is no answer to the second question"
        assert await runner.approve(run_id, "pay", "last")
        await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": [taken.index(True), "last"]}


async def test_the_event_log_is_not_read(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        runner, run_id = await parked(here, pays)

        async def never(*_: Any, **__: Any) -> Any:
            raise AssertionError("a log may have 100,000 deltas")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner.event_bus, "get_events", never)
            [request] = await runner.approvals()
            assert await runner.approve(run_id, "pay", {"ok": 1}, request_id=request.request_id)


async def test_a_question_of_an_older_release_can_be_answered(kind: str, tmp_path: Path) -> None:
    """Its run has no question in the mailbox, only the event."""
    async with store(kind, tmp_path) as here:
        here.agent("a", pays)
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("agent_runtime_core._execution.claim_writer.ClaimWriter.ask", _only_event)
            await runner.run_once()
        assert await messages(runner, run_id) == []
        [event] = [e for e in await runner.event_bus.get_events(run_id) if e.event_type == "approval.requested"]
        with pytest.raises(InvalidArgument, match="must match the schema"):
            await runner.approve(run_id, "pay", True)
        with pytest.raises(InvalidArgument, match="be the id of an approval"):
            await runner.approve(run_id, "pay", {"ok": 1}, request_id="x")
        # The older release gave this id to each answer, and a later one with the same id was dropped.
        await runner.queue.post(run_id, "signal", "pay", '{"ok":1}', answer_id(event.payload["request_id"]))
        assert not await runner.approve(run_id, "pay", {"ok": 2})
        await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": {"ok": 1}}


async def _only_event(self: Any, row: Any, name: str, request_id: str) -> int:
    await self.emit([row])
    return 0


# -- a process that dies


@pytest.mark.parametrize("confirmed", [False, True])
async def test_a_question_whose_wait_was_not_recorded_is_asked_once(kind: str, confirmed: bool, tmp_path: Path) -> None:
    """The process dies between the question and the record of the wait."""
    async with store(kind, tmp_path) as here:
        here.agent("a", pays)
        dying, runner = here.runner(settings(park_after=0, lease_ttl_seconds=0.2)), here.runner(COLD)
        run_id = await runner.submit("a")
        reached = asyncio.Event()

        async def stuck(*_: Any) -> Any:
            reached.set()
            await asyncio.get_running_loop().create_future()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("agent_runtime_core._execution.waits.Waits._begin", stuck)
            task = asyncio.ensure_future(dying.run_once())
            await reached.wait()
            await drop(dying, task, run_id)
        [request] = await runner.approvals()
        if confirmed:
            assert await runner.approve(run_id, "pay", {"ok": 1})

        async def taken_over() -> bool:
            await runner.run_once()
            return await status(runner, run_id) in ("waiting", "succeeded")

        await eventually(taken_over)
        if not confirmed:
            assert await runner.approvals() == [request]
            assert await runner.approve(run_id, "pay", {"ok": 1})
            await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": {"ok": 1}}
        told = [e for e in await runner.event_bus.get_events(run_id) if e.event_type == "approval.requested"]
        assert len(told) == 1
        assert (await messages(runner, run_id)).count(QUESTION) == 1
        task.cancel()


async def test_a_stale_claim_cannot_ask(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        go = asyncio.Event()

        async def late(ctx: Any) -> Any:
            await go.wait()
            return await pays(ctx)

        here.agent("a", late)
        stale, runner = here.runner(settings(lease_ttl_seconds=0.2)), here.runner(settings(worker_id="other"))
        run_id = await runner.submit("a")
        task = asyncio.ensure_future(stale.run_once())

        async def taken() -> bool:
            return await status(runner, run_id) == "running"

        await eventually(taken)
        stale.heartbeat.drop(str(run_id))
        other = asyncio.ensure_future(runner.run_loop(handle_signals=False))

        async def taken_over() -> bool:
            return (await runner.get_run(run_id)).worker == "other"

        await eventually(taken_over)
        [execution] = stale._worker._executions.values()
        writer = execution.claim.writer
        with pytest.raises(LeaseLost):
            await writer.ask(("asked:x", "approval.requested", "{}", 0.0), "pay", "x")
        assert await runner.approvals() == []
        assert await messages(runner, run_id) == []
        runner.stop()
        go.set()
        await asyncio.gather(task, other, return_exceptions=True)


# -- reviews


async def test_a_review_is_listed_and_answered(kind: str, tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def pay() -> Receipt:
        begun.set()
        await asyncio.get_running_loop().create_future()
        return Receipt(1)

    async def guarded(ctx: Any) -> Any:
        return (await ctx.step("pay", pay, on_in_doubt="review")).number

    async with store(kind, tmp_path) as here:
        here.agent("a", guarded)
        dying, runner = here.runner(settings(lease_ttl_seconds=0.2)), here.runner(COLD)
        run_id = await runner.submit("a")
        task = asyncio.ensure_future(dying.run_once())
        await begun.wait()
        await drop(dying, task, run_id)

        async def taken_over() -> bool:
            await runner.run_once()
            return await status(runner, run_id) == "waiting"

        await eventually(taken_over)
        assert await names(runner, run_id) == ("in_doubt:pay",)
        [request] = await runner.approvals()
        assert (request.name, request.details["step_name"]) == ("in_doubt:pay", "pay")
        assert request.schema is not None
        assert request.schema["required"] == ["outcome"]
        for wrong in (True, {"outcome": "perhaps"}, None):
            with pytest.raises(InvalidArgument, match="'in_doubt:pay'"):
                await runner.approve(run_id, "in_doubt:pay", wrong)
        # Only the run knows that this is no result of the step: it asks again.
        assert await runner.approve(run_id, "in_doubt:pay", {"outcome": "done", "result": "no number"})
        await runner.run_once()
        [again] = await runner.approvals()
        assert again.request_id != request.request_id
        assert not await runner.approve(run_id, "in_doubt:pay", "retry", request_id=request.request_id)
        answer = {"outcome": "done", "result": {"number": 7}}
        clients = [here.runner(), here.runner()]
        answer_at_once(*clients)
        taken = await asyncio.gather(*(each.approve(run_id, "in_doubt:pay", answer) for each in clients))
        assert sorted(taken) == [False, True]
        assert await runner.approvals() == []
        await runner.run_once()
        result = await runner.wait(run_id)
        assert (result.status, result.final_output) == (RunStatus.SUCCEEDED, {"value": 7})
        task.cancel()


# -- lists


async def test_a_thousand_questions_are_listed_in_pages(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        runner = here.runner()
        rows = [(await runner.queue.enqueue(f"r{i}", "a", {})).run_id for i in range(1000)]
        for i in range(1000):  # in another order than the runs were submitted in, and often two at the same time
            clock.advance(i % 2)
            await runner.queue.post(rows[i * 7 % 1000], QUESTION, "pay", '{"request_id":""}', f"Q{i:04}")
        every = await runner.approvals(10_000)
        assert [each.asked_at for each in every] == sorted(each.asked_at for each in every)
        assert len({each.request_id for each in every}) == 1000
        found: list[ApprovalRequest] = []
        after = None
        while page := await runner.approvals(300, after):
            found += page
            after = page[-1].cursor
            # What is answered meanwhile moves no other question.
            await runner.queue.post(str(page[0].run_id), "closed", "", "null", answer_id(page[0].request_id))
        assert found == every
        assert await runner.approvals(after=after) == []
        assert len(await runner.approvals(10_000)) == 1000 - 4


@pytest.mark.parametrize("bad", ["", "x", "1_2", 5, "1_x_y"])
async def test_a_wrong_cursor_is_refused(kind: str, bad: Any, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        with pytest.raises(InvalidArgument, match="cursor"):
            await here.runner().approvals(after=bad)
