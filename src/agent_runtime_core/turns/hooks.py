"""Hooks of the application at the start and end of turns and steps, and the log records of turns."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from .._core.log import LOGGED_TURN, log
from .._core.validation import must, shown


@contextmanager
def logged_turn(turn_id: str) -> Iterator[None]:
    """Give the records of code in this block the id of a turn."""
    token = LOGGED_TURN.set(turn_id)
    try:
        yield
    finally:
        LOGGED_TURN.reset(token)


class TurnLog(logging.LoggerAdapter[logging.Logger]):
    """Begins each message with the turn, and adds `trace_id`, `turn_id` and `step_id` to its log record."""

    def __init__(self, trace_id: str, turn_id: str, step_id: str | None = None) -> None:
        self._turn_id = turn_id
        ids = {"trace_id": trace_id, "turn_id": turn_id}
        # Without a step id, the record gets the id of the step in which it is logged.
        super().__init__(log, ids if step_id is None else {**ids, "step_id": step_id})

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message. The id is an argument, because tools group records by the message without arguments."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller of this class
        super().log(level, f"turn %s: {msg}", self._turn_id, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the ids to the `extra` of a log call."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


NAMES = ("on_turn_start", "on_plan_ready", "on_step_start", "on_step_end", "on_turn_end", "on_error")


class Hooks:
    """Calls the hooks of several objects in order.

    Each object defines any of these methods, sync or async: on_turn_start(turn), on_plan_ready(turn, plan),
    on_step_start(turn, step), on_step_end(turn, step), on_turn_end(turn) and on_error(turn, error).

    An error of a hook is logged and has no other effect. This also applies to a CancelledError that the hook raises
    itself. A turn that resumes after a crash may call a hook a second time.
    """

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        if not isinstance(objects, Iterable):
            raise must("hooks", "be a list of objects", objects, "Pass [hook]")
        self._objects = tuple(objects)
        for each in self._objects:
            if not any(callable(getattr(each, name, None)) for name in NAMES):
                raise must("a hook", f"have a method such as {NAMES[0]} or {NAMES[-1]}", each)

    async def call(self, name: str, *args: Any) -> None:
        """Call the method `name` of each hook that defines it. Errors are logged, not raised."""
        for each in self._objects:
            hook = getattr(each, name, None)
            if hook is None:
                continue
            try:
                outcome = hook(*args)
                if inspect.isawaitable(outcome):
                    await outcome
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                self._log_failure(name, each, args[0])
            except Exception:  # noqa: BLE001 - a hook may fail in any way
                self._log_failure(name, each, args[0])

    def _log_failure(self, name: str, hook: Any, turn: Any) -> None:
        TurnLog(turn.trace_id, turn.id).exception("hook %s of %s failed", name, shown(hook))
