"""What code sees of a request to cancel its run: it may end by itself, and begins nothing more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import RunFailed, StepCancelledError, StorageBusy
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig, open_run
from agent_runtime_core.runner.claim import NOTICE_SECONDS
from agent_runtime_core.state import InMemoryStateStore
from agent_runtime_core.status import RunStatus
from agent_runtime_core.steps import Step, StepExecutor
from tests.support.runs import Hurried, Rig, Script, interrupted


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "agents.db"


@pytest.fixture
def never_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that has been told of a cancellation is not stopped, however slow the machine is."""
    monkeypatch.setattr("agent_runtime_core.runner.claim.NOTICE_SECONDS", 3600.0)


@pytest.mark.usefixtures("never_stopped")
@pytest.mark.parametrize("by", ["runner", "queue"])
async def test_a_run_that_cancels_itself_begins_no_other_step(place: Path | None, by: str) -> None:
    log: list[str] = []

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            async def one(*_: Any) -> None:
                assert await (rig.runner if by == "runner" else rig.runner.queue).cancel(ctx.run_id)
                log.append(f"heard {ctx.cancelled()}")

            async def two(*_: Any) -> None:
                log.append("two")

            try:
                await StepExecutor(ctx).run([Step("one", one), Step("two", two)])
            except StepCancelledError as error:
                log.append(f"not {error.step_name}")
                raise

        result = await rig.go(body)
    assert result.status is RunStatus.CANCELLED
    assert log == ["heard True", "not two"]


@pytest.mark.usefixtures("never_stopped")
async def test_code_that_looks_ends_by_itself(place: Path | None) -> None:
    seen: list[bool] = []

    async def body(ctx: Any) -> None:
        begun.set()
        while not ctx.is_cancelled():  # noqa: ASYNC110 - that is what is tested
            await asyncio.sleep(NOTICE_SECONDS / 10)
        seen.append(ctx.cancelled())

    begun = asyncio.Event()
    async with Rig(place) as rig:
        going = asyncio.ensure_future(rig.go(body))
        await begun.wait()
        assert await rig.runner.cancel("r", wait=True) is RunStatus.CANCELLED
        result = await going
        assert result.status is RunStatus.CANCELLED
        assert seen == [True]
        assert [kind for kind, _ in await rig.told("run.")] == ["run.started", "run.cancelled"]


async def test_code_that_does_not_look_is_stopped() -> None:
    seen: list[str] = []

    async def body(ctx: Any) -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append(f"stopped, {ctx.cancelled()}")
            raise

    begun = asyncio.Event()
    async with Rig() as rig:
        going = asyncio.ensure_future(rig.go(body))
        await begun.wait()
        assert await rig.runner.cancel("r", wait=True) is RunStatus.CANCELLED
        assert (await going).status is RunStatus.CANCELLED
    assert seen == ["stopped, True"]


async def test_a_block_that_looks_and_ends_was_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"

    async def block() -> None:
        async with open_run(path, "r") as ctx, AgentRunner.open(path, registry=Registry()) as other:
            assert await other.cancel("r")
            while not ctx.cancelled():  # noqa: ASYNC110 - that is what is tested
                await asyncio.sleep(NOTICE_SECONDS / 10)

    with pytest.raises(RunFailed, match="was cancelled"):
        await block()
    async with AgentRunner.open(path, registry=Registry()) as runner:
        assert (await runner.get_run("r")).status is RunStatus.CANCELLED
    await asyncio.sleep(NOTICE_SECONDS * 1.5)  # the task of the block is not cancelled later


async def test_who_cancels_the_task_of_a_block_is_heard_though_its_run_is_being_cancelled(tmp_path: Path) -> None:
    path, asked = tmp_path / "jobs.db", asyncio.Event()

    async def block() -> None:
        async with open_run(path, "r") as ctx, AgentRunner.open(path, registry=Registry()) as other:
            assert await other.cancel("r")
            while not ctx.cancelled():  # noqa: ASYNC110 - that is what is tested
                await asyncio.sleep(NOTICE_SECONDS / 10)
            asked.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(block())
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with AgentRunner.open(path, registry=Registry()) as runner:
        assert (await runner.get_run("r")).status is RunStatus.CANCELLED


async def _crash(rig: Rig) -> None:
    """A worker that claims the run, and is never heard of again."""
    assert await rig.runner.queue.claim_rows("w", 60)
    rig.clock.advance(61)  # type: ignore[attr-defined]


async def test_crashes_are_no_failures() -> None:
    lives: list[int] = []

    async def body(ctx: Any) -> int:
        lives.append(ctx.attempt)
        if len(lives) == 1:
            raise ConnectionError("down")
        return 1

    async with Rig(max_retries=2, retry_backoff_base=0) as rig:
        rig.register(body)
        await rig.runner.submit("script", run_id="r")
        for _ in range(2):
            await _crash(rig)
        assert await rig.runner.run_once(), "the first failure, in the third attempt"
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("r", 10)).status is RunStatus.SUCCEEDED
    assert lives == [3, 4]


async def test_a_queue_may_allow_fewer_failures_than_the_runner() -> None:
    lives: list[int] = []

    async def body(ctx: Any) -> None:
        lives.append(ctx.attempt)
        raise ConnectionError("down")

    for queue, of_runner, tries in (
        (InMemoryQueue(max_retries=1), 3, 1),
        (InMemoryQueue(), 5, 5),
        (InMemoryQueue(max_retries=5), 2, 2),
    ):
        lives.clear()
        config = RunnerConfig(max_retries=of_runner, retry_backoff_base=0)
        async with AgentRunner(queue, config=config) as runner:
            assert runner.config.max_retries == tries
            assert (await runner.execute(Script(body), "r")).status is RunStatus.FAILED
        assert lives == [*range(1, tries + 1)]
    assert InMemoryQueue().max_retries == 3


async def test_a_run_that_crashed_once_still_says_what_it_waited_for() -> None:
    async def body(ctx: Any) -> None:
        await ctx.step("one", int)
        await ctx.wait_for_signal("go")

    async with Rig(park_after=0) as rig:
        rig.register(body)
        await rig.runner.submit("script", run_id="r")
        await _crash(rig)
        assert await rig.runner.run_once()
        assert (await rig.runner.get_run("r")).reason == "signal go"
        await rig.runner.signal("r", "go")
        assert await rig.runner.run_once()
        assert [told["reason"] for _, told in await rig.told("run.resumed")] == ["signal go"]


async def test_a_child_that_was_cancelled_first_goes_on_with_its_parent(place: Path | None) -> None:
    lives: list[int] = []

    async def child(ctx: Any) -> int:
        lives.append(len(lives))
        return 7

    async def body(ctx: Any) -> Any:
        return (await ctx.call("child", {})).final_output["value"]

    async with Rig(place, park_after=0) as rig:
        rig.register(body)
        await rig.runner.submit("script", run_id="r")
        assert await rig.runner.run_once()
        [called] = await rig.runner.runs(status="pending")
        assert await rig.runner.cancel(called.run_id), "it is the first to hear of it, and tells the run that waits"
        assert await rig.runner.cancel("r")
        await rig.runner.resume("r")
        rig.register(child, "child")
        while await rig.runner.run_once():
            pass
        result = await rig.runner.wait("r", 10)
    assert (result.status, result.final_output) == (RunStatus.SUCCEEDED, {"value": 7})
    assert lives == [0]


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_a_child_that_was_deleted_is_called_again_by_the_resumed_run(place: Path | None, end: str) -> None:
    """The message of the deleted child is in the mailbox of its parent, which must not take it for that of the new."""
    lives: list[int] = []

    async def child(ctx: Any) -> int:
        lives.append(len(lives))
        if len(lives) == 1:
            raise ValueError("not yet")
        return 7

    async def body(ctx: Any) -> Any:
        return (await ctx.call("child", {})).final_output["value"]

    async with Rig(place, park_after=0, max_retries=1) as rig:
        rig.register(body)
        await rig.runner.submit("script", run_id="r")
        assert await rig.runner.run_once()
        [called] = await rig.runner.runs(status="pending")
        rig.register(child, "child")
        if end == "failed":
            assert await rig.runner.run_once()
        else:
            assert await rig.runner.cancel(called.run_id)
            lives.append(0)
        assert await rig.runner.cancel("r")
        await rig.runner.discard(called.run_id)
        await rig.runner.resume("r")
        while await rig.runner.run_once():
            pass
        result = await rig.runner.wait("r", 10)
    assert (result.status, result.final_output) == (RunStatus.SUCCEEDED, {"value": 7})
    assert len(lives) == 2


async def test_who_finishes_the_end_of_a_cancelled_run_ends_what_it_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first worker went between the end of the journal and that of the row; the child came after the cancel."""
    ran: list[str] = []

    async def child(ctx: Any) -> None:
        ran.append("child")

    async def body(ctx: Any) -> None:
        assert await runner.cancel(ctx.run_id)
        await runner.submit("child", run_id="c", parent_run_id=ctx.run_id)
        await asyncio.sleep(60)

    async def away(run_id: str, how: Any) -> None:
        raise StorageBusy("the queue is away")

    clock = Hurried()
    queue, registry = InMemoryQueue(clock=clock), Registry()
    registry.register(Script(body))
    registry.register(Script(child, "child"))
    async with AgentRunner(
        queue, InMemoryEventBus(clock=clock), registry=registry, state_store=InMemoryStateStore(clock=clock)
    ) as runner:
        commit, refused = queue.commits.commit, list[Any]()

        async def unless_it_settles(guard: Any, ops: Any) -> Any:
            if any(op.name == "queue.settle" for op in ops):
                refused.append(ops)
                raise StorageBusy("the queue is away")
            return await commit(guard, ops)

        with monkeypatch.context() as patch:
            patch.setattr(queue.commits, "commit", unless_it_settles)
            patch.setattr(queue, "settle", away)
            await runner.submit("script", run_id="r")
            await interrupted(runner, refused)
        assert (await runner.get_run("r")).status is RunStatus.RUNNING
        assert await runner.state_store.ending(str((await runner.get_run("r")).run_id)) is not None
        clock.advance(61)
        while await runner.run_once():
            pass
        assert (await runner.get_run("r")).status is RunStatus.CANCELLED
        assert (await runner.get_run("c")).status is RunStatus.CANCELLED
    assert ran == []
