"""Convert messages, tool calls and usage to and from OpenAI's chat format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._core.ids import HALF

#: Standard fields of assistant messages. Other fields belong to the provider.
_KNOWN = frozenset({"role", "content", "tool_calls", "refusal"})
_CALL_FIELDS = frozenset({"id", "type", "index", "function", "custom"})
#: Finish reasons of answers that are not truncated.
_COMPLETE = frozenset({"stop", "tool_calls", "function_call"})
#: Fields of this library, which are not sent.
_OURS = frozenset({"metadata", "provider_fields"})


def outgoing(messages: Iterable[Mapping[str, Any]], provider: str) -> list[dict[str, Any]]:
    """Return the messages for `provider`: with its own fields merged in, without those of other providers."""
    return [_outgoing(message, provider) for message in messages]


def _outgoing(message: Mapping[str, Any], provider: str) -> dict[str, Any]:
    own: dict[str, Any] = dict((message.get("provider_fields") or {}).get(provider) or {})
    call_fields: dict[Any, dict[str, Any]] = own.pop("tool_calls", None) or {}
    sent = own | {key: value for key, value in message.items() if key not in _OURS}
    audio = sent.get("audio")
    if isinstance(audio, Mapping) and "id" in audio:
        # The audio of an earlier answer is referenced by id, not sent again.
        sent["audio"] = {"id": audio["id"]}
    if isinstance(sent.get("content"), Mapping):
        sent["content"] = json.dumps(sent["content"], ensure_ascii=False)
    calls: Sequence[dict[str, Any]] | None = sent.pop("tool_calls", None)
    if calls:
        sent["tool_calls"] = [{**call_fields.get(call.get("id"), {}), **_outgoing_call(call)} for call in calls]
    return sent


def _outgoing_call(call: Mapping[str, Any]) -> dict[str, Any]:
    if "function" not in call and "name" in call:
        call = {"id": call.get("id"), "type": "function", "function": call}
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    return {**call, "function": {"name": function.get("name"), "arguments": text_of(function)}}


def text_of(function: Mapping[str, Any]) -> str:
    """Return the arguments of a call as JSON text; missing arguments are an empty object."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    # A lone surrogate could not be sent back. Its escape means the same in JSON.
    return arguments.encode("utf-8", "backslashreplace").decode() or "{}"


def is_whole(arguments: str) -> bool:
    """Return whether the text is a complete JSON object."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def incoming(reported: Mapping[str, Any], provider: str, finish_reason: str, taken: set[str]) -> dict[str, Any]:
    """Return a provider's assistant message in the format of this library.

    Calls of a truncated answer are dropped if the arguments of any call are incomplete.

    Args:
        reported: The provider's message.
        provider: The name of the provider.
        finish_reason: Why the answer ended.
        taken: The ids of the earlier calls in the conversation.
    """
    requested: Sequence[Mapping[str, Any]] = reported.get("tool_calls") or ()
    if finish_reason not in _COMPLETE and not all(_is_whole_call(call) for call in requested):
        requested = ()
    calls, call_fields = _incoming_calls(requested, taken)
    content = joined(reported.get("content"))
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    if refusal := reported.get("refusal"):
        message["refusal"] = joined(refusal)
    own = {key: joined(value) for key, value in reported.items() if key not in _KNOWN and not _is_empty(value)}
    if call_fields:
        own["tool_calls"] = call_fields
    if own:
        message["provider_fields"] = {provider: own}
    return message


def joined(text: Any) -> Any:
    """Return the text with surrogate pairs joined, which some servers split; a lone surrogate is replaced."""
    if not isinstance(text, str) or text.isascii() or HALF.search(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _is_empty(value: Any) -> bool:
    # litellm adds {"refusal": None} to each answer.
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    return value in (None, "", [])


def _is_whole_call(call: Mapping[str, Any]) -> bool:
    arguments = (call.get("function") or {}).get("arguments")
    return is_whole(arguments) if isinstance(arguments, str) else True


def _incoming_calls(
    reported: Sequence[Mapping[str, Any]], taken: set[str]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    calls: list[dict[str, Any]] = []
    extras: dict[str, dict[str, Any]] = {}
    # A generated id is the same for the same request and answer, and unique in the conversation.
    seen: set[str] = set()
    number = len(taken)
    for each in reported:
        call_id = str(each.get("id") or "")
        while not call_id or call_id in seen:
            call_id, number = f"call_{number}", number + 1
            if call_id in taken:
                call_id = ""
        seen.add(call_id)
        call: dict[str, Any] = {"id": call_id, "type": each.get("type") or "function"}
        if isinstance(function := each.get("function"), Mapping):
            call["function"] = {"name": str(function.get("name") or ""), "arguments": text_of(function)}
        elif "custom" in each:
            call["custom"] = each["custom"]
        calls.append(call)
        if extra := {key: value for key, value in each.items() if key not in _CALL_FIELDS and value is not None}:
            extras[call_id] = extra
    return calls, extras


def ids_in(messages: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the ids of all tool calls in a conversation."""
    return {str(call.get("id")) for message in messages for call in message.get("tool_calls") or ()}


def usage_of(reported: Mapping[str, Any] | None) -> dict[str, int]:
    """Return token counts under this library's names; counts that were not reported are missing."""
    if not reported:
        return {}
    prompt_details = reported.get("prompt_tokens_details") or {}
    completion_details = reported.get("completion_tokens_details") or {}
    prompt, completion, total = (_count(reported.get(f"{each}_tokens")) for each in ("prompt", "completion", "total"))
    reasoning = _count(completion_details.get("reasoning_tokens"))
    if prompt is not None and completion is not None:
        if reasoning and total == prompt + completion + reasoning:
            # Some servers do not include reasoning in the completion.
            completion += reasoning
        total = prompt + completion if total is None else total
    found = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": total,
        "cached_tokens": _first(
            prompt_details.get("cached_tokens"),
            reported.get("cache_read_input_tokens"),
            reported.get("prompt_cache_hit_tokens"),
        ),
        "cache_write_tokens": _first(
            prompt_details.get("cache_write_tokens"),
            prompt_details.get("cache_creation_tokens"),
            reported.get("cache_creation_input_tokens"),
        ),
        "reasoning_tokens": reasoning,
    }
    return {name: count for name, count in found.items() if count is not None}


def _first(*counts: Any) -> int | None:
    return next((count for count in map(_count, counts) if count is not None), None)


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and value >= 0 else None
