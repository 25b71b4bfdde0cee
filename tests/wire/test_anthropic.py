"""What only Anthropic's wire has, with the real SDK against a server nobody here wrote.

The server notes Anthropic's bodies in OpenAI's format, so a hook in the SDK's transport notes them as they are.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_runtime_core.errors import NotSupported, RequestRefused
from agent_runtime_core.llm import AnthropicClient
from tests.wire.server import Aimock
from tests.wire.sides import KEY, WEATHER, Side, ask, told, user

pytestmark = [pytest.mark.wire, pytest.mark.parametrize("side", ["anthropic"], indirect=True)]

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
THINKING = {"type": "enabled", "budget_tokens": 1024}


class Noting:
    """A transport of the SDK that keeps the body of every request."""

    def __init__(self, sdk: Any) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.http = sdk("anthropic").DefaultAsyncHttpxClient(event_hooks={"request": [self._note], "response": []})

    async def __aenter__(self) -> Noting:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def _note(self, request: Any) -> None:
        self.bodies.append(json.loads(request.content))
        self.headers.append(dict(request.headers))


async def test_an_image_becomes_a_block(server: Aimock, side: Side, sdk: Any) -> None:
    server.play("text")
    content = [
        {"type": "text", "text": "Greet the guests on this picture."},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}},
    ]
    async with Noting(sdk) as noting, side.client(http_client=noting.http) as client:
        response = await client.generate([{"role": "user", "content": content}])
        assert response.message["content"] == "Good morning, and welcome to the mill."
        [body] = noting.bodies
        assert body["messages"] == [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Greet the guests on this picture."},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
                ],
            }
        ]
        # As `Authorization: Bearer` or, with older SDKs, as `x-api-key`.
        assert KEY in noting.headers[0].get("authorization", noting.headers[0].get("x-api-key", ""))


@pytest.mark.parametrize("streamed", [False, True])
async def test_thoughts_go_back_to_the_server_untouched(server: Aimock, side: Side, sdk: Any, streamed: bool) -> None:
    server.play("reasoning")
    async with Noting(sdk) as noting, side.client(http_client=noting.http) as client:
        messages: list[Any] = [user("What is the weather in Bern?")]
        asked = await ask(client, messages, streamed=streamed, tools=[WEATHER], thinking=THINKING)
        assert asked.message["content"] == "Let me look.", "a thought is no part of the text"
        # What goes into a journal comes back out of JSON.
        kept = json.loads(json.dumps(asked.message))
        messages += [kept, told(asked.tool_calls[0], "14 degrees")]
        done = await client.generate(messages, tools=[WEATHER], thinking=THINKING)
        assert done.message["content"] == "It is 14 degrees in Bern."
        assert noting.bodies[1]["messages"][1]["content"] == [
            {"type": "redacted_thinking", "data": "c2VjcmV0IHRob3VnaHQ="},
            {
                "type": "thinking",
                "thinking": "The tool knows the weather.",
                "signature": "signature-of-the-first-thought",
            },
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "call_bern", "name": "weather", "input": {"city": "Bern"}},
        ]


async def test_the_server_refuses_a_turn_without_its_thoughts(server: Aimock, side: Side) -> None:
    """Without this the test above would prove little."""
    server.play("reasoning")
    async with side.client() as client:
        messages: list[Any] = [user("What is the weather in Bern?")]
        asked = await client.generate(messages, tools=[WEATHER], thinking=THINKING)
        stripped = {name: value for name, value in asked.message.items() if name != "provider_fields"}
        messages += [stripped, told(asked.tool_calls[0], "14 degrees")]
        with pytest.raises(RequestRefused, match="thinking"):
            await client.generate(messages, tools=[WEATHER], thinking=THINKING)


async def test_results_of_parallel_tools_are_one_message(server: Aimock, side: Side, sdk: Any) -> None:
    server.play("parallel")
    async with Noting(sdk) as noting, side.client(http_client=noting.http) as client:
        messages: list[Any] = [user("Which is warmer, Bern or Rome?")]
        asked = await client.generate(messages, tools=[WEATHER])
        results = ["14 degrees", "noon", "20 degrees"]
        messages += [
            asked.message,
            *(told(call, result) for call, result in zip(asked.tool_calls, results, strict=True)),
        ]
        await client.generate(messages, tools=[WEATHER])
        sent = noting.bodies[1]["messages"]
        assert [message["role"] for message in sent] == ["user", "assistant", "user"]
        assert [(block["type"], block["id"], block["input"]) for block in sent[1]["content"]] == [
            ("tool_use", "call_bern", {"city": "Bern"}),
            ("tool_use", "call_clock", {}),
            ("tool_use", "call_rome", {"city": 'Rome "caput mundi" ☀'}),
        ]
        assert [(block["type"], block["tool_use_id"]) for block in sent[2]["content"]] == [
            ("tool_result", "call_bern"),
            ("tool_result", "call_clock"),
            ("tool_result", "call_rome"),
        ]


async def test_all_system_messages_are_kept(server: Aimock, side: Side) -> None:
    server.play("text")
    async with side.client() as client:
        await client.generate(
            [
                {"role": "system", "content": "You are a miller."},
                {"role": "system", "content": "You are polite."},
                user("Greet the guests"),
            ]
        )
        system, asked = server.sent()[0]["messages"]
        assert system["role"] == "system"
        assert system["content"].index("You are a miller.") < system["content"].index("You are polite.")
        assert asked == user("Greet the guests")


@pytest.mark.parametrize("streamed", [False, True])
async def test_structured_output(server: Aimock, side: Side, sdk: Any, streamed: bool) -> None:
    server.play("structured")
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    async with Noting(sdk) as noting, side.client(http_client=noting.http) as client:
        response = await client.generate(
            [user("Describe Bern.")],
            response_format={"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": schema}},
            stream=streamed,
        )
        assert json.loads(response.message["content"]) == {"city": "Bern", "people": 134000}
        [body] = noting.bodies
        assert "response_format" not in body
        assert body["output_config"]["format"] == {"type": "json_schema", "schema": schema}


async def test_what_this_provider_does_not_have(server: Aimock, side: Side) -> None:
    async with side.client() as client:
        with pytest.raises(NotSupported):
            await client.embed(["the mill"])
        with pytest.raises(NotSupported):
            await client.moderate("a peaceful sentence")
        assert server.journal() == []


async def test_the_address_may_come_from_the_environment(
    server: Aimock, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.play("text")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", server.anthropic)
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    client = AnthropicClient(default_model="claude-sonnet-5-5")
    try:
        response = await client.generate([user("Greet the guests")])
    finally:
        await client.close()
    assert response.message["content"] == "Good morning, and welcome to the mill."
    assert len(server.journal()) == 1
