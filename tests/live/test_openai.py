"""OpenAI itself: text, and a tool."""

from __future__ import annotations

import os

import pytest

from agent_runtime_core.llm import OpenAIClient

from .rounds import text_and_tool

MODEL = os.environ.get("LIVE_OPENAI_MODEL") or "gpt-5.4-nano"


@pytest.mark.live("OPENAI_API_KEY")
async def test_text_and_a_tool(key: str) -> None:
    pytest.importorskip("openai")
    client = OpenAIClient()
    try:
        await text_and_tool(client, MODEL)
    finally:
        await client.close()
