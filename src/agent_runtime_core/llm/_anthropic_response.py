"""Anthropic's answers, whole or put together from a stream's events, in OpenAI's chat format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from .._core.ids import HALF
from ..errors import ProviderUnavailable
from ._anthropic_format import PROVIDER, UNREADABLE, Block, message_of, object_of, without_last_thoughts

_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
# Stopped from outside, so that the last block may lack its end.
_CUTS = frozenset({"max_tokens", "model_context_window_exceeded", "refusal", "stop_sequence"})
# Levels of nesting: what is kept of an answer has an input several levels deeper, and 100 is the most.
_DEEPEST = 64


def answer_of(whole: Mapping[str, Any], *, call_is_whole: bool = False) -> tuple[dict[str, Any], dict[str, int], str]:
    """Message, usage and finish reason of an answer that ended.

    A tool call that the end cut off is left out; so is the last one of an answer that was cut unless
    `call_is_whole`, and every one of a refused answer.
    """
    stop = str(whole.get("stop_reason") or "")
    content = [dict(block) for block in whole.get("content") or ()]
    for block in content:
        if block.get("type") == "tool_use":
            if not (block.get("id") and block.get("name")):
                raise _broken("made a tool call without an id and a name")
            given = block.get("input") or {}
            block["input"] = dict(given) if isinstance(given, Mapping) and _holds(given) else _unread(json.dumps(given))
    if stop == "refusal":
        content = [block for block in content if block.get("type") != "tool_use"]
    if stop in _CUTS and content and _is_cut(content[-1], call_is_whole):
        content.pop()
    return message_of(without_last_thoughts(content)), usage_of(whole.get("usage") or {}), _FINISH.get(stop, stop)


def usage_of(told: Mapping[str, Any]) -> dict[str, int]:
    """Normalised: Anthropic counts cached tokens apart from the prompt, here they are part of it."""
    read, written = told.get("cache_read_input_tokens"), told.get("cache_creation_input_tokens")
    prompt = (told.get("input_tokens") or 0) + (read or 0) + (written or 0)
    completion = told.get("output_tokens") or 0
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    thought = (told.get("output_tokens_details") or {}).get("thinking_tokens")
    details = {"cached_tokens": read, "cache_write_tokens": written, "reasoning_tokens": thought}
    return usage | {name: count for name, count in details.items() if count is not None}


def _holds(given: Any, levels: int = _DEEPEST) -> bool:
    """Whether an input can be kept, and sent back, as it is."""
    if isinstance(given, (Mapping, list)):
        within = [*given, *given.values()] if isinstance(given, Mapping) else given
        return levels > 0 and all(_holds(each, levels - 1) for each in within)
    if isinstance(given, str):
        return given.isascii() or HALF.search(given) is None
    return not isinstance(given, float) or math.isfinite(given)


def _unread(text: str) -> dict[str, Any]:
    """An input as the text that the model wrote; a half of a character in it as its escape, which JSON knows too."""
    return {UNREADABLE: text.encode("utf-8", "backslashreplace").decode()}


def _is_cut(last: Mapping[str, Any], call_is_whole: bool) -> bool:
    kind = str(last.get("type"))
    if kind == "thinking":
        return not last.get("signature")
    return kind.endswith("tool_use") and not call_is_whole


class Assembly:
    """Takes the events of a stream in order; `ended` once the provider has said that the answer is finished."""

    def __init__(self) -> None:
        self._whole: dict[str, Any] = {}
        self._blocks: dict[Any, Block] = {}
        self._inputs: dict[Any, str] = {}
        self._stopped = False

    def take(self, event: Mapping[str, Any]) -> str:
        """The text that this event adds."""
        match event.get("type"):
            case "message_start":
                self._whole = dict(event.get("message") or {})
            case "content_block_start":
                block = self._blocks[event.get("index")] = dict(event.get("content_block") or {})
                return str(block.get("text") or "") if block.get("type") == "text" else ""
            case "content_block_delta":
                return self._grow(event.get("index"), event.get("delta") or {})
            case "message_delta":
                self._whole |= {name: value for name, value in (event.get("delta") or {}).items() if value is not None}
                # Counts are of all there was so far; one that did not change may be left out.
                usage = {name: count for name, count in (event.get("usage") or {}).items() if count is not None}
                self._whole["usage"] = {**(self._whole.get("usage") or {}), **usage}
            case "message_stop":
                self._stopped = True
        return ""

    @property
    def ended(self) -> bool:
        return self._stopped and bool(self._whole.get("stop_reason"))

    def whole(self) -> tuple[dict[str, Any], bool]:
        """The answer as it would have come unstreamed, and whether the input of its last block is all there."""
        content, is_whole = [], False
        for index, block in self._blocks.items():
            is_whole = False
            if text := self._inputs.get(index, ""):
                given = object_of(text)
                is_whole = given is not None
                block = {**block, "input": _unread(text) if given is None or not _holds(given) else given}
            content.append(block)
        return {**self._whole, "content": content}, is_whole

    def _grow(self, index: Any, delta: Mapping[str, Any]) -> str:
        block = self._blocks.get(index)
        if block is None:
            raise _broken(f"streamed a part of content block {index}, which had not begun")
        match delta.get("type"):
            case "text_delta":
                added = str(delta.get("text") or "")
                block["text"] = str(block.get("text") or "") + added
                return added
            case "input_json_delta":
                self._inputs[index] = self._inputs.get(index, "") + str(delta.get("partial_json") or "")
            case "citations_delta":
                block["citations"] = [*(block.get("citations") or ()), delta.get("citation")]
            case "signature_delta":
                block["signature"] = delta.get("signature")
            case _:
                for name, value in delta.items():
                    if name != "type":
                        before = block.get(name)
                        both = isinstance(before, str) and isinstance(value, str)
                        block[name] = before + value if both else value
        return ""


def _broken(what: str) -> ProviderUnavailable:
    return ProviderUnavailable(f"{PROVIDER} {what}", provider=PROVIDER)
