"""Leave out the contents of an exported run, so that the file can be attached to a public ticket.

A list of names says what stays. A field that is on no list is left out, so a new field does not publish anything until
somebody decides about it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any, Final


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: What an exported file has in place of a content.
LEFT_OUT: Final = "[left out]"

#: Fields that stay: states, times, counts, numbers, ids that this library made, and types.
KEPT: Final = _words(
    "action agent agent_key asked_at at attempt attempts cancel_requested child_run_id cost_usd created_at deadline "
    "duration_ms ended_at ev generation kind model ms nev next next_step number parent pos priority "
    "queued_behind_key request_id run_id scheduled_at seq sequence started_at state status step_id step_number "
    "time tokens tool tool_name total total_steps trace_id tries updated_at"
)
#: Fields with fields of their own, or lists of such values.
NESTED: Final = _words("actions attempts children edges items nodes questions steps waiting_for")
#: Of these, all numbers stay.
COUNTS: Final = frozenset({"limits", "usage"})
#: Of these, the types stay.
ERRORS: Final = frozenset({"error", "error_info"})
#: Fields of a record of the journal that stay. Its `state` is a checkpoint, and so a content.
RECORD: Final = _words("seq kind claim_id attempt time pos total tries ms ev nev step_id name key")
#: What the caller chose, and a person may recognize. A hash shows which of them are the same.
HASHED: Final = _words("by concurrency_key conversation_id idempotency_key list worker")
#: Objects of the caller. A page may read their fields.
_OBJECTS: Final = frozenset({"metadata", "payload"})
#: Names of tools. A model may call a tool that does not exist, under any name.
_TOOLS: Final = frozenset({"label", "tool", "tool_name"})
_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TYPE: Final = re.compile(r"[\w.:-]{1,120}")
_NUMBERS: Final = r"\d{1,3}(?::\d{1,3})*(?:@[0-9a-f]{16})?"
_STEP_KEY: Final = re.compile(rf"((?:[a-z]:)*):?(?:{_NUMBERS})?")
_ITEM: Final = re.compile(r"\[(.*)\]", re.DOTALL)


def short_hash(text: str) -> str:
    """Return `#` and eight characters that are the same for the same text."""
    return f"#{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def redacted_answers(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answers of an exported file without contents.

    Args:
        answers: The answer of the API by its path, such as `runs/ID/events`.
    """
    found = {}
    for path, answer in answers.items():
        part = path.split("/")[2:3]
        if path == "about":
            found[path] = answer
        elif part == ["messages"]:
            found[path] = {**answer, "items": [_message(each) for each in answer["items"]]}
        elif part == ["journal"]:
            found[path] = {**answer, "items": [_record(each) for each in answer["items"]]}
        else:
            found[path] = _fields(answer)
    return found


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _field(name, value, values) for name, value in values.items()}


def _field(name: str, value: Any, owner: Mapping[str, Any]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if name in ERRORS and isinstance(value, Mapping):
        return _error(value)
    if name == "records" and isinstance(value, list):
        return [_record(each) for each in value]
    if name in COUNTS and isinstance(value, Mapping):
        return _counts(value)
    if name in NESTED and isinstance(value, Mapping):
        return _fields(value)
    if name in NESTED and isinstance(value, list):
        return [_fields(each) if isinstance(each, Mapping) else _left_out(each) for each in value]
    if name in _TOOLS and isinstance(value, str) and (name != "label" or owner.get("kind") == "tool"):
        return _type(value)
    if name in _TEXTS and isinstance(value, str):
        return _TEXTS[name](value)
    if name == "key":
        return short_hash(value) if "run_id" in owner else _step_key(value)
    if name in KEPT and isinstance(value, str | int | float):
        return value
    return _left_out(value, name)


def _record(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _error(value) if name in ERRORS and isinstance(value, Mapping)
        else _field(name, value, record) if name in RECORD else _left_out(value)
        for name, value in record.items()
    }  # fmt: skip


def _counts(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers under their names; the names of a nested object are those of models."""
    return {
        name: _counts(each) if isinstance(each, Mapping) else each if isinstance(each, int | float) else _left_out(each)
        for name, each in value.items()
    }


def _error(error: Mapping[str, Any]) -> dict[str, Any]:
    kind = error.get("type")
    return {"type": _type(kind) if isinstance(kind, str) else None, "message": LEFT_OUT}


def _left_out(value: Any, name: str = "") -> Any:
    if value is None:
        return None
    return {} if name in _OBJECTS else LEFT_OUT


def _step_key(key: str) -> str:
    """Return a step key with its kind. The numbers that this library counts stay."""
    found = _STEP_KEY.match(key)
    if found is None or found.end() == len(key):
        return key
    prefix = found[1]
    return prefix + short_hash(key.removeprefix(prefix))


def _name(name: str) -> str:
    """Return the name of a step. The item of a map, as in `send[anna@example.com]`, is a value."""
    return _ITEM.sub(lambda item: f"[{_step_key(item[1])}]", name)


def _type(text: str) -> str:
    return text if _TYPE.fullmatch(text) else LEFT_OUT


def _message(message: Any) -> Any:
    """Return a message in chat format: who wrote it, and the names of the tools that it calls."""
    if not isinstance(message, Mapping):
        return LEFT_OUT
    role = message.get("role")
    found: dict[str, Any] = {"role": role if role in _ROLES else LEFT_OUT, "content": LEFT_OUT}
    if message.get("invalidated") is True and isinstance(attempt := message.get("attempt"), int):
        found |= {"invalidated": True, "attempt": attempt}  # text of an attempt that failed
    if isinstance(call := message.get("tool_call_id"), str):
        found["tool_call_id"] = short_hash(call)
    if isinstance(calls := message.get("tool_calls"), list):
        found["tool_calls"] = [_call(each) for each in calls if isinstance(each, Mapping)]
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "function"}
    if isinstance(each := call.get("id"), str):
        found["id"] = short_hash(each)
    function = call.get("function")
    if isinstance(name := (function if isinstance(function, Mapping) else call).get("name"), str):
        found["function"] = {"name": _type(name), "arguments": LEFT_OUT}
    return found


_TEXTS: Final[dict[str, Callable[[str], str]]] = {
    "name": _name, "label": _name, "reason": _name, "from": _name, "to": _name, "id": _name, "type": _type,
    **dict.fromkeys(HASHED, short_hash),
}  # fmt: skip
