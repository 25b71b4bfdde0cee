"""Names of tools: those that every provider accepts, and valid names for other texts."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, Tool, ToolCallingAgent, ToolRegistry, agent_tool, tool
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.testing import MockLLMClient, MockLLMResponse
from agent_runtime_core.tools import BaseTool, ToolResult, tool_name

INVALID = ["fs.read", "a b", "ns:tool", "über", "天气", "x" * 65, "a\n", "", "..."]


def valid(name: str) -> bool:
    return re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) is not None


@pytest.mark.parametrize("text", INVALID)
def test_any_text_has_a_valid_name(text: str) -> None:
    assert valid(tool_name(text))
    assert tool_name(tool_name(text)) == tool_name(text)


def test_names_of_different_texts_differ() -> None:
    texts = [*INVALID, "fs_read", "fs:read", "a-b", "a_b", "ns_tool", "x" * 66, "天 气", "."]
    assert len({tool_name(text) for text in texts}) == len(texts)
    assert [tool_name(text) for text in ("fs_read", "a-b", "x" * 64)] == ["fs_read", "a-b", "x" * 64]
    assert tool_name("fs.read").startswith("fs_read_")


class Named(BaseTool):
    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name

    def description(self) -> str:
        return ""

    def parameters(self) -> dict[str, Any]:
        return {}

    async def execute(self) -> ToolResult:
        return ToolResult(True)


@pytest.mark.parametrize("name", [name for name in INVALID if name])
def test_an_invalid_name_is_refused_with_a_valid_one(name: str) -> None:
    def fn() -> None: ...

    mutable = Tool("t", "", {}, fn)
    mutable.name = name
    duck: Any = SimpleNamespace(name=name, handler=fn)
    for make in (
        lambda: Tool(name, "", {}, fn),
        lambda: tool(name=name)(fn),
        lambda: Tool.from_function(fn, name=name),
        lambda: ToolRegistry().register(Named(name)),
        lambda: ToolRegistry().register(mutable),
        lambda: ToolRegistry().register(duck),
        lambda: agent_tool("helper", name=name),
    ):
        with pytest.raises(InvalidArgument, match="tool name must have 1 to 64 characters of a-z, A-Z, 0-9") as refused:
            make()
        assert f"name={tool_name(name)!r}" in str(refused.value)


def test_the_name_of_an_agent_is_made_of_its_key() -> None:
    assert agent_tool("research-agent").name == "research_agent"
    assert agent_tool("v2").name == "v2"
    keys = [
        "research.agent:v2",
        "research.agent.v2",
        "research agent v2",
        "research_agent_v2",
        "研究",
        "k" * 65,
        "a.b-c",
    ]
    names = {agent_tool(key).name for key in [*keys, "a.b_c"]}
    assert len(names) == len(keys) + 1
    assert all(map(valid, names))


class Child(ToolCallingAgent):
    key = "team:research.agent"
    system_prompt = "s"
    tools = ToolRegistry()

    def get_llm_client(self) -> Any:
        return MockLLMClient(responses=["found"])


@pytest.mark.parametrize("called", ["team:research.agent", agent_tool(Child()).name])
async def test_a_recorded_call_by_the_key_of_an_agent_still_reaches_it(called: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": called, "arguments": '{"task": "look"}'}}

    class Parent(Child):
        key = "parent"
        tools = ToolRegistry()

        def get_llm_client(self) -> Any:
            return MockLLMClient(responses=[MockLLMResponse(None, tool_calls=[call]), "done"])

    Parent.tools.register(agent_tool(Child()))
    async with AgentRunner() as runner:
        result = await runner.execute(Parent(), input_data={"messages": [{"role": "user", "content": "hi"}]})
    assert [each["content"] for each in result.final_messages if each["role"] == "tool"] == ["found"]
