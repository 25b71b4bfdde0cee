"""`agent-runtime runs` and `show`: list and inspect runs."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Sequence
from typing import Any

from .._core.ids import step_id
from .._execution.mailbox import answered_request
from .._journal.record import DONE, FAILED, RETRYING, STARTED, Record, is_copied
from ..events.event import Event, payload_of
from ..queue.records import LIVE, RunRow
from ..runner.runner import AgentRunner
from .output import (
    field,
    iso_time,
    print_json,
    print_line,
    table,
    warn,
    with_human_times,
    without_secrets,
)
from .store import answer_command, existing_store, require_run, rows_of, similar_agent, summary

_RUNS = ("run_id", "run_key", "agent_key", "status", "attempt", "created_at", "ended_at", "reason")
_STEPS = ("state", "name", "step_key", "step_id", "attempts", "duration_ms", "timestamp", "error")
_EVENTS = ("sequence", "timestamp", "event_type", "payload")
#: Fields of the start record of a wait for a signal, a sleep or a child run.
_WAIT_FIELDS = ("until", "child")


async def runs(args: Namespace) -> int:
    async with existing_store(args) as runner:
        last = deque[RunRow](maxlen=min(args.limit, sys.maxsize))
        async for row in rows_of(runner, args.status, args.agent):
            last.append(row)
        found = [await summary(runner, row) for row in last]
        if args.agent is not None and (meant := await similar_agent(runner, args.agent)) is not None:
            warn(f"no run has agent {args.agent!r}. Did you mean {meant!r}?")
    if args.json:
        print_json(found)
    else:
        table([with_human_times(each, local=False) for each in found], _RUNS)
    return 0


async def show(args: Namespace) -> int:
    async with existing_store(args) as runner:
        row = await require_run(runner, args.id)
        details = await summary(runner, row, end=True)
        details["input"], details["metadata"] = json.loads(row.input), json.loads(row.metadata)
        details["waiting_for"] = (await waits_of(runner, row))[0]
        details["steps"] = steps_of(row, await runner.state_store.records(row.run_id))
        if args.events:
            details["events"] = [event_fields(each) for each in await runner.event_bus.get_events(row.run_id)]
    if args.json:
        print_json(details)
    else:
        _print_run(details, args)
    return 0


def event_fields(event: Event) -> dict[str, Any]:
    """Return the fields of an event under their names in `Event`."""
    return {
        "sequence": event.sequence, "timestamp": event.timestamp.isoformat(), "event_type": event.event_type,
        "payload": payload_of(event),
    }  # fmt: skip


def _print_run(details: dict[str, Any], args: Namespace) -> None:
    details = with_human_times(without_secrets(details))
    error = details["error"]
    shown = {**details, "error": error and f"{error.get('type')}: {error.get('message')}"}
    for name, value in shown.items():
        if name in ("steps", "events"):
            print_line("")
            print_line(name if value else f"no {name}")
            lines = [
                {**with_human_times(each, local=False), "payload": json.dumps(each.get("payload"), default=str)}
                for each in value
            ]
            if value:
                table(lines, _STEPS if name == "steps" else _EVENTS)
        elif name == "waiting_for":
            for each in value:
                field(name, f"{each['kind']} {each['name']!r}")
                field("answer with", answer_command(args, each))
        elif value not in (None, False):
            field(name, json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value)


async def waits_of(runner: AgentRunner, row: RunRow) -> tuple[list[dict[str, str]], set[str]]:
    """Return the open waits of a run, and the names of all approvals that it has requested.

    A wait is {"kind": "approval" or "signal", "name": …}.
    """
    if row.status not in LIVE:
        return [], set()
    requested = {
        event.payload["request_id"]: str(event.payload.get("name"))
        for event in await runner.event_bus.get_events(row.run_id)
        if event.event_type == "approval.requested" and isinstance(event.payload.get("request_id"), str)
    }
    # The event of a request is stored before the record of its wait.
    waits = dict(requested)
    for record in await runner.state_store.records(row.run_id):
        wait = step_id(row.run_id, record.name, record.key)
        if record.kind == STARTED and record.key.startswith("w:") and record.name.startswith("signal:"):
            waits[wait] = record.name.removeprefix("signal:")
        elif record.kind == DONE:
            waits.pop(wait, None)
    for mail in await runner.queue.mail(row.run_id):
        waits.pop(answered_request(mail.msg_id) or "", None)
    kinds = [{"kind": "approval" if wait in requested else "signal", "name": name} for wait, name in waits.items()]
    return kinds, set(requested.values())


def steps_of(row: RunRow, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the steps, waits and calls of a run in order of their start, with the state of their last record."""
    open_state = "running" if row.status == "running" else "waiting" if row.status == "waiting" else "in doubt"
    states = {DONE: "done", STARTED: open_state, RETRYING: "retrying", FAILED: "failed"}
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
            "timestamp": iso_time(record.t), "error": info.get("error"),
        }  # fmt: skip
        if record.next is not None:
            after = json.loads(record.next)
            found.setdefault((after["name"], after["key"]), _step(row, after["name"], after["key"], open_state))
    return list(found.values())


def _step(row: RunRow, name: str, key: str, state: str) -> dict[str, Any]:
    return {"state": state, "name": name, "step_key": key.partition(":")[2], "step_id": step_id(row.run_id, name, key)}
