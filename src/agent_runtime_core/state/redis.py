"""A state store on one Redis or Valkey server, shared by all processes that reach it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

from .._core.codec.json import compact
from .._engines.backend import OperationSets, Reads
from .._engines.payloads import marked_key
from .._engines.redis.engine import RedisBackend, RedisEngine
from .._engines.redis.script import Codec, RedisOperationSet, as_list, lua_source
from .._journal import redis as journal
from .base import EffectExists, EffectRow, StateRow, StateStore, erased_key


def _checkpoint(run_id: str, text: str, mark: str | None, now: float) -> tuple[Any, ...]:
    return run_id, text, mark, repr(now)


def _status(run_id: str, text: str, now: float) -> tuple[Any, ...]:
    return run_id, text, repr(now)


def _copied(run_id: str, row: StateRow) -> tuple[Any, ...]:
    return run_id, {name: value for name, value in row._replace(t=repr(row.t))._asdict().items() if value is not None}  # type: ignore[arg-type]


def _effect(row: EffectRow, others: Sequence[str] = ()) -> tuple[Any, ...]:
    """Encode a row for the script: the fields that identify it, and all fields as one JSON string."""
    return row.origin, _digests(row.key, (row.digest, *others)), _run(row), compact(row)


def _digests(key: str, digests: Sequence[str]) -> tuple[Any, ...]:
    """Encode the digests of an effect: as fields of the hash, how these begin, and the marks of their keys."""
    keys, marks = dict.fromkeys((key, erased_key(key))), tuple(marked_key(each) for each in digests)
    fields = tuple(compact((each, digest)) for each in keys for digest in digests)
    return fields, tuple(compact((each, ""))[:-2] for each in keys), marks


def _run(row: EffectRow) -> str:
    return f"{row.run_id}:{row.arrival}" if row.arrival else row.run_id


def _rewrite_effect(old: EffectRow, new: EffectRow) -> tuple[Any, ...]:
    return *_effect(old), _digests(new.key, (new.digest,)), compact(new)


async def _effects(engine: RedisEngine, origin: str, key: str, digests: Sequence[str]) -> list[EffectRow]:
    rows = as_list(await engine.ask("state.effects", origin, _digests(key, digests)))
    return [EffectRow(*json.loads(row)) for row in rows]


async def _effect_keys(engine: RedisEngine, origin: str) -> list[tuple[str, str]]:
    return [tuple(json.loads(each)) for each in as_list(await engine.ask("state.effect_keys", origin))]


async def _state(engine: RedisEngine, run_id: str) -> StateRow:
    status, checkpoint, mark, t = await engine.ask("state.row", run_id)
    return StateRow(status or None, checkpoint or None, mark or None, float(t or 0))


async def _ids(engine: RedisEngine) -> list[str]:
    return await engine.ids(state="hash", journal="stream", effects="hash")


CONCERN = RedisOperationSet(
    "state",
    {},
    script=lua_source(__file__),
    seldom=lua_source(__file__, "redis_admin"),
    codecs={
        "state.checkpoint": Codec(_checkpoint),
        "state.status": Codec(_status),
        "state.copy": Codec(_copied),
        "effect.begin": Codec(_effect),
        "effect.put": Codec(_effect),
        "effect.rewrite": Codec(_rewrite_effect),
        "effect.drop": Codec(_effect),
    },
    refusals={"EFFECT": EffectExists},
)


class RedisStateStore(RedisBackend, StateStore):
    """A state store on one Redis or Valkey server, shared by all processes that reach it."""

    operation_sets: ClassVar[OperationSets] = (journal.CONCERN, CONCERN)
    reads: ClassVar[Reads] = {
        **journal.READS,
        "state": _state,
        "effects": _effects,
        "effect_keys": _effect_keys,
        "ids": _ids,
    }
