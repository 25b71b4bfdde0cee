"""What an application may do at the ends of turns and steps."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable
from typing import Any

from ..errors import InvalidArgument, brief
from .logs import log

NAMES = ("on_turn_start", "on_plan_ready", "on_step_start", "on_step_end", "on_turn_end", "on_error")


class Hooks:
    """Calls the hooks of several objects, in order, each of them sync or async.

    on_turn_start(turn), on_plan_ready(turn, plan), on_step_start(turn, step), on_step_end(turn, step),
    on_turn_end(turn), on_error(turn, error): an object has those it wants. What one raises is logged, and nothing
    else comes of it; so is a cancellation that is its own, and not the turn's. A turn that is taken up again after a
    crash may call one of them once more.
    """

    def __init__(self, objects: Iterable[Any] = ()) -> None:
        if not isinstance(objects, Iterable):
            raise InvalidArgument(f"hooks are a list of objects, not {brief(objects)}: write [it]")
        self._objects = tuple(objects)
        for each in self._objects:
            if not any(callable(getattr(each, name, None)) for name in NAMES):
                raise InvalidArgument(f"hooks are objects with one of {', '.join(NAMES)}; {brief(each)} is none")

    async def call(self, name: str, *args: Any) -> None:
        for each in self._objects:
            hook = getattr(each, name, None)
            if hook is None:
                continue
            try:
                made = hook(*args)
                if inspect.isawaitable(made):
                    await made
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is None or task.cancelling():
                    raise
                self._failed(name, each, args[0])
            except Exception:  # noqa: BLE001 - a hook may fail in any way
                self._failed(name, each, args[0])

    def _failed(self, name: str, hook: Any, turn: Any) -> None:
        log.exception("hook %s of %r failed", name, hook, extra={"trace_id": turn.trace_id, "turn_id": turn.id})
