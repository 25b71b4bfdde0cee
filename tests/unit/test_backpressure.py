"""A run with a slow output waits for it; one without is never slowed."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.interfaces import LLMClient, LLMResponse, LLMStreamChunk, RunResult
from agent_runtime_core.loop import run_turn_loop
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.runner.backpressure import Backpressure
from agent_runtime_core.testing import VirtualClock
from agent_runtime_core.tools import ToolRegistry
from tests.support.runs import Rig, Script, soon, until

PIECE = 4096
LIMIT = 131_072
MEBIBYTE = 1 << 20


class Pouring:
    """An agent that tells an answer in pieces, and notes how many it has told."""

    def __init__(self, pieces: int, size: int = PIECE) -> None:
        self.pieces, self.size, self.told = pieces, size, 0

    async def __call__(self, ctx: Any) -> RunResult:
        for number in range(self.pieces):
            await ctx.emit("assistant.delta", {"delta": f"{number:08d}" + "x" * (self.size - 8)})
            self.told += 1
        return RunResult()


async def _deltas(runner: AgentRunner, **options: Any) -> AsyncGenerator[str, None]:
    async for event in runner.stream("r", **options):
        if event.event_type == "assistant.delta":
            yield event.payload["delta"]


async def _attached(rig: Rig) -> tuple[AsyncGenerator[str, None], asyncio.Task[str]]:
    """A reader that the run, which is there and not begun, will wait for; and the first that it gets."""
    reading = _deltas(rig.runner, backpressure=True)
    first = asyncio.create_task(anext(reading))
    await soon(lambda: bool(rig.runner._flow._buffers))
    return reading, first


def _waits(rig: Rig) -> bool:
    """Whether the run waits for its reader now."""
    return any(pipe._waiters for pipe in rig.runner._flow._buffers.values())


async def test_a_run_waits_for_an_output_that_is_behind(place: Path | None) -> None:
    async with Rig(place, VirtualClock()) as rig:
        pouring = Pouring(100)
        rig.register(pouring)
        await rig.runner.submit("script", run_id="r")
        reading, first = await _attached(rig)
        running = asyncio.ensure_future(rig.runner.run_once())
        assert (await first).startswith("00000000")
        most = LIMIT // PIECE
        await soon(lambda: pouring.told >= most - 2)
        for _ in range(50):  # it has every chance to go on
            await asyncio.sleep(0.001)
        assert pouring.told <= most + 1
        assert rig.runner.backpressure_seconds == 0
        assert [int(each[:8]) async for each in reading] == list(range(1, 100))
        await running
        assert rig.runner.backpressure_seconds >= 0.05
        assert pouring.told == 100


async def test_a_run_of_a_worker_beside_it_waits_for_it_too() -> None:
    async with Rig() as rig:
        pouring, registry = Pouring(100), Registry()
        registry.register(Script(pouring, "theirs"))
        beside = rig.runner.worker_for(registry)
        await rig.runner.submit("theirs", run_id="r")
        reading, first = await _attached(rig)
        running = asyncio.ensure_future(beside.run_once())
        await first
        await soon(lambda: _waits(rig))
        assert pouring.told < 100
        assert len([each async for each in reading]) == 99
        assert await running
        await beside.close()


async def test_without_backpressure_the_run_is_not_slowed(place: Path | None) -> None:
    async with Rig(place) as rig:
        pouring = Pouring(100)
        rig.register(pouring)
        await rig.runner.submit("script", run_id="r")
        reading = _deltas(rig.runner)
        first = asyncio.ensure_future(anext(reading))
        await rig.runner.run_once()
        assert pouring.told == 100
        assert [await first, *[each async for each in reading]][-1].startswith("00000099")


async def test_the_events_of_a_page_are_read_when_the_next_page_is_requested() -> None:
    async with Rig() as rig:
        pouring = Pouring(200)
        rig.register(pouring)
        await rig.runner.submit("script", run_id="r")
        pages = rig.runner.event_pages("r", backpressure=True)
        first = asyncio.ensure_future(anext(pages))
        await soon(lambda: bool(rig.runner._flow._buffers))
        running = asyncio.ensure_future(rig.runner.run_once())
        seen = [event.sequence for event in await first]
        while seen[-1] < 201:
            await soon(lambda: _waits(rig) or running.done())
            told = pouring.told
            for _ in range(20):
                await asyncio.sleep(0)
            assert pouring.told == told, "the page is not read yet"
            seen += [event.sequence for event in await anext(pages)]
        assert seen == list(range(202))
        with pytest.raises(StopAsyncIteration):
            await anext(pages)
        await running
        assert rig.runner._flow._buffers == {}


async def test_an_output_that_leaves_lets_the_run_go_on() -> None:
    async with Rig() as rig:
        pouring = Pouring(100)
        rig.register(pouring)
        await rig.runner.submit("script", run_id="r")
        reading, first = await _attached(rig)
        running = asyncio.ensure_future(rig.runner.run_once())
        await first
        await soon(lambda: _waits(rig))
        assert pouring.told < 100
        await reading.aclose()
        await running
        assert pouring.told == 100


async def test_a_run_that_waits_for_an_output_can_be_cancelled_and_its_time_stands_still() -> None:
    async with Rig(clock=VirtualClock(), run_timeout_seconds=10) as rig:
        began = asyncio.Event()

        async def body(ctx: Any) -> RunResult:
            began.set()
            return await Pouring(100)(ctx)

        rig.register(body)
        await rig.runner.submit("script", run_id="r")
        _reading, first = await _attached(rig)
        running = asyncio.ensure_future(rig.runner.run_once())
        await until(began)
        await first
        await soon(lambda: _waits(rig))
        rig.clock.advance(1000)  # type: ignore[attr-defined]
        await asyncio.sleep(0.1)
        assert (await rig.runner.get_run("r")).status == "running"
        await rig.runner.cancel("r")
        await running
        assert (await rig.runner.get_run("r")).status == "cancelled"


async def test_ten_mebibytes_for_a_slow_reader_take_little_room(tmp_path: Path) -> None:
    """A reader at 64 KiB/s of a clock moved by hand: the process grows by 2 MiB at most, and nothing is lost."""
    clock = VirtualClock()
    async with Rig(tmp_path / "runs.db", clock, run_timeout_seconds=3600) as rig:
        count = 10 * MEBIBYTE // PIECE
        pouring = Pouring(count)
        rig.register(pouring)
        await rig.runner.submit("script", run_id="r")
        reading, first = await _attached(rig)
        running = asyncio.ensure_future(rig.runner.run_once())
        await first
        gc.collect()
        tracemalloc.start()
        try:
            before, seen, furthest = tracemalloc.get_traced_memory()[0], 1, 0
            async for delta in reading:
                assert int(delta[:8]) == seen
                seen += 1
                furthest = max(furthest, pouring.told - seen)
                clock.advance(PIECE / 65_536)
            peak = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        await running
    assert seen == count
    assert furthest * PIECE <= LIMIT + PIECE
    assert peak <= 2 * MEBIBYTE


@pytest.mark.parametrize("value", [-1, 1.5, True, "128"])
def test_the_limit_is_a_number_of_bytes(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_unsent_bytes"):
        RunnerConfig(max_unsent_bytes=value)


class Talkative(LLMClient):
    """A model that says as much as an answer may have, at 80 KiB/s."""

    pieces = 240

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.said = clock, 0

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        raise NotImplementedError

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        for number in range(self.pieces):
            self.clock.advance(0.05)
            self.said += 1
            yield LLMStreamChunk(f"{number:08d}" + "x" * (PIECE - 8))
        yield LLMStreamChunk(finish_reason="stop", usage={})


async def test_a_model_is_paused_for_a_slow_reader(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock) as rig:
        model, got, furthest = Talkative(clock), 1, 0

        async def body(ctx: Any) -> RunResult:
            said = [{"role": "user", "content": "x"}]
            done = await run_turn_loop(ctx, model, ToolRegistry(), messages=said, stream=True)
            return RunResult({"length": len(done.text or "")})

        rig.register(body)
        await rig.runner.submit("script", run_id="r")
        reading, first = await _attached(rig)
        running = asyncio.ensure_future(rig.runner.run_once())
        assert len(await first) == PIECE
        async for delta in reading:
            got += len(delta) // PIECE
            await soon(lambda: _waits(rig) or model.said == model.pieces)
            furthest = max(furthest, model.said - got)
        await running
        result = await rig.runner.wait("r")
    assert result.raise_for_status().final_output == {"length": model.pieces * PIECE}
    assert got == model.pieces
    assert LIMIT // PIECE - 2 <= furthest <= LIMIT // PIECE + 2


async def test_what_an_output_has_taken_is_that_event_and_all_before_it() -> None:
    flow = Backpressure(15, InMemoryEventBus)
    with flow.attached("r", 0) as output:
        assert flow.published("r", 0, 10) is None
        waiting = flow.published("r", 1, 10)
        assert waiting is not None
        output.read_up_to(0)
        await asyncio.sleep(0)
        assert waiting.done()
        assert flow.published("r", 2, 10) is not None, "the second one is not taken yet"


# -- readers in other processes


class Ticking:
    """Lets the virtual time pass while other code works."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._tick())

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.001)
            self._clock.advance(0.05)


async def _elsewhere(rig: Rig) -> tuple[AsyncGenerator[str, None], asyncio.Task[str]]:
    """A reader of another process, which has reported; and the first piece that it gets."""
    reading = _deltas(rig.another(), backpressure=True)
    first = asyncio.create_task(anext(reading))
    await until_reported(rig)
    return reading, first


async def until_reported(rig: Rig) -> None:
    run_id = (await rig.runner.queue.require("r")).run_id
    for _ in range(5000):
        if await rig.runner.event_bus.readers(run_id):
            return
        await asyncio.sleep(0.001)
    raise AssertionError("no reader has reported")


async def test_a_run_waits_for_a_reader_in_another_process(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock) as rig, Ticking(clock):
        pouring = Pouring(200)
        rig.register(pouring)
        await rig.runner.submit("script", run_id="r")
        reading, first = await _elsewhere(rig)
        running = asyncio.create_task(rig.runner.run_once())
        assert (await first).startswith("00000000")
        most = LIMIT // PIECE
        await soon(lambda: _waits(rig))
        for _ in range(50):  # it has every chance to go on
            await asyncio.sleep(0.001)
        # It counts from when it has seen the reader, which is after a few pieces.
        assert most <= pouring.told < 150
        assert [int(each[:8]) async for each in reading] == list(range(1, 200))
        await running
        assert rig.runner.backpressure_seconds > 0


async def test_a_run_does_not_wait_for_a_reader_that_does_not_report_any_more(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock) as rig:
        pouring = Pouring(200)
        rig.register(pouring)
        await rig.runner.submit("script", run_id="r")
        run_id = (await rig.runner.queue.require("r")).run_id
        await rig.runner.event_bus.report_reader(run_id, "killed.1", -1)
        running = asyncio.create_task(rig.runner.run_once())
        await soon(lambda: _waits(rig))
        assert pouring.told < 200
        for _ in range(15):
            clock.advance(0.1)
            await asyncio.sleep(0.01)
        assert _waits(rig)
        async with Ticking(clock):
            await running
        assert pouring.told == 200


async def test_a_reader_in_another_process_that_keeps_up_does_not_slow_the_run_down(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock) as rig, Ticking(clock):
        rig.register(Pouring(20))
        await rig.runner.submit("script", run_id="r")
        reading, first = await _elsewhere(rig)
        running = asyncio.create_task(rig.runner.run_once())
        assert [await first, *[each async for each in reading]]
        await running
        assert rig.runner.backpressure_seconds == 0
        assert await rig.runner.event_bus.readers((await rig.runner.queue.require("r")).run_id) == {}


async def test_a_run_of_this_process_needs_no_reports(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock) as rig, Ticking(clock):
        rig.register(Pouring(100))
        await rig.runner.submit("script", run_id="r")
        reading, first = await _attached(rig)
        running = asyncio.create_task(rig.runner.run_once())
        await first
        await soon(lambda: _waits(rig))
        assert len(rig.runner._flow._buffers[next(iter(rig.runner._flow._buffers))].readers) == 1
        assert len([each async for each in reading]) == 99
        await running


async def test_a_reader_reports_once_another_process_has_taken_the_run_over(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock) as rig, Ticking(clock):
        await rig.runner.submit("script", run_id="r")
        run_id, bus = (await rig.runner.queue.require("r")).run_id, rig.runner.event_bus
        flow = Backpressure(LIMIT, lambda: bus)
        outlet = flow.outlet(run_id)
        with flow.attached(run_id, 0) as reader:
            async with flow.reporting(run_id, reader):
                for _ in range(100):  # five seconds
                    await asyncio.sleep(0.001)
                assert await bus.readers(run_id) == {}
                del outlet
                await until_reported(rig)
            assert await bus.readers(run_id) == {}


@pytest.mark.parametrize(("text", "pieces"), [("x" * LIMIT, 1), ("x" * (LIMIT + 1), 2), ("é" * LIMIT, 7)])
async def test_a_large_piece_is_split(place: Path | None, text: str, pieces: int) -> None:
    async def tell(ctx: Any) -> RunResult:
        await ctx.emit("assistant.delta", {"delta": text, "index": 1})
        return RunResult()

    async with Rig(place) as rig:
        await rig.go(tell)
        events = await rig.runner.event_bus.get_events((await rig.runner.queue.require("r")).run_id)
        told = [each.payload for each in events if each.event_type == "assistant.delta"]
        assert len(told) == pieces
        assert "".join(each["delta"] for each in told) == text
        assert {each["index"] for each in told} == {1}
