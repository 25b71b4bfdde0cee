"""The clients of event loops: one for each, closed with it."""

from __future__ import annotations

import asyncio
import gc
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent_runtime_core.llm._client_per_loop import PerLoopClients


class Sdk:
    """A client that notes where it was closed, and refuses that in a loop of which it has no connections."""

    def __init__(self) -> None:
        self.home: asyncio.AbstractEventLoop | None = None
        self.closed: list[asyncio.AbstractEventLoop] = []

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed.append(asyncio.get_running_loop())
        if self.home is not None and self.home.is_closed():
            raise RuntimeError("Event loop is closed")


class Made:
    def __init__(self) -> None:
        self.all: list[Sdk] = []
        self.clients = PerLoopClients(self._make)

    def _make(self) -> Sdk:
        self.all.append(Sdk())
        return self.all[-1]

    async def used(self) -> Sdk:
        client: Sdk = await self.clients.here()
        assert [await self.clients.here()] == [client]
        client.home = asyncio.get_running_loop()
        return client


@pytest.fixture
def made() -> Made:
    return Made()


def test_a_loop_that_ends_closes_its_client(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    used = [asyncio.run(made.used()) for _ in range(5)]
    assert used == made.all
    assert [client.closed for client in used] == [[client.home] for client in used]
    assert not made.clients._bound
    assert [record for record in caplog.records if record.name != "asyncio" or record.levelno > logging.DEBUG] == []


def test_of_loops_that_were_just_closed_no_client_is_kept(made: Made) -> None:
    for _ in range(5):
        loop = asyncio.new_event_loop()
        used = loop.run_until_complete(made.used())
        loop.close()
        assert list(made.clients._bound) == [loop]
        assert used.closed == []
    here = asyncio.run(made.used())
    assert not made.clients._bound
    # In the loop that came next, where it raises: what is closed so is at least not closed again when it is collected.
    assert [len(client.closed) for client in made.all] == [1] * 6
    assert here is made.all[-1]


def test_loops_that_go_on_keep_theirs(made: Made) -> None:
    with asyncio.Runner() as first:
        mine = first.run(made.used())
        with ThreadPoolExecutor(1) as another:
            theirs = another.submit(asyncio.run, made.used()).result()
        assert theirs is not mine
        assert (len(theirs.closed), mine.closed) == (1, [])
        assert first.run(made.used()) is mine
    assert mine.closed == [mine.home]


async def test_one_is_closed_by_hand_and_the_next_one_is_another(made: Made) -> None:
    mine = await made.used()
    await made.clients.close()
    await made.clients.close()
    assert mine.closed == [asyncio.get_running_loop()]
    assert await made.used() is not mine


async def test_one_that_was_closed_before_its_use_is_not_given_to_anybody(made: Made) -> None:
    await made.clients.close()
    assert len(made.all[0].closed) == 1
    assert await made.used() is not made.all[0]
    await made.clients.close()
    assert [len(client.closed) for client in made.all] == [1, 1]


async def test_a_loop_that_goes_on_after_it_has_ended_its_generators_gets_another(made: Made) -> None:
    async def ends() -> Sdk:
        mine = await made.used()
        await asyncio.get_running_loop().shutdown_asyncgens()
        assert mine.closed == [mine.home]
        return mine

    loop = asyncio.new_event_loop()
    ended = await asyncio.to_thread(loop.run_until_complete, ends())
    with pytest.warns(ResourceWarning, match="after loop.shutdown_asyncgens"):
        assert await asyncio.to_thread(loop.run_until_complete, made.used()) is not ended
    await asyncio.to_thread(loop.close)


async def test_clients_that_nobody_holds_any_more_are_closed_in_their_loop() -> None:
    made = Made()
    mine = await made.used()
    del made
    gc.collect()
    for _ in range(5):
        await asyncio.sleep(0)
    assert mine.closed == [asyncio.get_running_loop()]


async def test_a_shared_one_is_never_closed() -> None:
    clients = PerLoopClients(Sdk, shared=True)
    assert await clients.here() is clients.first
    await clients.close()
    assert clients.first.closed == []
