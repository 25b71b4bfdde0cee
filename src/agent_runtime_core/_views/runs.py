"""Runs: the summary of the command line, the whole run, what it waits for, and rows of lists."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, cast

from .._core.clock import aware
from .._core.codec.json import decode_known
from .._core.ids import step_id, stored_id
from .._core.lazy_import import load
from .._core.validation import unknown
from .._engines.payloads import mark_in
from .._execution.journal_view import JournalView
from .._execution.usage import charged_by_model, reported_by
from .._journal.record import DONE, STARTED, Record, is_copied
from ..errors import MOST_NAMED, InvalidArgument, UnknownRun
from ..interfaces import AgentRuntime
from ..limits import COSTS, RunLimits, sum_usd
from ..queue.base import RunQueue
from ..queue.contents import TAGS, tags_in, without_tags
from ..queue.records import ACTED, IN_DOUBT, LIMITS, LIVE, QUESTION, RunFilter, RunRow, answered_request, open_questions
from ..registry import Registry
from ..runner.approvals import ApprovalRequest, decisions, open_requests_of
from ..runner.finding import duration_of
from ..runner.run_client import RunClient
from ..status import failure_reason, short_status
from .attempts import LIST, LOOP, step_views
from .journal import ended_record, last_error, outcome_in, outcomes_of, result_in
from .plain import iso_time, plain_of, plain_value, shortened_error
from .problems import invalid_field
from .reasons import Visible, forked_from, reasons_of

#: Most steps in the view of a run; `step_views` pages over all of them.
SHOWN_STEPS = 200


async def row_named(queue: RunQueue, run_id: str, tenant: str | None) -> RunRow:
    """Return the row of the run with this id, or with this run key: of the tenant, or the only run of that key.

    Raises:
        Problem: Runs of several tenants use the key.
        UnknownRun: No run is stored under this id, or the text can be no id.
    """
    try:
        stored_id(run_id)
    except InvalidArgument:
        raise UnknownRun("no run has this id") from None
    try:
        return await queue.require(run_id, tenant)
    except InvalidArgument:  # its message quotes the key, which answers do not
        found = await queue.find_runs(RunFilter(run_key=run_id, light=True, limit=MOST_NAMED + 1))
    names = ", ".join(sorted(each.tenant for each in found)[:MOST_NAMED]) + ", …" * (len(found) > MOST_NAMED)
    detail = f"Several tenants have a run with this key: {names}. Send the parameter tenant, or the run id."
    raise invalid_field("tenant", detail)


async def summary(runner: RunClient, row: RunRow, *, end: bool = False) -> dict[str, Any]:
    """Return the fields of a run under their names in `RunInfo`; with `end` also its error and usage."""
    fields: dict[str, Any] = {
        "run_id": row.run_id, "run_key": row.run_key, "tenant": row.tenant or None, "agent_key": row.agent,
        "status": row.status, "attempt": row.attempt, "generation": row.generation, "priority": row.priority,
        "reason": row.reason or None,
        "created_at": iso_time(row.created_at, "seconds"), "scheduled_at": iso_time(row.due_at, "seconds"),
        "started_at": iso_time(row.started_at, "seconds"), "ended_at": iso_time(row.ended_at, "seconds"),
        "deadline": iso_time(row.deadline, "seconds"), "worker": row.worker or None, "parent_run_id": row.parent_id,
        "cancel_requested": row.cancel_at is not None, "concurrency_key": row.concurrency_key, "held": row.blocked > 0,
        "open_approvals": [each.name for each in open_questions(row)], "tags": tags_of(row),
    }  # fmt: skip
    if end:
        ends = {} if row.status in LIVE else await runner.state_store.endings([row.run_id])
        fields["error"], usage = outcome_in(row, ends.get(row.run_id))
        fields["usage"] = usage or None
    return fields


async def list_items(runner: RunClient, rows: Sequence[RunRow], visible: Visible | None = None) -> list[dict[str, Any]]:
    """Return the items of a list for these rows, which may lack the input, with a bounded number of reads.

    `visible` returns whether the caller may see a run; None: the caller may see all.
    """
    outcomes = await outcomes_of(runner, rows)
    now = runner.queue.clock.wall()
    items = [_list_item(row, now, *outcome) for row, outcome in zip(rows, outcomes, strict=True)]
    reasons = await reasons_of(runner, rows, [each["error"] for each in items], visible)
    return [{**item, "why": why} for item, why in zip(items, reasons, strict=True)]


def tags_of(row: RunRow) -> list[str]:
    """Return the tags of a run; none for a row without metadata."""
    metadata = row.decoded("metadata", plain_value) if TAGS in row.metadata else {}
    return [*tags_in(metadata)]


def plain_metadata(row: RunRow) -> Any:
    """Return the metadata of a run as its caller passed it, as plain values."""
    metadata = row.decoded("metadata", plain_value)
    return without_tags(metadata) if isinstance(metadata, dict) else metadata


def _list_item(row: RunRow, now: float, error: Any, usage: dict[str, Any]) -> dict[str, Any]:
    seconds = duration_of(row, now)
    return {
        "run_id": row.run_id, "key": row.run_key, "agent": row.agent, "state": row.status,
        "status": short_status(row.status), "attempt": row.attempt, "created_at": iso_time(row.created_at),
        "started_at": iso_time(row.started_at), "ended_at": iso_time(row.ended_at),
        "updated_at": iso_time(row.updated_at), "scheduled_at": iso_time(row.due_at),
        "age_seconds": round(max(now - row.created_at, 0.0), 3),
        "duration_seconds": None if seconds is None else round(seconds, 3),
        "reason": row.reason or None, "waiting_for": waiting_words(row), "tokens": usage.get("total_tokens"),
        "cost_usd": usage.get("cost_usd"), "error": shortened_error(error), "parent": row.parent_id,
        "conversation_id": row.conversation, "concurrency_key": row.concurrency_key, "worker": row.worker or None,
        "tenant": row.tenant or None, "tags": tags_of(row), "fork_of": forked_from(row),
    }  # fmt: skip


def waiting_words(row: RunRow) -> list[str]:
    """Return the names of the open questions of a run, or else the reason for which it waits."""
    names = [each.name for each in open_questions(row)]
    return names or ([row.reason] if row.status == "waiting" and row.reason else [])


async def run_view(
    runner: RunClient,
    row: RunRow,
    registry: Registry | None = None,
    *,
    records: Sequence[Record] | None = None,
    new: bool = False,
    visible: Visible | None = None,
) -> dict[str, Any]:
    """Return a run with all its fields.

    Args:
        runner: The runner on the store.
        row: The run, with its input.
        registry: The agents that this process knows; by default the agents of the runner.
        records: The journal of the run, if it has been read.
        new: The run was just stored: there is nothing else to read about it.
        visible: Returns whether the caller may see another run. None: the caller may see all.
    """
    if records is None:
        records = [] if new else await runner.state_store.records(row.run_id)
    ended = await ended_record(runner, row)
    result = {} if row.status in LIVE else result_in(row, ended)
    error = last_error(row) if row.status in LIVE else result.get("error")
    why = [] if new else (await reasons_of(runner, [row], [shortened_error(error)], visible))[0]
    agent = (registry or runner.registry).get(row.agent)
    input_ = row.decoded("input", plain_value)
    steps = step_views(row, records, limit=SHOWN_STEPS)
    view = {
        "run_id": row.run_id, "status": short_status(row.status),
        "steps": steps["items"], "next_step": steps["next"],
        "result": result.get("final_output") if row.status == "succeeded" else None,
        "error": None if row.status in (*LIVE, "succeeded") else _reason(row, error),
        "created_at": iso_time(row.created_at), "updated_at": iso_time(_updated_at(row, records)),
        "state": row.status, "agent": row.agent, "key": row.run_key, "tenant": row.tenant or None,
        "attempt": row.attempt, "generation": row.generation, "reason": row.reason or None,
        "worker": row.worker or None, "parent": row.parent_id, "children": [] if new else await _children(runner, row),
        "usage": _usage(row, records, result), "limits": await _limits(runner, row, agent),
        "trace_id": row.run_id.replace("-", ""), "conversation_id": row.conversation or _conversation(input_),
        "waiting_for": [] if new else (await waits_of(runner, row, records))[0],
        "questions": await questions_of(runner, row), "actions": await _actions(runner, row),
        "concurrency_key": row.concurrency_key, "queued_behind_key": row.blocked > 0,
        "priority": row.priority, "metadata": plain_metadata(row), "tags": tags_of(row), "input": input_,
        "cancel_requested": row.cancel_at is not None, "started_at": iso_time(row.started_at),
        "ended_at": iso_time(row.ended_at), "scheduled_at": iso_time(row.due_at), "deadline": iso_time(row.deadline),
        "error_info": error, "why": why, "has_messages": _has_messages(records, input_, result),
        "has_plan": _has_plan(records),
    }  # fmt: skip
    if (tried := _planned_steps(records, agent)) is not None:
        view["steps"], view["next_step"] = tried, None
        if row.status == "succeeded":
            view["result"] = (result.get("final_output") or {}).get("result")
    return view


def _has_messages(records: Sequence[Record], input_: Any, result: dict[str, Any]) -> bool:
    if isinstance(input_, dict) and (input_.get("messages") or mark_in(input_) is not None):
        return True
    if result.get("final_messages") or result.get("before"):
        return True
    return any(each.name == "model" and each.key.startswith(LOOP) for each in records)


def _has_plan(records: Sequence[Record]) -> bool:
    if any(each.key.startswith(LIST) for each in records):
        return True
    return any(each.name == "plan" for each in records) and _of_plans("plan_in")(records) is not None


async def result_view(runner: RunClient, row: RunRow) -> dict[str, Any]:
    """Return the fields of a run for its result."""
    view = await run_view(runner, row)
    return {name: view[name] for name in ("run_id", "key", "status", "state", "result", "error", "usage")}


def _planned_steps(records: Sequence[Record], agent: AgentRuntime | None) -> list[dict[str, Any]] | None:
    if agent is None and not any(each.name == "plan" for each in records):
        return None  # most runs: `planning` is not imported
    return cast("list[dict[str, Any]] | None", _of_plans("planned_steps")(records, agent))


@lru_cache(maxsize=2)
def _of_plans(name: str) -> Any:
    return load(f".plan:{name}", package=__package__)


def _reason(row: RunRow, error: dict[str, Any] | None) -> str:
    kind, message = (None, "") if error is None else (error.get("type"), error.get("message"))
    return failure_reason(row.status, kind, message or "")


def _updated_at(row: RunRow, records: Sequence[Record]) -> float:
    return max(row.created_at, row.updated_at, row.started_at or 0.0, row.ended_at or 0.0, *(r.t for r in records[-1:]))


async def _actions(runner: RunClient, row: RunRow) -> list[dict[str, Any]]:
    """Return who has answered, cancelled and resumed a run: {"action", "name", "by", "at"}.

    The name is the name of an approval or review. An answer that came too late is left out.
    """
    mail = await runner.queue.mail(row.run_id) if row.mail_seq else []
    answers, decided = {each.msg_id: each for each in mail if each.kind == "signal"}, decisions(mail)
    found = []
    for each in mail:
        if each.kind != ACTED:
            continue
        answer = answers.get(each.msg_id.removeprefix(f"{ACTED}:"))
        request = answered_request(answer.msg_id) if answer is not None else None
        if request is None or decided[request] is answer:
            found.append({
                "action": each.name, "name": None if answer is None else answer.name,
                "by": plain_value(each.payload)["by"], "at": iso_time(each.t),
            })  # fmt: skip
    return found


async def _children(runner: RunClient, row: RunRow) -> list[dict[str, Any]]:
    children = await runner.queue.children(row.run_id)
    return [
        {"run_id": each.run_id, "key": each.run_key, "agent": each.agent, "state": each.status} for each in children
    ]


def _usage(row: RunRow, records: Sequence[Record], result: dict[str, Any]) -> dict[str, Any]:
    """Return what a run has used: as its result says, or so far as its journal says."""
    if row.status not in LIVE and (usage := result.get("usage")):
        return dict(usage)
    if not records:
        return {}
    return JournalView(row.run_id, records, lambda: 0.0).usage()


async def _limits(runner: RunClient, row: RunRow, agent: AgentRuntime | None) -> dict[str, Any]:
    """Return the limits of a run: the strictest of its runner, agent and input, then those that `resume` has set."""
    limits = RunLimits.of(runner.config.limits)
    # The view of each new run comes here: most inputs have no limits, and need not be decoded for them.
    given = row.decoded("input", decode_known) if '"limits"' in row.input else None
    for each in (getattr(agent, "limits", None), given.get("limits") if isinstance(given, dict) else None):
        try:
            limits = limits.stricter(each)
        except (InvalidArgument, TypeError):  # the run failed for that reason, or it is not what this library sets
            continue
    found = limits.as_dict()
    found.pop("pools", None)  # what they allow is not about this run, and their names may be those of other tenants
    if row.generation > 1 and row.mail_seq:
        for message in await runner.queue.mail(row.run_id):
            if message.kind == LIMITS:
                found |= json.loads(message.payload) | {"pools": None}
    return {name: value for name, value in found.items() if value is not None}


def _conversation(input_: Any) -> str | None:
    """Return the conversation in the input of a run. The rows of older releases contain none."""
    found = input_.get("conversation_id") if isinstance(input_, dict) else None
    return None if found is None else str(found)


async def waits_of(
    runner: RunClient, row: RunRow, records: Sequence[Record] | None = None
) -> tuple[list[dict[str, str]], set[str]]:
    """Return the open waits of a run, and the names of all questions that it has asked.

    A wait is {"kind": "approval", "review" or "signal", "name": …}. A review is the question about a step in doubt.
    Pass `records` if the journal has been read.
    """
    if row.status not in LIVE:
        return [], set()
    mail = await runner.queue.mail(row.run_id)
    requested = {each.msg_id: each.name for each in mail if each.kind == QUESTION}
    # The question is stored before the record of its wait.
    waits = dict(requested)
    for record in await runner.state_store.records(row.run_id) if records is None else records:
        if record.kind == STARTED and record.key.startswith("w:") and record.name.startswith("signal:"):
            waits[step_id(row.run_id, record.name, record.key)] = record.name.removeprefix("signal:")
        elif record.kind == DONE and waits:
            waits.pop(step_id(row.run_id, record.name, record.key), None)
    for each in mail:
        waits.pop(answered_request(each.msg_id) or "", None)
    of_reason = row.reason.removeprefix("approval ")  # also if the run has asked under an older release

    def kind(wait: str, name: str) -> str:
        if name.startswith(IN_DOUBT):
            return "review"
        return "approval" if wait in requested or name == of_reason else "signal"

    return [{"kind": kind(wait, name), "name": name} for wait, name in waits.items()], set(requested.values())


async def questions_of(runner: RunClient, row: RunRow) -> list[dict[str, Any]]:
    """Return what a run asks people now, the oldest question first."""
    return [question_view(each) for each in await open_requests_of(runner.queue, row)]


def question_view(asked: ApprovalRequest) -> dict[str, Any]:
    """Return an open question with its details and the schema of its answer."""
    return {
        "run_id": str(asked.run_id), "key": asked.run_key, "tenant": asked.tenant, "agent": asked.agent_key,
        "name": asked.name, "request_id": asked.request_id, "details": plain_of(asked.details),
        "schema": plain_of(asked.schema), "asked_at": asked.asked_at.isoformat(),
        "approved_before": asked.approved_before, "problem": asked.problem,
    }  # fmt: skip


BY: Final = ("agent", "tenant", "model", "day")
DEFAULT_SECONDS: Final = 30 * 86_400.0
_PAGE: Final = 500
#: Runs that are counted at most, the newest first. By model the journal of each run is read.
MOST_RUNS: Final = {"agent": 100_000, "tenant": 100_000, "day": 100_000, "model": 2_000}

_Item = tuple[str, dict[str, Any]]


async def usage_view(
    runner: RunClient, by: str = "agent", since: float | None = None, until: float | None = None,
    tenant: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return what the runs that were created in a time have used.

    Args:
        runner: The runner on the store.
        by: "agent", "tenant" ("" for runs without a tenant), "model" or "day" (of their creation, in UTC).
        since: Wall seconds; None for 30 days before `until`.
        until: Wall seconds; None for now.
        tenant: Only runs of this tenant; None for all runs.

    Returns:
        {"by", "since", "until", "complete", "items", "total"}. Each item is {<by>, "runs", "tokens", "prompt_tokens",
        "completion_tokens", "cost_usd"}, the most expensive first. `complete` is False if there are more runs than are
        counted; `since` is then the creation of the oldest run that was. By agent, tenant and day only finished runs
        have usage; by model each model call and `ctx.charge` counts, and `runs` are those that called the model.

    Raises:
        InvalidArgument: `by` is unknown.
    """
    if by not in BY:
        raise InvalidArgument(unknown("by", by, BY))
    now = runner.queue.clock.wall()
    since = (now if until is None else until) - DEFAULT_SECONDS if since is None else since
    wanted = RunFilter(since=since, until=until, tenant=tenant, limit=_PAGE, newest_first=True, light=True)
    sums, left, complete, oldest = dict[str, dict[str, Any]](), MOST_RUNS[by], True, since
    while rows := await runner.queue.find_runs(wanted):
        for row, items in await _used(runner, by, rows[:left]):
            for name, usage in items:
                _add(sums.setdefault(name, _nothing()), usage)
            oldest = row.created_at
        left -= len(rows)
        if len(rows) < _PAGE:
            break
        if left <= 0:
            complete = False
            break
        wanted = wanted._replace(before=(rows[-1].created_at, rows[-1].arrival))
    total = _nothing()
    for each in sums.values():
        _add(total, each)
    order = sorted(sums.items(), key=lambda item: (-item[1]["cost_usd"], -item[1]["tokens"], item[0]))
    if by == "day":
        order = sorted(sums.items(), reverse=True)
    return {
        "by": by, "since": iso_time(since if complete else oldest), "until": iso_time(now if until is None else until),
        "complete": complete, "items": [{by: name, **sums_} for name, sums_ in order], "total": total,
    }  # fmt: skip


async def _used(runner: RunClient, by: str, rows: list[RunRow]) -> list[tuple[RunRow, Iterable[_Item]]]:
    if by == "model":
        return [(row, (await _by_model(runner, row)).items()) for row in rows]
    found: list[tuple[RunRow, Iterable[_Item]]] = []
    for row, (_, usage) in zip(rows, await outcomes_of(runner, rows), strict=True):
        name = f"{aware(row.created_at):%Y-%m-%d}" if by == "day" else row.tenant if by == "tenant" else row.agent
        found.append((row, [(name, {**usage, "runs": 1})]))
    return found


async def _by_model(runner: RunClient, row: RunRow) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for record in await runner.state_store.records(row.run_id):
        for model, usage in models_in(record):
            sums = found.setdefault(model or "unknown", _nothing())
            _add(sums, {**usage, "runs": 0})
            sums["runs"] = 1
    return found


def models_in(record: Record) -> Iterator[_Item]:
    """Yield what the model call of a record has used, and what its step has charged, under the names of the models."""
    if is_copied(record):
        return
    yield from charged_by_model(record).items()
    if record.kind != DONE or record.name != "model":
        return
    answer = plain_value(record.result)
    if isinstance(answer, dict) and isinstance(answer.get("message"), dict):
        yield str(answer.get("model") or ""), reported_by(record)


def _nothing() -> dict[str, Any]:
    return {"runs": 0, "tokens": 0, "prompt_tokens": 0, "completion_tokens": 0, "cost_usd": 0.0}


def _add(sums: dict[str, Any], usage: dict[str, Any]) -> None:
    for name in sums:
        value = usage.get("total_tokens", usage.get("tokens")) if name == "tokens" else usage.get(name)
        if isinstance(value, int | float):
            sums[name] = sum_usd(sums[name], value) if name in COSTS else sums[name] + value
