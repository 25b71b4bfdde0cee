"""A fork after a file was opened: the child is told to open it after the fork, and the parent notices nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from uuid import UUID

import pytest

from agent_runtime_core import RunBusy, open_run
from tests.support.processes import PATIENCE, Child, image, recorded

RUN = str(UUID(int=3))


async def test_a_forked_child_cannot_use_what_was_opened_before_and_frees_nothing(tmp_path: Path) -> None:
    db = tmp_path / "jobs.db"
    with Child("forks", db, RUN) as child:
        said = {}
        for _ in range(7):
            name, _, answer = (await child.aline()).partition(": ")
            said[name] = answer
        # SQLite would take no locks in it for a file that was open here, so it does not get it at all.
        assert said == {
            "read": "StorageClosed", "submit": "StorageClosed", "step": "StorageClosed", "emit": "StorageClosed",
            "close": "done", "again": "StorageClosed", "another": "7",
        }  # fmt: skip
        assert await child.aline() == "child ended: 0"
        assert await child.aline() == "parent went on"
        with pytest.raises(RunBusy):
            async with open_run(db, RUN):
                pass
        child.tell("end")
        assert await child.aended() == 0
    conn = image(db)
    assert recorded(conn, RUN) == {"first", "second"}
    assert conn.execute("SELECT status FROM arc_runs WHERE run_id = ?", (RUN,)).fetchone() == ("succeeded",)
    conn.close()


@pytest.mark.redis
async def test_a_forked_child_cannot_use_what_was_opened_on_redis(redis_url: str) -> None:
    with Child("forks", redis_url, RUN) as child:
        said = [await child.aline() for _ in range(6)]
        assert sorted(said) == sorted(
            [*(f"{name}: StorageClosed" for name in ("read", "submit", "step", "emit")), "close: done", "again: 7"]
        )
        assert await child.aline() == "child ended: 0"
        assert await child.aline() == "parent went on"
        child.tell("end")
        assert await child.aended() == 0
    async with open_run(redis_url, RUN) as ctx:
        assert [await ctx.step("first", lambda: 9), await ctx.step("second", lambda: 9)] == [1, 2]


@pytest.mark.parametrize("how", ["closed", "opening"])
async def test_a_file_that_was_closed_before_the_fork_can_be_opened_in_the_child(tmp_path: Path, how: str) -> None:
    with Child("forks", tmp_path / "jobs.db", RUN, how) as child:
        assert await child.aline() == "again: 7"
        assert await child.aended() == 0


@pytest.mark.parametrize("how", ["half-open", "half-closed"])
async def test_a_file_that_another_thread_opens_or_closes_at_the_fork_is_refused_in_the_child(
    tmp_path: Path, how: str
) -> None:
    # The parent's connection would take this child's log away when it is closed.
    with Child("forks", tmp_path / "jobs.db", RUN, how) as child:
        assert await child.aline() == "again: StorageClosed"
        assert await child.aended() == 0


async def test_a_child_that_outlives_its_parent_keeps_neither_its_run_nor_the_file(tmp_path: Path) -> None:
    db = tmp_path / "jobs.db"
    with Child("forks", db, RUN, "inside") as child:
        orphan = int(child.expect("forked"))
        try:
            assert await child.aended() == -9
            # Half the time that a lease has to run out.
            async with asyncio.timeout(PATIENCE), open_run(db, RUN) as ctx:
                assert ctx.attempt == 2
                assert await ctx.step("first", lambda: 9) == 1
            os.kill(orphan, 0)  # it is still there
        finally:
            os.kill(orphan, signal.SIGKILL)
