"""What others do about a process that was killed, stopped or keeps dying: take over, wait, cancel, give up.

Measured figures: pytest tests/fault/test_recovery.py -o log_cli=true --log-cli-level=INFO
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import RunBusy, RunStatus, open_run
from tests.fault.jobs.agents import open_runner
from tests.support.backends import POSTGRES, SERVERS
from tests.support.processes import Child, becomes, image, lines, recorded, until

log = logging.getLogger("fault")

RUN = str(UUID(int=1))


def worker(where: Path, **how: Any) -> Child:
    return Child("worker", json.dumps({"places": [str(where / "all.db")] * 3, **how}))


async def holder_of(db: Path) -> str:
    try:
        async with open_run(db, RUN):
            return ""
    except RunBusy as busy:
        return busy.worker or "?"


async def test_a_job_goes_on_at_once_after_a_kill_and_not_while_its_process_is_only_stopped(tmp_path: Path) -> None:
    db, effects = tmp_path / "all.db", tmp_path / "effects"
    with Child("twenty", "steps", db, RUN, effects, 600) as child:
        child.expect("ready")
        until(lambda: len(lines(effects)) == 1, "the first step, which is a long one")
        assert (await holder_of(db)).startswith("open_run-")
        child.stop_between_commits(db)
        assert (await holder_of(db)).startswith("open_run-"), "a stopped process still holds its run"
        assert child.kill()
        began = time.monotonic()
        async with open_run(db, RUN) as ctx:  # RunBusy if it needed the end of the lease
            log.info("open_run after kill -9: %.1f ms", (time.monotonic() - began) * 1000)
            assert ctx.attempt == 2


async def test_a_killed_workers_run_is_taken_over_by_one_that_lives(tmp_path: Path) -> None:
    places, effects, gate = [tmp_path / "all.db"] * 3, tmp_path / "effects", tmp_path / "gate"
    async with open_runner(places, worker_id="lives") as runner:
        input_ = {"params": {"n": 6, "effects": str(effects), "held": 2, "gate": str(gate)}}
        with worker(tmp_path, config={"worker_id": "dies"}) as child:
            child.expect("ready")
            run_id = await runner.submit("steps", input_)
            await asyncio.to_thread(until, lambda: len(lines(effects)) == 3, "the third step")
            working = asyncio.create_task(runner.run_loop(poll_interval=0.1, handle_signals=False))
            await asyncio.sleep(0.02)  # let it look, and find nothing it may have
            pid, died = str(child.pid), time.monotonic()
            assert child.kill()
        gate.touch()
        result = await runner.wait(run_id, timeout=10)  # less than the lease
        runner.stop()
        await working
        info = await runner.get_run(run_id)
    ran = [(step, pid_) for _, step, pid_, *_ in lines(effects)]
    taken = next(float(words[3]) for words in lines(effects) if words[2] != pid) - died
    assert result.final_output == {"out": [0, 1, 4, 9, 16, 25]}
    assert (info.worker, info.attempt) == ("lives", 2)
    twice = {step for step, _ in ran if sum(s == step for s, _ in ran) > 1}
    assert len(ran) - 6 == len(twice)
    assert twice == {"s2"}, "only the step in flight ran again"
    log.info("taken over by a live worker after %.0f ms", taken * 1000)


@pytest.mark.redis
async def test_a_killed_workers_run_on_redis_is_taken_over_when_its_lease_is_over(
    tmp_path: Path, redis_url: str
) -> None:
    lease = 1.0
    places, effects, gate = [redis_url] * 3, tmp_path / "effects", tmp_path / "gate"
    async with open_runner(places, worker_id="lives", lease_ttl_seconds=lease) as runner:
        params = {"n": 4, "effects": str(effects), "held": 2, "gate": str(gate)}
        how = {"places": places, "concurrency": 8, "config": {"worker_id": "dies", "lease_ttl_seconds": lease}}
        with Child("worker", json.dumps(how)) as child:
            child.expect("ready")
            runs = [await runner.submit("steps", {"params": params}) for _ in range(8)]
            await asyncio.to_thread(until, lambda: len(lines(effects)) == 24, "the third steps")
            working = asyncio.create_task(runner.run_loop(concurrency=8, handle_signals=False))
            await asyncio.sleep(0.02)
            pid, died = str(child.pid), time.monotonic()
            assert child.kill()
        gate.touch()
        for run_id in runs:
            assert (await runner.wait(run_id, timeout=10)).final_output == {"out": [0, 1, 4, 9]}
        runner.stop()
        await working
    taken: dict[str, float] = {}
    for run, _, by, at, _ in lines(effects):
        if by != pid:
            taken.setdefault(run, float(at) - died)
    ran = Counter((run, step) for run, step, *_ in lines(effects))
    assert sum(ran.values()) - len(ran) <= 8, "at most the steps in flight ran again"
    log.info("%d runs taken over on Redis, the last after %.0f ms", len(taken), max(taken.values()) * 1000)


@pytest.mark.parametrize("engine", ["sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
async def test_a_cancel_reaches_a_running_step_in_another_process(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = request.getfixturevalue(f"{engine}_url") if engine in SERVERS else str(tmp_path / "all.db")
    took = await cancelled(place, tmp_path / "effects", 30)
    log.info("%s: cancel heard after p50 %.1f ms, the slowest %.1f ms", engine, took[15] * 1000, took[-1] * 1000)


async def cancelled(place: str, effects: Path, tries: int) -> list[float]:
    """After how many seconds each of so many steps heard of the cancel of its run, the fastest first."""
    places = [place] * 3
    async with open_runner(places) as runner:
        runs = [await runner.submit("sleeper", {"params": {"effects": str(effects)}}) for _ in range(tries)]
        with Child("worker", json.dumps({"places": places, "concurrency": tries})) as child:
            child.expect("ready")
            await asyncio.to_thread(until, lambda: len(lines(effects)) == tries, "all steps to begin")
            asked: dict[str, float] = {}
            for run_id in runs:
                asked[str(run_id)] = time.monotonic()
                assert await runner.cancel(run_id) is True
                assert await runner.cancel(run_id, wait=True) is RunStatus.CANCELLED
            child.process.terminate()
            assert await child.aended() == 0
    took = sorted(float(at) - asked[run] for run, what, at in lines(effects) if what == "out")
    assert len(took) == tries
    return took


async def test_a_run_that_kills_its_process_is_dead_after_three_and_keeps_no_other_from_running(tmp_path: Path) -> None:
    db, effects, cure = tmp_path / "all.db", tmp_path / "effects", tmp_path / "cure"
    async with open_runner([db] * 3) as runner:
        params = {"effects": str(effects), "cure": str(cure)}
        poison = await runner.submit("poison", {"params": params}, priority=1)
        others = [await runner.submit("noop", {}) for _ in range(5)]
        deaths = 0
        while deaths < 10:
            with worker(tmp_path) as child:
                child.expect("ready")

                async def decided() -> bool:
                    return child.process.poll() is not None or (await runner.get_run(others[-1])).ended_at is not None

                await becomes(decided, "the worker to die or to get through")
                if child.process.poll() is None:
                    child.process.terminate()
                    assert await child.aended() == 0
                    break
                deaths += 1
        assert (await runner.wait(poison, timeout=5)).status is RunStatus.DEAD
        ran = [step for _, step in lines(effects)]
        log.info("poison: dead after %d deaths of its workers", deaths)
        assert ran.count("s0") == ran.count("s1") == 1
        assert ran.count("s2") == deaths == 3
        for other in others:
            assert (await runner.wait(other, timeout=5)).status is RunStatus.SUCCEEDED
        records = await runner.state_store.records(poison)
        assert {r.name for r in records if r.kind == "done"} == {"s0", "s1"}, "its journal is kept"
        cure.touch()
        await runner.requeue(poison)
        assert await runner.run_once()
        assert (await runner.wait(poison, timeout=5)).final_output == {"out": [0, 1, 2]}
        assert [step for _, step in lines(effects)].count("s0") == 1


async def test_a_run_that_kills_its_process_takes_none_to_the_dead_that_ran_beside_it(tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    async with open_runner([tmp_path / "all.db"] * 3) as runner:
        poison = await runner.submit("poison", {"params": {"effects": str(effects), "cure": str(tmp_path / "cure")}})
        # Some have no record yet when their process dies, some have one more each time.
        others = [
            await runner.submit("steps", {"params": {"n": n, "pause": pause}})
            for n, pause in [(1, 0.2)] * 4 + [(20, 0.01)] * 3
        ]
        deaths = 0
        while deaths < 10:
            with worker(tmp_path, concurrency=8) as child:
                child.expect("ready")

                async def decided() -> bool:
                    infos = [await runner.get_run(each) for each in (poison, *others)]
                    return child.process.poll() is not None or all(info.ended_at is not None for info in infos)

                await becomes(decided, "the worker to die or to get through")
                if child.process.poll() is None:
                    child.process.terminate()
                    assert await child.aended() == 0
                    break
                deaths += 1
        ended = [(await runner.get_run(each)).status for each in (poison, *others)]
        assert ended == [RunStatus.DEAD] + [RunStatus.SUCCEEDED] * 7
        assert [step for _, step in lines(effects)].count("s2") == deaths == 3


@pytest.mark.parametrize("door", ["execute", "open_run"])
async def test_what_is_restarted_by_hand_never_goes_to_the_dead_letters(door: str, tmp_path: Path) -> None:
    db, effects, cure = tmp_path / "all.db", tmp_path / "effects", tmp_path / "cure"
    if door == "execute":
        run = {"agent": "poison", "run_id": RUN, "input_data": {"params": {"effects": str(effects), "cure": str(cure)}}}

        def life() -> Child:
            return worker(tmp_path, execute=run)
    else:

        def life() -> Child:
            return Child("suicide", db, RUN, effects, cure)

    for _ in range(5):
        with life() as child:
            child.expect("ready")
            assert child.ended() == 3
    cure.touch()
    with life() as child:
        child.expect("ready")
        child.expect("succeeded")
    ran = [words[-1] for words in lines(effects)]
    assert (ran.count("s0"), ran.count("s1"), ran.count("s2")) == (1, 1, 6)
    conn = image(db)
    assert recorded(conn, RUN) == {"s0", "s1", "s2"}
    conn.close()
