"""Why an answer ended, in OpenAI's words, whatever word the provider uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

LENGTH, REFUSAL, FILTERED, MALFORMED, FAILED = "length", "refusal", "content_filter", "malformed_tool_call", "error"
#: Finish reasons of answers that are not truncated.
COMPLETE = frozenset({"stop", "tool_calls", "function_call"})
#: Finish reasons that announce a tool call.
ANNOUNCING: Final = frozenset({"tool_calls", "function_call"})
# The endings of all wires; their words differ, so that one table is enough. The most telling word is first:
# "function_call_filter: MALFORMED_FUNCTION_CALL", "content_filter: SAFETY". The words come from the documentation of
# providers and from reports.
_NAMES: Final = {
    # Failed: the server could not read what the model wrote.
    MALFORMED: "malformed_function_call malformed_tool_call malformed_tool_use malformed_response "
    "malformed_model_output unexpected_tool_call",
    # Refused: the answer was stopped for its content.
    REFUSAL: "refusal refused",
    FILTERED: "content_filter content_filtered content_filtering filtered blocked safety recitation blocklist "
    "prohibited_content spii sensitive moderation guardrail guardrails guardrail_intervened model_armor "
    "image_safety image_prohibited_content image_recitation error_toxic",
    # Cut: the answer is incomplete.
    LENGTH: "length max_tokens max_token max_output_tokens max_completion_tokens max_length model_length token_limit "
    "length_limit error_limit truncated context_length context_length_exceeded context_window context_window_exceeded "
    "model_context_window_exceeded max_context_length incomplete continuation",
    # Failed: the server stopped in the middle. SGLang, LMDeploy and vLLM (abort), DeepSeek
    # (insufficient_system_resource), Zhipu (network_error), Cohere (user_cancel, timeout), OpenRouter (error).
    FAILED: "abort aborted error errored failed failure insufficient_system_resource network_error connection_error "
    "engine_error internal_error internal_server_error server_error system_error upstream_error provider_error "
    "service_unavailable overloaded unavailable timeout timed_out cancelled canceled user_cancel user_cancelled "
    "preempted out_of_memory",
    # Good: the answer is complete. After "pause_turn" Claude continues if it gets the answer back.
    "tool_calls": "tool_calls tool_call tool_use",
    "function_call": "function_call",
    "pause_turn": "pause_turn",
    "stop": "stop end_turn stop_sequence eos eos_token complete completed unspecified",
}
_NORMAL: Final = {name: normal for normal, names in _NAMES.items() for name in names.split()}
#: What a server cannot express with "stop", and therefore reports in a separate field.
_NATIVE: Final = frozenset({MALFORMED, REFUSAL, FILTERED, LENGTH, FAILED})
_WORD_START: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_BETWEEN: Final = re.compile(r"[^a-z0-9_\- ]+")
_SEPARATORS: Final = re.compile(r"[_\- ]+")


def normal_reason(reason: Any) -> str:
    """Return a finish reason in OpenAI's words: "length" for `MAX_TOKENS`. Other reasons stay as they are."""
    if type(reason) is str and (known := _NORMAL.get(reason)) is not None:  # most answers
        return known
    text = str(reason.value if isinstance(reason, Enum) else reason or "")
    # str() of some enums is "FinishReason.SAFETY", and some gateways return two words.
    words = _BETWEEN.split(_WORD_START.sub("_", text).lower())
    found = {_NORMAL.get(_SEPARATORS.sub("_", word).strip("_").removeprefix("finish_reason_")) for word in words}
    return next((normal for normal in _NAMES if normal in found), text)


def is_known(reason: str) -> bool:
    """Return whether a normalized finish reason is one of the table."""
    return reason in _NAMES


def reason_of(reported: Any, native: Any) -> str:
    """Return the normalized finish reason of a choice.

    Args:
        reported: Its finish reason.
        native: The word of the model's provider, if a gateway passes it on.
    """
    reason, own = normal_reason(reported), normal_reason(native)
    return own if reason == "stop" and own in _NATIVE else reason


def native_reason(choice: Mapping[str, Any]) -> Any:
    """Return the word of the model's provider that OpenRouter and litellm pass on."""
    fields = choice.get("provider_specific_fields")
    return choice.get("native_finish_reason") or (
        fields.get("native_finish_reason") if isinstance(fields, Mapping) else None
    )
