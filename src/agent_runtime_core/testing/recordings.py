"""A recorded run as a cassette: what its agent loops asked and were answered, told from the journal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from .._json import decode
from ..errors import InvalidArgument
from ..journal.record import DONE, Record
from .cassettes import Cassette

if TYPE_CHECKING:
    from ..runner.core import AgentRunner

__all__ = ["record"]


async def record(runner: AgentRunner, run_id: UUID | str, path: str | os.PathLike[str] | None = None) -> Cassette:
    """The calls of the model that a run's agent loops made, as a cassette, written to `path` if there is one.

    A ReplayLLMClient answers from it: the same agent with the same input takes the same way again, with no
    network. See Cassette for what such a file shows. UnknownRun: there is no such run. InvalidArgument: it has
    no recorded call of a model.
    """
    info = await runner.get_run(run_id)
    records = await runner.state_store.records(str(info.run_id))
    cassette = Cassette()
    for name, turns in _loops(records).items():
        _play(name, turns, _answers(records), info.input.get("messages") or [], cassette)
    if not cassette.exchanges:
        raise InvalidArgument(f"run {run_id!s} has no recorded call of a model: there is nothing to replay")
    if path is not None:
        cassette.save(path)
    return cassette


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
        each.key: cast("dict[str, Any]", decode(each.result))
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
