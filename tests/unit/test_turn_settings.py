"""What turns take from the settings their manager was given, without anything being applied to the process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import MockLLMClient, MockLLMResponse, configure, reset_config
from agent_runtime_core.errors import InvalidArgument, UnknownPrice
from agent_runtime_core.interfaces import LLMResponse, LLMStreamChunk
from agent_runtime_core.limits import RunLimits
from agent_runtime_core.persistence import PersistenceManager
from agent_runtime_core.planning import BasePlanner, LLMPlanner, Plan, PlanStep, StepKind
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import VirtualClock
from agent_runtime_core.tools import Tool
from agent_runtime_core.turns import ConfigLoader, PackSet, PersonalityInstance, TurnManager
from tests.support.runs import Rig, soon

NAMED = f"{__name__}:Named"


class Named(MockLLMClient):
    """A model's client as the settings name it; `asked` are the models it was asked for."""

    asked: list[tuple[str | None, dict[str, Any]]]

    def __init__(self, **options: Any) -> None:
        super().__init__(default_response="hello to you")
        self.options = options

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        Named.asked.append((options.get("model"), self.options))
        return await super().generate(messages, **options)

    def stream(self, messages: list[Any], **options: Any) -> Any:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    Named.asked = []
    reset_config()
    yield
    reset_config()


def _runner() -> AgentRunner:
    return AgentRunner(persistence=PersistenceManager.open("memory://"))


def _loader(tmp_path: Path, text: str) -> ConfigLoader:
    (tmp_path / "config.toml").write_text(text)
    return ConfigLoader(tmp_path / "config.toml", environ={})


class Fixed(BasePlanner):
    """A planner that knows one plan."""

    def __init__(self, *steps: PlanStep) -> None:
        self.steps = steps

    async def create_plan(self, prompt: str, available_tools: Any) -> Plan:
        return Plan(list(self.steps), prompt)


RUNTIME = f"""
[runtime]
model_provider = "{NAMED}"
default_model = "m-1"

[model_prices."m-1"]
input = 100
output = 1000
"""


@pytest.mark.sentence("001", "Adapter selection comes from `ConfigLoader` defaults or personality overrides")
async def test_a_turn_asks_the_provider_and_the_model_of_its_settings(tmp_path: Path) -> None:
    loader = _loader(tmp_path, RUNTIME)
    async with _runner() as runner:
        manager = TurnManager(runner, config=loader)
        turn = await manager.run_turn("hello")
        assert (turn.status, turn.response) == (RunStatus.SUCCEEDED, "hello to you")
        assert turn.metrics.cost_usd == pytest.approx(10 * 100e-6 + 20 * 1000e-6)
        _loader(tmp_path, RUNTIME.replace("m-1", "m-2"))
        assert loader.reload()
        await manager.run_turn("hello again")
    assert [model for model, _ in Named.asked] == ["m-1", "m-2"]


@pytest.mark.sentence("001", "Adapter selection comes from `ConfigLoader` defaults or personality overrides")
async def test_what_a_personality_or_its_provider_names_goes_before(tmp_path: Path) -> None:
    own = f'\n[providers."{NAMED}"]\ndefault_model = "m-own"\napi_key = "k"\n'
    packs = PackSet.of(
        {
            "plain": PersonalityInstance(name="plain", default=True),
            "special": PersonalityInstance(name="special", model="m-special"),
        }
    )
    async with _runner() as runner:
        manager = TurnManager(runner, config=_loader(tmp_path, RUNTIME + own), packs=packs)
        await manager.run_turn("hello")
        await manager.run_turn({"text": "hello", "personality": "special"})
    options = {"default_model": "m-own", "api_key": "k"}
    assert Named.asked == [("m-own", options), ("m-special", options)]


async def test_settings_that_say_nothing_of_models_leave_the_process_its_own(tmp_path: Path) -> None:
    configure(model_provider=NAMED)
    async with _runner() as runner:
        await TurnManager(runner, config=_loader(tmp_path, "[turns]\nmax_in_flight = 2\n")).run_turn("hello")
    assert Named.asked == [(None, {})]


async def test_a_limit_in_dollars_counts_with_the_model_of_the_personality() -> None:
    configure(model_prices={"m-dear": {"input": 1, "output": 1}})
    limits = RunLimits(max_cost_usd=1.0)
    client = MockLLMClient([MockLLMResponse("no plan")], default_response="an answer")

    def packs(model: str) -> PackSet:
        return PackSet.of({"one": PersonalityInstance(name="one", model=model, limits=limits, default=True)})

    async with _runner() as runner:
        planner = LLMPlanner(client, max_repairs=0)
        turn = await TurnManager(runner, planner=planner, packs=packs("m-dear"), client=client).run_turn("hello")
        assert (turn.status, turn.response) == (RunStatus.SUCCEEDED, "an answer")
        turn = await TurnManager(runner, planner=planner, packs=packs("m-other"), client=client).run_turn("hello")
    assert turn.error is not None
    assert (turn.error["type"], "'m-other'" in turn.error["message"]) == (UnknownPrice.__name__, True)


async def test_a_planner_asks_its_own_client_where_nobody_names_another(tmp_path: Path) -> None:
    configure(model_provider=NAMED)
    step = {"step_number": 1, "kind": "tool_call", "tool_name": "calculator", "tool_input": {"expression": "6 * 7"}}
    own = MockLLMClient(default_response=json.dumps({"final_goal": "", "steps": [step]}))
    async with _runner() as runner:
        turn = await TurnManager(runner, planner=LLMPlanner(own)).run_turn("six by seven")
        assert (turn.response, turn.planning.prompt_tokens, own.get_call_count()) == ("42", 10, 1)
        records = await runner.state_store.records(UUID(turn.id))
        assert [each.key for each in records if each.name == "model" and each.kind == "done"] == ["k:plan:0"]
        settings = _loader(tmp_path, RUNTIME)
        await TurnManager(runner, planner=LLMPlanner(own, max_repairs=0), config=settings).run_turn("six by seven")
    assert own.get_call_count() == 1
    assert {model for model, _ in Named.asked} == {"m-1"}


@pytest.mark.sentence("001", "StepProcessor caps concurrent in-flight steps (configurable, default = 16)")
async def test_more_steps_are_at_work_once_the_settings_say_so(tmp_path: Path) -> None:
    inside, go_on = asyncio.Semaphore(0), asyncio.Event()
    there = 0

    async def stay() -> None:
        nonlocal there
        there += 1
        inside.release()
        await go_on.wait()

    loader = _loader(tmp_path, "[turns]\nmax_in_flight = 1\n")
    async with _runner() as runner:
        planner = Fixed(*(PlanStep(number, "stay") for number in (1, 2, 3)))
        manager = TurnManager(runner, planner=planner, tools=[Tool.from_function(stay)], config=loader)
        _loader(tmp_path, "[turns]\nmax_in_flight = 3\n")
        assert loader.reload()
        running = asyncio.ensure_future(manager.run_turn("stay"))
        async with asyncio.timeout(5):
            for _ in range(3):
                await inside.acquire()
        go_on.set()
        assert (await running).status is RunStatus.SUCCEEDED


async def test_a_slow_reader_may_be_behind_by_what_the_settings_say(tmp_path: Path) -> None:
    clock, told = VirtualClock(), 0

    class Pouring(MockLLMClient):
        async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
            nonlocal told
            for _ in range(100):
                clock.advance(1.0)  # so that each piece is told by itself
                told += 1
                yield LLMStreamChunk(delta="x" * 1000)
            yield LLMStreamChunk(finish_reason="stop")

    ask = PlanStep(1, "", {"prompt": "pour"}, kind=StepKind.LLM_CALL)
    async with Rig(clock=clock) as rig:
        runner = rig.runner
        runner._stores = PersistenceManager.open("memory://")
        config = _loader(tmp_path, "[turns]\nmax_unsent_bytes = 5000\n")
        manager = TurnManager(runner, planner=Fixed(ask), client=Pouring(), config=config)
        await manager.start_turn({"text": "x", "turn_id": "t"})
        reading = manager.stream("t", backpressure=True)
        first = asyncio.ensure_future(anext(reading))
        await soon(lambda: bool(runner._flow._buffers))
        running = asyncio.ensure_future(runner.run_once())
        await first
        await soon(lambda: told >= 4)
        for _ in range(50):  # it has every chance to go on
            await asyncio.sleep(0.001)
        assert told < 10
        said = [event.payload["delta"] async for event in reading if event.event_type == "assistant.delta"]
        await running
        with pytest.raises(InvalidArgument, match="max_unsent_bytes must be an integer of at least 1, got 0"):
            await anext(runner.stream("t", backpressure=True, max_unsent_bytes=0))
    assert sum(map(len, said)) == 100_000
