"""Translate error answers and exceptions of providers."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from html import unescape
from typing import Any

from .._core.log import log
from ..errors import (
    AuthenticationFailed,
    ContextOverflow,
    ModelNotFound,
    ProviderError,
    ProviderTimeout,
    ProviderUnavailable,
    RateLimited,
    RequestRefused,
    brief,
)
from ._finish_reasons import ANNOUNCING, FAILED, FILTERED, LENGTH, MALFORMED, REFUSAL, is_known

#: Fields that have the words, or an object with the words; the most specific first.
_NAMES = (
    "message", "error_message", "errormessage", "msg", "status_msg", "faultstring", "detail", "details",
    "error_description", "description", "reason", "error", "errors", "fault", "base_resp", "raw", "metadata", "title",
)  # fmt: skip
#: Fields with the words of an error in a successful answer without the field `error`.
ERROR_FIELDS = (
    "message", "Message", "detail", "errors", "msg", "error_msg", "errmsg", "error_message", "errorMessage", "fault",
    "title",
)  # fmt: skip
#: Fields that name the error, if there are no words.
_CODES = ("code", "type", "status")
#: Levels of objects in objects and JSON in strings that are read.
_DEPTH = 8
#: Characters of a body that are read, and of the words that are returned.
_LONGEST_BODY = 50_000
_LONGEST = 2_000
#: Errors of a list that are returned.
_MOST = 5
# Control characters and marks of text direction can change what a terminal shows.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]+")

_HIDDEN = re.compile(r"<(?:script|style)\b", re.I)
_HIDDEN_END = re.compile(r"</(?:script|style)\s*>", re.I)
_TAG = re.compile(r"<[^<>]*>")


def words_of(body: Any) -> str:
    """Return the words in the body of an error, "" if there are none.

    Args:
        body: Text (JSON, HTML or plain), or parsed JSON.
    """
    found: list[str] = []
    for each in _words(body, _DEPTH):
        text = " ".join(_CONTROL.sub(" ", each).split())
        if text and not any(text in known for known in found):
            found.append(text)
        if len(found) == _MOST:
            break
    return "; ".join(found)[:_LONGEST]


def _words(body: Any, depth: int) -> Iterator[str]:
    if depth <= 0:
        return
    if isinstance(body, str):
        yield from _in_text(body[:_LONGEST_BODY].strip(), depth)
    elif isinstance(body, list):
        for each in body[:_MOST]:
            yield from _words(each, depth - 1)
    elif isinstance(body, Mapping):
        yield from _in_object(body, depth)


def _in_text(text: str, depth: int) -> Iterator[str]:
    if text[:1] in ("{", "[", '"'):
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            yield text
        else:
            yield from _words(parsed, depth - 1)
    elif text[:1] == "<" or "<html" in text[:500].lower():
        yield _without_tags(text)
    else:
        yield text


def _in_object(body: Mapping[Any, Any], depth: int) -> Iterator[str]:
    fields = {str(name).lower(): value for name, value in body.items()}
    where = fields.get("loc")
    prefix = ".".join(map(str, where)) + ": " if isinstance(where, list) and where else ""
    some = False
    for name in _NAMES:
        for words in _words(fields.get(name), depth - 1):
            some = some or bool(words)
            yield prefix + words
    if some or depth < _DEPTH - 2:
        return
    if codes := [f"{name} {fields[name]}" for name in _CODES if fields.get(name)]:
        yield ", ".join(codes)
    else:
        # The errors of a form have the fields of the request as names.
        for name, value in fields.items():
            for words in _words(value, depth - 1):
                yield f"{name}: {words}"


def _without_tags(text: str) -> str:
    """Return the text of an HTML page."""
    first, *rest = _HIDDEN.split(text)
    shown = [first] + [part[end.end() :] for part in rest if (end := _HIDDEN_END.search(part))]
    return unescape(_TAG.sub(" ", " ".join(shown)))


#: Errors in a chain of causes that are searched for the server's answer.
_CAUSES = 5
_TRANSPORTS = frozenset({"httpx", "httpx2", "httpcore", "httpcore2", "aiohttp"})
#: The words of each server for a request that exceeds the context window.
_TOO_LONG = re.compile(
    "|".join(
        (
            # OpenAI, DeepSeek, vLLM, llama.cpp, Groq, OpenRouter, Fireworks, LM Studio, Ollama, SGLang, Mistral
            r"context[ _-]?(length|window|limit|size|overflow)|maximum context|reached context",
            # xAI, vLLM, Copilot, GitHub Models
            r"max(imum)? (prompt|model|input) (length|tokens)|model_max_prompt_tokens|max_model_len",
            r"tokens_limit_reached|request body too large",
            # Anthropic, Bedrock, Fireworks, Ollama, Zhipu
            r"(prompt|input|request|conversation|messages?) (is|are|was) (too (long|large)|longer than)",
            r"prompt too long|prompt exceeds max length|too many (input |prompt )?tokens|input tokens exceeded",
            # Gemini, Vertex AI, OpenAI, Copilot, TensorRT-LLM, watsonx
            r"\b(input|prompt) (tokens?|length|token count)\b.{0,60}\b(exceeds?|cannot exceed|only supports up to)\b",
            r"number of input tokens",
            # Cohere, TGI, Together
            r"total number of tokens.{0,40}cannot exceed|inputs`? tokens \+ `?max_new_tokens",
            r"inputs`? must have less than",
            # Groq, Cerebras, Mistral, Moonshot, DashScope, Bedrock, OpenAI
            r"reduce the length of the (messages|prompt|input)|too large for model with|exceeded model token limit",
            r"range of input length|expected maxlength|messages\[\d+\]\.content.{0,40}string too long",
            # Moonshot, Hugging Face, MiniMax, Stepfun
            r"(prompt|conversation|context|messages?) too (long|large)|input too long",
            r"model'?s context|max(imum)? context",
            r"\b(messages?|prompt)\b.{0,40}\btokens?,? .{0,20}exceeds?\b|tokens in the (prompt|messages?) exceeds?",
            r"(expected )?input length to be at most|sequence length exceeds|max message tokens",
            r"\btoken limit exceeded|tokens in request more than max tokens",
        )
    ),
    re.I,
)
#: The limit of the answer is too large. Shorter messages would not help.
_ANSWER_LIMIT = re.compile(r"maximum value for [`'\"]?max_(completion_)?tokens", re.I)
#: OpenAI and Groq report a request that is larger than the limit of a whole minute as too many requests.
_LARGER_THAN_A_MINUTE = re.compile(r"request too large for\b.{0,200}\b(must be reduced|reduce)", re.I)
_OVERFLOW_STATUSES = (None, 400, 413, 422, 500, 502)
#: The model wrote a call or JSON that its server cannot read. It mostly writes a correct one the next time.
_UNREADABLE = re.compile(
    r"tool_use_failed|json_validate_failed|output_parse_failed|malformed_(function|tool)_call"
    r"|error parsing tool call|failed to (call a function|generate json|validate json|generate tool|parse tool call)"
    r"|tool call validation failed|produced (an )?invalid (content|sequence|output|tool)",
    re.I,
)
_NO_MODEL = re.compile(r"model_not_found|model\b.{0,80}\b(does not exist|not found)", re.I)
#: These have status 429, but a later request fails too.
_QUOTA_CODES = frozenset({"insufficient_quota", "billing_hard_limit_reached", "credit_exhausted"})
#: The words of each server for what is exhausted until the next month or payment. Not the words of an offer, such
#: as "Upgrade for $20 per month" of Groq and others.
_USED_UP = re.compile(
    "|".join(
        (
            # Anthropic, Gemini, xAI, GitHub Models, OpenRouter, Volcengine, Zhipu
            r"\bmonthly[^.!?$]{0,40}\b(limit|quota|cap|budget|allowance|allocation|usage|credits?)\b",
            # Cohere, gateways
            r"\b(limit(ed)?|quota|cap|calls|requests|tokens|budget|credits?)\b[^.!?$]{0,40}"
            r"(\bper|/|\bthis|\bfor the|\ba) ?(calendar )?month\b",
            # Anthropic, Moonshot, gateways
            r"\bspend(ing)?[ _-](limit|cap)\b|\bspecified (api )?usage limits?\b|\bbilling[ _](hard[ _]limit|cycle)\b",
            # Anthropic, OpenRouter, xAI, Moonshot, MiniMax, Zhipu
            r"\bcredit balance\b|\ball available credits\b|余额不足",
            r"\b(insufficient|out of|exhausted|no (more|remaining|available))[ _](your )?(account )?"
            r"(balance|credits?|funds|quota)\b",
        )
    ),
    re.I,
)
# Servers repeat keys in their errors, completely or in part.
_SHORTEST_KEY = 8
_KEY = re.compile(
    r"\b(sk|pk|rk|key)-[\w*.\-]{4,}|(?<=Bearer )\S+"
    r"|\b(gsk_|hf_|r8_|xai-|csk-|nvapi-|pplx-|fw_|AIza|AKIA|ya29\.)[\w*.\-]{8,}"
)
# Unknown finish reasons that were logged.
_logged: set[str] = set()
# litellm puts its own names before the words of the server.
_LITELLM = re.compile(r"^litellm\.\w+: (\w+: )?(\w+Exception - )?")


def translated(
    error: Exception, provider: str, model: str, packages: tuple[str, ...], key: str = ""
) -> ProviderError | None:
    """Return the ProviderError for an error of an SDK in `packages` or of a transport; None for any other error.

    Its message does not contain the key.
    """
    if isinstance(error, ProviderError):
        return error
    message = without_keys(_words_in(error), key)
    top = type(error).__module__.partition(".")[0]
    result: ProviderError
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        result = ProviderUnavailable("the answer is not JSON")
    elif top in _TRANSPORTS or isinstance(error, ConnectionError):
        result = _transport_error(error, message)
    elif top not in packages:
        return None
    elif "Timeout" in type(error).__name__ or "Connection" in type(error).__name__:
        if is_too_long(None, message):
            # litellm reports an error in the middle of a stream as a failed connection.
            return of_status(None, message, message, provider, model)
        result = _transport_error(error, without_keys(str(error.__cause__), key) if error.__cause__ else message)
    else:
        status = getattr(error, "status_code", None)
        kind = without_keys(str(getattr(error, "type", None) or ""), key)
        code = without_keys(str(getattr(error, "code", None) or ""), key) or kind
        if not isinstance(status, int) or status < 400:
            status = _status_of(code)
        return of_status(status, f"{code} {kind} {message}", message, provider, model, code, _headers(error))
    result.provider, result.model = provider, model
    return result


def _words_in(error: Exception) -> str:
    """Return the words of the server, or the words of the SDK if the server sent none."""
    cause: BaseException | None = error
    # The cause of litellm's error is the SDK's error with the answer.
    for _ in range(_CAUSES):
        if cause is None:
            break
        if words := words_of(_body_of(cause)):
            return words
        cause = cause.__cause__ or cause.__context__
    message = str(getattr(error, "message", None) or error)
    return words_of(_LITELLM.sub("", message)) or message


def _body_of(error: BaseException) -> Any:
    """Return the body of the error's answer; the SDK's own copy of it lacks all but one field of some shapes."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    text = None
    if isinstance(status, int) and status >= 400:
        with contextlib.suppress(Exception):  # the answer was not read
            text = response.text  # type: ignore[union-attr]
    return text if isinstance(text, str) and text.strip() else getattr(error, "body", None)


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
    if kind is RequestRefused and _UNREADABLE.search(evidence):
        error.retriable = True
    is_used_up = code in _QUOTA_CODES or (status in (None, 429) and _USED_UP.search(evidence))
    if is_used_up or should == "false":
        error.retriable = False
    elif should == "true":
        error.retriable = True
    return error


def require_answer(
    message: Mapping[str, Any], reason: str, word: Any, *, no_tokens: bool, provider: str, model: str
) -> None:
    """Raise the error of an answer that is none; log an unknown finish reason once per process.

    Args:
        message: The message of the answer.
        reason: Why it ended, normalized.
        word: The word of the provider for it.
        no_tokens: Whether the provider reported that the answer contains no tokens.
        provider: The name of the provider.
        model: The model that answered.
    """
    if reason == MALFORMED:
        raise _unusable("the model wrote a malformed tool call", provider, model)
    ended = f"finish_reason {brief(word)}"
    if reason == FAILED:
        raise ProviderUnavailable(f"the provider ended the answer with {ended}", provider=provider, model=model)
    if reason in (LENGTH, REFUSAL, FILTERED):
        return
    calls, text = message.get("tool_calls"), message.get("content")
    if no_tokens and not (calls or text or message.get("provider_fields")):
        words = f"the answer has no text, no tool call and no tokens ({ended})"
        raise ProviderUnavailable(words, provider=provider, model=model)
    if reason in ANNOUNCING and not calls:
        raise _unusable(f"the answer announces a tool call and contains none ({ended})", provider, model)
    if is_known(reason):
        return
    if calls or (message.get("metadata") or {}).get("truncated_tool_call"):
        raise _unusable(f"the answer has a tool call and ended with the unknown {ended}", provider, model)
    if not text:
        raise _unusable(f"the answer has no text and ended with the unknown {ended}", provider, model)
    if reason not in _logged:
        _logged.add(reason)
        log.warning("%s, model %r: unknown %s. The answer counts as complete", provider, model, ended)


def _unusable(words: str, provider: str, model: str) -> ProviderError:
    """Return the error for an answer of a working provider that cannot be used; another answer may be better."""
    error = RequestRefused(words, provider=provider, model=model)
    error.retriable = True
    return error


def is_too_long(status: int | None, evidence: str) -> bool:
    """Return whether a request was rejected because it exceeds the context window.

    Args:
        status: The HTTP status; None if the error is a part of an answer.
        evidence: Code, type and words of the error.
    """
    if status == 429:
        return bool(_LARGER_THAN_A_MINUTE.search(evidence))
    if status not in _OVERFLOW_STATUSES or _ANSWER_LIMIT.search(evidence):
        return False
    return bool(_TOO_LONG.search(evidence))


def _kind(status: int | None, evidence: str) -> type[ProviderError]:
    if status == 413 or is_too_long(status, evidence):
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
        ("tool_use_failed", 400),
        ("validate_failed", 400),
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
