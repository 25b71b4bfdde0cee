"""What only OpenAI's wire has, with the real SDK against a server nobody here wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_runtime_core.llm import OpenAIClient
from tests.wire.server import Aimock
from tests.wire.sides import KEY, WEATHER, Side, ask, told, user

pytestmark = [pytest.mark.wire, pytest.mark.parametrize("side", ["openai"], indirect=True)]

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
    "awAAAABJRU5ErkJggg=="
)


async def test_an_image_is_sent_as_it_is(server: Aimock, side: Side) -> None:
    server.play("text")
    message = {
        "role": "user",
        "content": [
            {"type": "text", "text": "Greet the guests on this picture."},
            {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
        ],
    }
    async with side.client() as client:
        await client.generate([message])
        assert server.sent()[0]["messages"] == [message]


@pytest.mark.parametrize("streamed", [False, True])
async def test_reasoning_goes_back_to_the_server(server: Aimock, side: Side, streamed: bool) -> None:
    server.play("reasoning")
    async with side.client() as client:
        messages: list[Any] = [user("What is the weather in Bern?")]
        asked = await ask(client, messages, streamed=streamed, tools=[WEATHER])
        assert asked.message["content"] == "Let me look.", "reasoning is no part of the text"
        assert asked.message["provider_fields"]["openai"]["reasoning_content"] == "The tool knows the weather."
        # What goes into a journal comes back out of JSON.
        kept = json.loads(json.dumps(asked.message))
        messages += [kept, told(asked.tool_calls[0], "14 degrees")]
        done = await client.generate(messages, tools=[WEATHER])
        assert done.message["content"] == "It is 14 degrees in Bern."
        sent = server.sent()[1]["messages"][1]
        assert sent["reasoning_content"] == "The tool knows the weather."
        assert "provider_fields" not in sent


async def test_another_providers_fields_stay_here(server: Aimock, side: Side) -> None:
    server.play("text")
    earlier = {
        "role": "assistant",
        "content": "Yes?",
        "provider_fields": {"anthropic": {"content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]}},
    }
    async with side.client() as client:
        await client.generate([user("Miller!"), earlier, user("Greet the guests")])
        assert server.sent()[0]["messages"][1] == {"role": "assistant", "content": "Yes?"}


@pytest.mark.parametrize("streamed", [False, True])
async def test_structured_output(server: Aimock, side: Side, streamed: bool) -> None:
    schema = {
        "type": "json_schema",
        "json_schema": {
            "name": "city",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
                "required": ["city", "people"],
                "additionalProperties": False,
            },
        },
    }
    server.script(
        {
            "match": {"userMessage": "Describe Bern", "responseFormat": "json_schema"},
            "response": {"content": {"city": "Bern", "people": 134000}},
        }
    )
    async with side.client() as client:
        response = await client.generate([user("Describe Bern.")], response_format=schema, stream=streamed)
        assert json.loads(response.message["content"]) == {"city": "Bern", "people": 134000}
        assert server.sent()[0]["response_format"] == schema


async def test_embeddings(server: Aimock, side: Side) -> None:
    server.play("embeddings")
    async with side.client() as client:
        vectors = await client.embed(["the mill", "the river"], model="text-embedding-3-small")
        assert vectors == [[0.25, -0.5, 1.0], [0.25, -0.5, 1.0]]
        [body] = server.sent()
        assert (body["model"], body["embeddingInput"]) == ("text-embedding-3-small", "the mill the river")


async def test_embeddings_of_different_texts_stand_in_their_order(server: Aimock, side: Side) -> None:
    # The server makes vectors up from texts where it need not be strict.
    async with side.client(default_headers={"x-aimock-strict": "false"}) as client:
        together = await client.embed(["mill", "river", "mill"])
        assert together[0] == together[2] != together[1]
        assert together[1] == (await client.embed(["river"]))[0]


async def test_moderation(server: Aimock, side: Side) -> None:
    async with side.client() as client:
        verdict = await client.moderate("a peaceful sentence")
        assert verdict["flagged"] is False
        [entry] = server.journal()
        assert (entry["path"], entry["service"]) == ("/v1/moderations", "moderation")


async def test_the_address_may_come_from_the_environment(
    server: Aimock, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.play("text")
    monkeypatch.setenv("OPENAI_BASE_URL", server.openai)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    client = OpenAIClient(default_model="gpt-5-mini")
    try:
        response = await client.generate([user("Greet the guests")])
    finally:
        await client.close()
    assert response.message["content"] == "Good morning, and welcome to the mill."
    assert len(server.journal()) == 1
