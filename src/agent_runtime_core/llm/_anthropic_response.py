"""Convert Anthropic's answers, complete or streamed, to OpenAI's chat format."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any

from .._core.ids import HALF
from ..errors import ProviderUnavailable
from ._anthropic_format import PROVIDER, Block, message_of, object_of, without_final_thinking
from ._finish_reasons import FILTERED, LENGTH, REFUSAL, normal_reason
from ._openai_format import as_unreadable, repaired
from ._openai_usage import count_of, further_counts, known_counts, most, sum_of

# Nesting levels of an input. The stored answer adds several levels, and 100 is the limit.
_DEEPEST = 64


def answer_of(answer: Mapping[str, Any], *, call_is_whole: bool = False) -> tuple[dict[str, Any], dict[str, int], str]:
    """Return message, usage and finish reason of a complete answer.

    An incomplete tool call is dropped, and the message's metadata contains `truncated_tool_call`. The last call of a
    truncated answer is dropped too unless `call_is_whole`, and every call of an answer that was refused or filtered.
    The field `refusal` of a refused answer contains Anthropic's explanation, or else the text of the model.
    """
    finish = normal_reason(answer.get("stop_reason"))
    # The answer was stopped for its content, so its tool calls must not run.
    is_stopped = finish in (REFUSAL, FILTERED)
    # The model did not stop by itself, so the last block may be incomplete.
    is_cut = is_stopped or finish == LENGTH or answer.get("stop_reason") == "stop_sequence"
    given = answer.get("content") or ()
    blocks = [{"type": "text", "text": given}] if isinstance(given, str) else given
    content = [dict(block) for block in blocks if isinstance(block, Mapping)]
    for block in content:
        if block.get("type") == "tool_use":
            if not (block.get("id") and block.get("name")):
                raise invalid_answer("returned a tool call without an id or a name")
            block["input"] = _input_of(block.get("input"))
    if is_stopped:
        content = [block for block in content if block.get("type") != "tool_use"]
    dropped: Block = {}
    if content and is_cut and _is_cut(content[-1], call_is_whole):
        dropped = content.pop()
    message = message_of(without_final_thinking(content))
    if dropped.get("type") == "tool_use":
        message["metadata"] = {"truncated_tool_call": True}
    if finish == REFUSAL:
        details = answer.get("stop_details")
        explanation = details.get("explanation") if isinstance(details, Mapping) else None
        if words := explanation or message["content"]:
            message["refusal"] = words
    answered = bool(message["content"] or message.get("tool_calls"))
    return message, usage_of(answer.get("usage") or {}, answered=answered), finish


def usage_of(reported: Mapping[str, Any], *, answered: bool = False) -> dict[str, int]:
    """Return normalized usage. Counts that were not reported are missing, so that a limited run estimates them.

    Anthropic counts cached tokens separately; here they are part of the prompt. Its counts leave out other calls of
    the model for this answer, such as a summary of the conversation; here they are included.

    Args:
        reported: The usage in the answer.
        answered: Whether the answer contains text or tool calls, so that 0 output tokens mean an unknown number.
    """
    counts = _counts_of(reported, answered=answered)
    calls = reported.get("iterations")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, Mapping) and call.get("type") not in (None, "message"):
            further = _counts_of(call)
            counts = {name: counts.get(name, 0) + further.get(name, 0) for name in (*counts, *further)}
    return counts


def _counts_of(reported: Mapping[str, Any], *, answered: bool = False) -> dict[str, int]:
    by_age = reported.get("cache_creation")
    read = count_of(reported.get("cache_read_input_tokens"))
    written = count_of(reported.get("cache_creation_input_tokens"))
    if isinstance(by_age, Mapping):
        written = max(written or 0, sum_of(by_age))
    given = count_of(reported.get("input_tokens"))
    # Some servers of other models use the names of OpenAI, whose prompt includes the cached tokens.
    prompt = count_of(reported.get("prompt_tokens")) if given is None else given + (read or 0) + (written or 0)
    prompt = prompt or (read or 0) + (written or 0)
    details = reported.get("output_tokens_details")
    reasoning = count_of(details.get("thinking_tokens")) if isinstance(details, Mapping) else None
    completion = most(reported.get("output_tokens"), reported.get("completion_tokens"))
    if reasoning is not None and reasoning > (completion or 0):
        # This server counts thoughts separately.
        completion = (completion or 0) + reasoning
    if not prompt and not completion:
        return {}
    if answered and not completion:
        completion = None
    counts = known_counts(prompt, completion, None, read, written, reasoning)
    return counts | further_counts(by_age, reported.get("server_tool_use"))


def _input_of(given: Any) -> dict[str, Any]:
    """Return the input of a tool call; unreadable text if the input is not an object or cannot be stored."""
    given = given or {}
    if isinstance(given, str):
        parsed = parsed_input(given)
        return as_unreadable(given) if parsed is None else parsed
    if isinstance(given, Mapping) and is_storable(given):
        return dict(given)
    return as_unreadable(json.dumps(given))


def parsed_input(text: str) -> dict[str, Any] | None:
    """Return the input that a model wrote as text, or None if it is not one storable object.

    Some servers begin with an empty object, send the whole object twice, or encode it as a JSON string.
    """
    text = text.strip()
    if text == "null":
        return {}
    if text.startswith('"'):
        with contextlib.suppress(ValueError, RecursionError):
            text = str(json.loads(text))
    parsed = object_of(repaired(text))
    return parsed if parsed is not None and is_storable(parsed) else None


def is_storable(given: Any, levels: int = _DEEPEST) -> bool:
    """Return whether an input can be stored and sent back unchanged."""
    if isinstance(given, (Mapping, list)):
        within = [*given, *given.values()] if isinstance(given, Mapping) else given
        return levels > 0 and all(is_storable(each, levels - 1) for each in within)
    if isinstance(given, str):
        return given.isascii() or HALF.search(given) is None
    return not isinstance(given, float) or math.isfinite(given)


def _is_cut(last: Mapping[str, Any], call_is_whole: bool) -> bool:
    kind = str(last.get("type"))
    if kind == "thinking":
        return not last.get("signature")
    return kind.endswith("tool_use") and not call_is_whole


def invalid_answer(what: str) -> ProviderUnavailable:
    return ProviderUnavailable(f"{PROVIDER} {what}", provider=PROVIDER)


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
                # "{}" may be all of the input in a truncated answer.
                is_whole = bool(parsed)
                # Some servers send the input with the start of the block, and only "{}" after it.
                input_ = as_unreadable(text) if parsed is None else parsed or block.get("input") or {}
                block = {**block, "input": input_}
            content.append(block)
        whole = {**self._whole, **({"content": content} if content else {})}
        if self._blocks and not self.has_usage:
            # The count at the start covers only the first tokens.
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
