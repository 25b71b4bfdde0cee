"""Make a cassette from a stored run: the model calls of its agent loops, read from the journal."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from .._core.codec.json import decode
from .._core.validation import Shown, must
from .._execution.context import conversation_id
from .._journal.record import DONE, Record
from ..limits import usd_of
from ..loop.session import joins_history
from ..runner.conversation_history import merged_history
from .cassettes import Cassette

if TYPE_CHECKING:
    from ..runner.runner import AgentRunner
    from ..runner.settings import RunInfo

__all__ = ["record"]


async def record(runner: AgentRunner, run_id: UUID | str, path: str | os.PathLike[str] | None = None) -> Cassette:
    """Return the model calls that a run's agent loops made, as a cassette.

    A ReplayLLMClient replays it without a network: the same agent with the same input, and the same earlier messages
    in its conversation, makes the same calls. See Cassette for the data that such a file exposes.

    Args:
        runner: A runner on the store that contains the run.
        run_id: The id of the run.
        path: Also save the cassette to this file.

    Raises:
        UnknownRun: The run does not exist.
        InvalidArgument: The run recorded no model call, or messages of its conversation were deleted.
    """
    info = await runner.get_run(run_id)
    records = await runner.state_store.records(str(info.run_id))
    loops, tool_results, cassette = _model_calls(records), _tool_results(records), Cassette()
    first_messages = await _first_messages(runner, info, records) if loops else []
    for name, turns in loops.items():
        _add_calls(cassette, name, turns, tool_results, first_messages)
    if not cassette.exchanges:
        raise must(
            f"run {str(run_id)!r}", "have at least one recorded model call", Shown("none"), "Pass another run_id"
        )
    if path is not None:
        cassette.save(path)
    return cassette


async def _first_messages(runner: AgentRunner, info: RunInfo, records: Sequence[Record]) -> list[Any]:
    """The messages that the run started with: the messages of its conversation, then of its input."""
    messages, named = info.input.get("messages") or [], conversation_id(info.input.get("conversation_id"))
    pins = [each for each in records if each.kind == DONE and each.name == "history" and each.key.startswith("v:")]
    if named is None or not pins:
        return messages
    pin = cast("dict[str, str | None]", decode(pins[0].result or "{}"))
    store = runner.persistence.for_tenant(info.tenant).conversations
    return await merged_history(store, named, pin.get("leaf"), messages)


def _model_calls(records: Sequence[Record]) -> dict[str, list[dict[str, Any]]]:
    """The model's responses by agent loop, in the order of the calls."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in records:
        if each.kind == DONE and each.name == "model" and each.key.startswith("k:l:") and each.result is not None:
            name = each.key.rpartition(":")[0]
            found.setdefault(name, []).append(cast("dict[str, Any]", decode(each.result)))
    return found


def _tool_results(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """The tool results by step key."""
    return {
        # Plain JSON: the result's type may not be importable here, and the model got the JSON text anyway.
        each.key: json.loads(each.result)
        for each in records
        if each.kind == DONE and each.name == "tool" and each.result is not None
    }


def _add_calls(
    cassette: Cassette,
    name: str,
    turns: Sequence[dict[str, Any]],
    tool_results: dict[str, dict[str, Any]],
    first_messages: list[Any],
) -> None:
    """Add the calls of one agent loop: rebuild each request from the messages before it."""
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        request = turn.get("asked") or {}
        messages += request.get("said") or []
        if request.get("input", 0) not in (0, len(first_messages)):
            constraint = f"have the {request['input']} messages that the run started with"
            fix = "Record runs before messages of their conversation are deleted"
            raise must("the conversation", constraint, len(first_messages), fix)
        messages += first_messages[: request.get("input", 0)]
        messages += request.get("received") or []
        sent = request.get("sent")
        if sent is None:
            ranges = request.get("kept", [[0, len(messages)]])
            sent = [message for first, end in ranges for message in messages[first:end]]
        response = {part: turn[part] for part in ("message", "usage", "model", "finish_reason")}
        response["cost_usd"] = usd_of(turn["cost_usd"])
        cassette.add({"messages": sent, "model": None}, response)
        if joins_history(turn):
            messages.append(turn["message"])
        for index, call in enumerate(turn["message"].get("tool_calls") or ()):
            result = tool_results.get(f"{name}:{number}:{index}") or {"content": "Error: not run", "ok": False}
            message = {"role": "tool", "tool_call_id": call["id"], "content": result["content"]}
            messages.append(message if result["ok"] else {**message, "metadata": {"is_error": True}})
