"""A real provider through LiteLLM: text, and a tool."""

from __future__ import annotations

import os

import pytest

from agent_runtime_core.llm import LiteLLMClient

from .rounds import text_and_tool

MODEL = os.environ.get("LIVE_LITELLM_MODEL") or "openai/gpt-5.4-nano"


# What litellm does with pydantic.
@pytest.mark.filterwarnings("ignore:Item .* on TypedDict class:UserWarning")
@pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning")
@pytest.mark.live(f"{MODEL.partition('/')[0].upper()}_API_KEY")
async def test_text_and_a_tool(key: str) -> None:
    pytest.importorskip("litellm")
    client = LiteLLMClient()
    try:
        await text_and_tool(client, MODEL)
    finally:
        await client.close()
