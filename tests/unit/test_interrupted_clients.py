"""A message interrupts a call of each model client, over the wire of its provider."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agent_runtime_core.interfaces import LLMClient, LLMResponse, LLMStreamChunk, RunResult
from agent_runtime_core.llm import AnthropicClient, LiteLLMClient, OpenAIClient
from agent_runtime_core.loop import run_turn_loop
from agent_runtime_core.testing.contracts.llm import KEY, Hang, Reply, TextReply
from tests.support.litellm_cleanup import settled
from tests.support.llm_servers import anthropic_script, asking, openai_script
from tests.support.provider_server import WireServer, serving
from tests.support.runs import Rig, Script, soon, until

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
REPLIES: list[Reply] = [Hang(TextReply("Once upon")), TextReply("new")]
OPTIONS: dict[str, Any] = asking(REPLIES)


def openai(url: str) -> LLMClient:
    return OpenAIClient(KEY, "m", base_url=url, **OPTIONS)


def anthropic(url: str) -> LLMClient:
    return AnthropicClient(KEY, "m", url, **OPTIONS)


def litellm(url: str) -> LLMClient:
    return LiteLLMClient("openai/m", url, api_key=KEY, **OPTIONS)


class Watched(LLMClient):
    """A client that says when its first chunk was taken."""

    def __init__(self, client: LLMClient) -> None:
        self.client = client
        self.taken = asyncio.Event()

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        return await self.client.generate(messages, **options)

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        text = ""
        async for chunk in self.client.stream(messages, **options):
            yield chunk
            text += chunk.delta
            if text == "Once upon":
                self.taken.set()


def needing(make: Callable[[str], LLMClient]) -> Any:
    missing = importlib.util.find_spec(make.__name__) is None
    marks: list[Any] = [pytest.mark.skipif(missing, reason=f"{make.__name__} is not installed")]
    if make is litellm:
        marks.append(pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"))
        marks.append(pytest.mark.filterwarnings("ignore:Item '.*' on TypedDict class:UserWarning"))
    return pytest.param(make, id=make.__name__, marks=marks)


async def interrupted(client: Watched, server: WireServer, *, stream: bool) -> RunResult:
    async with Rig() as rig:

        async def body(ctx: Any) -> RunResult:
            done = await run_turn_loop(ctx, client, stream=stream)
            return RunResult({"response": done.text}, done.messages)

        running = asyncio.ensure_future(rig.runner.execute(Script(body), "r", HELLO))
        await soon(lambda: bool(server.asked))
        if stream:
            await until(client.taken)
        await rig.runner.send("r", "stop", when="interrupt")
        return await running


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("make", [needing(openai), needing(anthropic), needing(litellm)])
async def test_the_call_ends_and_its_text_is_sent_back(make: Callable[[str], LLMClient], stream: bool) -> None:
    wire = anthropic_script if make is anthropic else openai_script
    async with serving(*(functools.partial(wire, reply) for reply in REPLIES)) as server:
        client: Any = make(server.url)
        if make is litellm:
            await client.warm_up()
        try:
            result = await interrupted(Watched(client), server, stream=stream)
        finally:
            await client.close()
            if make is litellm:
                await settled()
        partial = ["Once upon"] if stream else []
        assert [each["content"] for each in result.final_messages] == ["hello", *partial, "stop", "new"]
        sent = json.dumps(server.asked[1]["messages"])
        assert ("Once upon" in sent, "metadata" in sent) == (stream, False)
