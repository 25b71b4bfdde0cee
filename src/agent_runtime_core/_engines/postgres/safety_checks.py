"""Check, after a connect, that the settings of a PostgreSQL server do not lose runs, and that it is the same server.

A setting that mixes up contents is refused. A setting that loses runs only after another failure is a warning, which
one process a day logs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Any, Final

from ..._core.log import log
from ...errors import UnsafePostgres
from ..shared_engine import SafetyFinding
from .connection import PostgresConnection
from .url import PostgresAddress, driver

OLDEST: Final = 13
DAY: Final = 86_400
_SETTINGS: Final = (
    "fsync", "full_page_writes", "synchronous_commit", "synchronous_standby_names", "server_encoding",
    "server_version_num",
)  # fmt: skip
_ASK: Final = (
    f"SELECT {', '.join(f'current_setting({name!r})' for name in _SETTINGS)}, pg_is_in_recovery()::text,"
    " (SELECT count(*) FROM pg_stat_replication WHERE application_name <> 'pg_basebackup')::text,"
    " (SELECT coalesce(string_agg(relname, ', ' ORDER BY relname), '') FROM pg_class"
    " WHERE relnamespace = to_regnamespace(?) AND relkind = 'r' AND relpersistence = 'u')"
)
_NAMES: Final = (*_SETTINGS, "in_recovery", "standbys", "unlogged")
# `pg_control_checkpoint` reports the timeline of a promoted standby only after its next checkpoint.
_IDENTITY: Final = (
    "SELECT system_identifier || ':' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) FROM pg_control_system()"
)
_SEEN: Final = "INSERT INTO arc_seen AS s VALUES (?, ?, extract(epoch FROM clock_timestamp())::float8)"
_REPLACE: Final = "ON CONFLICT (name) DO UPDATE SET value = excluded.value, t = excluded.t"
_WARNED: Final = f"{_SEEN} {_REPLACE} WHERE s.value <> excluded.value OR s.t < excluded.t - {DAY} RETURNING 1"
_SERVER: Final = (
    f"WITH before AS (SELECT value FROM arc_seen WHERE name = 'server') {_SEEN} {_REPLACE}"
    " WHERE s.value <> excluded.value RETURNING (SELECT value FROM before)"
)

# (location, setting, value) of each warning of this process, so that each is logged once.
_logged: set[tuple[str, str, str]] = set()


class IsStandby(OSError):
    """The server is a standby in recovery, which may be promoted soon."""


def reported(conn: PostgresConnection) -> dict[str, str]:
    """Return the settings and facts that are checked, as the server reports them."""
    found = dict(zip(_NAMES, conn.execute(_ASK, (conn.schema,)).fetchone(), strict=True))
    info = conn.raw.info
    found["network"] = "open" if not (_is_local(info.host) or conn.raw.pgconn.ssl_in_use) else ""
    return found


def check(settings: Mapping[str, str], place: PostgresAddress, *, reads_only: bool = False) -> list[SafetyFinding]:
    """Return all `findings`.

    Raises:
        IsStandby: The server is a standby, and more than reads are wanted.
        UnsafePostgres: One of the findings is refused, and `place` does not allow that.
    """
    if settings["in_recovery"] == "true" and not reads_only:
        raise IsStandby("the server is a standby in recovery")
    found = findings(settings)
    refused = [each for each in found if each.severity == "refuse"]
    if refused and not place.allow_unsafe:
        raise UnsafePostgres(
            f"{place} would lose or mix up runs: {'; '.join(map(str, refused))}. "
            "Change that, or accept it with allow_unsafe=1 in the URL",
            {each.setting: each.value for each in refused},
        )
    return found


def findings(settings: Mapping[str, str]) -> list[SafetyFinding]:
    """Return what is unsafe, refused settings first."""
    return sorted(_findings(settings), key=lambda each: each.severity != "refuse")


def _findings(settings: Mapping[str, str]) -> Iterator[SafetyFinding]:
    version, encoding = int(settings["server_version_num"]), settings["server_encoding"]
    if version < OLDEST * 10_000:
        shown = f"{version // 10_000}.{version % 10_000}"
        yield SafetyFinding("version", shown, "refuse", f"before {OLDEST}", f"upgrade to PostgreSQL {OLDEST} or later")
    if encoding != "UTF8":
        yield SafetyFinding(
            "server_encoding", encoding, "refuse", "which does not store all texts",
            "create the database with ENCODING 'UTF8' TEMPLATE template0",
        )  # fmt: skip
    if settings["fsync"] == "off":
        why = "so a crash of the system may lose runs or damage the whole database"
        yield SafetyFinding("fsync", "off", "warn", why, "set fsync = on")
    if settings["full_page_writes"] == "off":
        why = "so a crash of the system may damage tables"
        yield SafetyFinding("full_page_writes", "off", "warn", why, "set full_page_writes = on")
    if settings["synchronous_commit"] == "off":
        why = "so a crash of the server loses the last commits, and their steps are executed again"
        yield SafetyFinding("synchronous_commit", "off", "warn", why, "set synchronous_commit = on for this role")
    if settings["unlogged"]:
        yield SafetyFinding(
            "unlogged tables", settings["unlogged"], "warn", "which are empty after a crash of the server",
            "ALTER TABLE … SET LOGGED",
        )  # fmt: skip
    if settings["standbys"] != "0" and not settings["synchronous_standby_names"]:
        yield SafetyFinding(
            "synchronous_standby_names", "", "warn",
            f"so a failover ({settings['standbys']} standbys) may lose the last commits, and their steps are executed "
            "again", "name the standbys that must confirm a commit",
        )  # fmt: skip
    if settings["network"]:
        why = "so the network between sees every run"
        yield SafetyFinding("TLS", "no", "warn", why, "set sslmode=verify-full in the URL")


def _is_local(host: str) -> bool:
    if not host or host.startswith(("/", "@")) or host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ip_address(host).is_loopback
    return False


def warn(found: list[SafetyFinding], conn: PostgresConnection, place: PostgresAddress) -> None:
    """Log the findings that no process logged in the last 24 hours. A process that only reads logs none."""
    for each in found:
        warning = (str(place), each.setting, each.value)
        if warning not in _logged:
            _logged.add(warning)
            if _noted(conn, _WARNED, (f"warned {each.setting}", each.value)) is not None:
                log.warning("%s: %s", place, each)


def identity(conn: PostgresConnection) -> str:
    """Identify the server and its timeline, which changes with a failover or a restore; "" if the role may not ask."""
    with contextlib.suppress(driver().Error):
        return str(conn.execute(_IDENTITY).fetchone()[0])
    return ""


def server_changed(server: str, before: str, conn: PostgresConnection, place: PostgresAddress) -> bool:
    """Return whether this process, or the store, knows another server or timeline; and log that.

    Args:
        server: The `identity` of the server.
        before: What this process saw before; "" for nothing.
        conn: The connection. The store notes the server, if it may be written.
        place: The database, for the message.
    """
    if not server:
        return False
    row = _noted(conn, _SERVER, ("server", server))
    known = before or (row[0] if row is not None else None) or server
    if known == server:
        return False
    (old, timeline), (new, later) = known.split(":"), server.split(":")
    what = f"its timeline changed from {timeline} to {later}" if old == new else "the database is on another server now"
    log.warning(
        "%s: %s, as after a failover or a restore. If the last commits were lost, their steps are executed again. "
        "After the restore of a backup, run: agent-runtime mark-restored",
        place,
        what,
    )
    return True


def _noted(conn: PostgresConnection, statement: str, values: tuple[str, str]) -> Any:
    """Execute a statement that notes something, and return its row; None if it is noted, or the role only reads."""
    try:
        return conn.execute(statement, values).fetchone()
    except (driver().errors.InsufficientPrivilege, driver().errors.ReadOnlySqlTransaction):
        return None
