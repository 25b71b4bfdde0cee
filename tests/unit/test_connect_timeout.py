"""The time limit for connecting, which is left to the SDKs: a server that takes up the line and says nothing."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from agent_runtime_core.errors import ProviderTimeout
from agent_runtime_core.llm import AnthropicClient, LiteLLMClient, OpenAIClient, Retries, Timeouts
from agent_runtime_core.llm._client import ChatClient
from agent_runtime_core.llm.litellm import _imported
from tests.support.litellm_cleanup import settled

ASK = [{"role": "user", "content": "hello"}]
KEY = "sk-canary-0123456789"
Make = Callable[..., ChatClient]
CLIENTS: dict[str, Make] = {
    "openai": lambda **about: OpenAIClient(KEY, **about),
    "anthropic": lambda **about: AnthropicClient(KEY, **about),
    "litellm": lambda **about: LiteLLMClient("openai/m", api_key=KEY, **about),
}


@asynccontextmanager
async def mute() -> AsyncIterator[str]:
    """The URL of a server that never answers the first word of TLS: nobody is ever connected to it."""
    held: list[asyncio.StreamWriter] = []
    listening = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    try:
        yield f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for writer in held:
            writer.transport.abort()


@pytest.mark.parametrize("streamed", [False, True], ids=["at once", "streamed"])
@pytest.mark.parametrize(
    "package",
    [
        pytest.param(each, marks=pytest.mark.skipif(importlib.util.find_spec(each) is None, reason="not installed"))
        for each in CLIENTS
    ],
)
async def test_a_server_that_does_not_let_one_connect_is_given_up(package: str, streamed: bool) -> None:
    _imported() if package == "litellm" else importlib.import_module(package)  # which takes seconds
    async with mute() as url:
        # Where connecting had no limit, it would be the one for all that ends it.
        limits = Timeouts(connect=0.2, first_byte=30, between_chunks=30, total=30)
        client = CLIENTS[package](base_url=url, timeouts=limits, retries=Retries(tries=1))
        try:
            with pytest.raises(ProviderTimeout) as raised:
                await client.generate(ASK, model="openai/m" if package == "litellm" else "m", stream=streamed)
        finally:
            await client.close()
            if package == "litellm":
                await settled()
    assert raised.value.code not in {"first_byte", "between_chunks", "total"}
