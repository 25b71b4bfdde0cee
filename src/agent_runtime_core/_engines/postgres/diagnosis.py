"""What `agent-runtime doctor` says of a PostgreSQL store: vacuum, open transactions, connections, notifications."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from ..._core.clock import shown_duration
from ...errors import StorageError
from .connection import PostgresConnection
from .notifier import HEARD_WITHIN, POLL

_MANY_DEAD: Final = 10_000  # rows of a table; fewer are no finding
_DEAD_SHARE: Final = 0.2  # of the rows of a table
_LONG: Final = 300.0  # seconds that a transaction may be open
_FULL: Final = 0.8  # of the connections that the server allows
_NAMED: Final = 5  # tables that the finding on sizes names
_OPEN: Final = """SELECT pid::text, usename::text, application_name, state,
    extract(epoch FROM now() - xact_start)::float8
    FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'
    AND xact_start IS NOT NULL AND pid <> pg_backend_pid()
    UNION ALL SELECT '', owner::text, gid, 'prepared', extract(epoch FROM now() - prepared)::float8
    FROM pg_prepared_xacts WHERE database = current_database() ORDER BY 5 DESC LIMIT 1"""
_TABLES: Final = """SELECT relname::text, n_live_tup, n_dead_tup,
    extract(epoch FROM now() - greatest(last_vacuum, last_autovacuum))::float8,
    pg_size_pretty(pg_total_relation_size(relid)), pg_size_pretty(sum(pg_total_relation_size(relid)) OVER ())
    FROM pg_stat_user_tables WHERE schemaname = ? ORDER BY pg_total_relation_size(relid) DESC"""
_SERVER: Final = """SELECT current_setting('server_version'), pg_is_in_recovery(),
    extract(epoch FROM now() - pg_postmaster_start_time())::float8"""
_TIMELINE: Final = "SELECT timeline_id FROM pg_control_checkpoint()"
_CONNECTIONS: Final = """SELECT count(*), count(*) FILTER (WHERE application_name LIKE 'agent-runtime%'),
    current_setting('max_connections')::int FROM pg_stat_activity WHERE datid IS NOT NULL"""


class Diagnosis(NamedTuple):
    """The result of one check: "ok", "warning" or "error", what was found, and how to fix it."""

    status: str
    detail: str
    fix: str = ""


async def diagnose(engine: Any) -> list[Diagnosis]:
    """Check the server and the schema of an engine. A check that the role may not make is a warning."""
    found = [
        Diagnosis("error" if each.severity == "refuse" else "warning", f"{each.setting} is {each.value!r}, {each.why}",
                  each.remedy)
        for each in engine.safety_findings
    ]  # fmt: skip
    for check in (_server, _timeline, _schema, _tables, _transactions, _slots, _connections):
        try:
            found += await engine.read(_all_of, check)
        except StorageError as error:
            found.append(Diagnosis("warning", f"{check.__name__[1:]} cannot be read ({error!s:.200})"))
    return [*found, await _notifications(engine)]


def _all_of(conn: PostgresConnection, check: Callable[[PostgresConnection], Iterator[Diagnosis]]) -> list[Diagnosis]:
    return [*check(conn)]


def _server(conn: PostgresConnection) -> Iterator[Diagnosis]:
    version, in_recovery, uptime = conn.execute(_SERVER).fetchone()
    text = f"PostgreSQL {version}, started {shown_duration(uptime)} ago"
    if in_recovery:
        fix = "Name the primary in the URL of the workers"
        yield Diagnosis("error", f"{text}, a standby in recovery: it is read-only", fix)
    else:
        yield Diagnosis("ok", text)


def _timeline(conn: PostgresConnection) -> Iterator[Diagnosis]:
    yield Diagnosis("ok", f"timeline {conn.execute(_TIMELINE).fetchone()[0]}, which changes with each failover")


def _schema(conn: PostgresConnection) -> Iterator[Diagnosis]:
    for _, version, library in conn.execute("SELECT concern, version, library FROM arc_schema"):
        yield Diagnosis("ok", f"schema {conn.schema} has version {version}, written by release {library}")


def _tables(conn: PostgresConnection) -> Iterator[Diagnosis]:
    rows = conn.execute(_TABLES, (conn.schema,)).fetchall()
    sizes = ", ".join(f"{row[0]} {row[4]}" for row in rows[:_NAMED])
    yield Diagnosis("ok", f"tables take {rows[0][5]}: {sizes}")
    dead = sum(row[2] for row in rows)
    vacuumed = min((row[3] for row in rows if row[3] is not None), default=None)
    when = "never" if vacuumed is None else f"{shown_duration(vacuumed)} ago"
    many = [row for row in rows if row[2] > max(_MANY_DEAD, _DEAD_SHARE * row[1])]
    if not many:
        yield Diagnosis("ok", f"{dead} dead rows, last vacuum {when}")
    for name, live, gone, ago, *_ in many:
        when = "never vacuumed" if ago is None else f"vacuumed {shown_duration(ago)} ago"
        yield Diagnosis(
            "warning",
            f"table {name} has {gone} dead rows beside {live} live ones, {when}",
            "End the oldest transaction, or let autovacuum run more often",
        )


def _transactions(conn: PostgresConnection) -> Iterator[Diagnosis]:
    sees_all = conn.execute("SELECT pg_has_role('pg_read_all_stats', 'USAGE')").fetchone()[0]
    if not sees_all:
        role = conn.execute("SELECT quote_ident(current_user)").fetchone()[0]
        fix = f"GRANT pg_read_all_stats TO {role}"
        yield Diagnosis("ok", f"transactions of other roles are not visible to this role. To see them: {fix}")
    row = conn.execute(_OPEN).fetchone()
    if row is None:
        if sees_all:
            yield Diagnosis("ok", "no other transaction is open")
        return
    pid, user, application, state, seconds = row
    who = f"{state or 'active'}, user {user}, {application or 'no application name'}{f', pid {pid}' if pid else ''}"
    text = f"the oldest transaction is open for {shown_duration(seconds)} ({who})"
    if seconds <= _LONG:
        yield Diagnosis("ok", text)
        return
    end = f"SELECT pg_terminate_backend({pid})" if pid else f"COMMIT PREPARED or ROLLBACK PREPARED {application!r}"
    yield Diagnosis("warning", f"{text}, so vacuum removes no row that died since", f"End it: {end}")


def _slots(conn: PostgresConnection) -> Iterator[Diagnosis]:
    query = "SELECT slot_name::text FROM pg_replication_slots WHERE NOT active ORDER BY 1"
    for (name,) in conn.execute(query):
        fix = "Start its standby, or run: SELECT pg_drop_replication_slot(name)"
        yield Diagnosis("warning", f"replication slot {name!r} is unused, and keeps WAL and dead rows", fix)


def _connections(conn: PostgresConnection) -> Iterator[Diagnosis]:
    used, ours, allowed = conn.execute(_CONNECTIONS).fetchone()
    text = f"{used} of {allowed} connections are open, {ours} of them of this library"
    if used > _FULL * allowed:
        yield Diagnosis("warning", text, "Raise max_connections, or use PgBouncer with pooler=1 and listen_url=")
    else:
        yield Diagnosis("ok", text)


async def _notifications(engine: Any) -> Diagnosis:
    """Test whether this process hears its own notification; a pooler in transaction mode hears none."""
    polling = f"so work of other processes is found by polling, up to {POLL:g} s later"
    if not engine.place.listen_conninfo:
        fix = "Add listen_url= with the URL of the server itself"
        return Diagnosis("warning", f"the URL has pooler=1 and no listen_url=, {polling}", fix)
    stop = engine.listen("doctor", lambda: None)
    until = time.monotonic() + HEARD_WITHIN + POLL
    try:
        while not engine.hears and time.monotonic() < until:  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.02)
    finally:
        stop()
    if engine.hears:
        return Diagnosis("ok", "notifications are heard")
    fix = "If the URL names a pooler such as PgBouncer, add pooler=1 and listen_url= with the URL of the server itself"
    return Diagnosis("warning", f"notifications are not heard, {polling}", fix)
