"""Convert messages between OpenAI's chat format and Anthropic's: pure functions on plain dicts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .._core.codec.json import loads_strict
from ..errors import RequestRefused, brief

PROVIDER = "anthropic"

Block = dict[str, Any]

# Anthropic's recommendation for arguments that a model wrote and that cannot be parsed.
UNREADABLE = "INVALID_JSON"
_THINKING = frozenset({"thinking", "redacted_thinking"})
_NOT_IN_AN_ID = re.compile(r"[^a-zA-Z0-9_-]")
_DATA_URL = re.compile(r"data:([^;,]+)(?:;[^;,]*)*;base64,(.*)", re.DOTALL)


def conversation_of(messages: Sequence[Mapping[str, Any]]) -> tuple[str | list[Block], list[Block]]:
    """Return the system prompt and the turns for Anthropic, which rejects empty messages: they are dropped.

    Raises:
        RequestRefused: A message has no equivalent there, or no message remains.
    """
    system: list[Block] = []
    turns: list[Block] = []
    results: list[Block] | None = None
    for index, message in enumerate(messages):
        where, role = f"messages[{index}]", message.get("role")
        if role in ("system", "developer"):
            system += _parts(message.get("content"), where)
        elif role == "tool":
            if results is None:
                turns.append({"role": "user", "content": (results := [])})
            results.append(_result(message, where))
        elif role in ("user", "assistant"):
            blocks = _parts(message.get("content"), where) if role == "user" else _assistant(message, where)
            if blocks:
                turns.append({"role": role, "content": _plain_or_blocks(blocks)})
                results = None
        else:
            raise refused(f"the role of {where} must be system, developer, user, assistant or tool, got {brief(role)}")
    if not turns:
        raise refused("messages must have a non-empty one besides the system prompt, which Anthropic requires")
    return _system(system), _distinct(turns)


def _distinct(turns: list[Block]) -> list[Block]:
    """Return the turns with unique ids of tool calls.

    Some servers number the calls of each answer from the beginning. Anthropic would reject a repeated id in every later
    request.
    """
    seen: set[str] = set()
    renamed: dict[str, str] = {}  # new ids by old ones, of the last answer that called tools
    for turn in turns:
        blocks = turn["content"]
        if isinstance(blocks, str):
            continue
        if turn["role"] == "assistant":
            renamed = {}
        for index, block in enumerate(blocks):
            if block.get("type") == "tool_use":
                id_ = block["id"]
                while id_ in seen:
                    id_ += "_"
                seen.add(id_)
                renamed[block["id"]] = id_
                blocks[index] = {**block, "id": id_}
            elif block.get("type") == "tool_result" and block.get("tool_use_id") in renamed:
                blocks[index] = {**block, "tool_use_id": renamed[block["tool_use_id"]]}
    return turns


def refused(message: str) -> RequestRefused:
    return RequestRefused(message, provider=PROVIDER)


def _system(blocks: list[Block]) -> str | list[Block]:
    plain = all(block.keys() == {"type", "text"} for block in blocks)
    return "\n\n".join(block["text"] for block in blocks) if plain else blocks


def _plain_or_blocks(blocks: list[Block]) -> str | list[Block]:
    """Return the text alone if there is nothing else, otherwise the blocks."""
    return str(blocks[0]["text"]) if len(blocks) == 1 and blocks[0].keys() == {"type", "text"} else blocks


def _parts(content: Any, where: str) -> list[Block]:
    """Return the blocks of a message's content, without empty texts."""
    if content is None:
        return []
    if isinstance(content, Mapping):
        content = json.dumps(content, ensure_ascii=False)
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    blocks = [_part({"type": "text", "text": part} if isinstance(part, str) else part, where) for part in content]
    return [block for block in blocks if not _is_blank(block)]


def _part(part: Mapping[str, Any], where: str) -> Block:
    match part.get("type"):
        case "text" | "input_text" | "output_text":
            kept = {"cache_control": part["cache_control"]} if part.get("cache_control") else {}
            return {"type": "text", "text": part.get("text") or "", **kept}
        case "refusal":
            return {"type": "text", "text": part.get("refusal") or ""}
        case "image_url":
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, Mapping) else image
            return {"type": "image", "source": _source(str(url), "image/", where)}
        case "file":
            return _document(part.get("file") or {}, where)
        case "input_audio":
            raise refused(f"{where} has a part of type 'input_audio': Anthropic accepts text, images and documents")
    return dict(part)


def _document(file: Mapping[str, Any], where: str) -> Block:
    if file.get("file_data"):
        source = _source(str(file["file_data"]), "application/pdf", where)
    else:
        source = {"type": "file", "file_id": str(file.get("file_id") or "")}
    return {"type": "document", "source": source} | ({"title": file["filename"]} if file.get("filename") else {})


def _source(url: str, kind: str, where: str) -> dict[str, str]:
    if found := _DATA_URL.fullmatch(url):
        media, data = found.groups()
        if media.startswith(kind):
            return {"type": "base64", "media_type": media, "data": data}
    elif url.startswith("https://"):
        return {"type": "url", "url": url}
    raise refused(f"{where}: the URL must be https, or data:{kind}…;base64,…, got {url[:60]!r}")


def _is_blank(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "text" and not str(block.get("text") or "").strip()


def _assistant(message: Mapping[str, Any], where: str) -> list[Block]:
    """Return Anthropic's own blocks of an answer if the message is unchanged; otherwise convert the message."""
    own = ((message.get("provider_fields") or {}).get(PROVIDER) or {}).get("content")
    if own and _is_same(own, message):
        return [
            {**block, "id": _id(block.get("id"), where)} if block.get("type") == "tool_use" else block
            for block in without_final_thinking([block for block in own if not _is_blank(block)])
        ]
    return _converted(message, where)


def without_final_thinking(content: Sequence[Block]) -> list[Block]:
    """Return the blocks without thinking blocks at the end, which Anthropic rejects."""
    kept = list(content)
    while kept and kept[-1].get("type") in _THINKING:
        kept.pop()
    return kept


def _converted(message: Mapping[str, Any], where: str) -> list[Block]:
    blocks = _parts(message.get("content") or message.get("refusal"), where)
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        name, arguments = str(function.get("name") or ""), function.get("arguments")
        parsed = object_of(arguments)
        if parsed is None:
            raise refused(
                f"{where}: the arguments of call {brief(call.get('id'))} of tool {brief(name)} must be a JSON object, "
                f"got {str(arguments)[:60]!r}. Correct them, or remove the call and its result"
            )
        blocks.append({"type": "tool_use", "id": _id(call.get("id"), where), "name": name, "input": parsed})
    return blocks


def _is_same(stored: Sequence[Mapping[str, Any]], message: Mapping[str, Any]) -> bool:
    converted = message_of([dict(block) for block in stored])
    return (converted["content"] or "") == _text(message.get("content")) and _calls(converted) == _calls(message)


def _text(content: Any) -> Any:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") if isinstance(part, Mapping) else str(part) for part in content)
    return content or ""


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
        raise refused(f"{where} has no tool call id: a call and its result must have the same id")
    # Other providers' ids may have characters that Anthropic rejects.
    return _NOT_IN_AN_ID.sub("_", str(given))


def _result(message: Mapping[str, Any], where: str) -> Block:
    block: Block = {"type": "tool_result", "tool_use_id": _id(message.get("tool_call_id"), where)}
    if blocks := _parts(message.get("content"), where):
        block["content"] = _plain_or_blocks(blocks)
    if (message.get("metadata") or {}).get("is_error"):
        block["is_error"] = True
    return block


def message_of(content: list[Block]) -> dict[str, Any]:
    """Return the message in OpenAI's format, with Anthropic's own blocks where that format loses information."""
    calls = [block for block in content if block.get("type") == "tool_use"]
    text = "".join(str(block.get("text") or "") for block in content if block.get("type") == "text")
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if calls:
        message["tool_calls"] = [_call(block) for block in calls]
    blocks = [_without_defaults(block) for block in content if not _is_blank(block)]
    if any(UNREADABLE in (block.get("input") or {}) for block in calls) or blocks != _converted(message, "the answer"):
        message["provider_fields"] = {PROVIDER: {"content": content}}
    return message


def _call(block: Block) -> dict[str, Any]:
    arguments_object = block.get("input") or {}
    unreadable = arguments_object.get(UNREADABLE) if len(arguments_object) == 1 else None
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
