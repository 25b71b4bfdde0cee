"""One timer of a loop for many who wait."""

from __future__ import annotations

import asyncio
from functools import partial

from agent_runtime_core._alarms import Alarms, _alarms, alarms


async def test_each_is_woken_once_and_not_before_its_time() -> None:
    alarm, loop = Alarms(), asyncio.get_running_loop()
    woken: dict[str, float] = {}
    all_woken = asyncio.Event()

    def wake(name: str) -> None:
        assert name not in woken
        woken[name] = loop.time()
        if len(woken) == 3:
            all_woken.set()

    since = loop.time()
    for name, seconds in (("late", 0.03), ("early", 0.001), ("between", 0.02)):
        alarm.set(name, seconds, partial(wake, name))
    async with asyncio.timeout(10):
        await all_woken.wait()
    assert [*woken] == ["early", "between", "late"]
    for name, seconds in (("late", 0.03), ("early", 0.001), ("between", 0.02)):
        assert woken[name] - since > seconds - 0.001
    assert (alarm._set, alarm._timer) == ({}, None)


async def test_who_dropped_it_or_set_it_anew_is_not_woken() -> None:
    alarm = Alarms()
    woken: list[str] = []
    last = asyncio.Event()
    alarm.set("gone", 0.001, lambda: woken.append("gone"))
    alarm.set("moved", 0.001, lambda: woken.append("too early"))
    alarm.drop("gone")
    alarm.drop("never set")
    alarm.set("moved", 0.02, lambda: woken.append("moved"))
    alarm.set("last", 0.03, last.set)
    async with asyncio.timeout(10):
        await last.wait()
    assert woken == ["moved"]


def fails() -> None:
    raise ZeroDivisionError


async def test_one_that_fails_keeps_none_from_being_woken() -> None:
    alarm, woken, heard = Alarms(), asyncio.Event(), []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: heard.append(type(context["exception"])))
    alarm.set("fails", 0.001, fails)
    alarm.set("fine", 0.001, woken.set)
    async with asyncio.timeout(10):
        await woken.wait()
    assert heard == [ZeroDivisionError]


async def test_who_sets_it_while_others_are_woken_is_woken_too() -> None:
    alarm, woken = Alarms(), asyncio.Event()
    alarm.set("first", 0.001, lambda: alarm.set("second", 0.001, woken.set))
    async with asyncio.timeout(10):
        await woken.wait()


def test_loops_that_are_closed_are_forgotten() -> None:
    async def mine() -> Alarms:
        found = alarms(asyncio.get_running_loop())
        assert alarms(asyncio.get_running_loop()) is found
        return found

    first = asyncio.run(mine())
    assert asyncio.run(mine()) is not first
    assert first not in _alarms.values()
