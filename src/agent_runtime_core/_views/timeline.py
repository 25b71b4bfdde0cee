"""The timeline of a run: one row for each step, model call, tool call, wait, approval, sleep and child run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from .._core.ids import child_run_id, step_id
from .._journal.record import DONE, ENDED, FAILED, RETRYING, Record, outcome_of
from ..limits import tokens_of
from ..queue.records import LIVE, RunRow
from .attempts import CALL, LIST, SIGNAL, Attempt, TracedStep, enclosing, scopes_of, traced_steps
from .journal import last_error, record_view
from .messages import tool_messages
from .plain import iso_time, plain_value, shortened_error
from .problems import Problem

#: Most rows of a page. It is large because each page reads and folds the whole journal.
MAX_ROWS: Final = 25_000
_NOT_OUTPUT = ("asked", "doubted")  # of a recorded model call: parts of the request


def timeline_view(
    row: RunRow, records: Sequence[Record], after: int = -1, limit: int | None = None, newest_first: bool = False
) -> dict[str, Any]:
    """Return a page of the rows of a run, in the order of their start: {"items", "next", "total"}.

    Args:
        row: The run.
        records: Its whole journal.
        after: The `sequence` of the last row of the page before, -1 for the first page.
        limit: How many rows at most; None for all.
        newest_first: Return the last rows first.

    Returns:
        `next` is the `after` of the next page, None for the last page. Each item is {"sequence", "step_id", "name",
        "label", "key", "kind", "state", "started_at", "ended_at", "duration_ms", "attempts", "error", "tokens",
        "cost_usd", "parent", "child_run_id"}.
    """
    timeline = _Timeline(row, records)
    numbers = range(len(timeline.steps))
    if newest_first:
        numbers = numbers[::-1] if after < 0 else numbers[: min(after, len(numbers))][::-1]
    else:
        numbers = numbers[max(after + 1, 0) :]
    page = numbers if limit is None else numbers[:limit]
    return {
        "items": [timeline.item(number) for number in page],
        "next": page[-1] if page and len(page) < len(numbers) else None,
        "total": len(timeline.steps),
    }


def step_detail(row: RunRow, records: Sequence[Record], wanted: str) -> dict[str, Any]:
    """Return the row of one step with its contents.

    Args:
        row: The run, with its input.
        records: Its whole journal.
        wanted: The id of the step.

    Returns:
        The row of the timeline, and {"input", "output", "error", "idempotency_key", "digest", "records"}. `input` is
        None for a step, because its journal stores only the digest of its arguments. `error` contains a traceback if
        the run stopped with it.

    Raises:
        Problem: The run contains no such step.
    """
    timeline = _Timeline(row, records)
    for number, step in enumerate(timeline.steps):
        if step_id(row.run_id, step.name, step.key) == wanted:
            return timeline.item(number) | timeline.contents(step, wanted)
    raise Problem.of(404, "unknown step id. Pass a step_id of the timeline of this run.")


def step_details(row: RunRow, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """Yield what `step_detail` returns for each step, in the order of their start. It reads the journal once."""
    timeline = _Timeline(row, records)
    for number, step in enumerate(timeline.steps):
        yield timeline.item(number) | timeline.contents(step, step_id(row.run_id, step.name, step.key))


class _Timeline:
    """The steps of one run, and the rows that are made of them."""

    def __init__(self, row: RunRow, records: Sequence[Record]) -> None:
        self.row, self.records = row, records
        self.steps = [each for each in traced_steps(row, records).values() if each.kind is not None]
        self._scopes = scopes_of(self.steps)

    def item(self, number: int) -> dict[str, Any]:
        """Return the row of the step with this number."""
        step, run_id = self.steps[number], self.row.run_id
        outer, usage = enclosing(step, self._scopes), step.usage
        state, error = self._outcome(step)
        return {
            "sequence": number, "step_id": step_id(run_id, step.name, step.key), "name": step.name,
            "label": self._label(step), "key": step.key.partition(":")[2], "kind": step.kind, "state": state,
            "started_at": iso_time(step.began), "ended_at": iso_time(step.ended), "duration_ms": _duration(step),
            "attempts": [_attempt(index, each, state) for index, each in enumerate(step.attempts, 1)],
            "error": error, "tokens": tokens_of(usage) if usage else None, "cost_usd": usage.get("cost_usd"),
            "parent": None if outer is None else step_id(run_id, outer.name, outer.key),
            "child_run_id": self._child(step),
        }  # fmt: skip

    def contents(self, step: TracedStep, wanted: str) -> dict[str, Any]:
        """Return the contents of a step."""
        _, error = self._outcome(step)
        if error is not None:
            error = {**error, "traceback": self._traceback(step, error["message"])}
        return {
            "input": self._input(step),
            "output": _output(step),
            "error": error,
            # Only code that runs inside a step reads it.
            "idempotency_key": f"{self.row.run_id}:{wanted}" if step.kind in ("step", "tool", "model") else None,
            "digest": None if step.key.startswith(LIST) else step.digest,
            "records": [record_view(each) for each in step.records],
        }

    def _outcome(self, step: TracedStep) -> tuple[str, dict[str, Any] | None]:
        """Return the state of a step and its error. The result of a tool call or child run may be a failure."""
        last = step.last
        if last is None:
            return step.state, None
        if last.kind in (RETRYING, FAILED):
            return step.state, _error(last)
        if step.state == "timed_out":
            return "timed_out", {"type": "WaitTimeout", "message": "nothing arrived in time"}
        if step.kind not in ("tool", "child") or last.result is None:
            return step.state, None
        found = plain_value(last.result)
        if not isinstance(found, dict):
            return step.state, None
        if step.kind == "child":
            error = shortened_error(found.get("error"))
            failed = found.get("status") not in (None, "succeeded")
        else:
            failed = found.get("ok") is False
            error = {"type": found.get("error") or "failed", "message": str(found.get("content"))} if failed else None
        state = "failed" if failed and step.state == "done" else step.state
        return state, error

    def _label(self, step: TracedStep) -> str:
        """Return what a reader calls the step: the tool, model, signal or agent instead of the name in the journal."""
        match step.kind:
            case "tool":
                return str(self._tool_call(step).get("name") or step.name)
            case "model":
                found = plain_value(step.last.result) if step.last is not None else None
                return str((isinstance(found, dict) and found.get("model")) or step.name)
            case "wait" | "approval":
                return step.name.removeprefix(SIGNAL)
            case "child":
                return step.name.removeprefix(CALL)
        return step.name

    def _tool_call(self, step: TracedStep) -> dict[str, Any]:
        """Return the name and arguments of a tool call: as its start says, or else as the model requested them."""
        if isinstance(found := step.start.get("tool"), dict) and "args" in found:
            return found
        turn, _, index = step.key.rpartition(":")
        for each in self.records:
            if each.kind == DONE and (each.name, each.key) == ("model", turn):
                calls = ((plain_value(each.result) or {}).get("message") or {}).get("tool_calls") or ()
                if index.isdecimal() and int(index) < len(calls):
                    function = calls[int(index)].get("function") or {}
                    return {"name": function.get("name"), "args": _json(function.get("arguments"))}
        return {}

    def _child(self, step: TracedStep) -> str | None:
        if step.kind != "child":
            return None
        if not step.copied:
            return str(step.start.get("child") or child_run_id(step_id(self.row.run_id, step.name, step.key)))
        assert step.last is not None
        found = plain_value(step.last.result)
        return found.get("run_id") if isinstance(found, dict) else None

    def _input(self, step: TracedStep) -> Any:
        match step.kind:
            case "tool":
                return self._tool_call(step).get("args")
            case "model":
                return self._request(step)
            case "sleep" | "wait" | "approval":
                return {"until": iso_time(step.start.get("until"))} if step.start.get("until") else None
        return None

    def _request(self, step: TracedStep) -> dict[str, Any] | None:
        """Return {"messages", "complete"} of a model call, from the journal and the input of the run."""
        loop, _, _ = step.key.rpartition(":")
        given = self.row.decoded("input", plain_value)
        initial = _list(given.get("messages") if isinstance(given, dict) else None)
        done = {(each.name, each.key): each for each in self.records if each.kind == DONE}
        messages: list[Any] = []
        complete = True
        for (name, key), record in done.items():
            if name != "model" or key.rpartition(":")[0] != loop:
                continue
            answer = plain_value(record.result)
            if not isinstance(answer, dict):
                return None
            # A step of the user may be named "model", and return anything.
            asked = found if isinstance(found := answer.get("asked"), dict) else {}
            messages += _list(asked.get("said"))
            if expected := asked.get("input"):
                complete = expected == len(initial)  # else the conversation had messages before the run
                messages += initial
            messages += _list(asked.get("received"))
            if key == step.key:
                return {"messages": _sent(messages, asked) if complete else messages, "complete": complete}
            message = found if isinstance(found := answer.get("message"), dict) else {}
            messages += [message, *tool_messages(key, message, done)]
        return None

    def _traceback(self, step: TracedStep, message: str) -> str | None:
        """Return the traceback of the error that ended or interrupted the run, if it is the error of the step."""
        ended = next((each for each in reversed(self.records) if each.kind == ENDED), None)
        error = last_error(self.row) if self.row.status in LIVE or ended is None else outcome_of(ended)[0]
        if not isinstance(error, dict) or message not in str(error.get("message")):
            return None
        last_failed = next((each for each in reversed(self.records) if each.kind in (RETRYING, FAILED)), None)
        is_last = last_failed is not None and (last_failed.name, last_failed.key) == (step.name, step.key)
        return (error.get("stack") or None) if is_last else None


def _sent(messages: list[Any], asked: dict[str, Any]) -> list[Any]:
    """Return the messages of a request, of which a `trim` hook may have left out some."""
    if (sent := asked.get("sent")) is not None:
        return list(sent)
    ranges = asked.get("kept", [[0, len(messages)]])
    return [message for first, end in ranges for message in messages[first:end]]


def _duration(step: TracedStep) -> int | None:
    last, began, ended = step.last, step.began, step.ended
    if last is not None and last.kind == DONE and len(step.attempts) == 1 and (last.ms or step.copied):
        return last.ms
    return None if began is None or ended is None else max(round((ended - began) * 1000), 0)


def _attempt(number: int, attempt: Attempt, state: str) -> dict[str, Any]:
    end = attempt.end
    if end is None:
        state = "interrupted" if attempt.replaced else state
    elif end.kind in (RETRYING, FAILED):
        state = "failed"
    return {
        "number": number,
        "started_at": None if state == "copied" else iso_time(attempt.began),
        "ended_at": None if state == "copied" else iso_time(attempt.ended),
        "state": state,
        "error": None if end is None or end.kind == DONE else _error(end),
    }


def _error(record: Record) -> dict[str, Any] | None:
    info = json.loads(record.info or "{}")
    return {"type": info.get("type") or "Error", "message": str(info.get("error") or "")}


def _output(step: TracedStep) -> Any:
    last = step.last
    if last is None or last.kind != DONE:
        return None
    value = plain_value(last.result)
    if not isinstance(value, dict):
        return value
    if step.kind == "tool":
        return value.get("result", value.get("content")) if value.get("ok") is not False else value.get("content")
    if step.kind == "model":
        return {name: each for name, each in value.items() if name not in _NOT_OUTPUT}
    return value


def _json(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
