"""Convert messages between OpenAI's chat format and Anthropic's: pure functions on plain dicts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .._core.arguments import SYSTEM_ROLES
from .._core.codec.json import loads_strict
from .._core.validation import Shown, must
from ._anthropic_content import PROVIDER, THINKING, Block, is_blank, parts, plain_or_blocks, refused, with_mark
from ._anthropic_turns import arranged
from ._openai_format import INVALID, as_unreadable, text_of_answer

_NOT_IN_AN_ID = re.compile(r"[^a-zA-Z0-9_-]")


def conversation_of(
    messages: Sequence[Mapping[str, Any]], *, signed: bool = True, instruction: str | None = None
) -> tuple[str | list[Block], list[Block]]:
    """Return the system prompt and the turns for Anthropic, which rejects empty messages: they are dropped.

    Args:
        messages: The messages in OpenAI's format.
        signed: Whether to drop thoughts without a signature. Claude rejects them; other models that are served with
            this API sign nothing, and some need their thoughts back.
        instruction: A text to add to the system prompt.

    Raises:
        RequestRefused: A message has no equivalent there, or no message remains.
        InvalidArgument: An image or a file cannot be sent.
    """
    system: list[Block] = []
    turns: list[Block] = []
    for index, message in enumerate(messages):
        where, role = f"messages[{index}]", message.get("role")
        if role in SYSTEM_ROLES:
            system += with_mark(parts(message.get("content"), where), message.get("cache_control"))
        elif role == "tool":
            turns.append({"role": "user", "content": [_result(message, where)]})
        elif role in ("user", "assistant"):
            blocks = parts(message.get("content"), where) if role == "user" else _assistant(message, where)
            if signed:
                blocks = [block for block in blocks if block.get("type") != "thinking" or block.get("signature")]
            blocks = with_mark(without_final_thinking(blocks), message.get("cache_control"))
            if blocks:
                turns.append({"role": role, "content": blocks})
        else:
            constraint = "be system, developer, user, assistant or tool"
            raise refused(str(must(f"role of {where}", constraint, role)))
    turns = arranged(turns)
    if not turns:
        raise refused(str(must("messages", "have a message with content besides the system prompt", Shown("none"))))
    if instruction:
        system.append({"type": "text", "text": instruction})
    return _system(system), turns


def _system(blocks: list[Block]) -> str | list[Block]:
    plain = all(block.keys() == {"type", "text"} for block in blocks)
    return "\n\n".join(block["text"] for block in blocks) if plain else blocks


def _assistant(message: Mapping[str, Any], where: str) -> list[Block]:
    """Return Anthropic's own blocks of an answer if the message is unchanged; otherwise convert the message."""
    own = ((message.get("provider_fields") or {}).get(PROVIDER) or {}).get("content")
    if own and _is_same(own, message):
        return [
            {**block, "id": _id(block.get("id"), where)} if block.get("type") == "tool_use" else block
            for block in own
            if not is_blank(block)
        ]
    return _converted(message, where)


def without_final_thinking(content: Sequence[Block]) -> list[Block]:
    """Return the blocks without thinking blocks at the end, which Anthropic rejects."""
    kept = list(content)
    while kept and kept[-1].get("type") in THINKING:
        kept.pop()
    return kept


def _converted(message: Mapping[str, Any], where: str) -> list[Block]:
    blocks = parts(message.get("content") or message.get("refusal"), where)
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        name, arguments = str(function.get("name") or ""), function.get("arguments")
        input_ = object_of(arguments)
        if input_ is None:
            # The result of the call has the error.
            input_ = as_unreadable(arguments if isinstance(arguments, str) else json.dumps(arguments, default=str))
        block = {"type": "tool_use", "id": _id(call.get("id"), where), "name": name, "input": input_}
        blocks += with_mark([block], call.get("cache_control"))
    return blocks


def _is_same(stored: Sequence[Mapping[str, Any]], message: Mapping[str, Any]) -> bool:
    converted = message_of([dict(block) for block in stored])
    return (converted["content"] or "") == text_of_answer(message.get("content")) and _calls(converted) == _calls(
        message
    )


def _calls(message: Mapping[str, Any]) -> list[tuple[Any, Any, Any]]:
    """Return the tool calls with parsed arguments, so that two spellings of the same JSON compare equal."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        arguments = function.get("arguments")
        parsed = object_of(arguments)
        calls.append((call.get("id"), function.get("name"), arguments if parsed is None else parsed))
    return calls


def object_of(arguments: Any) -> dict[str, Any] | None:
    """Return arguments as a dict, parsed if they are text; {} if they are empty, None if they are not an object."""
    if arguments is None or isinstance(arguments, Mapping):
        return dict(arguments or {})
    if not isinstance(arguments, str):
        return None
    if not arguments.strip():
        return {}
    try:
        value = loads_strict(arguments)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _id(given: Any, where: str) -> str:
    if not given:
        fix = "A call and its result need the same id"
        raise refused(str(must(f"tool call id of {where}", "be a non-empty string", given, fix)))
    # Other providers' ids may have characters that Anthropic rejects.
    return _NOT_IN_AN_ID.sub("_", str(given))


def _result(message: Mapping[str, Any], where: str) -> Block:
    block: Block = {"type": "tool_result", "tool_use_id": _id(message.get("tool_call_id"), where)}
    is_error = (message.get("metadata") or {}).get("is_error")
    mark = message.get("cache_control")
    blocks = parts(message.get("content"), where)
    for each in blocks:
        # A mark at the end of the result has the same effect, and is valid for every kind of content.
        mark = each.pop("cache_control", None) or mark
    if blocks:
        block["content"] = plain_or_blocks(blocks)
    if is_error:
        # Anthropic rejects an error without content.
        block |= {"content": block.get("content") or "Error", "is_error": True}
    return with_mark([block], mark)[0]


def message_of(content: list[Block]) -> dict[str, Any]:
    """Return the message in OpenAI's format, with Anthropic's own blocks where that format loses information."""
    calls = [block for block in content if block.get("type") == "tool_use"]
    text = "".join(str(block.get("text") or "") for block in content if block.get("type") == "text")
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if calls:
        message["tool_calls"] = [_call(block) for block in calls]
    blocks = [_without_defaults(block) for block in content if not is_blank(block)]
    if any(INVALID in (block.get("input") or {}) for block in calls) or blocks != _converted(message, "the answer"):
        message["provider_fields"] = {PROVIDER: {"content": content}}
    return message


def _call(block: Block) -> dict[str, Any]:
    arguments_object = block.get("input") or {}
    unreadable = arguments_object.get(INVALID) if len(arguments_object) == 1 else None
    arguments = unreadable if isinstance(unreadable, str) else json.dumps(arguments_object, ensure_ascii=False)
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _without_defaults(block: Block) -> Block:
    """Return a block without fields that have their default values."""
    return {
        name: value
        for name, value in block.items()
        if value is not None and not (name == "caller" and value == {"type": "direct"})
    }
