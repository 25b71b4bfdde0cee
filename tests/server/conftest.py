"""Applications over a store of the test, clients that call them in this process, and real servers."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pytest

from agent_runtime_core.orchestrator import Orchestrator
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.turns import TurnManager
from tests.support.processes import PATIENCE, Command, until
from tests.support.runs import Script
from tests.support.warm import Warm

if TYPE_CHECKING:
    import httpx
    from fastapi import FastAPI

HAS_SERVER = all(map(find_spec, ("fastapi", "uvicorn", "websockets", "httpx")))
collect_ignore_glob = [] if HAS_SERVER else ["test_*.py"]

TOKEN = "sk-canary-token-of-the-tests"
BASE = "http://127.0.0.1:8000"


async def echo(ctx: Any) -> Any:
    return ctx.input


@pytest.fixture
def runner(tmp_path: Path) -> AgentRunner:
    """A runner on a SQLite file, with the agent "echo" whose output is its input."""
    registry = Registry()
    registry.register(Script(echo, "echo"))
    return AgentRunner.open(tmp_path / "agents.db", registry=registry)


@pytest.fixture
def orchestrator(runner: AgentRunner) -> Orchestrator:
    return Orchestrator(runner=runner)


@pytest.fixture
def turns(runner: AgentRunner) -> TurnManager:
    return TurnManager(runner)


@pytest.fixture
def make_app(runner: AgentRunner, orchestrator: Orchestrator, turns: TurnManager) -> Callable[..., FastAPI]:
    """`make_app(**arguments of create_app)`: an application with one token, `TOKEN`, which has all scopes."""
    from agent_runtime_core.server.access import Tokens
    from agent_runtime_core.server.app import create_app
    from agent_runtime_core.server.token_file import Token

    def make(**arguments: Any) -> FastAPI:
        tokens = Tokens([Token.of(TOKEN)], clock=runner.queue.clock)
        return create_app(runner, **{"orchestrator": orchestrator, "turns": turns, "authenticate": tokens, **arguments})

    return make


_documents: list[dict[str, Any]] = []


@pytest.fixture
def app(make_app: Callable[..., FastAPI]) -> FastAPI:
    """Such an application without more arguments. Its OpenAPI document, which takes longer to make than most tests, is
    made once for all of them."""
    made = make_app()
    make = made.openapi

    def openapi() -> dict[str, Any]:
        if not _documents:
            _documents.append(make())
        return _documents[0]

    made.openapi = openapi  # type: ignore[method-assign]
    return made


def client_of(app: Any, token: str | None = TOKEN, **options: Any) -> httpx.AsyncClient:
    """A client that calls the application in this process."""
    import httpx

    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url=BASE, headers=headers, **options)


@pytest.fixture
def client(app: FastAPI) -> httpx.AsyncClient:
    return client_of(app)


class LiveServer:
    """uvicorn in a thread, on a free port of the loopback interface; it ends with the block."""

    def __init__(self, app: Any, **options: Any) -> None:
        import uvicorn

        from agent_runtime_core.server.serving import config_of

        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        if not options and hasattr(getattr(app, "state", None), "server"):
            config = config_of(app)
        else:
            config = uvicorn.Config(app, log_config=None, lifespan="off", access_log=False, **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    def __enter__(self) -> Self:
        self._thread.start()
        until(lambda: self._server.started, "the server accepts connections")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(PATIENCE)
        self._socket.close()
        assert not self._thread.is_alive()


@functools.cache
def _imported() -> Warm:
    """A process with the imports of a server, which take it longer than its start; it ends with this process."""
    warm = Warm("agent_runtime_core.cli.serve")
    atexit.register(warm.__exit__, None, None, None)
    return warm


class Served(Command):
    """`agent-runtime serve` with these arguments on a free port; `ready` is the line that it prints then."""

    def __init__(self, *args: object) -> None:
        super().__init__("agent_runtime_core", "serve", "--port", "0", "--json", *args)
        self.ready: dict[str, Any] = {}

    def _started(self, module: str, *args: str, **environment: str) -> subprocess.Popen[bytes]:
        return _imported().fork(module, *args)

    def __enter__(self) -> Self:
        try:
            self.ready = json.loads(self.line())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return super().__enter__()

    @property
    def url(self) -> str:
        url: str = self.ready["url"]
        return url

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, token: str | None = TOKEN) -> httpx.Client:
        """A client of this process; without a token one that is not authenticated."""
        import httpx

        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """`serve(*arguments)`: a process that serves `agents.db` of the test with `TOKEN`, until the end of the test.

    Arguments that begin with `--token` or are `--no-auth` replace the token; `--url` or a target replaces the store.
    """
    with contextlib.ExitStack() as processes:

        def start(*args: object) -> Served:
            given = [str(each) for each in args]
            auth = [] if any(each.startswith(("--token", "--no-auth")) for each in given) else ["--token", TOKEN]
            own = any(each in ("--url", "--db") or each.startswith("tests.") for each in given)
            store = [] if own else ["--db", str(tmp_path / "agents.db")]
            return processes.enter_context(Served(*store, *auth, *given))

        yield start


@pytest.fixture
def live_server() -> Iterator[Callable[..., LiveServer]]:
    """`live_server(app)`: a running server as `serve` starts it, until the end of the test.

    With options they are uvicorn's, and the server has its defaults: as if the application were mounted elsewhere.
    """
    with contextlib.ExitStack() as servers:
        yield lambda app, **options: servers.enter_context(LiveServer(app, **options))
