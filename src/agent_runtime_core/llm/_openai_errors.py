"""What an error of the openai package (litellm's are subclasses), or of the transport below it, means."""

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
#: No waiting helps against these, though they come as 429.
_SPENT = frozenset({"insufficient_quota", "billing_hard_limit_reached", "credit_exhausted"})
# Keys are echoed by servers, wholly or in part.
_SHORTEST_KEY = 8
_KEY = re.compile(r"\b(sk|pk|rk|key)-[\w*.\-]{4,}|(?<=Bearer )\S+")


def translated(
    error: Exception, provider: str, model: str, packages: tuple[str, ...], key: str = ""
) -> ProviderError | None:
    """The error of ours for one of an SDK in `packages` or of a transport, without the key; None for any other."""
    if isinstance(error, ProviderError):
        return error
    said = without_keys(_said(error), key)
    top = type(error).__module__.partition(".")[0]
    told: ProviderError
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        told = ProviderUnavailable("the answer is not JSON")
    elif top in _TRANSPORTS or isinstance(error, ConnectionError):
        told = _of_transport(error, said)
    elif top not in packages:
        return None
    elif "Timeout" in type(error).__name__ or "Connection" in type(error).__name__:
        told = _of_transport(error, without_keys(str(error.__cause__), key) if error.__cause__ else said)
    else:
        status = getattr(error, "status_code", None)
        code = without_keys(str(getattr(error, "code", None) or getattr(error, "type", None) or ""), key)
        if not isinstance(status, int) or status < 400:
            status = _status_of(code)
        return of_status(status, f"{code} {said}", said, provider, model, code, _headers(error))
    told.provider, told.model = provider, model
    return told


def _said(error: Exception) -> str:
    body = getattr(error, "body", None)
    inner = body.get("message") if isinstance(body, Mapping) else None
    return str(inner or getattr(error, "message", None) or error)


def _of_transport(error: Exception, said: str) -> ProviderError:
    if "Timeout" in type(error).__name__:
        return ProviderTimeout("no connection or no answer in time")
    return ProviderUnavailable(f"the connection failed: {said or type(error).__name__}")


def of_status(
    status: int | None,
    evidence: str,
    said: str,
    provider: str,
    model: str,
    code: str = "",
    headers: Mapping[str, str] | None = None,
) -> ProviderError:
    """The error for an HTTP status; `evidence` is what tells a request that is too long from others."""
    headers = headers or {}
    kind = _kind(status, evidence)
    wait = retry_after(headers)
    error = kind(
        f"said {status or code or 'error'}: {said}",
        provider=provider,
        model=model,
        status=status,
        code=code,
        retry_after=wait,
    )
    should = headers.get("x-should-retry")
    if code in _SPENT or should == "false":
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
    # 409 is a lock at the provider that somebody else holds.
    if status is None or status >= 500 or status == 409:
        return ProviderUnavailable
    return RequestRefused


def _status_of(code: str) -> int | None:
    """The HTTP status for a code that came without one, in the middle of a stream; None if it blames nobody."""
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
    """Seconds to wait; a date counts from the `date` beside it, so that nobody's clock has to be right."""
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
    # litellm makes up a response, and keeps the headers of the real one beside it.
    found = getattr(error, "litellm_response_headers", None)
    found = found or getattr(getattr(error, "response", None), "headers", None) or {}
    return {str(name).lower(): str(value) for name, value in dict(found).items()}


def without_keys(text: str, key: str = "") -> str:
    """The text with the key, and what looks like one, blotted out."""
    if len(key) >= _SHORTEST_KEY:
        text = text.replace(key, "(key)")
    return _KEY.sub("(key)", text)
