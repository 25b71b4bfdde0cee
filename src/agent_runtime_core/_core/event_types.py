"""The types of the events of a run."""

from __future__ import annotations

from enum import Enum
from typing import Final

__all__ = ["RUNNER_TYPES", "EventType"]


class EventType(str, Enum):  # noqa: UP042 (str() of a member is part of the public face)
    """Type of an event; the value is the string that is stored and sent.

    Attributes:
        RUN_STARTED: An attempt of the run starts.
        RUN_RESUMED: A parked, released or deferred run resumes.
        RUN_LEFT: A worker leaves the run to a worker whose code fits.
        RUN_RESTORED: The store was restored from a copy in which the run had not ended.
        RUN_HEARTBEAT: An execution of the run is alive; published every `heartbeat_interval_seconds`.
        RUN_SUCCEEDED: The run succeeded.
        RUN_FAILED: The run failed or is dead.
        RUN_CANCELLED: The run was cancelled.
        RUN_TIMED_OUT: The run timed out.
        ASSISTANT_DELTA: A part of an answer that an agent loop streams.
        ASSISTANT_MESSAGE: The last answer of a `ToolCallingAgent`.
        TOOL_CALL: An agent loop starts a tool call.
        TOOL_RESULT: That call is finished.
        MESSAGE_RECEIVED: An agent loop or `ctx.messages` takes a message of `runner.send`.
        STATE_CHECKPOINT: `ctx.checkpoint` was called.
        CHECKPOINT: The same as STATE_CHECKPOINT.
        STEP_STARTED: An attempt of a step starts.
        STEP_COMPLETED: The result of a step is saved.
        STEP_FAILED: A step failed after its last attempt.
        STEP_SKIPPED: The saved result of a step was returned, or one of its dependencies failed.
        STEP_RETRYING: An attempt of a step failed, and another attempt follows.
        STEP_EFFECT: The run reaches a guarded step that another run of its lineage of forks completed.
        PROGRESS_UPDATE: An attempt of a step in a list or a map starts.

    Examples:
        >>> from agent_runtime_core import EventType
        >>> EventType.STEP_COMPLETED.value
        'step.completed'
    """

    RUN_STARTED = "run.started"
    RUN_RESUMED = "run.resumed"
    RUN_LEFT = "run.left"
    RUN_RESTORED = "run.restored"
    RUN_HEARTBEAT = "run.heartbeat"
    RUN_SUCCEEDED = "run.succeeded"
    RUN_FAILED = "run.failed"
    RUN_CANCELLED = "run.cancelled"
    RUN_TIMED_OUT = "run.timed_out"
    ASSISTANT_DELTA = "assistant.delta"
    ASSISTANT_MESSAGE = "assistant.message"
    TOOL_CALL = "tool.call"
    TOOL_RESULT = "tool.result"
    MESSAGE_RECEIVED = "message.received"
    STATE_CHECKPOINT = "state.checkpoint"
    CHECKPOINT = STATE_CHECKPOINT
    STEP_STARTED = "step.started"
    STEP_COMPLETED = "step.completed"
    STEP_FAILED = "step.failed"
    STEP_SKIPPED = "step.skipped"
    STEP_RETRYING = "step.retrying"
    STEP_EFFECT = "step.effect"
    PROGRESS_UPDATE = "progress.update"


#: The types with which the runner says how a run started, lives and finished.
RUNNER_TYPES: Final = frozenset(each.value for each in EventType if each.value.startswith("run."))
