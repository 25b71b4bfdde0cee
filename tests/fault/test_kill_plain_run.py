"""SIGKILL at random moments of an agent whose `run` is a plain function: no recorded step runs again.

The long form, 100 kills: pytest tests/fault/test_kill_plain_run.py -m slow -o log_cli=true --log-cli-level=INFO
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.test_kill import Ordeal, ordeals


class PlainOrdeal(Ordeal):
    job = "plain"
    slow = ("plain", "")
    drag = 2


def test_a_plain_run_killed_at_random_moments_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    ordeals("plain", tmp_path, 6, at_once=2, ordeal=PlainOrdeal)


@pytest.mark.slow
def test_100_kills(tmp_path: Path) -> None:
    ordeals("plain", tmp_path, 100, at_once=2, ordeal=PlainOrdeal)
