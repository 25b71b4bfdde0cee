"""The steps of a run, read from its journal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .._core.ids import step_id
from .._execution.step_scope import SCOPE_SUFFIX, Identity, scope_id
from .._execution.usage import usage_of
from .._journal.record import DONE, FAILED, RETRYING, STARTED, Record, includes_start, is_copied
from ..queue.records import RunRow
from .plain import iso_time

#: Fields of the start record of a wait for a signal, a sleep or a child run.
_WAIT_FIELDS = ("until", "child")


def open_state(row: RunRow) -> str:
    """Return the state of a step that has started and has no end."""
    return row.status if row.status in ("running", "waiting") else "in doubt"


def steps_of(row: RunRow, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the steps, waits and calls of a run in order of their start, with the state of their last record."""
    states = {DONE: "done", STARTED: open_state(row), RETRYING: "retrying", FAILED: "failed"}
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for record in records:
        if record.kind not in states:
            continue
        info = json.loads(record.info) if record.info else {}
        state = "copied" if is_copied(record) else states[record.kind]
        if state == "in doubt" and not info.keys().isdisjoint(_WAIT_FIELDS):
            state = "waiting"
        found[record.name, record.key] = _step(row, record.name, record.key, state) | {
            "attempts": record.attempt, "duration_ms": record.ms if record.kind == DONE else None,
            "timestamp": iso_time(record.t, "seconds"), "error": info.get("error"),
        }  # fmt: skip
        if record.next is not None:
            after = json.loads(record.next)
            found.setdefault((after["name"], after["key"]), _step(row, after["name"], after["key"], open_state(row)))
    return list(found.values())


def _step(row: RunRow, name: str, key: str, state: str) -> dict[str, Any]:
    return {"state": state, "name": name, "step_key": key.partition(":")[2], "step_id": step_id(row.run_id, name, key)}


class StepTrace:
    """One step, wait or call of a run, with what its records say.

    Attributes:
        name: Its name.
        key: Its key in the journal.
        state: done, running, waiting, in doubt, retrying, failed or copied.
        began: When its first attempt started, wall seconds; None for a copied step.
        last: Its last record; None if only the record of the step before it has its start.
        start: The fields of its start: `pos`, and in a DAG `completed` and `needs`, the positions of other steps.
    """

    def __init__(self, name: str, key: str, state: str, began: float | None) -> None:
        self.name, self.key, self.state, self.began = name, key, state, began
        self.last: Record | None = None
        self.start: dict[str, Any] = {}

    def read(self, record: Record, state: str) -> None:
        info = json.loads(record.info) if record.info else {}
        if is_copied(record):
            state, self.began = "copied", None
        elif state == "in doubt" and not info.keys().isdisjoint(_WAIT_FIELDS):
            state = "waiting"
        if record.kind == DONE and includes_start(record) and self.last is None:
            self.began = record.t - record.ms / 1000
        began = info if record.kind == STARTED else info.get("began")
        self.start = {**self.start, **(began if isinstance(began, dict) else {}), "pos": record.pos}
        self.state, self.last = state, record

    @property
    def error(self) -> Any:
        """The error of the last attempt, or None."""
        failed = self.last is not None and self.last.kind in (RETRYING, FAILED)
        return json.loads(self.last.info or "{}").get("error") if failed and self.last is not None else None

    @property
    def usage(self) -> dict[str, Any]:
        """What its model call or child run has used."""
        return usage_of(self.last) if self.last is not None and self.last.kind == DONE else {}


def traces_of(row: RunRow, records: Sequence[Record]) -> dict[Identity, StepTrace]:
    """Return the steps of a run in the order of their start, which later records do not change."""
    waiting = open_state(row)
    states = {DONE: "done", STARTED: waiting, RETRYING: "retrying", FAILED: "failed"}
    found: dict[Identity, StepTrace] = {}
    for record in records:
        if (state := states.get(record.kind)) is None:
            continue
        identity = (record.name, record.key)
        if identity not in found:
            found[identity] = StepTrace(*identity, state, record.t)
        found[identity].read(record, state)
        if record.next is not None:
            after = json.loads(record.next)
            identity = (after["name"], after["key"])
            found.setdefault(identity, StepTrace(*identity, waiting, record.t)).start.update(after)
    return found


def step_views(row: RunRow, records: Sequence[Record], after: int = -1, limit: int | None = None) -> dict[str, Any]:
    """Return a page of the steps of a run in the order of their start: {"items", "next"}.

    Args:
        row: The run.
        records: Its whole journal.
        after: The `sequence` of the last step of the page before, -1 for the first page.
        limit: How many steps at most; None for all.

    Returns:
        `next` is the `after` of the next page, None for the last one. Each item is {"sequence", "step_id", "name",
        "key", "state", "started_at", "ended_at", "duration_ms", "attempts", "error", "cost_usd", "usage", "parent"};
        `parent` is the step id of the enclosing step.
    """
    traces = [*traces_of(row, records).values()]
    scopes = {scope_id(each.name, each.key): each for each in traces} if any("@" in each.key for each in traces) else {}
    first = max(after + 1, 0)
    end = len(traces) if limit is None else min(first + limit, len(traces))
    items = [_step_view(row, number, traces[number], scopes) for number in range(first, end)]
    return {"items": items, "next": end - 1 if items and end < len(traces) else None}


def _step_view(row: RunRow, number: int, step: StepTrace, scopes: dict[str, StepTrace]) -> dict[str, Any]:
    last, usage = step.last, step.usage
    ended = last is not None and last.kind in (DONE, FAILED)
    enclosing = scopes.get(found[1]) if (found := SCOPE_SUFFIX.search(step.key)) is not None else None
    return {
        "sequence": number, "step_id": step_id(row.run_id, step.name, step.key), "name": step.name,
        "key": step.key.partition(":")[2], "state": step.state, "started_at": iso_time(step.began),
        "ended_at": iso_time(last.t) if last is not None and ended else None,
        "duration_ms": last.ms if last is not None and last.kind == DONE else None,
        "attempts": 1 if last is None else last.attempt, "error": step.error,
        "cost_usd": usage.get("cost_usd"), "usage": usage or None,
        "parent": None if enclosing is None else step_id(row.run_id, enclosing.name, enclosing.key),
    }  # fmt: skip
