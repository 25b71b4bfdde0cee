"""The URL of a PostgreSQL database and of this library's schema there.

    postgresql://[user[:password]@]host[:5432]/database[?schema=arc&pooler=1&listen_url=…&allow_unsafe=1]

All other options are passed to libpq: `sslmode`, `sslrootcert`, `target_session_attrs` and so on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from ..._core.lazy_import import load
from ..._core.validation import Shown, must, redacted_url, type_name
from ...errors import InvalidArgument, brief

SCHEMA = "arc"
SCHEMES = ("postgresql", "postgres")
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,40}")
_TRUTH = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True, kw_only=True)
class PostgresAddress:
    """A database, and the schema of this library's tables. `str()` shows no user and no password."""

    #: What libpq connects to. It may contain a password.
    conninfo: str = field(repr=False)
    #: Where the notifier connects to; "" for none.
    listen_conninfo: str = field(repr=False)
    where: str
    schema: str = SCHEMA
    #: Whether a pooler such as PgBouncer may give each transaction another connection of the server.
    pooler: bool = False
    allow_unsafe: bool = False
    #: Whether this process creates and writes nothing there.
    reads_only: bool = False

    def __str__(self) -> str:
        return self.where

    def shown(self) -> str:
        """Return the URL of the store, without user and password, and without the default schema."""
        return self.where if self.schema == SCHEMA else f"{self.where}?schema={self.schema}"


def postgres_place(url: object) -> PostgresAddress:
    """Parse `url`.

    Raises:
        InvalidArgument: It is no URL of a PostgreSQL database. The message shows no password.
    """
    if not isinstance(url, str):
        got = Shown(type_name(type(url)))  # its repr may contain a password
        raise must("PostgreSQL URL", "be a string such as 'postgresql://host/database'", got)
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _refused(url, "be a valid URL") from None
    if parts.scheme not in SCHEMES or "://" not in url:
        raise _refused(url, "be postgresql://host:5432/database")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    schema = options.pop("schema", SCHEMA)
    if not _NAME.fullmatch(schema):
        raise _refused(url, "have a schema of 1 to 41 lower-case letters, digits and '_'")
    pooler, allow_unsafe = (_truth(url, options, name) for name in ("pooler", "allow_unsafe"))
    listen = options.pop("listen_url", None)
    conninfo = parts._replace(query=urlencode(options, quote_via=quote)).geturl()
    known = _parsed(url, conninfo)
    if listen is not None:
        _parsed(url, listen)
    host, port = (str(known.get(name) or "") for name in ("host", "port"))
    shown = f"[{host}]" if ":" in host else quote(host, safe=",.-") if host else ""
    where = f"postgresql://{shown}{f':{port}' if port else ''}/{quote(str(known.get('dbname') or ''))}"
    return PostgresAddress(
        conninfo=conninfo,
        listen_conninfo=listen if listen is not None else "" if pooler else conninfo,
        where=where,
        schema=schema,
        pooler=pooler,
        allow_unsafe=allow_unsafe,
    )


def driver() -> Any:
    """Return the module of the driver.

    Raises:
        MissingDependency: It is not installed.
    """
    return load("psycopg")


def _truth(url: str, options: dict[str, str], name: str) -> bool:
    found = _TRUTH.get(options.pop(name, "0").lower())
    if found is None:
        raise _refused(url, f"have {name}=1 or {name}=0")
    return found


def _parsed(url: str, conninfo: str) -> dict[str, Any]:
    try:
        parsed: Any = load("psycopg.conninfo:conninfo_to_dict")
        found: dict[str, Any] = parsed(conninfo)
    except driver().ProgrammingError as error:  # its message may quote the whole URL
        option = re.search(r'invalid URI query parameter: "(\w+)"', str(error))
        what = f"have only options that libpq knows, and {option[1]} is none" if option else "be valid for libpq"
        raise _refused(url, what) from None
    return found


def _refused(url: str, constraint: str, fix: str = "") -> InvalidArgument:
    return must("PostgreSQL URL", constraint, Shown(brief(redacted_url(url), 500)), fix)
