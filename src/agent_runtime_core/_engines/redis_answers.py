"""Answers of the script as they arrive from the server, in pieces (RESP2: arrays of texts, or a line of complaint)."""

from __future__ import annotations

from ..errors import StorageError

_END = b"\r\n"
_COMPLAINT, _ARRAY, _TEXT, _NUMBER = b"-*$:"


class Answers:
    """What has arrived and was not taken yet. Where channels are heard, `numbers` may stand among the texts."""

    def __init__(self, *, numbers: bool = False) -> None:
        self._got = bytearray()
        self._numbers = numbers

    def add(self, data: bytes) -> None:
        self._got += data

    def take(self) -> list[bytes] | str | None:
        """The texts of the next answer, or what the server says instead; None where it is not there in full.

        StorageError for what is neither.
        """
        got = self._got
        end = got.find(_END)
        if end < 0:
            return None
        at = end + 2
        if got[0] == _COMPLAINT:
            said = got[1:end].decode("utf-8", "replace")
            del got[:at]
            return said
        if got[0] != _ARRAY:
            raise StorageError(f"an answer that is none: {bytes(got[:40])!r}")
        texts: list[bytes] = []
        for _ in range(int(got[1:end])):
            end = got.find(_END, at)
            if end < 0:
                return None
            if got[at] == _NUMBER and self._numbers:
                texts.append(bytes(got[at + 1 : end]))
                at = end + 2
                continue
            if got[at] != _TEXT:
                raise StorageError(f"an answer that is none: {bytes(got[at : at + 40])!r}")
            start = end + 2
            at = start + int(got[at + 1 : end]) + 2
            if at > len(got):
                return None
            texts.append(bytes(got[start : at - 2]))
        del got[:at]
        return texts
