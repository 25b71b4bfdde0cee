"""Waiting times between attempts."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.retry import Backoff, fixed, run_backoff

RNG = random.Random(7)


def test_fixed_is_the_same_after_every_failure() -> None:
    assert [fixed(1.5)(attempt, RNG) for attempt in (1, 2, 50)] == [1.5, 1.5, 1.5]


def test_backoff_doubles_up_to_its_maximum() -> None:
    wait = Backoff(base=0.5, maximum=3, jitter="none")
    assert [wait(attempt, RNG) for attempt in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_full_jitter_spreads_over_the_whole_wait() -> None:
    wait = Backoff(base=8, maximum=8)
    waits = sorted(wait(1, RNG) for _ in range(500))
    assert waits[0] < 0.5
    assert waits[-1] > 7.5
    assert 3 < sum(waits) / 500 < 5


def test_jitter_is_drawn_from_the_source_it_is_given() -> None:
    wait = Backoff()
    assert [wait(n, random.Random(3)) for n in (1, 2)] == [wait(n, random.Random(3)) for n in (1, 2)]


@settings(deadline=None)
@given(st.integers(1, 10**9), st.floats(0, 1e300), st.floats(1, 1e300), st.floats(0, 1e300))
def test_a_wait_is_never_negative_nor_past_the_maximum(attempt: int, base: float, factor: float, most: float) -> None:
    assert 0 <= Backoff(base, factor, most)(attempt, RNG) <= most
    assert 0 <= run_backoff(base, attempt, most) <= most


def test_run_backoff_is_a_capped_power() -> None:
    assert [run_backoff(2, attempt, 300) for attempt in (0, 1, 2, 8, 9, 10**9)] == [1, 2, 4, 256, 300, 300]
    assert run_backoff(0, 1, 300) == 0


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, True, "1", None])
def test_what_is_no_number_of_seconds_is_refused(bad: float) -> None:
    with pytest.raises(InvalidArgument, match="delay must be"):
        fixed(bad)
    with pytest.raises(InvalidArgument, match="base must be"):
        Backoff(base=bad)
    with pytest.raises(InvalidArgument, match="maximum must be"):
        Backoff(maximum=bad)
    with pytest.raises(InvalidArgument, match="factor must be"):
        Backoff(factor=bad)
    with pytest.raises(InvalidArgument, match="base must be"):
        run_backoff(bad, 1, 300)
    with pytest.raises(InvalidArgument, match="maximum must be"):
        run_backoff(2, 1, bad)


def test_other_bad_arguments_are_named() -> None:
    with pytest.raises(InvalidArgument, match=r"factor must be .*0\.5"):
        Backoff(factor=0.5)
    with pytest.raises(InvalidArgument, match=r"jitter must be .*some"):
        Backoff(jitter="some")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="attempt must be at least 1, got 0"):
        Backoff()(0, RNG)
    with pytest.raises(InvalidArgument, match="attempt must be at least 0, got -1"):
        run_backoff(2, -1, 300)
