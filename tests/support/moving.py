"""Stores with runs in every state, which are moved between servers and files, and all that can be read of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

from agent_runtime_core.events import PostgresEventBus, RedisEventBus, SQLiteEventBus
from agent_runtime_core.persistence import Conversation, ConversationMessage, PersistenceConfig, PersistenceManager
from agent_runtime_core.queue import PostgresQueue, RedisQueue, SQLiteQueue
from agent_runtime_core.queue.records import RunFilter
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.state import PostgresStateStore, RedisStateStore, SQLiteStateStore
from agent_runtime_core.testing import VirtualClock
from tests.support.runs import Script

HOUR = 3600.0
TOPIC = "00000000-0000-4000-8000-000000000001"
LONG = 600  # steps of one run: more than one operation has


class Agents:
    """Agents that count how often their steps are executed."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = True
        self.scripts = [
            Script(getattr(self, name), name)
            for name in ("fast", "asks", "sleeps", "signalled", "failing", "parent", "guarded", "long")
        ]

    def _note(self, name: str) -> str:
        self.calls.append(name)
        return name

    async def fast(self, ctx: Any) -> Any:
        await ctx.emit("my.event", {"n": 1})
        return await ctx.step("fast", self._note, f"fast {ctx.run_key}")

    async def asks(self, ctx: Any) -> Any:
        await ctx.step("before", self._note, "asks")
        return await ctx.approve("pay", {"amount": 1})

    async def sleeps(self, ctx: Any) -> Any:
        await ctx.step("before", self._note, "sleeps")
        await ctx.sleep(HOUR)
        return await ctx.step("after", self._note, "slept")

    async def signalled(self, ctx: Any) -> Any:
        await ctx.step("before", self._note, "signalled")
        await ctx.checkpoint({"at": "before"})
        await ctx.emit("my.event", {"text": "é" * 10})
        return await ctx.wait_for_signal("go")

    async def failing(self, ctx: Any) -> Any:
        await ctx.step("before", self._note, "failing")
        if self.fails:
            raise ValueError("not yet")
        return "done"

    async def parent(self, ctx: Any) -> Any:
        return (await ctx.call("signalled", {})).final_output["value"]

    async def guarded(self, ctx: Any) -> Any:
        await ctx.step("look", self._note, "look")
        return await ctx.step("pay", self._note, "pay", on_in_doubt="fail")

    async def long(self, ctx: Any) -> Any:
        for n in range(LONG):
            await ctx.step(f"s{n}", lambda: "x" * 900)
        return await ctx.wait_for_signal("go")


def opened(url: str, clock: VirtualClock, agents: Agents) -> AgentRunner:
    """Return a runner on a store whose time is that of a clock."""
    registry = Registry()
    for script in agents.scripts:
        registry.register(script)
    kinds: Any
    engine: Any
    if url.startswith("postgresql:"):
        from agent_runtime_core._engines.postgres.engine import PostgresEngine

        engine = PostgresEngine.open(url, clock=clock)
        kinds = (PostgresQueue, PostgresEventBus, PostgresStateStore)
    elif "://" in url:
        from agent_runtime_core._engines.redis.engine import RedisEngine

        engine = RedisEngine.open(url, clock=clock)
        kinds = (RedisQueue, RedisEventBus, RedisStateStore)
    else:
        from agent_runtime_core._engines.sqlite.engine import SQLiteEngine

        engine = SQLiteEngine.open(url, clock=clock)
        kinds = (SQLiteQueue, SQLiteEventBus, SQLiteStateStore)
    queue, bus, state = (kind(engine=engine) for kind in kinds)
    persistence = PersistenceManager(PersistenceConfig.on(engine))
    engine.close_now()  # the backends have it open
    config = RunnerConfig(park_after=0, max_retries=1)
    return AgentRunner(queue, bus, state, config, registry=registry, persistence=persistence)


@asynccontextmanager
async def running(url: str, clock: VirtualClock, agents: Agents) -> AsyncIterator[AgentRunner]:
    async with opened(url, clock, agents) as runner, runner.persistence:  # which is not the runner's to close
        yield runner


async def drain(runner: AgentRunner) -> None:
    while await runner.run_once():
        pass


async def fill(runner: AgentRunner, clock: VirtualClock) -> None:
    """Store runs in every state, and something of each other kind."""
    for name, agent in {
        "deleted": "fast", "succeeded": "fast", "asking": "asks", "sleeping": "sleeps", "parked": "signalled",
        "failed": "failing", "calling": "parent", "paid": "guarded", "long": "long",
    }.items():  # fmt: skip
        await runner.submit(agent, {"params": {"n": 1}}, run_id=name, metadata={"note": name})
    await runner.submit("asks", run_id="first", concurrency_key="k")
    await drain(runner)
    await runner.submit("fast", run_id="behind", concurrency_key="k", priority=2)
    await runner.submit("fast", run_id="last behind", concurrency_key="k")
    for tenant in ("a", "b"):
        await runner.submit("signalled", run_id="parked", idempotency_key="once", tenant=tenant)
    await drain(runner)
    await runner.signal("parked", "other", {"n": 1})
    await runner.send("asking", "hurry")
    await drain(runner)
    await runner.fork("paid", "pay", new_run_id="forked")
    await runner.fork("paid", "look", new_run_id="fork of all")
    await runner.submit("signalled", run_id="cancelled")
    await drain(runner)
    await runner.cancel("cancelled")
    await drain(runner)
    await runner.submit("fast", run_id="crashed")
    claimed = await runner.queue.claim("a worker that is killed", agent_keys=["fast"])
    assert claimed.run_id == (await runner.get_run("crashed")).run_id
    await runner.submit("fast", run_id="queued", priority=5, idempotency_key="once")
    await runner.submit("fast", run_id="delayed", delay=2 * HOUR)
    clock.advance(120)  # the lease of the crashed run ends
    await runner.discard("deleted")
    for n in range(3):
        await runner.event_bus.publish(TOPIC, "my.topic", {"n": n})
    await _fill_documents(runner)


async def _fill_documents(runner: AgentRunner) -> None:
    stores = runner.persistence
    for n in range(3):
        await stores.memory.set("name", f"value {n}")
    await stores.for_tenant("a").memory.set("name", "of a")
    message = ConversationMessage(id=UUID(int=2), role="user", content="Hello there")
    await stores.conversations.save(Conversation(id=UUID(int=1), title="Talk", messages=[message]))


async def dump(runner: AgentRunner) -> dict[str, Any]:
    """Return all that can be read, without what belongs to a store: leases, and the reading of its clock."""
    now = runner.queue.clock.wall()
    rows = await runner.queue.find(RunFilter(limit=10_000))
    found: dict[str, Any] = {
        "counts": await runner.queue.counts(),
        "rows": [
            row.with_values(lease_until=0.0, holder="", due_at=row.due_at and round(row.due_at - now)) for row in rows
        ],
        "topic": await _events(runner, TOPIC),
        "memory": [await runner.persistence.memory.get("name"), await _of_tenant(runner)],
        "conversation": await runner.persistence.conversations.get(UUID(int=1)),
        "found": await runner.persistence.conversations.search("hello"),
    }
    for row in rows:
        found[row.run_id] = {
            "mail": await runner.queue.mail(row.run_id),
            "records": [[cell or None for cell in each] for each in await runner.state_store.records(row.run_id)],
            "events": await _events(runner, row.run_id),
            "checkpoint": await runner.state_store.get_checkpoint(row.run_id),
            "status": await runner.state_store.get_run_status(row.run_id) or row.status,
            "children": [each.run_id for each in await runner.queue.children(row.run_id)],
        }
    return found


async def _of_tenant(runner: AgentRunner) -> Any:
    return await runner.persistence.for_tenant("a").memory.get("name")


async def _events(runner: AgentRunner, run_id: str) -> list[tuple[Any, ...]]:
    events = await runner.event_bus.get_events(run_id)
    return [(each.sequence, each.event_type, each.payload, each.timestamp) for each in events]
