"""Enqueueing, claiming in order, and idempotency."""

from __future__ import annotations

import asyncio
import datetime as dt
from decimal import Decimal
from typing import Any
from uuid import UUID

from ..._core.codec.json import encode
from ..._core.ids import new_ulid
from ..._engines.base import Op
from ...errors import IdempotencyConflict, InvalidArgument, LeaseLost, UnknownRun
from ...queue.records import LIVE, QueuedRun, RowChanged, RunFilter, RunRow
from .checks import Cases, accepted, refused, same, turns
from .queue_fixtures import LEASE, Case, Make, add, drain, names, opened, settle

CASES: Cases[Case] = Cases()

# A column or its collation may treat any two of these as equal.
NAMES = [
    "Name", "name", "name ", "n\u00e4me", "na\u0308me", "x" * 511 + "1", "x" * 511 + "2", "x", "nam", "nam_", "nam%",
    "\u6ce8\u6587", "\u898b\u7a4d", "\U0001f600a", "\U0001f601a", "\ufffd", "?", "name\u200b", "na\\me", "1",
]  # fmt: skip
#: Also allowed in the names and ids of messages.
BROKEN = ["a\r\nb", "a\nb", "a\rb", "a\tb", "a\x00b", "a\x00", "a"]


# -- enqueueing and claiming


@CASES
async def a_claim_hands_over_what_was_enqueued(make: Make) -> None:
    async with opened(make) as (queue, clock):
        run_id, sent = UUID(int=7), {"messages": [{"role": "user"}], "who": UUID(int=1), "price": Decimal("1.10")}
        await queue.enqueue(run_id, "agent", sent, {"tenant": 5}, 3)
        sent["messages"] = []
        run = await queue.claim("worker-1", lease_seconds=60)
        same((run.run_id, run.agent_key, run.priority, run.attempt), (run_id, "agent", 3, 1), "the claimed run")
        expected = {"messages": [{"role": "user"}], "who": UUID(int=1), "price": Decimal("1.10")}
        same(run.input, expected, "its input")
        same(run.metadata, {"tenant": 5}, "its metadata")
        same(run.created_at, dt.datetime.fromtimestamp(clock.wall(), dt.UTC), "created_at")
        same(run.scheduled_at, None, "scheduled_at")
        same(bool(run.claim_id), True, "whether the claim has an id")
        run.input["messages"].append("mine")
        stored = await queue.require(run_id)
        same(QueuedRun.of(stored).input, expected, "the stored input after the claimer changed its copy")


@CASES
async def an_empty_queue_gives_none(make: Make) -> None:
    async with opened(make) as (queue, _):
        same(await queue.claim("w"), None, "a claim on an empty queue")
        same(await queue.claim("w", limit=3), [], "a claim of three on an empty queue")
        same(await queue.next_due(), None, "next_due")
        same(await queue.row(UUID(int=9)), None, "the row of an unknown run")
        with refused(UnknownRun, "require of an unknown run"):
            await queue.require(UUID(int=9))


@CASES
async def claims_come_by_priority_then_in_order_of_arrival(make: Make) -> None:
    async with opened(make) as (queue, _):
        for agent, priority in (("low", -1), ("b", 0), ("high", 5), ("c", 0), ("higher", 2**31 - 1), ("d", 0)):
            await add(queue, agent, priority=priority)
        same(names(await drain(queue)), ["higher", "high", "b", "c", "d", "low"], "the order of claims")
        most = 2**31 - 1
        wide = [-most, 40_000, -200, most - 1, 300, -40_000, most, -most + 1, 200, -300]
        ids = [(await add(queue, "agent", priority=priority))[0] for priority in wide]
        same([(await queue.require(each)).priority for each in ids], wide, "priorities of up to 32 bits")
        order = sorted(wide, reverse=True)
        same([run.priority for run in await drain(queue)], order, "the order of claims by such priorities")
        for priority in wide:
            await add(queue, "agent", priority=priority, concurrency_key="lane")
        found = []
        while rows := await queue.claim_rows("w"):
            found.append(rows[0].priority)
            same(len(found) <= len(wide), True, "whether each run is claimed once")
            await settle(queue, rows[0], "succeeded")
        same(found[1:], [each for each in order if each != wide[0]], "the order of claims of one key, after the first")


@CASES
async def a_run_that_was_given_back_keeps_its_place(make: Make) -> None:
    async with opened(make) as (queue, clock):
        for n in (3, 1, 2):
            await queue.enqueue(UUID(int=n), f"agent{n}", {})
        for way in ("released", "failed", "abandoned"):
            run = await queue.claim("w", LEASE)
            clock.advance(1)
            if way == "released":
                await settle(queue, run.row, "pending")
            elif way == "failed":
                await queue.requeue_for_retry(run.run_id, "w", "boom")
            else:
                clock.advance(LEASE)
            same(run.agent_key, "agent3", f"the run claimed before it is {way}")
        same(names(await drain(queue)), ["agent3", "agent1", "agent2"], "the order of claims after that")


@CASES
async def a_batch_is_claimed_in_the_same_order(make: Make) -> None:
    async with opened(make) as (queue, _):
        for agent, priority in (("a", 0), ("b", 2), ("c", 0), ("d", 1)):
            await add(queue, agent, priority=priority)
        batch = await queue.claim("w", limit=3)
        same(names(batch), ["b", "d", "a"], "a batch of three")
        same(len({run.claim_id for run in batch}), 3, "the number of distinct claim ids in the batch")
        same(names(await queue.claim("w", limit=3)), ["c"], "the next batch")
        same(await queue.claim("w", limit=10**12), [], "a claim of all runs in an empty queue")


@CASES
async def a_run_that_got_a_message_is_in_a_batch_once(make: Make) -> None:
    async with opened(make) as (queue, _):
        [run_id, _other] = await add(queue, "a", "b")
        await queue.post(run_id, "signal", "go", "1")
        same(names(await queue.claim("w", limit=3)), ["a", "b"], "a batch of three of two runs")


@CASES
async def a_claim_that_goes_on_under_a_new_id_is_refused_under_the_old_one(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await add(queue, "a")
        [row] = await queue.claim_rows("w", LEASE)
        how = queue.unchanged_update(row, row.claim_id)._replace(status="running", failures=1, renew=new_ulid(clock))
        renewed = await queue.settle(row.run_id, how)
        same((renewed.status, renewed.failures, renewed.worker), ("running", 1, "w"), "the row after the renewal")
        same(renewed.claim_id > row.claim_id, True, "whether the new claim id is greater than the old one")
        try:
            again = await queue.settle(row.run_id, how)
        except RowChanged:
            raise AssertionError("a repeated renewal, after a lost reply, was rejected") from None
        same(again.claim_id, renewed.claim_id, "the claim id of a repeated renewal")
        late = queue.unchanged_update(row, row.claim_id)._replace(status="failed")
        with refused(LeaseLost, "a final status by the old claim id"):
            await queue.settle(row.run_id, late)
        settled = (await queue.settle(row.run_id, late._replace(claim_id=renewed.claim_id))).status
        same(settled, "failed", "the final status by the new claim id")


@CASES
async def a_run_goes_to_one_of_many_claimers(make: Make) -> None:
    async with opened(make) as (queue, _):
        ids = await add(queue, *["agent"] * 24)

        async def claim(worker: int) -> list[QueuedRun]:
            one, more = await queue.claim(f"w{worker}"), await queue.claim(f"w{worker}", limit=2)
            return [*([one] if one else []), *more]

        found = [str(run.run_id) for runs in await asyncio.gather(*map(claim, range(16))) for run in runs]
        same(sorted(found), sorted(ids), "the runs that 16 workers claimed")


@CASES
async def a_claimer_that_is_cancelled_keeps_nothing(make: Make) -> None:
    async with opened(make) as (queue, _):
        await add(queue, "agent")
        for iterations in range(6):
            claiming = asyncio.ensure_future(queue.claim("w1", LEASE))
            await turns(iterations)
            claiming.cancel()
            await asyncio.wait({claiming})
            run: Any = await queue.claim("w2", LEASE) if claiming.cancelled() else claiming.result()
            same(
                run is not None,
                True,
                f"whether the run can be claimed after its claimer was cancelled (after {iterations} loop iterations)",
            )
            same(run.attempt, 1, f"the attempt after its claimer was cancelled (after {iterations} loop iterations)")
            await settle(queue, run.row, "pending")


@CASES
async def a_claim_is_for_the_agents_it_names(make: Make) -> None:
    async with opened(make) as (queue, _):
        await add(queue, "a", "b", "c", "b")
        same(await queue.claim("w", agent_keys=[]), None, "a claim for no agent")
        same(await queue.claim("w", agent_keys=["other"]), None, "a claim for an agent without runs")
        await add(queue, "mailer-2", "mailer2")
        for each in ("mailer", "mailer-", "mailer_2", "mailer%", "%", "mailer*", "MAILER-2"):
            same(names(await queue.claim("w", agent_keys=[each], limit=9)), [], f"a claim for the agent {each!r}")
        same(len(await queue.claim("w", agent_keys=["mailer-2", "mailer2"], limit=9)), 2, "a claim for both mailers")
        same(names(await queue.claim("w", agent_keys=["c", "b"], limit=5)), ["b", "c", "b"], "a claim for b and c")
        same(names(await drain(queue)), ["a"], "the runs of agents that no claim named")
        await add(queue, "b", "c", "b")
        twice = await queue.claim("w", agent_keys=["b", "b"], limit=3)
        same(len({run.run_id for run in twice}), len(twice), "the number of runs of a claim that names one agent twice")
        same(names(twice), ["b", "b"], "the agents of a claim that names one agent twice")


@CASES
async def a_delayed_run_waits_for_its_time(make: Make) -> None:
    async with opened(make) as (queue, clock):
        later = await queue.enqueue(None, "later", {}, delay=30.5)
        await add(queue, "now")
        same(later.scheduled_at, dt.datetime.fromtimestamp(clock.wall() + 30.5, dt.UTC), "scheduled_at")
        same(await queue.next_due(), clock.wall() + 30.5, "next_due")
        await queue.cancel((await queue.enqueue(None, "sooner", {}, delay=10)).run_id)
        [latest] = await add(queue, "latest", delay=3600)
        same(await queue.next_due(), clock.wall() + 30.5, "next_due with two delayed runs")
        same(names(await drain(queue)), ["now"], "claims before the delay has passed")
        clock.advance(30.4)
        same(await queue.claim("w"), None, "a claim just before the delay has passed")
        clock.advance(0.1)
        same(names(await drain(queue)), ["later"], "claims after the delay")
        same(await queue.next_due(), clock.wall() + 3569.5, "next_due after that claim")
        await queue.cancel(latest)
        same(await queue.next_due(), None, "next_due without delayed runs")


@CASES
async def a_delayed_run_keeps_its_priority_and_place(make: Make) -> None:
    async with opened(make) as (queue, clock):
        await add(queue, "first", delay=10)
        await add(queue, "second")
        await add(queue, "urgent", priority=1, delay=10)
        clock.advance(10)
        same(names(await drain(queue)), ["urgent", "first", "second"], "the order of claims after all are due")


# -- one run for one id or key


@CASES
async def racing_enqueuers_of_one_key_make_one_run(make: Make) -> None:
    async with opened(make) as (queue, _):

        async def enqueue(_: int) -> UUID:
            return (await queue.enqueue(None, "agent", {"n": 1}, idempotency_key="order-17")).run_id

        ids = await asyncio.gather(*map(enqueue, range(32)))
        same(len(set(ids)), 1, "the number of runs that 32 callers with one idempotency key made")
        same([run.run_id for run in await drain(queue)], [ids[0]], "the claimable runs")
        same((await queue.require(ids[0])).idem_key, "order-17", "its idempotency key")


@CASES
async def a_key_stands_for_its_run_also_when_that_is_over(make: Make) -> None:
    async with opened(make) as (queue, _):
        first = await queue.enqueue(None, "agent", {"n": 1}, idempotency_key="order-17")
        await queue.claim("w")
        await queue.release(first.run_id, "w", True)
        again = await queue.enqueue(None, "agent", {"n": 1}, idempotency_key="order-17")
        same(again.run_id, first.run_id, "the run of an idempotency key after its run finished")
        same(await queue.claim("w"), None, "the claimable runs")


@CASES
async def names_are_told_apart(make: Make) -> None:
    async with opened(make) as (queue, _):
        for n, each in enumerate(NAMES):
            with accepted(f"a run whose idempotency key is {each!r:.40}"):
                await queue.enqueue(None, f"agent{n}", {}, idempotency_key=each)
        found = names(await queue.claim("w", limit=99))
        same(found, [f"agent{n}" for n in range(len(NAMES))], "the runs of similar idempotency keys")
        await add(queue, *NAMES, concurrency_key="")
        for each in reversed(NAMES):
            same(names(await queue.find(RunFilter(("pending",), each))), [each], f"find for agent {each!r:.40}")
            claimed = await queue.claim_rows(each, agent_keys=[each], limit=9)
            same(names(claimed), [each], f"a claim for the agent {each!r:.40}")
            same((await queue.require(claimed[0].run_id)).worker, each, "the worker of the claim")
        [run_id] = await add(queue, "agent")
        several = [*NAMES, *BROKEN]
        answers = [await queue.post(run_id, "signal", each, "1", each) for each in several]
        same([seq for _, seq in answers], [*range(1, len(several) + 1)], "the numbers of messages with similar ids")
        box = await queue.mail(run_id)
        same([(mail.name, mail.msg_id) for mail in box], [(each, each) for each in several], "their names and ids")


@CASES
async def lanes_are_told_apart(make: Make) -> None:
    async with opened(make) as (queue, _):
        for each in NAMES:
            await add(queue, "first", "second", concurrency_key=each)
        first = await queue.claim_rows("w", limit=99)
        same(
            [(row.agent, row.concurrency_key) for row in first],
            [("first", each) for each in NAMES],
            "claimed runs of the keys",
        )
        for row in reversed(first):
            await settle(queue, row, "succeeded")
            then = [(each.agent, each.concurrency_key) for each in await queue.claim_rows("w", limit=99)]
            expected = [("second", row.concurrency_key)]
            same(then, expected, "the claimable runs after the first of a concurrency key finished")


@CASES
async def a_run_key_is_kept_as_it_is(make: Make) -> None:
    async with opened(make) as (queue, _):
        for n, each in enumerate(NAMES):
            with accepted(f"a run whose run and idempotency key are {each!r:.40}"):
                await queue.enqueue(each, f"agent{n}", {}, idempotency_key=each)
        for n, each in enumerate(NAMES):
            row = await queue.require(each)
            same((row.agent, row.run_key), (f"agent{n}", each), f"the agent and run key of {each!r:.40}")
            again = await queue.enqueue(None, f"agent{n}", {}, idempotency_key=each)
            same(str(again.run_id), row.run_id, f"the run of the idempotency key {each!r:.40}")


@CASES
async def what_is_long_is_kept_whole(make: Make) -> None:
    async with opened(make) as (queue, _):
        text = "é" * 200_000
        run = await queue.enqueue(None, "agent", {"text": text}, {"text": text})
        claimed = await queue.claim("w")
        whole = (claimed.input["text"] == text, claimed.metadata["text"] == text)
        same(whole, (True, True), "whether long input and metadata are complete")
        await queue.post(run.run_id, "signal", "go", f'"{text}"')
        same((await queue.mail(str(run.run_id)))[0].payload == f'"{text}"', True, "whether a long message is complete")
        await queue.release(run.run_id, "w", False, {"text": text}, text)
        row = await queue.require(run.run_id)
        same(row.output == encode({"text": text}), True, "whether a long output is complete")
        same(len(row.error or "") > len(text), True, "whether a long error is complete")


@CASES
async def the_same_run_twice_is_the_first_one(make: Make) -> None:
    async with opened(make) as (queue, clock):
        first = await queue.enqueue("nightly", "agent", {"n": 1}, {"from": 1}, 5)
        run = await queue.claim("w")
        clock.advance(1)
        again = await queue.enqueue("nightly", "agent", {"n": 1}, {"from": 2})
        same((again.run_id, again.metadata, again.priority), (first.run_id, {"from": 1}, 5), "the run enqueued again")
        same((await queue.require(run.run_id)).status, "running", "its status")
        same(await queue.claim("w"), None, "the claimable runs")


@CASES
async def a_run_is_known_by_the_string_it_was_enqueued_under(make: Make) -> None:
    async with opened(make) as (queue, _):
        for key in ("nightly", str(UUID(int=0xABC)).upper()):
            await queue.enqueue(key, "agent", {})
            run = await queue.claim("w")
            same(await queue.extend_lease(key, "w", LEASE), True, f"extend_lease of {key!r}")
            same(await queue.post(key, "signal", "go", "null"), ("running", 1), f"post of {key!r}")
            same(await queue.requeue_for_retry(key, "w", "boom"), True, f"requeue_for_retry of {key!r}")
            await queue.claim("w")
            same(await queue.cancel(key), True, f"cancel of {key!r}")
            same(await queue.is_cancelled(key), True, f"is_cancelled of {key!r}")
            await queue.release(key, "w", True)
            same((await queue.require(key)).run_id, str(run.run_id), f"the run of {key!r}")
        with refused(InvalidArgument, "cancel of None"):
            await queue.cancel(None)  # type: ignore[arg-type]


@CASES
async def the_order_of_keys_makes_no_other_input(make: Make) -> None:
    async with opened(make) as (queue, _):
        first = await queue.enqueue("nightly", "agent", {"a": 1, "b": {"c": 2, "d": [1]}}, idempotency_key="key-1")
        reordered = {"b": {"d": [1], "c": 2}, "a": 1}
        for run_id, key in (("nightly", None), (None, "key-1")):
            again = await queue.enqueue(run_id, "agent", reordered, idempotency_key=key)
            same(again.run_id, first.run_id, f"the run enqueued again under {run_id or key}")
        row = queue.new_row("nightly", "agent", reordered)
        outcome, there = await queue.take(row, "w", LEASE, insert=True, reopen=False)
        same((outcome, there and there.run_id), ("claimed", str(first.run_id)), "the result of take")
        with refused(IdempotencyConflict, "an input value that is only equal in Python"):
            await queue.enqueue("nightly", "agent", {"a": True, "b": {"c": 2, "d": [1]}})


@CASES
async def another_run_under_the_same_id_or_key_is_a_conflict(make: Make) -> None:
    async with opened(make) as (queue, _):
        await queue.enqueue("nightly", "agent", {"n": 1}, idempotency_key="key-1")
        for run_id, key, agent, input_, expected in (
            ("nightly", None, "other", {"n": 1}, ("nightly", "agent_key")),
            ("nightly", None, "agent", {"n": 2}, ("nightly", "input.n")),
            (None, "key-1", "agent", {"n": 2}, ("key-1", "input.n")),
        ):
            try:
                await queue.enqueue(run_id, agent, input_, idempotency_key=key)
            except IdempotencyConflict as error:
                missing = [part for part in expected if part not in str(error)]
                same(missing, [], f"the parts missing in the message of the conflict ({error})")
            else:
                raise AssertionError(f"enqueue of {agent} with {input_} under {run_id or key} was not rejected")
        same(len(await drain(queue)), 1, "the number of runs")


@CASES
async def a_waiting_row_is_replaced_in_one_commit(make: Make) -> None:
    """Schedules are such rows."""
    async with opened(make) as (queue, clock):
        at = clock.wall()

        def waiting(seconds: float) -> RunRow:
            row = queue.new_row(UUID(int=7), "a", {"seconds": seconds})
            return row.with_values(status="waiting", due_at=at + seconds, reason="schedule")

        first, second = await queue.insert(waiting(100)), waiting(150)
        same(await queue.next_due(), at + 100, "next_due with a waiting row")
        same(await queue.claim_rows("w"), [], "a claim before the row is due")
        clock.advance(100)
        [claimed] = await queue.claim_rows("w")
        end = Op("queue.end", (first.run_id, LIVE, "cancelled", clock.wall(), ""))
        delete = Op("queue.delete", (first.run_id, 1, first.arrival))
        stored: RunRow = (await queue.commits.commit(None, [end, delete, Op("queue.insert", (second,))]))[-1]
        same((stored.input, stored.due_at), (second.input, at + 150), "the row that replaced the claimed one")
        same(stored.arrival > first.arrival, True, "whether its arrival is later")
        with refused(LeaseLost, "an update by the claim on the old row"):
            await settle(queue, claimed, "succeeded")
        with refused(RowChanged, "a second replacement of the old row"):
            await queue.commits.commit(None, [end, delete, Op("queue.insert", (waiting(1),))])
        same(await queue.row(first.run_id), stored, "the row afterwards")
        clock.advance(50)
        same([row.input for row in await queue.claim_rows("w")], [second.input], "the claim of the new row")
