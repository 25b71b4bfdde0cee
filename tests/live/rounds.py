"""What a real provider is asked: a text, and a tool call with its result."""

from __future__ import annotations

from agent_runtime_core import LLMClient, MockRunContext, Tool, ToolRegistry, run_turn_loop


async def text_and_tool(client: LLMClient, model: str) -> None:
    said = await client.generate([{"role": "user", "content": "Answer with the one word: harbour"}], model=model)
    assert "harbour" in str(said.message["content"]).lower()
    assert said.usage["prompt_tokens"] > 0
    assert said.usage["completion_tokens"] > 0

    asked: list[str] = []

    def stock(item: str) -> int:
        """How many of an item are in the warehouse; nobody else knows."""
        asked.append(item)
        return 7319

    tools = ToolRegistry()
    tools.register(Tool.from_function(stock))
    question = [{"role": "user", "content": "How many lanterns are in the warehouse? Use the tool, answer in digits."}]
    ctx = MockRunContext(question)
    limits = {"max_turns": 4, "max_tokens": 20_000}
    done = await run_turn_loop(ctx, client, tools, limits, model=model, stream=True)
    assert asked
    assert "lantern" in asked[0].lower()
    assert "7319" in (done.text or "").replace(",", "").replace(".", "")
    assert [message["role"] for message in done.messages[:3]] == ["user", "assistant", "tool"]
    told = "".join(payload["delta"] for kind, payload in ctx.events if kind == "assistant.delta")
    assert (done.text or "") in told
