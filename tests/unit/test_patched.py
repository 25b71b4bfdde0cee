"""`ctx.patched`: a run takes changed code only if it has not gone past that point before the change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, RunnerConfig, RunStatus, Step, StepExecutor, open_run, open_run_sync
from agent_runtime_core.errors import InvalidArgument, LeaseLost
from agent_runtime_core.testing import crash_everywhere, run_agent_test
from tests.support.backends import POSTGRES, SERVERS
from tests.support.runs import Script

Code = Callable[[Any], Awaitable[Any]]


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in SERVERS:
        return str(request.getfixturevalue(f"{request.param}_url"))
    return "memory://" if request.param == "memory" else str(tmp_path / "runs.db")


def opened(url: str) -> AgentRunner:
    return AgentRunner.open(url, config=RunnerConfig(max_retries=1), persistence=None)


async def stopped(runner: AgentRunner, code: Code, run_id: str = "r") -> None:
    """Execute a run with this code, which must fail at its end."""
    assert (await runner.execute(Script(code), run_id)).status is RunStatus.FAILED


async def value(runner: AgentRunner, code: Code, run_id: str = "r") -> Any:
    result = await runner.execute(Script(code), run_id, raise_on_error=True)
    return result.final_output["value"]


def down() -> None:
    raise ConnectionError("down")


async def pay_first(ctx: Any) -> Any:
    await ctx.step("fetch", lambda: 1)
    await ctx.step("pay", lambda: 2)
    await ctx.step("send", down)


async def check_first(ctx: Any) -> list[str]:
    """The changed code: a check before the payment."""
    done = []
    await ctx.step("fetch", lambda: 1)
    if await ctx.patched("check"):
        done.append(await ctx.step("check", lambda: "checked"))
    await ctx.step("pay", lambda: 2)
    done.append(await ctx.step("send", lambda: "sent"))
    return done


async def test_a_new_run_takes_the_changed_code(url: str) -> None:
    async with opened(url) as runner:
        assert await value(runner, check_first) == ["checked", "sent"]


async def test_a_run_past_the_change_keeps_the_old_code(url: str) -> None:
    async with opened(url) as runner:
        await stopped(runner, pay_first)

        async def fails_again(ctx: Any) -> None:
            assert await ctx.step("fetch", lambda: 1) == 1
            assert not await ctx.patched("check")
            await ctx.step("pay", lambda: 2)
            await ctx.step("log", lambda: 3)
            down()

        await stopped(runner, fails_again)

        async def again(ctx: Any) -> Any:
            await ctx.step("fetch", lambda: 1)
            assert not await ctx.patched("check"), "the same in each execution"
            await ctx.step("pay", lambda: 2)
            return await ctx.step("log", lambda: 4)

        assert await value(runner, again) == 3


async def test_a_run_before_the_change_takes_it_and_stays_with_it(url: str) -> None:
    async with opened(url) as runner:

        async def fetches(ctx: Any) -> None:
            await ctx.step("fetch", lambda: 1)
            down()

        await stopped(runner, fetches)

        async def checks(ctx: Any) -> None:
            await ctx.step("fetch", lambda: 1)
            assert await ctx.patched("check")
            await ctx.step("check", lambda: "checked")
            await ctx.step("pay", lambda: 2)
            down()

        await stopped(runner, checks)
        assert await value(runner, check_first) == ["checked", "sent"]


async def test_a_step_in_doubt_is_past_the_change(tmp_path: Path) -> None:
    url, calls = str(tmp_path / "runs.db"), list[str]()

    async def pay() -> None:
        calls.append("pay")
        raise asyncio.CancelledError  # like a process that is killed here

    async def interrupted() -> None:
        async with open_run(url, "r") as ctx:
            await ctx.step("pay", pay, on_in_doubt=lambda *_: None)

    with pytest.raises(asyncio.CancelledError):
        await interrupted()

    async with open_run(url, "r") as ctx:
        assert not await ctx.patched("check")
        await ctx.step("pay", lambda: calls.append("again"), on_in_doubt=lambda *_: None)
    assert calls == ["pay", "again"]


async def test_a_loop_has_one_decision(url: str) -> None:
    async with opened(url) as runner:

        async def old(ctx: Any) -> None:
            await ctx.step("work", int)
            down()

        await stopped(runner, old)

        async def new(ctx: Any) -> list[bool]:
            found = []
            for _ in range(3):
                found.append(await ctx.patched("check"))
                await ctx.step("work", int)
            return found

        assert await value(runner, new) == [False] * 3
        assert await value(runner, new, "other") == [True] * 3


async def test_a_step_list_is_changed_for_new_runs_only(url: str) -> None:
    async with opened(url) as runner:

        async def one(ctx: Any, state: Any) -> int:
            return 1

        async def broken(ctx: Any, state: Any) -> None:
            down()

        async def old(ctx: Any) -> None:
            await StepExecutor(ctx).run([Step("fetch", one), Step("store", broken)])

        await stopped(runner, old)

        async def new(ctx: Any) -> list[str]:
            steps = [Step("fetch", one), Step("store", one)]
            if await ctx.patched("check"):
                steps.insert(1, Step("check", one))
            return [*await StepExecutor(ctx).run(steps)]

        assert await value(runner, new) == ["fetch", "store"]
        assert await value(runner, new, "other") == ["fetch", "check", "store"]


async def test_steps_of_other_tasks_do_not_hide_later_steps_of_the_main_task(url: str) -> None:
    async with opened(url) as runner:

        async def old(ctx: Any) -> None:
            await ctx.step("first", int)
            await ctx.step("pay", int)
            task = asyncio.create_task(ctx.step("side", int))
            await task
            down()

        await stopped(runner, old)

        async def new(ctx: Any) -> bool:
            await ctx.step("first", int)
            await asyncio.create_task(ctx.step("side", int))  # recorded after "pay"
            patched: bool = await ctx.patched("check")
            if patched:
                await ctx.step("check", int)
            await ctx.step("pay", int)
            return patched

        assert await value(runner, new) is False


async def test_only_the_main_task_decides_between_steps(url: str) -> None:
    async with opened(url) as runner:

        async def body(ctx: Any) -> str:
            with pytest.raises(InvalidArgument, match="must be called between steps, in the main task"):
                await asyncio.create_task(ctx.patched("check"))

            async def inside() -> str:
                with pytest.raises(InvalidArgument, match="must be called between steps, in the main task"):
                    await ctx.patched("check")
                return "rejected"

            return str(await ctx.step("outer", inside))

        assert await value(runner, body) == "rejected"


async def test_a_run_that_is_killed_at_any_write_decides_the_same() -> None:
    report = await crash_everywhere(lambda: Script(check_first))
    assert report.kills >= 2 * report.writes > 4
    report = await crash_everywhere(lambda: Script(check_first), again=1)
    assert report.outcome.final_output == {"value": ["checked", "sent"]}


async def test_a_finished_run_is_not_changed(tmp_path: Path) -> None:
    async with open_run(str(tmp_path / "runs.db"), "r") as ctx:
        await ctx.step("fetch", int)
    async with open_run(str(tmp_path / "runs.db"), "r") as ctx:
        await ctx.step("fetch", int)
        assert not await ctx.patched("check")


async def test_a_run_without_lease_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_run(str(tmp_path / "runs.db"), "r") as ctx:
        await ctx.step("fetch", int)
        with monkeypatch.context() as patch:
            patch.setattr(ctx.journal.writer, "closed_error", lambda _: LeaseLost("r", "claim"))
            with pytest.raises(LeaseLost):
                await ctx.patched("check")


async def test_a_forked_run_keeps_the_decision_before_its_fork(url: str) -> None:
    async with opened(url) as runner:
        await value(runner, check_first)
        for step in ("fetch", "check", "pay"):
            await runner.fork("r", step, new_run_id=f"after {step}")
            assert await value(runner, check_first, f"after {step}") == ["checked", "sent"]


async def test_a_call_that_was_removed_later(url: str) -> None:
    async with opened(url) as runner:

        async def with_call(ctx: Any) -> None:
            assert await ctx.patched("check")
            await ctx.step("check", int)
            down()

        await stopped(runner, with_call)

        async def without_call(ctx: Any) -> Any:
            await ctx.step("check", int)
            return await ctx.step("pay", lambda: 2)

        assert await value(runner, without_call) == 2


def test_plain_code_and_tests_have_it_too(tmp_path: Path) -> None:
    with open_run_sync(str(tmp_path / "runs.db"), "r") as run:
        assert run.sync_ctx.patched("check")
    result, _ = asyncio.run(run_agent_test(Script(check_first), "hi"))
    assert result.final_output == {"value": ["checked", "sent"]}


async def test_a_run_whose_tasks_went_past_the_change_keeps_the_old_code(url: str) -> None:
    """All later records belong to tasks that the run has started after that point."""

    async def pays_at_once(ctx: Any) -> Any:
        return await asyncio.gather(ctx.step("pay", lambda: 1, key="a"), ctx.step("pay", lambda: 2, key="b"))

    async def fails(ctx: Any) -> None:
        await pays_at_once(ctx)
        down()

    async def checks(ctx: Any) -> list[Any]:
        return [await ctx.patched("check"), await pays_at_once(ctx), await ctx.patched("report")]

    async with opened(url) as runner:
        await stopped(runner, fails)
        assert await value(runner, checks) == [False, [1, 2], True]


async def test_records_of_tasks_that_still_run_decide_nothing(url: str) -> None:
    """Their order relative to the main task is not known."""
    go = asyncio.Event()

    async def steps(ctx: Any) -> None:
        await ctx.step("one", lambda: 1)
        await ctx.step("two", lambda: 2)

    async def fails(ctx: Any) -> None:
        await asyncio.create_task(steps(ctx))
        down()

    async def checks(ctx: Any) -> bool:
        async def later() -> None:
            await go.wait()
            await steps(ctx)

        task = asyncio.create_task(later())
        patched = await ctx.patched("check")
        go.set()
        await task
        return bool(patched)

    async with opened(url) as runner:
        await stopped(runner, fails)
        assert await value(runner, checks)


async def test_a_wait_of_another_task_does_not_decide(url: str) -> None:
    async def body(ctx: Any) -> bool:
        async def journal() -> list[Any]:
            return await runner.state_store.records(str(ctx.run_id))

        waits = asyncio.create_task(ctx.wait_for_signal("go"))
        async with asyncio.timeout(10):
            while not any(each.name == "signal:go" for each in await journal()):  # noqa: ASYNC110 - nobody rings
                await asyncio.sleep(0.001)
        patched = await ctx.patched("check")
        await runner.signal("r", "go")
        await waits
        return bool(patched)

    async with opened(url) as runner:
        assert await value(runner, body), "it is a new run"
