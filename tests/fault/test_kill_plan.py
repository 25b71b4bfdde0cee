"""SIGKILL at random moments of a plan: the same result, and no step that was completed is carried out again.

The long form, 100 kills: pytest tests/fault/test_kill_plan.py -m slow -o log_cli=true --log-cli-level=INFO
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fault.children import lines
from tests.fault.jobs.graph import AT_ONCE
from tests.fault.jobs.planned import NEEDS
from tests.fault.test_kill import Ordeal, ordeals


class PlanOrdeal(Ordeal):
    job = "planned"

    def go(self) -> Any:
        """What each step came to; which try it was depends on the kills."""
        steps = super().go()
        return [{name: value for name, value in step.items() if name != "attempt"} for step in steps]

    def check_effects(self, kept: set[str]) -> None:
        ran = lines(self.effects)[self.seen :]
        self.seen += len(ran)
        names = [name for name, _ in ran]
        assert not self.kept & set(names), "a completed step was carried out again"
        assert len(names) == len(set(names)), "a step was carried out twice in one life"
        for name in names:
            assert kept.issuperset(NEEDS[name]), f"{name} began before what it needs was durable"
        again = [name for name in names if name in self.keys]
        assert len(again) <= AT_ONCE, "more than the steps in flight were carried out again"
        self.redone += len(again)
        for name, key in ran:
            assert self.keys.setdefault(name, key) == key, "another idempotency key"


def test_a_plan_killed_at_random_moments_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    ordeals("planned", tmp_path, 30, at_once=3, ordeal=PlanOrdeal)


@pytest.mark.slow
def test_100_kills(tmp_path: Path) -> None:
    ordeals("planned", tmp_path, 100, at_once=3, ordeal=PlanOrdeal)
