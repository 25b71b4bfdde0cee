"""Requests to model providers continue the trace of the run that makes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult, TraceSink
from agent_runtime_core.llm import AnthropicClient, OpenAIClient
from agent_runtime_core.tracing import OpenTelemetrySink, PrometheusSink
from tests.support.provider_server import Script, WireServer, events, script, serving

pytest.importorskip("openai")
pytest.importorskip("anthropic")
pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("prometheus_client")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

ASK = [{"role": "user", "content": "hello"}]
USED = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
OPENAI = {
    "id": "c", "object": "chat.completion", "created": 1, "model": "gpt-4o", "usage": USED,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
}  # fmt: skip
ANTHROPIC = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-sonnet-5-5", "stop_reason": "end_turn",
    "content": [{"type": "text", "text": "hi"}], "usage": {"input_tokens": 1, "output_tokens": 1},
}  # fmt: skip
OPENAI_STREAM = events(
    {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "gpt-4o",
     "choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]},
)  # fmt: skip
ANTHROPIC_STREAM = events(
    ("message_start", {"type": "message_start", "message": {**ANTHROPIC, "content": [], "stop_reason": None}}),
    ("content_block_start", {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
    ("content_block_delta", {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}}),
    ("content_block_stop", {"type": "content_block_stop", "index": 0}),
    ("message_delta", {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}}),
    ("message_stop", {"type": "message_stop"}),
    end="",
)
MAKE: dict[str, Callable[[WireServer], OpenAIClient | AnthropicClient]] = {
    "openai": lambda server: OpenAIClient("sk-1", base_url=server.url),
    "anthropic": lambda server: AnthropicClient(api_key="sk-1", base_url=server.url),
}
ANSWERS: dict[tuple[str, bool], Any] = {("openai", False): OPENAI, ("anthropic", False): ANTHROPIC,
           ("openai", True): OPENAI_STREAM, ("anthropic", True): ANTHROPIC_STREAM}  # fmt: skip


class Asking(AgentRuntime):
    key = "asking"

    def __init__(self, ask: Callable[[], Awaitable[Any]]) -> None:
        self.ask = ask
        self.traceparents: list[str | None] = []

    async def run(self, ctx: RunContext) -> RunResult:
        async def step() -> None:
            self.traceparents.append(ctx.traceparent)
            await self.ask()

        await ctx.step("ask", step)
        self.traceparents.append(ctx.traceparent)
        await self.ask()
        return RunResult()


async def headers_of(provider: str, streamed: bool, sink: TraceSink, **options: Any) -> tuple[list[Any], list[Any]]:
    """Return the headers of a request in a step and of one after it, and what `ctx.traceparent` was there."""
    answer = ANSWERS[provider, streamed]
    body = script(answer) if isinstance(answer, dict) else Script(answer, content_type="text/event-stream")
    async with serving(body) as server, AgentRunner(trace_sinks=[sink]) as runner:
        client = MAKE[provider](server)

        async def ask() -> None:
            if streamed:
                assert [chunk async for chunk in client.stream(ASK, **options)]
            else:
                await client.generate(ASK, **options)

        agent = Asking(ask)
        await runner.execute(agent, raise_on_error=True)
        await client.close()
    return [each.get("traceparent") for each in server.headers], agent.traceparents


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_a_request_has_the_span_of_its_step(provider: str, streamed: bool) -> None:
    sent, known = await headers_of(provider, streamed, OpenTelemetrySink(InMemorySpanExporter()))
    assert sent == known
    assert None not in known
    assert len({*known}) == 2  # the step, and the execution
    assert len({each.split("-")[1] for each in known}) == 1  # one trace


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_without_a_sink_that_sends_spans_there_is_no_header(provider: str) -> None:
    assert await headers_of(provider, False, PrometheusSink()) == ([None, None], [None, None])


async def test_a_header_of_the_caller_is_kept() -> None:
    own = f"00-{'1' * 32}-{'2' * 16}-01"
    sink = OpenTelemetrySink(InMemorySpanExporter())
    sent, _ = await headers_of("openai", False, sink, extra_headers={"traceparent": own})
    assert sent == [own, own]
