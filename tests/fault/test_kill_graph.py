"""SIGKILL at random moments of steps that depend on each other: none recorded runs again, none begins too early.

The long form, 100 kills: pytest tests/fault/test_kill_graph.py -m slow -o log_cli=true --log-cli-level=INFO
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.jobs.graph import AT_ONCE, EDGES
from tests.fault.test_kill import Ordeal, ordeals
from tests.support.processes import lines


class GraphOrdeal(Ordeal):
    job = "graph"

    def check_effects(self, kept: set[str]) -> None:
        ran = lines(self.effects)[self.seen :]
        self.seen += len(ran)
        names = [name for name, _ in ran]
        assert not self.kept & set(names), "a recorded step ran again"
        assert len(names) == len(set(names)), "a step ran twice in one life"
        for name in names:
            assert kept.issuperset(EDGES[name]), f"{name} began before what it depends on was durable"
        # Of one life: those lost in several lives may be more, and not the same.
        assert len(set(names) - kept) <= AT_ONCE, "more than the steps in flight were lost"
        self.redone += sum(name in self.keys for name in names)
        for name, key in ran:
            assert self.keys.setdefault(name, key) == key, "another idempotency key"


def test_a_graph_killed_at_random_moments_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    ordeals("graph", tmp_path, 6, at_once=3, ordeal=GraphOrdeal)


@pytest.mark.slow
def test_100_kills(tmp_path: Path) -> None:
    ordeals("graph", tmp_path, 100, at_once=3, ordeal=GraphOrdeal)
