"""The example of an agent of OpenAI Agents, killed in the middle and started again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("agents")

EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_agents_agent.py"


def command(tmp_path: Path, *options: str) -> list[str]:
    return [sys.executable, "-u", str(EXAMPLE), "--db", str(tmp_path / "example.db"), *options]


def test_it_resumes_after_a_kill(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    with subprocess.Popen(
        command(tmp_path), stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, env=environment
    ) as first:
        assert first.stdout is not None
        lines = [first.stdout.readline() for _ in range(4)]
        assert sorted(lines[1:3]) == ["  price('apples')\n", "  price('pears')\n"]
        while "may it call buy" not in lines[-1]:  # the question, which no line ends
            lines.append(first.stdout.read(len("may it call buy")))
        first.kill()
    again = subprocess.run(
        command(tmp_path, "--yes"), capture_output=True, text=True, env=environment, timeout=120, check=True
    )
    assert again.stdout == ("  buy(['apples', 'pears'])\nmodel call with 3 results\nDone: bought apples and pears.\n")
