"""Errors as `application/problem+json`. No body contains a traceback, a path, a secret or a value of the caller."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .._core.log import log
from .._core.payload_codec import KEY_ID
from .._core.validation import redacted
from ..errors import (
    AgentRuntimeError,
    IdempotencyConflict,
    IllegalTransition,
    InvalidArgument,
    InvalidTurn,
    JournalMismatch,
    LeaseLost,
    NotSupported,
    RedactionFailed,
    RunBusy,
    StorageBusy,
    StorageClosed,
    StorageCorrupt,
    StorageFull,
    StorageOutdated,
    StorageTooNew,
    UnknownAgent,
    UnknownEncryptionKey,
    UnknownRun,
    UnknownTool,
    UnserialisableResult,
)

MEDIA_TYPE: Final = "application/problem+json"
RETRY_SECONDS: Final = 1  # after a busy store

#: Code and title by error class. A class that is missing has those of its nearest base class.
_CODES: Final[Mapping[type[AgentRuntimeError], tuple[int, str]]] = {
    UnknownRun: (404, "Run not found"),
    UnknownAgent: (422, "Unknown agent"),
    UnknownTool: (422, "Unknown tool"),
    InvalidArgument: (422, "Invalid value"),
    UnserialisableResult: (422, "Invalid value"),
    IdempotencyConflict: (409, "Conflict with a stored run"),
    IllegalTransition: (409, "Not possible in the run's status"),
    RunBusy: (409, "The run is executing"),
    JournalMismatch: (409, "The code does not match the run"),
    LeaseLost: (409, "The run has changed"),
    NotSupported: (409, "Not supported by the store"),
    StorageBusy: (503, "The store is busy"),
    StorageClosed: (503, "The store is closed"),
    StorageFull: (507, "The store is full"),
    RedactionFailed: (503, "Redaction failed"),
    UnknownEncryptionKey: (503, "The contents are encrypted"),
}
#: Their messages name the place of the store.
_FIXED: Final[Mapping[type[AgentRuntimeError], str]] = {
    UnknownRun: "No run has this id.",
    StorageBusy: "The store did not reply in time. Repeat the request.",
    StorageClosed: "The store is not open. Repeat the request later.",
    StorageFull: "The store has no space left.",
}
TITLES: Final = {
    400: "Bad request", 401: "Not authenticated", 403: "Not allowed", 404: "Not found", 405: "Method not allowed",
    408: "Request timeout", 409: "Conflict", 410: "Gone", 413: "Body too large", 414: "URL too long",
    415: "Unsupported media type", 421: "Wrong host", 422: "Invalid value", 429: "Too many requests",
    431: "Headers too large",
    500: "Internal error", 503: "Not available",
}  # fmt: skip


_WORDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_TO_HYPHEN: Final = re.compile(r"[^a-z0-9]+")
# What a caller sent is quoted, or follows "got". The names after "Did you mean" and "Known:" are the server's own.
_GOT: Final = re.compile(r",? got .*", re.DOTALL)
_HINT: Final = re.compile(r"(Did you mean '[^']{1,100}'\?|Known(?: answers)?: (?:[^.]|\.\w){1,500}\.)$")
_QUOTED: Final = re.compile(r"(?<!\w)b?('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")(?!\w)|(?<!\w)['\"].*", re.DOTALL)
_PATH: Final = re.compile(r"(?<![\w/:.])(?:[A-Za-z]:\\|~?/)[^\s,;]+")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,40}(\[[0-9]{1,6}\])?")
MOST_ERRORS: Final = 20  # fields that a problem names


class Problem(Exception):
    """An error response.

    Args:
        status: The HTTP status.
        title: What kind of problem it is, in a few words.
        detail: What happened, and how to fix the request.
        type: The URN of the kind of problem. By default it is made of the title.
        errors: Each invalid field with a message: `{"field", "message"}`.
        headers: Headers of the response, such as `Retry-After`.
    """

    def __init__(
        self, status: int, title: str, detail: str = "", *, type: str = "", errors: Sequence[Mapping[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.status: int = status
        self.title: str = title
        self.detail: str = detail
        self.type: str = type or f"urn:agent-runtime:{kebab(title)}"
        self.errors: list[dict[str, str]] = [dict(each) for each in errors]
        self.headers: dict[str, str] = dict(headers or {})
        super().__init__(title)

    @classmethod
    def of(cls, status: int, detail: str = "", **more: Any) -> Problem:
        """Return a problem with the usual title of a status."""
        return cls(status, TITLES.get(status, "Error"), detail, **more)

    def body(self, request_id: str) -> dict[str, Any]:
        """Return the members of the response body."""
        found: dict[str, Any] = {"type": self.type, "title": self.title, "status": self.status}
        if self.detail:
            found["detail"] = self.detail
        if self.errors:
            found["errors"] = self.errors
        return {**found, "request_id": request_id}


def kebab(words: str) -> str:
    """Return `unknown-run` for `UnknownRun` and for `Unknown run`."""
    return _TO_HYPHEN.sub("-", _WORDS.sub("-", words).lower()).strip("-")


def safe_text(message: str) -> str:
    """Return a message without the values and names in it, except the known names that it proposes."""
    hint = _HINT.search(message)
    text = message if hint is None else message[: hint.start()]
    text = _PATH.sub("…", _QUOTED.sub("…", _GOT.sub("", redacted(text)))).rstrip()
    if text and text[-1] not in ".?!…":
        text += "."
    return text if hint is None else f"{text} {hint[0]}"


def detail_of(error: Exception) -> str:
    """Return what a caller gets to know of an error."""
    if isinstance(error, UnknownEncryptionKey):  # the id is none of the caller's values
        key = error.key_id if KEY_ID.fullmatch(error.key_id) else "unknown"
        return f"The contents are encrypted with key {key}, which this server does not have."
    if isinstance(error, RedactionFailed):
        return f"The redact hook of the server failed for the {error.kind}. Nothing was stored."
    return safe_text(str(error))


def problem_of(error: Exception) -> Problem:
    """Return the problem for any error. An unexpected error gives 500, without a detail."""
    if isinstance(error, Problem):
        return error
    known = next((each for each in type(error).__mro__ if each in _CODES), None)
    if known is None:
        return Problem(500, TITLES[500], type="urn:agent-runtime:internal-error")
    status, title = _CODES[known]
    urn = f"urn:agent-runtime:{kebab(type(error).__name__)}"
    text, errors = str(error), []
    if isinstance(error, InvalidTurn):
        text = f"{field_path(error.field)}{text.removeprefix(error.field)}"
    detail = _FIXED.get(known) or (detail_of(error) if text == str(error) else safe_text(text))
    if isinstance(error, InvalidTurn):
        errors = [{"field": field_path(error.field), "message": detail}]
    headers = {"Retry-After": str(RETRY_SECONDS)} if status == 503 else None
    return Problem(status, title, detail, type=urn, errors=errors, headers=headers)


def field_path(*where: object) -> str:
    """Return the path of a field. Model names are omitted, and names that cannot be names of fields are hidden."""
    source, *parts = where if len(where) > 1 else ("", *where)
    if source == "header":
        return str(parts[-1])
    shown = [
        str(each) if isinstance(each, int) or all(map(_NAME.fullmatch, str(each).split("."))) else "…"
        for position, each in enumerate(parts, 1)
        if not (isinstance(each, str) and each[:1].isupper() and position < len(parts))
    ]
    return ".".join(shown)


def invalid(field: str, error: InvalidArgument) -> Problem:
    """Return the problem for an invalid field or parameter."""
    return invalid_field(field, safe_text(str(error)))


def invalid_field(field: str, message: str) -> Problem:
    """Return the problem for a field with a message that is safe to send."""
    return invalid_fields([{"field": field, "message": message}])


def invalid_fields(found: Sequence[Mapping[str, str]]) -> Problem:
    """Return the problem for fields that do not fit: each {"field", "message"}; the messages name the fields."""
    detail = " ".join(each["message"] for each in found[:3])
    return Problem(422, TITLES[422], detail, type="urn:agent-runtime:invalid-argument", errors=found[:MOST_ERRORS])


def log_text(error: Exception) -> str:
    """Return what is logged of an unexpected error: its type, without its message, which may quote a run.

    Errors about a damaged store, or one of another version, name the run and what to do, and no content of it.
    """
    told = redacted(str(error)) if isinstance(error, StorageCorrupt | StorageTooNew | StorageOutdated) else ""
    return f"{type(error).__name__}: {told}" if told else type(error).__name__


def report(error: Exception, request_id: str) -> None:
    """Log an unexpected error, and where it was raised."""
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("request %s failed with %s at\n%s", request_id, log_text(error), where)
