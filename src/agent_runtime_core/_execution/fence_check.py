"""Reject backends that are on one database and have an engine each.

The queue sets the fence of a claim on its own engine, and the runner copies it to the other engines. If two engines
have the same fences, the end of a run on one of them rejects the writes of the same claim on the other.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from .._core.validation import Shown, must, type_name
from .._engines.base import FORGET, Committer, Guard, Op
from ..errors import LeaseLost

#: The ids of the engines that were found to have fences of their own, by queue.
_separate: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()


async def require_separate_fences(queue: Any, backend: Any, guard: Guard) -> None:
    """Check once in this process that the engine of `backend` does not have the fences of the queue's engine.

    Args:
        queue: The queue.
        backend: A backend on another engine. Nothing was written to it under this claim.
        guard: The claim, whose fence only the queue has set.

    Raises:
        InvalidArgument: The engine knows the claim already.
    """
    target: Committer = backend.commits
    checked = _separate.setdefault(queue, set())
    if id(target) in checked:
        return
    try:
        # The end of a claim that never was. With the guard of a claim it does not know, an engine raises LeaseLost.
        await target.commit(guard, [Op(FORGET, (f"{guard.key} has its own fences",))])
    except LeaseLost:
        checked.add(id(target))
        return
    got = Shown(f"{type_name(type(queue))} and {type_name(type(backend))} with the same fences and an engine each")
    raise must(
        "backends on one database", "share one engine", got,
        "Set the attribute `engine` of each to the same object, or give each its own table of fences",
    )  # fmt: skip
