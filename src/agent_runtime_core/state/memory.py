"""A state store in the memory of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from .._engines.backend import MemoryBackend, OperationSets, Reads
from .._engines.base import NotApplied, Op, OperationSet
from .._engines.memory import MemoryTx
from .._journal import memory as journal
from .base import (
    CHILD,
    MEMBER,
    EffectExists,
    EffectRow,
    StateRow,
    StateStore,
    rows_of_other_runs,
    rows_of_run,
    same_digest,
)

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


def begin(tx: MemoryTx, row: EffectRow, others: Sequence[str] = ()) -> None:
    there = effects(tx, row.origin, row.key, (row.digest, *others))
    if rows_of_run(there, row, others):
        return
    if rows_of_other_runs(there, row):
        raise EffectExists
    put(tx, row)


def put(tx: MemoryTx, row: EffectRow, others: Sequence[str] = ()) -> None:
    drop(tx, row, others)
    table = tx.tables["effects"]
    for key in (row.origin, row.key):
        if key not in table:
            tx.put(table, key, {})
        table = table[key]
    tx.put(table, row.digest, [*table.get(row.digest, ()), row])


def drop(tx: MemoryTx, row: EffectRow, others: Sequence[str] = ()) -> None:
    rows = tx.tables["effects"].get(row.origin, {}).get(row.key, {})
    for digest in (row.digest, *others):
        if left := rows_of_other_runs(rows.get(digest, ()), row):
            tx.put(rows, digest, left)
        else:
            tx.drop(rows, digest)


def leave(tx: MemoryTx, origin: str, run_id: str) -> None:
    leaving = [(origin, run_id)]
    for lineage, member in leaving:
        drop(tx, EffectRow(lineage, "", "", member, MEMBER))
        if not effects(tx, lineage, "", ("",)):
            leaving += [(each.run_id, lineage) for each in effects(tx, lineage, "", (CHILD,))]
            tx.drop(tx.tables["effects"], lineage)


def has_begun(tx: MemoryTx, row: EffectRow, others: Sequence[str] = ()) -> None:
    if not rows_of_run(effects(tx, row.origin, row.key, (row.digest, *others)), row, others):
        raise NotApplied


def was_put(tx: MemoryTx, row: EffectRow, others: Sequence[str] = ()) -> None:
    if row not in effects(tx, row.origin, row.key, (row.digest,)):
        raise NotApplied


def dropped(tx: MemoryTx, row: EffectRow, others: Sequence[str] = ()) -> None:
    if rows_of_run(effects(tx, row.origin, row.key, (row.digest, *others)), row, others):
        raise NotApplied


def effects(tx: MemoryTx, origin: str, key: str, digests: Sequence[str]) -> list[EffectRow]:
    rows: dict[str, list[EffectRow]] = tx.tables["effects"].get(origin, {}).get(key, {})
    return [row for digest, found in rows.items() if same_digest(digest, digests) for row in found]


def effect_keys(tx: MemoryTx, origin: str) -> list[tuple[str, str]]:
    return [(key, digest) for key, rows in tx.tables["effects"].get(origin, {}).items() for digest in rows]


def rewrite(tx: MemoryTx, run_id: str, old: str, new: str) -> bool:
    row = _state(tx, run_id)
    if row.checkpoint != old:
        return False
    tx.put(tx.tables["state"], run_id, row._replace(checkpoint=new))
    return True


def rewrite_effect(tx: MemoryTx, old: EffectRow, new: EffectRow) -> bool:
    if old not in effects(tx, old.origin, old.key, (old.digest,)):
        return False
    drop(tx, old)
    if not rows_of_run(effects(tx, new.origin, new.key, (new.digest,)), new):
        put(tx, new)
    return True


def delete(tx: MemoryTx, run_id: str) -> None:
    tx.drop(tx.tables["state"], run_id)
    journal.delete(tx, run_id)


def clear(tx: MemoryTx) -> None:
    for run_id in tx.tables["state"].keys() | tx.tables["journal"].keys():
        delete(tx, run_id)
    for origin in [*tx.tables["effects"]]:
        tx.drop(tx.tables["effects"], origin)


def _state(tx: MemoryTx, run_id: str) -> StateRow:
    row: StateRow = tx.tables["state"].get(run_id, StateRow())
    return row


CONCERN = OperationSet(
    "state",
    {
        "state.checkpoint": checkpoint, "state.status": status, "state.delete": delete, _CLEAR: clear,
        "effect.begin": begin, "effect.put": put, "effect.drop": drop, "effect.leave": leave,
        "state.rewrite": rewrite, "effect.rewrite": rewrite_effect,
    },
    {
        "state.checkpoint": checkpointed, "state.status": stated,
        "effect.begin": has_begun, "effect.put": was_put, "effect.drop": dropped,
    },
    tables=("state", "effects"),
)  # fmt: skip


class InMemoryStateStore(MemoryBackend, StateStore):
    """A state store in the memory of this process. Its runs are lost when the process ends."""

    operation_sets: ClassVar[OperationSets] = (journal.CONCERN, CONCERN)
    reads: ClassVar[Reads] = {
        "state": _state,
        "records": journal.records,
        "ending": journal.ending,
        "endings": journal.endings,
        "effects": effects,
        "effect_keys": effect_keys,
    }

    def clear(self) -> None:
        """Delete the state of all runs."""
        self.engine.apply(None, [Op(_CLEAR)])
