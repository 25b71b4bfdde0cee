"""A process that ends with work in flight says nothing of it, does not hang, and its run goes on at once elsewhere."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, RunResult, open_run
from tests.support.processes import PATIENCE, ROOT, image

RUN = str(UUID(int=5))

starts_threads = pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="Python 3.12 starts no thread after the main thread has ended"
)


class Ending(AgentRuntime):
    key = "endless"

    async def run(self, ctx: Any) -> RunResult:
        return RunResult(final_output={"first": await ctx.step("s", lambda: 2, key="0")})


def ended(how: str, db: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-m", "tests.fault.jobs.exits", how, str(db), RUN],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "code", "said", "status"),
    [
        ("left", 0, "", "pending"),
        ("sys.exit", 3, "", "pending"),
        ("synchronous", 0, "", "running"),
        ("stream", 0, "first run.started\n", "running"),
        pytest.param("thread", 0, "closed\n", "succeeded", marks=starts_threads),
        ("abandoned", 0, "closed\n", "running"),
        pytest.param("executing", 0, "succeeded\nclosed\n", "succeeded", marks=starts_threads),
        pytest.param("atexit", 0, "closed\n", "pending", marks=starts_threads),
        ("atexit close", 0, "closed\n", "pending"),
    ],
)
async def test_a_process_ends_with_work_in_flight(tmp_path: Path, how: str, code: int, said: str, status: str) -> None:
    db = tmp_path / "jobs.db"
    done = ended(how, db, "-W", "error", *([] if how == "abandoned" else ["-X", "dev"]))
    assert (done.returncode, done.stdout, done.stderr) == (code, said, "")
    conn = image(db)
    rows = conn.execute("SELECT status, crashes, failures FROM arc_runs WHERE run_id = ?", (RUN,)).fetchall()
    assert rows == [(status, 0, 0)]
    conn.close()
    if status != "succeeded":
        runner = AgentRunner.open(db)
        async with asyncio.timeout(PATIENCE):  # half of what a lease has
            assert (await runner.execute(Ending(), RUN, {})).status == "succeeded"
        await runner.close()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("plain", "within 0.2 s of being cancelled: abandoned, it may still have effects"),
        ("plain worker", "when it was cancelled; released to the queue"),
    ],
)
async def test_a_process_ends_though_a_plain_run_does_not_and_the_run_resumes_elsewhere(
    how: str, said: str, tmp_path: Path
) -> None:
    db = tmp_path / "jobs.db"
    done = ended(how, db, "-W", "error", "-X", "dev")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith(f"run {RUN} of agent 'endless' did not stop {said}. It is in Task-")
    assert done.stderr.endswith(" in EndlessPlain.run\n"), "the line where the thread is"
    async with AgentRunner.open(db) as runner:
        assert (await runner.execute(Ending(), RUN, {})).final_output == {"first": 1}, "its result was saved"


async def test_a_generator_with_an_open_run_that_is_not_used_up_releases_the_run(tmp_path: Path) -> None:
    db = tmp_path / "jobs.db"
    done = ended("generator", db)
    assert (done.returncode, done.stdout, done.stderr) == (0, "number 0\n", "")
    async with open_run(db, RUN) as ctx:
        assert await ctx.step("s", lambda: 7, key="0") == 0, "its result was saved"


def test_a_finalizer_that_calls_the_portal_while_the_interpreter_shuts_down_gets_an_error(tmp_path: Path) -> None:
    done = ended("__del__ call", tmp_path / "jobs.db")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines()[-1] == (
        "agent_runtime_core.errors.PortalMisuse: portal.call(AgentRunner.close) must be called before the interpreter "
        "shuts down. Close runs and runners in a with block, or in a function for atexit.register"
    )


def test_a_finalizer_that_closes_a_runner_in_a_loop_of_its_own_does_not_wait(tmp_path: Path) -> None:
    done = ended("__del__ asyncio", tmp_path / "jobs.db")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
