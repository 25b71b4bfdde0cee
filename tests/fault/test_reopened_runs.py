"""Runs opened again after an ending, runs that must not be, and runs that are forgotten."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._core.clock import SYSTEM
from agent_runtime_core._core.ids import stored_id
from agent_runtime_core.errors import IdempotencyConflict, IllegalTransition, InvalidArgument, RunBusy, UnknownRun
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.queue.records import RunFilter, RunRow
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.runner.backends import Backends
from agent_runtime_core.state import InMemoryStateStore
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing.clock import VirtualClock
from tests.support.fault_runs import KINDS, Store, consistent, settings, status, store, until, until_status
from tests.support.redis_protocol import Link

pytestmark = pytest.mark.parametrize("kind", KINDS)

LIMIT = 0.4  # seconds
ENDINGS = ("failed", "timed_out", "cancelled", "dead")


async def ended_as(here: Store, runner: AgentRunner, how: str) -> tuple[str, list[str]]:
    """A run that ended so after one recorded step, and goes on well from there; what it ran."""
    ran: list[str] = []
    heal: list[bool] = []

    async def code(ctx: Any) -> Any:
        await ctx.step("first", lambda: ran.append("first"))
        if heal:
            return await ctx.step("second", well)
        heal.append(True)
        match how:
            case "failed":
                return await ctx.step("second", bad)
            case "timed_out":
                assert isinstance(here.clock, VirtualClock)
                here.clock.advance(LIMIT)
                await asyncio.get_running_loop().create_future()
            case "dead":
                await asyncio.get_running_loop().create_future()
            case "cancelled":
                await runner.cancel("x")
                await asyncio.get_running_loop().create_future()
        return None

    def bad() -> None:
        raise ValueError("bad")

    def well() -> str:
        ran.append("second")
        return "well"

    here.agent("a", code)
    await runner.submit("a", {"n": 1}, run_id="x")
    if how == "dead":
        # Three claims by workers that die before they get anywhere.
        for _ in range(3):
            [row] = await runner.queue.claim_rows("doomed", agent_keys=["a"])
            await runner.queue.extend_lease(row.run_id, "doomed", 0.001, claim_id=row.claim_id)
            await until_expired(runner, row.run_id)
        ran.append("first")
        heal.append(True)
    assert await runner.run_once()
    assert await status(runner, "x") == how
    return "x", ran


async def until_expired(runner: AgentRunner, run_id: str) -> None:
    row = await runner.queue.require(run_id)
    # Where leases are in a server's time, it is this machine's.
    await until(lambda: (runner.queue.lease_now() or runner.queue.clock.wall()) > row.lease_until)


def brief(how: str) -> Any:
    return settings(max_retries=1 if how == "failed" else 3, run_timeout_seconds=LIMIT if how == "timed_out" else 60.0)


@pytest.mark.parametrize("how", ENDINGS)
@pytest.mark.parametrize("door", ["resume", "requeue", "execute"])
async def test_an_ended_run_is_opened_again(kind: str, door: str, how: str, tmp_path: Path) -> None:
    # A time limit is over when the run says so, however slow this machine is.
    async with store(kind, tmp_path, VirtualClock() if how == "timed_out" else SYSTEM) as here:
        runner = here.runner(brief(how))
        run_id, ran = await ended_as(here, runner, how)
        if door == "execute":
            result = await runner.execute("a", run_id, {"n": 1})
        else:
            info = await getattr(runner, door)(run_id)
            assert (info.status, info.generation, info.attempt) == (RunStatus.PENDING, 2, 1)
            assert await runner.run_once()
            result = await runner.wait(run_id, timeout=5)
        assert result.status is RunStatus.SUCCEEDED, result.error
        assert result.final_output == {"value": "well"}
        assert ran == ["first", "second"] if how != "dead" else ["first", "first", "second"]
        info = await runner.get_run(run_id)
        assert (info.generation, info.attempt, info.cancel_requested) == (2, 1, False)
        kinds = [e.event_type for e in await runner.event_bus.get_events(run_id)]
        ends = {"failed": "run.failed", "dead": "run.failed"}.get(how, f"run.{how}")
        assert [k for k in kinds if k in (ends, "run.succeeded")] == [ends, "run.succeeded"]
        await consistent(runner, run_id)
        # And what has succeeded stays so.
        for again in (runner.resume, runner.requeue):
            with pytest.raises(IllegalTransition, match="succeeded"):
                await again(run_id)
        assert (await runner.execute("a", run_id, {"n": 1})).final_output == {"value": "well"}
        assert (await runner.get_run(run_id)).generation == 2


@pytest.mark.parametrize("apart", [False, True], ids=["one engine", "two"])
async def test_a_worker_that_is_quicker_than_whoever_resumed_has_the_last_word(
    kind: str, apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store(kind, tmp_path) as here:
        runner = here.runner(brief("failed"))
        if apart:
            runner.backends = Backends(runner.queue, runner.event_bus, InMemoryStateStore(clock=here.clock))
        run_id, _ = await ended_as(here, runner, "failed")
        commit = here.engine.commit

        async def quick(guard: Any, ops: Any) -> list[Any]:
            results: list[Any] = await commit(guard, ops)
            if any(op.name == "queue.reopen" for op in ops):
                assert await runner.run_once()
            return results

        monkeypatch.setattr(here.engine, "commit", quick)
        assert (await runner.resume(run_id)).status is RunStatus.SUCCEEDED
        assert await runner.state_store.get_run_status(str((await runner.get_run(run_id)).run_id)) == "succeeded"


async def test_a_live_run_is_not_resumed(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        here.agent("a", lambda ctx: ctx.wait_for_signal("go"))
        runner = here.runner(settings(park_after=0))
        run_id = await runner.submit("a")
        with pytest.raises(IllegalTransition, match="pending"):
            await runner.resume(run_id)
        assert await runner.run_once()
        with pytest.raises(IllegalTransition, match="waiting"):
            await runner.resume(run_id)
        with pytest.raises(UnknownRun, match="nobody"):
            await runner.resume("nobody")


async def test_one_id_is_one_run(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        here.agent("a", lambda ctx: asyncio.sleep(0))
        here.agent("b", lambda ctx: asyncio.sleep(0))
        runner = here.runner()
        await runner.execute("a", "x", {"n": 1})
        for call, differs in (
            (lambda: runner.execute("a", "x", {"n": 2}), "another input.n"),
            (lambda: runner.execute("b", "x", {"n": 1}), "another agent_key"),
            (lambda: runner.submit("a", {"n": 2}, run_id="x"), "another input.n"),
        ):
            with pytest.raises(IdempotencyConflict, match=r"'x' was used before") as caught:
                await call()
            assert differs in str(caught.value)
        first = await runner.submit("a", {"n": 1}, idempotency_key="k")
        assert await runner.submit("a", {"n": 1}, idempotency_key="k") == first
        with pytest.raises(IdempotencyConflict, match="idempotency key 'k'"):
            await runner.submit("a", {"n": 2}, idempotency_key="k")
        assert len(await runner.runs()) == 2


async def test_a_run_that_is_running_elsewhere(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        gate, ran = asyncio.Event(), list[int]()

        async def code(ctx: Any) -> str:
            ran.append(1)
            await gate.wait()
            return "once"

        here.agent("a", code)
        one, two = here.runner(settings(worker_id="one")), here.runner(settings(worker_id="two"))
        first = asyncio.ensure_future(one.execute("a", "x"))
        await until(lambda: bool(ran))
        with pytest.raises(RunBusy, match="is already running in one") as caught:
            await two.execute("a", "x", if_running="raise")
        assert caught.value.worker == "one"
        second = asyncio.ensure_future(two.execute("a", "x"))
        await asyncio.sleep(0.02)
        assert not second.done()
        gate.set()
        assert (await first).final_output == (await second).final_output == {"value": "once"}
        assert ran == [1]
        for wrong in ({"if_running": "join"}, {"recover": "maybe"}):
            with pytest.raises(InvalidArgument, match=next(iter(wrong.values()))):
                await one.execute("a", "x", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("recover", ["inline", "worker"])
async def test_who_takes_over_when_execute_dies(kind: str, recover: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        ran: list[int] = []

        async def code(ctx: Any) -> int:
            ran.append(ctx.attempt)
            if len(ran) == 1:
                await asyncio.get_running_loop().create_future()
            return len(ran)

        here.agent("a", code)
        dying = here.runner()
        dead = asyncio.ensure_future(dying.execute("a", "x", recover=recover))
        await until(lambda: bool(ran))
        dying.heartbeat.drop(stored_id("x"))
        clock.advance(61)
        worker = here.runner()
        assert await worker.run_once() is (recover == "worker")
        result = await worker.execute("a", "x", recover=recover)
        assert result.final_output == {"value": 2}
        assert ran == [1, 2]
        dead.cancel()
        await asyncio.wait({dead})
        await consistent(worker, "x")


async def test_what_execute_gave_back_waits_for_execute(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        ran: list[int] = []

        async def code(ctx: Any) -> int:
            ran.append(1)
            if len(ran) == 1:
                await asyncio.get_running_loop().create_future()
            return len(ran)

        here.agent("a", code)
        runner = here.runner()
        task = asyncio.ensure_future(runner.execute("a", "x"))
        await until(lambda: bool(ran))
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert await status(runner, "x") == "pending"
        assert not await here.runner().run_once()
        assert (await runner.execute("a", "x")).final_output == {"value": 2}
        assert (await runner.get_run("x")).attempt == 1


async def test_the_caller_is_cancelled_though_the_lease_is_lost(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:
        began = asyncio.Event()

        async def code(ctx: Any) -> None:
            began.set()
            await asyncio.get_running_loop().create_future()

        here.agent("a", code)
        runner = here.runner()
        task = asyncio.ensure_future(runner.execute("a", "x", recover="worker"))
        await began.wait()
        runner.heartbeat.drop(stored_id("x"))
        clock.advance(61)
        assert await here.runner().queue.claim("thief")
        task.cancel()
        await asyncio.wait({task}, timeout=5)
        assert task.cancelled()
        assert (await runner.get_run("x")).worker == "thief"


# -- forgetting


def rows_of(path: Path, run_id: str) -> dict[str, int]:
    """How many rows each table has of that run."""
    conn = sqlite3.connect(path)
    try:
        tables = [name for (name,) in conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = {}
        for table in tables:
            columns = [column[1] for column in conn.execute(f"PRAGMA table_info({table})")]
            key = "run_id" if "run_id" in columns else "key" if "key" in columns else None
            if key is not None:
                count = conn.execute(f"SELECT count(*) FROM {table} WHERE {key} = ?", (run_id,)).fetchone()[0]
                if count:
                    found[table] = count
        return found
    finally:
        conn.close()


def keys_of(engine: Any, run_id: str) -> dict[str, int]:
    """The keys that are of that run, or name it."""
    read = {b"hash": ("HKEYS",), b"zset": ("ZRANGE", 0, -1), b"set": ("SMEMBERS",)}
    found = {}
    with Link(engine.place.port) as link:
        for key in link.ask("KEYS", f"{engine.place.tag}:*"):
            word, *span = read.get(link.ask("TYPE", key), ("EXISTS",))
            inside = repr([key, link.ask(word, key, *span)])
            if run_id in inside:
                found[key.decode()] = 1
    return found


def tables_of(here: Store, path: Path, run_id: str) -> dict[str, int]:
    if isinstance(here.engine.tables if hasattr(here.engine, "tables") else None, dict):
        return {name: 1 for name, table in here.engine.tables.items() if run_id in table}
    if here.engine.kind == "postgres":
        tables = ("runs", "mail", "journal", "events", "state")
        conn = here.engine.connect(writes=False)
        try:
            rows = {
                each: conn.execute(f"SELECT count(*) FROM arc_{each} WHERE run_id = ?", (run_id,)) for each in tables
            }
            return {each: count for each in tables if (count := rows[each].fetchone()[0])}
        finally:
            conn.close()
    if here.engine.kind == "redis":
        return keys_of(here.engine, run_id)
    return rows_of(path / "runs.db", run_id)


async def test_old_runs_are_forgotten_and_live_ones_never(kind: str, tmp_path: Path) -> None:
    clock = VirtualClock()
    async with store(kind, tmp_path, clock) as here:

        async def code(ctx: Any) -> Any:
            await ctx.emit("big", {"text": "x" * 20_000})
            await ctx.checkpoint({"big": "y" * 20_000})
            await ctx.step("big", lambda: "z" * 20_000)
            if ctx.params.get("wait"):
                return await ctx.wait_for_signal("go")
            if ctx.params.get("fail"):
                raise ValueError("no")
            return None

        here.agent("a", code)
        runner = here.runner(settings(park_after=0, max_retries=1, retention={"succeeded": 100.0}))
        old = [await runner.submit("a", idempotency_key=f"k{n}") for n in range(30)]
        failed = await runner.submit("a", {"params": {"fail": True}})
        waiting = await runner.submit("a", {"params": {"wait": True}})
        await runner.signal(waiting, "other")
        while await runner.run_once():
            pass
        pending = await runner.submit("a", delay=1e6)
        clock.advance(99)
        young = (await runner.execute("a")).run_id
        assert await runner.vacuum() == 0
        clock.advance(2)
        before = (tmp_path / "runs.db").stat().st_size if kind == "sqlite" else 0
        assert tables_of(here, tmp_path, str(old[0]))
        assert await runner.vacuum() == 30
        for run_id in old:
            assert tables_of(here, tmp_path, str(run_id)) == {}
            with pytest.raises(UnknownRun):
                await runner.get_run(run_id)
            assert await runner.event_bus.get_events(run_id) == []
        if kind == "sqlite":
            assert (tmp_path / "runs.db").stat().st_size < before / 3
        assert {i.run_id for i in await runner.runs()} == {failed, waiting, pending, young}
        # Its key is free for another run.
        assert await runner.submit("a", {"n": 2}, idempotency_key="k0") not in old
        clock.advance(1e5)
        assert await runner.vacuum({"failed": 10, "cancelled": 0}) == 1
        assert await status(runner, waiting) == "waiting"
        await runner.signal(waiting, "go")
        assert await runner.run_once()
        assert await status(runner, waiting) == "succeeded"
        with pytest.raises(InvalidArgument, match="'pending'"):
            await runner.vacuum({"pending": 1})


@pytest.mark.parametrize("ends", [False, True], ids=["it goes on", "it has ended again"])
@pytest.mark.parametrize("look", ["find", "row"])
async def test_a_run_resumed_while_it_is_to_be_forgotten_is_kept_whole(
    kind: str, look: str, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resumed behind the look for all, or behind the look at it: the commit that deletes it sees that."""
    async with store(kind, tmp_path) as here:
        runner = here.runner(brief("failed"))
        run_id, ran = await ended_as(here, runner, "failed")
        looks = getattr(runner.queue, look)

        async def resumed_meanwhile(wanted: Any) -> Any:
            seen = await looks(wanted)
            monkeypatch.undo()
            await runner.resume(run_id)
            if ends:
                assert await runner.run_once()
            return seen

        monkeypatch.setattr(runner.queue, look, resumed_meanwhile)
        await asyncio.sleep(0.01)
        assert await runner.vacuum({"failed": 0}) == 0
        assert ends or await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": "well"}
        assert ran == ["first", "second"]
        await consistent(runner, run_id)


async def test_a_run_that_ends_anew_while_it_is_discarded_is_discarded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store(kind, tmp_path) as here:
        runner = here.runner(brief("failed"))
        run_id, _ = await ended_as(here, runner, "failed")
        looks = runner.queue.row

        async def ended_meanwhile(wanted: str) -> Any:
            seen = await looks(wanted)
            monkeypatch.undo()
            await runner.resume(run_id)
            assert await runner.run_once()
            return seen

        monkeypatch.setattr(runner.queue, "row", ended_meanwhile)
        await runner.discard(run_id)
        assert tables_of(here, tmp_path, run_id) == {}


@pytest.mark.parametrize("ends", [False, True], ids=["it goes on", "it has ended again"])
async def test_a_run_begun_anew_after_it_was_found_is_not_what_is_to_be_forgotten(
    kind: str, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the journal and the events on engines of their own: there no commit knows of the queue's row."""
    async with store(kind, tmp_path) as here:
        runner = here.runner(brief("failed"))
        bus, state = InMemoryEventBus(clock=here.clock), InMemoryStateStore(clock=here.clock)
        runner.backends = Backends(runner.queue, bus, state)
        run_id, ran = await ended_as(here, runner, "failed")
        find = runner.queue.find

        async def found(wanted: RunFilter) -> list[RunRow]:
            rows = await find(wanted)
            monkeypatch.undo()
            await runner.resume(run_id)
            if ends:
                assert await runner.run_once()
            return rows

        monkeypatch.setattr(runner.queue, "find", found)
        await asyncio.sleep(0.01)
        assert await runner.vacuum({"failed": 0}) == 0
        assert ends or await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"value": "well"}
        assert ran == ["first", "second"]
        await consistent(runner, run_id)


async def test_a_poisoned_run_is_dead_and_delays_nobody(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        runner = here.runner()
        run_id, _ = await ended_as(here, runner, "dead")
        result = await runner.wait(run_id)
        assert result.error is not None
        assert result.error.type == "Poisoned"
        assert [i.run_key for i in await runner.runs("dead")] == ["x"]
        await until_status(runner, run_id, "dead")


@pytest.mark.parametrize("ended", [False, True], ids=["still letting go", "gone"])
@pytest.mark.parametrize("parked", [False, True])
async def test_a_child_that_was_cancelled_with_its_parent_goes_on_with_it(
    kind: str, parked: bool, ended: bool, tmp_path: Path
) -> None:
    async with store(kind, tmp_path) as here:
        begun, may_go = asyncio.Event(), asyncio.Event()
        ran: list[int] = []

        async def child(ctx: Any) -> int:
            ran.append(1)
            begun.set()
            if len(ran) == 1:
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    await may_go.wait()
            return len(ran)

        async def parent(ctx: Any) -> Any:
            return (await ctx.call("child", {})).final_output["value"]

        here.agent("child", child)
        here.agent("parent", parent)
        runner = here.runner(settings(park_after=0 if parked else 1e6))
        working = asyncio.ensure_future(runner.run_loop(0.01, concurrency=4, handle_signals=False))
        run_id = await runner.submit("parent", run_id="x")
        await asyncio.wait_for(begun.wait(), 10)
        if parked:
            await until_status(runner, run_id, "waiting")
        await runner.cancel(run_id, wait=True)
        [there] = await runner.runs(agent="child")
        if ended:
            may_go.set()
            await until_status(runner, there.run_id, "cancelled")
        await runner.resume(run_id)
        if not ended:
            asyncio.get_running_loop().call_later(0.1, may_go.set)
        assert (await runner.wait(run_id, 20)).final_output == {"value": 2}
        assert len(ran) == 2
        runner.stop()
        await working
        await consistent(runner, "x")


async def test_a_child_that_somebody_cancels_while_its_parent_waits_again_stays_cancelled(
    kind: str, tmp_path: Path
) -> None:
    async with store(kind, tmp_path) as here:
        begun = asyncio.Event()

        async def child(ctx: Any) -> None:
            begun.set()
            await asyncio.get_running_loop().create_future()

        async def parent(ctx: Any) -> Any:
            return await ctx.call("child", {})

        here.agent("child", child)
        here.agent("parent", parent)
        runner = here.runner(settings(park_after=0))
        working = asyncio.ensure_future(runner.run_loop(0.01, concurrency=4, handle_signals=False))
        run_id = await runner.submit("parent", run_id="x")
        for _ in range(2):
            await asyncio.wait_for(begun.wait(), 10)
            await until_status(runner, run_id, "waiting")
            begun.clear()
            [there] = await runner.runs(agent="child")
            if (await runner.get_run(run_id)).generation > 1:
                break
            await runner.cancel(run_id, wait=True)
            await until_status(runner, there.run_id, "cancelled")
            await runner.resume(run_id)
        await runner.cancel(there.run_id)
        result = await runner.wait(run_id, 20)
        assert (result.status, result.error and result.error.type) == (RunStatus.FAILED, "RunFailed")
        runner.stop()
        await working


async def test_a_child_that_went_on_and_was_forgotten_answers_with_its_last_end(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        begun, may_go = asyncio.Event(), asyncio.Event()
        ran: list[int] = []

        async def child(ctx: Any) -> int:
            ran.append(1)
            begun.set()
            if len(ran) == 1:
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    await may_go.wait()
            return len(ran)

        async def parent(ctx: Any) -> Any:
            return (await ctx.call("child", {})).final_output["value"]

        here.agent("child", child)
        here.agent("parent", parent)
        runner = here.runner(settings(park_after=0))
        run_id = await runner.submit("parent", run_id="x")
        assert await runner.run_once()  # it parks
        childs = asyncio.ensure_future(runner.run_once())
        await asyncio.wait_for(begun.wait(), 10)
        await runner.cancel(run_id, wait=True)
        await runner.resume(run_id)
        assert await runner.run_once()  # its child still lets go: it parks
        may_go.set()
        assert await childs
        assert await runner.run_once()  # it has its child go on, and parks
        assert await runner.run_once()
        [there] = await runner.runs(agent="child")
        assert there.status is RunStatus.SUCCEEDED
        await runner.discard(there.run_id)
        assert await runner.run_once()
        assert (await runner.wait(run_id, 10)).final_output == {"value": 2}
