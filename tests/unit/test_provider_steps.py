"""Steps of turns that only provider workers execute, which know the topics and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.limits import RunLimits
from agent_runtime_core.planning import PlanStep, StepKind
from agent_runtime_core.status import RunStatus, StepStatus
from agent_runtime_core.testing import MockLLMClient, VirtualClock
from agent_runtime_core.tools import Tool
from agent_runtime_core.turns import (
    EventEnvelope,
    EventPublisherSubscriber,
    PackSet,
    PersonalityInstance,
    ProviderSteps,
    StepRequest,
    StepResultChunk,
)
from agent_runtime_core.turns.events import AUDIT, RESULTS, STEPS
from tests.support.runs import soon
from tests.unit.test_turns import Fixed, House

ASK = PlanStep(1, "", {"prompt": "How are you?"}, kind=StepKind.LLM_CALL)
Answer = Callable[["Provider", EventEnvelope, StepRequest], Awaitable[None]]


class Provider:
    """Answers requests of steps. It has its own objects for the topics, as a process of its own would."""

    def __init__(self, house: House, answer: Answer) -> None:
        runner = house.another()
        self.topics = EventPublisherSubscriber(runner.event_bus, runner.state_store)
        self.requests: list[StepRequest] = []
        self._answer = answer
        self._task = asyncio.create_task(self._work())

    async def __aenter__(self) -> Provider:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _work(self) -> None:
        async for envelope in self.topics.subscribe(STEPS, 0):
            if isinstance(envelope.payload, StepRequest):
                self.requests.append(envelope.payload)
                await self._answer(self, envelope, envelope.payload)

    async def send(self, to: EventEnvelope, event: str, *, turn_id: str | None = None, **fields: Any) -> None:
        assert isinstance(to.payload, StepRequest)
        fields = {"step_number": to.payload.step_number, "attempt": to.payload.attempt, **fields}
        await self.topics.tell(
            StepResultChunk(**fields), event_id=f"{to.step_id}:{event}", turn_id=turn_id or to.turn_id,
            step_id=to.step_id, trace_id=to.trace_id,
        )  # fmt: skip

    async def complete(self, to: EventEnvelope, result: Any, event: str = "provider", **fields: Any) -> None:
        await self.send(to, event, final=True, status="completed", result=result, **fields)


async def fine(provider: Provider, to: EventEnvelope, request: StepRequest) -> None:
    """Answer in two pieces, each sent twice, as a provider worker that was killed and restarted does."""
    for number in range(2):
        for index, delta in enumerate(("I am ", "fine.")):
            await provider.send(to, f"piece:{number}:{index}", index=index, delta=delta)
    await provider.complete(to, "I am fine.", metrics={"prompt_tokens": 30, "completion_tokens": 4, "cost_usd": 0.5})


async def silent(provider: Provider, to: EventEnvelope, request: StepRequest) -> None:
    """Never answer."""


def still(place: Path | None = None, **config: Any) -> House:
    """A house whose time only passes when a test says so."""
    return House(place, clock=VirtualClock(), **config)


@contextlib.asynccontextmanager
async def started(house: House, *steps: PlanStep, **options: Any) -> AsyncIterator[Any]:
    """A manager whose turn t is being executed, as a task."""
    settings = options.pop("settings", ProviderSteps())
    manager = house.manager(planner=Fixed(*steps or (ASK,)), provider_steps=settings, backoff_base=0.0, **options)
    await manager.start_turn({"text": "How are you?", "turn_id": "t"})
    working = asyncio.create_task(manager.runner.run_once())
    try:
        yield manager
        await working
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working


@pytest.mark.sentence(
    "001", "StepProcessor: drive each Step (LLM/tool/memory) by invoking the appropriate adapter or service"
)
async def test_a_model_call_is_answered_by_a_provider_worker(place: Path | None) -> None:
    pack = PersonalityInstance(name="p", system_prompt="Be short.", model="m-1", default=True)
    async with still(place) as house, Provider(house, fine) as provider:
        async with started(house, packs=PackSet.of({"p": pack})) as manager:
            pass
        turn = await manager.get_turn("t")
        assert (turn.status, turn.response) == (RunStatus.SUCCEEDED, "I am fine.")
        assert (turn.metrics.prompt_tokens, turn.metrics.cost_usd) == (30, 0.5)
        [request] = provider.requests
        assert request.messages == [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "How are you?"},
        ]
        assert request.options == {"model": "m-1"}
        events = await manager.runner.event_bus.get_events(turn.id)
        assert [each.payload["delta"] for each in events if each.event_type == "assistant.delta"] == ["I am ", "fine."]
        result = await manager.runner.wait("t")
        assert (result.usage["prompt_tokens"], result.usage["cost_usd"]) == (30, 0.5)
        final = [each async for each in manager.topics.subscribe(RESULTS, 0, follow=False) if each.payload.final]
        assert [each.event_id.rpartition(":")[2] for each in final] == ["provider"]


async def test_a_request_has_the_results_of_the_steps_before() -> None:
    async def answer(provider: Provider, to: EventEnvelope, request: StepRequest) -> None:
        await provider.complete(to, f"It is {request.messages[-1]['content']}.")

    add = PlanStep(1, "calculator", {"operation": "add", "a": 1, "b": 2})
    ask = PlanStep(2, "", {"prompt": "{{step_1.result}}"}, depends_on=[1], kind=StepKind.LLM_CALL)
    async with still() as house, Provider(house, answer) as provider:
        async with started(house, add, ask) as manager:
            pass
        assert [each.step_number for each in provider.requests] == [2]
        assert (await manager.get_turn("t")).response == "It is 3."


@pytest.mark.sentence("001", "StepProcessor consumes the `agent.step_results` stream")
async def test_the_first_of_several_answers_counts_and_others_are_ignored() -> None:
    async def answer(provider: Provider, to: EventEnvelope, request: StepRequest) -> None:
        await provider.complete(to, "of another turn", "other-turn", turn_id="another")
        await provider.topics.tell(
            StepResultChunk(step_number=1, final=True, status="completed", result="of another step"),
            event_id="other-step",
            turn_id=to.turn_id,
            step_id="another",
        )
        await provider.complete(to, "first", "1")
        await provider.complete(to, "second", "2")

    async with still() as house, Provider(house, answer):
        async with started(house) as manager:
            pass
        turn = await manager.get_turn("t")
    assert (turn.response, turn.steps[0].status) == ("first", StepStatus.COMPLETED)


async def test_a_failed_answer_is_requested_again() -> None:
    async def answer(provider: Provider, to: EventEnvelope, request: StepRequest) -> None:
        if request.attempt == 1:
            await provider.send(to, "failed", final=True, status="failed", error="no model")
        else:
            await provider.complete(to, f"in attempt {request.attempt}")

    async with still() as house, Provider(house, answer):
        async with started(house) as manager:
            pass
        turn = await manager.get_turn("t")
    assert (turn.response, turn.steps[0].attempt) == ("in attempt 2", 2)


async def test_a_step_that_nobody_answers_fails_at_its_deadline() -> None:
    clock = VirtualClock()
    async with House(clock=clock) as house, Provider(house, silent) as provider:
        settings = ProviderSteps(deadline=10)
        async with started(house, settings=settings, step_tries=2) as manager:
            for number in (1, 2):
                await soon(lambda number=number: len(provider.requests) == number)  # type: ignore[misc]
                clock.advance(10)
        turn = await manager.get_turn("t")
    assert turn.status is RunStatus.FAILED
    assert "no provider worker answered within 10 s" in (turn.steps[0].error or "")


async def test_a_provider_worker_that_falls_silent_is_not_waited_for() -> None:
    clock = VirtualClock()

    async def answer(provider: Provider, to: EventEnvelope, request: StepRequest) -> None:
        if request.attempt == 1:
            await provider.send(to, "alive")
        else:
            await provider.complete(to, "from the second attempt")

    async with House(clock=clock) as house, Provider(house, answer) as provider:
        async with started(house, settings=ProviderSteps(deadline=1000, heartbeat=5)) as manager:
            await soon(lambda: len(provider.requests) == 1)
            for _ in range(50):
                await asyncio.sleep(0)
            while len(provider.requests) == 1:
                clock.advance(5)
                await asyncio.sleep(0.01)
        assert (await manager.get_turn("t")).response == "from the second attempt"
        assert clock.wall() < 500 + VirtualClock().wall()


async def test_a_step_that_nobody_answers_is_executed_here_and_a_late_answer_changes_nothing() -> None:
    clock, late = VirtualClock(), list[EventEnvelope]()

    async def answer(provider: Provider, to: EventEnvelope, request: StepRequest) -> None:
        late.append(to)

    settings = ProviderSteps(deadline=10, fallback="here")
    async with House(clock=clock) as house, Provider(house, answer) as provider:
        async with started(house, settings=settings, client=MockLLMClient(["from here"])) as manager:
            await soon(lambda: len(late) == 1)
            clock.advance(10)
        await provider.complete(late[0], "too late")
        turn = await manager.get_turn("t")
        assert (turn.response, turn.steps[0].attempt) == ("from here", 1)
        actions = [each.payload.action async for each in manager.topics.subscribe(AUDIT, 0, follow=False)
                   if hasattr(each.payload, "action")]  # fmt: skip
        assert "step.not_answered" in actions


async def test_an_answer_that_is_late_for_an_attempt_is_used_by_the_next() -> None:
    clock, first = VirtualClock(), list[EventEnvelope]()

    async def answer(provider: Provider, to: EventEnvelope, request: StepRequest) -> None:
        if not first:
            first.append(to)
        else:
            await provider.complete(first[0], "of the first attempt")

    async with House(clock=clock) as house, Provider(house, answer):
        async with started(house, settings=ProviderSteps(deadline=10)) as manager:
            await soon(lambda: len(first) == 1)
            clock.advance(10)
        turn = await manager.get_turn("t")
    assert (turn.response, turn.steps[0].attempt) == ("of the first attempt", 2)


@pytest.mark.sentence("001", "Idempotency: `step_id` allows re-processing without duplication")
async def test_a_resumed_turn_finds_the_answer_and_does_not_ask_again(tmp_path: Path) -> None:
    answered = asyncio.Event()

    async def answer(provider: Provider, to: EventEnvelope, request: StepRequest) -> None:
        await answered.wait()
        await provider.complete(to, "fine")

    async with still(tmp_path / "turns.db") as house, Provider(house, answer) as provider:
        manager = house.manager(planner=Fixed(ASK), provider_steps=ProviderSteps())
        await manager.start_turn({"text": "How are you?", "turn_id": "t"})
        working = asyncio.create_task(manager.runner.run_loop(handle_signals=False))
        await soon(lambda: len(provider.requests) == 1)
        manager.runner.stop()
        manager.runner.stop()  # does not wait for the turn
        await working
        answered.set()
        other = house.manager(house.another(), planner=Fixed(ASK), provider_steps=ProviderSteps())
        await other.runner.run_once()
        assert (await other.get_turn("t")).response == "fine"
        assert len(provider.requests) == 1


@pytest.mark.parametrize("moment", [-1, 0, 1])
@pytest.mark.parametrize("in_doubt", [None, "fail", "review", "retry"])
@pytest.mark.parametrize("remote_steps", [False, True])
async def test_an_answer_that_came_in_time_counts_after_a_takeover(
    tmp_path: Path, moment: int, in_doubt: str | None, remote_steps: bool
) -> None:
    """The turn resumes so many seconds after the deadline; `in_doubt` is the policy of its tool."""
    calls = list[str]()
    metadata = {} if in_doubt is None else {"on_in_doubt": in_doubt}
    charge = Tool.from_function(lambda: calls.append("here"), name="charge", description="", has_side_effects=True)
    charge.metadata.update(metadata)
    clock, asked = VirtualClock(), list[EventEnvelope]()

    async def answer(provider: Provider, to: EventEnvelope, request: StepRequest) -> None:
        asked.append(to)

    options: dict[str, Any] = {
        "planner": Fixed(PlanStep(1, "charge", {})),
        "tools": [charge],
        "remote_steps": remote_steps,
        "provider_steps": ProviderSteps(kinds=("tool_call",), deadline=10),
    }
    async with House(tmp_path / "turns.db", clock=clock) as house, Provider(house, answer) as provider:
        manager = house.manager(**options)
        await manager.start_turn({"text": "charge", "turn_id": "t"})
        working = asyncio.create_task(manager.runner.run_loop(handle_signals=False, concurrency=2))
        await soon(lambda: len(asked) == 1)
        manager.runner.stop()
        manager.runner.stop()  # does not wait for the turn
        await working
        await provider.complete(asked[0], "charged")
        clock.advance(10 + moment)
        other = house.manager(house.another(), **options)
        working = asyncio.create_task(other.runner.run_loop(handle_signals=False, concurrency=2))
        turn = await other.wait("t")
        other.runner.stop()
        await working
        assert (turn.status, turn.response, calls) == (RunStatus.SUCCEEDED, "charged", [])
        assert len(asked) == 1


async def test_steps_in_runs_of_their_own_are_answered_too() -> None:
    async with still() as house, Provider(house, fine) as provider:
        manager = house.manager(planner=Fixed(ASK), provider_steps=ProviderSteps(), remote_steps=True)
        await manager.start_turn({"text": "How are you?", "turn_id": "t"})
        working = asyncio.create_task(manager.runner.run_loop(handle_signals=False, concurrency=2))
        turn = await manager.wait("t")
        manager.runner.stop()
        await working
    assert (turn.response, turn.metrics.prompt_tokens, len(provider.requests)) == ("I am fine.", 30, 1)


async def test_no_call_is_requested_once_the_answers_have_reached_a_limit() -> None:
    again = PlanStep(2, "", {"prompt": "{{step_1.result}}"}, depends_on=[1], kind=StepKind.LLM_CALL)
    async with still(limits=RunLimits(max_tokens=20)) as house, Provider(house, fine) as provider:
        async with started(house, ASK, again) as manager:
            pass
        turn = await manager.get_turn("t")
        result = await manager.runner.wait("t")
        assert len(provider.requests) == 1
    assert (turn.status, turn.steps[0].result) == (RunStatus.FAILED, "I am fine.")
    assert result.error is not None
    assert result.error.type == "LimitExceeded"


async def test_a_turn_that_is_cancelled_does_not_wait() -> None:
    async with still() as house, Provider(house, silent) as provider:
        async with started(house) as manager:
            await soon(lambda: len(provider.requests) == 1)
            await manager.runner.cancel("t")
        assert (await manager.get_turn("t")).status is RunStatus.CANCELLED


@pytest.mark.parametrize(
    "wrong",
    [{"kinds": ()}, {"kinds": ("llm",)}, {"kinds": "llm_call"}, {"deadline": 0}, {"heartbeat": -1}, {"fallback": "no"}],
)
def test_the_settings_are_checked(wrong: dict[str, Any]) -> None:
    [name] = wrong
    with pytest.raises(InvalidArgument, match=f"^{name} must be"):
        ProviderSteps(**wrong)
