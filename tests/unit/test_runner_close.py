"""What becomes of runs, and of those who wait for them, when their runner is closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._core.clock import Clock
from agent_runtime_core.errors import StorageClosed
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus
from tests.support.runs import Rig, Script, soon, until


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "a.db" if request.param == "sqlite" else None


async def told(*waiting: asyncio.Future[Any]) -> None:
    for each in waiting:
        with pytest.raises(StorageClosed, match="this runner was closed"):
            await each


async def test_whoever_waits_or_executes_is_told_and_the_run_goes_on_later_at_no_cost(place: Path | None) -> None:
    inside = asyncio.Event()

    async def body(ctx: Any) -> Any:
        inside.set()
        return await ctx.wait_for_signal("go")

    async with Rig(place, Clock(), grace_seconds=3600) as rig:
        rig.register(body)
        closing, there = rig.another(), rig.another()
        executing = asyncio.ensure_future(closing.execute("script", run_id="r"))
        await until(inside)
        behind = asyncio.ensure_future(closing.execute("script", run_id="r"))
        waiting = asyncio.ensure_future(closing.wait("r"))
        await soon(lambda: bool(closing.watcher._by_loop))
        await closing.close()  # it only waits, and is given no grace
        await told(executing, behind, waiting)
        info = await there.get_run("r")
        assert (info.status, info.reason) == (RunStatus.PENDING, "handed back")
        await there.signal("r", "go", 1)
        result = await there.execute("script", run_id="r")
        assert result.final_output == {"value": 1}
        assert (await there.get_run("r")).attempt == 1


async def test_what_executes_may_finish_within_the_grace(place: Path | None) -> None:
    inside, more = asyncio.Event(), asyncio.Event()

    async def body(ctx: Any) -> int:
        inside.set()
        await more.wait()
        return 1

    async with Rig(place, Clock(), grace_seconds=3600) as rig:
        rig.register(body)
        runner = rig.another()
        executing = asyncio.ensure_future(runner.execute("script"))
        await until(inside)
        closing = asyncio.ensure_future(runner.close())
        await asyncio.sleep(0)
        more.set()
        await closing
        assert (await executing).final_output == {"value": 1}


async def test_after_the_grace_it_is_given_back_with_what_it_executes_itself(place: Path | None) -> None:
    """The outer run is not told that the inner one was given back: that would be a failure of it."""
    inside = asyncio.Event()

    async def outer(ctx: Any) -> Any:
        return (await ctx.call("inner", {})).final_output

    async def inner(ctx: Any) -> Any:
        inside.set()
        return await ctx.wait_for_signal("go")

    async with Rig(place, Clock(), grace_seconds=0) as rig:
        rig.register(outer, "outer")
        rig.register(inner, "inner")
        runner, there = rig.another(), rig.another()
        executing = asyncio.ensure_future(runner.execute("outer", run_id="r"))
        await until(inside)
        await runner.close()
        await told(executing)
        runs = await there.runs()
        assert [(run.agent_key, run.status, run.attempt) for run in runs] == [
            ("outer", RunStatus.PENDING, 1),
            ("inner", RunStatus.PENDING, 1),
        ]


async def test_what_does_not_stop_is_given_back_all_the_same(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, more = asyncio.Event(), asyncio.Event()
    monkeypatch.setattr("agent_runtime_core.runner.runner.SHUTDOWN_SECONDS", 0.01)

    async def body(ctx: Any) -> int:
        inside.set()
        while not more.is_set():
            try:
                await more.wait()
            except asyncio.CancelledError:
                continue
        return 1

    async with Rig(place, Clock(), grace_seconds=0) as rig:
        rig.register(body)
        runner, there = rig.another(), rig.another()
        executing = asyncio.ensure_future(runner.execute("script", run_id="r"))
        await until(inside)
        await runner.close()
        info = await there.get_run("r")
        assert (info.status, info.attempt) == (RunStatus.PENDING, 1)
        more.set()
        with pytest.raises(StorageClosed):
            await executing


async def test_an_agent_can_close_the_runner_that_executes_it(place: Path | None) -> None:
    async def body(ctx: Any) -> None:
        await runner.close()

    async with Rig(place, Clock(), grace_seconds=3600) as rig:
        rig.register(body)
        runner, there = rig.another(), rig.another()
        with pytest.raises(StorageClosed):
            await runner.execute("script", run_id="r")
        info = await there.get_run("r")
        assert (info.status, info.attempt) == (RunStatus.PENDING, 1)


async def test_what_is_executed_on_another_loop_is_stopped_there(place: Path | None) -> None:
    """In debug mode a loop says so where another thread touches what is its own."""
    inside, ended = threading.Event(), list[BaseException]()

    async def body(ctx: Any) -> None:
        inside.set()
        await asyncio.Event().wait()

    def work() -> None:
        try:
            asyncio.run(runner.execute("script", run_id="r"), debug=True)
        except StorageClosed as error:
            ended.append(error)

    async with Rig(place, Clock(), grace_seconds=0) as rig:
        rig.register(body)
        runner, there = rig.another(), rig.another()
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        await asyncio.to_thread(inside.wait, 10)
        await runner.close()
        await asyncio.to_thread(thread.join, 10)
        assert len(ended) == 1
        assert (await there.get_run("r")).status == RunStatus.PENDING


async def test_a_runner_beside_another_one_tells_its_own_who_wait(place: Path | None) -> None:
    async with Rig(place, Clock(), grace_seconds=0) as rig:
        await rig.runner.submit("script", run_id="r")
        beside = rig.runner.worker_for(rig.registry)
        there, here = (asyncio.ensure_future(each.wait("r")) for each in (rig.runner, beside))
        await soon(lambda: bool(beside.watcher._by_loop) and bool(rig.runner.watcher._by_loop))
        await beside.close()
        await told(here)
        await rig.runner.cancel("r")
        assert (await there).status == RunStatus.CANCELLED


@pytest.mark.parametrize("url", ["memory://", "a.db"])
async def test_a_runner_that_was_closed_does_nothing_more(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = AgentRunner.open(url)
    await runner.submit("script", run_id="r")
    await runner.cancel("r")
    await runner.close()
    asked: list[Callable[[], Any]] = [
        lambda: runner.execute(Script(lambda ctx: ctx.now())),
        lambda: runner.resume("r"),
        lambda: runner.requeue("r"),
        lambda: runner.fork("r"),
        lambda: runner.cancel("r"),
        lambda: runner.signal("r", "go"),
        lambda: runner.approve("r", "go"),
        lambda: runner.discard("r"),
        lambda: runner.vacuum(),
    ]
    for ask in asked:
        with pytest.raises(StorageClosed, match="this runner was closed"):
            await ask()
    with pytest.raises(StorageClosed):
        await runner.wait("r")


async def test_whatever_one_backend_does_the_others_are_closed(tmp_path: Path) -> None:
    runner, closed = AgentRunner.open(tmp_path / "a.db"), list[str]()
    engine = runner.queue.engine  # type: ignore[attr-defined]

    async def refuse() -> None:
        closed.append("queue")
        raise OSError("not now")

    close, runner.queue.close = runner.queue.close, refuse  # type: ignore[method-assign]
    with pytest.raises(OSError, match="not now"):
        await runner.close()
    assert (closed, engine._users) == (["queue"], 1)
    await close()
    assert engine._users == 0
