"""A time limit that holds even for what does not listen."""

from __future__ import annotations

import asyncio
import gc

import pytest

from agent_runtime_core._core.timeouts import wait_cancelled, with_time_limit


async def test_within_its_time_the_result_or_the_error_comes_through() -> None:
    async def gives() -> int:
        return 3

    async def raises() -> None:
        raise KeyError("own")

    assert await with_time_limit(gives(), 60, "it") == 3
    with pytest.raises(KeyError, match="own"):
        await with_time_limit(raises(), 60, "it")


async def test_after_its_time_it_is_cancelled_and_the_error_is_the_caller_s() -> None:
    ended: list[bool] = []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(TimeoutError, match=r"^timed out after 0\.01 s$"):
        await with_time_limit(endless(), 0.01, "it")
    with pytest.raises(ZeroDivisionError):
        await with_time_limit(endless(), 0.01, "it", ZeroDivisionError())
    assert ended == [True, True]


async def test_what_fails_while_it_is_stopped_does_not_hide_the_time() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("while stopping") from None

    with pytest.raises(TimeoutError):
        await with_time_limit(stubborn(), 0.01, "it")
    gc.collect()  # an error that nobody took would be reported here


async def test_what_does_not_stop_is_abandoned_and_named(caplog: pytest.LogCaptureFixture) -> None:
    free = asyncio.Event()

    async def deaf() -> str:
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue
        return "late"

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    task.cancel()
    assert await wait_cancelled((task,), "tool 'deaf'", grace=0.01) == {task}
    assert "tool 'deaf' did not stop within 0.01 s of being cancelled" in caplog.text
    free.set()
    assert await task == "late"


async def test_cancelling_the_wait_cancels_what_is_waited_for() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.create_task(with_time_limit(endless(), 60, "it"))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()
