"""A question whose wait the code of the run has cancelled is closed; one whose attempt was stopped stays open."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import open_run
from agent_runtime_core.errors import IllegalTransition
from agent_runtime_core.queue.records import CLOSED, QUESTION
from agent_runtime_core.runner import AgentRunner, ApprovalRequest
from tests.support.fault_runs import KINDS, consistent, drop, eventually, settings, status, store

HOT, COLD = settings(park_after=1e6), settings(park_after=0)
DYING = settings(park_after=1e6, lease_ttl_seconds=0.2)
Code = Callable[[Any], Awaitable[Any]]

every_store = pytest.mark.parametrize("kind", KINDS)


async def names(runner: AgentRunner, run_id: Any) -> list[str]:
    """The open questions of the run."""
    return [*(await runner.get_run(run_id)).open_approvals]


async def asked(runner: AgentRunner, run_id: Any, *wanted: str) -> None:
    """Until these are the open questions of the only run, in both lists."""

    async def are_asked() -> bool:
        listed = sorted(each.name for each in await runner.approvals())
        return sorted(await names(runner, run_id)) == listed == sorted(wanted)

    await eventually(are_asked)


async def messages(runner: AgentRunner, run_id: Any) -> list[str]:
    return [each.kind for each in await runner.queue.mail(str((await runner.get_run(run_id)).run_id))]


async def approval(ctx: Any) -> Any:
    return await ctx.approve("pay", {"amount": 12})


# -- how code cancels a wait


async def by_timeout(ctx: Any, ask: Code, enough: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(None) as limit:
            cancels = asyncio.ensure_future(_then(enough, lambda: limit.reschedule(0)))
            await ask(ctx)
        await cancels


async def by_task_group(ctx: Any, ask: Code, enough: asyncio.Event) -> None:
    async def fails() -> None:
        await enough.wait()
        raise ValueError("the sibling fails")

    with suppress(BaseExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(ctx))  # type: ignore[arg-type]
            group.create_task(fails())


async def by_first_of_several(ctx: Any, ask: Code, enough: asyncio.Event) -> None:
    tasks = [asyncio.create_task(ask(ctx)), asyncio.create_task(enough.wait())]  # type: ignore[arg-type]
    _, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for each in left:
        each.cancel()


async def by_gather(ctx: Any, ask: Code, enough: asyncio.Event) -> None:
    both = asyncio.gather(ask(ctx), enough.wait())
    await enough.wait()
    both.cancel()
    with suppress(asyncio.CancelledError):
        await both


async def _then(event: asyncio.Event, act: Callable[[], None]) -> None:
    await event.wait()
    act()


@every_store
@pytest.mark.parametrize("cancels", [by_timeout, by_task_group, by_first_of_several, by_gather])
async def test_a_question_whose_wait_is_cancelled_is_closed(kind: str, cancels: Any, tmp_path: Path) -> None:
    enough = asyncio.Event()

    async def code(ctx: Any) -> Any:
        await cancels(ctx, approval, enough)
        return await ctx.wait_for_signal("go")

    async with store(kind, tmp_path) as here:
        here.agent("a", code)
        runner = here.runner(HOT)
        run_id = await runner.submit("a", run_id="r")
        working = asyncio.ensure_future(runner.run_once())
        await asked(runner, run_id, "pay")
        [request] = await runner.approvals()
        enough.set()
        await asked(runner, run_id)
        which: tuple[dict[str, Any], ...] = ({}, {"request_id": request.request_id}, {"message_id": "m"})
        for options in which:
            with pytest.raises(IllegalTransition, match="cannot answer 'pay' of run 'r': the code of the run has canc"):
                await runner.approve("r", "pay", True, **options)
        assert await messages(runner, run_id) == [QUESTION, CLOSED]
        assert await runner.signal(run_id, "go", 1)
        await working
        assert (await runner.wait(run_id)).final_output == {"value": 1}
        await consistent(runner, run_id)


@every_store
async def test_a_run_that_was_parked_closes_it_too(kind: str, tmp_path: Path) -> None:
    """The run resumes for its second question, and the next attempt cancels the wait for the first one."""

    async def code(ctx: Any) -> Any:
        first, second = (asyncio.ensure_future(ctx.approve(name)) for name in ("pay", "ship"))
        shipped = await second
        first.cancel()
        return [shipped, await ctx.wait_for_signal("go")]

    async with store(kind, tmp_path) as here:
        here.agent("a", code)
        runner = here.runner(COLD)
        run_id = await runner.submit("a")
        await runner.run_once()
        assert await names(runner, run_id) == ["pay", "ship"]
        await runner.approve(run_id, "ship", "yes")
        while await runner.run_once():
            pass
        assert (await status(runner, run_id), await names(runner, run_id)) == ("waiting", [])
        with pytest.raises(IllegalTransition):
            await runner.approve(run_id, "pay")
        await runner.signal(run_id, "go", 1)
        while await runner.run_once():
            pass
        assert (await runner.wait(run_id)).final_output == {"value": ["yes", 1]}
        await consistent(runner, run_id)


@every_store
@pytest.mark.parametrize("key", ["again", None])
async def test_a_wait_that_is_called_again_asks_again(kind: str, key: str | None, tmp_path: Path) -> None:
    """With the key it is the same wait; without one it is the next wait of that name."""
    enough = asyncio.Event()

    async def code(ctx: Any) -> Any:
        async def ask(ctx: Any) -> Any:
            return await ctx.approve("pay", key=key)

        await by_timeout(ctx, ask, enough)
        await ctx.wait_for_signal("go")
        return await ask(ctx)

    async with store(kind, tmp_path) as here:
        here.agent("a", code)
        runner = here.runner(HOT)
        run_id = await runner.submit("a")
        working = asyncio.ensure_future(runner.run_once())
        await asked(runner, run_id, "pay")
        [first] = await runner.approvals()
        enough.set()
        await asked(runner, run_id)
        await runner.signal(run_id, "go")
        await asked(runner, run_id, "pay")
        [second] = await runner.approvals()
        assert (second.name, second.request_id != first.request_id) == ("pay", True)
        with pytest.raises(IllegalTransition):
            await runner.approve(run_id, "pay", "late", request_id=first.request_id)
        assert await runner.approve(run_id, "pay", "yes")
        await working
        assert (await runner.wait(run_id)).final_output == {"value": "yes"}
        assert await messages(runner, run_id) == [QUESTION, CLOSED, "signal", QUESTION, "signal"]
        await consistent(runner, run_id)


@every_store
async def test_the_next_attempt_asks_again_too(kind: str, tmp_path: Path) -> None:
    """A new claim finds the question closed in the mailbox, and again after that."""
    rounds = 0

    async def code(ctx: Any) -> Any:
        nonlocal rounds
        rounds += 1
        asking = asyncio.ensure_future(ctx.approve("pay", key="k"))
        if rounds < 3:
            await asked(runner, run_id, "pay")
            asking.cancel()
            await asked(runner, run_id)
            raise ValueError("the attempt fails")
        return await asking

    async with store(kind, tmp_path) as here:
        here.agent("a", code)
        runner = here.runner(settings(park_after=1e6, max_retries=5))
        run_id = await runner.submit("a")
        for _ in range(2):
            await runner.run_once()
        working = asyncio.ensure_future(runner.run_once())
        await asked(runner, run_id, "pay")
        assert await runner.approve(run_id, "pay", "yes")
        await working
        assert (await runner.wait(run_id)).final_output == {"value": "yes"}
        assert await messages(runner, run_id) == [QUESTION, CLOSED, QUESTION, CLOSED, QUESTION, "signal"]
        await consistent(runner, run_id)


@every_store
async def test_a_review_whose_wait_is_cancelled_is_closed(kind: str, tmp_path: Path) -> None:
    """The next attempt asks again."""
    enough, begun, rounds = asyncio.Event(), asyncio.Event(), 0

    async def pay() -> str:
        begun.set()
        await asyncio.get_running_loop().create_future()
        return "paid"

    async def review(ctx: Any) -> Any:
        return await ctx.step("pay", pay, on_in_doubt="review", key="p")

    async def code(ctx: Any) -> Any:
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            return await review(ctx)
        await by_timeout(ctx, review, enough)
        await ctx.wait_for_signal("go")
        raise ValueError("the attempt fails")

    async with store(kind, tmp_path) as here:
        here.agent("a", code)
        dying, runner = here.runner(DYING), here.runner(settings(park_after=1e6, max_retries=5))
        run_id = await runner.submit("a", run_id="r")
        task = asyncio.ensure_future(dying.run_once())
        await begun.wait()
        await drop(dying, task, run_id)
        working = asyncio.ensure_future(runner.run_loop(handle_signals=False))
        await asked(runner, run_id, "in_doubt:pay")
        enough.set()
        await asked(runner, run_id)
        with pytest.raises(IllegalTransition, match="cannot answer 'in_doubt:pay' of run 'r'"):
            await runner.approve("r", "in_doubt:pay", {"outcome": "retry"})
        await runner.signal(run_id, "go")
        await asked(runner, run_id, "in_doubt:pay")
        assert await runner.approve(run_id, "in_doubt:pay", {"outcome": "done", "result": "by hand"})
        assert (await runner.wait(run_id)).final_output == {"value": "by hand"}
        runner.stop()
        await working
        task.cancel()


@every_store
async def test_an_answer_before_the_close_is_to_the_same_wait(kind: str, tmp_path: Path) -> None:
    """It was accepted, so the wait gets it when it is called again; another wait of that name does not."""
    cancelled = asyncio.Event()

    async def code(ctx: Any) -> Any:
        asking = asyncio.ensure_future(ctx.approve("pay", key="k"))
        await asked(runner, run_id, "pay")
        assert await other.approve(run_id, "pay", "in time")
        asking.cancel()  # the answer is stored, and the code has not received it
        with suppress(asyncio.CancelledError):
            return await asking
        cancelled.set()
        return await ctx.approve("pay", key="k")

    async with store(kind, tmp_path) as here:
        here.agent("a", code)
        runner, other = here.runner(HOT), here.runner()
        run_id = await runner.submit("a")
        await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": "in time"}
        assert await names(runner, run_id) == []


# -- the attempt is stopped


async def both_waits(ctx: Any) -> Any:
    other = asyncio.ensure_future(ctx.approve("ship"))
    return [await ctx.approve("pay"), await other]


@every_store
@pytest.mark.parametrize("stop", ["drain", "crash", "park"])
async def test_a_question_of_a_stopped_attempt_stays_open(kind: str, stop: str, tmp_path: Path) -> None:
    config = {"drain": settings(park_after=1e6, grace_seconds=0), "crash": DYING, "park": COLD}
    async with store(kind, tmp_path) as here:
        here.agent("a", both_waits)
        stopped, runner = here.runner(config[stop]), here.runner(HOT)
        run_id = await runner.submit("a")
        task = asyncio.ensure_future(stopped.run_loop(handle_signals=False) if stop == "drain" else stopped.run_once())
        await asked(runner, run_id, "pay", "ship")
        before = await runner.approvals()
        if stop == "drain":
            stopped.stop()
        elif stop == "crash":
            await drop(stopped, task, run_id)
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert await runner.approvals() == before
        for name in ("pay", "ship"):
            assert await runner.approve(run_id, name, name)
        working = asyncio.ensure_future(runner.run_loop(handle_signals=False))
        assert (await runner.wait(run_id)).final_output == {"value": ["pay", "ship"]}
        assert CLOSED not in await messages(runner, run_id)
        runner.stop()
        await working


async def cancelled_while_asking(runner: AgentRunner, going: asyncio.Future[Any]) -> list[ApprovalRequest]:
    """Cancel what executes a run that asks two questions, and return the questions."""

    async def are_asked() -> bool:
        return len(await runner.approvals()) == 2

    await eventually(are_asked)
    before = await runner.approvals()
    going.cancel()
    with suppress(asyncio.CancelledError):
        await going
    return before


@every_store
async def test_a_question_of_an_abandoned_execute_stays_open(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        agent = here.agent("a", both_waits)
        runner = here.runner(HOT)
        going = asyncio.ensure_future(runner.execute(agent, "r"))
        before = await cancelled_while_asking(runner, going)
        assert [each.request_id for each in await runner.approvals()] == [each.request_id for each in before]
        for name in ("pay", "ship"):
            assert await runner.approve("r", name, name)
        assert (await runner.execute(agent, "r")).final_output == {"value": ["pay", "ship"]}


async def test_a_question_of_a_cancelled_block_stays_open(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"

    async def block() -> Any:
        async with open_run(path, run_id="r") as ctx:
            return await both_waits(ctx)

    async with AgentRunner.open(path) as runner:
        going = asyncio.ensure_future(block())
        before = await cancelled_while_asking(runner, going)
        assert await runner.approvals() == before
        assert CLOSED not in await messages(runner, "r")
        for name in ("pay", "ship"):
            assert await runner.approve("r", name, name)
        assert await block() == ["pay", "ship"]


async def test_a_block_that_continues_closes_its_question(tmp_path: Path) -> None:
    path, enough = tmp_path / "runs.db", asyncio.Event()
    async with AgentRunner.open(path) as runner, open_run(path, run_id="r") as ctx:
        asking = asyncio.ensure_future(by_timeout(ctx, approval, enough))
        await asked(runner, "r", "pay")
        enough.set()
        await asking
        await asked(runner, "r")
        with pytest.raises(IllegalTransition):
            await runner.approve("r", "pay")


@every_store
async def test_a_crash_before_the_close_leaves_it_to_the_next_attempt(kind: str, tmp_path: Path) -> None:
    enough, crashed = asyncio.Event(), asyncio.Event()

    async def code(ctx: Any) -> Any:
        await by_timeout(ctx, approval, enough)
        return await ctx.wait_for_signal("go")

    async with store(kind, tmp_path) as here:
        here.agent("a", code)
        dying, runner = here.runner(DYING), here.runner(HOT)
        commit = type(runner.queue.commits).commit

        async def loses_the_close(self: Any, guard: Any, ops: Any) -> Any:
            if not crashed.is_set() and any(op.name == "queue.post" and op.args[1].kind == CLOSED for op in ops):
                crashed.set()
                await asyncio.get_running_loop().create_future()
            return await commit(self, guard, ops)

        run_id = await runner.submit("a")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(runner.queue.commits), "commit", loses_the_close)
            task = asyncio.ensure_future(dying.run_once())
            await asked(runner, run_id, "pay")
            enough.set()
            await crashed.wait()
            await drop(dying, task, run_id)
        assert await names(runner, run_id) == ["pay"]
        working = asyncio.ensure_future(runner.run_loop(handle_signals=False))
        await asked(runner, run_id)
        await runner.signal(run_id, "go", 1)
        assert (await runner.wait(run_id)).final_output == {"value": 1}
        runner.stop()
        await working
        task.cancel()
