"""Connections to Redis that are cut, callers that are cancelled: nothing is lost, doubled or taken for another's.

The long forms, 500 runs and 10,000 operations: pytest tests/fault/test_redis_cuts.py -m slow -o log_cli=true
--log-cli-level=INFO
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, TypeVar

import pytest

from agent_runtime_core import AgentRunner, RunStatus
from agent_runtime_core._core.lazy_import import load
from agent_runtime_core._engines.base import Op
from agent_runtime_core._engines.redis import connection as redis_line
from agent_runtime_core._engines.redis.connection import Connection, NoReply, NotSent, connection
from agent_runtime_core._engines.redis.engine import RedisEngine
from agent_runtime_core._engines.redis.script import RedisOperationSet, prepared
from agent_runtime_core._engines.redis.url import redis_place
from agent_runtime_core.errors import StorageBusy
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner.backends import open_url
from agent_runtime_core.steps import Step, StepExecutor
from tests.support.fault_runs import Agent, consistent, settings, until
from tests.support.redis_proxy import Cut
from tests.support.redis_servers import RedisServer, free_port

pytestmark = pytest.mark.redis

log = logging.getLogger("fault")

T = TypeVar("T")

WHENS = ("before", "middle", "after")
STEPS = 4


async def again(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until there is an answer, as anybody does who is told that repeating is safe."""
    for _ in range(5):
        with contextlib.suppress(StorageBusy):
            return await ask()
    return await ask()


class Seed:
    """One run over a connection that is cut a few times at random requests."""

    def __init__(self, number: int, proxy: Cut, server: RedisServer) -> None:
        self.random = Random(number)
        self.proxy = proxy
        self.prefix = f"?prefix=cut{number}"
        self.direct = server.url + self.prefix
        self.effects: Counter[str] = Counter()

    def runner(self, url: str) -> AgentRunner:
        agents = Registry()
        agents.register(Agent("a", self.code))
        queue, bus, state = open_url(url)
        return AgentRunner(queue, bus, state, settings(park_after=0, lease_ttl_seconds=2.0), registry=agents)

    async def code(self, ctx: Any) -> Any:
        def effect(name: str) -> Callable[..., Any]:
            def act(*_: Any) -> int:
                self.effects[name] += 1
                return len(self.effects)

            return act

        await ctx.emit("begun", {})
        told = await ctx.wait_for_signal("go")
        steps = [Step(f"s{i}", effect(f"s{i}")) for i in range(STEPS)]
        await StepExecutor(ctx).run(steps)
        for i in range(STEPS):
            await ctx.step(f"t{i}", effect(f"t{i}"))
            await ctx.checkpoint({"i": i})
            await ctx.emit("said", {"i": i})
        return told

    async def go(self) -> None:
        far = self.runner(f"{self.proxy.url}{self.prefix}")
        near = self.runner(self.direct)
        try:
            for _ in range(self.random.randint(1, 3)):
                self.proxy.cut(self.random.choice(WHENS), self.random.randint(1, 40))  # type: ignore[arg-type]
            run_id = await again(lambda: far.submit("a", {}, run_id="x"))
            working = asyncio.create_task(far.run_loop(0.05, handle_signals=False))
            sent = [await again(lambda: far.signal(run_id, "go", {"n": 1}, message_id="m"))]
            result = await near.wait(run_id, timeout=20)
            far.stop()
            await working
            assert sent == [True]
            await self.check(near, run_id, result)
        finally:
            await far.close()
            await near.close()
            self.proxy._call(self.forget())

    async def forget(self) -> None:
        self.proxy._plan.clear()

    async def check(self, runner: AgentRunner, run_id: Any, result: Any) -> None:
        assert (result.status, result.final_output) == (RunStatus.SUCCEEDED, {"value": {"n": 1}})
        assert len(await runner.runs()) == 1
        assert len(await runner.queue.mail(str(result.run_id or run_id))) == 1, "the message is there once"
        await consistent(runner, run_id)
        assert set(self.effects) == {f"{kind}{i}" for kind in "st" for i in range(STEPS)}
        twice = [name for name, count in self.effects.items() if count > 1]
        crashes = (await runner.get_run(run_id)).attempt - 1
        assert len(twice) <= crashes, f"ran again without need: {twice}"
        records = Counter(r.name for r in await runner.state_store.records(run_id) if r.kind == "done")
        assert {name: count for name, count in records.items() if name in self.effects} == dict.fromkeys(
            self.effects, 1
        )
        said = Counter(e.payload["i"] for e in await runner.event_bus.get_events(run_id) if e.event_type == "said")
        assert said == dict.fromkeys(range(STEPS), 1)
        assert await runner.state_store.get_checkpoint(run_id) == {"i": STEPS - 1}


async def cut_runs(server: RedisServer, seeds: range) -> None:
    redone = 0
    with Cut(server.port) as proxy:
        for number in seeds:
            seed = Seed(number, proxy, server)
            try:
                await seed.go()
            except BaseException as error:
                error.add_note(f"seed {number}")
                raise
            redone += sum(seed.effects.values()) - len(seed.effects)
        cuts = proxy.cuts
    log.info("%d runs, %d cuts: 0 lost, 0 doubled, %d steps ran again", len(seeds), cuts, redone)
    assert cuts >= len(seeds)


async def test_runs_over_connections_that_are_cut(redis_server: RedisServer) -> None:
    await cut_runs(redis_server, range(30))


@pytest.mark.slow
async def test_500_runs_over_connections_that_are_cut(redis_server: RedisServer) -> None:
    await cut_runs(redis_server, range(1000, 1500))


# -- cancelling

ECHO = RedisOperationSet(
    "echo",
    {},
    script="""
ops['echo'] = function(n)
  write('HSET', P .. 'echo', n, n)
  return n
end
ops['count'] = function()
  return call('HLEN', P .. 'echo')
end
""",
)


async def cancelled(server: RedisServer, count: int) -> None:
    """Operations of which every third is cancelled at any moment; each answer has to be its own."""
    random = Random(count)
    with Cut(server.port, delay=0.001) as proxy:
        engine = RedisEngine.open(f"{proxy.url}?prefix=cancelled{count}")
        engine.add(ECHO)
        told: Counter[str] = Counter()

        async def ask(n: int) -> None:
            task = asyncio.ensure_future(engine.commit(None, [Op("echo", (str(n),))]))
            if n % 3 == 0:
                await asyncio.sleep(random.random() * 0.004)
                task.cancel()
            try:
                assert await task == [str(n)]
                told["answered"] += 1
            except asyncio.CancelledError:
                told["cancelled"] += 1

        for first in range(0, count, 50):
            await asyncio.gather(*(ask(n) for n in range(first, min(first + 50, count))))
        landed = await engine.ask("count")
        await engine.close()
        connections = proxy.connections
    log.info("%d operations, %s: 0 mismatched, %d connections", count, dict(told), connections)
    assert landed == count, "whoever was cancelled knows that it landed"
    assert told["cancelled"] >= count / 10
    assert connections <= 2, "the first one, and one for the farewell to the bell"


async def test_a_cancelled_caller_takes_no_answer_of_another(redis_server: RedisServer) -> None:
    await cancelled(redis_server, 500)


@pytest.mark.slow
async def test_10000_operations_and_cancellations(redis_server: RedisServer) -> None:
    await cancelled(redis_server, 10_000)


async def test_answers_are_nobody_elses_when_connections_are_cut_under_load(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cuts at any moment, with several calls under way: who is answered, is answered with what was asked."""
    monkeypatch.setattr(redis_line, "ANSWER", 0.5)
    for n in range(5):  # until some calls met a cut and some did not
        told, landed = await under_load(redis_server, f"load{n}")
        log.info("cuts under load: %s, %d landed", dict(told), landed)
        assert told["answered"] <= landed <= 3000
        if told["answered"] > 2000 and told["busy"] > 0:
            break
    assert told["answered"] > 2000
    assert told["busy"] > 0


async def under_load(server: RedisServer, prefix: str) -> tuple[Counter[str], int]:
    """What callers were told, and how many of their calls landed."""
    random = Random(7)
    with Cut(server.port, delay=0.001) as proxy:
        engine = RedisEngine.open(f"{proxy.url}?prefix={prefix}")
        engine.add(ECHO)
        told: Counter[str] = Counter()

        async def ask(n: int) -> None:
            await asyncio.sleep(random.random() * 0.2)
            try:
                assert await engine.commit(None, [Op("echo", (str(n),))]) == [str(n)]
                told["answered"] += 1
            except StorageBusy:
                told["busy"] += 1

        async def cut() -> None:
            for _ in range(4):
                await asyncio.sleep(0.04)
                await asyncio.to_thread(proxy.drop)

        for first in range(0, 3000, 500):
            await asyncio.gather(cut(), *(ask(n) for n in range(first, first + 500)))
        landed: int = await engine.ask("count")
        await engine.close()
    return told, landed


# -- nothing is sent twice: by its own defaults redis-py repeats what got no answer (RELIABILITY.md, findings 3 and 4)

TALLY = RedisOperationSet(
    "tally",
    {},
    script="""
ops['tally'] = function()
  write('INCR', P .. 'tally')
end
ops['tallied'] = function()
  return tonumber(call('GET', P .. 'tally') or '0')
end
""",
)


@pytest.mark.usefixtures("redis_url")
async def test_what_got_no_answer_was_carried_out_once(redis_server: RedisServer) -> None:
    with Cut(redis_server.port) as proxy:
        engine = RedisEngine.open(f"{proxy.url}?prefix=tally")
        engine.add(TALLY)
        assert await engine.ask("tallied") == 0  # it is connected
        for n in (1, 2, 3):
            proxy.cut("after")
            with pytest.raises(StorageBusy, match="unknown"):
                await engine.commit(None, [Op("tally", ())])
            assert await engine.ask("tallied") == n
        await engine.close()
        assert proxy.cuts == 3


@pytest.mark.usefixtures("redis_url")
async def test_a_command_that_got_no_answer_was_carried_out_once(redis_server: RedisServer) -> None:
    with Cut(redis_server.port) as proxy:
        line = Connection(redis_place(proxy.url), lambda line: None, lambda: prepared(""))
        for n in (1, 3, 5):
            assert await asyncio.to_thread(line.ask, "INCR", "counted") == n
            proxy.cut("after")
            with pytest.raises(NoReply):
                await asyncio.to_thread(line.ask, "INCR", "counted")
        line.drop()
        assert proxy.asked.count("INCR") == 6


async def test_who_is_not_let_in_knocks_once() -> None:
    with Cut(free_port()) as proxy:
        line = Connection(redis_place(proxy.url), lambda line: None, lambda: prepared(""))
        with pytest.raises(NotSent):
            await asyncio.to_thread(line.ask, "PING")
        assert proxy.connections == 1


def tries(made: Any, error: str) -> int:
    """How often redis-py would try what this connection fails at with such an error."""
    wrong: Any = load(f"redis.exceptions:{error}")
    count = 0

    def fails() -> None:
        nonlocal count
        count += 1
        raise wrong

    with pytest.raises(wrong):
        made.retry.call_with_retry(fails, lambda error: None)
    return count


@pytest.mark.parametrize("url", ["redis://127.0.0.1/1", "rediss://127.0.0.1", "unix:///run/redis.sock"])
@pytest.mark.parametrize("error", ["TimeoutError", "ConnectionError", "BusyLoadingError"])
def test_a_connection_tries_nothing_again(url: str, error: str) -> None:
    made = connection(redis_place(url))
    assert tries(made, error) == 1
    assert (made.retry_on_timeout, made.retry_on_error) == (False, [])


@pytest.mark.usefixtures("redis_url")
async def test_nor_does_any_that_an_engine_makes(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one for commits and the one that hears of those of others."""
    module: Any = load("redis.connection")
    made: list[Any] = []

    class Seen(module.Connection):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(module, "Connection", Seen)
    engine = RedisEngine.open(f"{redis_server.url}?prefix=retries")
    engine.add(ECHO)
    deaf = engine.listen("work", lambda: None)
    assert await engine.ask("count") == 0
    await until(lambda: len(made) >= 2)
    deaf()
    await engine.close()
    assert {tries(each, "TimeoutError") for each in made} == {1}
