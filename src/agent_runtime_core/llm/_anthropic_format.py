"""Messages between OpenAI's chat format and Anthropic's: pure functions over plain dicts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .._core.codec.json import loads_strict
from ..errors import RequestRefused, brief

PROVIDER = "anthropic"

Block = dict[str, Any]

# Anthropic's own advice for arguments that a model wrote and nobody can parse.
UNREADABLE = "INVALID_JSON"
_THINKING = frozenset({"thinking", "redacted_thinking"})
_NOT_IN_AN_ID = re.compile(r"[^a-zA-Z0-9_-]")
_DATA_URL = re.compile(r"data:([^;,]+)(?:;[^;,]*)*;base64,(.*)", re.DOTALL)


def conversation_of(messages: Sequence[Mapping[str, Any]]) -> tuple[str | list[Block], list[Block]]:
    """The system prompt and the turns. A message that says nothing is left out: Anthropic takes no empty ones.

    RequestRefused: a message has no form there, or none is left.
    """
    system: list[Block] = []
    turns: list[Block] = []
    results: list[Block] | None = None
    for place, message in enumerate(messages):
        where, role = f"messages[{place}]", message.get("role")
        if role in ("system", "developer"):
            system += _parts(message.get("content"), where)
        elif role == "tool":
            if results is None:
                turns.append({"role": "user", "content": (results := [])})
            results.append(_result(message, where))
        elif role in ("user", "assistant"):
            blocks = _parts(message.get("content"), where) if role == "user" else _assistant(message, where)
            if blocks:
                turns.append({"role": role, "content": _short(blocks)})
                results = None
        else:
            raise refused(f"{where} has the role {brief(role)}; there is system, developer, user, assistant and tool")
    if not turns:
        raise refused("no message is left to send: Anthropic needs one besides the system prompt that is not empty")
    return _system(system), _distinct(turns)


def _distinct(turns: list[Block]) -> list[Block]:
    """The turns with another id for a tool call whose id an earlier one has: servers that count the calls of each
    answer anew repeat theirs, and Anthropic refuses that for ever."""
    seen: set[str] = set()
    now: dict[str, str] = {}  # of the last answer that called tools, and of its results
    for turn in turns:
        blocks = turn["content"]
        if isinstance(blocks, str):
            continue
        if turn["role"] == "assistant":
            now = {}
        for place, block in enumerate(blocks):
            if block.get("type") == "tool_use":
                id_ = block["id"]
                while id_ in seen:
                    id_ += "_"
                seen.add(id_)
                now[block["id"]] = id_
                blocks[place] = {**block, "id": id_}
            elif block.get("type") == "tool_result" and block.get("tool_use_id") in now:
                blocks[place] = {**block, "tool_use_id": now[block["tool_use_id"]]}
    return turns


def refused(message: str) -> RequestRefused:
    return RequestRefused(message, provider=PROVIDER)


def _system(blocks: list[Block]) -> str | list[Block]:
    plain = all(block.keys() == {"type", "text"} for block in blocks)
    return "\n\n".join(block["text"] for block in blocks) if plain else blocks


def _short(blocks: list[Block]) -> str | list[Block]:
    """The text alone where there is nothing else."""
    return str(blocks[0]["text"]) if len(blocks) == 1 and blocks[0].keys() == {"type", "text"} else blocks


def _parts(content: Any, where: str) -> list[Block]:
    """Blocks of a message's content, without texts that say nothing."""
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
            raise refused(f"{where} has a part of type 'input_audio': Anthropic reads text, images and documents")
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
    raise refused(f"{where}: {url[:60]!r} cannot be sent: give an https URL, or data:{kind}…;base64,…")


def _is_blank(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "text" and not str(block.get("text") or "").strip()


def _assistant(message: Mapping[str, Any], where: str) -> list[Block]:
    """As Anthropic said it where it did and nobody has changed it since, else made anew."""
    said = ((message.get("provider_fields") or {}).get(PROVIDER) or {}).get("content")
    if said and _is_same(said, message):
        return [
            {**block, "id": _id(block.get("id"), where)} if block.get("type") == "tool_use" else block
            for block in without_last_thoughts([block for block in said if not _is_blank(block)])
        ]
    return _made(message, where)


def without_last_thoughts(content: Sequence[Block]) -> list[Block]:
    """The blocks up to the last one that is no thought: Anthropic refuses a message that ends with its thoughts."""
    kept = list(content)
    while kept and kept[-1].get("type") in _THINKING:
        kept.pop()
    return kept


def _made(message: Mapping[str, Any], where: str) -> list[Block]:
    blocks = _parts(message.get("content") or message.get("refusal"), where)
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        name, arguments = str(function.get("name") or ""), function.get("arguments")
        given = object_of(arguments)
        if given is None:
            raise refused(
                f"{where}: the arguments of the call {brief(call.get('id'))} of tool {brief(name)} are no JSON object "
                f"({str(arguments)[:60]!r}): repair them, or leave out the call and its result"
            )
        blocks.append({"type": "tool_use", "id": _id(call.get("id"), where), "name": name, "input": given})
    return blocks


def _is_same(said: Sequence[Mapping[str, Any]], message: Mapping[str, Any]) -> bool:
    own = message_of([dict(block) for block in said])
    return (own["content"] or "") == _text(message.get("content")) and _calls(own) == _calls(message)


def _text(content: Any) -> Any:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") if isinstance(part, Mapping) else str(part) for part in content)
    return content or ""


def _calls(message: Mapping[str, Any]) -> list[tuple[Any, Any, Any]]:
    """Its tool calls in a form that tells whether two are the same, however their arguments are written."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        arguments = function.get("arguments")
        given = object_of(arguments)
        calls.append((call.get("id"), function.get("name"), arguments if given is None else given))
    return calls


def object_of(arguments: Any) -> dict[str, Any] | None:
    """The object that arguments say, text or not; None if they say none. Nothing written means nothing given."""
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
        raise refused(f"{where} has no id of its tool call: a call and its result need the same one")
    # Other providers' ids may hold what Anthropic's may not.
    return _NOT_IN_AN_ID.sub("_", str(given))


def _result(message: Mapping[str, Any], where: str) -> Block:
    block: Block = {"type": "tool_result", "tool_use_id": _id(message.get("tool_call_id"), where)}
    if blocks := _parts(message.get("content"), where):
        block["content"] = _short(blocks)
    if (message.get("metadata") or {}).get("is_error"):
        block["is_error"] = True
    return block


def message_of(content: list[Block]) -> dict[str, Any]:
    """The message in OpenAI's format; Anthropic's own is kept beside it where that one does not say it all."""
    calls = [block for block in content if block.get("type") == "tool_use"]
    text = "".join(str(block.get("text") or "") for block in content if block.get("type") == "text")
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if calls:
        message["tool_calls"] = [_call(block) for block in calls]
    told = [_bare(block) for block in content if not _is_blank(block)]
    if any(UNREADABLE in (block.get("input") or {}) for block in calls) or told != _made(message, "the answer"):
        message["provider_fields"] = {PROVIDER: {"content": content}}
    return message


def _call(block: Block) -> dict[str, Any]:
    given = block.get("input") or {}
    unreadable = given.get(UNREADABLE) if len(given) == 1 else None
    arguments = unreadable if isinstance(unreadable, str) else json.dumps(given, ensure_ascii=False)
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _bare(block: Block) -> Block:
    """A block without what it says by default."""
    return {
        name: value
        for name, value in block.items()
        if value is not None and not (name == "caller" and value == {"type": "direct"})
    }
