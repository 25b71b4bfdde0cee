"""SIGKILL at each call of an agent of OpenAI Agents: the run resumes, and repeats only the call that was killed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("agents")

from tests.support.framework_kills import WAYS, Program, check_kills, logged


@WAYS
@pytest.mark.parametrize(
    ("program", "calls"),
    [("openai_agents_program", 8), ("openai_agents_streamed_program", 5)],
    ids=["plain", "streamed"],
)
def test_a_kill_at_each_call(tmp_path: Path, program: str, calls: int, both_ways: bool) -> None:
    made = check_kills(f"tests.integrations.{program}", "{folder}/runs.db", tmp_path, both_ways=both_ways)
    assert len(made) == calls


def test_a_guarded_tool_call_that_was_killed_is_not_repeated(tmp_path: Path) -> None:
    store, log = f"{tmp_path}/guarded.db", tmp_path / "calls.log"
    with Program("tests.integrations.openai_agents_program") as program:
        assert program.run(store, log, "2") is None
        assert logged(log) == ["first 0", "add 1 2"]
        assert program.run(store, log) == "StepInDoubt"
        assert logged(log) == ["first 0", "add 1 2"]
