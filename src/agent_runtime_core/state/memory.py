"""A state store in the memory of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from .._core.clock import SYSTEM, Clock
from .._engines.backend import known_options, memory_store
from .._engines.base import NotApplied, Op, OperationSet, engine_close, engine_commit, engine_read
from .._engines.memory import MemoryEngine, MemoryTx
from .._journal import memory as journal
from .base import EffectExists, EffectRow, StateRow, StateStore

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


def begin(tx: MemoryTx, row: EffectRow) -> None:
    there = effects(tx, *row[:3])
    if any(each.run_id == row.run_id for each in there):
        return
    if there:
        raise EffectExists
    put(tx, row)


def put(tx: MemoryTx, row: EffectRow) -> None:
    _keep(tx, row.origin, row[1:3], [*_others(tx, *row[:4]), row])


def drop(tx: MemoryTx, origin: str, key: str, digest: str, run_id: str) -> None:
    _keep(tx, origin, (key, digest), _others(tx, origin, key, digest, run_id))


def leave(tx: MemoryTx, origin: str, run_id: str) -> None:
    drop(tx, origin, "", "", run_id)
    if not effects(tx, origin, "", ""):
        tx.drop(tx.tables["effects"], origin)


def has_begun(tx: MemoryTx, row: EffectRow) -> None:
    if not any(each.run_id == row.run_id for each in effects(tx, *row[:3])):
        raise NotApplied


def was_put(tx: MemoryTx, row: EffectRow) -> None:
    if row not in effects(tx, *row[:3]):
        raise NotApplied


def dropped(tx: MemoryTx, origin: str, key: str, digest: str, run_id: str) -> None:
    if len(_others(tx, origin, key, digest, run_id)) != len(effects(tx, origin, key, digest)):
        raise NotApplied


def effects(tx: MemoryTx, origin: str, key: str, digest: str) -> list[EffectRow]:
    found: list[EffectRow] = tx.tables["effects"].get(origin, {}).get((key, digest), [])
    return found


def _others(tx: MemoryTx, origin: str, key: str, digest: str, run_id: str) -> list[EffectRow]:
    return [each for each in effects(tx, origin, key, digest) if each.run_id != run_id]


def _keep(tx: MemoryTx, origin: str, identity: tuple[str, ...], rows: list[EffectRow]) -> None:
    table = tx.tables["effects"]
    if origin not in table:
        tx.put(table, origin, {})
    tx.put(table[origin], identity, rows)


def effect_keys(tx: MemoryTx, origin: str) -> list[tuple[str, ...]]:
    return [*tx.tables["effects"].get(origin, {})]


def rewrite(tx: MemoryTx, run_id: str, old: str, new: str) -> bool:
    row = _state(tx, run_id)
    if row.checkpoint != old:
        return False
    tx.put(tx.tables["state"], run_id, row._replace(checkpoint=new))
    return True


def rewrite_effect(tx: MemoryTx, old: EffectRow, new: EffectRow) -> bool:
    if old not in effects(tx, *old[:3]):
        return False
    drop(tx, *old[:4])
    if not any(each.run_id == new.run_id for each in effects(tx, *new[:3])):
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


class InMemoryStateStore(StateStore):
    """A state store in the memory of this process. Its runs are lost when the process ends."""

    operation_sets: ClassVar[Sequence[OperationSet]] = (journal.CONCERN, CONCERN)
    reads: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "state": _state,
        "records": journal.records,
        "ending": journal.ending,
        "endings": journal.endings,
        "effects": effects,
        "effect_keys": effect_keys,
    }

    rewrites = True

    commit = engine_commit
    read = engine_read
    close = engine_close

    def __init__(self, *, engine: MemoryEngine | None = None, clock: Clock = SYSTEM, **options: Any) -> None:
        with known_options(type(self), options):
            super().__init__(clock=getattr(engine, "clock", clock), **options)
        self._engine_store = memory_store(self.operation_sets, self.reads, engine=engine, clock=clock)
        self.engine: MemoryEngine = self._engine_store.engine

    def clear(self) -> None:
        """Delete the state of all runs."""
        self.engine.apply(None, [Op(_CLEAR)])
