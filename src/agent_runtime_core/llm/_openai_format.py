"""What goes out to, and comes back from, a wire that speaks OpenAI's chat format: messages, tool calls, usage."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._core.ids import HALF

#: What every assistant message has; all else that a provider adds to one is its own.
_KNOWN = frozenset({"role", "content", "tool_calls", "refusal"})
_OF_A_CALL = frozenset({"id", "type", "index", "function", "custom"})
#: How an answer ends that was not cut short.
_ENDS = frozenset({"stop", "tool_calls", "function_call"})
#: Ours, which no provider knows.
_OURS = frozenset({"metadata", "provider_fields"})


def outgoing(messages: Iterable[Mapping[str, Any]], provider: str) -> list[dict[str, Any]]:
    """The messages as `provider` gets them: with its own fields merged back in, without those of others."""
    return [_outgoing(message, provider) for message in messages]


def _outgoing(message: Mapping[str, Any], provider: str) -> dict[str, Any]:
    own: dict[str, Any] = dict((message.get("provider_fields") or {}).get(provider) or {})
    of_calls: dict[Any, dict[str, Any]] = own.pop("tool_calls", None) or {}
    sent = own | {key: value for key, value in message.items() if key not in _OURS}
    audio = sent.get("audio")
    if isinstance(audio, Mapping) and "id" in audio:
        # An answer's sound is named when it is sent back, not repeated.
        sent["audio"] = {"id": audio["id"]}
    if isinstance(sent.get("content"), Mapping):
        sent["content"] = json.dumps(sent["content"], ensure_ascii=False)
    calls: Sequence[dict[str, Any]] | None = sent.pop("tool_calls", None)
    if calls:
        sent["tool_calls"] = [{**of_calls.get(call.get("id"), {}), **_outgoing_call(call)} for call in calls]
    return sent


def _outgoing_call(call: Mapping[str, Any]) -> dict[str, Any]:
    if "function" not in call and "name" in call:
        call = {"id": call.get("id"), "type": "function", "function": call}
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    return {**call, "function": {"name": function.get("name"), "arguments": text_of(function)}}


def text_of(function: Mapping[str, Any]) -> str:
    """The arguments of a call as JSON text, whatever a server made of them; none are an empty object."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    # Half a character could not be sent back. Its escape means the same in JSON.
    return arguments.encode("utf-8", "backslashreplace").decode() or "{}"


def is_whole(arguments: str) -> bool:
    """Whether this is all of a JSON object, not the beginning of one."""
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def incoming(told: Mapping[str, Any], provider: str, finish_reason: str, taken: set[str]) -> dict[str, Any]:
    """An assistant message of ours from a provider's; `taken` are the ids of the calls before it.

    Calls of an answer that was cut short, with arguments that break off, are left out.
    """
    asked: Sequence[Mapping[str, Any]] = told.get("tool_calls") or ()
    if finish_reason not in _ENDS and not all(_is_whole_call(call) for call in asked):
        asked = ()
    calls, of_calls = _incoming_calls(asked, taken)
    content = joined(told.get("content"))
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    if refusal := told.get("refusal"):
        message["refusal"] = joined(refusal)
    own = {key: joined(value) for key, value in told.items() if key not in _KNOWN and not _says_nothing(value)}
    if of_calls:
        own["tool_calls"] = of_calls
    if own:
        message["provider_fields"] = {provider: own}
    return message


def joined(text: Any) -> Any:
    """The text with the halves of characters joined, as some servers part them; one alone could not be sent back."""
    if not isinstance(text, str) or text.isascii() or HALF.search(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _says_nothing(value: Any) -> bool:
    # litellm has {"refusal": None} among its fields of each answer.
    if isinstance(value, Mapping):
        return all(map(_says_nothing, value.values()))
    return value in (None, "", [])


def _is_whole_call(call: Mapping[str, Any]) -> bool:
    arguments = (call.get("function") or {}).get("arguments")
    return is_whole(arguments) if isinstance(arguments, str) else True


def _incoming_calls(
    told: Sequence[Mapping[str, Any]], taken: set[str]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    calls: list[dict[str, Any]] = []
    extras: dict[str, dict[str, Any]] = {}
    # A made-up id is the same whenever the same request has the same answer, and in no other message of it.
    seen: set[str] = set()
    number = len(taken)
    for each in told:
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
        if extra := {key: value for key, value in each.items() if key not in _OF_A_CALL and value is not None}:
            extras[call_id] = extra
    return calls, extras


def ids_in(messages: Iterable[Mapping[str, Any]]) -> set[str]:
    """The ids of all tool calls in a conversation."""
    return {str(call.get("id")) for message in messages for call in message.get("tool_calls") or ()}


def usage_of(told: Mapping[str, Any] | None) -> dict[str, int]:
    """Tokens under our names; only what was told."""
    if not told:
        return {}
    prompt_details = told.get("prompt_tokens_details") or {}
    completion_details = told.get("completion_tokens_details") or {}
    prompt, completion, total = (_count(told.get(f"{each}_tokens")) for each in ("prompt", "completion", "total"))
    reasoning = _count(completion_details.get("reasoning_tokens"))
    if prompt is not None and completion is not None:
        if reasoning and total == prompt + completion + reasoning:
            # Some servers count reasoning beside the completion, not in it.
            completion += reasoning
        total = prompt + completion if total is None else total
    found = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": total,
        "cached_tokens": _first(
            prompt_details.get("cached_tokens"),
            told.get("cache_read_input_tokens"),
            told.get("prompt_cache_hit_tokens"),
        ),
        "cache_write_tokens": _first(
            prompt_details.get("cache_write_tokens"),
            prompt_details.get("cache_creation_tokens"),
            told.get("cache_creation_input_tokens"),
        ),
        "reasoning_tokens": reasoning,
    }
    return {name: count for name, count in found.items() if count is not None}


def _first(*counts: Any) -> int | None:
    return next((count for count in map(_count, counts) if count is not None), None)


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and value >= 0 else None
