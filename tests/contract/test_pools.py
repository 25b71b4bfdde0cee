"""The rules of pools are written twice, in Python and in Lua: the same commits give the same states on each engine.

Several queues of one store reserve, spend and give back in any order, and crash in between: no pool exceeds its limit,
and nothing leaks.
"""

from __future__ import annotations

import asyncio
import datetime as _dt
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from agent_runtime_core._engines.base import Op
from agent_runtime_core.queue import RunQueue, get_queue
from agent_runtime_core.queue.pools import HELD, Amounts, Pool, PoolLimit, end_of
from agent_runtime_core.testing.clock import VirtualClock

#: Name, period, limits.
POOLS: list[tuple[str, str | float, Amounts]] = [
    ("day", "day", (20_000, -1, -1)),
    ("month", "month", (90_000, 500, -1)),
    ("hour", "hour", (-1, 300, -1)),
    ("minute", 60.0, (-1, 250, 4)),
    ("a-third", 100 / 3, (9_007_199_254_740_000, -1, 3)),
]
PHASES = (Phase.explicit, Phase.generate)  # an example is short, and each of its steps takes three engines
RUNS = ("r1", "r2", "r3")
PAUSES = [0.0, 0.0, 0.1, 1.0, 2.9, 20.0, 59.95, 60.0, 3600.0, HELD + 1, 20 * 86_400.0, -30.0, -200.0, -90 * 86_400.0]
INDEXES = st.sets(st.integers(0, len(POOLS) - 1), min_size=1, max_size=3)


class Act(NamedTuple):
    """One operation of a commit. `part` is how much of what was reserved a call has used, in tenths."""

    kind: str
    run: str
    call: int
    pools: frozenset[int]
    amounts: Amounts
    part: int


AMOUNTS = st.tuples(st.integers(0, 12_000), st.integers(0, 260), st.just(1))
ACTS = st.builds(
    Act, st.sampled_from(["reserve"] * 4 + ["spend"] * 3 + ["give_back", "end", "forced"]), st.sampled_from(RUNS),
    st.integers(0, 2), INDEXES.map(frozenset), AMOUNTS, st.integers(0, 10),
)  # fmt: skip
COMMITS = st.lists(st.tuples(st.sampled_from(PAUSES), st.lists(ACTS, min_size=1, max_size=3)), min_size=3, max_size=20)


def op_of(act: Act, wall: float) -> Op:
    id, chosen = f"{act.run}/{act.call}", sorted(act.pools)
    names = sorted(POOLS[index][0] for index in chosen)
    match act.kind:
        case "reserve" | "forced":
            wanted = sorted(PoolLimit(POOLS[index][0], "", *POOLS[index][1:], act.amounts) for index in chosen)
            return Op("queue.reserve", (id, wanted, wall, act.kind == "forced"))
        case "spend":
            usd, tokens, _ = act.amounts
            return Op("queue.spend", (names, id, (usd * act.part // 10, tokens * act.part // 10, 1), wall))
        case "give_back":
            return Op("queue.give_back", (names, id, wall))
        case _:
            return Op("queue.give_back", (sorted(name for name, _, _ in POOLS), f"{act.run}/", wall))


async def states(queue: RunQueue) -> dict[str, Any]:
    return {name: json.loads(text) for name, text in (await queue.read("shared", "pool:")).items()}


async def play(queues: Sequence[RunQueue], clock: VirtualClock, commits: list[tuple[float, list[Act]]]) -> int:
    """Make the commits on each engine; return how many reservations were refused."""
    refused = 0
    for seconds, acts in commits:
        clock.set_wall(clock.wall() + seconds) if seconds < 0 else clock.advance(seconds)
        ops = [op_of(act, clock.wall()) for act in acts]
        results = [await queue.commits.commit(None, ops) for queue in queues]
        found = [await states(queue) for queue in queues]
        for result, state in zip(results, found, strict=True):
            assert (result, state) == (results[0], found[0])
        refused += sum(bool(result) for op, result in zip(ops, results[0], strict=True) if op.name == "queue.reserve")
    return refused


def compare(queues_of: Any, examples: int) -> None:
    numbers, refused = itertools.count(), 0

    @settings(
        max_examples=examples, phases=PHASES, derandomize=True, database=None, deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(COMMITS)
    def same(commits: list[tuple[float, list[Act]]]) -> None:
        nonlocal refused

        async def compared() -> int:
            clock = VirtualClock()
            queues = queues_of(next(numbers), clock)
            try:
                return await play(queues, clock, commits)
            finally:
                for queue in queues:
                    await queue.close()

        refused += asyncio.run(compared())

    same()
    assert refused > examples / 4


@pytest.mark.redis
@pytest.mark.parametrize("examples", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_the_same_commits_give_the_same_pools_on_each_engine(redis_url: str, tmp_path: Path, examples: int) -> None:
    def queues_of(number: int, clock: VirtualClock) -> list[RunQueue]:
        return [
            get_queue("memory", clock=clock),
            get_queue("sqlite", path=tmp_path / f"{number}.db", durability="normal", clock=clock),
            get_queue("redis", url=f"{redis_url}n{number}", clock=clock),
        ]

    compare(queues_of, examples)


@pytest.mark.postgres
def test_the_same_commits_give_the_same_pools_on_postgresql(postgres_url: str) -> None:
    def queues_of(number: int, clock: VirtualClock) -> list[RunQueue]:
        return [get_queue("memory", clock=clock), get_queue("postgres", url=f"{postgres_url}_{number}", clock=clock)]

    compare(queues_of, 10)


def test_the_end_of_a_period_is_that_of_the_calendar() -> None:
    for then, hour, day, month in (
        ("2026-12-31T23:59:59.5", "2027-01-01T00", "2027-01-01", "2027-01-01"),
        ("2028-02-28T00:00:00", "2028-02-28T01", "2028-02-29", "2028-03-01"),
        ("2028-02-29T12:30:00", "2028-02-29T13", "2028-03-01", "2028-03-01"),
    ):
        now = _dt.datetime.fromisoformat(f"{then}+00:00").timestamp()
        found = [_dt.datetime.fromtimestamp(end_of(per, now), _dt.UTC) for per in ("hour", "day", "month")]
        assert found == [
            _dt.datetime.fromisoformat(f"{each}:00:00+00:00" if "T" in each else f"{each}T00:00:00+00:00")
            for each in (hour, day, month)
        ]


@settings(max_examples=100, phases=PHASES, derandomize=True, database=None, deadline=None)
@given(COMMITS)
def test_no_period_exceeds_its_limit_and_nothing_leaks(commits: list[tuple[float, list[Act]]]) -> None:
    """Calls that use at most what they reserved: the limit holds in each period, however calls and crashes mix."""
    asyncio.run(_hold(commits))


async def _hold(commits: list[tuple[float, list[Act]]]) -> None:
    clock = VirtualClock()
    queue = get_queue("memory", clock=clock)
    held: dict[str, Act] = {}
    for seconds, acts in commits:
        clock.advance(abs(seconds))
        for act in acts:
            if act.kind == "forced":
                continue
            id = f"{act.run}/{act.call}"
            if act.kind == "spend":  # the answer of the call that was reserved
                if id not in held:
                    continue
                act = held.pop(id)._replace(kind="spend", part=act.part)
            [result] = await queue.commits.commit(None, [op_of(act, clock.wall())])
            if act.kind == "reserve" and not result:
                held[id] = act
            elif act.kind in ("reserve", "give_back"):  # a refused repeat has given back what was reserved before
                held.pop(id, None)
            elif act.kind == "end":
                held = {each: found for each, found in held.items() if found.run != act.run}
            for name, per, limits in POOLS:
                text = (await queue.read("shared", "pool:")).get(f"pool:{name}")
                pool = Pool(text, per, clock.wall())
                for used, reserved, limit in zip(pool.used, pool.reserved, limits, strict=True):
                    assert used >= reserved >= 0
                    assert limit < 0 or used <= limit
    for seconds in (0, 40 * 86_400.0):
        clock.advance(seconds)
        ended = [op_of(Act("end", run, 0, frozenset(), (0, 0, 0), 0), clock.wall()) for run in RUNS]
        await queue.commits.commit(None, ended)
        assert all(state["open"] == [] for state in (await states(queue)).values())
    assert await states(queue) == {}  # what counts nothing takes no space
    await queue.close()


async def test_a_repeated_commit_counts_once(tmp_path: Path) -> None:
    clock = VirtualClock()
    queue = get_queue("sqlite", path=tmp_path / "q.db", clock=clock)
    want = [PoolLimit("acme", "", "day", (100, -1, -1), (60, 5, 1))]
    reserve = Op("queue.reserve", ("r/1", want, clock.wall(), False))
    assert await queue.commits.commit(None, [reserve]) == [[]]
    assert await queue.commits.commit(None, [reserve]) == [[]]
    spend = Op("queue.spend", (["acme"], "r/1", (40, 3, 1), clock.wall()))
    for _ in range(2):
        await queue.commits.commit(None, [spend])
        assert (await states(queue))["pool:acme"]["cells"] == [[clock.wall(), clock.wall(), 40, 3, 1]]
    assert await queue.commits.commit(None, [reserve._replace(args=("r/2", *reserve.args[1:]))]) == [[]]
    [[refusal]] = await queue.commits.commit(None, [reserve._replace(args=("r/3", *reserve.args[1:]))])
    assert (refusal.name, refusal.unit, refusal.used, refusal.is_reserved) == ("acme", 0, 100, True)
    assert refusal.seconds == end_of("day", clock.wall()) - clock.wall()
    await queue.close()
