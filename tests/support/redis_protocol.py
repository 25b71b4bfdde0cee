"""Just enough of Redis's protocol, RESP2 and RESP3, to ask a server something and to tell where a message ends."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

_LINES = b"+-:_,#("
_STRINGS = b"$!="
_LISTS = {ord("*"): 1, ord("~"): 1, ord(">"): 1, ord("%"): 2, ord("|"): 2}
PUSH = ord(">")
ATTRIBUTE = ord("|")


class Refused(Exception):
    """An error reply: its text."""


class Unfinished(Exception):
    """The message goes on beyond the bytes there are."""


def request(*words: object) -> bytes:
    """A command, as clients send it."""
    texts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(texts) + b"".join(b"$%d\r\n%s\r\n" % (len(text), text) for text in texts)


def read(data: bytes | bytearray, at: int = 0) -> tuple[Any, int]:
    """The message that begins at `at`, and where it ends; texts stay bytes, and an error is given, not raised.

    Unfinished: not all of it is there. ValueError: that is no message.
    """
    kind, (line, end) = _kind(data, at), _line(data, at)
    if kind in _LINES:
        return _scalar(kind, line), end
    if kind in _STRINGS:
        size = int(line)
        if size < 0:
            return None, end
        if len(data) < end + size + 2:
            raise Unfinished
        text = bytes(data[end : end + size])
        return (Refused(text.decode()) if kind == ord("!") else text), end + size + 2
    return _list(data, kind, int(line), end)


def _kind(data: bytes | bytearray, at: int) -> int:
    if len(data) <= at:
        raise Unfinished
    if data[at] not in _LINES + _STRINGS and data[at] not in _LISTS:
        raise ValueError(f"no message begins with {bytes(data[at : at + 20])!r}")
    return data[at]


def _line(data: bytes | bytearray, at: int) -> tuple[bytes, int]:
    end = data.find(b"\r\n", at)
    if end < 0:
        raise Unfinished
    return bytes(data[at + 1 : end]), end + 2


def _scalar(kind: int, line: bytes) -> Any:
    match chr(kind):
        case "+":
            return line
        case "-":
            return Refused(line.decode())
        case ":" | "(":
            return int(line)
        case ",":
            return float(line)
        case "#":
            return line == b"t"
        case _:
            return None


def _list(data: bytes | bytearray, kind: int, size: int, at: int) -> tuple[Any, int]:
    if size < 0:
        return None, at
    values = []
    for _ in range(size * _LISTS[kind]):
        value, at = read(data, at)
        values.append(value)
    if kind == ATTRIBUTE:  # it is about the message that follows
        return read(data, at)
    return (dict(zip(values[::2], values[1::2], strict=True)) if _LISTS[kind] == 2 else values), at


class Link:
    """A connection that asks one thing at a time; it ends with the block."""

    def __init__(self, port: int, seconds: float = 10.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), seconds)
        self._unread = bytearray()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def ask(self, *words: object) -> Any:
        """The reply; Refused for an error, EOFError or OSError where none comes."""
        self.send(*words)
        return self.receive()

    def send(self, *words: object) -> None:
        self._socket.sendall(request(*words))

    def receive(self) -> Any:
        while True:
            with contextlib.suppress(Unfinished):
                value, end = read(self._unread)
                del self._unread[:end]
                if isinstance(value, Refused):
                    raise value
                return value
            more = self._socket.recv(65536)
            if not more:
                raise EOFError(f"the connection ended after {bytes(self._unread[:100])!r}")
            self._unread += more
