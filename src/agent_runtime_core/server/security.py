"""The checks of every request: host, origin, sizes, time and JSON; its id and its line in the access log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
from typing import Any, Final, cast
from urllib.parse import unquote

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from .._core.ids import new_ulid
from .._views.page import check_sizes, foreign_origin, host_name, is_loopback
from .._views.problems import report
from .access import CALLER, SAFE_METHODS, SLASH, is_own
from .errors import REQUEST_ID, Problem, problem_of, response_of
from .limits import IS_SPARE, Limits, too_many_connections
from .settings import ServerSettings
from .state import ServerState

access_log: logging.Logger = logging.getLogger("agent_runtime_core.access")

PREFIX: Final = "/api/v1"
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BRACKETS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
#: Headers of every response that does not have them: no cache stores data, and no browser guesses its type.
_OF_DATA: Final = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
SEND: Final = "agent_runtime.send"  # in the ASGI scope: `send` without the middleware of this application
HEAD: Final = "agent_runtime.head"  # in the ASGI scope of a HEAD request, which has the method GET there
UNREAD: Final = "agent_runtime.unread"  # in the ASGI scope: whether there is a body that was not read to its end


def route_path(scope: Scope) -> str:
    """Return the path below the place where the application is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


class Envelope:
    """Gives each request an id, checks its host and size, writes one line of the access log, and answers failures."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._clock = state.runner.queue.clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        started = self._clock.boot()
        request_id = scope[REQUEST_ID] = new_ulid(self._clock)
        if scope.get("method") == "HEAD":
            scope, send = as_get(scope, send)
        scope[SEND] = send
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
                self._count(scope, status, started)
                headers = message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                named = {name for name, _ in headers}
                headers += [each for each in _OF_DATA if each[0] not in named]
                # A client could send the rest of the body without end.
                if scope[UNREAD] if UNREAD in scope else has_body(scope):
                    headers.append((b"connection", b"close"))
            elif message["type"] == "websocket.accept":
                status = 101
                self._count(scope, status, started)
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id.encode())]}
            await send(message)

        bounded = BoundedSend(self._state.limits, scope, receive, send_with_id)
        try:
            check_head(scope, self._state.settings)
            if scope.get("state", {}).get(IS_SPARE) and not route_path(scope).startswith(f"{PREFIX}/health"):
                scope[UNREAD] = True  # the connection ends with the answer
                raise too_many_connections()
            await self._app(scope, receive, bounded)
        except Exception as error:  # noqa: BLE001 - every failure gets a response without a traceback
            problem = problem_of(error)
            if problem.status == 500:
                report(error, request_id)
            if status:  # the response has begun: only the end of the connection can tell the client
                raise Aborted(f"request {request_id} failed after its response had begun") from None
            await answer(problem, scope, receive, send_with_id)
        finally:
            bounded.close()
            if access_log.isEnabledFor(logging.INFO) and not is_static(scope):
                caller = scope.get(CALLER)
                access_log.info(
                    "%s %s %d %.1f ms request %s caller %s", method_of(scope), template_of(scope), status,
                    (self._clock.boot() - started) * 1000, request_id, "-" if caller is None else caller.name,
                )  # fmt: skip

    def _count(self, scope: Scope, status: int, started: float) -> None:
        """Count a response that begins: the time that a stream stays open is not the duration of its request."""
        if self._state.metrics is not None and not is_static(scope):
            seconds = self._clock.boot() - started
            self._state.metrics.http_response(method_of(scope), template_of(scope), status, seconds)


class BoundedSend:
    """Sends one answer, or 429 in its place if the caller has not read too many bytes of earlier answers.

    The check before a route sees the request is not enough: many requests may come before the first answer.
    """

    def __init__(self, limits: Limits, scope: Scope, receive: Receive, send: Send) -> None:
        self._limits, self._scope, self._receive, self._send = limits, scope, receive, send
        self._counted = contextlib.ExitStack()
        self._replaced = False

    async def __call__(self, message: Message) -> None:
        """Send a message."""
        if message["type"] == "http.response.start" and CALLER in self._scope:
            await self._start(message, self._scope[CALLER].name)
        elif not self._replaced:
            await self._send(message)

    def close(self) -> None:
        """Count no more bytes of the answer, except for the bytes that the transport has not sent."""
        self._counted.close()

    async def _start(self, message: Message, caller: str) -> None:
        size = next((int(value) for name, value in message["headers"] if name == b"content-length"), 0)
        # In uvicorn, `receive` is a method of what has the transport.
        transport = getattr(getattr(self._receive, "__self__", None), "transport", None)
        if not size or not hasattr(transport, "get_write_buffer_size"):  # a stream, or another server
            await self._send(message)
            return
        problem = self._limits.unread(caller) if self._scope["method"] in SAFE_METHODS else None
        if problem is not None:  # nothing else can tell the client, as the route has answered
            self._replaced = True
            await response_of(problem, self._scope[REQUEST_ID])(self._scope, self._receive, self._send)
            return
        self._counted.enter_context(self._limits.answer(caller, cast("asyncio.WriteTransport", transport), size))
        await self._send(message)


def is_static(scope: Scope) -> bool:
    """Whether a file of the page is requested. A browser asks for dozens at the same time."""
    return route_path(scope).startswith("/static/")


def as_get(scope: Scope, send: Send) -> tuple[Scope, Send]:
    """Return a HEAD request as the GET request whose headers it gets, and a `send` that omits the body."""

    async def send_head(message: Message) -> None:
        await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

    # A copy, as the server reads the method of its own scope to frame the response.
    return {**scope, "method": "GET", HEAD: True}, send_head


def has_body(scope: Scope) -> bool:
    """Whether a request announces a body."""
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
        if scope["type"] == "http"
    )


class Aborted(RuntimeError):
    """Ends a connection whose response cannot be completed."""


async def answer(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a problem as the response; a socket without that extension is closed."""
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 4403})
        return
    await response_of(problem, scope[REQUEST_ID])(scope, receive, send)


def method_of(scope: Scope) -> str:
    """Return the method; "-" for a method that does not exist."""
    method = "HEAD" if HEAD in scope else scope.get("method", "WS")
    return method if method in _METHODS or method == "WS" else "-"


def template_of(scope: Scope) -> str:
    """Return the route's path with its parameters as names, never the path that was requested."""
    template = getattr(scope.get("route"), "path", None)
    if template is None:
        return "-"
    return template if not route_path(scope).startswith(PREFIX) else f"{PREFIX}{template.removeprefix(PREFIX)}"


def check_head(scope: Scope, settings: ServerSettings) -> None:
    """Raise Problem 414, 431 or 421 for the URL, the headers or the host of a request."""
    url = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    check_sizes(url, size, settings.max_url_bytes, settings.max_header_bytes)
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if len(hosts) != 1 or not (is_trusted(hosts[0].decode("latin-1"), settings) or is_test_client(scope, hosts[0])):
        raise Problem.of(
            421,
            "The Host header must name this server. Add the name to trusted_hosts of ServerSettings, or start "
            "agent-runtime serve with --trusted-host NAME.",
        )


def is_test_client(scope: Scope, host: bytes) -> bool:
    """Whether Starlette's `TestClient` calls the application. No header changes the address of a real server."""
    server = scope.get("server")
    return host == b"testserver" and server is not None and server[0] == "testserver"


def is_trusted(host: str, settings: ServerSettings) -> bool:
    """Whether a `Host` header is a loopback address or a trusted name, with any port."""
    name = host_name(host)
    return name is not None and (
        is_loopback(name) or any(name == each.strip("[]").lower() for each in settings.trusted_hosts)
    )


class RequestChecks:
    """Checks the origin, the caller and the body of a request before a route sees it."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                receive = await self._checked(scope, receive)
            except Problem as problem:
                await answer(problem, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _checked(self, scope: Scope, receive: Receive) -> Receive:
        socket = scope["type"] == "websocket"
        connection = WebSocket(scope, receive, _unused) if socket else Request(scope, receive)
        origin = connection.headers.get("origin")
        if origin and origin not in self._state.settings.cors and not is_own(connection, origin, scheme=False):
            raise foreign_origin()
        keep_slashes(scope)
        path = route_path(scope)
        if self._state.draining.is_set() and not path.startswith(f"{PREFIX}/health"):
            raise Problem.of(503, "The server is shutting down.", headers={"Retry-After": "5"})
        if not has_body(scope):
            return receive
        self._check_length(connection.headers.get("content-length", "0"))
        if path.startswith(PREFIX) and path != f"{PREFIX}/session":
            # An unknown client must not fill the memory.
            await self._state.access.caller(connection)
        body = await self._read(receive)
        scope[UNREAD] = False
        if not body:  # a route that reads it must not wait for more
            return _replayed(b"", receive)
        check_media_type(connection.headers.get("content-type", ""))
        check_json(body, self._state.settings.max_json_depth)
        return _replayed(body, receive)

    def _check_length(self, length: str) -> None:
        if not length.isdecimal() or not length.isascii():
            raise Problem.of(400, "Content-Length must be a number.")
        if len(length) > 15 or int(length) > self._state.settings.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> Problem:
        return Problem.of(413, f"The body must have at most {self._state.settings.max_body_bytes} bytes.")

    async def _read(self, receive: Receive) -> bytes:
        parts, size, seconds = [], 0, self._state.settings.request_seconds
        guard = asyncio.timeout(seconds)
        try:
            async with guard:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Problem.of(400, "The request was not sent completely.")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._state.settings.max_body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            if not guard.expired():
                raise
            raise Problem.of(408, f"The request must be sent within {seconds:g} s.") from None


async def _unused(message: Message) -> None:
    raise AssertionError("nothing is sent before the checks")


def _replayed(body: bytes, receive: Receive) -> Receive:
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def replay() -> Message:
        nonlocal first
        if first is None:
            return await receive()
        message, first = first, None
        return message

    return replay


def keep_slashes(scope: Scope) -> None:
    """Decode `%2F` within a segment to `SLASH`, so that an id with a slash stays one segment."""
    raw = scope.get("raw_path") or b""
    if SLASH in scope["path"]:
        raise Problem.of(404, "No such path.")
    if b"%2f" in raw.lower():
        path = raw.partition(b"?")[0].decode("ascii", "replace")
        scope["path"] = "/".join(unquote(each).replace("/", SLASH) for each in path.split("/"))


def check_media_type(value: str) -> None:
    """Raise Problem 415 unless a body is JSON."""
    kind = value.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise Problem.of(415, "The body must be JSON, with Content-Type: application/json.")


def check_json(body: bytes, depth: int) -> None:
    """Raise Problem 400 or 422 unless a body is JSON in UTF-8 that can be stored."""
    if body.count(b"[") + body.count(b"{") > depth and _depth_of(body) > depth:
        raise _invalid(f"The JSON must not be nested deeper than {depth} levels.")
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse, parse_float=_finite)
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise _invalid("The JSON must not contain a lone surrogate.") from None
    except UnicodeDecodeError:
        raise Problem.of(400, "The body must be UTF-8.", type="urn:agent-runtime:not-json") from None
    except ValueError:
        raise Problem.of(400, "The body must be JSON.", type="urn:agent-runtime:not-json") from None


def _invalid(detail: str) -> Problem:
    return Problem.of(422, detail, type="urn:agent-runtime:invalid-argument")


def _depth_of(body: bytes) -> int:
    deepest = now = 0
    for found in _BRACKETS.finditer(body):
        if found[0] in (b"[", b"{"):
            now += 1
            deepest = max(deepest, now)
        elif found[0] in (b"]", b"}"):
            now -= 1
    return deepest


def _refuse(text: str) -> Any:
    raise ValueError(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number
