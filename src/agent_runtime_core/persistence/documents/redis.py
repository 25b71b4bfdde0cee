"""Document store on a Redis or Valkey server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from ..._engines.backend import OperationSets, Reads
from ..._engines.redis.engine import RedisBackend, RedisEngine
from ..._engines.redis.script import Codec, RedisOperationSet, as_list, lua_source
from ...errors import StorageCorrupt, brief
from .base import Document, DocumentMissing, DocumentStore, Entry, Query, VersionConflict

PAGE = 500  # documents in one reply, at most

_encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _encode_write(space: str, kind: str, entry: Entry, *rest: Any) -> tuple[Any, ...]:
    text = _encode_json(entry.text)
    return space, kind, entry.key, text, entry.group, entry.rank, entry.expires, entry.words, entry.mark, *rest


def _encode_rewrite(space: str, kind: str, key: str, old: str, new: str, *rest: Any) -> tuple[Any, ...]:
    return (space, kind, key, _encode_json(old), _encode_json(new), *rest)


def _encode_copy(space: str, kind: str, document: Document, words: str, now: float) -> tuple[Any, ...]:
    key, text, version, rank, group, expires = document
    return (
        space,
        kind,
        key,
        {"version": version, "rank": rank, "group": group, "body": _encode_json(text)},
        expires,
        words,
    )


def _decode_add(reply: list[Any] | None) -> float | None:
    return None if reply is None else float(reply[1])


def _documents(kind: str, reply: Any) -> Iterable[Document]:
    for each in as_list(reply):
        if isinstance(each, str):
            raise StorageCorrupt(
                f"{kind} {brief(each)} cannot be read. It was not modified. Restore it from a backup, or delete it."
            )
        key, version, rank, group, expires, text = each
        yield Document(key, text, version, float(rank), group, None if expires is None else float(expires))


async def _get(engine: RedisEngine, space: str, kind: str, keys: Sequence[str], now: float) -> list[Document]:
    found: list[Document] = []
    while keys:
        read_count, reply = await engine.ask("documents.get", space, kind, keys[:PAGE], now)
        found += _documents(kind, reply)
        keys = keys[read_count:]
    return found


async def _find(engine: RedisEngine, query: Query) -> list[Document]:
    space, kind, now, group, prefix, low, high, descending, offset, limit = query
    found: dict[str, Document] = {}
    after: list[Any] | None = None
    while limit is None or len(found) < limit:
        page_size = PAGE if limit is None else min(PAGE, limit - len(found))
        after, offset, reply = await engine.ask(
            "documents.find", space, kind, now, group, prefix, low, high, descending, offset, page_size, after
        )
        for document in _documents(kind, reply):
            found.setdefault(document.key, document)  # it may be in two pages, if its rank changed between them
        if after is None:
            break
    return list(found.values())


async def _words(engine: RedisEngine, space: str, kind: str, now: float) -> list[tuple[str, float, str]]:
    found: list[tuple[str, float, str]] = []
    after: list[Any] | None = None
    while True:
        after, reply = await engine.ask("documents.words", space, kind, now, after)
        found += [(key, float(rank), words) for key, rank, words in as_list(reply)]
        if after is None:
            return found


async def _kinds(engine: RedisEngine) -> list[tuple[str, str]]:
    cursor, found = "0", dict[tuple[str, str], None]()  # a scan may return a key twice
    while True:
        cursor, places = await engine.ask("documents.kinds", cursor)
        found |= dict.fromkeys(map(tuple, as_list(places)))
        if cursor == "0":
            return list(found)


def _corrupt_document() -> StorageCorrupt:
    return StorageCorrupt(
        "a document to change cannot be read. It was not modified. Restore it from a backup, or delete it."
    )


CONCERN = RedisOperationSet(
    "documents",
    {},
    script="\n".join(lua_source(__file__, name) for name in ("redis_docs", "redis")),
    codecs={
        "documents.put": Codec(_encode_write, lambda reply: (reply[0], float(reply[1]))),
        "documents.add": Codec(_encode_write, _decode_add),
        "documents.rewrite": Codec(_encode_rewrite),
        "documents.copy": Codec(_encode_copy),
    },
    refusals={"CHANGED": VersionConflict, "ABSENT": DocumentMissing, "CORRUPT": _corrupt_document},
)


class RedisDocuments(RedisBackend, DocumentStore):
    """Document store on a Redis or Valkey server.

    A query may take several replies of at most 500 documents or 200 KB, each with the state at its time. So a document
    is found once. It may be missed only if its rank changes during the query.
    """

    operation_sets: ClassVar[OperationSets] = (CONCERN,)
    reads: ClassVar[Reads] = {"get": _get, "find": _find, "words": _words, "kinds": _kinds}
