"""Log records with the ids of their turn."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from .._core.log import LOGGED_TURN, log


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
