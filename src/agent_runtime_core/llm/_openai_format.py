"""Convert messages and tool calls to and from OpenAI's chat format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from .._core.ids import HALF
from ._finish_reasons import COMPLETE

_TEXT: Final = ("text", "refusal")
_ABOUT: Final = "What the tools returned besides text:"
#: Characters of the arguments in the label of a call.
_LONGEST: Final = 200


def with_text_of_tools(messages: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the messages with other parts than text moved from results of tools to a message of the user.

    That message follows the last result of the same turn, because a result must follow its call. It names the call
    before its parts. A result without text refers to it.
    """
    moved: list[Any] = []
    calls: dict[Any, str] = {}
    for message in messages:
        if message.get("role") != "tool":
            if moved:
                yield {"role": "user", "content": [{"type": "text", "text": _ABOUT}, *moved]}
                moved = []
            calls |= {call.get("id"): _shown(call) for call in message.get("tool_calls") or ()}
            yield message
            continue
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        others = [each for each in parts if _is_other(each)]
        if not others:
            yield message
            continue
        id_ = message.get("tool_call_id")
        moved += [{"type": "text", "text": f"Result of the call {id_}{calls.get(id_, '')}:"}, *others]
        kept = [each for each in parts if not _is_other(each)]
        says = any(isinstance(each, str) or str(each.get("text") or "").strip() for each in kept)
        elsewhere = f"(The result of the call {id_} is in the next message of the user.)"
        yield {**message, "content": kept if says else elsewhere}
    if moved:
        yield {"role": "user", "content": [{"type": "text", "text": _ABOUT}, *moved]}


def _is_other(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") not in _TEXT


def _shown(call: Mapping[str, Any]) -> str:
    """Return the tool and the arguments of a call, because some servers do not show its id to the model."""
    function = call.get("function") or call
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False, default=str)
    return f", {function.get('name')}({text[:_LONGEST]}{'…' * (len(text) > _LONGEST)})"


#: Standard fields of assistant messages. Other fields belong to the provider.
_KNOWN = frozenset({"role", "content", "tool_calls", "function_call", "refusal"})
_CALL_FIELDS = frozenset({"id", "type", "index", "function", "custom"})
#: Fields of this library, which are not sent, and of answers that no server needs again.
_NOT_SENT = frozenset({"metadata", "provider_fields", "annotations", "refusal"})
#: The argument under which the model gets arguments back that were not a JSON object: Anthropic's recommendation.
INVALID = "INVALID_JSON"
#: Parts of a content that are not an answer.
_THOUGHTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
#: Moonshot and others reject a tool's result without text.
_NO_OUTPUT = "(no output)"
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


def outgoing(messages: Iterable[Mapping[str, Any]], provider: str) -> list[dict[str, Any]]:
    """Return the messages for `provider`: with the provider's own fields merged in, without fields of other providers.

    An assistant message without text and tool calls is left out, because many servers reject it, and so is a system
    message without content. An image in the result of a tool is sent in a message of the user after it.
    """
    return [_outgoing(message, provider) for message in with_text_of_tools(messages) if not is_empty(message)]


def is_empty(message: Mapping[str, Any]) -> bool:
    """Return whether a message of the model or a prompt contains nothing to send."""
    if message.get("role") in ("system", "developer"):
        return not message.get("content")
    if message.get("role") != "assistant":
        return False
    own = [fields for fields in (message.get("provider_fields") or {}).values() if isinstance(fields, Mapping)]
    names = ("tool_calls", "function_call", "refusal", "audio", "images")
    if any(message.get(name) for name in names) or any(fields.get(name) for fields in own for name in names[1:]):
        return False
    return _is_blank(message.get("content"))


def _is_blank(content: Any) -> bool:
    if isinstance(content, list):
        return not any(_says_something(part) for part in content)
    return content is None or content == {} or (isinstance(content, str) and not content.strip())


def _says_something(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return bool(part)
    if part.get("type", "text") == "text":
        return bool(str(part.get("text") or "").strip())
    return part.get("type") not in _THOUGHTS


def _outgoing(message: Mapping[str, Any], provider: str) -> dict[str, Any]:
    own: dict[str, Any] = dict((message.get("provider_fields") or {}).get(provider) or {})
    call_fields: dict[Any, dict[str, Any]] = own.pop("tool_calls", None) or {}
    # A dump of another library's message contains a null for each field that is not set.
    sent = {
        key: value
        for key, value in (own | dict(message)).items()
        if key not in _NOT_SENT and (value is not None or key == "content")
    }
    if message.get("role") == "tool" and message.get("content") != {} and _is_blank(message.get("content")):
        sent["content"] = _NO_OUTPUT
    if refusal := message.get("refusal"):
        # Only OpenAI accepts this field. The model needs the words to know that it refused.
        sent["content"] = sent.get("content") or refusal
    audio = sent.get("audio")
    if isinstance(audio, Mapping) and "id" in audio:
        # The audio of an earlier answer is referenced by id, not sent again.
        sent["audio"] = {"id": audio["id"]}
    if isinstance(sent.get("content"), Mapping):
        sent["content"] = json.dumps(sent["content"], ensure_ascii=False)
    calls: Sequence[dict[str, Any]] | None = sent.pop("tool_calls", None)
    if calls:
        sent["content"] = sent.get("content") or None
        sent["tool_calls"] = [{**call_fields.get(call.get("id"), {}), **_outgoing_call(call)} for call in calls]
    return sent


def _outgoing_call(call: Mapping[str, Any]) -> dict[str, Any]:
    if "function" not in call and "name" in call:
        call = {"id": call.get("id"), "type": "function", "function": call}
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    return {**call, "function": {"name": function.get("name"), "arguments": _sendable(text_of(function))}}


def _sendable(arguments: str) -> str:
    """Return arguments that every server accepts; the result of the call reports that they were not an object."""
    if is_whole(arguments, strict=True):
        return arguments
    if arguments.strip() in ("", "null"):
        return "{}"
    return json.dumps(as_unreadable(arguments), ensure_ascii=False)


def as_unreadable(arguments: str) -> dict[str, Any]:
    """Return arguments as the text that the model wrote; a lone surrogate becomes its JSON escape."""
    return {INVALID: arguments.encode("utf-8", "backslashreplace").decode()}


def text_of(function: Mapping[str, Any]) -> str:
    """Return the arguments of a call as JSON text; missing arguments are an empty object."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    # A lone surrogate could not be sent back. Its escape means the same in JSON.
    return arguments.encode("utf-8", "backslashreplace").decode() or "{}"


def is_whole(arguments: str, *, strict: bool = False) -> bool:
    """Return whether the text is a complete JSON object; `strict` excludes NaN and Infinity."""
    if not arguments.rstrip().endswith("}"):
        return False
    try:
        return isinstance(json.loads(arguments, parse_constant=_reject if strict else None), dict)
    except (ValueError, RecursionError):
        return False


def _reject(constant: str) -> Any:
    raise ValueError(constant)


def repaired(arguments: str) -> str:
    """Return the arguments without what some servers add.

    That is an empty object before them, all of them a second time, or their encoding as a JSON string.
    """
    if is_whole(arguments):
        return arguments
    found: list[tuple[Any, str]] = []
    start = _SPACE.match(arguments).end()  # type: ignore[union-attr]
    while start < len(arguments):
        try:
            value, end = _DECODER.raw_decode(arguments, start)
        except (ValueError, RecursionError):
            return arguments
        if value not in (None, "", {}):
            found.append((value, arguments[start:end]))
        start = _SPACE.match(arguments, end).end()  # type: ignore[union-attr]
    if not found:
        return "{}"
    first, text = found[0]
    if isinstance(first, str) and is_whole(first) and len(found) == 1:
        return first
    return text if isinstance(first, dict) and all(value == first for value, _ in found) else arguments


def incoming(reported: Mapping[str, Any], provider: str, finish_reason: str, taken: set[str]) -> dict[str, Any]:
    """Return a provider's assistant message in the format of this library.

    Calls of a truncated answer are dropped if the arguments of any call are incomplete. `truncated_tool_call` in
    the message's metadata reports that.

    Args:
        reported: The provider's message.
        provider: The name of the provider.
        finish_reason: Why the answer ended, normalized.
        taken: The ids of the earlier calls in the conversation.
    """
    requested = [_repaired_call(call) for call in calls_in(reported)]
    truncated = finish_reason not in COMPLETE and not all(_is_whole_call(call) for call in requested)
    if truncated:
        requested = []
    calls, call_fields = _incoming_calls(requested, taken)
    content = joined(reported.get("content"))
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    if refusal := _refusal_in(reported):
        message["refusal"] = joined(refusal)
    if truncated:
        message["metadata"] = {"truncated_tool_call": True}
    own = {key: joined(value) for key, value in reported.items() if key not in _KNOWN and not _is_empty(value)}
    if call_fields:
        own["tool_calls"] = call_fields
    if own:
        message["provider_fields"] = {provider: own}
    return message


def text_of_answer(content: Any) -> str:
    """Return the text of an answer, which may be a list of parts; other parts are ignored."""
    if isinstance(content, list):
        return "".join(text_of_answer(part.get("text")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else "" if content is None else str(content)


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


def _refusal_in(reported: Mapping[str, Any]) -> str:
    """Return the words of a refusal, which are in a field, in parts of the content, or in litellm's own fields."""
    fields = reported.get("provider_specific_fields")
    parts = content if isinstance(content := reported.get("content"), list) else ()
    found = [
        reported.get("refusal"),
        fields.get("refusal") if isinstance(fields, Mapping) else None,
        "".join(str(part.get("refusal") or "") for part in parts if isinstance(part, Mapping)),
    ]
    return next((words for words in found if isinstance(words, str) and words), "")


def calls_in(reported: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the tool calls of an answer or of a delta; some servers send one call without a list, or null in it.

    The field `function_call` is an earlier form of a call.
    """
    calls = reported.get("tool_calls")
    if not calls and isinstance(old := reported.get("function_call"), Mapping) and old:
        return [{"index": 0, "type": "function", "function": old}]
    if isinstance(calls, Mapping):
        return [calls]
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []


def _repaired_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str) or not arguments:
        return call
    return {**call, "function": {**function, "arguments": repaired(arguments)}}


def _is_whole_call(call: Mapping[str, Any]) -> bool:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return True
    arguments = function.get("arguments")
    return bool(function.get("name")) and (is_whole(arguments) if isinstance(arguments, str) else True)


def _incoming_calls(
    reported: Sequence[Mapping[str, Any]], taken: set[str]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    calls: list[dict[str, Any]] = []
    extras: dict[str, dict[str, Any]] = {}
    # A generated id is the same for the same request and answer, and unique in the conversation.
    seen: set[str] = set()
    number = len(taken)
    for each in without_repeats(reported):
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


def without_repeats(calls: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the calls of an answer, without the calls that some servers send twice under one id.

    Calls without an id, or with the same id and other arguments, are different calls.
    """
    if len(calls) == 1:
        return calls
    ids = [call.get("id") for call in calls]
    if all(isinstance(each, str) for each in ids) and len(set(ids)) == len(ids):  # nearly always
        return calls
    found: list[Mapping[str, Any]] = []
    seen: set[tuple[Any, ...]] = set()
    for call in calls:
        function = call.get("function")
        fields = function if isinstance(function, Mapping) else call
        what = (str(call.get("id")), str(fields.get("name")), _ordered(fields.get("arguments")))
        if not call.get("id") or what not in seen:
            found.append(call)
            seen.add(what)
    return found


def _ordered(arguments: Any) -> str:
    """Return arguments as JSON, with the same text for equal arguments; unchanged if they are not JSON."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(value, sort_keys=True, default=str)
    except (ValueError, TypeError, RecursionError):
        return str(arguments)


def ids_in(messages: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the ids of all tool calls in a conversation."""
    return {str(call.get("id")) for message in messages for call in message.get("tool_calls") or ()}
