"""The memory of agents, preferences, facts, summaries and embeddings as documents."""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from uuid import UUID

from ..._core.codec.json import MAX_WHOLE, decode, encode
from ..._core.threads import in_thread
from ..._core.validation import must
from ..._engines.base import Op
from ...errors import TooManyVectors
from ..base.knowledge import KnowledgeStore, MemoryStore, PreferencesStore
from ..documents.base import PAGE, Collection, Document, Entry, retry_conflicts, text_in
from ..model_codec import model_of, text_of
from ..models import Embedding, Fact, FactType, Scope, Summary
from ..vectors import VectorIndex, dot, floats, unit
from .base import (
    MEMORY,
    PREFERENCE,
    ChangeLog,
    DocumentBackedStore,
    TrackedIndex,
    check_link,
    check_model,
    choice,
    escaped,
    id_text,
    of_space,
    original,
    seconds_of,
    stored_key,
)

MAX_VECTORS = 100_000  # in one scope
_MARGIN = 1000  # writes between two checks of the limit, while the scope is far from it
_STEP = 100  # vectors that are added to the index before other tasks of the event loop run
_VECTOR_NAME = frozenset({"vector"})
_VECTOR_FIELD = ',"vector":"'


class Vectors:
    """The embeddings of one table, at most `max_vectors`."""

    def __init__(self, table: Collection, max_vectors: int) -> None:
        self._table = table
        self._log = ChangeLog(table)
        self._max_vectors = max_vectors
        self._unchecked_writes = 0
        self._index = TrackedIndex(table, self._log, partial(_EmbeddingIndex, self._reject_excess))

    # -- writing

    async def save(self, embedding: Embedding) -> None:
        check_model(Embedding, embedding)
        vector = floats(embedding.vector, f"the vector of embedding {embedding.id}")
        if embedding.dimensions not in (0, len(vector)):
            raise must(
                f"dimensions of embedding {embedding.id}",
                f"be 0 or {len(vector)}, the length of its vector",
                embedding.dimensions,
            )
        key = id_text(embedding.id, "embedding")
        await self._check_limit(key)
        rank = seconds_of(embedding.created_at, "created_at")
        entry = Entry(key, _encode(embedding, vector), stored_key(embedding.content_type, "content_type"), rank)
        _, *log_ranks = await self._table.write(self._table.put(entry), *self._log.note([key]))
        self._unchecked_writes -= 1
        await self._log.trim(log_ranks)

    async def delete(self, key: str) -> bool:
        existed, *log_ranks = await self._table.write(self._table.delete(key), *self._log.note([key]))
        await self._log.trim(log_ranks)
        return bool(existed)

    async def _check_limit(self, key: str) -> None:
        """Reject a new embedding if the table is full.

        The limit is checked once for several writes. So concurrent writers may exceed it, each by up to `_MARGIN`.
        """
        if self._unchecked_writes > 0:
            return
        for margin in (min(_MARGIN, self._max_vectors), 1):
            if not await self._table.find(offset=max(0, self._max_vectors - margin), limit=1):
                self._unchecked_writes = margin
                return
        if await self._table.get(key) is None:
            self._reject_excess(self._max_vectors + 1)

    def _reject_excess(self, count: int) -> None:
        if count > self._max_vectors:
            raise TooManyVectors(
                f"a scope must have at most {self._max_vectors:,} embeddings, because a search reads all of them. "
                "Store more in a vector database (with a custom KnowledgeStore that implements save_embedding, "
                "search_similar and delete_embedding), or use several projects."
            )

    # -- searching

    async def search(self, vector: array[float], limit: int, content_type: str | None) -> list[tuple[Embedding, float]]:
        index = await self._index.current()
        while limit:
            keys = await index.search(vector, limit, content_type and escaped(content_type))
            found = await self._table.many(keys)
            if len(found) == len(keys):
                return _with_scores(found, vector)
            # The change log does not contain documents that expired.
            for key in set(keys) - {each.key for each in found}:
                index.drop(key)
        return []


class _EmbeddingIndex(VectorIndex):
    """The vectors of a table. `load` calls `reject_excess` with their number."""

    def __init__(self, reject_excess: Callable[[int], None]) -> None:
        super().__init__()
        self._reject_excess = reject_excess

    async def load(self, documents: Sequence[Document]) -> None:
        await in_thread(self.put_all, map(_index_item, documents))
        self._reject_excess(len(self))

    async def add(self, documents: Sequence[Document]) -> None:
        for number, each in enumerate(documents, 1):
            self.put(*_index_item(each))
            if number % _STEP == 0:
                await asyncio.sleep(0)


def _encode(embedding: Embedding, vector: array[float]) -> str:
    """Return the text of an embedding. It ends with the vector, as base64 of little-endian doubles."""
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    packed = base64.b64encode(vector.tobytes()).decode("ascii")
    return f'{text_of(embedding, leave_out=_VECTOR_NAME)[:-1]}{_VECTOR_FIELD}{packed}"}}'


def _decode_vector(text: str) -> array[float]:
    vector = array("d", base64.b64decode(text.rpartition(_VECTOR_FIELD)[2][:-2]))
    if sys.byteorder == "big":
        vector.byteswap()
    return vector


def _index_item(document: Document) -> tuple[str, str, float, array[float]]:
    return document.key, document.group, document.rank, _decode_vector(document.text)


def _with_scores(documents: Sequence[Document], vector: array[float]) -> list[tuple[Embedding, float]]:
    def scores() -> Iterator[tuple[float, float, str, Document]]:
        direction = unit(vector)
        for each in documents:
            yield -dot(unit(_decode_vector(each.text)), direction), each.rank, each.key, each

    return [
        (model_of(Embedding, each.text, vector=_decode_vector(each.text).tolist()), -score)
        for score, _, _, each in sorted(scores())
    ]


_INDEXED_SPACES = 64  # whose vectors are in memory at the same time, at most


class StoredKnowledge(DocumentBackedStore, KnowledgeStore):
    """Stores facts, summaries and embeddings."""

    max_vectors: int = MAX_VECTORS
    """How many embeddings a scope may have."""

    def __init__(self, *place: Any, **options: Any) -> None:
        super().__init__(*place, **options)
        self._vectors: dict[str, Vectors] = {}

    # -- facts

    async def save_fact(self, fact: Fact, scope: Scope | None = None) -> None:
        check_model(Fact, fact)
        choice(FactType, fact.fact_type, "fact_type")
        group = stored_key(fact.key, "key")
        expires = None if fact.expires_at is None else seconds_of(fact.expires_at, "expires_at")
        key, rank, text = id_text(fact.id, "fact"), seconds_of(fact.created_at, "created_at"), text_of(fact)
        words = text_in(
            [fact.key, fact.value, fact.source]
        )  # after text_of, which rejects a cyclic value: text_in would not end
        table = self.home.table(scope, "fact")
        entry = Entry(key, text, group, rank, expires, words)
        await table.write(table.put(entry))

    async def get_fact(self, fact_id: UUID, scope: Scope | None = None) -> Fact | None:
        found = await self.home.table(scope, "fact").get(id_text(fact_id, "fact"))
        return None if found is None else model_of(Fact, found.text)

    async def get_fact_by_key(self, key: str, scope: Scope | None = None) -> Fact | None:
        """Return the newest fact with this key that is not expired, or None.

        Args:
            key: The key of the fact.
            scope: The scope.
        """
        found = await self.home.table(scope, "fact").find(stored_key(key, "key"), descending=True, limit=1)
        return model_of(Fact, found[0].text) if found else None

    async def list_facts(
        self, scope: Scope | None = None, fact_type: FactType | None = None, limit: int = 100
    ) -> list[Fact]:
        """Return at most `limit` facts, of one type or of all, the newest first.

        Args:
            scope: The scope.
            fact_type: Only facts of this type. If None, of all types.
            limit: At most this many facts.
        """
        _check_limit(limit)
        wanted_type = None if fact_type is None else choice(FactType, fact_type, "fact_type")
        facts: list[Fact] = []
        async for page in self.home.table(scope, "fact").pages(descending=True, size=max(1, min(limit, PAGE))):
            facts += [fact for fact in _facts(page) if wanted_type in (None, fact.fact_type)]
            if len(facts) >= limit:
                break
        return facts[:limit]

    async def search_facts(self, query: str, scope: Scope | None = None, limit: int = 20) -> list[Fact]:
        """Return at most `limit` facts that contain all words of `query`, the best match first.

        Args:
            query: The words.
            scope: The scope to search.
            limit: At most this many facts.

        Raises:
            InvalidArgument: `query` is not a string, or `limit` is invalid.
        """
        _check_limit(limit)
        if not isinstance(query, str):
            raise must("query", "be a string", query)
        return list(_facts(await self.home.table(scope, "fact").search(query, limit=limit)))

    async def delete_fact(self, fact_id: UUID, scope: Scope | None = None) -> bool:
        table = self.home.table(scope, "fact")
        [stored] = await table.write(table.delete(id_text(fact_id, "fact")))
        return bool(stored)

    # -- summaries. For each of its conversations there is a `summary_link` document

    async def save_summary(self, summary: Summary, scope: Scope | None = None) -> None:
        check_model(Summary, summary)
        if not isinstance(summary.conversation_ids, list | tuple):
            raise must("conversation_ids", "be a list", summary.conversation_ids)
        for each in (summary.conversation_id, *summary.conversation_ids):
            check_link(each, "a conversation of a summary")
        table, links = self.home.table(scope, "summary"), self.home.table(scope, "summary_link")
        key, rank = id_text(summary.id, "summary"), seconds_of(summary.created_at, "created_at")
        entry = Entry(key, text_of(summary), rank=rank)

        async def attempt() -> None:
            stored = await table.get(key)
            ops = [table.put(entry, 0 if stored is None else stored.version), *_unlink(links, stored)]
            ops += [links.put(Entry(f"{each}/{key}", key, each, rank)) for each in _conversation_ids(summary)]
            await table.write(*ops)

        await retry_conflicts(f"summary {key}", attempt)

    async def get_summary(self, summary_id: UUID, scope: Scope | None = None) -> Summary | None:
        found = await self.home.table(scope, "summary").get(id_text(summary_id, "summary"))
        return None if found is None else model_of(Summary, found.text)

    async def get_summaries_for_conversation(self, conversation_id: UUID, scope: Scope | None = None) -> list[Summary]:
        """Return the summaries whose `conversation_id` or `conversation_ids` contain it, the newest first.

        Args:
            conversation_id: The id of the conversation.
            scope: The scope.
        """
        links = self.home.table(scope, "summary_link")
        keys = [each.text for each in await links.find(id_text(conversation_id, "conversation"), descending=True)]
        found = await self.home.table(scope, "summary").many(keys)
        return [model_of(Summary, each.text) for each in found]

    async def delete_summary(self, summary_id: UUID, scope: Scope | None = None) -> bool:
        table, links = self.home.table(scope, "summary"), self.home.table(scope, "summary_link")
        stored = await table.get(id_text(summary_id, "summary"))
        results = await table.write(table.delete(id_text(summary_id, "summary")), *_unlink(links, stored))
        return bool(results[0])

    # -- embeddings

    def _embeddings(self, scope: Scope | None) -> Vectors:
        table = self.home.table(scope, "embedding")
        return of_space(self._vectors, table.space, lambda: Vectors(table, self.max_vectors), _INDEXED_SPACES)

    async def save_embedding(self, embedding: Embedding, scope: Scope | None = None) -> None:
        """Store a text with its vector.

        Args:
            embedding: The text with its vector.
            scope: The scope.

        Raises:
            InvalidArgument: The vector is empty, contains only zeros, does not have the length `dimensions`, or
                contains a component that is not a finite number.
            TooManyVectors: The scope already contains `max_vectors` embeddings.
        """
        await self._embeddings(scope).save(embedding)

    async def search_similar(
        self,
        query_vector: Sequence[float],
        limit: int = 10,
        scope: Scope | None = None,
        content_type: str | None = None,
    ) -> list[tuple[Embedding, float]]:
        _check_limit(limit)
        return await self._embeddings(scope).search(floats(query_vector, "query_vector"), limit, content_type)

    async def delete_embedding(self, embedding_id: UUID, scope: Scope | None = None) -> bool:
        return await self._embeddings(scope).delete(id_text(embedding_id, "embedding"))

    async def close(self) -> None:
        self._vectors.clear()
        await super().close()


def _facts(documents: Iterable[Document]) -> Iterator[Fact]:
    return (model_of(Fact, each.text) for each in documents)


def _conversation_ids(summary: Summary) -> list[str]:
    """Return the ids of the conversations of a summary, each once."""
    ids = [summary.conversation_id, *summary.conversation_ids]
    return list(dict.fromkeys(str(each) for each in ids if each is not None))


def _unlink(links: Collection, stored: Document | None) -> list[Op]:
    if stored is None:
        return []
    return [links.delete(f"{each}/{stored.key}") for each in _conversation_ids(model_of(Summary, stored.text))]


def _check_limit(limit: object) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise must("limit", "be an integer of at least 0", limit)


class StoredMemory(DocumentBackedStore, MemoryStore):
    """Stores values by key. A value is encoded as JSON text."""

    async def get(self, key: str, scope: Scope | None = None) -> Any | None:
        found = await self.home.table(scope, MEMORY).get(stored_key(key))
        return None if found is None else decode(found.text)

    async def set(self, key: str, value: Any, scope: Scope | None = None) -> None:
        table = self.home.table(scope, MEMORY)
        await table.write(table.put(_entry(stored_key(key), value)))

    async def change(self, key: str, fn: Callable[[Any | None], Any], scope: Scope | None = None) -> Any:
        document_key, new_value = stored_key(key), None

        def changed(stored: Document | None) -> Entry:
            nonlocal new_value
            new_value = fn(None if stored is None else decode(stored.text))
            return _entry(document_key, new_value)

        await self.home.table(scope, MEMORY).change(document_key, changed)
        return new_value

    async def delete(self, key: str, scope: Scope | None = None) -> bool:
        table = self.home.table(scope, MEMORY)
        [existed] = await table.write(table.delete(stored_key(key)))
        return bool(existed)

    async def list_keys(self, scope: Scope | None = None, prefix: str | None = None) -> list[str]:
        if not isinstance(prefix, str | None):
            raise must("prefix", "be a string or None", prefix)
        found = await self.home.table(scope, MEMORY).find(prefix=escaped(prefix or ""))
        return sorted(original(each.key) for each in found)

    async def clear(self, scope: Scope | None = None) -> None:
        table = self.home.table(scope, MEMORY)
        await table.write(table.clear())


def _entry(key: str, value: Any) -> Entry:
    return Entry(key, encode(value, max_bytes=MAX_WHOLE), rank=0.0)


class StoredPreferences(DocumentBackedStore, PreferencesStore):
    """Stores preferences by key. A value is encoded as JSON text."""

    async def get(self, key: str, scope: Scope | None = None) -> Any | None:
        found = await self._table(scope).get(stored_key(key))
        return None if found is None else decode(found.text)

    async def set(self, key: str, value: Any, scope: Scope | None = None) -> None:
        table = self._table(scope)
        await table.write(table.put(Entry(stored_key(key), encode(value), rank=0.0)))

    async def delete(self, key: str, scope: Scope | None = None) -> bool:
        table = self._table(scope)
        [existed] = await table.write(table.delete(stored_key(key)))
        return bool(existed)

    async def get_all(self, scope: Scope | None = None) -> dict[str, Any]:
        found = await self._table(scope).find()
        return {key: decode(text) for key, text in sorted((original(each.key), each.text) for each in found)}

    def _table(self, scope: Scope | None) -> Collection:
        return self.home.table(scope, PREFERENCE, Scope.GLOBAL)
