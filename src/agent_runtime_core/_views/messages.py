"""The conversation of a run in chat format, with tool calls, their results and the text of failed attempts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from .._core.arguments import SYSTEM_ROLES
from .._core.event_types import EventType
from .._core.ids import step_id
from .._engines.payloads import mark_in, words_of
from .._execution.loop_messages import calls_of, loop_turns, tool_results
from .._execution.result_codec import OmittedHistory
from .._execution.step import Identity
from .._journal.record import ATTEMPT, DONE, ENDED, RESUMED, Record, includes_start
from ..errors import InvalidArgument
from ..interfaces import RunResult
from ..persistence.model_codec import json_form
from ..queue.records import LIVE, RunRow
from ..runner.conversation_history import merged_history, restore_history
from ..runner.run_client import RunClient
from .attempts import LOOP
from .journal import ended_record, result_in
from .plain import plain_value

_Recorded = tuple[Any, Identity | None]  # a message, and the model or tool call that made it
_Item = tuple[Any, str | None]  # a message, and the id of that call

MOST_EVENTS: Final = 20_000  # of a longer log nothing is read: a page of messages must not read hundreds of megabytes
_PAGE: Final = 256
_BOUNDARIES = frozenset({EventType.RUN_STARTED.value, EventType.RUN_RESUMED.value})


async def messages_view(
    runner: RunClient, row: RunRow, after: int = -1, limit: int | None = None,
    records: Sequence[Record] | None = None, *, invalidated: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Return a page of the messages of a run: {"items", "step_ids", "next"}.

    The messages of a finished run are those in its result. If it contains no messages, and while the run is executed,
    the messages are read from its conversation, its input and its journal.

    Args:
        runner: The runner on the store.
        row: The run, with its input.
        after: The index of the last message of the page before, -1 for the first page.
        limit: How many messages at most; None for all.
        records: The journal of the run, if it has been read.
        invalidated: Include text that was streamed in an attempt that failed, as items {"role": "assistant",
            "content", "invalidated": True, "attempt"}. They are no messages: no model has received them.

    Returns:
        `step_ids` contains the id of the model or tool call of each item, None for other messages. `next` is the
        `after` of the next page, None for the last page.
    """
    records = await runner.state_store.records(row.run_id) if records is None else records
    messages = await _final_messages(runner, row)
    if messages:
        items = _located(row, messages, _recorded(records))
    else:
        initial = await _initial_messages(runner, row, records)
        items = [(message, _id(row, call)) for message, call in _conversation(initial, records)]
    if invalidated and (texts := await invalidated_texts(runner, row, records)):
        items = _with_invalidated(row, items, records, texts)
    first = max(after + 1, 0)
    end = len(items) if limit is None else min(first + limit, len(items))
    return {
        "items": [message for message, _ in items[first:end]],
        "step_ids": [step for _, step in items[first:end]],
        "next": end - 1 if first < end < len(items) else None,
    }


async def _final_messages(runner: RunClient, row: RunRow) -> list[Any]:
    ended = await ended_record(runner, row)
    if ended is None:
        return []
    result = result_in(row, ended)
    messages: list[Any] = result.get("final_messages") or []
    if (before := result.get("before")) is None:
        return messages
    whole = RunResult(final_messages=messages, run_id=UUID(row.run_id))
    store = runner.persistence.for_tenant(row.tenant or None).conversations
    whole = await restore_history(store, whole, OmittedHistory(**before))
    return _plain(whole.final_messages)


async def _initial_messages(runner: RunClient, row: RunRow, records: Sequence[Record]) -> list[Any]:
    """Return the messages that a run began with: from its conversation so far, and from its input."""
    given = row.decoded("input", plain_value)
    if not isinstance(given, dict):
        return []
    if (mark := mark_in(given)) is not None:
        return [{"role": "user", "content": words_of(mark)}]
    found = given.get("messages")
    messages = [*found] if isinstance(found, list) else []
    pinned = next((each for each in records if each.kind == DONE and each.name == "history"), None)
    found = None if pinned is None else plain_value(pinned.result)
    leaf = found.get("leaf") if isinstance(found, dict) else None  # a user's step may be named "history"
    if not isinstance(leaf, str) or given.get("conversation_id") is None:
        return messages
    try:
        store = runner.persistence.for_tenant(row.tenant or None).conversations
        return _plain(await merged_history(store, UUID(given["conversation_id"]), leaf, messages))
    except (InvalidArgument, ValueError, TypeError):  # the conversation was deleted since, or changed, or it is none
        return messages


def _plain(messages: list[Any]) -> list[Any]:
    """Return plain values: the conversation store returns times and other types, the journal plain values."""
    plain: list[Any] = json.loads(json.dumps(messages, default=json_form))
    return plain


def _recorded(records: Sequence[Record]) -> list[_Recorded]:
    """Return the messages of the model and tool calls in a journal."""
    found: list[_Recorded] = []
    for turn in loop_turns(records, plain_value):
        said = turn.said if found or turn.continues else []  # else the whole conversation, with the input
        found += [(each, None) for each in (*said, *turn.received)]
        found.append((turn.answer, ("model", turn.key)))
        found += [(each, ("tool", f"{turn.key}:{index}")) for index, each in turn.results.items()]
    return found


def _conversation(initial: Sequence[Any], records: Sequence[Record]) -> list[_Recorded]:
    """Return the initial messages and the model and tool calls of a journal, without system prompts."""
    found = [*((each, None) for each in initial), *_recorded(records)]
    return [each for each in found if isinstance(each[0], dict) and each[0].get("role") not in SYSTEM_ROLES]


def _id(row: RunRow, call: Identity | None) -> str | None:
    return None if call is None else step_id(row.run_id, *call)


def tool_messages(key: str, message: Mapping[str, Any], done: Mapping[Identity, Record]) -> list[dict[str, Any]]:
    """Return the results in the journal of the tool calls that a message requested.

    Args:
        key: The key of the model call in the journal.
        message: Its answer.
        done: The records of the completed steps.
    """
    return [*tool_results(key, calls_of(message), done, plain_value).values()]


def _located(row: RunRow, messages: Sequence[Any], recorded: Sequence[_Recorded]) -> list[_Item]:
    """Return the messages of a result with the ids of their model and tool calls.

    The last messages are compared first: earlier turns of the conversation, which are not in this journal, may have
    the same texts.
    """
    calls: dict[str, list[Identity]] = {}
    for message, call in recorded:
        if call is not None:
            calls.setdefault(_content(message), []).append(call)
    items: list[_Item] = []
    for message in reversed(messages):
        known = calls.get(_content(message)) if isinstance(message, dict) else None
        items.append((message, _id(row, known.pop() if known else None)))
    return items[::-1]


def _content(message: Mapping[str, Any]) -> str:
    """Return what a message contains in a result and in the journal, as a string."""
    fields = (message.get("role"), message.get("content"), message.get("tool_call_id"), message.get("tool_calls"))
    return json.dumps(fields, sort_keys=True)


def _with_invalidated(
    row: RunRow, items: Sequence[_Item], records: Sequence[Record], texts: Mapping[str, Sequence[Invalidated]]
) -> list[_Item]:
    """Add invalidated texts: before the answer of their model call, or at the end if there is no answer."""
    left, found = dict(texts), list[_Item]()
    for message, step in items:
        found += _struck(step, left.pop(step, ())) if step is not None else []
        found.append((message, step))
    for step in _open_calls(row, records):
        found += _struck(step, left.pop(step, ()))
    return found


def _struck(step: str, texts: Sequence[Invalidated]) -> list[_Item]:
    return [
        ({"role": "assistant", "content": text, "invalidated": True, "attempt": attempt}, step)
        for attempt, text in texts
    ]


def _open_calls(row: RunRow, records: Sequence[Record]) -> list[str]:
    """Return the ids that model calls without a saved answer can get: an id for each loop and for the next loop.

    The journal contains no start of a model call, and the steps of a loop are counted.
    """
    turns = {0: 0}
    for each in records:
        loop, _, turn = each.key.removeprefix(LOOP).partition(":")
        if each.name == "model" and each.key.startswith(LOOP) and loop.isdecimal() and turn.isdecimal():
            turns[int(loop)] = max(turns.get(int(loop), 0), int(turn) + (each.kind == DONE))
    turns[max(turns) + 1] = 0
    return [step_id(row.run_id, "model", f"{LOOP}{loop}:{turn}") for loop, turn in sorted(turns.items())]


class Invalidated(NamedTuple):
    """What one attempt streamed of an answer."""

    attempt: int  # the number of the run attempt
    text: str


async def invalidated_texts(runner: RunClient, row: RunRow, records: Sequence[Record]) -> dict[str, list[Invalidated]]:
    """Return the texts by the id of the step of their model call, in the order in which they were streamed.

    When a run starts or resumes, the text of a model call that has not ended is streamed again from its beginning.
    When the run has finished, a text without a saved answer never becomes an answer.
    """
    starts = [each for each in records if each.kind in (ATTEMPT, RESUMED) or _is_whole_attempt(each)]
    finished = row.status not in LIVE
    if len(starts) < 2 and not (finished and row.status != "succeeded"):
        return {}  # nearly all runs: their log need not be read
    if await runner.event_bus.head(row.run_id) > MOST_EVENTS:
        return {}
    texts = await _streamed(runner, row, starts)
    answered = _answered(row, records, starts)
    found: dict[str, list[Invalidated]] = {}
    for (step, start), text in texts.items():
        # The text of the last start is the answer, or may still become one.
        last = answered.get(step, None if finished else len(starts) - 1)
        if last is None or start < last:
            found.setdefault(step, []).append(Invalidated(_attempt(starts, start), text))
    return found


def _is_whole_attempt(record: Record) -> bool:
    """Return whether the end of a run attempt includes its start."""
    return record.kind == ENDED and includes_start(record)


def _attempt(starts: Sequence[Record], start: int) -> int:
    if not 0 <= start < len(starts):
        return 1
    record = starts[start]
    return int(json.loads(record.info or "{}")["began"][2]) if record.kind == ENDED else record.attempt


def _answered(row: RunRow, records: Sequence[Record], starts: Sequence[Record]) -> dict[str, int]:
    """Return the index of the start in which each model call got its saved answer."""
    found: dict[str, int] = {}
    for record in records:
        if record.kind == DONE and record.name == "model":
            before = sum(each.seq < record.seq for each in starts) - 1
            found[step_id(row.run_id, record.name, record.key)] = before
    return found


async def _streamed(runner: RunClient, row: RunRow, starts: Sequence[Record]) -> Mapping[tuple[str, int], str]:
    """Return the streamed text by step and by the index of the start of the run before it."""
    parts: dict[tuple[str, int], list[str]] = {}
    since, start = 0, -1
    while page := await runner.event_bus.get_events(row.run_id, since, _PAGE):
        if since == 0 and page[0].sequence > 0:
            return {}  # the beginning was deleted, so the starts cannot be counted
        for event in page:
            if event.event_type in _BOUNDARIES and not event.from_agent:
                start += 1
            elif event.event_type == EventType.ASSISTANT_DELTA.value:
                # The agent's own code may emit this type, with any payload.
                step, delta = event.payload.get("step_id"), event.payload.get("delta")
                if isinstance(step, str) and isinstance(delta, str):
                    parts.setdefault((step, start), []).append(delta)
        since = page[-1].sequence + 1
        if len(page) < _PAGE or since > MOST_EVENTS:
            break
    return {which: "".join(texts) for which, texts in parts.items()}
