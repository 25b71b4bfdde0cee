"""Cases of lists of runs, and of the tenants of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from ..._engines.base import Op
from ...errors import IdempotencyConflict, InvalidArgument, NotSupported, UnknownRun
from ...queue import records
from ...queue.base import RunQueue
from ...queue.records import RunCounts, RunFilter, RunRow
from ..clock import VirtualClock
from .checks import Cases, accepted, refused, same
from .queue_fixtures import LEASE, Case, Make, claim_new, drain, names, one, opened, settle

CASES: Cases[Case] = Cases()


async def listed(queue: RunQueue, **wanted: Any) -> str:
    """Return the keys of the agents of the listed runs, newest first, as one string."""
    return "".join(names(await queue.find(RunFilter(**{"newest_first": True, **wanted}))))


async def several(queue: RunQueue, clock: VirtualClock, agents: str, **options: Any) -> list[RunRow]:
    """Enqueue a run for each letter, each a second after the run before."""
    rows = []
    for agent in agents:
        clock.advance(1)
        run = await queue.enqueue(None, agent, {}, **options)
        rows.append(await queue.require(run.run_id))
    return rows


async def waiting(queue: RunQueue, agent: str, reason: str, **options: Any) -> RunRow:
    row = await claim_new(queue, agent, **options)
    return await settle(queue, row, "waiting", parked=1, reason=reason)


async def delete(queue: RunQueue, row: RunRow) -> None:
    await queue.commits.commit(None, [Op("queue.delete", (row.run_id, row.generation, row.arrival))])


async def ask(queue: RunQueue, row: RunRow, request: str, name: str) -> None:
    await queue.post(row.run_id, records.QUESTION, name, "{}", request)


@CASES
async def the_newest_runs_are_listed_page_by_page(make: Make) -> None:
    async with opened(make) as (queue, clock):
        rows = await several(queue, clock, "abcdefg")
        every = await queue.find(RunFilter(newest_first=True))
        same(every, rows[::-1], "all runs, newest first")
        for size in (1, 3, 7):
            found: list[RunRow] = []
            before = None
            while page := await queue.find(RunFilter(limit=size, newest_first=True, before=before)):
                same(len(page) <= size, True, f"whether a page has at most {size} runs")
                found += page
                before = (page[-1].created_at, page[-1].arrival)
            same(found, every, f"all pages of {size} runs")


@CASES
async def runs_of_the_same_time_are_listed_by_their_number(make: Make) -> None:
    async with opened(make) as (queue, clock):
        for agent in "aabab":
            await queue.enqueue(None, agent, {})
        clock.set_wall(clock.wall() - 5)
        await queue.enqueue(None, "c", {})
        same(await listed(queue), "babaac", "all runs, newest first")
        same("".join(names(await queue.find(RunFilter()))), "aababc", "all runs in order of arrival")
        [_, second, *_] = await queue.find(RunFilter(newest_first=True))
        for agents, wanted in (("baac", {}), ("aa", {"agent": "a"}), ("b", {"agent": "b"}), ("ba", {"limit": 2})):
            found = await listed(queue, before=(second.created_at, second.arrival), statuses=("pending",), **wanted)
            same(found, agents, f"the pending runs after the second, with {wanted}")


@CASES
async def a_range_of_creation_times_is_listed(make: Make) -> None:
    async with opened(make) as (queue, clock):
        rows = await several(queue, clock, "abcdef")
        times = [row.created_at for row in rows]
        for wanted, agents in (
            ({"since": times[2]}, "fedc"),
            ({"until": times[2]}, "ba"),
            ({"since": times[1], "until": times[4]}, "dcb"),
            ({"since": times[1], "until": times[4], "agent": "c"}, "c"),
            ({"since": times[1], "until": times[4], "statuses": ("pending",)}, "dcb"),
            ({"since": times[3] + 0.5, "until": times[4]}, ""),
            ({"since": times[4], "until": times[1]}, ""),
            ({"until": times[4], "before": (times[2], rows[2].arrival)}, "ba"),
            ({"until": times[1], "before": (times[4], rows[4].arrival)}, "a"),
            ({"since": times[5] + 1}, ""),
        ):
            same(await listed(queue, **wanted), agents, f"the runs of {wanted}, newest first")
            oldest = await queue.find(RunFilter(**wanted))
            same("".join(names(oldest)), agents[::-1], f"the runs of {wanted} in order of arrival")


@CASES
async def statuses_and_agents_are_merged_in_order(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await several(queue, clock, "abcabcab")
        for row in await queue.claim_rows("w", agent_keys=["a"], limit=2):
            await settle(queue, row, "failed")
        await queue.claim_rows("w", agent_keys=["b"], limit=2)
        for statuses, agent, expected in (
            (("failed",), None, "aa"),
            (("pending",), None, "bacc"),
            (("pending", "failed"), None, "bacaca"),
            (("running", "pending", "pending"), None, "bacbcb"),
            (None, "a", "aaa"),
            (("pending",), "a", "a"),
            (("pending", "running"), "b", "bbb"),
            (("dead",), None, ""),
            (("dead", "waiting"), "a", ""),
            ((), None, ""),
            (None, "nobody", ""),
        ):
            same(await listed(queue, statuses=statuses, agent=agent), expected, f"the runs of {statuses} and {agent}")
            newest = await listed(queue, statuses=statuses, agent=agent, limit=2)
            same(newest, expected[:2], f"the two newest runs of {statuses} and {agent}")


@CASES
async def a_prefix_of_the_id_or_the_key_is_found(make: Make) -> None:
    async with opened(make) as (queue, clock):
        runs = {
            "a": "order-1", "b": "order-10", "c": "Order-1", "d": "ordes", "e": "50%_done", "f": "\u00e4rger",
            "g": str(UUID(int=0xABC << 116)), "h": str(UUID(int=0xABD << 116)), "i": "ab: a key",
        }  # fmt: skip
        for agent, run_id in runs.items():
            clock.advance(1)
            await queue.enqueue(run_id, agent, {})
        for prefix, agents in (
            ("order-1", "ba"), ("order-10", "b"), ("order", "ba"), ("orde", "dba"), ("O", "c"), ("50%", "e"),
            ("50%_", "e"), ("%", ""), ("_", ""), ("\u00e4", "f"), ("abc", "g"), ("abd00000-0000", "h"), ("ordesx", ""),
            ("ab:", "i"),
        ):  # fmt: skip
            same(await listed(queue, prefix=prefix), agents, f"the runs with the prefix {prefix!r}")
        for agent, run_id in runs.items():
            row = await queue.require(run_id)
            same(await listed(queue, prefix=row.run_id), agent, "the runs with a whole id as prefix")
        same("".join(names(await queue.find(RunFilter(prefix="order")))), "ab", "a prefix in order of arrival")
        same(await listed(queue, prefix="order", agent="a"), "a", "the runs of a prefix and an agent")
        same(await listed(queue, prefix="order", limit=1), "b", "the newest run of a prefix")


@CASES
async def children_conversations_and_concurrency_keys_are_found(make: Make) -> None:
    async with opened(make) as (queue, clock):
        [parent] = await several(queue, clock, "p")
        await several(queue, clock, "ab", parent_run_id=parent.run_id)
        await several(queue, clock, "cde", concurrency_key="key 1")
        await several(queue, clock, "f", concurrency_key="key 2")
        conversation = UUID(int=7)
        for agent, named in (("g", conversation), ("h", str(conversation).upper()), ("i", "talk"), ("j", "")):
            clock.advance(1)
            await queue.enqueue(None, agent, {"conversation_id": named})
        for wanted, agents in (
            ({"parent": parent.run_id}, "ba"),
            ({"parent": str(UUID(int=1))}, ""),
            ({"parent": parent.run_id, "agent": "a"}, "a"),
            ({"concurrency_key": "key 1"}, "edc"),
            ({"concurrency_key": "key 2"}, "f"),
            ({"concurrency_key": "key"}, ""),
            ({"concurrency_key": "key 1", "statuses": ("pending",), "agent": "d"}, "d"),
            ({"conversation": str(conversation)}, "hg"),
            ({"conversation": "talk"}, "i"),
            ({"conversation": "tal"}, ""),
            ({"conversation": "talk", "concurrency_key": "key 1"}, ""),
        ):
            same(await listed(queue, **wanted), agents, f"the runs of {wanted}, newest first")
            same(await listed(queue, limit=1, **wanted), agents[:1], f"the newest run of {wanted}")
            oldest = await queue.find(RunFilter(**wanted))
            same("".join(names(oldest)), agents[::-1], f"the runs of {wanted} in order of arrival")
        await queue.cancel(parent.run_id)
        await delete(queue, await queue.require(parent.run_id))
        same(await listed(queue, agent="p"), "", "the runs of an agent after its run was deleted")


@CASES
async def reasons_are_found_by_their_first_words(make: Make) -> None:
    async with opened(make) as (queue, clock):
        for agent, reason in (
            ("a", "signal go"), ("b", "signal"), ("c", "signals"), ("d", "signal go now"), ("e", "signal stop"),
            ("f", "sleep"), ("g", "signal\tgo"), ("h", ""),
        ):  # fmt: skip
            clock.advance(1)
            await waiting(queue, agent, reason)
        for reason, agents in (
            ("signal", "edba"), ("signal go", "da"), ("signal g", ""), ("sig", ""), ("sleep", "f"), ("other", ""),
        ):  # fmt: skip
            same(await listed(queue, reason=reason), agents, f"the runs with the reason {reason!r}")
            same(await listed(queue, reason=reason, limit=1), agents[:1], f"the newest run with {reason!r}")
        same(await listed(queue, reason="signal", statuses=("pending",)), "", "the pending runs with a reason")
        row = await claim_new(queue, "z")
        await settle(queue, row, "failed", reason="signal")
        same(await listed(queue, reason="signal"), "zedba", "the runs with a reason after one more")
        same(await listed(queue, reason="signal", statuses=("failed",)), "z", "the failed runs with a reason")


@CASES
async def runs_that_are_tried_again_are_found(make: Make) -> None:
    async with opened(make) as (queue, clock):
        row = await claim_new(queue, "a")
        await settle(queue, row, "pending", failures=1, due_at=clock.wall() + 60)
        clock.advance(1)
        row = await claim_new(queue, "b")
        await settle(queue, row, "failed", failures=3)
        clock.advance(1)
        await claim_new(queue, "c")
        same(await listed(queue, retrying=True), "a", "the live runs after a failed attempt")
        clock.advance(60)
        [row] = await queue.claim_rows("w", agent_keys=["a"])
        same(await listed(queue, retrying=True), "a", "the same while the next attempt is running")
        same(await listed(queue, retrying=True, statuses=("pending",)), "", "the pending ones of them")
        await settle(queue, row, "succeeded", failures=1)
        same(await listed(queue, retrying=True), "", "the live runs after a failed attempt, once it has succeeded")


@CASES
async def open_questions_are_found_until_they_are_answered(make: Make) -> None:
    async with opened(make) as (queue, clock):
        rows = {}
        for agent in "abc":
            clock.advance(1)
            rows[agent] = await claim_new(queue, agent)
        await ask(queue, rows["a"], "01A", "plan")
        asked = [records.OpenQuestion("01A", clock.wall(), "plan")]
        clock.advance(0.25)
        await ask(queue, rows["a"], "01B", "price \u2028 of\nit")
        asked.append(records.OpenQuestion("01B", clock.wall(), "price \u2028 of it"))
        await ask(queue, rows["b"], "01C", f"{records.IN_DOUBT}pay")
        await ask(queue, rows["a"], "01A", "plan")  # a message with a known id is dropped
        same(records.open_questions(await queue.require(rows["a"].run_id)), asked, "the questions")
        same(await listed(queue, asking=True), "ba", "the runs with an open question")
        same(await listed(queue, in_doubt=True), "b", "the runs with a step in doubt")
        await queue.post(rows["a"].run_id, "signal", "plan", "1", records.answer_id("01"))
        await queue.post(rows["a"].run_id, "signal", "plan", "1", "01A")
        await queue.post(rows["a"].run_id, "signal", "plan", "1", records.answer_id("01A", "x:y"))
        same(records.open_questions(await queue.require(rows["a"].run_id)), asked[1:], "the questions left")
        await queue.post(rows["b"].run_id, "closed", "", "null", records.answer_id("01C"))
        same(await listed(queue, in_doubt=True), "", "the runs with a step in doubt, after the answer")
        same(await listed(queue, asking=True), "a", "the runs with an open question, after two answers")
        await settle(queue, rows["a"], "failed")
        same(await listed(queue, asking=True), "", "the runs with an open question, after the last has finished")


@CASES
async def a_light_row_has_no_large_values(make: Make) -> None:
    async with opened(make) as (queue, _):
        await queue.enqueue("r", "a", {"text": "in"}, metadata={"m": 1})
        [row] = await queue.claim_rows("w")
        await settle(queue, row, "succeeded", output='{"text": "out"}', reason="done")
        [whole] = await queue.find(RunFilter())
        same((whole.input, whole.output, whole.metadata), ('{"text":"in"}', '{"text": "out"}', '{"m":1}'), "a row")
        for wanted in (RunFilter(light=True), RunFilter(light=True, newest_first=True, prefix="r")):
            same(await queue.find(wanted), [records.light(whole)], "the light rows")
            same(
                await queue.find(wanted._replace(without_input=True)),
                [records.light(whole)],
                "the light rows without input",
            )


@CASES
async def a_row_without_its_input_has_its_metadata(make: Make) -> None:
    async with opened(make) as (queue, _):
        await queue.enqueue("r", "a", {"text": "in"}, metadata={"m": 1})
        await settle(queue, (await queue.claim_rows("w"))[0], "succeeded", output='{"text": "out"}')
        [whole] = await queue.find(RunFilter())
        for wanted in (RunFilter(), RunFilter(newest_first=True, prefix="r"), RunFilter(agent="a")):
            found = await queue.find(wanted._replace(without_input=True))
            same(found, [whole._replace(input="{}", output=None)], "the rows without their input and output")


@CASES
async def runs_are_counted(make: Make) -> None:
    async with opened(make) as (queue, clock):
        same(await queue.counts(), RunCounts({}, {}, 0, {}), "the counts of an empty queue")
        rows = await several(queue, clock, "ab")
        await queue.enqueue(None, "late", {}, delay=60)
        for agent, reason in (("x", "signal go"), ("x", "signal stop"), ("x", "sleep"), ("y", "")):
            await waiting(queue, agent, reason)
        row = await claim_new(queue, "x")
        await settle(queue, row, "waiting", parked=1, reason="sleep", due_at=clock.wall() + 9)
        await settle(queue, await claim_new(queue, "x"), "failed", reason="signal")
        runs = {("pending", "a"): 1, ("pending", "b"): 1, ("pending", "late"): 1, ("waiting", "x"): 4,
                ("waiting", "y"): 1, ("failed", "x"): 1}  # fmt: skip
        oldest = {"a": rows[0].created_at, "b": rows[1].created_at}
        expected = RunCounts(runs, oldest, 2, {"signal": 2, "sleep": 2, "": 1})
        same(await queue.counts(), expected, "the counts")
        await queue.cancel(rows[0].run_id)
        runs["cancelled", "a"] = 1
        del runs["pending", "a"], oldest["a"]
        same(await queue.counts(), expected, "after a cancel")
        for row in await queue.find(RunFilter(("cancelled", "failed"))):
            await delete(queue, row)
        del runs["cancelled", "a"], runs["failed", "x"]
        same((await queue.counts()).runs, runs, "the counts after two runs were deleted")


@CASES
async def the_oldest_pending_run_waits_for_a_worker_since_it_was_stored(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await queue.enqueue("late", "a", {}, delay=330)
        await queue.enqueue("retried", "a", {})
        for number in range(300):  # more than a backend reads with one request
            clock.advance(1)
            await queue.enqueue(f"later{number}", "a", {}, delay=3600)
        await settle(queue, (await queue.claim_rows("w"))[0], "pending", due_at=clock.wall() + 60, failures=1)
        same((await queue.counts()).oldest_pending, {}, "the oldest run, if all are due later")
        clock.advance(1)
        await queue.enqueue("first", "a", {}, concurrency_key="k")
        first = await queue.require("first")
        clock.advance(1)
        await queue.enqueue("blocked", "b", {}, concurrency_key="k")
        same((await queue.counts()).oldest_pending, {"a": first.created_at}, "the oldest run")
        clock.advance(60)
        await queue.claim_rows("w", agent_keys=["none"])  # makes runs ready that are due
        rows = {row.run_key: row for row in await queue.find(RunFilter(agent="a", limit=1000))}
        same([rows[name].due_at for name in ("late", "retried")], [0.0, 0.0], "the times of runs that were due")
        same(rows["late"].updated_at, rows["late"].created_at + 330, "when a run that became due was updated")
        same((await queue.counts()).oldest_pending, {"a": first.created_at}, "the oldest run after others became due")
        every = await queue.find(RunFilter(limit=1000))
        same(await queue.counts(), RunCounts.of(every), "the counts, and the counts of all rows")
        while (row := (await queue.claim_rows("w"))[0]).run_key != "first":
            await settle(queue, row, "succeeded")
        same((await queue.counts()).oldest_pending, {}, "the oldest run after the first was claimed")
        await settle(queue, row, "succeeded")
        blocked = await queue.require("blocked")
        same((await queue.counts()).oldest_pending, {"b": blocked.created_at}, "the oldest run after it was unblocked")


@CASES
async def many_runs_of_several_agents_are_merged_in_order(make: Make) -> None:
    async with opened(make) as (queue, clock):
        agents = "a" * 60 + "b" * 40 + "abc" * 20 + "b" * 30 + "c" + "a" * 25
        for part in range(0, len(agents), 50):
            new = []
            for agent in agents[part : part + 50]:
                clock.advance(0.25)
                new.append(Op("queue.insert", (queue.new_row(None, agent, {}),)))
            await queue.commits.commit(None, new)
        for wanted, expected in (
            ({"statuses": ("pending",)}, agents[::-1]),
            ({"statuses": ("pending", "failed")}, agents[::-1]),
            ({"agent": "b"}, "b" * 90),
        ):
            for limit in (7, 60, 1000):
                same(await listed(queue, limit=limit, **wanted), expected[:limit], f"{limit} runs of {wanted}")
            found, before = "", None
            while page := await queue.find(RunFilter(newest_first=True, limit=40, before=before, **wanted)):
                found, before = found + "".join(names(page)), (page[-1].created_at, page[-1].arrival)
            same(found, expected, f"all pages of {wanted}")


@CASES
async def many_runs_of_one_time_are_listed_whole(make: Make) -> None:
    async with opened(make) as (queue, _):
        numbers = await insert_many(queue, 1100)
        for wanted in ({}, {"statuses": ("pending",)}, {"prefix": "0"}, {"conversation": "c"}):
            found = await queue.find(RunFilter(**wanted, newest_first=True, limit=5000))
            same([row.arrival for row in found], numbers[::-1], f"the numbers of 1100 runs of {wanted}")
        found = await queue.find(RunFilter(conversation="c", limit=5000))
        same([row.arrival for row in found], numbers, "the numbers of 1100 runs in order of arrival")


async def insert_many(queue: RunQueue, number: int) -> Sequence[int]:
    rows = [queue.new_row(UUID(int=n), "many", {"conversation_id": "c"}) for n in range(number)]
    for i in range(0, number, 100):
        await queue.commits.commit(None, [Op("queue.insert", (row,)) for row in rows[i : i + 100]])
    return [row.arrival for row in await queue.find(RunFilter(limit=5000))]


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
