"""Anthropic itself: text, and a tool."""

from __future__ import annotations

import os

import pytest

from agent_runtime_core.llm import AnthropicClient

from .rounds import text_and_tool

MODEL = os.environ.get("LIVE_ANTHROPIC_MODEL") or "claude-haiku-5-5"


@pytest.mark.live("ANTHROPIC_API_KEY")
async def test_text_and_a_tool(key: str) -> None:
    pytest.importorskip("anthropic")
    client = AnthropicClient()
    try:
        await text_and_tool(client, MODEL)
    finally:
        await client.close()
