"""Four workers of one store keep a rate limit, by the times that the store has."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from agent_runtime_core import AgentRunner, RateLimit
from agent_runtime_core.queue import RunFilter
from agent_runtime_core.registry import Registry
from tests.support.backends import SERVERS, backends
from tests.support.processes import Command, becomes

RUNS, LIMIT = 150, RateLimit(50, per=1.0)


@pytest.fixture(params=backends(["sqlite", "redis", "postgres"]))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in SERVERS:
        return str(request.getfixturevalue(f"{request.param}_url"))
    return str(tmp_path / "runs.db")


async def test_four_workers_never_start_more_runs_in_a_second(url: str) -> None:
    async with AgentRunner.open(url, registry=Registry()) as runner:
        with ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(Command("tests.fault.rate_program", url))
            for number in range(RUNS):
                await runner.submit("mailer", run_id=f"mail-{number}", rate_limit=LIMIT)

            async def all_done() -> bool:
                return (await runner.queue.counts()).runs.get(("succeeded", "mailer")) == RUNS

            await becomes(all_done, "all runs succeeded")
        rows = await runner.queue.find(RunFilter(limit=1000))
    times = sorted(row.started_at or 0.0 for row in rows)
    assert len(times) == RUNS
    assert all(later - first >= 1.0 for first, later in zip(times, times[50:], strict=False))
