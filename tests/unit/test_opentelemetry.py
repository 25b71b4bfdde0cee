"""The spans of runs in OpenTelemetry: names, ids, parents, GenAI attributes, contents."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    MockLLMClient,
    MockLLMResponse,
    RunContext,
    RunnerConfig,
    RunResult,
    Tool,
    ToolCallingAgent,
    ToolRegistry,
    open_run,
)
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.planning import PlanningAgent
from agent_runtime_core.registry import Registry
from agent_runtime_core.tracing import OpenTelemetrySink

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, StatusCode

CANARY = "canary-7c41"


@pytest.fixture
def exported() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def user(exported: InMemorySpanExporter) -> Any:
    """A tracer of the application, whose spans arrive in the same place."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exported))
    return provider.get_tracer("shop")


def sink_to(exported: InMemorySpanExporter, **options: Any) -> OpenTelemetrySink:
    return OpenTelemetrySink(processor=SimpleSpanProcessor(exported), **options)


def registry_of(agent: AgentRuntime) -> Registry:
    registry = Registry()
    registry.register(agent)
    return registry


def about(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def at(span: ReadableSpan) -> SpanContext:
    context: SpanContext | None = span.context
    assert context is not None
    return context


def by_name(exported: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """Return the spans; each name must occur once."""
    spans = exported.get_finished_spans()
    found = {span.name: span for span in spans}
    assert len(found) == len(spans), sorted(span.name for span in spans)
    return found


def parent(span: ReadableSpan, spans: dict[str, ReadableSpan]) -> str | None:
    if span.parent is None:
        return None
    return next((name for name, each in spans.items() if at(each).span_id == span.parent.span_id), "unknown")


class Weather(ToolCallingAgent):
    key = "weather"
    system_prompt = f"You know the weather. {CANARY}"
    model = "gpt-4o"
    temperature = 0.5

    def __init__(self, user: Any) -> None:
        self.client = MockLLMClient(
            [
                MockLLMResponse("", tool_calls=[{"name": "look", "arguments": {"city": CANARY}}]),
                MockLLMResponse("", tool_calls=[{"name": "count", "arguments": {}}]),
                f"It is sunny. {CANARY}",
            ]
        )
        self.registry = ToolRegistry()

        async def look(city: str) -> str:
            """Look out of the window."""
            with user.start_as_current_span("window"):
                return f"sunny in {city}"

        def count() -> int:
            """Count the clouds, in a thread."""
            with user.start_as_current_span("clouds"):
                return 3

        self.registry.register(Tool.from_function(look))
        self.registry.register(Tool.from_function(count))

    @property
    def tools(self) -> ToolRegistry:
        return self.registry

    def get_llm_client(self) -> MockLLMClient:
        return self.client


class Plain(AgentRuntime):
    key = "plain"

    async def run(self, ctx: RunContext) -> RunResult:
        return RunResult()


@pytest.mark.parametrize("tenant", ["acme", None])
async def test_the_span_of_an_execution_names_its_tenant(exported: InMemorySpanExporter, tenant: str | None) -> None:
    async with AgentRunner.open("memory://", trace_sinks=[sink_to(exported)]) as runner:
        await runner.execute(Plain(), input_data={}, tenant=tenant)
    [agent] = exported.get_finished_spans()
    assert about(agent).get("agent_runtime.tenant") == tenant
    assert ("agent_runtime.tenant" in about(agent)) is (tenant is not None)


async def weather(exported: InMemorySpanExporter, user: Any, **options: Any) -> RunResult:
    config = RunnerConfig()
    async with AgentRunner.open("memory://", trace_sinks=[sink_to(exported, **options)], config=config) as runner:
        messages = [{"role": "user", "content": f"how is it? {CANARY}"}]
        return await runner.execute(Weather(user), input_data={"messages": messages, "conversation_id": "c-1"})


async def test_a_three_turn_tool_agent_has_the_attributes_of_the_conventions(
    exported: InMemorySpanExporter, user: Any
) -> None:
    result = await weather(exported, user)
    spans = exported.get_finished_spans()
    kinds = [about(span).get("gen_ai.operation.name") for span in spans]
    assert sorted(filter(None, kinds)) == ["chat"] * 3 + ["execute_tool"] * 2 + ["invoke_agent"]
    [agent] = [span for span in spans if span.name == "invoke_agent weather"]
    assert about(agent)["gen_ai.agent.name"] == "weather"
    assert about(agent)["agent_runtime.run_id"] == str(result.run_id)
    assert about(agent)["agent_runtime.outcome"] == "succeeded"
    assert about(agent)["gen_ai.usage.input_tokens"] == result.usage["prompt_tokens"]
    for chat in (span for span in spans if about(span).get("gen_ai.operation.name") == "chat"):
        assert chat.name == "chat gpt-4o"
        assert chat.kind.name == "CLIENT"
        assert about(chat)["gen_ai.request.temperature"] == 0.5
        assert {"gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.provider.name"} <= set(about(chat))
        assert chat.parent is not None
        assert chat.parent.span_id == at(agent).span_id
    assert {at(span).trace_id for span in spans} == {result.run_id.int if result.run_id else 0}
    assert agent.parent is None


async def test_a_users_span_is_a_child_of_its_tool_also_in_a_thread(exported: InMemorySpanExporter, user: Any) -> None:
    await weather(exported, user)
    spans = {span.name: span for span in exported.get_finished_spans()}
    assert parent(spans["window"], spans) == "execute_tool look"
    assert parent(spans["clouds"], spans) == "execute_tool count"
    assert parent(spans["execute_tool look"], spans) == "invoke_agent weather"


@pytest.mark.parametrize("content", [False, True])
async def test_contents_are_sent_only_on_request(exported: InMemorySpanExporter, user: Any, content: bool) -> None:
    await weather(exported, user, content=content)
    texts = "".join(span.to_json() for span in exported.get_finished_spans())
    assert (CANARY in texts) is content
    if content:
        tool = next(span for span in exported.get_finished_spans() if span.name == "execute_tool look")
        assert json.loads(about(tool)["gen_ai.tool.call.arguments"]) == {"city": CANARY}
        assert about(tool)["gen_ai.tool.call.result"] == f"sunny in {CANARY}"


class Nested(AgentRuntime):
    key = "nested"

    def __init__(self, user: Any) -> None:
        self.user = user

    async def run(self, ctx: RunContext) -> RunResult:
        with self.user.start_as_current_span("between"):
            await asyncio.sleep(0)
        await ctx.step("outer", self.outer)
        await ctx.call(Child(), {})
        return RunResult()

    async def outer(self, ctx: RunContext) -> None:
        await ctx.step("inner", self.inner)

    async def inner(self) -> None:
        with self.user.start_as_current_span("own"):
            pass


class Child(AgentRuntime):
    key = "child"

    async def run(self, ctx: RunContext) -> RunResult:
        await ctx.step("in child", lambda: None)
        return RunResult()


async def test_steps_and_child_runs_have_their_parents(exported: InMemorySpanExporter, user: Any) -> None:
    async with AgentRunner.open("memory://", trace_sinks=[sink_to(exported)]) as runner:
        await runner.execute(Nested(user), input_data={})
    spans = by_name(exported)
    parents = {name: parent(span, spans) for name, span in spans.items()}
    assert parents == {
        "invoke_agent nested": None,
        "between": "invoke_agent nested",
        "outer": "invoke_agent nested",
        "inner": "outer",
        "own": "inner",
        "invoke_agent child": "invoke_agent nested",
        "in child": "invoke_agent child",
    }
    assert len({at(span).trace_id for span in spans.values()}) == 1


async def test_a_run_belongs_to_the_trace_in_which_it_was_submitted(exported: InMemorySpanExporter, user: Any) -> None:
    async with AgentRunner.open("memory://", trace_sinks=[sink_to(exported)], registry=registry_of(Child())) as runner:
        with user.start_as_current_span("request"):
            run_id = await runner.submit("child", {})
        other = await runner.submit("child", {}, traceparent=f"00-{7:032x}-{9:016x}-01")
        for _ in range(2):
            assert await runner.run_once()
        assert (await runner.wait(run_id)).run_id is not None
        assert other is not None
    spans = exported.get_finished_spans()
    request = next(span for span in spans if span.name == "request")
    agents = [span for span in spans if span.name == "invoke_agent child"]
    parents = {(each.parent.trace_id, each.parent.span_id) for each in agents if each.parent is not None}
    assert parents == {(at(request).trace_id, at(request).span_id), (7, 9)}
    assert {at(each).trace_id for each in agents} == {at(request).trace_id, 7}


async def test_an_unsampled_trace_sends_nothing(exported: InMemorySpanExporter) -> None:
    async with AgentRunner.open("memory://", trace_sinks=[sink_to(exported)], registry=registry_of(Child())) as runner:
        await runner.submit("child", {}, traceparent=f"00-{7:032x}-{9:016x}-00")
        assert await runner.run_once()
    assert exported.get_finished_spans() == ()


async def test_a_wrong_traceparent_is_rejected() -> None:
    async with AgentRunner.open("memory://", registry=registry_of(Child())) as runner:
        with pytest.raises(InvalidArgument, match=r"traceparent must be a W3C traceparent, got '00-1'"):
            await runner.submit("child", {}, traceparent="00-1")


class Flaky(AgentRuntime):
    key = "flaky"

    async def run(self, ctx: RunContext) -> RunResult:
        await ctx.step("unreliable", self.fail, ctx.attempt, retries=1, retry_delay=0.0)
        return RunResult()

    async def fail(self, attempt: int) -> None:
        if attempt == 1:
            raise ValueError(CANARY)


async def test_each_attempt_is_a_span_and_errors_have_their_type(exported: InMemorySpanExporter) -> None:
    config = RunnerConfig(retry_backoff_base=0.001, retry_backoff_max=0.001)
    async with AgentRunner.open("memory://", trace_sinks=[sink_to(exported)], config=config) as runner:
        await runner.execute(Flaky(), input_data={})
    steps = [span for span in exported.get_finished_spans() if span.name == "unreliable"]
    assert [span.status.status_code for span in steps] == [StatusCode.ERROR, StatusCode.ERROR, StatusCode.UNSET]
    assert len({at(span).span_id for span in steps}) == 3
    assert CANARY not in "".join(span.to_json() for span in exported.get_finished_spans())


async def test_a_run_that_waited_links_to_the_execution_before(exported: InMemorySpanExporter, tmp_path: Path) -> None:
    class Asking(AgentRuntime):
        key = "asking"

        async def run(self, ctx: RunContext) -> RunResult:
            await ctx.approve("pay")
            return RunResult()

    config = RunnerConfig(park_after=0)
    sink = sink_to(exported)
    async with AgentRunner.open(
        tmp_path / "a.db", trace_sinks=[sink], registry=registry_of(Asking()), config=config
    ) as runner:
        run_id = await runner.submit("asking", {})
        assert await runner.run_once()
        await runner.approve(run_id, "pay")
        assert await runner.run_once()
    waited, resumed = sorted(exported.get_finished_spans(), key=lambda span: span.start_time or 0)
    assert about(waited)["agent_runtime.outcome"] == "waiting"
    assert [link.context.span_id for link in resumed.links] == [at(waited).span_id]
    assert at(resumed).trace_id == at(waited).trace_id


async def test_steps_of_open_run_are_children_of_its_span(exported: InMemorySpanExporter, tmp_path: Path) -> None:
    async with AgentRunner.open(tmp_path / "a.db", trace_sinks=[sink_to(exported)]) as runner:
        assert runner is not None
    async with open_run(tmp_path / "b.db", "r") as ctx:
        assert ctx.traceparent is None  # open_run has no trace sinks
    assert exported.get_finished_spans() == ()


async def test_ctx_traceparent_names_the_span_of_the_step(exported: InMemorySpanExporter) -> None:
    seen: list[str | None] = []

    class Reading(AgentRuntime):
        key = "reading"

        async def run(self, ctx: RunContext) -> RunResult:
            seen.append(ctx.traceparent)
            await ctx.step("read", self.read)
            return RunResult()

        async def read(self, ctx: RunContext) -> None:
            seen.append(ctx.traceparent)

    async with AgentRunner.open("memory://", trace_sinks=[sink_to(exported)]) as runner:
        await runner.execute(Reading(), input_data={})
    spans = by_name(exported)
    ids = [at(spans[name]) for name in ("invoke_agent reading", "read")]
    assert seen == [f"00-{each.trace_id:032x}-{each.span_id:016x}-01" for each in ids]


def test_the_resource_and_both_ways_of_sending() -> None:
    exported = InMemorySpanExporter()
    with pytest.raises(InvalidArgument, match="exporter and processor"):
        OpenTelemetrySink(exported, processor=SimpleSpanProcessor(exported))
    sink = OpenTelemetrySink(exported, resource=Resource.create({"service.name": "shop"}))
    assert sink.current_traceparent() is None


async def test_a_sink_that_fails_to_activate_fails_no_run(
    exported: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(OpenTelemetrySink):
        def activate(self, traceparent: str) -> Any:
            raise RuntimeError("no")

    sink = Broken(processor=SimpleSpanProcessor(exported))
    with caplog.at_level(logging.WARNING):
        async with AgentRunner.open("memory://", trace_sinks=[sink]) as runner:
            result = await runner.execute(Child(), input_data={})
    assert result.error is None
    assert [record.message for record in caplog.records].count(
        "trace sink Broken failed in activate(); logged once"
    ) == 1


async def test_a_run_that_plans_is_a_workflow(exported: InMemorySpanExporter) -> None:
    async with AgentRunner(trace_sinks=[sink_to(exported)]) as runner:
        await runner.execute(PlanningAgent(), params={"prompt": "add 12 and 30"})
    spans = by_name(exported)
    assert {"invoke_workflow planning", "plan"} < spans.keys()
    workflow, plan = about(spans["invoke_workflow planning"]), about(spans["plan"])
    assert workflow["gen_ai.operation.name"] == "invoke_workflow"
    assert workflow["gen_ai.workflow.name"] == "planning"
    assert plan["gen_ai.operation.name"] == "plan"
    assert parent(spans["plan"], spans) == "invoke_workflow planning"


async def test_a_step_that_is_called_plan_is_a_step(exported: InMemorySpanExporter) -> None:
    class Careful(AgentRuntime):
        key = "careful"

        async def run(self, ctx: RunContext) -> RunResult:
            await ctx.step("plan", lambda: "look first")
            return RunResult()

    async with AgentRunner(trace_sinks=[sink_to(exported)]) as runner:
        await runner.execute(Careful())
    assert "gen_ai.operation.name" not in about(by_name(exported)["plan"])
