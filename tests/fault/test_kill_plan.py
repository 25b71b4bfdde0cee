"""SIGKILL at random moments of a plan: the same result, and no step that was completed is carried out again.

The long form, 100 kills: pytest tests/fault/test_kill_plan.py -m slow -o log_cli=true --log-cli-level=INFO
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fault.jobs.graph import AT_ONCE
from tests.fault.jobs.planned import NEEDS
from tests.fault.test_kill import Ordeal, ordeals
from tests.support.processes import lines


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
        # Of one life, no more than those in flight are lost: which these are differs from life to life.
        assert len(set(names) - kept) <= AT_ONCE, "more than the steps in flight were lost"
        self.redone += sum(name in self.keys for name in names)
        for name, key in ran:
            assert self.keys.setdefault(name, key) == key, "another idempotency key"


def test_a_plan_killed_at_random_moments_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    ordeals("planned", tmp_path, 6, at_once=3, ordeal=PlanOrdeal)


class TodoOrdeal(Ordeal):
    job = "todos"
    hit = False
    drag = 2

    def check_effects(self, kept: set[str]) -> None:
        """The to-dos themselves are the effects: `go` compares what is left of them."""


def test_every_to_do_of_a_killed_plan_is_added_and_deleted_once(tmp_path: Path) -> None:
    ordeals("todos", tmp_path, 6, at_once=3, ordeal=TodoOrdeal)


@pytest.mark.slow
def test_100_kills(tmp_path: Path) -> None:
    ordeals("planned", tmp_path, 100, at_once=3, ordeal=PlanOrdeal)


@pytest.mark.slow
def test_100_kills_among_to_dos(tmp_path: Path) -> None:
    ordeals("todos", tmp_path, 100, at_once=3, ordeal=TodoOrdeal)
