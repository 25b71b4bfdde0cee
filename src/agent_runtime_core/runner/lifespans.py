"""Enter the lifespan of an agent before its first run, and leave it at shutdown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from .._core.context_vars import start_helper
from .._core.log import log
from .._core.per_loop import call_in_loop
from .._core.timeouts import contained
from .._core.validation import must
from ..interfaces import AgentRuntime
from .settings import SHUTDOWN_SECONDS


class _Lifespan:
    """One entered lifespan.

    A task of its own enters and leaves it, because the task of a run ends earlier, and because cancel scopes, as those
    of anyio, must be left by the task that entered them.
    """

    def __init__(self, agent: AgentRuntime) -> None:
        self.agent = agent
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.runs = 0  # which use it now
        self.ended: Future[None] = Future()
        self._leave = asyncio.Event()
        self._entered: asyncio.Future[None] = self.loop.create_future()
        self._task = start_helper(self._hold())
        self._task.add_done_callback(self._end)

    @property
    def over(self) -> bool:
        """Whether no run may enter it any more."""
        return self._leave.is_set() or self.ended.done()

    async def entered(self) -> None:
        """Wait until it is entered; raise what entering it has raised. A cancelled caller leaves the others waiting."""
        await asyncio.shield(self._entered)

    def leave(self) -> None:
        """Have its task leave it, from any thread."""
        call_in_loop(self.loop, self._leave.set)

    def cancel(self) -> None:
        """Cancel its task, from any thread."""
        call_in_loop(self.loop, self._task.cancel)

    async def _hold(self) -> None:
        key = self.agent.key
        try:
            async with _manager(self.agent):
                if not self._entered.done():
                    self._entered.set_result(None)
                # The end of the event loop cancels this task: code after the `yield` is then executed too.
                with contextlib.suppress(asyncio.CancelledError):
                    await self._leave.wait()
                self._leave.set()
        except BaseException as raised:
            if isinstance(
                error := contained(raised, f"lifespan() of agent {key!r}"), (GeneratorExit, KeyboardInterrupt)
            ):
                raise
            if not self._entered.done():
                self._refuse(error)
            else:
                log.error("leaving the lifespan of agent %r failed: %s", key, error, exc_info=error)

    def _refuse(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            self._entered.cancel()
            return
        self._entered.set_exception(error)
        self._entered.exception()  # every run that waited for it may be gone

    def _end(self, _: asyncio.Task[None]) -> None:
        if not self._entered.done():  # cancelled before it began
            self._entered.cancel()
        self.ended.set_result(None)


class Lifespans:
    """The lifespans of the agents of one runner, each entered once per event loop.

    Args:
        grace: Returns how many seconds leaving one may take.
    """

    def __init__(self, grace: Callable[[], float]) -> None:
        self._grace = grace
        self._held: dict[tuple[asyncio.AbstractEventLoop, int], _Lifespan] = {}

    async def enter(self, agent: AgentRuntime) -> Callable[[], None] | None:
        """Wait until the lifespan of an agent is entered.

        Returns:
            What the run calls when it needs the lifespan no more; None for an agent without one.
        """
        given = getattr(type(agent), "lifespan", None)  # agents of other base classes have none
        if given is None or given is AgentRuntime.lifespan:
            return None
        key = (asyncio.get_running_loop(), id(agent))
        held = self._held.get(key)
        if held is None or held.over:
            self._held = {key: each for key, each in self._held.items() if not each.loop.is_closed()}
            held = self._held[key] = _Lifespan(agent)
        held.runs += 1
        try:
            await held.entered()
        except BaseException:
            held.runs -= 1
            raise

        def release() -> None:
            held.runs -= 1

        return release

    async def leave(self, *, idle_only: bool = False) -> None:
        """Leave the lifespans, the last one first; each may take the grace, and is cancelled after that.

        Args:
            idle_only: Only those of this event loop that no run uses.
        """
        if not self._held:  # a coroutine of `run_loop` may be closed when no event loop runs any more
            return
        here, grace = asyncio.get_running_loop(), self._grace()
        for key, held in reversed(list(self._held.items())):
            if idle_only and (held.runs or held.loop is not here):
                continue
            if self._held.get(key) is held:
                del self._held[key]
            if held.loop.is_closed():
                continue
            held.leave()
            if not await _ends(held, grace):
                log.warning("the lifespan of agent %r is not left after %g s: cancelled", held.agent.key, grace)
                held.cancel()
                await _ends(held, SHUTDOWN_SECONDS)


def _manager(agent: AgentRuntime) -> contextlib.AbstractAsyncContextManager[Any]:
    manager = agent.lifespan()
    if not isinstance(manager, contextlib.AbstractAsyncContextManager):
        fix = "Decorate it with contextlib.asynccontextmanager"
        raise must(f"lifespan() of agent {agent.key!r}", "return an async context manager", manager, fix)
    return manager


async def _ends(held: _Lifespan, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.shield(asyncio.wrap_future(held.ended))
    return held.ended.done()
