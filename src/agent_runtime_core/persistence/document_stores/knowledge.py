"""The memory of agents, preferences, facts, summaries and embeddings as documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from uuid import UUID

from ..._core.codec.json import MAX_WHOLE, decode, encode
from ..._core.validation import must
from ..._engines.base import Op
from ..base.knowledge import KnowledgeStore, MemoryStore, PreferencesStore
from ..documents.base import PAGE, Collection, Document, Entry, retry_conflicts, text_in
from ..model_codec import model_of, text_of
from ..models import Embedding, Fact, FactType, Scope, Summary
from ..vectors import floats
from .base import (
    MEMORY,
    PREFERENCE,
    DocumentBackedStore,
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
from .embeddings import MAX_VECTORS, Vectors

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
        """Return the newest fact with this key that has not expired, or None."""
        found = await self.home.table(scope, "fact").find(stored_key(key, "key"), descending=True, limit=1)
        return model_of(Fact, found[0].text) if found else None

    async def list_facts(
        self, scope: Scope | None = None, fact_type: FactType | None = None, limit: int = 100
    ) -> list[Fact]:
        """Return at most `limit` facts, of one type or of all, the newest first."""
        _check_limit(limit)
        wanted_type = None if fact_type is None else choice(FactType, fact_type, "fact_type")
        facts: list[Fact] = []
        async for page in self.home.table(scope, "fact").pages(descending=True, size=max(1, min(limit, PAGE))):
            facts += [fact for fact in _facts(page) if wanted_type in (None, fact.fact_type)]
            if len(facts) >= limit:
                break
        return facts[:limit]

    async def search_facts(self, query: str, scope: Scope | None = None, limit: int = 20) -> list[Fact]:
        """Return at most `limit` facts that contain all words of `query`, the best match first."""
        _check_limit(limit)
        if not isinstance(query, str):
            raise must("query", "be a string", query)
        return list(_facts(await self.home.table(scope, "fact").search(query, limit=limit)))

    async def delete_fact(self, fact_id: UUID, scope: Scope | None = None) -> bool:
        table = self.home.table(scope, "fact")
        [stored] = await table.write(table.delete(id_text(fact_id, "fact")))
        return bool(stored)

    # -- summaries. Each has a `summary_link` document for each of its conversations

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
        """Return the summaries whose `conversation_id` or `conversation_ids` contain it, the newest first."""
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

        Raises:
            InvalidArgument: The vector is empty, has only zeros, does not have the length `dimensions`, or has a
                component that is not a finite number.
            TooManyVectors: The scope has `max_vectors` embeddings already.
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
