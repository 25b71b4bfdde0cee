"""SIGKILL at random moments: no recorded step runs again, none is lost, and the result is the uninterrupted run's.

The long forms, 300 kills each: pytest tests/fault/test_kill.py -m slow -o log_cli=true --log-cli-level=INFO
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import AgentRunner
from tests.fault.jobs.twenty import STEPS
from tests.support.processes import PATIENCE, Child, image, lines, recorded
from tests.support.redis_servers import RedisServer

log = logging.getLogger("fault")

NAMES = [f"s{i}" for i in range(STEPS)]


class Ordeal:
    """One job, killed at random moments up to `kills` times and then left to finish."""

    job = "twenty"
    #: Kinds of jobs that come slowly to their first record: with longer lives more of the kills hit one.
    slow = ("transactions", "turned")
    #: Whether so many kills hit it behind a record that one has to.
    hit = True
    #: How many times as long its steps take, so that one is not through before it was killed often.
    drag = 1

    def __init__(self, kind: str, where: Path, number: int, kills: int, life: float, pause: float) -> None:
        self.kind, self.kills, self.pause = kind, kills, pause * self.drag
        self.life = life * (3 if kind in self.slow else 1)
        self.random = Random(f"{kind} {number}")
        self.run_id = str(UUID(int=number + 1))
        self.db, self.effects = where / f"{number}.db", where / f"{number}.effects"
        self.killed = self.inside = self.redone = self.seen = 0
        self.kept: set[str] = set()
        self.keys: dict[str, str] = {}

    def go(self) -> Any:
        """The result, once it is done."""
        while True:
            life = self.random.uniform(0, self.life) if self.killed < self.kills else None
            with Child(self.job, self.kind, self.db, self.run_id, self.effects, self.pause, life=life) as child:
                child.expect("ready")
                said = child.poll_line(PATIENCE)
                ended = child.ended()
                assert ended == 0 or (life is not None and ended == -signal.SIGKILL)
                self.killed += ended == -signal.SIGKILL
            before = self.kept
            self.check()
            self.inside += ended == -signal.SIGKILL and self.kept > before
            if said is not None:
                assert said.startswith("done "), said
                return json.loads(said[5:])

    def check(self) -> None:
        conn = image(self.db) if self.db.exists() and self.db.stat().st_size else None
        kept = recorded(conn, self.run_id) if conn is not None else set()
        assert self.kept <= kept, "a record was lost"
        if self.kind != "transactions":
            self.check_effects(kept)
        elif conn is not None:
            self.check_rows(conn, kept)
        if conn is not None:
            conn.close()
        self.kept = kept

    def check_effects(self, kept: set[str]) -> None:
        ran = lines(self.effects)[self.seen :]
        self.seen += len(ran)
        names = [name for name, _ in ran]
        assert not self.kept & set(names), "a recorded step ran again"
        assert names == NAMES[len(self.kept) : len(self.kept) + len(names)]
        # A step is begun only when the one before it is durable.
        assert set(names[:-1]) <= kept
        again = [name for name in names if name in self.keys]
        assert len(again) <= 1, "more than the step in flight ran again"
        self.redone += len(again)
        for name, key in ran:
            assert self.keys.setdefault(name, key) == key, "another idempotency key"

    def check_rows(self, conn: Any, kept: set[str]) -> None:
        there = conn.execute("SELECT 1 FROM sqlite_master WHERE name = 'effects'").fetchone()
        found = conn.execute("SELECT i FROM effects ORDER BY rowid").fetchall() if there else []
        assert found == [(i,) for i in range(len(kept))]
        assert kept == {f"t{i}" for i in range(len(kept))}


MOST_JOBS = 30


def ordeals(kind: str, where: Path, kills: int, *, at_once: int, ordeal: type[Ordeal] = Ordeal) -> None:
    """Start jobs until `kills` kills have happened; most kills, up to 20, hit one of the jobs."""
    most = min(20, kills * 2 // 3)
    plain, often = ordeal(kind, where, 0, 0, 0.0, 0.0), ordeal(kind, where, 1, most, 0.03, 0.012)
    jobs, killed = [plain, often], often.kills
    with ThreadPoolExecutor(at_once) as pool:
        expected, result_of_often = pool.submit(plain.go), pool.submit(often.go)
        # A machine under load may have killed every job before it began: then there are more.
        while killed < kills or (ordeal.hit and len(jobs) < MOST_JOBS and not _any_hit(jobs)):
            left = kills - killed if killed < kills else 6
            some = [
                ordeal(kind, where, len(jobs) + k, min(6, left - 6 * k), 0.1, 0.004)
                for k in range(at_once)
                if left - 6 * k > 0
            ]
            jobs += some
            for each, result in zip(some, pool.map(ordeal.go, some), strict=True):
                assert result == expected.result(), f"{each.run_id}, killed {each.killed} times"
            killed += sum(each.killed for each in some)
        assert result_of_often.result() == expected.result()
    assert (plain.killed, often.killed) == (0, most)
    log.info(
        "%s: %d kills over %d jobs, %d behind a new record, %d in flight ran again, 0 recorded ran again, 0 lost",
        kind, killed, len(jobs), sum(each.inside for each in jobs), sum(each.redone for each in jobs),
    )  # fmt: skip
    assert killed >= kills
    assert not ordeal.hit or _any_hit(jobs), "no kill in the midst of it: this proves nothing"


def _any_hit(jobs: list[Ordeal]) -> bool:
    return any(each.inside or each.redone for each in jobs)


@pytest.mark.parametrize("kind", ["steps", "transactions"])
def test_a_job_killed_at_random_moments_ends_as_if_nothing_had_happened(kind: str, tmp_path: Path) -> None:
    ordeals(kind, tmp_path, 9, at_once=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["steps", "transactions"])
def test_300_kills(kind: str, tmp_path: Path) -> None:
    ordeals(kind, tmp_path, 300, at_once=3)


class OnServer(Ordeal):
    """The same on a server, which keeps a dead process's run until its lease is over."""

    url = ""

    def __init__(self, kind: str, where: Path, number: int, *how: Any) -> None:
        super().__init__(kind, where, number, *how)
        self.db = f"{self.url}-{number}"  # type: ignore[assignment]

    def check(self) -> None:
        kept = asyncio.run(self.recorded())
        assert self.kept <= kept, "a record was lost"
        self.check_effects(kept)
        self.kept = kept

    async def recorded(self) -> set[str]:
        async with AgentRunner.open(self.db) as runner:
            return {each.name for each in await runner.state_store.records(self.run_id) if each.kind == "done"} & set(
                NAMES
            )


def on_server(where: Path, kills: int, at_once: int) -> None:
    with RedisServer(appendonly="yes") as server:
        ordeal = type("Here", (OnServer,), {"url": f"{server.url}?prefix=kill"})
        ordeals("steps", where, kills, at_once=at_once, ordeal=ordeal)


@pytest.mark.redis
def test_a_job_on_redis_killed_at_random_moments_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    on_server(tmp_path, 9, 3)


@pytest.mark.slow
@pytest.mark.redis
def test_300_kills_on_redis(tmp_path: Path) -> None:
    on_server(tmp_path, 300, 6)
