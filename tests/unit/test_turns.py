"""Turns from end to end: one test for each row of the table of duties, and what turns have from being runs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from agent_runtime_core.config import configure
from agent_runtime_core.errors import (
    IdempotencyConflict,
    IllegalTransition,
    InvalidArgument,
    InvalidTurn,
    PlanningError,
    ProviderUnavailable,
    StorageBusy,
    UnknownRun,
)
from agent_runtime_core.interfaces import LLMClient, LLMResponse, LLMStreamChunk
from agent_runtime_core.limits import RunLimits
from agent_runtime_core.llm._retries import Breakers
from agent_runtime_core.persistence import Conversation, ConversationMessage, PersistenceManager, ToolCall
from agent_runtime_core.planning import LLMPlanner, Plan, PlanStep, StepKind, built_in_tools
from agent_runtime_core.planning.plan import BasePlanner
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus, StepStatus
from agent_runtime_core.testing import MockLLMClient
from agent_runtime_core.tools import Tool, ToolRegistry
from agent_runtime_core.turns import (
    MemorySettings,
    PackSet,
    PersonalityInstance,
    StepMetrics,
    Turn,
    TurnEvent,
    TurnManager,
)
from agent_runtime_core.turns.events import (
    AUDIT,
    RESULTS,
    STEPS,
    TURNS,
    AuditEvent,
    EventEnvelope,
    PlanRequest,
    StepResultChunk,
)
from agent_runtime_core.turns.hooks import TurnLog
from agent_runtime_core.turns.planner import PlanExecutor
from agent_runtime_core.turns.turn_run import recent_messages
from tests.support.runs import Rig, until
from tests.support.scripted_model import Scripted

SUM = "add 12 and 30, then multiply by 2"


class House(Rig):
    """A rig whose runners keep turns in stores of their own."""

    def __init__(self, path: Path | None = None, **config: Any) -> None:
        self.stores = PersistenceManager.open("memory://" if path is None else path.with_suffix(".stores.db"))
        super().__init__(path, **config)

    def another(self, **config: Any) -> AgentRunner:
        runner = super().another(**config)
        runner._stores = self.stores
        return runner

    def manager(self, runner: AgentRunner | None = None, **options: Any) -> TurnManager:
        return TurnManager(runner or self.runner, **options)

    async def __aenter__(self) -> House:
        return self

    async def close(self) -> None:
        await super().close()
        await self.stores.close()


class Fixed(BasePlanner):
    """A planner that knows one plan, or one error."""

    def __init__(self, *steps: PlanStep, error: Exception | None = None) -> None:
        self.steps, self.error = steps, error

    async def create_plan(self, prompt: str, available_tools: Any) -> Plan:
        if self.error is not None:
            raise self.error
        return Plan(list(self.steps), prompt)


class Told:
    """Hooks that note what they are told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_turn_start(self, turn: Turn) -> None:
        self.calls.append(("on_turn_start", turn.personality))

    async def on_plan_ready(self, turn: Turn, plan: Plan) -> None:
        self.calls.append(("on_plan_ready", len(plan.steps)))

    def on_step_start(self, turn: Turn, step: Any) -> None:
        self.calls.append(("on_step_start", step.step_number))

    async def on_step_end(self, turn: Turn, step: Any) -> None:
        self.calls.append(("on_step_end", (step.step_number, step.status.value)))

    def on_turn_end(self, turn: Turn) -> None:
        self.calls.append(("on_turn_end", turn.status.value))

    def on_error(self, turn: Turn, error: Exception) -> None:
        self.calls.append(("on_error", type(error).__name__))


def llm(number: int = 1, prompt: str = "say it", **more: Any) -> PlanStep:
    return PlanStep(number, "", {"prompt": prompt}, kind=StepKind.LLM_CALL, **more)


def tools_of(*functions: Any) -> ToolRegistry:
    registry = ToolRegistry()
    for each in functions:
        registry.register(each if isinstance(each, Tool) else Tool.from_function(each))
    return registry


async def trail(manager: TurnManager, topic: str) -> list[EventEnvelope]:
    return [each async for each in manager.topics.subscribe(topic, 0, follow=False)]


def actions(envelopes: list[EventEnvelope]) -> list[str]:
    return [each.payload.action for each in envelopes if isinstance(each.payload, AuditEvent)]


# -- a turn


@pytest.mark.sentence(
    "001", "TurnManager: accept `TurnEvent` from API layer, attach `trace_id`, pick personality, load session context"
)
async def test_a_turn_is_planned_carried_out_and_told(place: Path | None) -> None:
    async with House(place) as house:
        hooks = Told()
        manager = house.manager(hooks=[hooks])
        asked = await manager.start_turn({"text": SUM, "turn_id": "t1", "user_id": "bob", "trace_id": "outer"})
        assert asked.status is RunStatus.PENDING
        assert await house.runner.run_once()
        turn = await manager.wait("t1")
        assert (turn.status, turn.response, turn.user_id) == (RunStatus.SUCCEEDED, "84", "bob")
        assert [(s.step_number, s.tool_name, s.status, s.result, s.attempt) for s in turn.steps] == [
            (1, "calculator", StepStatus.COMPLETED, 42, 1),
            (2, "calculator", StepStatus.COMPLETED, 84, 1),
        ]
        assert turn.trace_id == asked.trace_id == turn.id.replace("-", "")
        assert turn.metadata["parent_trace_id"] == "outer"
        assert turn.plan is not None
        assert turn.plan.final_goal == SUM
        assert hooks.calls == [
            ("on_turn_start", "default"), ("on_plan_ready", 2),
            ("on_step_start", 1), ("on_step_end", (1, "completed")),
            ("on_step_start", 2), ("on_step_end", (2, "completed")), ("on_turn_end", "succeeded"),
        ]  # fmt: skip


@pytest.mark.sentence("001", "PlanExecutor produces `StepEvent` messages to `agent.steps`")
@pytest.mark.sentence("001", "StepProcessor produces response chunks to WebSocket & `audit` topic")
async def test_the_four_topics_tell_of_a_turn_with_the_ids_of_the_journal(place: Path | None) -> None:
    async with House(place) as house:
        manager = house.manager()
        turn = await manager.run_turn(SUM)
        turns, steps = await trail(manager, TURNS), await trail(manager, STEPS)
        results, audit = await trail(manager, RESULTS), await trail(manager, AUDIT)
        completed = await house.told("step.completed", turn.id)
        events = await house.runner.event_bus.get_events(turn.id)
        journal = [e.payload["step_id"] for e in events if e.event_type == "step.completed"]
        assert len(completed) >= 2
        ids = [step.step_id for step in turn.steps]
        assert [each.step_id for each in steps] == ids == [each.step_id for each in results]
        assert set(ids) < set(journal)
        assert all(len(each) == 26 for each in ids)
        assert [type(each.payload) for each in turns] == [TurnEvent]
        assert actions(audit) == ["turn.started", "plan.ready", "step.completed", "step.completed", "turn.succeeded"]
        assert {each.trace_id for each in (*turns, *steps, *results, *audit)} == {turn.trace_id}
        assert {each.turn_id for each in (*turns, *steps, *results, *audit)} == {turn.id}


async def test_the_same_turn_id_is_the_same_turn() -> None:
    async with House() as house:
        manager = house.manager()
        first, again = [await manager.start_turn({"text": SUM, "turn_id": "t"}) for _ in range(2)]
        assert first.id == again.id
        with pytest.raises(IdempotencyConflict):
            await manager.start_turn({"text": "another", "turn_id": "t"})
        assert len(await house.runner.runs()) == 1


async def test_two_managers_in_one_process_keep_and_tell_their_own_turns(tmp_path: Path) -> None:
    registry = Registry()
    one = AgentRunner.open(str(tmp_path / "one.db"), registry=registry)
    two = AgentRunner.open(str(tmp_path / "two.db"), registry=registry)
    async with one, two:
        managers = TurnManager(one), TurnManager(two)
        for manager in managers:
            await manager.start_turn({"text": "add 1 and 2", "turn_id": "t"})
            assert await manager.runner.run_once()
            assert (await manager.wait("t")).response == "3"
            assert (await manager.run_turn({"text": "add 1 and 3", "turn_id": "t2"})).response == "4"
            late = await manager.start_turn({"text": "add 1 and 4"})
            assert await manager.cancel(late.id)
        for manager in managers:
            assert actions(await trail(manager, AUDIT)).count("turn.succeeded") == 2
            assert actions(await trail(manager, AUDIT)).count("turn.cancelled") == 1
            assert len(await trail(manager, TURNS)) == 2
        registry.unregister("turn")
        assert one.registry.get("turn") is None


async def test_an_unknown_turn_and_a_run_that_is_no_turn(place: Path | None) -> None:
    async with House(place) as house:
        manager = house.manager()

        async def nothing(ctx: Any) -> None:
            return None

        await house.go(nothing, "r")
        for name in ("r", "nowhere"):
            with pytest.raises(UnknownRun):
                await manager.get_turn(name)


@pytest.mark.sentence(
    "001", "StepProcessor: drive each Step (LLM/tool/memory) by invoking the appropriate adapter or service"
)
async def test_a_model_answers_in_pieces_with_the_personality_of_the_turn() -> None:
    packs = PackSet.of(
        {
            "plain": PersonalityInstance(name="plain", default=True),
            "pirate": PersonalityInstance(name="pirate", system_prompt="Speak as {{role}}, {{mood}}.", model="m-1"),
        }
    )
    async with House() as house:
        await house.stores.preferences.set("bob/mood", "merry")
        client = MockLLMClient(["Ahoy, and a long answer indeed"])
        manager = house.manager(planner=Fixed(llm()), client=client, packs=packs)
        asked = {"text": "hi", "personality": "pirate", "params": {"role": "pirate"}, "user_id": "bob"}
        turn = await manager.run_turn(asked)
        assert turn.response == "Ahoy, and a long answer indeed"
        [call] = client.get_calls()
        assert call["model"] == "m-1"
        assert call["messages"][0] == {"role": "system", "content": "Speak as pirate, merry."}
        deltas = await house.told("assistant.delta", turn.id)
        assert "".join(payload["delta"] for _, payload in deltas) == turn.response
        chunks = [each.payload for each in await trail(manager, RESULTS)]
        assert all(isinstance(each, StepResultChunk) for each in chunks)
        assert "".join(each.delta for each in chunks if isinstance(each, StepResultChunk)) == turn.response
        assert turn.steps[0].metrics.prompt_tokens == 10
        assert turn.metrics.completion_tokens == 20


async def test_what_steps_use_is_summed_on_the_turn() -> None:
    answers = [
        LLMResponse({"role": "assistant", "content": "a"}, {"prompt_tokens": 5, "completion_tokens": 2}, cost_usd=0.25),
        LLMResponse({"role": "assistant", "content": "b"}, {"prompt_tokens": 7, "completion_tokens": 1}, cost_usd=0.5),
    ]
    async with House() as house:
        manager = house.manager(planner=Fixed(llm(1), llm(2, "{{step_1.result}}")), client=MockLLMClient(answers))
        turn = await manager.run_turn("hi")
        assert (turn.metrics.prompt_tokens, turn.metrics.completion_tokens, turn.metrics.cost_usd) == (12, 3, 0.75)
        assert [step.metrics.cost_usd for step in turn.steps] == [0.25, 0.5]
        assert (await manager.get_turn(turn.id)).metrics == turn.metrics


async def test_a_client_of_a_turn_may_tell_no_usage() -> None:
    silent = LLMResponse({"role": "assistant", "content": "a"}, usage=None)  # type: ignore[arg-type]
    configure(model_prices={"scripted-1": {"input": 1.0, "output": 1.0}})
    async with House() as house:
        turn = await house.manager(planner=Fixed(llm()), client=Scripted(silent)).run_turn("x")
        assert (turn.response, turn.metrics.prompt_tokens) == ("a", 0)


async def test_what_a_recorded_call_used_is_told_though_the_turn_was_cut_before_it_was_kept(place: Path | None) -> None:
    inside = asyncio.Event()
    async with House(place) as house:
        client = MockLLMClient(["four"])
        manager = house.manager(client=client, planner=Fixed(llm()))
        save = manager.contexts.save_turn

        async def stuck(turn: Turn) -> None:
            if any(step.ended for step in turn.steps):
                inside.set()
                await asyncio.Event().wait()
            await save(turn)

        manager.contexts.save_turn = stuck  # type: ignore[method-assign]
        cut = asyncio.ensure_future(manager.run_turn({"text": "x", "turn_id": "t"}))
        await until(inside)
        cut.cancel()
        await asyncio.wait({cut})
        manager.contexts.save_turn = save  # type: ignore[method-assign]
        turn = await manager.run_turn({"text": "x", "turn_id": "t"})
        assert (turn.response, client.get_call_count()) == ("four", 1)
        assert (turn.metrics.prompt_tokens, turn.metrics.completion_tokens) == (10, 20)


async def test_the_planners_model_calls_are_recorded_and_not_paid_for_twice(place: Path | None) -> None:
    said = (
        '{"final_goal": "g", "steps": [{"step_number": 1, "kind": "tool_call", "tool_name": "wait", "tool_input": {}}]}'
    )
    inside, calls = asyncio.Event(), 0

    async def wait() -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            inside.set()
            await asyncio.Event().wait()
        return "done"

    async with House(place) as house:
        client = MockLLMClient(["nonsense", said])
        manager = house.manager(planner=LLMPlanner(MockLLMClient()), client=client, tools=tools_of(wait))
        await manager.start_turn({"text": "x", "turn_id": "t"})
        running = asyncio.ensure_future(house.runner.run_once())
        await until(inside)
        running.cancel()
        await asyncio.wait({running})
        runner = house.another()
        again = house.manager(runner, planner=LLMPlanner(MockLLMClient()), client=client, tools=tools_of(wait))
        assert await runner.run_once()
        turn = await again.wait("t")
        assert (turn.status, turn.response) == (RunStatus.SUCCEEDED, "done")
        assert client.get_call_count() == 2
        assert turn.planning.prompt_tokens == 20
        records = await house.records(turn.id)
        assert sum(each.name == "model" and each.kind == "done" for each in records) == 2


# -- the table of duties


@pytest.mark.sentence(
    "001",
    "`TurnManager` fetches the desired `PersonalityInstance` and passes its system-prompt & tools to `PlanExecutor`",
)
async def test_row_config_loader_a_turn_keeps_what_it_began_with() -> None:
    """ConfigLoader: atomic swap. What changes while a turn runs is for the next one."""
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> str:
        inside.set()
        await go_on.wait()
        return "x"

    def packs(version: int) -> PackSet:
        pack = PersonalityInstance(name="p", default=True, system_prompt=f"v{version}", model=f"m-{version}")
        return PackSet.of({"p": pack})

    async with House() as house:
        client = MockLLMClient()
        steps = (PlanStep(1, "wait", {}), llm(2, "{{step_1.result}}"))
        manager = house.manager(planner=Fixed(*steps), tools=tools_of(wait), client=client, packs=packs(1))
        running = asyncio.ensure_future(manager.run_turn("hi"))
        await until(inside)
        manager._packs = packs(2)
        go_on.set()
        await running
        await manager.run_turn("hi")
        seen = [(call["model"], call["messages"][0]["content"]) for call in client.get_calls()]
        assert seen == [("m-1", "v1"), ("m-2", "v2")]


@pytest.mark.sentence("001", "TurnManager: 422 on malformed turn")
@pytest.mark.parametrize(
    ("turn", "field"),
    [
        ({"text": ""}, "text"),
        ({"text": "x", "personality": "nobody"}, "personality"),
        ({"text": "x", "params": {"a": object()}}, "params.a"),
        ({"text": "x", "metadata": {"a": float("nan")}}, "metadata.a"),
        ({"messages": [{"role": "user", "content": "x", "more": object()}]}, "messages[0].more"),
    ],
)
async def test_row_turn_manager_a_malformed_turn_is_a_422(turn: dict[str, Any], field: str) -> None:
    async with House() as house:
        with pytest.raises(InvalidTurn) as refused:
            await house.manager().start_turn(turn)
        assert (refused.value.status_code, refused.value.field) == (422, field)
        with pytest.raises(InvalidTurn) as refused:
            await house.manager().run_turn(turn)
        assert refused.value.field == field
        assert await house.runner.runs() == []


@pytest.mark.sentence("001", "PlanExecutor: skips step on planner error, logs")
@pytest.mark.parametrize("gives", [KeyError("no such thing"), {"steps": []}])
async def test_row_plan_executor_a_planner_that_fails_is_logged_and_done_without(
    gives: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(BasePlanner):
        async def create_plan(self, prompt: str, available_tools: Any) -> Plan:
            if isinstance(gives, Exception):
                raise gives
            return gives  # type: ignore[no-any-return]

    async with House() as house:
        turn = await house.manager(planner=Broken(), client=MockLLMClient(["as it is"])).run_turn("hello")
        assert (turn.status, turn.response) == (RunStatus.SUCCEEDED, "as it is")
        assert "planning failed" in caplog.text
        assert ("Traceback" in caplog.text) is isinstance(gives, Exception)

        class Away(Broken):
            async def create_plan(self, prompt: str, available_tools: Any) -> Plan:
                raise ProviderUnavailable("away")

        turn = await house.manager(planner=Away(), client=MockLLMClient(["as it is"])).run_turn("hello")
        assert (turn.error or {})["type"] == "ProviderUnavailable"


@pytest.mark.sentence("001", "PlanExecutor: skips step on planner error, logs")
async def test_row_plan_executor_broken_steps_are_skipped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    steps = (
        PlanStep(1, "calculator", {"expression": "1 + 1"}),
        PlanStep(2, "nothing", {}),
        PlanStep(3, "calculator", {"expression": "{{step_2.result}} + 1"}),
        PlanStep(4, "calculator", {"expression": "{{step_1.result}} + 5"}),
    )
    async with House() as house:
        manager = house.manager(planner=Fixed(*steps))
        turn = await manager.run_turn("x")
        assert (turn.status, turn.response) == (RunStatus.SUCCEEDED, "7")
        assert [step.status.value for step in turn.steps] == ["completed", "skipped", "skipped", "completed"]
        assert "unknown tool 'nothing'" in (turn.steps[1].error or "")
        assert turn.steps[2].error == "it needs step 2, which is dropped"
    records = [each for each in caplog.records if "is dropped" in each.message]
    assert len(records) == 2
    assert {vars(each)["trace_id"] for each in records} == {turn.trace_id}


async def test_what_each_step_needs_is_looked_up_a_few_times_however_long_a_broken_plan_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked_up, needs = Counter[int](), vars(PlanStep)["needs"].fget

    def counted(step: PlanStep) -> Any:
        looked_up[step.step_number] += 1
        return needs(step)

    monkeypatch.setattr(PlanStep, "needs", property(counted))
    planner = Fixed(
        PlanStep(1, "nothing", {}),
        *(PlanStep(n, "calculator", {"expression": "1"}, depends_on=[n - 1]) for n in range(2, 90)),
        *(PlanStep(n, "calculator", {"expression": "1"}, depends_on=[n - 1][: n - 90]) for n in range(90, 101)),
    )
    asked, log = PlanRequest(prompt="x", tools=[]), TurnLog("trace", "turn")
    planned = await PlanExecutor(planner).plan(asked, built_in_tools(), lambda own: None, log)
    assert [step.step_number for step, _ in planned.skipped] == list(range(1, 90))
    assert len(planned.plan.steps) == 11
    assert max(looked_up.values()) <= 2


async def test_row_plan_executor_without_a_plan_the_model_answers(caplog: pytest.LogCaptureFixture) -> None:
    async with House() as house:
        client = MockLLMClient(["Hello!"])
        manager = house.manager(planner=Fixed(error=PlanningError("no idea")), client=client)
        turn = await manager.run_turn("hi {{step_1.result}}")
        assert (turn.status, turn.response) == (RunStatus.SUCCEEDED, "Hello!")
        assert client.get_calls()[0]["messages"] == [{"role": "user", "content": "hi {{step_1.result}}"}]
    assert "no idea" in caplog.text


async def test_row_plan_executor_with_no_model_either_the_turn_fails_once() -> None:
    async with House(max_retries=3) as house:
        hooks = Told()
        manager = house.manager(planner=Fixed(error=PlanningError("no idea", ["p"])), hooks=[hooks])
        turn = await manager.run_turn("hi")
        assert turn.status is RunStatus.FAILED
        assert turn.error == {"type": "PlanningError", "message": "no idea", "details": {"problems": ["p"]}}
        assert hooks.calls[-2:] == [("on_error", "PlanningError"), ("on_turn_end", "failed")]
        assert actions(await trail(manager, AUDIT)) == ["turn.started", "turn.failed"]


class Failing(LLMClient):
    """A provider that is away for a while."""

    def __init__(self, failures: int) -> None:
        self.failures, self.asked = failures, 0

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        self.asked += 1
        if self.asked <= self.failures:
            raise ProviderUnavailable("away")
        return LLMResponse({"role": "assistant", "content": "back"})

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        response = await self.generate(messages)
        yield LLMStreamChunk("back", finish_reason="stop", response=response)


@pytest.mark.sentence("001", "StepProcessor: circuit-break on repeated provider errors")
async def test_row_step_processor_repeated_provider_errors_open_a_circuit_and_put_the_turn_off() -> None:
    async with House() as house:
        client = Failing(2)
        breakers = Breakers(house.clock, after=2, window=60.0)
        manager = house.manager(planner=Fixed(llm()), client=client, breakers=breakers)
        await manager.start_turn({"text": "hi", "turn_id": "t"})
        assert await house.runner.run_once()
        turn, info = await manager.get_turn("t"), await house.runner.get_run("t")
        # Two tries failed and the third was not made; the run was put off and has lost no attempt.
        assert (turn.status, info.reason, info.attempt, client.asked) == (RunStatus.PENDING, "CircuitOpen", 1, 2)
        assert not await house.runner.run_once()
        house.clock.advance(100)  # type: ignore[attr-defined]
        assert await house.runner.run_once()
        turn = await manager.get_turn("t")
        assert (turn.status, turn.response, client.asked) == (RunStatus.SUCCEEDED, "back", 3)


@pytest.mark.sentence("001", "ContextManager: retries with stale-read fallback")
async def test_row_context_manager_preferences_that_cannot_be_read_are_told_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with House() as house:
        manager = house.manager()
        asked = {"text": SUM, "user_id": "bob"}
        await manager.run_turn(asked)

        async def away(*args: Any) -> Any:
            raise StorageBusy("no answer")

        monkeypatch.setattr(house.stores.preferences, "get_all", away)
        turn = await manager.run_turn(asked)
        assert turn.status is RunStatus.SUCCEEDED
        started = next(e.payload for e in await trail(manager, AUDIT) if e.turn_id == turn.id)
        assert isinstance(started, AuditEvent)
        assert started.details["stale"] is True


@pytest.mark.sentence("001", "ContextManager: read/write conversation history and user prefs; provide short-term cache")
@pytest.mark.parametrize(("user", "recorded"), [("bob", {"mood": "merry"}), (None, {})])
async def test_a_turn_records_the_preferences_of_its_user_that_it_uses(
    user: str | None, recorded: dict[str, Any]
) -> None:
    pack = PersonalityInstance(name="p", default=True, system_prompt="Be {{mood}}.")
    async with House() as house:
        for name in ("bob/mood", "bob/life", "eve/mood"):
            await house.stores.preferences.set(name, "merry")
        manager = house.manager(client=MockLLMClient(), packs=PackSet.of({"p": pack}))
        turn = await manager.run_turn({"text": SUM, "user_id": user, "params": {} if user else {"mood": "grim"}})
        assert turn.status is RunStatus.SUCCEEDED
        [begun] = [each for each in await house.records(turn.id) if each.name == "begin" and each.kind == "done"]
        assert begun.result is not None
        assert json.loads(begun.result)["preferences"] == recorded


@pytest.mark.sentence("001", "EventPublisherSubscriber: idempotent writes via `step_id` keys")
async def test_row_event_publisher_a_turn_that_is_taken_up_again_tells_nothing_twice(place: Path | None) -> None:
    inside, calls = asyncio.Event(), 0

    async def wait() -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            inside.set()
            await asyncio.Event().wait()
        return "done"

    steps = (PlanStep(1, "once", {}), PlanStep(2, "wait", {}, depends_on=[1]))
    ran = 0

    def once() -> int:
        nonlocal ran
        ran += 1
        return ran

    async with House(place) as house:
        manager = house.manager(planner=Fixed(*steps), tools=tools_of(wait, once))
        await manager.start_turn({"text": "x", "turn_id": "t"})
        running = asyncio.ensure_future(house.runner.run_once())
        await until(inside)
        running.cancel()
        await asyncio.wait({running})
        runner = house.another()
        again = house.manager(runner, planner=Fixed(*steps), tools=tools_of(wait, once))
        assert await runner.run_once()
        assert (await again.get_turn("t")).response == "done"
        assert ran == 1
        for topic in (TURNS, STEPS, RESULTS, AUDIT):
            ids = [each.event_id for each in await trail(again, topic)]
            assert len(ids) == len(set(ids))
        assert [each.payload.step_number for each in await trail(again, STEPS)] == [1, 2]  # type: ignore[attr-defined]
        assert actions(await trail(again, AUDIT)).count("step.completed") == 2


# -- steps


async def test_a_step_is_tried_again_and_then_fails_the_turn_with_its_error() -> None:
    tries = 0

    def broken() -> None:
        nonlocal tries
        tries += 1
        raise OSError("no such device")

    async with House(max_retries=3) as house:
        hooks = Told()
        steps = (PlanStep(1, "broken", {}), PlanStep(2, "calculator", {"expression": "2"}))
        manager = house.manager(planner=Fixed(*steps), tools=_with_calculator(broken), hooks=[hooks])
        turn = await manager.run_turn("x")
        assert tries == 3
        assert turn.status is RunStatus.FAILED
        assert turn.error is not None
        assert (turn.error["type"], turn.error["details"]) == ("OSError", {"step": "step_1", "attempts": 3})
        assert [step.status.value for step in turn.steps] == ["failed", "completed"]
        assert turn.steps[0].attempt == 3
        assert [call for call in hooks.calls if call[0] == "on_error"] == [("on_error", "StepExecutionError")]


def _with_calculator(*functions: Any) -> ToolRegistry:
    registry = built_in_tools()
    for tool in tools_of(*functions).list_tools():
        registry.register(tool)
    return registry


@pytest.mark.sentence("001", "StepProcessor caps concurrent in-flight steps (configurable, default = 16)")
async def test_only_so_many_steps_of_all_turns_are_at_work_at_once() -> None:
    now = most = 0

    async def work() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.005)
        now -= 1

    async with House() as house:
        steps = [PlanStep(number, "work", {}) for number in range(1, 9)]
        manager = house.manager(planner=Fixed(*steps), tools=tools_of(work), max_in_flight=3)
        turns = await asyncio.gather(manager.run_turn("a"), manager.run_turn("b"))
        assert [turn.status for turn in turns] == [RunStatus.SUCCEEDED] * 2
        assert most == 3


async def test_a_hook_that_fails_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Bad:
        def on_turn_start(self, turn: Turn) -> None:
            raise RuntimeError("sync")

        async def on_step_end(self, turn: Turn, step: Any) -> None:
            raise RuntimeError("async")

        def on_turn_end(self, turn: Turn) -> None:
            raise RuntimeError("end")

    async with House() as house:
        hooks = Told()
        turn = await house.manager(hooks=[Bad(), hooks]).run_turn(SUM)
        assert turn.status is RunStatus.SUCCEEDED
        assert hooks.calls[0][0] == "on_turn_start"
    failed = [each for each in caplog.records if "failed" in each.message and each.exc_info]
    assert len(failed) == 4
    assert {vars(each)["trace_id"] for each in failed} == {turn.trace_id}


async def test_a_cancellation_of_a_hooks_own_is_not_the_turns() -> None:
    class Bad:
        async def on_step_start(self, turn: Turn, step: Any) -> None:
            other = asyncio.get_running_loop().create_future()
            other.cancel()
            await other

    async with House() as house:
        turn = await house.manager(hooks=[Bad()]).run_turn(SUM)
        assert (turn.status, turn.response) == (RunStatus.SUCCEEDED, "84")


async def test_a_turn_that_is_cancelled_inside_a_hook_is_cancelled() -> None:
    inside = asyncio.Event()

    class Slow:
        async def on_plan_ready(self, turn: Turn, plan: Plan) -> None:
            inside.set()
            await asyncio.Event().wait()

    async with House() as house:
        manager = house.manager(hooks=[Slow()])
        running = asyncio.ensure_future(manager.run_turn({"text": SUM, "turn_id": "t"}))
        await inside.wait()
        await manager.cancel("t")
        assert (await running).status is RunStatus.CANCELLED


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"hooks": Told()}, "hooks must be a list of objects"),
        ({"planner": Fixed}, "a planner must be an instance with create_plan"),
        ({"step_tries": 0}, "step_tries must be"),
        ({"backoff_base": -1}, "backoff_base must be a number of seconds"),
        ({"tools": 5}, "a ToolRegistry or a list of tools"),
    ],
)
async def test_what_no_manager_can_be_made_of_is_said_at_once(options: dict[str, Any], says: str) -> None:
    async with House() as house:
        with pytest.raises(InvalidArgument, match=says):
            house.manager(**options)


@pytest.mark.sentence("001", "Every sub-module emits structured logs with `trace_id`")
async def test_logs_of_a_turn_carry_its_trace_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "agent_runtime_core")
    async with House() as house:
        turn = await house.manager().run_turn(SUM)
    told = [each for each in caplog.records if each.message.startswith(("turn ", "step "))]
    assert len(told) == 4
    assert {(vars(each)["trace_id"], vars(each)["turn_id"]) for each in told} == {(turn.trace_id, turn.id)}
    assert [vars(each)["step_id"] for each in told][1:3] == [step.step_id for step in turn.steps]
    assert told[0].message == f"turn {turn.id}: started with personality default"
    assert {each.filename for each in told}.isdisjoint({"logs.py"})


async def test_a_turn_is_cancelled_with_its_steps() -> None:
    inside = asyncio.Event()

    async def wait() -> None:
        inside.set()
        await asyncio.Event().wait()

    async with House() as house:
        hooks = Told()
        manager = house.manager(planner=Fixed(PlanStep(1, "wait", {})), tools=tools_of(wait), hooks=[hooks])
        await manager.start_turn({"text": "x", "turn_id": "t"})
        running = asyncio.ensure_future(house.runner.run_once())
        await until(inside)
        assert await manager.cancel("t", wait=True) is RunStatus.CANCELLED
        await running
        turn = await manager.get_turn("t")
        assert [step.status.value for step in turn.steps] == ["cancelled"]
        assert hooks.calls[-1] == ("on_turn_end", "cancelled")


async def ends(manager: TurnManager) -> list[tuple[str, Any]]:
    """What the trail tells of ends: the action, and the type of the error."""
    told = [each.payload for each in await trail(manager, AUDIT)]
    last = [each for each in told if isinstance(each, AuditEvent) and "status" in each.details]
    return [(each.action, (each.details["error"] or {}).get("type")) for each in last if each.action[:5] == "turn."]


async def test_a_turn_that_ends_before_it_begins_is_told_once(place: Path | None) -> None:
    async with House(place) as house:
        hooks = Told()
        manager = house.manager(hooks=[hooks])
        await manager.start_turn({"text": SUM, "turn_id": "cancelled"})
        assert await manager.cancel("cancelled")
        assert not await manager.cancel("cancelled")
        await manager.start_turn({"text": SUM, "turn_id": "expired"}, expires_in=5)
        house.clock.advance(10)  # type: ignore[attr-defined]
        assert await house.runner.run_once()
        assert await ends(manager) == [("turn.cancelled", None), ("turn.timed_out", "Expired")]
        assert hooks.calls == [("on_turn_end", "cancelled"), ("on_turn_end", "timed_out")]


async def test_a_turn_that_is_cut_off_is_told_once(place: Path | None) -> None:
    begun = asyncio.Event()

    async def wait() -> None:
        begun.set()
        await asyncio.Event().wait()

    async with House(place) as house:
        hooks = Told()
        manager = house.manager(planner=Fixed(PlanStep(1, "wait", {})), tools=tools_of(wait), hooks=[hooks])
        await manager.start_turn({"text": "x", "turn_id": "t"}, deadline=house.clock.wall() + 60)
        running = asyncio.ensure_future(house.runner.run_once())
        await until(begun)
        running.cancel()  # its worker is gone, and nobody takes it up again until it is too late
        await asyncio.wait({running})
        house.clock.advance(100)  # type: ignore[attr-defined]
        assert await house.another().run_once()
        assert await ends(manager) == [("turn.timed_out", "DeadlineExceeded")]
        assert [call for call in hooks.calls if call[0] == "on_turn_end"] == [("on_turn_end", "timed_out")]


async def fails_then_hangs(house: House, **options: Any) -> tuple[TurnManager, asyncio.Task[bool], asyncio.Event]:
    """A turn `t` whose first attempt failed, and whose second one hangs in a step, and was saved meanwhile.

    The event is set when it hangs.
    """
    inside, saved, tries = asyncio.Event(), asyncio.Event(), 0

    def begin() -> None:
        nonlocal tries
        tries += 1
        if tries <= 2:
            raise ProviderUnavailable("the first one")

    async def hang() -> None:
        begin()
        inside.set()
        await asyncio.Event().wait()

    async def beside() -> None:
        begin()
        await inside.wait()

    class Saved:
        def on_step_end(self, turn: Turn, step: Any) -> None:
            if step.status is StepStatus.COMPLETED:
                saved.set()

    steps = (PlanStep(1, "hang", {}), PlanStep(2, "beside", {}), PlanStep(3, "beside", {}, depends_on=[1]))
    manager = house.manager(planner=Fixed(*steps), tools=tools_of(hang, beside), step_tries=1, hooks=[Saved()])
    await manager.start_turn({"text": "x", "turn_id": "t"}, **options)
    await house.runner.run_once()
    turn = await manager.get_turn("t")
    assert turn.error is not None
    assert (turn.status, turn.error["type"]) == (RunStatus.PENDING, "ProviderUnavailable")
    house.clock.advance(30)  # type: ignore[attr-defined]
    running = asyncio.ensure_future(house.runner.run_once())
    await until(saved)
    assert [step.status.value for step in (await manager.get_turn("t")).steps] == ["running", "completed", "pending"]
    return manager, running, inside


async def as_the_run_tells(manager: TurnManager) -> Turn:
    """The turn `t`, whose error is that of its run."""
    turn, told = await manager.get_turn("t"), (await manager.runner.wait("t", 10)).error
    assert told is not None
    assert turn.error == {"type": told.type, "message": told.message, "details": told.details}
    return turn


async def test_a_turn_that_failed_before_it_timed_out_tells_that_it_timed_out(place: Path | None) -> None:
    async with House(place, max_retries=3) as house:
        manager, running, _ = await fails_then_hangs(house, deadline=house.clock.wall() + 60)
        running.cancel()
        await asyncio.wait({running})
        house.clock.advance(100)  # type: ignore[attr-defined]
        assert await house.another().run_once()
        turn = await as_the_run_tells(manager)
        assert (turn.status, turn.error and turn.error["type"]) == (RunStatus.TIMED_OUT, "DeadlineExceeded")
        assert [step.status.value for step in turn.steps] == ["cancelled", "completed", "pending"]


async def test_a_turn_that_failed_before_it_died_tells_what_it_died_of(place: Path | None) -> None:
    async with House(place, max_retries=3) as house:
        manager, running, inside = await fails_then_hangs(house)
        for crashes in (1, 3):  # the first of them came after a record
            running.cancel()
            await asyncio.wait({running})
            for _ in range(crashes):  # claimed, and never heard of again
                await house.runner.queue.claim("lost", lease_seconds=1)
                house.clock.advance(5)  # type: ignore[attr-defined]
            inside.clear()
            running = asyncio.ensure_future(house.runner.run_once())
            if crashes == 1:
                await until(inside)
        assert await running
        turn = await as_the_run_tells(manager)
        assert (turn.status, turn.error and turn.error["type"]) == (RunStatus.DEAD, "Poisoned")
        assert [step.status.value for step in turn.steps] == ["pending", "completed", "pending"]


async def test_a_turn_that_failed_before_it_was_cancelled_tells_no_earlier_error() -> None:
    async with House(max_retries=3) as house:
        manager, running, _ = await fails_then_hangs(house)
        assert await manager.cancel("t", wait=True) is RunStatus.CANCELLED
        await running
        turn = await manager.get_turn("t")
        assert turn.error == {"type": "cancelled", "message": "", "details": {}}
        assert [step.status.value for step in turn.steps] == ["cancelled", "completed", "cancelled"]
        assert await ends(manager) == [("turn.cancelled", None)]


async def test_a_turn_that_expired_tells_so(place: Path | None) -> None:
    async with House(place) as house:
        manager = house.manager()
        await manager.start_turn({"text": SUM, "turn_id": "t"}, expires_in=5)
        house.clock.advance(10)  # type: ignore[attr-defined]
        assert await house.runner.run_once()
        turn = await as_the_run_tells(manager)
        assert turn.error == {"type": "Expired", "message": "the run did not start within 5 s", "details": {}}


async def test_a_turn_that_kills_its_workers_is_told_once(place: Path | None) -> None:
    async with House(place) as house:
        hooks = Told()
        manager = house.manager(hooks=[hooks])
        await manager.start_turn({"text": SUM, "turn_id": "t"})
        for _ in range(4):  # claimed, and never heard of again
            await house.runner.queue.claim("lost", lease_seconds=1)
            house.clock.advance(5)  # type: ignore[attr-defined]
        assert await house.runner.run_once()
        assert (await manager.get_turn("t")).status is RunStatus.DEAD
        assert await ends(manager) == [("turn.dead", "Poisoned")]
        assert hooks.calls == [("on_turn_end", "dead")]


async def test_a_parked_turn_that_is_cancelled_is_told_once_and_its_steps_are_over(place: Path | None) -> None:
    async with House(place, park_after=0) as house:
        hooks = Told()
        steps = (PlanStep(1, "calculator", {"expression": "1"}),)
        manager = house.manager(remote_steps=True, planner=Fixed(*steps), hooks=[hooks])
        await manager.start_turn({"text": "x", "turn_id": "t"})
        while (await manager.get_turn("t")).status is not RunStatus.WAITING:
            assert await house.runner.run_once()
        assert await manager.cancel("t", wait=True) is RunStatus.CANCELLED
        turn = await manager.get_turn("t")
        assert [step.status for step in turn.steps] == [StepStatus.CANCELLED]
        assert await ends(manager) == [("turn.cancelled", None)]
        assert hooks.calls[-1] == ("on_turn_end", "cancelled")


async def test_an_end_is_told_though_the_store_of_turns_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async with House() as house:
        manager = house.manager()
        await manager.start_turn({"text": SUM, "turn_id": "t"})

        async def away(*args: Any) -> Any:
            raise StorageBusy("no answer")

        monkeypatch.setattr(house.stores.memory, "get", away)
        assert await manager.cancel("t")
        assert await ends(manager) == [("turn.cancelled", None)]


async def test_the_trail_of_old_turns_is_deleted_and_goes_on(place: Path | None) -> None:
    async with House(place) as house:
        manager = house.manager()
        await manager.run_turn(SUM)
        house.clock.advance(100)  # type: ignore[attr-defined]
        turn = await manager.run_turn(SUM)
        told = {topic: len(await trail(manager, topic)) for topic in (TURNS, STEPS, RESULTS, AUDIT)}
        assert await manager.vacuum(older_than=50) == sum(told.values()) // 2
        for topic, count in told.items():
            left = await trail(manager, topic)
            assert {each.turn_id for each in left} == {turn.id}
            assert [each.offset for each in left] == [*range(count // 2, count)]
        with pytest.raises(InvalidArgument, match=r"older_than must be .*, got -1"):
            await manager.vacuum(older_than=-1)


async def test_a_trail_is_kept_for_as_long_as_one_says() -> None:
    async with House() as house:
        manager = house.manager()
        await manager.run_turn(SUM)
        for ever in (1e11, 1e18, float("inf")):
            assert await manager.vacuum(ever) == 0


async def test_a_turn_is_streamed_to_its_end() -> None:
    async with House() as house:
        manager = house.manager()
        turn = await manager.start_turn(SUM)
        running = asyncio.ensure_future(house.runner.run_once())
        kinds = [each.event_type async for each in manager.stream(turn.id, backpressure=True)]
        assert [each.event_type async for each in manager.stream(turn.id, 2)] == kinds[2:]
        await running
        assert kinds[0] == "run.started"
        assert kinds[-2:] == ["assistant.message", "run.succeeded"]


# -- steps as runs


async def test_steps_are_runs_that_any_worker_may_claim(place: Path | None) -> None:
    async with House(place, park_after=0) as house:
        manager = house.manager(remote_steps=True, client=MockLLMClient(["four"]), planner=Fixed(
            PlanStep(1, "calculator", {"expression": "1 + 1"}),
            PlanStep(2, "calculator", {"expression": "{{step_1.result}} * 2"}), llm(3, "say {{step_2.result}}"),
        ))  # fmt: skip
        await manager.start_turn({"text": "x", "turn_id": "t"})
        elsewhere = house.another(worker_id="worker-2")
        while await elsewhere.run_once() or await house.runner.run_once():
            pass
        turn = await manager.get_turn("t")
        assert (turn.status, turn.response) == (RunStatus.SUCCEEDED, "four")
        assert [step.result for step in turn.steps] == [2, 4, "four"]
        runs = await house.runner.runs(agent="turn.step")
        assert len(runs) == 3
        assert {str(run.parent_run_id) for run in runs} == {turn.id}
        assert turn.metrics.prompt_tokens == 10
        ids = [step.step_id for step in turn.steps]
        assert ids == [each.step_id for each in await trail(manager, STEPS)]
        finals = [e.step_id for e in await trail(manager, RESULTS) if e.payload.final]  # type: ignore[attr-defined]
        assert finals == ids


async def test_a_turn_that_is_cut_while_a_step_is_a_run_of_its_own_goes_on_with_that_run(place: Path | None) -> None:
    inside, free = asyncio.Event(), asyncio.Event()

    async def now() -> str:
        await house.clock.sleep(5)
        return "begun"

    async def wait() -> str:
        inside.set()
        await free.wait()
        return "done"

    async with House(place) as house:
        steps = PlanStep(1, "now", {}), PlanStep(2, "wait", {}, depends_on=[1])
        manager = house.manager(remote_steps=True, planner=Fixed(*steps), tools=tools_of(wait, now))
        first = asyncio.ensure_future(manager.run_turn({"text": "x", "turn_id": "t"}))
        await until(inside)
        first.cancel()
        await asyncio.wait({first})
        free.set()
        turn = await manager.run_turn({"text": "x", "turn_id": "t"})
        assert (turn.status, turn.response, turn.error) == (RunStatus.SUCCEEDED, "done", None)
        assert len(await house.runner.runs(agent="turn.step")) == 2


async def test_a_step_that_fails_elsewhere_fails_the_turn(place: Path | None) -> None:
    def broken() -> None:
        raise OSError("no such device")

    async with House(place, park_after=0) as house:
        manager = house.manager(
            remote_steps=True, planner=Fixed(PlanStep(1, "broken", {})), tools=tools_of(broken), backoff_base=0.0
        )
        await manager.start_turn({"text": "x", "turn_id": "t"})
        while await house.runner.run_once():
            pass
        turn = await manager.get_turn("t")
        assert turn.status is RunStatus.FAILED
        failed = turn.steps[0]
        assert (failed.status, failed.attempt) == (StepStatus.FAILED, 3)
        assert "no such device" in (failed.error or "")
        assert "no such device" in (turn.error or {})["message"]


# -- by event


@pytest.mark.sentence("001", "TurnManager consumes the `agent.turns` topic")
async def test_turns_that_are_published_are_started_once_whatever_happens_in_between(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with House(place) as house:
        manager = house.manager()
        await manager.topics.tell(TurnEvent.of({"text": SUM}), event_id="one")
        await manager.topics.tell(TurnEvent.of({"text": SUM, "personality": "nobody"}), event_id="bad")
        await manager.topics.tell(TurnEvent.of({"text": SUM, "turn_id": "two"}), event_id="turn:two")

        async def away(*args: Any) -> None:
            raise StorageBusy("no answer")

        with monkeypatch.context() as broken:
            broken.setattr(manager.topics, "commit", away)
            with pytest.raises(StorageBusy):
                await manager.consume()
        assert len(await house.runner.runs()) == 1

        # As another process after a crash between the run and the place in the topic.
        again, stop = house.manager(house.another()), asyncio.Event()
        consuming = asyncio.ensure_future(again.consume(stop=stop))
        async with asyncio.timeout(10):
            while len(await house.runner.runs()) < 2:  # noqa: ASYNC110 - nobody rings for it
                await asyncio.sleep(0.002)
        while await house.runner.run_once():
            pass
        async with asyncio.timeout(10):
            while (await again.topics.stats())[TURNS].lag["turns"]:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        stop.set()
        await consuming
        runs = await house.runner.runs()
        assert [run.status.value for run in runs] == ["succeeded", "succeeded"]
        assert (await again.get_turn("two")).response == "84"
        assert (await again.get_turn("turn:one")).response == "84"
        assert actions(await trail(again, AUDIT)).count("turn.refused") == 1
        assert len(await trail(again, TURNS)) == 3
    assert "nobody" in caplog.text


@pytest.mark.sentence("001", "StepProcessor consumes the `agent.step_results` stream")
async def test_a_step_result_that_comes_by_event_is_taken_in_once() -> None:
    async with House() as house:
        manager = house.manager()
        turn = await manager.run_turn(SUM)
        state = turn.steps[0]
        state.status, state.result, state.metrics = StepStatus.RUNNING, None, StepMetrics()
        await manager.contexts.save_turn(turn)
        [first, _] = await trail(manager, RESULTS)
        taken = await manager.handle_step_result_event(first)
        assert taken is not None
        assert (taken.steps[0].status, taken.steps[0].result) == (StepStatus.COMPLETED, 42)
        assert isinstance(first.payload, StepResultChunk)
        assert taken.steps[0].metrics == StepMetrics.from_dict(first.payload.metrics)
        assert await manager.handle_step_result_event(first) == taken
        [started, *_] = await trail(manager, AUDIT)
        with pytest.raises(InvalidTurn):
            await manager.handle_step_result_event(started)
        wrong: Any = first.to_dict()
        with pytest.raises(InvalidTurn, match="envelope must be an EventEnvelope"):
            await manager.handle_step_result_event(wrong)
        unknown = EventEnvelope.from_dict(first.to_dict() | {"turn_id": "nowhere"})
        assert await manager.handle_step_result_event(unknown) is None


@pytest.mark.sentence("001", "Idempotency: `step_id` allows re-processing without duplication")
async def test_a_late_result_changes_no_step_that_has_ended() -> None:
    async with House() as house:
        manager = house.manager()
        turn = await manager.run_turn(SUM)
        [first, _] = await trail(manager, RESULTS)
        failed = EventEnvelope.from_dict(first.to_dict() | {"payload": first.payload.to_dict() | {"status": "failed"}})
        for status, late, changes in (
            (StepStatus.CANCELLED, first, False),
            (StepStatus.SKIPPED, first, False),
            (StepStatus.FAILED, failed, False),
            (StepStatus.FAILED, first, True),
        ):
            turn.steps[0].status = status
            await manager.contexts.save_turn(turn)
            before = await manager.contexts.get_turn(turn.id)
            assert (await manager.handle_step_result_event(late) != before) is changes
            assert (await manager.contexts.get_turn(turn.id) != before) is changes


@pytest.mark.sentence(
    "001", "TurnManager: accept `TurnEvent` from API layer, attach `trace_id`, pick personality, load session context"
)
async def test_turns_of_one_conversation_go_one_after_the_other_and_remember() -> None:
    async with House() as house:
        client = MockLLMClient(["one", "two"])
        manager = house.manager(planner=Fixed(error=PlanningError("none")), client=client)
        for text in ("a", "b"):
            await manager.start_turn({"text": text, "conversation_id": "c", "turn_id": text})
        assert (await house.runner.get_run("b")).held
        while await house.runner.run_once():
            pass
        said = [each["content"] for each in client.get_calls()[1]["messages"]]
        assert said == ["a", "one", "b"]


async def test_a_limit_of_the_personality_holds() -> None:
    pack = PersonalityInstance(name="p", default=True, limits=RunLimits(max_turns=1))
    async with House() as house:
        manager = house.manager(
            planner=Fixed(llm(1), llm(2, "{{step_1.result}}")), client=MockLLMClient(), packs=PackSet.of({"p": pack})
        )
        turn = await manager.run_turn("x")
        assert turn.status is RunStatus.FAILED
        assert turn.error is not None
        assert turn.error["type"] == "LimitExceeded"


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("limits", [RunLimits(max_turns=2), RunLimits(max_tokens=60)])
async def test_a_limit_of_the_personality_holds_for_steps_side_by_side(limits: RunLimits, remote: bool) -> None:
    pack = PersonalityInstance(name="p", default=True, limits=limits)
    async with House() as house:
        client = MockLLMClient()
        manager = house.manager(
            planner=Fixed(*map(llm, range(1, 11))), client=client, packs=PackSet.of({"p": pack}), remote_steps=remote
        )
        turn = await manager.run_turn("x")
        assert (turn.error or {})["type"] == "LimitExceeded"
        assert client.get_call_count() == 2


async def test_what_steps_elsewhere_used_is_counted_once_by_a_resumed_turn() -> None:
    inside, free = asyncio.Event(), asyncio.Event()

    async def wait() -> str:
        inside.set()
        await free.wait()
        return "done"

    pack = PersonalityInstance(name="p", default=True, limits=RunLimits(max_turns=4, max_tokens=10_000))
    async with House() as house:
        steps = [llm(1), PlanStep(2, "wait", {}, depends_on=[1]), llm(3, "{{step_2.result}}"), llm(4, depends_on=[3])]
        client = MockLLMClient()
        manager = house.manager(
            remote_steps=True, planner=Fixed(*steps), tools=tools_of(wait), client=client, packs=PackSet.of({"p": pack})
        )
        first = asyncio.ensure_future(manager.run_turn({"text": "x", "turn_id": "t"}))
        await until(inside)
        first.cancel()
        await asyncio.wait({first})
        free.set()
        assert (await manager.run_turn({"text": "x", "turn_id": "t"})).status is RunStatus.SUCCEEDED
        usage = (await house.runner.wait("t")).usage
        assert (client.get_call_count(), usage["turns"], usage["total_tokens"]) == (3, 3, 90)


async def test_only_so_much_of_a_conversation_is_told() -> None:
    pack = PersonalityInstance(name="p", default=True, memory=MemorySettings(history_messages=3, history_tokens=20))
    async with House() as house:
        client = MockLLMClient(["one " * 20, "two"])
        manager = house.manager(
            planner=Fixed(error=PlanningError("none")), client=client, packs=PackSet.of({"p": pack})
        )
        for text in ("a", "b", "c"):
            await manager.run_turn({"text": text, "conversation_id": "c", "turn_id": text})
        told = [[each["content"] for each in call["messages"]] for call in client.get_calls()]
        # The long answer is left out for its tokens, and what was before it with it.
        assert told == [["a"], ["b"], ["b", "two", "c"]]


@pytest.mark.parametrize("memory", [MemorySettings(history_messages=3), MemorySettings(history_tokens=15)])
async def test_no_result_of_a_tool_is_told_without_its_call(memory: MemorySettings) -> None:
    pack = PersonalityInstance(name="p", default=True, memory=memory)
    async with House() as house:
        said = [
            ConversationMessage(role="user", content="weather?"),
            ConversationMessage(role="assistant", tool_calls=[ToolCall(id="c", name="look " * 20)]),
            ConversationMessage(role="tool", content="sunny", tool_call_id="c"),
            ConversationMessage(role="assistant", content="sun"),
        ]
        id_ = uuid4()
        await house.stores.conversations.save(Conversation(id=id_, messages=said))
        client = MockLLMClient(["yes"])
        manager = house.manager(
            planner=Fixed(error=PlanningError("none")), client=client, packs=PackSet.of({"p": pack})
        )
        assert (await manager.run_turn({"text": "sure?", "conversation_id": str(id_)})).response == "yes"
        assert [each["content"] for each in client.get_calls()[0]["messages"]] == ["sun", "sure?"]


def test_each_message_of_a_conversation_is_measured_once() -> None:
    class Said(dict[str, Any]):
        read = 0

        def get(self, key: str, default: Any = None) -> Any:
            Said.read += key == "content"
            return super().get(key, default)

    said = [Said(role="user", content="x" * 30) for _ in range(100)]
    assert len(recent_messages(said, MemorySettings(history_messages=1000, history_tokens=14 * 5 + 13), 1)) == 5
    assert Said.read == 100
    assert len(recent_messages(said, MemorySettings(history_messages=50), 60)) == 60
    assert len(recent_messages(said, MemorySettings(history_tokens=1), 2)) == 2


async def test_a_personality_that_is_not_to_remember_reads_the_conversation_and_adds_nothing(
    place: Path | None,
) -> None:
    packs = PackSet.of(
        {
            "open": PersonalityInstance(name="open", default=True),
            "discreet": PersonalityInstance(name="discreet", memory=MemorySettings(remember=False)),
        }
    )
    async with House(place) as house:
        client = MockLLMClient(["none yet", "one", "two", "three"])
        manager = house.manager(planner=Fixed(error=PlanningError("none")), client=client, packs=packs)
        for text, personality in (("a", "discreet"), ("b", "open"), ("c", "discreet"), ("d", "open")):
            asked = {"text": text, "conversation_id": "c", "turn_id": text, "personality": personality}
            turn = await manager.start_turn(asked)
            assert await house.runner.run_once()
            assert (await manager.get_turn(turn.id)).status is RunStatus.SUCCEEDED
        told = [[each["content"] for each in call["messages"]] for call in client.get_calls()]
        assert told == [["a"], ["b"], ["b", "one", "c"], ["b", "one", "d"]]
        said = (await manager.contexts.history("c")).value
        assert [each["content"] for each in said] == ["b", "one", "d", "three"]


async def test_a_tool_that_needs_a_yes_parks_the_turn_until_it_comes(place: Path | None) -> None:
    sent: list[str] = []

    def send(to: str) -> str:
        sent.append(to)
        return f"sent to {to}"

    tool = Tool.from_function(send)
    tool.requires_confirmation = True
    steps = (PlanStep(1, "calculator", {"expression": "1 + 1"}), PlanStep(2, "send", {"to": "bob"}, depends_on=[1]))
    async with House(place, park_after=0) as house:
        hooks = Told()
        manager = house.manager(planner=Fixed(*steps), tools=_with_calculator(tool), hooks=[hooks])
        await manager.start_turn({"text": "x", "turn_id": "t"})
        assert await house.runner.run_once()
        waiting = await manager.get_turn("t")
        assert waiting.status is RunStatus.WAITING
        assert [step.status.value for step in waiting.steps] == ["completed", "pending"]
        await house.runner.approve("t", "tool:send", True)
        assert await house.runner.run_once()
        turn = await manager.get_turn("t")
        assert (turn.status, turn.response, sent) == (RunStatus.SUCCEEDED, "sent to bob", ["bob"])
        assert [name for name, _ in hooks.calls].count("on_turn_start") == 1
        assert [name for name, _ in hooks.calls].count("on_step_end") == 2


@pytest.mark.sentence("001", "StepProcessor: handle streaming back-pressure")
@pytest.mark.skipif(find_spec("redis") is None, reason="needs the redis package")
async def test_a_turn_on_redis_with_a_reader_that_holds_it_back(redis_url: str) -> None:
    async with AgentRunner.open(redis_url) as runner:
        client = MockLLMClient(["word " * 200])
        manager = TurnManager(runner, planner=Fixed(llm()), client=client)
        turn = await manager.start_turn({"text": "x", "turn_id": "t"})
        running = asyncio.ensure_future(runner.run_once())
        events = [each async for each in manager.stream(turn.id, backpressure=True)]
        await running
        said = "".join(each.payload["delta"] for each in events if each.event_type == "assistant.delta")
        assert said == "word " * 200 == (await manager.get_turn("t")).response
        assert [each.offset for each in await trail(manager, STEPS)] == [0]
        assert (await manager.topics.stats())[RESULTS].errors == 0


async def test_no_plan_reads_what_is_kept_of_turns(place: Path | None) -> None:
    async with House(place) as house:
        first = await house.manager().run_turn({"text": SUM, "turn_id": "secret"})
        steps = (
            PlanStep(1, "set", {"key": "a", "value": 1}, kind=StepKind.MEMORY_OP),
            PlanStep(2, "search", {}, kind=StepKind.MEMORY_OP, depends_on=[1]),
        )
        turn = await house.manager(planner=Fixed(*steps)).run_turn("x")
        assert turn.steps[1].result == [{"key": "a", "value": 1}]
        key = f"agent_runtime_core/turn/{first.id}"
        assert await house.stores.memory.get(key) is not None
        for name, more in (("get", {}), ("set", {"value": 1}), ("delete", {})):
            broken = PlanStep(1, name, {"key": key, **more}, kind=StepKind.MEMORY_OP)
            failed = await house.manager(planner=Fixed(broken)).run_turn("x")
            assert "is reserved" in (failed.error or {})["message"]


async def test_a_turn_is_deleted_with_what_was_saved_of_it(place: Path | None) -> None:
    async with House(place) as house:
        manager = house.manager()
        turn = await manager.run_turn(SUM)
        waiting = await manager.start_turn("later")
        with pytest.raises(IllegalTransition):
            await manager.discard(waiting.id)
        await manager.discard(turn.id)
        with pytest.raises(UnknownRun):
            await manager.get_turn(turn.id)
        assert await manager.contexts.get_turn(turn.id) is None
