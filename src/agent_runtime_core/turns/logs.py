"""Log records with the ids of their turn."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

log: logging.Logger = logging.getLogger("agent_runtime_core")


class TurnLog(logging.LoggerAdapter[logging.Logger]):
    """Adds `trace_id`, `turn_id` and `step_id` to each log record as attributes."""

    def __init__(self, trace_id: str, turn_id: str, step_id: str | None = None) -> None:
        super().__init__(log, {"trace_id": trace_id, "turn_id": turn_id, "step_id": step_id})

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the ids to the `extra` of a log call."""
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs
