"""A queue in a PostgreSQL database, shared by all processes that reach it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import compress
from operator import ne
from typing import Any, ClassVar

from .._core.codec.json import encode
from .._core.ids import ULID_RANDOM_LENGTH
from .._engines.backend import OperationSets, Reads
from .._engines.commit_request import CommitRequest
from .._engines.postgres.connection import PostgresConnection
from .._engines.postgres.engine import PostgresBackend, PostgresTx, server_time
from .base import RunQueue
from .pools import PREFIX
from .postgres_batches import BATCHES, OF_RUNS
from .postgres_caller import CallerInsert, store_id
from .postgres_search import OPERATION_SET, search
from .postgres_search import state as search_state
from .rate_limits import PREFIX as RATES
from .rate_limits import Rate
from .records import COLUMNS, ClaimRequest, MailboxMessage, ProcessRow, RunRow, RunSnapshot, RunUpdate, contents_of
from .sqlite import _REWRITE, _REWRITE_MESSAGE, _children, _mail, _shared
from .sqlite import _next_due as sqlite_next_due
from .sqlite import _processes as sqlite_processes
from .sqlite_find import ALL, agents, checked_row, counts, fetch, find
from .sqlite_search import numbered
from .transitions import ServerLeases, operation_set

DUE_AT_ONCE = 1_000  # most delayed runs that one claim makes ready; the next claim continues
_N = COLUMNS.index("n")
_NAMING = ("queue.", "journal.", "events.", "state.", "fence.")  # operations whose first argument may be a run id
_STORED = tuple(name for name in COLUMNS if name != "n")
_GROUP = "hashtextextended(?::text || chr(2) || ?::text, 2)"
_LOCK_GROUP = f"SELECT pg_advisory_xact_lock({_GROUP})"
_TRY_GROUP = f"SELECT pg_try_advisory_xact_lock({_GROUP})"
# Every transaction locks the concurrency key of a run first, then its row: the same order everywhere, so that none
# waits for another that waits for it.
_LOCKED = (
    "WITH of_group AS MATERIALIZED (SELECT CASE WHEN lane IS NOT NULL THEN"
    " pg_advisory_xact_lock(hashtextextended(lane || chr(2) || tenant, 2))::text END FROM arc_runs WHERE run_id = ?)"
    f" SELECT {', '.join(f'r.{name}' for name in COLUMNS)} FROM of_group, arc_runs r WHERE r.run_id = ?"
    " FOR NO KEY UPDATE OF r"
)
# The same for all runs of a transaction: the keys by their numbers, then the rows by their ids. The condition with the
# keys is evaluated first, even if no row is found.
_LOCKED_TOGETHER = (
    "WITH keys AS MATERIALIZED (SELECT count(pg_advisory_xact_lock(key)) AS locked FROM"
    " (SELECT hashtextextended(lane || chr(2) || tenant, 2) AS key FROM arc_runs"
    " WHERE run_id = ANY(?) AND lane IS NOT NULL UNION SELECT"
    " hashtextextended(lane || chr(2) || tenant, 2) FROM unnest(?::text[], ?::text[]) AS g (lane, tenant)"
    f" ORDER BY 1) k) SELECT {ALL} FROM arc_runs WHERE (SELECT locked FROM keys) >= 0 AND run_id = ANY(?)"
    " ORDER BY run_id FOR NO KEY UPDATE"
)
_BY_KEY = f"SELECT {ALL} FROM arc_runs WHERE idem_key = ? AND tenant = ?"
_INSERT = f"INSERT INTO arc_runs ({', '.join(_STORED)}) VALUES ({', '.join('?' * len(_STORED))})"
_INSERT_COPIED = f"INSERT INTO arc_runs ({ALL}) VALUES ({', '.join('?' * len(COLUMNS))})"
_DUE = (
    "SELECT n, CASE WHEN held = 1 THEN lane END, tenant FROM arc_runs WHERE due_at > 0 AND due_at <= ?"
    " ORDER BY priority DESC, n LIMIT ? FOR NO KEY UPDATE SKIP LOCKED"
)
_MAKE_READY = "UPDATE arc_runs SET status = 'pending', updated_at = due_at, due_at = 0 WHERE n = ANY(?)"
_CLAIMED_BEFORE = (
    f"SELECT {ALL} FROM arc_runs WHERE status = 'running' AND right(claim_id, {ULID_RANDOM_LENGTH}) = ANY(?)"
    " ORDER BY run_id FOR NO KEY UPDATE"
)
_CLAIMED = "status = 'running' AND origin = '' AND lease_until < ?"
_READY = "status = 'pending' AND due_at = 0 AND origin = '' AND held = 0"
_OF = "agent = ANY(?)"
_OF_AGENT = "agent = ?"  # an index has the order of `ANY` only from PostgreSQL 17 on, so all ready runs would be sorted
_SKIP = "FOR NO KEY UPDATE SKIP LOCKED"
_TURN = (
    f"SELECT {ALL} FROM arc_runs WHERE agent = ? AND priority = ? AND turn IS NOT NULL AND turn {{}} ? AND {_READY}"
    f" ORDER BY turn, n LIMIT 1 {_SKIP}"
)
_FIRST_TURN, _NEXT_TURN = _TURN.format(">="), _TURN.format(">")
_NEXT_AGENT = f"SELECT agent FROM arc_runs WHERE {_READY} AND agent > ? ORDER BY agent LIMIT 1"
_HEAD = f"SELECT {ALL} FROM arc_runs WHERE lane = ? AND tenant = ? AND held = 0 AND ended_at IS NULL ORDER BY n LIMIT ?"
_BEHIND = (
    f"SELECT {ALL} FROM arc_runs WHERE lane = ? AND tenant = ? AND held = 1 AND due_at = 0"
    " ORDER BY priority DESC, n LIMIT 1"
)
_LAPSED = (
    f"SELECT {ALL} FROM arc_runs WHERE lane IS NOT NULL AND held = 0 AND origin <> '' AND status IN"
    f" ('pending', 'running') AND ended_at IS NULL AND lease_until < ? {_SKIP}"
)
_LIMITED = (
    f"SELECT {ALL} FROM arc_runs WHERE rate = ? AND agent = ? AND reason = 'rate_limit' AND status = 'pending'"
    f" AND due_at > 0 ORDER BY priority DESC, n LIMIT 1 {_SKIP}"
)
_BRING_FORWARD = (
    "UPDATE arc_runs SET due_at = due_at - ? WHERE n = ANY (ARRAY(SELECT n FROM arc_runs WHERE reason = 'rate_limit'"
    f" AND status = 'pending' AND due_at > 0 AND substr(rate, strpos(rate, ' ') + 1) = ? {_SKIP}))"
)
_LOCK_SHARED = (
    "SELECT count(pg_advisory_xact_lock(key)) FROM (SELECT hashtextextended(chr(2) || name, 2) AS key"
    " FROM unnest(?::text[]) AS names (name) ORDER BY 1) k"
)
_SHARED_STATE = "SELECT state FROM arc_shared WHERE name = ?"
_SAVE_SHARED = "INSERT INTO arc_shared VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET state = excluded.state"
_BEAT = (
    "WITH w AS MATERIALIZED (SELECT r.run_id, r.claim_id FROM arc_runs r"
    " JOIN unnest(?::text[], ?::text[]) AS w (run_id, claim_id) USING (run_id, claim_id)"
    " WHERE r.status = 'running' ORDER BY r.run_id FOR NO KEY UPDATE OF r)"
    " UPDATE arc_runs r SET lease_until = ? FROM w WHERE r.run_id = w.run_id"
    " RETURNING r.run_id, r.claim_id, r.cancel_at"
)


@cache
def _choice(condition: str, order: str) -> str:
    return f"SELECT {ALL} FROM arc_runs WHERE {condition} ORDER BY {order} LIMIT ? {_SKIP}"


@cache
def _update(names: tuple[str, ...]) -> str:
    return f"UPDATE arc_runs SET {', '.join(f'{name} = ?' for name in names)} WHERE n = ?"


def _one(rows: Any) -> RunRow | None:
    row = rows.fetchone()
    return checked_row(row) if row else None


class PostgresTransitions(ServerLeases):
    """Rows in the table `runs`. A row that is read here is locked, and `tx.rows` keeps it for this transaction."""

    tx: PostgresTx

    # -- the clock of the server

    def wanted(self, want: ClaimRequest) -> ClaimRequest:
        return super().wanted(want)._replace(wall=self.tx.now) if self.tx.engine.by_server else want

    def _due(self, due_at: float, at: float) -> float:
        """Return a time on the clock of the server, for a time on the clock of the caller, which shows `at` now."""
        return self.tx.now + max(due_at - at, 0.0) if due_at and self.tx.engine.by_server else due_at

    def insert(self, row: RunRow) -> RunRow:
        return super().insert(row.with_values(due_at=self._due(row.due_at, row.updated_at)))

    def claim(self, want: ClaimRequest) -> list[RunRow]:
        return self.claim_applied(want) or self.claim_next(want)

    def claim_applied(self, want: ClaimRequest) -> list[RunRow]:
        """Return what these tickets have claimed, if this is a repetition after a lost reply."""
        if not self.tx.repeats:
            return []
        ends = [ticket[-ULID_RANDOM_LENGTH:] for ticket in want.tickets]
        found = fetch(self.tx.execute(_CLAIMED_BEFORE, (ends,)))
        self.tx.rows.update((row.run_id, row) for row in found)
        return sorted(found, key=lambda row: ends.index(row.claim_id[-ULID_RANDOM_LENGTH:]))

    def take(
        self, row: RunRow, insert: bool, reopen: bool, want: ClaimRequest, wait: bool = False
    ) -> tuple[str, RunRow | None]:
        if found := self.claim_applied(want):
            return ("claimed", found[0])
        return super().take(row, insert, reopen, want, wait)

    def settle(self, run_id: str, how: RunUpdate) -> RunRow:
        return super().settle(run_id, how._replace(due_at=self._due(how.due_at, how.now)))

    # -- rows

    def get(self, run_id: str) -> RunRow | None:
        if run_id not in self.tx.rows:
            self.tx.rows[run_id] = _one(self.tx.execute(_LOCKED, (run_id, run_id)))
        found: RunRow | None = self.tx.rows[run_id]
        return found

    def by_key(self, idem_key: str, tenant: str) -> RunRow | None:
        return _one(self.tx.execute(_BY_KEY, (idem_key, tenant)))

    def fence(self, run_id: str, token: str | None) -> None:
        """The row of a run is its fence."""

    def add(self, row: RunRow) -> RunRow:
        return self._added(row, self.tx.execute(f"{_INSERT} RETURNING n", _cells(row)))

    def add_new(self, row: RunRow) -> RunRow | None:
        found = self.tx.execute(f"{_INSERT} ON CONFLICT (run_id) DO NOTHING RETURNING n", _cells(row))
        return self._added(row, found) if found.rowcount else None

    def _added(self, row: RunRow, found: Any) -> RunRow:
        row = row.with_values(arrival=found.fetchone()[0])
        self.tx.rows[row.run_id] = row
        return row

    def add_copied(self, row: RunRow) -> None:
        self.tx.execute(_INSERT_COPIED, row)
        self.tx.rows.pop(row.run_id, None)

    def keep_arrival(self, last: int) -> None:
        self.tx.execute(
            "SELECT setval(pg_get_serial_sequence(?, 'n'), greatest(?, (SELECT coalesce(max(n), 1) FROM arc_runs)))",
            (f"{self.tx.conn.schema}.runs", max(last, 1)),
        )

    def save(self, row: RunRow) -> None:
        before: RunRow | None = self.tx.rows.get(row.run_id)
        changed = (True,) * len(COLUMNS) if before is None else tuple(map(ne, before, row))
        names = tuple(name for name in compress(COLUMNS, changed) if name != "n")
        if names:
            values = [value for name, value in zip(COLUMNS, row, strict=True) if name in names]
            self.tx.execute(_update(names), (*values, row.arrival))
        self.tx.rows[row.run_id] = row

    def replace_contents(self, row: RunRow) -> None:
        self.tx.execute(_REWRITE, (*contents_of(row), row.arrival))
        self.tx.rows[row.run_id] = row

    def replace_message(self, run_id: str, old: MailboxMessage, new: MailboxMessage) -> bool:
        found = (run_id, old.seq, old.kind, old.msg_id, old.payload)
        return bool(self.tx.execute(_REWRITE_MESSAGE, (new.payload, *found)).rowcount == 1)

    def move(self, row: RunRow, after: RunRow) -> None:
        self.save(after)

    def drop(self, row: RunRow) -> None:
        self.tx.rows[row.run_id] = None
        self.tx.execute("DELETE FROM arc_runs WHERE n = ?", (row.arrival,))
        self.tx.execute("DELETE FROM arc_mail WHERE run_id = ?", (row.run_id,))

    def make_due_ready(self, wall: float) -> Sequence[tuple[str, str]]:
        numbers, groups = list[int](), dict[tuple[str, str], bool]()
        for n, key, tenant in self.tx.execute(_DUE, (wall, DUE_AT_ONCE)):
            group = (key, tenant)
            # Rows are locked here before keys. So a key that another transaction holds is left to the next claim.
            if key is not None and group not in groups:
                groups[group] = bool(self.tx.execute(_TRY_GROUP, group).fetchone()[0])
            if key is None or groups[group]:
                numbers.append(n)
        if numbers:
            self.tx.execute(_MAKE_READY, (numbers,))
            self.tx.rows.clear()
        return tuple(group for group, locked in groups.items() if locked)

    def expired_leases(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        return self._chosen(_CLAIMED, want.lease_now, want, "lease_until", limit)

    def claimable(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        return self._chosen(_READY, None, want, "priority DESC, n", limit)

    def _chosen(self, condition: str, value: Any, want: ClaimRequest, order: str, limit: int) -> list[RunRow]:
        values = [value] if value is not None else []
        if want.agents is None:
            condition = f"{OF_RUNS} AND {condition}"
        else:
            of, key = (_OF_AGENT, want.agents[0]) if len(want.agents) == 1 else (_OF, [*want.agents])
            condition, values = f"{of} AND {condition}", [key, *values]
        found = fetch(self.tx.execute(_choice(condition, order), (*values, limit)))
        self.tx.rows.update((row.run_id, row) for row in found)
        return found

    def next_turn(self, want: ClaimRequest, priority: int, after: str | None) -> RunRow | None:
        found: list[RunRow] = []
        having = agents(lambda agent: self.tx.execute(_NEXT_AGENT, (agent,)).fetchone())
        keys = want.agents or filter(want.admits, having)
        for agent in keys:  # the index begins with the agent
            query = _FIRST_TURN if after is None else _NEXT_TURN
            found += fetch(self.tx.execute(query, (agent, priority, after or "")))
        row = min(found, key=lambda row: (row.turn or "", row.arrival), default=None)
        self.tx.rows.update((row.run_id, row) for row in found)
        return row

    def active_in_group(self, concurrency_key: str, tenant: str) -> RunRow | None:
        return next(iter(self.all_active_in_group(concurrency_key, tenant, 1)), None)

    def all_active_in_group(self, concurrency_key: str, tenant: str, limit: int) -> Sequence[RunRow]:
        self.tx.execute(_LOCK_GROUP, (concurrency_key, tenant))
        return fetch(self.tx.execute(_HEAD, (concurrency_key, tenant, limit)))

    def next_in_group(self, concurrency_key: str, tenant: str) -> RunRow | None:
        found = _one(self.tx.execute(_BEHIND, (concurrency_key, tenant)))
        return None if found is None else self.get(found.run_id)

    def abandoned_inline(self, want: ClaimRequest) -> list[RunRow]:
        found = []
        for row in fetch(self.tx.execute(_LAPSED, (want.lease_now,))):
            # As in `make_due_ready`.
            if self.tx.execute(_TRY_GROUP, (row.concurrency_key, row.tenant)).fetchone()[0]:
                found.append(row)
                self.tx.rows[row.run_id] = row
        return found

    def message_number(self, run_id: str, msg_id: str) -> int | None:
        row = self.tx.execute("SELECT seq FROM arc_mail WHERE run_id = ? AND msg_id = ?", (run_id, msg_id)).fetchone()
        return row[0] if row else None

    def add_message(self, run_id: str, mail: MailboxMessage) -> None:
        self.tx.execute(
            "INSERT INTO arc_mail VALUES (?,?,?,?,?,?,?)",
            (run_id, mail.seq, mail.kind, mail.name, mail.payload, mail.msg_id, mail.t),
        )

    def beat(self, claims: Sequence[tuple[str, str]], lease_until: float) -> list[tuple[bool, bool]]:
        for run_id, _ in claims:
            self.tx.rows.pop(run_id, None)
        ids = [[claim[index] for claim in sorted(claims)] for index in (0, 1)]
        rows = self.tx.execute(_BEAT, (*ids, self.lease_time(lease_until)))
        found = {(run_id, claim_id): cancel_at for run_id, claim_id, cancel_at in rows}
        return [
            (claim in found, found.get(claim) is not None)
            for claim in ((run_id, claim_id) for run_id, claim_id in claims)
        ]

    def save_process(self, row: ProcessRow, kept: float) -> None:
        if self.tx.engine.by_server:
            row = row._replace(seen_at=self.tx.now, alive_until=self.lease_time(row.alive_until))
        self.tx.execute("DELETE FROM arc_processes WHERE seen_at < ?", (row.seen_at - kept,))
        self.drop_process(row.process_id)
        cells = (*row[:6], encode([*row.agents]), *row[7:])
        self.tx.execute("INSERT INTO arc_processes VALUES (?,?,?,?,?,?,?,?,?,?,?)", cells)

    def drop_process(self, process_id: str) -> None:
        self.tx.execute("DELETE FROM arc_processes WHERE process_id = ?", (process_id,))

    def shared(self, name: str) -> str | None:
        if name not in self.tx.shared:
            self.tx.execute(_LOCK_GROUP, ("", name))
        row = self.tx.execute(_SHARED_STATE, (name,)).fetchone()
        return row[0] if row else None

    def shared_if_free(self, name: str) -> tuple[bool, str | None]:
        # In two statements: the snapshot of one would be older than the lock, and the state that it reads outdated.
        if not self.tx.execute(_TRY_GROUP, ("", name)).fetchone()[0]:
            return False, None
        row = self.tx.execute(_SHARED_STATE, (name,)).fetchone()
        return True, row[0] if row else None

    def shared_states(self, prefix: str) -> Mapping[str, str]:
        return _shared(self.tx.conn, prefix)  # type: ignore[arg-type]

    def clock_seen(self) -> dict[str, float]:
        seen: dict[str, float] = vars(self.tx.engine).setdefault("clock_seen", {})
        return seen

    def bring_forward(self, name: str, seconds: float) -> None:
        self.tx.execute(_BRING_FORWARD, (seconds, name.removeprefix(RATES)))
        self.tx.rows.clear()

    def next_rate_limited(self, rate: str, agent: str) -> RunRow | None:
        found = _one(self.tx.execute(_LIMITED, (rate, agent)))
        if found is not None:
            self.tx.rows[found.run_id] = found
        return found

    def save_shared(self, name: str, state: str | None) -> None:
        if state is None:
            self.tx.execute("DELETE FROM arc_shared WHERE name = ?", (name,))
        else:
            self.tx.execute(_SAVE_SHARED, (name, state))


def _cells(row: RunRow) -> tuple[Any, ...]:
    return (*row[:_N], *row[_N + 1 :])


def _claim_of(tx: PostgresTx, run_id: str) -> str | None:
    row = PostgresTransitions(tx).get(run_id)
    return row.claim_id if row is not None and row.status == "running" else None


def _lock_shared(tx: PostgresTx, requests: Sequence[CommitRequest]) -> None:
    """Lock the shared states of all requests, in one order and before anything else: other requests lock keys and rows.

    A claim keeps a rate limit locked while it locks rows, but it waits for no row then. So a release, which takes the
    start of its claim back, may wait for the claim here.
    """
    for request in requests:
        for name, args in request.ops:
            if name == "queue.reserve":
                tx.shared.update(PREFIX + pool.name for pool in args[1])
            elif name in ("queue.spend", "queue.give_back"):
                tx.shared.update(PREFIX + pool for pool in args[0])
            elif name == "queue.settle" and args[1].take_back:
                tx.shared.add(Rate.read(args[1].take_back).name)
    if tx.shared:
        tx.execute(_LOCK_SHARED, ([*tx.shared],))


def _lock(tx: PostgresTx, requests: Sequence[CommitRequest]) -> None:
    """Lock the keys and rows of the runs that these requests name, unless one statement does that anyway."""
    _lock_shared(tx, requests)
    named, renewed, groups, others = set[str](), set[str](), set[tuple[str, str]](), 0
    for request in requests:
        if request.guard is not None:
            named.add(request.guard.key)
        for name, args in request.ops:
            first = args[0] if args else None
            if isinstance(first, RunRow):
                named.add(first.run_id)
                if first.concurrency_key is not None:
                    groups.add((first.concurrency_key, first.tenant))
            elif name == "queue.beat":
                renewed.update(run_id for run_id, _ in args[0])
                others += 1
            elif name == "queue.claim":  # it waits for no lock, but it keeps those that it gets
                others += 1
            elif isinstance(first, str) and name.startswith(_NAMING):
                named.add(first)
    # The worker's usual claim extends its leases first, in one statement.
    if (named or (renewed and len(requests) > 1)) and len(named) + others > 1:
        keys = [[group[index] for group in groups] for index in (0, 1)]
        found = fetch(tx.execute(_LOCKED_TOGETHER, ([*named], *keys, [*(named | renewed)])))
        tx.rows.update((row.run_id, row) for row in found)
    tx.lock_logs(requests)


def _news(view: PostgresConnection, run_ids: Sequence[str]) -> dict[str, RunSnapshot]:
    rows = view.execute(
        "SELECT run_id, status, claim_id, mail_seq, cancel_at IS NOT NULL FROM arc_runs WHERE run_id = ANY(?)",
        ([*run_ids],),
    )
    return {run_id: RunSnapshot(*found) for run_id, *found in rows}


def _last_arrival(view: PostgresConnection) -> int:
    last, is_called = view.execute("SELECT last_value, is_called FROM arc_runs_n_seq").fetchone()
    return int(last) if is_called else 0


def _get(view: PostgresConnection, run_id: str, tenant: str = "") -> RunRow | None:
    row = _one(view.execute(f"SELECT {ALL} FROM arc_runs WHERE run_id = ?", (run_id,)))
    return None if row is None or (tenant and row.tenant != tenant) else row


def _next_due(view: PostgresConnection) -> float | None:
    due: float | None = sqlite_next_due(view)  # type: ignore[arg-type]
    return due if due is None or view.clock is None else due - server_time(view) + view.clock.wall()


def _processes(view: PostgresConnection) -> list[ProcessRow]:
    """Return the rows with their times on the clocks of this process."""
    rows = sqlite_processes(view)  # type: ignore[arg-type]
    if view.clock is None:
        return rows
    now, wall = server_time(view), view.clock.wall()
    return [row._replace(seen_at=wall + row.seen_at - now, alive_until=row.alive_until - now) for row in rows]


_ONE_STATEMENT: frozenset[Callable[..., Any]] = frozenset({_get, _children, _mail, _news})


class PostgresQueue(PostgresBackend, RunQueue):
    """A queue in a PostgreSQL database, shared by all processes that reach it."""

    operation_sets: ClassVar[OperationSets] = (
        replace(
            operation_set(PostgresTransitions, fence=_claim_of),
            lock=_lock,
            batches=BATCHES,
            one_statement=_ONE_STATEMENT,
        ),
        OPERATION_SET,
    )

    reads: ClassVar[Reads] = {
        "row": _get,
        "find": find,
        "counts": counts,
        "children": _children,
        "mail": _mail,
        "news": _news,
        "next_due": _next_due,
        "processes": _processes,
        "last_arrival": _last_arrival,
        "shared": _shared,
        "search": search,
        "search_state": search_state,
        "numbered": numbered,
    }

    # A process cannot see that a process on another machine ended.
    recommended_settings: ClassVar[Mapping[str, float]] = {"lease_ttl_seconds": 30, "heartbeat_interval_seconds": 10}
    keeps_processes = True
    keeps_limits = True
    keeps_search = True
    keeps_rows = "arc_runs"

    def lease_now(self) -> float:
        return self.engine.lease_now()

    async def store_id(self) -> str:
        found: str = await self.engine.read(store_id)
        self._store = found
        return found

    async def insertion(self, row: RunRow, connection: Any, *, sync: bool) -> CallerInsert:
        row = await self._assigned_before(row)
        known = getattr(self, "_store", None) or await self.store_id()  # the first read creates the tables
        return CallerInsert(self, row, connection, known, sync=sync)
