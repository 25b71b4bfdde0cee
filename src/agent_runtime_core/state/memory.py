"""A state store in the memory of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from .._engines.backend import MemoryBackend, OperationSets, Reads
from .._engines.base import Op
from .._engines.memory import MemoryTx
from .._journal import memory as journal
from .base import EffectRow, StateOperations, StateRow, StateStore, erased_key, rows_of_other_runs, same_digest

_CLEAR = "state.clear"


def checkpoint(tx: MemoryTx, run_id: str, text: str, mark: str | None, now: float) -> None:
    row = tx.tables["state"].get(run_id, StateRow())
    tx.put(tx.tables["state"], run_id, row._replace(checkpoint=text, mark=mark, t=now))


def status(tx: MemoryTx, run_id: str, text: str, now: float) -> None:
    row = tx.tables["state"].get(run_id, StateRow())
    tx.put(tx.tables["state"], run_id, row._replace(status=text, t=now))


def put(tx: MemoryTx, row: EffectRow, others: Sequence[str] = ()) -> None:
    drop(tx, row, others)
    table = tx.dict_in(tx.dict_in(tx.tables["effects"], row.origin), row.key)
    tx.put(table, row.digest, [*table.get(row.digest, ()), row])


def drop(tx: MemoryTx, row: EffectRow, others: Sequence[str] = ()) -> None:
    by_key = tx.tables["effects"].get(row.origin, {})
    rows = by_key.get(row.key, {})
    for digest in (row.digest, *others):
        if left := rows_of_other_runs(rows.get(digest, ()), row):
            tx.put(rows, digest, left)
        else:
            tx.drop(rows, digest)
    if not rows:
        tx.drop(by_key, row.key)


def effects(tx: MemoryTx, origin: str, key: str, digests: Sequence[str]) -> list[EffectRow]:
    of_origin: dict[str, dict[str, list[EffectRow]]] = tx.tables["effects"].get(origin, {})
    by_digest = [each for name in {key: 0, erased_key(key): 0} for each in of_origin.get(name, {}).items()]
    return [row for digest, found in by_digest if same_digest(digest, digests) for row in found]


def effect_keys(tx: MemoryTx, origin: str) -> list[tuple[str, str]]:
    return [(key, digest) for key, rows in tx.tables["effects"].get(origin, {}).items() for digest in rows]


def rewrite(tx: MemoryTx, run_id: str, old: str, new: str) -> bool:
    row = _state(tx, run_id)
    if row.checkpoint != old:
        return False
    tx.put(tx.tables["state"], run_id, row._replace(checkpoint=new))
    return True


def delete(tx: MemoryTx, run_id: str) -> None:
    tx.drop(tx.tables["state"], run_id)
    journal.delete(tx, run_id)


def clear(tx: MemoryTx) -> None:
    for run_id in tx.tables["state"].keys() | tx.tables["journal"].keys():
        delete(tx, run_id)
    for origin in [*tx.tables["effects"]]:
        _drop_lineage(tx, origin)


def _drop_lineage(tx: MemoryTx, origin: str) -> None:
    tx.drop(tx.tables["effects"], origin)


def _state(tx: MemoryTx, run_id: str) -> StateRow:
    row: StateRow = tx.tables["state"].get(run_id, StateRow())
    return row


CONCERN = StateOperations(_state, effects, put, drop, _drop_lineage).operation_set(
    {
        "state.checkpoint": checkpoint, "state.status": status, "state.delete": delete, "state.rewrite": rewrite,
        _CLEAR: clear,
    },
    tables=("state", "effects"),
)  # fmt: skip


class InMemoryStateStore(MemoryBackend, StateStore):
    """A state store in the memory of this process. Its runs are lost when the process ends."""

    operation_sets: ClassVar[OperationSets] = (journal.CONCERN, CONCERN)
    reads: ClassVar[Reads] = {**journal.READS, "state": _state, "effects": effects, "effect_keys": effect_keys}

    def clear(self) -> None:
        """Delete the state of all runs."""
        self.engine.apply(None, [Op(_CLEAR)])
