"""Embeddings of one scope: their documents, and the index of their vectors that is kept up with them."""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ..._core.threads import in_thread
from ...errors import InvalidArgument, TooManyVectors, brief
from ..documents.base import Collection, Document, Entry
from ..model_codec import model_of, text_of
from ..models import Embedding
from ..vector_index import VectorIndex
from ..vectors import dot, floats, unit
from .arguments import check_model, escaped, id_text, seconds_of, stored_key
from .change_log import ChangeLog, TrackedIndex

MAX_VECTORS = 100_000  # in one scope
_MARGIN = 1000  # so many more may be written before the room is measured again
_STEP = 100  # vectors that are added to it before others have their turn
_VECTOR = frozenset({"vector"})
_CUT = ',"vector":"'


class Vectors:
    """The embeddings of one table."""

    def __init__(self, table: Collection, most: int) -> None:
        self._table = table
        self._log = ChangeLog(table)
        self._most = most
        self._room = 0
        self._index = TrackedIndex(table, self._log, partial(_EmbeddingIndex, self._refuse_more))

    # -- writing

    async def save(self, embedding: Embedding) -> None:
        check_model(Embedding, embedding)
        vector = floats(embedding.vector, f"the vector of embedding {embedding.id}")
        if embedding.dimensions not in (0, len(vector)):
            raise InvalidArgument(
                f"embedding {embedding.id} has {len(vector)} components, and dimensions={brief(embedding.dimensions)}"
            )
        key = id_text(embedding.id, "embedding")
        await self._make_room(key)
        rank = seconds_of(embedding.created_at, "created_at")
        entry = Entry(key, _text(embedding, vector), stored_key(embedding.content_type, "content_type"), rank)
        _, *notes = await self._table.write(self._table.put(entry), *self._log.note([key]))
        self._room -= 1
        await self._log.trim(notes)

    async def delete(self, key: str) -> bool:
        there, *notes = await self._table.write(self._table.delete(key), *self._log.note([key]))
        await self._log.trim(notes)
        return bool(there)

    async def _make_room(self, key: str) -> None:
        """Writers that are not told of each other may go over by what each has left of its margin."""
        if self._room > 0:
            return
        for room in (min(_MARGIN, self._most), 1):
            if not await self._table.find(offset=max(0, self._most - room), limit=1):
                self._room = room
                return
        if await self._table.get(key) is None:
            self._refuse_more(self._most + 1)

    def _refuse_more(self, count: int) -> None:
        if count > self._most:
            raise TooManyVectors(
                f"a scope holds at most {self._most:,} embeddings, each of which a search looks at: keep more in a "
                "vector database (a KnowledgeStore of your own may have save_embedding, search_similar and "
                "delete_embedding ask it), or spread them over projects"
            )

    # -- searching

    async def search(
        self, vector: array[float], limit: int, content_type: str | None
    ) -> list[tuple[Embedding, float]]:  # fmt: skip
        index = await self._index.current()
        while limit:
            keys = await index.search(vector, limit, content_type and escaped(content_type))
            found = await self._table.many(keys)
            if len(found) == len(keys):
                return _rated(found, vector)
            # What has expired is told by nobody.
            for key in set(keys) - {each.key for each in found}:
                index.drop(key)
        return []


class _EmbeddingIndex(VectorIndex):
    """The vectors of the table. `refuse_more` is called with their number."""

    def __init__(self, refuse_more: Callable[[int], None]) -> None:
        super().__init__()
        self._refuse_more = refuse_more

    async def load(self, documents: Sequence[Document]) -> None:
        await in_thread(self.put_all, map(_item, documents))
        self._refuse_more(len(self))

    async def add(self, documents: Sequence[Document]) -> None:
        for number, each in enumerate(documents, 1):
            self.put(*_item(each))
            if number % _STEP == 0:
                await asyncio.sleep(0)


def _text(embedding: Embedding, vector: array[float]) -> str:
    """The vector as the base64 of its doubles, the lowest byte first, at the end."""
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    packed = base64.b64encode(vector.tobytes()).decode("ascii")
    return f'{text_of(embedding, leave_out=_VECTOR)[:-1]}{_CUT}{packed}"}}'


def _vector(text: str) -> array[float]:
    vector = array("d", base64.b64decode(text.rpartition(_CUT)[2][:-2]))
    if sys.byteorder == "big":
        vector.byteswap()
    return vector


def _item(document: Document) -> tuple[str, str, float, array[float]]:
    return document.key, document.group, document.rank, _vector(document.text)


def _rated(documents: Sequence[Document], vector: array[float]) -> list[tuple[Embedding, float]]:
    def rate() -> Iterator[tuple[float, float, str, Document]]:
        mine = unit(vector)
        for each in documents:
            yield -dot(unit(_vector(each.text)), mine), each.rank, each.key, each

    return [
        (model_of(Embedding, each.text, vector=_vector(each.text).tolist()), -score)
        for score, _, _, each in sorted(rate())
    ]
