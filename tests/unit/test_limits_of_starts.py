"""Rate limits, concurrency limits and turns of a runner: where they are set, and what is stored."""

from __future__ import annotations

import asyncio
import datetime as _dt
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, RateLimit, RunnerConfig, RunResult
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.queue import InMemoryQueue, RunRow, SQLiteQueue
from agent_runtime_core.queue.sqlite import _FIRST_TURN, _LIMITED, _NEXT_TURN
from agent_runtime_core.registry import Registry, key_of
from agent_runtime_core.testing import VirtualClock


class Mailer(AgentRuntime):
    key = "mailer"
    rate_limit = RateLimit(2, per=_dt.timedelta(minutes=1))

    async def run(self, ctx: Any) -> RunResult:
        return RunResult()


class Other(AgentRuntime):
    key = "other"

    async def run(self, ctx: Any) -> RunResult:
        return RunResult()


def opened(**config: Any) -> AgentRunner:
    registry = Registry()
    for agent in (Mailer(), Other()):
        registry.register(agent)
    return AgentRunner.open("memory://", registry=registry, config=RunnerConfig(**config))


async def stored(runner: AgentRunner, *args: Any, **options: Any) -> RunRow:
    row = await runner.queue.row(await runner.submit(*args, **options))
    assert row is not None
    return row


@pytest.mark.parametrize(
    "options",
    [
        {"starts": 0}, {"starts": -1}, {"starts": True}, {"starts": 1.5}, {"starts": float("nan")}, {"starts": None},
        {"per": 0}, {"per": -1}, {"per": float("nan")}, {"per": float("inf")}, {"per": True}, {"per": "1"},
        {"per": _dt.timedelta()}, {"key": ""}, {"key": "a\nb"}, {"key": 7}, {"per_tenant": 1},
    ],
)  # fmt: skip
def test_invalid_rate_limits_are_rejected_where_they_are_made(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        RateLimit(**{"starts": 5, "per": 1.0} | options)


def test_settings_are_checked_where_they_are_set() -> None:
    with pytest.raises(InvalidArgument, match="rate_limit must be RateLimit"):
        RunnerConfig(rate_limit=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="take_turns must be 'tenant', a function of the input, or None"):
        RunnerConfig(take_turns="agent")  # type: ignore[arg-type]
    invalid = type("Invalid", (Mailer,), {"rate_limit": 5})()
    with pytest.raises(InvalidArgument, match="rate_limit must be RateLimit"):
        key_of(invalid)


async def test_a_run_has_the_limit_of_its_caller_its_agent_or_its_runner() -> None:
    async with opened(rate_limit=RateLimit(9, per=2)) as runner:
        assert (await stored(runner, "mailer")).rate == "2 60.0 agent mailer"
        assert (await stored(runner, Mailer())).rate == "2 60.0 agent mailer"
        assert (await stored(runner, "other")).rate == "9 2.0 key *"
        assert (await stored(runner, "unknown")).rate == "9 2.0 key *"
        own = RateLimit(1, per=0.5, key="mine", per_tenant=True)
        assert (await stored(runner, "mailer", rate_limit=own, tenant="t")).rate == "1 0.5 key mine\ntenant t"
        with pytest.raises(InvalidArgument, match="rate_limit"):
            await runner.submit("mailer", rate_limit=5)  # type: ignore[arg-type]


async def test_a_function_returns_the_key_of_a_run() -> None:
    def customer(input: Mapping[str, Any]) -> Any:
        return input.get("customer")

    limit = RateLimit(1, per=60, key=customer)
    async with opened() as runner:
        assert (await stored(runner, "other", {"customer": "ada"}, rate_limit=limit)).rate == "1 60.0 key ada"
        assert (await stored(runner, "other", rate_limit=limit)).rate is None
        with pytest.raises(InvalidArgument, match="the key of a rate limit must be a string"):
            await runner.submit("other", {"customer": 7}, rate_limit=limit)


async def test_executed_runs_are_not_limited() -> None:
    async with opened() as runner:
        for _ in range(5):
            result = await runner.execute("mailer")
            assert result.run_id is not None
            assert (await runner.queue.require(result.run_id)).rate is None


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, 10_001])
async def test_invalid_concurrency_limits_are_rejected(limit: Any) -> None:
    async with opened() as runner:
        with pytest.raises(InvalidArgument, match="concurrency_limit must be"):
            await runner.submit("other", concurrency_key="k", concurrency_limit=limit)


async def test_a_worker_starts_delayed_runs_when_there_is_room() -> None:
    clock = VirtualClock()
    registry = Registry()
    registry.register(Mailer())
    async with AgentRunner(InMemoryQueue(clock=clock), registry=registry) as runner:
        ids = [await runner.submit("mailer") for _ in range(5)]
        while await runner.run_once():
            pass
        infos = [await runner.get_run(each) for each in ids]
        assert [info.status.value for info in infos] == ["succeeded"] * 2 + ["pending"] * 3
        assert {info.reason for info in infos[2:]} == {"rate_limit"}
        clock.advance(60.0)
        while await runner.run_once():
            pass
        infos = [await runner.get_run(each) for each in ids]
        assert [info.status.value for info in infos].count("succeeded") == 3, "the next one starts half a minute later"


async def test_a_run_that_no_slot_of_the_worker_is_free_for_uses_up_no_start() -> None:
    clock, registry = VirtualClock(), Registry()
    registry.register(Other())
    async with AgentRunner(InMemoryQueue(clock=clock), registry=registry) as runner:
        ids = [await runner.submit("other", rate_limit=RateLimit(1, per=86_400)) for _ in range(2)]
        worker = runner._worker
        worker.slots.resize(0)
        worker.start_delivered(await runner.queue.claim_rows("w", 60.0, limit=9))
        await asyncio.wait([*worker._executions])
        worker.slots.resize()
        clock.advance(1.0)
        assert await runner.run_once()
        assert not await runner.run_once()
        infos = [await runner.get_run(each) for each in ids]
        assert [(info.status.value, info.reason) for info in infos] == [("succeeded", ""), ("pending", "rate_limit")]


async def test_a_run_that_is_left_to_another_version_uses_up_no_start() -> None:
    clock, runs = VirtualClock(), list[str]()

    def of_version(version: str) -> Registry:
        class Versioned(AgentRuntime):
            key = "versioned"
            code_version = version

            async def run(self, ctx: Any) -> RunResult:
                runs.append(version)
                if len(runs) == 1:
                    raise ConnectionError
                return RunResult()

        registry = Registry()
        registry.register(Versioned())
        return registry

    async with AgentRunner(
        InMemoryQueue(clock=clock), config=RunnerConfig(retry_backoff_base=0.0), registry=of_version("1")
    ) as runner:
        other = runner.worker_for(of_version("2"))
        run_id = await runner.submit("versioned", rate_limit=RateLimit(2, per=86_400))
        assert await runner.run_once()
        for _ in range(5):
            clock.advance(20.0)
            await other.run_once()
        assert runs == ["1"]
        clock.advance(20.0)
        assert await runner.run_once()
        assert (runs, (await runner.get_run(run_id)).status.value) == (["1", "1"], "succeeded")
        await other.close()


async def test_an_overdue_retry_counts_as_a_start_after_the_clock_was_set_back() -> None:
    clock, runs, limit = VirtualClock(), list[float](), RateLimit(2, per=60.0)

    class Fails(Mailer):
        async def run(self, ctx: Any) -> RunResult:
            runs.append(clock.boot())
            if len(runs) == 1:
                raise ConnectionError
            return RunResult()

    registry = Registry()
    registry.register(Fails())
    config = RunnerConfig(retry_backoff_base=5.0)
    async with AgentRunner(InMemoryQueue(clock=clock), config=config, registry=registry) as runner:
        for _ in range(4):
            await runner.submit("mailer", rate_limit=limit)
        while len(runs) < 2:
            assert await runner.run_once()
        clock.set_wall(clock.wall() - 30.0)
        while len(runs) < 5:
            clock.advance(1.0)
            await runner.run_once()
        assert max(sum(0 <= at - first < 60.0 for at in runs) for first in runs) == 2
        assert runs[-1] < 200.0


@pytest.mark.parametrize("overlap", ["skip", "queue", "cancel_previous"])
async def test_runs_of_a_schedule_start_as_often_as_their_rate_limit_allows(overlap: str) -> None:
    clock, starts = VirtualClock(), list[float]()

    class Ticks(Mailer):
        rate_limit = RateLimit(1, per=100.0)

        async def run(self, ctx: Any) -> RunResult:
            starts.append(clock.boot())
            return RunResult()

    registry = Registry()
    registry.register(Ticks())
    async with AgentRunner(InMemoryQueue(clock=clock), registry=registry) as runner:
        await runner.schedules.put("ticks", "mailer", every=10, overlap=overlap)
        for _ in range(60):
            clock.advance(5.0)
            while await runner.run_once():
                pass
        assert starts == [10.0, 110.0, 210.0]
        waiting = await runner.runs(status="pending")
        assert len(waiting) == (27 if overlap == "queue" else 1)


async def test_turns_are_stored_by_runners_that_take_turns() -> None:
    async with opened() as runner:
        assert (await stored(runner, "other", tenant="t")).turn is None
    async with opened(take_turns="tenant") as runner:
        assert (await stored(runner, "other", tenant="t")).turn == "t"
        assert (await stored(runner, "other")).turn == ""
    async with opened(take_turns=lambda input: input.get("team")) as runner:
        assert (await stored(runner, "other", {"team": "blue"})).turn == "blue"
        assert (await stored(runner, "other")).turn == ""


async def test_a_worker_serves_tenants_in_turns() -> None:
    async with opened(take_turns="tenant") as runner:
        for tenant in "aaaabbc":
            await runner.submit("other", {"tenant": tenant}, tenant=tenant)
        order: list[str] = []
        for _ in range(7):
            before = {run.run_id for run in await runner.runs(status="succeeded")}
            assert await runner.run_once()
            order += [run.tenant or "" for run in await runner.runs(status="succeeded") if run.run_id not in before]
        assert order == [*"abcabaa"]


async def test_claims_of_limits_and_turns_read_one_entry_of_an_index(tmp_path: Path) -> None:
    queue = SQLiteQueue(tmp_path / "runs.db")
    await queue.enqueue(None, "agent", {})
    await queue.close()
    view = sqlite3.connect(tmp_path / "runs.db")
    for query, values, index in (
        (_LIMITED, ("1 1.0 x", "agent"), "arc_runs_limited (rate=? AND agent=?)"),
        (_FIRST_TURN, ("agent", 0, ""), "arc_runs_turns (agent=? AND priority=? AND turn>?)"),
        (_NEXT_TURN, ("agent", 0, "t"), "arc_runs_turns (agent=? AND priority=? AND turn>?)"),
    ):
        plan = [row[3] for row in view.execute(f"EXPLAIN QUERY PLAN {query}", values)]
        assert plan == [f"SEARCH arc_runs USING INDEX {index}"]
    view.close()
