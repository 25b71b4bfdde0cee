"""Redact the results of steps and of runs before they are stored. The agent gets the same values at once."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

from .._core.codec.json import MAX_BYTES
from .._core.codec.typed import annotation_of
from .._core.redaction import Redaction, stored_error_text, stored_error_value
from .._core.validation import type_name
from ..errors import RedactionFailed
from ..interfaces import ErrorInfo, RunResult
from .result_codec import encode_result


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
    # Outside of the handler: the error may quote the content, and is no context of this one.
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
