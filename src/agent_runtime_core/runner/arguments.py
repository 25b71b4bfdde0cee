"""Check the arguments of a runner, and make the errors of runs that it cannot claim or send to."""

from __future__ import annotations

import contextlib
import datetime as _dt
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from .._core.arguments import checked_int, checked_name, checked_tenant, checked_time, mapping
from .._core.clock import shown_duration
from .._core.codec.json import decode_dict
from .._core.ids import stored_id
from .._core.validation import Shown, must, type_name, unknown
from .._execution.context import conversation_id
from ..config import SETTINGS
from ..errors import InvalidArgument, RunBusy
from ..queue.base import conversation_of
from ..queue.records import RunFilter, RunRow
from ..status import RunStatus, status_words
from ..tools.registry import ToolRegistry
from .settings import RunnerConfig


def check_parts(config: object, tools: object, trace_sinks: object, persistence: object) -> None:
    """Raise InvalidArgument for arguments that no runner can use, before anything is opened."""
    if config is not None and not isinstance(config, RunnerConfig):
        raise must("config", "be a RunnerConfig", Shown(type_name(type(config))), "Write RunnerConfig(...)")
    if tools is not None and not isinstance(tools, ToolRegistry):
        raise must("tools", "be a ToolRegistry", tools, "Register each tool in one with register(tool)")
    SETTINGS["trace_sinks"].check("trace_sinks", trace_sinks)
    if persistence is not None and persistence != "default" and not hasattr(persistence, "document_stores"):
        got, fix = Shown(type_name(type(persistence))), "Open one with PersistenceManager.open(path_or_url)"
        raise must("persistence", "be a PersistenceManager, None or 'default'", got, fix)


def check_messages(input: Any) -> None:
    """Raise InvalidArgument for an input whose messages are not a list."""
    messages = input.get("messages") if isinstance(input, Mapping) else None
    if messages is not None and not isinstance(messages, (list, tuple)):
        example = "Example: [{'role': 'user', 'content': 'hi'}]"
        raise must("input_data['messages']", "be a list of dicts", messages, example)


def merged_input(input_data: Any, params: Any, *, name: str = "input_data") -> dict[str, Any]:
    """Return the input of a run, with `params` merged into its "params"; `name` is that of the caller's argument."""
    merged = mapping(name, input_data)
    check_messages(merged)
    if more := mapping("params", params):
        merged["params"] = {**mapping(f"{name}['params']", merged.get("params")), **more}
    return merged


def concurrency_key_of(key: str | None, input: Mapping[str, Any], parent: UUID | str | None) -> str | None:
    """Return the concurrency key of a run: the one that was passed, else that of its conversation.

    A child run has none by default: its parent, which waits for it, may hold the slot.
    """
    if key is not None or parent is not None or not isinstance(input, Mapping):
        return key
    conversation = input.get("conversation_id")
    if conversation is None or conversation == "":
        return None
    try:
        conversation = str(conversation)
    except Exception:  # noqa: BLE001 - nested too deeply, a number too long, or a custom __str__
        raise must("input_data['conversation_id']", "be a UUID or a string", conversation) from None
    with contextlib.suppress(ValueError):
        conversation = UUID(conversation)
    key = f"conversation:{conversation}"
    try:
        return checked_name("concurrency_key", key)
    except (
        InvalidArgument
    ):  # too long, or with line breaks: an id may be any string, and the user has not chosen this key
        return f"conversation:{conversation_id(conversation)}"


def run_filter(
    status: RunStatus | str | Sequence[RunStatus | str] | None, agent: str | None, since: _dt.datetime | float | None,
    until: _dt.datetime | float | None, prefix: str | None, parent: UUID | str | None, conversation: UUID | str | None,
    concurrency_key: str | None, reason: str | None, newest_first: bool, limit: int, tenant: str | None = None,
) -> RunFilter:  # fmt: skip
    """Return the filter of `AgentRunner.runs`, or raise InvalidArgument about an argument of it."""
    if agent is not None and not isinstance(agent, str):
        raise must("agent", "be an agent key", agent, "Pass agent.key")
    if not isinstance(newest_first, bool):
        raise must("newest_first", "be True or False", newest_first)
    begin = (checked_time("since", since) if since else None) or 0.0
    end = checked_time("until", until)
    if end is not None and end < begin:
        raise must("until", f"be at least since ({begin:g})", until)
    of_conversation = None if conversation is None else conversation_of({"conversation_id": conversation})
    if conversation is not None and of_conversation is None:
        raise must("conversation", "be a UUID or a non-empty string", conversation)
    owner = checked_tenant(tenant)
    return RunFilter(
        _statuses(status), agent, begin, limit=checked_int("limit", limit), until=end, newest_first=newest_first,
        prefix=None if prefix is None else checked_name("prefix", prefix),
        parent=None if parent is None else stored_id(parent, owner),
        conversation=of_conversation,
        concurrency_key=None if concurrency_key is None else checked_name("concurrency_key", concurrency_key),
        reason=None if reason is None else checked_name("reason", reason),
        tenant=owner or None,
    )  # fmt: skip


def _statuses(status: RunStatus | str | Sequence[RunStatus | str] | None) -> tuple[str, ...] | None:
    if status is None:
        return None
    if isinstance(status, str) or not isinstance(status, Iterable):
        status = (status,)
    found = [*status]
    for each in found:
        if each not in RunStatus.__members__.values():
            raise InvalidArgument(unknown("status", each, RunStatus))
    return tuple(dict.fromkeys(RunStatus(each).value for each in found))


def run_busy_error(outcome: str, there: RunRow, now: float) -> RunBusy:
    """Return the error for a `take` without a claim: another process executes the run, or another run has its slot."""
    worker = there.worker if there.status == "running" else None
    since = there.claimed_at if worker else None
    return RunBusy(
        there.run_key or there.run_id, worker, since, there.concurrency_key if outcome == "behind" else None,
        ago="" if since is None else shown_duration(now - since),
    )  # fmt: skip


def no_messages_reason(row: RunRow, run_id: UUID | str) -> str:
    """Return why a finished run accepts no messages, and how to continue its conversation."""
    conversation = row.decoded("input", decode_dict).get("conversation_id")
    fields = "'messages': [...]" if conversation is None else f"'messages': [...], 'conversation_id': {conversation!r}"
    where = "" if conversation is None else " of its conversation"
    return (
        f"run {str(run_id)!r} {status_words(row.status)} and accepts no messages. "
        f"Start a new run{where}: runner.submit({row.agent!r}, {{{fields}}})"
    )
