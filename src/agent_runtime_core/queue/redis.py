"""A queue on one Redis or Valkey server, shared by all processes that reach it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from .._core.codec.json import encode
from .._engines.backend import OperationSets, Reads
from .._engines.redis.engine import RedisBackend, RedisEngine
from .._engines.redis.script import Codec, RedisOperationSet, as_list, lua_source
from ..status import RunStatus
from .base import RunQueue
from .blocking_claims import BlockingClaims, SubscriptionFactory
from .payload_fields import decode_committed
from .pools import HELD, Refusal
from .rate_limits import MOST_DELAYED, MOST_LEFT, STEP
from .records import (
    ANSWER,
    COLUMNS,
    IN_DOUBT,
    QUESTION,
    QUEUED_BEHIND,
    RATE_LIMITED,
    SCHEDULE,
    SET_ASIDE,
    MailboxMessage,
    ProcessRow,
    RowChanged,
    RunRow,
    RunSnapshot,
    RunUpdate,
)
from .redis_find import PAGE, TIME_INDEXES, counts, decoded_row, decoded_rows, find
from .transitions import CLOCK_STEP, INLINE_RESERVATION
from .windows import CELLS


def _time(seconds: float | None) -> str | None:
    """Encode a time for the script: "0" is no time."""
    return None if seconds is None else repr(seconds) if seconds else "0"


def _cells(row: RunRow) -> list[Any]:
    cells: list[Any] = list(row)
    for index in TIME_INDEXES:
        cells[index] = _time(cells[index])
    return cells


def _take(row: RunRow, *args: Any) -> tuple[Any, ...]:
    return _cells(row), *args


def _settle(run_id: str, how: RunUpdate) -> tuple[Any, ...]:
    claim_id, status, now, due_at, *rest = how
    return run_id, claim_id, status, _time(now), _time(due_at), *rest


def _post(run_id: str, mail: MailboxMessage) -> tuple[Any, ...]:
    return run_id, mail.kind, mail.name, mail.payload, mail.msg_id, repr(mail.t)


def _end(run_id: str, expect: Sequence[str], status: str, now: float, reason: str) -> tuple[Any, ...]:
    return run_id, expect, status, _time(now), reason


def _reopen(run_id: str, expect: Sequence[str], now: float) -> tuple[Any, ...]:
    return run_id, expect, _time(now)


def _rewrite_mail(run_id: str, changes: Sequence[tuple[MailboxMessage, MailboxMessage]]) -> tuple[Any, ...]:
    return run_id, [(old.seq, old.msg_id, old.payload, new.payload) for old, new in changes]


def _copy(row: RunRow, messages: Sequence[MailboxMessage]) -> tuple[Any, ...]:
    return _cells(row), [
        (kind, name, payload, msg_id, repr(t), seq) for kind, name, payload, msg_id, t, seq in messages
    ]


def _taken(reply: list[Any]) -> tuple[str, RunRow | None]:
    return reply[0], decoded_row(reply[1])


async def _news(engine: RedisEngine, run_ids: Sequence[str]) -> dict[str, RunSnapshot]:
    found = as_list(await engine.ask("queue.news", list(run_ids)))
    return {run_id: RunSnapshot(*cells) for run_id, cells in zip(run_ids, found, strict=True) if cells}


async def _next_due(engine: RedisEngine) -> float | None:
    """Return the time on the clock of this process, which may differ from the server's clock, which decides."""
    left = await engine.ask("queue.next_due")
    return None if left is None else float(left) + (engine.clock.wall() if engine.by_server else 0.0)


async def _last_arrival(engine: RedisEngine) -> int:
    return int(await engine.ask("queue.last_arrival"))


async def _shared(engine: RedisEngine, prefix: str) -> dict[str, str]:
    return dict(sorted(as_list(await engine.ask("queue.shared", prefix))))


async def _row(engine: RedisEngine, *args: Any) -> Any:
    return await engine.ask("queue.row", *args)


async def _all(engine: RedisEngine, what: str, run_id: str, after: int = 0) -> list[Any]:
    found: list[Any] = []
    start: int | None = after
    while start is not None:
        start, page = await engine.ask(what, run_id, start, PAGE)
        found += page
    return found


async def _children(engine: RedisEngine, run_id: str) -> list[RunRow]:
    return decoded_rows(await _all(engine, "queue.children", run_id))


async def _mail(engine: RedisEngine, run_id: str, after: int = 0) -> list[MailboxMessage]:
    found = await _all(engine, "queue.mail", run_id, after)
    return [MailboxMessage(kind, name, payload, msg_id, float(t), seq) for kind, name, payload, msg_id, t, seq in found]


async def _processes(engine: RedisEngine) -> list[ProcessRow]:
    """Return the rows with their times on the clocks of this process: the server reports how long ago they were."""
    found, wall = as_list(await engine.ask("queue.processes")), engine.clock.wall() if engine.by_server else 0.0
    rows = [ProcessRow(*json.loads(cells)) for cells, _, _ in found]
    return [
        row._replace(agents=tuple(row.agents), seen_at=wall + float(seen), alive_until=float(until))
        for row, (_, seen, until) in zip(rows, found, strict=True)
    ]


def _save_process(row: ProcessRow, kept: float) -> tuple[Any, ...]:
    cells = (*row[:6], [*row.agents], *row[7:])
    return row.process_id, encode([*cells]), _time(row.seen_at), row.alive_until, kept


def _refusals(answer: Any) -> list[Refusal]:
    return [Refusal(name, unit, int(used), float(after), held) for name, unit, used, after, held in as_list(answer)]


#: Constants that are defined in Python.
_CONSTANTS = f"""local BEHIND, ASIDE, PLACE, IN_DOUBT = {QUEUED_BEHIND}, {SET_ASIDE}, {INLINE_RESERVATION}, '{IN_DOUBT}'
local RATE_LIMITED, MOST_DELAYED, MOST_LEFT = '{RATE_LIMITED}', {MOST_DELAYED}, {MOST_LEFT}
local STEP, CELLS, CLOCK_STEP, SCHEDULE = {STEP}, {CELLS}, {CLOCK_STEP}, '{SCHEDULE}'"""
_STATUSES = ", ".join(f"'{status.value}'" for status in RunStatus)
_SELDOM_CONSTANTS = f"local QUESTION, ANSWER, STATUSES, HELD = '{QUESTION}', '{ANSWER}', {{{_STATUSES}}}, {HELD:g}"
#: Most blocking claims that a commit considers for the runs it made ready, and most characters of one message.
_STANDING = "local STANDING, LETTER = 8, 60000"
_CELLS = {name.upper(): index for index, name in enumerate(COLUMNS, 1)}


def _with_indexes(lua: str) -> str:
    """Return the script with indexes for the names of a row's fields. So many Lua locals would slow down each call."""
    return re.sub(r"\[([A-Z_]+)\]", lambda name: f"[{_CELLS[name[1]]}]", lua)


CONCERN = RedisOperationSet(
    "queue",
    {},
    script="\n".join(
        (
            _CONSTANTS,
            _STANDING,
            *(
                _with_indexes(lua_source(__file__, name))
                for name in ("redis_rows", "redis_concurrency_keys", "redis_claims", "redis")
            ),
        )
    ),
    seldom="\n".join(
        (_SELDOM_CONSTANTS, _with_indexes(lua_source(__file__, "redis_admin")), lua_source(__file__, "redis_pools"))
    ),
    codecs={
        "queue.insert": Codec(lambda row: (_cells(row),), decoded_row),
        "queue.claim": Codec(unpack=decoded_rows),
        "queue.take": Codec(_take, _taken),
        "queue.settle": Codec(_settle, decoded_row),
        "queue.beat": Codec(unpack=lambda reply: [tuple(each) for each in as_list(reply)]),
        "queue.post": Codec(_post, tuple),
        "queue.end": Codec(_end, decoded_row),
        "queue.reopen": Codec(_reopen, decoded_row),
        "queue.rewrite_mail": Codec(_rewrite_mail, as_list),
        "queue.save_process": Codec(_save_process),
        "queue.copy": Codec(_copy),
        "queue.row": Codec(unpack=decoded_row),
        "queue.reserve": Codec(unpack=_refusals),
    },
    refusals={"MOVED": RowChanged},
)


class RedisQueue(RedisBackend, RunQueue):
    """A queue on one Redis or Valkey server, shared by all processes that reach it."""

    operation_sets: ClassVar[OperationSets] = (CONCERN,)
    reads: ClassVar[Reads] = {
        "find": find,
        "counts": counts,
        "news": _news,
        "next_due": _next_due,
        "children": _children,
        "mail": _mail,
        "row": _row,
        "processes": _processes,
        "last_arrival": _last_arrival,
        "shared": _shared,
    }

    # A process cannot see that a process on another machine ended.
    recommended_settings: ClassVar[Mapping[str, float]] = {"lease_ttl_seconds": 30, "heartbeat_interval_seconds": 10}
    keeps_processes = True
    keeps_limits = True
    mail_count = "queue.mail_count"

    def lease_now(self) -> float:
        return self.engine.lease_now()

    def blocking_claims(self, given: Callable[[list[RunRow]], None]) -> BlockingClaims | None:
        # The lease of a blocking claim begins when it gets a run: only the server's clock can measure that.
        if (
            self.engine.place.tls
            or not self.engine.by_server
            or (self.payloads is not None and self.payloads.reads_only)
        ):
            return None
        subscribe: SubscriptionFactory = lambda name, *call: self.engine.subscription(f"stand:{name}", *call)  # noqa: E731

        def claimed(message: bytes) -> list[RunRow]:
            return [decode_committed(self.payloads, row) for row in decoded_rows(json.loads(message))]

        return BlockingClaims(self, subscribe, claimed, given)
