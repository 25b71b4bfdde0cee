"""The example of a crew of CrewAI, killed in the middle and started again.

CrewAI and other packages of the tests need different releases of the same packages: `CREWAI_PYTHON` names the Python of
an environment with CrewAI.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("CREWAI_PYTHON") or (sys.executable if importlib.util.find_spec("crewai") else "")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "crewai_crew.py"
CALLS = [
    "model call with 0 results",
    "  price('apples')",
    "model call with 1 results",
    "  price('pears')",
    "model call with 2 results",
]
ANSWER = ["Together they cost 3.", "(3 model calls)"]

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs CrewAI, here or in the environment of CREWAI_PYTHON"),
    pytest.mark.slow,
]


def command(tmp_path: Path, *options: str) -> list[str]:
    return [PYTHON, "-u", str(EXAMPLE), "--db", str(tmp_path / "crew.db"), *options]


def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
    return kept | {"PYTHONPATH": str(ROOT / "src"), "HOME": str(tmp_path), "OTEL_SDK_DISABLED": "true"}


def finished(tmp_path: Path, *options: str) -> list[str]:
    done = subprocess.run(
        command(tmp_path, *options), capture_output=True, text=True, env=environment(tmp_path), timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("kill_at", [2, 3])
def test_it_resumes_after_a_kill(tmp_path: Path, kill_at: int) -> None:
    with subprocess.Popen(
        command(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment(tmp_path)
    ) as first:
        assert first.stdout is not None
        assert [first.stdout.readline().rstrip("\n") for _ in range(kill_at)] == CALLS[:kill_at]
        first.kill()
        made = CALLS[:kill_at] + first.stdout.read().splitlines()  # it may have gone on until the signal arrived
    again = finished(tmp_path)
    assert again[-2:] == ANSWER
    # The call in flight at the kill, if there was one, is made again; all others are made once.
    assert again[:-2] in (CALLS[len(made) - 1 :], CALLS[len(made) :])
    assert finished(tmp_path) == ANSWER


def test_a_limit_of_the_run_stops_the_crew(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, "--max-turns", "1"),
        capture_output=True, text=True, env=environment(tmp_path), timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout.splitlines() == CALLS[:2]
    assert "LimitExceeded" in done.stderr
