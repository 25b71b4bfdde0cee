"""Reading, deleting, listeners, and rejected arguments."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable
from typing import Any
from uuid import UUID

from ..._engines.base import Op
from ...errors import InvalidArgument, LeaseLost, UnserialisableResult
from ...queue.base import RunQueue
from ...queue.records import RowChanged, RunFilter, RunRow
from ..clock import VirtualClock
from .checks import CONTENTS, TRIES, Cases, keeps_the_loop_free, refused, same, turns
from .queue_fixtures import LEASE, Case, Make, add, claim_new, margin, names, one, opened, settle

CASES: Cases[Case] = Cases()


# -- reading and deleting


@CASES
async def find_lists_what_was_asked_for(make: Make) -> None:
    async with opened(make) as (queue, clock):
        start = clock.wall()
        for agent in "abab":
            await add(queue, agent)
            clock.advance(10)
        for row in await queue.claim_rows("w", agent_keys=["a"], limit=2):
            await settle(queue, row, "failed")
            clock.advance(5)
        every = await queue.find(RunFilter())
        same(names(every), list("abab"), "all runs, in order of arrival")
        same(names(await queue.find(RunFilter(("failed",)))), list("aa"), "the failed runs")
        same(names(await queue.find(RunFilter(("failed", "pending"), "b"))), list("bb"), "failed or pending runs of b")
        same(names(await queue.find(RunFilter(("running",)))), [], "the running runs")
        same(names(await queue.find(RunFilter(()))), [], "the runs of an empty set of statuses")
        same(len(await queue.find(RunFilter(since=start + 10))), 3, "the number of runs created since the second")
        same(len(await queue.find(RunFilter(ended_before=start + 45))), 1, "the number of runs ended before a time")
        page = await queue.find(RunFilter(limit=3))
        same(len(page), 3, "the number of runs on a page of three")
        rest = await queue.find(RunFilter(after=page[-1].arrival, limit=3))
        same([*page, *rest], every, "two pages")
        same([row.arrival for row in every], sorted({row.arrival for row in every}), "the growing run numbers")


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
        for row, status in zip(
            await queue.claim_rows("w", agent_keys=["a", "b"], limit=2), ("succeeded", "failed"), strict=True
        ):
            await settle(queue, row, status)
        same(
            [row.run_id for row in await queue.children(parent)], children, "the children of a run after they finished"
        )


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
            await queue.commits.commit(None, [Op("queue.delete", (run_id, row.generation, row.arrival))])

        await forget(first)
        same(await children(parent), [second], "the children after one was deleted")
        await queue.enqueue(first, "a", {})
        same(await children(parent), [second], "the children after that id was enqueued without a parent")
        await forget(first)
        await queue.enqueue(first, "a", {}, parent_run_id=parent)
        same(await children(parent), [second, first], "the children after that id was enqueued as a child again")
        await forget(parent)
        same(await children(parent), [second, first], "the children of a deleted run")


@CASES
async def a_deleted_run_is_gone_with_its_mail_and_key(make: Make) -> None:
    async with opened(make) as (queue, _):
        row = await claim_new(queue, idempotency_key="key-1")
        await queue.post(row.run_id, "signal", "go", "1", "m1")
        delete = Op("queue.delete", (row.run_id, row.generation, row.arrival))
        with refused(RowChanged, "deleting a live run"):
            await queue.commits.commit(None, [delete])
        await settle(queue, row, "succeeded")
        await queue.commits.commit(None, [delete])
        await queue.commits.commit(None, [delete])
        same(await queue.row(row.run_id), None, "the row")
        same(await queue.mail(row.run_id), [], "the mailbox")
        same(await queue.find(RunFilter()), [], "all runs")
        with refused(LeaseLost, "a write by its last claim"):
            await settle(queue, row, "running")
        run = await queue.enqueue(row.run_id, "other", {"n": 2}, idempotency_key="key-1")
        is_later = (await queue.require(run.run_id)).arrival > row.arrival
        same(is_later, True, "whether the number of a new run with its id is greater")
        same(await queue.post(run.run_id, "signal", "go", "2", "m1"), ("pending", 1), "post to the new run")


@CASES
async def a_run_is_deleted_as_it_was_seen(make: Make) -> None:
    async with opened(make) as (queue, clock):
        seen = await claim_new(queue)
        await settle(queue, seen, "failed")
        delete = Op("queue.delete", (seen.run_id, seen.generation, seen.arrival))
        await queue.commits.commit(None, [Op("queue.reopen", (seen.run_id, ("failed",), clock.wall()))])
        again = await one(queue, "w")
        await settle(queue, again, "succeeded")
        with refused(RowChanged, "deleting a run that was reopened and finished again"):
            await queue.commits.commit(None, [delete])
        same((await queue.require(seen.run_id)).status, "succeeded", "its status after the rejected delete")
        await queue.commits.commit(None, [Op("queue.delete", (again.run_id, again.generation, again.arrival))])
        await queue.enqueue(seen.run_id, "agent", {})
        await settle(queue, await one(queue, "w"), "succeeded")
        with refused(RowChanged, "deleting a new run with the same id"):
            await queue.commits.commit(None, [delete])
        same((await queue.require(seen.run_id)).status, "succeeded", "the status of the new run")


def _unchanging(row: RunRow) -> RunRow:
    """The columns of a row that never change after enqueue."""
    return RunRow(
        row.run_id, row.agent, row.input, row.digest, row.metadata, row.priority, row.created_at,
        expires_at=row.expires_at, deadline=row.deadline, run_key=row.run_key, idem_key=row.idem_key,
        parent_id=row.parent_id, concurrency_key=row.concurrency_key, arrival=row.arrival, tenant=row.tenant,
    )  # fmt: skip


class _EnqueuedRun:
    """A run whose enqueued columns are compared after each change."""

    def __init__(self, queue: RunQueue, clock: VirtualClock, enqueued: RunRow) -> None:
        self.queue, self.clock, self.enqueued = queue, clock, enqueued

    async def unchanged(self, returned: RunRow | None, after: str) -> RunRow:
        row = await self.queue.require(self.enqueued.run_id)
        same(_unchanging(row), _unchanging(self.enqueued), f"the enqueued columns after {after}")
        if returned is not None:
            same(returned, row, f"the returned row after {after}, compared with the stored row")
        return row

    async def claim(self, after: str) -> RunRow:
        self.clock.advance(1.5)
        rows = await self.queue.claim_rows("w", LEASE, agent_keys=["agent"])
        same(names(rows), ["agent"], f"the claimable runs after {after}")
        return await self.unchanged(rows[0], f"a claim after {after}")


async def _enqueue_with_all_columns(queue: RunQueue, clock: VirtualClock) -> _EnqueuedRun:
    clock.advance(0.123456)
    [parent] = await add(queue, "parent")
    run = await queue.enqueue(
        "job", "agent", {"n": 1}, {"tenant": 5}, 7, idempotency_key="key-1", parent_run_id=parent, tenant="t-1",
        concurrency_key="lane", expires_in=86400.25, deadline=clock.wall() + 86400.75,
    )  # fmt: skip
    row = await queue.require(run.run_id)
    columns = (row.priority, row.run_key, row.idem_key, row.parent_id, row.concurrency_key, row.tenant, row.created_at)
    same(columns, (7, "job", "key-1", parent, "lane", "t-1", clock.wall()), "the enqueued columns of the row")
    digest = queue.new_row(None, "agent", {"n": 1}).digest
    same(row.digest, queue.payloads.keyed_digest(digest) if queue.payloads else digest, "its digest")
    same((row.expires_at, row.deadline), (clock.wall() + 86400.25, clock.wall() + 86400.75), "its limits")
    return _EnqueuedRun(queue, clock, row)


@CASES
async def what_a_run_came_with_it_keeps(make: Make) -> None:
    async with opened(make) as (queue, clock):
        run = await _enqueue_with_all_columns(queue, clock)
        key = run.enqueued.run_id
        row = await run.claim("enqueue")
        row = await run.unchanged(await settle(queue, row, "running", min_step_count=3), "a write of counters")
        await queue.commits.commit(None, [Op("queue.beat", (((key, row.claim_id),), queue.lease_now() + LEASE))])
        await run.unchanged(None, "a heartbeat")
        await run.unchanged(
            await settle(queue, row, "pending", failures=1, due_at=clock.wall() + 1, error='"x"'), "a retry"
        )
        row = await run.claim("a retry")
        await run.unchanged(
            await settle(queue, row, "waiting", parked=1, reason="sleep", due_at=clock.wall() + 1), "a park"
        )
        row = await run.claim("a park")
        reason = "signal a\r\nb" + "\u6ce8" * 300
        left = await run.unchanged(
            await settle(queue, row, "waiting", parked=1, reason=reason), "a park without a time"
        )
        same(left.reason, reason, "the reason of a parked run")
        await queue.post(key, "signal", "go", "1")
        await run.unchanged(None, "a message")
        await run.claim("a message")
        clock.advance(LEASE)
        row = await run.claim("a crash")
        await queue.cancel(key)
        await run.unchanged(None, "a cancel request")
        clock.advance(0.25)
        left = await run.unchanged(
            await settle(queue, row, "failed", reason=reason, failures=2, error='"x"'), "the final status"
        )
        times = (left.ended_at, left.updated_at, left.reason)
        same(times, (clock.wall(), clock.wall(), reason), "ended_at, updated_at and reason")
        op = Op("queue.reopen", (key, ("failed",), clock.wall()))
        run.enqueued = run.enqueued._replace(expires_at=None)  # reopening removes the limit for the first claim
        await run.unchanged((await queue.commits.commit(None, [op]))[0], "a reopen")


@CASES
async def times_and_limits_are_kept(make: Make) -> None:
    async with opened(make) as (queue, clock):
        until = dt.datetime.fromtimestamp(clock.wall() + 90, dt.UTC)
        run = await queue.enqueue("job", "agent", {}, expires_in=30, deadline=until)
        row = await queue.require(run.run_id)
        same((row.expires_at, row.deadline, row.run_key), (clock.wall() + 30, until.timestamp(), "job"), "its limits")
        clock.advance(5)
        row = await one(queue, "w", 40)
        times = (row.started_at, row.claimed_at, row.created_at)
        same(times, (clock.wall(), clock.wall(), clock.wall() - 5), "started_at, claimed_at and created_at")
        lease = queue.lease_now() + 40
        same(row.lease_until if abs(row.lease_until - lease) > margin(queue) else lease, lease, "lease_until")
        await settle(queue, row, "pending")
        clock.advance(5)
        row = await one(queue, "w")
        same((row.started_at, row.claimed_at), (clock.wall() - 5, clock.wall()), "the times after a second claim")


@CASES
async def listeners_hear_what_concerns_them(make: Make) -> None:
    """Listeners are optional: without them `listen` returns None, and workers poll."""
    async with opened(make) as (queue, _):
        woken = {topic: asyncio.Event() for topic in ("work", "mail", "done")}
        loop = asyncio.get_running_loop()

        def listen(topic: str) -> Callable[[], None] | None:
            def wake() -> None:
                loop.call_soon_threadsafe(woken[topic].set)

            return queue.listen(topic, wake)

        stops = [listen(topic) for topic in woken]
        if None in stops:
            same(stops, [None] * 3, "the results of listen for three topics: None for all or for none")
            return

        row = await claim_new(queue)
        await woken["work"].wait()
        await queue.post(row.run_id, "signal", "go", "1")
        await woken["mail"].wait()
        await settle(queue, row, "succeeded")
        await woken["done"].wait()
        for stop in stops:
            assert stop is not None
            stop()
        for _ in range(TRIES):  # an earlier notification may arrive late
            woken["work"].clear()
            await add(queue, "agent")
            await turns()
            if not woken["work"].is_set():
                break
        same(woken["work"].is_set(), False, "whether a stopped listener is notified")


# -- rejected arguments


@CASES
async def what_makes_no_sense_is_refused_and_nothing_written(make: Make) -> None:
    async with opened(make) as (queue, _):
        no_zone = dt.datetime(2027, 1, 1)  # noqa: DTZ001 - must be rejected
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
            arguments: dict[str, Any] = {"run_id": None, "agent_key": "agent", "input": {}, **wrong}
            with refused(InvalidArgument, f"enqueue with {wrong!s:.80}"):
                await queue.enqueue(**arguments)
        with refused(UnserialisableResult, "an input that is not JSON-serializable"):
            await queue.enqueue(None, "agent", {"x": object()})
        same(await queue.find(RunFilter()), [], "the stored runs")
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
        with refused(InvalidArgument, "extend_lease by a negative time"):
            await queue.extend_lease(run_id, "w", -1)
        with refused(InvalidArgument, "requeue_for_retry with a negative delay"):
            await queue.requeue_for_retry(run_id, "w", "boom", delay_seconds=-1)
        with refused(InvalidArgument, "an output that is not a dict"):
            await queue.release(run_id, "w", True, "done")  # type: ignore[arg-type]
        same((await queue.require(run_id)).status, "running", "the status after the rejected calls")
        unknown = await queue.requeue_for_retry(UUID(int=5), "w", "boom", claim_id="0" * 26)
        same(unknown, False, "requeue_for_retry of an unknown run")
        for tries in (0, "3", 1.5, None):
            with refused(InvalidArgument, f"a queue with max_retries={tries!r}"):
                make(clock=VirtualClock(), max_retries=tries)


@CASES
async def contents_come_back_letter_by_letter(make: Make) -> None:
    async with opened(make) as (queue, _):
        for text in CONTENTS:
            new = queue.new_row(None, "agent", {})._replace(input=text, metadata=text)
            await queue.commits.commit(None, [Op("queue.insert", (new,))])
            row = await one(queue, "w")
            await queue.post(row.run_id, "signal", "go", text)
            left = await settle(queue, row, "failed", output=text, error=text)
            for what, each in (("read", await queue.require(row.run_id)), ("returned by a commit", left)):
                found = (each.input, each.metadata, each.output, each.error)
                same(found, (text,) * 4, f"input, metadata, output and error of a row {what}")
            same([mail.payload for mail in await queue.mail(row.run_id)], [text], "a message")


@CASES
async def the_event_loop_goes_on_while_a_commit_waits(make: Make) -> None:
    async with opened(make) as (queue, _):

        async def fill(count: int) -> None:
            rows = [queue.new_row(None, "agent", {}) for _ in range(count)]
            await queue.commits.commit(None, [Op("queue.insert", (row,)) for row in rows])
            await queue.find(RunFilter())

        await keeps_the_loop_free(fill, 200, "runs")
