"""Cancelled at every await of its life in turn: no open transaction, no half event, no task and no lease left."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._core.clock import Clock
from agent_runtime_core._core.ids import stored_id
from agent_runtime_core._engines.sqlite import writer
from agent_runtime_core.errors import RunFailed
from agent_runtime_core.runner import AgentRunner, RunnerConfig, open_run
from agent_runtime_core.runner.backends import Backends
from agent_runtime_core.status import TERMINAL, RunStatus
from agent_runtime_core.steps import Step, StepExecutor
from tests.support.fault_runs import consistent, no_transaction_left, others, settings, store, terminal_events, until

Strike = Callable[[], object]


class Suspensions:
    """Counts how often the tasks of this loop suspend, and strikes at one of those moments."""

    def __init__(self) -> None:
        self.count, self.at = 0, 0
        self.strike: Strike | None = None
        self.struck = False
        asyncio.get_running_loop().set_task_factory(self._task)

    def _task(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        # The heart beats in its own time.
        seen = work if getattr(work, "__qualname__", "Heart.").startswith("Heart.") else self._watch(work)
        return asyncio.Task(seen, loop=loop, **options)

    def arm(self, at: int = 0, strike: Strike | None = None) -> None:
        self.count, self.at, self.strike = 0, at, strike
        self.struck = self.struck and strike is None

    async def _watch(self, work: Awaitable[Any]) -> Any:
        return await _Watched(self, work)

    def seen(self) -> None:
        self.count += 1
        if self.count == self.at and self.strike is not None:
            self.struck = True
            # Not before the task is suspended: then a cancellation meets the very future it waits for.
            asyncio.get_running_loop().call_soon(self.strike)


class _Watched:
    def __init__(self, seen: Suspensions, work: Awaitable[Any]) -> None:
        self._seen, self._work = seen, work

    def __await__(self) -> Generator[Any, Any, Any]:
        steps: Any = self._work.__await__()
        error: BaseException | None = None
        while True:
            try:
                waited = steps.send(None) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            self._seen.seen()
            try:
                yield waited
                error = None
            except BaseException as thrown:  # noqa: BLE001 - handed on to the watched coroutine
                error = thrown


class Still(Clock):
    """Its time only passes for those who sleep.

    On a clock of the machine, the millisecond of `life` may be over before its wait begins. Then the life has three
    suspensions fewer, and how many lives the test interrupts depends on what else the machine does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passed, self._start = 0.0, time.time()

    def wall(self) -> float:
        return self._start + self._passed

    def boot(self) -> float:
        return self._passed

    async def sleep(self, seconds: float) -> None:
        until = self._passed + seconds
        await super().sleep(seconds)
        self._passed = max(self._passed, until)


async def life(ctx: Any) -> Any:
    """Every kind of await that a step's life has."""
    tries = 0

    async def one(ctx: Any, state: Any) -> int:
        state["seen"] = True
        await asyncio.sleep(0)
        await ctx.emit("inside", {"n": 1})
        return 1

    def two(ctx: Any, state: Any) -> int:
        return 2

    async def flaky() -> str:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("once")
        await asyncio.sleep(0)
        return "flaky"

    listed = await StepExecutor(ctx).run([Step("one", one, timeout=5), Step("two", two)])
    await ctx.emit("between", {"n": 2})
    tried = await ctx.step("flaky", flaky, retries=1, retry_delay=0, on_in_doubt=lambda: None)
    squares = await StepExecutor(ctx, max_concurrency=2).map("square", square, [1, 2, 3])
    await ctx.checkpoint({"squares": squares})
    await ctx.sleep(0.001)
    return [listed, tried, squares, await ctx.get_state()]


async def square(n: int) -> int:
    await asyncio.sleep(0)
    return n * n


OUTCOME = {"value": [{"one": 1, "two": 2}, "flaky", [1, 4, 9], {"squares": [1, 4, 9]}]}


#: Suspensions there are at least. On SQLite a commit is handed to a thread, or carried out on the event
#: loop at the end of the iteration.
FEWEST = {"memory": 11, "sqlite": 14, "sqlite, by the thread": 19}


@pytest.fixture(autouse=True)
def carried_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = request.node.callspec.params.get("kind", "") if hasattr(request.node, "callspec") else ""
    if kind.endswith("thread"):
        monkeypatch.setattr(writer, "ON_LOOP", 0)


async def nothing_left(runner: AgentRunner, run_id: str, before: set[asyncio.Task[Any]]) -> str | None:
    """Checks what holds right after a cancellation; the run's status, None if it was never stored."""

    def ours() -> set[asyncio.Task[Any]]:
        return {task for task in others() - before if not task.get_name().startswith("agent-runtime-")}

    await until(lambda: not ours())
    await no_transaction_left(runner)
    row = await runner.queue.row(stored_id(run_id))
    if row is None:
        return None
    assert row.status != "running", "its lease was not let go"
    await consistent(runner, row.run_id)
    return row.status


async def again(runner: AgentRunner, run_id: str) -> None:
    async with asyncio.timeout(5):
        result = await runner.execute("life", run_id)
    assert result.status is RunStatus.SUCCEEDED, result.error
    assert result.final_output == OUTCOME
    await consistent(runner, run_id)


def lives(seen: Suspensions) -> Iterator[tuple[int, str]]:
    """For each suspension its number, and the name of the run to interrupt there; the last life had none left.

    How many there are differs from life to life: on SQLite a slow disk makes more of them.
    """
    for n in itertools.count(1):
        yield n, f"run {n}"
        if not seen.struck:
            return


async def struck(seen: Suspensions, n: int, work: Awaitable[Any]) -> asyncio.Task[Any]:
    """The task of `work`, cancelled at suspension n, when it is done."""
    task = asyncio.ensure_future(work)
    seen.arm(n, task.cancel)
    await asyncio.wait({task}, timeout=5)
    assert task.done(), n
    seen.arm()
    return task


@pytest.mark.parametrize("kind", FEWEST)
async def test_the_caller_of_execute_is_cancelled(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path, Still()) as here:
        here.agent("life", life)
        runner, seen = here.runner(), Suspensions()
        n = cancelled = 0
        for n, name in lives(seen):
            before = others()
            task = await struck(seen, n, runner.execute("life", name))
            cancelled += task.cancelled()
            assert await nothing_left(runner, name, before) in (None, "pending", "succeeded"), n
            assert task.cancelled() or task.result().status is RunStatus.SUCCEEDED, n
            await again(runner, name)
        assert n > FEWEST[kind]
        assert cancelled >= n - 5


@pytest.mark.parametrize("apart", [False, True], ids=["one engine", "three"])
@pytest.mark.parametrize("kind", ["memory", "sqlite", "sqlite, by the thread"])
async def test_the_caller_of_execute_is_cancelled_about_a_failed_attempt(
    kind: str, apart: bool, tmp_path: Path
) -> None:
    """In the pause before the next one as well, and before it has begun."""
    seen, tried = Suspensions(), set[Any]()
    for name in "bs":
        (tmp_path / name).mkdir()

    async def code(ctx: Any) -> Any:
        if ctx.run_id not in tried:
            tried.add(ctx.run_id)
            raise ValueError("once")
        return 1

    async with store(kind, tmp_path) as here, store(kind, tmp_path / "b") as bus, store(kind, tmp_path / "s") as state:
        here.agent("life", code)
        runner = here.runner(settings(retry_backoff_base=0.01))
        if apart:
            runner.backends = Backends(runner.queue, bus.runner().event_bus, state.runner().state_store)
        for n, name in lives(seen):
            before = others()
            task = await struck(seen, n, runner.execute("life", name))
            assert await nothing_left(runner, name, before) in (None, "pending", "succeeded"), n
            async with asyncio.timeout(5):
                assert (await runner.execute("life", name)).final_output == {"value": 1}
            assert (await runner.get_run(name)).attempt <= 2, "giving a run back costs it nothing"
            begun = [e.payload for e in await runner.event_bus.get_events(name) if e.event_type == "run.started"]
            assert [each["attempt"] for each in begun] in ([1], [1, 2]), n
            assert task.cancelled() or len(begun) == 2, n
            await consistent(runner, name)


@pytest.mark.parametrize("kind", FEWEST)
async def test_a_worker_is_cancelled(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path, Still()) as here:
        here.agent("life", life)
        runner, seen = here.runner(), Suspensions()

        n = cancelled = 0
        for n, name in lives(seen):
            before = others()
            await runner.submit("life", run_id=name)
            task = await struck(seen, n, runner.run_once())
            cancelled += task.cancelled()
            assert await nothing_left(runner, name, before) in ("pending", "succeeded"), n
            info = await runner.get_run(name)
            assert info.attempt == 1, "giving a run back costs it nothing"
            if info.status is RunStatus.PENDING:
                assert await runner.run_once()
            await again(runner, name)
            started = [e for e in await runner.event_bus.get_events(name) if e.event_type == "run.started"]
            assert len(started) == 1, n
        assert n > FEWEST[kind]
        assert cancelled >= n - 7


@pytest.mark.parametrize("worker", [False, True], ids=["execute", "worker"])
@pytest.mark.parametrize("kind", FEWEST)
async def test_the_run_is_cancelled(kind: str, worker: bool, tmp_path: Path) -> None:
    async with store(kind, tmp_path, Still()) as here:
        here.agent("life", life)
        runner, seen = here.runner(), Suspensions()

        async def work(name: str) -> Any:
            if not worker:
                return await runner.execute("life", name)
            while not await runner.run_once():
                assert (await runner.get_run(name)).status in TERMINAL
                break
            return await runner.wait(name)

        n, ends = 0, list[str]()
        for n, name in lives(seen):
            before = others()
            told: list[asyncio.Task[Any]] = []
            await runner.submit("life", run_id=name)

            def strike(name: str = name, told: list[asyncio.Task[Any]] = told) -> None:
                told.append(asyncio.ensure_future(runner.cancel(name)))

            seen.arm(n, strike)
            async with asyncio.timeout(5):
                result = await work(name)
            seen.arm()
            if told:
                assert await told[0] or result.status is RunStatus.SUCCEEDED, n
            assert result.status in (RunStatus.CANCELLED, RunStatus.SUCCEEDED), (n, result.error)
            ends.append(result.status.value)
            assert await nothing_left(runner, name, before) == ends[-1], n
            assert await terminal_events(runner, name) == [f"run.{ends[-1]}"]
            await again(runner, name)
        assert n > FEWEST[kind]
        # How many depends on how soon a thread gets the time to hear of it: on a busy machine, most lives are over.
        assert "cancelled" in ends


@pytest.mark.parametrize("kind", FEWEST)
async def test_the_agents_own_code_cancels_it(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path, Still()) as here:
        current: list[asyncio.Task[Any]] = []

        async def noted(ctx: Any) -> Any:
            current[:] = [task for task in [asyncio.current_task()] if task is not None]
            return await life(ctx)

        here.agent("life", noted)
        runner, seen = here.runner(), Suspensions()
        n, attempts = 0, list[int]()
        for n, name in lives(seen):
            before = others()
            current.clear()
            seen.arm(n, lambda: current and current[0].cancel())
            async with asyncio.timeout(5):
                result = await runner.execute("life", name)
            seen.arm()
            # It counts as a failure of the agent, so another attempt follows.
            assert result.status is RunStatus.SUCCEEDED, (n, result.error)
            assert result.final_output == OUTCOME
            assert await nothing_left(runner, name, before) == "succeeded"
            attempts.append((await runner.get_run(name)).attempt)
        assert n > FEWEST[kind]
        assert set(attempts) <= {1, 2}
        assert attempts.count(2) > n // 2


async def test_a_block_of_ones_own_is_cancelled(tmp_path: Path) -> None:
    path = tmp_path / "own.db"
    config = RunnerConfig(worker_id="own", run_timeout_seconds=1e6, max_retries=1)
    seen = Suspensions()

    async def block(name: str) -> Any:
        async with open_run(path, name, config=config) as ctx:
            return await life(ctx)

    n = cancelled = 0
    async with AgentRunner.open(path) as runner:
        for n, name in lives(seen):
            before = others()
            task = await struck(seen, n, block(name))
            cancelled += task.cancelled()
            assert await nothing_left(runner, name, before) in (None, "pending", "succeeded"), n
            async with asyncio.timeout(5):
                assert await block(name) == OUTCOME["value"]
            await consistent(runner, name)
    assert n > FEWEST["sqlite"]
    assert cancelled >= n - 5


async def test_cancelling_a_block_of_ones_own_from_outside_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "own.db"
    async with AgentRunner.open(path) as runner:

        async def block() -> None:
            async with open_run(path, "mine") as ctx:
                await runner.cancel("mine")
                await ctx.sleep(30)

        with pytest.raises(RunFailed, match="was cancelled"):
            await block()
        assert (await runner.get_run("mine")).status is RunStatus.CANCELLED
        await consistent(runner, "mine")
