"""Documents on one Redis or Valkey server, shared by all processes that reach it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from ..._core.clock import SYSTEM, Clock
from ..._engines.backend import known_options
from ..._engines.base import OperationSet, engine_close, engine_commit, engine_read
from ..._engines.redis.engine import RedisEngine, redis_store
from ..._engines.redis.script import Codec, RedisOperationSet, as_list, lua_source
from ...errors import StorageCorrupt, brief
from .base import Document, DocumentMissing, DocumentStore, Entry, Query, VersionConflict

PAGE = 500  # documents in one answer, at most

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _entry(entry: Entry) -> tuple[Any, ...]:
    return entry.key, _encode(entry.text), entry.group, entry.rank, entry.expires, entry.words, entry.mark


def _put(space: str, kind: str, entry: Entry, expect: int | None, now: float) -> tuple[Any, ...]:
    return (space, kind, *_entry(entry), expect, now)


def _add(space: str, kind: str, entry: Entry, now: float) -> tuple[Any, ...]:
    return (space, kind, *_entry(entry), now)


def _placed(answer: list[Any]) -> tuple[int, float]:
    return answer[0], float(answer[1])


def _added(answer: list[Any] | None) -> float | None:
    return None if answer is None else float(answer[1])


def _documents(kind: str, told: Any) -> Iterable[Document]:
    for each in as_list(told):
        if isinstance(each, str):
            raise StorageCorrupt(f"{kind} {brief(each)} cannot be read; it is left as it is")
        key, version, rank, group, expires, text = each
        yield Document(key, text, version, float(rank), group, None if expires is None else float(expires))


async def _get(engine: RedisEngine, space: str, kind: str, keys: Sequence[str], now: float) -> list[Document]:
    found: list[Document] = []
    while keys:
        seen, told = await engine.ask("documents.get", space, kind, keys[:PAGE], now)
        found += _documents(kind, told)
        keys = keys[seen:]
    return found


async def _find(engine: RedisEngine, query: Query) -> list[Document]:
    space, kind, now, group, prefix, low, high, descending, offset, limit = query
    found: dict[str, Document] = {}
    after: list[Any] | None = None
    while limit is None or len(found) < limit:
        most = PAGE if limit is None else min(PAGE, limit - len(found))
        after, offset, told = await engine.ask(
            "documents.find", space, kind, now, group, prefix, low, high, descending, offset, most, after
        )
        for document in _documents(kind, told):
            found.setdefault(document.key, document)  # it may have moved on since
        if after is None:
            break
    return list(found.values())


async def _words(engine: RedisEngine, space: str, kind: str, now: float) -> list[tuple[str, float, str]]:
    found: list[tuple[str, float, str]] = []
    after: list[Any] | None = None
    while True:
        after, told = await engine.ask("documents.words", space, kind, now, after)
        found += [(key, float(rank), words) for key, rank, words in as_list(told)]
        if after is None:
            return found


def _corrupt() -> StorageCorrupt:
    return StorageCorrupt("a document that was to be changed cannot be read; it is left as it is")


CONCERN = RedisOperationSet(
    "documents",
    {},
    script="\n".join(lua_source(__file__, name) for name in ("redis_docs", "redis")),
    codecs={"documents.put": Codec(_put, _placed), "documents.add": Codec(_add, _added)},
    refusals={"CHANGED": VersionConflict, "ABSENT": DocumentMissing, "CORRUPT": _corrupt},
)


class RedisDocuments(DocumentStore):
    """Documents on one Redis or Valkey server, shared by all processes that reach it.

    What is found may take several answers, of 500 documents or 200 KB each, and each is of its own moment: a document
    is found once, and may be missed only if its rank was changed meanwhile.
    """

    operation_sets: ClassVar[Sequence[OperationSet]] = (CONCERN,)
    reads: ClassVar[Mapping[str, Callable[..., Any]]] = {"get": _get, "find": _find, "words": _words}

    commit = engine_commit
    read = engine_read
    close = engine_close

    def __init__(
        self, url: str | None = None, *, redis_url: str | None = None, engine: RedisEngine | None = None,
        clock: Clock = SYSTEM, **options: Any,
    ) -> None:  # fmt: skip
        with known_options(type(self), options):
            super().__init__(clock=getattr(engine, "clock", clock), **options)
        self._engine_store = redis_store(
            self.operation_sets, self.reads, url, redis_url=redis_url, engine=engine, clock=clock
        )
        self.engine: RedisEngine = self._engine_store.engine
