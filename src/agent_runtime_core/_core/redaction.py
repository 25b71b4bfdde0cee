"""The redaction hook of the application: what may leave the process, and with `redact_stored` what may be stored."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, cast
from weakref import WeakSet

from ..errors import RedactionFailed, UnserialisableResult
from .codec.json import MAX_BYTES, MAX_WHOLE, decode_known, encode
from .log import log

Kind = Literal["input", "result", "state", "event", "error", "message", "log"]
#: The setting `redact`. It may be called from several threads at the same time.
Hook = Callable[[str, Any], Any]

#: What a sink gets in place of a content that the hook could not redact.
LEFT_OUT: Final = "[left out]"
_INTERVAL: Final = 60.0  # seconds between two log records about a failing hook
_NO_CONTENT: Final = frozenset({"{}", "null", "[]", '""', "true", "false"})
_READY: Final = "_content_free"  # of a log record without contents


class Redaction:
    """Calls the hook of an application.

    Attributes:
        hook: The hook.
        failures: How often the hook failed for a sink or a log record.
    """

    def __init__(self, hook: Hook) -> None:
        self.hook: Hook = hook
        self.failures: int = 0
        self._logged_at = float("-inf")

    def for_sink(self, kind: Kind, value: Any, otherwise: Any = LEFT_OUT) -> Any:
        """Return what may leave the process; `otherwise` if the hook fails. The hook gets a copy of the value."""
        if value is None or value == {} or value == []:
            return value
        try:
            found = self.hook(kind, _copied(value))
        except Exception as error:  # noqa: BLE001 - the hook may raise anything
            self._failed(kind, type(error).__name__)
            return otherwise
        try:
            encode(found, max_bytes=sys.maxsize)
        except UnserialisableResult:
            self._failed(kind, "it returned a value that is not JSON")
            return otherwise
        if type(otherwise) is dict and type(found) is not dict:
            self._failed(kind, "it returned no dict for a dict")
            return otherwise
        return found

    def stored(self, kind: Kind, text: str, owner: str, *, max_bytes: int = MAX_BYTES, exact: bool = False) -> str:
        """Return the JSON text that a store may have.

        Args:
            kind: The kind of content.
            text: The JSON text of the value.
            owner: Whose content it is, such as "run" and its id.
            max_bytes: The size limit of the text.
            exact: As for `encode`.

        Raises:
            RedactionFailed: The hook failed. The error contains no content.
        """
        if text in _NO_CONTENT:
            return text
        return self._stored_text(kind, decode_known(text), owner, max_bytes, exact)

    def stored_dict(self, kind: Kind, text: str, owner: str, *, max_bytes: int = MAX_BYTES) -> str:
        """Return the JSON text of an object that a store may have. As `stored`; numbers are no contents.

        Raises:
            RedactionFailed: The hook failed, or returned no dict.
        """
        if text == "{}":
            return text
        value = decode_known(text)
        if isinstance(value, dict) and all(type(each) in (int, float) for each in value.values()):
            return text
        found = self._stored_text(kind, value, owner, max_bytes, exact=False)
        if not found.startswith("{"):
            raise RedactionFailed(kind, owner, "returned no dict for a dict")
        return found

    def stored_copy(self, kind: Kind, value: Any, owner: str) -> dict[str, Any]:
        """Return the dict that a store may have. As `stored_dict`, for a dict that is part of a text."""
        text = self.stored_dict(kind, encode(value, max_bytes=MAX_WHOLE), owner, max_bytes=MAX_WHOLE)
        return cast("dict[str, Any]", decode_known(text))

    def stored_value(self, kind: Kind, value: Any, owner: str) -> Any:
        """Return the value that a store may have. As `stored`, for a value that is part of a text."""
        if value is None or type(value) in (bool, int, float):
            return value
        return decode_known(self._stored_text(kind, _copied(value), owner, sys.maxsize, exact=False))

    def _stored_text(self, kind: Kind, value: Any, owner: str, max_bytes: int, exact: bool) -> str:
        try:
            return encode(self.hook(kind, value), max_bytes=max_bytes, exact=exact)
        except UnserialisableResult:
            reason = "returned a value that is not JSON, or too large"
        except Exception as error:  # noqa: BLE001 - the hook may raise anything
            reason = f"raised {type(error).__name__}"
        # Outside of the handler: the error of the hook may quote the content, and must not be the context of this
        # error.
        raise RedactionFailed(kind, owner, reason)

    def _failed(self, kind: Kind, reason: str) -> None:
        self.failures += 1
        if time.monotonic() - self._logged_at < _INTERVAL:
            return
        self._logged_at = time.monotonic()
        log.warning(
            "the redact hook failed for a value of kind %r: %s. Contents are left out; failures so far: %d",
            kind, reason, self.failures, extra={_READY: True},
        )  # fmt: skip


def _copied(value: Any) -> Any:
    """Return a copy that the hook may change: a run still uses the lists and dicts of its traces."""
    if isinstance(value, Mapping):
        return {name: _copied(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(each) for each in value]
    return value


# -- errors


def stored_error_text(redaction: Redaction, text: str) -> str:
    """Return the text of an error that a store may have.

    A run whose error cannot be redacted must end nevertheless, so a text takes its place.
    """
    if not text:
        return text
    try:
        found = redaction.stored_value("error", text, "an error")
    except RedactionFailed as error:
        return f"{LEFT_OUT}: {error}"
    return found if isinstance(found, str) else LEFT_OUT


def stored_error_value(redaction: Redaction, value: Any) -> Any:
    """Return a value of an error that a store may have; a text in its place if the hook fails."""
    try:
        return redaction.stored_value("error", value, "an error")
    except RedactionFailed as error:
        return f"{LEFT_OUT}: {error}"


# -- log records


class _RedactedRecords(logging.Filter):
    """Redacts the log records of this library. Other loggers are the application's own."""

    def __init__(self) -> None:
        super().__init__()
        self.by: WeakSet[Redaction] = WeakSet()

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace the message and the traceback of a record."""
        if self.by and _READY not in record.__dict__:
            self._redact(record)
        return True

    def _redact(self, record: logging.LogRecord) -> None:
        template, args = str(record.msg), record.args
        if (message := self._redacted(record.getMessage())) is None:
            # The words of the library, and numbers. The ids of the run are attributes of the record.
            kept = args.values() if isinstance(args, Mapping) else args or ()
            with suppress(TypeError, ValueError):
                template %= tuple(each if isinstance(each, int | float) else LEFT_OUT for each in kept)
            message = template
        record.msg, record.args = message, ()
        if record.exc_info:
            record.exc_text = record.exc_text or logging.Formatter().formatException(record.exc_info)
            record.exc_info = None  # a handler may send the error itself
        for name in ("exc_text", "stack_info"):
            if text := record.__dict__[name]:
                record.__dict__[name] = self._redacted(text) or LEFT_OUT

    def _redacted(self, text: str) -> str | None:
        """Return the text as all hooks return it; None if one fails."""
        found: Any = text
        for redaction in tuple(self.by):
            found = redaction.for_sink("log", found, None)
            if not isinstance(found, str):
                return None
        return cast("str", found)


_RECORDS: Final = _RedactedRecords()


def redaction_by(hook: Hook) -> Redaction:
    """Return the redaction with a hook, one for each hook. The log of this library is redacted while it is in use."""
    for each in tuple(_RECORDS.by):
        if each.hook == hook:
            return each
    found = Redaction(hook)
    _RECORDS.by.add(found)
    if _RECORDS not in log.filters:
        log.addFilter(_RECORDS)
    return found
