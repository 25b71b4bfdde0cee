"""`agent-runtime runs`, `workers`, `show` and `events`: list runs and workers, show a run, follow its events."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from .._core.event_types import EventType
from .._core.validation import did_you_mean
from .._engines.payloads import in_words
from .._views.attempts import steps_of
from .._views.overview import pools_view, workers_view
from .._views.plain import without_secrets
from .._views.runs import list_items, plain_metadata, questions_of, summary, waits_of
from ..errors import MOST_NAMED, IllegalTransition, InvalidArgument, UnknownRun
from ..events.event import Event, agent_type, payload_of, shown_type
from ..queue.records import RunFilter
from ..runner.finding import Finder
from ..runner.runner import AgentRunner
from ..runner.settings import content_filter
from . import store
from .consent import asks, confirmed
from .output import (
    counted,
    field,
    human_time,
    json_line,
    print_columns,
    print_json,
    print_line,
    table,
    warn,
    with_human_times,
)

_RUNS = ("run_id", "run_key", "tenant", "agent_key", "status", "attempt", "created_at", "ended_at", "reason", "why")
_LONGEST_WHY = 200  # characters in a line of the table
_POOLS = ("name", "tenant", "per", "spent", "reserved", "left", "ends_at")
_WORKERS = ("worker", "host", "pid", "state", "slots", "agents", "version", "started_at", "last_seen_at")
_STEPS = ("state", "name", "step_key", "step_id", "attempts", "duration_ms", "timestamp", "error")
_EVENTS = ("sequence", "timestamp", "event_type", "payload")


async def runs(args: Namespace) -> int:
    async with store.existing_store(args, reads=True) as runner:
        wanted, note = await _filter_of(runner, args), ""
        if args.sort is None and wanted == wanted.of_store:
            rows = [row async for row in store.newest_rows(runner, wanted, args.limit)]
        else:
            page = await Finder(runner.queue, runner.state_store, wanted, args.sort).find(args.limit)
            rows, note = page.rows, page.note
        if args.sort is None:
            rows.reverse()
        items = await list_items(runner, rows)
        found = [{**await summary(runner, row), "why": item["why"]} for row, item in zip(rows, items, strict=True)]
        if args.agent is not None and (meant := await store.similar_agent(runner, args.agent)) is not None:
            warn(f"no run has agent {args.agent!r}. Did you mean {meant!r}?")
    if note:
        warn(note)
    if args.json:
        print_json(found)
    else:
        lines = [{**each, "why": _in_short(each["why"])} for each in found]
        table(
            [with_human_times(without_secrets(each), local=False) for each in lines], _RUNS, optional=("tenant", "why")
        )
    return 0


def _in_short(why: Sequence[dict[str, Any]]) -> str:
    text = "; ".join(each["text"] for each in why)
    return text if len(text) <= _LONGEST_WHY else f"{text[: _LONGEST_WHY - 1]}…"


async def _filter_of(runner: AgentRunner, args: Namespace) -> RunFilter:
    """Return the filter that the arguments of `runs` are."""
    contents = content_filter(dict(args.metadata), args.tag, args.error_type, args.code_version, args.search)
    parent = None if args.parent is None else (await store.require_run(runner, args.parent, args.tenant)).run_id
    return store.wanted_runs(args)._replace(
        light=False, without_input=True, newest_first=True, min_attempts=args.min_attempts, contents=contents,
        parent=parent,
    )  # fmt: skip


async def workers(args: Namespace) -> int:
    async with store.existing_store(args, reads=True) as runner:
        found = await workers_view(runner)
    if args.json:
        print_json(found)
        return 0
    table([_shown_worker(each) for each in found], _WORKERS)
    return 0


async def pools(args: Namespace) -> int:
    async with store.existing_store(args, reads=True) as runner:
        found = await pools_view(runner, args.tenant)
    if args.json:
        print_json(found)
        return 0
    table([_shown_pool(each) for each in found], _POOLS, optional=("tenant",))
    return 0


def _shown_pool(pool: dict[str, Any]) -> dict[str, Any]:
    """Return a pool with its amounts as texts: USD with cents and parts of them, if there are any."""
    texts = {
        name: ", ".join(f"{unit} {_shown_amount(unit, amount)}" for unit, amount in pool[name].items() if amount)
        for name in ("spent", "reserved", "left")
    }
    per = pool["per"] if isinstance(pool["per"], str) else f"{pool['per']:g} s"
    return with_human_times({**pool, **texts, "per": per}, local=False)


def _shown_amount(unit: str, amount: float) -> str:
    return f"{amount:.4f}" if unit == "usd" else f"{amount:,}"


def _shown_worker(worker: dict[str, Any]) -> dict[str, Any]:
    agents, more = worker["agents"][:MOST_NAMED], len(worker["agents"]) - MOST_NAMED
    names = ", ".join(agents) + (f" and {more} more" if more > 0 else "")
    state = "living" if worker["living"] else "ended"
    return with_human_times({**worker, "agents": names, "state": state}, local=False)


async def show(args: Namespace) -> int:
    async with store.existing_store(args, reads=True) as runner:
        row = await store.require_run(runner, args.id, args.tenant)
        details = await summary(runner, row, end=True)
        details["input"], details["metadata"] = json.loads(row.input), plain_metadata(row)
        details["why"] = (await list_items(runner, [row]))[0]["why"]
        details["waiting_for"] = (await waits_of(runner, row))[0]
        details["questions"] = await questions_of(runner, row)
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
        "payload": payload_of(event), **({"from_agent": True} if event.from_agent else {}),
    }  # fmt: skip


def _print_waits(waits: list[dict[str, str]], questions: list[dict[str, Any]], args: Namespace) -> None:
    """Print what a run waits for, with the command that answers it."""
    for wait in waits:
        field("waiting_for", f"{wait['kind']} {wait['name']!r}")
        asked = [each for each in questions if each["name"] == wait["name"]]
        question = asked.pop(0) if asked else None
        if question is not None:
            questions.remove(question)
            _print_question(question)
        is_one = [each["name"] for each in waits].count(wait["name"]) == 1
        request_id = None if question is None or is_one else question["request_id"]
        field("answer with", store.answer_command(args, wait, request_id))


def _print_question(question: dict[str, Any]) -> None:
    details = question["details"]
    if isinstance(details, dict) and "tool_name" in details:
        arguments = json.dumps(details.get("tool_args"), ensure_ascii=False, default=str)
        field("tool_call", f"{details['tool_name']} {arguments}")
    if question["problem"]:
        field("problem", question["problem"])


def _print_run(details: dict[str, Any], args: Namespace) -> None:
    details = with_human_times(in_words(without_secrets(details)))
    error = details["error"]
    shown = {**details, "error": error and f"{error.get('type')}: {error.get('message')}"}
    for name, value in shown.items():
        if name in ("steps", "events"):
            print_line("")
            print_line(name if value else f"no {name}")
            lines = [
                {
                    **with_human_times(each, local=False),
                    "payload": json.dumps(each.get("payload"), default=str),
                    **({"event_type": agent_type(each["event_type"])} if each.get("from_agent") else {}),
                }
                for each in value
            ]
            if value:
                table(lines, _STEPS if name == "steps" else _EVENTS)
        elif name == "waiting_for":
            _print_waits(value, details["questions"], args)
        elif name == "why":
            for each in value:
                if each["kind"] not in ("error", "question") and not (
                    each["kind"] == "wait" and details["waiting_for"]
                ):
                    field(name, each["text"])
        elif name == "tags" and value:
            field(name, ", ".join(value))
        elif name not in ("open_approvals", "questions", "tags") and value not in (
            None,
            False,
        ):  # they are in waiting_for
            field(name, json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value)
            if name == "error" and (command := store.resume_command(args, error)) is not None:
                field("raise it with", command)


async def events(args: Namespace) -> int:
    async with store.existing_store(args, reads=True) as runner:
        row = await store.require_run(runner, args.id, args.tenant)
        since = args.since if args.after is None else args.after + 1
        if not args.follow:
            found = await runner.event_bus.get_events(row.run_id, since)
            shown = [each for each in found if _wanted(args, each)]
            if args.json:
                print_json([event_fields(each) for each in shown])
            for each in () if args.json else shown:
                _print_event(each)
            if args.type and not shown:
                warn(_no_event(args, found))
            return 0
        async with contextlib.aclosing(runner.stream(row.run_id, since)) as stream:
            async for event in stream:
                if not _wanted(args, event):
                    continue
                if args.json:
                    json_line(event_fields(event))
                else:
                    _print_event(event)
                    sys.stdout.flush()
    return 0


def _no_event(args: Namespace, found: Sequence[Event]) -> str:
    known = {each.event_type for each in found} | {each.value for each in EventType}
    asked = " or ".join(map(repr, args.type))
    hints = [hint for each in args.type if "Did" in (hint := did_you_mean(each, known))]
    return " ".join((f"run {args.id!r} has no event of type {asked}.", *hints[:1]))


def _wanted(args: Namespace, event: Event) -> bool:
    return not args.type or any(fnmatch.fnmatchcase(event.event_type, each) for each in args.type)


def _print_event(event: Event) -> None:
    fields = in_words(without_secrets(event_fields(event)))
    payload = json.dumps(fields["payload"], ensure_ascii=False, default=str)
    time = human_time(fields["timestamp"], local=False)
    print_columns((f"{event.sequence}", 5), (time, 32), (shown_type(event), 18), (payload, 0))


_COLUMNS = ("run_id", "run_key", "tenant", "agent_key", "attempt", "ended_at", "reason", "error")


async def list_dead(args: Namespace) -> int:
    async with store.existing_store(args, reads=True) as runner:
        found = [
            await summary(runner, row, end=True) async for row in store.rows_of(runner, args.status, tenant=args.tenant)
        ]
    if args.json:
        print_json(found)
    else:
        rows = [{**each, "error": (each["error"] or {}).get("message")} for each in found]
        table([with_human_times(each, local=False) for each in rows], _COLUMNS, optional=("tenant",))
    return 0


async def requeue(args: Namespace) -> int:
    return await _apply_to_runs(
        args, "requeued", lambda runner, run_id: runner.requeue(run_id, limits=store.limits_from(args))
    )


async def discard(args: Namespace) -> int:
    return await _apply_to_runs(args, "discarded", lambda runner, run_id: runner.discard(run_id))


async def _apply_to_runs(args: Namespace, done: str, act: Callable[[AgentRunner, str], Awaitable[Any]]) -> int:
    """Apply `act` to every named run; warn about those that do not exist or are in another status."""
    if bool(args.ids) == args.all:
        raise InvalidArgument("pass run ids or --all" if not args.ids else "pass either run ids or --all, not both")
    changed, refused = list[str](), dict[str, str]()
    async with store.existing_store(args) as runner:
        rows = store.rows_of(runner, args.status, tenant=args.tenant)
        ids = [row.run_id async for row in rows] if args.all else list(dict.fromkeys(args.ids))
        if args.all and asks(args):
            what = f"delete {counted(len(ids), f'{args.status} run')} from {store.display_name(runner, args.url)}"
            if not confirmed(what):
                return 1
        for run_id in ids:
            try:
                row = await store.require_run(runner, run_id, args.tenant)
                if row.status != args.status:
                    refused[run_id] = f"run {run_id!r} must be {args.status}, got {row.status}"
                    continue
                if not args.dry_run:
                    await act(runner, row.run_id)
                changed.append(run_id)
            except (UnknownRun, IllegalTransition) as error:
                refused[run_id] = str(error)
    for reason in refused.values():
        warn(reason)
    if args.json:
        print_json({done: changed, "refused": refused, "dry_run": args.dry_run})
    else:
        print_line(f"{counted(len(changed), 'run')} {'would be ' if args.dry_run else ''}{done}")
    return 1 if refused else 0
