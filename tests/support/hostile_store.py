"""A store with hostile texts in every field that takes them: `python -m tests.support.hostile_store FILE.db`.

With `--harmless` the same store has plain texts: its pages have the elements and attributes that the others may have.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    ErrorInfo,
    RunContext,
    RunnerConfig,
    RunResult,
    ToolCallingAgent,
    ToolRegistry,
)
from agent_runtime_core.planning import Plan, PlanningAgent, PlanStep
from agent_runtime_core.planning.plan import BasePlanner
from agent_runtime_core.registry import Registry
from tests.support.hostile_texts import HOSTILE_TEXTS, STORABLE
from tests.support.scripted_model import Scripted, asks, call


def harmless(texts: Sequence[str]) -> list[str]:
    """Plain texts, of which every second one may be the name of a tool."""
    return [f"text{' ' if number % 2 else '-'}{number}" for number in range(len(texts))]


def valid(texts: Sequence[str]) -> list[str]:
    """Those that JSON in UTF-8 can have: a payload with a lone surrogate is rejected before it is stored."""
    return [text for text in texts if not any("\ud800" <= each <= "\udfff" for each in text)]


class Named(AgentRuntime):
    """An agent whose key is the text: its run asks, then fails, with the text in every field."""

    key = "named"

    def __init__(self, text: str) -> None:
        self.key = self.text = text

    async def run(self, ctx: RunContext) -> RunResult:
        text = self.text
        await ctx.step(text, lambda: {text: text}, key=text)
        await ctx.emit("custom.said", {text: [text, {text: text}], "message": text})
        if ctx.params["ask"]:
            properties = {text: {"type": "string", "title": text, "description": text}, "pick": {"enum": [text, "b"]}}
            await ctx.approve(text, {text: text}, schema={"type": "object", "properties": properties})
        return RunResult(error=ErrorInfo(text, text, stack=text, retriable=False, details={text: text}))


class Wide(ToolCallingAgent):
    """Calls of unknown tools, messages, steps and events with all of the texts."""

    key = "wide"
    system_prompt = "system"
    tools = ToolRegistry()
    texts: Sequence[str] = ()
    payloads: Sequence[str] = ()

    def get_llm_client(self) -> Any:
        return Scripted(say=self.say)

    def say(self, messages: Sequence[Any]) -> Any:
        if messages[-1]["role"] != "user":
            return "\n".join(self.payloads)
        calls = [call(text, {text: text}, f"{number} {text}") for number, text in enumerate(self.texts)]
        return asks(*calls, content=" ".join(self.payloads))

    async def after_run(self, ctx: Any, result: RunResult) -> RunResult:
        for text in self.texts:
            await ctx.step(text, lambda text=text: {text: text})
            await ctx.emit(f"custom.{text}"[:100] if text.isidentifier() else "custom.said", {text: text})
        for text in self.payloads:
            await ctx.emit("custom.said", {"message": text, "content": text, "error": {"message": text}})
        result.artifacts = {text: text for text in self.payloads}
        return result


class _Planner(BasePlanner):
    texts: Sequence[str] = ()

    async def create_plan(self, prompt: str, available_tools: Any) -> Plan:
        steps = [
            PlanStep(
                number, "calculator", {"expression": "1 + 1"}, text, depends_on=[number - 1] if number % 7 != 1 else []
            )
            for number, text in enumerate(self.texts[:90], 1)
        ]
        return Plan(steps, " ".join(self.texts)[:2000])


async def make(db: Path, *, plain: bool = False) -> None:
    texts = list(STORABLE)
    payloads = valid(HOSTILE_TEXTS)
    if plain:
        texts, payloads = harmless(texts), harmless(payloads)
    registry = Registry()
    for text in texts:
        registry.register(Named(text))
    wide = Wide()
    wide.texts, wide.payloads = texts, payloads
    planner = _Planner()
    planner.texts = texts
    registry.register(wide)
    registry.register(PlanningAgent("planner", planner))
    config = RunnerConfig(park_after=0, max_retries=1, worker_id="worker-1")
    async with AgentRunner.open(db, config=config, registry=registry, durability="normal") as runner:
        for text in texts:
            for ask in (True, False):
                given: dict[str, Any] = {"params": {"ask": ask, "text": text, text: text}}
                name, key = text if ask else f"2 {text}", f"{ask} {text}"
                await runner.submit(text, given, run_id=name, metadata={text: text}, concurrency_key=key)
        messages = [{"role": role, "content": text} for text in payloads for role in ("user", "assistant")]
        listed: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": "go"}]}
        await runner.submit("wide", listed, run_id="wide", metadata={text: text for text in payloads})
        await runner.submit("planner", {"messages": [{"role": "user", "content": " ".join(texts)}]}, run_id="planned")
        while await runner.run_once():
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("db", type=Path)
    parser.add_argument("--harmless", action="store_true")
    options = parser.parse_args()
    asyncio.run(make(options.db, plain=options.harmless))


if __name__ == "__main__":
    main()
