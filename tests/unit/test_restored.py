"""A store that was restored from a copy puts guarded steps that the copy may lack in doubt."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, AlreadyDone, RunnerConfig
from agent_runtime_core.cli.main import main
from agent_runtime_core.config import place_of
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.queue import get_queue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner.verification import confirm_restored, mark_restored
from agent_runtime_core.state import get_state_store
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import VirtualClock
from tests.support.redis_servers import RedisServer
from tests.support.runs import Script

PAYMENTS = 50


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new store."""
    if request.param == "redis":
        return str(request.getfixturevalue("redis_url"))
    return f"sqlite:///{tmp_path}/runs.db"


class Bank:
    """What payments have done, whatever happens to the store."""

    def __init__(self) -> None:
        self.paid: list[int] = []

    def pay(self, number: int) -> int:
        self.paid.append(number)
        return number


def opened(url: str, body: Any, clock: VirtualClock | None = None, **more: Any) -> AgentRunner:
    registry = Registry()
    for key, each in {"script": body, **more}.items():
        registry.register(Script(each, key))
    config = RunnerConfig(max_retries=1, park_after=0)
    if clock is None:
        return AgentRunner.open(url, registry=registry, config=config)
    name, where = place_of(url)
    where["clock"] = clock
    backends = get_queue(name, **where), get_event_bus(name, **where), get_state_store(name, **where)
    return AgentRunner(*backends, config, registry=registry)


class SQLiteCopies:
    """Copies a file while it is in use, and restores the copies as new files."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count()
        self.url = f"sqlite:///{folder}/runs.db"

    def take(self) -> Path:
        copy = self._folder / f"copy {next(self._numbers)}.db"
        with closing(sqlite3.connect(self._folder / "runs.db")) as one, closing(sqlite3.connect(copy)) as other:
            one.backup(other)
        return copy

    async def restore(self, copy: Path) -> str:
        restored = copy.with_name(f"restored {copy.name}")
        assert await asyncio.to_thread(main, ["restore", str(copy), str(restored), "--json"]) == 0
        return f"sqlite:///{restored}"

    def close(self) -> None:
        """Leave the files to the folder."""


class RedisCopies:
    """Has a server write snapshots, and starts another server from them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count()
        self._servers = [RedisServer().__enter__() for _ in range(2)]
        self.url = self._servers[0].url

    def take(self) -> Path:
        source = self._servers[0]
        source.ask("SAVE")
        return Path(shutil.copyfile(source.folder / "dump.rdb", self._folder / f"{next(self._numbers)}.rdb"))

    async def restore(self, copy: Path) -> str:
        target = self._servers[1]
        target.kill()
        shutil.copyfile(copy, target.folder / "dump.rdb")
        await asyncio.to_thread(target.restart)
        assert await asyncio.to_thread(main, ["mark-restored", "--url", target.url]) == 0
        return target.url

    def close(self) -> None:
        for server in self._servers:
            server.__exit__(None, None, None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", ["fail", "check"])
@pytest.mark.parametrize("kind", [SQLiteCopies, pytest.param(RedisCopies, marks=pytest.mark.redis)])
async def test_no_payment_happens_twice_silently(
    tmp_path: Path, kind: Callable[[Path], Any], seed: int, policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy is taken at random moments of a run with 50 payments, restored after the run has ended, and resumed."""
    bank, taken, clock = Bank(), list[Path](), VirtualClock()
    moments = {*random.Random(seed).sample(range(PAYMENTS), 10)}
    with closing(kind(tmp_path)) as copies:

        async def body(ctx: Any) -> None:
            for number in range(PAYMENTS):
                if number in moments and not resumed:
                    await ctx.step(f"before {number}", int)
                    taken.append(copies.take())

                async def check(number: int = number) -> Any:
                    return AlreadyDone(number) if number in bank.paid else None

                how: Any = "fail" if policy == "fail" else check
                await ctx.step("pay", bank.pay, number, key=str(number), on_in_doubt=how)

        resumed = False
        async with opened(copies.url, body, clock) as runner:
            await runner.submit("script", {}, run_id="r")
            await runner.run_once()
        assert bank.paid == [*range(PAYMENTS)]
        assert len(taken) == 10
        resumed = True
        for copy in taken:
            clock.advance(3600)  # the lease that the copy shows has ended
            async with opened(await copies.restore(copy), body, clock) as runner:
                for _ in range(3):
                    await runner.run_once()
                result = await runner.wait("r", timeout=10)
            if policy == "fail":
                assert result.error is not None
                assert result.error.type == "StepInDoubt"
            else:
                assert result.status is RunStatus.SUCCEEDED
            assert bank.paid == [*range(PAYMENTS)]
    capsys.readouterr()


async def test_a_person_confirms_that_nothing_more_had_happened(url: str) -> None:
    bank = Bank()

    async def body(ctx: Any) -> None:
        await ctx.wait_for_signal("go")
        for number in range(2):
            await ctx.step("pay", bank.pay, number, key=str(number), on_in_doubt="fail")

    async with opened(url, body) as runner:
        await runner.submit("script", {}, run_id="r")
        await runner.run_once()
        assert await mark_restored(runner) == 1
        await runner.signal("r", "go")
        await runner.run_once()
        failed = (await runner.wait("r", timeout=10)).error
        assert failed is not None
        assert "perhaps done after the copy from which the store was restored" in failed.message
        assert bank.paid == []
        assert await confirm_restored(runner, "r", by="ada")
        await runner.run_once()
        assert (await runner.wait("r", timeout=10)).status is RunStatus.SUCCEEDED
        assert bank.paid == [0, 1]
        events = [each.event_type async for each in runner.stream("r")]
        assert events.count("run.restored") == 1


async def test_a_live_run_is_confirmed_and_a_new_run_needs_no_confirmation(url: str) -> None:
    bank = Bank()

    async def body(ctx: Any) -> None:
        await ctx.wait_for_signal("go")
        await ctx.step("pay", bank.pay, 0, on_in_doubt="fail")

    async with opened(url, body) as runner:
        for name in ("old", "new"):
            await runner.submit("script", {}, run_id=name)
            await runner.run_once()
            if name == "old":
                await mark_restored(runner)
                await runner.run_once()
                assert not await confirm_restored(runner, "old")
            await runner.signal(name, "go")
            await runner.run_once()
            assert (await runner.wait(name, timeout=10)).status is RunStatus.SUCCEEDED
    assert bank.paid == [0, 0]


async def test_children_of_a_marked_run_are_in_doubt_too(url: str) -> None:
    """The run may have called the child after the copy, and the child may have paid."""
    bank = Bank()

    async def child(ctx: Any) -> None:
        await ctx.step("pay", bank.pay, 0, on_in_doubt="fail")

    async def body(ctx: Any) -> None:
        await ctx.wait_for_signal("go")
        await ctx.call("child", {})

    async with opened(url, body, child=child) as runner:
        await runner.submit("script", {}, run_id="r")
        await runner.run_once()
        await mark_restored(runner)
        await runner.signal("r", "go")
        while await runner.run_once():
            pass
        assert bank.paid == []
        [run] = await runner.runs(agent="child")
        assert run.status is RunStatus.FAILED


async def test_a_store_with_living_workers_is_not_marked(url: str) -> None:
    async def body(ctx: Any) -> None:
        return None

    async with opened(url, body) as runner:
        runner._process.slots = 1
        await runner._process.renew()
        with pytest.raises(InvalidArgument, match="the store must have no living workers, got worker-1"):
            await mark_restored(runner)
        assert await mark_restored(runner, force=True) == 0


def test_the_commands(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def submitted() -> None:
        async with AgentRunner.open(url) as runner:
            await runner.submit("script", {}, run_id="r")

    asyncio.run(submitted())
    assert main(["mark-restored", "--url", url]) == 0
    assert main(["restored", "r", "--url", url]) == 0
    assert main(["restored", "r", "--confirm", "--url", url]) == 0
    out = capsys.readouterr().out
    assert "1 run that had not ended marked" in out
    assert "run r may have done more than the store knows" in out
    assert "run r lacks nothing more" in out
    if url.startswith("redis"):
        assert main(["backup", url, str(tmp_path / "copy.db")]) == 2
        assert "FILE must be a SQLite file" in capsys.readouterr().err
        return
    assert main(["backup", str(tmp_path / "runs.db"), str(tmp_path / "copy.db")]) == 0
    assert main(["restore", str(tmp_path / "copy.db"), str(tmp_path / "runs.db")]) == 2
    assert "FILE must be a file that does not exist" in capsys.readouterr().err
