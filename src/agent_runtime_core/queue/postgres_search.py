"""The full-text index of the runs in a PostgreSQL database: a table with their contents, and their trigrams.

As in `sqlite_search`, a run is a candidate of each search if its text is missing or may be outdated: `text` is NULL, or
the run is live and its claim or its messages are others. The row of a run is deleted with the run, by its
foreign key. A trigger empties it when the run changes after its end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from .._engines.base import OperationSet
from .._engines.postgres.connection import PostgresConnection, rows_of, sent
from .._engines.postgres.engine import PostgresTx
from .._engines.postgres.url import driver
from ..errors import NotSupported
from .contents import Candidates, IndexEntry, IndexState, tenant_mark
from .records import RunFilter
from .sqlite_find import Condition
from .sqlite_search import WATCHED, candidates

_HAS: Final = "SELECT to_regclass('arc_search') IS NOT NULL"
#: Errors of `CREATE EXTENSION`: it is not installed on the server, or the user may not create it.
_LACKING: Final = ("0A000", "42501", "58P01")
_EXTENSION: Final = (
    "SELECT quote_ident(n.nspname) FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace"
    " WHERE e.extname = 'pg_trgm'"
)
_CREATE: Final = (
    "CREATE TABLE arc_search (n bigint PRIMARY KEY REFERENCES arc_runs (n) ON DELETE CASCADE, live boolean NOT NULL,"
    ' claim_id text COLLATE "C", mail_seq int, text text COLLATE "C")',
    "CREATE TABLE arc_search_state (upto bigint NOT NULL)",
    "INSERT INTO arc_search_state VALUES (0)",
    "CREATE INDEX search_left ON arc_search (n) WHERE live OR text IS NULL",
    # Not as the user whose commit fires it, who may have no right to write the table.
    "CREATE FUNCTION arc_search_changed() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER"
    " SET search_path = pg_catalog AS $$ BEGIN"
    " UPDATE arc_search SET text = NULL, claim_id = NULL WHERE n = OLD.n; RETURN NULL; END $$",
    f"CREATE TRIGGER search_changed AFTER UPDATE OF {WATCHED} ON arc_runs FOR EACH ROW"
    " WHEN (OLD.ended_at IS NOT NULL OR OLD.tenant <> NEW.tenant) EXECUTE FUNCTION arc_search_changed()",
)
_DROP: Final = (
    "DROP TRIGGER search_changed ON arc_runs",
    "DROP FUNCTION arc_search_changed()",
    "DROP TABLE arc_search_state, arc_search",
)
# In a statement before the insertion, because a statement reads what was committed when it began. A change after it
# waits, and its trigger then finds the row of the index.
_LOCK: Final = "SELECT n FROM arc_runs WHERE n = ANY(?) ORDER BY run_id FOR SHARE"
_NEW: Final = ("n", "generation", "ended_at", "mail_seq", "claim_id", "text", "live")
_ROWS: Final = rows_of(
    "w", "n bigint", "generation int", "ended_at float8", "mail_seq int", "claim_id text", "text text", "live int"
)
_SAME: Final = (
    "(r.generation, r.mail_seq, r.claim_id) = (w.generation, w.mail_seq, w.claim_id)"
    " AND r.ended_at IS NOT DISTINCT FROM w.ended_at"
)
_PUT: Final = (
    f"INSERT INTO arc_search (n, live, claim_id, mail_seq, text)"
    f" SELECT w.n, w.live = 1, CASE WHEN {_SAME} THEN w.claim_id END, w.mail_seq, CASE WHEN {_SAME} THEN w.text END"
    f" FROM {_ROWS} JOIN arc_runs r ON r.n = w.n"
    " ON CONFLICT (n) DO UPDATE SET live = excluded.live, claim_id = excluded.claim_id,"
    " mail_seq = excluded.mail_seq, text = excluded.text"
)
_OUTDATED: Final = (
    "(s.claim_id IS NULL OR s.live AND r.ended_at IS NOT NULL OR r.claim_id <> s.claim_id OR r.mail_seq <> s.mail_seq)"
)
_NAMES: Final = "SELECT s.n FROM arc_search s JOIN arc_runs r ON r.n = s.n WHERE (s.live OR s.text IS NULL) AND"
_LEFT: Final = f"{_NAMES} (s.text IS NULL OR {_OUTDATED})"
_CHANGED: Final = f"{_NAMES} {_OUTDATED} AND r.status <> 'running' ORDER BY s.n LIMIT ?"
# Each transaction holds this lock from before a number is assigned until its run can be read.
_WRITERS: Final = (
    "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND mode = 'RowExclusiveLock' AND granted"
    " AND relation = CAST(CAST('arc_runs' AS regclass) AS oid)"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_SPECIAL: Final = re.compile(r"([\\%_])")


def _has_index(view: Any) -> bool:
    return bool(view.execute(_HAS).fetchone()[0])


def create(tx: PostgresTx) -> bool:
    """Create an empty index, and return whether there was none."""
    if _has_index(tx):
        return False
    try:
        tx.execute("CREATE EXTENSION IF NOT EXISTS pg_trgm")
    except driver().Error as error:
        if error.sqlstate not in _LACKING:
            raise
        why = f"{error!s:.200}".strip()
        raise NotSupported(
            f"a full-text index needs the extension pg_trgm, which this user cannot create ({why}). Ask the owner of "
            "the database for: CREATE EXTENSION pg_trgm. Until then, searches read the runs of the last day"
        ) from error
    [schema] = tx.execute(_EXTENSION).fetchone()
    for statement in (*_CREATE, f"CREATE INDEX search_text ON arc_search USING gin (text {schema}.gin_trgm_ops)"):
        tx.execute(statement)
    return True


def drop(tx: PostgresTx) -> bool:
    """Delete the index, and return whether there was one."""
    if not _has_index(tx):
        return False
    for statement in _DROP:
        tx.execute(statement)
    return True


def put(tx: PostgresTx, upto: int, entries: Sequence[IndexEntry]) -> None:
    """Store the entries of runs, unless the index was dropped since. A run that changed since is left."""
    if not _has_index(tx):
        return
    if numbers := [each.arrival for each in entries if each.text is not None]:
        tx.execute(_LOCK, (numbers,))
    rows = [(each.arrival, *each.seen, each.text, int(each.live)) for each in entries]
    if rows:
        tx.execute(_PUT, (sent(_NEW, rows),))
    tx.execute("UPDATE arc_search_state SET upto = greatest(upto, ?)", (upto,))


def merge(tx: PostgresTx, first: bool) -> bool:
    """Do nothing: what was deleted is in no part of the index that a query reads."""
    return False


OPERATION_SET: Final = OperationSet(
    "search", {"search.create": create, "search.drop": drop, "search.put": put, "search.merge": merge}
)


def state(view: PostgresConnection, limit: int) -> IndexState | None:
    """Return how far the index goes; None without an index."""
    if not _has_index(view):
        return None
    last, is_called = view.execute("SELECT last_value, is_called FROM arc_runs_n_seq").fetchone()
    writers = frozenset(name for (name,) in view.execute(_WRITERS))  # read after the number
    [upto] = view.execute("SELECT upto FROM arc_search_state").fetchone()
    changed = [n for (n,) in view.execute(_CHANGED, (limit,))]
    return IndexState(upto, changed, int(last) if is_called else 0, writers)


def search(view: PostgresConnection, wanted: RunFilter, words: str, most: int) -> Candidates | None:
    """Return the places of runs that may contain words; None without an index. See `sqlite_search.search`."""
    if not _has_index(view):
        return None
    text, values = "SELECT n FROM arc_search WHERE text LIKE ?", [_pattern(words)]
    if wanted.tenant is not None:
        text, values = f"{text} AND text LIKE ?", [*values, _pattern(tenant_mark(wanted.tenant))]
    parts: list[Condition] = [
        ("SELECT n FROM arc_runs WHERE n > (SELECT upto FROM arc_search_state)", ()),
        (_LEFT, ()),
        (text, tuple(values)),
    ]
    return candidates(view, wanted, parts, most)


def _pattern(words: str) -> str:
    return "%" + _SPECIAL.sub(r"\\\1", words) + "%"
