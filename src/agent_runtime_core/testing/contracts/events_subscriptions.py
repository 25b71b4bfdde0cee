"""Subscriptions of event buses: replay, live events, concurrent subscribers, unsubscribing and closing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from uuid import UUID

from ...errors import StorageClosed
from ...events.base import EventBus
from .checks import TRIES, Cases, refused, same, turns
from .events_fixtures import OTHER, RUN, Case, Make, fill, opened, sequences, take

CASES: Cases[Case] = Cases()

READY = 0.1  # seconds after its first read within which a subscription must receive live events


@CASES
async def a_subscription_is_live_within_a_tenth_of_a_second(make: Make) -> None:
    async with opened(make) as bus:
        for n in range(TRIES):
            found = await _first_live(bus, UUID(int=n + 1))
            if found == [2, 3]:
                break
        same(found, [2, 3], "the events of a live subscription")


async def _first_live(bus: EventBus, run_id: UUID) -> list[int]:
    """The first two live events of a subscription, published at least READY seconds after its start: 2 and 3."""
    await fill(bus, 2, run_id=run_id)
    follower = asyncio.create_task(take(bus.subscribe(run_id), 2))
    first = 2
    while not follower.done():
        await asyncio.wait([follower], timeout=READY)
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
        await asyncio.sleep(READY)
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
        await asyncio.sleep(READY)
        await bus.close()
        with refused(StorageClosed, "a subscriber of a closed bus"):
            await waiting
        with refused(StorageClosed, "publishing on a closed bus"):
            await bus.publish(RUN, "tick", {})
        with refused(StorageClosed, "reading a closed bus"):
            await bus.get_events(RUN)
        await bus.close()
