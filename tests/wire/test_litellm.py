"""What litellm adds on its own, against a server nobody here wrote."""

from __future__ import annotations

from typing import Any

import pytest

from agent_runtime_core.errors import NotSupported
from tests.wire.conftest import LITELLM
from tests.wire.server import Aimock
from tests.wire.sides import WEATHER, Side, told, user

pytestmark = [pytest.mark.wire, pytest.mark.parametrize("side", [LITELLM], indirect=True)]


async def test_embeddings(server: Aimock, side: Side) -> None:
    server.play("embeddings")
    async with side.client() as client:
        vectors = await client.embed(["the mill"], model="openai/text-embedding-3-small")
        assert vectors == [[0.25, -0.5, 1.0]]
        assert server.sent()[0]["model"] == "text-embedding-3-small", "the prefix names the provider, not the model"


async def test_moderation_is_not_to_be_had(server: Aimock, side: Side) -> None:
    async with side.client() as client:
        with pytest.raises(NotSupported):
            await client.moderate("a peaceful sentence")
        assert server.journal() == []


async def test_reasoning_goes_back_to_the_server(server: Aimock, side: Side) -> None:
    server.play("reasoning")
    async with side.client() as client:
        messages: list[Any] = [user("What is the weather in Bern?")]
        asked = await client.generate(messages, model="openai/gpt-5-mini", tools=[WEATHER])
        assert asked.message["content"] == "Let me look."
        messages += [asked.message, told(asked.tool_calls[0], "14 degrees")]
        done = await client.generate(messages, model="openai/gpt-5-mini", tools=[WEATHER])
        assert done.message["content"] == "It is 14 degrees in Bern."
        assert server.sent()[1]["messages"][1]["reasoning_content"] == "The tool knows the weather."
