"""Convert the options of a request from OpenAI's names to Anthropic's: pure functions on plain dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import NotSupported, brief
from ._anthropic_format import refused


def tools_of(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools in Anthropic's format. A tool that is not an OpenAI function is passed as it is."""
    return [_tool(tool["function"]) if tool.get("type") == "function" else dict(tool) for tool in tools]


def options_of(extra: Mapping[str, Any], *, tools: bool) -> dict[str, Any]:
    """Return the other arguments of a request; OpenAI's names for them are translated.

    Raises:
        NotSupported: Anthropic does not support the response format.
    """
    options = {name: value for name, value in extra.items() if value is not None}
    choice = _choice(options.pop("tool_choice", None))
    if options.pop("parallel_tool_calls", True) is False and tools and choice != {"type": "none"}:
        choice = {**(choice or {"type": "auto"}), "disable_parallel_tool_use": True}
    if choice:
        options["tool_choice"] = choice
    output = {}
    if wanted := _output_format(options.pop("response_format", None)):
        output["format"] = wanted
    if effort := options.pop("reasoning_effort", None):
        output["effort"] = effort
    if output:
        options["output_config"] = {**output, **(options.get("output_config") or {})}
    if (stop := options.pop("stop", None)) is not None:
        options.setdefault("stop_sequences", [stop] if isinstance(stop, str) else list(stop))
    if user := options.pop("user", None):
        options["metadata"] = {"user_id": user, **(options.get("metadata") or {})}
    return options


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    tool = {"name": function.get("name"), "description": function.get("description")}
    tool["input_schema"] = function.get("parameters") or {"type": "object", "properties": {}}
    if function.get("strict"):
        tool["strict"] = True
    return {name: value for name, value in tool.items() if value is not None}


def _choice(choice: Any) -> dict[str, Any] | None:
    match choice:
        case None:
            return None
        case "auto" | "none":
            return {"type": choice}
        case "required" | "any":
            return {"type": "any"}
        case {"type": "function", "function": {"name": str(name)}}:
            return {"type": "tool", "name": name}
        case Mapping():
            return dict(choice)
    raise refused(f"tool_choice must be 'auto', 'none', 'required' or a function with its name, got {brief(choice)}")


def _output_format(wanted: Any) -> dict[str, Any] | None:
    match wanted:
        case None | {"type": "text"}:
            return None
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            return {"type": "json_schema", "schema": _closed(schema)}
    raise NotSupported(
        f"Anthropic does not support response_format={str(wanted)[:80]}. Use a schema: "
        "{'type': 'json_schema', 'json_schema': {'name': …, 'schema': {…}}}"
    )


def _closed(schema: Any) -> Any:
    """Return the schema with every object closed, as Anthropic requires, unless it sets additionalProperties."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {
        name: {key: _closed(each) for key, each in value.items()}
        if name in ("properties", "$defs", "definitions") and isinstance(value, Mapping)
        else _closed(value)
        if name in ("items", "anyOf", "allOf", "oneOf", "not")
        else value
        for name, value in schema.items()
    }
    if closed.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed
