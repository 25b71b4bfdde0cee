"""A recorded run as a cassette: what its agent loops asked and were answered, told from the journal."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from .._core.codec.json import decode
from .._execution.context import conversation_id
from .._journal.record import DONE, Record
from ..errors import InvalidArgument
from ..runner.conversation_history import merged_history
from .cassettes import Cassette

if TYPE_CHECKING:
    from ..runner.runner import AgentRunner
    from ..runner.settings import RunInfo

__all__ = ["record"]


async def record(runner: AgentRunner, run_id: UUID | str, path: str | os.PathLike[str] | None = None) -> Cassette:
    """The calls of the model that a run's agent loops made, as a cassette, written to `path` if there is one.

    A ReplayLLMClient answers from it: the same agent with the same input, and the same messages before it in its
    conversation, takes the same way again, with no network. See Cassette for what such a file shows. UnknownRun:
    there is no such run. InvalidArgument: it has no recorded call of a model, or its conversation is not there any
    more.
    """
    info = await runner.get_run(run_id)
    records = await runner.state_store.records(str(info.run_id))
    loops, answers, cassette = _loops(records), _answers(records), Cassette()
    given = await _given(runner, info, records) if loops else []
    for name, turns in loops.items():
        _play(name, turns, answers, given, cassette)
    if not cassette.exchanges:
        raise InvalidArgument(f"run {run_id!s} has no recorded call of a model: there is nothing to replay")
    if path is not None:
        cassette.save(path)
    return cassette


async def _given(runner: AgentRunner, info: RunInfo, records: Sequence[Record]) -> list[Any]:
    """The messages that the run began with: those of its input, behind what its conversation had."""
    messages, named = info.input.get("messages") or [], conversation_id(info.input.get("conversation_id"))
    pins = [each for each in records if each.kind == DONE and each.name == "history" and each.key.startswith("v:")]
    if named is None or not pins:
        return messages
    pin = cast("dict[str, str | None]", decode(pins[0].result or "{}"))
    return await merged_history(runner.persistence.conversations, named, pin.get("leaf"), messages)


def _loops(records: Sequence[Record]) -> dict[str, list[dict[str, Any]]]:
    """The answers of the model, in the order of their turns, by loop."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in records:
        if each.kind == DONE and each.name == "model" and each.key.startswith("k:l:") and each.result is not None:
            name = each.key.rpartition(":")[0]
            found.setdefault(name, []).append(cast("dict[str, Any]", decode(each.result)))
    return found


def _answers(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """The answers of tools, by the keys of their steps."""
    return {
        # What a tool returned may be of a type that is not known here: its text was sent to the model.
        each.key: json.loads(each.result)
        for each in records
        if each.kind == DONE and each.name == "tool" and each.result is not None
    }


def _play(
    name: str, turns: Sequence[dict[str, Any]], answers: dict[str, dict[str, Any]], given: list[Any], cassette: Cassette
) -> None:
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        asked = turn.get("asked") or {}
        messages += asked.get("said") or []
        if asked.get("input", 0) not in (0, len(given)):
            raise InvalidArgument(f"the run was given {asked['input']} messages, and {len(given)} of them are known")
        messages += given[: asked.get("input", 0)]
        sent = asked.get("sent")
        if sent is None:
            stretches = asked.get("kept", [[0, len(messages)]])
            sent = [message for first, end in stretches for message in messages[first:end]]
        response = {part: turn[part] for part in ("message", "usage", "model", "finish_reason", "cost_usd")}
        cassette.add({"messages": sent, "model": None}, response)
        messages.append(turn["message"])
        for place, call in enumerate(turn["message"].get("tool_calls") or ()):
            answer = answers.get(f"{name}:{number}:{place}") or {"content": "Error: not run", "ok": False}
            told = {"role": "tool", "tool_call_id": call["id"], "content": answer["content"]}
            messages.append(told if answer["ok"] else {**told, "metadata": {"is_error": True}})
