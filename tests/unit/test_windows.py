"""Amounts of the last seconds in bounded space."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from agent_runtime_core.queue.windows import CELLS, Window


def admitted(
    rng: random.Random, window: Window, limit: float, amounts: Callable[[], float], until: float, t: float = 1.7e9
) -> list[tuple[float, float]]:
    """Add amounts whenever there is room, reading the window anew each time; return (time, amount) of each."""
    end, added, text = t + until, list[tuple[float, float]](), None
    while t < end:
        window = Window.read(text, window.per)
        amount = amounts()
        free = window.free_at(amount, limit, t)
        if free <= t:
            assert free == t
            added.append((window.add(amount, t), amount))
            t += rng.choice((0.0, 0.0, window.per * rng.random() / limit))
        else:
            assert free > t
            assert Window.read(text, window.per).free_at(amount, limit, free) == free, "there is room at that time"
            t = free if rng.random() < 0.7 else t + (free - t) * rng.random()
        text = window.text()
        assert len(window.cells) <= CELLS + 2
    return added


def most(added: list[tuple[float, float]], per: float) -> float:
    """Return the greatest sum of the amounts in any sliding period."""
    greatest, first, total = 0.0, 0, 0.0
    for t, amount in added:
        total += amount
        while t - added[first][0] >= per:
            total -= added[first][1]
            first += 1
        greatest = max(greatest, total)
    return greatest


@pytest.mark.parametrize("seed", range(20))
def test_no_sliding_period_exceeds_the_limit_and_nearly_all_of_it_is_used(seed: int) -> None:
    rng = random.Random(seed)
    per = rng.choice((0.1, 1.0, 1 / 3, 60.0, 86400.0))
    limit = rng.choice((1, 2, 7, 50, 200))
    added = admitted(rng, Window(per), limit, lambda: 1, 20 * per)
    assert most(added, per) == limit
    assert len(added) >= 0.93 * 20 * limit


@pytest.mark.parametrize("seed", range(10))
def test_amounts_that_are_no_counts(seed: int) -> None:
    rng = random.Random(seed)
    added = admitted(rng, Window(60.0), 1000.0, lambda: rng.choice((0, 1, 250, rng.randrange(1, 400))), 1200.0)
    assert 0.5 * 1000 < most(added, 60.0) <= 1000.0


def test_an_amount_above_the_limit_is_never_free() -> None:
    assert Window(1.0).free_at(3, 2, 5.0) == math.inf


def test_the_total_is_of_the_last_period() -> None:
    window = Window(10.0)
    window.add(2, 100.0)
    window.add(3, 104.0)
    assert [window.total(t) for t in (104.0, 109.9, 110.0, 113.9, 114.0)] == [5, 5, 3, 3, 0]


def test_a_clock_that_goes_back_a_little_admits_nothing_more() -> None:
    window = Window(1.0)
    assert window.add(1, 100.0) == 100.0
    assert window.add(1, 99.5) == 100.0, "the time of the last amount, so that times are in order"
    assert window.free_at(1, 2, 99.5) == 101.0
    assert window.free_at(1, 3, 99.5) == 99.5


def test_after_a_clock_that_goes_back_far_amounts_keep_their_ages() -> None:
    window = Window(1.0)
    window.add(1, 5000.0)
    window.add(1, 5000.5)
    assert window.free_at(1, 2, 1000.0) == pytest.approx(1000.5), "not 4001 seconds later"
    assert window.free_at(2, 2, 1000.0) == pytest.approx(1001.0)
    assert window.add(0, 1000.0) == 1000.0
