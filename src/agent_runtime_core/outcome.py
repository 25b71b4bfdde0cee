"""How a run ended, as plain values: what its last record, its parent's journal and its callers hold."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

from ._json import MAX_WHOLE, decode, encode
from .interfaces import ErrorInfo, RunResult
from .status import RunStatus


def error_payload(error: ErrorInfo | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {
        "type": error.type,
        "message": error.message,
        "stack": error.stack,
        "retriable": error.retriable,
        "details": error.details,
    }


def payload_of(result: RunResult) -> dict[str, Any]:
    return {
        "status": None if result.status is None else result.status.value,
        "run_id": None if result.run_id is None else str(result.run_id),
        "final_output": result.final_output,
        "final_messages": result.final_messages,
        "usage": result.usage,
        "artifacts": result.artifacts,
        "error": error_payload(result.error),
    }


def result_of(payload: dict[str, Any]) -> RunResult:
    """The inverse of `payload_of`."""
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


def encode_result(result: RunResult) -> str:
    return encode(payload_of(result), max_bytes=MAX_WHOLE)


def decode_result(text: str) -> RunResult:
    return result_of(cast("dict[str, Any]", decode(text)))
