"""Lists of runs by each filter, in both orders, and counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from ..._engines.base import Op
from ...queue.base import RunQueue
from ...queue.records import (
    IN_DOUBT,
    QUESTION,
    OpenQuestion,
    RunCounts,
    RunFilter,
    RunRow,
    answer_id,
    light,
    open_questions,
)
from ..clock import VirtualClock
from .checks import Cases, same
from .queue_fixtures import Case, Make, claim_new, names, opened, settle

CASES: Cases[Case] = Cases()


async def listed(queue: RunQueue, **wanted: Any) -> str:
    """Return the keys of the agents of the listed runs, newest first, as one string."""
    return "".join(names(await queue.find(RunFilter(**{"newest_first": True, **wanted}))))


async def several(queue: RunQueue, clock: VirtualClock, agents: str, **options: Any) -> list[RunRow]:
    """Enqueue a run for each letter, a second after the one before it."""
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
    await queue.post(row.run_id, QUESTION, name, "{}", request)


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
            same(
                await listed(queue, statuses=statuses, agent=agent, limit=2),
                expected[:2],
                f"the two newest runs of {statuses} and {agent}",
            )


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
        asked = [OpenQuestion("01A", clock.wall(), "plan")]
        clock.advance(0.25)
        await ask(queue, rows["a"], "01B", "price \u2028 of\nit")
        asked.append(OpenQuestion("01B", clock.wall(), "price \u2028 of it"))
        await ask(queue, rows["b"], "01C", f"{IN_DOUBT}pay")
        await ask(queue, rows["a"], "01A", "plan")  # a message with a known id is dropped
        same(open_questions(await queue.require(rows["a"].run_id)), asked, "the questions")
        same(await listed(queue, asking=True), "ba", "the runs with an open question")
        same(await listed(queue, in_doubt=True), "b", "the runs with a step in doubt")
        await queue.post(rows["a"].run_id, "signal", "plan", "1", answer_id("01"))
        await queue.post(rows["a"].run_id, "signal", "plan", "1", "01A")
        await queue.post(rows["a"].run_id, "signal", "plan", "1", answer_id("01A", "x:y"))
        same(open_questions(await queue.require(rows["a"].run_id)), asked[1:], "the questions left")
        await queue.post(rows["b"].run_id, "closed", "", "null", answer_id("01C"))
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
            same(await queue.find(wanted), [light(whole)], "the light rows")
            same(await queue.find(wanted._replace(without_input=True)), [light(whole)], "the light rows without input")


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
        late = (await queue.find(RunFilter(agent="late")))[0]
        oldest = {"a": rows[0].created_at, "b": rows[1].created_at, "late": late.created_at}
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
