"""What a server sent as a stream, as far as the SDK does not report it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any, Final

DONE: Final = "[DONE]"
# Bytes at the end of a stream in which DONE is looked for.
_LONGEST_END: Final = 64


class StreamBody:
    """Watches the bytes that an SDK reads for a stream.

    It replaces the method `aiter_bytes` of this one response. If the SDK reads in another way, nothing is seen.

    Args:
        stream: The stream of the SDK, before it is read.
    """

    def __init__(self, stream: Any) -> None:
        self._whole: list[bytes] | None = []  # None for a real stream
        self._end = b""
        response: Any = getattr(stream, "response", None)
        self._received: Any = getattr(response, "aiter_bytes", None)
        if self._received is not None:
            response.aiter_bytes = self._watch

    async def _watch(self, *args: Any, **options: Any) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(self._received(*args, **options)) as body:
            async for part in body:
                if not self._end.strip() and part.strip()[:1] not in (b"", b"{"):
                    self._whole = None
                if self._whole is not None:
                    self._whole.append(part)
                self._end = (self._end + part)[-_LONGEST_END:]
                yield part

    def whole(self) -> dict[str, Any]:
        """Return the answer of a server that does not stream, after the stream was read to its end.

        It is {} for a real stream. The content type says little: servers send both kinds with that of the other.
        """
        try:
            found = json.loads(b"".join(self._whole or ()))
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def is_done(self) -> bool:
        """Return whether the server ended the stream itself."""
        return self._end.rstrip().endswith(DONE.encode())
