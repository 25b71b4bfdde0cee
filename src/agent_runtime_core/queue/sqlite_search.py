"""The full-text index of the runs in a SQLite file: a table of FTS5 with the trigrams of their contents.

It yields candidates: who searches reads their contents. `arc_search_left` names the runs whose text in `arc_search` is
missing or may be outdated, and which are then candidates of each search. The text of a live run counts as long as the
run has the same claim and messages; while it runs, it has no text. A run that changed after its end is named by a
trigger, in the transaction of the change, so that a store without an index has nothing to do. A trigger must not write
to a table of FTS5 while `trusted_schema` is off, so `forget` deletes the text of a run that is deleted. A process with
an older library only names the run, and the next pass deletes the text.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

from .._engines.base import OperationSet, always
from .._engines.sqlite.transaction import SQLiteTx
from ..errors import NotSupported
from .contents import Candidates, IndexEntry, IndexState, indexed_words, tenant_mark
from .records import SCHEDULE, RunFilter, RunRow
from .sqlite_find import _THESE, Condition, _arrived, _before, _conditions, _query, _rows, _split

WATCHED: Final = "ended_at, generation, mail_seq, tenant, input, metadata, output, error"
#: Candidates that are read beyond the bound: a run may be created before a run with a smaller `n`.
_MARGIN: Final = 1_000
_MOST_TRIGRAMS: Final = 64  # of the words; more would find hardly fewer candidates
_PAGES: Final = 500  # that one commit merges
_FIRST: Final = (3, 34, 0)  # the SQLite that first had the tokenizer
_NAME: Final = "SELECT 1 FROM sqlite_master WHERE name = 'arc_search'"
_COUNTER: Final = "search.index"
_NAMED: Final = (
    "INSERT OR REPLACE INTO arc_search_left SELECT OLD.n, 0, 0, NULL, 0"
    " WHERE OLD.n <= (SELECT upto FROM arc_search_state)"
)
_CREATE: Final = (
    "CREATE VIRTUAL TABLE arc_search USING fts5"
    " (text, tokenize = 'trigram case_sensitive 1', detail = none, columnsize = 0)",
    "CREATE TABLE arc_search_left (n INTEGER PRIMARY KEY, has_text INTEGER NOT NULL, live INTEGER NOT NULL,"
    " claim_id TEXT, mail_seq INTEGER NOT NULL)",
    "CREATE TABLE arc_search_state (upto INTEGER NOT NULL)",
    "INSERT INTO arc_search_state VALUES (0)",
    f"CREATE TRIGGER arc_search_deleted AFTER DELETE ON arc_runs BEGIN {_NAMED}; END",
    f"CREATE TRIGGER arc_search_changed AFTER UPDATE OF {WATCHED} ON arc_runs"
    f" WHEN OLD.ended_at IS NOT NULL OR OLD.tenant <> NEW.tenant BEGIN {_NAMED}; END",
)
_DROP: Final = (
    "DROP TRIGGER arc_search_deleted", "DROP TRIGGER arc_search_changed", "DROP TABLE arc_search_state",
    "DROP TABLE arc_search_left", "DROP TABLE arc_search",
)  # fmt: skip
_REMOVE: Final = ("DELETE FROM arc_search WHERE rowid = ?", "DELETE FROM arc_search_left WHERE n = ?")
_MATCHING: Final = "SELECT rowid AS n FROM arc_search WHERE arc_search MATCH ?"
_OUTDATED: Final = (
    "(l.claim_id IS NULL OR r.n IS NULL OR l.live = 1 AND r.ended_at IS NOT NULL OR r.claim_id <> l.claim_id"
    " OR r.mail_seq <> l.mail_seq)"
)
_NAMES: Final = "SELECT l.n FROM arc_search_left l LEFT JOIN arc_runs r ON r.n = l.n WHERE"
_LEFT: Final = f"{_NAMES} (l.has_text = 0 OR {_OUTDATED})"
_CHANGED: Final = f"{_NAMES} {_OUTDATED} AND r.status IS NOT 'running' ORDER BY l.n LIMIT ?"


def _has_index(view: Any) -> bool:
    return view.execute(_NAME).fetchone() is not None


# -- operations


def create(tx: SQLiteTx) -> bool:
    """Create an empty index, and return whether there was none."""
    if _has_index(tx):
        return False
    if sqlite3.sqlite_version_info < _FIRST:
        raise NotSupported(f"a full-text index needs SQLite 3.34 or later, got {sqlite3.sqlite_version}. Install it")
    for statement in _CREATE:
        tx.execute(statement)
    tx.counters.pop(_COUNTER, None)
    return True


def drop(tx: SQLiteTx) -> bool:
    """Delete the index, and return whether there was one."""
    if not _has_index(tx):
        return False
    for statement in _DROP:
        tx.execute(statement)
    tx.counters.pop(_COUNTER, None)
    return True


def put(tx: SQLiteTx, upto: int, entries: Sequence[IndexEntry]) -> None:
    """Store the entries of runs, unless the index was dropped since. A run that changed since is left."""
    if not _has_index(tx):
        return
    for arrival, seen, text, live in entries:
        _remove(tx, arrival)
        row = tx.execute(
            "SELECT generation, ended_at, mail_seq, claim_id FROM arc_runs WHERE n = ?", (arrival,)
        ).fetchone()
        if row is None:
            continue
        has_text = text is not None and row == seen
        if has_text:
            tx.execute("INSERT INTO arc_search (rowid, text) VALUES (?, ?)", (arrival, text))
        if live or not has_text:
            left = (arrival, has_text, live, seen[3] if row == seen else None, seen[2])
            tx.execute("INSERT INTO arc_search_left VALUES (?, ?, ?, ?, ?)", left)
    tx.execute("UPDATE arc_search_state SET upto = max(upto, ?)", (upto,))


def merge(tx: SQLiteTx, first: bool) -> bool:
    """Merge parts of the index, which contain trigrams of deleted runs until then. Return whether to go on.

    Args:
        tx: The transaction.
        first: Whether all parts are to be merged, from this call on.
    """
    if not _has_index(tx):
        return False
    before = tx.conn.total_changes
    tx.execute("INSERT INTO arc_search (arc_search, rank) VALUES ('merge', ?)", (-_PAGES if first else _PAGES,))
    return tx.conn.total_changes - before > 1


def forget(tx: SQLiteTx, arrival: int) -> None:
    """Remove a run that is deleted."""
    if _COUNTER not in tx.counters:
        tx.counters[_COUNTER] = _has_index(tx)
    if tx.counters[_COUNTER]:
        _remove(tx, arrival)


def _remove(tx: SQLiteTx, arrival: int) -> None:
    for statement in _REMOVE:
        tx.execute(statement, (arrival,))


OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    "search.create": create,
    "search.drop": drop,
    "search.put": put,
    "search.merge": merge,
}
OPERATION_SET: Final = OperationSet("search", OPERATIONS, slow=dict.fromkeys(OPERATIONS, always))


# -- reads


def state(view: sqlite3.Connection, limit: int) -> IndexState | None:
    """Return how far the index goes; None without an index."""
    if not _has_index(view):
        return None
    [upto] = view.execute("SELECT upto FROM arc_search_state").fetchone()
    [last] = view.execute("SELECT coalesce(max(n), 0) FROM arc_runs").fetchone()
    return IndexState(upto, [n for (n,) in view.execute(_CHANGED, (limit,))], last)


def search(view: sqlite3.Connection, wanted: RunFilter, words: str, most: int) -> Candidates | None:
    """Return the places of runs that may contain words; None without an index.

    Args:
        view: A connection.
        wanted: The filter.
        words: At least 3 characters.
        most: How many candidates at most.
    """
    if not _has_index(view):
        return None
    parts: list[Condition] = [
        ("SELECT n FROM arc_runs WHERE n > (SELECT upto FROM arc_search_state)", ()),
        (_LEFT, ()),
        (_MATCHING, (_expression(words, wanted.tenant),)),
    ]
    return candidates(view, wanted, parts, most)


def _expression(words: str, tenant: str | None) -> str:
    """Return the query for texts with all trigrams of the words."""
    text, mark = indexed_words(words), "" if tenant is None else tenant_mark(tenant)
    trigrams = (each[at : at + 3] for each in (mark, text) for at in range(len(each) - 2))
    quoted = ('"' + each.replace('"', '""') + '"' for each in trigrams)
    return " AND ".join([*dict.fromkeys(quoted)][:_MOST_TRIGRAMS])


def candidates(view: Any, wanted: RunFilter, parts: Sequence[Condition], most: int) -> Candidates:
    """Return the places of the first candidates.

    Args:
        view: A connection.
        wanted: The filter.
        parts: Queries for the `n` of candidates, with their values.
        most: How many candidates at most.
    """
    if wanted.statuses == ():
        return Candidates([], None)
    is_bounded = wanted.after or wanted.since or wanted.before or wanted.until
    bounds, values = _split(*(_arrived(view, wanted) if is_bounded else ()))
    limit, found = most + _MARGIN, set[int]()
    for text, given in parts:
        query = _part(text, bounds, wanted.newest_first)
        found.update(n for (n,) in view.execute(query, (*given, *values, limit)))
    numbers = sorted(found, reverse=wanted.newest_first)
    places = _places(view, wanted, numbers[:limit])
    if len(numbers) < limit:
        return Candidates(places, None)
    if not wanted.newest_first:
        return Candidates(places, (0.0, numbers[limit - 1]))
    # A run with a smaller `n` may belong before these runs: they are found again, with the next candidates.
    edge = max(_places(view, RunFilter(newest_first=True), numbers[limit - _MARGIN : limit]), default=(0.0, 0))
    is_last = wanted.before is not None and edge >= wanted.before
    return Candidates([each for each in places if each >= edge], None if is_last else edge)


@lru_cache(256)
def _part(text: str, bounds: tuple[str, ...], newest_first: bool) -> str:
    """Return a statement for the first `n` of a query. All parts of it are texts of this package."""
    where = f" WHERE {' AND '.join(bounds)}" if bounds else ""
    return f"SELECT n FROM ({text}) AS c{where} ORDER BY n {'DESC' if newest_first else 'ASC'} LIMIT ?"


def _places(view: Any, wanted: RunFilter, numbers: Sequence[int]) -> list[tuple[float, int]]:
    """Return the places of the wanted runs with these `n`, in the order of the filter."""
    no_schedule = ("agent <> ?", (SCHEDULE,))
    texts, values = _split((_THESE, (json.dumps([*numbers]),)), no_schedule, *_conditions(wanted), _before(wanted))
    order = "created_at DESC, n DESC" if wanted.newest_first else "n"
    found = view.execute(_query("created_at, n", "", texts, f"ORDER BY {order}"), values).fetchall()
    return [(created_at, n) for created_at, n in found]


def numbered(view: Any, arrivals: Sequence[int]) -> list[RunRow]:
    """Return the rows with these `n`, in that order."""
    return _rows(view, RunFilter(), arrivals)
