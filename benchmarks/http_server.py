"""The HTTP server beside a bare FastAPI application. Needs the extra `server`, uvloop and httptools.

The server, and the client of all connections, are one process each; both sides have the same client, the same options
of uvicorn and the same journal and `synchronous` of SQLite. The bare application has no authentication, no event log
and no limits: one queue for each reader, and one `INSERT` and commit for each run, over one connection.

Its route of `POST /runs` is a plain `def`, so FastAPI inserts in a thread. The note has the figure of an `async def`
that inserts on the event loop: it is faster where a flush costs nothing, and stops all requests during each flush.

The sides alternate, and a figure is the median of its rounds. p99 of the paced readers also has the time that the
client process takes to read all of them, and that both processes wait for a core.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .floor import Line, Size, in_turns
from .http_clients import more_files

NEEDED = ("fastapi", "uvicorn", "websockets", "uvloop", "httptools")
ROUNDS = 3
FASTER = 2.5  # deliveries of one process, beside those of the bare application
CPU = 12.0  # microseconds of a delivery
LATE = 100.0  # milliseconds
POSTS = {"full": 1.0, "normal": 0.8}  # requests per second, beside the bare application
SLOWER = 2.5  # p99 of a request
CONNECTIONS = 16
BODY = json.dumps({"agent": "noop", "input": {"order": 17, "text": "a word or two"}})
EVENTS = {"ours": "/api/v1/runs/followed/events", "bare": "/events"}
RUNS = {"ours": "/api/v1/runs", "bare": "/runs", "bare-on-loop": "/runs"}


class Process:
    """A process that is told and says JSON lines."""

    def __init__(self, module: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=Path(__file__).parents[1],
        )  # fmt: skip

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def said(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"{self.process.args!r} ended with {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        try:
            self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise


@contextmanager
def _process(module: str, *arguments: object) -> Iterator[Process]:
    process = Process(module, *arguments)
    try:
        yield process
        process.end()
    finally:
        process.process.kill()
        process.process.communicate()


class Followed:
    """How events reached their readers."""

    def __init__(self, size: Size, side: str, readers: int, events: int, rate: float = 0) -> None:
        with ExitStack() as stack:
            path = stack.enter_context(size.file())
            server = stack.enter_context(_process("http_app", side, path, "full"))
            at = server.said()
            clients = stack.enter_context(
                _process("http_clients", "read", at["port"], EVENTS[side], at["token"], readers, events)
            )
            if side == "ours":  # the headers of the bare application come with the first event
                clients.said()
            server.tell(f"publish {readers} {events} {rate}")
            published = server.said()
            if side != "ours":
                clients.said()
            clients.tell(json.dumps(published["committed"]))
            found = clients.said()
            server.tell("cpu")
            used = server.said()["used"] - published["used"]
        count = readers * events
        assert (found["gaps"], found["received"]) == (0, count), found
        self.rate: float = count / (found["ended"] - published["began"])
        self.cpu: float = used / count * 1e6
        self.p50: float = found["p50"] * 1000
        self.p99: float = found["p99"] * 1000


def _posted(size: Size, side: str, durability: str, requests: int) -> tuple[float, float, float]:
    """Requests per second, p99 in milliseconds, and microseconds of the server's processor time for a request."""
    with ExitStack() as stack:
        path = stack.enter_context(size.file())
        server = stack.enter_context(_process("http_app", side, path, durability))
        at = server.said()

        def send(count: int) -> Any:
            with _process(
                "http_clients", "post", at["port"], RUNS[side], at["token"], CONNECTIONS, count, BODY
            ) as clients:
                return clients.said()

        def used() -> float:
            server.tell("cpu")
            seconds: float = server.said()["used"]
            return seconds

        send(CONNECTIONS)  # what the first requests load is not measured
        before = used()
        found = send(requests)
        return requests / found["seconds"], found["p99"] * 1000, (used() - before) / requests * 1e6


def _fan_out(size: Size) -> Iterator[Line]:
    readers, events = size.of(500, 5), size.of(200, 10)
    cpu: dict[str, list[float]] = {"ours": [], "bare": []}

    def measure(side: str) -> float:
        followed = Followed(size, side, readers, events)
        cpu[side].append(followed.cpu)
        return followed.rate

    ours, bare = in_turns(size.rounds(ROUNDS), lambda: measure("ours"), lambda: measure("bare"))
    name = f"http {readers:,} readers of {events} events"
    yield Line(name, ours, "deliveries/s", bare, least=FASTER)
    yield Line(f"{name}: processor time of a delivery", min(cpu["ours"]), "µs", most=CPU, beside=min(cpu["bare"]))


def _paced(size: Size) -> Iterator[Line]:
    readers, events, rate = size.of(1000, 5), size.of(200, 10), size.of(20, 100)
    followed = Followed(size, "ours", readers, events, rate)
    note = f"p50 {followed.p50:.1f} ms; {followed.cpu:.1f} µs of processor time a delivery"
    yield Line(
        f"http {readers:,} readers, {rate} events/s: commit to socket, p99", followed.p99, "ms", most=LATE, note=note
    )


def _posts(size: Size) -> Iterator[Line]:
    requests = size.of(3000, 50)
    for durability, least in POSTS.items():
        p99: dict[str, list[float]] = {side: [] for side in RUNS}
        cpu: dict[str, list[float]] = {side: [] for side in RUNS}

        def measure(
            side: str,
            durability: str = durability,
            p99: dict[str, list[float]] = p99,
            cpu: dict[str, list[float]] = cpu,
        ) -> float:
            rate, slow, used = _posted(size, side, durability, requests)
            p99[side].append(slow)
            cpu[side].append(used)
            return rate

        ours, bare, on_loop = in_turns(size.rounds(ROUNDS), *(partial(measure, side) for side in RUNS))
        name = f"http POST /runs, {CONNECTIONS} connections, {durability.upper()}"
        note = f"{min(cpu['ours']):.0f} µs of processor time each, bare {min(cpu['bare']):.0f} µs; "
        note += f"bare on the event loop: {on_loop:,.0f} requests/s, {min(cpu['bare-on-loop']):.0f} µs"
        yield Line(name, ours, "requests/s", bare, least=least, note=note)
        slow, slow_bare = (sorted(p99[side])[len(p99[side]) // 2] for side in ("ours", "bare"))
        yield Line(f"{name}: p99", slow, "ms", slow_bare, most=SLOWER)


def missing() -> list[str]:
    """Return the packages that these rows need and that are not installed."""
    return [name for name in NEEDED if find_spec(name) is None]


def rows(size: Size) -> Iterator[Line]:
    if absent := missing():
        print(f"http: needs {', '.join(absent)}: pip install 'agent-runtime-core[server]' uvloop httptools")
        return
    more_files()
    yield from _fan_out(size)
    yield from _paced(size)
    yield from _posts(size)
    from . import http_socket  # needs websockets

    yield from http_socket.rows(size)
