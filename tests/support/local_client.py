"""A local server in a thread, and a client that sends it exactly what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Coroutine, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from agent_runtime_core import AgentRunner
from agent_runtime_core.inspector.local_server import LocalServer
from agent_runtime_core.registry import Registry
from tests.support.processes import PATIENCE

T = TypeVar("T")

#: A path for each endpoint, on a store of `tests.support.read_only.write_store`.
PATHS = (
    "about", "runs", "runs?state=failed&state=retrying&limit=1", "runs/a_run", "runs/a_run/result", "runs/a_run/steps",
    "runs/a_run/timeline", "runs/a_run/timeline?newest_first=true", "runs/a_run/journal", "runs/a_run/messages",
    "runs/a_run/plan", "runs/a_run/compare/a_failure", "runs/a_run/events", "approvals", "queue", "agents", "usage",
    "usage?by=model", "health", "health/live", "health/ready",
)  # fmt: skip


class Response(NamedTuple):
    status: int
    headers: dict[str, str]  # with names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def problem(self) -> str:
        assert self.headers["content-type"] == "application/problem+json"
        found = self.json
        assert found["status"] == self.status
        assert found["request_id"] == self.headers["x-request-id"]
        kind: str = found["type"]
        return kind.removeprefix("urn:agent-runtime:")


class LocalClient:
    """Sends requests on one connection, which it opens again if the server has closed it."""

    def __init__(self, port: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)

    def send(self, target: str, method: str = "GET", headers: dict[str, str] | None = None) -> Response:
        self._connection.putrequest(method, target, skip_host=headers is not None, skip_accept_encoding=True)
        for name, value in (headers or {}).items():
            self._connection.putheader(name, value)
        self._connection.endheaders()
        response = self._connection.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return Response(response.status, found, response.read())

    def data(self, path: str) -> Response:
        return self.send(f"/api/v1/{path}")

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def inspecting(store: Path | str, port: int = 0) -> Iterator[LocalServer]:
    """Serve a store, which is opened read-only in the event loop of another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE)

    runner = AgentRunner.open(store, registry=Registry(), read_only=True)
    try:
        server = run(LocalServer(runner, port).__aenter__())
        try:
            yield server
        finally:
            run(server.__aexit__(None, None, None))
    finally:
        run(runner.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()
