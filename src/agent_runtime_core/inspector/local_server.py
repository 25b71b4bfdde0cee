"""The server of `agent-runtime inspect`: the page and the data of a store, for this machine only, without FastAPI.

It answers GET and HEAD. Each connection gets a thread, which makes the event loop of the runner read the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import socketserver
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence, Set
from concurrent.futures import CancelledError, Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Final, NamedTuple, Self
from urllib.parse import parse_qsl, unquote

from .._core.context_vars import start_helper
from .._core.ids import new_ulid
from .._core.log import log
from .._core.validation import redacted
from .._views.events import Chosen, events_page, sequence_of, type_filter
from .._views.overview import health_view, store_problem
from .._views.page import HEADERS, check_sizes, foreign_origin, host_name, is_loopback, page_file
from .._views.plain import json_bytes
from .._views.problems import MEDIA_TYPE, Problem, kebab, problem_of, report
from .._views.queries import checked
from .._views.read_routes import OF_EVENTS, OF_RUNS, OF_STORES, WAIT, Answer, Asked, Route, known_parameters
from ..errors import InvalidArgument, StorageError
from ..queue.records import LIVE, RunRow
from ..runner.run_client import RunClient
from ..runner.settings import RunInfo

HOST: Final = "127.0.0.1"
MAX_URL_BYTES: Final = 8 * 1024
MAX_HEADER_BYTES: Final = 32 * 1024
IDLE_SECONDS: Final = 60  # until a connection without requests is closed
_POLL_SECONDS: Final = 0.1  # until the listening thread notices that the server stops
_API: Final = ["api", "v1"]


class _Person(NamedTuple):
    """Who inspects a store: nothing is hidden from this person, who may select a tenant."""

    tenant: str | None
    scopes: Set[str] = frozenset({"read"})
    may: Callable[[str, RunInfo], bool] | None = None
    limited: bool = False


class _Asked(Asked):
    """A request of the page. Nobody reads its connection while the request is answered."""

    def __init__(self, runner: RunClient, ids: Sequence[str], query: Mapping[str, Any], client: socket.socket) -> None:
        super().__init__(runner, _Person(query["tenant"]), ids, query)
        self.client = client

    def about(self) -> dict[str, Any]:
        """Return that the page follows a run with requests that wait."""
        return {"live": "poll"}

    async def ended(self, row: RunRow, seconds: float) -> RunRow:
        """Return the run when it has finished, when the time is over, or when the client is gone."""
        if row.status not in LIVE or not seconds:
            return row
        await _until(self.client, self.runner.watcher.until_ended(row.run_id, seconds))
        return await self.row()


async def _events(asked: _Asked) -> Answer:
    """Return a page of events. With `wait` it holds at least one event, unless the run has finished or time is over."""
    position = sequence_of("after", asked.query["after"])
    start = 0 if position is None else position + 1
    chosen = type_filter(asked.query["types"])
    row = await asked.row()
    if asked.query["wait"]:
        await _until(asked.client, _next_event(asked.runner, row.run_id, start, chosen, asked.query["wait"]))
    return Answer(await events_page(asked.runner.event_bus, row.run_id, start, chosen))


async def _next_event(runner: RunClient, run_id: str, start: int, chosen: Chosen | None, seconds: float) -> None:
    """Return when the run contains such an event from `start` on, when it has finished, or when the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds), contextlib.aclosing(runner.event_pages(run_id, start)) as pages:
            async for page in pages:
                if chosen is None or any(map(chosen, page)):
                    return


async def _until(client: socket.socket, work: Coroutine[Any, Any, object]) -> None:
    """Wait for something, or until the client has closed its connection."""
    with _leaving(client) as gone:
        waiting = start_helper(work)
        others: list[Awaitable[Any]] = [waiting, gone]
        try:
            await asyncio.wait(map(asyncio.ensure_future, others), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result()
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


@contextlib.contextmanager
def _leaving(client: socket.socket) -> Iterator[asyncio.Future[None]]:
    """Yield a future that is done when the client closes its connection, or sends the next request already."""
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()
    loop.add_reader(client, lambda: None if gone.done() else gone.set_result(None))
    try:
        yield gone
    finally:
        loop.remove_reader(client)


async def _live(asked: Asked) -> Answer:
    return Answer({"status": "ok"})


async def _ready(asked: Asked) -> Answer:
    failed = bool(await store_problem(asked.runner))
    return Answer({"status": "unavailable"}, 503, _LATER) if failed else Answer({"status": "ok"})


async def _health(asked: Asked) -> Answer:
    ready, problem = await _ready(asked), await store_problem(asked.runner)
    return ready._replace(value={**ready.value, **health_view(asked.runner, [problem] if problem else [])})


_LATER: Final = {"Retry-After": "5"}
ROUTES: Final = (
    *OF_RUNS,
    *OF_STORES,
    Route("runs/{id}/events", _events, parameters={**OF_EVENTS, "wait": WAIT}),
    Route("health", _health),
    Route("health/live", _live),
    Route("health/ready", _ready),
)


class LocalServer:
    """Serves the page and the data of a store on the loopback interface, inside an `async with` block.

    Args:
        runner: The runner on the store, opened in the event loop of the block. It is not closed.
        port: The port; 0 chooses a free port.
    """

    def __init__(self, runner: RunClient, port: int = 0) -> None:
        self._runner = runner
        self._port = port
        self._pending: set[Future[Answer]] = set()
        self._stopping = False

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._port

    @property
    def url(self) -> str:
        """The URL of the page."""
        return f"http://{HOST}:{self._port}/"

    async def __aenter__(self) -> Self:
        """Start to listen.

        Raises:
            InvalidArgument: The port cannot be used.
        """
        self._loop = asyncio.get_running_loop()
        try:
            self._http = _Listener(self, self._port)
        except OSError as error:
            why = error.strerror or "it is not available"
            raise InvalidArgument(f"port {self._port} of {HOST} cannot be used: {why}. Choose another one") from None
        self._port = self._http.server_address[1]
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(_POLL_SECONDS,), name="agent-runtime-inspect", daemon=True
        )
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop. Requests that wait for an event get 503."""
        self._stopping = True
        for each in tuple(self._pending):
            each.cancel()
        await asyncio.to_thread(self._http.shutdown)
        self._http.server_close()

    def read(self, parts: list[str], query: str, connection: socket.socket) -> Answer:
        """Return the response for a path below `/api/v1/`, in the thread of a connection.

        Raises:
            Problem: There is no such path, a parameter is invalid, or the server stops.
            AgentRuntimeError: The run is unknown, or the store does not answer.
        """
        for route in ROUTES:
            ids = route.ids_in(parts)
            if ids is not None:
                break
        else:
            raise Problem.of(404, "No endpoint has this path.")
        pairs = parse_qsl(query, keep_blank_values=True)
        asked = _Asked(self._runner, ids, checked(pairs, known_parameters(route)), connection)
        if self._stopping:
            raise _stopped()
        future: Future[Answer] = asyncio.run_coroutine_threadsafe(route.read(asked), self._loop)
        self._pending.add(future)
        try:
            return future.result()
        except CancelledError:
            raise _stopped() from None
        finally:
            self._pending.discard(future)

    def new_request_id(self) -> str:
        """Return an id for a request."""
        return new_ulid(self._runner.queue.clock)


def _stopped() -> Problem:
    return Problem.of(503, "The server is shutting down.", headers=_LATER)


def _unreadable(error: StorageError) -> Problem:
    """Return why the store cannot be read. `serve` hides it from its callers, but who inspects a file looks for it."""
    kind = kebab(type(error).__name__)
    return Problem(500, "The store cannot be read", redacted(str(error)), type=f"urn:agent-runtime:{kind}")


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, server: LocalServer, port: int) -> None:
        self.local = server
        super().__init__((HOST, port), _Connection)

    def server_bind(self) -> None:
        # Without the look-up of the host's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # those are of clients that are gone
            log.error("a connection failed with %s", type(error).__name__)


class _Connection(BaseHTTPRequestHandler):
    """One connection of a client, in a thread."""

    server: _Listener
    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    disable_nagle_algorithm = True
    wbufsize = -1  # head and body in one packet

    def do_GET(self) -> None:
        """Answer a request."""
        request_id = self.server.local.new_request_id()
        try:
            self._check()
            self._answer(request_id)
        except OSError:
            raise  # the client is gone
        except Exception as error:  # noqa: BLE001 - every failure gets a response without a traceback
            problem = problem_of(error)
            if problem.status == 500:
                if isinstance(error, StorageError):
                    problem = _unreadable(error)
                report(error, request_id)
            self._send_problem(problem, request_id)

    do_HEAD = do_GET

    def _check(self) -> None:
        """Raise Problem 414, 431, 421 or 403 for a request that is too large, or that another site has caused."""
        lengths = self.headers.get_all("Content-Length", [])
        if any(each != "0" for each in lengths) or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # a body would be read as the next request
        size = sum(len(name) + len(value) + 4 for name, value in self.headers.items())
        check_sizes(len(self.path), size, MAX_URL_BYTES, MAX_HEADER_BYTES)
        hosts = self.headers.get_all("Host", [])
        name = host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None or not is_loopback(name):
            raise Problem.of(421, "The Host header must name this machine, such as 127.0.0.1.")
        origin = self.headers.get("Origin")
        if origin and origin.partition("://")[2] != hosts[0]:
            raise foreign_origin()

    def _answer(self, request_id: str) -> None:
        path, _, query = self.path.partition("?")
        first, *parts = map(unquote, path.split("/"))  # first split: an id may contain a slash
        if first == "" and parts[:2] == _API:
            answer = self.server.local.read(parts[2:], query, self.connection)
            headers = {"Content-Type": "application/json", "Cache-Control": "no-store", **answer.headers}
            body = answer.value if isinstance(answer.value, bytes) else json_bytes(answer.value)
            self._send(answer.status, body, request_id, headers)
        elif first == "" and parts == [""]:
            self._send_file("index.html", request_id)
        elif first == "" and parts[:1] == ["static"]:
            self._send_file("/".join(parts[1:]), request_id)
        else:
            raise Problem.of(404, "No endpoint has this path.")

    def _send_file(self, name: str, request_id: str) -> None:
        status, content, headers = page_file(name, self.headers.get("If-None-Match"))
        self._send(status, content, request_id, headers)

    def _send_problem(self, problem: Problem, request_id: str) -> None:
        headers = {"Content-Type": MEDIA_TYPE, "Cache-Control": "no-store", **problem.headers}
        self._send(problem.status, json_bytes(problem.body(request_id)), request_id, headers)

    def _send(self, status: int, body: bytes | None, request_id: str, headers: Mapping[str, str]) -> None:
        self.send_response_only(status)
        for name, value in {**HEADERS, "X-Request-Id": request_id, **headers}.items():
            self.send_header(name, value)
        if body is not None:
            self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if body is not None and self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that the base class rejects: 501 is its status for a method without a function."""
        self.close_connection = True
        self.request_version = self.protocol_version  # it sends no status to a client of HTTP/0.9
        problem = Problem.of(405, headers={"Allow": "GET, HEAD"}) if code == 501 else Problem.of(code)
        self._send_problem(problem, self.server.local.new_request_id())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: all requests come from one person."""
