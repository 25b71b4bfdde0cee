"""A state store in a PostgreSQL database, shared by all processes that reach it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .._engines.backend import OperationSets, Reads
from .._engines.postgres.connection import PostgresConnection
from .._engines.postgres.engine import PostgresBackend, PostgresTx
from .._journal import postgres as journal
from .base import EffectRow, StateOperations, StateStore
from .postgres_batches import BATCHES
from .sqlite import _drop_lineage, _newest, _state, checkpoint, copy, drop, effect_keys, effects, put, rewrite, status

_LOCK_EFFECT = "SELECT pg_advisory_xact_lock(hashtextextended(?::text || chr(2) || ?::text, 4))"
_IDS = (
    "SELECT run_id FROM arc_state UNION SELECT run_id FROM arc_journal UNION SELECT origin FROM arc_effects ORDER BY 1"
)


def _locked_effects(tx: PostgresTx, origin: str, key: str, digests: Sequence[str]) -> list[EffectRow]:
    """Return the rows of an effect. No other transaction can begin a row of it before this transaction ends."""
    tx.execute(_LOCK_EFFECT, (origin, key))
    return effects(tx, origin, key, digests)  # type: ignore[arg-type]


def delete(tx: PostgresTx, run_id: str) -> None:
    tx.execute("DELETE FROM arc_state WHERE run_id = ?", (run_id,))
    journal.delete(tx, run_id)


def _ids(view: PostgresConnection) -> list[str]:
    return [run_id for (run_id,) in view.execute(_IDS)]


def _any(function: Any) -> Any:
    """Return a function of the SQLite store, whose statements are the same here."""
    return function


CONCERN = StateOperations(_any(_state), _locked_effects, _any(put), _any(drop), _any(_drop_lineage)).operation_set(
    {
        "state.checkpoint": checkpoint,
        "state.status": status,
        "state.delete": delete,
        "state.rewrite": rewrite,
        "state.copy": copy,
    },
    batches=BATCHES,
    one_statement=frozenset({effect_keys, journal.records, journal.ending, _ids}),
)


class PostgresStateStore(PostgresBackend, StateStore):
    """A state store in a PostgreSQL database, shared by all processes that reach it."""

    operation_sets: ClassVar[OperationSets] = (journal.CONCERN, CONCERN)
    reads: ClassVar[Reads] = {
        **journal.READS,
        "state": _newest,
        "effects": effects,
        "effect_keys": effect_keys,
        "ids": _ids,
    }
    transacts = True
    reads_rows = "arc_runs"
