"""The harness that kills programs accepts recorded calls, and refuses calls that are made twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.framework_kills import check_kills

STORE = "{folder}/runs.db"


def test_recorded_calls_are_not_repeated(tmp_path: Path) -> None:
    assert check_kills("tests.integrations.plain_program", STORE, tmp_path) == ["call 0", "call 1", "call 2"]


def test_calls_that_are_no_steps_are_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="killed at 2"):
        check_kills("tests.integrations.forgetful_program", STORE, tmp_path)
