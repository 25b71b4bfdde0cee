"""The state of an agent loop, its cancellation token, its hooks and its result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .._core.per_loop import call_in_loop

__all__ = ["CancellationToken", "Hooks", "LoopResult", "TurnState"]


class TurnState(str, Enum):  # noqa: UP042 (like the other public enums)
    """State of a loop.

    Attributes:
        STREAMING: A model call is active.
        TOOL_EXECUTION: Tool calls are active.
        WAITING: The loop waits for an approval.
        YIELDING: The loop ended with an answer.
        HANDED_OFF: The loop ended because another agent answered.
        CANCELLED: The loop was ended by its cancellation token.
        LIMITED: The loop ended because a limit was reached.
    """

    STREAMING = "streaming"
    TOOL_EXECUTION = "tool_execution"
    WAITING = "waiting"
    YIELDING = "yielding"
    HANDED_OFF = "handed_off"
    CANCELLED = "cancelled"
    LIMITED = "limited"


class CancellationToken:
    """Ends a loop from outside, between two calls or during a call. Thread-safe.

    token = CancellationToken()
    task = asyncio.create_task(run_turn_loop(ctx, client, cancellation=token))
    token.cancel()
    result = await task  # result.state is TurnState.CANCELLED

    Examples:
        >>> from agent_runtime_core import CancellationToken
        >>> token = CancellationToken()
        >>> token.cancel()
        >>> token.cancelled
        True
    """

    def __init__(self) -> None:
        self._cancelled = False
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def cancel(self) -> None:
        """End the loops that have this token."""
        with self._lock:
            self._cancelled = True
            waiting = list(self._waiting)
        for loop, event in waiting:
            call_in_loop(loop, event.set)

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    async def wait(self) -> None:
        """Wait until `cancel` is called."""
        listener = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            if self._cancelled:
                return
            self._waiting.add(listener)
        try:
            await listener[1].wait()
        finally:
            with self._lock:
                self._waiting.discard(listener)


@dataclass
class LoopResult:
    """The outcome of a loop.

    Attributes:
        messages: The initial messages and all new messages; each tool call is followed by its result.
        state: The last state.
        text: The text of the last answer, or None.
        output: The typed answer, if there is an `output_type`.
        plain_output: The typed answer as plain JSON.
        usage: Tokens, cost, turns and tool calls.
        turns: The number of turns.
        tool_calls: The number of tool calls.
        finish_reason: Why the last answer ended: "stop", or "length" for a text that was truncated.
    """

    messages: list[dict[str, Any]]
    state: TurnState
    text: str | None = None
    output: Any = None
    plain_output: Any = None
    usage: dict[str, Any] = field(default_factory=dict)
    turns: int = 0
    tool_calls: int = 0
    finish_reason: str = ""


@dataclass(frozen=True)
class Hooks:
    """Functions that a loop calls.

    Args:
        before_tool: Awaited before a tool runs, with its name and arguments, which it may change. It may also return
            other arguments. The arguments are recorded, and the hook is called once for each call.
        after_tool: Awaited with the name and the result of a tool; returns the result to use.
        trim: Called with all messages; returns those to send. The others stay in the history. May be async. A tool call
            and its results that it separates are removed, or both sent if the model has not seen the results yet.
        on_state: Called with each new state.
    """

    before_tool: Callable[[str, dict[str, Any]], Awaitable[Any]] | None = None
    after_tool: Callable[[str, Any], Awaitable[Any]] | None = None
    trim: Callable[[list[dict[str, Any]]], Any] | None = None
    on_state: Callable[[TurnState], None] | None = None
