"""Metrics for Prometheus: what is counted, under which labels, and what is read of the queue and the topics."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import pytest

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    LLMResponse,
    MockLLMClient,
    RunContext,
    RunnerConfig,
    RunResult,
    Tool,
    ToolCallingAgent,
    ToolRegistry,
    configure,
)
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.registry import Registry
from agent_runtime_core.testing import VirtualClock
from agent_runtime_core.tracing import PrometheusSink, get_trace_sink
from agent_runtime_core.turns import TurnEvent, TurnManager

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

CANARY = "canary-7c41"
Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Values:
    """Return the samples of an exposition, without the times at which counters were created."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def exported(sink: PrometheusSink) -> Values:
    body, _ = await sink.exposition()
    return parsed(body.decode())


def value(values: Values, name: str, **labels: str) -> float | None:
    return values.get((f"agent_runtime_{name}", frozenset(labels.items())))


def labels(values: Values, name: str) -> list[Mapping[str, str]]:
    return [dict(labels) for (each, labels) in values if each == f"agent_runtime_{name}"]


def registry_of(*agents: AgentRuntime) -> Registry:
    registry = Registry()
    for agent in agents:
        registry.register(agent)
    return registry


class Order(AgentRuntime):
    key = "order"

    async def run(self, ctx: RunContext) -> RunResult:
        failures = ctx.params.get("failures", 0)
        attempts = 0

        def pay() -> str:
            nonlocal attempts
            attempts += 1
            if attempts <= failures:
                raise ConnectionError(CANARY)
            return CANARY

        await ctx.step("pay", pay, retries=ctx.params.get("retries", 0), retry_delay=0)
        return RunResult({"paid": True})


class Weather(ToolCallingAgent):
    key = "weather"
    system_prompt = f"You know the weather. {CANARY}"
    model = "gpt-4o"

    def __init__(self) -> None:
        usage = {"prompt_tokens": 100, "completion_tokens": 20, "cached_tokens": 40}
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": f'{{"city": "{CANARY}"}}'}}
        self.client = MockLLMClient(
            [
                LLMResponse({"role": "assistant", "content": "", "tool_calls": [call]}, usage, "gpt-4o", "tool_calls"),
                LLMResponse({"role": "assistant", "content": f"It is sunny. {CANARY}"}, usage, "gpt-4o", "stop"),
            ]
        )
        self.registry = ToolRegistry()

        def look(city: str) -> str:
            """Look out of the window."""
            if self.fails:
                raise ConnectionError("no window")
            return f"sunny in {city}"

        self.registry.register(Tool.from_function(look))

    fails = False

    @property
    def tools(self) -> ToolRegistry:
        return self.registry

    def get_llm_client(self) -> MockLLMClient:
        return self.client


async def executed(sink: PrometheusSink, *agents: AgentRuntime, **params: Any) -> None:
    """Execute each agent once, and wait until the sink has all traces."""
    config = RunnerConfig(retry_backoff_base=0)
    async with AgentRunner(trace_sinks=[sink], config=config, registry=registry_of(*agents)) as runner:
        for agent in agents:
            await runner.execute(agent, input_data={"messages": [{"role": "user", "content": CANARY}]}, params=params)


async def test_runs_and_steps_are_counted_with_their_duration() -> None:
    sink = PrometheusSink()
    await executed(sink, Order())
    values = await exported(sink)
    assert value(values, "runs_total", agent="order", state="succeeded") == 1
    assert value(values, "run_seconds_count", agent="order") == 1
    assert value(values, "step_seconds_count", agent="order", kind="step") == 1
    assert value(values, "step_seconds_bucket", agent="order", kind="step", le="+Inf") == 1
    # A rate over a counter that does not exist before its first event misses that event.
    assert value(values, "step_failures_total", agent="order", kind="step") == 0
    assert value(values, "runs_total", agent="order", state="failed") == 0


async def test_what_runs_do_has_the_label_of_their_tenant_only_if_that_is_asked_for() -> None:
    plain, by_tenant = PrometheusSink(), PrometheusSink(tenant=True)
    async with AgentRunner(trace_sinks=[plain, by_tenant]) as runner:
        for agent in (Order, Weather):
            for tenant in ("acme", "zenith", None, "acme"):
                await runner.execute(agent(), input_data={"messages": []}, tenant=tenant)
    values = await exported(by_tenant)
    for tenant, runs in (("acme", 2), ("zenith", 1), ("", 1)):
        assert value(values, "runs_total", agent="order", state="succeeded", tenant=tenant) == runs
        assert value(values, "run_seconds_count", agent="order", tenant=tenant) == runs
        assert value(values, "step_seconds_count", agent="order", kind="step", tenant=tenant) == runs
        assert value(values, "step_failures_total", agent="order", kind="step", tenant=tenant) == 0
        assert value(values, "tokens_total", model="gpt-4o", kind="input", tenant=tenant) == 200 * runs
    values = await exported(plain)
    assert value(values, "runs_total", agent="order", state="succeeded") == 4
    assert not [labels for _, labels in values if "tenant" in dict(labels)]


async def test_the_hundred_and_first_tenant_is_counted_as_other() -> None:
    sink = PrometheusSink(tenant=True)
    for n in range(102):
        run_id = uuid4()
        sink.start_run(run_id, {"agent_key": "order", "tenant": f"t{n}", "time": 1.0})
        sink.end_run(run_id, "succeeded", {"time": 2.0})
    sink.end_run(uuid4(), "failed", {"time": 2.0})
    values = await exported(sink)
    assert value(values, "runs_total", agent="order", state="succeeded", tenant="t99") == 1
    assert value(values, "runs_total", agent="order", state="succeeded", tenant="other") == 2
    assert value(values, "runs_total", agent="unknown", state="failed", tenant="") == 1


async def test_failed_attempts_are_counted_and_the_run_once() -> None:
    sink = PrometheusSink()
    await executed(sink, Order(), failures=2, retries=2)
    await executed(sink, Order(), failures=1)  # which fails in each of the three attempts of the run
    values = await exported(sink)
    assert value(values, "step_failures_total", agent="order", kind="step") == 2 + 3
    assert value(values, "runs_total", agent="order", state="succeeded") == 1
    assert value(values, "runs_total", agent="order", state="failed") == 1


async def test_an_attempt_that_is_repeated_is_no_end_of_the_run(tmp_path: Any) -> None:
    sink = PrometheusSink()

    class Twice(AgentRuntime):
        key = "twice"

        async def run(self, ctx: RunContext) -> RunResult:
            if ctx.attempt == 1:
                raise ConnectionError("the first attempt")
            return RunResult()

    config = RunnerConfig(max_retries=3, retry_backoff_base=0)
    runner = AgentRunner.open(tmp_path / "agents.db", config=config, trace_sinks=[sink], registry=registry_of(Twice()))
    async with runner:
        run = await runner.submit("twice", {})
        while not (await runner.get_run(run)).ended_at:
            await runner.run_once()
    values = await exported(sink)
    assert value(values, "runs_total", agent="twice", state="succeeded") == 1
    assert value(values, "runs_total", agent="twice", state="failed") == 0


async def test_model_calls_are_counted_with_their_tokens_and_cost() -> None:
    configure(model_prices={"gpt-4o": {"input": 2, "output": 8}})
    sink = PrometheusSink()
    await executed(sink, Weather())
    values = await exported(sink)
    [model] = {each["model"] for each in labels(values, "tokens_total")}
    for kind, tokens in (("input", 200), ("output", 40), ("cache_read", 80)):
        assert value(values, "tokens_total", model=model, kind=kind) == tokens
    assert labels(values, "cost_usd_total") == [{"model": model}]
    assert value(values, "step_seconds_count", agent="weather", kind="tool") == 1


async def test_a_tool_that_fails_is_counted() -> None:
    sink, agent = PrometheusSink(), Weather()
    agent.fails = True
    await executed(sink, agent)
    assert value(await exported(sink), "step_failures_total", agent="weather", kind="tool") == 1


async def test_usage_that_a_step_reports_is_counted() -> None:
    class Charging(AgentRuntime):
        key = "charging"

        async def run(self, ctx: RunContext) -> RunResult:
            await ctx.step("ask", lambda: ctx.charge(model="m-1", input_tokens=7, output_tokens=2, cost_usd=0.25))
            return RunResult()

    sink = PrometheusSink()
    await executed(sink, Charging())
    values = await exported(sink)
    assert value(values, "tokens_total", model="m-1", kind="input") == 7
    assert value(values, "tokens_total", model="m-1", kind="output") == 2
    assert value(values, "cost_usd_total", model="m-1") == 0.25
    assert value(values, "step_seconds_count", agent="charging", kind="model") is None


async def test_the_hundred_and_first_agent_and_model_are_counted_as_other() -> None:
    sink = PrometheusSink()
    for number in range(103):
        run_id = uuid4()
        sink.start_run(run_id, {"agent_key": f"agent-{number}", "time": 1.0})
        call = {"model": f"model-{number}", "usage": {"prompt_tokens": 1}, "started_at": 1.0, "ended_at": 2.0}
        sink.log_event(run_id, "llm.call", call)
        sink.end_run(run_id, "succeeded", {"time": 3.0})
    values = await exported(sink)
    assert len({each["agent"] for each in labels(values, "runs_total")}) == len(labels(values, "tokens_total")) == 101
    assert value(values, "runs_total", agent="other", state="succeeded") == 3
    assert value(values, "run_seconds_sum", agent="other") == 6
    assert value(values, "tokens_total", model="other", kind="input") == 3


async def test_a_name_with_a_lone_surrogate_or_without_end_can_be_sent() -> None:
    sink = PrometheusSink()
    for agent in ("bad\ud800", "x" * 100_000, 'quote"\n\\'):
        run_id = uuid4()
        sink.start_run(run_id, {"agent_key": agent, "time": 1.0})
        sink.end_run(run_id, "failed", {"time": 2.0})
    agents = {each["agent"] for each in labels(await exported(sink), "runs_total")}
    assert agents == {"bad?", "x" * 200, 'quote"\n\\'}


async def test_the_queue_is_read_at_most_every_five_seconds(tmp_path: Any) -> None:
    sink = PrometheusSink()
    async with AgentRunner.open(tmp_path / "agents.db", registry=registry_of(Order())) as runner:
        clock = VirtualClock()
        runner.queue.clock = clock
        sink.watch(runner)
        await runner.submit("order", {})
        clock.advance(3)
        values = await exported(sink)
        assert value(values, "queue_depth", agent="order", state="pending") == 1
        assert value(values, "queue_oldest_seconds", agent="order") == pytest.approx(3)
        assert value(values, "dead") == 0
        await runner.submit("order", {})
        clock.advance(4.9)
        assert value(await exported(sink), "queue_depth", agent="order", state="pending") == 1
        clock.advance(0.1)
        assert value(await exported(sink), "queue_depth", agent="order", state="pending") == 2


async def test_finished_runs_are_no_part_of_the_queue() -> None:
    sink = PrometheusSink()
    async with AgentRunner(trace_sinks=[sink], registry=registry_of(Order())) as runner:
        sink.watch(runner)
        await runner.execute("order")
        values = await exported(sink)
    assert labels(values, "queue_depth") == labels(values, "queue_oldest_seconds") == []


async def test_a_store_that_does_not_answer_makes_its_metrics_missing(caplog: pytest.LogCaptureFixture) -> None:
    sink = PrometheusSink()
    await executed(sink, Order())

    class Broken:
        tracer = None
        backpressure_seconds = 0.0

        def __init__(self) -> None:
            self.queue = self
            self.clock = VirtualClock()

        async def counts(self) -> Any:
            raise ConnectionError(CANARY)

    broken: Any = Broken()
    sink.watch(broken)
    for _ in range(3):
        values = await exported(sink)
        broken.clock.advance(10)
    assert value(values, "runs_total", agent="order", state="succeeded") == 1
    assert labels(values, "queue_depth") == labels(values, "dead") == []
    assert len([each for each in caplog.records if "cannot be read" in each.message]) == 1


@pytest.mark.sentence("001", "`EventPublisherSubscriber` surfaces per-topic latency and error metrics")
async def test_topics_have_latency_errors_and_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = PrometheusSink()
    async with AgentRunner(trace_sinks=[sink]) as runner:
        topics = TurnManager(runner).topics
        sink.watch(runner, topics=topics)
        for number in range(3):
            await topics.tell(TurnEvent(messages=[{"role": "user", "content": CANARY}], turn_id=f"turn {number}"))
        assert [each.offset async for each in topics.subscribe("agent.turns", follow=False)] == [0, 1, 2]
        await topics.commit("agent.turns", "reader", 0)
        values = await exported(sink)
        assert value(values, "topic_lag", topic="agent.turns", consumer="reader") == 2

        async def failing(*_: Any) -> Any:
            raise ConnectionError("no store")

        monkeypatch.setattr(runner.event_bus, "commit", failing)
        with pytest.raises(ConnectionError):
            await topics.tell(TurnEvent(messages=[{"role": "user", "content": CANARY}], turn_id="turn"))
        monkeypatch.undo()
    values = await exported(sink)
    assert value(values, "topic_publish_seconds_count", topic="agent.turns") == 3
    assert value(values, "topic_errors_total", topic="agent.turns") == 1


async def test_an_application_scrapes_the_registry_from_a_thread(tmp_path: Any) -> None:
    registry = CollectorRegistry()
    sink = PrometheusSink(registry)
    async with AgentRunner.open(tmp_path / "agents.db", registry=registry_of(Order())) as runner:
        sink.watch(runner)
        await runner.submit("order", {})
        body = await asyncio.to_thread(generate_latest, registry)
    assert value(parsed(body.decode()), "queue_depth", agent="order", state="pending") == 1


def test_two_sinks_do_not_share_a_registry() -> None:
    registry = CollectorRegistry(auto_describe=True)
    PrometheusSink(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        PrometheusSink(registry)


def test_the_registry_is_checked() -> None:
    with pytest.raises(InvalidArgument, match="registry must be a CollectorRegistry"):
        PrometheusSink("metrics")


def test_the_sink_has_a_name() -> None:
    assert isinstance(get_trace_sink("prometheus"), PrometheusSink)


async def test_openmetrics_is_written_for_who_asks_for_it() -> None:
    sink = PrometheusSink()
    await executed(sink, Order())
    body, content_type = await sink.exposition("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    names = {family.name for family in openmetrics.text_string_to_metric_families(body.decode())}  # type: ignore[no-untyped-call]
    assert "agent_runtime_runs" in names


async def test_names_have_the_prefix_and_no_label_has_contents_or_ids(tmp_path: Any) -> None:
    sink = PrometheusSink()
    config = RunnerConfig(worker_id=f"worker-{CANARY}")
    registry = registry_of(Order(), Weather())
    async with AgentRunner.open(tmp_path / "agents.db", config=config, trace_sinks=[sink], registry=registry) as runner:
        sink.watch(runner)
        await runner.execute("order", params={"failures": 1, "retries": 1, "user": CANARY})
        await runner.execute("weather", input_data={"messages": [{"role": "user", "content": CANARY}]})
        run = await runner.submit("order", {"prompt": CANARY}, run_id=f"key-{CANARY}", metadata={"user": CANARY})
        body, _ = await sink.exposition()
    families = list(text_string_to_metric_families(body.decode()))
    assert families
    assert all(family.name.startswith("agent_runtime_") for family in families)
    assert CANARY not in body.decode()
    assert str(run) not in body.decode()


async def test_traces_of_many_threads_are_all_counted() -> None:
    sink = PrometheusSink()

    def count() -> None:
        for _ in range(200):
            sink.http_response("GET", "/api/v1/runs", 200, 0.001)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    values = await exported(sink)
    assert value(values, "http_requests_total", method="GET", route="/api/v1/runs", status="200") == 800
