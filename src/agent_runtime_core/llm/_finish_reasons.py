"""Why an answer ended, in OpenAI's words, whatever word the server has for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: Finish reasons of answers that are not truncated.
COMPLETE = frozenset({"stop", "tool_calls", "function_call"})
_NAMES = {
    "stop": ("stop", "end_turn", "stop_sequence", "eos", "eos_token", "complete", "finish_reason_unspecified"),
    "length": (
        "length", "max_tokens", "max_token", "max_output_tokens", "max_length", "model_length", "token_limit",
        "context_length", "context_window", "model_context_window_exceeded", "incomplete", "continuation",
    ),
    "tool_calls": ("tool_calls", "tool_call", "tool_use"),
    "content_filter": (
        "content_filter", "content_filtered", "safety", "recitation", "blocklist", "prohibited_content", "spii",
        "image_safety", "image_prohibited_content", "image_recitation", "guardrail_intervened", "error_toxic",
        "sensitive", "moderation",
    ),
    "refusal": ("refusal", "refused"),
    "malformed_call": (
        "malformed_function_call", "malformed_tool_call", "malformed_tool_use", "malformed_response",
        "malformed_model_output", "unexpected_tool_call",
    ),
}  # fmt: skip
_NORMAL = {name: normal for normal, names in _NAMES.items() for name in names}
# The most telling word first: "function_call_filter: MALFORMED_FUNCTION_CALL", "content_filter: SAFETY".
_BY_WEIGHT = ("malformed_call", "refusal", "content_filter", "length", "tool_calls", "stop")
#: What a server cannot express with "stop", and therefore reports in a field of its own.
_NATIVE = frozenset({"malformed_call", "refusal", "content_filter", "length"})


def normal_reason(reason: str) -> str:
    """Return the finish reason in OpenAI's words; "malformed_call" for an unreadable call, others unchanged."""
    found = {_NORMAL.get(word) for word in re.findall(r"[a-z_]+", reason.lower().replace("-", "_"))}
    return next((normal for normal in _BY_WEIGHT if normal in found), reason)


def reason_of(reported: Any, native: Any) -> str:
    """Return the normalized finish reason of a choice.

    Args:
        reported: Its finish reason.
        native: The word of the model's provider, if a gateway passes it on.
    """
    reason = normal_reason(str(reported or ""))
    own = normal_reason(str(native or ""))
    return own if reason == "stop" and own in _NATIVE else reason


def native_reason(choice: Mapping[str, Any]) -> Any:
    """Return the word of the model's provider that OpenRouter and litellm pass on."""
    fields = choice.get("provider_specific_fields")
    return choice.get("native_finish_reason") or (
        fields.get("native_finish_reason") if isinstance(fields, Mapping) else None
    )
