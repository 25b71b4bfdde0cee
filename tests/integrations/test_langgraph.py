"""Graphs of LangGraph in a run: steps in nodes, questions, resumes, events, models, limits and cancellation."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import pytest

pytest.importorskip("langgraph")

from langchain_core.language_models import BaseChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Send, interrupt
from pydantic import BaseModel
from typing_extensions import TypedDict

from agent_runtime_core import RunContext, RunLimits, RunResult, RunStatus, current_run
from agent_runtime_core.errors import InvalidArgument, StepExecutionError
from agent_runtime_core.integrations.langgraph import AgentRuntimeSaver, DurableChatModel, run_graph
from agent_runtime_core.portal import from_thread
from tests.support.runs import Body, Rig, until

Node = Callable[[Any], Any]  # of a graph


class Log(TypedDict):
    log: Annotated[list[str], operator.add]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "graphs.db")


def opened(url: str, **config: Any) -> Rig:
    return Rig(Path(url).with_name("runs.db"), **config)


class Calls:
    """Functions for steps, which note that they were called."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def work(self, what: str) -> str:
        self.made.append(what)
        return f"did {what}"


def context() -> RunContext:
    ctx = current_run()
    assert ctx is not None
    return ctx


def chain(saver: AgentRuntimeSaver, *nodes: Node, state: Any = Log) -> Any:
    builder = StateGraph(state)
    for name, node in zip("abcdef", nodes, strict=False):
        builder.add_node(name, cast(Any, node))
    for start, end in zip([START, *"abcdef"], [*"abcdef"[: len(nodes)], END], strict=False):
        builder.add_edge(start, end)
    return builder.compile(checkpointer=saver)


def agent(url: str, *nodes: Node, input: Any = None, state: Any = Log, config: Any = None, **options: Any) -> Body:
    async def body(ctx: RunContext) -> RunResult:
        async with AgentRuntimeSaver(url) as saver:
            graph = chain(saver, *nodes, state=state)
            given = {"log": ["start"]} if input is None else input
            return RunResult(await run_graph(ctx, graph, given, config, **options))

    return body


async def answered(rig: Rig, body: Body, *answers: Any) -> Any:
    """Execute a run, answer its questions in their order, and return its output."""
    going = asyncio.ensure_future(rig.go(body))
    await rig.begun()
    left = list(answers)
    async for event in rig.runner.stream("r"):
        if event.event_type == "approval.requested":
            await rig.runner.approve("r", event.payload["name"], left.pop(0))
            if not left:
                break
    return (await going).raise_for_status().final_output


async def failed_once(rig: Rig, body: Body, fails: list[bool]) -> Any:
    """Execute a run that fails while `fails` says so, resume it, and return its output."""
    failed = await rig.go(body)
    assert failed.error is not None
    assert failed.error.type == "ConnectionError", failed.error
    fails.append(False)
    return (await rig.go(body)).raise_for_status().final_output


async def test_the_steps_of_nodes_are_not_repeated_when_a_run_resumes(url: str) -> None:
    calls, fails = Calls(), [True]

    async def a(state: Log) -> dict[str, Any]:
        return {"log": [await context().step("work", calls.work, "a")]}

    async def b(state: Log) -> dict[str, Any]:
        done = [await context().step("work", calls.work, f"b{n}") for n in range(2)]
        if fails.pop():
            raise ConnectionError("the network is down")
        return {"log": done}

    async with opened(url) as rig:
        output = await failed_once(rig, agent(url, a, b), fails)
    assert output == {"log": ["start", "did a", "did b0", "did b1"]}
    assert calls.made == ["a", "b0", "b1"]


async def test_parallel_nodes_have_results_of_their_own(url: str) -> None:
    calls, fails, left, others = Calls(), [True], {"0", "1", "3"}, asyncio.Event()

    async def a(state: Log) -> dict[str, Any]:
        return {"log": []}

    async def one(item: str) -> dict[str, Any]:
        result = await context().step("work", calls.work, item)
        left.discard(item)
        if not left:
            others.set()
        if item == "2":
            await others.wait()  # a step that the failure cuts off would be repeated
            if fails.pop():
                raise ConnectionError("the network is down")
        return {"log": [result]}

    async def body(ctx: RunContext) -> RunResult:
        async with AgentRuntimeSaver(url) as saver:
            builder = StateGraph(Log)
            builder.add_node("a", a)
            builder.add_node("one", cast(Any, one))
            builder.add_edge(START, "a")
            builder.add_conditional_edges("a", lambda state: [Send("one", str(n)) for n in range(4)], ["one"])
            return RunResult(await run_graph(ctx, builder.compile(checkpointer=saver), {"log": []}))

    async with opened(url) as rig:
        output = await failed_once(rig, body, fails)
    assert output == {"log": ["did 0", "did 1", "did 2", "did 3"]}
    assert sorted(calls.made) == ["0", "1", "2", "3"]


async def test_plain_nodes_use_steps_from_their_threads(url: str) -> None:
    calls = Calls()

    def a(state: Log) -> dict[str, Any]:
        ctx = context()
        return {"log": [from_thread(ctx.step, "work", calls.work, "a"), from_thread(ctx.step, "work", calls.work, "b")]}

    async with opened(url) as rig:
        output = (await rig.go(agent(url, a))).raise_for_status().final_output
    assert output == {"log": ["start", "did a", "did b"]}


async def test_people_answer_the_questions_of_a_node(url: str) -> None:
    calls = Calls()

    async def a(state: Log) -> dict[str, Any]:
        draft = await context().step("work", calls.work, "draft")
        first, second = interrupt({"draft": draft}), interrupt("Sure?")
        sent = await context().step("work", calls.work, "send")
        return {"log": [f"{first} {second}", sent]}

    async with opened(url) as rig:
        output = await answered(rig, agent(url, a), "yes", ["a", None])
        events = [event async for event in rig.runner.stream("r")]
    assert output == {"log": ["start", "yes ['a', None]", "did send"]}
    assert calls.made == ["draft", "send"]
    asked = [event.payload for event in events if event.event_type == "approval.requested"]
    assert [(each["name"], each["details"]) for each in asked] == [("a", {"draft": "did draft"}), ("a", "Sure?")]


async def test_questions_of_parallel_nodes_are_asked_one_after_the_other(url: str) -> None:
    async def one(item: str) -> dict[str, Any]:
        return {"log": [f"{item}: {interrupt(item)}"]}

    async def body(ctx: RunContext) -> RunResult:
        async with AgentRuntimeSaver(url) as saver:
            builder = StateGraph(Log)
            builder.add_node("one", cast(Any, one))
            builder.add_conditional_edges(START, lambda state: [Send("one", item) for item in "xy"], ["one"])
            return RunResult(await run_graph(ctx, builder.compile(checkpointer=saver), {"log": []}))

    async with opened(url) as rig:
        output = await answered(rig, body, 1, 2)
    assert output == {"log": ["x: 1", "y: 2"]}


@pytest.mark.parametrize("options", [{}, {"stream_mode": "custom"}, {"subgraphs": True}], ids=str)
async def test_a_run_is_parked_when_all_of_its_parallel_nodes_wait(url: str, options: dict[str, Any]) -> None:
    works, may_end, ended = asyncio.Event(), asyncio.Event(), list[str]()

    async def one(item: str) -> dict[str, Any]:
        if item == "work":
            works.set()
            await may_end.wait()
            ended.append(item)
            return {"log": [item]}
        return {"log": [await context().approve(item)]}

    async def body(ctx: RunContext) -> RunResult:
        async with AgentRuntimeSaver(url) as saver:
            builder = StateGraph(Log)
            builder.add_node("one", cast(Any, one))
            builder.add_conditional_edges(START, lambda state: [Send("one", n) for n in ("x", "work", "y")], ["one"])
            return RunResult(await run_graph(ctx, builder.compile(checkpointer=saver), {"log": []}, **options))

    async with asyncio.timeout(20), opened(url, park_after=0) as rig:
        runner = rig.runner
        await runner.submit(rig.register(body), {}, run_id="r")
        executing = asyncio.ensure_future(runner.run_once())
        await until(works)
        while len(await runner.approvals()) < 2:  # noqa: ASYNC110 - nobody rings for it
            await asyncio.sleep(0.001)
        assert not executing.done()
        may_end.set()
        for name in ("x", "y"):
            assert await executing
            assert (await runner.get_run("r")).status is RunStatus.WAITING
            await runner.approve("r", name, name)
            executing = asyncio.ensure_future(runner.run_once())
        assert await executing
        output = (await runner.wait("r", timeout=0)).raise_for_status().final_output
    assert (output, ended) == ({"log": ["x", "work", "y"]}, ["work"])


async def test_an_answer_is_kept_if_the_node_fails_after_it(url: str) -> None:
    fails = [True]

    async def a(state: Log) -> dict[str, Any]:
        first = interrupt("First?")
        if fails and fails.pop():
            raise ConnectionError("the network is down")
        return {"log": [first, interrupt("Second?")]}

    async def answer(text: str) -> None:
        async with asyncio.timeout(10):
            while not (asked := await rig.runner.approvals()):  # noqa: ASYNC110 - the run may not have resumed yet
                await asyncio.sleep(0.001)
        questions.extend(each.details for each in asked)
        await rig.runner.approve("r", "a", text)

    questions: list[Any] = []
    body = agent(url, a)
    async with opened(url) as rig:
        going = asyncio.ensure_future(rig.go(body))
        await answer("one")
        assert (await going).error is not None
        fails.append(False)
        going = asyncio.ensure_future(rig.go(body))
        await answer("two")
        result = await going
    assert questions == ["First?", "Second?"]
    assert result.final_output == {"log": ["start", "one", "two"]}


class Decision(BaseModel):
    ok: bool


async def test_the_schema_of_a_question_is_that_of_its_approval(url: str) -> None:
    async def a(state: Log) -> dict[str, Any]:
        decision = interrupt("Send it?", response_schema=Decision)
        return {"log": [type(decision).__name__, str(decision.ok)]}

    async with opened(url) as rig:
        going = asyncio.ensure_future(rig.go(agent(url, a)))
        await rig.begun()
        async for event in rig.runner.stream("r"):
            if event.event_type == "approval.requested":
                with pytest.raises(InvalidArgument):
                    await rig.runner.approve("r", "a", {"ok": "perhaps"})
                await rig.runner.approve("r", "a", {"ok": True})
                break
        output = (await going).final_output
    assert output == {"log": ["start", "Decision", "True"]}


async def test_a_question_inside_a_step_passes_through_it(url: str) -> None:
    asked: list[str] = []

    async def ask() -> str:
        asked.append("asked")
        return f"answered {interrupt('ok?')}"

    async def a(state: Log) -> dict[str, Any]:
        return {"log": [await context().step("ask", ask, retries=2), await context().step("work", len, "four")]}

    async with opened(url) as rig:
        output = await answered(rig, agent(url, a), "yes")
    assert output == {"log": ["start", "answered yes", 4]}
    assert asked == ["asked"] * 2


async def test_a_guarded_step_with_a_question_is_not_in_doubt(url: str) -> None:
    async def ask() -> str:
        return f"answered {interrupt('ok?')}"

    async def a(state: Log) -> dict[str, Any]:
        return {"log": [await context().step("ask", ask, on_in_doubt="fail")]}

    async with opened(url) as rig:
        output = await answered(rig, agent(url, a), "yes")
    assert output == {"log": ["start", "answered yes"]}


async def test_a_thread_continues_in_another_run(url: str) -> None:
    async def a(state: Log) -> dict[str, Any]:
        return {"log": [f"saw {len(state['log'])}"]}

    config = {"configurable": {"thread_id": "conversation-1"}}
    async with opened(url) as rig:
        await rig.go(agent(url, a, config=config), "r1")
        output = (await rig.go(agent(url, a, config=config), "r2")).raise_for_status().final_output
    assert output == {"log": ["start", "saw 1", "start", "saw 3"]}


async def test_a_run_calls_a_graph_twice(url: str) -> None:
    calls = Calls()

    async def a(state: Log) -> dict[str, Any]:
        return {"log": [await context().step("work", calls.work, state["log"][-1])]}

    async def body(ctx: RunContext) -> RunResult:
        async with AgentRuntimeSaver(url) as saver:
            graph = chain(saver, a)
            await run_graph(ctx, graph, {"log": ["first"]})
            return RunResult(await run_graph(ctx, graph, {"log": ["second"]}))

    async with opened(url) as rig:
        output = (await rig.go(body)).raise_for_status().final_output
    assert output == {"log": ["first", "did first", "second", "did second"]}


async def test_the_stream_of_a_graph_is_published(url: str) -> None:
    fails = [True]

    async def a(state: Log) -> dict[str, Any]:
        await context().emit("app.progress", {"node": "a"})
        return {"log": ["a"]}

    async def b(state: Log) -> dict[str, Any]:
        await context().emit("app.progress", {"node": "b"})
        if fails.pop():
            raise ConnectionError("the network is down")
        return {"log": ["b"]}

    script = agent(url, a, b, stream_mode=["updates"])
    async with opened(url) as rig:
        await failed_once(rig, script, fails)
        events = [event async for event in rig.runner.stream("r")]
    updates = [event.payload["data"] for event in events if event.event_type == "langgraph.updates"]
    assert updates == [{"a": {"log": ["a"]}}, {"b": {"log": ["b"]}}]
    assert [event.payload["node"] for event in events if event.event_type == "app.progress"] == ["a", "b", "b"]


async def test_a_cancelled_run_stops_its_graph(url: str) -> None:
    entered, stopped = asyncio.Event(), asyncio.Event()

    async def a(state: Log) -> dict[str, Any]:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return {}

    async with opened(url) as rig:
        going = asyncio.ensure_future(rig.go(agent(url, a)))
        await until(entered)
        await rig.runner.cancel("r")
        result = await going
    assert result.status is RunStatus.CANCELLED
    assert stopped.is_set()


async def test_the_error_of_a_step_is_the_same_in_each_execution_of_its_node(url: str) -> None:
    calls = Calls()

    def fail() -> None:
        calls.work("fail")
        raise ValueError("no such city")

    async def a(state: Log) -> dict[str, Any]:
        try:
            await context().step("fail", fail)
        except StepExecutionError as error:
            seen.append((type(error), str(error)))
        await context().step("recover", calls.work, "recover")
        if fails.pop():
            raise ConnectionError("the network is down")
        return {"log": ["recovered"]}

    seen: list[Any] = []
    fails = [True]
    async with opened(url) as rig:
        output = await failed_once(rig, agent(url, a), fails)
    assert output == {"log": ["start", "recovered"]}
    assert len(seen) == 2
    assert seen[0] == seen[1]
    # As in other tasks of a run, a later step does not show that the code went on without the failed one.
    assert calls.made == ["fail", "recover", "fail"]


async def test_a_graph_without_a_checkpointer_is_rejected(url: str) -> None:
    async def body(ctx: RunContext) -> RunResult:
        builder = StateGraph(Log)
        builder.add_node("a", lambda state: {})
        builder.add_edge(START, "a")
        return RunResult(await run_graph(ctx, builder.compile(), {"log": []}))

    async with opened(url) as rig:
        result = await rig.go(body)
    assert result.error is not None
    assert result.error.type == "InvalidArgument"
    assert result.error.message.startswith("graph must have a checkpointer, got None. Compile it with")


# -- models


class Scripted(BaseChatModel):
    """Answers with the number of its call; keeps the options of each call."""

    calls: list[dict[str, Any]]
    tokens: int = 100

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=[each.__name__ for each in tools], **kwargs)

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        self.calls.append(kwargs)
        usage: Any = {"input_tokens": self.tokens, "output_tokens": 1, "total_tokens": self.tokens + 1}
        message = AIMessage(f"answer {len(self.calls)}", usage_metadata=usage)
        return ChatResult(generations=[ChatGeneration(message=message)])


def asking(model: Any, *, plain: bool = False) -> Node:
    def ask_plainly(state: Any) -> dict[str, Any]:
        return {"log": [model.invoke([HumanMessage("hi")]).content]}

    async def ask(state: Any) -> dict[str, Any]:
        return {"log": [(await model.ainvoke([HumanMessage("hi")])).content]}

    return ask_plainly if plain else ask


@pytest.mark.parametrize("plain", [False, True])
async def test_the_calls_of_a_model_are_steps(url: str, plain: bool) -> None:
    inner, fails = Scripted(calls=[]), [True]
    model = DurableChatModel(model=inner)

    async def broken(state: Log) -> dict[str, Any]:
        if fails.pop():
            raise ConnectionError("the network is down")
        return {"log": ["done"]}

    script = agent(url, asking(model, plain=plain), asking(model, plain=plain), broken)
    async with opened(url) as rig:
        output = await failed_once(rig, script, fails)
    assert output == {"log": ["start", "answer 1", "answer 2", "done"]}
    assert len(inner.calls) == 2


@pytest.mark.parametrize("plain", [False, True])
async def test_the_calls_of_a_model_count_against_the_limits(url: str, plain: bool) -> None:
    inner = Scripted(calls=[])
    node = asking(DurableChatModel(model=inner), plain=plain)
    async with opened(url, limits=RunLimits(max_turns=2)) as rig:
        result = await rig.go(agent(url, node, node, node))
    assert result.error is not None
    assert result.error.type == "LimitExceeded"
    assert len(inner.calls) == 2


async def test_the_usage_of_a_graph_is_that_of_its_run(url: str) -> None:
    node = asking(DurableChatModel(model=Scripted(calls=[])))
    async with opened(url) as rig:
        result = (await rig.go(agent(url, node, node))).raise_for_status()
    assert result.usage["total_tokens"] == 202


async def test_tools_are_bound_to_the_inner_model() -> None:
    def search() -> None: ...

    inner = Scripted(calls=[])
    answer = await DurableChatModel(model=inner).bind_tools([search], strict=True).ainvoke("hi")
    assert answer.content == "answer 1"
    assert inner.calls == [{"tools": ["search"], "strict": True}]


async def test_the_tokens_of_a_model_are_streamed(url: str) -> None:
    class Ask:
        def __init__(self, model: BaseChatModel) -> None:
            self.model = model

        async def __call__(self, state: MessagesState) -> dict[str, Any]:
            return {"messages": [await self.model.ainvoke(state["messages"])]}

    model = DurableChatModel(model=GenericFakeChatModel(messages=iter([AIMessage("one two three")])))
    question = {"messages": [HumanMessage("hi", id="q")]}

    async def body(ctx: RunContext) -> RunResult:
        async with AgentRuntimeSaver(url) as saver:
            graph = chain(saver, Ask(model), state=MessagesState)
            state = await run_graph(ctx, graph, question, stream_mode="messages")
        return RunResult({"text": state["messages"][-1].content})

    async with opened(url) as rig:
        output = (await rig.go(body)).raise_for_status().final_output
        events = [event async for event in rig.runner.stream("r")]
    assert output == {"text": "one two three"}
    parts = [event.payload["data"][0]["content"] for event in events if event.event_type == "langgraph.messages"]
    assert "".join(parts) == "one two three"
    assert len(parts) > 2


async def test_a_resumed_graph_counts_the_calls_of_finished_nodes(url: str) -> None:
    inner, fails = Scripted(calls=[]), [True]
    node = asking(DurableChatModel(model=inner))

    async def broken(state: Log) -> dict[str, Any]:
        await context().step("charge", charge)
        if fails.pop():
            raise ConnectionError("the network is down")
        return {"log": ["done"]}

    async def charge() -> None:
        context().charge(model="m", input_tokens=1000, turns=0)

    body = agent(url, node, broken, node)
    async with opened(url, limits=RunLimits(max_turns=2)) as rig:
        await failed_once(rig, body, fails)
        result = await rig.go(body)
    assert result.usage["total_tokens"] == 1202
    assert len(inner.calls) == 2
