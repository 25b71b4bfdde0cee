"""What somebody else does to the keys of this library on their server: all of them gone, or one of another type."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

import agent_runtime_core
from agent_runtime_core import AgentRunner, RateLimit, RunStatus
from agent_runtime_core._engines.base import Guard, Op
from agent_runtime_core.errors import IdempotencyConflict, IllegalTransition, StorageError, UnknownRun
from agent_runtime_core.persistence import Conversation, ConversationMessage, PersistenceManager, Scope
from agent_runtime_core.queue.records import LIVE, RunFilter
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner.backends import open_url
from agent_runtime_core.state import EffectRow
from tests.support.fault_runs import Agent, settings, until, until_status
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.redis

LUA = sorted(Path(agent_runtime_core.__file__).parent.rglob("*.lua"))
#: Every kind of key there is, as the scripts name them. A bell is a channel, `rights` is gone before
#: its call ends, `docstamps` is only deleted, and of `lists` only matters whether it exists.
KINDS = sorted(
    {kind for each in LUA for kind in re.findall(r"P \.\. '(\w+)", each.read_text("utf-8"))}
    - {"bell", "rights", "docstamps", "lists"}
)


@asynccontextmanager
async def work(url: str) -> AsyncIterator[tuple[AgentRunner, asyncio.Task[None], asyncio.Event, asyncio.Event]]:
    """A worker with one run under way, until the second event is set, and one parked."""
    begun, gate = asyncio.Event(), asyncio.Event()
    agents = Registry()

    async def held(ctx: Any) -> str:
        await ctx.emit("said", {})
        await ctx.checkpoint({"at": 1})

        async def wait() -> str:
            begun.set()
            await gate.wait()
            return "waited"

        await ctx.step("pay", lambda: 1, on_in_doubt="fail")  # has an effect row
        waited: str = await ctx.step("wait", wait)
        return waited

    async def quick(ctx: Any) -> str:
        return "quick"

    agents.register(Agent("held", held))
    agents.register(Agent("parked", lambda ctx: ctx.wait_for_signal("go")))
    agents.register(Agent("quick", quick))
    queue, bus, state = open_url(url)
    runner = AgentRunner(queue, bus, state, settings(lease_ttl_seconds=60.0, park_after=0), registry=agents)
    working = asyncio.create_task(runner.run_loop(600, concurrency=4, handle_signals=False))
    try:
        yield runner, working, begun, gate
    finally:
        gate.set()
        runner.stop()
        await working
        await runner.close()


async def ends(runner: AgentRunner, run_id: uuid.UUID | str, output: Any) -> None:
    result = await runner.wait(run_id, timeout=20)
    assert (result.status, result.final_output) == (RunStatus.SUCCEEDED, {"value": output})


async def test_everything_is_deleted_under_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    """What is gone is told as gone, no late write brings any of it back, and the worker goes on with what is new."""
    with RedisServer() as server:
        async with work(server.url) as (runner, working, begun, gate):
            parked, held = await runner.submit("parked"), await runner.submit("held")
            await begun.wait()
            await until_status(runner, parked, "waiting")
            server.ask("FLUSHALL")
            asked: list[Callable[[], Awaitable[Any]]] = [
                lambda: runner.get_run(held),
                lambda: runner.wait(held, timeout=0),
                lambda: runner.cancel(held),
                lambda: runner.resume(parked),
                lambda: runner.signal(parked, "go", 1),
            ]
            for ask in asked:
                with pytest.raises(UnknownRun):
                    await ask()
            gate.set()
            await until(lambda: not runner._worker._executions)
            assert await runner.runs() == []
            assert [key for key in server.ask("KEYS", "*") if str(held).encode() in key] == []
            assert not working.done()
            await ends(runner, await runner.submit("quick"), "quick")
            # The same ids are new runs: no number, no record and no fence of theirs is left to stand in the way.
            again = [await runner.submit("held", run_id=held), await runner.submit("parked", run_id=parked)]
            assert again == [held, parked]
            await until_status(runner, parked, "waiting")
            await runner.signal(parked, "go", 1)
            await ends(runner, parked, 1)
            await ends(runner, held, "waited")
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) <= 3, [record.getMessage() for record in told]


class Scene:
    """Something of every kind that a server is asked to keep, and every verb there is upon it."""

    def __init__(self, url: str, runner: AgentRunner) -> None:
        self.runner = runner
        self.stores = PersistenceManager.open(url, session_id="one")
        self.conversation = Conversation()
        self.numbers = iter(range(1000))
        self.inline: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def build(self) -> None:
        runner, stores = self.runner, self.stores
        self.held = await runner.submit("held", idempotency_key="once")
        self.parked = await runner.submit("parked")
        self.later = await runner.submit("quick", priority=1, delay=3600, parent_run_id=self.held)
        self.first, self.second = [await runner.submit("nobody", concurrency_key="lane") for _ in range(2)]
        self.inline = asyncio.create_task(runner.execute("held", "inline", {"conversation_id": "c"}))
        await until_status(runner, self.parked, "waiting")
        await runner.signal(self.parked, "another", 1)
        await stores.memory.set("k", 1)
        await stores.memory.set("k", 1, Scope.SESSION)
        await stores.conversations.save(self.conversation)
        await stores.conversations.append(self.conversation.id, [self.message()])
        await self.ask("in_doubt:pay")
        retried = await runner.submit("retried")
        await runner.queue.claim("w", agent_keys=["retried"])
        assert await runner.queue.requeue_for_retry(retried, "w", "no", 3600)
        limit = RateLimit(1, per=3600)
        await asyncio.gather(*(runner.submit("limited", rate_limit=limit) for _ in range(2)))
        await runner.queue.claim("w", agent_keys=["limited"], limit=2)  # one starts, and one is delayed
        await runner.queue.insert(runner.queue.new_row(None, "nobody", {}, turn="one"))
        engine = cast("Any", runner.queue).engine
        await engine.commit(None, [Op("fence.install", ("somebody", "1")), self.standing(), self.effect("one")])
        await runner.event_bus.report_reader(str(self.held), "another.1", 0)

    async def close(self) -> None:
        self.inline.cancel()
        await asyncio.gather(self.inline, return_exceptions=True)
        await self.stores.close()

    async def ask(self, name: str) -> None:
        await self.runner.queue.post(self.later, "question", name, "{}", f"q{next(self.numbers)}")

    @staticmethod
    def effect(key: str) -> Op:
        return Op("effect.put", (EffectRow("somebody", key, "", "somebody", "begun"),))

    def standing(self) -> Op:
        """A claim that stands."""
        return Op(
            "queue.claim", (self.runner.queue.claim_request("w", 60, ["none"], wait_name="s", wait_seconds=3600),)
        )

    @staticmethod
    def message() -> ConversationMessage:
        return ConversationMessage(id=uuid.uuid4(), role="user", content="word for word")

    def verbs(self) -> list[Callable[[], Awaitable[Any]]]:
        runner, stores, engine = self.runner, self.stores, cast("Any", self.runner.queue).engine
        return [
            lambda: runner.submit("nobody", idempotency_key=f"n{next(self.numbers)}", concurrency_key="lane"),
            lambda: runner.submit("nobody"),
            lambda: runner.submit("limited", rate_limit=RateLimit(1, per=3600)),
            lambda: runner.queue.claim("w", agent_keys=["limited"]),
            lambda: runner.queue.claim_rows("w", agent_keys=["nobody"], after_turn="zero"),
            lambda: runner.queue.insert(runner.queue.new_row(None, "nobody", {}, turn="two")),
            lambda: runner.pools(),
            lambda: runner.submit("nobody", idempotency_key="once"),
            lambda: runner.submit("nobody", delay=3600, parent_run_id=self.held),
            lambda: runner.get_run(self.held),
            lambda: runner.runs(),
            lambda: runner.runs("waiting"),
            lambda: runner.runs("waiting", reason="signal", newest_first=True),
            lambda: runner.queue.find(RunFilter(retrying=True, newest_first=True)),
            lambda: runner.queue.find(RunFilter(in_doubt=True, newest_first=True)),
            lambda: runner.approvals(),
            lambda: runner.queue.counts(),
            lambda: runner.event_bus.readers(str(self.held)),
            lambda: runner.event_bus.report_reader(str(self.held), "another.1", 0),
            lambda: runner.run_once(),
            lambda: runner.queue.next_due(),
            lambda: runner.processes(),
            lambda: runner.signal(self.parked, "another", 2),
            lambda: runner.approve(self.parked, "another"),
            lambda: runner.fork(self.held),
            lambda: runner.cancel(self.later),
            lambda: runner.resume(self.later),
            lambda: runner.vacuum({"cancelled": 0}),
            lambda: runner.event_bus.get_events(self.held),
            lambda: runner.event_bus.publish(self.held, "x", {}),
            lambda: runner.state_store.records(self.held),
            lambda: runner.state_store.get_checkpoint(self.held),
            lambda: runner.state_store.update_run_status("another", "running"),
            lambda: engine.commit(None, [Op("fence.install", ("somebody", "2"))]),
            lambda: engine.commit(Guard("somebody", "2"), []),
            lambda: engine.commit(None, [self.standing()]),
            lambda: engine.commit(None, [self.effect("two")]),
            lambda: engine.commit(None, [Op("queue.sit", ("s",))]),
            lambda: stores.memory.get("k"),
            lambda: stores.memory.set("k", 2),
            lambda: stores.memory.set("k", 2, Scope.SESSION),
            lambda: stores.memory.list_keys(),
            lambda: stores.preferences.set("k", 1, Scope.PROJECT),
            lambda: stores.memory.delete("other"),
            lambda: stores.conversations.get(self.conversation.id),
            lambda: stores.conversations.append(self.conversation.id, [self.message()]),
            lambda: stores.conversations.search("word"),
        ]


@pytest.mark.parametrize("kind", KINDS)
async def test_keys_of_another_type_are_told_and_left_and_the_worker_goes_on(
    kind: str, redis_server: RedisServer, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    tag = f"{{{redis_url.rpartition('=')[2]}}}:"
    async with work(redis_url) as (runner, working, begun, gate):
        scene = Scene(redis_url, runner)
        try:
            await scene.build()
            await begun.wait()
            there = [key.decode() for key in redis_server.ask("KEYS", f"{tag}{kind}*")]
            taken = {key: redis_server.ask("DUMP", key) for key in there if kind == key.removeprefix(tag).split(":")[0]}
            assert taken, "there is something of this kind"
            for key in taken:
                command = "RPUSH" if redis_server.ask("TYPE", key) == b"string" else "SET"
                redis_server.ask("DEL", key)
                redis_server.ask(command, key, "theirs")
            theirs = {key: redis_server.ask("DUMP", key) for key in taken}
            gate.set()
            told = [await failure(ask) for ask in scene.verbs()]
            assert any("WRONGTYPE" in str(each) for each in told)
            assert {key: redis_server.ask("DUMP", key) for key in taken} == theirs
            await until(lambda: not runner._worker._executions)
            for key, value in taken.items():
                redis_server.ask("RESTORE", key, 0, value, "REPLACE")
            assert not working.done()
            await ends(runner, await runner.submit("quick"), "quick")
            # Those it was in the way of keep their lease as a pause; none was ended, and none is lost.
            after = {run.run_id: run for run in await runner.runs()}
            known = (scene.held, scene.parked, scene.later, scene.first, scene.second)
            # A run writes `words` only when it is parked. The parked one got a signal and cannot be parked again.
            ended = {RunStatus.FAILED} if kind == "words" else set()
            assert {after[each].status for each in known} <= {*LIVE, RunStatus.SUCCEEDED, RunStatus.CANCELLED, *ended}
        finally:
            await scene.close()
    assert len(caplog.records) < 3 * len(told), [record.getMessage() for record in caplog.records]


async def failure(ask: Callable[[], Awaitable[Any]]) -> StorageError | None:
    """What is wrong with the store, if it says so; what is wrong with the run or the call is none."""
    try:
        async with asyncio.timeout(20):
            await ask()
    except (StorageError, IllegalTransition, IdempotencyConflict) as error:
        return error if isinstance(error, StorageError) else None
    return None
