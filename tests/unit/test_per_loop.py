"""Objects by event loop, and calls into a loop from any thread."""

from __future__ import annotations

import asyncio
import threading

from agent_runtime_core._core.per_loop import PerLoop, call_in_loop


def test_each_loop_has_one_object_until_it_is_closed_and_another_one_is_new() -> None:
    made: list[asyncio.AbstractEventLoop] = []
    closed: list[int] = []

    def make(loop: asyncio.AbstractEventLoop) -> int:
        made.append(loop)
        return len(made)

    objects: PerLoop[int] = PerLoop(make, closed.append)

    async def twice() -> tuple[int, int]:
        return objects.here(), objects[asyncio.get_running_loop()]

    assert asyncio.run(twice()) == (1, 1)
    assert list(objects.values()) == [1]
    assert asyncio.run(twice()) == (2, 2)
    assert list(objects.values()) == [2]
    assert closed == [1]


async def test_a_call_reaches_its_loop_from_a_thread() -> None:
    loop, called = asyncio.get_running_loop(), asyncio.Event()
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(call_in_loop(loop, called.set)))
    thread.start()
    async with asyncio.timeout(10):
        await called.wait()
    thread.join()
    assert answers == [True]


def test_a_call_into_a_closed_loop_is_reported() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    assert not call_in_loop(loop, print)
