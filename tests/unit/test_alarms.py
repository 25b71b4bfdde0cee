"""One timer of a loop for many who wait."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar, copy_context
from functools import partial
from weakref import ref

import pytest

from agent_runtime_core._alarms import FEW, Alarms


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
    here = alarm._in.here()
    assert (here.waiting, here._timer) == ({}, None)


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


async def test_who_is_dropped_by_one_that_is_woken_with_it_is_not_woken() -> None:
    alarm, woken = Alarms(), asyncio.Event()
    told: list[str] = []

    def first() -> None:
        told.append("first")
        alarm.drop("second")
        alarm.set("third", 0.02, lambda: told.append("third, later"))
        alarm.set("last", 0.03, woken.set)

    alarm.set("first", 0.001, first)
    alarm.set("second", 0.0011, lambda: told.append("second"))
    alarm.set("third", 0.0012, lambda: told.append("third"))
    time.sleep(0.002)  # all three are due at once
    async with asyncio.timeout(10):
        await woken.wait()
    assert told == ["first", "third, later"]


async def test_who_sets_it_while_others_are_woken_is_woken_too() -> None:
    alarm, woken = Alarms(), asyncio.Event()
    alarm.set("first", 0.001, lambda: alarm.set("second", 0.001, woken.set))
    async with asyncio.timeout(10):
        await woken.wait()


async def test_those_that_are_dropped_are_not_kept() -> None:
    alarm, rounds = Alarms(), 1000
    stays, freed = object(), []

    class Caller:
        def wake(self) -> None:
            raise AssertionError("it was dropped")

    alarm.set(stays, 3600, lambda: None)
    for _ in range(rounds):
        caller = Caller()
        freed.append(ref(caller))
        alarm.set(caller, 1800, caller.wake)
        alarm.drop(caller)
    del caller
    assert all(each() is None for each in freed)
    here = alarm._in.here()
    assert list(here.waiting) == [stays]
    assert len(here._times) <= 2 * len(here.waiting) + FEW + 1


async def test_one_that_rings_does_not_look_at_all_others() -> None:
    alarm, woken = Alarms(), asyncio.Event()
    looked_at = 0

    class Counted(float):
        def __lt__(self, other: float) -> bool:
            nonlocal looked_at
            looked_at += 1
            return float(self) < other

    many = 1024
    for number in range(many):
        alarm.set(number, 3600 + number, lambda: None)
    here = alarm._in.here()
    for each in here._times:
        each[0] = Counted(each[0])
    alarm.set("soon", 0.001, woken.set)
    looked_at = 0
    async with asyncio.timeout(10):
        await woken.wait()
    assert len(here.waiting) == many
    assert 0 < looked_at < 50


def test_each_loop_has_its_own_and_those_that_are_closed_are_forgotten() -> None:
    alarm = Alarms()

    async def woken() -> None:
        there = asyncio.Event()
        alarm.set("far", 3600, there.clear)
        alarm.set("near", 0.001, there.set)
        async with asyncio.timeout(10):
            await there.wait()

    for _ in range(3):
        asyncio.run(woken())
        assert len(alarm._in) == 1


@pytest.mark.parametrize("given", [False, True])
async def test_what_is_woken_runs_in_the_context_that_was_given_or_an_empty_one(given: bool) -> None:
    name: ContextVar[str] = ContextVar("name", default="nobody")
    name.set("who made it")
    alarm, heard, woken = Alarms(copy_context() if given else None), [], asyncio.Event()

    def wake() -> None:
        heard.append(name.get())
        woken.set()

    async def waiting() -> None:
        name.set("who set it")
        alarm.set("it", 0.001, wake)

    await asyncio.create_task(waiting())
    async with asyncio.timeout(10):
        await woken.wait()
    assert heard == ["who made it" if given else "nobody"]
