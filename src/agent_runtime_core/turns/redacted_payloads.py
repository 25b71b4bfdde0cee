"""Redact the payloads of topics. Ids, names, positions and counts stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from .._core.redaction import LEFT_OUT, Kind, Redaction
from ..errors import RedactionFailed

_KINDS: Final[Mapping[str, Kind]] = {
    "delta": "result", "details": "event", "error": "error", "messages": "message", "metadata": "input",
    "params": "input", "prompt": "message", "reasoning": "message", "result": "result", "system_prompt": "message",
    "tool_input": "input",
}  # fmt: skip


def leaving_payload(redaction: Redaction, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the payload that may leave the process. Where the hook fails, contents are left out."""

    def redacted(kind: Kind, value: Any) -> Any:
        otherwise = _without_contents(value)
        found = redaction.for_sink(kind, value, otherwise)
        return found if _has_form_of(value, found) else otherwise

    return _redacted(redacted, payload)


def stored_payload(redaction: Redaction, payload: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return the payload that may be stored.

    Raises:
        RedactionFailed: The hook failed, or returned a value that the payload cannot have.
    """

    def redacted(kind: Kind, value: Any) -> Any:
        found = redaction.stored_value(kind, value, owner)
        if not _has_form_of(value, found):
            raise RedactionFailed(kind, owner, "returned a value of another type")
        return found

    return _redacted(redacted, payload)


def _redacted(redact: Callable[[Kind, Any], Any], payload: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(payload)
    for name, kind in _KINDS.items():
        value = payload.get(name)
        if not value:
            continue
        found[name] = [redact(kind, each) for each in value] if name == "messages" else redact(kind, value)
    return found


def _without_contents(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return LEFT_OUT
    return {"role": value["role"], "content": LEFT_OUT} if "role" in value and "content" in value else {}


def _has_form_of(value: Any, found: Any) -> bool:
    if isinstance(value, Mapping):
        return isinstance(found, Mapping) and value.get("role") == found.get("role")
    return not isinstance(value, str) or isinstance(found, str)
