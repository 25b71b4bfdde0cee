"""The types of the events of a run."""

from __future__ import annotations

from enum import Enum
from typing import Final

__all__ = ["RUNNER_TYPES", "EventType"]


class EventType(str, Enum):  # noqa: UP042 (str() of a member is part of the public face)
    """Type of an event; the value is the string that is stored and sent."""

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
