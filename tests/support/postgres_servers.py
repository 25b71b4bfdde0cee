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

HOST = "127.0.0.1"
START_SECONDS = 20.0


@cache
def programs() -> Path | None:
    """The folder of the server's programs, None where there is no server."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).parent
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
            self._run("initdb", "-D", str(self.folder / "data"), "-A", "trust", "-U", "postgres", "-N", *self._locale)
            with socket.socket() as probe:
                probe.bind((HOST, 0))
                self.port = int(probe.getsockname()[1])
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
