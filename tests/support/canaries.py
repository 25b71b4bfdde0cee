"""Marked contents for a run and the persistence stores, and the raw bytes that stores make of them."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Self
from uuid import UUID, uuid5

from agent_runtime_core import AgentRunner, PersistenceManager
from agent_runtime_core.errors import StepExecutionError
from agent_runtime_core.persistence import (
    AuditEntry,
    AuditEventType,
    Conversation,
    ConversationMessage,
    Embedding,
    ErrorRecord,
    Fact,
    PerformanceMetric,
    Summary,
    Task,
    TaskList,
)
from agent_runtime_core.registry import Registry
from agent_runtime_core.steps import Step, StepExecutor
from tests.support.redis_protocol import Link
from tests.support.redis_servers import RedisServer
from tests.support.runs import Script

MARK = "canary"
CONVERSATION = uuid5(UUID(int=0), "conversation")


class Canaries:
    """Contents that name where they come from, so that a test can tell which of them is stored in plain text."""

    def __init__(self) -> None:
        self.made: set[str] = set()

    def __call__(self, place: str) -> str:
        self.made.add(place)
        return f"{place}{MARK}"  # one word, also of a full-text index

    def found_in(self, raw: bytes) -> set[str]:
        """Return the places whose contents are there. "?" is a canary of no known place."""
        found = {place for place in self.made if f"{place}{MARK}".encode() in raw}
        return found or ({"?"} if MARK.encode() in raw else set())


async def run_with_contents(runner: AgentRunner, marked: Canaries) -> None:
    """Execute runs that store each kind of content of a run."""
    registry = Registry()
    registry.register(Script(_child_of(marked), "child"))
    registry.register(Script(_failing(marked), "failing"))
    registry.register(Script(_speaker(marked), "speaker"))
    runner.registry = registry
    await runner.submit("speaker", {"text": marked("input")}, run_id="r", metadata={"note": marked("metadata")})
    await runner.submit("failing", {}, run_id="failing")
    await _work_off(runner)
    await runner.signal("r", "answer", {"text": marked("signal")})
    await runner.send("r", marked("message"))
    await runner.approve("r", "pay", {"text": marked("decision")})
    await _work_off(runner)
    result = await runner.wait("r", timeout=30)
    result.raise_for_status()
    assert result.final_output["value"] == marked("output")
    await runner.fork("r", "told", new_run_id="fork", input={"text": marked("forkinput")}, effects="reuse")
    await runner.signal("fork", "answer", {"text": marked("forksignal")})
    await _work_off(runner)
    assert await runner.cancel("fork")
    assert (await runner.wait("failing", timeout=30)).error
    await _delivered_to_a_loop(runner, marked)


async def _delivered_to_a_loop(runner: AgentRunner, marked: Canaries) -> None:
    """Submit runs to a worker that waits for them, so that the store sends it the run."""
    loop = asyncio.create_task(runner.run_loop(handle_signals=False))
    for number in range(3):
        run_id = await runner.submit("child", {"text": marked("loopinput")}, run_id=f"loop-{number}")
        await runner.wait(run_id, timeout=30)
    runner.stop()
    await loop


async def _work_off(runner: AgentRunner) -> None:
    while await runner.run_once():
        pass


def _child_of(marked: Canaries) -> Any:
    async def child(ctx: Any) -> str:
        return marked("childoutput")

    return child


def _failing(marked: Canaries) -> Any:
    async def failing(ctx: Any) -> None:
        raise ValueError(marked("error"))

    return failing


def _speaker(marked: Canaries) -> Any:
    async def tell(text: str) -> str:
        return f"{marked('result')} {text}"

    async def long() -> str:
        return marked("longresult") * 200

    async def break_down() -> None:
        raise ValueError(marked("steperror"))

    async def pay() -> str:
        return marked("effect")

    async def first(ctx: Any, state: Any) -> str:
        state["said"] = [marked("state")] * 40
        return marked("listresult")

    async def second(ctx: Any, state: Any) -> str:
        state["said"].append(marked("difference"))
        return "second"

    async def speaker(ctx: Any) -> str:
        await ctx.step("told", tell, "an argument", description=marked("description"))
        await ctx.step("long", long)
        with contextlib.suppress(StepExecutionError):
            await ctx.step("broken", break_down, retries=1, retry_delay=0)
        await ctx.step("pay", pay, on_in_doubt="fail")
        await StepExecutor(ctx).run([Step("first", first), Step("second", second)])
        await ctx.checkpoint({"at": marked("checkpoint")})
        await ctx.emit("my.event", {"text": marked("event")})
        await ctx.call("child", {"text": marked("childinput")})
        await ctx.wait_for_signal("answer")
        await ctx.approve("pay", {"text": marked("question")})
        await ctx.messages(timeout=None)
        return marked("output")

    return speaker


async def store_contents(stores: PersistenceManager, marked: Canaries) -> None:
    """Store each kind of document."""
    await stores.memory.set("name", {"text": marked("memory")})
    await stores.preferences.set("theme", marked("preference"))
    await stores.conversations.save(Conversation(id=CONVERSATION, title=marked("title")))
    await stores.conversations.add_message(
        CONVERSATION, ConversationMessage(role="user", content=marked("conversation"))
    )
    task = Task(name=marked("taskname"), description=marked("task"), checkpoint_data={"at": marked("taskcheckpoint")})
    await stores.tasks.save(TaskList(name=marked("tasklist"), tasks=[task], conversation_id=CONVERSATION))
    if stores.knowledge is not None:
        await stores.knowledge.save_fact(Fact(key="color", value=marked("fact")))
        await stores.knowledge.save_summary(Summary(content=marked("summary"), conversation_id=CONVERSATION))
        embedding = Embedding(vector=[0.25, 0.5], content=marked("embedding"))
        await stores.knowledge.save_embedding(embedding)
        [(found, _)] = await stores.knowledge.search_similar([0.25, 0.5])
        assert found.content == embedding.content
    if stores.audit is not None:
        await stores.audit.log_event(
            AuditEntry(event_type=AuditEventType.TOOL_CALL, action=marked("audit"), details={"n": marked("details")})
        )
        await stores.audit.log_error(ErrorRecord(error_type="E", message=marked("errorrecord")))
        await stores.audit.record_metric(PerformanceMetric(name="n", value=1.0, tags={"of": marked("metric")}))


def bytes_under(folder: Path) -> bytes:
    """Return the bytes of all files, and of all values in a SQLite file that are compressed."""
    files = [each for each in sorted(folder.rglob("*")) if each.is_file()]
    raw = [each.read_bytes() for each in files]
    for path in files:
        if path.suffix == ".db":
            raw += _values(path)
    return b"\n".join(raw)


def _values(path: Path) -> Iterator[bytes]:
    with closing(sqlite3.connect(path)) as db:
        for (table,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
            for row in db.execute(f'SELECT * FROM "{table}"'):
                for value in row:
                    if isinstance(value, bytes):
                        with contextlib.suppress(zlib.error):
                            yield zlib.decompress(value)


class Overheard:
    """All that clients send to a Redis server, with what its functions do: keys, values and notifications."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._monitor = Link(server.port)
        self._monitor.ask("MONITOR")

    def raw(self) -> bytes:
        """Return what was sent so far, and what the server has stored now."""
        self._server.ask("ECHO", "end-of-monitor")
        lines = [self._monitor.receive()]
        while b"end-of-monitor" not in lines[-1]:
            lines.append(self._monitor.receive())
        return b"\n".join([*lines, *self._stored()])

    def _stored(self) -> Iterator[bytes]:
        reads = {
            b"string": ("GET",), b"hash": ("HGETALL",), b"list": ("LRANGE", 0, -1), b"set": ("SMEMBERS",),
            b"zset": ("ZRANGE", 0, -1), b"stream": ("XRANGE", "-", "+"),
        }  # fmt: skip
        with self._server.link() as link:
            for key in link.ask("KEYS", "*"):
                command, *rest = reads[link.ask("TYPE", key)]
                yield key
                yield repr(link.ask(command, key, *rest)).encode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._monitor.close()
