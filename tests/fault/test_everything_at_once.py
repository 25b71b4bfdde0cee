"""Workers of two versions, kills, and a store that is away or has a full disk: no run fails, and nothing is done twice.

The long form, 200 runs and an outage of 20 s: pytest tests/fault/test_everything_at_once.py -m slow
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from agent_runtime_core import AgentRunner, RunStatus
from agent_runtime_core.errors import StorageError, UnknownRun
from agent_runtime_core.queue.records import RunFilter
from tests.fault.jobs.deployed import GUARDED, STEPS
from tests.support.processes import Child, lines
from tests.support.redis_servers import RedisServer

log = logging.getLogger("fault")

PATIENCE = 240.0


class Size(NamedTuple):
    """How much of everything there is; times in seconds."""

    runs: int
    outage: float
    kills: int  # before the outage, and as many after it
    every: float  # time between two submitted runs
    lease: float
    restart: float  # until a killed worker is started again
    pause: float  # half the time of a step


SHORT = Size(runs=40, outage=1.0, kills=1, every=0.04, lease=3.0, restart=0.3, pause=0.02)
LONG = Size(runs=200, outage=20.0, kills=3, every=0.15, lease=30.0, restart=5.0, pause=0.1)


# -- stores that go away


class Store(NamedTuple):
    """A store, and how it is away for a while."""

    url: str
    outage: Callable[[Fleet], AbstractAsyncContextManager[None]]


@contextmanager
def sqlite_store(folder: Path) -> Iterator[Store]:
    """A file on a small disk, which another file fills; where no disk can be mounted, files that may not grow."""
    small = folder / "small"
    small.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", small], capture_output=True, check=False
    ).returncode == 0  # fmt: skip

    @asynccontextmanager
    async def full(fleet: Fleet) -> AsyncIterator[None]:
        filler = small / "filler"
        if mounted:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
        else:
            fleet.limit_files(max(each.stat().st_size for each in small.iterdir() if each.is_file()))
        try:
            yield
        finally:
            filler.unlink(missing_ok=True)
            fleet.limit_files(resource.RLIM_INFINITY)

    try:
        yield Store(f"sqlite:///{small}/runs.db", full)
    finally:
        if mounted:
            subprocess.run(["umount", "-l", small], check=True)


@contextmanager
def redis_store(folder: Path) -> Iterator[Store]:
    """A server that is killed and started again."""
    with RedisServer(appendonly="yes", appendfsync="always") as server:

        @asynccontextmanager
        async def away(fleet: Fleet) -> AsyncIterator[None]:
            server.kill()
            try:
                yield
            finally:
                await asyncio.to_thread(server.restart)

        yield Store(server.url, away)


# -- the workers


class Fleet:
    """A worker of each version, which is started again when it is killed."""

    def __init__(self, store: Store, folder: Path, size: Size, stack: ExitStack) -> None:
        self.effects, self.log = folder / "effects", folder / "log"
        self.crashes: Counter[str] = Counter()  # by run: how often a worker was killed that executed it
        self.kills = 0
        self.is_away = False
        self._store, self._size, self._stack = store, size, stack
        self._limit = resource.RLIM_INFINITY
        self._killed: list[str] = []  # workers whose runs were not read yet
        self._workers: dict[str, tuple[str, Child]] = {}
        self._starting: set[asyncio.Task[None]] = set()

    async def start(self, version: str) -> None:
        """Start a worker; again, like a supervisor, if it ends because the store is away."""
        while True:
            name = f"{version}-{self.kills}"  # that of a killed worker is never used again
            how = {
                "url": self._store.url, "version": version, "worker": name,
                "effects": str(self.effects), "log": str(self.log), "pause": self._size.pause,
                "config": {"lease_ttl_seconds": self._size.lease, "max_retries": 1, "park_after": 0.1},
            }  # fmt: skip
            child = self._stack.enter_context(Child("deployed", json.dumps(how)))
            self._workers[version] = name, child
            self._limit_files(child)
            line = await asyncio.to_thread(child.poll_line, 30.0)
            if line == "ready":
                return
            assert line is None
            assert self.is_away, "the worker ends without an outage"
            log.info("worker %s ended with %s", name, await child.aended())
            await asyncio.sleep(0.2)

    async def kill(self, version: str) -> None:
        """Kill a worker, and start its successor."""
        name, child = self._workers[version]
        self.kills += 1
        if self._store.url.startswith("sqlite"):  # others take the runs of a process that has ended
            child.stop_between_commits(self._store.url.removeprefix("sqlite:///"))
            await self._count(name)
            child.kill()
        else:
            child.kill()
            self._killed.append(name)
        start = asyncio.create_task(self._start_later(version))
        self._starting.add(start)

    async def _start_later(self, version: str) -> None:
        await asyncio.sleep(self._size.restart)
        await self.start(version)

    async def count_crashes(self) -> None:
        """Count the runs of killed workers, before others take them."""
        for name in self._killed:
            await self._count(name)
        self._killed.clear()

    async def _count(self, name: str) -> None:
        rows = await retried(lambda: self.client.queue.find(RunFilter(("running",), limit=1000)))
        self.crashes.update(str(row.run_key) for row in rows if row.worker == name)

    def limit_files(self, size: int) -> None:
        """Let no file grow beyond this size."""
        self._limit = size
        for _, child in self._workers.values():
            self._limit_files(child)

    def _limit_files(self, child: Child) -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (self._limit, resource.RLIM_INFINITY))

    async def started(self) -> None:
        """Wait until every worker claims runs."""
        await asyncio.gather(*self._starting)

    def client_on(self) -> AgentRunner:
        self.client = AgentRunner.open(self._store.url)
        return self.client

    async def stop(self) -> None:
        for _, child in self._workers.values():
            child.process.terminate()
        assert [await child.aended() for _, child in self._workers.values()] == [0, 0]


async def retried(call: Callable[[], Any]) -> Any:
    """Repeat a call of a client until the store answers."""
    async with asyncio.timeout(PATIENCE):
        while True:
            try:
                return await call()
            except StorageError:
                await asyncio.sleep(0.05)


async def submitted(fleet: Fleet, size: Size) -> None:
    """Submit runs, one after the other. Half of them wait for their signal."""
    for n in range(size.runs):
        run = f"r{n}"
        await retried(lambda: fleet.client.submit("job" if n % 4 < 2 else "pinned", {}, run_id=run))  # noqa: B023
        if n % 2:
            await retried(lambda: fleet.client.signal(run, "go", message_id=f"go:{run}"))  # noqa: B023
        await asyncio.sleep(size.every)


async def signalled(fleet: Fleet, size: Size) -> None:
    """Send the runs that wait their signal."""
    for n in range(0, size.runs, 2):
        run = f"r{n}"
        while not await retried(lambda: waits(fleet, run)):  # noqa: ASYNC110, B023
            await asyncio.sleep(0.05)
        await retried(lambda: fleet.client.signal(run, "go", message_id=f"go:{run}"))  # noqa: B023


async def waits(fleet: Fleet, run: str) -> bool:
    with contextlib.suppress(UnknownRun):
        return (await fleet.client.queue.require(run)).status not in ("pending", "running")
    return False


async def everything(kind: Callable[[Path], Any], folder: Path, size: Size, seed: int) -> None:
    random, began = Random(seed), time.monotonic()
    with kind(folder) as store, ExitStack() as stack:
        fleet = Fleet(store, folder, size, stack)
        async with fleet.client_on():
            await asyncio.gather(*map(fleet.start, STEPS))
            clients = [asyncio.create_task(each(fleet, size)) for each in (submitted, signalled)]
            for _ in range(size.kills):
                await asyncio.sleep(size.runs * size.every * random.uniform(0.1, 0.2))
                await fleet.kill(random.choice(list(STEPS)))
                await fleet.count_crashes()
                await fleet.started()
            async with store.outage(fleet):
                fleet.is_away = True
                await asyncio.sleep(size.outage * 0.5)
                await fleet.kill(random.choice(list(STEPS)))
                await asyncio.sleep(size.outage * 0.5)
            fleet.is_away = False
            await fleet.count_crashes()
            await fleet.started()
            for _ in range(size.kills):
                await asyncio.sleep(size.runs * size.every * random.uniform(0.1, 0.2))
                await fleet.kill(random.choice(list(STEPS)))
                await fleet.count_crashes()
                await fleet.started()
            await asyncio.gather(*clients)
            await check(fleet, size)
            await fleet.stop()
    log.info(
        "%d runs, %d kills of a worker (%d runs in flight), %s away for %g s: 0 failed, in %.0f s",
        size.runs, fleet.kills, fleet.crashes.total(), kind.__name__, size.outage, time.monotonic() - began,
    )  # fmt: skip


async def check(fleet: Fleet, size: Size) -> None:
    told = Counter(line.split()[0] for line in fleet.log.read_text().splitlines() if " is not available," in line)
    assert set(told.values()) <= {1}, "each worker logs the traceback of the outage once"
    for n in range(size.runs):
        run = f"r{n}"
        result = await fleet.client.wait(run, timeout=PATIENCE)
        assert result.status is RunStatus.SUCCEEDED, (run, result.error)
        version = result.final_output["done"][0].split()[0]
        assert result.final_output == {"done": [f"{version} {name}" for part in STEPS[version] for name in part]}
        row = await fleet.client.queue.require(run)
        assert (row.failures, row.crashes, row.attempt) == (0, fleet.crashes[run], 1 + fleet.crashes[run]), run
        done = Counter(lines_of(fleet, run))
        other = {name for name, by in done if by != version}
        first = set() if n % 4 >= 2 else {STEPS[each][0][0] for each in STEPS}
        assert not other or (row.crashes and other <= first), "the other version left the run"
        for name in GUARDED:
            assert done[name, version] == 1, f"{run}: {name} was done {done[name, version]} times"
        assert sum(done.values()) <= len(done) + row.crashes, "only the step of a killed worker is repeated"


def lines_of(fleet: Fleet, run: str) -> list[tuple[str, ...]]:
    return [tuple(line[1:]) for line in lines(fleet.effects) if line[0] == run]


STORES = pytest.mark.parametrize("kind", [sqlite_store, pytest.param(redis_store, marks=pytest.mark.redis)])


@STORES
async def test_everything_at_once(kind: Callable[[Path], Any], tmp_path: Path) -> None:
    await everything(kind, tmp_path, SHORT, 1)


@pytest.mark.slow
@STORES
async def test_everything_at_once_with_200_runs(kind: Callable[[Path], Any], tmp_path: Path) -> None:
    await everything(kind, tmp_path, LONG, 1)
