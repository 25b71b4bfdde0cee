"""Translate error answers of Anthropic's API, and of proxies that answer in another format."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import unescape
from typing import Any

from ..errors import ProviderError
from ._anthropic_content import PROVIDER
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
# How Anthropic, Bedrock and Vertex word that the prompt is too long.
_TOO_LONG = re.compile(r"(prompt|input|request|conversation) is too long|input length and|context limit", re.I)
# The fields that may have the words of an error, in the order in which they are looked for.
_WORDS = ("message", "Message", "error", "errorMessage", "error_description", "detail", "msg", "reason")
_HIDDEN = re.compile(r"<(script|style|head)\b.*?</\1>", re.I | re.S)
_TAG = re.compile(r"<[^>]+>")
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.I | re.S)
_DEEPEST = 4


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
    message = without_keys(words_in(body) or fallback or kind, key)
    if status is None or status < 400:
        status = _STATUSES.get(kind) or (int(kind) if re.fullmatch("[45][0-9]{2}", kind) else None)
    evidence = f"{message} (context length)" if _TOO_LONG.search(message) else message
    return of_status(status, evidence, message, PROVIDER, model, kind, headers)


def words_in(body: Any, depth: int = 0) -> str:
    """Return the words of an error in any JSON, in HTML or in text; "" if there are none."""
    if depth > _DEEPEST:
        return ""
    if isinstance(body, str):
        return _text_in(body, depth)
    if isinstance(body, list):
        return "; ".join(words for words in (words_in(each, depth + 1) for each in body) if words)
    if isinstance(body, Mapping):
        for name in _WORDS:
            if words := words_in(body.get(name), depth + 1):
                return words
        return json.dumps(body, ensure_ascii=False, default=str) if body and not depth else ""
    return ""


def _text_in(text: str, depth: int) -> str:
    text = text.strip()
    if text[:1] in ("{", "["):
        # A proxy repeats the answer of the provider as text.
        try:
            return words_in(json.loads(text), depth + 1) or text
        except (ValueError, RecursionError):
            return text
    if text[:1] == "<":
        title = _TITLE.search(text)
        shown = " ".join(unescape(_TAG.sub(" ", _HIDDEN.sub(" ", text))).split())
        heading = " ".join(unescape(title.group(1)).split()) if title else ""
        return heading if heading and heading in shown else f"{heading} {shown}".strip()
    return text


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
