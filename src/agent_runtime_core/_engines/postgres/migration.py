"""Create and update the schema of this library, and grant it to roles."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence
from typing import Any, Final

from ..._core.clock import SYSTEM
from ..._core.lazy_import import load
from ..._core.log import log
from ..._core.validation import must
from ...errors import StorageBusy, StorageError, StorageOutdated
from ..base import OperationSet
from ..sqlite.database import check_version
from .connection import PostgresConnection, translated
from .schema import TABLES
from .url import PostgresAddress, driver, postgres_place

_VERSIONS: Final = (
    'CREATE TABLE IF NOT EXISTS arc_schema (concern text COLLATE "C" PRIMARY KEY, version int NOT NULL, library text)'
)
_MIGRATION_LOCK: Final = 0x61726300  # of all schemas: two migrations at the same time are rare
_MIGRATION_SECONDS: Final = 30.0
_LOCK_TIMEOUT: Final = "3s"
_STORED: Final = "SELECT concern, version, library FROM arc_schema"
_WRITES: Final = "SELECT, INSERT, UPDATE, DELETE"
#: What a role gets: its rights on tables, and on sequences. A reader needs them to see the number of the last run.
_WORKER: Final = (_WRITES, "SELECT, USAGE, UPDATE")
_READER: Final = ("SELECT", "SELECT")


def migrate(conn: PostgresConnection, place: PostgresAddress, operation_sets: Sequence[OperationSet]) -> None:
    """Bring the tables of operation sets to their newest version.

    Raises:
        StorageTooNew: The stored schema is newer.
        StorageOutdated: The user may not change the schema.
    """
    try:
        if not _statements(conn, place, operation_sets):
            return
        run_alone(conn, place, operation_sets)
    except driver().errors.InsufficientPrivilege as error:
        what = "must be created or updated, and the user may not do that"
        raise outdated(place, f"{what} ({error!s:.200})") from error


def require_schema(conn: PostgresConnection, place: PostgresAddress, operation_sets: Sequence[OperationSet]) -> None:
    """Check that the tables of operation sets have the newest version.

    Raises:
        StorageTooNew: The stored schema is newer.
        StorageOutdated: It is older, or the user may not read it.
    """
    try:
        missing = _statements(conn, place, operation_sets)
    except driver().errors.InsufficientPrivilege as error:
        raise outdated(place, f"must be granted to the user ({error!s:.200})") from error
    if missing:
        raise outdated(place, "must be created or updated, which a reader does not do")


def outdated(place: PostgresAddress, what: str) -> StorageOutdated:
    """Return the error for a schema that this user cannot use. It names the command that helps."""
    return StorageOutdated(
        f"{place}: the schema {place.schema} {what}. Run, as its owner: agent-runtime migrate "
        f"{shlex.quote(place.shown())}, with --role for the role of workers and --reader for a role that only reads"
    )


def migrate_store(
    url: str, *, role: str | None = None, reader: str | None = None, dry_run: bool = False
) -> tuple[str, list[str]]:
    """Create or update the schema at `url`, and grant it to a role of workers and to a role that only reads.

    Returns:
        The location, and the statements that were executed. With `dry_run`, those that would be.

    Raises:
        InvalidArgument: There is no such role.
    """
    place = postgres_place(url)
    psycopg = driver()
    try:
        conn = PostgresConnection(place, None)
        with contextlib.closing(conn):
            grants = [text for name, rights in ((role, _WORKER), (reader, _READER)) if name is not None
                      for text in _grants(conn, name, rights)]  # fmt: skip
            if dry_run:
                found = [*_statements(conn, place, [TABLES]), *grants]
            else:
                found = run_alone(conn, place, [TABLES], grants)
            return place.shown(), [" ".join(each.split()) for script in found for each in script.split(";\n")]
    except psycopg.errors.InsufficientPrivilege as error:
        raise outdated(place, f"must be created or updated by its owner ({error!s:.200})") from error
    except psycopg.OperationalError as error:
        raise StorageBusy(f"{place} did not answer ({f'{error!s:.300}'.strip()}). Repeat the command") from error
    except psycopg.Error as error:
        raise StorageError(f"{place}: {f'{error!s:.300}'.strip()}") from error


def _grants(conn: PostgresConnection, role: str, rights: tuple[str, str]) -> list[str]:
    """Return the statements that give rights to a role, including rights on tables that the same user creates later."""
    if conn.execute("SELECT 1 FROM pg_roles WHERE rolname = ?", (role,)).fetchone() is None:
        raise must("role", "exist on the server", role, "Create it: CREATE ROLE name LOGIN PASSWORD '…'")
    schema, to = conn.schema, conn.raw.execute("SELECT quote_ident(%s)", (role,)).fetchone()[0]
    tables, sequences = rights
    later = f"ALTER DEFAULT PRIVILEGES IN SCHEMA {schema}"
    found = [
        f"GRANT USAGE ON SCHEMA {schema} TO {to}",
        f"GRANT {tables} ON ALL TABLES IN SCHEMA {schema} TO {to}",
        f"GRANT {sequences} ON ALL SEQUENCES IN SCHEMA {schema} TO {to}",
        f"{later} GRANT {tables} ON TABLES TO {to}",
        f"{later} GRANT {sequences} ON SEQUENCES TO {to}",
    ]
    if tables == _WRITES:
        found.append(f"REVOKE INSERT, UPDATE, DELETE ON {schema}.schema FROM {to}")
    return found


def _statements(conn: PostgresConnection, place: PostgresAddress, operation_sets: Sequence[OperationSet]) -> list[str]:
    """Return what brings the tables to their newest version; nothing if they have it.

    Raises:
        StorageTooNew: They have a greater version.
    """
    found, stored = [], dict[str, object]()
    if conn.execute("SELECT to_regnamespace(?)", (conn.schema,)).fetchone()[0] is None:
        found.append(f"CREATE SCHEMA {conn.schema}")
    if found or conn.execute("SELECT to_regclass(?)", (f"{conn.schema}.schema",)).fetchone()[0] is None:
        found.append(_VERSIONS)
    else:
        for name, version, library in conn.execute(_STORED):
            stored |= {name: version, f"library of {name}": library}
    for each in operation_sets:
        newest = len(each.migrations)
        version = check_version(str(place), each.name, stored, newest)
        found += each.migrations[version:]
        if version != newest:
            by: Any = load("agent_runtime_core:__version__")
            found.append(
                f"INSERT INTO arc_schema VALUES ('{each.name}', {newest}, '{by}') ON CONFLICT (concern)"
                " DO UPDATE SET version = excluded.version, library = excluded.library"
            )
    return [translated(each, conn.schema).replace("%%", "%") for each in found]


def run_alone(
    conn: PostgresConnection, place: PostgresAddress, operation_sets: Sequence[OperationSet], more: Sequence[str] = ()
) -> list[str]:
    """Execute the missing statements and more, while no other process does that, and return them."""
    until = time.monotonic() + _MIGRATION_SECONDS
    while True:
        conn.run(f"BEGIN; SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
        try:
            # A wait inside of the server would hold a snapshot.
            if conn.execute("SELECT pg_try_advisory_xact_lock(?)", (_MIGRATION_LOCK,)).fetchone()[0]:
                statements = [*_statements(conn, place, operation_sets), *more]
                for each in statements:
                    conn.raw.execute(each)
                conn.run("COMMIT")
                return statements
        except (driver().errors.DuplicateSchema, driver().errors.UniqueViolation):
            pass  # another process that migrates in an older transaction was faster
        except driver().errors.LockNotAvailable as error:
            log.warning("%s: the migration waits for other transactions (%s)", place, error)
        finally:
            if conn.in_transaction and not conn.is_broken:
                with contextlib.suppress(driver().Error):
                    conn.run("ROLLBACK")
        if time.monotonic() > until:
            raise StorageBusy(
                f"{place}: the schema {conn.schema} was locked for {_MIGRATION_SECONDS:g} s. Try again later"
            )
        time.sleep(SYSTEM.random.uniform(0.02, 0.1))
