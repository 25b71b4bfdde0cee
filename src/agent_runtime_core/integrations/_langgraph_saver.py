"""Checkpoints of LangGraph as documents, in each document store of this library."""

from __future__ import annotations

import builtins
import json
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    PendingWrite,
    get_checkpoint_id,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from .. import portal
from .._core.validation import must
from .._engines.base import Op
from ..persistence.documents.base import Collection, Document, DocumentStore, Entry
from ..persistence.manager import open_document_store

SPACE = "langgraph"  # the ids of all threads and runs; each thread uses a separate space
LATEST, DELETE = "keep_latest", "delete"
_RANK_DIGITS = 13  # hexadecimal digits of a checkpoint's id that a double holds exactly


class _Place(NamedTuple):
    """Where a checkpoint is: its thread, namespace and id. An empty id means the latest checkpoint."""

    thread: str
    ns: str
    id: str

    @property
    def config(self) -> RunnableConfig:
        return {"configurable": {"thread_id": self.thread, "checkpoint_ns": self.ns, "checkpoint_id": self.id}}


def _key(*parts: str | int | float) -> str:
    return json.dumps(parts, separators=(",", ":"), ensure_ascii=False)


def _rank(checkpoint_id: str) -> float:
    """Return a rank that sorts checkpoints as their ids do, which begin with the time. The key decides ties."""
    digits = checkpoint_id.replace("-", "")[:_RANK_DIGITS]
    try:
        return float(int(digits, 16)) if len(digits) == _RANK_DIGITS else 0.0
    except ValueError:
        return 0.0


def _thread_of(config: RunnableConfig) -> str:
    thread = config.get("configurable", {}).get("thread_id")
    if thread is None:
        fix = "Pass config={'configurable': {'thread_id': 'conversation-1'}}"
        raise must("configurable of the config", "have a thread_id", config.get("configurable"), fix)
    return str(thread)


def _place(config: RunnableConfig) -> _Place:
    return _Place(_thread_of(config), config["configurable"].get("checkpoint_ns", ""), get_checkpoint_id(config) or "")


class AgentRuntimeSaver(BaseCheckpointSaver[str]):
    """Saves the checkpoints of LangGraph in a document store: in memory, SQLite, Redis, PostgreSQL or files.

        saver = AgentRuntimeSaver("agents.db")
        graph = builder.compile(checkpointer=saver)

    Inside a run, a checkpoint is written only while the run owns its lease. All asynchronous and plain methods of
    `BaseCheckpointSaver` are available; the plain methods may be called in each thread.

    Args:
        store: A document store, or the URL of a document store, as `open_document_store` takes it. The saver closes a
            store that it opened.
        serde: Serializes the values of channels. None is LangGraph's own serializer.
    """

    def __init__(self, store: DocumentStore | str, *, serde: SerializerProtocol | None = None) -> None:
        super().__init__(serde=serde)
        self._owned = isinstance(store, str)
        self.documents: DocumentStore = open_document_store(store) if isinstance(store, str) else store

    async def aclose(self) -> None:
        """Close the store, if the saver opened it."""
        if self._owned:
            await self.documents.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- documents

    def _checkpoints(self, thread: str) -> Collection:
        return Collection(self.documents, f"{SPACE}:{thread}", "checkpoint")

    def _writes(self, thread: str) -> Collection:
        return Collection(self.documents, f"{SPACE}:{thread}", "write")

    def _blobs(self, thread: str) -> Collection:
        return Collection(self.documents, f"{SPACE}:{thread}", "channel")

    @property
    def _threads(self) -> Collection:
        return Collection(self.documents, SPACE, "thread")

    @property
    def _runs(self) -> Collection:
        return Collection(self.documents, SPACE, "run")

    def _dump(self, value: Any) -> builtins.list[str]:
        kind, data = self.serde.dumps_typed(value)
        return [kind, b64encode(data).decode()]

    def _load(self, typed: Sequence[str]) -> Any:
        return self.serde.loads_typed((typed[0], b64decode(typed[1])))

    # -- reading

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the checkpoint of a config, or the latest of its thread and namespace. None if there is none."""
        place = _place(config)
        collection = self._checkpoints(place.thread)
        if place.id:
            document = await collection.get(_key(place.id, place.ns))
        else:
            found = await collection.find(place.ns, descending=True, limit=1)
            document = found[0] if found else None
        return None if document is None else await self._tuple(place.thread, document)

    async def _tuple(
        self, thread: str, document: Document, metadata: CheckpointMetadata | None = None
    ) -> CheckpointTuple:
        checkpoint_id, ns = json.loads(document.key)
        stored = json.loads(document.text)
        place = _Place(thread, ns, checkpoint_id)
        blobs = await self._blobs(thread).many(stored["blobs"])
        values = {json.loads(each.key)[1]: self._load(json.loads(each.text)) for each in blobs}
        parent = stored["parent"]
        checkpoint: Checkpoint = self._load(stored["checkpoint"])
        checkpoint["channel_values"] = values
        return CheckpointTuple(
            place.config,
            checkpoint,
            metadata or self._load(stored["metadata"]),
            _Place(thread, ns, parent).config if parent else None,
            await self._pending(place),
        )

    async def _pending(self, place: _Place) -> builtins.list[PendingWrite]:
        found = await self._writes(place.thread).find(_key(place.id, place.ns))
        writes = [json.loads(each.text) for each in found]
        # The order in which LangGraph applies them: by the path of the task, its id, and the index of the write.
        writes.sort(key=lambda each: (each["path"], each["task"], each["index"]))
        return [(each["task"], each["channel"], self._load(each["value"])) for each in writes]

    async def alist(
        self, config: RunnableConfig | None, *, filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None, limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:  # fmt: skip
        """Yield checkpoints, the newest of a thread first.

        Args:
            config: Only checkpoints of its thread, and of its namespace and id if it contains them. If None, of all
                threads.
            filter: Only checkpoints whose metadata contains these values.
            before: Only checkpoints with a smaller id than this checkpoint.
            limit: At most this many. If None, all.
        """
        where = {} if config is None else config.get("configurable", {})
        ns, only = where.get("checkpoint_ns"), where.get("checkpoint_id")
        end = None if before is None else get_checkpoint_id(before)
        left = limit
        async for thread in self._thread_ids(config):
            async for page in self._checkpoints(thread).pages(ns, descending=True):
                for document in page:
                    checkpoint_id = json.loads(document.key)[0]
                    if (only and checkpoint_id != only) or (end and checkpoint_id >= end):
                        continue
                    metadata = self._load(json.loads(document.text)["metadata"])
                    if filter and not all(metadata.get(name) == value for name, value in filter.items()):
                        continue
                    if left is not None:
                        if left <= 0:
                            return
                        left -= 1
                    yield await self._tuple(thread, document, metadata)

    async def _thread_ids(self, config: RunnableConfig | None) -> AsyncIterator[str]:
        if config is not None:
            yield _thread_of(config)
            return
        async for page in self._threads.pages():
            for document in page:
                yield document.key

    # -- writing

    async def aput(
        self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:  # fmt: skip
        """Save a checkpoint and the new values of its channels in one commit, and return its config."""
        parent = _place(config)
        place = parent._replace(id=checkpoint["id"])
        rest = dict(checkpoint)
        values: Mapping[str, Any] = rest.pop("channel_values")  # type: ignore[assignment]
        described = get_checkpoint_metadata(config, metadata)
        run = described.get("run_id")
        text = json.dumps(
            {
                "checkpoint": self._dump(rest),
                "metadata": self._dump(described),
                "parent": parent.id or None,
                "run": None if run is None else str(run),
                # For a channel without a value in this checkpoint there is no document of that version either.
                "blobs": [_key(place.ns, name, version) for name, version in checkpoint["channel_versions"].items()],
            }
        )
        blobs = self._blobs(place.thread)
        ops = [
            blobs.put(Entry(_key(place.ns, name, version), json.dumps(self._dump(values[name])), rank=0.0))
            for name, version in new_versions.items()
            if name in values
        ]
        entry = Entry(_key(place.id, place.ns), text, group=place.ns, rank=_rank(place.id))
        ops += [self._checkpoints(place.thread).put(entry), *self._indexed(place.thread, [run])]
        await self.documents.write(*ops)
        return place.config

    def _indexed(self, thread: str, runs: Iterable[object]) -> builtins.list[Op]:
        """Return what adds a thread, and the runs that wrote to it, to the lists of threads and runs."""
        ids = sorted({str(each) for each in runs if each is not None})
        return [
            self._threads.add(Entry(thread, "")),
            *(self._runs.add(Entry(_key(each, thread), thread, group=each)) for each in ids),
        ]

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Save what a task wrote since a checkpoint. A write that is there already is kept."""
        place = _place(config)
        collection, ops = self._writes(place.thread), []
        for position, (channel, value) in enumerate(writes):
            index = WRITES_IDX_MAP.get(channel, position)
            text = json.dumps(
                {"task": task_id, "path": task_path, "index": index, "channel": channel, "value": self._dump(value)}
            )
            key = _key(place.id, place.ns, task_id, index)
            entry = Entry(key, text, group=_key(place.id, place.ns), rank=0.0)
            # Negative indexes stand for errors, interrupts and answers. Of these the last counts.
            ops.append(collection.put(entry) if index < 0 else collection.add(entry))
        if ops:
            await self.documents.write(*ops)

    def get_next_version(self, current: str | None, channel: None) -> str:
        """Return a version after `current`. It is unique, because two branches of a thread may both follow it."""
        number = 0 if current is None else int(str(current).split(".")[0])
        return f"{number + 1:032}.{self.documents.clock.random.getrandbits(64):016x}"

    # -- deleting and copying

    async def _all(self, thread: str) -> builtins.list[Document]:
        """Return all checkpoints of a thread."""
        return await self._checkpoints(thread).find()

    async def adelete_thread(self, thread_id: str) -> None:
        """Delete all checkpoints and writes of a thread."""
        runs = {json.loads(each.text)["run"] for each in await self._all(thread_id)} - {None}
        drop = Op("documents.drop", (f"{SPACE}:{thread_id}", self.documents.clock.wall()))
        gone = (self._runs.delete(_key(each, thread_id)) for each in sorted(runs))
        await self.documents.write(drop, self._threads.delete(thread_id), *gone)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete all checkpoints whose metadata contains one of these values as `run_id`, and their writes.

        The values of a `DeltaChannel` are lost where later checkpoints of another run need the deleted checkpoints.
        """
        for run_id in map(str, run_ids):
            for index in await self._runs.find(run_id):
                thread = index.text
                documents = await self._all(thread)
                kept = [each for each in documents if json.loads(each.text)["run"] != run_id]
                await self._keep(thread, documents, kept, self._runs.delete(index.key))

    async def _keep(self, thread: str, documents: Sequence[Document], kept: Sequence[Document], *also: Op) -> None:
        """Delete those checkpoints of a thread that are not kept, with their writes and values."""
        checkpoints, writes, blobs = self._checkpoints(thread), self._writes(thread), self._blobs(thread)
        if not kept:
            await self.adelete_thread(thread)
            return
        keys, needed = {each.key for each in kept}, {blob for each in kept for blob in json.loads(each.text)["blobs"]}
        gone = [each for each in documents if each.key not in keys]
        unused = {blob for each in gone for blob in json.loads(each.text)["blobs"]} - needed
        await self.documents.write(
            *(checkpoints.delete(each.key) for each in gone),
            *(writes.clear(each.key) for each in gone),
            *(blobs.delete(each) for each in sorted(unused)),
            *also,
        )

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all checkpoints and writes of a thread to another thread."""
        documents = await self._all(source_thread_id)
        if not documents:
            return
        ops = self._indexed(target_thread_id, [json.loads(each.text)["run"] for each in documents])
        for collection in (self._checkpoints, self._writes, self._blobs):
            target = collection(target_thread_id)
            for each in await collection(source_thread_id).find():
                ops.append(target.put(Entry(each.key, each.text, each.group, each.rank)))
        await self.documents.write(*ops)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = LATEST) -> None:
        """Delete old checkpoints of threads that no graph is writing to.

        Args:
            thread_ids: The threads.
            strategy: "keep_latest" keeps the newest checkpoint of each namespace, and those before it from which the
                values of a `DeltaChannel` are made. "delete" keeps none.
        """
        if strategy not in (LATEST, DELETE):
            raise must("strategy", f"be {LATEST!r} or {DELETE!r}", strategy)
        for thread in thread_ids:
            if strategy == DELETE:
                await self.adelete_thread(thread)
            elif documents := await self._all(thread):
                await self._keep(thread, documents, await self._latest(thread, documents))

    async def _latest(self, thread: str, documents: Sequence[Document]) -> builtins.list[Document]:
        """Return the newest checkpoint of each namespace, and those before it that its delta channels need."""
        by_key = {each.key: each for each in documents}
        newest = {each.group: each for each in sorted(documents, key=lambda each: (each.rank, each.key))}
        kept = dict[str, Document]()
        for ns, document in newest.items():
            at: Document | None = document
            missing = set(self._load(json.loads(document.text)["metadata"]).get("counters_since_delta_snapshot") or ())
            while at is not None:
                kept[at.key] = at
                stored = json.loads(at.text)
                if missing:
                    there = await self._blobs(thread).many(stored["blobs"])
                    missing -= {json.loads(each.key)[1] for each in there}
                at = by_key.get(_key(stored["parent"], ns)) if missing and stored["parent"] else None
        return list(kept.values())

    # -- the same from plain code, on the portal's event loop

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Do what `aget_tuple` does."""
        return portal.call(self.aget_tuple, config)

    def list(
        self, config: RunnableConfig | None, *, filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None, limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:  # fmt: skip
        """Do what `alist` does."""
        return portal.iterate(self.alist, config, filter=filter, before=before, limit=limit)

    def put(
        self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:  # fmt: skip
        """Do what `aput` does."""
        return portal.call(self.aput, config, checkpoint, metadata, new_versions)

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Do what `aput_writes` does."""
        portal.call(self.aput_writes, config, writes, task_id, task_path)

    def delete_thread(self, thread_id: str) -> None:
        """Do what `adelete_thread` does."""
        portal.call(self.adelete_thread, thread_id)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Do what `adelete_for_runs` does."""
        portal.call(self.adelete_for_runs, run_ids)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Do what `acopy_thread` does."""
        portal.call(self.acopy_thread, source_thread_id, target_thread_id)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = LATEST) -> None:
        """Do what `aprune` does."""
        portal.call(self.aprune, thread_ids, strategy=strategy)
