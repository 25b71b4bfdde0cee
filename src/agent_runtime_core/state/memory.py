"""A state store in this process, gone when it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from .._engines.backed import OnMemory
from .._engines.base import Concern, NotApplied, Op
from .._engines.memory import MemoryTx
from ..journal import memory as journal
from .base import StateRow, StateStore

_CLEAR = "state.clear"


def checkpoint(tx: MemoryTx, run_id: str, text: str, mark: str | None, now: float) -> None:
    row = tx.tables["state"].get(run_id, StateRow())
    tx.put(tx.tables["state"], run_id, row._replace(checkpoint=text, mark=mark, t=now))


def status(tx: MemoryTx, run_id: str, text: str, now: float) -> None:
    row = tx.tables["state"].get(run_id, StateRow())
    tx.put(tx.tables["state"], run_id, row._replace(status=text, t=now))


def checkpointed(tx: MemoryTx, run_id: str, text: str, mark: str | None, now: float) -> None:
    row = _state(tx, run_id)
    if (row.checkpoint, row.mark, row.t) != (text, mark, now):
        raise NotApplied


def stated(tx: MemoryTx, run_id: str, text: str, now: float) -> None:
    row = _state(tx, run_id)
    if (row.status, row.t) != (text, now):
        raise NotApplied


def delete(tx: MemoryTx, run_id: str) -> None:
    tx.drop(tx.tables["state"], run_id)
    journal.delete(tx, run_id)


def clear(tx: MemoryTx) -> None:
    for run_id in tx.tables["state"].keys() | tx.tables["journal"].keys():
        delete(tx, run_id)


def _state(tx: MemoryTx, run_id: str) -> StateRow:
    row: StateRow = tx.tables["state"].get(run_id, StateRow())
    return row


CONCERN = Concern(
    "state",
    {"state.checkpoint": checkpoint, "state.status": status, "state.delete": delete, _CLEAR: clear},
    {"state.checkpoint": checkpointed, "state.status": stated},
    tables=("state",),
)


class InMemoryStateStore(OnMemory, StateStore):
    """A state store in this process, gone when it ends."""

    concerns: ClassVar[Sequence[Concern]] = (journal.CONCERN, CONCERN)
    reads: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "state": _state,
        "records": journal.records,
        "ending": journal.ending,
    }

    def clear(self) -> None:
        """Forget every run."""
        self.engine.apply(None, [Op(_CLEAR)])
