"""The examples of graphs of LangGraph, killed while they ask or call a tool, and started again."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from agent_runtime_core import AgentRunner

pytest.importorskip("langgraph")

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTION = "Order for 3? [y/N] "


def command(tmp_path: Path, *options: str, name: str = "langgraph_agent.py") -> list[str]:
    return [sys.executable, "-u", str(EXAMPLES / name), "--db", str(tmp_path / "example.db"), *options]


def test_it_resumes_after_a_kill(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path), stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        lines = [first.stdout.readline() for _ in range(2)]
        assert first.stdout.read(len(QUESTION)) == QUESTION
        first.kill()
    assert sorted(lines) == ["  look_up('apples')\n", "  look_up('pears')\n"]
    again = subprocess.run(command(tmp_path, "--yes"), capture_output=True, text=True, timeout=120, check=True)
    assert again.stdout == "  order(total=3)\nordered for 3\n"


async def test_no_recorded_call_of_a_tool_node_is_repeated(tmp_path: Path) -> None:
    """The calls of one answer run at the same time, so the store shows which of them the kill left."""
    with subprocess.Popen(command(tmp_path, name="langgraph_tools.py"), stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        lines = [first.stdout.readline() for _ in range(2)]
        first.kill()
        lines += first.stdout.readlines()
    assert lines[0] == "model call with 0 results\n"
    async with AgentRunner.open(str(tmp_path / "example.db")) as runner:
        events = await runner.event_bus.get_events("tools-1")
    steps = Counter(event.payload["step_name"] for event in events if event.event_type == "step.completed")
    again = subprocess.run(
        command(tmp_path, name="langgraph_tools.py"), capture_output=True, text=True, timeout=120, check=True
    )
    called = Counter(line.strip().partition("(")[0] for line in again.stdout.splitlines()[:-1])
    prices, orders = called["price"], called["order"]
    assert (prices, orders) == (2 - steps["tool:price"], 1 - steps["tool:order"])
    assert called.total() - prices - orders == 3 - steps["model call"]
    assert again.stdout.endswith("I have ordered for 3.\n")
