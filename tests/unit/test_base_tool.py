"""Tools as classes: registered like others, with results that tell success and failure."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from agent_runtime_core.errors import BadArguments, InvalidArgument, NotSupported, ToolFailed, ToolTimeout
from agent_runtime_core.interfaces import RunContext, ToolCallDict
from agent_runtime_core.testing import MockRunContext
from agent_runtime_core.tools import (
    BaseTool,
    CalculatorTool,
    Tool,
    ToolDefinition,
    ToolRegistry,
    ToolResult,
    answer_call,
)


class Call:
    def __init__(self, name: str, arguments: Any) -> None:
        self.id, self.name, self.arguments = "c1", name, arguments


class Greeter(BaseTool):
    has_side_effects = True
    timeout: float | None = 5

    def name(self) -> str:
        return "greet"

    def description(self) -> str:
        return "Greets somebody."

    def parameters(self) -> dict[str, Any]:
        return {"type": "object", "properties": {"who": {"type": "string"}}, "required": ["who"]}

    async def execute(self, who: str, ctx: RunContext | None = None) -> ToolResult:
        if who == "nobody":
            return ToolResult(False, error="there is nobody")
        return ToolResult(True, f"hello {who}" + (" in a run" if ctx is not None else ""))


def registry(*tools: Tool | BaseTool) -> ToolRegistry:
    made = ToolRegistry()
    for tool in tools:
        made.register(tool)
    return made


@pytest.mark.sentence("003", "`BaseTool`: `name`, `description`, `parameters`, `execute`")
def test_four_methods_are_for_the_subclass_to_give() -> None:
    assert BaseTool.__abstractmethods__ == {"name", "description", "parameters", "execute"}


@pytest.mark.sentence("003", "`BaseTool`: `name`, `description`, `parameters`, `execute`")
async def test_it_is_a_tool_like_others_once_it_is_registered() -> None:
    tools = registry(Greeter())
    made = tools.get("greet")
    assert made is not None
    assert (made.name, made.description, made.has_side_effects, made.timeout) == ("greet", "Greets somebody.", True, 5)
    assert tools.to_openai_format()[0]["function"]["parameters"]["required"] == ["who"]
    assert await tools.execute("greet", {"who": "Ada"}) == "hello Ada"
    assert await tools.execute("greet", '{"who": "Ada"}', MockRunContext()) == "hello Ada in a run"
    with pytest.raises(BadArguments, match="tool 'greet'"):
        await tools.execute("greet", {"whom": "Ada"})


async def test_a_result_without_success_is_an_error_that_a_model_is_told() -> None:
    tools = registry(Greeter(), CalculatorTool())
    with pytest.raises(ToolFailed, match="tool 'greet' did not succeed: there is nobody") as failed:
        await tools.execute("greet", {"who": "nobody"})
    assert (failed.value.tool, failed.value.error) == ("greet", "there is nobody")
    answer = await answer_call(tools, Call("calculator", '{"expression": "1/0"}'), None)
    assert (answer.ok, answer.error) == (False, "failed")
    assert "division by zero" in answer.content
    assert (await answer_call(tools, Call("calculator", '{"expression": "6*7"}'), None)).content == "42"
    assert (await answer_call(tools, Call("calculator", '{"operation": "pow"}'), None)).error == "bad_arguments"


async def test_another_result_is_the_output_because_the_tool_ran() -> None:
    class Plain(Greeter):
        async def execute(self, who: str, ctx: RunContext | None = None) -> Any:
            return who

    assert await registry(Plain()).execute("greet", {"who": "Ada"}) == "Ada"


async def test_its_time_limit_is_kept() -> None:
    class Slow(Greeter):
        timeout = 0.01

        async def execute(self, who: str, ctx: RunContext | None = None) -> ToolResult:
            await asyncio.Event().wait()
            return ToolResult(True)

    with pytest.raises(ToolTimeout):
        await registry(Slow()).execute("greet", {"who": "Ada"})


async def test_one_that_is_a_plain_function_runs_in_a_thread() -> None:
    class Blocking(Greeter):
        def execute(self, who: str) -> ToolResult:  # type: ignore[override]
            return ToolResult(who != "nobody", threading.current_thread() is threading.main_thread(), "there is nobody")

    tools = registry(Blocking())
    assert await tools.execute("greet", {"who": "Bob"}) is False
    with pytest.raises(ToolFailed, match="there is nobody"):
        await tools.execute("greet", {"who": "nobody"})


@pytest.mark.parametrize("wrong", [Greeter, "greet", None, len])
def test_what_is_no_tool_is_not_registered(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="tool must be a Tool or a BaseTool object"):
        ToolRegistry().register(wrong)


@pytest.mark.sentence("003", "`ToolRegistry.register` and `get_tool`; an unknown tool is an error")
async def test_get_tool_gives_what_was_registered() -> None:
    greeter, plain = Greeter(), Tool.from_function(lambda: 1, name="plain", description="")
    tools = registry(greeter, plain)
    assert tools.get_tool("greet") is greeter
    assert tools.get_tool("plain") is plain
    found = tools.get_tool("greet")
    assert isinstance(found, BaseTool)
    assert await found.execute(who="Ada") == ToolResult(True, "hello Ada")
    with pytest.raises(ValueError, match="Tool not found: gret") as missing:
        tools.get_tool("gret")
    assert str(missing.value) == "Tool not found: gret"
    assert "Did you mean 'greet'" in missing.value.__notes__[0]
    other = Tool.from_function(lambda: 2, name="greet", description="")
    tools.register(other)
    assert tools.get_tool("greet") is other


@pytest.mark.sentence("003", "`ToolResult` and `RunResponse` are models")
def test_results_are_plain_under_both_names() -> None:
    for result in (ToolResult(True, {"a": 1}), ToolResult(False, error="no")):
        plain = {"success": result.success, "output": result.output, "error": result.error}
        assert result.model_dump() == result.to_dict() == plain
        assert ToolResult(**result.to_dict()) == result


@pytest.mark.sentence("003", "`ToolRegistry.tools` has the registered tools")
def test_the_tools_of_a_registry_are_those_that_were_registered() -> None:
    greeter, plain = Greeter(), Tool.from_function(lambda: 1, name="plain", description="")
    tools = registry(plain, greeter)
    assert dict(tools.tools) == {"plain": plain, "greet": greeter}
    assert list(tools.tools) == [each.name for each in tools.list_tools()]
    with pytest.raises(TypeError):
        tools.tools["x"] = plain  # type: ignore[index]


@pytest.mark.sentence("003", "`ToolDefinition(name, description, parameters)`")
async def test_a_definition_describes_a_tool_and_is_refused_when_it_is_executed() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "number"}}}
    definition = ToolDefinition("look", "Looks.", parameters)
    assert definition == ToolDefinition(name="look", description="Looks.", parameters=parameters)
    tools = registry(definition)
    assert tools.to_openai_format()[0]["function"] == {
        "name": "look",
        "description": "Looks.",
        "parameters": parameters,
    }
    refused = r"tool 'look' has no handler\. Pass handler= to Tool\(\.\.\.\)"
    with pytest.raises(NotSupported, match=refused):
        definition(a=1)
    with pytest.raises(NotSupported, match=refused):
        await tools.execute("look", {"a": 1})
    call = ToolCallDict({"id": "c", "function": {"name": "look", "arguments": "{}"}})
    answer = await answer_call(tools, call, None)
    assert (answer.ok, "tool 'look' has no handler" in answer.content) == (False, True)
