"""The models that stores keep: conversations, tasks, knowledge and audit records, as plain dataclasses.

All fields are keyword-only. A datetime without a time zone is compared and sorted as UTC. A store returns it as it
was passed, without a time zone.
"""

from __future__ import annotations

import datetime as _dt
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from uuid import UUID

from .._core.clock import SYSTEM, aware
from .._core.ids import run_uuid


class Scope(str, Enum):  # noqa: UP042 - StrEnum prints as its value
    """The range of a stored value: all projects of a user, one project, or one session that ends."""

    GLOBAL = "global"
    PROJECT = "project"
    SESSION = "session"


class TaskState(str, Enum):  # noqa: UP042 - StrEnum prints as its value
    """The state of a task."""

    NOT_STARTED = "not_started"
    IN_PROGRESS = "in_progress"
    COMPLETE = "complete"
    CANCELLED = "cancelled"


class FactType(str, Enum):  # noqa: UP042 - StrEnum prints as its value
    """The subject of a fact."""

    USER = "user"
    PROJECT = "project"
    PREFERENCE = "preference"
    CONTEXT = "context"
    CUSTOM = "custom"


class AuditEventType(str, Enum):  # noqa: UP042 - StrEnum prints as its value
    """The kind of event that an audit entry records."""

    CONVERSATION_START = "conversation_start"
    CONVERSATION_END = "conversation_end"
    MESSAGE_SENT = "message_sent"
    MESSAGE_RECEIVED = "message_received"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    TOOL_ERROR = "tool_error"
    AGENT_START = "agent_start"
    AGENT_END = "agent_end"
    AGENT_ERROR = "agent_error"
    CHECKPOINT_SAVED = "checkpoint_saved"
    CHECKPOINT_RESTORED = "checkpoint_restored"
    CUSTOM = "custom"


class ErrorSeverity(str, Enum):  # noqa: UP042 - StrEnum prints as its value
    """The severity of an error."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


def now() -> _dt.datetime:
    """Return the current time in UTC."""
    return aware(SYSTEM.wall())


def new_id() -> UUID:
    """Return a new random id."""
    return run_uuid(None, SYSTEM)[0]


def moment(when: _dt.datetime) -> float:
    """Return the seconds since the epoch. A datetime without a time zone is in UTC."""
    return (when if when.tzinfo is not None else when.replace(tzinfo=_dt.UTC)).timestamp()


@dataclass(kw_only=True)
class ToolCall:
    """A tool call that a message requests. The model provider chooses `id`."""

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    timestamp: _dt.datetime = field(default_factory=now)


@dataclass(kw_only=True)
class ToolResult:
    """The result of a tool call."""

    tool_call_id: str
    result: Any = None
    error: str | None = None
    timestamp: _dt.datetime = field(default_factory=now)


@dataclass(kw_only=True)
class ConversationMessage:
    """One message of a conversation.

    A message without a `parent_message_id` follows the previous message of its branch. A message with one follows its
    parent. The first message of a branch replaces its parent if both have the same role: it is an edit, or another
    answer.

    Attributes:
        run_id: The run that a runner appended the message for; None for a message that the application added.
        position: The position of the message in the messages of that run, from 0.
    """

    id: UUID = field(default_factory=new_id)
    role: str
    content: str | dict[str, Any] | list[Any] = ""
    timestamp: _dt.datetime = field(default_factory=now)
    tool_calls: list[ToolCall] = field(default_factory=list)
    tool_call_id: str | None = None
    model: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    parent_message_id: UUID | None = None
    branch_id: UUID | None = None
    run_id: UUID | None = None
    position: int | None = None


Message = ConversationMessage


@dataclass(kw_only=True)
class Conversation:
    """A conversation with the messages of all its branches, in order of arrival.

    Attributes:
        name: The `conversation_id` of its first run, if that is not a UUID. `conversation_uuid(name)` is its `id`.
    """

    id: UUID = field(default_factory=new_id)
    title: str | None = None
    messages: list[ConversationMessage] = field(default_factory=list)
    created_at: _dt.datetime = field(default_factory=now)
    updated_at: _dt.datetime = field(default_factory=now)
    metadata: dict[str, Any] = field(default_factory=dict)
    agent_key: str | None = None
    summary: str | None = None
    parent_conversation_id: UUID | None = None
    active_branch_id: UUID | None = None
    name: str | None = None


@dataclass(kw_only=True)
class Task:
    """A task.

    A task is ready once all its `dependencies` are complete. Of the ready tasks, those with the highest `priority`
    come first. `claimed_by` names the worker that has claimed the task, and `claimed_until` is the end of its lease.
    """

    id: UUID = field(default_factory=new_id)
    name: str
    description: str = ""
    state: TaskState = TaskState.NOT_STARTED
    parent_id: UUID | None = None
    created_at: _dt.datetime = field(default_factory=now)
    updated_at: _dt.datetime = field(default_factory=now)
    metadata: dict[str, Any] = field(default_factory=dict)
    dependencies: list[UUID] = field(default_factory=list)
    priority: int = 0
    due_at: _dt.datetime | None = None
    completed_at: _dt.datetime | None = None
    checkpoint_data: dict[str, Any] = field(default_factory=dict)
    checkpoint_at: _dt.datetime | None = None
    attempts: int = 0
    last_error: str | None = None
    conversation_id: UUID | None = None
    claimed_by: str | None = None
    claimed_until: _dt.datetime | None = None


@dataclass(kw_only=True)
class TaskList:
    """An ordered list of tasks."""

    id: UUID = field(default_factory=new_id)
    name: str
    tasks: list[Task] = field(default_factory=list)
    created_at: _dt.datetime = field(default_factory=now)
    updated_at: _dt.datetime = field(default_factory=now)
    conversation_id: UUID | None = None
    run_id: UUID | None = None


@dataclass(kw_only=True)
class Fact:
    """A fact that an agent learned. It is found by its id or its key, and is absent after `expires_at`."""

    id: UUID = field(default_factory=new_id)
    key: str
    value: Any
    fact_type: FactType = FactType.CUSTOM
    confidence: float = 1.0
    source: str | None = None
    created_at: _dt.datetime = field(default_factory=now)
    updated_at: _dt.datetime = field(default_factory=now)
    expires_at: _dt.datetime | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Summary:
    """A summary of one or several conversations."""

    id: UUID = field(default_factory=new_id)
    content: str
    conversation_id: UUID | None = None
    conversation_ids: list[UUID] = field(default_factory=list)
    start_time: _dt.datetime | None = None
    end_time: _dt.datetime | None = None
    created_at: _dt.datetime = field(default_factory=now)
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Embedding:
    """A text and its vector. `dimensions` is the length of the vector, or 0 for any length."""

    id: UUID = field(default_factory=new_id)
    vector: list[float]
    content: str
    content_type: str = "text"
    source_id: UUID | None = None
    model: str | None = None
    dimensions: int = 0
    created_at: _dt.datetime = field(default_factory=now)
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class AuditEntry:
    """An event in the audit log."""

    id: UUID = field(default_factory=new_id)
    event_type: AuditEventType
    timestamp: _dt.datetime = field(default_factory=now)
    conversation_id: UUID | None = None
    run_id: UUID | None = None
    agent_key: str | None = None
    action: str | None = ""
    details: dict[str, Any] = field(default_factory=dict)
    actor_type: str = "agent"
    actor_id: str | None = None
    request_id: str | None = None
    parent_event_id: UUID | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ErrorRecord:
    """An error that is open until it is resolved."""

    id: UUID = field(default_factory=new_id)
    timestamp: _dt.datetime = field(default_factory=now)
    severity: ErrorSeverity = ErrorSeverity.ERROR
    error_type: str | None = ""
    message: str | None = ""
    stack_trace: str | None = None
    conversation_id: UUID | None = None
    run_id: UUID | None = None
    agent_key: str | None = None
    context: dict[str, Any] = field(default_factory=dict)
    resolved: bool = False
    resolved_at: _dt.datetime | None = None
    resolution_notes: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class PerformanceMetric:
    """One measured value of a metric."""

    id: UUID = field(default_factory=new_id)
    name: str
    value: float
    unit: str | None = ""
    timestamp: _dt.datetime = field(default_factory=now)
    conversation_id: UUID | None = None
    run_id: UUID | None = None
    agent_key: str | None = None
    tags: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


Order = tuple[float, float, float]


def order(task: Task) -> Order:
    """Return the sort key of a task: descending priority, then `due_at` (tasks without one last), then `created_at`."""
    due = math.inf if task.due_at is None else moment(task.due_at)
    return (-task.priority, due, moment(task.created_at))


def is_unclaimed(task: Task, now: float) -> bool:
    """Return whether a task is unclaimed: it was not started, or its claim has expired."""
    if task.state is TaskState.IN_PROGRESS:
        return task.claimed_by is not None and task.claimed_until is not None and moment(task.claimed_until) <= now
    return task.state is TaskState.NOT_STARTED


def ready_of(tasks: Sequence[Task], now: float) -> list[Task]:
    """Return the ready tasks of a complete list, in order.

    A dependency that the list does not contain blocks its task.
    """
    complete = {task.id for task in tasks if task.state is TaskState.COMPLETE}
    found = [task for task in tasks if is_unclaimed(task, now) and complete.issuperset(task.dependencies)]
    return sorted(found, key=order)


def find_cycle(starts: Iterable[str], dependencies: Callable[[str], Iterable[str]]) -> list[str]:
    """Find a cycle of dependencies that is reachable from `starts`.

    Returns:
        Keys of which each depends on the next one, and the last one on the first. Empty if there is no cycle.
    """
    done: set[str] = set()
    for start in starts:
        if start in done:
            continue
        path, on_path = [start], {start}
        stack = [iter(dependencies(start))]
        while stack:
            dependency = next(stack[-1], None)
            if dependency is None:
                stack.pop()
                done.add(path[-1])
                on_path.discard(path.pop())
            elif dependency in on_path:
                return path[path.index(dependency) :]
            elif dependency not in done:
                path.append(dependency)
                on_path.add(dependency)
                stack.append(iter(dependencies(dependency)))
    return []
