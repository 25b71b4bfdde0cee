"""A server on this machine that takes spans as Langfuse's does, and keeps them to be looked at."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agent_runtime_core._core.lazy_import import load

PATH = "/api/public/otel/v1/traces"


@dataclass(frozen=True)
class Seen:
    """One span as it was sent; ids are in hexadecimal, times in seconds."""

    name: str
    id: str
    parent: str
    trace: str
    start: float
    end: float
    failed: bool
    about: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.about["langfuse.observation.type"])

    def json(self, name: str) -> Any:
        """An attribute that holds JSON, under its name in Langfuse."""
        return json.loads(self.about[f"langfuse.observation.{name}"])


@dataclass
class Receiver:
    """What has come in so far."""

    url: str = ""
    spans: list[Seen] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    on_arrival: Callable[[list[Seen]], None] | None = None

    def of(self, kind: str) -> list[Seen]:
        """The observations of one type, in the order in which they began."""
        return sorted((span for span in self.spans if span.kind == kind), key=lambda span: span.start)

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.paths.append(path)
        self.headers.append(headers)
        self.bodies.append(body)
        if path in (PATH, "/v1/traces"):
            arrived = [*_decoded(body)]
            self.spans += arrived
            if self.on_arrival is not None:
                self.on_arrival(arrived)


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port, closed on leaving."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            receiver.take(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Keeps quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def clients_let_go() -> Iterator[None]:
    """Every Langfuse client there is on leaving is ended, with what it has not sent: its threads would go on trying."""
    yield
    resources: Any = load("langfuse._client.resource_manager:LangfuseResourceManager")
    for each in resources._instances.values():
        if each.tracer_provider is not None:
            each.tracer_provider.shutdown()
    resources.reset()


def _decoded(body: bytes) -> Iterator[Seen]:
    message: Any = load("opentelemetry.proto.collector.trace.v1.trace_service_pb2:ExportTraceServiceRequest")
    for resource in message.FromString(body).resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Seen(
                    span.name,
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.trace_id.hex(),
                    span.start_time_unix_nano / 1e9,
                    span.end_time_unix_nano / 1e9,
                    span.status.code == 2,
                    {each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes},
                )
