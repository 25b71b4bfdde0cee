"""Tells repeated uses of one step name apart, and keeps two of one identity from running at once."""

from __future__ import annotations

import asyncio
import re
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

from .._core.codec.json import digest
from .._core.context_vars import queued
from .._core.ids import step_id
from .claim_writer import ClaimWriter
from .record_factory import RecordFactory

Identity = tuple[str, str]  # (name, key)


@dataclass(slots=True, eq=False, repr=False)
class StepScope:
    """The step that code is running in."""

    book: StepKeys
    name: str
    key: str
    attempt: int
    outer: StepScope | None = None
    emitted: int = 0
    counts: dict[tuple[str, str], int] | None = None  # uses of a name inside this step

    @property
    def step_id(self) -> str:
        return step_id(self.book.ledger.run_id, self.name, self.key)

    @property
    def scope_id(self) -> str:
        return scope_id(self.name, self.key)


def scope_id(name: str, key: str) -> str:
    """Tells this step from the others of its run, and of that run's forks; what is inside it has it in its keys."""
    return digest(f"{name}\0{key}")[:16]


#: Where the key of a step says inside which other one it is.
SCOPE_SUFFIX: Final = re.compile("@([0-9a-f]{16})(?::|$)")

CURRENT_STEP: ContextVar[StepScope | None] = ContextVar("agent_runtime_step", default=None)


def _next_occurrence(counts: dict[tuple[str, str], int], space: str, name: str) -> int:
    count = counts.get((space, name), 0)
    counts[space, name] = count + 1
    return count


class KeyLock:
    """Inside the block, nobody else is inside one of that identity."""

    __slots__ = ("_alone", "_entered", "_identity", "_uses")

    def __init__(self, uses: StepKeys, alone: dict[Identity, asyncio.Event | None], identity: Identity) -> None:
        self._uses = uses
        self._alone: dict[Identity, asyncio.Event | None] = alone
        self._identity: Identity = identity
        self._entered = False

    async def __aenter__(self) -> None:
        alone, identity, frame = self._alone, self._identity, CURRENT_STEP.get()
        while frame is not None:
            if frame.book is self._uses and (frame.name, frame.key) == identity:
                return  # it calls itself
            frame = frame.outer
        while identity in alone:
            if (left := alone[identity]) is None:
                left = alone[identity] = asyncio.Event()
            with queued():
                await left.wait()
        alone[identity] = None
        self._entered = True

    async def __aexit__(self, *_: object) -> None:
        if self._entered and (left := self._alone.pop(self._identity)) is not None:
            left.set()


class StepKeys(RecordFactory):
    """The uses of names by the code of one claim, counted for each step by itself."""

    def __init__(self, ledger: ClaimWriter) -> None:
        super().__init__(ledger)
        self._counts: dict[tuple[str, str], int] = {}
        #: Uses inside a step that came to a failure: another try of that step has new ones in their place.
        self.failed_try_keys: set[Identity] = set()
        #: Uses that may come once more, each by its step, space and name, with what it was used with.
        self.reusable_keys: dict[tuple[StepScope | None, str, str], tuple[int, str | None]] = {}
        self.locked_keys: dict[
            Identity, asyncio.Event | None
        ] = {}  # what goes on, and its end if others wait: see `only`

    def next_key(self, space: str, name: str, mark: str | None = None) -> str:
        """The key of the next unkeyed use of `name`, counted for each step by itself: on a resume those inside a
        recorded one are not asked for again, and those beside it come in any order; `mark` tells what with."""
        frame = self._frame()
        if self.reusable_keys:
            use, of = self.reusable_keys.pop((frame, space, name), (0, ""))
            if of == mark:
                self._uses(frame)[space, name] = use
        if frame is None:
            return f"{space}:{_next_occurrence(self._counts, space, name)}"
        counts = self._uses(frame)
        while True:
            key = f"{space}:{_next_occurrence(counts, space, name)}@{frame.scope_id}"
            if (name, key) not in self.failed_try_keys:
                return key

    def reuse_key(self, name: str, key: str, mark: str | None, frame: StepScope | None) -> None:
        """Have the next use of that name in that step, or between steps, be this one, if it was the last and is used
        with the same: its end was not heard of, or its caller gave it up."""
        frame = None if frame is None or frame.book is not self else frame
        space, _, use = key.partition("@")[0].partition(":")
        if use.isdecimal() and self._uses(frame).get((space, name)) == int(use) + 1:
            self.reusable_keys[frame, space, name] = int(use), mark

    def _frame(self) -> StepScope | None:
        """The step of this run that the code which asks is in."""
        frame = CURRENT_STEP.get()
        return None if frame is None or frame.book is not self else frame

    def _uses(self, frame: StepScope | None) -> dict[tuple[str, str], int]:
        """How often each name was used between steps, or in that step."""
        if frame is None:
            return self._counts
        if frame.counts is None:
            frame.counts = {}
        return frame.counts

    def exclusive(self, name: str, key: str) -> KeyLock:
        """One at a time: what a failed try of the step around it left behind goes on, and answers for the next."""
        return KeyLock(self, self.locked_keys, (name, key))

    def scope_suffix(self) -> str:
        """What tells the step lists and maps inside a step from those of other steps; nothing between steps."""
        frame = self._frame()
        return "" if frame is None else f"@{frame.scope_id}"
