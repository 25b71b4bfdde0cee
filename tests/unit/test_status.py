"""The ways between the states of a run: every legal and every illegal pair."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from agent_runtime_core._core.event_types import EventType
from agent_runtime_core.errors import IllegalTransition
from agent_runtime_core.status import TERMINAL, TRANSITIONS, RunStatus, StepStatus, check
from tests.support.cases import for_each

FREE = {
    ("pending", "running"),
    ("pending", "cancelled"),
    ("running", "waiting"),
    ("running", "pending"),
    ("running", "succeeded"),
    ("running", "failed"),
    ("running", "cancelled"),
    ("running", "timed_out"),
    ("running", "dead"),
    ("waiting", "pending"),
    ("waiting", "cancelled"),
}
EXPLICIT = {("waiting", "running")} | {
    (old, new) for old in ("failed", "cancelled", "timed_out", "dead") for new in ("pending", "running")
}
PAIRS = list(itertools.product([status.value for status in RunStatus], repeat=2))


@for_each(("old", "new"), PAIRS)
def test_every_pair(old: str, new: str) -> None:
    for reopen in (False, True):
        if (old, new) in FREE or (reopen and (old, new) in EXPLICIT):
            check(old, new, reopen=reopen)
            check(RunStatus(old), RunStatus(new), reopen=reopen)
        else:
            with pytest.raises(IllegalTransition) as caught:
                check(old, new, reopen=reopen)
            assert f"from {old} to {new}" in str(caught.value)


def test_the_message_names_the_way_out() -> None:
    with pytest.raises(IllegalTransition, match="waiting allows pending, cancelled"):
        check("waiting", "succeeded")
    with pytest.raises(IllegalTransition, match="succeeded is final"):
        check("succeeded", "running", reopen=True)
    with pytest.raises(IllegalTransition, match="only by resume, requeue, execute or open_run"):
        check("dead", "pending")


def test_the_table_has_a_row_for_each_status_and_no_free_way_out_of_an_end() -> None:
    assert set(TRANSITIONS) == set(RunStatus)
    assert not any(explicit is False for status in TERMINAL for explicit in TRANSITIONS[status].values())


def test_the_picture_describes_every_way_out_of_a_live_status() -> None:
    picture = (Path(__file__).parents[2] / "docs" / "assets" / "statuses.svg").read_text("utf-8")
    described = re.findall(r"(\w+) to (\w+)", picture.partition("<desc>")[2].partition("</desc>")[0])
    assert sorted(described) == sorted({*FREE, ("waiting", "running")})


def test_values_are_their_names_in_lower_case() -> None:
    assert [status.value for status in RunStatus] == [name.lower() for name in RunStatus.__members__]
    assert [status.value for status in StepStatus] == [name.lower() for name in StepStatus.__members__]
    assert len(StepStatus) == 6
    assert {status.value for status in TERMINAL} == {"succeeded", "failed", "cancelled", "timed_out", "dead"}


def test_event_types_are_their_names_with_a_dot() -> None:
    assert {event.name.replace("_", ".", 1).lower() for event in EventType} == {
        event.value if event is not EventType.RUN_TIMED_OUT else "run.timed_out" for event in EventType
    }
    assert EventType["CHECKPOINT"] is EventType.STATE_CHECKPOINT
    assert EventType.RUN_RESUMED.value == "run.resumed"
    assert len(EventType) == 22
