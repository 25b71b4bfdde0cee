"""A worker that wakes up after its run was taken over writes nothing through `ctx.persistence`, wherever that is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from agent_runtime_core.errors import LeaseLost
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.persistence import (
    AuditEntry,
    AuditEventType,
    Conversation,
    ConversationMessage,
    Fact,
    FileAuditStore,
    FileKnowledgeStore,
    PersistenceConfig,
    PersistenceManager,
    Scope,
    Task,
)
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.backends import POSTGRES, SERVERS
from tests.support.fault_runs import KINDS, settings, store, until

CHAT = uuid4()
STORES = ("files", "the run's own", "sqlite", "memory", pytest.param("redis", marks=pytest.mark.redis), POSTGRES)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    """Of a server, for those that need one."""
    where = request.node.callspec.params["where"]
    return f"{request.getfixturevalue(f'{where}_url')}_stores" if where in SERVERS else ""


def stores(where: str, engine: Any, path: Path, url: str) -> PersistenceManager:
    match where:
        case "files":
            return PersistenceManager(
                PersistenceConfig(
                    project_dir=path / "project",
                    knowledge_store_class=FileKnowledgeStore,
                    audit_store_class=FileAuditStore,
                )
            )
        case "the run's own":
            return PersistenceManager(PersistenceConfig.on(engine))
        case "sqlite":
            return PersistenceManager.open(path / "stores.db")
        case "redis" | "postgres":
            return PersistenceManager.open(url)
        case _:
            return PersistenceManager.open("memory://")


def writes(manager: PersistenceManager) -> dict[str, Callable[[], Awaitable[Any]]]:
    """One of each kind of write."""
    message = ConversationMessage(role="user", content="late")
    knowledge, audit = manager.knowledge, manager.audit
    assert knowledge is not None
    assert audit is not None
    return {
        "memory": lambda: manager.memory.set("who", "the first"),
        "global memory": lambda: manager.memory.set("who", "the first", Scope.GLOBAL),
        "memory that goes": lambda: manager.memory.delete("there"),
        "all memory": lambda: manager.memory.clear(),
        "preferences": lambda: manager.preferences.set("who", "the first"),
        "conversation": lambda: manager.conversations.save(Conversation(title="late")),
        "message": lambda: manager.conversations.add_message(CHAT, message),
        "messages": lambda: manager.conversations.append(CHAT, [message]),
        "task": lambda: manager.tasks.save(Task(name="late")),
        "fact": lambda: knowledge.save_fact(Fact(key="who", value="the first")),
        "entry": lambda: audit.log_event(AuditEntry(event_type=AuditEventType.CUSTOM)),
    }


async def refused(manager: PersistenceManager) -> list[str]:
    """The writes that were not refused."""
    through = []
    for name, write in writes(manager).items():
        try:
            await write()
        except LeaseLost:
            continue
        through.append(name)
    return through


@pytest.mark.parametrize("writing", [True, False], ids=["its heir writes", "its heir writes nothing"])
@pytest.mark.parametrize("where", STORES)
@pytest.mark.parametrize("kind", KINDS)
async def test_every_write_of_a_worker_that_was_taken_over_is_refused(
    kind: str, where: str, url: str, writing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    clock, wake, lives = VirtualClock(), asyncio.Event(), 0
    through: list[str] = []
    async with store(kind, tmp_path, clock) as here:
        first = stores(where, here.engine, tmp_path, url)
        second = first if where == "memory" else stores(where, here.engine, tmp_path, url)
        await first.memory.set("there", 1)
        await first.conversations.save(Conversation(id=CHAT))

        async def code(ctx: Any) -> RunResult:
            nonlocal lives
            lives += 1
            if lives == 1:
                await wake.wait()
                through.extend(await refused(ctx.persistence))
            elif writing:
                await ctx.persistence.memory.set("who", "the second")
            return RunResult()

        here.agent("a", code)
        workers = [
            AgentRunner(*here.runner().backends, settings(worker_id=name), persistence=manager, registry=here.agents)
            for name, manager in (("one", first), ("two", second))
        ]
        run_id = await workers[0].submit("a")
        zombie = asyncio.ensure_future(workers[0].run_once())
        await until(lambda: lives == 1)
        workers[0].heartbeat.drop(str(run_id))  # it is stopped: nobody tells it that it lost the run
        clock.advance(61)
        assert await workers[1].run_once()
        assert lives == 2
        wake.set()
        await zombie
        assert through == []
        assert await second.memory.get("who") == ("the second" if writing else None)
        assert await second.memory.get("there") == 1
        assert await second.conversations.get_messages(CHAT) == []
        await first.close()
        if second is not first:
            await second.close()


@pytest.mark.parametrize("where", STORES)
async def test_what_a_run_left_running_writes_nothing_once_it_has_ended(
    where: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    through: list[str] = []
    wake = asyncio.Event()
    left: list[asyncio.Task[None]] = []
    async with store("sqlite", tmp_path) as here:
        manager = stores(where, here.engine, tmp_path, url)

        async def late(ctx: Any) -> None:
            await wake.wait()
            through.extend(await refused(ctx.persistence))

        async def code(ctx: Any) -> RunResult:
            await ctx.persistence.memory.set("who", "the run")
            left.append(asyncio.ensure_future(late(ctx)))
            return RunResult()

        here.agent("a", code)
        runner = AgentRunner(*here.runner().backends, settings(), persistence=manager, registry=here.agents)
        await runner.execute("a", None, {})
        wake.set()
        await left[0]
        assert through == []
        assert await manager.memory.get("who") == "the run"
        await manager.close()
