"""Requests that no HTTP client sends, to real servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.server.settings import ServerSettings
from tests.server.conftest import TOKEN, LiveServer, Served
from tests.support.processes import PATIENCE

HOST = "Host: 127.0.0.1"
AUTH = f"Authorization: Bearer {TOKEN}"
JSON = "Content-Type: application/json"
UPGRADE = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
           "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==")  # fmt: skip


class Response(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes
    ended: bool  # the server closed the connection after it

    @property
    def problem(self) -> str:
        assert self.headers["content-type"] == "application/problem+json"
        kind: str = json.loads(self.body)["type"]
        return kind.removeprefix("urn:agent-runtime:")


class Connection:
    """A TCP connection that sends any bytes, and reads responses."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self._file = self._socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def request(self, *lines: str, body: bytes = b"") -> Response:
        self.send("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        return self.response()

    def response(self) -> Response:
        line = self._file.readline()
        assert line.startswith(b"HTTP/1.1 "), line
        headers: dict[str, str] = {}
        while (header := self._file.readline().decode("latin-1").rstrip("\r\n")) != "":
            name, _, value = header.partition(":")
            headers[name.lower()] = value.strip()
        if "content-length" not in headers and "transfer-encoding" not in headers:
            return Response(int(line.split()[1]), headers, self._file.read(), True)
        body = self._file.read(int(headers.get("content-length", 0)))
        ended = headers.get("connection") == "close" and self.ends()
        return Response(int(line.split()[1]), headers, body, ended)

    def headers(self) -> bytes:
        """The head of a response that has no body."""
        lines = []
        while (line := self._file.readline()).strip():
            lines.append(line)
        return b"".join(lines)

    def frame(self) -> bytes:
        """A short text frame of a WebSocket server."""
        kind, length = self._file.read(2)
        assert kind == 0x81
        return self._file.read(int.from_bytes(self._file.read(2)) if length == 126 else length)

    def ends(self) -> bool:
        """Wait until the server closes the connection; False if it sends something else first."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self._file.close()
        self._socket.close()


Connect = Callable[[int], Connection]


@pytest.fixture
def connect() -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def connected(port: int) -> Connection:
            connection = Connection(port)
            stack.callback(connection.close)
            return connection

        yield connected


@pytest.fixture(params=["httptools", "h11"])
def live(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, live_server: Callable[..., LiveServer]
) -> Callable[..., LiveServer]:
    """`live_server` with each of the protocols that uvicorn has: httptools is optional."""
    protocol: type
    if request.param == "httptools":
        pytest.importorskip("httptools")
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as protocol
    else:
        from uvicorn.protocols.http.h11_impl import H11Protocol as protocol
    monkeypatch.setattr("agent_runtime_core.server.connections.AutoHTTPProtocol", protocol)
    return live_server


@pytest.fixture
def port(app: Any, live: Callable[..., LiveServer]) -> int:
    return live(app).port


def get(connection: Connection, path: str = "/openapi.json", *headers: str) -> Response:
    return connection.request(f"GET {path} HTTP/1.1", *(headers or (HOST, AUTH)))


NOT_TRUSTED: list[tuple[tuple[str, ...], int, str]] = [
    ((AUTH, "Host: evil.example"), 421, "wrong-host"),
    ((AUTH, HOST, "Origin: https://evil.example"), 403, "foreign-origin"),
    ((HOST,), 401, "not-authenticated"),
    ((HOST, "Authorization: Bearer"), 401, "not-authenticated"),
    ((HOST, "Authorization: Bearer \xff\xfe"), 401, "not-authenticated"),
    ((HOST, f"{AUTH}0"), 401, "not-authenticated"),
    ((HOST, "Cookie: agent_runtime_session_8000=default:9999999999:0:0"), 401, "not-authenticated"),
    ((AUTH, "Host: evil.example", *UPGRADE), 421, "wrong-host"),
    ((AUTH, HOST, "Origin: https://evil.example", *UPGRADE), 403, "foreign-origin"),
]

NOT_A_REQUEST = [
    b"GET /openapi.json HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
    b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: b\rX-B: c\r\n\r\n",
    b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: b\x00c\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /a b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"POST /x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    b"\x16\x03\x01\x00\xa5\x01",
    b"\x00" * 1000,
]


def post(connection: Connection, *headers: str, body: bytes = b"", path: str = "/api/v1/nothing") -> Response:
    return connection.request(f"POST {path} HTTP/1.1", HOST, AUTH, JSON, *headers, body=body)


def test_a_real_process_refuses_all_attacks_and_goes_on(serve: Callable[..., Served], connect: Connect) -> None:
    served = serve()
    for headers, status, kind in NOT_TRUSTED:
        response = get(connect(served.port), "/openapi.json", *headers)
        assert (response.status, response.problem) == (status, kind), headers
    for text in NOT_A_REQUEST:
        bad = connect(served.port)
        bad.send(text)
        response = bad.response()
        assert (response.status, response.problem, response.ended) == (400, "bad-request", True), text
        assert response.headers["x-request-id"] == json.loads(response.body)["request_id"]
    response = post(connect(served.port), f"Content-Length: {2 << 30}", body=b"{")
    assert (response.status, response.problem, response.ended) == (413, "body-too-large", True)
    response = post(connect(served.port), "Content-Length: 99999999999999999999")
    assert response.status in (400, 413)
    assert response.ended
    deep = b"[" * 10_000
    response = post(connect(served.port), f"Content-Length: {len(deep)}", body=deep)
    assert (response.status, response.problem) == (422, "invalid-argument")
    response = post(connect(served.port), "Content-Length: 4", body=b'"\xff"\n')
    assert (response.status, response.problem) == (400, "not-json")
    assert get(connect(served.port)).status == 200


def every_path(app: Any) -> list[tuple[str, str]]:
    """The method and a path of each route, those that are in no document included."""
    found = [(method.upper(), path) for path, each in app.openapi()["paths"].items() for method in each]
    found += [(method, path) for path in ("/", "/static/main.js", "/openapi.json") for method in ("GET", "HEAD")]
    return [*((method, re.sub(r"\{\w+\}", "x", path)) for method, path in found), ("GET", "/api/v1/nothing")]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "127.0.0.1:{port}@x"]
)
def test_a_page_of_another_name_gets_nothing_of_any_route(
    app: Any, live_server: Callable[..., LiveServer], connect: Connect, host: str
) -> None:
    """What a browser sends after DNS rebinding: the name of the page as the host, and as the origin if it sends one."""
    port = live_server(app).port
    host = host.format(port=port)
    paths = every_path(app)
    assert len(paths) > 30
    for method, path in paths:
        for more in ((), (f"Origin: http://{host}", "Sec-Fetch-Site: same-origin")):
            connection = connect(port)
            # Without a body, a response to HEAD looks like one that does not end.
            response = connection.request(
                f"{method} {path} HTTP/1.1", f"Host: {host}", AUTH, "Connection: close", *more
            )
            assert response.status == 421, (method, path)
            assert response.headers["content-type"] == "application/problem+json"
            assert "set-cookie" not in response.headers
            connection.close()
    for origin in ((), (f"Origin: http://{host}",)):
        lines = (f"Host: {host}", f"Sec-WebSocket-Protocol: bearer.{TOKEN}", *UPGRADE)
        response = get(connect(port), "/api/v1/socket", *lines, *origin)
        assert (response.status, response.problem) == (421, "wrong-host")


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:1", "http://localhost:{port}", "null"])
def test_a_page_of_another_origin_opens_no_socket(port: int, connect: Connect, origin: str) -> None:
    lines = (f"Host: 127.0.0.1:{port}", f"Sec-WebSocket-Protocol: bearer.{TOKEN}", *UPGRADE)
    response = get(connect(port), "/api/v1/socket", *lines, f"Origin: {origin.format(port=port)}")
    assert (response.status, response.problem) == (403, "foreign-origin")
    own = connect(port)
    own.send("\r\n".join(["GET /api/v1/socket HTTP/1.1", *lines, f"Origin: http://127.0.0.1:{port}", "", ""]).encode())
    assert own.headers().startswith(b"HTTP/1.1 101 ")


@pytest.mark.parametrize("hosts", [(), (HOST, "Host: evil.example")], ids=["none", "two"])
def test_a_request_needs_one_host(port: int, connect: Connect, hosts: tuple[str, ...]) -> None:
    response = get(connect(port), "/openapi.json", AUTH, *hosts)
    assert response.problem in ("wrong-host", "bad-request")  # h11 says 400


def test_an_endless_chunked_body_ends_at_the_limit(port: int, connect: Connect) -> None:
    connection = connect(port)
    connection.send(
        "\r\n".join(["POST /api/v1/nothing HTTP/1.1", HOST, AUTH, JSON, "Transfer-Encoding: chunked", "", ""]).encode()
    )
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with contextlib.suppress(ConnectionError):  # it may be closed while the rest is on its way
        for _ in range(64):
            connection.send(chunk)
    response = connection.response()
    assert (response.status, response.problem, response.ended) == (413, "body-too-large", True)


CHUNKED = ("Transfer-Encoding: chunked", JSON, AUTH)


@pytest.mark.parametrize("before", [b"", b"5\r\n{}   \r\n"], ids=["first", "second"])
@pytest.mark.parametrize(
    "chunk",
    [b"zz\r\n", b"-1\r\n{}", b"\r\n{}\r\n", b"2\r\n{}{}{}", b"f" * 30 + b"\r\n", b"0x2\r\n{}\r\n", b"2\x00\r\n{}\r\n"],
)
@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
def test_a_malformed_chunk_is_answered(port: int, connect: Connect, before: bytes, chunk: bytes, apart: bool) -> None:
    connection = connect(port)
    lines = ("POST /api/v1/runs HTTP/1.1", HOST, *CHUNKED, *(["Expect: 100-continue"] if apart else []))
    head = "\r\n".join([*lines, "", ""]).encode()
    connection.send(head if apart else head + before + chunk)
    if apart:  # the server has read the head when it asks for the body
        assert connection.headers().startswith(b"HTTP/1.1 100 ")
        connection.send(before + chunk)
    response = connection.response()
    assert (response.status, response.problem, response.ended) == (400, "bad-request", True)
    assert get(connect(port)).status == 200


@pytest.mark.parametrize("path", ["/api/v1/runs/r/events", "/api/v1/runs", "/", "/api/v1/runs/unknown"])
def test_a_client_of_http_1_0_gets_no_chunks(
    make_app: Callable[..., Any], runner: AgentRunner, live: Callable[..., LiveServer], connect: Connect, path: str
) -> None:
    asyncio.run(with_a_finished_run(runner))
    connection = connect(live(make_app()).port)
    response = connection.request(f"GET {path} HTTP/1.0", HOST, AUTH, "Connection: keep-alive")
    assert "transfer-encoding" not in response.headers
    assert response.headers["connection"] == "close"
    assert response.ended
    if path.endswith("events"):
        assert response.body.startswith(b"retry: 1000\n\nid: 0\n")
        assert response.body.endswith(b'data: {"type":"end","state":"cancelled"}\n\n')


async def with_a_finished_run(runner: AgentRunner) -> None:
    async with AgentRunner.open(runner.queue.commits.path, registry=Registry()) as other:  # type: ignore[attr-defined]
        await other.submit("echo", {"n": "x" * 100_000}, run_id="r")
        await other.cancel("r")


def test_an_endless_body_of_an_unknown_client_is_not_read(port: int, connect: Connect) -> None:
    response = connect(port).request("POST /api/v1/nothing HTTP/1.1", HOST, JSON, "Transfer-Encoding: chunked")
    assert (response.status, response.ended) == (401, True)


@pytest.mark.parametrize("name", ["a%0d%0aX-Evil: 1", "a%0aX-Evil:1", "%E2%80%A8", "a%00b", "..%2f..%2fetc%2fpasswd"])
def test_a_name_in_the_path_cannot_add_a_header(port: int, connect: Connect, name: str) -> None:
    path = f"/api/v1/runs/{name.replace(' ', '%20')}"
    response = get(connect(port), path)
    assert response.status == 404
    assert "x-evil" not in response.headers
    assert re.fullmatch(r"[0-9A-Z]{26}", response.headers["x-request-id"])
    assert b"evil" not in response.body.lower()
    assert b"passwd" not in response.body


@pytest.mark.parametrize("lines", [1, 5000])
def test_headers_are_limited_before_they_are_complete(port: int, connect: Connect, lines: int) -> None:
    connection = connect(port)
    connection.send(f"GET /openapi.json HTTP/1.1\r\n{HOST}\r\n".encode())
    line = b"X-A: " + b"b" * (50_000 // lines) + b"\r\n"
    with contextlib.suppress(ConnectionError):
        for _ in range(lines):
            connection.send(line)
    response = connection.response()
    assert response.problem in ("headers-too-large", "bad-request")  # h11 says 400
    assert response.ended


def send_without_end(connection: Connection) -> None:
    while True:
        connection.send(b"X-A: " + b"b" * 1000 + b"\r\n")


def test_headers_after_a_request_in_progress_are_limited(
    make_app: Callable[..., Any], live_server: Callable[..., LiveServer], connect: Connect
) -> None:
    pytest.importorskip("httptools")  # with h11, uvicorn reads nothing before the response
    app = make_app()
    release = threading.Event()

    async def slow() -> dict[str, str]:
        await asyncio.to_thread(release.wait)
        return {}

    app.add_api_route("/slow", slow)
    connection = connect(live_server(app).port)
    connection.send(f"GET /slow HTTP/1.1\r\n{HOST}\r\n\r\nGET / HTTP/1.1\r\n".encode())
    try:
        with pytest.raises(ConnectionError):
            send_without_end(connection)
    finally:
        release.set()


# -- slow clients, many connections


@pytest.fixture
def hasty(make_app: Callable[..., Any], live: Callable[..., LiveServer]) -> int:
    """A server that waits 0.2 s for a request, and takes five connections."""
    return live(make_app(settings=ServerSettings(request_seconds=0.2, max_connections=5))).port


@pytest.mark.parametrize("sent", [b"", b"GET /openapi.json HTTP/1.1\r\nHost: "])
def test_a_client_that_sends_no_headers_is_disconnected(hasty: int, connect: Connect, sent: bytes) -> None:
    connection = connect(hasty)
    connection.send(sent)
    response = connection.response()
    assert (response.status, response.problem, response.ended) == (408, "request-timeout", True)


def test_a_client_that_sends_its_second_request_slowly_is_disconnected(hasty: int, connect: Connect) -> None:
    connection = connect(hasty)
    assert get(connection).status == 200
    connection.send(b"GET /openapi.json HTTP/1.1\r\n")
    assert connection.response().status == 408
    assert connection.ends()


def test_a_client_that_sends_no_body_is_disconnected(hasty: int, connect: Connect) -> None:
    response = post(connect(hasty), "Content-Length: 10", body=b"{")
    assert (response.status, response.problem, response.ended) == (408, "request-timeout", True)


@pytest.mark.parametrize("size", [100_000, 1_000_000])
def test_a_large_body_is_read_on_a_connection_that_was_used_before(port: int, connect: Connect, size: int) -> None:
    connection = connect(port)
    body = json.dumps({"agent": "nobody", "input": {"x": "x" * size}}).encode()
    for part in (1000, size, len(body)):
        head = ["POST /api/v1/runs HTTP/1.1", HOST, AUTH, JSON, f"Content-Length: {len(body)}", "", ""]
        connection.send("\r\n".join(head).encode())
        for start in range(0, len(body), part):
            connection.send(body[start : start + part])
        assert connection.response().problem == "unknown-agent"


def test_trailers_are_no_headers(port: int, connect: Connect) -> None:
    connection = connect(port)
    head = ["POST /api/v1/runs/x/cancel HTTP/1.1", HOST, JSON, "Transfer-Encoding: chunked"]
    response = connection.request(*head, body=f"2\r\n{{}}\r\n0\r\n{AUTH}\r\n\r\n".encode())
    assert (response.status, response.problem) == (401, "not-authenticated")
    response = connect(port).request(*head, AUTH, body=b"2\r\n{}\r\n0\r\nHost: evil\r\n\r\n")
    assert (response.status, response.problem) == (404, "unknown-run")


def masked(text: bytes) -> bytes:
    """A text frame of a WebSocket client, of at most 125 bytes."""
    return bytes([0x81, 0x80 | len(text), 0, 0, 0, 0]) + text


def test_a_socket_may_be_idle_for_longer_than_a_request_may_take(hasty: int, connect: Connect) -> None:
    socket = connect(hasty)
    socket.send("\r\n".join(["GET /api/v1/socket HTTP/1.1", HOST, AUTH, *UPGRADE, "", ""]).encode())
    assert socket.headers().startswith(b"HTTP/1.1 101 ")
    assert connect(hasty).response().status == 408  # the time of the older connection is over too
    socket.send(masked(b'{"type":"follow","run_id":"x","ref":7}'))
    assert b'"ref":7' in socket.frame()


@pytest.mark.parametrize("announced", ["Content-Length: 5", "Transfer-Encoding: chunked"])
def test_a_websocket_handshake_with_a_body_is_rejected(port: int, connect: Connect, announced: str) -> None:
    response = connect(port).request("GET /api/v1/socket HTTP/1.1", HOST, AUTH, *UPGRADE, announced)
    assert (response.status, response.problem, response.ended) == (400, "bad-request", True)


@pytest.mark.parametrize("length", ["Content-Length: 00", "Transfer-Encoding: chunked"])
def test_an_announced_body_may_be_empty(port: int, connect: Connect, length: str) -> None:
    body = b"0\r\n\r\n" if "chunked" in length else b""
    response = connect(port).request("POST /api/v1/runs/x/cancel HTTP/1.1", HOST, AUTH, length, body=body)
    assert (response.status, response.problem) == (404, "unknown-run")


def test_an_idle_connection_makes_way_for_a_new_one(
    make_app: Callable[..., Any], live: Callable[..., LiveServer], connect: Connect
) -> None:
    port = live(make_app(settings=ServerSettings(max_connections=5))).port
    idle = [connect(port) for _ in range(5)]
    assert get(connect(port)).status == 200
    response = idle[0].response()
    assert (response.status, response.problem, response.ended) == (503, "not-available", True)
    assert get(idle[4]).status == 200


def test_connections_with_requests_in_progress_do_not_make_way(
    make_app: Callable[..., Any], live: Callable[..., LiveServer], connect: Connect
) -> None:
    app = make_app(settings=ServerSettings(max_connections=5))
    release, begun = threading.Event(), threading.Semaphore(0)

    async def slow() -> dict[str, str]:
        begun.release()
        await asyncio.to_thread(release.wait)
        return {}

    app.add_api_route("/slow", slow)
    port = live(app).port
    busy = [connect(port) for _ in range(5)]
    try:
        for each in busy:
            each.send(f"GET /slow HTTP/1.1\r\n{HOST}\r\n\r\n".encode())
        for _ in busy:
            assert begun.acquire(timeout=PATIENCE)
        response = get(connect(port))
        assert (response.status, response.problem, response.ended) == (503, "not-available", True)
        # Idle connections take none of the spare ones from the probes, however many there are.
        idle = [connect(port) for _ in range(40)]
        assert get(connect(port), "/api/v1/health/live").status == 200
        assert idle[0].response().status == 503
    finally:
        release.set()
    assert [each.response().status for each in busy] == [200] * 5
    assert get(connect(port)).status == 200


def wrong_tokens(connection: Connection, count: int) -> list[int]:
    """Send so many requests with wrong tokens, 100 at a time."""
    statuses = []
    for first in range(0, count, 100):
        connection.send(b"".join(
            f"GET /openapi.json HTTP/1.1\r\n{HOST}\r\n{AUTH}-{n}\r\n\r\n".encode() for n in range(first, first + 100)
        ))  # fmt: skip
        statuses += [connection.response().status for _ in range(100)]
    return statuses


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_wrong_tokens_are_rejected_while_a_valid_one_works(
    serve: Callable[..., Served], connect: Connect, count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    served = serve()
    valid = connect(served.port)
    for _ in range(count // 100):
        statuses = wrong_tokens(connect(served.port), 100)
        assert set(statuses) <= {401, 429}
        assert get(valid).status == 200
    assert statuses.count(429) >= 90
    served.send(signal.SIGTERM)
    assert served.ended() == 0
    assert TOKEN not in capfd.readouterr().err
