"""Read and write saved turns; read the conversations of turns, and user preferences."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from uuid import UUID

from .._core.clock import SYSTEM, Clock
from .._core.codec.json import MAX_WHOLE, decode, encode
from .._core.log import about_run, log
from .._execution.context import conversation_id as as_conversation
from ..errors import LeaseLost, UnserialisableResult, holds
from ..persistence.base.conversations import ConversationStore
from ..persistence.chat_format import paired
from ..persistence.document_stores.conversations import read_history
from ..persistence.manager import PersistenceManager
from ..persistence.stored_history import ChatPath, StoredHistory
from ..planning.memory_operations import RESERVED
from ..retry import Backoff
from .turn import StepState, Turn

T = TypeVar("T")

MAX_ATTEMPTS = 3
MAX_CACHED = 16 * 1024 * 1024  # characters of all cached values
#: The start of the keys of turns in the memory store.
KEY_PREFIX = f"{RESERVED}turn/"
#: A longer result is stored under its own key, so that it is not written again with each later step.
MAX_INLINE_CHARACTERS = 1024


def _result_key(turn_id: str, step: StepState) -> str:
    """Return the key of a result that is stored separately from its turn."""
    return f"{KEY_PREFIX}{turn_id}/{step.step_number}"


def _is_large(result: Any) -> bool:
    if isinstance(result, str):
        return len(result) > MAX_INLINE_CHARACTERS
    try:
        return len(encode(result, max_bytes=MAX_WHOLE)) > MAX_INLINE_CHARACTERS
    except UnserialisableResult:  # the store raises the same error, with the name of the value
        return True


def _without_separate_results(turn: Turn, stored: dict[str, Any]) -> dict[str, Any]:
    """Replace each separately stored result by the mark `apart`. Changes `stored`."""
    for step, plain in zip(turn.steps, stored["steps"], strict=True):
        # `apart` is True if the result is stored and was not loaded.
        if step.apart is not None and plain["result"] is (None if step.apart is True else step.apart):
            plain["result"], plain["apart"] = None, True
    return stored


@dataclass(frozen=True)
class Remembered(Generic[T]):
    """A value that was read. `stale` means that the store was unavailable and this is its last known value.

    Attributes:
        value: The value.
        stale: Whether the store was unavailable, so that this is the last known value.
    """

    value: T
    stale: bool = False


class ContextManager:
    """Reads and writes turns, and reads histories and preferences, in the stores of a PersistenceManager.

    A failed read is attempted three times, with growing delays. Then the last known value is returned, marked as stale.
    Without a known value, the error is raised.

    Args:
        persistence: Returns the stores; called for each access.
        clock: Its `sleep` is used between attempts.
        cached: How many of the last values are kept for that, 16 Mi characters together at most.
        backoff: The delays between attempts, in seconds; by default 0.05, then 0.2.
    """

    def __init__(
        self, persistence: Callable[[], PersistenceManager], *, clock: Clock = SYSTEM, cached: int = 512,
        backoff: Backoff | None = None,
    ) -> None:  # fmt: skip
        self._stores, self._clock = persistence, clock
        self._backoff = backoff or Backoff(base=0.05, factor=4.0, jitter="none")
        self._last_values = _LastValues(cached)
        self._tenant: str | None = None

    def for_tenant(self, tenant: str | None) -> ContextManager:
        """Return a manager of the turns, histories and preferences of a tenant. None returns this manager.

        Args:
            tenant: The tenant, or None.
        """
        if tenant is None:
            return self
        found = copy.copy(self)
        found._stores, found._tenant = lambda: self._stores().for_tenant(tenant), tenant
        return found

    # -- turns

    async def get_turn(self, turn_id: str) -> Turn | None:
        """Return the turn as last saved, None if it never was; `stale` is True if its store was unavailable.

        Args:
            turn_id: The id of the turn.
        """
        key = KEY_PREFIX + turn_id
        found = await self._read(key, lambda: self._stores().memory.get(key), turn_id)
        if found.value is None:
            return None
        turn = Turn.from_dict(found.value)
        turn.stale = found.stale
        for step in turn.steps:
            if step.apart is not None:
                await self._fetch(turn, step)
        return turn

    async def save_turn(self, turn: Turn) -> None:
        """Save the turn. A result of more than 1,024 characters is written once, not with each later step.

        Raises:
            LeaseLost: Called inside the turn's run, and another worker took the run over.
        """
        stored = turn.to_dict()
        for step, plain in zip(turn.steps, stored["steps"], strict=True):
            result = plain["result"]
            if result is not None and step.apart is not result and _is_large(result):
                await self._put(_result_key(turn.id, step), result)
                step.apart = result
        await self._put(KEY_PREFIX + turn.id, _without_separate_results(turn, stored))

    async def change_turn(self, turn_id: str, change: Callable[[Turn], None]) -> Turn | None:
        """Change a saved turn without losing concurrent changes.

        Args:
            turn_id: The id of the turn.
            change: Changes the turn it gets. Results of more than 1,024 characters are missing in that turn.

        Returns:
            The changed turn, or None if none is saved.
        """

        def changed(stored: Any) -> Any:
            if stored is None:
                return None
            turn = Turn.from_dict(stored)
            change(turn)
            return _without_separate_results(turn, turn.to_dict())

        stored = await self._stores().memory.change(KEY_PREFIX + turn_id, changed)
        self._remember(KEY_PREFIX + turn_id, stored)
        return None if stored is None else await self.get_turn(turn_id)

    async def forget_turn(self, turn_id: str) -> bool:
        """Delete the saved turn and its results. Return whether the turn was saved."""
        memory = self._stores().memory
        for key in await memory.list_keys(prefix=f"{KEY_PREFIX}{turn_id}/"):
            await self._drop(key)
        return await self._drop(KEY_PREFIX + turn_id)

    async def _fetch(self, turn: Turn, step: StepState) -> None:
        """Load the result of a step that is stored separately."""
        key = _result_key(turn.id, step)
        found = await self._read(key, lambda: self._stores().memory.get(key), turn.id)
        step.result = step.apart = found.value
        turn.stale = turn.stale or found.stale

    async def _put(self, key: str, value: Any) -> None:
        await self._stores().memory.set(key, value)
        self._remember(key, value)

    async def _drop(self, key: str) -> bool:
        self._forget(key)
        return await self._stores().memory.delete(key)

    # -- histories and preferences

    async def history(self, conversation: UUID | str, limit: int | None = None) -> Remembered[list[Mapping[str, Any]]]:
        """Return the last `limit` messages of the conversation's active branch, in chat format; None is no limit.

        Tool calls without a result, and results without their call, are left out.

        Args:
            conversation: The conversation.
            limit: At most this many messages; None is no limit.
        """
        id_ = as_conversation(conversation)
        assert id_ is not None
        found = await self.conversation(self._stores().conversations, id_)
        leaf = None if found.value is None else found.value.leaf()
        path = ChatPath() if found.value is None or leaf is None else await found.value.path_to(leaf.id)
        chats = [*path.prompts, *path.chats]
        return Remembered(paired(chats if limit is None else chats[-limit:] if limit else []), found.stale)

    async def conversation(self, store: ConversationStore, conversation_id: UUID) -> Remembered[StoredHistory | None]:
        """Return the messages of a conversation for readers that do not modify them; None if it does not exist.

        The runner reads the conversation of a turn with it.

        Args:
            store: The store of the conversation.
            conversation_id: The id of the conversation.
        """
        key = f"conversation {conversation_id}"
        found = await self._read(key, lambda: read_history(store, conversation_id))
        if found.value is None:  # nobody knows what was said since
            self._forget(key)
        return found

    async def preferences(self, user_id: str | None = None) -> Remembered[dict[str, Any]]:
        """Return all preferences, or the preferences of a user: keys with the prefix `<user_id>/`, without it.

        Args:
            user_id: The user. None returns all preferences.
        """

        async def read() -> dict[str, Any]:
            every = await self._stores().preferences.get_all()
            start = "" if user_id is None else f"{user_id}/"
            return {key.removeprefix(start): value for key, value in every.items() if key.startswith(start)}

        return await self._read(f"preferences:{user_id}", read)

    # -- reading

    async def _read(self, key: str, read: Callable[[], Awaitable[T]], turn_id: str | None = None) -> Remembered[T]:
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                value = await read()
            except Exception as error:
                if holds(error, LeaseLost):
                    raise
                if attempt < MAX_ATTEMPTS:
                    await self._clock.sleep(self._backoff(attempt, self._clock.random))
                    continue
                if (self._tenant, key) not in self._last_values:
                    raise
                about = None if turn_id is None else about_run(turn_id, turn_id=turn_id)
                log.warning("reading %s failed; using its last known value: %s", key, error, extra=about)
                return Remembered(self._last_values.get((self._tenant, key)), True)
            self._remember(key, value)
            return Remembered(value)
        raise AssertionError("the last attempt returns or raises")

    def _remember(self, key: str, value: Any) -> None:
        self._last_values.put((self._tenant, key), value)

    def _forget(self, key: str) -> None:
        self._last_values.drop((self._tenant, key))


class _LastValues:
    """The values that were read last, by tenant and key."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._cache: OrderedDict[tuple[str | None, str], str | StoredHistory] = OrderedDict()
        self._size = 0  # characters of all cached values

    def __contains__(self, key: tuple[str | None, str]) -> bool:
        return key in self._cache

    def put(self, key: tuple[str | None, str], value: Any) -> None:
        # Encoded, so that a caller who changes the value does not change the cache. Nobody changes a history.
        self.drop(key)
        try:
            kept = value if isinstance(value, StoredHistory) else encode(value, max_bytes=MAX_WHOLE)
        except UnserialisableResult:  # too large for the cache
            return
        self._size += _size_of(kept)
        self._cache[key] = kept
        while self._cache and (len(self._cache) > self._most or self._size > MAX_CACHED):
            self._size -= _size_of(self._cache.popitem(last=False)[1])

    def drop(self, key: tuple[str | None, str]) -> None:
        self._size -= _size_of(self._cache.pop(key, ""))

    def get(self, key: tuple[str | None, str]) -> Any:
        kept = self._cache[key]
        return decode(kept) if isinstance(kept, str) else kept


def _size_of(kept: str | StoredHistory) -> int:
    return len(kept) if isinstance(kept, str) else kept.characters
