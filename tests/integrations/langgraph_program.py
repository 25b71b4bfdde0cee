"""A graph of LangGraph with three model turns and three tools, in one run. Usage: see framework_kills.py."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Send

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult, current_run
from agent_runtime_core.integrations.langgraph import AgentRuntimeSaver, DurableChatModel, run_graph
from tests.support.framework_kills import begin, called, finish


class Scripted(BaseChatModel):
    """Asks for two prices at once, then for an order, and ends with what the tools returned."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        turn = 1 + sum(isinstance(each, AIMessage) for each in messages)
        called(f"model {turn}")
        calls: list[Any] = []
        if turn == 1:
            calls = [{"id": f"call-{item}", "name": "price", "args": {"item": item}} for item in ("tea", "milk")]
        elif turn == 2:
            calls = [{"id": "call-order", "name": "order", "args": {"item": "tea"}}]
        text = "" if calls else " ".join(str(each.content) for each in messages if isinstance(each, ToolMessage))
        usage: Any = {"input_tokens": 10, "output_tokens": turn, "total_tokens": 10 + turn}
        return ChatResult(
            generations=[
                ChatGeneration(message=AIMessage(text, tool_calls=calls, usage_metadata=usage, id=f"ai-{turn}"))
            ]
        )


model = DurableChatModel(model=Scripted())


def use(name: str, item: str) -> str:
    called(f"{name} {item}")
    return f"{name} of {item}: {len(item)}"


async def ask(state: MessagesState) -> dict[str, Any]:
    return {"messages": [await model.ainvoke(state["messages"])]}


async def use_tool(call: dict[str, Any]) -> dict[str, Any]:
    ctx = current_run()
    assert ctx is not None
    result = await ctx.step("tool", use, call["name"], call["args"]["item"])
    return {"messages": [ToolMessage(result, tool_call_id=call["id"], id=call["id"])]}


def next_tasks(state: MessagesState) -> Any:
    last = state["messages"][-1]
    assert isinstance(last, AIMessage)
    return [Send("tool", call) for call in last.tool_calls] or END


def built(saver: AgentRuntimeSaver) -> Any:
    builder = StateGraph(MessagesState)
    builder.add_node("model", ask)
    builder.add_node("tool", cast(Any, use_tool))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", next_tasks, ["tool", END])
    builder.add_edge("tool", "model")
    return builder.compile(checkpointer=saver)


class Shop(AgentRuntime):
    key = "shop"

    def __init__(self, store: str) -> None:
        self.store = store

    async def run(self, ctx: RunContext) -> RunResult:
        async with AgentRuntimeSaver(self.store) as saver:
            # One task at a time, so that the order of the calls is the same in each process.
            config: Any = {"max_concurrency": 1}
            state = await run_graph(ctx, built(saver), {"messages": [HumanMessage("Order tea.", id="q")]}, config)
        return RunResult({"text": state["messages"][-1].content, "messages": [each.id for each in state["messages"]]})


async def main() -> None:
    store = begin()
    async with AgentRunner.open(store) as runner:
        result = await runner.execute(Shop(store), "shop-1", raise_on_error=True)
    finish(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
