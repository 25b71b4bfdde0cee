"""Settings and arguments of a runner, and the description of a run that it returns."""

from __future__ import annotations

import contextlib
import datetime as _dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal
from uuid import UUID

from .._core.arguments import checked_int, checked_name, checked_tenant, checked_time, mapping, run_input
from .._core.clock import aware, shown_duration
from .._core.codec.json import decode_dict
from .._core.ids import known_uuid, stored_id
from .._core.settings import DURATION, SECONDS, TRUTH, SettingType, check_all, with_known_names
from .._core.validation import Shown, must, type_name, unknown
from .._execution.context import conversation_id
from ..config import HEARTBEAT_SECONDS, LEASE_SECONDS, SETTINGS, DefaultSeconds, RuntimeConfig
from ..errors import InvalidArgument, RunBusy
from ..limits import RATE_LIMIT, TURNS, RateLimit, RunLimits
from ..queue.base import RunQueue, conversation_of
from ..queue.contents import ContentFilter, checked_tag, comparable, tags_in, without_tags
from ..queue.records import RunFilter, RunRow, open_questions
from ..status import TERMINAL, RunStatus, status_words
from ..tools.registry import ToolRegistry

SHUTDOWN_SECONDS = 2.0  # seconds that cancelled runs have to stop after the grace


@with_known_names
@dataclass(frozen=True)
class RunnerConfig:
    """Settings of a runner. Times are in seconds.

    Attributes:
        worker_id: Names the worker in claims, logs and `RunInfo.worker`.
        run_timeout_seconds: Time limit of one attempt in seconds; inf is no limit. Time that the run waits does not
            count. An agent may have its own limit, which may be higher.
        heartbeat_interval_seconds: Time between two extensions of a lease; at most a third of the lease. On Redis and
            PostgreSQL the default is 10.
        lease_ttl_seconds: Time after which another worker takes over the runs of a crashed worker. On Redis and
            PostgreSQL the default is 30.
        max_retries: Failed attempts after which a run is `failed`, including the first attempt. Crashes do not count.
        max_crashes: Crashes of its worker in a row, without a new recorded step, after which a run is `dead`. With 1,
            the other runs of that worker are dead too. From 2 on, the run is executed alone before its last crash.
        other_code_timeout_seconds: How long workers leave a run to each other that code of another version began. After
            that the run fails with JournalMismatch.
        retry_backoff_base: Base of the exponential delay before the next attempt.
        retry_backoff_max: Longest delay before the next attempt.
        park_after: How long a run waits in memory before it is parked.
        grace_seconds: Time for active runs to finish on shutdown, for a `cancel` hook to release what its run
            holds, and for an audit store to answer.
        retention: How long `vacuum` keeps finished runs, by status.
        limits: Limits of the agent loop of each run. An agent and a run can only set stricter limits.
        max_unsent_bytes: How many bytes of an answer a reader with `stream(…, backpressure=True)` may lag.
        keep_unanswered: Whether a run that failed or timed out leaves in its conversation also the user's messages that
            no complete turn follows, marked as unanswered.
        stall_timeout_seconds: An attempt that records nothing for that long ends; None is no limit. Time that the run
            waits does not count. An agent may have its own limit.
        rate_limit: How many of the runs that this runner submits start in a period, in all workers on the store. An
            agent with its own `rate_limit` has that limit instead.
        take_turns: Among runs of equal priority, those with different turns are claimed in turns, so that many runs of
            one tenant do not delay another tenant. "tenant": the tenant of a run is its turn. A function is called with
            the input of each new run and returns the turn, or None. Set it where runs are submitted, and for workers.

    Examples:
        >>> from agent_runtime_core import RunnerConfig
        >>> RunnerConfig(max_retries=5, lease_ttl_seconds=30).heartbeat_interval
        10.0
    """

    worker_id: str = "worker-1"
    run_timeout_seconds: float = 300
    heartbeat_interval_seconds: float = HEARTBEAT_SECONDS
    lease_ttl_seconds: float = LEASE_SECONDS
    max_retries: int = 3
    max_crashes: int = 3
    other_code_timeout_seconds: float = 600
    retry_backoff_base: float = 2
    retry_backoff_max: float = 300
    park_after: float = 5.0
    grace_seconds: float = 25.0
    retention: Mapping[str, float] = field(default_factory=dict)
    limits: RunLimits | None = None
    max_unsent_bytes: int = 131072
    keep_unanswered: bool = True
    stall_timeout_seconds: float | None = None
    rate_limit: RateLimit | None = None
    take_turns: Literal["tenant"] | Callable[[Mapping[str, Any]], str | None] | None = None

    def __post_init__(self) -> None:
        for name, kind in _SETTINGS.items():
            kind.check(name, getattr(self, name))
        check_all(self.retention, dict.fromkeys(TERMINAL, DURATION), "retention", "final status")

    @property
    def heartbeat_interval(self) -> float:
        """Seconds between two heartbeats: a third of the lease at most."""
        return min(self.heartbeat_interval_seconds, self.lease_ttl_seconds / 3)

    @property
    def silence_seconds(self) -> float:
        """Seconds without an answer of the store after which code is stopped, because the lease may end."""
        return self.lease_ttl_seconds * 2 / 3

    def on(self, queue: RunQueue) -> RunnerConfig:
        """Return the settings of a runner on a queue, which recommends values where the user set none.

        Args:
            queue: The queue of the runner.
        """
        unset: dict[str, Any] = {
            name: value
            for name, value in queue.recommended_settings.items()
            if isinstance(getattr(self, name), DefaultSeconds)
        }
        return replace(self, **unset) if unset else self

    @classmethod
    def of(cls, config: RuntimeConfig) -> RunnerConfig:
        """Return a RunnerConfig with the values of the process configuration.

        Args:
            config: The settings of the process.
        """
        return cls(**{name: getattr(config, name) for name in _OF_PROCESS})


class _Name(SettingType):
    """A name that every store can keep, whose error says what is wrong with it."""

    def check(self, called: str, value: Any) -> None:
        try:
            checked_name(called, value)
        except InvalidArgument:
            if self.shown(value) == value:
                raise
            raise must(called, f"be {self.wanted}", self.shown(value)) from None


#: The settings that a runner takes from the settings of the process.
_OF_PROCESS = [each.name for each in fields(RunnerConfig) if each.name in SETTINGS]
_SETTINGS = {
    "worker_id": _Name("a string of 1 to 512 characters without control characters", lambda value: True),
    **{name: SETTINGS[name] for name in _OF_PROCESS},
    **dict.fromkeys(("grace_seconds", "other_code_timeout_seconds"), SECONDS),
    "keep_unanswered": TRUTH,
    "rate_limit": RATE_LIMIT,
    "take_turns": TURNS,
    "limits": SettingType("RunLimits(...) or None", lambda value: value is None or isinstance(value, RunLimits)),
    "retention": SettingType("a dict of seconds by final status", lambda value: isinstance(value, Mapping)),
}


@dataclass(frozen=True)
class RunInfo:
    """A run as `get_run` and `runs` return it. Times are aware datetimes in UTC.

    Attributes:
        run_id: The id of the run.
        run_key: The run id that you passed, if it was not a UUID; else None.
        agent_key: The key of the agent that executes the run.
        status: The status of the run.
        attempt: The number of the run attempt, from 1.
        generation: 1 at first, plus 1 each time the run is reopened.
        input: The input of the run.
        metadata: What the caller stored with the run.
        priority: Runs with a greater priority are claimed first.
        created_at: When the run was stored.
        scheduled_at: The earliest time of the next attempt, or when the timer of a waiting run is due; None if there is
            none.
        started_at: When the first attempt started; None before.
        ended_at: When the run finished; None before.
        deadline: When the run is stopped; None for a run without a deadline.
        reason: What a waiting run waits for, or why a finished run finished.
        worker: The worker that executes the run, or executed it last.
        parent_run_id: The run that this is a child of, or None.
        cancel_requested: Whether the run was asked to stop.
        concurrency_key: Runs with the same key execute one at a time; None for a run without a key.
        held: Whether the run is blocked: another run with its concurrency key goes first.
        open_approvals: The names of the questions that the run asks people now; see `runner.approvals`.
        tenant: Whose run it is. Run keys, idempotency keys, concurrency keys and conversations are names within a
            tenant.
        tags: The tags of the run.

    Examples:
        >>> from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
        >>> class Hello(AgentRuntime):
        ...     key = "hello"
        ...     def run(self, ctx):
        ...         return RunResult(final_output={"to": ctx.params["name"]})
        >>> runner = AgentRunner.open("memory://")
        >>> runner.execute_sync(Hello(), run_id="hello-1", params={"name": "Ada"}).final_output
        {'to': 'Ada'}
        >>> from agent_runtime_core.portal import call
        >>> info = call(runner.get_run, "hello-1")
        >>> info.agent_key, info.status.value, info.attempt
        ('hello', 'succeeded', 1)
    """

    run_id: UUID
    run_key: str | None
    agent_key: str
    status: RunStatus
    attempt: int
    generation: int
    input: dict[str, Any]
    metadata: dict[str, Any]
    priority: int
    created_at: _dt.datetime
    scheduled_at: _dt.datetime | None
    started_at: _dt.datetime | None
    ended_at: _dt.datetime | None
    deadline: _dt.datetime | None
    reason: str
    worker: str | None
    parent_run_id: UUID | None
    cancel_requested: bool
    concurrency_key: str | None
    held: bool
    open_approvals: tuple[str, ...] = ()
    tenant: str | None = None
    tags: tuple[str, ...] = ()

    @classmethod
    def of(cls, row: RunRow) -> RunInfo:
        """Return the description of a stored run.

        Args:
            row: The row of the run.
        """

        def when(seconds: float | None) -> _dt.datetime | None:
            return aware(seconds) if seconds else None

        decoded = row.decoded
        metadata = decoded("metadata", partial(decode_dict, known=True))
        return cls(
            run_id=decoded("run_id", known_uuid),
            run_key=row.run_key,
            agent_key=row.agent,
            status=decoded("status", RunStatus),
            attempt=row.attempt,
            generation=row.generation,
            input=decoded("input", partial(decode_dict, known=True)),
            metadata=without_tags(metadata),
            priority=row.priority,
            created_at=decoded("created_at", aware),
            scheduled_at=decoded("due_at", when),
            started_at=decoded("started_at", when),
            ended_at=decoded("ended_at", when),
            deadline=decoded("deadline", when),
            reason=row.reason,
            worker=row.worker or None,
            parent_run_id=None if row.parent_id is None else decoded("parent_id", UUID),
            cancel_requested=row.cancel_at is not None,
            concurrency_key=row.concurrency_key,
            held=row.blocked > 0,
            open_approvals=tuple(question.name for question in open_questions(row)),
            tenant=row.tenant or None,
            tags=tags_in(metadata),
        )


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


def checked_input(input: Any, params: Any, input_data: Any = None) -> dict[str, Any]:
    """Return what `run_input` returns, or raise InvalidArgument for an input whose messages are not a list."""
    merged = run_input(input, params, input_data=input_data)
    messages = merged.get("messages")
    if messages is not None and not isinstance(messages, (list, tuple)):
        name = "input" if input_data is None else "input_data"
        example = "Example: [{'role': 'user', 'content': 'hi'}]"
        raise must(f"{name}['messages']", "be a list of dicts", messages, example)
    return merged


def concurrency_key_of(key: str | None, input: Mapping[str, Any], parent: UUID | str | None) -> str | None:
    """Return the concurrency key of a run: the passed key, else the key of its conversation.

    By default a child run has none: its parent, which waits for it, may hold the slot.
    """
    if key is not None or parent is not None or not isinstance(input, Mapping):
        return key
    conversation = input.get("conversation_id")
    if conversation is None or conversation == "":
        return None
    try:
        conversation = str(conversation)
    except Exception:  # noqa: BLE001 - nested too deeply, a number too long, or a custom __str__
        raise must("input['conversation_id']", "be a UUID or a string", conversation) from None
    with contextlib.suppress(ValueError):
        conversation = UUID(conversation)
    key = f"conversation:{conversation}"
    try:
        return checked_name("concurrency_key", key)
    except (
        InvalidArgument
    ):  # too long, or with line breaks: an id may be any string, and the user did not choose this key
        return f"conversation:{conversation_id(conversation)}"


def run_filter(
    status: RunStatus | str | Sequence[RunStatus | str] | None, agent: str | None, since: _dt.datetime | float | None,
    until: _dt.datetime | float | None, prefix: str | None, parent: UUID | str | None, conversation: UUID | str | None,
    concurrency_key: str | None, reason: str | None, newest_first: bool, limit: int, tenant: str | None,
    *, min_attempts: int, contents: ContentFilter,
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
        min_attempts=checked_int("min_attempts", min_attempts),
        contents=contents,
    )  # fmt: skip


def content_filter(
    metadata: Mapping[str, Any] | None, tag: str | None, error_type: str | None, code_version: str | None,
    search: str | None,
) -> ContentFilter:  # fmt: skip
    """Return the conditions on the contents of runs, or raise InvalidArgument about one of them."""
    pairs = mapping("metadata", metadata)
    if (wrong := next((key for key in pairs if not isinstance(key, str)), None)) is not None:
        raise must("a key of metadata", "be a string", wrong)
    if search is not None and (not isinstance(search, str) or not search.strip()):
        raise must("search", "be a string that is not empty", search)
    return ContentFilter(
        tuple((key, comparable(value)) for key, value in pairs.items()),
        None if tag is None else checked_tag(tag),
        None if error_type is None else checked_name("error_type", error_type),
        None if code_version is None else checked_name("code_version", code_version),
        None if search is None else search.strip(),
    )


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
    """Return the error for a `take` without a claim: another process executes the run, or its slot is in use."""
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
        f"run {str(run_id)!r} {status_words(row.status)}, so it accepts no messages. "
        f"Start a new run{where}: runner.submit({row.agent!r}, {{{fields}}})"
    )
