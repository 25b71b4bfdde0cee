"""Steps, transactions and called runs that were given up, or not answered, and what is asked for next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._journal.record import DONE, STARTED, Record
from agent_runtime_core.errors import StorageBusy
from tests.support.cases import for_each
from tests.support.runs import Rig, Script, soon


def cut_off(
    engine: Any, monkeypatch: pytest.MonkeyPatch, which: Callable[[Record], bool], how: str, *, landed: bool
) -> list[asyncio.Timeout]:
    """Have the first commit of such a record not answered, or its caller's time be over meanwhile; the list is for
    the caller's Timeout."""
    limits, tries, commit = list[asyncio.Timeout](), list[int](), engine.commit

    async def cut(guard: Any, ops: Any) -> Any:
        placed = [op.args[3 if op.name == "journal.transact" else 1] for op in ops if op.name.startswith("journal.")]
        if len(tries) >= (4 if how == "busy" else 1) or not any(map(which, placed)):
            return await commit(guard, ops)
        tries.append(1)
        if landed:
            await commit(guard, ops)
        if how == "timeout":
            limits[-1].reschedule(asyncio.get_running_loop().time() - 1)
            await asyncio.sleep(1)
        raise StorageBusy("did not answer")

    monkeypatch.setattr(engine, "commit", cut)
    return limits


@for_each("how", ["busy", "timeout"])
@for_each(
    # Nothing is recorded of a transaction that did not land.
    ("kind", "landed"),
    [("step", False), ("step", True), ("call", False), ("call", True), ("transaction", True)],
)
async def test_what_is_used_with_something_else_is_not_answered_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, how: str, landed: bool
) -> None:
    ran: list[int] = []
    lives: list[list[Any]] = []

    def fetch(*args: Any) -> str:
        ran.append(args[-1])
        return f"page {args[-1]}"

    async def child(ctx: Any) -> str:
        return fetch(ctx.params["n"])

    async def page(ctx: Any, n: int) -> Any:
        match kind:
            case "step":
                return await ctx.step("fetch", fetch, n)
            case "call":
                return (await ctx.call(Script(child, "child"), {"params": {"n": n}})).final_output["value"]
        return await ctx.transaction("fetch", fetch, n)

    async def body(ctx: Any) -> Any:
        pages: list[Any] = []
        lives.append(pages)
        for n in range(3):
            try:
                async with asyncio.timeout(None) as limit:
                    limits.append(limit)
                    pages.append(await page(ctx, n))
            except (TimeoutError, StorageBusy):
                pages.append(None)
        if len(lives) == 1:
            raise ValueError("once more, from what is recorded")
        return pages

    async with Rig(tmp_path / "runs.db") as rig, asyncio.timeout(20):
        name = "call:child" if kind == "call" else "fetch"
        limits = cut_off(
            rig.runner.queue.commits, monkeypatch, lambda record: record[1:3] == (DONE, name), how, landed=landed
        )
        await rig.go(body)
        again = await rig.value(body)
        assert lives == [[None, "page 1", "page 2"], ["page 0", "page 1", "page 2"]]
        assert again == lives[1]
        assert ran == [0, 1, 2]


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("how", ["busy", "timeout"])
async def test_a_transaction_that_is_asked_for_again_happens_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, landed: bool
) -> None:
    def book(conn: Any, amount: int) -> int:
        conn.execute("CREATE TABLE IF NOT EXISTS bookings (amount INTEGER)")
        conn.execute("INSERT INTO bookings VALUES (?)", (amount,))
        return int(conn.execute("SELECT count(*) FROM bookings").fetchone()[0])

    caught, lives = list[BaseException](), list[int]()

    async def body(ctx: Any) -> Any:
        lives.append(1)
        while True:
            try:
                async with asyncio.timeout(None) as limit:
                    limits.append(limit)
                    booked = await ctx.transaction("book", book, 42)
                break
            except (TimeoutError, StorageBusy) as error:
                caught.append(error)
        after = await ctx.step("after", lambda: "after")
        if len(lives) == 1:
            raise ValueError("once more, from what is recorded")
        return [booked, after]

    async with Rig(tmp_path / "runs.db") as rig, asyncio.timeout(20):
        limits = cut_off(
            rig.runner.queue.commits, monkeypatch, lambda record: record.name == "book", how, landed=landed
        )
        await rig.go(body)
        assert await rig.value(body) == [1, "after"]
        assert len(caught) == 1


async def test_a_step_that_was_given_up_and_asked_for_again_is_that_step(place: Path | None) -> None:
    ran, lives = list[int](), list[int]()

    async def slow() -> int:
        ran.append(1)
        if len(ran) == 1:
            await asyncio.sleep(60)
        return len(ran)

    async def body(ctx: Any) -> Any:
        lives.append(1)
        while True:
            try:
                value = await asyncio.wait_for(ctx.step("slow", slow), 0.02 if len(lives) == 1 and not ran else 10)
                break
            except TimeoutError:
                continue
        after = await ctx.step("after", lambda: "after")
        if len(lives) == 1:
            raise ValueError("once more, from what is recorded")
        return [value, after]

    async with Rig(place) as rig, asyncio.timeout(20):
        await rig.go(body)
        assert await rig.value(body) == [2, "after"]
        assert len(ran) == 2


async def test_a_called_run_that_was_not_waited_for_and_is_called_again_is_that_run(place: Path | None) -> None:
    begun = asyncio.Event()

    async def child(ctx: Any) -> str:
        begun.set()
        await ctx.wait_for_signal("go")
        return "theirs"

    async def parent(ctx: Any) -> Any:
        call = asyncio.ensure_future(ctx.call("child", {"params": {"n": 1}}))
        await begun.wait()
        call.cancel()
        await asyncio.wait({call})
        [there] = await rig.runner.runs(agent="child")
        await rig.runner.signal(there.run_id, "go")
        return (await ctx.call("child", {"params": {"n": 1}})).final_output["value"]

    # A lease of more than the sleep that the clock takes along: else the other slot would take the run over.
    async with Rig(place, park_after=60, lease_ttl_seconds=6000) as rig, asyncio.timeout(20):
        rig.register(parent)
        rig.register(child, "child")
        run_id = await rig.runner.submit("script", run_id="r")
        task = asyncio.ensure_future(rig.runner.run_loop(concurrency=2, handle_signals=False))
        assert (await rig.runner.wait(run_id)).final_output == {"value": "theirs"}
        assert len(await rig.runner.runs(agent="child")) == 1
        started = [record for record in await rig.records() if (record.kind, record.name) == (STARTED, "call:child")]
        assert len(started) == 1
        rig.runner.stop()
        await task


async def test_a_transaction_that_was_not_answered_is_not_repeated_behind_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled, last = asyncio.Event(), asyncio.Event()

    async def body(ctx: Any) -> Any:
        async def others() -> None:
            await stalled.wait()
            for n in range(3):
                await ctx.step(f"other-{n}", asyncio.sleep, 0)
            last.set()

        beside = asyncio.ensure_future(others())
        with pytest.raises(StorageBusy):
            await ctx.transaction("book", lambda conn: 1)
        await beside
        return await ctx.transaction("book", lambda conn: 2)

    async with Rig(tmp_path / "runs.db") as rig, asyncio.timeout(20):
        engine = rig.runner.queue.commits
        commit = engine.commit

        async def stall(guard: Any, ops: Any) -> Any:
            if any(op.name == "journal.transact" for op in ops) and not stalled.is_set():
                stalled.set()
                await last.wait()
                raise StorageBusy("did not answer")
            return await commit(guard, ops)

        monkeypatch.setattr(engine, "commit", stall)
        assert await rig.value(body) == 2
        records = await rig.records()
        assert [each.ev for each in records] == sorted(each.ev for each in records)
        events = await rig.runner.event_bus.get_events("r")
        assert [event.sequence for event in events] == [*range(len(events))]
        await soon(last.is_set)
