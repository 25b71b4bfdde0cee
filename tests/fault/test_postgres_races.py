"""Two engines on one PostgreSQL schema, as two processes have them: fences, event numbers, and contents of many MB."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core._engines.base import Guard, Op
from agent_runtime_core._engines.postgres import notifier
from agent_runtime_core._journal.record import Record
from agent_runtime_core.errors import LeaseLost
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner.backends import open_url
from tests.support.fault_runs import Agent, Code, consistent, settings, until
from tests.support.postgres_servers import PostgresServer
from tests.support.processes import Child

pytestmark = pytest.mark.postgres


@asynccontextmanager
async def two(url: str, code: Code | None = None) -> AsyncIterator[tuple[AgentRunner, AgentRunner]]:
    runners = []
    for number in range(2):
        registry = Registry()
        if code is not None:
            registry.register(Agent("a", code))
        backends = open_url(f"{url}&fallback_application_name=e{number}")
        runners.append(AgentRunner(*backends, settings(worker_id=f"w{number}"), registry=registry))
    try:
        yield runners[0], runners[1]
    finally:
        for each in runners:
            await each.close()


def step(row: Any, seq: int) -> tuple[Guard, list[Op]]:
    record = Record(seq, "done", f"s{seq}", f"s{seq}", 1, row.claim_id, 1.0)
    return Guard(row.run_id, row.claim_id), [Op("journal.append", (row.run_id, record))]


async def waiting(server: PostgresServer) -> None:
    """Until a transaction waits for the lock of another one."""
    ask = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    await until(lambda: server.ask(ask)[0][0] == 1)


async def test_a_step_of_a_claim_that_is_being_superseded_waits_and_is_refused(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    import psycopg

    async with two(postgres_url) as (old, new):
        await old.queue.enqueue("r", "a", {})
        [row] = await old.queue.claim_rows("w", 60)
        await old.queue.commit(*step(row, 0))
        schema = postgres_url.rpartition("=")[2]
        with psycopg.connect(postgres_server.url) as conn:
            conn.execute(f"UPDATE {schema}.runs SET claim_id = 'Z' WHERE run_id = %s".encode(), (row.run_id,))
            late = asyncio.ensure_future(old.queue.commit(*step(row, 1)))
            await waiting(postgres_server)
            assert [each.seq for each in await new.state_store.records(row.run_id)] == [0]
            conn.commit()
        with pytest.raises(LeaseLost):
            await late
        assert [each.seq for each in await new.state_store.records(row.run_id)] == [0]


async def test_a_message_does_not_wait_for_the_function_of_a_transaction(postgres_url: str) -> None:
    entered, leave = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slow(conn: Any) -> int:
        loop.call_soon_threadsafe(entered.set)
        assert leave.wait(20)
        return 1

    async def code(ctx: Any) -> Any:
        return await ctx.transaction("pay", slow)

    async with two(postgres_url, code) as (worker, other):
        run_id = await worker.submit("a")
        working = asyncio.ensure_future(worker.run_once())
        await entered.wait()
        assert await other.signal(run_id, "go")
        assert not working.done()
        leave.set()
        await working
        assert any(each.name == "pay" and each.kind == "done" for each in await other.state_store.records(run_id))


async def test_events_of_a_run_and_of_another_process_have_one_order(postgres_url: str) -> None:
    published = 0

    async def code(ctx: Any) -> int:
        for number in range(60):
            await ctx.step(f"s{number}", lambda: 1)
            await ctx.emit("said", {"number": number})
            await asyncio.sleep(0.001)
        return published

    async with two(postgres_url, code) as (worker, other):
        run_id = await worker.submit("a")
        assert await other.event_bus.get_events(run_id) == []  # it has a connection now
        working = asyncio.ensure_future(worker.run_once())

        async def publish(each: int) -> None:
            nonlocal published
            while not working.done():
                await other.event_bus.publish(run_id, "custom.note", {"each": each, "number": published})
                published += 1

        await asyncio.gather(*(publish(each) for each in range(4)))
        await working
        await consistent(worker, run_id)
        found = await other.event_bus.get_events(run_id)
        assert sum(each.event_type == "custom.note" for each in found) == published > 8
        said = [each.payload["number"] for each in found if each.event_type == "said"]
        assert said == list(range(60))


async def test_contents_of_many_megabytes_are_kept(postgres_url: str) -> None:
    text = "\x00\x01 ä 🐘" * 320_000  # 10 MB as JSON

    async def code(ctx: Any) -> str:
        assert ctx.input["text"] == text
        found: str = await ctx.step("long", lambda: text, max_result_bytes=2**24)
        await ctx.emit("said", {"text": text[:9_000]})
        await ctx.checkpoint({"text": text})
        return found

    async with two(postgres_url, code) as (worker, other):
        run_id = await other.submit("a", {"text": text})
        assert await worker.run_once()
        result = await other.wait(run_id, timeout=30)
        assert result.error is None
        assert (result.final_output["value"] == text) is True  # a report of the difference would be long
        assert (await other.state_store.get_checkpoint(run_id) == {"text": text}) is True
        await consistent(other, run_id)


async def _next_of(runner: AgentRunner, run_id: Any, kind: str) -> asyncio.Task[Any]:
    """A task that ends with the next event of that type, which it has begun to wait for."""
    began = asyncio.Event()

    async def follow() -> Any:
        async for event in runner.event_bus.subscribe(run_id, 0):
            began.set()
            if event.event_type == kind:
                return event
        raise AssertionError("the log of a live run has no end")

    task = asyncio.ensure_future(follow())
    await began.wait()
    return task


async def test_a_notification_whose_connection_is_terminated_is_sent_again(
    postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "TEST_EVERY", math.inf)  # which would reconnect the listeners
    async with two(postgres_url) as (one, other):
        run_id = (await one.queue.enqueue("r", "a", {})).run_id
        for number in range(6):
            await one.event_bus.publish(run_id, "custom.first", {})
            task = await _next_of(other, run_id, f"custom.n{number}")
            name = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s"
            postgres_server.ask(name, "agent-runtime notifier")
            await one.event_bus.publish(run_id, f"custom.n{number}", {})
            async with asyncio.timeout(20):
                await task


async def test_what_a_killed_process_told_nobody_is_found(postgres_url: str) -> None:
    async with two(postgres_url) as (one, other):
        run_id = (await one.queue.enqueue("r", "a", {})).run_id
        await one.event_bus.publish(run_id, "custom.first", {})
        task = await _next_of(other, run_id, "custom.last")
        with Child("silent", f"{postgres_url}&fallback_application_name=dies", run_id) as child:
            assert await child.aended() == -signal.SIGKILL
        async with asyncio.timeout(20):
            assert (await task).payload == {"by": child.pid}
