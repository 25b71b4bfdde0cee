"""The n-th call of the engine fails, n = 1, 2, 3 …: the run ends right or raises typed, and can be run again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._core.clock import SYSTEM
from agent_runtime_core._core.ids import run_uuid
from agent_runtime_core._engines.base import Op
from agent_runtime_core.errors import StorageBusy, StorageError, StorageFull
from agent_runtime_core.runner import claim, execution
from agent_runtime_core.status import RunStatus
from agent_runtime_core.steps import Step, StepExecutor
from tests.support.fault_runs import KINDS, consistent, settings, store

Agent = Callable[[Any], Awaitable[Any]]


class Faults:
    """Stands in front of an engine's calls; those numbered `at` to `at + burst - 1` fail."""

    def __init__(self, engine: Any) -> None:
        self.at, self.burst, self.calls = 0, 0, 0
        self.after = False
        self.error: type[StorageError] = StorageBusy
        self._commit, self._read, self._post = engine.commit, engine.read, engine.commit_nowait
        engine.commit, engine.read, engine.commit_nowait = self.commit, self.read, self.post

    def arm(self, at: int, burst: int, error: type[StorageError], *, after: bool) -> None:
        self.at, self.burst, self.error, self.after, self.calls = at, burst, error, after, 0

    def _fails(self) -> bool:
        self.calls += 1
        return self.at <= self.calls < self.at + self.burst

    async def commit(self, guard: Any, ops: Any) -> Any:
        if not self._fails():
            return await self._commit(guard, ops)
        if self.after:
            await self._commit(guard, ops)
        raise self.error("injected")

    async def read(self, fn: Any, *args: Any) -> Any:
        if self._fails():
            raise self.error("injected")
        return await self._read(fn, *args)

    def post(self, guard: Any, ops: Any) -> None:
        # What is posted is never answered: a failure is the loss of the write.
        if not self._fails() or self.after:
            self._post(guard, ops)


async def chain(ctx: Any) -> Any:
    async def one(ctx: Any, state: Any) -> int:
        state["n"] = state.get("n", 0) + 1
        return 1

    def two(ctx: Any, state: Any) -> list[int]:
        state["n"] += 10
        return [state["n"]]

    return await StepExecutor(ctx).run([Step("one", one), Step("two", two), Step("three", one)])


async def imperative(ctx: Any) -> Any:
    first = await ctx.step("one", lambda: {"a": 1})
    await ctx.emit("half.way", {"first": first})
    second = await ctx.step("two", lambda x: x + 1, 1, on_in_doubt=lambda: None)
    await ctx.checkpoint({"second": second})
    third = await ctx.step("three", lambda: "c")
    return [first, second, third, (await ctx.get_state())]


async def fan_out(ctx: Any) -> Any:
    return await StepExecutor(ctx, max_concurrency=2).map("square", lambda x: x * x, [1, 2, 3])


OUTCOMES: dict[Agent, Any] = {
    chain: {"one": 1, "two": [11], "three": 1},
    imperative: [{"a": 1}, 2, "c", {"second": 2}],
    fan_out: [1, 4, 9],
}
FAULTS = [
    pytest.param(StorageBusy, 1, False, id="not-answered"),
    pytest.param(StorageBusy, 1, True, id="reply-lost"),
    pytest.param(StorageBusy, 3, False, id="not-answered-thrice"),
    pytest.param(StorageBusy, 3, True, id="reply-lost-thrice"),
    pytest.param(StorageFull, 1, False, id="full"),
    pytest.param(StorageFull, 2, False, id="full-twice"),
]


@pytest.mark.parametrize("code", OUTCOMES, ids=lambda code: code.__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("error", "burst", "after"), FAULTS)
async def test_execute_survives_each(
    kind: str, code: Agent, error: type[StorageError], burst: int, after: bool, tmp_path: Path
) -> None:
    async with store(kind, tmp_path) as here:
        here.agent("a", code)
        runner = here.runner()
        faults = Faults(here.engine)
        n = raised = held = 0
        while n == 0 or faults.calls >= n:
            n += 1
            faults.arm(n, burst, error, after=after)
            try:
                async with asyncio.timeout(5):
                    first = await runner.execute("a", f"run {n}", {"n": n})
            except error:
                raised += 1
            else:
                assert first.status is RunStatus.SUCCEEDED, (n, first.error)
            calls, faults.at = faults.calls, 0
            held += await lease_over(runner, f"run {n}")
            async with asyncio.timeout(5):
                again = await runner.execute("a", f"run {n}", {"n": n})
            assert again.status is RunStatus.SUCCEEDED, (n, again.error)
            assert again.final_output == {"value": OUTCOMES[code]}, n
            assert (await runner.get_run(f"run {n}")).generation == 1
            await settled(runner, f"run {n}")
            faults.calls = calls
        assert n > 5
        # Before there is a run to drive, and when even its end cannot be written, the caller hears of it.
        assert raised or (burst, error) == (1, StorageBusy)
        # One failure never leaves a run held by nobody; a second one right after it may.
        assert held == 0 or burst > 1


@pytest.fixture(autouse=True)
def _put_off_for_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "OUTAGE_DELAY", 0.0)
    monkeypatch.setattr(claim, "OUTAGE_PAUSE", 0.0)
    monkeypatch.setattr(execution, "OUTAGE_PAUSE", 0.0)


async def lease_over(runner: Any, run_id: Any) -> bool:
    """Let the lease run out of a run that nobody drives any more, if there is one."""
    row = await runner.queue.row(run_uuid(run_id, SYSTEM)[0])
    if row is None or row.status != "running":
        return False
    await runner.queue.commits.commit(None, [Op("queue.beat", (((row.run_id, row.claim_id),), -1.0))])
    return True


async def settled(runner: Any, run_id: str) -> None:
    """Like `consistent`, but for what was posted and lost: a start, never an end."""
    try:
        await consistent(runner, run_id)
    except AssertionError as error:
        if "never started" not in str(error):
            raise


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("error", "burst", "after"), FAULTS)
async def test_a_worker_survives_each(
    kind: str, error: type[StorageError], burst: int, after: bool, tmp_path: Path
) -> None:
    async with store(kind, tmp_path) as here:
        here.agent("a", imperative)
        runner = here.runner()
        faults = Faults(here.engine)
        n = 0
        while n == 0 or faults.calls >= n:
            n += 1
            run_id = await runner.submit("a")
            faults.arm(n, burst, error, after=after)
            for _ in range(3):
                try:
                    if await runner.run_once():
                        break
                except error:
                    continue
            calls, faults.at = faults.calls, 0
            await lease_over(runner, run_id)
            while await runner.run_once():
                pass
            result = await runner.wait(run_id, timeout=5)
            assert result.status is RunStatus.SUCCEEDED, (n, result.error)
            assert result.final_output == {"value": OUTCOMES[imperative]}
            await settled(runner, str(run_id))
            faults.calls = calls
        assert n > 5


OUTAGES = [
    pytest.param(StorageBusy, 15, False, id="away"),
    pytest.param(StorageBusy, 15, True, id="away-reply-lost"),
    pytest.param(StorageFull, 15, False, id="full"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("error", "burst", "after"), OUTAGES)
async def test_an_outage_that_begins_at_any_call_uses_no_attempt(
    kind: str, error: type[StorageError], burst: int, after: bool, tmp_path: Path
) -> None:
    """Its worker executes the run to its end under one claim, as the first attempt."""
    ran: Counter[str] = Counter()
    caught: list[Exception] = []

    async def careless(ctx: Any) -> Any:
        def act(name: str) -> str:
            ran[name] += 1
            return name

        try:
            await ctx.step("plain", act, "plain")
            await ctx.step("guarded", act, "guarded", on_in_doubt=lambda: None)
            await ctx.emit("half.way", {})
            await asyncio.gather(*(ctx.step(name, act, name) for name in ("left", "right")))
            await ctx.checkpoint({"n": 1})
            return await ctx.step("last", act, "last")
        except Exception as found:  # noqa: BLE001 - as code of users does
            caught.append(found)
            raise RuntimeError("the code takes the outage for a failure") from None

    async with store(kind, tmp_path) as here:
        here.agent("a", careless)
        runner = here.runner(settings(max_retries=1, max_crashes=1))
        faults = Faults(here.engine)
        n = 0
        while n == 0 or faults.calls >= n:
            n += 1
            ran.clear()
            run_id = await runner.submit("a")
            faults.arm(n, burst, error, after=after)
            async with asyncio.timeout(20):
                while not await claimed_and_executed(runner, error):
                    pass
            calls, faults.burst = faults.calls, 0
            row = await runner.queue.require(run_id)
            assert (row.status, row.attempt, row.failures, row.crashes) == ("succeeded", 1, 0, 0), (n, row.error)
            assert caught == []
            assert dict(ran) == dict.fromkeys(("plain", "guarded", "left", "right", "last"), 1), n
            await settled(runner, str(run_id))
            faults.calls = calls
        assert n > 5


async def claimed_and_executed(runner: Any, error: type[StorageError]) -> bool:
    try:
        return bool(await runner.run_once())
    except error:  # of the claim
        return False
