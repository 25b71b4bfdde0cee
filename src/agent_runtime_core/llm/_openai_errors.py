"""Translate errors of the openai package (litellm's are subclasses) and of the transport below it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

from ..errors import (
    AuthenticationFailed,
    ContextOverflow,
    ModelNotFound,
    ProviderError,
    ProviderTimeout,
    ProviderUnavailable,
    RateLimited,
    RequestRefused,
)

_TRANSPORTS = frozenset({"httpx", "httpx2", "httpcore", "httpcore2", "aiohttp"})
_TOO_LONG = re.compile(
    r"context[ _]?(length|window|limit)|maximum context|prompt is too long|too many (input )?tokens"
    r"|reduce the length",
    re.I,
)
_NO_MODEL = re.compile(r"model_not_found|model\b.{0,80}\b(does not exist|not found)", re.I)
#: These have status 429, but a later request fails too.
_QUOTA_CODES = frozenset({"insufficient_quota", "billing_hard_limit_reached", "credit_exhausted"})
# Servers repeat keys in their errors, completely or in part.
_SHORTEST_KEY = 8
_KEY = re.compile(r"\b(sk|pk|rk|key)-[\w*.\-]{4,}|(?<=Bearer )\S+")


def translated(
    error: Exception, provider: str, model: str, packages: tuple[str, ...], key: str = ""
) -> ProviderError | None:
    """Return the ProviderError for an error of an SDK in `packages` or of a transport; None for any other error.

    Its message does not contain the key.
    """
    if isinstance(error, ProviderError):
        return error
    message = without_keys(_message_in(error), key)
    top = type(error).__module__.partition(".")[0]
    result: ProviderError
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        result = ProviderUnavailable("the answer is not JSON")
    elif top in _TRANSPORTS or isinstance(error, ConnectionError):
        result = _transport_error(error, message)
    elif top not in packages:
        return None
    elif "Timeout" in type(error).__name__ or "Connection" in type(error).__name__:
        result = _transport_error(error, without_keys(str(error.__cause__), key) if error.__cause__ else message)
    else:
        status = getattr(error, "status_code", None)
        code = without_keys(str(getattr(error, "code", None) or getattr(error, "type", None) or ""), key)
        if not isinstance(status, int) or status < 400:
            status = _status_of(code)
        return of_status(status, f"{code} {message}", message, provider, model, code, _headers(error))
    result.provider, result.model = provider, model
    return result


def _message_in(error: Exception) -> str:
    body = getattr(error, "body", None)
    reported = body.get("message") if isinstance(body, Mapping) else None
    return str(reported or getattr(error, "message", None) or error)


def _transport_error(error: Exception, message: str) -> ProviderError:
    if "Timeout" in type(error).__name__:
        return ProviderTimeout("no connection or no answer in time")
    return ProviderUnavailable(f"the connection failed: {message or type(error).__name__}")


def of_status(
    status: int | None,
    evidence: str,
    message: str,
    provider: str,
    model: str,
    code: str = "",
    headers: Mapping[str, str] | None = None,
) -> ProviderError:
    """Return the error for an HTTP status; `evidence` is the text that identifies too long requests."""
    headers = headers or {}
    kind = _kind(status, evidence)
    wait = retry_after(headers)
    error = kind(
        f"{f'HTTP {status}' if status else code or 'error'}: {message}",
        provider=provider,
        model=model,
        status=status,
        code=code,
        retry_after=wait,
    )
    should = headers.get("x-should-retry")
    if code in _QUOTA_CODES or should == "false":
        error.retriable = False
    elif should == "true":
        error.retriable = True
    return error


def _kind(status: int | None, evidence: str) -> type[ProviderError]:
    if status == 413 or (status in (400, 422) and _TOO_LONG.search(evidence)):
        return ContextOverflow
    if status == 404 or (status in (400, 403) and _NO_MODEL.search(evidence)):
        return ModelNotFound
    if status in (401, 403):
        return AuthenticationFailed
    if status == 408:
        return ProviderTimeout
    if status == 429:
        return RateLimited
    # 409 is a conflict with another request at the provider.
    if status is None or status >= 500 or status == 409:
        return ProviderUnavailable
    return RequestRefused


def _status_of(code: str) -> int | None:
    """Return the HTTP status for an error code in the middle of a stream, which has no status; None if unknown."""
    if code.isdecimal() and len(code) == 3 and 400 <= int(code) < 600:
        return int(code)
    for word, status in (
        ("rate_limit", 429),
        ("insufficient_quota", 429),
        ("context_length", 400),
        ("invalid", 400),
        ("content_policy", 400),
        ("timeout", 408),
    ):
        if word in code:
            return status
    return None


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait. A date is relative to the `date` header, so clocks need not agree."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        try:
            return max(0.0, float(headers[name]) / unit)
        except (KeyError, ValueError):
            continue
    try:
        until, now = (parsedate_to_datetime(headers[name]) for name in ("retry-after", "date"))
        return max(0.0, (until - now).total_seconds())
    except (KeyError, ValueError, TypeError):
        return None


def _headers(error: Exception) -> dict[str, str]:
    # litellm creates its own response and stores the headers of the real one in another attribute.
    found = getattr(error, "litellm_response_headers", None)
    found = found or getattr(getattr(error, "response", None), "headers", None) or {}
    return {str(name).lower(): str(value) for name, value in dict(found).items()}


def without_keys(text: str, key: str = "") -> str:
    """Return the text with the key, and everything that looks like a key, replaced."""
    if len(key) >= _SHORTEST_KEY:
        text = text.replace(key, "(key)")
    return _KEY.sub("(key)", text)
