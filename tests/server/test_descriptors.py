"""A server at the usual limit of 1,024 open files, with more connections than that."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Served

MOST = 1024
MANY = 1010
TOKEN = "of-the-descriptors"  # the token of the other tests must not be in a file
REQUEST = "GET /api/v1/runs/waits/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n\r\n"


class Limited(Served):
    """`agent-runtime serve` in a process that may not have more than 1,024 open files."""

    def _started(self, module: str, *args: str, **environment: str) -> subprocess.Popen[bytes]:
        limited = ["bash", "-c", f'ulimit -n {MOST}; exec "$@"', "bash", sys.executable, "-m", module, *args]
        return subprocess.Popen(
            limited, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment}
        )


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Limited]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * MANY:
        pytest.skip("this system allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * MANY), hard))
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f"{TOKEN}-{n} caller-{n}\n" for n in range(12)) + f"{TOKEN} tests\n")
    tokens.chmod(0o600)
    try:
        with Limited("tests.server.agents:registry", "--db", tmp_path / "agents.db", "--token-file", tokens) as served:
            yield served
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def check(served: Served) -> None:
    """The server answers a probe, a new run and a list, each on a new connection."""
    for number in range(3):
        with served.client(TOKEN) as client:
            assert client.get("/api/v1/health/live").status_code == 200
            assert client.get("/api/v1/health/ready").status_code == 200
            body = {"agent": "gated", "run_id": f"run-{number}", "delay": 3600}
            assert client.post("/api/v1/runs", json=body).status_code == 201
            assert client.get("/api/v1/runs").status_code == 200


@contextlib.contextmanager
def opened(port: int, count: int, request: Any) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        found = []
        for number in range(count):
            found.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
            if request is not None:
                found[-1].sendall(request(number))
        yield found


def test_idle_connections_make_way(limited: Limited) -> None:
    with opened(limited.port, MANY, None):
        check(limited)
    check_after(limited)


def test_silent_streams_leave_room(limited: Limited) -> None:
    with limited.client(TOKEN) as client:
        assert client.post("/api/v1/runs", json={"agent": "gated", "run_id": "waits", "delay": 3600}).status_code == 201

    def request(number: int) -> bytes:
        return REQUEST.format(token=f"{TOKEN}-{number % 12}").encode()

    with opened(limited.port, MANY, request) as streams:
        codes = [each.recv(15)[9:12] for each in streams]
        assert set(codes) == {b"200", b"503"}
        check(limited)
    check_after(limited)


def check_after(served: Served) -> None:
    with served.client(TOKEN) as client:
        assert client.get("/api/v1/runs").status_code == 200
