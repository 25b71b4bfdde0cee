"""What a queue tells, clears away and refuses."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable
from typing import Any
from uuid import UUID

from ..._engines.base import Op
from ...errors import InvalidArgument, LeaseLost, UnserialisableResult
from ...queue.records import RowChanged, RunFilter, RunRow
from ..clock import VirtualClock
from .checks import TRIES, Cases, refused, same, turns
from .queue_fixtures import LEASE, Case, Make, add, hold, leave, names, one, opened

CASES: Cases[Case] = Cases()


# -- looking and clearing away


@CASES
async def find_lists_what_was_asked_for(make: Make) -> None:
    async with opened(make) as (queue, clock):
        start = clock.wall()
        for agent in "abab":
            await add(queue, agent)
            clock.advance(10)
        for row in await queue.claim_rows("w", agent_keys=["a"], limit=2):
            await leave(queue, row, "failed")
            clock.advance(5)
        every = await queue.find(RunFilter())
        same(names(every), list("abab"), "all runs, in order of arrival")
        same(names(await queue.find(RunFilter(("failed",)))), list("aa"), "the failed ones")
        same(names(await queue.find(RunFilter(("failed", "pending"), "b"))), list("bb"), "b's, failed or pending")
        same(names(await queue.find(RunFilter(("running",)))), [], "the running ones")
        same(names(await queue.find(RunFilter(()))), [], "those of no status")
        same(len(await queue.find(RunFilter(since=start + 10))), 3, "those created since the second")
        same(len(await queue.find(RunFilter(ended_before=start + 45))), 1, "those that ended before")
        page = await queue.find(RunFilter(limit=3))
        same(len(page), 3, "how many a page of three has")
        rest = await queue.find(RunFilter(after=page[-1].n, limit=3))
        same([*page, *rest], every, "two pages")
        same([row.n for row in every], sorted({row.n for row in every}), "their numbers, growing")


@CASES
async def what_is_many_is_listed_whole(make: Make) -> None:
    async with opened(make) as (queue, _):
        [parent] = await add(queue, "parent")
        rows = [queue.new_row(None, "many", {}, parent_run_id=parent) for _ in range(1100)]
        await queue.commits.commit(None, [Op("queue.insert", (row,)) for row in rows])
        ids = [row.run_id for row in rows]
        for statuses in (None, ("pending",)):
            found = await queue.find(RunFilter(statuses, "many", limit=2000))
            same([row.run_id for row in found], ids, f"1,100 runs, found by the statuses {statuses}")
        same([row.run_id for row in await queue.children(parent)], ids, "1,100 children of one run")


@CASES
async def children_know_their_parent(make: Make) -> None:
    async with opened(make) as (queue, _):
        [parent] = await add(queue, "parent")
        children = await add(queue, "a", "b", parent_run_id=parent)
        same([row.run_id for row in await queue.children(parent)], children, "the children of a run")
        same(await queue.children(children[0]), [], "the children of a child")
        for row, status in zip(await queue.claim_rows("w", agent_keys=["a", "b"], limit=2), ("succeeded", "failed"),
                               strict=True):  # fmt: skip
            await leave(queue, row, status)
        same([row.run_id for row in await queue.children(parent)], children, "its children when they are over")


@CASES
async def a_deleted_child_is_its_parents_only_if_it_is_again(make: Make) -> None:
    async with opened(make) as (queue, _):
        [parent] = await add(queue, "parent")
        first, second = await add(queue, "a", "b", parent_run_id=parent)

        async def children(run_id: str) -> list[str]:
            return [row.run_id for row in await queue.children(run_id)]

        async def forget(run_id: str) -> None:
            await queue.cancel(run_id)
            row = await queue.require(run_id)
            await queue.commits.commit(None, [Op("queue.delete", (run_id, row.generation, row.n))])

        await forget(first)
        same(await children(parent), [second], "the children of a run when one of them is deleted")
        await queue.enqueue(first, "a", {})
        same(await children(parent), [second], "its children when that is there again, and is nobody's child")
        await forget(first)
        await queue.enqueue(first, "a", {}, parent_run_id=parent)
        same(await children(parent), [second, first], "its children when that is its child again")
        await forget(parent)
        same(await children(parent), [second, first], "the children of a run that is deleted itself")


@CASES
async def a_deleted_run_is_gone_with_its_mail_and_key(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = await hold(queue, idempotency_key="key-1")
        await queue.post(row.run_id, "signal", "go", "1", "m1")
        delete = Op("queue.delete", (row.run_id, row.generation, row.n))
        with refused(RowChanged, "deleting a live run"):
            await queue.commits.commit(None, [delete])
        await leave(queue, row, "succeeded")
        await queue.commits.commit(None, [delete])
        await queue.commits.commit(None, [delete])
        same(await queue.row(row.run_id), None, "the row")
        same(await queue.mail(row.run_id), [], "the mailbox")
        same(await queue.find(RunFilter()), [], "all runs")
        with refused(LeaseLost, "a write by its last claim"):
            await leave(queue, row, "running")
        run = await queue.enqueue(row.run_id, "other", {"n": 2}, idempotency_key="key-1")
        same((await queue.require(run.run_id)).n > row.n, True, "that its successor's number is greater")
        same(await queue.post(run.run_id, "signal", "go", "2", "m1"), ("pending", 1), "a message to its successor")


@CASES
async def a_run_is_deleted_as_it_was_seen(make: Make) -> None:
    async with opened(make) as (queue, clock):
        seen = await hold(queue)
        await leave(queue, seen, "failed")
        delete = Op("queue.delete", (seen.run_id, seen.generation, seen.n))
        await queue.commits.commit(None, [Op("queue.reopen", (seen.run_id, ("failed",), clock.wall()))])
        again = await one(queue, "w")
        await leave(queue, again, "succeeded")
        with refused(RowChanged, "deleting a run that has ended anew"):
            await queue.commits.commit(None, [delete])
        same((await queue.require(seen.run_id)).status, "succeeded", "its status then")
        await queue.commits.commit(None, [Op("queue.delete", (again.run_id, again.generation, again.n))])
        await queue.enqueue(seen.run_id, "agent", {})
        await leave(queue, await one(queue, "w"), "succeeded")
        with refused(RowChanged, "deleting its successor in its place"):
            await queue.commits.commit(None, [delete])
        same((await queue.require(seen.run_id)).status, "succeeded", "the successor's status")


def _brought(row: RunRow) -> RunRow:
    """What a run came with and keeps, whatever becomes of it."""
    return RunRow(
        row.run_id, row.agent, row.input, row.digest, row.metadata, row.priority, row.created_at,
        expires_at=row.expires_at, deadline=row.deadline, run_key=row.run_key, idem_key=row.idem_key,
        parent_id=row.parent_id, lane=row.lane, n=row.n,
    )  # fmt: skip


@CASES
async def what_a_run_came_with_it_keeps(make: Make) -> None:
    async with opened(make) as (queue, clock):
        clock.advance(0.123456)
        [parent] = await add(queue, "parent")
        run = await queue.enqueue(
            "job", "agent", {"n": 1}, {"tenant": 5}, 7, idempotency_key="key-1", parent_run_id=parent,
            concurrency_key="lane", expires_in=86400.25, deadline=clock.wall() + 86400.75,
        )  # fmt: skip
        came, key = await queue.require(run.run_id), str(run.run_id)
        brought = (came.priority, came.run_key, came.idem_key, came.parent_id, came.lane, came.created_at)
        same(brought, (7, "job", "key-1", parent, "lane", clock.wall()), "what its row has of what it came with")
        same(came.digest, queue.new_row(None, "agent", {"n": 1}).digest, "its digest")
        same((came.expires_at, came.deadline), (clock.wall() + 86400.25, clock.wall() + 86400.75), "its limits")

        async def kept(answered: RunRow | None, after: str) -> RunRow:
            row = await queue.require(key)
            same(_brought(row), _brought(came), f"what it came with, after {after}")
            if answered is not None:
                same(answered, row, f"the answer to {after}, and its row")
            return row

        async def claim(after: str) -> RunRow:
            clock.advance(1.5)
            rows = await queue.claim_rows("w", LEASE, agent_keys=["agent"])
            same(names(rows), ["agent"], f"what is there to claim after {after}")
            return await kept(rows[0], f"a claim after {after}")

        row = await claim("enqueue")
        row = await kept(await leave(queue, row, "running", mark=3), "a claim wrote its counts")
        await queue.commits.commit(None, [Op("queue.beat", (((key, row.claim_id),), queue.lease_now() + LEASE))])
        await kept(None, "a beat")
        await kept(await leave(queue, row, "pending", failures=1, due_at=clock.wall() + 1, error='"x"'), "a retry")
        row = await claim("a retry")
        await kept(await leave(queue, row, "waiting", parked=1, reason="sleep", due_at=clock.wall() + 1), "a park")
        row = await claim("a park")
        reason = "signal a\r\nb" + "\u6ce8" * 300
        left = await kept(await leave(queue, row, "waiting", parked=1, reason=reason), "a park without a time")
        same(left.reason, reason, "what it waits for")
        await queue.post(key, "signal", "go", "1")
        await kept(None, "a message")
        await claim("a message")
        clock.advance(LEASE)
        row = await claim("a crash")
        await queue.cancel(key)
        await kept(None, "a request to cancel")
        clock.advance(0.25)
        left = await kept(await leave(queue, row, "failed", reason=reason, failures=2, error='"x"'), "its end")
        same(
            (left.ended_at, left.updated_at, left.reason), (clock.wall(), clock.wall(), reason), "when and why it ended"
        )
        op = Op("queue.reopen", (key, ("failed",), clock.wall()))
        came = came._replace(expires_at=None)  # that it was not claimed in time is over
        await kept((await queue.commits.commit(None, [op]))[0], "it was opened again")


@CASES
async def times_and_limits_are_kept(make: Make) -> None:
    async with opened(make) as (queue, clock):
        until = dt.datetime.fromtimestamp(clock.wall() + 90, dt.UTC)
        run = await queue.enqueue("job", "agent", {}, expires_in=30, deadline=until)
        row = await queue.require(run.run_id)
        same((row.expires_at, row.deadline, row.run_key), (clock.wall() + 30, until.timestamp(), "job"), "its limits")
        clock.advance(5)
        row = await one(queue, "w", 40)
        same((row.started_at, row.claimed_at, row.created_at), (clock.wall(), clock.wall(), clock.wall() - 5), "times")
        same(row.lease_until, queue.lease_now() + 40, "the end of its lease")
        await leave(queue, row, "pending")
        clock.advance(5)
        row = await one(queue, "w")
        same((row.started_at, row.claimed_at), (clock.wall() - 5, clock.wall()), "its first start and its last claim")


@CASES
async def listeners_hear_what_concerns_them(make: Make) -> None:
    """A queue may do without: its `listen` answers None and workers poll."""
    async with opened(make) as (queue, _):
        bells = {topic: asyncio.Event() for topic in ("work", "mail", "done")}
        loop = asyncio.get_running_loop()

        def listen(topic: str) -> Callable[[], None] | None:
            def wake() -> None:
                loop.call_soon_threadsafe(bells[topic].set)

            return queue.listen(topic, wake)

        stops = [listen(topic) for topic in bells]
        if None in stops:
            same(stops, [None] * 3, "listening to some topics only")
            return

        row = await hold(queue)
        await bells["work"].wait()
        await queue.post(row.run_id, "signal", "go", "1")
        await bells["mail"].wait()
        await leave(queue, row, "succeeded")
        await bells["done"].wait()
        for stop in stops:
            assert stop is not None
            stop()
        for _ in range(TRIES):  # what was rung before may be heard a little later
            bells["work"].clear()
            await add(queue, "agent")
            await turns()
            if not bells["work"].is_set():
                break
        same(bells["work"].is_set(), False, "that work is heard of after listening was stopped")


# -- what is refused


@CASES
async def what_makes_no_sense_is_refused_and_nothing_written(make: Make) -> None:
    async with opened(make) as (queue, _):
        no_zone = dt.datetime(2027, 1, 1)  # noqa: DTZ001 - this is what is refused
        for wrong in (
            {"priority": 2**31}, {"priority": 1.5}, {"priority": True}, {"delay": -1}, {"delay": float("nan")},
            {"expires_in": -1}, {"deadline": no_zone}, {"delay": 1.7e12}, {"delay": 10**400}, {"expires_in": 1.7e12},
            {"deadline": 1.7e12},
            {"idempotency_key": ""}, {"idempotency_key": 7}, {"idempotency_key": "x" * 513},
            {"idempotency_key": "a\0b"}, {"idempotency_key": "a\ud800"},
            {"concurrency_key": 7}, {"concurrency_key": "x" * 513}, {"concurrency_key": "a\0b"},
            {"agent_key": ""}, {"agent_key": None}, {"agent_key": "a\0b"}, {"agent_key": "a\udfff"},
            {"input": [1]}, {"metadata": [1]}, {"metadata": "a"}, {"run_id": ""}, {"run_id": "a\0b"},
        ):  # fmt: skip
            asked: dict[str, Any] = {"run_id": None, "agent_key": "agent", "input": {}, **wrong}
            with refused(InvalidArgument, f"enqueue with {wrong!s:.80}"):
                await queue.enqueue(**asked)
        with refused(UnserialisableResult, "an input that has no JSON form"):
            await queue.enqueue(None, "agent", {"x": object()})
        same(await queue.find(RunFilter()), [], "what was stored")
        [run_id] = await add(queue, "agent")
        for lease in (-1, 0, float("inf"), float("nan"), 10**400, True, "60"):
            with refused(InvalidArgument, f"a lease of {lease!r:.80}"):
                await queue.claim("w", lease)  # type: ignore[arg-type]
        for limit in (0, -1, True, 1.5, "3", None):
            with refused(InvalidArgument, f"a claim of {limit!r} runs"):
                await queue.claim("w", limit=limit)  # type: ignore[arg-type]
        for worker in ("", None, 7):
            with refused(InvalidArgument, f"a claim by {worker!r}"):
                await queue.claim(worker)  # type: ignore[arg-type]
        for agents in ("agent", 7):
            with refused(InvalidArgument, f"a claim for the agents {agents!r}"):
                await queue.claim("w", agent_keys=agents)  # type: ignore[arg-type]
        await queue.claim("w")
        with refused(InvalidArgument, "extending a lease by less than nothing"):
            await queue.extend_lease(run_id, "w", -1)
        with refused(InvalidArgument, "a retry in the past"):
            await queue.requeue_for_retry(run_id, "w", "boom", delay_seconds=-1)
        with refused(InvalidArgument, "an output that is no dict"):
            await queue.release(run_id, "w", True, "done")  # type: ignore[arg-type]
        same((await queue.require(run_id)).status, "running", "the status after all that")
        unknown = await queue.requeue_for_retry(UUID(int=5), "w", "boom", claim_id="0" * 26)
        same(unknown, False, "requeue_for_retry of an unknown run")
        for tries in (0, "3", 1.5, None):
            with refused(InvalidArgument, f"a queue that tries {tries!r} times"):
                make(clock=VirtualClock(), max_retries=tries)
