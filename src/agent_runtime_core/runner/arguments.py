"""What a runner is given, checked, and what it says of a run that it cannot have."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from .._core.arguments import checked_name
from .._execution.context import conversation_id
from ..config import SETTINGS
from ..errors import InvalidArgument, RunBusy, brief
from ..queue.records import RunRow
from ..tools.registry import ToolRegistry
from .settings import RunnerConfig


def check_parts(config: object, tools: object, trace_sinks: object, persistence: object) -> None:
    """InvalidArgument for what no runner can be made of, before anything is opened for it."""
    if config is not None and not isinstance(config, RunnerConfig):
        raise InvalidArgument(f"config is a RunnerConfig(...), not {type(config).__name__}")
    if tools is not None and not isinstance(tools, ToolRegistry):
        raise InvalidArgument(f"tools is a ToolRegistry, not {brief(tools)}: register(tool) each of them in one")
    SETTINGS["trace_sinks"].check("trace_sinks", trace_sinks)
    if persistence is not None and persistence != "default" and not hasattr(persistence, "homes"):
        raise InvalidArgument(
            f"persistence must be a PersistenceManager, None or 'default', got a {type(persistence).__name__}. "
            "Make one with PersistenceManager.open(path_or_url)"
        )


def check_messages(input: Any) -> None:
    """InvalidArgument for an input whose messages are no list."""
    messages = input.get("messages") if isinstance(input, Mapping) else None
    if messages is not None and not isinstance(messages, (list, tuple)):
        raise InvalidArgument(
            "the messages of an input are a list of dicts, as [{'role': 'user', 'content': 'Hello!'}], "
            f"not {brief(messages)}"
        )


def concurrency_key_of(key: str | None, input: Mapping[str, Any], parent: UUID | str | None) -> str | None:
    """The concurrency key of a run: as given, else that of its conversation.

    A child has none: its parent, which waits for it, may have the turn.
    """
    if key is not None or parent is not None or not isinstance(input, Mapping):
        return key
    conversation = input.get("conversation_id")
    if conversation is None or conversation == "":
        return None
    try:
        conversation = str(conversation)
    except Exception:  # noqa: BLE001 - nested too deeply, a number too long, or somebody else's __str__
        raise InvalidArgument(
            f"the conversation_id of an input is a UUID or a text, not {brief(conversation)}"
        ) from None
    with contextlib.suppress(ValueError):
        conversation = UUID(conversation)
    key = f"conversation:{conversation}"
    try:
        return checked_name("a concurrency key", key)
    except InvalidArgument:  # too long, or with line breaks: an id may be any text, and no user gave this key
        return f"conversation:{conversation_id(conversation)}"


def backend_label(kind: type) -> str:
    brings = ", ".join(sorted(getattr(kind, "__abstractmethods__", ())))
    return f"a {kind.__name__} (one of your own extends {kind.__name__} and brings {brings})"


def run_busy_error(outcome: str, there: RunRow) -> RunBusy:
    """What a `take` that got no claim means: the run is held, or the one in front of it has its lane."""
    worker = there.worker if there.status == "running" else None
    return RunBusy(
        there.run_key or there.run_id, worker, there.claimed_at if worker else None,
        there.lane if outcome == "behind" else None,
    )  # fmt: skip
