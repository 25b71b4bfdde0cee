"""Encode, decode and redact results of runs, for their last record, their parent's journal and their callers."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple, cast
from uuid import UUID

from .._core.codec.json import MAX_BYTES, MAX_WHOLE, decode, decode_checked, encode
from .._core.codec.typed import annotation_of
from .._core.redaction import Redaction, stored_error_text, stored_error_value
from .._core.validation import type_name
from ..errors import RedactionFailed
from ..interfaces import ErrorInfo, RunResult
from ..status import RunStatus

_ERROR = {"type": str, "message": str, "stack": str, "retriable": bool, "details": dict}


class OmittedHistory(NamedTuple):
    """Messages that a recorded result leaves out, because its conversation contains them.

    The record names them instead, so that it does not grow with the conversation.

    Attributes:
        conversation_id: The conversation.
        leaf: The id of the last of these messages.
        at: How many messages of the result come before them.
        messages: How many messages they are.
    """

    conversation_id: str
    leaf: str
    at: int
    messages: int


def error_payload(error: ErrorInfo | None) -> dict[str, Any] | None:
    """Return the fields of an error as plain values."""
    return None if error is None else {name: getattr(error, name) for name in _ERROR}


def error_in(text: str) -> ErrorInfo | None:
    """Return the error in a row of the queue. Values that are no fields of ErrorInfo are added to its details.

    Raises:
        ValueError: The text was not written by a queue.
    """
    value = decode_checked(text)
    if value is None:
        return None
    if not isinstance(value, dict):
        return ErrorInfo("Error", str(value))
    fields = {name: value[name] for name, kind in _ERROR.items() if isinstance(value.get(name), kind)}
    rest = {name: each for name, each in value.items() if name not in fields}
    details = fields.get("details", {})
    if rest:
        clash = rest.keys() & details.keys()
        details = {**rest, "details": details} if clash else {**details, **rest}
    return ErrorInfo(**{"type": "Error", "message": "", **fields, "details": details})


def result_payload(result: RunResult, before: OmittedHistory | None = None) -> dict[str, Any]:
    """Return a result as plain values. It names the messages `before` and does not contain them."""
    messages = result.final_messages
    if before is not None:
        messages = [*messages[: before.at], *messages[before.at + before.messages :]]
    payload = {
        "status": None if result.status is None else result.status._value_,
        "run_id": None if result.run_id is None else str(result.run_id),
        "final_output": result.final_output,
        "final_messages": messages,
        "usage": result.usage,
        "artifacts": result.artifacts,
        "error": error_payload(result.error),
    }
    return payload if before is None else {**payload, "before": before._asdict()}


def result_from_payload(payload: dict[str, Any]) -> RunResult:
    """Return the result that `result_payload` was made of, without the messages that the payload only names."""
    error, status, run_id = payload.get("error"), payload.get("status"), payload.get("run_id")
    return RunResult(
        final_output=payload.get("final_output") or {},
        final_messages=payload.get("final_messages") or [],
        usage=payload.get("usage") or {},
        artifacts=payload.get("artifacts") or {},
        error=None if error is None else ErrorInfo(**error),
        status=None if status is None else RunStatus(status),
        run_id=None if run_id is None else UUID(run_id),
    )


def encode_result(result: RunResult, before: OmittedHistory | None = None) -> str:
    """Encode a result, as in `result_payload`."""
    return encode(result_payload(result, before), max_bytes=MAX_WHOLE)


def decode_result(text: str) -> RunResult:
    """Decode a recorded result, as in `result_from_payload`."""
    return result_from_payload(cast("dict[str, Any]", decode(text)))


def omitted_history_in(text: str) -> OmittedHistory | None:
    """Return the messages that a recorded result names and does not contain; None if there are none."""
    before = cast("dict[str, Any]", decode(text)).get("before") if '"before":' in text else None
    return None if before is None else OmittedHistory(**before)


# -- redacted results


def redacted_result(
    redaction: Redaction, owner: str, text: str, decode: Callable[[str], object], max_bytes: int = MAX_BYTES
) -> str:
    """Return the text of a result that may be stored.

    Args:
        redaction: Calls the hook.
        owner: Whose result it is, such as a step and its run.
        text: The text of the result.
        decode: Decodes it.
        max_bytes: The size limit of the text.

    Raises:
        RedactionFailed: The hook failed, or what it returned cannot be decoded.
    """
    redacted = redaction.stored("result", text, owner, max_bytes=max_bytes, exact=True)
    if redacted == text:
        return text
    try:
        decode(redacted)
        return redacted
    except Exception:  # noqa: BLE001 - a model of the application may raise anything
        kind = annotation_of(decode)
    name = type_name(kind) if isinstance(kind, type) else str(kind)
    # Outside of the handler: the error may quote the content, and must not be the context of this error.
    raise RedactionFailed("result", owner, f"returned a value that is no {name}")


def redacted_run_result(redaction: Redaction, result: RunResult, run_id: str) -> RunResult:
    """Return the result of a run that may be stored.

    Raises:
        RedactionFailed: The hook failed.
        UnserialisableResult: The result cannot be stored.
    """
    encode_result(result)
    result, owner = copy(result), f"run {run_id}"
    result.final_output = redaction.stored_copy("result", result.final_output, owner)
    result.artifacts = redaction.stored_copy("result", result.artifacts, owner)
    result.final_messages = [redaction.stored_value("message", each, owner) for each in result.final_messages or ()]
    if result.error is not None:
        result.error = redacted_error(redaction, result.error)
    return result


def redacted_error(redaction: Redaction, error: ErrorInfo) -> ErrorInfo:
    """Return the error of a run that may be stored. Its type, and numbers in its details, stay."""
    return replace(
        error,
        message=stored_error_text(redaction, error.message),
        stack=stored_error_text(redaction, error.stack),
        details={name: _detail(redaction, each) for name, each in error.details.items()},
    )


def _detail(redaction: Redaction, value: Any) -> Any:
    return value if isinstance(value, int | float) else stored_error_value(redaction, value)
