"""The journal in Redis streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._core.codec.json import compact
from .._engines.redis.script import Codec, RedisOperationSet, as_list, lua_source
from ..errors import NotSupported
from .record import ENDED, Record

if TYPE_CHECKING:
    from .._engines.redis.engine import RedisEngine

PAGE = 512  # most records in one reply


def _body(record: Record) -> str:
    return compact((record.kind, record.name, record.key, record.attempt, record.claim_id, *record[6:17]))


def _packed(run_id: str, record: Record) -> tuple[Any, ...]:
    """Return the fields of a record that the script reads, and the other fields as one JSON string."""
    return (run_id, record.seq, record.nev, record.claim_id, record.kind, record.key, _body(record))


def _rewritten(run_id: str, changes: Sequence[tuple[Record, Record]]) -> tuple[Any, ...]:
    return run_id, [(f"{old.ev}-{old.seq + 1}", _body(old), _body(new)) for old, new in changes]


def _copied(run_id: str, records: Sequence[Record]) -> tuple[Any, ...]:
    return run_id, [(record.seq, record.ev, record.nev, _body(record)) for record in records]


def restored(reply: list[Any]) -> Record:
    """Return the record of a reply [first event number, position, number of events, body]."""
    ev, seq, nev, body = reply
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
    start, reply = "+", None
    while start is not None:
        start, reply = await engine.ask("journal.ending", run_id, start, PAGE)
    return None if reply is None else restored(reply)


async def endings(engine: RedisEngine, run_ids: Sequence[str]) -> dict[str, Record]:
    """Return the last end of each of these runs, if there is any; of the result only the error and the usage."""
    found, left = {}, list(run_ids)
    while left:
        count, ends = await engine.ask("journal.endings", left)
        for run_id, name, attempt, info, result in ends:
            found[run_id] = Record(-1, ENDED, name, attempt=attempt, info=info, result=result)
        left = left[count:]
    return found


#: What a state store reads of the journal.
READS: dict[str, Any] = {"records": records, "ending": ending, "endings": endings}


def _no_function(*args: Any) -> Any:
    raise NotSupported(
        "ctx.transaction needs the journal on SQLite or PostgreSQL, got Redis. Use AgentRunner.open('agents.db'), or "
        "ctx.step"
    )


CONCERN = RedisOperationSet(
    "journal",
    {},
    script=lua_source(__file__),
    seldom=lua_source(__file__, "redis_admin"),
    codecs={
        "journal.append": Codec(_packed),
        "journal.rewrite": Codec(_rewritten, as_list),
        "journal.copy": Codec(_copied),
        "journal.transact": Codec(_no_function),
    },
)
