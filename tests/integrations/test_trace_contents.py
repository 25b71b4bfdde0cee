"""Errors of tools, models and frameworks quote contents: no trace sink sends them unless content is on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

pytest.importorskip("agents")
pytest.importorskip("langgraph")
pytest.importorskip("mcp")
pytest.importorskip("pydantic_ai")
pytest.importorskip("langfuse")
pytest.importorskip("prometheus_client")

from agents import Agent as OpenAIAgent
from agents import function_tool, set_tracing_disabled
from agents.testing import assistant_message, function_call
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langgraph.graph import END, START, StateGraph
from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations
from openai.types.responses import ResponseReasoningItem
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import generate_latest
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ThinkingPart, ToolCallPart
from pydantic_ai.models.function import AgentInfo, FunctionModel
from typing_extensions import TypedDict

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    MockLLMClient,
    RunContext,
    RunnerConfig,
    RunResult,
    Tool,
    ToolCallingAgent,
    ToolRegistry,
    current_run,
)
from agent_runtime_core.integrations.langgraph import AgentRuntimeSaver, DurableChatModel, run_graph
from agent_runtime_core.integrations.mcp import MCPAgent, MCPTools
from agent_runtime_core.integrations.openai_agents import run_agent
from agent_runtime_core.integrations.pydantic_ai import Durable
from agent_runtime_core.interfaces import ErrorInfo
from agent_runtime_core.status import RunStatus
from agent_runtime_core.tracing import LangfuseTraceSink, OpenTelemetrySink, PrometheusSink
from tests.support.gen_ai import SCHEMAS, messages_in
from tests.support.openai_models import FakeModel
from tests.support.otlp_receiver import Receiver, clients_let_go, receiving
from tests.support.runs import Body, Script

set_tracing_disabled(True)

#: It begins as an error's type does, so a sink that reads a type from a message sends it.
CANARY = "canary7c41: iban DE02 7731"
WORD = CANARY.partition(":")[0]


class Declined(Exception):
    """What the parts of an agent raise."""


def fail(*_: Any) -> NoReturn:
    raise Declined(CANARY)


def pay(to: str) -> str:
    """Pay somebody."""
    raise Declined(f"{CANARY} {to}")


# -- the loop of this library


def looping(model: Any, tool: Callable[..., Any] = pay) -> AgentRuntime:
    class Loop(ToolCallingAgent):
        key = "clerk"
        system_prompt = CANARY
        tools = ToolRegistry()

        def get_llm_client(self) -> Any:
            return model

    Loop.tools.register(Tool.from_function(tool))
    return Loop()


def calling(name: str = "pay", arguments: str = f'{{"to": "{CANARY}"}}') -> MockLLMClient:
    call = {"id": "c1", "function": {"name": name, "arguments": arguments}}
    return MockLLMClient([{"role": "assistant", "tool_calls": [call]}, CANARY])


class BrokenModel(MockLLMClient):
    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        fail()


def saying() -> str:
    """Answer with a content."""
    return CANARY


# -- code of an application


async def step_that_is_retried(ctx: RunContext) -> None:
    await ctx.step("pay", fail, retries=1, retry_delay=0.0)


async def step_in_a_step(ctx: RunContext) -> None:
    async def outer(ctx: RunContext) -> None:
        await ctx.step("inner", fail)

    await ctx.step("outer", outer)


async def failing_run(ctx: RunContext) -> None:
    fail()


async def group_of_errors(ctx: RunContext) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(fail))
        tasks.create_task(asyncio.to_thread(fail))


async def failing_child(ctx: RunContext) -> None:
    await ctx.call(Script(failing_run, "child"), {"messages": CANARY})


async def stated_error(ctx: RunContext) -> RunResult:
    return RunResult(status=RunStatus.FAILED, error=ErrorInfo(CANARY, CANARY, details={"to": CANARY}))


async def own_trace(ctx: RunContext) -> None:
    ctx.trace("llm.call", {"model": "m", "input": CANARY, "error": CANARY, "model_parameters": {"stop": CANARY}})
    ctx.trace("tool.done", {"tool_name": "pay", "error": CANARY})
    ctx.trace("order.refused", {"why": CANARY})
    await ctx.emit("step.failed", {"step_id": "s", "step_name": "pay", "error": CANARY})


# -- frameworks


def langgraph(node: Callable[..., Any]) -> Body:
    async def body(ctx: RunContext) -> RunResult:
        builder = StateGraph(TypedDict("State", {"text": str}))  # type: ignore[operator] # a class made by a call
        builder.add_node("node", node)
        builder.add_edge(START, "node")
        builder.add_edge("node", END)
        async with AgentRuntimeSaver("memory://") as saver:
            return RunResult(await run_graph(ctx, builder.compile(checkpointer=saver), {"text": CANARY}))

    return body


async def node_with_a_step(state: Any) -> NoReturn:
    ctx = current_run()
    assert ctx is not None
    await ctx.step("pay", pay, CANARY)
    raise AssertionError


async def node_with_a_model(state: Any) -> NoReturn:
    model = DurableChatModel(model=GenericFakeChatModel(messages=iter([AIMessage(CANARY)])))
    await model.ainvoke(CANARY)
    await model.ainvoke(CANARY)  # the model has no further answer
    raise AssertionError


async def openai_tool(ctx: RunContext) -> None:
    model = FakeModel(lambda items: [function_call("pay", {"to": CANARY}, call_id="c1")])
    tool = function_tool(pay, failure_error_function=None)
    await run_agent(OpenAIAgent(name="clerk", model=model, tools=[tool], instructions=CANARY), CANARY)


async def openai_answered_tool(ctx: RunContext) -> None:
    def answer(items: list[dict[str, Any]]) -> list[Any]:
        done = any(each.get("type") == "function_call_output" for each in items)
        return [assistant_message(CANARY)] if done else [function_call("pay", {"to": CANARY}, call_id="c1")]

    agent = OpenAIAgent(name="clerk", model=FakeModel(answer), tools=[function_tool(pay)])
    await run_agent(agent, CANARY)
    fail()


async def openai_model(ctx: RunContext) -> None:
    await run_agent(OpenAIAgent(name="clerk", model=FakeModel(fail)), CANARY)


async def openai_streamed_model(ctx: RunContext) -> None:
    async def ignore(event: Any) -> None:
        """Take the event."""

    await run_agent(OpenAIAgent(name="clerk", model=FakeModel(fail)), CANARY, on_event=ignore)


def pydantic_ai(answer: Callable[[list[ModelMessage], AgentInfo], ModelResponse]) -> Body:
    async def body(ctx: RunContext) -> RunResult:
        agent = PydanticAgent(FunctionModel(answer), name="clerk", capabilities=[Durable()], instructions=CANARY)
        agent.tool_plain(pay)
        return RunResult({"text": (await agent.run(CANARY)).output})

    return body


def pydantic_call(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
    return ModelResponse(parts=[TextPart(CANARY), ToolCallPart("pay", {"to": CANARY}, tool_call_id="c1")])


class MCPClerk(MCPAgent):
    key = "clerk"
    system_prompt = CANARY

    def __init__(self) -> None:
        server = MCPServer("bank", log_level="CRITICAL")
        server.tool(annotations=ToolAnnotations(read_only_hint=True))(pay)  # else a person must confirm the call
        self.mcp_servers, self.model_client = [MCPTools(server)], calling()

    def get_llm_client(self) -> MockLLMClient:
        return self.model_client


AGENTS: dict[str, Callable[[], AgentRuntime]] = {
    "tool": lambda: looping(calling()),
    "unknown tool": lambda: looping(calling(WORD)),
    "wrong arguments": lambda: looping(calling(arguments=f'{{"whom": "{CANARY}"}}')),
    "arguments that are no JSON": lambda: looping(calling(arguments=CANARY)),
    "answer of a tool": lambda: looping(calling("saying", "{}"), saying),
    "model": lambda: looping(BrokenModel([CANARY])),
    "retried step": lambda: Script(step_that_is_retried),
    "step in a step": lambda: Script(step_in_a_step),
    "run": lambda: Script(failing_run),
    "group": lambda: Script(group_of_errors),
    "child run": lambda: Script(failing_child),
    "stated error": lambda: Script(stated_error),
    "own trace": lambda: Script(own_trace),
    "langgraph node": lambda: Script(langgraph(fail)),
    "langgraph step": lambda: Script(langgraph(node_with_a_step)),
    "langgraph model": lambda: Script(langgraph(node_with_a_model)),
    "openai tool": lambda: Script(openai_tool),
    "openai answered tool": lambda: Script(openai_answered_tool),
    "openai model": lambda: Script(openai_model),
    "openai streamed model": lambda: Script(openai_streamed_model),
    "pydantic ai tool": lambda: Script(pydantic_ai(pydantic_call)),
    "pydantic ai model": lambda: Script(pydantic_ai(fail)),
    "mcp tool": MCPClerk,
}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with clients_let_go(), receiving() as found:
        yield found


async def sent(receiver: Receiver, agent: AgentRuntime, *, content: bool) -> dict[str, str]:
    """Execute an agent whose parts fail, and return all that each sink has sent."""
    exported, metrics = InMemorySpanExporter(), PrometheusSink()
    sinks = [
        OpenTelemetrySink(processor=SimpleSpanProcessor(exported), content=content),
        LangfuseTraceSink("pk-lf-1", "sk-lf-1", receiver.url, content=content),
        metrics,
    ]
    async with AgentRunner.open("memory://", trace_sinks=sinks, config=RunnerConfig(max_retries=1)) as runner:
        try:
            await runner.execute(agent, input_data={"messages": [{"role": "user", "content": CANARY}]})
        finally:
            if isinstance(agent, MCPAgent):
                await agent.close()
    return {
        "opentelemetry": "".join(span.to_json() for span in exported.get_finished_spans()),
        "langfuse": "".join(body.decode("utf-8", "replace") for body in receiver.bodies),
        "prometheus": generate_latest(metrics.registry).decode(),
    }


@pytest.mark.parametrize("name", AGENTS)
async def test_without_content_no_sink_sends_a_text_of_an_error(receiver: Receiver, name: str) -> None:
    texts = await sent(receiver, AGENTS[name](), content=False)
    assert all(len(text) > 200 for text in texts.values())
    assert [sink for sink, text in texts.items() if WORD in text] == []


@pytest.mark.parametrize("name", AGENTS)
async def test_with_content_the_texts_are_sent(receiver: Receiver, name: str) -> None:
    texts = await sent(receiver, AGENTS[name](), content=True)
    assert [sink for sink, text in texts.items() if WORD in text] == ["opentelemetry", "langfuse"]


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("tool", {"failed"}),
        ("wrong arguments", {"bad_arguments"}),
        ("unknown tool", {"unknown_tool"}),
        ("model", {"Declined"}),
        ("retried step", {"Declined", "StepExecutionError"}),
        ("stated error", {"error"}),
        ("langgraph step", {"Declined", "StepExecutionError"}),
        ("openai tool", {"Declined", "UserError"}),
        ("openai streamed model", {"Declined"}),
        ("pydantic ai tool", {"Declined"}),
    ],
)
async def test_the_type_of_an_error_is_sent(receiver: Receiver, name: str, types: set[str]) -> None:
    exported = InMemorySpanExporter()
    sink = OpenTelemetrySink(processor=SimpleSpanProcessor(exported))
    async with AgentRunner.open("memory://", trace_sinks=[sink], config=RunnerConfig(max_retries=1)) as runner:
        await runner.execute(AGENTS[name](), input_data={})
    spans = exported.get_finished_spans()
    assert {(span.attributes or {}).get("error.type") for span in spans} - {None} == types
    assert {span.status.description for span in spans} - {None} == types


# -- messages of all frameworks


def with_reasoning(items: list[dict[str, Any]]) -> list[Any]:
    if any(each.get("type") == "function_call_output" for each in items):
        return [assistant_message("It is sunny.")]
    summary: Any = [{"type": "summary_text", "text": "hm"}]
    reasoning = ResponseReasoningItem(id="r", type="reasoning", summary=summary)
    return [reasoning, function_call("look", {"city": "Bern"}, call_id="c1")]


def look(city: str) -> dict[str, str]:
    """Look out of the window."""
    return {"sky": f"sunny in {city}"}


def openai_agent(*, streamed: bool) -> Body:
    async def ignore(event: Any) -> None:
        """Take the event."""

    async def body(ctx: RunContext) -> None:
        agent = OpenAIAgent(
            name="w", model=FakeModel(with_reasoning), tools=[function_tool(look)], instructions="You know the weather."
        )
        await run_agent(agent, "How is it?", on_event=ignore if streamed else None)

    return body


async def pydantic_ai_agent(ctx: RunContext) -> None:
    def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        if len(messages) > 1:
            return ModelResponse(parts=[TextPart("It is sunny.")], finish_reason="stop")
        call = ToolCallPart("look", {"city": "Bern"}, tool_call_id="c1")
        return ModelResponse(parts=[ThinkingPart("hm"), call], finish_reason="tool_call")

    model = FunctionModel(answer, model_name="fake-model")
    agent = PydanticAgent(model, name="w", capabilities=[Durable()], instructions="You know the weather.")
    agent.tool_plain(look)
    await agent.run("How is it?")


async def langgraph_agent(ctx: RunContext) -> None:
    call = {"name": "look", "args": {"city": "Bern"}, "id": "c1"}
    content: Any = [{"type": "thinking", "thinking": "hm"}]
    answers = iter(
        [
            AIMessage(content, tool_calls=[call]),
            AIMessage("It is sunny.", response_metadata={"stop_reason": "end_turn"}),
        ]
    )
    model = DurableChatModel(model=Scripted(messages=answers))
    messages: list[BaseMessage] = [SystemMessage("You know the weather."), HumanMessage("How is it?")]
    messages.append(await model.ainvoke(messages))
    messages.append(ToolMessage('{"sky": "sunny in Bern"}', tool_call_id="c1"))
    await model.ainvoke(messages)


class Scripted(GenericFakeChatModel):
    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        return {"ls_provider": "google_genai", "ls_model_name": "fake-model"}


class Weather(ToolCallingAgent):
    key = "script"
    system_prompt = "You know the weather."
    model = "fake-model"
    tools = ToolRegistry()
    tools.register(Tool.from_function(look))

    def get_llm_client(self) -> MockLLMClient:
        call = {"id": "c1", "function": {"name": "look", "arguments": '{"city": "Bern"}'}}
        return MockLLMClient(
            [
                {"role": "assistant", "reasoning": "hm", "tool_calls": [call]},
                {"role": "assistant", "content": "It is sunny."},
            ]
        )


FRAMEWORKS: dict[str, tuple[Callable[[], AgentRuntime], str]] = {
    "own loop": (Weather, "MockLLMClient"),
    "openai": (lambda: Script(openai_agent(streamed=False)), "fake"),
    "openai streamed": (lambda: Script(openai_agent(streamed=True)), "fake"),
    "pydantic ai": (lambda: Script(pydantic_ai_agent), "function"),
    "langgraph": (lambda: Script(langgraph_agent), "gcp.gemini"),
}


@pytest.mark.parametrize("name", FRAMEWORKS)
async def test_chat_spans_of_all_frameworks_follow_the_conventions(name: str) -> None:
    make, provider = FRAMEWORKS[name]
    exported = InMemorySpanExporter()
    sink = OpenTelemetrySink(processor=SimpleSpanProcessor(exported), content=True)
    async with AgentRunner.open("memory://", trace_sinks=[sink]) as runner:
        result = await runner.execute(make(), input_data={"messages": [{"role": "user", "content": "How is it?"}]})
    assert result.error is None
    calls = [dict(span.attributes or {}) for span in exported.get_finished_spans() if span.name.startswith("chat ")]
    for attributes in calls:
        assert attributes["gen_ai.provider.name"] == provider
        assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "fake-model"
        assert attributes["gen_ai.agent.name"] == "script"
    first, second = [dict(messages_in(attributes)) for attributes in calls]
    reasons = [attributes["gen_ai.response.finish_reasons"] for attributes in calls]
    assert reasons == [("tool_call",), ("stop",)]
    asked = {"role": "user", "parts": [{"type": "text", "content": "How is it?"}]}
    reasoning = {"type": "reasoning", "content": "hm"}
    call = {"type": "tool_call", "id": "c1", "name": "look", "arguments": {"city": "Bern"}}
    assert first["gen_ai.system_instructions"] == [{"type": "text", "content": "You know the weather."}]
    assert first["gen_ai.input.messages"] == [asked]
    assert first["gen_ai.output.messages"] == [
        {"role": "assistant", "parts": [reasoning, call], "finish_reason": "tool_call"}
    ]
    *before, answered = second["gen_ai.input.messages"]
    assert before == [asked, {"role": "assistant", "parts": [reasoning, call]}]
    [response] = answered["parts"]
    assert (answered["role"], response["type"], response["id"]) == ("tool", "tool_call_response", "c1")
    assert "sunny in Bern" in str(response["response"])
    assert second["gen_ai.output.messages"][0]["parts"] == [{"type": "text", "content": "It is sunny."}]


@pytest.mark.parametrize("name", FRAMEWORKS)
async def test_without_content_chat_spans_have_the_rest(name: str) -> None:
    make, provider = FRAMEWORKS[name]
    exported = InMemorySpanExporter()
    sinks = [OpenTelemetrySink(processor=SimpleSpanProcessor(exported)), PrometheusSink()]
    async with AgentRunner.open("memory://", trace_sinks=sinks) as runner:
        await runner.execute(make(), input_data={"messages": [{"role": "user", "content": "How is it?"}]})
    spans = [dict(span.attributes or {}) for span in exported.get_finished_spans() if span.name == "chat fake-model"]
    assert [each["gen_ai.provider.name"] for each in spans] == [provider] * 2
    assert [each["gen_ai.response.finish_reasons"] for each in spans] == [("tool_call",), ("stop",)]
    assert not any(SCHEMAS.keys() & each.keys() for each in spans)
