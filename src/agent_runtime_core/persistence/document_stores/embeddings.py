"""The embeddings of one scope: their documents, and an index of their vectors in memory."""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ..._core.threads import in_thread
from ..._core.validation import must
from ...errors import TooManyVectors
from ..documents.base import Collection, Document, Entry
from ..model_codec import model_of, text_of
from ..models import Embedding
from ..vectors import VectorIndex, dot, floats, unit
from .base import ChangeLog, TrackedIndex, check_model, escaped, id_text, seconds_of, stored_key

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
