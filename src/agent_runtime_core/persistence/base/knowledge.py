"""The contracts of stores for the memory of agents, for preferences, and for facts, summaries and embeddings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from ...errors import NotSupported
from ..documents.base import best, folded, text_in, words_of
from ..models import Embedding, Fact, FactType, Scope, Summary, moment

_SEARCHED = 10_000  # facts that a search without a full-text index reads, at most


class NoEmbeddings(NotSupported, NotImplementedError):
    """The store does not support embeddings."""


class KnowledgeStore(ABC):
    """Stores facts, summaries and, optionally, embeddings.

    The methods for embeddings raise NoEmbeddings, which is a NotImplementedError, unless a store implements them.
    """

    @abstractmethod
    async def save_fact(self, fact: Fact, scope: Scope = Scope.PROJECT) -> None:
        """Store a fact. An earlier fact with the same id is replaced.

        Args:
            fact: The fact.
            scope: The scope.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core.persistence import Fact, InMemoryKnowledgeStore
            >>> async def main():
            ...     store = InMemoryKnowledgeStore()
            ...     await store.save_fact(Fact(key="city", value="Ulm"))
            ...     return (await store.get_fact_by_key("city")).value
            >>> asyncio.run(main())
            'Ulm'
        """

    @abstractmethod
    async def get_fact(self, fact_id: UUID, scope: Scope = Scope.PROJECT) -> Fact | None:
        """Return a fact by its id, or None if there is none.

        Args:
            fact_id: The id of the fact.
            scope: The scope.
        """

    @abstractmethod
    async def get_fact_by_key(self, key: str, scope: Scope = Scope.PROJECT) -> Fact | None:
        """Return a fact by its key, or None if there is none.

        Args:
            key: The key of the fact.
            scope: The scope.
        """

    @abstractmethod
    async def list_facts(
        self, scope: Scope = Scope.PROJECT, fact_type: FactType | None = None, limit: int = 100
    ) -> list[Fact]:
        """Return at most `limit` facts, of one type or of all, the newest first.

        Args:
            scope: The scope.
            fact_type: Only facts of this type. If None, of all types.
            limit: At most this many facts.
        """

    @abstractmethod
    async def delete_fact(self, fact_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        """Delete a fact, and return whether it existed.

        Args:
            fact_id: The id of the fact.
            scope: The scope.

        Returns:
            Whether the fact existed.
        """

    @abstractmethod
    async def save_summary(self, summary: Summary, scope: Scope = Scope.PROJECT) -> None:
        """Store a summary. An earlier summary with the same id is replaced.

        Args:
            summary: The summary.
            scope: The scope.
        """

    @abstractmethod
    async def get_summary(self, summary_id: UUID, scope: Scope = Scope.PROJECT) -> Summary | None:
        """Return a summary by its id, or None if there is none.

        Args:
            summary_id: The id of the summary.
            scope: The scope.
        """

    @abstractmethod
    async def get_summaries_for_conversation(
        self, conversation_id: UUID, scope: Scope = Scope.PROJECT
    ) -> list[Summary]:
        """Return the summaries of a conversation, the newest first.

        Args:
            conversation_id: The id of the conversation.
            scope: The scope.
        """

    @abstractmethod
    async def delete_summary(self, summary_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        """Delete a summary, and return whether it existed.

        Args:
            summary_id: The id of the summary.
            scope: The scope.

        Returns:
            Whether the summary existed.
        """

    async def search_facts(self, query: str, scope: Scope = Scope.PROJECT, limit: int = 20) -> list[Fact]:
        """Return at most `limit` facts that contain all words of `query`, the best match first.

        A fact contains the words of its key, its source and the strings in its value. Case and accents are ignored. The
        last word of `query` also matches words that begin with it. The built-in stores use the full-text index of their
        backend if there is one. Here the newest 10,000 facts are read.

        Args:
            query: The words.
            scope: The scope to search.
            limit: At most this many facts.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core.persistence import Fact, InMemoryKnowledgeStore
            >>> async def main():
            ...     store = InMemoryKnowledgeStore()
            ...     await store.save_fact(Fact(key="city", value="Ulm an der Donau"))
            ...     return [fact.key for fact in await store.search_facts("donau")]
            >>> asyncio.run(main())
            ['city']
        """
        facts = await self.list_facts(scope, None, _SEARCHED)
        texts = (
            (str(n), moment(each.created_at), folded(text_in([each.key, each.value, each.source])))
            for n, each in enumerate(facts)
        )
        return [facts[int(n)] for n in best(words_of(query), texts, limit)]

    async def save_embedding(self, embedding: Embedding, scope: Scope = Scope.PROJECT) -> None:
        """Store a text with its vector.

        Args:
            embedding: The text with its vector.
            scope: The scope.

        Raises:
            NoEmbeddings: This store does not support embeddings.
        """
        raise self._no_embeddings()

    async def search_similar(
        self,
        query_vector: Sequence[float],
        limit: int = 10,
        scope: Scope = Scope.PROJECT,
        content_type: str | None = None,
    ) -> list[tuple[Embedding, float]]:
        """Return the embeddings that are most similar to a vector, the most similar first.

        Args:
            query_vector: The vector to compare with.
            limit: At most this many embeddings.
            scope: The scope to search.
            content_type: Only embeddings of this content type. If None, of all types.

        Returns:
            Pairs of an embedding and its cosine similarity, from -1 to 1.

        Raises:
            NoEmbeddings: This store does not support embeddings.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core.persistence import Embedding, InMemoryKnowledgeStore
            >>> async def main():
            ...     store = InMemoryKnowledgeStore()
            ...     await store.save_embedding(Embedding(vector=[1.0, 0.0], content="Ulm"))
            ...     await store.save_embedding(Embedding(vector=[0.0, 1.0], content="Paris"))
            ...     return [found.content for found, _ in await store.search_similar([0.9, 0.1], limit=1)]
            >>> asyncio.run(main())
            ['Ulm']
        """
        raise self._no_embeddings()

    async def delete_embedding(self, embedding_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        """Delete an embedding, and return whether it existed.

        Args:
            embedding_id: The id of the embedding.
            scope: The scope.

        Returns:
            Whether the embedding existed.

        Raises:
            NoEmbeddings: This store does not support embeddings.
        """
        raise self._no_embeddings()

    def _no_embeddings(self) -> NoEmbeddings:
        return NoEmbeddings(
            f"{type(self).__name__} does not support embeddings. Use a store of agent_runtime_core.persistence."
        )

    async def close(self) -> None:  # noqa: B027 - many stores have nothing to release
        """Release the connections and files of this store."""


class MemoryStore(ABC):
    """Stores the values that an agent remembers, by key.

    A value is anything that a step may return: JSON, and the further types that the library encodes.
    """

    @abstractmethod
    async def get(self, key: str, scope: Scope = Scope.PROJECT) -> Any | None:
        """Return the value of a key, or None if there is none.

        Args:
            key: The key.
            scope: The scope.
        """

    @abstractmethod
    async def set(self, key: str, value: Any, scope: Scope = Scope.PROJECT) -> None:
        """Store a value under a key. An earlier value is replaced.

        Args:
            key: The key.
            value: The value.
            scope: The scope.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core.persistence import InMemoryMemoryStore
            >>> async def main():
            ...     store = InMemoryMemoryStore()
            ...     await store.set("city", "Ulm")
            ...     return await store.get("city"), await store.get("country")
            >>> asyncio.run(main())
            ('Ulm', None)
        """

    @abstractmethod
    async def delete(self, key: str, scope: Scope = Scope.PROJECT) -> bool:
        """Delete a key, and return whether it existed.

        Args:
            key: The key.
            scope: The scope.

        Returns:
            Whether the key existed.
        """

    @abstractmethod
    async def list_keys(self, scope: Scope = Scope.PROJECT, prefix: str | None = None) -> list[str]:
        """Return the keys that begin with `prefix`, sorted. None returns all keys.

        Args:
            scope: The scope.
            prefix: How the keys begin. If None, any key.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core.persistence import InMemoryMemoryStore
            >>> async def main():
            ...     store = InMemoryMemoryStore()
            ...     for key in ("trip:2", "trip:1", "city"):
            ...         await store.set(key, True)
            ...     return await store.list_keys(prefix="trip:")
            >>> asyncio.run(main())
            ['trip:1', 'trip:2']
        """

    @abstractmethod
    async def clear(self, scope: Scope = Scope.PROJECT) -> None:
        """Delete all keys of a scope.

        Args:
            scope: The scope.
        """

    async def change(self, key: str, fn: Callable[[Any | None], Any], scope: Scope = Scope.PROJECT) -> Any:
        """Replace the value of a key by `fn(value)`, and return the new value.

        The built-in stores compare and set. So no change of another writer is lost, and `fn` is called again after
        each conflict. Here it is a `get` and a `set`: a change between the two is lost.

        Args:
            key: The key to change.
            fn: Receives the present value, or None, and returns the new value. It must not cause side effects.
            scope: The scope of the key.

        Returns:
            The new value.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core.persistence import InMemoryMemoryStore
            >>> async def main():
            ...     store = InMemoryMemoryStore()
            ...     await store.change("visits", lambda visits: (visits or 0) + 1)
            ...     return await store.change("visits", lambda visits: (visits or 0) + 1)
            >>> asyncio.run(main())
            2
        """
        value = fn(await self.get(key, scope))
        await self.set(key, value, scope)
        return value

    async def close(self) -> None:  # noqa: B027 - many stores have nothing to release
        """Release the connections and files of this store."""


class PreferencesStore(ABC):
    """Stores the preferences of a user by key. By default the scope is the user in all projects."""

    @abstractmethod
    async def get(self, key: str, scope: Scope = Scope.GLOBAL) -> Any | None:
        """Return the value of a key, or None if there is none.

        Args:
            key: The key.
            scope: The scope.
        """

    @abstractmethod
    async def set(self, key: str, value: Any, scope: Scope = Scope.GLOBAL) -> None:
        """Store a value under a key. An earlier value is replaced.

        Args:
            key: The key.
            value: The value.
            scope: The scope.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core.persistence import InMemoryPreferencesStore
            >>> async def main():
            ...     store = InMemoryPreferencesStore()
            ...     await store.set("language", "de")
            ...     return await store.get_all()
            >>> asyncio.run(main())
            {'language': 'de'}
        """

    @abstractmethod
    async def delete(self, key: str, scope: Scope = Scope.GLOBAL) -> bool:
        """Delete a key, and return whether it existed.

        Args:
            key: The key.
            scope: The scope.

        Returns:
            Whether the key existed.
        """

    @abstractmethod
    async def get_all(self, scope: Scope = Scope.GLOBAL) -> dict[str, Any]:
        """Return all values by their keys.

        Args:
            scope: The scope.
        """

    async def close(self) -> None:  # noqa: B027 - many stores have nothing to release
        """Release the connections and files of this store."""
