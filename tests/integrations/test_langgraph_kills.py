"""A run with a graph of LangGraph, killed at each model call and tool call, repeats no recorded call."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.framework_kills import check_kills

pytest.importorskip("langgraph")

PROGRAM = "tests.integrations.langgraph_program"


def test_no_recorded_call_is_repeated(tmp_path: Path) -> None:
    calls = check_kills(PROGRAM, "{folder}/runs.db", tmp_path)
    assert calls == ["model 1", "price tea", "price milk", "model 2", "order tea", "model 3"]
