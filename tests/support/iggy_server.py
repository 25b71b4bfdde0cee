"""A double of an Apache Iggy server on this machine: the part of its documented REST API that the adapter uses.

The paths and bodies are those of core/server/server.http in the repository apache/iggy, version 0.9, as its own client
sends and reads them. It cuts, delays, rejects and loses answers when a test asks for it.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
import zlib
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

TOKEN = "token-of-the-double"
_TOPIC = re.compile(r"/streams/([^/]+)/topics/([^/]+)(/messages)?")


@dataclass
class Topic:
    """The messages of each partition, as they are returned."""

    partitions: list[list[dict[str, Any]]]

    @property
    def payloads(self) -> list[list[Any]]:
        """The decoded payloads of each partition."""
        return [[json.loads(base64.b64decode(each["payload"])) for each in part] for part in self.partitions]


@dataclass
class IggyDouble:
    """What is stored, and which faults come next."""

    streams: dict[str, dict[str, Topic]] = field(default_factory=dict)
    #: How many of the next requests for messages get status 500, and change nothing.
    rejects: int = 0
    #: How many of the next messages are stored, and their answer is lost with the connection.
    loses: int = 0
    #: How many of the next requests are not answered for so many seconds.
    delays: tuple[int, float] = (0, 0.0)
    requests: int = 0

    def __post_init__(self) -> None:
        double, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_request(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                with lock:
                    answer = double.answer(self.command, self.path, body, self.headers.get("authorization", ""))
                if answer is None:
                    self.close_connection = True
                    return
                status, content = answer
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = handle_request

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"iggy+http://iggy:iggy@127.0.0.1:{self._server.server_port}"

    def topic(self, name: str, stream: str = "agents") -> Topic:
        return self.streams[stream][name]

    def answer(self, method: str, path: str, body: bytes, authorization: str) -> tuple[int, Any] | None:
        """Return the status and the content of a response; None cuts the connection."""
        self.requests += 1
        if path == "/ping":
            return 200, "pong"
        if path == "/users/login":
            known = json.loads(body)
            if (known["username"], known["password"]) != ("iggy", "iggy"):
                return 401, _error("invalid_credentials")
            return 200, {"user_id": 0, "access_token": {"token": TOKEN, "expiry": int(time.time()) + 3600}}
        if authorization != f"Bearer {TOKEN}":
            return 401, _error("unauthenticated")
        parts = urlsplit(path)
        found = _TOPIC.fullmatch(parts.path)
        if found is not None and found[3]:
            return self._messages(method, found[1], found[2], parts.query, body)
        return self._administration(method, parts.path, found, body)

    def _administration(self, method: str, path: str, found: re.Match[str] | None, body: bytes) -> tuple[int, Any]:
        if method == "POST":
            asked = json.loads(body)
            if path == "/streams":
                if asked["name"] in self.streams:
                    return 400, _error("stream_name_already_exists")
                self.streams[asked["name"]] = {}
                return 200, _stream(asked["name"])
            stream = path.split("/")[2]
            if asked["name"] in self.streams[stream]:
                return 400, _error("topic_name_already_exists")
            topic = Topic([[] for _ in range(asked["partitions_count"])])
            self.streams[stream][asked["name"]] = topic
            return 200, _topic(asked["name"], topic)
        if found is None:
            name = path.split("/")[2]
            return (200, _stream(name)) if name in self.streams else (404, _error("stream_id_not_found"))
        there = self.streams.get(found[1], {}).get(found[2])
        return (404, _error("topic_id_not_found")) if there is None else (200, _topic(found[2], there))

    def _messages(self, method: str, stream: str, name: str, query: str, body: bytes) -> tuple[int, Any] | None:
        if self.delays[0]:
            self.delays = (self.delays[0] - 1, self.delays[1])
            time.sleep(self.delays[1])
        if self.rejects:
            self.rejects -= 1
            return 500, _error("error")
        topic = self.streams[stream][name]
        if method == "GET":
            asked = {key: values[0] for key, values in parse_qs(query).items()}
            assert asked["kind"] == "offset"
            part, offset = int(asked["partition_id"]), int(asked["value"])
            messages = topic.partitions[part][offset : offset + int(asked["count"])]
            current = max(len(topic.partitions[part]) - 1, 0)
            return 200, {"partition_id": part, "current_offset": current, "count": len(messages), "messages": messages}
        sent = json.loads(body)
        key = base64.b64decode(sent["partitioning"]["value"])
        part = zlib.crc32(key) % len(topic.partitions)
        base = self.store(topic, part, sent["messages"])
        if self.loses:
            self.loses -= 1
            return None
        confirmation = {"stream_id": 0, "topic_id": 0, "partition_id": part, "base_offset": base}
        return 201, {"confirmations": [confirmation]}

    def store(self, topic: Topic, part: int, messages: list[dict[str, Any]]) -> int:
        """Append messages to a partition; the offset of the first one."""
        stored, base = topic.partitions[part], len(topic.partitions[part])
        for each in messages:
            header = {
                "checksum": 0, "id": each["id"], "offset": len(stored), "timestamp": 1, "origin_timestamp": 1,
                "user_headers_length": 0, "payload_length": len(base64.b64decode(each["payload"])), "reserved": 0,
            }  # fmt: skip
            stored.append(
                {"header": header, "payload": each["payload"], "user_headers": each.get("user_headers") or []}
            )
        return base

    def publish(self, name: str, payload: bytes, part: int = 0, stream: str = "agents") -> None:
        """Publish a message, as another program does."""
        topic = self.streams.setdefault(stream, {}).setdefault(name, Topic([[], []]))
        self.store(topic, part, [{"id": 1, "payload": base64.b64encode(payload).decode()}])


def _error(code: str) -> dict[str, Any]:
    return {"id": 1, "code": code, "reason": code, "field": None}


def _stream(name: str) -> dict[str, Any]:
    return {"id": 0, "created_at": 1, "name": name, "size": 0, "messages_count": 0, "topics_count": 0, "topics": []}


def _topic(name: str, topic: Topic) -> dict[str, Any]:
    partitions = [
        {"id": number, "created_at": 1, "segments_count": 1, "current_offset": max(len(part) - 1, 0), "size": 0,
         "messages_count": len(part)}
        for number, part in enumerate(topic.partitions)
    ]  # fmt: skip
    return {
        "id": 0, "created_at": 1, "name": name, "size": 0, "message_expiry": 0, "compression_algorithm": "none",
        "max_topic_size": 0, "replication_factor": 1, "messages_count": sum(map(len, topic.partitions)),
        "partitions_count": len(partitions), "partitions": partitions,
    }  # fmt: skip
