"""What a server sent as a stream and the SDK does not report, and the end of a finished answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Final

from .._core.clock import SYSTEM, Clock
from .._core.context_vars import start_helper
from .._core.log import log

DONE: Final = "[DONE]"
#: Seconds on the clock of the client in which the usage of a finished answer may arrive.
USAGE_WAIT: Final = 2.0
#: Seconds in which the end of a response may arrive. It nearly always arrives with the last event.
_REST: Final = 0.1
# Bytes at the end of a stream in which DONE is looked for.
_LONGEST_END: Final = 64


class StreamBody:
    """Watches the bytes that an SDK reads for a stream.

    It replaces the method `aiter_bytes` of this single response. If the SDK reads in another way, nothing is seen.

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

        It is {} for a real stream. The content type does not help: servers send both kinds with either content type.
        """
        try:
            found = json.loads(b"".join(self._whole or ()))
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def is_done(self) -> bool:
        """Return whether the server ended the stream itself."""
        return self._end.rstrip().endswith(DONE.encode())


def end_with_json(response: Any) -> None:
    """Let the body of a response end when its JSON is whole, however its connection ends.

    Args:
        response: The response of the transport, before it is read. Its method `aiter_bytes` is replaced.
    """
    received: Any = response.aiter_bytes

    async def whole(*args: Any, **options: Any) -> AsyncGenerator[bytes, None]:
        body = b""
        async with contextlib.aclosing(received(*args, **options)) as parts:
            async for part in parts:
                body += part
                yield part
                if part.rstrip().endswith(b"}") and _is_json(body):
                    await read_rest(parts, lambda part: False, lambda: True, SYSTEM)
                    return

    response.aiter_bytes = whole


def _is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except (ValueError, RecursionError):
        return False
    return True


async def read_rest(
    events: AsyncIterator[Any], take: Callable[[Any], bool], has_usage: Callable[[], bool], clock: Clock
) -> bool:
    """Read what follows a finished answer: its usage, and the end of the response.

    The answer counts, so no error and no missing end is raised. A response that stays open is read for `USAGE_WAIT`
    seconds, or until the usage arrives. A response that is read to its end leaves a connection that can be reused.

    Args:
        events: The remaining events of the stream.
        take: Takes an event, and returns whether the answer continues with it.
        has_usage: Returns whether the usage of the finished answer is there.
        clock: Measures `USAGE_WAIT`.

    Returns:
        Whether the answer continues.
    """
    loop = asyncio.get_running_loop()
    timers: list[asyncio.Task[None]] = []
    try:
        async with asyncio.timeout(None) as limit:

            def end(_: object = None) -> None:
                limit.reschedule(loop.time())

            def rest_is_late() -> None:
                if has_usage():
                    end()
                else:
                    timers.append(start_helper(clock.sleep_for(USAGE_WAIT)))
                    timers[0].add_done_callback(end)

            late = loop.call_later(_REST, rest_is_late)
            try:
                async for event in events:
                    if take(event):
                        return True
                    if timers and has_usage():
                        break
            finally:
                late.cancel()
                for timer in timers:
                    timer.remove_done_callback(end)
                    timer.cancel()
    except Exception as error:  # noqa: BLE001 - the answer is finished, however its connection ends
        log.debug("the end of a finished answer is missing: %s", type(error).__name__)
    return False
