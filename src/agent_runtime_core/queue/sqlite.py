"""A queue in one SQLite file, shared by all processes on this machine."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import compress
from operator import itemgetter, ne
from typing import Any, ClassVar

from .._core.codec.json import encode
from .._engines.backend import OperationSets, Reads, SQLiteBackend
from .._engines.sqlite.transaction import SQLiteTx
from .base import RunQueue
from .rate_limits import PREFIX as RATES
from .records import COLUMNS, ClaimRequest, MailboxMessage, ProcessRow, RunRow, RunSnapshot, contents_of, end_of_prefix
from .sqlite_find import ALL, BATCH, agents, checked_row, counts, fetch, find
from .sqlite_search import OPERATION_SET, forget, numbered, search
from .sqlite_search import state as search_state
from .transitions import RunTransitions, operation_set

DEAD_HOLDERS_EVERY = 0.1  # seconds between checks for dead processes in claims
DUE_AT_ONCE = 5_000  # most delayed runs that one claim makes ready; the next claim continues
LARGEST_KEPT = 4_000  # most characters of input of a row that is cached in memory while it runs
_N = COLUMNS.index("n")
_INDEXES = tuple(index for index in range(len(COLUMNS)) if index != _N)
_FIXED = (
    "run_id", "agent", "input", "digest", "metadata", "priority", "created_at", "deadline", "run_key", "idem_key",
    "parent_id", "lane", "conversation", "tenant", "concurrency_limit", "rate", "turn",
)  # fmt: skip
_CHANGEABLE = tuple(index for index in _INDEXES if COLUMNS[index] not in _FIXED)
_ALL_7 = ", ".join(COLUMNS[:40])  # the columns of script 7

# The last script makes the table of runs again, so its indexes are left out of the scripts before.
MIGRATIONS = (
    """CREATE TABLE arc_runs (
    run_id TEXT NOT NULL UNIQUE, agent TEXT NOT NULL, input TEXT NOT NULL, digest TEXT NOT NULL, metadata TEXT NOT NULL,
    priority INTEGER NOT NULL, created_at REAL NOT NULL, due_at REAL NOT NULL, expires_at REAL, deadline REAL,
    run_key TEXT, idem_key TEXT, parent_id TEXT, lane TEXT,
    origin TEXT NOT NULL, held INTEGER NOT NULL, status TEXT NOT NULL,
    generation INTEGER NOT NULL, failures INTEGER NOT NULL, crashes INTEGER NOT NULL, stalls INTEGER NOT NULL,
    mark INTEGER NOT NULL, parked INTEGER NOT NULL, reason TEXT NOT NULL, claim_id TEXT NOT NULL, worker TEXT NOT NULL,
    holder TEXT NOT NULL, lease_until REAL NOT NULL, claimed_at REAL, started_at REAL, ended_at REAL,
    updated_at REAL NOT NULL, cancel_at REAL, output TEXT, error TEXT, mail_seq INTEGER NOT NULL,
    n INTEGER PRIMARY KEY AUTOINCREMENT);
CREATE TABLE arc_mail (run_id TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
    payload TEXT NOT NULL, msg_id TEXT NOT NULL, t REAL NOT NULL, PRIMARY KEY (run_id, seq)) WITHOUT ROWID;
CREATE UNIQUE INDEX arc_mail_once ON arc_mail (run_id, msg_id)""",
    # The row of a run contains its fencing token. With this version, a library that stores the token in another table
    # cannot open the file any more.
    "DELETE FROM arc_carried WHERE key IN (SELECT run_id FROM arc_runs)",
    "",
    """ALTER TABLE arc_runs ADD COLUMN conversation TEXT;
ALTER TABLE arc_runs ADD COLUMN questions TEXT NOT NULL DEFAULT '';
UPDATE arc_runs SET conversation = nullif(json_extract(input, '$.conversation_id'), '')
    WHERE instr(input, '"conversation_id"') AND json_valid(input)
    AND json_type(input, '$.conversation_id') = 'text';
UPDATE arc_runs SET conversation = json_extract(input, '$.conversation_id.v')
    WHERE instr(input, '"conversation_id":{') AND json_valid(input)
    AND json_extract(input, '$.conversation_id."$"') = 'uuid';
UPDATE arc_runs SET conversation = lower(conversation)
    WHERE conversation LIKE '________-____-____-____-____________' AND conversation NOT GLOB '*[^0-9A-Fa-f-]*'""",
    """CREATE TABLE arc_processes (process_id TEXT PRIMARY KEY, worker TEXT NOT NULL, host TEXT NOT NULL,
    pid INTEGER NOT NULL, started_at REAL NOT NULL, version TEXT NOT NULL, agents TEXT NOT NULL, slots INTEGER NOT NULL,
    holder TEXT NOT NULL, seen_at REAL NOT NULL, alive_until REAL NOT NULL) WITHOUT ROWID""",
    """ALTER TABLE arc_runs ADD COLUMN tenant TEXT NOT NULL DEFAULT ''""",
    # Without AUTOINCREMENT, whose counter is one more page to write for a run: `arc_last_run` contains the number of a
    # run that was the last run when it was deleted. The columns that may be long are last, so that the first page of a
    # row contains all others. An older library that still uses the file cannot store a run without `listed`.
    f"""ALTER TABLE arc_runs RENAME TO arc_runs_6;
CREATE TABLE arc_runs (
    listed INTEGER NOT NULL DEFAULT 1, run_id TEXT NOT NULL UNIQUE, agent TEXT NOT NULL, digest TEXT NOT NULL,
    priority INTEGER NOT NULL, created_at REAL NOT NULL, due_at REAL NOT NULL, expires_at REAL, deadline REAL,
    run_key TEXT, idem_key TEXT, parent_id TEXT, lane TEXT, conversation TEXT, tenant TEXT NOT NULL,
    origin TEXT NOT NULL, held INTEGER NOT NULL, status TEXT NOT NULL,
    generation INTEGER NOT NULL, failures INTEGER NOT NULL, crashes INTEGER NOT NULL, stalls INTEGER NOT NULL,
    mark INTEGER NOT NULL, parked INTEGER NOT NULL, reason TEXT NOT NULL, claim_id TEXT NOT NULL, worker TEXT NOT NULL,
    holder TEXT NOT NULL, lease_until REAL NOT NULL, claimed_at REAL, started_at REAL, ended_at REAL,
    updated_at REAL NOT NULL, cancel_at REAL, mail_seq INTEGER NOT NULL, n INTEGER PRIMARY KEY,
    questions TEXT NOT NULL, metadata TEXT NOT NULL, error TEXT, output TEXT, input TEXT NOT NULL);
INSERT INTO arc_runs ({_ALL_7}) SELECT {_ALL_7} FROM arc_runs_6;
CREATE TABLE arc_last_run (n INTEGER NOT NULL);
INSERT INTO arc_last_run SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'arc_runs_6';
DROP TABLE arc_runs_6;
CREATE INDEX arc_runs_ready ON arc_runs (agent, priority DESC, n)
    WHERE status = 'pending' AND due_at = 0 AND origin = '' AND held = 0;
CREATE INDEX arc_runs_due ON arc_runs (due_at) WHERE due_at > 0;
CREATE INDEX arc_runs_expired ON arc_runs (agent, lease_until) WHERE status = 'running' AND origin = '';
CREATE UNIQUE INDEX arc_runs_idem ON arc_runs (idem_key, tenant) WHERE idem_key IS NOT NULL;
CREATE UNIQUE INDEX arc_runs_head ON arc_runs (lane, tenant) WHERE lane IS NOT NULL AND held = 0 AND ended_at IS NULL;
CREATE INDEX arc_runs_behind ON arc_runs (lane, tenant, priority DESC, n) WHERE held = 1 AND due_at = 0;
CREATE INDEX arc_runs_lapsed ON arc_runs (lease_until)
    WHERE lane IS NOT NULL AND held = 0 AND origin <> '' AND status IN ('pending', 'running');
CREATE INDEX arc_runs_parent ON arc_runs (parent_id, n, created_at, tenant) WHERE parent_id IS NOT NULL;
CREATE INDEX arc_runs_owner ON arc_runs (tenant, run_id) WHERE tenant <> '';
CREATE INDEX arc_runs_state ON arc_runs (listed, status, agent, created_at) WHERE listed = 1;
CREATE INDEX arc_runs_created ON arc_runs (listed, created_at, n, run_id, run_key) WHERE listed = 1;
CREATE INDEX arc_runs_tenant ON arc_runs (listed, tenant, status, agent, created_at) WHERE tenant <> '' AND listed = 1;
CREATE INDEX arc_runs_key ON arc_runs (listed, run_key, tenant) WHERE run_key IS NOT NULL AND listed = 1;
CREATE INDEX arc_runs_conversation ON arc_runs (listed, conversation, created_at, n, tenant)
    WHERE conversation IS NOT NULL AND listed = 1;
CREATE INDEX arc_runs_lane ON arc_runs (listed, lane, created_at, n, tenant) WHERE lane IS NOT NULL AND listed = 1;
CREATE INDEX arc_runs_reason
    ON arc_runs (listed, substr(reason, 1, instr(reason || ' ', ' ') - 1), created_at, n, reason, tenant)
    WHERE reason <> '' AND listed = 1;
CREATE INDEX arc_runs_waiting ON arc_runs (substr(reason, 1, instr(reason || ' ', ' ') - 1))
    WHERE status = 'waiting' AND listed = 1;
CREATE INDEX arc_runs_retrying ON arc_runs (created_at, n, tenant)
    WHERE failures > 0 AND ended_at IS NULL AND listed = 1;
CREATE INDEX arc_runs_asking ON arc_runs (created_at, n, tenant)
    WHERE questions <> '' AND ended_at IS NULL AND listed = 1;
CREATE INDEX arc_runs_in_doubt ON arc_runs (created_at, n, tenant)
    WHERE instr(questions, ' in_doubt:') > 0 AND ended_at IS NULL AND listed = 1""",
    """ALTER TABLE arc_runs ADD COLUMN concurrency_limit INTEGER NOT NULL DEFAULT 1;
ALTER TABLE arc_runs ADD COLUMN rate TEXT;
ALTER TABLE arc_runs ADD COLUMN turn TEXT;
DROP INDEX arc_runs_head;
CREATE INDEX arc_runs_head ON arc_runs (lane, tenant) WHERE lane IS NOT NULL AND held = 0 AND ended_at IS NULL;
CREATE INDEX arc_runs_turns ON arc_runs (agent, priority DESC, turn, n)
    WHERE turn IS NOT NULL AND status = 'pending' AND due_at = 0 AND origin = '' AND held = 0;
CREATE INDEX arc_runs_limited ON arc_runs (rate, agent, priority DESC, n)
    WHERE reason = 'rate_limit' AND status = 'pending' AND due_at > 0;
CREATE TABLE arc_shared (name TEXT PRIMARY KEY, state TEXT NOT NULL) WITHOUT ROWID""",
)

_INSERT = (
    f"INSERT INTO arc_runs ({', '.join(COLUMNS[index] for index in _INDEXES)}, n, listed)"
    f" VALUES ({'?, ' * len(_INDEXES)}"
    " max((SELECT n FROM arc_last_run), coalesce((SELECT max(n) FROM arc_runs), 0)) + 1, 0)"
)
_INSERT_COPIED = f"INSERT INTO arc_runs ({ALL}) VALUES ({', '.join('?' * len(COLUMNS))})"
_INSERT_NEW = f"{_INSERT} ON CONFLICT (run_id) DO NOTHING"
_LIST = "UPDATE arc_runs SET listed = 1 WHERE n > ? AND n <= ?"
# Numbers do not come again: they order runs, they number journals, and they tell a run from a deleted run with its id.
_KEEP_LAST = "UPDATE arc_last_run SET n = ? WHERE n < ? AND NOT EXISTS (SELECT 1 FROM arc_runs WHERE n > ?)"
_KEEP_AT_LEAST = "UPDATE arc_last_run SET n = ? WHERE n < ?"
_LAST_ARRIVAL = "SELECT max((SELECT n FROM arc_last_run), coalesce((SELECT max(n) FROM arc_runs), 0))"
_REWRITE = "UPDATE arc_runs SET input = ?, digest = ?, metadata = ?, output = ?, error = ? WHERE n = ?"  # CONTENTS
_REWRITE_MESSAGE = (
    "UPDATE arc_mail SET payload = ? WHERE run_id = ? AND seq = ? AND kind = ? AND msg_id = ? AND payload = ?"
)
_CLAIM = "SELECT claim_id FROM arc_runs WHERE run_id = ? AND status = 'running'"
_ROW = f"SELECT {ALL} FROM arc_runs WHERE run_id = ?"
_OWN_ROW = f"SELECT {ALL} FROM arc_runs INDEXED BY arc_runs_owner WHERE tenant <> '' AND tenant = ? AND run_id = ?"
_BY_KEY = f"SELECT {ALL} FROM arc_runs WHERE idem_key = ? AND tenant = ?"
_DUE = "SELECT 1 FROM arc_runs WHERE due_at > 0 AND due_at <= ? LIMIT ?"
_MAKE_READY = (
    "UPDATE arc_runs SET status = 'pending', updated_at = due_at, due_at = 0 WHERE due_at > 0 AND due_at <= ?"
    " RETURNING CASE WHEN held = 1 THEN lane END, tenant"
)
_MAKE_FIRST_READY = (
    "UPDATE arc_runs SET status = 'pending', updated_at = due_at, due_at = 0 WHERE n IN"
    " (SELECT n FROM arc_runs WHERE due_at > 0 AND due_at <= ? ORDER BY priority DESC, n LIMIT ?)"
    " RETURNING CASE WHEN held = 1 THEN lane END, tenant"
)
# The statements of claims name their indexes: SQLite would rather use the larger indexes of lists.
_EXPIRING = "arc_runs INDEXED BY arc_runs_expired"
_LAPSING = "arc_runs INDEXED BY arc_runs_lapsed"
_CLAIMED = "status = 'running' AND origin = ''"
_EXPIRED = (
    f"SELECT {ALL} FROM {_EXPIRING} WHERE {_CLAIMED} AND lease_until < ? AND agent = ? ORDER BY lease_until LIMIT ?"
)
_IN_PLACE = "lane IS NOT NULL AND held = 0 AND origin <> '' AND status IN ('pending', 'running')"
# Processes whose leases block claims. Inline runs without a concurrency key are left out, as any caller may take them.
# Leases that were ended before are left out, or each claim would cost more for every process that was ever killed.
_HOLDERS = (
    f"SELECT holder FROM {_EXPIRING} WHERE {_CLAIMED} AND lease_until >= 0 AND holder <> ''"
    f" UNION SELECT holder FROM {_LAPSING} WHERE {_IN_PLACE} AND lease_until >= 0 AND holder <> ''"
)
_END_LEASES = (
    f"UPDATE {_EXPIRING} SET lease_until = -1 WHERE {_CLAIMED} AND lease_until >= 0 AND holder = ?",
    # A blocked inline run may be active by now. Its lease must be ended too: the boot clock restarts at 0 with the
    # machine, so that the lease would expire very late.
    f"UPDATE {_LAPSING} SET lease_until = -1 WHERE {_IN_PLACE} AND lease_until >= 0 AND holder = ?",
)
_READY = (
    f"SELECT {ALL} FROM arc_runs INDEXED BY arc_runs_ready"
    " WHERE status = 'pending' AND due_at = 0 AND agent = ? AND origin = '' AND held = 0"
    " ORDER BY priority DESC, n LIMIT ?"
)
_TURN = (
    f"SELECT {ALL} FROM arc_runs INDEXED BY arc_runs_turns WHERE agent = ? AND priority = ? AND turn IS NOT NULL"
    " AND turn {} ? AND status = 'pending' AND due_at = 0 AND origin = '' AND held = 0 ORDER BY turn, n LIMIT 1"
)
_FIRST_TURN, _NEXT_TURN = _TURN.format(">="), _TURN.format(">")
_NEXT_AGENT = (
    "SELECT agent FROM arc_runs INDEXED BY arc_runs_ready"
    " WHERE status = 'pending' AND due_at = 0 AND origin = '' AND held = 0 AND agent > ?"
    " ORDER BY agent LIMIT 1"
)
_NEXT_CLAIMED = f"SELECT agent FROM {_EXPIRING} WHERE {_CLAIMED} AND agent > ? ORDER BY agent LIMIT 1"
_HEAD = (
    f"SELECT {ALL} FROM arc_runs INDEXED BY arc_runs_head"
    " WHERE lane = ? AND tenant = ? AND held = 0 AND ended_at IS NULL ORDER BY n LIMIT ?"
)
_LIMITED = (
    f"SELECT {ALL} FROM arc_runs INDEXED BY arc_runs_limited WHERE rate = ? AND agent = ? AND reason = 'rate_limit'"
    " AND status = 'pending' AND due_at > 0 ORDER BY priority DESC, n LIMIT 1"
)
_BRING_FORWARD = (
    "UPDATE arc_runs INDEXED BY arc_runs_limited SET due_at = due_at - ? WHERE reason = 'rate_limit'"
    " AND status = 'pending' AND due_at > 0 AND substr(rate, instr(rate, ' ') + 1) = ?"
)
_BEHIND = (
    f"SELECT {ALL} FROM arc_runs INDEXED BY arc_runs_behind WHERE lane = ? AND tenant = ? AND held = 1 AND due_at = 0"
    " ORDER BY priority DESC, n LIMIT 1"
)
_LAPSED = f"SELECT {ALL} FROM {_LAPSING} WHERE {_IN_PLACE} AND lease_until < ?"
_BEAT = (
    "UPDATE arc_runs SET lease_until = ? WHERE run_id = ? AND claim_id = ? AND status = 'running' RETURNING cancel_at"
)


@cache
def _update(indexes: tuple[int, ...]) -> tuple[str, Callable[[RunRow], tuple[Any, ...]]]:
    """Return the statement that updates only these columns, and a function that gets its parameters from a row.

    Other columns are left out, because SQLite would update their indexes too.
    """
    names = ", ".join(f"{COLUMNS[index]} = ?" for index in indexes)
    return f"UPDATE arc_runs SET {names} WHERE n = ?", itemgetter(*indexes, _N)


def _one(rows: sqlite3.Cursor) -> RunRow | None:
    row = rows.fetchone()
    return checked_row(row) if row else None


class SQLiteTransitions(RunTransitions):
    """Rows in the table `arc_runs`, in the writer thread's transaction, which caches the rows of running runs."""

    tx: SQLiteTx

    def get(self, run_id: str) -> RunRow | None:
        cached: RunRow | None = self.tx.rows.get(run_id)
        return cached if cached is not None else _one(self.tx.execute(_ROW, (run_id,)))

    def by_key(self, idem_key: str, tenant: str) -> RunRow | None:
        return _one(self.tx.execute(_BY_KEY, (idem_key, tenant)))

    def fence(self, run_id: str, token: str | None) -> None:
        self.tx.held(run_id, token)

    def add(self, row: RunRow) -> RunRow:
        return self._added(row, self.tx.execute(_INSERT, (*row[:_N], *row[_N + 1 :])))

    def add_new(self, row: RunRow) -> RunRow | None:
        cursor = self.tx.execute(_INSERT_NEW, (*row[:_N], *row[_N + 1 :]))
        return self._added(row, cursor) if cursor.rowcount else None

    def add_copied(self, row: RunRow) -> None:
        self.tx.execute(_INSERT_COPIED, row)

    def keep_arrival(self, last: int) -> None:
        self.tx.execute(_KEEP_AT_LEAST, (last, last))

    def _added(self, row: RunRow, cursor: sqlite3.Cursor) -> RunRow:
        arrival = cursor.lastrowid or 0
        if arrival % BATCH == 0:
            self.tx.execute(_LIST, (arrival - BATCH, arrival))
        row = row.with_values(arrival=arrival)
        self._remember(row)
        return row

    def save(self, row: RunRow) -> None:
        tx = self.tx
        before = tx.rows.pop(row.run_id, None)
        indexes = tuple(compress(range(len(before)), map(ne, before, row))) if before is not None else _CHANGEABLE
        if indexes:
            statement, values = _update(indexes)
            tx.execute(statement, values(row))
        self._remember(row)

    def replace_contents(self, row: RunRow) -> None:
        self.tx.rows.pop(row.run_id, None)
        self.tx.execute(_REWRITE, (*contents_of(row), row.arrival))

    def replace_message(self, run_id: str, old: MailboxMessage, new: MailboxMessage) -> bool:
        found = (run_id, old.seq, old.kind, old.msg_id, old.payload)
        return self.tx.execute(_REWRITE_MESSAGE, (new.payload, *found)).rowcount == 1

    def move(self, row: RunRow, after: RunRow) -> None:
        self.tx.rows.pop(row.run_id, None)
        self.tx.execute(
            "UPDATE arc_runs SET tenant = ?, held = ?, due_at = ?, reason = ?, rate = ?, turn = ? WHERE n = ?",
            (after.tenant, after.blocked, after.due_at, after.reason, after.rate, after.turn, row.arrival),
        )

    def _remember(self, row: RunRow) -> None:
        if row.status == "running" and len(row.input) <= LARGEST_KEPT:
            self.tx.rows[row.run_id] = row

    def drop(self, row: RunRow) -> None:
        self.tx.rows.pop(row.run_id, None)
        self.tx.execute(_KEEP_LAST, (row.arrival,) * 3)
        self.tx.execute("DELETE FROM arc_runs WHERE n = ?", (row.arrival,))
        forget(self.tx, row.arrival)
        self.tx.execute("DELETE FROM arc_mail WHERE run_id = ?", (row.run_id,))

    def make_due_ready(self, wall: float) -> Sequence[tuple[str, str]]:
        due = len(self.tx.execute(_DUE, (wall, DUE_AT_ONCE + 1)).fetchall())
        if not due:
            return ()
        update = (_MAKE_READY, (wall,)) if due <= DUE_AT_ONCE else (_MAKE_FIRST_READY, (wall, DUE_AT_ONCE))
        groups = [(key, tenant) for key, tenant in self.tx.execute(*update) if key is not None]
        return tuple(dict.fromkeys(groups))

    def expired_leases(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        self._expire_dead_processes()
        found: list[RunRow] = []
        for agent in self._agents(want, _NEXT_CLAIMED):
            found += fetch(self.tx.execute(_EXPIRED, (want.lease_now, agent, limit)))
        found.sort(key=lambda row: row.lease_until)
        return found[:limit]

    def _expire_dead_processes(self) -> None:
        """End the leases of dead processes immediately."""
        engine = self.tx.engine
        now = engine.clock.boot()
        if 0 <= now - engine.dead_looked_at < DEAD_HOLDERS_EVERY:
            return
        engine.dead_looked_at = now
        for holder in engine.dead_holders([row[0] for row in self.tx.execute(_HOLDERS)]):
            for statement in _END_LEASES:
                self.tx.execute(statement, (holder,))
            self.tx.rows.clear()

    def claimable(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        found: list[RunRow] = []
        keys = self._agents(want, _NEXT_AGENT)
        for agent in keys:
            found += fetch(self.tx.execute(_READY, (agent, limit)))
        if len(keys) > 1:
            found.sort(key=lambda row: (-row.priority, row.arrival))
            found = found[:limit]
        self.tx.rows.update((row.run_id, row) for row in found)
        return found

    def next_turn(self, want: ClaimRequest, priority: int, after: str | None) -> RunRow | None:
        found: list[RunRow] = []
        for agent in self._agents(want, _NEXT_AGENT):
            query = _FIRST_TURN if after is None else _NEXT_TURN
            found += fetch(self.tx.execute(query, (agent, priority, after or "")))
        row = min(found, key=lambda row: (row.turn or "", row.arrival), default=None)
        if row is not None:
            self.tx.rows[row.run_id] = row
        return row

    def _agents(self, want: ClaimRequest, following: str) -> Sequence[str]:
        """Return the agents of a request: without names those with ready or running runs, with one lookup for each."""
        if want.agents is not None:
            return want.agents
        return [*filter(want.admits, agents(lambda agent: self.tx.execute(following, (agent,)).fetchone()))]

    def active_in_group(self, concurrency_key: str, tenant: str) -> RunRow | None:
        return _one(self.tx.execute(_HEAD, (concurrency_key, tenant, 1)))

    def all_active_in_group(self, concurrency_key: str, tenant: str, limit: int) -> Sequence[RunRow]:
        return fetch(self.tx.execute(_HEAD, (concurrency_key, tenant, limit)))

    def next_in_group(self, concurrency_key: str, tenant: str) -> RunRow | None:
        return _one(self.tx.execute(_BEHIND, (concurrency_key, tenant)))

    def abandoned_inline(self, want: ClaimRequest) -> list[RunRow]:
        return fetch(self.tx.execute(_LAPSED, (want.lease_now,)))

    def message_number(self, run_id: str, msg_id: str) -> int | None:
        row = self.tx.execute("SELECT seq FROM arc_mail WHERE run_id = ? AND msg_id = ?", (run_id, msg_id)).fetchone()
        return row[0] if row else None

    def add_message(self, run_id: str, mail: MailboxMessage) -> None:
        self.tx.execute(
            "INSERT INTO arc_mail VALUES (?,?,?,?,?,?,?)",
            (run_id, mail.seq, mail.kind, mail.name, mail.payload, mail.msg_id, mail.t),
        )

    def is_dead(self, holder: str) -> bool:
        return bool(holder and self.tx.engine.dead_holders([holder]))

    def beat(self, claims: Sequence[tuple[str, str]], lease_until: float) -> list[tuple[bool, bool]]:
        for run_id, _ in claims:
            self.tx.rows.pop(run_id, None)
        found = [self.tx.execute(_BEAT, (lease_until, run_id, claim_id)).fetchone() for run_id, claim_id in claims]
        return [(row is not None, row is not None and row[0] is not None) for row in found]

    def save_process(self, row: ProcessRow, kept: float) -> None:
        self.tx.execute("DELETE FROM arc_processes WHERE seen_at < ?", (row.seen_at - kept,))
        cells = (*row[:6], encode([*row.agents]), *row[7:])
        self.tx.execute("INSERT OR REPLACE INTO arc_processes VALUES (?,?,?,?,?,?,?,?,?,?,?)", cells)

    def drop_process(self, process_id: str) -> None:
        self.tx.execute("DELETE FROM arc_processes WHERE process_id = ?", (process_id,))

    def shared(self, name: str) -> str | None:
        row = self.tx.execute("SELECT state FROM arc_shared WHERE name = ?", (name,)).fetchone()
        return row[0] if row else None

    def save_shared(self, name: str, state: str | None) -> None:
        if state is None:
            self.tx.execute("DELETE FROM arc_shared WHERE name = ?", (name,))
        else:
            self.tx.execute("INSERT OR REPLACE INTO arc_shared VALUES (?, ?)", (name, state))

    def shared_states(self, prefix: str) -> Mapping[str, str]:
        return dict(self.tx.execute(_SHARED, (prefix, end_of_prefix(prefix))).fetchall())

    def clock_seen(self) -> dict[str, float]:
        seen: dict[str, float] = vars(self.tx.engine).setdefault("clock_seen", {})
        return seen

    def bring_forward(self, name: str, seconds: float) -> None:
        self.tx.execute(_BRING_FORWARD, (seconds, name.removeprefix(RATES)))

    def next_rate_limited(self, rate: str, agent: str) -> RunRow | None:
        return _one(self.tx.execute(_LIMITED, (rate, agent)))


def _claim_of(tx: SQLiteTx, run_id: str) -> str | None:
    row = tx.execute(_CLAIM, (run_id,)).fetchone()
    return row[0] if row else None


def _get(view: sqlite3.Connection, run_id: str, tenant: str = "") -> RunRow | None:
    return _one(view.execute(_OWN_ROW, (tenant, run_id)) if tenant else view.execute(_ROW, (run_id,)))


def _children(view: sqlite3.Connection, run_id: str) -> list[RunRow]:
    return fetch(
        view.execute(f"SELECT {ALL} FROM arc_runs INDEXED BY arc_runs_parent WHERE parent_id = ? ORDER BY n", (run_id,))
    )


_MAIL = "SELECT kind, name, payload, msg_id, t, seq FROM arc_mail WHERE run_id = ? AND seq > ? ORDER BY seq"
_SHORT = 1 << 16  # characters of messages that an event loop reads itself


def _mail(view: sqlite3.Connection, run_id: str, after: int) -> list[MailboxMessage]:
    return [MailboxMessage(*row) for row in view.execute(_MAIL, (run_id, after))]


def _short_mail(view: sqlite3.Connection, run_id: str, after: int) -> list[MailboxMessage] | None:
    """Return the messages of a mailbox, or None if they are long."""
    found, left = [], _SHORT
    rows = view.execute(_MAIL, (run_id, after))  # not read before they are asked for
    try:
        for row in rows:
            found.append(MailboxMessage(*row))
            left -= len(row[2])
            if left < 0:
                return None
    finally:
        rows.close()  # else an interrupt would keep the connection at an old snapshot
    return found


def _news(view: sqlite3.Connection, run_ids: Sequence[str]) -> dict[str, RunSnapshot]:
    found = {}
    for run_id in run_ids:
        row = view.execute(
            "SELECT status, claim_id, mail_seq, cancel_at IS NOT NULL FROM arc_runs WHERE run_id = ?", (run_id,)
        ).fetchone()
        if row is not None:
            found[run_id] = RunSnapshot(row[0], row[1], row[2], bool(row[3]))
    return found


def _next_due(view: sqlite3.Connection) -> float | None:
    due: float | None = view.execute("SELECT min(due_at) FROM arc_runs WHERE due_at > 0").fetchone()[0]
    return due


def _last_arrival(view: sqlite3.Connection) -> int:
    last: int = view.execute(_LAST_ARRIVAL).fetchone()[0]
    return last


def _processes(view: sqlite3.Connection) -> list[ProcessRow]:
    rows = [ProcessRow(*cells) for cells in view.execute("SELECT * FROM arc_processes")]
    return [row._replace(agents=tuple(json.loads(str(row.agents)))) for row in rows]


_SHARED = "SELECT name, state FROM arc_shared WHERE name >= ? AND name < ? ORDER BY name"


def _shared(view: sqlite3.Connection, prefix: str) -> dict[str, str]:
    return dict(view.execute(_SHARED, (prefix, end_of_prefix(prefix))).fetchall())


class SQLiteQueue(SQLiteBackend, RunQueue):
    """A queue in one SQLite file, shared by all processes on this machine."""

    operation_sets: ClassVar[OperationSets] = (
        operation_set(SQLiteTransitions, MIGRATIONS, fence=_claim_of, short_reads={_mail: _short_mail}),
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

    keeps_processes = True
    keeps_limits = True
    keeps_search = True
    keeps_rows = "arc_runs"
