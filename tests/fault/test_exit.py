"""A process that ends with work in flight says nothing of it, does not hang, and its run goes on at once elsewhere."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
from tests.fault.children import PATIENCE, ROOT, image

RUN = str(UUID(int=5))


class Ending(AgentRuntime):
    key = "endless"

    async def run(self, ctx: Any) -> RunResult:
        return RunResult(final_output={"first": await ctx.step("s", lambda: 2, key="0")})


@pytest.mark.parametrize(
    ("how", "code", "said", "status"),
    [
        ("left", 0, "", "pending"),
        ("sys.exit", 3, "", "pending"),
        ("synchronous", 0, "", "running"),
        ("thread", 0, "closed\n", "succeeded"),
        ("abandoned", 0, "closed\n", "running"),
    ],
)
async def test_a_process_ends_with_work_in_flight(tmp_path: Path, how: str, code: int, said: str, status: str) -> None:
    db = tmp_path / "jobs.db"
    strict = ["-X", "dev", "-W", "error"] if how != "abandoned" else ["-W", "error"]
    done = subprocess.run(
        [sys.executable, *strict, "-m", "tests.fault.jobs.exits", how, str(db), RUN],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (code, said, "")
    conn = image(db)
    assert conn.execute("SELECT status, crashes, failures FROM arc_runs").fetchall() == [(status, 0, 0)]
    conn.close()
    if status != "succeeded":
        runner = AgentRunner.open(db)
        async with asyncio.timeout(PATIENCE):  # half of what a lease has
            assert (await runner.execute(Ending(), RUN, {})).status == "succeeded"
        await runner.close()
