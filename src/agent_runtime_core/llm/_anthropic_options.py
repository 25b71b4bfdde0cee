"""Convert the options of a request from OpenAI's names to Anthropic's: pure functions on plain dicts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .._core.validation import must
from ..errors import NotSupported, brief
from ._schemas import output_schema, tool_parameters

# Options of OpenAI that need no equivalent: Anthropic always reports the usage of a stream, and gives one answer.
_NEEDLESS = frozenset({"stream_options"})
# OpenAI's names for a user, the first one in use first.
_USER = ("user", "safety_identifier")
_TIERS = {"auto": "auto", "default": "standard_only", "standard_only": "standard_only"}
_EFFORTS = {"minimal": "low"}
_CACHE_MARKS = 4
# The version after "claude-", with or without the family before it; Bedrock, Vertex and gateways put more around it.
_OLD_MODEL = re.compile(r"claude-(?:v?2|instant|3-(?:opus|sonnet|haiku))")
_MODEL_3_5 = re.compile(r"claude-3[-.]5")


def default_max_tokens(model: str) -> int:
    """Return the most tokens of an answer for requests that set none; Anthropic has no default.

    Anthropic rejects a limit above the maximum of the model. 20,000 is less than the maximum of Claude 3.7 and later
    models, and so few that an answer need not be streamed. Servers of other models may have a short context.
    """
    model = model.lower()
    if "claude" not in model or _OLD_MODEL.search(model):
        return 4096
    return 8192 if _MODEL_3_5.search(model) else 20_000


def tools_of(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tools in Anthropic's format. A tool that is not an OpenAI function is passed as it is."""
    return [_tool(tool) if tool.get("type") == "function" else dict(tool) for tool in tools]


def tools_called(turns: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return definitions of the tools that were called in a conversation, for a request without tools.

    Anthropic rejects calls in a conversation without a definition. After a handoff they may be of another agent's
    tools.
    """
    blocks = (block for turn in turns if isinstance(turn.get("content"), list) for block in turn["content"])
    names = dict.fromkeys(block.get("name") for block in blocks if block.get("type") == "tool_use")
    return [{"name": name, "description": "Not available.", "input_schema": {"type": "object"}} for name in names]


def options_of(extra: Mapping[str, Any], *, tools: Iterable[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Return the other arguments of a request; OpenAI's names for them are translated.

    Raises:
        NotSupported: Anthropic does not support the response format.
        InvalidArgument: An option has no equivalent.
    """
    options = {name: value for name, value in extra.items() if value is not None and name not in _NEEDLESS}
    names = [str(tool.get("name") or (tool.get("function") or {}).get("name")) for tool in tools or ()]
    choice = _choice(options.pop("tool_choice", None), names)
    if options.pop("parallel_tool_calls", True) is False and names and choice != {"type": "none"}:
        choice = {**(choice or {"type": "auto"}), "disable_parallel_tool_use": True}
    if choice:
        options["tool_choice"] = choice
    output = {}
    schema = _schema_in(options.pop("response_format", None))
    if schema is not None and (format_ := output_schema(schema, "anthropic")) is not None:
        output["format"] = {"type": "json_schema", "schema": format_}
    if effort := options.pop("reasoning_effort", None):
        if effort == "none":
            options.setdefault("thinking", {"type": "disabled"})
        else:
            output["effort"] = _EFFORTS.get(effort, effort)
    if output:
        options["output_config"] = {**output, **(options.get("output_config") or {})}
    _translate_names(options)
    return options


def schema_prompt(response_format: Any) -> str | None:
    """Return what the system prompt must say about a schema that Anthropic cannot enforce; None if it can."""
    schema = _schema_in(response_format)
    if schema is None or output_schema(schema, "anthropic") is not None:
        return None
    return f"Answer with nothing but JSON that fits this schema: {json.dumps(schema, ensure_ascii=False)}"


def limit_cache_marks(*places: Any, reserved: int = 0) -> tuple[Any, ...]:
    """Return the tools, the system prompt and the turns with at most four `cache_control` marks, Anthropic's maximum.

    The first mark is kept, which is that of the tools or of the system prompt, and the last ones. Anthropic also finds
    an earlier prefix at a later mark, so a conversation in which each turn is marked remains cached.
    """
    excess = _marks_in(places) - _CACHE_MARKS + reserved
    if excess <= 0:
        return places
    dropped = iter([False, *[True] * excess])
    return tuple(_without_marks(place, dropped) for place in places)


def _marks_in(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_marks_in, value))
    return _marks_in(value.get("content")) + bool(value.get("cache_control")) if isinstance(value, Mapping) else 0


def _without_marks(value: Any, dropped: Iterator[bool]) -> Any:
    """Return a copy without the marks for which `dropped` is true, in the order in which Anthropic reads them."""
    if isinstance(value, list):
        return [_without_marks(each, dropped) for each in value]
    if not isinstance(value, Mapping):
        return value
    copy = dict(value)
    if "content" in copy:
        copy["content"] = _without_marks(copy["content"], dropped)
    if copy.get("cache_control") and next(dropped, False):
        del copy["cache_control"]
    return copy


def _translate_names(options: dict[str, Any]) -> None:
    """Replace OpenAI's names of simple options by Anthropic's."""
    stop = options.pop("stop", None)
    stop = options.pop("stop_sequences", stop)
    if stop:
        options["stop_sequences"] = [stop] if isinstance(stop, str) else list(stop)
    users = [options.pop(name, None) for name in _USER]
    metadata = options.pop("metadata", None) or {}
    if not isinstance(metadata, Mapping) or metadata.keys() - {"user_id"}:
        raise must("metadata", "be a dict with only user_id for Anthropic", metadata, "Remove the other names")
    if metadata or any(users):
        options["metadata"] = metadata or {"user_id": next(filter(None, users))}
    thinking = options.get("thinking")
    if thinking is not None and not (isinstance(thinking, Mapping) and thinking.get("type")):
        fix = "See Anthropic's documentation for the types that a model supports"
        raise must("thinking", "be a dict such as {'type': 'adaptive'}", thinking, fix)
    if (tier := options.get("service_tier")) is not None:
        if tier not in _TIERS:
            raise must("service_tier", "be 'auto' or 'standard_only' for Anthropic", tier)
        options["service_tier"] = _TIERS[tier]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    parameters = tool_parameters(function.get("parameters"), "anthropic")
    found = {"name": function.get("name"), "description": function.get("description"), "input_schema": parameters}
    # Anthropic accepts a strict tool only with the schemas that it accepts for answers.
    if function.get("strict") and (strict := output_schema(parameters, "anthropic")) is not None:
        found |= {"input_schema": strict, "strict": True}
    found["cache_control"] = tool.get("cache_control") or function.get("cache_control")
    return {name: value for name, value in found.items() if value is not None}


def _choice(choice: Any, names: list[str]) -> dict[str, Any] | None:
    match choice:
        case None:
            return None
        case "auto" | "none":
            # Anthropic rejects a choice without tools.
            return {"type": choice} if names else None
        case "required" | "any":
            return {"type": "any"}
        case str() if choice in names:
            return {"type": "tool", "name": choice}
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return {"type": "tool", "name": name}
        case {"type": "auto" | "any" | "none" | "tool"}:
            return dict(choice)
    constraint = "be 'auto', 'none', 'required', the name of a tool, or a dict with the name of a function"
    raise must("tool_choice", constraint, choice)


def _schema_in(wanted: Any) -> Mapping[str, Any] | None:
    match wanted:
        case None | {"type": "text"}:
            return None
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            return schema
    raise NotSupported(
        f"response_format must have a schema for Anthropic, got {brief(wanted)}. Pass "
        "{'type': 'json_schema', 'json_schema': {'name': …, 'schema': {…}}}"
    )
