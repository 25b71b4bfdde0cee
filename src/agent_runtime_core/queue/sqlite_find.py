"""Lists and counts of the runs in a SQLite file, each from an index.

An index is one more page to write each time a run changes. So the indexes of lists hold only the runs with `listed` 1,
and the runs that arrived last are not listed: most of them change soon, and often for the last time. `BATCH` of them
are listed together when the last of these runs arrives. The others, fewer than `BATCH`, are read from the table.
"""

from __future__ import annotations

import heapq
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice, product
from typing import Any, NamedTuple, get_args, get_type_hints

from .._core.ids import known_uuid
from ..errors import StorageCorrupt, brief
from ..status import RunStatus
from .records import COLUMNS, IN_DOUBT, RunCounts, RunFilter, RunRow, damaged, end_of_prefix

ALL = ", ".join(COLUMNS)
BATCH = 256  # runs that are listed together
FEW = 1000  # most runs of a prefix that are sorted; more are read in order of creation, as many of these then match
MANY = 10_000  # the same for the runs of another index in order of arrival
_KINDS = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(RunRow).items()}
_STATUSES = frozenset(status.value for status in RunStatus)
_WITHOUT_INPUT = {"input": "'{}'", "output": "NULL", "concurrency_limit": "1", "rate": "NULL", "turn": "NULL"}
_LIGHT = {**_WITHOUT_INPUT, "metadata": "'{}'"}
FIRST_WORD = "substr(reason, 1, instr(reason || ' ', ' ') - 1)"  # as in the indexes
_BEFORE = "(created_at, n) < (?, ?)"
_THESE = "n IN (SELECT value FROM json_each(?))"
Condition = tuple[str, tuple[Any, ...]]
_ANY: Condition = ("TRUE", ())
_LISTED: Condition = ("listed = 1", ())
#: `waits_since_stored` of pending runs. The read in order of creation ends at the first of them.
_SINCE: Condition = ("due_at = 0 AND held = 0 AND origin = '' AND updated_at = created_at", ())


def _unlisted() -> Condition:
    return "listed = 0 AND n > (SELECT max(n) FROM arc_runs) / ? * ?", (BATCH, BATCH)


@lru_cache(1024)
def _invalid_column(kinds: tuple[type, ...]) -> str | None:
    """Return the first column with a type that is never written there. SQLite itself does not check types."""
    return next((name for name, kind in zip(RunRow._fields, kinds, strict=True) if kind not in _KINDS[name]), None)


def checked_row(row: Sequence[Any]) -> RunRow:
    """Return the row of a query.

    Raises:
        StorageCorrupt: if it is not as it was written.
    """
    found: RunRow = tuple.__new__(RunRow, row)
    if (column := _invalid_column(tuple(map(type, row)))) is not None:
        raise damaged(found.run_id, column, getattr(found, column))
    found.decoded("run_id", known_uuid)
    if found.status not in _STATUSES:
        raise damaged(found.run_id, "status", found.status)
    return found


def fetch(rows: sqlite3.Cursor) -> list[RunRow]:
    """Return the checked rows of a query."""
    return [checked_row(row) for row in rows]


def agents(following: Callable[[str], Any]) -> Iterator[str]:
    """Yield the agents of an index, with one lookup for each: `following(agent)` is the row of the next agent."""
    agent = ""
    while row := following(agent):
        if type(row[0]) is not str or row[0] <= agent:
            raise StorageCorrupt(
                f"agent {brief(row[0])} must come after {brief(agent)} in the index of the queue. Restore a backup"
            )
        agent = row[0]
        yield agent


# -- which index, and which conditions


class _Source(NamedTuple):
    """An index of the wanted runs in order of (created_at, n) for each of its keys."""

    name: str  # of the index, without "arc_runs_"
    keys: Sequence[Condition] = (("", ()),)  # what selects one such range; all ranges are merged

    @property
    def has(self) -> Condition:
        """The condition for the runs in the index. The index of parents contains all of them."""
        return ("", ()) if self.name == "parent" else _LISTED


def _indexed(wanted: RunFilter) -> list[tuple[str, Condition]]:
    """Return the conditions of a filter with a separate index, the most selective first."""
    given = [
        ("in_doubt", wanted.in_doubt, (f"instr(questions, ' {IN_DOUBT}') > 0 AND ended_at IS NULL", ())),
        ("asking", wanted.asking, ("questions <> '' AND ended_at IS NULL", ())),
        ("retrying", wanted.retrying, ("failures > 0 AND ended_at IS NULL", ())),
        ("conversation", wanted.conversation is not None, ("conversation = ?", (wanted.conversation,))),
        ("key", wanted.run_key is not None, ("run_key = ?", (wanted.run_key,))),
        ("lane", wanted.concurrency_key is not None, ("lane = ?", (wanted.concurrency_key,))),
        ("parent", wanted.parent is not None, ("parent_id = ?", (wanted.parent,))),  # SQLite sorts these
    ]
    return [(index, condition) for index, is_given, condition in given if is_given]


def _chosen(view: sqlite3.Connection, wanted: RunFilter) -> _Source:
    for index, condition in _indexed(wanted):
        return _Source(index, (condition,))
    if wanted.reason:
        word = wanted.reason.partition(" ")[0]
        return _Source("reason", ((f"reason <> '' AND {FIRST_WORD} = ?", (word,)),))
    if wanted.statuses is not None or wanted.agent is not None or wanted.tenant:
        index, of = _by_state(wanted.tenant)
        given = f"{of[0]} AND status = ? AND agent = ?" if of[0] else "status = ? AND agent = ?"
        return _Source(index, [(given, (*of[1], *pair)) for pair in _pairs(view, wanted)])
    return _Source("created")


def _by_state(tenant: str | None) -> tuple[str, Condition]:
    """Return the index of all runs, or of a tenant's, by status and agent, and the condition for its first column."""
    return ("tenant", ("tenant <> '' AND tenant = ?", (tenant,))) if tenant else ("state", ("", ()))


def _pairs(view: sqlite3.Connection, wanted: RunFilter) -> list[tuple[str, str]]:
    """Return the wanted pairs of status and agent that occur in runs, with one index lookup for each."""
    statuses = tuple(_STATUSES) if wanted.statuses is None else dict.fromkeys(wanted.statuses)
    if wanted.agent is not None:
        return [*product(statuses, (wanted.agent,))]
    return [(status, agent) for status in statuses for agent in _agents(view, status, wanted.tenant)]


def _agents(view: sqlite3.Connection, status: str, tenant: str | None) -> Iterator[str]:
    index, of = _by_state(tenant)
    texts, values = _split(of, ("status = ?", (status,)), _LISTED)
    query = _query("agent", _by(index), (*texts, "agent > ?"), "ORDER BY agent LIMIT 1")
    return agents(lambda agent: view.execute(query, (*values, agent)).fetchone())


def _conditions(wanted: RunFilter) -> list[Condition]:
    """Return the conditions of a filter, apart from `until` and `before`; see `_upper`."""
    given: list[Condition] = [("created_at >= ?", (wanted.since,))]
    if wanted.after:
        given.append(("n > ?", (wanted.after,)))
    if wanted.agent is not None:
        given.append(("agent = ?", (wanted.agent,)))
    if wanted.statuses is not None:
        given.append((f"status IN ({', '.join('?' * len(wanted.statuses))})", wanted.statuses))
    if wanted.tenant is not None:
        given.append(("tenant = ?", (wanted.tenant,)))
    if wanted.ended_before is not None:
        given.append(("ended_at < ?", (wanted.ended_before,)))
    if wanted.prefix:
        given.append(_prefix(wanted.prefix))
    if wanted.reason is not None:
        more = f"{wanted.reason} "
        given.append(("(reason = ? OR reason >= ? AND reason < ?)", (wanted.reason, more, end_of_prefix(more))))
    return given + [condition for _, condition in _indexed(wanted)]


def _prefix(prefix: str) -> Condition:
    beyond = end_of_prefix(prefix)
    if beyond is None:
        return "(run_id >= ? OR run_key >= ?)", (prefix, prefix)
    return "(run_id >= ? AND run_id < ? OR run_key >= ? AND run_key < ?)", (prefix, beyond, prefix, beyond)


def _upper(wanted: RunFilter) -> tuple[float, int]:
    """Return the place in the order of (created_at, n) before which the wanted runs are."""
    until = (float("inf") if wanted.until is None else wanted.until, 0)
    return until if wanted.before is None else min(until, wanted.before)


def _before(wanted: RunFilter) -> Condition:
    upper = _upper(wanted)
    return ("", ()) if upper[0] == float("inf") else (_BEFORE, upper)


def _split(*conditions: Condition) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return the texts and the values of conditions."""
    given = [condition for condition in dict.fromkeys(conditions) if condition[0]]
    return tuple(text for text, _ in given), tuple(value for _, values in given for value in values)


@lru_cache(1024)
def _query(columns: str, index: str, conditions: tuple[str, ...], end: str) -> str:
    """Return a statement. All parts of it are texts of this module; the values of a filter are its parameters."""
    return f"SELECT {columns} FROM arc_runs {index} WHERE {' AND '.join(conditions)} {end}"


def _by(name: str) -> str:
    return f"INDEXED BY arc_runs_{name}"


# -- lists


def find(view: sqlite3.Connection, wanted: RunFilter) -> list[RunRow]:
    """Return the rows that a filter admits."""
    if wanted.statuses == () or wanted.limit <= 0:
        return []
    few = _of_prefix(view, wanted.prefix, wanted.tenant) if wanted.prefix else None
    if few is not None:
        return _of_few(view, wanted, few)
    if not wanted.newest_first:
        return _oldest(view, wanted)
    source = _chosen(view, wanted)
    streams = [_newest(view, wanted, source, key) for key in source.keys]
    if source.has is _LISTED:
        streams.append(iter(sorted(_places_unlisted(view, wanted), reverse=True)))
    return _rows(view, wanted, [n for _, n in islice(heapq.merge(*streams, reverse=True), wanted.limit)])


def _places_unlisted(view: sqlite3.Connection, wanted: RunFilter) -> list[tuple[float, int]]:
    """Return the places of the wanted runs that the indexes do not contain."""
    texts, values = _split(_unlisted(), *_conditions(wanted), _before(wanted))
    return view.execute(_query("created_at, n", "NOT INDEXED", texts, ""), values).fetchall()


def _newest(
    view: sqlite3.Connection, wanted: RunFilter, source: _Source, key: Condition
) -> Iterator[tuple[float, int]]:
    """Yield the places of the runs of one key of an index, newest first, read in pages of growing size."""
    texts, values = _split(key, source.has, *_conditions(wanted), (_BEFORE, ()))
    query = _query("created_at, n", _by(source.name), texts, "ORDER BY created_at DESC, n DESC LIMIT ?")
    size = wanted.limit if len(source.keys) == 1 else 8 + 2 * min(wanted.limit, FEW) // len(source.keys)
    before = _upper(wanted)
    while True:
        page = view.execute(query, (*values, *before, size)).fetchall()
        yield from page
        if len(page) < size:
            return
        before, size = page[-1], 4 * size


def _columns(wanted: RunFilter) -> str:
    left_out = _LIGHT if wanted.light else _WITHOUT_INPUT if wanted.without_input else None
    if left_out is None:
        return ALL
    return ", ".join(left_out.get(name, name) for name in COLUMNS)


def _rows(view: sqlite3.Connection, wanted: RunFilter, numbers: Sequence[int]) -> list[RunRow]:
    """Return the rows with these `n`, in that order."""
    query = _query(_columns(wanted), "", (_THESE,), "")
    rows = {row.arrival: row for row in fetch(view.execute(query, (json.dumps(numbers),)))}
    return [rows[n] for n in numbers if n in rows]


def _of_prefix(view: sqlite3.Connection, prefix: str, tenant: str | None) -> list[int] | None:
    """Return the `n` of all runs whose id or key begins with a prefix, None if they are not few."""
    found: set[int] = set()
    beyond = end_of_prefix(prefix)
    owner = ("tenant <> '' AND tenant = ?" if tenant else "", (tenant,))
    for column, index, of in (("run_id", "", _ANY), ("run_key", "", _LISTED), ("run_key", "NOT INDEXED", _unlisted())):
        ends = (f"{column} >= ?", (prefix,)), (f"{column} < ?" if beyond else "", (beyond,))
        texts, values = _split(*ends, owner, of)
        numbers = view.execute(_query("n", index, texts, "LIMIT ?"), (*values, FEW + 1)).fetchall()
        found.update(n for (n,) in numbers)
        if len(numbers) > FEW:
            return None
    return [*found]


def _of_few(view: sqlite3.Connection, wanted: RunFilter, numbers: Sequence[int]) -> list[RunRow]:
    """Return the rows of a filter whose numbers are in `numbers`."""
    texts, values = _split((_THESE, (json.dumps(numbers),)), *_conditions(wanted), _before(wanted))
    end = "ORDER BY created_at DESC, n DESC LIMIT ?" if wanted.newest_first else "ORDER BY n LIMIT ?"
    found = view.execute(_query("n", "", texts, end), (*values, wanted.limit))
    return _rows(view, wanted, [n for (n,) in found])


def _oldest(view: sqlite3.Connection, wanted: RunFilter) -> list[RunRow]:
    """Return the rows of a filter in order of arrival: from an index, or from the table if the index contains many."""
    source = _chosen(view, wanted)
    if wanted.tenant:
        return _rows(view, wanted, _oldest_of_tenant(view, wanted, source))
    if source.name != "created" and (numbers := _numbers(view, wanted, source)) is not None:
        return _of_few(view, wanted, numbers)
    texts, values = _split(*_conditions(wanted), _before(wanted), *_arrived(view, wanted))
    query = _query(_columns(wanted), "NOT INDEXED", texts, "ORDER BY n LIMIT ?")
    return fetch(view.execute(query, (*values, wanted.limit)))


def _oldest_of_tenant(view: sqlite3.Connection, wanted: RunFilter, source: _Source) -> list[int]:
    """Return the first `n` of a tenant's runs. Each index contains the tenant, so no row of another tenant is read."""
    found: list[int] = []
    for key in source.keys:
        texts, values = _split(key, source.has, *_conditions(wanted), _before(wanted))
        query = _query("n", _by(source.name), texts, "ORDER BY n LIMIT ?")
        found += (n for (n,) in view.execute(query, (*values, wanted.limit)))
    if source.has is _LISTED:
        found += (n for _, n in _places_unlisted(view, wanted))
    return sorted(found)[: wanted.limit]


def _numbers(view: sqlite3.Connection, wanted: RunFilter, source: _Source) -> list[int] | None:
    """Return the `n` of all runs of the keys of an index, None if these are many."""
    found: list[int] = []
    for key in source.keys:
        texts, values = _split(key, source.has, ("created_at >= ? AND n > ?", (wanted.since, wanted.after)))
        query = _query("n", _by(source.name), texts, "LIMIT ?")
        found += (n for (n,) in view.execute(query, (*values, MANY + 1 - len(found))))
        if len(found) > MANY:
            return None
    return found + [n for _, n in _places_unlisted(view, wanted)] if source.has is _LISTED else found


def _arrived(view: sqlite3.Connection, wanted: RunFilter) -> list[Condition]:
    """Return conditions on `n` that are true of all wanted runs, so that fewer other rows are read."""

    def end(which: str, condition: Condition) -> tuple[int | None]:
        found: list[Any] = []
        for index, of in ((_by("created"), _LISTED), ("NOT INDEXED", _unlisted())):
            texts, values = _split(of, condition)
            found += view.execute(_query(f"{which}(n)", index, texts, ""), values).fetchone()
        return ((min if which == "min" else max)((n for n in found if n is not None), default=None),)

    first: tuple[int | None] = (wanted.after + 1,)
    if wanted.since > 0 and not wanted.after:
        first = end("min", ("created_at >= ?", (wanted.since,)))
    given: list[Condition] = [("n >= ?", first)]  # never true of NULL: no run is wanted
    if (before := _before(wanted))[0]:
        given.append(("n <= ?", end("max", before)))
    return given


# -- counts


def counts(view: sqlite3.Connection, tenant: str | None = None) -> RunCounts:
    """Return how many runs are stored. With a tenant, only its runs are counted."""
    of_state, of = _by_state(tenant)
    runs, oldest, waiting, due = Counter[tuple[str, str]](), dict[str, float](), Counter[str](), 0

    def read(index: str, columns: str, end: str, *more: Condition) -> list[tuple[Any, ...]]:
        texts, values = _split(of, *more)
        return view.execute(_query(columns, index, texts, end), values).fetchall()

    # The indexes of due and of waiting runs contain the runs of all tenants.
    listed = _by(of_state), _by(of_state if tenant else "waiting"), _LISTED
    for by_state, by_waiting, part in (listed, ("NOT INDEXED", "NOT INDEXED", _unlisted())):
        for status, agent, number in read(by_state, "status, agent, count(*)", "GROUP BY status, agent", part):
            runs[status, agent] += number
            if status == "pending":
                at = oldest_of(view, agent, tenant, part)
                if at is not None:
                    oldest[agent] = min(at, oldest.get(agent, at))
        words = f"{FIRST_WORD}, count(*)"
        waiting.update(dict(read(by_waiting, words, "GROUP BY 1", ("status = 'waiting'", ()), part)))
        if tenant:
            live = "status IN ('pending', 'waiting') AND due_at > 0"
            due += read(by_state, "count(*)", "", (live, ()), part)[0][0]
    if not tenant:
        due = read(_by("due"), "count(*)", "", ("due_at > 0", ()))[0][0]
    return RunCounts(dict(runs), oldest, due, dict(waiting))


def oldest_of(view: sqlite3.Connection, agent: str, tenant: str | None, part: Condition) -> float | None:
    """Return when the oldest run of an agent was stored that has waited for a worker since.

    The read is in the order of creation and ends at this run: it passes only pending runs that wait for something else.
    `part` is the condition of the runs that the indexes contain, or of the others.
    """
    index, of = _by_state(tenant)
    texts, values = _split(of, ("status = 'pending' AND agent = ?", (agent,)), part, _SINCE)
    by = _by(index) if part == _LISTED else "NOT INDEXED"
    found: float | None = view.execute(_query("min(created_at)", by, texts, ""), values).fetchone()[0]
    return found
