"""Where stores keep their documents: scopes, sessions that end, engines that are shared and let go of once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core.errors import InvalidArgument, StorageBusy, StorageClosed
from agent_runtime_core.persistence.backends.files import FileMemoryStore
from agent_runtime_core.persistence.backends.memory import InMemoryMemoryStore
from agent_runtime_core.persistence.backends.postgres import PostgresMemoryStore
from agent_runtime_core.persistence.backends.redis import RedisMemoryStore
from agent_runtime_core.persistence.backends.sqlite import SQLiteMemoryStore, SQLiteTaskStore
from agent_runtime_core.persistence.document_stores.base import SESSION_TTL, DocumentHome
from agent_runtime_core.persistence.documents.base import Entry
from agent_runtime_core.persistence.documents.memory import MemoryDocuments
from agent_runtime_core.persistence.models import Scope, Task
from agent_runtime_core.testing import VirtualClock
from tests.support.backends import POSTGRES

New = Callable[..., DocumentHome]

PLACES: dict[str, Any] = {
    "memory": InMemoryMemoryStore,
    "sqlite": SQLiteMemoryStore,
    "redis": RedisMemoryStore,
    "postgres": PostgresMemoryStore,
}


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
def new(request: pytest.FixtureRequest, tmp_path: Path) -> New:
    """Homes in one place."""
    if request.param == "memory":
        engine = MemoryEngine(VirtualClock())
        return lambda **options: InMemoryMemoryStore(engine=engine, **options).home
    if request.param == "sqlite":
        return lambda **options: SQLiteMemoryStore(tmp_path / "home.db", durability="normal", **options).home
    url, made = request.getfixturevalue(f"{request.param}_url"), PLACES[request.param]
    return lambda **options: made(url, **options).home


async def put(home: DocumentHome, scope: Scope, key: str = "k") -> None:
    table = home.table(scope, "thing")
    await table.write(table.put(Entry(key, scope.value)))


async def keys(home: DocumentHome, scope: Scope | None, kind: str = "thing") -> list[str]:
    return [document.key for document in await home.table(scope, kind).find()]


async def test_scopes_are_told_apart(new: New) -> None:
    clock = VirtualClock()
    first, second = new(clock=clock), new(clock=clock, project="other")
    for scope in Scope:
        await put(first, scope, scope.value)
    assert [await keys(first, scope) for scope in Scope] == [[scope.value] for scope in Scope]
    assert await keys(first, None) == [Scope.PROJECT.value]
    assert [await keys(second, scope) for scope in (Scope.GLOBAL, Scope.PROJECT, Scope.SESSION)] == [["global"], [], []]
    with pytest.raises(InvalidArgument, match="nowhere"):
        first.table("nowhere", "thing")  # type: ignore[arg-type]
    await first.close()
    await second.close()


async def test_a_session_ends_with_its_store(new: New) -> None:
    clock = VirtualClock()
    watching = new(clock=clock, session_id="watching")
    for shared, left in ((False, []), (True, ["k"])):
        home = new(clock=clock, session_id="mine" if shared else None)
        session = home.session_id
        for kind in ("thing", "other"):
            table = home.table(Scope.SESSION, kind)
            await table.write(table.put(Entry("k", "")))
        await put(home, Scope.PROJECT)
        await home.close()
        after = new(clock=clock, session_id=session)
        assert [await keys(after, Scope.SESSION, kind) for kind in ("thing", "other")] == [left, left]
        assert await keys(after, Scope.PROJECT) == ["k"]
        await after.close()
    await watching.close()


async def test_a_session_that_outlives_its_process_expires(new: New) -> None:
    home = new(clock=VirtualClock(), session_id="left", session_ttl=100.0)
    if home.expires(Scope.SESSION) is None:
        await home.close()
        return  # it cannot outlive it
    clock = home.clock
    assert isinstance(clock, VirtualClock)
    for scope in Scope:
        await put(home, scope)
    clock.advance(99)
    assert await keys(home, Scope.SESSION) == ["k"]
    clock.advance(1)
    assert [await keys(home, scope) for scope in (Scope.GLOBAL, Scope.PROJECT, Scope.SESSION)] == [["k"], ["k"], []]
    await home.close()


async def test_the_clock_is_the_one_that_was_given_else_that_of_the_engine(new: New) -> None:
    clock = VirtualClock()
    first = new(clock=clock)
    engine: Any = first.documents(Scope.PROJECT).commits
    second = PLACES[engine.kind](engine=engine).home
    assert first.clock is clock
    assert second.clock is engine.clock
    await first.close()
    await second.close()


async def test_an_engine_is_let_go_of_once_by_each(new: New) -> None:
    first, second = new(), new()
    await put(first, Scope.PROJECT)
    for _ in range(3):
        await first.close()
    assert await keys(second, Scope.PROJECT) == ["k"]
    await second.close()
    await second.close()
    if not isinstance(second.documents(Scope.PROJECT), MemoryDocuments):
        with pytest.raises(StorageClosed):
            await keys(second, Scope.PROJECT)


async def test_a_store_on_an_engine_of_others_leaves_it_open(new: New) -> None:
    first = new(clock=VirtualClock())
    engine: Any = first.documents(Scope.PROJECT).commits
    second = PLACES[engine.kind](engine=engine).home
    await put(second, Scope.SESSION)
    await put(second, Scope.PROJECT)
    await second.close()
    assert await keys(first, Scope.PROJECT) == ["k"]
    await first.close()


async def test_a_session_that_cannot_be_cleared_is_left_to_expire(
    new: New, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def away(space: str) -> None:
        raise StorageBusy("the server is away")

    home = new()
    documents = home.documents(Scope.SESSION)
    await put(home, Scope.SESSION)
    monkeypatch.setattr(documents, "drop", away)
    with caplog.at_level(logging.WARNING, "agent_runtime_core"):
        if home.expires(Scope.SESSION) is None:
            with pytest.raises(StorageBusy):
                await home.close()
        else:
            await home.close()
            assert home.session_id in caplog.text
    assert documents._held_engine is None


def test_names_that_cannot_be_stored_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="session_id"):
        InMemoryMemoryStore(session_id="half \ud800")
    with pytest.raises(InvalidArgument, match="project"):
        InMemoryMemoryStore(project=7)  # type: ignore[arg-type]


def test_a_file_has_one_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="db_path"):
        SQLiteMemoryStore(tmp_path / "a.db", db_path=tmp_path / "b.db")


@pytest.mark.redis
def test_a_server_has_one_name() -> None:
    with pytest.raises(InvalidArgument, match="redis_url"):
        RedisMemoryStore("redis://localhost:1", redis_url="redis://localhost:2")
    with pytest.raises(InvalidArgument, match=r"Pass url='redis://host:6379/0', or call configure\(redis_url=\.\.\.\)"):
        RedisMemoryStore()


@pytest.mark.parametrize("bad", ["", "a\0b", "a\ud800"])
def test_what_is_no_path_of_a_project_is_refused(bad: str) -> None:
    with pytest.raises(InvalidArgument, match="project_dir must be the path of a directory"):
        FileMemoryStore(bad)


async def test_tasks_of_others_are_seen_in_a_session_that_expired_and_goes_on(tmp_path: Path) -> None:
    """The notes about changes are counted from 1 again, and none of the old numbers says that one is known."""
    clock = VirtualClock()
    mine, theirs = (SQLiteTaskStore(tmp_path / "s.db", session_id="s", clock=clock) for _ in range(2))
    for name in ("a", "b", "c"):
        await mine.save(Task(name=name), Scope.SESSION)
        if name == "a":
            assert await mine.ready(scope=Scope.SESSION)
    clock.advance(SESSION_TTL + 1)
    for count, name in enumerate(("d", "e", "f"), 1):
        await theirs.save(Task(name=name), Scope.SESSION)
        assert len(await mine.ready(scope=Scope.SESSION)) == count
    await mine.close()
    await theirs.close()
