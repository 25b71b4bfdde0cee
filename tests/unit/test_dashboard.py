"""The numbers of the dashboard are those of the stored runs, however they are read."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunnerConfig, RunResult
from agent_runtime_core._views import dashboard
from agent_runtime_core._views.dashboard import Dashboard
from agent_runtime_core._views.journal import outcomes_of
from agent_runtime_core.queue.records import RunFilter
from agent_runtime_core.registry import Registry
from tests.support.inspector_data import many_runs

FAILED = ("failed", "dead", "timed_out")


async def counted(runner: AgentRunner, window: str, tenant: str | None = None) -> dict[str, Any]:
    found = Dashboard(tenant)
    for _ in range(200):
        view = await found.view(runner, window)
        if view["complete"]:
            return view
    raise AssertionError("it never has all runs")


@pytest.mark.parametrize(("page", "pages"), [(500, 20), (7, 2)])
async def test_the_counts_are_those_of_the_rows(
    page: int, pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "_PAGE", page)
    monkeypatch.setattr(dashboard, "_PAGES", pages)
    await many_runs(tmp_path / "many.db", 200, time.time(), days=5)
    async with AgentRunner.open(tmp_path / "many.db", read_only=True) as runner:
        first = await Dashboard(None).view(runner, "week")
        assert first["complete"] is (page == 500)
        view = await counted(runner, "week")
        rows = await runner.queue.find(RunFilter(limit=1000))
        outcomes = await outcomes_of(runner, rows)
    ended = [row for row in rows if row.ended_at]
    assert view["runs"] == len(rows) == 200
    assert view["started"] == sum(row.started_at is not None for row in rows) == view["latency"]["queue"]["count"]
    assert view["ended"] == len(ended) == view["latency"]["run"]["count"]
    assert view["failed"] == sum(row.status in FAILED for row in ended)
    for name in ("started", "ended", "failed"):
        assert sum(each[name] for each in view["series"]) == view[name]
    cost = Counter[str]()
    for row, (_, usage) in zip(rows, outcomes, strict=True):
        cost[row.agent] += usage.get("cost_usd") or 0
    assert {each["name"]: each["cost_usd"] for each in view["cost"]["agent"]} == pytest.approx(dict(cost))
    assert view["errors"] == [{"type": "ConnectionError", "runs": view["failed"]}]


async def test_a_window_has_only_its_time(tmp_path: Path) -> None:
    await many_runs(tmp_path / "many.db", 200, time.time(), days=5)
    async with AgentRunner.open(tmp_path / "many.db", read_only=True) as runner:
        views = {window: await counted(runner, window) for window in ("hour", "day", "week")}
        rows = await runner.queue.find(RunFilter(limit=1000))
    assert views["hour"]["ended"] < views["day"]["ended"] < views["week"]["ended"]
    for window, (seconds, step) in dashboard.WINDOWS.items():
        first = datetime.fromisoformat(views[window]["since"]).timestamp()
        assert views[window]["ended"] == sum(row.ended_at is not None and row.ended_at >= first for row in rows)
        assert len(views[window]["series"]) == seconds // step


class Waiter(AgentRuntime):
    key = "waiter"

    async def run(self, ctx: RunContext) -> RunResult:
        await ctx.wait_for_signal("go")

        async def pay() -> str:
            ctx.charge(model="m-1", input_tokens=30, output_tokens=12, cost_usd=0.5)
            if ctx.params.get("fail"):
                raise LookupError("nothing there")
            return "paid"

        return RunResult({"response": await ctx.step("pay", pay)})


async def test_a_live_run_is_counted_when_it_ends() -> None:
    registry = Registry()
    registry.register(Waiter())
    async with AgentRunner.open("memory://", config=RunnerConfig(max_retries=1), registry=registry) as runner:
        board, other = Dashboard(None), Dashboard("globex")
        for number, tenant in enumerate(("acme", "globex")):
            given = {"params": {"fail": number == 1}}
            await runner.submit("waiter", given, run_id=f"run-{number}", tenant=tenant)
        view = await board.view(runner, "hour")
        assert (view["started"], view["ended"], view["runs"]) == (0, 0, 2)
        for number, tenant in enumerate(("acme", "globex")):
            await runner.signal(f"run-{number}", "go", tenant=tenant)
        while await runner.run_once():
            pass
        for _ in range(2):  # a second look counts nothing twice
            view = await board.view(runner, "hour")
            assert (view["started"], view["ended"], view["failed"], view["runs"]) == (2, 2, 1, 2)
        assert {each["name"]: each["cost_usd"] for each in view["cost"]["model"]} == {"m-1": 0.5}
        assert {each["name"]: each["tokens"] for each in view["cost"]["tenant"]} == {"acme": 42, "globex": 42}
        assert view["latency"]["step"]["count"] == 1
        assert [each["runs"] for each in view["errors"]] == [1]
        only = await other.view(runner, "hour")
        assert (only["ended"], only["runs"]) == (1, 1)


async def test_the_steps_of_new_runs_are_counted_however_many_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "MOST_JOURNALS", 1)
    registry = Registry()
    registry.register(Waiter())
    async with AgentRunner.open("memory://", registry=registry) as runner:
        board = Dashboard(None)
        for number in range(1, 4):
            await runner.submit("waiter", run_id=f"run-{number}")
            await runner.signal(f"run-{number}", "go")
            while await runner.run_once():
                pass
            assert (await board.view(runner, "hour"))["latency"]["step"]["count"] == number


def test_percentiles_are_exact_within_five_percent() -> None:
    chance = random.Random(3)
    times = [chance.expovariate(1 / 3) + 0.001 for _ in range(2000)]
    board = Dashboard(None)
    for each in times:
        board._time(1000.0, "run", each)
    [counts] = board._buckets.values()
    found = dashboard._latency(counts, "run")
    assert found["count"] == 2000
    for share in (50, 95, 99):
        exact = sorted(times)[math.ceil(2000 * share / 100) - 1]
        assert found[f"p{share}"] == pytest.approx(exact, rel=0.055)


async def test_names_are_bounded() -> None:
    board = Dashboard(None)
    for number in range(300):
        board._named(1000.0, "error", f"Error{number}")
    [counts] = board._buckets.values()
    assert len(counts) == 101
    assert counts["error", "other"] == 200
