"""The time that leases are counted in."""

from __future__ import annotations

import time

import pytest

from agent_runtime_core._clock import Clock


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no clock that counts while it sleeps")
def test_the_time_of_leases_goes_on_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 42.0}.__getitem__)
    assert Clock().boot() == 42.0
