"""The queue, the runner, the steps and the waits keep their promises whatever a seed does to them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .ablations import SAFEGUARDS
from .loop import HOST, Deadlock, SimLoop
from .scenarios import Outcome, build, play, wrong_ones

HERE = Path(__file__).parent
OLD_SEEDS = [
    int(word)
    for line in (HERE / "seeds.txt").read_text().splitlines()
    if not line.startswith("#")
    for word in line.split()
]
SEEDS = range(int(os.environ.get("SIMULATION_SEEDS", "500")))

#: Within how many seeds the absence of each safeguard shows.
WITHOUT = {
    "fence": 100,
    "match": 400,
    "count": 150,
    "cursor": 500,
    "rollback": 100,
    "resume": 20,
    "once": 300,
    "liveness": 50,
}


def _told(outcomes: list[Outcome]) -> str:
    return "\n\n".join(map(str, outcomes))


def test_the_seeds_that_once_found_something_find_nothing() -> None:
    wrong = wrong_ones(OLD_SEEDS)

    assert not wrong, _told(wrong)


@pytest.mark.slow
def test_seeds_find_nothing() -> None:
    wrong = wrong_ones(SEEDS)

    assert not wrong, _told(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("safeguard", sorted(SAFEGUARDS))
def test_a_safeguard_that_is_taken_away_is_missed(safeguard: str) -> None:
    found = next((seed for seed in range(WITHOUT[safeguard]) if play(seed, (safeguard,)).problems), None)

    assert found is not None
    assert not play(found).problems


def test_a_seed_goes_the_same_way_twice() -> None:
    for seed in range(20):
        assert _path(play(seed)) == _path(play(seed))


def test_a_seed_goes_the_same_way_whatever_the_hash_seed() -> None:
    code = "from tests.simulation.scenarios import play\nfor s in range(10): o = play(s); print(o.digest, o.turns)"
    ways = {_in_process(code, hash_seed) for hash_seed in ("1", "4711")}

    assert len(ways) == 1


def test_seeds_differ() -> None:
    assert len({play(seed).digest for seed in range(10)}) == 10


def test_seeds_meet_both_engines_and_every_kind_of_trouble() -> None:
    scenarios = [build(seed) for seed in SEEDS]
    kinds = {what for scenario in scenarios for _, what, _ in scenario.actions}
    items = {kind for scenario in scenarios for run in scenario.runs for kind, _, _ in run.items}

    assert {scenario.backend for scenario in scenarios} == {"memory", "sqlite"}
    assert kinds == {"kill", "pause", "go on", "stop", "jump", "cancel", "signal"}
    assert items == {"step", "chain", "map", "signal", "sleep", "emit", "call", "late", "transaction", "poison"}
    for fault in ("lost", "unanswered", "doubled", "dropped", "crash", "late_bell"):
        assert any(getattr(scenario.faults, fault) > 0 for scenario in scenarios)


# -- the loop


def test_time_jumps_and_a_lost_wake_up_is_a_deadlock() -> None:
    loop = SimLoop(0)

    loop.run_until_complete(asyncio.sleep(86_400))
    assert loop.time() == 86_400
    with pytest.raises(Deadlock):
        loop.run_until_complete(loop.create_future())
    loop.bury()


def test_a_killed_host_runs_no_finally_and_a_stopped_one_goes_on() -> None:
    loop = SimLoop(0)
    done: list[str] = []

    async def work(host: str) -> None:
        HOST.set(host)
        try:
            await asyncio.sleep(1)
            done.append(f"{host} worked")
        finally:
            done.append(f"{host} left")

    async def main() -> None:
        tasks = [loop.create_task(work(host)) for host in ("killed", "stopped")]
        await asyncio.sleep(0.5)
        loop.kill("killed")
        loop.stop_host("stopped")
        await asyncio.sleep(5)
        assert done == []
        loop.resume_host("stopped")
        await asyncio.wait(tasks[1:])

    loop.run_until_complete(main())
    assert done == ["stopped worked", "stopped left"]
    loop.bury()


def _path(outcome: Outcome) -> tuple[int, int, float]:
    return outcome.digest, outcome.turns, outcome.seconds


def _in_process(code: str, hash_seed: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        cwd=HERE.parents[1],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
