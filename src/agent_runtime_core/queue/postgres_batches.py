"""Statements that apply many commits of one shape to a PostgreSQL database in one round trip.

Each statement is a second form of a rule of `RunTransitions`, for the usual case only. It leaves a request alone that
is not the usual case, and the engine applies that request by the rules themselves.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

from .._engines.base import Batch
from .._engines.commit_request import CommitRequest
from .._engines.postgres.connection import NOT_MOVED, rows_of, sent
from .._engines.postgres.engine import NOW
from .records import COLUMNS, SCHEDULE, ClaimRequest, RunRow, as_claimed
from .sqlite_find import checked_row

#: See `Batch.apply`.
Steps = Generator[list[tuple[str, Sequence[Any]]], list[list[Any]], list[CommitRequest]]

#: `ClaimRequest.admits` without agents.
OF_RUNS: Final = f"agent <> '{SCHEDULE}'"
_STORED: Final = tuple(name for name in COLUMNS if name != "n")
_N: Final = COLUMNS.index("n")
_FLOATS: Final = frozenset({
    "created_at", "due_at", "expires_at", "deadline", "lease_until", "claimed_at", "started_at", "ended_at",
    "updated_at", "cancel_at",
})  # fmt: skip
_INTS: Final = frozenset(
    {
        "priority",
        "held",
        "generation",
        "failures",
        "crashes",
        "stalls",
        "mark",
        "parked",
        "mail_seq",
        "concurrency_limit",
    }
)
ROW: Final = ", ".join(f"r.{name}" for name in COLUMNS)


def _kind(name: str) -> str:
    return "float8" if name in _FLOATS else "int" if name in _INTS else "text"


# -- queue.insert and queue.take

_NEW_ROWS: Final = rows_of("w", *(f"{name} {_kind(name)}" for name in _STORED))
# The same run may be in an open transaction of the application, which must not delay all commits of this process.
# The time is read once: a run that never started is told by `started_at = claimed_at`.
_BRIEF: Final = f"WITH brief AS MATERIALIZED (SELECT {NOW} AS now, set_config('lock_timeout', '250ms', true)) "
_INSERT: Final = (
    f"{_BRIEF}INSERT INTO arc_runs ({', '.join(_STORED)}) SELECT w.* FROM"
    f" brief, {_NEW_ROWS} WHERE {NOT_MOVED}"
    " ON CONFLICT DO NOTHING RETURNING run_id, n"
)


def _cells(row: RunRow) -> tuple[Any, ...]:
    return (*row[:_N], *row[_N + 1 :])


def insert(engine: Any, requests: Sequence[CommitRequest]) -> Steps:
    """Store new runs that nothing delays or blocks."""
    rows = [_cells(args[0]) for request in requests for _, args in request.ops]
    [found] = yield [(_INSERT, (sent(_STORED, rows),))]
    arrivals = dict(found)
    for request in requests:
        mine: list[RunRow] = [args[0] for _, args in request.ops]
        if all(row.run_id in arrivals for row in mine):
            request.result = [row.with_values(arrival=arrivals[row.run_id]) for row in mine]
    return [request for request in requests if request.result is None]


def _inserts(request: CommitRequest) -> bool:
    rows = [args[0] for _, args in request.ops]
    return request.guard is None and all(map(_is_free, rows)) and len({row.run_id for row in rows}) == len(rows)


def _is_free(row: RunRow) -> bool:
    """Whether nothing delays or blocks a new run, and nothing but its id can be taken."""
    return row.concurrency_key is None and row.idem_key is None and not row.due_at


@cache
def _take(by_server: bool) -> str:
    values = dict.fromkeys(("claimed_at", "started_at", "updated_at"), "brief.now")
    values["lease_until"] = "brief.now + w.lease_until"
    if not by_server:
        values = {}
    return (
        f"{_BRIEF}INSERT INTO arc_runs AS r ({', '.join(_STORED)})"
        f" SELECT {', '.join(values.get(name, f'w.{name}') for name in _STORED)}"
        f" FROM brief, {_NEW_ROWS} WHERE {NOT_MOVED}"
        f" ON CONFLICT DO NOTHING RETURNING {ROW}"
    )


def take(engine: Any, requests: Sequence[CommitRequest]) -> Steps:
    """Store new runs that their callers execute."""
    of_run = {request.ops[0].args[0].run_id: request for request in requests}
    rows = (as_claimed(row, want.tickets[0], want) for row, _, _, want, *_ in (each.ops[0].args for each in requests))
    [found] = yield [(_take(engine.by_server), (sent(_STORED, map(_cells, rows)),))]
    for row in map(checked_row, found):
        of_run[row.run_id].result = [("claimed", row)]
    return [request for request in requests if request.result is None]


def _takes(request: CommitRequest) -> bool:
    row, is_inserted, *_ = request.ops[0].args
    free = row.concurrency_key is None and row.idem_key is None
    return request.guard is None and len(request.ops) == 1 and is_inserted and free


Claims = list[tuple[tuple[str, Sequence[Any]], list[tuple[str, CommitRequest]]]]


@cache
def _claim(by_server: bool, agents: int) -> str:
    """Return the statement that claims ready runs. `agents` is how many agents it names; -1: all runs.

    Runs with a rate limit or a turn are left to the rules. They are chosen and not claimed: to look for other runs
    behind them could mean to read all of them.
    """
    now, lease = (NOW, "clock.now + ?::float8") if by_server else ("?::float8", "?::float8")
    ready = "status = 'pending' AND due_at = 0 AND origin = '' AND held = 0 AND claim_id < ?"
    # Of several agents, more rows are looked at than are claimed: other workers may have locked some of them.
    order = "ORDER BY priority DESC, n LIMIT"
    columns = "SELECT run_id, priority, n, rate, turn"
    if agents <= 1:
        of_agent = "agent = ?" if agents == 1 else OF_RUNS
        chosen = f"{columns} FROM arc_runs WHERE {of_agent} AND {ready} {order} (SELECT count(*) FROM t)"
    else:
        each = f"SELECT run_id, n FROM arc_runs WHERE agent = a.agent AND {ready} {order} ?"
        chosen = (
            f"{columns} FROM arc_runs WHERE n = ANY (ARRAY(SELECT m.n FROM unnest(?::text[]) AS a"
            f" (agent), LATERAL ({each}) m)) AND {ready} {order} (SELECT count(*) FROM t)"
        )
    return (
        "WITH t AS (SELECT w.ticket, row_number() OVER (ORDER BY w.ticket) AS place FROM"
        " unnest(?::text[], ?::text[], ?::text[]) AS w (ticket, owner, token) LEFT JOIN arc_runs o"
        " ON o.run_id = w.owner WHERE w.owner IS NULL OR o.claim_id = w.token AND o.status <> 'running'"
        " AND o.xmin = pg_current_xact_id()::xid),"
        f" clock AS MATERIALIZED (SELECT {now} AS now), c AS MATERIALIZED ({chosen} FOR NO KEY UPDATE SKIP LOCKED),"
        " p AS (SELECT c.run_id, row_number() OVER (ORDER BY c.priority DESC, c.n) AS place FROM c"
        " WHERE c.rate IS NULL AND c.turn IS NULL)"
        " UPDATE arc_runs r SET status = 'running', claim_id = t.ticket, worker = ?, holder = ?,"
        " claimed_at = clock.now, started_at = coalesce(r.started_at, clock.now), updated_at = clock.now,"
        f" lease_until = {lease}, due_at = 0, held = 0 FROM p JOIN t USING (place), clock"
        f" WHERE r.run_id = p.run_id AND {NOT_MOVED} RETURNING {ROW}"
    )


def claims(engine: Any, wants: Iterable[tuple[CommitRequest, ClaimRequest]]) -> Claims:
    """Return the statements of claims and their tickets. Claims that differ in their tickets share a statement."""
    groups: dict[ClaimRequest, list[tuple[str, CommitRequest]]] = {}
    for request, want in wants:
        same = want._replace(tickets=(), wall=0.0, lease_until=round(want.lease_until), lease_now=0.0)
        groups.setdefault(same, []).extend((ticket, request) for ticket in want.tickets)
    return [(_claim_statement(engine, next(_wants(group)), group), group) for group in groups.values()]


def _wants(group: Iterable[tuple[str, CommitRequest]]) -> Iterator[ClaimRequest]:
    for _, request in group:
        yield request.ops[-1].args[0]


def _claim_statement(
    engine: Any, want: ClaimRequest, group: Sequence[tuple[str, CommitRequest]]
) -> tuple[str, Sequence[Any]]:
    tickets = [ticket for ticket, _ in group]
    guards = [request.guard for _, request in group]
    owners = [None if guard is None else guard.key for guard in guards]
    tokens = [None if guard is None else guard.token for guard in guards]
    lowest = min(tickets)
    if want.agents is None:
        chosen: list[Any] = [lowest]
    elif len(want.agents) == 1:
        chosen = [want.agents[0], lowest]
    else:
        chosen = [[*want.agents], lowest, 4 * len(tickets) + 16, lowest]
    times = [] if engine.by_server else [want.wall]
    statement = _claim(engine.by_server, -1 if want.agents is None else min(len(want.agents), 2))
    return statement, (tickets, owners, tokens, *times, *chosen, want.worker, want.holder, want.lease_until)


def given(groups: Claims, replies: Sequence[list[Any]]) -> dict[CommitRequest, list[RunRow]]:
    """Return the claimed rows of each request."""
    found: dict[CommitRequest, list[RunRow]] = {}
    for (_, tickets), rows in zip(groups, replies, strict=True):
        owners = dict(tickets)
        for row in map(checked_row, rows):
            found.setdefault(owners[row.claim_id], []).append(row)
    return found


BATCHES: Final[Mapping[tuple[str, ...], Batch]] = {
    ("queue.insert",): Batch(insert, _inserts, frozenset({"work"})),
    ("queue.take",): Batch(take, _takes),
}
