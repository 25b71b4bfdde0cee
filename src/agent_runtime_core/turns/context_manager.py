"""What a turn is told from: itself as last saved, what was said before, and what the user prefers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from uuid import UUID

from .._core.clock import SYSTEM, Clock
from .._core.codec.json import MAX_WHOLE, decode, encode
from .._execution.context import conversation_id as as_conversation
from ..errors import LeaseLost, UnserialisableResult, holds
from ..persistence.chat_format import chat_of, paired
from ..persistence.manager import PersistenceManager
from ..planning.memory_operations import RESERVED
from ..retry import Backoff
from .logs import log
from .turn import StepState, Turn

T = TypeVar("T")

TRIES = 3
MAX_CACHED = 16 * 1024 * 1024  # characters of answers that are kept
#: Of the keys in the memory store.
PREFIX = f"{RESERVED}turn/"
#: Characters of a result that is written with its turn, each time.
SMALL = 1024


def _place(turn_id: str, step: StepState) -> str:
    """Where a result is kept apart from its turn."""
    return f"{PREFIX}{turn_id}/{step.step_number}"


def _is_large(result: Any) -> bool:
    if isinstance(result, str):
        return len(result) > SMALL
    try:
        return len(encode(result, max_bytes=MAX_WHOLE)) > SMALL
    except UnserialisableResult:  # whatever it is, its store says so
        return True


def _without_those_apart(turn: Turn, told: dict[str, Any]) -> dict[str, Any]:
    """A turn as it is stored: of a result that is kept apart, only that it is."""
    for step, plain in zip(turn.steps, told["steps"], strict=True):
        # True: it is there, and was not read.
        if step.apart is not None and plain["result"] is (None if step.apart is True else step.apart):
            plain["result"], plain["apart"] = None, True
    return told


@dataclass(frozen=True)
class Remembered(Generic[T]):
    """What was read; `stale` where the store was away and this is what it said before."""

    value: T
    stale: bool = False


class ContextManager:
    """Reads and writes turns, and reads what they need, in the stores of a PersistenceManager.

    A read that fails is tried three times, with growing pauses; then the last answer is given again, marked as
    stale, or the error raised where there was none. The last `cached` answers are kept for that, 16 MiB at most.
    """

    def __init__(
        self, persistence: Callable[[], PersistenceManager], *, clock: Clock = SYSTEM, cached: int = 512,
        backoff: Backoff | None = None,
    ) -> None:  # fmt: skip
        self._stores, self._clock, self._most = persistence, clock, cached
        self._backoff = backoff or Backoff(base=0.05, factor=4.0, jitter="none")
        self._cache: OrderedDict[str, str] = OrderedDict()
        self._size = 0  # of all texts there

    # -- turns

    async def get_turn(self, turn_id: str) -> Turn | None:
        """The turn as it was saved last; `stale` is True where its store was away. None: it was never saved."""
        found = await self._read(PREFIX + turn_id, lambda: self._stores().memory.get(PREFIX + turn_id))
        if found.value is None:
            return None
        turn = Turn.from_dict(found.value)
        turn.stale = found.stale
        for step in turn.steps:
            if step.apart is not None:
                await self._fetch(turn, step)
        return turn

    async def save_turn(self, turn: Turn) -> None:
        """Keep the turn as it is now. Inside its run it is refused with LeaseLost once the run is another worker's.

        A result of more than a kilobyte is written once, and not with each step that ends after it.
        """
        told = turn.to_dict()
        for step, plain in zip(turn.steps, told["steps"], strict=True):
            result = plain["result"]
            if result is not None and step.apart is not result and _is_large(result):
                await self._put(_place(turn.id, step), result)
                step.apart = result
        await self._put(PREFIX + turn.id, _without_those_apart(turn, told))

    async def change_turn(self, turn_id: str, change: Callable[[Turn], None]) -> Turn | None:
        """Change a turn that was saved, so that no other change is lost; None if there is none.

        What `change` is given lacks the results of more than a kilobyte.
        """

        def made(told: Any) -> Any:
            if told is None:
                return None
            turn = Turn.from_dict(told)
            change(turn)
            return _without_those_apart(turn, turn.to_dict())

        told = await self._stores().memory.change(PREFIX + turn_id, made)
        self._keep(PREFIX + turn_id, told)
        return None if told is None else await self.get_turn(turn_id)

    async def forget_turn(self, turn_id: str) -> bool:
        """Delete what was saved of the turn; whether there was anything."""
        memory = self._stores().memory
        for key in await memory.list_keys(prefix=f"{PREFIX}{turn_id}/"):
            await self._drop(key)
        return await self._drop(PREFIX + turn_id)

    async def _fetch(self, turn: Turn, step: StepState) -> None:
        """The result of a step that is kept apart."""
        key = _place(turn.id, step)
        found = await self._read(key, lambda: self._stores().memory.get(key))
        step.result = step.apart = found.value
        turn.stale = turn.stale or found.stale

    async def _put(self, key: str, value: Any) -> None:
        await self._stores().memory.set(key, value)
        self._keep(key, value)

    async def _drop(self, key: str) -> bool:
        self._size -= len(self._cache.pop(key, ""))
        return await self._stores().memory.delete(key)

    # -- what a turn is told

    async def history(self, conversation: UUID | str, limit: int | None = None) -> Remembered[list[Mapping[str, Any]]]:
        """The last `limit` messages of the conversation's active branch, in chat format.

        Each tool call among them has a result, and no result is without its call.
        """
        known = as_conversation(conversation)
        assert known is not None

        async def read() -> list[Mapping[str, Any]]:
            store = self._stores().conversations
            if await store.get(known) is None:
                return []
            said = await store.history(known)
            return paired(chat_of(each) for each in (said if limit is None else said[-limit:] if limit else []))

        return await self._read(f"history:{known}:{limit}", read)

    async def preferences(self, user_id: str | None = None) -> Remembered[dict[str, Any]]:
        """What is preferred: of a user, what is kept under keys that begin with `<user_id>/`; else all there is."""

        async def read() -> dict[str, Any]:
            every = await self._stores().preferences.get_all()
            start = "" if user_id is None else f"{user_id}/"
            return {key.removeprefix(start): value for key, value in every.items() if key.startswith(start)}

        return await self._read(f"preferences:{user_id}", read)

    # -- reading

    async def _read(self, key: str, read: Callable[[], Awaitable[T]]) -> Remembered[T]:
        for attempt in range(1, TRIES + 1):
            try:
                value = await read()
            except Exception as error:
                if holds(error, LeaseLost):
                    raise
                if attempt < TRIES:
                    await self._clock.sleep(self._backoff(attempt, self._clock.random))
                    continue
                if key not in self._cache:
                    raise
                log.warning("%s cannot be read, it is told as it was last: %s", key, error)
                return Remembered(self._cached(key), True)
            self._keep(key, value)
            return Remembered(value)
        raise AssertionError("the last try returns or raises")

    def _keep(self, key: str, value: Any) -> None:
        # A text: nobody who got the value can change what is kept.
        try:
            text = encode(value, max_bytes=MAX_WHOLE)
        except UnserialisableResult:  # too large for a place beside its store
            self._size -= len(self._cache.pop(key, ""))
            return
        self._size += len(text) - len(self._cache.pop(key, ""))
        self._cache[key] = text
        while self._cache and (len(self._cache) > self._most or self._size > MAX_CACHED):
            self._size -= len(self._cache.popitem(last=False)[1])

    def _cached(self, key: str) -> Any:
        return decode(self._cache[key])
