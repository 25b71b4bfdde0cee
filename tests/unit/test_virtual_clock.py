"""The clock a test moves by hand."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.testing.clock import START, VirtualClock


def test_time_stands_still_until_it_is_moved() -> None:
    clock = VirtualClock()
    assert (clock.wall(), clock.boot()) == (START, 0.0)
    clock.advance(1.5)
    assert (clock.wall(), clock.boot()) == (START + 1.5, 1.5)
    with pytest.raises(InvalidArgument, match="-1"):
        clock.advance(-1)
    with pytest.raises(InvalidArgument, match="nan"):
        clock.advance(float("nan"))


def test_the_wall_clock_may_be_set_back_and_the_other_one_not() -> None:
    clock = VirtualClock(100.0)
    clock.advance(5)
    clock.set_wall(1.0)
    assert (clock.wall(), clock.boot()) == (1.0, 5.0)


async def test_sleepers_wake_in_the_order_of_their_time() -> None:
    clock, woken = VirtualClock(), list[str]()

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(name)

    tasks = [asyncio.ensure_future(sleeper(name, s)) for name, s in (("c", 3), ("a", 1), ("b", 1), ("d", 9))]
    await clock.until_sleeping(4)
    assert clock.next_due == 1
    clock.advance(0.999)
    await asyncio.sleep(0)
    assert woken == []
    clock.advance(5)
    await asyncio.wait(tasks[:3])
    assert woken == ["a", "b", "c"]
    assert not tasks[3].done()
    tasks[3].cancel()
    await asyncio.wait(tasks)
    assert clock.next_due is None


async def test_a_cancelled_sleep_counts_no_more() -> None:
    clock = VirtualClock()
    task = asyncio.ensure_future(clock.sleep(1))
    await clock.until_sleeping()
    task.cancel()
    await asyncio.wait({task})
    waiting = asyncio.ensure_future(clock.until_sleeping())
    await asyncio.sleep(0)
    assert not waiting.done()
    clock.advance(2)
    again = asyncio.ensure_future(clock.sleep(1))
    await waiting
    clock.advance(1)
    await again


async def test_no_time_is_no_wait() -> None:
    await VirtualClock().sleep(0)


async def test_another_thread_may_move_it() -> None:
    clock = VirtualClock()
    task = asyncio.ensure_future(clock.sleep(60))
    await clock.until_sleeping()
    thread = threading.Thread(target=clock.advance, args=(60,))
    thread.start()
    await task
    thread.join()


def test_chance_is_seeded() -> None:
    def draw(seed: int) -> list[float]:
        clock = VirtualClock(seed=seed)
        return [clock.random.random() for _ in range(3)]

    assert draw(7) == draw(7) != draw(8)


def test_moving_it_after_the_sleeper_is_gone_is_harmless() -> None:
    clock = VirtualClock()

    async def forgotten() -> None:
        task = asyncio.ensure_future(clock.sleep(1))
        await clock.until_sleeping()
        task.get_name()

    asyncio.run(forgotten())
    clock.advance(1)
    assert clock.next_due is None
