"""Translate error answers of Anthropic's API, and of proxies that answer in another format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ProviderError
from ._anthropic_content import PROVIDER
from ._error_text import words_of
from ._openai_errors import of_status, without_keys

# An error in the middle of a stream has the status of the stream, 200.
_STATUSES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "conflict_error": 409,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}


def error_of(
    body: Any, status: int | None, model: str, *, fallback: str = "", key: str = "", headers: Mapping[str, str]
) -> ProviderError:
    """Return the ProviderError for the body of an error answer.

    Args:
        body: The body, as JSON or text.
        status: The HTTP status; below 400 for an error in a stream or in a successful answer.
        model: The requested model.
        fallback: The message if the body has none.
        key: The API key, which is removed from the message.
        headers: The headers of the answer.
    """
    kind = _kind_in(body)
    message = without_keys(words_of(body) or fallback or kind, key)
    if status is None or status < 400:
        status = _STATUSES.get(kind) or (int(kind) if kind.isdecimal() and 400 <= int(kind) < 600 else None)
    return of_status(status, message, message, PROVIDER, model, kind, headers)


def _kind_in(body: Any) -> str:
    """Return the type of an error, or ""."""
    if isinstance(body, list):
        body = next(iter(body), None)
    if not isinstance(body, Mapping):
        return ""
    error = body.get("error")
    reported = error if isinstance(error, Mapping) else body
    kind = reported.get("type") or reported.get("status") or reported.get("code") or reported.get("__type") or ""
    return "" if kind in ("error", "message") else str(kind)
