"""Workers that are killed one after the other lose no run, and leave no log behind that grows.

For an hour, with what a worker takes of descriptors and memory: python -m tests.support.soak --seconds 3600
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.support import soak
from tests.support.soak import ENOUGH, Soak, slope

log = logging.getLogger("fault")


async def soaked(where: Path, every: float, seconds: float, kills: int) -> None:
    soak = Soak(where, every)
    await soak.go(seconds, kills)
    log.info("%s", soak)
    assert soak.wrong() == []


async def test_workers_that_are_killed_lose_no_run(tmp_path: Path) -> None:
    await soaked(tmp_path, 0.0, 0.0, 2)


@pytest.mark.slow
async def test_a_minute_of_workers_that_are_killed(tmp_path: Path) -> None:
    await soaked(tmp_path, 2.0, 60.0, 20)


def test_what_grows_is_told_by_its_slope(tmp_path: Path) -> None:
    hour = [(float(at), 10) for at in range(0, 3600, 10)]
    assert slope(hour) == 0
    assert slope([(at, 1000 + at / 360) for at, _ in hour]) == pytest.approx(0.01, rel=0.01)
    done = Soak(tmp_path, 10.0)
    done.seen = [(at, 10 + int(at // 600), 500) for at, _ in hour]
    [said] = done.wrong()
    assert said.startswith("its descriptors grow by ")
    done.seen = [each for each in done.seen if each[0] < ENOUGH / 2]
    assert done.wrong() == []
    done.log = soak.MOST_LOG + 1
    assert done.wrong() == [f"the log had {done.log} bytes"]
