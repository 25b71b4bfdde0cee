"""Event logs: order, deduplication, exact payloads, deletion and trimming."""

from __future__ import annotations

import asyncio
import datetime as dt
from decimal import Decimal
from typing import Any
from uuid import UUID

from ..._engines.base import INSTALL, Guard, Op
from ...errors import InvalidArgument, LeaseLost, UnserialisableResult
from ...events.base import DELETE, PUBLISH, TRIM
from .checks import Cases, refused, same
from .events_fixtures import OTHER, RUN, Case, Make, fill, opened, sequences, take

CASES: Cases[Case] = Cases()

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
        same(
            (await bus.publish(RUN, "tick", {}, event_id="e0")).sequence,
            5,
            "the sequence of a trimmed id published again",
        )
        same(
            (await bus.publish(RUN, "tick", {}, event_id="e4")).sequence,
            4,
            "the sequence of a stored id published again",
        )
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
