"""Many commits at once: each waits for its turn, and the time limit is for a store that answers nothing."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core._engines import commit_request
from agent_runtime_core._engines.base import Guard, Op
from agent_runtime_core._engines.commit_request import CommitRequest, LoopBatch, PendingCommits, resolve
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core.errors import StorageBusy
from agent_runtime_core.queue.sqlite import SQLiteQueue
from tests.support.backends import POSTGRES

TIMEOUT = 6.0


class SlowStore:
    """Answers so many commits in each second of a clock that only it moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, per_second: int) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: self.now)
        self.per_second = per_second
        self.in_line: deque[CommitRequest] = deque()
        self.applied: list[Any] = []
        self.most_in_line = 0
        self.batch = LoopBatch(loop, "the store", lambda: TIMEOUT, self.enqueue)

    def pending(self, loop: asyncio.AbstractEventLoop) -> PendingCommits:
        return self.batch.pending

    def submit(self, request: CommitRequest) -> None:
        self.batch.send(request)

    def enqueue(self, requests: list[CommitRequest]) -> None:
        self.in_line += requests
        self.most_in_line = max(self.most_in_line, len(self.in_line))

    async def commit(self, value: int, guard: Guard | None = None) -> Any:
        return (await CommitRequest(guard, [Op("put", (value,))], self))[0]

    async def serve(self, until: asyncio.Future[Any], answers: int = 1_000_000) -> float:
        """Answer at most so many commits until `until` is done, and return how long that took after the last answer."""
        last = self.now
        while not until.done():
            await asyncio.sleep(0)
            self.now += 1.0
            for _ in range(min(self.per_second, answers, len(self.in_line))):
                request = self.in_line.popleft()
                if not request.timed_out:
                    request.result = [request.ops[0].args[0]]
                    self.applied.append(request.result[0])
                    resolve([request])
                    answers, last = answers - 1, self.now
        return self.now - last


async def test_commits_that_wait_for_earlier_ones_do_not_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_request, "MAX_IN_FLIGHT", 8)
    store = SlowStore(monkeypatch, per_second=2)
    began = store.now
    every = asyncio.gather(*(store.commit(n) for n in range(100)))
    await store.serve(every)
    assert await every == store.applied == list(range(100))
    assert store.now - began > 5 * TIMEOUT
    assert store.most_in_line <= 8
    assert not store.batch.requests
    assert not store.batch.pending.waiting


async def test_a_loop_that_is_busy_before_it_sends_the_first_commit_uses_no_time_of_the_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = SlowStore(monkeypatch, per_second=1)

    async def commit(n: int) -> Any:
        store.now += 1.0  # all of these are in one iteration of the loop
        return await store.commit(n)

    every = asyncio.gather(*(commit(n) for n in range(20)))
    await store.serve(every)
    assert await every == list(range(20))


@pytest.mark.parametrize("answered", [0, 1, 30])
async def test_a_store_that_stops_answering_fails_all_commits_at_once(
    monkeypatch: pytest.MonkeyPatch, answered: int
) -> None:
    monkeypatch.setattr(commit_request, "MAX_IN_FLIGHT", 8)
    store = SlowStore(monkeypatch, per_second=1)
    every = asyncio.gather(*(store.commit(n) for n in range(100)), return_exceptions=True)
    waited = await store.serve(every, answers=answered)
    found = await every
    assert found[:answered] == list(range(answered))
    assert {type(each) for each in found[answered:]} == {StorageBusy}
    assert TIMEOUT < waited < 3 * TIMEOUT, "not a time limit for each eight of them"


async def test_a_later_commit_is_sent_after_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_request, "MAX_IN_FLIGHT", 4)
    store = SlowStore(monkeypatch, per_second=1)
    first = [asyncio.ensure_future(store.commit(n)) for n in range(10)]
    await asyncio.sleep(0)
    first[6].cancel()  # it is in line, and its outcome is still awaited
    every = asyncio.gather(*first, store.commit(10), return_exceptions=True)
    await store.serve(every)
    assert store.applied == list(range(11))
    assert isinstance((await every)[6], asyncio.CancelledError)


@pytest.mark.parametrize("where", ["sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
async def test_many_submits_at_once_are_stored_in_order(
    where: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_request, "MAX_IN_FLIGHT", 8)
    url = str(tmp_path / "runs.db") if where == "sqlite" else request.getfixturevalue(f"{where}_url")
    async with AgentRunner.open(url) as runner:
        ids = await asyncio.gather(*(runner.submit("agent", {"n": n}) for n in range(300)))
        assert [info.run_id for info in await runner.runs(limit=1000)] == ids


async def test_what_waits_for_its_turn_is_committed_before_the_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_request, "MAX_IN_FLIGHT", 8)
    engine = SQLiteEngine.open(tmp_path / "runs.db")
    queue = SQLiteQueue(engine=engine)
    stored = [asyncio.ensure_future(queue.enqueue(None, "agent", {"n": n})) for n in range(100)]
    await asyncio.sleep(0)
    await queue.close()
    await engine.close()
    assert [run.input for run in await asyncio.gather(*stored)] == [{"n": n} for n in range(100)]
