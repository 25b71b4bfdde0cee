"""Stores whose contents are encrypted again: opened with any codec, and read as they are."""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.encryption import AESGCMCodec, PayloadCodec
from agent_runtime_core.errors import IdempotencyConflict
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.persistence import (
    Conversation,
    ConversationMessage,
    PersistenceConfig,
    PersistenceManager,
    Scope,
)
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.state import InMemoryStateStore
from agent_runtime_core.status import RunStatus
from tests.support.backends import backends
from tests.support.effects import stored_effects
from tests.support.redis_servers import RedisServer
from tests.support.runs import Script

CANARY = "canary-of-contents"
KEYS = {"old": bytes(range(32)), "new": bytes(range(1, 33))}
DIGEST_KEY = bytes(range(2, 34))
OLD = AESGCMCodec({"old": KEYS["old"]}, "old", digest_key=DIGEST_KEY)
BOTH = AESGCMCodec(KEYS, "new", digest_key=DIGEST_KEY)
NEW = AESGCMCodec({"new": KEYS["new"]}, "new", digest_key=DIGEST_KEY)


LONG = [f"{CANARY} {n}" for n in range(200)]  # so long that SQLite compresses it


class Place:
    """A store of one kind, which can be opened many times."""

    def __init__(self, kind: str, folder: Path, server: tuple[Any, str] | None = None) -> None:
        self.kind, self._server = kind, server
        self._engine = MemoryEngine()
        self.url: str = server[1] if server is not None else str(folder / "runs.db")

    @asynccontextmanager
    async def runner(self, codec: PayloadCodec | None, *scripts: Script, **settings: Any) -> AsyncIterator[AgentRunner]:
        """Yield a runner with this codec and these agents."""
        configure(payload_codec=codec)
        registry = Registry()
        for script in scripts:
            registry.register(script)
        config = RunnerConfig(park_after=0, max_retries=1, **settings)
        try:
            async with self._opened(config, registry) as runner:
                yield runner
        finally:
            reset_config()

    def _opened(self, config: RunnerConfig, registry: Registry) -> AgentRunner:
        if self.kind != "memory":
            return AgentRunner.open(self.url, config=config, registry=registry)
        engine = self._engine
        persistence = PersistenceManager(PersistenceConfig.on(engine))
        return AgentRunner(
            InMemoryQueue(engine=engine), InMemoryEventBus(engine=engine), InMemoryStateStore(engine=engine), config,
            registry=registry, persistence=persistence,
        )  # fmt: skip

    def stored(self) -> str:
        """Return all that the store has, as text."""
        if self.kind == "memory":
            return repr(self._engine.tables)
        if self._server is not None:
            server, url = self._server
            if self.kind == "postgres":
                return "\n".join(str(cell) for row in server.rows(url) for cell in row)
            return "\n".join(_redis_values(server, url.rpartition("=")[2]))
        with contextlib.closing(sqlite3.connect(self.url)) as conn:
            tables = [name for (name,) in conn.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
            rows = [row for table in tables for row in conn.execute(f'SELECT * FROM "{table}"')]
        return "\n".join(_text(value) for row in rows for value in row)

    def effects(self) -> int:
        """Return how many rows of effects, and of members of lineages, the store has."""
        if self.kind == "memory":
            return stored_effects(self._engine.tables["effects"])
        if self._server is not None:
            server, url = self._server
            if self.kind == "postgres":
                return int(server.ask(f"SELECT count(*) FROM {url.partition('?schema=')[2]}.effects")[0][0])
            keys = server.ask("KEYS", f"{{{url.rpartition('=')[2]}}}:effects:*")
            return sum(field != b"marks" for key in keys for field in server.ask("HKEYS", key))
        with contextlib.closing(sqlite3.connect(self.url)) as conn:
            return int(conn.execute("SELECT count(*) FROM arc_effects").fetchone()[0])


def _text(value: object) -> str:
    if isinstance(value, bytes):
        with contextlib.suppress(zlib.error):
            value = zlib.decompress(value)
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _redis_values(server: RedisServer, prefix: str) -> list[str]:
    reads = {
        b"string": ("GET",), b"hash": ("HGETALL",), b"set": ("SMEMBERS",), b"list": ("LRANGE", 0, -1),
        b"zset": ("ZRANGE", 0, -1), b"stream": ("XRANGE", "-", "+"),
    }  # fmt: skip
    found = []
    for key in server.ask("KEYS", f"{{{prefix}}}:*"):
        command, *arguments = reads[server.ask("TYPE", key)]
        found.append(f"{key!r} {server.ask(command, key, *arguments)!r}")
    return found


class Agents:
    """Agents that count how often their steps are executed."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = True
        self.scripts = [Script(self.speak, "speaker"), Script(self.pay, "payer"), Script(self.fail, "failing")]

    async def _tell(self, text: str) -> Any:
        self.calls.append(text)
        return {"told": f"{CANARY} {text}", "long": LONG}

    async def speak(self, ctx: Any) -> dict[str, Any]:
        said = await ctx.step("tell", self._tell, "speech")
        await ctx.checkpoint({"at": CANARY})
        await ctx.emit("my.event", {"text": CANARY})
        return {"said": said["told"], "answer": await ctx.wait_for_signal("answer")}

    async def pay(self, ctx: Any) -> dict[str, Any]:
        await ctx.step("tell", self._tell, "order")
        await ctx.step("pay", self._tell, "payment", on_in_doubt="fail")
        return {"paid": CANARY}

    async def fail(self, ctx: Any) -> dict[str, Any]:
        await ctx.step("tell", self._tell, "failure")
        if self.fails:
            raise ValueError(CANARY)
        return {"failed": CANARY}


async def fill(runner: AgentRunner) -> None:
    """Store something of each kind."""
    asked = {"text": CANARY, "n": 1}
    await runner.submit("payer", asked, run_id="paid", metadata={"note": CANARY})
    await runner.submit("speaker", {"conversation_id": "talk", **asked}, run_id="parked")
    await runner.submit("failing", asked, run_id="failed")
    await runner.submit("nobody", asked, run_id="pending", idempotency_key="once")
    for _ in range(3):
        await runner.run_once()
    await runner.signal("parked", "other", {"text": CANARY})
    assert (await runner.get_run("failed")).status is RunStatus.FAILED
    assert (await runner.get_run("paid")).status is RunStatus.SUCCEEDED
    stores = runner.persistence
    await stores.memory.set("name", CANARY)
    await stores.memory.set("name", CANARY, Scope.SESSION)
    message = ConversationMessage(id=uuid4(), role="user", content=CANARY)
    await stores.conversations.save(Conversation(title=CANARY, messages=[message]))


async def _check_submits(runner: AgentRunner) -> None:
    asked = {"text": CANARY, "n": 1}
    paid = await runner.get_run("paid")
    assert (paid.input["text"], paid.metadata["note"]) == (CANARY, CANARY)
    assert (await runner.wait("paid", timeout=5)).final_output["value"] == {"paid": CANARY}
    assert await runner.submit("payer", asked, run_id="paid") == paid.run_id, "the run is recognized"
    pending = (await runner.get_run("pending")).run_id
    assert await runner.submit("nobody", asked, idempotency_key="once") == pending
    with pytest.raises(IdempotencyConflict):
        await runner.submit("payer", {"text": "other"}, run_id="paid")
    with pytest.raises(IdempotencyConflict):
        await runner.execute("payer", "paid", {"text": "other"})


async def _check_documents(stores: PersistenceManager) -> None:
    assert await stores.memory.get("name") == CANARY
    [conversation, *_] = [each for each in await stores.conversations.list_conversations() if each.title]
    assert conversation.title == CANARY
    found = await stores.conversations.get(conversation.id)
    assert found is not None
    assert found.messages[0].content == CANARY


async def check(runner: AgentRunner, agents: Agents) -> None:
    """Read and continue all that `fill` has stored."""
    await _check_submits(runner)
    calls = [*agents.calls]
    events = [event async for event in runner.stream("paid")]
    assert [event.sequence for event in events] == [*range(len(events))]
    assert events[-1].payload["final_output"]["value"] == {"paid": CANARY}
    await runner.signal("parked", "answer", {"text": CANARY})
    while await runner.run_once():
        pass
    parked = await runner.wait("parked", timeout=5)
    assert parked.final_output["value"] == {"said": f"{CANARY} speech", "answer": {"text": CANARY}}
    assert await runner.state_store.get_checkpoint((await runner.get_run("parked")).run_id) == {"at": CANARY}
    assert {"text": CANARY} in [event.payload async for event in runner.stream("parked")]
    mail = await runner.queue.mail(str((await runner.get_run("parked")).run_id))
    assert [each.name for each in mail] == ["other", "answer"]

    failed = await runner.wait("failed", timeout=5)
    assert failed.error is not None
    assert CANARY in failed.error.message
    agents.fails = False
    await runner.resume("failed")
    await runner.run_once()
    assert (await runner.wait("failed", timeout=5)).final_output["value"] == {"failed": CANARY}
    assert agents.calls == calls, "no recorded step was executed again"

    copied = await runner.fork("paid", "pay")
    early = await runner.fork("paid", "tell")
    for _ in range(2):
        await runner.run_once()
    assert (await runner.wait(copied, timeout=5)).final_output["value"] == {"paid": CANARY}
    refused = (await runner.wait(early, timeout=5)).error
    assert refused is not None
    assert "was already done in run 'paid'" in refused.message, "its effect is recognized"
    assert agents.calls == calls
    await _check_documents(runner.persistence)


NAMES = ("memory", "sqlite", "redis", "postgres")
KINDS = backends(NAMES)
#: For files about code above the engines. In each of them, some tests are on every engine.
MOSTLY_SQLITE = backends(NAMES, default=["sqlite"])
ON_EVERY_ENGINE = pytest.mark.parametrize("place", KINDS, indirect=True)


def place_of(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Return an empty store of that kind."""
    if kind not in ("redis", "postgres"):
        return Place(kind, tmp_path)
    return Place(kind, tmp_path, (request.getfixturevalue(f"{kind}_server"), request.getfixturevalue(f"{kind}_url")))
