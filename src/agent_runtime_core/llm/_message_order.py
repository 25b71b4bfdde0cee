"""Arrange messages for servers with a strict chat template: pure functions that leave their argument unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Final

from .._core.arguments import SYSTEM_ROLES
from ._openai_format import is_empty

Messages = Sequence[Mapping[str, Any]]
#: What the model says between the result of a tool and a message of the user.
_ACKNOWLEDGED: Final = {"role": "assistant", "content": "OK."}


def merged(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with consecutive ones of the user, or of the model, as one message."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if is_empty(message):
            continue  # it is not sent, so the messages around it follow each other
        before = found[-1] if found else {}
        role = message.get("role")
        if role in ("user", "assistant") and role == before.get("role") and not before.get("tool_calls"):
            found[-1] = {**before, **message, "content": joined(_content(before), _content(message))}
        else:
            found.append(dict(message))
    return found


def with_one_system_message(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with the contents of all system messages in one at the beginning."""
    system = [dict(each) for each in messages if each.get("role") in SYSTEM_ROLES]
    rest = [dict(each) for each in messages if each.get("role") not in SYSTEM_ROLES]
    if not system:
        return rest
    return [{**system[0], "content": reduce(joined, map(_content, system))}, *rest]


def without_system_messages(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with the system messages as text of the user."""
    return merged([{**each, "role": "user"} if each.get("role") in SYSTEM_ROLES else each for each in messages])


def with_answers_to_results(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with one of the model between the result of a tool and a message of the user."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if is_empty(message):
            continue
        if message.get("role") == "user" and found and found[-1].get("role") == "tool":
            found.append(dict(_ACKNOWLEDGED))
        found.append(dict(message))
    return found


def joined(first: Any, second: Any) -> Any:
    """Return two contents as one: texts with an empty line between them, parts in one list."""
    if isinstance(first, list) or isinstance(second, list):
        return [*_parts(first), *_parts(second)]
    return "\n\n".join(_text(each) for each in (first, second) if each)


def _content(message: Mapping[str, Any]) -> Any:
    return message.get("content") or message.get("refusal")


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": _text(content)}] if content else []


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
