"""Where an agent loop stands, what ends it from outside, and what it comes to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .._core.per_loop import call_in_loop

__all__ = ["CancellationToken", "Hooks", "LoopResult", "TurnState"]


class TurnState(str, Enum):  # noqa: UP042 (as the other enums of the public face)
    """Where a loop stands."""

    STREAMING = "streaming"  # the model is asked
    TOOL_EXECUTION = "tool_execution"
    WAITING = "waiting"  # for somebody's approval
    YIELDING = "yielding"  # the model has answered
    HANDED_OFF = "handed_off"  # another agent has answered
    CANCELLED = "cancelled"
    LIMITED = "limited"  # a limit was reached


class CancellationToken:
    """Ends a loop from outside: between two calls, or in the middle of one. Any thread may cancel it."""

    def __init__(self) -> None:
        self._cancelled = False
        self._lock = threading.Lock()
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            waiting = list(self._waiting)
        for loop, event in waiting:
            call_in_loop(loop, event.set)

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    async def wait(self) -> None:
        """Return once it is cancelled."""
        mine = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            if self._cancelled:
                return
            self._waiting.add(mine)
        try:
            await mine[1].wait()
        finally:
            with self._lock:
                self._waiting.discard(mine)


@dataclass
class LoopResult:
    """How a loop ended. `messages` are those it was given and all that came, each tool call with its result."""

    messages: list[dict[str, Any]]
    state: TurnState
    text: str | None = None
    #: What the text says, where an `output_type` was asked for.
    output: Any = None
    #: The same as plain JSON.
    plain_output: Any = None
    usage: dict[str, Any] = field(default_factory=dict)
    turns: int = 0
    tool_calls: int = 0


@dataclass(frozen=True)
class Hooks:
    """What an agent does around the calls of its loop."""

    before_tool: Callable[[str, dict[str, Any]], Awaitable[None]] | None = None
    after_tool: Callable[[str, Any], Awaitable[Any]] | None = None
    #: The messages to send, of all there are; those left out stay in the history.
    trim: Callable[[list[dict[str, Any]]], Any] | None = None
    on_state: Callable[[TurnState], None] | None = None
