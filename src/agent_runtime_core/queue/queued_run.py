"""A run as a worker receives it."""

from __future__ import annotations

import datetime as _dt
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import UUID

from .._core.clock import SYSTEM, aware
from .._core.codec.json import decode_dict
from .._core.ids import known_uuid
from .records import RunRow


@dataclass
class QueuedRun:
    """A claimed or submitted run. `attempt` is 1 plus the number of failures and crashes."""

    run_id: UUID
    agent_key: str
    input: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    attempt: int = 1
    created_at: _dt.datetime = field(default_factory=lambda: aware(SYSTEM.wall()))
    scheduled_at: _dt.datetime | None = None
    claim_id: str = ""
    row: RunRow | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, row: RunRow) -> QueuedRun:
        """Return the public form of a row."""
        run = cls(
            run_id=row.decoded("run_id", known_uuid),
            agent_key=row.agent,
            input={},
            priority=row.priority,
            attempt=row.attempt,
            created_at=row.decoded("created_at", aware),
            scheduled_at=row.decoded("due_at", aware) if row.due_at > 0 else None,
            claim_id=row.claim_id,
            row=row,
        )
        # Decoded on first access. Otherwise a run that cannot be decoded here would make the claim fail, and the other
        # runs of that claim would be lost.
        del run.input, run.metadata
        return run

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            row = self.__dict__.get("row")
            if row is None or name not in ("input", "metadata"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            value = row.decoded(name, decode_dict)
            setattr(self, name, value)
            return value
