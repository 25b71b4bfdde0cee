"""Which handler of SIGTERM and SIGINT is installed when, and which one receives a signal."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from agent_runtime_core.runner.signals import NUMBERS, SHARED

TERM, INT = signal.SIGTERM, signal.SIGINT

pytestmark = pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals")


class Loop:
    def __init__(self) -> None:
        self.stops = 0

    def stop(self) -> None:
        self.stops += 1


class Host:
    """A handler that counts its calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, number: int, frame: Any) -> None:
        self.calls.append(number)


@pytest.fixture
def host() -> Iterator[Host]:
    handler = Host()
    before = [signal.signal(number, handler) for number in NUMBERS]
    yield handler
    for number, each in zip(NUMBERS, before, strict=True):
        signal.signal(number, each)


def installed() -> list[Any]:
    return [signal.getsignal(number) for number in NUMBERS]


async def test_the_handlers_are_shared_until_the_last_loop_ends(host: Host) -> None:
    first, second = Loop(), Loop()
    with SHARED.stopping(first):
        ours = installed()
        assert host not in ours
        with SHARED.stopping(second):
            assert installed() == ours
        assert installed() == ours
        signal.raise_signal(TERM)
        assert (first.stops, second.stops, host.calls) == (1, 0, [])
    assert installed() == [host, host]
    assert host.calls == [TERM]


async def test_each_signal_stops_every_loop_again_and_is_passed_on_once(host: Host) -> None:
    first, second = Loop(), Loop()
    with SHARED.stopping(first), SHARED.stopping(second):
        for number in (TERM, TERM, INT):
            signal.raise_signal(number)
        assert (first.stops, second.stops, host.calls) == (3, 3, [])
    assert host.calls == [TERM, TERM, INT]


async def test_a_loop_that_begins_while_others_drain_is_stopped_at_once(host: Host) -> None:
    late = Loop()
    with SHARED.stopping(Loop()):
        signal.raise_signal(TERM)
        with SHARED.stopping(late):
            assert late.stops == 1
        assert host.calls == []
    with SHARED.stopping(late):
        assert late.stops == 1, "the signal was passed on"


async def test_a_handler_that_the_host_installs_meanwhile_is_kept(host: Host) -> None:
    later, loop = Host(), Loop()
    with SHARED.stopping(loop):
        ours = signal.signal(TERM, later)
        signal.raise_signal(TERM)
        assert (loop.stops, later.calls) == (0, [TERM])
    assert installed() == [later, host]
    signal.signal(TERM, ours)  # as a server does that restores what it found
    signal.raise_signal(TERM)
    assert host.calls == [TERM]
    assert installed() == [host, host]


async def test_a_handler_that_calls_the_one_before_it_does_not_get_the_signal_twice(host: Host) -> None:
    later, loop = Host(), Loop()

    def chained(number: int, frame: Any) -> None:
        later(number, frame)
        ours(number, frame)

    with SHARED.stopping(loop):
        ours: Any = signal.signal(TERM, chained)
        signal.raise_signal(TERM)
        assert (loop.stops, later.calls, host.calls) == (1, [TERM], [])
    assert (later.calls, host.calls) == ([TERM], [TERM])
    assert installed() == [chained, host]
    signal.raise_signal(TERM)
    assert (later.calls, host.calls) == ([TERM, TERM], [TERM, TERM])


async def test_a_loop_that_begins_after_the_host_installed_a_handler_passes_on_to_that(host: Host) -> None:
    later, loops = Host(), [Loop(), Loop()]
    with ExitStack() as stack:
        stack.enter_context(SHARED.stopping(loops[0]))
        signal.signal(TERM, later)
        stack.enter_context(SHARED.stopping(loops[1]))
        signal.raise_signal(TERM)
        assert [each.stops for each in loops] == [1, 1]
    assert (later.calls, host.calls) == ([TERM], [])
    assert installed() == [later, host]


async def test_what_was_not_installed_from_python_is_not_replaced(monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    real = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with SHARED.stopping(Loop()):
        assert [real(number) for number in NUMBERS] == [host, host]


async def test_handlers_of_the_event_loop_are_called_after_the_drain_and_are_back_then(host: Host) -> None:
    calls: list[str] = []
    here = asyncio.get_running_loop()
    here.add_signal_handler(TERM, calls.append, "term")
    descriptor = wakeup()
    loop = Loop()
    with SHARED.stopping(loop):
        signal.raise_signal(TERM)
        assert loop.stops == 1
        await rounds()
        assert calls == []
    await rounds()
    assert calls == ["term"]
    assert wakeup() == descriptor
    signal.raise_signal(TERM)
    await rounds()
    assert calls == ["term", "term"]
    assert here.remove_signal_handler(TERM)


async def test_a_handler_of_the_event_loop_that_was_removed_meanwhile_does_not_come_back(host: Host) -> None:
    here = asyncio.get_running_loop()
    here.add_signal_handler(TERM, print)
    with SHARED.stopping(Loop()):
        assert here.remove_signal_handler(TERM)
    assert not here.remove_signal_handler(TERM)
    assert signal.getsignal(TERM) is signal.SIG_DFL


def test_a_loop_that_outlives_the_main_task_leaves_no_handler_of_asyncio(host: Host) -> None:
    signal.signal(INT, signal.default_int_handler)

    async def works() -> None:
        with SHARED.stopping(Loop()):
            await asyncio.Event().wait()

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(works())
        await asyncio.sleep(0)
        return task

    assert asyncio.run(main()).cancelled()
    assert installed() == [host, signal.default_int_handler]


def test_ctrl_c_under_asyncio_run_is_not_raised_after_the_drain(host: Host) -> None:
    signal.signal(INT, signal.default_int_handler)

    async def main() -> int:
        loop = Loop()
        with SHARED.stopping(loop):
            signal.raise_signal(INT)
        await asyncio.sleep(0)  # where the main task would be cancelled
        return loop.stops

    assert asyncio.run(main()) == 1


def wakeup() -> int:
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    return descriptor


async def rounds() -> None:
    """Let the event loop read which signals came, and call their handlers."""
    for _ in range(5):
        await asyncio.sleep(0)
