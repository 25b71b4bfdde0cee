"""A real PostgreSQL server for tests, on a free port of loopback. It ends with its block."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.support.redis_servers import HOST as HOST
from tests.support.redis_servers import free_port

START_SECONDS = 60.0


@cache
def programs() -> Path | None:
    """The folder of the server's programs, None where there is no server."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent  # a link to it may be alone on PATH
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda each: float(each.parts[-3]))
    return versions[-1].parent if versions else None


def _owner() -> dict[str, Any]:
    """As whom the server runs: it refuses to be root."""
    if os.geteuid() != 0:
        return {}
    names = {each.pw_name: each for each in pwd.getpwall()}
    user = names.get("postgres") or names["nobody"]
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def missing(what: str) -> None:
    """Skip the test on a laptop, fail it in CI."""
    if os.environ.get("CI"):
        pytest.fail(f"the tests with a PostgreSQL have to run in CI: {what}", pytrace=False)
    pytest.skip(what)


class PostgresServer:
    """A server with one database; options are settings of the server.

    Args:
        locale: What `initdb` is told of the locale: `--icu-locale=de --locale-provider=icu`.
        options: Settings: `fsync="on"`.
    """

    def __init__(self, *, locale: tuple[str, ...] = ("--locale=C.UTF-8",), **options: object) -> None:
        self._locale = locale
        self._options = {"fsync": "off", "max_connections": 300, "shared_buffers": "64MB", **options}
        self.folder = Path()
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        where = programs()
        if where is None:
            missing("no initdb on PATH or in /usr/lib/postgresql: install the server of PostgreSQL")
        assert where is not None
        self._programs, self._as = where, _owner()
        self.folder = Path(tempfile.mkdtemp(prefix="arc-postgres-"))
        if self._as:
            os.chown(self.folder, self._as["user"], self._as["group"])
        try:
            self._make()
            self.port = free_port()
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make(self) -> None:
        self._run("initdb", "-D", str(self.folder / "data"), "-A", "trust", "-U", "postgres", "-N", *self._locale)

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._programs / program, *arguments], capture_output=True, text=True, check=False, cwd="/", **self._as
        )
        assert done.returncode == 0, done.stdout + done.stderr

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{HOST}:{self.port}/postgres"

    def start(self, **options: object) -> None:
        """Start it on its port; `options` replace those it had."""
        self._options.update(options)
        settings = [f"-c{name}={value}" for name, value in self._options.items()]
        log = (self.folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", str(self.folder / "data"), "-p", str(self.port), "-h", HOST,
                 "-k", "", *settings],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/", **self._as,
            )  # fmt: skip
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(Exception):
                self.ask("SELECT 1")
                return
            assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
            assert time.monotonic() < end, f"it did not start within {START_SECONDS:g} s"
            time.sleep(0.02)

    def ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of one statement, on a connection of its own."""
        import psycopg

        with psycopg.connect(self.url, autocommit=True, connect_timeout=5) as conn:
            cursor = conn.execute(statement.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def rows(self, url: str) -> list[tuple[Any, ...]]:
        """All rows of the tables in the schema of a URL."""
        schema = url.partition("?schema=")[2]
        tables = self.ask("SELECT tablename FROM pg_tables WHERE schemaname = %s", schema)
        return [row for (table,) in tables for row in self.ask(f"SELECT * FROM {schema}.{table}")]

    def end(self, number: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT aborts transactions, SIGTERM waits for clients."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(START_SECONDS)

    def kill(self) -> None:
        """SIGKILL it with all its processes, and wait until it is gone."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def restart(self, **options: object) -> None:
        """Kill it if it lives, and start it again on the same port."""
        self.kill()
        self.start(**options)

    def promote(self) -> None:
        """Make a standby the primary."""
        self.ask("SELECT pg_promote()")


class Standby(PostgresServer):
    """A server that follows `primary`, and ends with its block."""

    def __init__(self, primary: PostgresServer, **options: object) -> None:
        super().__init__(locale=(), **options)
        self._primary = primary

    def _make(self) -> None:
        source = f"host={HOST} port={self._primary.port} user=postgres application_name=standby"
        self._run("pg_basebackup", "-D", str(self.folder / "data"), "-d", source, "-R", "-c", "fast")


class PgBouncer:
    """A pooler in transaction mode before a server, on a free port of loopback."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    def __enter__(self) -> Self:
        program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if program is None:
            missing("no pgbouncer on PATH or in /usr/sbin")
        assert program is not None
        owner = _owner()
        self._folder = Path(tempfile.mkdtemp(prefix="arc-pgbouncer-"))
        self.port = free_port()
        (self._folder / "pgbouncer.ini").write_text(
            f"[databases]\n* = host={HOST} port={self._server.port} user=postgres\n[pgbouncer]\nlisten_addr = {HOST}\n"
            f"listen_port = {self.port}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\n"
            f"max_client_conn = 400\ndefault_pool_size = 20\nlogfile = {self._folder / 'log'}\n"
        )
        if owner:
            for path in (self._folder, *self._folder.iterdir()):
                os.chown(path, owner["user"], owner["group"])
        self._process = subprocess.Popen(
            [program, "-q", str(self._folder / "pgbouncer.ini")], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True, cwd="/", **owner,
        )  # fmt: skip
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), 1):
                return self
            assert time.monotonic() < end, (self._folder / "log").read_text()
            time.sleep(0.02)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{HOST}:{self.port}/postgres?pooler=1"
