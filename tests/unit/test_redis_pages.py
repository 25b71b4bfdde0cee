"""Long answers of a Redis server come in parts, each of so much text: none of them takes the time that all would."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("redis")

from agent_runtime_core._engines.base import Op
from agent_runtime_core._engines.redis.engine import RedisEngine
from agent_runtime_core._journal.record import DONE, ENDED, Record
from agent_runtime_core.events.redis import RedisEventBus
from agent_runtime_core.queue.records import RunFilter
from agent_runtime_core.queue.redis import RedisQueue
from agent_runtime_core.queue.redis_find import PAGE
from agent_runtime_core.state.redis import RedisStateStore

pytestmark = pytest.mark.redis

RUN = "00000000-0000-4000-8000-000000000001"
LARGE = 300_000
PART = 1_000_000 + LARGE + 10_000  # characters, at most


class Answers(list[int]):
    """The lengths of all answers from now on; none is longer than a part may be, and there are several."""

    def check(self) -> None:
        assert len(self) > 2
        assert max(self) <= PART
        self.clear()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    lengths, tell = Answers(), RedisEngine._set_outcome

    def telling(self: RedisEngine, call: Any, answer: bytes) -> None:
        lengths.append(len(answer))
        tell(self, call, answer)

    monkeypatch.setattr(RedisEngine, "_set_outcome", telling)
    return lengths


def large(n: int) -> str:
    return f'"{n}{"x" * LARGE}"'


async def test_a_journal_of_large_results(redis_url: str, answers: Answers) -> None:
    state = RedisStateStore(redis_url)
    try:
        asked = [Record(n, DONE, "s", str(n), result=large(n) if n % 2 else "1", nev=n % 3) for n in range(40)]
        for record in asked:
            await state.commit(None, [Op("journal.append", (RUN, record))])
        answers.clear()
        found = await state.records(RUN)
        answers.check()
        assert [record._replace(ev=-1) for record in found] == asked
        assert await state.ending(RUN) is None
        answers.check()
        last = Record(40, ENDED, "failed")
        for record in (last, *(record._replace(seq=41 + n) for n, record in enumerate(asked))):
            await state.commit(None, [Op("journal.append", (RUN, record))])
        answers.clear()
        ending = await state.ending(RUN)
        assert ending is not None
        assert ending.seq == 40
        answers.check()
    finally:
        await state.close()


@pytest.mark.parametrize("published", [LARGE, 10])
@pytest.mark.parametrize("recorded", [LARGE, 10])
async def test_events_that_were_published_and_recorded(
    published: int, recorded: int, redis_url: str, answers: Answers
) -> None:
    bus = RedisEventBus(redis_url)
    try:
        for n in range(20):
            await bus.publish(RUN, "some.event", {"x": "x" * published, "n": n})
            quiet, told = (Record(2 * n + nev, DONE, "s", result=f'"{"x" * recorded}"', nev=nev) for nev in (0, 1))
            await bus.commit(None, [Op("journal.append", (RUN, quiet)), Op("journal.append", (RUN, told))])
        answers.clear()
        for since in (0, 1, 17, 38, 39):
            events = await bus.get_events(RUN, since)
            assert [event.sequence for event in events] == list(range(since, 40))
            assert [event.event_type for event in events if event.sequence % 2 == 0] == ["some.event"] * (
                (40 - since) // 2
            )
        assert max(answers) <= 2 * PART
        assert len(answers) > 5 or LARGE not in (published, recorded)
        assert [event.sequence for event in await bus.get_events(RUN, 3, 5)] == [3, 4, 5, 6, 7]
        followed = []
        async with asyncio.timeout(30):
            async for event in bus.subscribe(RUN, 0):
                followed.append(event.sequence)
                if len(followed) == 40:
                    break
        assert followed == list(range(40))
    finally:
        await bus.close()


async def test_lists_of_large_runs(redis_url: str, answers: Answers) -> None:
    queue = RedisQueue(redis_url)
    try:
        parent = await queue.enqueue(None, "parent", {})
        asked = [
            str((await queue.enqueue(None, "a", {"x": "x" * LARGE}, parent_run_id=parent.run_id)).run_id)
            for _ in range(10)
        ]
        await queue.claim("w", 60, agent_keys=["a"], limit=3)
        answers.clear()
        for wanted in (RunFilter(), RunFilter(("running", "pending")), RunFilter(agent="a")):
            rows = await queue.find(wanted)
            answers.check()
            assert [row.run_id for row in rows if row.agent == "a"] == asked
        assert [row.run_id for row in await queue.children(str(parent.run_id))] == asked
        answers.check()
        assert len(await queue.find(RunFilter(limit=7))) == 7
        assert len(await queue.find(RunFilter(("pending",)))) == 8
        assert await queue.find(RunFilter(agent="b")) == []
    finally:
        await queue.close()


async def test_many_small_children_and_messages(redis_url: str, answers: Answers) -> None:
    queue = RedisQueue(redis_url)
    try:
        parent = str((await queue.enqueue(None, "parent", {})).run_id)
        many = 2 * PAGE + 1
        rows = [queue.new_row(None, "a", {}, parent_run_id=parent) for _ in range(many)]
        await asyncio.gather(*(queue.commit(None, [Op("queue.insert", (row,))]) for row in rows))
        await asyncio.gather(*(queue.post(parent, "signal", "s", str(n)) for n in range(many)))
        answers.clear()
        assert [row.run_id for row in await queue.children(parent)] == [row.run_id for row in rows]
        assert len(answers) == 3
        assert [message.seq for message in await queue.mail(parent)] == list(range(1, many + 1))
        assert [message.seq for message in await queue.mail(parent, many - 3)] == [many - 2, many - 1, many]
        assert await queue.mail(parent, many) == []
        assert await queue.children("nobody") == []
    finally:
        await queue.close()


async def test_a_mailbox_of_large_messages(redis_url: str, answers: Answers) -> None:
    queue = RedisQueue(redis_url)
    try:
        run_id = str((await queue.enqueue(None, "a", {})).run_id)
        for n in range(10):
            await queue.post(run_id, "signal", "s", large(n))
        answers.clear()
        assert [message.payload for message in await queue.mail(run_id)] == [large(n) for n in range(10)]
        answers.check()
    finally:
        await queue.close()
