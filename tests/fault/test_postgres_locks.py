"""Several processes lock the rows of runs and their concurrency keys in the same order, so none waits in a circle.

The server looks for deadlocks after 5 ms, and logs each that it finds. By default it looks after a second, and the
commits wait for so long.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from agent_runtime_core._engines.base import Guard, Op
from agent_runtime_core._journal.record import Record
from agent_runtime_core.errors import LeaseLost
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.limits import RateLimit
from agent_runtime_core.queue import get_queue
from agent_runtime_core.queue.pools import PoolLimit
from agent_runtime_core.queue.records import RowChanged, RunRow, RunUpdate
from agent_runtime_core.state import get_state_store
from tests.support.postgres_servers import PostgresServer

OBJECTS = 6


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer(deadlock_timeout="5ms") as server:
        yield server


class Together:
    """One of several processes that write to the same few runs and keys."""

    def __init__(self, url: str, number: int, known: list[str]) -> None:
        # Another URL of the same database: another engine, as in another process.
        place = f"{url}&fallback_application_name=p{number}"
        self.queue, self.bus = get_queue("postgres", url=place), get_event_bus("postgres", url=place)
        self.chance, self.known, self.name = random.Random(number), known, f"w{number}"
        self.state = get_state_store("postgres", url=place)
        self.claimed: list[RunRow] = []
        self.records = Counter[str]()
        self.done = 0

    async def close(self) -> None:
        await self.state.close()
        await self.bus.close()
        await self.queue.close()

    async def work(self, rounds: int) -> None:
        for _ in range(rounds):
            # What is committed at the same time is one transaction.
            many = [self.once() for _ in range(self.chance.choice((1, 2, 4, 12)))]
            for result in await asyncio.gather(*many, return_exceptions=True):
                if isinstance(result, BaseException) and not isinstance(result, LeaseLost | RowChanged):
                    raise result
                self.done += 1

    def some(self) -> str:
        return self.chance.choice(self.known[-24:])

    async def once(self) -> None:
        match self.chance.randrange(12):
            case 0 | 1:
                await self._submit()
            case 2:
                self.claimed += await self.queue.claim_rows(self.name, 60, limit=16)
            case 3:
                await self.queue.post(self.some(), "signal", "go", "null")
            case 4:
                await self.queue.cancel(self.some())
            case 5:
                await self.bus.publish(self.some(), "custom.note", {})
            case 6:
                live = [(row.run_id, row.claim_id) for row in self.claimed]
                self.chance.shuffle(live)
                await self.queue.commit(None, [Op("queue.beat", (live, self.queue.lease_now() + 60))])
            case 7:
                await asyncio.gather(*(self._settle() for _ in range(6)))
            case 8:
                await asyncio.gather(*map(self._step, self.chance.sample(self.claimed, min(6, len(self.claimed)))))
            case 9 | 10:
                await asyncio.gather(*(self._reserve() for _ in range(3)))
            case _:
                await asyncio.gather(*(self._end_and_claim() for _ in range(3)))

    def _pools(self) -> list[str]:
        return sorted(self.chance.sample(["p", "q", "r"], self.chance.choice((1, 2))))

    async def _reserve(self) -> None:
        if not self.claimed:
            return
        row, now, names = self.chance.choice(self.claimed), self.queue.clock.wall(), self._pools()
        id = f"{row.run_id}/{self.chance.randrange(3)}"
        wanted = [PoolLimit(name, "", "day", (-1, 10**9, -1), (0, 1, 1)) for name in names]
        reserve = Op("queue.reserve", (id, wanted, now, False))
        await self.queue.commit(Guard(row.run_id, row.claim_id), [reserve])
        spend = Op("queue.spend", (names, id, (0, 1, 1), now))
        await self.queue.commit(Guard(row.run_id, row.claim_id), [self._record(row, "done"), spend])

    def _record(self, row: RunRow, kind: str) -> Op:
        self.records[row.claim_id] += 1
        number = self.records[row.claim_id] + 1000 * row.crashes  # after the records of earlier claims
        record = Record(number, kind, "s", "s", 1, row.claim_id, 1.0, nev=1)
        return Op("journal.append", (row.run_id, record))

    async def _step(self, row: RunRow) -> None:
        await self.queue.commit(Guard(row.run_id, row.claim_id), [self._record(row, "done")])

    async def _end_and_claim(self) -> None:
        if not self.claimed:
            return
        row = self.claimed.pop(self.chance.randrange(len(self.claimed)))
        how = self.queue.unchanged_update(row, row.claim_id)._replace(status="succeeded")
        claim = Op("queue.claim", (self.queue.claim_request(self.name, 60, ["a"], 1, ready_only=True),))
        ops = [self._record(row, "ended"), Op("queue.settle", (row.run_id, how)), claim]
        given_back = Op("queue.give_back", (self._pools(), f"{row.run_id}/", self.queue.clock.wall()))
        ops.insert(self.chance.randrange(3), given_back)
        self.claimed += (await self.queue.commit(Guard(row.run_id, row.claim_id), ops))[-1]

    async def _submit(self) -> None:
        key = f"key{self.chance.randrange(4)}" if self.chance.random() < 0.7 else None
        unique = f"once{self.chance.randrange(10_000)}" if self.chance.random() < 0.2 else None
        parent = self.some() if self.known and self.chance.random() < 0.5 else None
        row = self.queue.new_row(
            None, "a", {}, {}, concurrency_key=key, idempotency_key=unique, parent_run_id=parent,
            delay=self.chance.choice((0, 0, 0.001)), concurrency_limit=self.chance.choice((1, 1, 3)),
            rate_limit=self.chance.choice((None, None, RateLimit(200, per=1.0, key="x"))),
            turn=self.chance.choice((None, None, "t", "u")),
        )  # fmt: skip
        self.known.append((await self.queue.insert(row)).run_id)

    async def _settle(self) -> None:
        if not self.claimed:
            return
        row = self.claimed.pop(self.chance.randrange(len(self.claimed)))
        status = self.chance.choice(("succeeded", "succeeded", "pending", "waiting", "failed"))
        how: RunUpdate = self.queue.unchanged_update(row, row.claim_id)._replace(status=status)
        if status == "waiting":
            how = how._replace(due_at=self.queue.clock.wall() + 0.002)
        # As the end of a run: with a message to its caller, and with messages to runs that it has called.
        others = [self.some() for _ in range(self.chance.randrange(3))]
        if row.parent_id is not None:
            others.append(row.parent_id)
        posts = [self.queue.post_op(other, "child", row.run_id, "null") for other in others if other != row.run_id]
        await self.queue.settle(row.run_id, how, posts)


def deadlocks(server: PostgresServer) -> list[str]:
    text = (server.folder / "log").read_text()
    return [line for line in text.splitlines() if "deadlock detected" in line or "lock timeout" in line]


async def contend(server: PostgresServer, schema: str, rounds: int) -> None:
    known: list[str] = []
    before = len(deadlocks(server))
    async with contextlib.AsyncExitStack() as stack:
        all_of_them = [Together(f"{server.url}?schema={schema}", n, known) for n in range(OBJECTS)]
        for each in all_of_them:
            stack.push_async_callback(each.close)
        await all_of_them[0]._submit()
        await asyncio.gather(*(each.work(rounds) for each in all_of_them))
        assert sum(each.done for each in all_of_them) > OBJECTS * rounds
    assert deadlocks(server)[before:] == []


@pytest.mark.postgres
async def test_no_transaction_waits_for_one_that_waits_for_it(server: PostgresServer) -> None:
    await contend(server, "short", 40)


@pytest.mark.postgres
@pytest.mark.slow
async def test_no_transaction_waits_for_one_that_waits_for_it_longer(server: PostgresServer) -> None:
    await contend(server, "long", 400)
