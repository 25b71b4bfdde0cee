"""The messages of errors: one shape, the value that was passed, and the fix."""

from __future__ import annotations

import pytest

from tests.support.messages import Triggered, problems_of


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("deadline must be a datetime, got 'x'.", []),
        ("run_id must not be empty, got ''.", ["no fix"]),
        ("run_id must not be empty, got ''. Pass None for a new id.", []),
        ("unknown status 'deadd'. Did you mean 'dead'?", []),
        ("unknown tool 'x'. None exist. Register it first.", []),
        ("unknown status 'deadd'.", ["neither `X must …, got …` nor `unknown X …. Did you mean …?`"]),
        ("the deadline is a point in time", ["neither `X must …, got …` nor `unknown X …. Did you mean …?`"]),
        ("since must be a time, got 1795635680.", ["epoch seconds"]),
        ("n must be a int, got 1.", ["a for an"]),
        ("n must be 'a', 'b', 'c', 'd', 'e' or 'f', got 1.", []),
        ("n must be 'a', 'b', 'c', 'd', 'e', 'f' or 'g', got 1.", ["a list of more than five names"]),
    ],
)
def test_the_check_finds_a_wrong_shape(message: str, wrong: list[str]) -> None:
    assert problems_of(Triggered(lambda: None, message)) == wrong


def test_the_check_finds_a_state_error_without_object_or_fix() -> None:
    message = "run 'c90469da-0000-4000-8000-000000000000' has succeeded"
    assert problems_of(Triggered(lambda: None, message, about="'report-1'", fix="resume")) == [
        "the object \"'report-1'\" is not named",
        "the fix 'resume' is not named",
        "a derived id in place of the name that the user passed",
    ]
