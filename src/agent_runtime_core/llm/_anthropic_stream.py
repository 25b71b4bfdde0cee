"""Assemble Anthropic's answer from the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ._anthropic_content import Block
from ._anthropic_response import invalid_answer, parsed_input
from ._openai_format import as_unreadable

# The blocks whose start a server may omit.
_STARTED_BY = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "thinking"}


class Assembly:
    """Assembles an answer from stream events in order; unknown events are ignored, unknown blocks are kept."""

    def __init__(self) -> None:
        self._whole: dict[str, Any] = {}
        self._blocks: list[Block] = []
        self._inputs: dict[int, str] = {}  # by position in `_blocks`
        self._positions: dict[Any, int] = {}  # by index of the server
        #: Whether the output tokens of the whole answer were reported.
        self.has_usage: bool = False

    def add(self, event: Mapping[str, Any]) -> str:
        """Add an event; return the text that it adds."""
        match event.get("type"):
            case "message_start":
                self._whole = dict(event.get("message") or {})
            case "content_block_start":
                block = dict(event.get("content_block") or {})
                self._begin(event.get("index"), block)
                return str(block.get("text") or "") if block.get("type") == "text" else ""
            case "content_block_delta":
                return self._add_delta(event.get("index"), event.get("delta") or {})
            case "message_delta":
                self._whole |= {name: value for name, value in (event.get("delta") or {}).items() if value is not None}
                usage = event.get("usage") or {}
                self._whole["usage"] = _larger(self._whole.get("usage") or {}, usage)
                self.has_usage = self.has_usage or usage.get("output_tokens") is not None
            case "message":
                # The server answers as if it was not asked to stream.
                self._whole = dict(event)
                blocks = [block for block in event.get("content") or () if isinstance(block, Mapping)]
                return "".join(str(block.get("text") or "") for block in blocks if block.get("type") == "text")
        return ""

    @property
    def complete(self) -> bool:
        """Whether the answer is complete: the reason for its end comes after all of its content."""
        return bool(self._whole.get("stop_reason"))

    def whole(self) -> tuple[dict[str, Any], bool]:
        """Return the answer as if it was not streamed, and whether the input of its last block is complete."""
        content, is_whole = [], False
        for position, block in enumerate(self._blocks):
            is_whole = False
            if text := self._inputs.get(position, ""):
                parsed = parsed_input(text)
                # "{}" may be all that a truncated answer has of an input.
                is_whole = bool(parsed)
                # Some servers send the input with the start of the block, and only "{}" after it.
                input_ = as_unreadable(text) if parsed is None else parsed or block.get("input") or {}
                block = {**block, "input": input_}
            content.append(block)
        whole = {**self._whole, **({"content": content} if content else {})}
        if self._blocks and not self.has_usage:
            # The count at the start is only that of the first tokens.
            whole["usage"] = {
                name: count for name, count in (whole.get("usage") or {}).items() if name != "output_tokens"
            }
        return whole, is_whole

    def _begin(self, index: Any, block: Block) -> None:
        # Some servers give all blocks the same index, or none.
        self._positions[index] = len(self._blocks)
        self._blocks.append(block)

    def _add_delta(self, index: Any, delta: Mapping[str, Any]) -> str:
        kind = delta.get("type")
        if index not in self._positions:
            if kind not in _STARTED_BY:
                raise invalid_answer(f"sent a delta of content block {index} before its start")
            self._begin(index, {"type": _STARTED_BY[str(kind)]})
        position = self._positions[index]
        block = self._blocks[position]
        match kind:
            case "text_delta":
                added = str(delta.get("text") or "")
                block["text"] = str(block.get("text") or "") + added
                return added
            case "input_json_delta":
                piece = delta.get("partial_json") or ""
                self._inputs[position] = self._inputs.get(position, "") + (
                    piece if isinstance(piece, str) else json.dumps(piece, ensure_ascii=False)
                )
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


def _larger(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usage of both events: counts are cumulative, and some servers report 0 in one of the two."""
    usage = dict(before)
    for name, count in after.items():
        known = usage.get(name)
        if isinstance(known, (int, float)) and isinstance(count, (int, float)):
            usage[name] = max(known, count)
        elif isinstance(known, Mapping) and isinstance(count, Mapping):
            usage[name] = _larger(known, count)
        elif count is not None:
            usage[name] = count
    return usage
