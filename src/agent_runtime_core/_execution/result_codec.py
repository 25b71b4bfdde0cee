"""How a run ended, as plain values: what its last record, its parent's journal and its callers hold."""

from __future__ import annotations

from typing import Any, NamedTuple, cast
from uuid import UUID

from .._core.codec.json import MAX_WHOLE, decode, decode_checked, encode
from ..interfaces import ErrorInfo, RunResult
from ..status import RunStatus

_ERROR = {"type": str, "message": str, "stack": str, "retriable": bool, "details": dict}


class OmittedHistory(NamedTuple):
    """Of a result's messages, those that its conversation keeps already: so many `messages` behind the first `at`.

    They end with the message `leaf`. A record names them, so that it does not grow with the conversation.
    """

    conversation_id: str
    leaf: str
    at: int
    messages: int


def error_payload(error: ErrorInfo | None) -> dict[str, Any] | None:
    return None if error is None else {name: getattr(error, name) for name in _ERROR}


def error_in(text: str) -> ErrorInfo | None:
    """What a queue was told of an error; what an ErrorInfo has no place for is among its details.

    ValueError for a text that no queue has written.
    """
    told = decode_checked(text)
    if told is None:
        return None
    if not isinstance(told, dict):
        return ErrorInfo("Error", str(told))
    fields = {name: told[name] for name, kind in _ERROR.items() if isinstance(told.get(name), kind)}
    rest = {name: value for name, value in told.items() if name not in fields}
    details = fields.get("details", {})
    if rest:
        clash = rest.keys() & details.keys()
        details = {**rest, "details": details} if clash else {**details, **rest}
    return ErrorInfo(**{"type": "Error", "message": "", **fields, "details": details})


def result_payload(result: RunResult, before: OmittedHistory | None = None) -> dict[str, Any]:
    """What is recorded of a result; without the messages of `before`, which are named in their place."""
    messages = result.final_messages
    if before is not None:
        messages = [*messages[: before.at], *messages[before.at + before.messages :]]
    payload = {
        "status": None if result.status is None else result.status.value,
        "run_id": None if result.run_id is None else str(result.run_id),
        "final_output": result.final_output,
        "final_messages": messages,
        "usage": result.usage,
        "artifacts": result.artifacts,
        "error": error_payload(result.error),
    }
    return payload if before is None else {**payload, "before": before._asdict()}


def result_from_payload(payload: dict[str, Any]) -> RunResult:
    """The inverse of `payload_of`, without the messages that it names."""
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
    return encode(result_payload(result, before), max_bytes=MAX_WHOLE)


def decode_result(text: str) -> RunResult:
    return result_from_payload(cast("dict[str, Any]", decode(text)))


def omitted_history_in(text: str) -> OmittedHistory | None:
    """The messages that a recorded result names."""
    told = cast("dict[str, Any]", decode(text)).get("before") if '"before":' in text else None
    return None if told is None else OmittedHistory(**told)
