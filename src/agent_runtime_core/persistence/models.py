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
    """The range of a stored value: all projects of a user, one project, or one session that ends.

    Attributes:
        GLOBAL: All projects of a user.
        PROJECT: One project.
        SESSION: One session that ends.
    """

    GLOBAL = "global"
    PROJECT = "project"
    SESSION = "session"


class TaskState(str, Enum):  # noqa: UP042 - StrEnum prints as its value
    """The state of a task.

    Attributes:
        NOT_STARTED: No worker started the task.
        IN_PROGRESS: The task is being done.
        COMPLETE: The task is done.
        CANCELLED: The task will not be done.
    """

    NOT_STARTED = "not_started"
    IN_PROGRESS = "in_progress"
    COMPLETE = "complete"
    CANCELLED = "cancelled"


class FactType(str, Enum):  # noqa: UP042 - StrEnum prints as its value
    """The subject of a fact.

    Attributes:
        USER: About the user.
        PROJECT: About the project.
        PREFERENCE: What the user prefers.
        CONTEXT: About the circumstances.
        CUSTOM: Any other subject.
    """

    USER = "user"
    PROJECT = "project"
    PREFERENCE = "preference"
    CONTEXT = "context"
    CUSTOM = "custom"


class AuditEventType(str, Enum):  # noqa: UP042 - StrEnum prints as its value
    """The kind of event that an audit entry records.

    Attributes:
        CONVERSATION_START: A conversation begins.
        CONVERSATION_END: A conversation ends.
        MESSAGE_SENT: A message was sent.
        MESSAGE_RECEIVED: A message was received.
        TOOL_CALL: A tool was called.
        TOOL_RESULT: A tool returned a result.
        TOOL_ERROR: A tool failed.
        AGENT_START: An agent starts.
        AGENT_END: An agent ended.
        AGENT_ERROR: An agent failed.
        CHECKPOINT_SAVED: A checkpoint was saved.
        CHECKPOINT_RESTORED: A checkpoint was restored.
        CUSTOM: Any other event.
    """

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
    """The severity of an error.

    Attributes:
        DEBUG: Only of interest for finding errors.
        INFO: For information.
        WARNING: A person may have to look at it.
        ERROR: An operation failed.
        CRITICAL: The application cannot continue.
    """

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
    """A tool call that a message requests. The model provider chooses `id`.

    Attributes:
        id: The id of the call, which the model provider chooses.
        name: The name of the tool.
        arguments: The arguments of the tool.
        timestamp: When the model requested the call.
    """

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    timestamp: _dt.datetime = field(default_factory=now)


@dataclass(kw_only=True)
class ToolResult:
    """The result of a tool call.

    Attributes:
        tool_call_id: The id of the call.
        result: What the tool returned.
        error: Why the call failed, or None.
        timestamp: When the call ended.
    """

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
        id: Its id; a new id by default.
        role: "user", "assistant", "system" or "tool".
        content: The text, or a list of content parts.
        timestamp: When the message was written.
        tool_calls: The tool calls that the message requests.
        tool_call_id: The call that the message answers, for the role "tool".
        model: The model that wrote the message, or None.
        usage: The tokens of the message.
        metadata: Further data of the application, as JSON.
        parent_message_id: The message that this message follows; None for the previous message of the branch.
        branch_id: The branch; None for the main line.
        run_id: The run that a runner appended the message for; None for a message that the application added.
        position: The position of the message in the messages of that run, from 0.

    Examples:
        >>> from agent_runtime_core import ConversationMessage
        >>> ConversationMessage(role="user", content="Hi").tool_calls
        []
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
"""Another name of `ConversationMessage`."""


@dataclass(kw_only=True)
class Conversation:
    """A conversation with the messages of all its branches, in order of arrival.

    Attributes:
        id: Its id; a new id by default.
        title: The title, or None.
        messages: The messages of all branches, in order of arrival.
        created_at: When it was created.
        updated_at: When it was last changed.
        metadata: Further data of the application, as JSON.
        agent_key: The key of the agent, or None.
        summary: A summary of the messages, or None.
        parent_conversation_id: The conversation that was forked to create this conversation, or None.
        active_branch_id: The branch that is continued; None for the main line.
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

    A task is ready once all its `dependencies` are complete. Ready tasks with the highest `priority` come first.
    `claimed_by` names the worker that claimed the task, and `claimed_until` is the end of its lease.

    Attributes:
        id: Its id; a new id by default.
        name: What to do.
        description: More about it.
        state: The state of the task.
        parent_id: The task that this is a part of, or None.
        created_at: When it was created.
        updated_at: When it was last changed.
        metadata: Further data of the application, as JSON.
        dependencies: The tasks that must be complete before.
        priority: Ready tasks with a greater priority come first.
        due_at: When the task should be done, or None.
        completed_at: When the task was completed, or None.
        checkpoint_data: The progress, for the worker that continues the task.
        checkpoint_at: When the progress was stored, or None.
        attempts: How often the task was claimed.
        last_error: Why the last attempt failed, or None.
        conversation_id: The conversation that it belongs to, or None.
        claimed_by: The worker that claimed the task, or None.
        claimed_until: When the claim expires; None for a claim that does not expire.

    Examples:
        >>> from agent_runtime_core import Task
        >>> Task(name="Write the report").state.value
        'not_started'
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
    """An ordered list of tasks.

    Attributes:
        id: Its id; a new id by default.
        name: The name of the list.
        tasks: The tasks, in order.
        created_at: When it was created.
        updated_at: When it was last changed.
        conversation_id: The conversation that it belongs to, or None.
        run_id: The run that it belongs to, or None.

    Examples:
        >>> from agent_runtime_core import Task, TaskList
        >>> plan = TaskList(name="plan", tasks=[Task(name="Read"), Task(name="Write")])
        >>> [task.name for task in plan.tasks]
        ['Read', 'Write']
    """

    id: UUID = field(default_factory=new_id)
    name: str
    tasks: list[Task] = field(default_factory=list)
    created_at: _dt.datetime = field(default_factory=now)
    updated_at: _dt.datetime = field(default_factory=now)
    conversation_id: UUID | None = None
    run_id: UUID | None = None


@dataclass(kw_only=True)
class Fact:
    """A fact that an agent learned. It is found by its id or its key, and is absent after `expires_at`.

    Attributes:
        id: Its id; a new id by default.
        key: The key of the fact.
        value: What the agent learned, as JSON.
        fact_type: The subject of the fact.
        confidence: How certain the fact is, from 0 to 1.
        source: Where the fact comes from, or None.
        created_at: When it was created.
        updated_at: When it was last changed.
        expires_at: When the fact is no longer returned; None for never.
        metadata: Further data of the application, as JSON.
    """

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
    """A summary of one or several conversations.

    Attributes:
        id: Its id; a new id by default.
        content: The text of the summary.
        conversation_id: The conversation, or None.
        conversation_ids: The conversations of a summary of several.
        start_time: The time of the first message that it covers, or None.
        end_time: The time of the last message that it covers, or None.
        created_at: When it was created.
        metadata: Further data of the application, as JSON.
    """

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
    """A text and its vector. `dimensions` is the length of the vector, or 0 for any length.

    Attributes:
        id: Its id; a new id by default.
        vector: The vector.
        content: The text.
        content_type: The kind of text, for `search_similar`.
        source_id: What the text is from, or None.
        model: The model that made the vector, or None.
        dimensions: The length of the vector, or 0 for any length.
        created_at: When it was created.
        metadata: Further data of the application, as JSON.
    """

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
    """An event in the audit log.

    Attributes:
        id: Its id; a new id by default.
        event_type: The kind of event.
        timestamp: When it happened.
        conversation_id: The conversation that it belongs to, or None.
        run_id: The run that it belongs to, or None.
        agent_key: The key of the agent, or None.
        action: What was done.
        details: More about it, as JSON.
        actor_type: Who did it: "agent", or another word of the application.
        actor_id: The id of the actor, or None.
        request_id: The request that it belongs to, or None.
        parent_event_id: The entry that caused this entry, or None.
        metadata: Further data of the application, as JSON.
    """

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
    """An error that is open until it is resolved.

    Attributes:
        id: Its id; a new id by default.
        timestamp: When the error happened.
        severity: The severity of the error.
        error_type: The name of the class of the error.
        message: The error message.
        stack_trace: The traceback, or None.
        conversation_id: The conversation that it belongs to, or None.
        run_id: The run that it belongs to, or None.
        agent_key: The key of the agent, or None.
        context: What the application knows about the circumstances, as JSON.
        resolved: Whether the error is resolved.
        resolved_at: When it was resolved, or None.
        resolution_notes: How it was resolved, or None.
        metadata: Further data of the application, as JSON.
    """

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
    """One measured value of a metric.

    Attributes:
        id: Its id; a new id by default.
        name: The name of the metric.
        value: The measured value.
        unit: The unit of the value, such as "ms".
        timestamp: When it was measured.
        conversation_id: The conversation that it belongs to, or None.
        run_id: The run that it belongs to, or None.
        agent_key: The key of the agent, or None.
        tags: What `get_metrics` can select by.
        metadata: Further data of the application, as JSON.
    """

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
    """Return whether a task is unclaimed: it was not started, or its claim is expired."""
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
        Keys of which each depends on the next key, and the last key on the first. Empty if there is no cycle.
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
