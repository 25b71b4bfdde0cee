"""An event bus on one Redis or Valkey server: the log of each run is a stream, and a message only says that it grew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from .._core.codec.json import compact
from .._engines.backend import OperationSets, Reads
from .._engines.base import READER_SECONDS
from .._engines.redis.engine import RedisBackend, RedisEngine
from .._engines.redis.script import Codec, RedisOperationSet, as_list, lua_source
from .._journal import redis as journal
from .._journal.record import Record
from .base import COPY, PUBLISH, REWRITE, EventBus
from .event import PAGE_BYTES, EventRows, StoredEvent, merged

Row = tuple[str, str, str, float]


def _packed(run_id: str, rows: Sequence[Row]) -> tuple[Any, ...]:
    return run_id, [
        (event_id, compact((event_type, payload, t, event_id))) for event_id, event_type, payload, t in rows
    ]


def _rewritten(run_id: str, changes: Sequence[tuple[StoredEvent, StoredEvent]]) -> tuple[Any, ...]:
    return run_id, [(f"{old.sequence + 1}-0", compact(old[1:]), compact(new[1:])) for old, new in changes]


def _copied(run_id: str, events: Sequence[StoredEvent]) -> tuple[Any, ...]:
    return run_id, [(each.sequence, each.event_id, compact(each[1:])) for each in events]


async def _ids(engine: RedisEngine) -> list[str]:
    return await engine.ids(events="stream")


CONCERN = RedisOperationSet(
    "events",
    {},
    script=lua_source(__file__),
    seldom=lua_source(__file__, "redis_admin"),
    codecs={
        PUBLISH: Codec(_packed, as_list),
        REWRITE: Codec(_rewritten, as_list),
        COPY: Codec(_copied),
        "events.heads": Codec(unpack=as_list),
    },
)


class RedisEventBus(RedisBackend, EventBus):
    """An event bus on one Redis or Valkey server, shared by all processes that reach it."""

    operation_sets: ClassVar[OperationSets] = (journal.CONCERN, CONCERN)
    reads: ClassVar[Reads] = {"ids": _ids}
    derives = True
    bounds_pages = True
    stores_readers = True

    async def _rows(self, run_id: str, since: int, limit: int) -> Sequence[StoredEvent | Record]:
        start: int | None = since
        while start is not None:
            start, stored, records = await self.engine.ask("events.rows", run_id, start, limit, PAGE_BYTES)
            if stored or records:  # else it read only records without events
                events = [StoredEvent(number, *body) for number, body in stored]
                return merged(events, [journal.restored(each) for each in records], limit, start)
        return EventRows([], False, 0)

    async def report_reader(self, run_id: str, reader: str, sequence: int | None) -> None:
        await self.engine.ask("events.report", run_id, reader, sequence)

    async def readers(self, run_id: str) -> dict[str, int]:
        found = as_list(await self.engine.ask("events.readers", run_id, READER_SECONDS))
        return {reader: int(sequence) for reader, sequence in found}

    async def _head(self, run_id: str) -> int:
        return (await self._heads([run_id]))[0]

    async def _heads(self, run_ids: Sequence[str]) -> list[int]:
        found: list[int] = await self.engine.ask("events.heads", list(run_ids))
        return found
