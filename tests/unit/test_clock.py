"""The time that leases are counted in."""

from __future__ import annotations

import time
from functools import partial

import pytest

from agent_runtime_core._clock import Clock


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no clock that counts while it sleeps")
def test_the_time_of_leases_goes_on_while_the_machine_sleeps() -> None:
    assert isinstance(Clock.boot, partial)
    assert (Clock.boot.func, Clock.boot.args) == (time.clock_gettime, (time.CLOCK_BOOTTIME,))
    assert abs(time.clock_gettime(time.CLOCK_BOOTTIME) - Clock().boot()) < 5
