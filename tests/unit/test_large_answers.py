"""An answer of ten mebibytes is recorded, told and read again, whoever asked for it."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.errors import PlanningError
from agent_runtime_core.interfaces import LLMClient, LLMResponse, LLMStreamChunk
from agent_runtime_core.persistence import AuditEventType, PersistenceManager
from agent_runtime_core.planning.plan import BasePlanner
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import VirtualClock
from agent_runtime_core.tools import ToolRegistry
from agent_runtime_core.tools.structured_output import Output
from agent_runtime_core.turns import TurnManager
from tests.support.runs import Hurried, Rig

MEBIBYTE = 1 << 20
PIECE = 65_536
SIZE = 10 * MEBIBYTE


class Talkative(LLMClient):
    """A model that streams an answer, a piece in each twentieth of a second of the clock it is given."""

    def __init__(self, clock: VirtualClock | None = None, size: int = SIZE) -> None:
        self.clock, self.size = clock, size

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        raise NotImplementedError

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        for number in range(self.size // PIECE):
            if self.clock is not None:
                self.clock.advance(0.05)
            await asyncio.sleep(0)
            yield LLMStreamChunk(f"{number:08d}" + "x" * (PIECE - 8))
        yield LLMStreamChunk(finish_reason="stop", usage={})


class Planless(BasePlanner):
    """Leaves all to the model."""

    async def create_plan(self, prompt: str, available_tools: Any) -> Any:
        raise PlanningError("none")


class Talker(ToolCallingAgent):
    key = "talker"
    system_prompt = ""
    tools = ToolRegistry()
    stream = True

    def __init__(self, client: LLMClient) -> None:
        self.client = client

    def get_llm_client(self) -> LLMClient:
        return self.client


def is_whole(text: str | None, size: int = SIZE) -> bool:
    if text is None or len(text) != size:
        return False
    return all(text.startswith(f"{n:08d}", n * PIECE) for n in range(size // PIECE))


async def read(runner: AgentRunner, run_id: Any) -> int:
    """How many bytes a reader that holds the run back is given of its answer, in order."""
    got = 0
    async for event in runner.stream(run_id, backpressure=True):
        if event.event_type == "assistant.delta":
            delta = event.payload["delta"]
            assert got % PIECE or delta.startswith(f"{got // PIECE:08d}")
            got += len(delta)
            await asyncio.sleep(0)
    return got


async def test_an_agent_answers_at_length(place: Path | None) -> None:
    clock = Hurried()
    async with Rig(place, clock) as rig:
        rig.registry.register(Talker(Talkative(clock)))
        run_id = await rig.runner.submit("talker", {"messages": [{"role": "user", "content": "go on"}]})
        running = asyncio.ensure_future(rig.runner.run_once())
        assert await read(rig.runner, run_id) == SIZE
        await running
        result = (await rig.runner.wait(run_id)).raise_for_status()
        assert is_whole(result.final_output["response"])
        assert is_whole(result.final_messages[-1]["content"])


async def turned(runner: AgentRunner, client: Talkative) -> None:
    size = client.size
    manager = TurnManager(runner, planner=Planless(), client=client)
    turn = await manager.start_turn({"text": "go on", "conversation_id": "c"})
    running = asyncio.ensure_future(runner.run_once())
    assert await read(runner, turn.id) == size
    await running
    turn = await manager.get_turn(turn.id)
    assert turn.status is RunStatus.SUCCEEDED
    assert is_whole(turn.response, size)
    assert is_whole((await runner.wait(turn.id)).final_output["response"], size)
    said = (await manager.contexts.history("c")).value
    assert [is_whole(each["content"], size) for each in said] == [False, True]


async def test_a_turn_answers_at_length(place: Path | None) -> None:
    stores = PersistenceManager.open("memory://" if place is None else place.with_suffix(".stores.db"))
    clock = Hurried()
    # Before the run begins, its reader reports every 250 ms, which pass at once on this clock.
    async with Rig(place, clock, run_timeout_seconds=10**9) as rig:
        rig.runner._stores = stores
        await turned(rig.runner, Talkative(clock))
    assert stores.audit is not None
    ended = [each for each in await stores.audit.get_events() if each.event_type is AuditEventType.AGENT_END]
    assert ["larger than" in each.details["left_out"] for each in ended] == [True]
    await stores.close()


@pytest.mark.skipif(find_spec("redis") is None, reason="needs the redis package")
async def test_a_turn_answers_at_length_on_redis(redis_url: str) -> None:
    """The server carries out one write at a time: ten mebibytes, several times over, may hold it up for too long."""
    async with PersistenceManager.open(redis_url) as stores, AgentRunner.open(redis_url, persistence=stores) as runner:
        await turned(runner, Talkative(size=20 * PIECE))


@pytest.mark.parametrize("kind", [pytest.param("talker", marks=pytest.mark.slow), "turn"])
async def test_while_a_long_answer_is_told_to_a_slow_reader_it_is_in_memory_once(kind: str, tmp_path: Path) -> None:
    """At any moment until its last piece is read, the process has grown by the text so far and less than 2 MiB."""
    clock, got, beyond = Hurried(), 0, 0
    stores = PersistenceManager.open(tmp_path / "stores.db")
    async with Rig(tmp_path / "runs.db", clock, run_timeout_seconds=3600) as rig:
        rig.runner._stores = stores
        rig.registry.register(Talker(Talkative(clock)))
        TurnManager(rig.runner, planner=Planless(), client=Talkative(clock))
        run_id = await rig.runner.submit(kind, {"messages": [{"role": "user", "content": "go on"}]})
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            running = asyncio.ensure_future(rig.runner.run_once())
            async for event in rig.runner.stream(run_id, backpressure=True):
                if event.event_type != "assistant.delta":
                    continue
                got += len(event.payload["delta"])
                clock.advance(1.0)  # it takes 64 KiB in a second
                if got < SIZE - 2 * 131_072:  # until the model has said all: then it is recorded
                    beyond = max(beyond, tracemalloc.get_traced_memory()[1] - before - got)
        finally:
            tracemalloc.stop()
        await running
        (await rig.runner.wait(run_id)).raise_for_status()
    await stores.close()
    assert got == SIZE
    assert 0 < beyond <= 2 * MEBIBYTE


def test_a_long_answer_is_not_parsed_as_a_typed_one() -> None:
    assert Output(list).problem("[" * (MEBIBYTE + 1)) == "it must have at most 1,048,576 characters, got 1,048,577"
