"""Chat messages, and the check of a list of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypedDict

from .validation import must


class Message(TypedDict, total=False):
    """A chat message in OpenAI's format."""

    role: str
    content: str | list[Any] | dict[str, Any] | None
    name: str
    tool_call_id: str
    tool_calls: list[dict[str, Any]]
    metadata: dict[str, Any]


#: Two names of the role of a prompt.
SYSTEM_ROLES: Final = ("system", "developer")


def messages_in(given: Any) -> list[Any]:
    """Return the messages as a new list; InvalidArgument unless they are a list of dicts."""
    no_list = isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable)
    messages = [] if no_list else list(given)
    if no_list or not are_mappings(messages):
        raise must("messages", "be a list of dicts", given, "Example: [{'role': 'user', 'content': 'hi'}]")
    return messages


def are_mappings(values: Iterable[Any]) -> bool:
    """Return whether all values are mappings. A check of the type of each one takes several times as long."""
    return all(kind is dict or issubclass(kind, Mapping) for kind in set(map(type, values)))
