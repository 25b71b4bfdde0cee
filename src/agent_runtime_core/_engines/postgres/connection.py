"""A connection to a PostgreSQL server, with the statements of this library.

Statements are written with `?`, with `:name`, and with table names that begin with `arc_`: the form in which this
library writes them for SQLite too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..._core.clock import Clock
from .url import PostgresAddress, driver

#: For keepalives, and for how long a sent statement may stay unconfirmed by the network.
_NETWORK = {
    "connect_timeout": 5, "keepalives": 1, "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3,
    "tcp_user_timeout": 6000, "application_name": "agent-runtime", "client_encoding": "UTF8",
}  # fmt: skip
_NAME = re.compile(r"\barc_(\w+)")
_HINT = re.compile(r" (?:INDEXED BY \w+|NOT INDEXED)")
NAMED = re.compile(r"(?<![:\w]):([a-z]\w*)")
# What SQLite writes in another way. It keeps the last runs out of some indexes; here all runs are listed. The oldest
# run is looked for among the ready runs: a read in the order of creation could pass all runs that have ended.
_WORDS = (
    ("SELECT value FROM json_each(%s)", "SELECT value::bigint FROM json_array_elements_text(%s::json)"),
    ("instr(", "strpos("),
    ("SELECT min(created_at)", "SELECT min(+created_at)"),
    ("listed = 1", "TRUE"),
    ("listed = 0", "FALSE"),
)
#: PostgreSQL stores no NUL. Written so, texts keep their order.
_WRITTEN = str.maketrans({"\0": "\1\1", "\1": "\1\2"})
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_READ = re.compile("\1([\1\2])")


@lru_cache(4096)
def translated(statement: str, schema: str) -> str:
    """Return a statement as the driver takes it."""
    text = _HINT.sub("", statement.replace("%", "%%"))
    text = NAMED.sub(r"%(\1)s", text).replace("?", "%s")
    for ours, theirs in _WORDS:
        text = text.replace(ours, theirs)
    return named(text, schema)


@lru_cache(512)
def named(statement: str, schema: str) -> str:
    """Return a statement with the names that its tables have."""
    return _NAME.sub(rf"{schema}.\1", statement)


def written(value: Any) -> Any:
    """Return a value as it is stored."""
    kind = type(value)
    if kind is str:
        return value.translate(_WRITTEN) if "\0" in value or "\1" in value else value
    if kind is bool:
        return int(value)
    if kind is list:
        return [written(each) for each in value]
    return str(value) if isinstance(value, str) else value


def restored(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a row as it was before `written`."""
    for cell in row:
        if type(cell) is str and "\1" in cell:
            return tuple(_READ.sub(_original, each) if type(each) is str else each for each in row)
    return row


def _original(found: re.Match[str]) -> str:
    return "\0" if found[1] == "\1" else "\1"


def rows_of(table: str, *columns: str) -> str:
    """Return a table whose rows are one parameter, which `sent` returns; each column is `name type`."""
    return f"json_to_recordset(?::json) AS {table} ({', '.join(columns)})"


@lru_cache
def _names(columns: tuple[str, ...]) -> list[str]:
    return [column.split(" ")[0] for column in columns]


def sent(columns: tuple[str, ...], rows: Iterable[Sequence[Any]]) -> str:
    """Return rows for `rows_of`. To write one JSON text takes a tenth of the time of an array for each column."""
    found = [dict(zip(_names(columns), row, strict=True)) for row in rows]
    text = _JSON.encode(found)
    if "\\u0000" in text or "\\u0001" in text:
        text = _JSON.encode([{name: written(cell) for name, cell in row.items()} for row in found])
    return text


#: What each statement of a batch requires.
NOT_MOVED = "NOT EXISTS (SELECT 1 FROM arc_fences WHERE key = 'moved')"


class Rows:
    """The rows of a statement."""

    __slots__ = ("_cursor",)

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    @property
    def rowcount(self) -> int:
        return int(self._cursor.rowcount)

    def fetchone(self) -> Any:
        row = self._cursor.fetchone()
        return None if row is None else restored(row)

    def fetchall(self) -> list[Any]:
        return [restored(row) for row in self._cursor.fetchall()]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetchall())

    def close(self) -> None:
        self._cursor.close()


class PostgresConnection:
    """A connection of one thread.

    Args:
        place: The database.
        clock: The clock of this process, if the server decides on all times; None if the process decides.
    """

    def __init__(self, place: PostgresAddress, clock: Clock | None) -> None:
        psycopg = driver()
        self.schema: str = place.schema
        self.clock: Clock | None = clock
        self.raw: Any = psycopg.connect(
            place.conninfo, autocommit=True, prepare_threshold=None if place.pooler else 3, **_NETWORK
        )

    def execute(self, statement: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> Rows:
        """Execute a statement."""
        given: Any = (
            {name: written(value) for name, value in values.items()}
            if isinstance(values, Mapping)
            else [written(value) for value in values]
        )
        return Rows(self.raw.execute(translated(statement, self.schema), given))

    def run(self, statements: str) -> Any:
        """Execute statements without values in one round trip, and return the last row."""
        cursor = self.raw.execute(translated(statements, self.schema).replace("%%", "%"))
        while cursor.nextset():
            pass
        return cursor.fetchone() if cursor.description else None

    def pipelined(self, statements: Sequence[tuple[str, Sequence[Any]]]) -> list[list[Any]]:
        """Execute statements as one transaction, in one round trip, and return the rows of each."""
        if not statements:
            return []
        if len(statements) == 1:
            return [self.execute(*statements[0]).fetchall()]
        with self.raw.pipeline():
            self.raw.execute("BEGIN")
            found = [self.execute(*each) for each in statements]
            self.raw.execute("COMMIT")
        return [rows.fetchall() for rows in found]

    @property
    def in_transaction(self) -> bool:
        return int(self.raw.info.transaction_status) != 0

    @property
    def is_broken(self) -> bool:
        return bool(self.raw.closed)

    def close(self) -> None:
        self.raw.close()
