"""Convert Anthropic's answers, complete or assembled from stream events, to OpenAI's chat format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from .._core.ids import HALF
from ..errors import ProviderUnavailable
from ._anthropic_format import PROVIDER, UNREADABLE, Block, message_of, object_of, without_final_thinking

_FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
# The model did not stop by itself, so the last block may be incomplete.
_CUTS = frozenset({"max_tokens", "model_context_window_exceeded", "refusal", "stop_sequence"})
# Nesting levels of an input. The stored answer adds several levels, and 100 is the limit.
_DEEPEST = 64


def answer_of(answer: Mapping[str, Any], *, call_is_whole: bool = False) -> tuple[dict[str, Any], dict[str, int], str]:
    """Return message, usage and finish reason of a complete answer.

    An incomplete tool call is dropped. So is the last call of a truncated answer unless `call_is_whole`, and every call
    of an answer that the model refused.
    """
    stop = str(answer.get("stop_reason") or "")
    content = [dict(block) for block in answer.get("content") or ()]
    for block in content:
        if block.get("type") == "tool_use":
            if not (block.get("id") and block.get("name")):
                raise _invalid_answer("returned a tool call without an id or a name")
            parsed = block.get("input") or {}
            block["input"] = (
                dict(parsed)
                if isinstance(parsed, Mapping) and _is_storable(parsed)
                else _as_unreadable(json.dumps(parsed))
            )
    if stop == "refusal":
        content = [block for block in content if block.get("type") != "tool_use"]
    if stop in _CUTS and content and _is_cut(content[-1], call_is_whole):
        content.pop()
    return message_of(without_final_thinking(content)), usage_of(answer.get("usage") or {}), _FINISH.get(stop, stop)


def usage_of(reported: Mapping[str, Any]) -> dict[str, int]:
    """Return normalized usage. Anthropic counts cached tokens separately; here they are part of the prompt."""
    read, written = reported.get("cache_read_input_tokens"), reported.get("cache_creation_input_tokens")
    prompt = (reported.get("input_tokens") or 0) + (read or 0) + (written or 0)
    completion = reported.get("output_tokens") or 0
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    reasoning = (reported.get("output_tokens_details") or {}).get("thinking_tokens")
    details = {"cached_tokens": read, "cache_write_tokens": written, "reasoning_tokens": reasoning}
    return usage | {name: count for name, count in details.items() if count is not None}


def _is_storable(given: Any, levels: int = _DEEPEST) -> bool:
    """Return whether an input can be stored and sent back unchanged."""
    if isinstance(given, (Mapping, list)):
        within = [*given, *given.values()] if isinstance(given, Mapping) else given
        return levels > 0 and all(_is_storable(each, levels - 1) for each in within)
    if isinstance(given, str):
        return given.isascii() or HALF.search(given) is None
    return not isinstance(given, float) or math.isfinite(given)


def _as_unreadable(text: str) -> dict[str, Any]:
    """Return an input as the text that the model wrote; a lone surrogate becomes its JSON escape."""
    return {UNREADABLE: text.encode("utf-8", "backslashreplace").decode()}


def _is_cut(last: Mapping[str, Any], call_is_whole: bool) -> bool:
    kind = str(last.get("type"))
    if kind == "thinking":
        return not last.get("signature")
    return kind.endswith("tool_use") and not call_is_whole


class Assembly:
    """Assembles an answer from stream events in order; `ended` is true once the provider has finished the answer."""

    def __init__(self) -> None:
        self._whole: dict[str, Any] = {}
        self._blocks: dict[Any, Block] = {}
        self._inputs: dict[Any, str] = {}
        self._stopped = False

    def add(self, event: Mapping[str, Any]) -> str:
        """Add an event; return the text that it adds."""
        match event.get("type"):
            case "message_start":
                self._whole = dict(event.get("message") or {})
            case "content_block_start":
                block = self._blocks[event.get("index")] = dict(event.get("content_block") or {})
                return str(block.get("text") or "") if block.get("type") == "text" else ""
            case "content_block_delta":
                return self._add_delta(event.get("index"), event.get("delta") or {})
            case "message_delta":
                self._whole |= {name: value for name, value in (event.get("delta") or {}).items() if value is not None}
                # Counts are cumulative; an unchanged one may be missing.
                usage = {name: count for name, count in (event.get("usage") or {}).items() if count is not None}
                self._whole["usage"] = {**(self._whole.get("usage") or {}), **usage}
            case "message_stop":
                self._stopped = True
        return ""

    @property
    def ended(self) -> bool:
        return self._stopped and bool(self._whole.get("stop_reason"))

    def whole(self) -> tuple[dict[str, Any], bool]:
        """Return the answer as if it was not streamed, and whether the input of its last block is complete."""
        content, is_whole = [], False
        for index, block in self._blocks.items():
            is_whole = False
            if text := self._inputs.get(index, ""):
                parsed = object_of(text)
                is_whole = parsed is not None
                block = {
                    **block,
                    "input": _as_unreadable(text) if parsed is None or not _is_storable(parsed) else parsed,
                }
            content.append(block)
        return {**self._whole, "content": content}, is_whole

    def _add_delta(self, index: Any, delta: Mapping[str, Any]) -> str:
        block = self._blocks.get(index)
        if block is None:
            raise _invalid_answer(f"sent a delta of content block {index} before its start")
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
                        previous = block.get(name)
                        both = isinstance(previous, str) and isinstance(value, str)
                        block[name] = previous + value if both else value
        return ""


def _invalid_answer(what: str) -> ProviderUnavailable:
    return ProviderUnavailable(f"{PROVIDER} {what}", provider=PROVIDER)
