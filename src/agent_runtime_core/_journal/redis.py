"""The journal in Redis streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._core.codec.json import compact
from .._engines.redis.script import Codec, RedisOperationSet, lua_source
from ..errors import NotSupported
from .record import Record

if TYPE_CHECKING:
    from .._engines.redis.engine import RedisEngine

PAGE = 512  # records in one answer, at most


def _packed(run_id: str, record: Record) -> tuple[Any, ...]:
    """What the script has to know of a record, and the rest of it as a text of its own."""
    body = (record.kind, record.name, record.key, record.attempt, record.claim_id, *record[6:17])
    return (run_id, record.seq, record.nev, record.claim_id, record.kind, record.key, compact(body))


def restored(told: list[Any]) -> Record:
    """The record that the script tells as [first event number, position, number of events, body]."""
    ev, seq, nev, body = told
    record: Record = tuple.__new__(Record, (seq, *body, ev, nev))
    return record


async def records(engine: RedisEngine, run_id: str, after: int = -1) -> list[Record]:
    found: list[Record] = []
    start: str | None = "-"
    while start is not None:
        start, page = await engine.ask("journal.records", run_id, start, PAGE)
        found += map(restored, page)
    return found if after < 0 else [record for record in found if record.seq > after]


async def ending(engine: RedisEngine, run_id: str) -> Record | None:
    start, told = "+", None
    while start is not None:
        start, told = await engine.ask("journal.ending", run_id, start, PAGE)
    return None if told is None else restored(told)


def _no_function(*args: Any) -> Any:
    raise NotSupported("a function cannot run inside a commit on Redis: ctx.transaction needs the journal on SQLite")


CONCERN = RedisOperationSet(
    "journal",
    {},
    script=lua_source(__file__),
    seldom=lua_source(__file__, "redis_admin"),
    codecs={"journal.append": Codec(_packed), "journal.transact": Codec(_no_function)},
)
