"""Facts, summaries, and texts found by their vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from uuid import UUID

from ...errors import NotSupported
from ..documents.full_text import best, folded, text_in, words_of
from ..models import Embedding, Fact, FactType, Scope, Summary, moment

_SEARCHED = 10_000  # facts


class NoEmbeddings(NotSupported, NotImplementedError):
    """This store keeps no embeddings."""


class KnowledgeStore(ABC):
    """What was learned. Embeddings are optional: a store without them raises NotImplementedError."""

    @abstractmethod
    async def save_fact(self, fact: Fact, scope: Scope = Scope.PROJECT) -> None: ...

    @abstractmethod
    async def get_fact(self, fact_id: UUID, scope: Scope = Scope.PROJECT) -> Fact | None: ...

    @abstractmethod
    async def get_fact_by_key(self, key: str, scope: Scope = Scope.PROJECT) -> Fact | None: ...

    @abstractmethod
    async def list_facts(
        self, scope: Scope = Scope.PROJECT, fact_type: FactType | None = None, limit: int = 100
    ) -> list[Fact]: ...

    @abstractmethod
    async def delete_fact(self, fact_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        """Whether there was one."""

    @abstractmethod
    async def save_summary(self, summary: Summary, scope: Scope = Scope.PROJECT) -> None: ...

    @abstractmethod
    async def get_summary(self, summary_id: UUID, scope: Scope = Scope.PROJECT) -> Summary | None: ...

    @abstractmethod
    async def get_summaries_for_conversation(
        self, conversation_id: UUID, scope: Scope = Scope.PROJECT
    ) -> list[Summary]: ...

    @abstractmethod
    async def delete_summary(self, summary_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        """Whether there was one."""

    async def search_facts(self, query: str, scope: Scope = Scope.PROJECT, limit: int = 20) -> list[Fact]:
        """Facts with all words of `query` in their key, source and texts of their value, best first.

        Words are compared without case and accents; the last one may be the start of another. Ours ask the full-text
        index of their store where it has one; here the newest 10,000 facts are read.
        """
        facts = await self.list_facts(scope, None, _SEARCHED)
        texts = (
            (str(n), moment(each.created_at), folded(text_in([each.key, each.value, each.source])))
            for n, each in enumerate(facts)
        )
        return [facts[int(n)] for n in best(words_of(query), texts, limit)]

    async def save_embedding(self, embedding: Embedding, scope: Scope = Scope.PROJECT) -> None:
        raise NoEmbeddings(f"{type(self).__name__} keeps no embeddings")

    async def search_similar(
        self,
        query_vector: Sequence[float],
        limit: int = 10,
        scope: Scope = Scope.PROJECT,
        content_type: str | None = None,
    ) -> list[tuple[Embedding, float]]:
        """The embeddings nearest to a vector with their cosine similarity, from -1 to 1, the nearest first."""
        raise NoEmbeddings(f"{type(self).__name__} keeps no embeddings")

    async def delete_embedding(self, embedding_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        """Whether there was one."""
        raise NoEmbeddings(f"{type(self).__name__} keeps no embeddings")

    async def close(self) -> None:  # noqa: B027 - many have nothing to let go of
        """Let go of what this store holds."""
