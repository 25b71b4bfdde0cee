"""Runs of one concurrency key: whose turn it is under a runner, and what finding that out costs a SQLite file."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core._engines.base import Op
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core.errors import InvalidArgument, RunBusy, UnknownRun
from agent_runtime_core.queue import InMemoryQueue, RowChanged, SQLiteQueue
from agent_runtime_core.queue import sqlite as sqlite_queue
from agent_runtime_core.queue.records import RunRow
from agent_runtime_core.queue.transitions import INLINE_RESERVATION
from agent_runtime_core.runner import AgentRunner, RunnerConfig, open_run
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import VirtualClock
from tests.support.runs import Rig, Script, until

CONVERSATION = UUID(int=9)
TALK = {"conversation_id": str(CONVERSATION)}
KEY = f"conversation:{CONVERSATION}"


class Gate:
    """An agent's body that tells when it is inside, and stays until it is let go."""

    def __init__(self) -> None:
        self.inside: dict[str, asyncio.Event] = {}
        self.leave: dict[str, asyncio.Event] = {}
        self.order: list[str] = []
        self.most = self.now = 0

    def __getitem__(self, run: str) -> asyncio.Event:
        return self.inside.setdefault(run, asyncio.Event())

    def let(self, run: str) -> None:
        self.leave.setdefault(run, asyncio.Event()).set()

    async def __call__(self, ctx: Any) -> str:
        self.now += 1
        self.most = max(self.most, self.now)
        self.order.append(ctx.run_key)
        self[ctx.run_key].set()
        try:
            await self.leave.setdefault(ctx.run_key, asyncio.Event()).wait()
        finally:
            self.now -= 1
        return str(ctx.run_key)


async def stored(rig: Rig, count: int) -> None:
    """Until so many runs are there."""
    async with asyncio.timeout(10):
        while len(await rig.runner.runs()) < count:  # noqa: ASYNC110 - a commit that nobody rings for
            await asyncio.sleep(0.001)


# -- which runs have one


async def test_a_run_with_a_conversation_has_its_key_by_default(place: Path | None) -> None:
    async with Rig(place) as rig:
        submit = rig.runner.submit
        infos = [
            await rig.runner.get_run(await submit("script", input_, **options))
            for input_, options in (
                (TALK, {}),
                ({"conversation_id": CONVERSATION}, {}),
                ({"conversation_id": str(CONVERSATION).upper()}, {}),
                (TALK, {"concurrency_key": "mine"}),
                (TALK, {"concurrency_key": ""}),
                (TALK, {"parent_run_id": UUID(int=1)}),
                ({"conversation_id": None}, {}),
                ({"conversation_id": ""}, {}),
                ({}, {}),
                ({"conversation_id": 0}, {}),
            )
        ]
        assert [info.concurrency_key for info in infos] == [
            *(KEY, KEY, KEY, "mine", None, None, None, None, None),
            "conversation:0",
        ]
        assert [info.held for info in infos[:4]] == [False, True, True, False]


@pytest.mark.parametrize(("key", "told"), [("x" * 513, "got 513"), ("a\0b", "control characters"), (7, "got 7")])
async def test_a_key_that_cannot_be_kept_is_refused(key: Any, told: str) -> None:
    async with Rig() as rig:
        with pytest.raises(InvalidArgument, match=f"concurrency_key.*{told}"):
            await rig.runner.submit("script", concurrency_key=key)
        with pytest.raises(InvalidArgument, match=f"concurrency_key.*{told}"):
            await rig.runner.execute(Script(Gate()), concurrency_key=key)
        assert await rig.runner.runs() == []


# -- workers


async def test_workers_run_one_conversation_in_order_and_others_beside_it(place: Path | None) -> None:
    gate = Gate()
    async with Rig(place) as rig:
        rig.register(gate)
        for name in ("a1", "a2", "b1", "b2"):
            await rig.runner.submit("script", run_id=name, concurrency_key=name[0])
        working = asyncio.ensure_future(rig.runner.run_loop(concurrency=4, handle_signals=False))
        await until(gate["a1"])
        await until(gate["b1"])
        assert gate.order == ["a1", "b1"]
        gate.let("b1")
        await until(gate["b2"])
        for name in ("a1", "a2", "b2"):
            gate.let(name)
        results = [await rig.runner.wait(name, 10) for name in ("a1", "a2", "b1", "b2")]
        rig.runner.stop()
        await working
        assert [result.final_output["value"] for result in results] == ["a1", "a2", "b1", "b2"]
        assert (gate.order, gate.most) == (["a1", "b1", "b2", "a2"], 2)


async def test_a_parked_run_keeps_its_turn_and_its_child_needs_none(place: Path | None) -> None:
    order: list[str] = []

    async def parent(ctx: Any) -> None:
        order.append("parent")
        await ctx.call("child", TALK)
        order.append("went on")

    async def child(ctx: Any) -> None:
        order.append("child")

    async def later(ctx: Any) -> None:
        order.append("later")

    async with Rig(place, park_after=0) as rig:
        for body, key in ((parent, "parent"), (child, "child"), (later, "later")):
            rig.register(body, key)
        await rig.runner.submit("parent", TALK, run_id="p")
        await rig.runner.submit("later", TALK, run_id="l", priority=9)
        while await rig.runner.run_once():
            pass
        assert order == ["parent", "child", "parent", "went on", "later"]
        order.clear()
        await rig.runner.execute("parent", "again", TALK, raise_on_error=True)
        assert order == ["parent", "child", "went on"]


async def test_a_held_run_can_be_cancelled_and_resumed(place: Path | None) -> None:
    async def nothing(ctx: Any) -> None:
        return

    async with Rig(place) as rig:
        rig.register(nothing)
        for name in ("a", "b", "c"):
            await rig.runner.submit("script", TALK, run_id=name)
        assert await rig.runner.cancel("b", wait=True) == RunStatus.CANCELLED
        assert not (await rig.runner.get_run("b")).held
        assert (await rig.runner.resume("b")).held
        assert await rig.runner.cancel("a") is True
        assert [(await rig.runner.get_run(name)).held for name in ("b", "c")] == [False, True]
        while await rig.runner.run_once():
            pass
        assert [info.status for info in await rig.runner.runs()] == ["cancelled", "succeeded", "succeeded"]


# -- here, in this process


async def test_execute_waits_for_its_turn(place: Path | None) -> None:
    gate = Gate()
    async with Rig(place) as rig:
        other = rig.another()
        tasks = []
        for runner, name in ((rig.runner, "a"), (other, "b"), (rig.runner, "c")):
            tasks.append(asyncio.ensure_future(runner.execute(Script(gate), name, TALK)))
            await stored(rig, len(tasks))
        assert [info.held for info in await rig.runner.runs()] == [False, True, True]
        for name in ("c", "b", "a"):
            gate.let(name)
        assert [(await task).final_output["value"] for task in tasks] == ["a", "b", "c"]
        assert (gate.order, gate.most) == (["a", "b", "c"], 1)


async def test_execute_that_shall_not_wait_names_the_run_in_front_and_stores_nothing(place: Path | None) -> None:
    gate = Gate()
    async with Rig(place) as rig:
        other = rig.another(worker_id="other")
        going = asyncio.ensure_future(other.execute(Script(gate), "a", TALK))
        await until(gate["a"])
        with pytest.raises(RunBusy, match=f"concurrency key '{KEY}' is in use by run 'a' in other") as caught:
            await rig.runner.execute(Script(gate), "b", TALK, if_running="raise")
        assert (caught.value.run_id, caught.value.worker, caught.value.concurrency_key) == ("a", "other", KEY)
        with pytest.raises(UnknownRun):
            await rig.runner.get_run("b")
        gate.let("a")
        await going
        await rig.runner.submit("script", TALK, run_id="queued")
        with pytest.raises(RunBusy, match=r"is in use by run 'queued' in another process\. Wait for it"):
            await rig.runner.execute(Script(gate), "b", TALK, if_running="raise")


async def test_an_execute_that_was_cancelled_lets_the_next_one_go(place: Path | None) -> None:
    gate = Gate()
    async with Rig(place) as rig:
        first = asyncio.ensure_future(rig.runner.execute(Script(gate), "a", TALK))
        await until(gate["a"])
        rig.register(gate)
        await rig.runner.submit("script", TALK, run_id="b")
        assert not await rig.runner.run_once()
        first.cancel()
        await asyncio.wait({first})
        gate.let("b")
        assert await rig.runner.run_once()
        assert (await rig.runner.get_run("b")).status == "succeeded"
        left = await rig.runner.get_run("a")
        assert (left.status, left.held, left.attempt) == ("pending", True, 1)
        gate.let("a")
        assert (await rig.runner.execute(Script(gate), "a", TALK)).status == "succeeded"


async def test_a_cancelled_run_that_waits_for_its_turn_tells_its_caller(place: Path | None) -> None:
    gate = Gate()
    async with Rig(place) as rig:
        first = asyncio.ensure_future(rig.runner.execute(Script(gate), "a", TALK))
        await until(gate["a"])
        second = asyncio.ensure_future(rig.runner.execute(Script(gate), "b", TALK))
        await stored(rig, 2)
        assert await rig.runner.cancel("b") is True
        gate.let("a")
        assert (await first).status == "succeeded"
        assert (await second).status == "cancelled"
        assert gate.order == ["a"]


async def test_what_a_run_executes_itself_is_part_of_its_turn(place: Path | None) -> None:
    async with Rig(place) as rig:
        told: list[str | None] = []

        async def inner(ctx: Any) -> str:
            return "inner"

        async def outer(ctx: Any) -> Any:
            result = await rig.runner.execute(Script(inner), "i", TALK)
            told.append((await rig.runner.get_run("i")).concurrency_key)
            with pytest.raises(RunBusy, match="in use by run 'o'"):
                await rig.runner.execute(Script(inner), "j", concurrency_key=KEY)
            return result.final_output["value"]

        result = await rig.runner.execute(Script(outer), "o", TALK, raise_on_error=True)
        assert (result.final_output, told) == ({"value": "inner"}, [None])
        rig.register(outer)
        told.clear()
        await rig.runner.submit("script", TALK, run_id="o2")
        assert await rig.runner.run_once()
        assert told == [None]
        assert (await rig.runner.execute(Script(inner), "j", concurrency_key=KEY)).status == "succeeded"


async def test_a_crashed_execute_gives_up_its_turn(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock, lease_ttl_seconds=60) as rig:
        queue = rig.runner.queue
        row = queue.new_row("a", "script", TALK, concurrency_key=KEY, origin="inline")
        assert (await rig.runner.claim_run(row))[0] == "claimed"

        async def body(ctx: Any) -> str:
            return "done"

        rig.register(body)
        await rig.runner.submit("script", TALK, run_id="b")
        assert not await rig.runner.run_once()
        clock.advance(61)
        assert (await rig.runner.execute(Script(body), "c", TALK, concurrency_key="")).status == "succeeded"
        assert await rig.runner.run_once()
        result = await rig.runner.execute(Script(body), "a", TALK)
        info = await rig.runner.get_run("a")
        assert (result.status, info.attempt) == ("succeeded", 2)


async def test_who_waited_for_its_turn_when_the_machine_went_down_gives_it_up(tmp_path: Path) -> None:
    path, before, after = tmp_path / "jobs.db", VirtualClock(), VirtualClock()
    before.advance(1e6)
    queue = SQLiteQueue(path, clock=before)
    await queue.enqueue("first", "a", {}, concurrency_key="k")
    assert await queue.claim_rows("w")
    row = queue.new_row("in place", "a", {}, concurrency_key="k", origin="inline")
    assert (await queue.take(row, "w", 60.0, insert=True, reopen=False, wait=True))[0] == "behind"
    await queue.enqueue("last", "a", {}, concurrency_key="k")
    await queue.close()
    # Boot time begins at 0 again.
    queue = SQLiteQueue(path, clock=after)
    [first] = await queue.claim_rows("w")
    await queue.settle(first.run_id, queue.unchanged_update(first, first.claim_id)._replace(status="succeeded"))
    after.advance(INLINE_RESERVATION + 1)
    assert [(await queue.require(row.run_id)).run_key for row in await queue.claim_rows("w")] == ["last"]
    await queue.close()


async def test_open_run_does_not_wait(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with open_run(path, "a", concurrency_key="nightly"):
        with pytest.raises(RunBusy, match="concurrency key 'nightly' is in use by run 'a'") as caught:
            async with open_run(path, "b", concurrency_key="nightly"):
                raise AssertionError
        assert caught.value.concurrency_key == "nightly"
        async with open_run(path, "c", concurrency_key="hourly"):
            pass
    async with open_run(path, "b", concurrency_key="nightly"):
        pass
    async with AgentRunner.open(path) as runner:
        assert [info.run_key for info in await runner.runs(status="succeeded")] == ["a", "c", "b"]


# -- what holds it together


def test_threads_on_one_file_never_run_two_of_one_key(tmp_path: Path) -> None:
    lock, running, done, problems = threading.Lock(), set[str](), list[str](), list[str]()

    async def work(n: int) -> None:
        queue = SQLiteQueue(path=tmp_path / "queue.db")
        for m in range(5):
            await queue.enqueue(None, "agent", {}, concurrency_key=f"key{(n + m) % 2}")
            for row in await queue.claim_rows(f"w{n}", limit=2):
                assert row.concurrency_key is not None
                with lock:
                    problems.extend([row.concurrency_key] if row.concurrency_key in running else [])
                    running.add(row.concurrency_key)
                await asyncio.sleep(0)
                with lock:
                    running.discard(row.concurrency_key)
                    done.append(row.run_id)
                await queue.settle(row.run_id, queue.unchanged_update(row, row.claim_id)._replace(status="succeeded"))
        await queue.close()

    threads = [threading.Thread(target=asyncio.run, args=(work(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def rest() -> int:
        queue = SQLiteQueue(path=tmp_path / "queue.db")
        count = 0
        while rows := await queue.claim_rows("w"):
            await queue.settle(
                rows[0].run_id, queue.unchanged_update(rows[0], rows[0].claim_id)._replace(status="succeeded")
            )
            count += 1
        await queue.close()
        return count

    assert problems == []
    assert len(done) + asyncio.run(rest()) == 40


async def test_a_commit_that_is_taken_back_leaves_the_line_as_it_was() -> None:
    queue = InMemoryQueue(engine=MemoryEngine(VirtualClock()))
    ids = [str((await queue.enqueue(None, name, {}, concurrency_key="k")).run_id) for name in ("a", "b", "c")]
    ends = [Op("queue.end", (each, ("pending",), "cancelled", 0.0, "")) for each in (ids[0], ids[1], "nobody")]
    with pytest.raises(RowChanged):
        await queue.commits.commit(None, ends)
    for name in ("a", "b", "c"):
        [row] = await queue.claim_rows("w")
        assert row.agent == name
        await queue.settle(row.run_id, queue.unchanged_update(row, row.claim_id)._replace(status="succeeded"))


# -- what it costs


def _table(rows: int, held: int) -> sqlite3.Connection:
    """The queue's table with so many runs ready, and so many behind the head of one lane."""
    conn = sqlite3.connect(":memory:")
    for step in (0, 2, 3, 5, 6, 7):  # the others are about other tables
        conn.executescript(sqlite_queue.MIGRATIONS[step])
    plain = [RunRow(f"free{n}", "agent") for n in range(rows)]
    lane = [RunRow(f"held{n}", "agent", concurrency_key="k", blocked=min(n, 1)) for n in range(held)]
    conn.executemany(sqlite_queue._INSERT, [(*row[:36], *row[37:]) for row in (*lane, *plain)])
    return conn


LOOKS: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "ready": (sqlite_queue._READY, ("agent", 1), "SEARCH arc_runs USING INDEX arc_runs_ready (agent=?)"),
    "next agent": (sqlite_queue._NEXT_AGENT, ("",), "SEARCH arc_runs USING INDEX arc_runs_ready (agent>?)"),
    "expired": (
        sqlite_queue._EXPIRED,
        (1.0, "agent", 1),
        "SEARCH arc_runs USING INDEX arc_runs_expired (agent=? AND lease_until<?)",
    ),
    "next agent with claims": (
        sqlite_queue._NEXT_CLAIMED,
        ("",),
        "SEARCH arc_runs USING INDEX arc_runs_expired (agent>?)",
    ),
    "head": (sqlite_queue._HEAD, ("k", "", 1), "SEARCH arc_runs USING INDEX arc_runs_head (lane=? AND tenant=?)"),
    "behind": (sqlite_queue._BEHIND, ("k", ""), "SEARCH arc_runs USING INDEX arc_runs_behind (lane=? AND tenant=?)"),
    "lapsed": (sqlite_queue._LAPSED, (1.0,), "SEARCH arc_runs USING INDEX arc_runs_lapsed (lease_until<?)"),
    "due": (sqlite_queue._DUE, (1.0, 1), "SEARCH arc_runs USING INDEX arc_runs_due (due_at>? AND due_at<?)"),
    "promote": (sqlite_queue._MAKE_READY, (1.0,), "SEARCH arc_runs USING INDEX arc_runs_due (due_at>? AND due_at<?)"),
}


@pytest.mark.parametrize("look", LOOKS)
def test_each_look_of_a_claim_is_one_search_of_an_index(look: str) -> None:
    text, args, plan = LOOKS[look]
    with closing(_table(1, 1)) as conn:
        found = conn.execute(f"EXPLAIN QUERY PLAN {text}", args).fetchall()
    assert [detail.replace("COVERING ", "") for *_, detail in found] == [plan]


@pytest.mark.parametrize("look", LOOKS)
def test_each_look_costs_the_same_however_many_wait(look: str) -> None:
    text, args, _ = LOOKS[look]

    def steps(conn: sqlite3.Connection) -> int:
        count = 0

        def step() -> None:
            nonlocal count
            count += 1

        with closing(conn):
            conn.set_progress_handler(step, 1)
            conn.execute(text, args).fetchall()
        return count

    few, many = steps(_table(10, 10)), steps(_table(2_000, 2_000))
    assert many <= few + 5


@pytest.mark.parametrize("name", ["c" * 499, "c" * 500, "c" * 512, "c" * 100_000, "room\n7", "room\x007", "room\u0085"])
async def test_a_conversation_id_of_any_length_has_one_key(name: str, place: Path | None) -> None:
    async with Rig(place) as rig:
        keys = []
        for given in (name, name, f"{name}x"):
            run_id = await rig.runner.submit("script", {"conversation_id": given})
            keys.append((await rig.runner.get_run(run_id)).concurrency_key)
        assert keys[0] == keys[1] != keys[2]
        assert str(keys[0]).startswith("conversation:")


@pytest.mark.parametrize("name", ["a\nb", "a\0", "", "x" * 513, "\udc80", None, 3])
def test_a_worker_id_is_a_name_that_every_store_keeps(name: object) -> None:
    with pytest.raises(InvalidArgument, match="worker_id"):
        RunnerConfig(worker_id=name)  # type: ignore[arg-type]
