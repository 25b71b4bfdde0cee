"""Embeddings of one scope: their documents, and the index of their vectors that is kept up with them."""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import Iterator, Sequence

from ...errors import InvalidArgument, TooManyVectors, brief
from ...portal import in_thread
from ..documents.base import Document, Entry, Table
from ..forms import model_of, text_of
from ..index import Index
from ..models import Embedding
from ..vectors import dot, floats, unit
from .choices import check_model, seconds_of
from .feed import Feed, Mark
from .keys import escaped, id_text, stored_key
from .pages import pages

MAX_VECTORS = 100_000  # in one scope
_MARGIN = 1000  # so many more may be written before the room is measured again
_PART = 2000  # documents read at once for the index
_STEP = 100  # vectors that are added to it before others have their turn
_VECTOR = frozenset({"vector"})
_CUT = ',"vector":"'


class Vectors:
    """The embeddings of one table."""

    def __init__(self, table: Table, most: int) -> None:
        self._table = table
        self._feed = Feed(table)
        self._most = most
        self._room = 0
        self._index: Index | None = None
        self._mark: Mark | None = None

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
        _, *notes = await self._table.write(self._table.put(entry), *self._feed.note([key]))
        self._room -= 1
        await self._feed.trim(notes)

    async def delete(self, key: str) -> bool:
        there, *notes = await self._table.write(self._table.delete(key), *self._feed.note([key]))
        await self._feed.trim(notes)
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
            raise self._too_many()

    def _too_many(self) -> TooManyVectors:
        return TooManyVectors(
            f"a scope holds at most {self._most:,} embeddings, each of which a search looks at: keep more in a vector "
            "database (a KnowledgeStore of your own may have save_embedding, search_similar and delete_embedding ask "
            "it), or spread them over projects"
        )

    # -- searching

    async def search(
        self, vector: array[float], limit: int, content_type: str | None
    ) -> list[tuple[Embedding, float]]:  # fmt: skip
        index = await self._current()
        while limit:
            keys = await index.search(vector, limit, content_type and escaped(content_type))
            found = await self._table.many(keys)
            if len(found) == len(keys):
                return _rated(found, vector)
            # What has expired is told by nobody.
            for key in set(keys) - {each.key for each in found}:
                index.drop(key)
        return []

    async def _current(self) -> Index:
        changes = None if self._index is None else await self._feed.since(self._mark)
        if self._index is None or changes is None:
            return await self._load()
        (keys, mark), index = changes, self._index
        found = {each.key: each for each in await self._table.many(sorted(keys))}
        for number, key in enumerate(keys):
            if number % _STEP == _STEP - 1:
                await asyncio.sleep(0)
            if key in found:
                index.put(*_item(found[key]))
            else:
                index.drop(key)
        if index is self._index:
            self._mark = mark
        return index

    async def _load(self) -> Index:
        mark = await self._feed.last()
        index = Index()
        async for page in pages(self._table, size=_PART):
            await in_thread(index.put_all, map(_item, page))
            if len(index) > self._most:
                raise self._too_many()
        self._index, self._mark = index, mark
        return index


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
