"""A key is told to its provider and to nobody else, and what is wrong with a client is said once and clearly."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.config import configure
from agent_runtime_core.interfaces import LLMClient, RunResult, TraceSink
from agent_runtime_core.llm import AnthropicClient, OpenAIClient, Retries, get_llm_client
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.fault_runs import settings
from tests.support.provider_server import Script, WireServer, script, serving, stream

PROVIDERS = ("openai", "anthropic")
HELLO = [{"role": "user", "content": "hello"}]
#: As providers make them, and as a proxy may: nothing in the second tells that it is a key.
KEYS = {"its own": "sk-canary-0a1b2c3d4e5f", "any other": "canary.0a1b2c3d4e5f/+="}
CLIENTS: dict[str, Callable[..., LLMClient]] = {"openai": OpenAIClient, "anthropic": AnthropicClient}


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tuple(os.environ):
        if name.startswith(("OPENAI_", "ANTHROPIC_")):
            monkeypatch.delenv(name)


def look(at: str) -> str:
    """Look at something."""
    return f"seen {at}"


class Agent(ToolCallingAgent):
    key = "agent"
    system_prompt = "Look."
    tools = ToolRegistry()
    tools.register(Tool.from_function(look))
    client: Callable[[], LLMClient]
    model = "some-model"

    def get_llm_client(self) -> LLMClient:
        return self.client()


def agent(client: Callable[[], LLMClient], **changes: Any) -> Agent:
    made: Agent = type("Changed", (Agent,), changes)()
    made.client = client
    return made


class Kept(TraceSink):
    """Everything a sink is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def trace(self, event: dict[str, Any]) -> None:
        self.told.append(event)

    def start_run(self, run_id: Any, metadata: dict[str, Any]) -> None:
        self.told.append(metadata)

    def log_event(self, run_id: Any, event_type: str, payload: dict[str, Any]) -> None:
        self.told.append(payload)

    def end_run(self, run_id: Any, outcome: str, metadata: dict[str, Any] | None = None) -> None:
        self.told.append(metadata)


def wants_a_tool(provider: str, streamed: bool) -> Script:
    """The provider's way to ask for a call of `look`."""
    if provider == "openai":
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        about = {"id": "1", "created": 1, "model": "some-model", "object": "chat.completion"}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        if not streamed:
            return script(
                {**about, "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}], "usage": usage}
            )
        delta = {**message, "tool_calls": [{**call, "index": 0}]}
        chunk = {**about, "object": "chat.completion.chunk"}
        return stream(
            {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
            {**chunk, "choices": [], "usage": usage},
        )
    use: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "x"}}
    answer: dict[str, Any] = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "some-model", "content": [use],
        "stop_reason": "tool_use", "stop_sequence": None, "usage": {"input_tokens": 10, "output_tokens": 5},
    }  # fmt: skip
    if not streamed:
        return script(answer)
    delta = {"type": "input_json_delta", "partial_json": '{"at": "x"}'}
    parts: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**answer, "content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {**use, "input": {}}},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]
    return stream(*((part["type"], part) for part in parts), end="")


def refusal(provider: str, status: int, said: str, **about: Any) -> Script:
    """An error as the provider tells it."""
    error = {"message": said, "type": "some_error", **about}
    body = {"error": error} if provider == "openai" else {"type": "error", "error": error}
    return script(body, status=status)


@asynccontextmanager
async def run(provider: str, key: str, path: Path, *scripts: Script, streamed: bool = False) -> AsyncIterator[Any]:
    """An agent of that provider, run against those answers: (result, what was told of it, the server)."""
    pytest.importorskip(provider)
    sink, told = Kept(), list[str]()
    async with serving(*scripts) as server:
        client = CLIENTS[provider](key, base_url=server.url, retries=Retries(tries=2, base=0))
        sinks: list[TraceSink] = [sink]
        async with AgentRunner.open(path / "runs.db", config=settings(max_retries=2), trace_sinks=sinks) as runner:
            result = await runner.execute(agent(lambda: client, stream=streamed), "r", {"messages": HELLO})
            told += [repr(event) for event in await runner.event_bus.get_events("r")]
            told += [repr(record) for record in await runner.state_store.records("r")]
            told += [repr(await runner.get_run("r")), repr(runner), repr(runner.config)]
        told += [repr(client), str(client), repr(getattr(client, "_wire", None)), repr(sink.told), repr(result)]
        yield result, "\n".join(told), server
        await client.close()  # type: ignore[attr-defined]


def stored(path: Path) -> bytes:
    return b"".join(each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file())


def forms(key: str) -> list[str]:
    """The key, and as it looks inside JSON and a repr."""
    return list({key, json.dumps(key)[1:-1], repr(key)[1:-1]})


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS.keys())
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("status", [400, 401, 403, 500])
@pytest.mark.parametrize("shape", ["told", "raw"])
async def test_a_key_that_the_server_sends_back_is_nowhere(
    provider: str, key: str, streamed: bool, status: int, shape: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said = f"Incorrect API key provided: {key}. Bearer {key}, x-api-key={key}"
    wrong = (
        refusal(provider, status, said, code=f"bad {key}", param=key)
        if shape == "told"
        else Script(said.encode(), status=status, content_type="text/plain")
    )
    scripts = (wants_a_tool(provider, streamed), wrong)
    async with run(provider, key, tmp_path, *scripts, streamed=streamed) as (result, told, server):
        sent = [f"{headers.get('authorization')} {headers.get('x-api-key')}" for headers in server.headers]
    assert all(key in headers for headers in sent), "whom it is for does get it"
    assert isinstance(result, RunResult)
    assert result.status is RunStatus.FAILED
    assert result.error is not None
    assert str(status) in result.error.message, "what went wrong is said all the same"
    assert len(sent) >= 2, "the first answer was taken"
    data = stored(tmp_path)
    assert b"seen x" in data
    for form in forms(key):
        assert form not in result.error.message
        assert form not in result.error.stack
        assert form not in repr(result.error.details)
        assert form not in told
        assert form not in caplog.text
        assert not any(form in repr(record.__dict__) for record in caplog.records)
        assert form.encode() not in data


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_key_that_comes_back_in_the_middle_of_a_stream_is_nowhere(
    provider: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = KEYS["any other"]
    error = {"type": "error", "error": {"type": "api_error", "message": f"no {key}", "code": f"c {key}"}}
    last = stream(("error", error) if provider == "anthropic" else {"error": error["error"]})
    scripts = (wants_a_tool(provider, True), last)
    async with run(provider, key, tmp_path, *scripts, streamed=True) as (result, told, _):
        pass
    assert result.status is RunStatus.FAILED
    for form in forms(key):
        assert form not in told
        assert form not in caplog.text
        assert form.encode() not in stored(tmp_path)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_configured_key_is_in_no_text_of_the_configuration(provider: str) -> None:
    key = KEYS["any other"]
    config = configure(**{f"{provider}_api_key": key})
    assert key not in f"{config!r} {config}"
    pytest.importorskip(provider)
    assert key not in repr(get_llm_client(provider))


# -- one error each, with the way out


async def ended(made: Agent, path: Path) -> RunResult:
    """How its run ends; it is not tried again, as it would only end the same way."""
    async with AgentRunner.open(path / "runs.db", config=settings()) as runner:
        result = await runner.execute(made, "r", {"messages": HELLO})
        assert (await runner.get_run("r")).attempt == 1
    assert result.status is RunStatus.FAILED
    assert result.error is not None
    assert not result.error.retriable
    return result


WAYS_OUT = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}
CLASSES = {"openai": "OpenAIConfigurationError", "anthropic": "AnthropicConfigurationError"}


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_without_a_key(provider: str, tmp_path: Path) -> None:
    pytest.importorskip(provider)
    result = await ended(agent(lambda: get_llm_client(provider)), tmp_path)
    assert result.error is not None
    assert result.error.type == CLASSES[provider]
    for way in ("api_key=", f"configure({provider}_api_key=", WAYS_OUT[provider]):
        assert way in result.error.message


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_without_the_package(provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, provider, None)
    result = await ended(agent(lambda: CLIENTS[provider](KEYS["its own"])), tmp_path)
    assert result.error is not None
    assert result.error.type == "MissingDependency"
    assert f"pip install 'agent-runtime-core[{provider}]'" in result.error.message


TOO_LONG = {
    "openai": {"code": "context_length_exceeded", "type": "invalid_request_error"},
    "anthropic": {"type": "invalid_request_error"},
}


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    ("what", "kind", "ways"),
    [
        ("key", "AuthenticationFailed", ["Check api_key=", "API_KEY", "401"]),
        ("model", "ModelNotFound", ["Check model=", "default_model=", "'some-model'"]),
        ("length", "ContextOverflow", ["fewer or shorter messages", "trim"]),
    ],
)
async def test_what_the_provider_does_not_accept(
    provider: str, what: str, kind: str, ways: list[str], tmp_path: Path
) -> None:
    pytest.importorskip(provider)
    wrong = {
        "key": refusal(provider, 401, "no"),
        "model": refusal(provider, 404, "no such model"),
        "length": refusal(provider, 400, "prompt is too long: 300000 tokens > 200000 maximum", **TOO_LONG[provider]),
    }[what]
    async with serving(wrong) as server:
        result = await ended(agent(made(provider, server)), tmp_path)
        assert len(server.asked) == 1, "it is not asked again"
    assert result.error is not None
    assert result.error.type == kind
    for way in (provider, *ways):
        assert way in result.error.message


def made(provider: str, server: WireServer) -> Callable[[], LLMClient]:
    return lambda: CLIENTS[provider](KEYS["its own"], base_url=server.url)
