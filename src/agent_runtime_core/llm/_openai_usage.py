"""Token counts of a chat completion under this library's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from ..limits import sum_usd, usd_of

#: Digits of a count; more would be no count of tokens.
_MOST_DIGITS = 15


def usage_of(reported: Mapping[str, Any] | None, *, answered: bool = False) -> dict[str, int]:
    """Return the token counts of an answer, never fewer than the server reports in any of its fields.

    Counts that were not reported are missing, so that they can be estimated.

    Args:
        reported: The usage in the answer.
        answered: Whether the answer contains text or tool calls, so that 0 output tokens mean an unknown number.
    """
    if not isinstance(reported, Mapping):
        return {}
    details = _details(reported, "prompt") | _details(reported, "input")
    read = _first(
        details.get("cached_tokens"),
        reported.get("cache_read_input_tokens"),
        reported.get("prompt_cache_hit_tokens"),
        reported.get("cached_tokens"),
    )
    by_age = details.get("cache_creation_token_details") or reported.get("cache_creation")
    written = _first(
        details.get("cache_write_tokens"),
        details.get("cache_creation_tokens"),
        reported.get("cache_creation_input_tokens"),
        sum_of(by_age) or None,
    )
    out_details = _details(reported, "completion") | _details(reported, "output")
    reasoning = _first(out_details.get("reasoning_tokens"), reported.get("reasoning_tokens"))
    prompt = most(reported.get("prompt_tokens"), reported.get("input_tokens"))
    completion = most(reported.get("completion_tokens"), reported.get("output_tokens"))
    total = count_of(reported.get("total_tokens"))
    if not (prompt or completion or total):
        return {}  # litellm reports zeros if the server reports nothing
    prompt, completion = _split(prompt, completion, total, (read or 0, written or 0), reasoning or 0)
    if answered and not completion:
        completion = None
    counts = known_counts(prompt, completion, total, read, written, reasoning)
    return counts | further_counts(by_age, reported.get("server_tool_use"))


def cost_of(reported: Mapping[str, Any] | None) -> float | None:
    """Return the cost in USD that the server reports with the usage, as OpenRouter does; None if there is none."""
    cost = reported.get("cost") if isinstance(reported, Mapping) else None
    if not isinstance(reported, Mapping) or not _is_cost(cost):
        return None
    details = reported.get("cost_details")
    # With a key of the user, the provider sends its own bill.
    upstream = details.get("upstream_inference_cost") if isinstance(details, Mapping) else None
    return sum_usd(cost, upstream) if reported.get("is_byok") and _is_cost(upstream) else usd_of(cost)


def _is_cost(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def further_counts(by_age: Any, tools: Any) -> dict[str, int]:
    """Return the counts of an answer that cost more than its tokens: cache writes of one hour, web searches.

    Args:
        by_age: Written tokens by their age, in Anthropic's names.
        tools: How often tools on the provider's side were used, in Anthropic's names.
    """
    hour = count_of(by_age.get("ephemeral_1h_input_tokens")) if isinstance(by_age, Mapping) else None
    searches = count_of(tools.get("web_search_requests")) if isinstance(tools, Mapping) else None
    counts = {"cache_write_1h_tokens": hour, "web_search_requests": searches}
    return {name: count for name, count in counts.items() if count}


def reports_no_tokens(reported: Any) -> bool:
    """Return whether a usage states that the answer contains no tokens. A usage without numbers states nothing."""
    if not isinstance(reported, Mapping):
        return False
    written = most(reported.get("completion_tokens"), reported.get("output_tokens"))
    if written is None:
        return count_of(reported.get("total_tokens")) == 0
    return written == 0 and not usage_of(reported).get("completion_tokens")


def known_counts(
    prompt: int | None, completion: int | None, total: int | None, read: int | None, written: int | None,
    reasoning: int | None,
) -> dict[str, int]:  # fmt: skip
    """Return the counts that are not None. If the server does not report both parts of `total`, its total is used."""
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": total if prompt is None or completion is None else prompt + completion,
        "cached_tokens": read,
        "cache_write_tokens": written,
        "reasoning_tokens": reasoning,
    }
    return {name: count for name, count in counts.items() if count is not None}


def _split(
    prompt: int | None, completion: int | None, total: int | None, cached: tuple[int, int], reasoning: int
) -> tuple[int | None, int | None]:
    """Return prompt and completion tokens, with counts that only another field contains."""
    if total and prompt is None:
        prompt = max(total - completion, 0) if completion else 0
    if total and completion is None:
        completion = max(total - (prompt or 0), 0)
    if prompt is None or completion is None:
        return prompt, completion
    beyond = (total or 0) - prompt - completion
    if sum(cached) and beyond in (*cached, sum(cached)) and beyond > 0:
        # The prompt is counted without cached tokens.
        prompt += beyond
    elif beyond > 0:
        # Gemini and others count reasoning only in the total.
        completion += beyond
    if sum(cached) > prompt:
        prompt += sum(cached)
    if reasoning > completion:
        completion += reasoning
    return prompt, completion


def merged_usage(known: Mapping[str, Any] | None, reported: Any) -> Mapping[str, Any] | None:
    """Return the usage of a stream after a further report; the largest of each count, since counts only grow."""
    if not isinstance(reported, Mapping):
        return known
    merged = dict(known or {})
    for name, value in reported.items():
        previous = merged.get(name)
        if isinstance(value, Mapping):
            merged[name] = merged_usage(previous if isinstance(previous, Mapping) else None, value)
        elif isinstance(value, int | float) and isinstance(previous, int | float):
            merged[name] = max(previous, value)
        elif value is not None:
            merged[name] = value
    return merged


def _details(reported: Mapping[str, Any], kind: str) -> dict[str, Any]:
    found = reported.get(f"{kind}_tokens_details")
    return {name: value for name, value in found.items() if value is not None} if isinstance(found, Mapping) else {}


def _first(*counts: Any) -> int | None:
    return next((count for count in map(count_of, counts) if count is not None), None)


def sum_of(counts: Any) -> int:
    """Return the sum of the counts in a mapping; 0 for any other value."""
    return sum(count_of(count) or 0 for count in counts.values()) if isinstance(counts, Mapping) else 0


def most(*counts: Any) -> int | None:
    return max((count for count in map(count_of, counts) if count is not None), default=None)


def count_of(value: Any) -> int | None:
    """Return a count that a server reported, as a number or as text; None for anything else."""
    if isinstance(value, str):
        return int(value) if value.isdecimal() and len(value) <= _MOST_DIGITS else None
    return int(value) if isinstance(value, int | float) and 0 <= value < math.inf else None
