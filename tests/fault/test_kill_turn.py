"""SIGKILL at random moments of a turn: the same answer, no completed step again, and each event of the trail once.

The long form, 100 kills: pytest tests/fault/test_kill_turn.py -m slow -o log_cli=true --log-cli-level=INFO
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fault.test_kill import Ordeal, ordeals
from tests.fault.test_kill_plan import PlanOrdeal


class TurnOrdeal(PlanOrdeal):
    job = "turned"

    def go(self) -> Any:
        """Status, answer, every step with its result, and how many events of each kind were told."""
        return Ordeal.go(self)


@pytest.mark.sentence("001", "Stateless: all per-turn state lives in Iggy or Memory-Service")
def test_a_turn_killed_at_random_moments_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    ordeals("turned", tmp_path, 6, at_once=3, ordeal=TurnOrdeal)


@pytest.mark.slow
def test_100_kills(tmp_path: Path) -> None:
    ordeals("turned", tmp_path, 100, at_once=3, ordeal=TurnOrdeal)
