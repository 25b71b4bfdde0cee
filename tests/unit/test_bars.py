"""The tests' own bars on time, and their turns where several processes run them."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bars import ROUNDS, TRIES, times_another, within
from tests.room import Room


def test_a_bar_is_held_in_the_best_of_several_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tests.bars.time.perf_counter", lambda: now[0])

    def turns(*seconds: float) -> int:
        for turn, _ in enumerate(within(1.0, tries=3), 1):
            now[0] += seconds[turn - 1]
        return turn

    assert turns(0.5) == 1
    assert turns(2.0, 1.0, 0.5) == 3
    with pytest.raises(AssertionError, match="not once within 1 s: 2, 1, 1 s"):
        turns(2.0, 1.0, 1.0)


def test_a_cost_is_held_to_another_by_the_least_of_many_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("tests.bars.time.process_time", lambda: now[0])

    def costs(*seconds: float) -> Callable[[], None]:
        """Something whose calls take these times, one after the other and the last for ever."""
        left = list(seconds)

        def call() -> None:
            now[0] += left.pop(0) if len(left) > 1 else left[0]

        return call

    times_another(costs(9.0, 1.5), costs(1.0), 2, times=1)
    times_another(costs(*[3.0] * ROUNDS, 1.5), costs(1.0), 2, times=1)
    with pytest.raises(AssertionError, match=f"not once below 2 times: {', '.join(['2'] * TRIES)}"):
        times_another(costs(2.0), costs(1.0), 2, times=3)


def _taken(door: Path) -> bool:
    fd = os.open(door, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def test_many_are_in_at_once_or_one_alone_whom_nobody_overtakes(tmp_path: Path) -> None:
    one, two, three = (Room(tmp_path) for _ in range(3))
    order: list[str] = []

    def enter(room: Room, who: str) -> None:
        with room.entered(alone=who == "alone"):
            order.append(who)

    with one.entered(alone=False), two.entered(alone=False):
        enter(three, "beside them")
    assert order == ["beside them"]
    with one.entered(alone=False):
        alone = threading.Thread(target=enter, args=(two, "alone"))
        alone.start()
        while not _taken(tmp_path / "door"):
            time.sleep(0.001)
        after = threading.Thread(target=enter, args=(three, "after"))
        after.start()
        assert order == ["beside them"]
    alone.join()
    after.join()
    assert order == ["beside them", "alone", "after"]
