"""Agents of Pydantic AI, killed at each model call and tool call, repeat no call that is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.framework_kills import WAYS, check_kills

pytest.importorskip("pydantic_ai")

STORE = "{folder}/runs.db"
CALLS = ["model 1", "price tea", "price milk", "model 2", "order 2 tea", "model 3"]


@WAYS
def test_recorded_calls_of_an_agent_are_not_repeated(tmp_path: Path, both_ways: bool) -> None:
    assert check_kills("tests.integrations.pydantic_ai_program", STORE, tmp_path, both_ways=both_ways) == CALLS


@pytest.mark.slow  # repeats the kind above
def test_recorded_calls_of_run_sync_are_not_repeated(tmp_path: Path) -> None:
    assert check_kills("tests.integrations.pydantic_ai_sync_program", STORE, tmp_path) == CALLS
