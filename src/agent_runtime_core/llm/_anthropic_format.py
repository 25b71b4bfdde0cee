"""Convert messages between OpenAI's chat format and Anthropic's: pure functions on plain dicts."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from .._core.arguments import SYSTEM_ROLES
from .._core.codec.json import loads_strict
from .._core.validation import Shown, must, redacted
from ..errors import NotSupported, RequestRefused, brief
from ._openai_format import INVALID, as_unreadable, text_of_answer
from ._schemas import output_schema, tool_parameters

PROVIDER = "anthropic"

Block = dict[str, Any]

THINKING = frozenset({"thinking", "redacted_thinking"})
_DATA_URL = re.compile(r"data:([^;,]*)(?:;[^;,]*)*;base64,(.*)", re.DOTALL | re.IGNORECASE)
# Libraries and browsers write these names; Anthropic accepts only the registered names.
_ALIASES = {
    "image/jpg": "image/jpeg",
    "image/pjpeg": "image/jpeg",
    "image/jfif": "image/jpeg",
    "image/x-jpeg": "image/jpeg",
    "image/x-png": "image/png",
    "image/x-webp": "image/webp",
    "application/x-pdf": "application/pdf",
    "application/acrobat": "application/pdf",
    "text/pdf": "application/pdf",
}
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_DOCUMENTS = ("application/pdf", "text/plain")
_FROM_URL_SAFE = str.maketrans("-_", "+/")
# Parts of answers of other providers.
_FOREIGN = frozenset({"reasoning", "reasoning_content"})


def refused(message: str) -> RequestRefused:
    return RequestRefused(message, provider=PROVIDER)


def parts(content: Any, where: str) -> list[Block]:
    """Return the blocks of a message's content, without empty texts, which Anthropic rejects."""
    if content is None:
        return []
    if isinstance(content, Mapping):
        content = json.dumps(content, ensure_ascii=False)
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    blocks = [
        _part({"type": "text", "text": part} if isinstance(part, str) else part, f"{where}.content[{index}]")
        for index, part in enumerate(content)
    ]
    return [block for block in blocks if not is_blank(block) and block.get("type") not in _FOREIGN]


def is_blank(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "text" and not str(block.get("text") or "").strip()


def with_mark(blocks: list[Block], mark: Any) -> list[Block]:
    """Return the blocks with a `cache_control` mark on the last block that accepts a mark."""
    if mark:
        for index in reversed(range(len(blocks))):
            if blocks[index].get("type") not in THINKING:
                blocks[index] = {**blocks[index], "cache_control": mark}
                break
    return blocks


def plain_or_blocks(blocks: list[Block]) -> str | list[Block]:
    """Return the text alone if there is nothing else, otherwise the blocks."""
    return str(blocks[0]["text"]) if len(blocks) == 1 and blocks[0].keys() == {"type", "text"} else blocks


def _part(part: Mapping[str, Any], where: str) -> Block:
    inner = part.get(str(part.get("type")))
    # Some libraries write the mark into the object with the data.
    mark = part.get("cache_control") or (inner.get("cache_control") if isinstance(inner, Mapping) else None)
    kept = {"cache_control": mark} if mark else {}
    match part.get("type"):
        case "text" | "input_text" | "output_text":
            return {"type": "text", "text": part.get("text") or "", **kept}
        case "refusal":
            return {"type": "text", "text": part.get("refusal") or "", **kept}
        case "image_url" | "input_image":
            image = part.get("image_url")
            url = image.get("url") if isinstance(image, Mapping) else image
            return {"type": "image", "source": _source(str(url), "image/", where), **kept}
        case "file":
            return _document(part.get("file") or {}, where) | kept
        case "input_file":
            return _document(part, where) | kept
        case "input_audio":
            raise refused(str(must(f"{where}: a part", "be text, an image or a document", "input_audio")))
        case "image" | "document":
            return _own(part, where)
    return dict(part)


def _own(part: Mapping[str, Any], where: str) -> Block:
    """Return a part in Anthropic's own format, with a media type that Anthropic accepts."""
    source = part.get("source")
    if not isinstance(source, Mapping) or source.get("type") != "base64":
        return dict(part)
    accepted = _IMAGES if part.get("type") == "image" else _DOCUMENTS
    media = _media_type(source.get("media_type"), accepted, where)
    data = source.get("data")
    return {
        **part,
        "source": {**source, "media_type": media, "data": _plain_base64(data) if isinstance(data, str) else data},
    }


def _document(file: Mapping[str, Any], where: str) -> Block:
    if file.get("file_data"):
        source = _source(str(file["file_data"]), "application/pdf", where)
    elif file.get("file_url"):
        source = _source(str(file["file_url"]), "application/pdf", where)
    elif file.get("file_id"):
        source = {"type": "file", "file_id": str(file["file_id"])}
    else:
        raise must(where, "have file_data, file_url or file_id", Shown("none of them"), "Add one")
    return {"type": "document", "source": source} | ({"title": file["filename"]} if file.get("filename") else {})


def _source(url: str, kind: str, where: str) -> dict[str, str]:
    if found := _DATA_URL.fullmatch(url):
        given, data = found[1], _plain_base64(found[2])
        media = _media_type(given, _IMAGES if kind == "image/" else _DOCUMENTS, where)
        if media == "text/plain":
            return {"type": "text", "media_type": media, "data": _decoded(data, where)}
        return {"type": "base64", "media_type": media, "data": data}
    if url[:8].lower() == "https://":
        return {"type": "url", "url": url}
    raise must(f"{where}: URL", f"be https, or data:{kind}…;base64,…", redacted(url[:200]))


def _media_type(given: Any, accepted: tuple[str, ...], where: str) -> str:
    name = str(given or "").partition(";")[0].strip().lower()
    name = _ALIASES.get(name, name)
    if name.startswith("text/") and "text/plain" in accepted:
        name = "text/plain"  # Anthropic uses one name for all texts
    if name not in accepted:
        constraint = f"be {', '.join(accepted[:-1])} or {accepted[-1]} for Anthropic"
        raise must(f"media type of {where}", constraint, str(given), "Convert the file, or send its text")
    return name


def _plain_base64(data: str) -> str:
    """Return base64 in the only form that Anthropic accepts: without line breaks, %-escapes and URL-safe letters."""
    data = "".join(unquote(data).split()).translate(_FROM_URL_SAFE)
    return data + "=" * (-len(data) % 4)


def _decoded(data: str, where: str) -> str:
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise must(f"data of {where}", "be UTF-8 text in base64", data, "Encode the bytes of the text") from None


_UNANSWERED = "No result: the call was interrupted."


def arranged(turns: list[Block]) -> list[Block]:
    """Return the turns, each with a list of blocks, as Anthropic accepts them.

    1. Every tool call has a unique id.
    2. The results of an answer's calls directly follow it. A call without a result gets an error as result, for
       example after an interrupted run. A result without a call is dropped, for example after the history was trimmed.
    3. Consecutive turns of one role are merged, because some servers reject them.
    4. A final assistant turn does not end with whitespace.
    """
    merged = _merged(_paired(_distinct(turns)))
    if merged and merged[-1]["role"] == "assistant":
        last = merged[-1]["content"][-1]
        if last.get("type") == "text":
            merged[-1]["content"][-1] = {**last, "text": last["text"].rstrip()}
    return [{**turn, "content": plain_or_blocks(turn["content"])} for turn in merged]


def _distinct(turns: list[Block]) -> list[Block]:
    """Return the turns with unique ids of tool calls.

    Some servers number the calls of each answer from the beginning. Anthropic would reject a repeated id in every later
    request.
    """
    seen: set[Any] = set()
    renamed: dict[Any, str] = {}  # new ids by old ids, of the last answer that called tools
    for turn in turns:
        blocks = turn["content"]
        if turn["role"] == "assistant" and any(block.get("type") == "tool_use" for block in blocks):
            renamed = {}
        for index, block in enumerate(blocks):
            if block.get("type") == "tool_use":
                id_ = str(block.get("id"))
                while id_ in seen:
                    id_ += "_"
                seen.add(id_)
                renamed[block.get("id")] = id_
                blocks[index] = {**block, "id": id_}
            elif block.get("type") == "tool_result" and block.get("tool_use_id") in renamed:
                blocks[index] = {**block, "tool_use_id": renamed[block["tool_use_id"]]}
    return turns


def _paired(turns: list[Block]) -> list[Block]:
    """Return the turns with the results of each answer's calls in the turn after it."""
    # Of several results of one call the last result counts.
    results = {
        block.get("tool_use_id"): block
        for turn in turns
        for block in turn["content"]
        if block.get("type") == "tool_result"
    }
    found: list[Block] = []
    for turn in turns:
        rest = [block for block in turn["content"] if block.get("type") != "tool_result"]
        if rest:
            found.append({**turn, "content": rest})
        called = [block["id"] for block in rest if block.get("type") == "tool_use"]
        if called:
            found.append({"role": "user", "content": [results.get(id_) or _unanswered(id_) for id_ in called]})
    return found


def _unanswered(id_: str) -> Block:
    return {"type": "tool_result", "tool_use_id": id_, "content": _UNANSWERED, "is_error": True}


def _merged(turns: list[Block]) -> list[Block]:
    found: list[Block] = []
    for turn in turns:
        if found and found[-1]["role"] == turn["role"]:
            found[-1] = {**turn, "content": [*found[-1]["content"], *turn["content"]]}
        else:
            found.append(turn)
    return found


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
        RequestRefused: Anthropic has no equivalent of a message, or no message remains.
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
            # The result of the call contains the error.
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


# Options of OpenAI that need no equivalent: Anthropic always reports the usage of a stream, and gives one answer.
_NEEDLESS = frozenset({"stream_options"})
# OpenAI's names for a user, the name in use first.
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

    The first mark (of the tools or the system prompt) and the last marks are kept. Anthropic also finds an earlier
    prefix at a later mark, so a conversation in which each turn is marked remains cached.
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
