"""What a flipped bit makes of a SQLite file, where no checksum tells it: a typed error, and no call that never ends."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._core.clock import aware
from agent_runtime_core._engines.base import Op
from agent_runtime_core._engines.sqlite.transaction import SQLiteTx
from agent_runtime_core._journal.record import DONE, Record
from agent_runtime_core.errors import StepExecutionError, StorageCorrupt, StorageError, UnknownRun
from agent_runtime_core.events import InMemoryEventBus, SQLiteEventBus
from agent_runtime_core.persistence import PersistenceManager, Scope
from agent_runtime_core.persistence.documents.base import Collection
from agent_runtime_core.persistence.models import AuditEntry, AuditEventType, Conversation, ConversationMessage
from agent_runtime_core.queue import SQLiteQueue
from agent_runtime_core.queue.records import RunRow
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.state import InMemoryStateStore, SQLiteStateStore
from tests.support.runs import Script

RUN = "5bd5bb05-9e0c-4ac2-a1ba-9a2be0f8a1ce"
BROKEN = "CAST(x'41ff' AS TEXT)"  # a text that is none


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


def damaged(path: Path, *statements: str, loose: str | None = None) -> None:
    """Carry out `statements`, where the table `loose` takes anything in its columns."""
    if loose is not None:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
            conn.execute("PRAGMA writable_schema=ON")
            for word in (" NOT NULL", " REAL"):
                conn.execute("UPDATE sqlite_master SET sql = replace(sql, ?, '') WHERE name = ?", (word, loose))
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
        for each in statements:
            conn.execute(each)


async def nothing(ctx: Any) -> None: ...


@contextlib.asynccontextmanager
async def opened(path: Path) -> AsyncIterator[AgentRunner]:
    registry = Registry()
    registry.register(Script(nothing))
    async with AgentRunner.open(path, registry=registry) as runner, asyncio.timeout(20):
        yield runner


# -- the queue


async def cancelled(path: Path, count: int) -> list[str]:
    """Runs that have ended, of which nothing is kept but their rows."""
    queue = SQLiteQueue(path)
    ids = [str((await queue.enqueue(None, "script", {})).run_id) for _ in range(count)]
    for each in ids:
        assert await queue.cancel(each)
    await queue.close()
    return ids


async def test_a_run_that_is_listed_and_not_found_does_not_keep_vacuum_for_ever(path: Path) -> None:
    ids = await cancelled(path, 3)
    data = bytearray(path.read_bytes())
    key = ids[1].encode()
    with contextlib.closing(sqlite3.connect(path)) as conn:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_arc_runs_1'"
        [page] = conn.execute(query).fetchone()
    of_index = data.index(key, (page - 1) * 4096)
    assert of_index < page * 4096
    data[of_index + 20] ^= 4
    path.write_bytes(data)
    async with opened(path) as runner:
        assert len(await runner.runs()) == 3
        assert await runner.queue.row(ids[1]) is None
        gone = await runner.vacuum({"cancelled": 0})
        left = [str(each.run_id) for each in await runner.runs()]
        assert ids[1] in left
        assert gone == 3 - len(left) >= 1  # the search for another one may end at the damaged entry


async def test_vacuum_goes_through_many_pages(path: Path) -> None:
    await cancelled(path, 450)
    async with opened(path) as runner:
        assert await runner.vacuum({"cancelled": 0}) == 450


async def test_a_table_that_lost_a_column_is_told(path: Path) -> None:
    async with opened(path) as runner:
        await runner.submit("script", {}, run_id="x")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("PRAGMA writable_schema=ON")
        conn.execute("UPDATE sqlite_master SET sql = replace(sql, 'mail_seq INTEGER NOT NULL,', '')")
    async with opened(path) as runner:
        asks: list[Callable[[], Awaitable[Any]]] = [runner.runs, lambda: runner.get_run("x"), runner.run_once]
        for ask in asks:
            with pytest.raises(StorageError, match="no such column: mail_seq"):
                await ask()


async def test_agents_that_do_not_stand_in_order_are_told(path: Path) -> None:
    async with opened(path) as runner:
        await runner.submit("script", {}, run_id="x")
    damaged(path, "UPDATE arc_runs SET agent = x'41'")
    async with opened(path) as runner:
        with pytest.raises(StorageCorrupt, match="agent b'A'"):
            await runner.queue.claim("w")


@pytest.mark.parametrize("seconds", [1e18, -9e16, 1e300, float("nan")])
def test_a_time_that_no_calendar_has_is_told(seconds: float) -> None:
    with pytest.raises((ValueError, OverflowError)):
        aware(seconds)
    row = RunRow(RUN, "agent", created_at=seconds)
    with pytest.raises(StorageCorrupt, match=f"run '{RUN}': created_at"):
        row.decoded("created_at", aware)


@pytest.mark.parametrize("error", ["{", "[", '{"$":', "x'00'", BROKEN])
async def test_an_error_that_was_damaged_is_told_by_whoever_waits(path: Path, error: str) -> None:
    async with opened(path) as runner:
        run_id = await runner.submit("script", {}, run_id="x")
        await runner.queue.claim("w")
        await runner.queue.release(run_id, "w", False, error={"message": "boom"})
    damaged(path, f"UPDATE arc_runs SET error = {error if error[0] in 'xC' else repr(error)}")
    async with opened(path) as runner:
        with pytest.raises(StorageCorrupt):
            await runner.wait("x", 1)


# -- the journal, the state and the events


GONE = "DELETE FROM arc_journal"  # as pages are whose numbers the header of the file, or of a page above them, hides


@pytest.mark.parametrize("hidden", [GONE, f"{GONE} WHERE kind = 'ended'"])
async def test_a_run_that_succeeded_and_lost_its_end_has_no_empty_result(path: Path, hidden: str) -> None:
    async with opened(path) as runner:
        await runner.execute("script", "x")
    damaged(path, hidden)
    async with opened(path) as runner:
        with pytest.raises(StorageCorrupt, match="run 'x' has succeeded, but the end of its journal is missing"):
            await runner.wait("x", 1)


async def test_a_run_that_is_deleted_while_somebody_waits_for_it_is_not_called_damaged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(path) as runner:
        await runner.execute("script", "x")
        ending = runner.state_store.ending

        async def deleted_first(run_id: str) -> Record | None:
            await runner.discard("x")
            return await ending(run_id)

        monkeypatch.setattr(runner.state_store, "ending", deleted_first)
        with pytest.raises(UnknownRun):
            await runner.wait("x", 1)


async def test_a_run_that_was_ended_by_the_queue_alone_has_an_empty_result(path: Path) -> None:
    async with opened(path) as runner:
        run_id = await runner.submit("script", {}, run_id="x")
        await runner.queue.claim("w")
        await runner.queue.release(run_id, "w", True)
        assert (await runner.wait("x", 1)).final_output == {}


@pytest.mark.parametrize(
    "hidden", [GONE, f"{GONE} WHERE id & 4294967295 > 1", f"{GONE} WHERE kind = 'done' AND id & 4294967295 > 1"]
)
async def test_a_run_that_has_lost_recorded_steps_does_not_run_them_again(path: Path, hidden: str) -> None:
    ran: list[int] = []

    async def body(ctx: Any) -> None:
        await ctx.step("one", ran.append, 1)
        await ctx.step("two", ran.append, 2)
        await ctx.wait_for_signal("first")
        await ctx.wait_for_signal("second")

    @contextlib.asynccontextmanager
    async def working() -> AsyncIterator[AgentRunner]:
        registry = Registry()
        registry.register(Script(body))
        config = RunnerConfig(park_after=0)
        async with AgentRunner.open(path, registry=registry, config=config) as runner, asyncio.timeout(20):
            yield runner

    async with working() as runner:
        await runner.submit("script", run_id="x")
        await runner.run_once()
        await runner.signal("x", "first")
        await runner.run_once()
        assert (await runner.get_run("x")).status == "waiting"
        await runner.signal("x", "second")
    damaged(path, hidden)
    async with working() as runner:
        with pytest.raises(StorageCorrupt, match=r"the ends of 2 steps were recorded and \d are found"):
            await runner.run_once()
    assert ran == [1, 2]


async def test_a_journal_that_was_in_the_memory_of_a_process_that_is_gone_is_not_called_damaged(path: Path) -> None:
    ran: list[int] = []

    async def body(ctx: Any) -> None:
        await ctx.step("one", ran.append, 1)
        await ctx.wait_for_signal("first")
        await ctx.wait_for_signal("second")

    @contextlib.asynccontextmanager
    async def process() -> AsyncIterator[AgentRunner]:
        registry = Registry()
        registry.register(Script(body))
        places = SQLiteQueue(path), InMemoryEventBus(), InMemoryStateStore()
        async with AgentRunner(*places, RunnerConfig(park_after=0), registry=registry) as runner, asyncio.timeout(20):
            yield runner

    async with process() as runner:
        await runner.submit("script", run_id="x")
        await runner.run_once()
        await runner.signal("x", "first")
        await runner.run_once()
        assert (await runner.queue.require("x")).min_step_count == 1
        await runner.signal("x", "second")
    async with process() as runner:
        await runner.run_once()
        assert (await runner.get_run("x")).status == "succeeded"
    async with process() as runner:
        assert (await runner.wait("x", 1)).final_output == {}
    assert ran == [1, 1]


@pytest.mark.parametrize("damage", ["ev = NULL", "nev = NULL", "ev = 9223372036854775807"])
async def test_a_record_without_a_number_is_told_by_whoever_counts_on(path: Path, damage: str) -> None:
    store, bus = SQLiteStateStore(path), SQLiteEventBus(path)
    await store.commits.commit(None, [Op("journal.append", (RUN, Record(0, DONE, "s", nev=1)))])
    await store.close()
    await bus.close()
    damaged(path, f"UPDATE arc_journal SET {damage}", loose="arc_journal")
    bus = SQLiteEventBus(path)
    asks: list[Callable[[], Awaitable[Any]]] = [lambda: bus.head(RUN), lambda: bus.publish(RUN, "a", {})]
    for ask in asks:
        with pytest.raises(StorageCorrupt, match=f"run {RUN}: .* [Rr]estore a backup"):
            await ask()
    await bus.close()


@pytest.mark.parametrize("column", ["seq", "type", "payload", "t", "event_id"])
@pytest.mark.parametrize("value", ["NULL", "x'41'", BROKEN])
async def test_an_event_that_holds_what_is_never_written_is_told(path: Path, column: str, value: str) -> None:
    bus = SQLiteEventBus(path)
    await bus.publish(RUN, "said", {"n": 1})
    await bus.close()
    if (column, value) == ("seq", "NULL"):
        return  # no key of SQLite's
    damaged(path, f"UPDATE arc_events SET {column} = {value}", loose="arc_events")
    bus = SQLiteEventBus(path)
    for ask in (bus.get_events, bus.published):
        with pytest.raises(
            StorageCorrupt, match=f"run {RUN}: .*[Rr]estore a backup" if value != BROKEN else "UTF-8|event"
        ):
            await ask(RUN)
    await bus.close()


@pytest.mark.parametrize("column", ["status", "checkpoint", "mark", "t"])
async def test_a_state_that_holds_what_is_never_written_is_told(path: Path, column: str) -> None:
    store = SQLiteStateStore(path)
    await store.save_checkpoint(RUN, {"a": 1})
    await store.update_run_status(RUN, "running")
    await store.close()
    damaged(path, f"UPDATE arc_state SET {column} = x'00'", loose="arc_state")
    store = SQLiteStateStore(path)
    for ask in (store.get_checkpoint, store.get_run_status):
        with pytest.raises(StorageCorrupt, match=f"run {RUN}: the {column} of its state"):
            await ask(RUN)
    await store.close()


@pytest.mark.parametrize("text", ["{", "[]", "7", '{"a":1}}', "[" * 100_000])
async def test_a_checkpoint_that_is_none_is_told(path: Path, text: str) -> None:
    store = SQLiteStateStore(path)
    await store.save_checkpoint(RUN, {"a": 1})
    await store.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.execute("UPDATE arc_state SET checkpoint = ?", (text,))
    store = SQLiteStateStore(path)
    with pytest.raises(StorageCorrupt, match=f"run {RUN}: the checkpoint of its state"):
        await store.get_checkpoint(RUN)
    await store.close()


# -- documents


async def said(memory: PersistenceManager) -> Any:
    conversations = memory.conversations
    conversation = next(iter(await conversations.list_conversations()), None)
    if conversation is None:
        await conversations.save(conversation := Conversation())
    await conversations.add_message(conversation.id, ConversationMessage(role="user", content="a word"))
    return await conversations.search("word")


@pytest.mark.parametrize("damage", ["UPDATE {} SET upto = NULL", "UPDATE {} SET upto = 'x'", "DELETE FROM {}"])
@pytest.mark.parametrize("first", ["write", "search"])
async def test_an_index_that_does_not_know_how_far_it_goes_is_made_anew(path: Path, damage: str, first: str) -> None:
    async with PersistenceManager.open(path) as stores:
        assert len(await said(stores)) == 1
    damaged(path, damage.format("arc_document_index_state"), loose="arc_document_index_state")
    async with PersistenceManager.open(path) as stores:
        if first == "search":
            assert len(await stores.conversations.search("word")) == 1
        assert len(await said(stores)) == 2
    with contextlib.closing(sqlite3.connect(path)) as conn:
        assert conn.execute("SELECT one, upto FROM arc_document_index_state").fetchall() == [(1, 2**62)]


async def test_a_text_that_is_none_is_told_by_a_search(path: Path) -> None:
    async with PersistenceManager.open(path) as stores:
        assert len(await said(stores)) == 1
    damaged(path, f"UPDATE arc_documents SET text = {BROKEN}")
    async with PersistenceManager.open(path) as stores:
        with pytest.raises(StorageCorrupt):
            await stores.conversations.search("word")


async def test_entries_that_are_listed_and_not_found_do_not_keep_prune_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with PersistenceManager.open(path) as stores:
        audit = stores.audit
        assert audit is not None
        for n in range(3):
            await audit.log_event(AuditEntry(event_type=AuditEventType.CUSTOM, action=f"a{n}"), Scope.PROJECT)
        delete = Collection.delete
        with monkeypatch.context() as patched:
            patched.setattr(Collection, "delete", lambda table, key: delete(table, "nowhere"))
            async with asyncio.timeout(5):
                assert await audit.prune(Scope.PROJECT, keep=0) == 0
                assert await audit.prune(Scope.PROJECT, older_than=0) == 0
        assert await audit.prune(Scope.PROJECT, keep=0) == 3


# -- the file


@pytest.mark.parametrize("version", ["'x'", "NULL", "x'02'", "-1", "1.5"])
def test_a_version_that_is_no_number_is_told(path: Path, version: str) -> None:
    SQLiteQueue(path).engine.close_now()
    damaged(path, f"UPDATE arc_schema SET version = {version} WHERE concern = 'queue'", loose="arc_schema")
    with pytest.raises(StorageCorrupt, match=r"its queue schema has version .*[Rr]estore a backup"):
        SQLiteQueue(path)


def undecodable(tx: SQLiteTx, *_: Any) -> Any:
    return b"a\xff".decode()


@pytest.mark.parametrize("beside", [0, 2])
async def test_a_message_of_the_driver_that_is_no_text_is_told_as_damage(
    path: Path, monkeypatch: pytest.MonkeyPatch, beside: int
) -> None:
    store = SQLiteStateStore(path)
    with monkeypatch.context() as patched:
        patched.setitem(store.engine.writer.committer.operations, "state.status", undecodable)
        others = [store.save_checkpoint(f"other{n}", {}) for n in range(beside)]
        told = await asyncio.gather(store.update_run_status(RUN, "x"), *others, return_exceptions=True)
    assert isinstance(told[0], StorageCorrupt)
    assert told[1:] == [None] * beside
    assert store.engine.writer.committer.conn.in_transaction is False
    await store.close()


async def test_a_decoding_error_of_a_users_function_is_its_own(path: Path) -> None:
    async def script(ctx: Any) -> Any:
        with pytest.raises(StepExecutionError, match="can't decode byte 0xff"):
            await ctx.transaction("t", undecodable)
        return "went on"

    registry = Registry()
    registry.register(Script(script))
    async with AgentRunner.open(path, registry=registry) as runner:
        result = await runner.execute("script")
        assert result.final_output == {"value": "went on"}
