"""The tables of docs/reference/tools.md name each setting, attribute and method, with its default."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

from agent_runtime_core import Tool, ToolCallingAgent, ToolRegistry
from agent_runtime_core.interfaces import AgentRuntime
from agent_runtime_core.tools import BaseTool

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "tools.md").read_text()


def table(head: str) -> dict[str, str]:
    """Return the second cell of each row, by the names in its first cell."""
    rows = PAGE[PAGE.index(f"| {head} |") :].split("\n\n")[0].splitlines()[2:]
    cells = [re.split(r"(?<!\\) \| ", row.strip("| ")) for row in rows]
    names = [(re.findall(r"`(?:await )?(\w+)[^`]*`", first), rest[0].strip()) for first, *rest in cells]
    return {name: second for found, second in names for name in found}


def shown(default: Any) -> str:
    return f"`{default.__name__ if isinstance(default, type) else repr(default)}`"


def test_settings_of_a_tool() -> None:
    documented = table("Setting")
    fields = {each.name: each for each in dataclasses.fields(Tool)}
    assert documented.keys() == fields.keys()
    for name, field in fields.items():
        if field.default is not dataclasses.MISSING:
            assert documented[name] == ("none" if name == "handler" else shown(field.default))
            if name in vars(BaseTool):
                assert vars(BaseTool)[name] == field.default
    options = inspect.signature(Tool.from_function).parameters.keys() - {"fn"}
    assert options == fields.keys() - {"handler"}


def public(kind: type, base: type = object) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")} - set(vars(base))


def test_members_of_a_registry() -> None:
    internal = {"execute_read", "run_checked", "run_once"}
    assert table("Member").keys() == public(ToolRegistry) - internal


def test_attributes_and_methods_of_an_agent() -> None:
    documented, methods = table("Attribute"), table("Method")
    members = public(ToolCallingAgent, AgentRuntime) | {"key"}
    functions = {name for name in members if inspect.isfunction(vars(ToolCallingAgent).get(name))}
    assert documented.keys() == members - functions
    assert methods.keys() == functions
    for name in documented.keys() - {"key", "system_prompt", "tools"}:
        assert documented[name] == shown(vars(ToolCallingAgent)[name])
