"""A run with a graph of LangGraph, killed at each model call and tool call, repeats no recorded call."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.framework_kills import WAYS, check_kills

pytest.importorskip("langgraph")

PROGRAM = "tests.integrations.langgraph_program"


@WAYS
def test_no_recorded_call_is_repeated(tmp_path: Path, both_ways: bool) -> None:
    calls = check_kills(PROGRAM, "{folder}/runs.db", tmp_path, both_ways=both_ways)
    assert calls == ["model 1", "price tea", "price milk", "model 2", "order tea", "model 3"]
