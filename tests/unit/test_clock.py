"""The time that leases are counted in."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextvars import ContextVar
from functools import partial

import pytest

from agent_runtime_core._core.clock import Clock, human_time


@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no clock that counts while it sleeps")
def test_the_time_of_leases_goes_on_while_the_machine_sleeps() -> None:
    assert isinstance(Clock.boot, partial)
    assert (Clock.boot.func, Clock.boot.args) == (time.clock_gettime, (time.CLOCK_BOOTTIME,))
    assert abs(time.clock_gettime(time.CLOCK_BOOTTIME) - Clock().boot()) < 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is nothing to fork with")
def test_a_forked_child_draws_other_numbers_than_its_parent() -> None:
    code = """
import os
from agent_runtime_core._core.clock import SYSTEM

pid = os.fork()
os.write(1, b"%d\\n" % SYSTEM.random.getrandbits(80))
if pid:
    os.waitpid(pid, 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert len(set(done.stdout.split())) == 2


async def test_a_timer_calls_in_an_empty_context_unless_it_is_cancelled() -> None:
    name: ContextVar[str] = ContextVar("name", default="nobody")
    name.set("the caller")
    called: list[str] = []
    done = asyncio.Event()
    clock = Clock()
    clock.call_later(0.001, lambda: called.append("cancelled")).cancel()
    clock.call_later(0.002, lambda: called.append(name.get()))
    clock.call_later(0.003, done.set)
    async with asyncio.timeout(10):
        await done.wait()
    assert called == ["nobody"]


def test_a_time_for_people_is_in_utc_to_the_minute() -> None:
    assert human_time(1_795_635_680.151) == "2026-11-25 19:41 UTC"
    assert human_time(1e13) == "10000000000000 s since 1970"
