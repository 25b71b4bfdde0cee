"""A run killed at every write comes to the same, and what would not is told with the write and the difference."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core._core.clock import aware
from agent_runtime_core._core.codec.json import encode
from agent_runtime_core._engines.base import Op, OperationSet
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core._execution.context import Context
from agent_runtime_core._journal.record import DONE, Record
from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.errors import InvalidArgument, NotSupported, StorageClosed, UnknownAgent, WaitTimeout
from agent_runtime_core.events import Event
from agent_runtime_core.interfaces import AgentRuntime, RunContext, RunResult
from agent_runtime_core.llm import use_llm_client
from agent_runtime_core.loop import agent_tool
from agent_runtime_core.persistence import Conversation, ConversationMessage
from agent_runtime_core.portal import call, from_thread
from agent_runtime_core.retry import Backoff
from agent_runtime_core.runner import RunnerConfig
from agent_runtime_core.state.memory import InMemoryStateStore
from agent_runtime_core.status import RunStatus
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.testing import CrashReport, MockLLMClient, MockLLMResponse, crash_everywhere
from agent_runtime_core.testing import simulated_process as lives
from agent_runtime_core.testing.crash_points import CrashPoint, KillableEngine
from agent_runtime_core.testing.crash_test import event_log_errors
from agent_runtime_core.testing.simulated_process import SimulatedProcess
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool

Code = Callable[[Any], Awaitable[Any]]


class Coded(AgentRuntime):
    """An agent whose `run` is a function: what that returns is the final output's "value"."""

    def __init__(self, code: Code, key: str = "coded") -> None:
        self._code, self._key = code, key

    @property
    def key(self) -> str:
        return self._key

    async def run(self, ctx: RunContext) -> RunResult:
        return RunResult({"value": await self._code(ctx)})


async def crashed(code: Code, **options: Any) -> CrashReport:
    return await crash_everywhere(Coded(code), {"n": 3}, **options)


def value(report: CrashReport) -> Any:
    return report.outcome.final_output["value"]


# -- what comes through


async def imperative(ctx: Any) -> Any:
    first = await ctx.step("one", lambda: {"a": 1})
    await ctx.emit("half.way", {"first": first})
    second = await ctx.step("two", lambda x: x + 1, 1, on_in_doubt=lambda: None)
    await ctx.checkpoint({"second": second})
    third = await ctx.step("three", lambda: "c", key=str(await ctx.uuid4()))
    return [first, second, third, await ctx.get_state()]


async def chain(ctx: Any) -> Any:
    async def grow(ctx: Any, state: Any) -> int:
        state["n"] = state.get("n", 0) + 1
        await ctx.emit("grown", {"n": state["n"]})
        return int(state["n"])

    return await StepExecutor(ctx).run([Step("a", grow), Step("b", grow, description="again"), Step("c", grow)])


async def fan_out(ctx: Any) -> Any:
    async def square(x: int) -> int:
        return x * x

    return await StepExecutor(ctx, max_concurrency=2).map("square", square, [1, 2, 3])


async def graph(ctx: Any) -> Any:
    async def one(ctx: Any, state: Any) -> int:
        return 1

    async def both(ctx: Any, state: Any) -> int:
        return int(state.results["left"] + state.results["right"])

    steps = [Step("left", one), Step("right", one), Step("both", both, depends_on=["left", "right"])]
    return await StepExecutor(ctx).run(steps)


async def waits(ctx: Any) -> Any:
    before = await ctx.now()
    await ctx.sleep(86_400)
    return [(await ctx.now() - before).total_seconds(), await ctx.random() < 1]


async def nested(ctx: Any) -> Any:
    async def outer(ctx: RunContext) -> int:
        return int(await ctx.step("inner", lambda: 1)) + 1

    result = await ctx.step("outer", outer)
    await ctx.emit("after", {"result": result})
    return result


OUTCOMES: dict[Code, Any] = {
    nested: 2,
    imperative: [{"a": 1}, 2, "c", {"second": 2}],
    chain: {"a": 1, "b": 2, "c": 3},
    fan_out: [1, 4, 9],
    graph: {"left": 1, "right": 1, "both": 2},
    waits: [86_400.0, True],
}


@pytest.mark.parametrize("code", OUTCOMES, ids=lambda code: code.__name__)
async def test_what_depends_on_input_and_steps_alone_comes_to_the_same(code: Code) -> None:
    report = await crashed(code)
    assert value(report) == OUTCOMES[code]
    assert report.outcome.status is RunStatus.SUCCEEDED
    assert report.writes > 4
    assert report.kills == 2 * report.writes, "each write is one to die before, and one to die after"
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.kills = 0  # type: ignore[misc]


async def test_lives_after_the_first_are_killed_too() -> None:
    async def two(ctx: Any) -> Any:
        return [await ctx.step("one", lambda: 1), await ctx.step("two", lambda: 2)]

    once, twice = await crashed(two), await crashed(two, again=1)
    assert twice.kills > 3 * once.kills
    assert (twice.writes, value(twice)) == (once.writes, value(once))


async def test_three_deaths_in_a_row_are_more_than_a_run_is_tried_for() -> None:
    async def nothing(ctx: Any) -> Any:
        return "done"

    assert value(await crashed(nothing, again=3)) == "done"


class Mails:
    """A world with a mailbox that knows what it sent by its key."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.keys: set[str] = set()

    def clear(self) -> None:
        self.sent.clear()
        self.keys.clear()

    def once(self, key: str | None, text: str) -> None:
        assert key is not None
        if key not in self.keys:
            self.keys.add(key)
            self.sent.append(text)


async def test_a_step_in_doubt_has_the_key_it_had() -> None:
    mails, tried = Mails(), list[str | None]()

    async def send(ctx: RunContext) -> str:
        tried.append(ctx.idempotency_key)
        mails.once(ctx.idempotency_key, "hello")
        return "sent"

    async def agent(ctx: Any) -> Any:
        return await ctx.step("send", send)

    report = await crashed(agent, effects=lambda: mails.sent, reset=mails.clear)
    assert mails.sent == ["hello"]
    assert len(tried) > report.kills, "it was carried out more than once in some runs"
    assert len(set(tried)) == 1


async def test_retries_and_pauses_take_no_time_and_their_counters_begin_anew() -> None:
    world = {"asked": 0}

    def flaky() -> str:
        world["asked"] += 1
        if world["asked"] < 3:
            raise ConnectionError("not yet")
        return "there"

    async def agent(ctx: Any) -> Any:
        return await ctx.step("ask", flaky, retries=5, backoff=Backoff(base=3600, maximum=3600))

    report = await crashed(agent, reset=lambda: world.update(asked=0))
    assert value(report) == "there"


async def test_chance_is_the_same_in_every_life_and_never_drawn_twice() -> None:
    async def agent(ctx: Any) -> Any:
        drawn = [str(await ctx.uuid4()), await ctx.random()]
        await ctx.step("pay", lambda: 1, key=drawn[0])
        return [*drawn, await ctx.random(), str(await ctx.uuid4())]

    drawn = value(await crashed(agent))
    assert len(set(drawn)) == 4


async def test_a_crash_is_no_failure() -> None:
    world = {"asked": 0}

    async def agent(ctx: Any) -> Any:
        world["asked"] += 1
        if world["asked"] < 3:
            raise ConnectionError("not yet")
        return await ctx.step("one", lambda: 1)

    def reset() -> None:
        world["asked"] = 0

    assert value(await crashed(agent, reset=reset, config=RunnerConfig(max_retries=3))) == 1


class Child(AgentRuntime):
    key = "child"

    async def run(self, ctx: RunContext) -> RunResult:
        half = await ctx.step("half", lambda x: x // 2, ctx.params["x"])
        return RunResult({"half": half})


async def parent(ctx: Any) -> Any:
    made = [await ctx.call("child", {"params": {"x": x}}) for x in (4, 6)]
    return [each.final_output["half"] for each in made]


@pytest.mark.parametrize("park_after", [0.0, 5.0])
async def test_children_are_run_once_and_end_the_same(park_after: float) -> None:
    report = await crashed(parent, agents=[Child], config=RunnerConfig(park_after=park_after))
    assert value(report) == [2, 3]


async def test_a_child_that_nobody_knows_is_told() -> None:
    with pytest.raises(UnknownAgent, match=r"unknown agent 'child'\. Pass it in agents="):
        await crashed(parent)


# -- agents with tools


def look_up(city: str) -> dict[str, int]:
    return {"degrees": len(city)}


def answer(messages: list[Any]) -> Any:
    """What the model says to these messages, whenever it is asked."""
    if messages[-1]["role"] == "tool":
        return f"It has {messages[-1]['content']}"
    cities = [("c1", "Ulm"), ("c2", "Bonn")]
    calls = [
        {"id": id, "type": "function", "function": {"name": "look_up", "arguments": f'{{"city": "{city}"}}'}}
        for id, city in cities
    ]
    return MockLLMResponse(None, tool_calls=calls)


class Weather(ToolCallingAgent):
    key = "weather"
    system_prompt = "You know the weather."
    tools = ToolRegistry()
    tools.register(Tool.from_function(look_up))


async def test_an_agent_with_tools() -> None:
    model = MockLLMClient(response_fn=answer)
    asked = {"messages": [{"role": "user", "content": "How warm is it?"}]}
    with use_llm_client(model):
        report = await crash_everywhere(Weather, asked)
    assert report.outcome.final_output == {"response": 'It has {"degrees": 4}'}
    assert report.kills == 2 * report.writes
    assert model.get_call_count() > 2 * (report.kills / 2)


@pytest.mark.parametrize(
    ("handoff", "asked_first"),
    [
        (False, False),
        (True, True),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
    ],
)
async def test_a_tool_that_is_another_agent(handoff: bool, asked_first: bool) -> None:
    """Its events are told once, and so is what the agent says behind them."""

    class Desk(Weather):
        key = "desk"
        system_prompt = "Ask around."
        tools = ToolRegistry()
        tools.register(replace(agent_tool("weather", handoff=handoff), requires_confirmation=asked_first))

    def answered(messages: list[Any]) -> Any:
        if messages[0]["content"] == "Ask around." and messages[-1]["role"] == "user":
            function = {"name": "weather", "arguments": '{"task": "How warm is it?"}'}
            return {"role": "assistant", "tool_calls": [{"id": "w", "type": "function", "function": function}]}
        return answer(messages)

    signals = {"tool:weather": {"approved": True, "arguments": {"task": "How cold is it?"}}} if asked_first else {}
    with use_llm_client(MockLLMClient(response_fn=answered)):
        await crash_everywhere(
            Desk, {"messages": [{"role": "user", "content": "Warm?"}]}, agents=[Weather], signals=signals
        )


async def test_a_tool_that_is_confirmed() -> None:
    class Pays(Weather):
        key = "pays"
        tools = ToolRegistry()
        tools.register(Tool.from_function(look_up, requires_confirmation=True))

    asked = {"messages": [{"role": "user", "content": "How warm is it?"}]}
    with use_llm_client(MockLLMClient(response_fn=answer)):
        report = await crash_everywhere(Pays, asked, signals={"tool:look_up": True})
    assert report.outcome.final_output == {"response": 'It has {"degrees": 4}'}


async def test_a_conversation_is_kept_once() -> None:
    asked = {"messages": [{"role": "user", "content": "How warm is it?"}], "conversation_id": "talk"}
    with use_llm_client(MockLLMClient(response_fn=answer)):
        report = await crash_everywhere(Weather, asked, persistence=True)
    assert report.outcome.final_output == {"response": 'It has {"degrees": 4}'}
    assert len(report.outcome.final_messages) == 5

    async def says(ctx: Any) -> Any:
        talk = ctx.persistence.conversations
        if await talk.get(ctx.conversation_id) is None:
            await talk.save(Conversation(id=ctx.conversation_id))
        # Outside of a step, and with an id of its own each time.
        await talk.add_message(ctx.conversation_id, ConversationMessage(role="user", content="hi"))

    with pytest.raises(AssertionError, match=r"the conversation is \[.*'hi'.*'hi'.*, undisturbed"):
        await crash_everywhere(Coded(says), asked, persistence=True)


# -- waits for people


async def publishes(ctx: Any) -> Any:
    said = await ctx.approve("publish", {"title": "News"})
    return [said, await ctx.wait_for_signal("when")]


async def test_signals_answer_what_it_waits_for() -> None:
    report = await crashed(publishes, signals={"publish": "yes", "when": 8})
    assert value(report) == ["yes", 8]


async def test_what_nobody_answers_is_told() -> None:
    with pytest.raises(WaitTimeout, match=r"waiting: signal when.*signals="):
        await crashed(publishes, signals={"publish": "yes"})


async def test_a_step_in_doubt_can_be_reviewed() -> None:
    async def charges(ctx: Any) -> Any:
        return await ctx.step("charge", lambda: 5, on_in_doubt="review")

    report = await crashed(charges, signals={"in_doubt:charge": {"outcome": "retry"}})
    assert value(report) == 5
    with pytest.raises(WaitTimeout, match="in_doubt"):
        await crashed(charges)


# -- other endings


async def fails(ctx: Any) -> Any:
    await ctx.step("one", lambda: 1)
    raise ValueError("no")


async def test_a_run_that_fails_fails_the_same_way() -> None:
    report = await crashed(fails, status="failed")
    assert report.outcome.error is not None
    assert report.outcome.error.type == "ValueError"
    with pytest.raises(AssertionError, match=r"must end as succeeded, got failed \(ValueError: no\)"):
        await crashed(fails)


async def test_a_cancelled_run_is_cancelled() -> None:
    async def cancels(ctx: Any) -> Any:
        async def cancel() -> None:
            queue = ctx.journal.writer.queue
            await queue.post(str(ctx.run_id), "cancel", "", encode(None), "cancel:1")

        await ctx.step("cancel", cancel)
        await ctx.sleep(3600)

    report = await crashed(cancels, status=RunStatus.CANCELLED)
    assert report.outcome.status is RunStatus.CANCELLED


async def test_a_transaction_needs_another_store() -> None:
    async def transacts(ctx: Any) -> Any:
        return await ctx.transaction("add", lambda conn: 1)

    with pytest.raises(NotSupported, match=r"in memory: ctx.transaction needs the journal on SQLite or PostgreSQL"):
        await crashed(transacts)


# -- seeded defects


async def test_an_effect_outside_of_a_step_is_there_twice() -> None:
    sent = list[str]()

    async def agent(ctx: Any) -> Any:
        sent.append("hello")
        return await ctx.step("one", lambda: 1)

    with pytest.raises(
        AssertionError, match=r"killed (before|after) write \d+.*effects\(\) returned \['hello', 'hello'\]"
    ):
        await crashed(agent, effects=lambda: sent, reset=sent.clear)


async def test_an_effect_without_its_key_is_there_twice() -> None:
    sent = list[str]()

    async def agent(ctx: Any) -> Any:
        return await ctx.step("send", lambda: sent.append("hello"))

    with pytest.raises(AssertionError, match=r"killed (before|after) write \d.*effects"):
        await crashed(agent, effects=lambda: sent, reset=sent.clear)


async def test_another_order_in_each_life_is_a_mismatch() -> None:
    lives = itertools.count()

    def made() -> AgentRuntime:
        order = ["a", "b"] if next(lives) % 2 else ["b", "a"]

        async def agent(ctx: Any) -> Any:
            return sorted([await ctx.step(name, str, name) for name in order])

        return Coded(agent)

    def reset() -> None:
        nonlocal lives
        lives = itertools.count()

    with pytest.raises(AssertionError, match=r"ended as \('failed', .*JournalMismatch: the next step must be 'b'"):
        await crash_everywhere(made, reset=reset)


async def test_a_key_that_changes_is_another_step() -> None:
    numbers = itertools.count()

    def reset() -> None:
        nonlocal numbers
        numbers = itertools.count()

    async def agent(ctx: Any) -> Any:
        return await ctx.step("pay", lambda: 1, key=f"payment-{next(numbers)}")

    with pytest.raises(AssertionError, match=r"other idempotency keys \(also step 'pay' \(payment-1\)"):
        await crashed(agent, reset=reset)


async def test_a_result_of_the_attempt_is_another_one() -> None:
    async def agent(ctx: Any) -> Any:
        return ctx.attempt

    wrong = (
        r"killed after write 1 was applied \(queue.claim\): the run ended as .*'value': 2.*undisturbed as .*'value': 1"
    )
    with pytest.raises(AssertionError, match=wrong):
        await crashed(agent)
    report = await crashed(agent, compare=lambda result: result.status)
    assert value(report) == 1


async def test_an_agent_that_keeps_state_differs_undisturbed() -> None:
    runs = itertools.count()

    async def agent(ctx: Any) -> Any:
        return next(runs)

    with pytest.raises(AssertionError, match=r"two undisturbed runs differ: .*reset="):
        await crashed(agent)


async def test_an_event_that_changes_is_told() -> None:
    times = itertools.count()

    def reset() -> None:
        nonlocal times
        times = itertools.count()

    async def agent(ctx: Any) -> Any:
        await ctx.emit("begun", {"time": next(times)})
        return await ctx.step("one", lambda: 1)

    with pytest.raises(AssertionError, match=r'event begun {"time":\d} was published \d times, undisturbed \d'):
        await crashed(agent, reset=reset)


# -- safeguards that are gone


async def test_a_journal_that_answers_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = InMemoryStateStore.records

    async def records(self: Any, run_id: Any, after: int = -1) -> list[Record]:
        return [each for each in await read(self, run_id, after) if each.kind != DONE]

    monkeypatch.setattr(InMemoryStateStore, "records", records)
    with pytest.raises(AssertionError, match=r"killed .*step 'one' \(s:0\) has a saved result but was executed again"):
        await crashed(lambda ctx: ctx.step("one", lambda: 1))


async def test_events_that_are_not_absorbed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, event = itertools.count(), Context._event

    def another(self: Context, kind: str, payload: dict[str, Any]) -> Any:
        row = event(self, kind, payload)
        return None if row is None else (f"{row[0]} {next(numbers)}", *row[1:])

    async def agent(ctx: Any) -> Any:
        await ctx.emit("begun", {})
        return await ctx.step("one", lambda: 1)

    monkeypatch.setattr(Context, "_event", another)
    with pytest.raises(AssertionError, match=r"event begun {} was published 2 times, undisturbed 1 times"):
        await crashed(agent)


# -- the kill itself


WORDS = OperationSet("words", {"word": lambda tx, word: tx.put(tx.tables["words"], word, True)}, tables=("words",))


@pytest.mark.parametrize("landed", [False, True])
async def test_the_write_that_kills_lands_or_not_and_none_after_it_does(landed: bool) -> None:
    store, died = MemoryEngine(), list[str]()
    front = KillableEngine(store, CrashPoint(2, landed), lambda ops, landed: None, lambda: died.append("now"))
    front.add(WORDS)
    await front.commit(None, [Op("word", ("one",))])
    assert died == []
    killed = asyncio.ensure_future(front.commit(None, [Op("word", ("two",))]))
    await asyncio.sleep(0)
    front.commit_nowait(None, [Op("word", ("three",))])
    with pytest.raises(StorageClosed):
        front.commit_from_thread(None, [Op("word", ("four",))])
    reading = asyncio.ensure_future(front.read(lambda tx: tx.tables["words"]))
    done, _ = await asyncio.wait([killed, reading], timeout=0.005)
    assert not done, "nothing of it is answered"
    assert [*store.tables["words"]] == (["one", "two"] if landed else ["one"])
    assert died == ["now"]
    for task in (killed, reading):
        task.cancel()


def _event(sequence: int, kind: str, step: str = "") -> Event:
    return Event(UUID(int=1), kind, {"step_id": step} if step else {}, aware(0.0), sequence)


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ([(0, "a"), (2, "run.failed")], "the sequence numbers have a gap"),
        ([(0, "a")], "the log must end with its only final event"),
        ([(0, "run.failed"), (1, "run.failed")], "the log must end with its only final event"),
        ([(0, "run.failed"), (1, "a")], "the log must end with its only final event"),
        ([(0, "step.completed", "s"), (1, "step.completed", "s"), (2, "run.failed")], "step s was published 2 times"),
        ([(0, "step.completed", "s"), (1, "step.completed", "t"), (2, "run.failed")], ""),
    ],
)
def test_what_is_wrong_with_events_by_themselves(kinds: list[Any], told: str) -> None:
    found = "; ".join(event_log_errors([_event(*each) for each in kinds]))
    assert told in found
    assert bool(found) is bool(told)


async def test_the_dead_do_nothing_before_their_run_was_compared() -> None:
    said, late = list[str](), list[int]()

    async def agent(ctx: Any) -> Any:
        try:
            await ctx.step("one", lambda: 1)
            await ctx.sleep(1)
            await ctx.step("two", lambda: 2)
            said.append("through")
        finally:
            said.append("finally")

    def effects() -> None:
        assert said.count("finally") == said.count("through")

    def reset() -> None:
        late.append(said.count("finally") - said.count("through"))
        said.clear()

    await crashed(agent, effects=effects, reset=reset, config=RunnerConfig(park_after=5))
    assert max(late) == 1
    assert said == ["through", "finally"], "the last run is an undisturbed one"


@pytest.mark.parametrize("in_executor", [False, True])
async def test_a_thread_of_the_dead_is_waited_for(in_executor: bool) -> None:
    going, beside = list[str](), list[str]()

    def slow() -> str:
        beside.extend(going)
        going.append("slow")
        threading.Event().wait(0.003)
        going.remove("slow")
        return "done"

    async def elsewhere() -> str:
        return await asyncio.to_thread(slow)

    report = await crashed(lambda ctx: ctx.step("slow", elsewhere if in_executor else slow))
    assert value(report) == "done"
    assert beside == []


async def test_a_thread_that_asks_the_dead_does_not_hold_up_the_living(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "THREAD_GRACE", 0.02)

    def tells(ctx: RunContext) -> str:
        from_thread(ctx.emit, "told", {})
        return "done"

    assert value(await crashed(lambda ctx: ctx.step("tells", tells))) == "done"


async def test_a_run_that_does_not_end_is_given_up() -> None:
    async def agent(ctx: Any) -> Any:
        await asyncio.Event().wait()

    with pytest.raises(AssertionError, match=r"must finish within 0.05 s"):
        await crashed(agent, timeout=0.05)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"again": -1}, "again must be an integer of at least 0, got -1"),
        ({"status": "running"}, "status must be a terminal status"),
        ({"timeout": "1"}, r"timeout must be from 0 to 100,000,000,000 seconds, got"),
        ({"signals": ["a"]}, r"signals must be a dict, got \['a'\]"),
        ({"input": [1]}, r"input must be a dict, got \[1\]"),
    ],
)
async def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        await crash_everywhere(Coded(imperative), **options)


async def test_who_gives_up_waiting_ends_the_life(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = list[SimulatedProcess]()
    run = SimulatedProcess.run

    async def noted(life: SimulatedProcess) -> bool:
        lives.append(life)
        return await run(life)

    async def agent(ctx: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(SimulatedProcess, "run", noted)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await crashed(agent)
    assert lives[0]._loop.is_closed()


def test_it_is_reached_without_a_loop() -> None:
    report = call(crash_everywhere, Coded(chain))
    assert value(report) == OUTCOMES[chain]


async def test_what_is_no_agent_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="agent must be an AgentRuntime, got None"):
        await crash_everywhere(None)  # type: ignore[arg-type]


async def test_a_child_that_outlives_its_failed_parent_is_lived_to_its_end() -> None:
    class Child(AgentRuntime):
        key = "child"

        async def run(self, ctx: RunContext) -> RunResult:
            await ctx.sleep(5)
            return RunResult()

    class Parent(AgentRuntime):
        key = "parent"

        async def run(self, ctx: RunContext) -> RunResult:
            async def fails() -> None:
                raise ValueError("no")

            await asyncio.gather(ctx.call("child", {}, key="c"), fails())
            return RunResult()

    config = RunnerConfig(max_retries=1, park_after=0)
    async with asyncio.timeout(60):
        await crash_everywhere(Parent, agents=[Child], status="failed", config=config)
