"""Rate limits under several workers of one store: no burst, nearly all of the limit is used, and the order is kept."""

from __future__ import annotations

import bisect
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import RateLimit
from agent_runtime_core._engines.base import Op
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core.queue import RunQueue, RunRow, get_queue
from agent_runtime_core.queue.rate_limits import SKEW, counted_rate, unused
from agent_runtime_core.runner.pools import drop_unused
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.backends import backends

LEASE = 10_000.0


def queues(kind: str, count: int, clock: VirtualClock, request: pytest.FixtureRequest, folder: Path) -> list[RunQueue]:
    """Return several objects on one store."""
    options: dict[str, Any] = {"engine": MemoryEngine(clock=clock)}
    if kind == "sqlite":
        options = {"path": folder / "runs.db", "durability": "normal"}
    elif kind != "memory":
        options = {"url": request.getfixturevalue(f"{kind}_url")}
    return [get_queue(kind, clock=clock, **options) for _ in range(count)]


def most(times: list[float], per: float) -> int:
    """Return the greatest number of times in any sliding period."""
    times = sorted(times)
    return max(
        (bisect.bisect_left(times, True, lo=n, key=lambda at: at - first >= per) - n for n, first in enumerate(times)),
        default=0,
    )


class Workers:
    """Workers that claim whenever a run is due, and finish, retry or park what they claim."""

    def __init__(self, rng: random.Random, queues: list[RunQueue], clock: VirtualClock) -> None:
        self.rng, self.queues, self.clock = rng, queues, clock
        self.starts: list[RunRow] = []

    async def claim(self) -> int:
        queue = self.rng.choice(self.queues)
        rows = await queue.claim_rows("w", LEASE, limit=self.rng.choice([1, 3, 20]))
        for row in rows:
            if not row.parked:
                self.starts.append(row)
            how = queue.unchanged_update(row, row.claim_id)._replace(status="succeeded")
            if row.failures == 0 and not row.parked and self.rng.random() < 0.2:
                parks = self.rng.random() < 0.5
                due_at = self.clock.wall() + self.rng.random()
                how = how._replace(
                    status="waiting" if parks else "pending", parked=int(parks), failures=1 - int(parks), due_at=due_at
                )
            await queue.settle(row.run_id, how)
        return len(rows)

    async def work(self, until: float) -> None:
        """Work until a time, or until there is nothing to do."""
        while self.clock.wall() < until:
            if await self.claim():
                continue
            due = await self.queues[0].next_due()
            if due is None:
                return
            # Workers are late, as on a machine with other work.
            self.clock.advance(min(max(due - self.clock.wall(), 0.001) + self.rng.random() / 100, until))

    def times(self) -> list[float]:
        return [row.claimed_at or 0.0 for row in self.starts]


@pytest.mark.parametrize("kind", backends(["memory", "sqlite", "redis", "postgres"]))
@pytest.mark.parametrize("seed", range(3))
async def test_several_workers_keep_a_rate_limit(
    kind: str, seed: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    rng, clock = random.Random(seed), VirtualClock()
    limit = RateLimit([5, 20, 50][seed], per=[0.5, 1.0, 60.0][seed])
    per = float(limit.per)  # type: ignore[arg-type]
    stores = queues(kind, 2 + seed, clock, request, tmp_path)
    workers = Workers(rng, stores, clock)
    begin = clock.wall()
    try:
        for _ in range(limit.starts * 6):
            await rng.choice(stores).enqueue(None, "agent", {}, rate_limit=limit)
        await workers.work(begin + 3 * per)
        assert len(workers.starts) >= 0.9 * 3 * limit.starts, "nearly all of the limit is used"
        clock.advance(50 * per)  # no worker runs, and all delayed runs become due
        await workers.work(begin + 1000 * per)
        assert most(workers.times(), per) == limit.starts, "never more starts in any sliding period"
        firsts = [row.arrival for row in workers.starts if row.failures == 0]
        assert firsts == sorted(firsts), "runs start in the order of their arrival"
        assert len(firsts) == limit.starts * 6
        assert any(row.failures for row in workers.starts), "retries were counted"
    finally:
        for each in stores:
            await each.close()


@pytest.mark.parametrize("kind", backends(["memory", "sqlite", "redis", "postgres"]))
async def test_runs_of_several_agents_and_priorities_share_a_key(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    clock, limit = VirtualClock(), RateLimit(4, per=1.0, key="shared")
    first, second = queues(kind, 2, clock, request, tmp_path)
    try:
        for number in itertools.chain([0] * 6, [2] * 6, [1] * 6):
            for agent in "ab":
                await first.enqueue(None, agent, {}, rate_limit=limit, priority=number)
        found: dict[str, list[RunRow]] = {"a": [], "b": []}
        while len(found["a"]) + len(found["b"]) < 36:
            for queue, agent in ((first, "a"), (second, "b")):  # neither worker knows the agent of the other worker
                for row in await queue.claim_rows("w", LEASE, agent_keys=[agent], limit=2):
                    found[agent].append(row)
                    how = queue.unchanged_update(row, row.claim_id)._replace(status="succeeded")
                    await queue.settle(row.run_id, how)
            clock.advance(0.05)
        assert most([row.claimed_at or 0.0 for rows in found.values() for row in rows], 1.0) == 4
        for rows in found.values():
            assert [row.priority for row in rows] == [2] * 6 + [1] * 6 + [0] * 6
            assert len(rows) == 18, "neither agent keeps the other one from starting"
    finally:
        for queue in (first, second):
            await queue.close()


@pytest.mark.parametrize("kind", backends(["memory", "sqlite", "redis", "postgres"]))
@pytest.mark.parametrize("seed", range(3))
async def test_releases_and_steps_of_the_clock_neither_exceed_nor_waste_a_limit(
    kind: str, seed: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Workers release runs that they may not execute, and the wall clock is set back by any time, in any order."""
    rng, clock = random.Random(seed), VirtualClock()
    starts, per = [(1, 60.0), (5, 1.0), (20, 10.0)][seed]
    stores = queues(kind, 2, clock, request, tmp_path)
    started, steps = list[float](), 0  # by a clock that is never set back
    try:
        for _ in range(8 * starts):
            await rng.choice(stores).enqueue(None, rng.choice("ab"), {}, rate_limit=RateLimit(starts, per, key="x"))
        while len(started) < 8 * starts:
            queue = rng.choice(stores)
            rows = await queue.claim_rows("w", 1e9, limit=rng.choice([1, 3]))
            for row in rows:
                how = queue.unchanged_update(row, row.claim_id)._replace(status="succeeded")
                if rng.random() < 0.5:
                    how = how._replace(status="pending", take_back=counted_rate(row))
                else:
                    started.append(clock.boot())
                await queue.settle(row.run_id, how)
            if steps < 4 and started and rng.random() < 0.05:
                steps += 1
                clock.set_wall(clock.wall() - per * rng.choice([0.5, 1.5, 3.0, 1000.0]))
            elif not rows:
                due = await queue.next_due()
                assert due is not None
                clock.advance(min(max(due - clock.wall(), 0.001), per / 10))
        assert most(started, per) <= starts
        assert started[-1] < (8 + 2 * steps + 2) * per / 0.9
    finally:
        for each in stores:
            await each.close()


@pytest.mark.parametrize("kind", backends(["memory", "redis"]))
@pytest.mark.parametrize(("starts", "per", "late"), [(1, 60.0, 1.0), (50, 1.0, 0.02)])
async def test_late_workers_use_nearly_all_of_a_limit_for_a_long_backlog(
    kind: str, starts: int, per: float, late: float, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    rng, clock, periods = random.Random(1), VirtualClock(), 20
    [queue] = queues(kind, 1, clock, request, tmp_path)
    workers = Workers(rng, [queue], clock)
    begin = clock.wall()
    try:
        for _ in range(starts * periods):
            await queue.enqueue(None, "agent", {}, rate_limit=RateLimit(starts, per=per))
        while (due := await queue.next_due()) is not None or len(workers.starts) < starts:
            if not await workers.claim() and due is not None:
                clock.advance(max(due - clock.wall(), 0.001) + late * rng.random())
        assert (clock.wall() - begin) / per < len(workers.starts) / starts / 0.9
        assert most(workers.times(), per) <= starts
    finally:
        await queue.close()


@pytest.mark.parametrize("kind", backends(["memory", "sqlite", "redis", "postgres"]))
async def test_a_vacuum_deletes_states_that_count_nothing(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    clock = VirtualClock()
    queue, other = queues(kind, 2, clock, request, tmp_path)
    limit = RateLimit(1, 60.0, key=lambda input: input["of"])
    for name in ("ada", "ben"):
        await queue.enqueue(None, "a", {"of": name}, rate_limit=limit)
    assert len(await queue.claim_rows("w", LEASE, limit=5)) == 2
    states = await queue.read("shared", "rate:")
    assert len(states) == 2
    clock.advance(60.0)
    await drop_unused(queue)
    assert await queue.read("shared", "rate:") == states  # the clocks of two machines may differ
    clock.advance(SKEW + 1)
    await other.enqueue(None, "a", {"of": "ben"}, rate_limit=limit)
    await other.claim_rows("w", LEASE)  # between the read and the delete of the vacuum
    await queue.commits.commit(None, [Op("queue.forget_shared", (unused(states, clock.wall()),))])
    [kept] = await queue.read("shared", "rate:")
    assert kept.endswith("ben")
    for each in (queue, other):
        await each.close()
