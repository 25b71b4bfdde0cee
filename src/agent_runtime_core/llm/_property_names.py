"""Names of tool properties that a provider refuses: mapped in requests, and mapped back in answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from ._schemas import property_names, with_renamed_properties

Names: TypeAlias = Mapping[str, Mapping[str, str]]
"""For each tool, the names that are sent for its properties."""

_CLAUDE: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
#: The names that are accepted, by a word in the name of the provider or of the model. Others accept all names.
_ACCEPTED: Final = {"anthropic": _CLAUDE, "claude": _CLAUDE}
_REPLACED: Final = re.compile(r"[^a-zA-Z0-9_.-]")
_LONGEST: Final = 60


def renamed_tools(
    tools: Sequence[dict[str, Any]] | None, provider: str, model: str
) -> tuple[Sequence[dict[str, Any]] | None, Names]:
    """Return the tools with names of properties that the provider accepts, and these names."""
    asked = f"{provider} {model}".lower()
    accepted = next((pattern for word, pattern in _ACCEPTED.items() if word in asked), None)
    if not tools or accepted is None:
        return tools, {}
    changed, names = list[dict[str, Any]](), dict[str, Mapping[str, str]]()
    for tool in tools:
        function = tool.get("function")
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        found = _replacements(parameters, accepted) if isinstance(parameters, Mapping) else {}
        if found:
            assert isinstance(function, Mapping)
            names[str(function.get("name"))] = found
            tool = {**tool, "function": {**function, "parameters": with_renamed_properties(parameters or {}, found)}}
        changed.append(tool)
    return (changed, names) if names else (tools, {})


def _replacements(schema: Mapping[str, Any], accepted: re.Pattern[str]) -> dict[str, str]:
    known, found = property_names(schema), dict[str, str]()
    for name in known:
        if accepted.fullmatch(name):
            continue
        base, number = _REPLACED.sub("_", name)[:_LONGEST] or "_", 2
        new = base
        while new in known or new in found.values():
            new, number = f"{base}_{number}", number + 1
        found[name] = new
    return found


def with_sent_names(messages: Iterable[dict[str, Any]], names: Names) -> list[dict[str, Any]]:
    """Return the messages in which the arguments of earlier calls have the names that are sent."""
    return [_with_names(message, names) for message in messages]


def with_real_names(message: dict[str, Any], names: Names) -> dict[str, Any]:
    """Return an answer in which the arguments of calls have the names of the tools."""
    return _with_names(message, {tool: {new: old for old, new in each.items()} for tool, each in names.items()})


def _with_names(message: dict[str, Any], names: Names) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_renamed_call(call, names) for call in calls]}


def _renamed_call(call: Any, names: Names) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    found = names.get(str(function.get("name"))) if isinstance(function, Mapping) else None
    if found is None or not isinstance(function, Mapping):
        return call
    return {**call, "function": {**function, "arguments": _renamed_arguments(function.get("arguments"), found)}}


def _renamed_arguments(arguments: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(arguments, str):
        return _renamed(arguments, names)
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    renamed = _renamed(parsed, names)
    return arguments if renamed == parsed else json.dumps(renamed, ensure_ascii=False)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {names.get(name, name): _renamed(each, names) for name, each in value.items()}
    return [_renamed(each, names) for each in value] if isinstance(value, list) else value
