"""The conversation of a run in chat format, with tool calls and their results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from .._execution.result_codec import OmittedHistory
from .._journal.record import DONE, Record
from ..errors import InvalidArgument
from ..interfaces import SYSTEM_ROLES, RunResult
from ..persistence.jsonl import json_form
from ..queue.records import RunRow
from ..runner.conversation_history import merged_history, restore_history
from ..runner.run_client import RunClient
from .plain import plain_value
from .results import ended_record, result_in


async def messages_view(
    runner: RunClient, row: RunRow, after: int = -1, limit: int | None = None, records: Sequence[Record] | None = None
) -> dict[str, Any]:
    """Return a page of the messages of a run: {"items", "next"}.

    A finished run has the messages of its result. If it has none, and while it is executed, the messages are read from
    its conversation, its input and its journal.

    Args:
        runner: The runner on the store.
        row: The run, with its input.
        after: The index of the last message of the page before, -1 for the first page.
        limit: How many messages at most; None for all.
        records: The journal of the run, if it has been read.

    Returns:
        `next` is the `after` of the next page, None for the last one.
    """
    messages = await _final_messages(runner, row)
    if not messages:
        records = await runner.state_store.records(row.run_id) if records is None else records
        given = row.decoded("input", plain_value)
        messages = recorded_messages(await _initial_messages(runner, given, records), records)
    first = max(after + 1, 0)
    end = len(messages) if limit is None else min(first + limit, len(messages))
    return {"items": messages[first:end], "next": end - 1 if first < end < len(messages) else None}


async def _final_messages(runner: RunClient, row: RunRow) -> list[Any]:
    ended = await ended_record(runner, row)
    if ended is None:
        return []
    result = result_in(row, ended)
    messages: list[Any] = result.get("final_messages") or []
    if (before := result.get("before")) is None:
        return messages
    whole = RunResult(final_messages=messages, run_id=UUID(row.run_id))
    whole = await restore_history(runner.persistence.conversations, whole, OmittedHistory(**before))
    return _plain(whole.final_messages)


async def _initial_messages(runner: RunClient, given: Any, records: Sequence[Record]) -> list[Any]:
    """Return the messages that a run began with: those of its conversation so far, and those of its input."""
    if not isinstance(given, dict):
        return []
    found = given.get("messages")
    messages = [*found] if isinstance(found, list) else []
    pinned = next((each for each in records if each.kind == DONE and each.name == "history"), None)
    leaf = None if pinned is None else (plain_value(pinned.result) or {}).get("leaf")
    if leaf is None or given.get("conversation_id") is None:
        return messages
    try:
        store = runner.persistence.conversations
        return _plain(await merged_history(store, UUID(given["conversation_id"]), leaf, messages))
    except InvalidArgument:  # the conversation was deleted since, or changed
        return messages


def _plain(messages: list[Any]) -> list[Any]:
    """Return plain values: the conversation store returns times and other types, the journal plain ones."""
    plain: list[Any] = json.loads(json.dumps(messages, default=json_form))
    return plain


def recorded_messages(initial: Sequence[Any], records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the initial messages and those of the model and tool calls in a journal, without system prompts."""
    done = {(each.name, each.key): each for each in records if each.kind == DONE}
    found: list[Any] = [*initial]
    first = True
    for (name, key), record in done.items():
        # A loop inside a step, such as one of a tool, has a conversation of its own.
        if name == "model" and "@" not in key and isinstance(answer := plain_value(record.result), dict):
            found += _turn(key, answer, done, first=first)
            first = False
    return [each for each in found if isinstance(each, dict) and each.get("role") not in SYSTEM_ROLES]


def _turn(
    key: str, answer: dict[str, Any], done: Mapping[tuple[str, str], Record], *, first: bool
) -> list[dict[str, Any]]:
    """Return what a model call has added: new messages of the loop and of the user, the answer, results of tools."""
    asked, message = answer.get("asked") or {}, answer.get("message")
    if not isinstance(message, dict):
        return []
    said = asked.get("said") or []
    if first and "input" not in asked:
        said = []  # the whole conversation so far, which begins with the input
    found = [*said, *(asked.get("received") or []), message]
    for index, call in enumerate(message.get("tool_calls") or ()):
        result = done.get(("tool", f"{key}:{index}"))
        if result is None:
            continue
        value = plain_value(result.result)
        content = value.get("content") if isinstance(value, dict) else value
        each: dict[str, Any] = {"role": "tool", "tool_call_id": call.get("id"), "content": content}
        if isinstance(value, dict) and value.get("ok") is False:
            each["metadata"] = {"is_error": True}
        found.append(each)
    return found
