"""Tenants: the same names apart, lists and counts of one tenant, and runs that are given to a tenant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import IdempotencyConflict, InvalidArgument, NotSupported, UnknownRun
from ...queue.base import RunQueue
from ...queue.records import RunCounts, RunFilter, RunRow
from ..clock import VirtualClock
from .checks import Cases, accepted, refused, same
from .queue_fixtures import LEASE, Case, Make, claim_new, drain, names, one, opened, settle

CASES: Cases[Case] = Cases()
#: None is no tenant. The others would meet if a tenant were a part of the name, or if names were compared loosely.
TENANTS: Sequence[str | None] = (None, "a", "A", "a:b", "ab", "job", "a job")


async def enqueued(queue: RunQueue, tenant: str | None, number: int = 1, **options: Any) -> RunRow:
    run = await queue.enqueue(f"job{number}", "agent", {"n": number}, tenant=tenant, **options)
    return await queue.require(str(run.run_id))


@CASES
async def tenants_use_the_same_names_apart(make: Make) -> None:
    async with opened(make) as (queue, _):
        keys: dict[str, Any] = {"idempotency_key": "key", "concurrency_key": "lane"}
        with accepted("the names of another tenant's run"):
            rows = [await enqueued(queue, tenant, **keys) for tenant in TENANTS]
        same([row.tenant or None for row in rows], [*TENANTS], "the tenants of the rows")
        same(len({row.run_id for row in rows}), len(TENANTS), "the number of runs with one run key")
        for row, tenant in zip(rows, TENANTS, strict=True):
            again = await queue.enqueue(None, "agent", {"n": 1}, idempotency_key="key", tenant=tenant)
            same(str(again.run_id), row.run_id, f"the run of tenant {tenant!r} with that idempotency key")
            same((await queue.require("job1", tenant)).run_id, row.run_id, f"the run of {tenant!r} with that run key")
            with refused(IdempotencyConflict, "another input under the run key of a tenant"):
                await queue.enqueue("job1", "agent", {"n": 2}, tenant=tenant)
        second = [await enqueued(queue, tenant, 2, concurrency_key="lane") for tenant in TENANTS]
        claimed = await queue.claim_rows("w", LEASE, limit=99)
        same([row.run_id for row in claimed], [row.run_id for row in rows], "the first run of each tenant with the key")
        for row, behind in zip(claimed, second, strict=True):
            await settle(queue, row, "succeeded")
            following = await one(queue, "w")
            same(following.run_id, behind.run_id, "the next run of the tenant whose first run has ended")
            await settle(queue, following, "failed")
        same(await drain(queue), [], "the claimable runs after all have ended")


@CASES
async def a_delayed_run_waits_for_the_key_of_its_own_tenant(make: Make) -> None:
    async with opened(make) as (queue, clock):
        active = await claim_new(queue, "a", concurrency_key="lane", tenant="a")
        for tenant in ("a", "b"):
            await queue.enqueue(None, tenant * 2, {}, concurrency_key="lane", tenant=tenant, delay=9)
        clock.advance(10)
        same(names(await queue.claim_rows("w", LEASE, limit=9)), ["bb"], "the runs that are due, with the key free")
        await settle(queue, active, "succeeded")
        same(names(await queue.claim_rows("w", LEASE, limit=9)), ["aa"], "the run that was due behind the active one")


@CASES
async def taking_a_run_waits_for_the_key_of_its_own_tenant(make: Make) -> None:
    async with opened(make) as (queue, _):
        rows = {
            (tenant, n): queue.new_row(f"job{n}", "agent", {}, concurrency_key="lane", origin="inline", tenant=tenant)
            for n in (1, 2)
            for tenant in ("a", "b")
        }
        for (tenant, n), row in rows.items():
            outcome, there = await queue.take(row, "w", LEASE, insert=True, reopen=True, wait=True)
            same(outcome, "claimed" if n == 1 else "behind", f"taking run {n} of tenant {tenant!r}")
            assert there is not None
            same(there.run_id, rows[tenant, 1].run_id, "the active run of the tenant with the key")
        other = rows["a", 1].with_values(run_id=rows["b", 1].run_id, run_key=None)
        outcome, _ = await queue.take(other, "w", LEASE, insert=True, reopen=True)
        same(outcome, "conflict", "taking the run of another tenant by its id")
        with refused(IdempotencyConflict, "storing a run under the id of another tenant's run"):
            await queue.insert(other)


@CASES
async def a_run_key_without_a_tenant_means_one_run(make: Make) -> None:
    async with opened(make) as (queue, _):
        first = await enqueued(queue, "a")
        same((await queue.require("job1")).run_id, first.run_id, "the only run with a run key")
        same((await queue.require(first.run_id)).run_id, first.run_id, "a run by its id")
        for name in ("job1", first.run_id):
            with refused(UnknownRun, "the run of another tenant"):
                await queue.require(name, "b")
        await enqueued(queue, "b")
        with refused(InvalidArgument, "a run key that two tenants use"):
            await queue.require("job1")
        own = await enqueued(queue, None)
        same((await queue.require("job1")).run_id, own.run_id, "the run without a tenant that has the run key")


async def some_runs(queue: RunQueue, clock: VirtualClock) -> None:
    """Store runs of all tenants in all states."""
    rng = clock.random
    for number in range(60):
        clock.advance(rng.random())
        tenant, late = rng.choice(TENANTS), 1000.0 * (rng.random() < 0.2)
        await queue.enqueue(
            f"key{number % 7}{tenant}{number}", rng.choice("xyz"), {"conversation_id": f"c{number % 3}"},
            tenant=tenant, delay=late, concurrency_key=f"lane{number}" if number % 4 else None,
        )  # fmt: skip
        if rng.random() < 0.7 and (rows := await queue.claim_rows("w", LEASE)):
            status = rng.choice(["waiting", "waiting", "succeeded", "failed", "pending", "running"])
            later = clock.wall() + 500 if status == "waiting" and rng.random() < 0.5 else 0.0
            reason = rng.choice(["signal go", "sleep", ""]) if status in ("waiting", "failed") else ""
            if status != "running":
                await settle(queue, rows[0], status, due_at=later, reason=reason, failures=rng.randrange(2))


async def compare_lists(queue: RunQueue, what: str) -> None:
    """Compare each list and count of a tenant with what all rows say."""
    rows = await queue.find(RunFilter(limit=1000))
    for tenant in (*(each or "" for each in TENANTS), "unknown"):
        if tenant:
            same(await queue.counts(tenant), RunCounts.of(rows, tenant), f"the counts of {tenant!r} {what}")
        for more in (
            {}, {"agent": "x"}, {"statuses": ("waiting", "pending")}, {"statuses": ("failed",), "agent": "y"},
            {"conversation": "c1"}, {"concurrency_key": "lane9"}, {"reason": "signal"}, {"retrying": True},
            {"prefix": "key1"}, {"run_key": "key2a2"}, {"since": rows[20].created_at}, {"until": rows[20].created_at},
            {"after": 30},
        ):  # fmt: skip
            for newest_first in (False, True):
                for limit in (2, 1000):
                    wanted = RunFilter(tenant=tenant, newest_first=newest_first, limit=limit, **more)
                    found = [row.arrival for row in await queue.find(wanted)]
                    same(found, [row.arrival for row in wanted.listed(rows)], f"the runs of {wanted} {what}")


@CASES
async def lists_and_counts_of_a_tenant_have_its_runs_only(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await some_runs(queue, clock)
        await compare_lists(queue, "")


@CASES
async def a_stored_run_is_given_to_a_tenant(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await some_runs(queue, clock)
        rows = await queue.find(RunFilter(limit=1000))
        try:
            await queue.assign(rows[0].run_id, "A")
        except NotSupported:
            return
        for row in clock.random.sample(rows, 40):
            before = await queue.require(row.run_id)
            outcome = await queue.assign(row.run_id, "A")
            running = before.status == "running" and before.tenant != "A"
            same(outcome, "running" if running else "assigned", f"giving away a run that is {before.status}")
            after = await queue.require(row.run_id)
            tenant = before.tenant if outcome == "running" else "A"
            same(after.with_values(blocked=0), before.with_values(tenant=tenant, blocked=0), "the row of the run")
            assert after.run_key is not None
            same((await queue.require(after.run_key, tenant or None)).run_id, row.run_id, "the run by its key")
        await compare_lists(queue, "after runs were given to a tenant")
        same(await queue.assign("00000000-0000-0000-0000-000000000000", "A"), "gone", "giving away an unknown run")


@CASES
async def a_run_that_is_given_to_a_tenant_takes_its_keys_along(make: Make) -> None:
    async with opened(make) as (queue, _):
        first, second, third = [await enqueued(queue, None, n, concurrency_key="lane") for n in (1, 2, 3)]
        theirs = await enqueued(queue, "a", 4, concurrency_key="lane", idempotency_key="taken")
        mine = await enqueued(queue, None, 5, idempotency_key="taken")
        try:
            same(await queue.assign(mine.run_id, "a"), "taken", "giving away a run whose key the tenant has")
        except NotSupported:
            return
        same((await queue.require(mine.run_id)).tenant, "", "the tenant of that run")
        same(await queue.assign(first.run_id, "a"), "assigned", "giving away the active run of a concurrency key")
        held = [(await queue.require(row.run_id)).blocked for row in (first, second, third, theirs)]
        same(held, [1, 0, 1, 0], "which runs are blocked: the run given away follows the active run of its new key")
        again = await queue.enqueue("job1", "agent", {"n": 1}, tenant="a")
        same(str(again.run_id), first.run_id, "the run of the tenant with the run key of the run given away")
        claimed = await queue.claim_rows("w", LEASE, limit=9)
        same([row.run_key for row in claimed], ["job2", "job4", "job5"], "the claimable runs")
        await settle(queue, claimed[1], "waiting", reason="signal go")
        await settle(queue, claimed[0], "waiting", reason="signal go")
        same(await queue.assign(second.run_id, "a"), "taken", "giving away a waiting run whose new key is in use")
        await settle(queue, claimed[2], "succeeded")
        same(await queue.assign(mine.run_id, "b"), "assigned", "giving away a run that has ended")
        again = await queue.enqueue(None, "agent", {"n": 5}, tenant="b", idempotency_key="taken")
        same(str(again.run_id), mine.run_id, "the run by the idempotency key that it took along")
        fresh = await queue.enqueue(None, "agent", {"n": 6}, idempotency_key="taken")
        same(str(fresh.run_id) == mine.run_id, False, "whether the key still means that run without a tenant")
