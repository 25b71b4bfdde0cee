"""Conformance tests for event buses. Run one of `CASES` with `await case(make)`, or all with `await check(make)`.

`make()` returns a new and empty bus. A failing case raises AssertionError, or the unexpected error of the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import itertools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from decimal import Decimal
from typing import Any
from uuid import UUID

from ..._engines.base import FORGET, INSTALL, Guard, Op, end_fence
from ...errors import InvalidArgument, LeaseLost, StorageClosed, UnserialisableResult
from ...events.base import DELETE, PUBLISH, TRIM, EventBus
from ...events.event import Event
from .checks import CONTENTS, TRIES, Cases, cancelled_while_it_writes, keeps_the_loop_free, opened, refused, same, turns
from .races import EVENTS

__all__ = ["CASES", "Case", "Make", "check"]

Make = Callable[[], EventBus]
Case = Callable[[Make], Awaitable[None]]

CASES: Cases[Case] = Cases(several=EVENTS)
check: Callable[..., Awaitable[None]] = CASES.check

RUN = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2a01")
OTHER = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2a02")


async def fill(bus: EventBus, count: int, first: int = 0, run_id: UUID = RUN) -> None:
    """Publish `count` events in one commit."""
    events = [(f"e{n}", "tick", {"n": n}) for n in range(first, first + count)]
    await bus.commits.commit(None, [bus.publishing(run_id, events)])


async def take(events: AsyncGenerator[Event, None], count: int) -> list[Event]:
    found: list[Event] = []
    async for event in events:
        found.append(event)
        if len(found) == count:
            break
    return found


def sequences(events: Sequence[Event]) -> list[int]:
    return [event.sequence for event in events]


#: Each differs from the next only beyond Latin-1 or beyond 16 bits.
TEXTS = ("注文", "見積", "\U0001f600a", "\U0001f601a")


@CASES
async def sequences_count_from_zero_for_each_run(make: Make) -> None:
    async with opened(make) as bus:
        published = [await bus.publish(RUN, "tick", {"n": n}) for n in range(3)]
        other = await bus.publish(OTHER, "tick", {})
        same(sequences(published), [0, 1, 2], "sequences of one run")
        same(other.sequence, 0, "first sequence of another run")
        found = await bus.get_events(RUN)
        same(found, published, "the log compared with the results of publish")
        same([event.run_id for event in found], [RUN] * 3, "the run of each event")
        same([event.event_type for event in found], ["tick"] * 3, "the type of each event")
        same(found[0].timestamp.utcoffset(), dt.timedelta(0), "offset of a timestamp")
        same(await bus.get_events(str(OTHER)), [other], "the log by a string run id")


@CASES
async def sequences_have_no_gap_under_32_publishers(make: Make) -> None:
    async with opened(make) as bus:

        async def publish(worker: int) -> list[int]:
            return sequences([await bus.publish(RUN, "tick", {"worker": worker, "n": n}) for n in range(8)])

        answers = await asyncio.gather(*(publish(worker) for worker in range(32)))
        found = await bus.get_events(RUN)
        same(sequences(found), list(range(256)), "sequences in the log")
        for worker, answer in enumerate(answers):
            mine = [event for event in found if event.payload["worker"] == worker]
            same([event.payload["n"] for event in mine], list(range(8)), f"order of publisher {worker}")
            same(sequences(mine), answer, f"the sequences returned to publisher {worker}")


@CASES
async def get_events_is_inclusive_and_limited(make: Make) -> None:
    async with opened(make) as bus:
        same(await bus.get_events(RUN), [], "the log of an unknown run")
        await fill(bus, 3)
        same(sequences(await bus.get_events(RUN, since_sequence=1)), [1, 2], "since 1 of 3")
        same(sequences(await bus.get_events(RUN, 0, limit=2)), [0, 1], "limit 2")
        same(await bus.get_events(RUN, limit=0), [], "limit 0")
        same(await bus.get_events(RUN, 3), [], "since the head")
        same(await bus.get_events(RUN, 2**64), [], "since far past the head")
        for wrong in (-1, True, 1.5):
            with refused(InvalidArgument, f"since_sequence={wrong}"):
                await bus.get_events(RUN, wrong)  # type: ignore[arg-type]


@CASES
async def a_long_log_is_read_whole(make: Make) -> None:
    async with opened(make) as bus:
        await fill(bus, 5000)
        same(sequences(await bus.get_events(RUN)), list(range(5000)), "5,000 events read at once")
        same(sequences(await bus.get_events(RUN, 10, 3000)), list(range(10, 3010)), "3,000 from the tenth")
        same(len(await bus.published(RUN)), 5000, "published ids")


@CASES
async def an_event_id_is_absorbed_and_keeps_its_sequence(make: Make) -> None:
    async with opened(make) as bus:
        first = await bus.publish(RUN, "tick", {}, event_id="a")
        await bus.publish(RUN, "tick", {}, event_id="b")
        again = await bus.publish(RUN, "tick", {}, event_id="a")
        same((first.sequence, again.sequence), (0, 0), "the sequence of a repeated event id")
        mixed = bus.publishing(RUN, [("b", "tick", {}), ("c", "tick", {}), ("c", "tick", {})])
        same(await bus.commits.commit(None, [mixed]), [[1, 2, 2]], "a batch of old and new ids")
        same((await bus.publish(OTHER, "tick", {}, event_id="a")).sequence, 0, "the same id in another run")
        same(sequences(await bus.get_events(RUN)), [0, 1, 2], "the log")
        same(await bus.published(RUN), frozenset("abc"), "published ids")


@CASES
async def an_event_stays_as_it_was_first_published(make: Make) -> None:
    async with opened(make) as bus:
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A"))])
        await fill(bus, 2)
        before = await bus.get_events(RUN)
        other = Op(PUBLISH, (str(RUN), (("e0", "other", '{"n":9}', 9.0),)))
        for guard in (None, Guard(str(RUN), "01A"), Guard(str(RUN), "01")):
            same(await bus.commits.commit(guard, [other]), [[0]], "the sequence of a known id with another event")
        same(await bus.get_events(RUN), before, "the log after the repeats")
        twice = bus.publishing(RUN, [("new", "tick", {"n": 2}), ("new", "other", {"n": 3})])
        same(await bus.commits.commit(None, [twice]), [[2, 2]], "the sequences of one id with two events")
        [kept] = await bus.get_events(RUN, 2)
        same((kept.event_type, kept.payload), ("tick", {"n": 2}), "the stored one of the two events")


@CASES
async def a_deleted_run_is_gone(make: Make) -> None:
    async with opened(make) as bus:
        await fill(bus, 3)
        await bus.commits.commit(None, [Op(INSTALL, (str(OTHER), "01A")), Op(INSTALL, (str(RUN), "01B"))])
        await bus.publish(OTHER, "tick", {}, claim="01A")
        await bus.commits.commit(None, [Op(DELETE, (str(RUN),))])
        await bus.publish(OTHER, "tick", {}, claim="01A")
        same(await bus.get_events(RUN), [], "the log of a deleted run")
        same(await bus.published(RUN), frozenset(), "its published ids")
        same(len(await bus.get_events(OTHER)), 2, "the log of another run")
        same(await bus.head(RUN), 0, "its head")
        with refused(LeaseLost, "installing an older claim after the run was deleted"):
            await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A"))])
        anew = await bus.publish(RUN, "tick", {}, event_id="e1", claim="01B")
        same(anew.sequence, 0, "the first sequence after the run was created again")


@CASES
async def a_log_that_is_trimmed_goes_on(make: Make) -> None:
    async def trimmed(before: int, run_id: UUID = RUN) -> int:
        gone: int = (await bus.commits.commit(None, [Op(TRIM, (str(run_id), before))]))[0]
        return gone

    async with opened(make) as bus:
        await fill(bus, 5)
        await fill(bus, 2, run_id=OTHER)
        same(await trimmed(3), 3, "the number of trimmed events")
        same(sequences(await bus.get_events(RUN)), [3, 4], "the log")
        same(await bus.published(RUN), frozenset({"e3", "e4"}), "its published ids")
        same(await trimmed(3), 0, "the number of events that a repeat trims")
        same(await trimmed(100), 1, "the number of trimmed events when all are older")
        same(sequences(await bus.get_events(RUN)), [4], "the log, which keeps its last event")
        same((await bus.publish(RUN, "tick", {}, event_id="e0")).sequence, 5, "the sequence of a trimmed id, again")
        same((await bus.publish(RUN, "tick", {}, event_id="e4")).sequence, 4, "the sequence of a stored id, again")
        same(await bus.head(RUN), 6, "the head of a log that was trimmed")
        follower = bus.subscribe(RUN, 1)
        same(sequences(await take(follower, 2)), [4, 5], "a subscription from a trimmed sequence")
        await follower.aclose()
        same(sequences(await bus.get_events(OTHER)), [0, 1], "the log of another run")
        same(await trimmed(9, UUID(int=1)), 0, "the number of trimmed events of an unknown run")
        same(await bus.head(UUID(int=1)), 0, "the head of an unknown run")


@CASES
async def payloads_come_back_as_they_were(make: Make) -> None:
    payload: dict[str, Any] = {
        "tree": {"a": [1, 2.5, True, None, "é\ud800"], "$": "a dollar"},
        "uuid": RUN,
        "when": dt.datetime(2026, 11, 21, 12, 30, 1, 5, tzinfo=dt.UTC),
        "day": dt.date(2026, 11, 21),
        "took": dt.timedelta(milliseconds=1500),
        "price": Decimal("1.10"),
        "raw": b"\x00\xff",
        "set": {1, 2},
        "pair": (1, "two"),
    }
    async with opened(make) as bus:
        published = await bus.publish(RUN, "tick", payload)
        [found] = await bus.get_events(RUN)
        [followed] = await take(bus.subscribe(RUN, 0), 1)
        for event in (published, found, followed):
            same(event.payload, payload, "the payload")
            for key, value in payload.items():
                same(type(event.payload[key]), type(value), f"the type of {key}")


@CASES
async def texts_are_kept_whole_and_told_apart(make: Make) -> None:
    async with opened(make) as bus:
        kinds = ["Tick", "tick", "tick ", "ti\u0301ck", "t\u00edck", "x" * 199, *TEXTS]
        ids = ["Id", "id", "id ", "x" * 99 + "1", "x" * 99 + "2", "\u00edd", "i\u0301d", *TEXTS]
        for kind in kinds:
            await bus.publish(RUN, kind, {"text": kind * 2000})
        found = await bus.get_events(RUN)
        same([event.event_type for event in found], kinds, "the types")
        same([event.payload["text"] == event.event_type * 2000 for event in found], [True] * len(kinds), "the payloads")
        published = [await bus.publish(OTHER, "tick", {}, event_id=each) for each in ids]
        same(sequences(published), list(range(len(ids))), "the sequences of similar event ids")
        same(await bus.published(OTHER), frozenset(ids), "published ids")
        # `publish` rejects these types, so the operation is written directly: the bus must store any string.
        broken = ["a\0b", "a\0c", "a\r\nb", "a\nb", "a\rb", "a\x85b", "a\u2028b"]
        run_id = str(UUID(int=1))
        await bus.commits.commit(
            None, [Op(PUBLISH, (run_id, tuple((ascii(kind), kind, "{}", 9.0) for kind in broken)))]
        )
        same([event.event_type for event in await bus.get_events(run_id)], broken, "types with a NUL or a line end")


@CASES
async def payloads_keep_the_order_of_their_keys_and_the_form_of_their_numbers(make: Make) -> None:
    async with opened(make) as bus:
        for n, text in enumerate((CONTENTS[0], '{"z":1.0,"b":100000000000000000000.0,"aa":"\\u0000"}')):
            await bus.commits.commit(None, [Op(PUBLISH, (str(RUN), ((f"e{n}", "tick", text, 9.0),)))])
            [event] = await bus.get_events(RUN, n)
            same(
                json.dumps(event.payload, separators=(",", ":")),
                json.dumps(json.loads(text), separators=(",", ":")),
                "a payload",
            )


@CASES
async def the_event_loop_goes_on_while_a_commit_waits(make: Make) -> None:
    async with opened(make) as bus:
        numbers = itertools.count()

        async def publish(count: int) -> None:
            run_id = UUID(int=next(numbers))
            await fill(bus, count, run_id=run_id)
            await bus.get_events(run_id)

        await keeps_the_loop_free(publish, 1000, "events")


@CASES
async def an_id_is_known_however_long_ago_it_was_published(make: Make) -> None:
    async with opened(make) as bus:
        await fill(bus, 3000)
        same((await bus.publish(RUN, "tick", {}, event_id="e0")).sequence, 0, "the first event published again")
        same(len(await bus.get_events(RUN)), 3000, "the number of events")


@CASES
async def a_payload_is_no_alias_of_the_callers(make: Make) -> None:
    async with opened(make) as bus:
        payload = {"items": [1]}
        published = await bus.publish(RUN, "tick", payload)
        payload["items"].append(2)
        published.payload["items"].append(3)
        [found] = await bus.get_events(RUN)
        same(found.payload, {"items": [1]}, "the stored payload")


@CASES
async def what_cannot_be_stored_is_refused_and_nothing_written(make: Make) -> None:
    async with opened(make) as bus:
        for payload in ({"x": object()}, {"x": float("nan")}, {1: "x"}):
            with refused(UnserialisableResult, f"payload {payload!r}"):
                await bus.publish(RUN, "tick", payload)  # type: ignore[arg-type]
        with refused(InvalidArgument, "a payload that is not a dict"):
            await bus.publish(RUN, "tick", [1])  # type: ignore[arg-type]
        for wrong in ("", "a\0b", "x" * 300):
            with refused(InvalidArgument, f"event type {wrong!r}"):
                await bus.publish(RUN, wrong, {})
        with refused(InvalidArgument, "an empty run id"):
            await bus.publish("", "tick", {})
        same(await bus.get_events(RUN), [], "the log")
        same((await bus.publish(RUN, "tick", {})).sequence, 0, "the first sequence")


@CASES
async def a_stale_claim_is_refused(make: Make) -> None:
    async with opened(make) as bus:
        with refused(LeaseLost, "a claim that was never installed"):
            await bus.publish(RUN, "tick", {}, claim="01A")
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A"))])
        await bus.publish(RUN, "tick", {}, claim="01A", event_id="mine")
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01B"))])
        with refused(LeaseLost, "a superseded claim"):
            await bus.publish(RUN, "tick", {}, claim="01A", event_id="late")
        with refused(LeaseLost, "installing an older claim"):
            await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A"))])
        repeated = await bus.publish(RUN, "tick", {}, claim="01A", event_id="mine")
        same(repeated.sequence, 0, "the repeat of an applied write")
        same((await bus.publish(RUN, "tick", {}, claim="01B")).sequence, 1, "a write under the current claim")
        same((await bus.publish(RUN, "tick", {})).sequence, 2, "an administrator's write")
        same(sequences(await bus.get_events(RUN)), [0, 1, 2], "the log")


@CASES
async def every_write_is_refused_under_a_stale_claim(make: Make) -> None:
    async with opened(make) as bus:
        await fill(bus, 3)
        ops = [bus.publishing(RUN, [("late", "tick", {})]), Op(DELETE, (str(RUN),)), Op(TRIM, (str(RUN), 2))]
        ops += [Op(INSTALL, (str(RUN), "01D")), Op(FORGET, (str(RUN),))]

        async def late(claim: str, when: str) -> None:
            for op in ops:
                with refused(LeaseLost, f"{op.name} under a claim {when}"):
                    await bus.commits.commit(Guard(str(RUN), claim), [op])

        await late("01A", "before any claim is installed")
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01B"))])
        await late("01A", "less than the installed one")
        await late("01C", "greater than the installed one")
        same(sequences(await bus.get_events(RUN)), [0, 1, 2], "the log")
        same((await bus.publish(RUN, "tick", {}, claim="01B")).sequence, 3, "a write under the current claim")


@CASES
async def a_claim_counts_for_its_own_run_whichever_is_written(make: Make) -> None:
    async with opened(make) as bus:
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A")), Op(INSTALL, (str(OTHER), "01B"))])
        event = bus.publishing(OTHER, [("a", "tick", {})])
        with refused(LeaseLost, "a write guarded by another run, with a claim id of the written run"):
            await bus.commits.commit(Guard(str(RUN), "01B"), [event])
        same(await bus.get_events(OTHER), [], "the log")
        same(await bus.commits.commit(Guard(str(RUN), "01A"), [event]), [[0]], "a write under a claim of another run")


@CASES
async def a_repeat_is_answered_only_where_all_of_it_was_written(make: Make) -> None:
    async with opened(make) as bus:
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A"))])
        await bus.publish(RUN, "tick", {}, claim="01A", event_id="a")
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01B"))])
        stale, again = Guard(str(RUN), "01A"), bus.publishing(RUN, [("a", "tick", {})])
        same(await bus.commits.commit(stale, [again]), [[0]], "the repeat of an applied commit")
        for what, more in (
            ("an event", bus.publishing(RUN, [("new", "tick", {})])),
            ("a batch of an old event and a new one", bus.publishing(RUN, [("a", "tick", {}), ("new", "tick", {})])),
            ("the deletion of the log", Op(DELETE, (str(RUN),))),
            ("the trimming of the log", Op(TRIM, (str(RUN), 1))),
        ):
            with refused(LeaseLost, f"a repeated commit with {what} added"):
                await bus.commits.commit(stale, [again, more])
        same(sequences(await bus.get_events(RUN)), [0], "the log")
        same(await bus.published(RUN), frozenset("a"), "published ids")


@CASES
async def a_claim_may_be_carried_here_again_and_is_forgotten(make: Make) -> None:
    async with opened(make) as bus:
        install = Op(INSTALL, (str(RUN), "01B"))
        for _ in range(2):  # the first answer was lost
            same(await bus.commits.commit(None, [install]), [True], "the result of installing a claim")
        await bus.publish(RUN, "tick", {}, claim="01B")
        for _ in range(2):
            await bus.commits.commit(None, [Op(FORGET, (str(RUN),))])
        with refused(LeaseLost, "a write after the claim was forgotten"):
            await bus.publish(RUN, "tick", {}, claim="01B")
        same(await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A"))]), [True], "a lesser claim after that")


@CASES
async def a_claim_that_is_superseded_while_it_writes_writes_before_or_not_at_all(make: Make) -> None:
    async with opened(make) as bus:
        for n in range(12):
            run_id, seen = UUID(int=n + 1), list[int]()
            await bus.commits.commit(None, [Op(INSTALL, (str(run_id), "01A"))])

            async def supersede(run_id: UUID = run_id, seen: list[int] = seen, n: int = n) -> None:
                await turns(n // 2)
                await bus.commits.commit(None, [Op(INSTALL, (str(run_id), "01B"))])
                seen += sequences(await bus.get_events(run_id))

            async def write(run_id: UUID = run_id, n: int = n) -> None:
                await turns(n % 2)
                with contextlib.suppress(LeaseLost):
                    await bus.publish(run_id, "tick", {}, claim="01A")

            await asyncio.gather(supersede(), write())
            same(sequences(await bus.get_events(run_id)), seen, "the log after the next claim has read it")


@CASES
async def a_writer_that_is_cancelled_wrote_all_or_nothing(make: Make) -> None:
    async with opened(make) as bus:
        for iterations in range(8):
            run_id, other = UUID(int=iterations + 1), UUID(int=iterations + 101)
            events = [bus.publishing(run_id, [(f"{m}.{n}", "tick", {}) for n in range(3)]) for m in range(2)]
            writing = asyncio.ensure_future(
                bus.commits.commit(None, [*events, bus.publishing(other, [("a", "tick", {})])])
            )
            await turns(iterations)
            writing.cancel()
            await asyncio.wait({writing})
            found = sequences(await bus.get_events(run_id))
            same(found in ([], [*range(6)]), True, f"whether all six events are stored or none, got {found}")
            same(sequences(await bus.get_events(other)), [0] if found else [], "the log of another run in this commit")
            same((await bus.publish(run_id, "tick", {})).sequence, len(found), "the next sequence")


@CASES
async def a_writer_that_is_cancelled_does_not_go_on(make: Make) -> None:
    async with opened(make) as bus:
        await cancelled_while_it_writes(
            lambda number: bus.commits.commit(None, [bus.publishing(UUID(int=number + 1), [("e", "tick", {})])])
        )


@CASES
async def an_end_that_puts_a_fence_behind_itself_may_be_repeated(make: Make) -> None:
    async with opened(make) as bus:
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A"))])
        ops = [bus.publishing(RUN, [("end", "run.succeeded", {})]), end_fence(str(RUN), "01A")]
        guard = Guard(str(RUN), "01A")
        same(await bus.commits.commit(guard, ops), [[0], True], "the result of the commit")
        same(await bus.commits.commit(guard, ops), [[0], True], "the result of the repeated commit")
        with refused(LeaseLost, "a write after the final record"):
            await bus.publish(RUN, "tick", {}, claim="01A")
        with refused(LeaseLost, "installing the claim again after its final record"):
            await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A"))])
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01B"))])
        same(sequences(await bus.get_events(RUN)), [0], "the log")


@CASES
async def a_commit_is_all_or_nothing(make: Make) -> None:
    async with opened(make) as bus:
        await bus.commits.commit(None, [Op(INSTALL, (str(OTHER), "01B"))])
        ops = [bus.publishing(RUN, [("a", "tick", {})]), Op(INSTALL, (str(OTHER), "01A"))]
        with refused(LeaseLost, "a rejected operation"):
            await bus.commits.commit(None, ops)
        same(await bus.get_events(RUN), [], "the log after a refused commit")
        same((await bus.publish(RUN, "tick", {})).sequence, 0, "the first sequence after it")
        await bus.commits.commit(None, [Op(INSTALL, (str(RUN), "01A"))])
        ops = [Op(INSTALL, (str(RUN), "01B")), Op(DELETE, (str(RUN),)), Op(FORGET, (str(RUN),)), ops[-1]]
        for first in range(3):
            with refused(LeaseLost, f"a rejected operation after {ops[first].name}"):
                await bus.commits.commit(None, ops[first:])
            same(len(await bus.get_events(RUN)), first + 1, f"the number of events after the end of {ops[first].name}")
            await bus.publish(RUN, "tick", {}, claim="01A")


READY = 0.1  # seconds after its first read within which a subscription must receive live events


@CASES
async def a_subscription_is_live_within_a_tenth_of_a_second(make: Make) -> None:
    async with opened(make) as bus:
        for n in range(TRIES):
            found = await _first_live(bus, UUID(int=n + 1))
            if found == [2, 3]:
                break
        same(found, [2, 3], "the events of a live subscription")


async def _ready(bus: EventBus, run_id: UUID = RUN) -> float:
    """Return the seconds within which a subscription must be live: more of them on a server that answers late."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await bus.head(run_id)
    return max(READY, 4 * (loop.time() - began))


async def _first_live(bus: EventBus, run_id: UUID) -> list[int]:
    """The first two live events of a subscription, published at least READY seconds after its start: 2 and 3."""
    await fill(bus, 2, run_id=run_id)
    ready = await _ready(bus, run_id)
    follower = asyncio.create_task(take(bus.subscribe(run_id), 2))
    first = 2
    while not follower.done():
        await asyncio.wait([follower], timeout=ready)
        await fill(bus, 2, first, run_id)
        first += 2
    return sequences(await follower)


@CASES
async def replay_goes_over_into_following_without_a_gap(make: Make) -> None:
    async with opened(make) as bus:
        await fill(bus, 100)

        async def publish() -> None:
            for n in range(100, 200):
                await bus.publish(RUN, "tick", {"n": n})
                await asyncio.sleep(0)

        publisher = asyncio.create_task(publish())
        found = await take(bus.subscribe(RUN, since_sequence=40), 160)
        await publisher
        same(sequences(found), list(range(40, 200)), "the replayed and the live events")
        same([event.payload["n"] for event in found], list(range(40, 200)), "their payloads")


@CASES
async def a_late_joiner_misses_nothing(make: Make) -> None:
    async with opened(make) as bus:
        live = asyncio.create_task(take(bus.subscribe(RUN, 0), 3000))
        await fill(bus, 2999)
        late = asyncio.create_task(take(bus.subscribe(RUN, since_sequence=0), 3000))
        await turns()
        await bus.publish(RUN, "tick", {"n": 2999})
        same(sequences(await live), list(range(3000)), "the events of a subscriber from the start")
        same(sequences(await late), list(range(3000)), "the events of a late subscriber")


@CASES
async def a_subscription_from_a_later_sequence_waits_for_it(make: Make) -> None:
    async with opened(make) as bus:
        await fill(bus, 1)
        ahead = asyncio.create_task(take(bus.subscribe(RUN, since_sequence=4), 1))
        from_start = asyncio.create_task(take(bus.subscribe(RUN, since_sequence=0), 6))
        await turns()
        for n in range(1, 6):
            await bus.publish(RUN, "tick", {"n": n})
        same(sequences(await ahead), [4], "a subscription from sequence 4")
        same(sequences(await from_start), list(range(6)), "a concurrent subscription from the start")


@CASES
async def leaving_cleans_up(make: Make) -> None:
    async with opened(make) as bus:
        listening = 0
        listen = bus.listen

        def counted(topic: str, wake: Callable[[], None]) -> Callable[[], None]:
            nonlocal listening
            listening += 1
            stop = listen(topic, wake)

            def stopped() -> None:
                nonlocal listening
                listening -= 1
                stop()

            return stopped

        setattr(bus, "listen", counted)  # noqa: B010 - a checker forbids assigning to a method
        await fill(bus, 3)
        tasks = asyncio.all_tasks()
        async for _ in bus.subscribe(RUN, 0):
            break
        closed = bus.subscribe(RUN, 0)
        await anext(closed)
        await closed.aclose()
        waiting = [asyncio.create_task(take(bus.subscribe(run_id), 1)) for run_id in (RUN, RUN, OTHER)]
        await asyncio.sleep(await _ready(bus))
        same(listening > 0, True, "whether there are listeners while subscriptions wait")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await turns()
        same(asyncio.all_tasks() - tasks, set(), "remaining tasks after unsubscribing")
        same(listening, 0, "remaining listeners after unsubscribing")


@CASES
async def one_follower_leaving_does_not_disturb_the_others(make: Make) -> None:
    async with opened(make) as bus:
        followers = [asyncio.create_task(take(bus.subscribe(RUN, 0), 50)) for _ in range(5)]
        await turns()
        for n in range(50):
            await bus.publish(RUN, "tick", {"n": n})
            if n in (10, 20, 30):
                followers[n // 10].cancel()
        for follower in (followers[0], followers[4]):
            same(sequences(await follower), list(range(50)), "a subscriber that stayed")


@CASES
async def all_followers_see_the_same_order(make: Make) -> None:
    async with opened(make) as bus:
        followers = [asyncio.create_task(take(bus.subscribe(RUN, 0), 60)) for _ in range(2)]

        async def publish(worker: int) -> None:
            for n in range(10):
                await bus.publish(RUN, "tick", {"from": (worker, n)})

        await asyncio.gather(*(publish(worker) for worker in range(6)))
        one, two = [await follower for follower in followers]
        same(one, two, "the events of two subscribers")
        same(one, await bus.get_events(RUN), "their events compared with the log")


@CASES
async def runs_are_followed_apart(make: Make) -> None:
    async with opened(make) as bus:
        runs = [UUID(int=n) for n in range(1, 21)]
        followers = [asyncio.create_task(take(bus.subscribe(run_id, 0), 3)) for run_id in runs]
        await turns()
        for n in range(3):
            for run_id in runs:
                await bus.publish(run_id, "tick", {"n": n})
        for run_id, follower in zip(runs, followers, strict=True):
            found = await follower
            same({event.run_id for event in found}, {run_id}, "the run ids that a subscriber received")
            same(sequences(found), [0, 1, 2], "the events that it received")


@CASES
async def a_slow_follower_holds_nobody_up_and_misses_nothing(make: Make) -> None:
    async with opened(make) as bus:
        slow = bus.subscribe(RUN, 0)
        await fill(bus, 1)
        same((await anext(slow)).sequence, 0, "the first event")
        fast = asyncio.create_task(take(bus.subscribe(RUN, 0), 4000))
        for first in range(1, 4001, 500):
            await fill(bus, 500, first=first)
            await turns()
        same(sequences(await fast), list(range(4000)), "the events of a fast subscriber")
        seen = await take(slow, 3999)
        same(sequences(seen), list(range(1, 4000)), "the events of the slow subscriber")
        same([event.payload["n"] for event in seen], list(range(1, 4000)), "their payloads")
        await slow.aclose()


@CASES
async def a_page_holds_at_most_256_kib(make: Make) -> None:
    lengths = [10, 100_000, 100_000, 100_000, 300_000, 10, 10, 300_000, *[100] * 3000, *[20_000] * 30]
    everything = list(range(len(lengths)))
    async with opened(make) as bus:
        for first in range(0, len(lengths), 500):
            rows = [(f"e{n}", "tick", {"x": "x" * lengths[n]}) for n in everything[first : first + 500]]
            await bus.commits.commit(None, [bus.publishing(RUN, rows)])
        same(sequences(await bus.get_events(RUN)), everything, "the log")
        same(sequences(await bus.get_events(RUN, 2, limit=4)), [2, 3, 4, 5], "4 events from the third")
        same(len(await bus.published(RUN)), len(lengths), "published ids")
        same(sequences(await take(bus.subscribe(RUN, 0), len(lengths))), everything, "the events of a subscription")
        async with contextlib.aclosing(bus.pages(RUN)) as one, contextlib.aclosing(bus.pages(RUN)) as other:
            found: list[int] = []
            async for page in one:
                same(await anext(other) is page, True, "whether two readers at the same sequence share the page")
                size = sum(len(event.payload["x"]) for event in page)
                same(
                    size <= 262_144 or len(page) == 1, True, f"whether {len(page)} events of {size} bytes fit in a page"
                )
                found += sequences(page)
                if len(found) >= len(lengths):
                    break
        same(found, everything, "the events of all pages")


@CASES
async def readers_report_how_far_they_have_read(make: Make) -> None:
    async with opened(make) as bus:
        run, other = str(RUN), str(OTHER)
        await bus.report_reader(run, "one.1", 4)
        await bus.report_reader(run, "two.1", -1)
        await bus.report_reader(run, "one.1", 7)
        found = await bus.readers(run)
        if not bus.stores_readers:
            same(found, {}, "the readers of a bus that stores no reports")
            return
        same(found, {"one.1": 7, "two.1": -1}, "the readers of a run")
        same(await bus.readers(other), {}, "the readers of another run")
        await bus.report_reader(run, "one.1", None)
        await bus.report_reader(run, "never-there", None)
        same(await bus.readers(run), {"two.1": -1}, "the readers after one has stopped")


@CASES
async def closing_ends_subscriptions_and_refuses_more(make: Make) -> None:
    async with opened(make) as bus:
        waiting = asyncio.create_task(take(bus.subscribe(RUN), 1))
        await asyncio.sleep(await _ready(bus))
        await bus.close()
        with refused(StorageClosed, "a subscriber of a closed bus"):
            await waiting
        with refused(StorageClosed, "publishing on a closed bus"):
            await bus.publish(RUN, "tick", {})
        with refused(StorageClosed, "reading a closed bus"):
            await bus.get_events(RUN)
        await bus.close()
