"""The client process of `http_server`, over raw sockets: it must cost less than the server that is measured.

python -m benchmarks.http_clients read PORT PATH TOKEN READERS EVENTS
python -m benchmarks.http_clients post PORT PATH TOKEN CONNECTIONS REQUESTS BODY
"""

from __future__ import annotations

import json
import re
import resource
import selectors
import socket
import sys
import time
from array import array

from .floor import percentile

_ID = re.compile(rb"(?m)^id: ?(\d+)\r?$")
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_HEAD_END = b"\r\n\r\n"
_LARGE = 1 << 18
PATIENCE = 120.0  # seconds without a byte


def _connected(port: str) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", int(port)))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def _head(method: str, path: str, port: str, token: str, *more: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", *more]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    return "\r\n".join([*lines, "", ""]).encode()


class Stream:
    """One reader: what it has received, and the number of the event that comes next."""

    __slots__ = ("expected", "left", "link", "raw", "started", "text")

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.raw = b""
        self.started = False
        self.left = 0  # bytes of the present chunk
        self.text = b""  # the beginning of a frame
        self.expected = 0

    def received(self, data: bytes) -> list[int]:
        """Return the numbers of the events that are complete now."""
        self.raw += data
        if not self.started:
            head, found, rest = self.raw.partition(_HEAD_END)
            if not found:
                return []
            assert head.startswith(b"HTTP/1.1 200 "), head
            self.started, self.raw = True, rest
        text = self.text + self._body()
        end = text.rfind(b"\n\n") + 2 if b"\n\n" in text else 0
        self.text = text[end:]
        return [int(number) for number in _ID.findall(text[:end])]

    def _body(self) -> bytes:
        """Take what is complete of the chunks."""
        raw, at, body = self.raw, 0, []
        while True:
            if self.left:
                piece = raw[at : at + self.left]
                if not piece:
                    break
                body.append(piece)
                at += len(piece)
                self.left -= len(piece)
                continue
            end = raw.find(b"\r\n", at)
            if end < 0:
                break
            if end > at:  # an empty line is the end of the chunk before
                self.left = int(raw[at:end], 16)
                assert self.left, "the server ended the stream"
            at = end + 2
        self.raw = raw[at:]
        return b"".join(body)


def read(port: str, path: str, token: str, readers: int, events: int) -> None:
    """Follow with all readers; say how many events were out of place, and how late they came after their commit."""
    selector = selectors.DefaultSelector()
    request = _head("GET", path, port, token, "Accept: text/event-stream")
    for _ in range(readers):
        link = _connected(port)
        link.sendall(request)
        link.setblocking(False)
        selector.register(link, selectors.EVENT_READ, Stream(link))
    arrived = [array("d") for _ in range(events)]
    starting, following, gaps = readers, readers, 0
    while following:
        ready = selector.select(PATIENCE)
        assert ready, f"{following} readers got nothing for {PATIENCE:g} s"
        for key, _ in ready:
            stream: Stream = key.data
            was_started = stream.started
            data = stream.link.recv(_LARGE)
            assert data, "the server closed a connection"
            now = time.monotonic()
            for number in stream.received(data):
                gaps += number != stream.expected
                stream.expected = number + 1
                arrived[number].append(now)
            if stream.started and not was_started:
                starting -= 1
                if not starting:
                    print("{}", flush=True)
            if stream.expected >= events:
                selector.unregister(stream.link)
                following -= 1
    ended = max(times[-1] for times in arrived)
    committed: list[float] = json.loads(sys.stdin.readline())
    late = [max(0.0, at - since) for since, times in zip(committed, arrived, strict=True) for at in times]
    p50, p99 = percentile(late, 0.5), percentile(late, 0.99)
    print(json.dumps({"ended": ended, "gaps": gaps, "received": len(late), "p50": p50, "p99": p99}), flush=True)


def post(port: str, path: str, token: str, connections: int, requests: int, body: str) -> None:
    """Send requests, one at a time on each connection; say how long all and each of them took."""
    content = ("Content-Type: application/json", f"Content-Length: {len(body.encode())}")
    request = _head("POST", path, port, token, *content) + body.encode()
    selector = selectors.DefaultSelector()
    links = [_connected(port) for _ in range(connections)]
    taken: list[float] = []
    sent: dict[socket.socket, tuple[float, bytes]] = {}
    unsent = requests

    def send(link: socket.socket) -> None:
        nonlocal unsent
        if unsent > 0:
            unsent -= 1
            sent[link] = time.monotonic(), b""
            link.sendall(request)

    began = time.monotonic()
    for link in links:
        selector.register(link, selectors.EVENT_READ)
        send(link)
    while sent:
        ready = selector.select(PATIENCE)
        assert ready, f"no answer for {PATIENCE:g} s"
        for key, _ in ready:
            link = key.fileobj  # type: ignore[assignment]
            since, answer = sent.pop(link)
            answer += link.recv(_LARGE)
            head, found, rest = answer.partition(_HEAD_END)
            length = _LENGTH.search(head)
            if not found or length is None or len(rest) < int(length[1]):
                sent[link] = since, answer
                continue
            assert head.startswith(b"HTTP/1.1 201 "), answer
            taken.append(time.monotonic() - since)
            send(link)
    seconds = time.monotonic() - began
    print(json.dumps({"seconds": seconds, "p50": percentile(taken, 0.5), "p99": percentile(taken, 0.99)}), flush=True)


def more_files() -> None:
    """Let this process, and those that it starts, open as many files as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main(what: str, port: str, path: str, token: str, links: str, count: str, *more: str) -> None:
    more_files()
    if what == "read":
        read(port, path, token, int(links), int(count))
    else:
        post(port, path, token, int(links), int(count), *more)


if __name__ == "__main__":
    main(*sys.argv[1:])
