"""Statements that record steps and ends of many runs in a PostgreSQL database in one round trip.

Each statement is a second form of the rules of `RunTransitions` and of the journal, for the usual case only. It leaves
a request alone that is not the usual case, and the engine applies that request by the rules themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from .._engines.base import Batch
from .._engines.commit_request import CommitRequest
from .._engines.postgres.connection import NOT_MOVED, rows_of, sent
from .._journal.record import Record
from ..queue.postgres_batches import ROW, Steps, claims, given
from ..queue.records import COLUMNS, LIVE, RunRow, RunUpdate
from ..queue.sqlite_find import checked_row

# -- journal.append

_RECORD: Final = (
    "run_id text", "token text", "first int", "seq int", "kind text", "name text", "key text", "attempt int",
    "claim_id text", "t float8", "result text", "error text", "state text", "pos int", "total int", "tries int",
    "ms bigint", "info text", "next text", "digest text", "nev int",
)  # fmt: skip
_RECORDS: Final = rows_of("w", *_RECORD)
_LAST: Final = (
    "LEFT JOIN LATERAL (SELECT seq, ev + nev AS ev FROM arc_journal WHERE run_id = ok.run_id ORDER BY seq DESC LIMIT 1)"
    " j ON true LEFT JOIN LATERAL (SELECT seq + 1 AS seq FROM arc_events WHERE run_id = ok.run_id"
    " ORDER BY seq DESC LIMIT 1) v ON true"
)
_APPENDED: Final = (
    "INSERT INTO arc_journal SELECT w.run_id, w.seq, w.kind, w.name, w.key, w.attempt, w.claim_id, w.t, w.result,"
    " w.error, w.state, w.pos, w.total, w.tries, w.ms, w.info, w.next, w.digest, greatest(ok.next_event,"
    " coalesce(j.ev, 0), coalesce(v.seq, 0)) + sum(w.nev) OVER (PARTITION BY w.run_id ORDER BY w.seq) - w.nev, w.nev"
    f" FROM w JOIN ok USING (run_id) {_LAST} WHERE w.first > coalesce(j.seq, -1) RETURNING run_id, seq"
)
_APPEND: Final = (
    f"WITH w AS (SELECT * FROM {_RECORDS}), ok AS MATERIALIZED (SELECT r.run_id, r.next_event FROM arc_runs r JOIN"
    " (SELECT DISTINCT run_id, token FROM w) g ON r.run_id = g.run_id AND r.claim_id = g.token"
    f" WHERE r.status = 'running' AND {NOT_MOVED} ORDER BY r.run_id FOR SHARE OF r) {_APPENDED}"
)


def _records(requests: Sequence[CommitRequest]) -> str:
    rows = []
    for request in requests:
        assert request.guard is not None
        run_id, token = request.guard
        records: list[Record] = [args[1] for name, args in request.ops if name == "journal.append"]
        # If the first record is not after the last stored record, none of them is appended.
        rows += [(run_id, token, records[0].seq, *record[:17], record.nev) for record in records]
    return sent(_RECORD, sorted(rows, key=lambda row: row[0]))


def _appends(request: CommitRequest) -> bool:
    """Whether all records of a request are of the run of its claim, and have positions that grow."""
    last, guard = -1, request.guard
    for name, args in request.ops:
        if name == "journal.append":
            if guard is None or args[0] != guard.key or args[1].seq <= last:
                return False
            last = args[1].seq
    return True


def append(engine: Any, requests: Sequence[CommitRequest]) -> Steps:
    """Append the records of claims that are current."""
    [rows] = yield [(_APPEND, (_records(requests),))]
    stored = set(rows)
    for request in requests:
        places = [(args[0], args[1].seq) for _, args in request.ops]
        if stored.issuperset(places):
            request.result = [seq for _, seq in places]
    return [request for request in requests if request.result is None]


# -- queue.settle, of runs that end, and queue.claim

_ENDS: Final = (
    "run_id text", "claim_id text", "seq int", "cursor int", "status text", "now float8", "parked int",
    "reason text", "failures int", "crashes int", "stalls int", "mark int", "output text", "error text",
)  # fmt: skip
_END: Final = (
    f"WITH e AS (SELECT * FROM {rows_of('e', *_ENDS)}), "
    " locked AS MATERIALIZED (SELECT r.run_id FROM arc_runs r JOIN e USING (run_id) ORDER BY r.run_id"
    " FOR NO KEY UPDATE OF r), ok AS MATERIALIZED (UPDATE arc_runs r SET status = e.status, due_at = 0,"
    " parked = e.parked, reason = e.reason, failures = e.failures, crashes = e.crashes, stalls = e.stalls,"
    " mark = e.mark, output = e.output, error = e.error, ended_at = e.now, updated_at = e.now, lease_until = 0 FROM e"
    " JOIN locked USING (run_id) WHERE r.run_id = e.run_id AND r.claim_id = e.claim_id AND r.status = 'running'"
    f" AND r.lane IS NULL AND (e.cursor < 0 OR r.mail_seq = e.cursor) AND {NOT_MOVED}"
    " AND NOT EXISTS (SELECT 1 FROM arc_journal j WHERE j.run_id = e.run_id AND j.seq >= e.seq)"
    f" RETURNING {ROW}, r.next_event),"
    f" w AS (SELECT * FROM {_RECORDS}), appended AS ({_APPENDED}) SELECT {', '.join(COLUMNS)} FROM ok"
)


def end(engine: Any, requests: Sequence[CommitRequest]) -> Steps:
    """End runs, and claim the next runs for those who ask for that in the same commit."""
    values = sent(_ENDS, sorted(map(_end_cells, requests))), _records(requests)
    wants = [(request, request.ops[-1].args[0]) for request in requests if request.ops[-1].name == "queue.claim"]
    groups = claims(engine, wants)
    replies = yield [(_END, values), *(statement for statement, _ in groups)]
    ended = {row[0]: checked_row(row) for row in replies[0]}
    claimed = given(groups, replies[1:])
    for request in requests:
        assert request.guard is not None
        if (row := ended.get(request.guard.key)) is not None:
            request.result = [_outcome(op.name, op.args, row, claimed, request) for op in request.ops]
    return [request for request in requests if request.result is None]


def _outcome(
    name: str, args: tuple[Any, ...], row: RunRow, claimed: Mapping[CommitRequest, list[RunRow]], request: CommitRequest
) -> Any:
    if name == "journal.append":
        return args[1].seq
    return row if name == "queue.settle" else claimed.get(request, [])


def _ends(request: CommitRequest) -> bool:
    guard, settles = request.guard, [args for name, args in request.ops if name == "queue.settle"]
    if guard is None or len(settles) != 1 or not _appends(request):
        return False
    run_id, how = settles[0]
    claim = request.ops[-1].args[0] if request.ops[-1].name == "queue.claim" else None
    return (
        run_id == guard.key
        and how.claim_id == guard.token
        and how.status not in LIVE
        and not how.renew
        and (claim is None or claim.ready_only)
    )


def _end_cells(request: CommitRequest) -> tuple[Any, ...]:
    run_id, how = next(args for name, args in request.ops if name == "queue.settle")
    update: RunUpdate = how
    first = min(args[1].seq for name, args in request.ops if name == "journal.append")
    return (
        run_id, update.claim_id, first, update.cursor, update.status, update.now, update.parked, update.reason,
        update.failures, update.crashes, update.crashes_in_row, update.min_step_count, update.output, update.error,
    )  # fmt: skip


_ENDED: Final = frozenset({"done", "events"})
BATCHES: Final[Mapping[tuple[str, ...], Batch]] = {
    ("journal.append",): Batch(append, _appends, frozenset({"events"})),
    ("journal.append", "queue.settle"): Batch(end, _ends, _ENDED),
    ("journal.append", "queue.settle", "queue.claim"): Batch(end, _ends, _ENDED),
}
