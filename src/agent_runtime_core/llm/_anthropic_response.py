"""Convert Anthropic's complete answers to OpenAI's chat format."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any

from .._core.ids import HALF
from ..errors import ProviderUnavailable
from ._anthropic_content import PROVIDER, Block
from ._anthropic_format import message_of, object_of, without_final_thinking
from ._finish_reasons import FILTERED, LENGTH, REFUSAL, normal_reason
from ._openai_format import as_unreadable, repaired
from ._openai_usage import count_of, further_counts, known_counts, most, sum_of

# Nesting levels of an input. The stored answer adds several levels, and 100 is the limit.
_DEEPEST = 64


def answer_of(answer: Mapping[str, Any], *, call_is_whole: bool = False) -> tuple[dict[str, Any], dict[str, int], str]:
    """Return message, usage and finish reason of a complete answer.

    An incomplete tool call is dropped, and the message's metadata has `truncated_tool_call`. So is the last call of a
    truncated answer unless `call_is_whole`, and every call of an answer that was refused or filtered. The field
    `refusal` of a refused answer has Anthropic's explanation, or else the text of the model.
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
        answered: Whether the answer has text or tool calls, so that 0 output tokens mean an unknown number.
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
    """Return the input of a tool call; one that is not an object, or cannot be stored, as unreadable text."""
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
