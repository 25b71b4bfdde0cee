"""The example of a graph of LangGraph, killed while it asks, and started again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("langgraph")

EXAMPLE = Path(__file__).parents[2] / "examples" / "langgraph_agent.py"
QUESTION = "Order for 3? [y/N] "


def command(tmp_path: Path, *options: str) -> list[str]:
    return [sys.executable, "-u", str(EXAMPLE), "--db", str(tmp_path / "example.db"), *options]


def test_it_resumes_after_a_kill(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path), stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        lines = [first.stdout.readline() for _ in range(2)]
        assert first.stdout.read(len(QUESTION)) == QUESTION
        first.kill()
    assert sorted(lines) == ["  look_up('apples')\n", "  look_up('pears')\n"]
    again = subprocess.run(command(tmp_path, "--yes"), capture_output=True, text=True, timeout=120, check=True)
    assert again.stdout == "  order(total=3)\nordered for 3\n"
