"""Pools of runs: what a model call reserves, spends and gives back, and who waits or fails."""

from __future__ import annotations

import asyncio
import datetime as _dt
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import (
    AgentRunner,
    LLMResponse,
    MockLLMClient,
    ModelLimits,
    RateLimit,
    RunLimits,
    SpendPool,
    ToolCallingAgent,
    ToolRegistry,
    configure,
    run_turn_loop,
)
from agent_runtime_core._engines.base import Op
from agent_runtime_core.config import reset_config
from agent_runtime_core.encryption import AESGCMCodec
from agent_runtime_core.errors import InvalidArgument, UnknownPrice
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.queue import get_queue
from agent_runtime_core.queue.pools import PoolLimit, end_of
from agent_runtime_core.runner import PoolInfo, RunnerConfig
from agent_runtime_core.runner.pools import drop_unused
from agent_runtime_core.state import get_state_store
from agent_runtime_core.steps import StepExecutor
from agent_runtime_core.testing import VirtualClock
from tests.support.cases import for_each
from tests.support.command_line import Commands
from tests.support.runs import Hurried, Rig, Script, until

PRICES = {"m": {"input": 1.0, "output": 1000.0}}  # USD per million tokens: an answer of 100 tokens costs 0.1 USD


@pytest.fixture(autouse=True)
def prices() -> Iterator[None]:
    configure(model_prices=PRICES, default_model="m")
    yield
    reset_config()


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "runs.db" if request.param == "sqlite" else None


def answer(tokens: int = 100, text: str = "done") -> LLMResponse:
    usage = {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens}
    return LLMResponse({"role": "assistant", "content": text}, usage, "m")


class Client(MockLLMClient):
    """Answers with 100 tokens each, after what `before` does."""

    default_model = "m"
    provider = "made-up"

    def __init__(self, before: Callable[[int], Any] | None = None, limits: Any = None) -> None:
        super().__init__()
        self.calls_made, self.before, self.limits = 0, before, limits

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        self.calls_made += 1
        if self.before is not None:
            await self.before(self.calls_made)
        return answer()


def ask(client: Client, limits: RunLimits | None = None, max_tokens: int = 100) -> Callable[[Any], Any]:
    async def body(ctx: Any) -> Any:
        messages = [{"role": "user", "content": "hi"}]
        result = await run_turn_loop(
            ctx, client, ToolRegistry(), limits, messages=messages, model="m", max_tokens=max_tokens
        )
        return result.text

    return body


def limits(*pools: Any) -> RunLimits:
    return RunLimits(pools=pools)


async def only(rig: Rig) -> PoolInfo:
    [found] = await rig.runner.pools()
    return found


def wrong(value: Any) -> Any:
    """Hide a value from the type checker, which would reject it as well."""
    return value


@for_each(
    "made",
    [
        lambda: SpendPool(""), lambda: SpendPool("p"), lambda: SpendPool("p", usd=0), lambda: SpendPool("p", usd=-1),
        lambda: SpendPool("p", usd=float("nan")), lambda: SpendPool("p", usd=True), lambda: SpendPool("p", usd=1e10),
        lambda: SpendPool("p", tokens=wrong(1.5)), lambda: SpendPool("p", usd=1, per="week"),
        lambda: SpendPool("p", usd=1, per=0), lambda: SpendPool("p", usd=1, per=_dt.timedelta(0)),
        lambda: SpendPool("p", usd=1, per=float("inf")), lambda: SpendPool("p", usd=1, on_empty="stop"),
        lambda: ModelLimits(), lambda: ModelLimits(requests=0), lambda: ModelLimits(requests=1, per=wrong("day")),
        lambda: ModelLimits(tokens=True), lambda: RunLimits(pools=wrong(SpendPool("p", usd=1))),
        lambda: RunLimits(pools=wrong(["p"])), lambda: RunLimits(pools=wrong([{"name": "p", "usd": 1, "perr": 1}])),
    ],
)  # fmt: skip
def test_bad_values_are_rejected_where_they_are_set(made: Callable[[], Any]) -> None:
    with pytest.raises(InvalidArgument):
        made()


def test_pools_are_added_and_travel_as_json() -> None:
    mine, other = SpendPool("a", usd=1, per=_dt.timedelta(minutes=1)), ModelLimits(tokens=5, name="x")
    both = limits(mine).stricter(limits(other, mine))
    assert both.pools == (mine, other)
    assert RunLimits.of(json.loads(json.dumps(both.as_dict()))) == both
    assert mine.per == 60.0


async def test_a_call_reserves_its_most_and_spends_what_it_used(place: Path | None) -> None:
    seen: list[PoolInfo] = []

    async def look(_: int) -> None:
        seen.append(await only(rig))

    async with Rig(place, limits=limits(SpendPool("acme", usd=20))) as rig:
        assert await rig.value(ask(Client(look), max_tokens=500)) == "done"
        during, after = seen[0], await only(rig)
        assert during.spent == {"usd": 0.0, "tokens": 0, "requests": 0}
        assert during.reserved["requests"] == 1
        assert during.reserved["tokens"] == 500 + 4  # the most of the answer, and the prompt
        assert during.reserved["usd"] == pytest.approx(0.500004)
        assert (after.reserved["usd"], after.spent["usd"], after.left) == (0, 0.1, {"usd": 19.9})
        assert (after.name, after.per, after.tenant, after.limits) == ("acme", "day", None, {"usd": 20.0})
        assert after.ends_at is not None
        assert after.ends_at.timestamp() == end_of("day", rig.clock.wall())
        assert await rig.value(ask(Client(look))) == "done"  # a run that succeeded is not executed again
        assert (await only(rig)).spent["usd"] == 0.1


async def test_a_run_without_room_is_parked_until_the_next_period(place: Path | None) -> None:
    clock, client = VirtualClock(), Client()
    pool = SpendPool("acme", usd=0.25, per="hour")
    async with Rig(place, clock, limits=limits(pool), park_after=0) as rig:
        rig.register(ask(client))
        for number in range(3):
            await rig.runner.submit("script", run_id=f"r{number}")
        for _ in range(3):
            await rig.runner.run_once()
        waiting = await rig.runner.get_run("r2")
        assert (waiting.status, waiting.reason) == ("waiting", "pool 'acme'")
        assert waiting.scheduled_at is not None
        assert waiting.scheduled_at.timestamp() == end_of("hour", clock.wall())
        assert client.calls_made == 2
        assert not await rig.runner.run_once(), "it is not claimed before that"
        clock.advance(end_of("hour", clock.wall()) - clock.wall())
        assert await rig.runner.run_once()
        assert (await rig.runner.get_run("r2")).status == "succeeded"
        assert ((await only(rig)).spent["usd"], client.calls_made) == (0.1, 3)


async def test_a_run_without_room_fails_if_the_pool_says_so(place: Path | None) -> None:
    async with Rig(place, limits=limits(SpendPool("acme", usd=0.15, on_empty="fail"))) as rig:
        assert await rig.value(ask(Client())) == "done"
        result = await rig.go(ask(Client()), "second")
        assert result.error is not None
        assert (result.status, result.error.type) == ("failed", "LimitExceeded")
        assert result.error.message.startswith("limit reached: pool 'acme' (usd)=0.15, used 0.1")
        assert (await only(rig)).reserved["usd"] == 0


async def test_a_call_larger_than_the_pool_fails_although_the_pool_waits(place: Path | None) -> None:
    async with Rig(place, limits=limits(SpendPool("acme", tokens=300, per="month"))) as rig:
        result = await rig.go(ask(Client(), max_tokens=1000))
        assert result.error is not None
        assert result.error.type == "LimitExceeded"
        assert "one call may use that much" in result.error.message


async def test_only_reservations_in_the_way_are_waited_for_a_moment(place: Path | None) -> None:
    """The pool has room once the first call has used less than it reserved, so not even `fail` fails."""
    begun, end = asyncio.Event(), asyncio.Event()

    async def slow(_: int) -> None:
        begun.set()
        await until(end)

    clock = VirtualClock()
    async with Rig(place, clock, limits=limits(SpendPool("acme", usd=0.7, on_empty="fail"))) as rig:
        first = asyncio.ensure_future(rig.value(ask(Client(slow), max_tokens=500)))
        await until(begun)
        second = asyncio.ensure_future(rig.value(ask(Client(), max_tokens=500), "second"))
        await clock.until_sleeping()
        assert not second.done()
        end.set()
        assert await first == "done"
        while not second.done():
            clock.advance(1.0)
            await asyncio.sleep(0.001)
        assert second.result() == "done"
        assert (await only(rig)).spent["usd"] == pytest.approx(0.2)


async def test_an_interrupted_call_gives_back_and_its_repeat_counts_once(place: Path | None) -> None:
    begun = asyncio.Event()

    async def hang(number: int) -> None:
        if number == 1:
            begun.set()
            await asyncio.Event().wait()

    client = Client(hang)
    async with Rig(place, limits=limits(SpendPool("acme", usd=1))) as rig:
        await rig.cut(ask(client), begun)
        assert await rig.runner.pools() == [], "nothing is spent or reserved"
        assert await rig.value(ask(client)) == "done"
        assert ((await only(rig)).spent["usd"], (await only(rig)).spent["requests"]) == (0.1, 1)


async def test_a_failed_call_gives_back(place: Path | None) -> None:
    async def broken(_: int) -> None:
        raise ConnectionError("down")

    async with Rig(place, limits=limits(SpendPool("acme", usd=1))) as rig:
        assert (await rig.go(ask(Client(broken)))).status == "failed"
        assert await rig.runner.pools() == [] or (await only(rig)).reserved["usd"] == 0


async def test_a_cancelled_run_gives_back(place: Path | None) -> None:
    begun = asyncio.Event()

    async def hang(_: int) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with Rig(place, limits=limits(SpendPool("acme", usd=1))) as rig:
        going = asyncio.ensure_future(rig.go(ask(Client(hang))))
        await until(begun)
        assert (await only(rig)).reserved["usd"] > 0
        await rig.runner.cancel("r")
        assert (await going).status == "cancelled"
        assert await rig.runner.pools() == []


async def test_pools_of_runner_agent_and_run_count_together(place: Path | None) -> None:
    class Asks(ToolCallingAgent):
        key = "asks"
        name = "asks"
        description = "asks"
        system_prompt = "Answer."
        model = "m"
        max_tokens = 100
        limits = RunLimits(pools=[SpendPool("agent", tokens=10_000)])

        def get_llm_client(self) -> Any:
            return Client()

        @property
        def tools(self) -> ToolRegistry:
            return ToolRegistry()

    async with Rig(place, limits=limits(SpendPool("runner", usd=1))) as rig:
        rig.registry.register(Asks())
        given = {"messages": [{"role": "user", "content": "hi"}], "limits": limits(SpendPool("run", usd=2))}
        await rig.runner.submit("asks", given, run_id="r")
        assert await rig.runner.run_once()
        assert (await rig.runner.get_run("r")).status == "succeeded"
        assert {each.name: each.spent["tokens"] for each in await rig.runner.pools()} == {
            "agent": 100,
            "run": 100,
            "runner": 100,
        }


async def test_a_pool_of_each_tenant(place: Path | None) -> None:
    async with Rig(place, limits=limits(SpendPool("budget of {tenant}", usd=0.15, on_empty="fail"))) as rig:
        for tenant in ("ada", "ben"):
            assert (await rig.go(ask(Client()), tenant=tenant)).status == "succeeded"
            assert (await rig.go(ask(Client()), "again", tenant=tenant)).status == "failed"
        assert [each.name for each in await rig.runner.pools()] == ["budget of ada", "budget of ben"]
        [own] = await rig.runner.pools(tenant="ada")
        assert (own.name, own.tenant) == ("budget of ada", "ada")


async def test_a_fork_does_not_spend_what_it_copies(place: Path | None) -> None:
    async with Rig(place, limits=limits(SpendPool("acme", usd=1))) as rig:
        client = Client()

        async def twice(ctx: Any) -> Any:
            await ask(client)(ctx)
            await ctx.step("between", _one)
            return await ask(client)(ctx)

        rig.register(twice)
        await rig.go(twice)
        assert (await only(rig)).spent["usd"] == 0.2
        await rig.runner.fork("r", "between", new_run_id="fork")
        assert await rig.runner.run_once()
        assert (await rig.runner.get_run("fork")).status == "succeeded"
        assert (await only(rig)).spent["usd"] == pytest.approx(0.3)
        assert client.calls_made == 3


async def _one() -> int:
    return 1


async def test_a_child_run_counts_in_the_pools_of_its_runner_once(place: Path | None) -> None:
    async with Rig(place, limits=limits(SpendPool("acme", usd=1))) as rig:
        child = rig.register(ask(Client()), "child")

        async def parent(ctx: Any) -> Any:
            await ctx.call(child, {})
            return await ask(Client())(ctx)

        assert await rig.value(parent) == "done"
        assert (await only(rig)).spent == {"usd": pytest.approx(0.2), "tokens": 200, "requests": 2}


async def test_charged_usage_counts_without_a_reservation_and_once(place: Path | None) -> None:
    async with Rig(place, limits=limits(SpendPool("acme", usd=0.25, on_empty="fail"))) as rig:
        tries: list[int] = []

        async def framework(ctx: Any) -> Any:
            async def call() -> int:
                await ctx.pools.admit(ctx.budget.strictest.pools)  # as the integrations do
                ctx.charge(model="m", output_tokens=100)
                return 1

            for number in range(3):
                await ctx.step(f"call {number}", call)
                tries.append(number)
                if len(tries) == 1:
                    raise ConnectionError("cut")

        await rig.go(framework)
        assert (await only(rig)).spent == {"usd": 0.1, "tokens": 100, "requests": 1}
        result = await rig.go(framework)  # the first call is not made again
        assert (await only(rig)).spent["usd"] == pytest.approx(0.3), "a call that was made counts, beyond the limit"
        assert result.status == "succeeded"
        result = await rig.go(framework, "another")
        assert (result.status, result.error and result.error.type) == ("failed", "LimitExceeded")


async def test_a_step_around_a_call_defers_the_run(place: Path | None) -> None:
    """A wait inside a step cannot be parked: the run is released until the pool has room, without an attempt."""
    clock, client = VirtualClock(), Client()
    async with Rig(place, clock, limits=limits(SpendPool("acme", usd=0.15, per="day")), park_after=0) as rig:

        async def steps(ctx: Any) -> Any:
            return await ctx.step("asks", lambda: ask(client)(ctx))

        rig.register(steps)
        for run in ("a", "b"):
            await rig.runner.submit("script", run_id=run)
            await rig.runner.run_once()
        waiting = await rig.runner.get_run("b")
        assert (waiting.status, waiting.attempt) == ("pending", 1)
        assert waiting.scheduled_at is not None
        assert waiting.scheduled_at.timestamp() == end_of("day", clock.wall()), "longer than run_timeout_seconds"
        clock.advance(86_400.0)
        assert await rig.runner.run_once()
        assert (await rig.runner.get_run("b")).status == "succeeded"


async def test_items_of_a_map_wait_for_the_pool(place: Path | None) -> None:
    clock, client = Hurried(), Client()
    async with Rig(place, clock, limits=limits(SpendPool("acme", usd=0.25, per="day")), park_after=0) as rig:

        async def each(ctx: Any) -> Any:
            async def item(index: int) -> Any:
                return await ask(client)(ctx)

            return await StepExecutor(ctx).map("ask", item, range(3))

        rig.register(each)
        await rig.runner.submit("script", run_id="r")
        for _ in range(6):
            await rig.runner.run_once()
            if (await rig.runner.get_run("r")).status == "succeeded":
                break
            clock.advance(86_400.0)
        info = await rig.runner.get_run("r")
        assert info.status == "succeeded", info.reason
        assert client.calls_made == 3
        assert (await only(rig)).spent["usd"] <= 0.2


async def test_a_client_with_limits_waits_for_its_provider(place: Path | None) -> None:
    clock = VirtualClock()
    client = Client(limits=ModelLimits(requests=2, per=60))
    async with Rig(place, clock, park_after=0) as rig:
        rig.register(ask(client))
        for number in range(3):
            await rig.runner.submit("script", run_id=f"r{number}")
            await rig.runner.run_once()
        assert client.calls_made == 2
        assert (await rig.runner.get_run("r2")).reason == "pool 'made-up:m'"
        found = await only(rig)
        assert (found.name, found.per, found.ends_at, found.left) == ("made-up:m", 60.0, None, {"requests": 0})
        clock.advance(60.0)
        assert await rig.runner.run_once()
        assert client.calls_made == 3


async def test_a_call_larger_than_the_limit_of_a_provider_goes_alone(place: Path | None) -> None:
    client = Client(limits=ModelLimits(tokens=50, name="shared"))
    async with Rig(place) as rig:
        assert await rig.value(ask(client)) == "done"
        assert (await only(rig)).spent["tokens"] == 100


async def test_money_needs_a_price() -> None:
    configure(model_prices={})
    async with Rig(limits=limits(SpendPool("acme", usd=1))) as rig:
        result = await rig.go(ask(Client()))
        assert result.error is not None
        assert result.error.type == UnknownPrice.__name__


async def test_a_pool_that_counts_nothing_takes_no_space(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock, limits=limits(SpendPool("of {tenant}", usd=1))) as rig:
        for tenant in ("ada", "ben"):
            await rig.go(ask(Client()), tenant=tenant)
        await rig.runner.vacuum()
        assert len(await rig.runner.pools()) == 2
        clock.advance(86_400.0)
        await rig.runner.vacuum()
        assert await rig.runner.queue.read("shared", "pool:") == {}


async def test_a_model_call_without_pools_writes_as_before() -> None:
    async with Rig() as rig:
        written: list[str] = []
        engine: Any = rig.runner.queue.commits
        commit = engine.commit

        def counted(guard: Any, ops: Any, *args: Any) -> Any:
            written.extend(op.name for op in ops)
            return commit(guard, ops, *args)

        engine.commit = counted
        assert await rig.value(ask(Client())) == "done"
        assert not {"queue.reserve", "queue.spend", "queue.give_back"} & set(written)
        assert "journal.append" in written


async def test_an_abandoned_run_gives_back_when_it_is_cancelled(place: Path | None) -> None:
    """Its process was killed inside a call, and nobody executes it again."""
    clock, begun = VirtualClock(), asyncio.Event()

    async def hang(_: int) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with Rig(place, clock, limits=limits(SpendPool("acme", usd=1))) as rig:
        rig.register(ask(Client(hang)))
        killed = rig.another()
        await killed.submit("script", run_id="r")
        going = asyncio.ensure_future(killed.run_once())
        await until(begun)
        await rig.runner.queue.commits.commit(None, [])  # the start of the call is stored
        killed.heartbeat.stop()
        rig.registry.unregister("script")
        clock.advance(1000.0)
        assert (await only(rig)).reserved["requests"] == 1
        await rig.runner.cancel("r", wait=True)
        assert await rig.runner.pools() == []
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)


async def test_a_killed_run_that_resumes_on_another_path_gives_back(place: Path | None) -> None:
    clock, begun, found = VirtualClock(), asyncio.Event(), list[list[PoolInfo]]()

    async def hang(_: int) -> None:
        begun.set()
        await asyncio.Event().wait()

    async def body(ctx: Any) -> None:
        if not begun.is_set():
            await ask(Client(hang))(ctx)
        found.append(await rig.runner.pools())

    async with Rig(place, clock, limits=limits(SpendPool("acme", usd=1)), linger=1000.0) as rig:
        rig.register(body)
        killed = rig.another()
        await killed.submit("script", run_id="r")
        going = asyncio.ensure_future(killed.run_once())
        await until(begun)
        killed.heartbeat.stop()  # the start of the call, which names the pool, may not be stored
        clock.advance(1000.0)
        assert (await only(rig)).reserved["requests"] == 1
        assert await rig.runner.run_once()
        assert found == [[]]
        assert (await rig.runner.get_run("r")).status == "succeeded"
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)


async def test_a_run_keeps_nothing_of_the_calls_that_it_has_settled(place: Path | None) -> None:
    async with Rig(place, limits=limits(SpendPool("acme", usd=1))) as rig:

        async def body(ctx: Any) -> list[int]:
            kept = []
            for _ in range(3):
                await ask(Client())(ctx)
                kept.append(len(ctx.journal.writer._spent))
            return kept

        assert await rig.value(body) == [0, 0, 0]
        assert (await only(rig)).spent["usd"] == pytest.approx(0.3)


async def test_many_pools_are_deleted_with_several_commits(place: Path | None) -> None:
    """A store with a pool for each of many tenants: one transaction must not lock them all."""
    clock = VirtualClock()
    async with Rig(place, clock) as rig:
        queue: Any = rig.runner.queue
        wanted = [PoolLimit(f"tenant-{n:03}", "", 1.0, (-1, 9, -1), (0, 1, 1)) for n in range(250)]
        await queue.commits.commit(None, [Op("queue.reserve", ("r/1", wanted, clock.wall(), False))])
        clock.advance(2.0)
        counts: list[int] = []
        commit = queue.commits.commit

        def counted(guard: Any, ops: Any, *args: Any) -> Any:
            counts.extend(len(op.args[0]) for op in ops if op.name == "queue.give_back")
            return commit(guard, ops, *args)

        queue.commits.commit = counted
        await drop_unused(queue)
        assert await queue.read("shared", "pool:") == {}
        assert sum(counts) == 250
        assert max(counts) <= 100


async def test_a_killed_run_that_its_rate_limit_delays_gives_back_when_it_is_cancelled(place: Path | None) -> None:
    clock, begun = VirtualClock(), asyncio.Event()

    async def hang(_: int) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with Rig(place, clock, limits=limits(SpendPool("acme", usd=1))) as rig:
        rig.register(ask(Client(hang)))
        killed = rig.another()
        await killed.submit("script", run_id="r", rate_limit=RateLimit(1, per=5000.0))
        going = asyncio.ensure_future(killed.run_once())
        await until(begun)
        killed.heartbeat.stop()
        clock.advance(1000.0)
        assert not await rig.runner.run_once()
        assert (await rig.runner.get_run("r")).reason == "rate_limit"
        assert (await only(rig)).reserved["requests"] == 1
        await rig.runner.cancel("r", wait=True)
        left = await rig.runner.pools()
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        assert left == []


@pytest.mark.parametrize("engines", ["queue elsewhere", "queue and journal together", "encrypted"])
async def test_separate_engines_count_once(engines: str, tmp_path: Path) -> None:
    encrypted = engines == "encrypted"
    if encrypted:
        configure(model_prices=PRICES, payload_codec=AESGCMCodec({"k": b"k" * 32}, "k"))
    there = tmp_path / ("journal.db" if engines == "queue elsewhere" else "queue.db")
    queue = get_queue("sqlite", path=tmp_path / "queue.db")
    state = get_state_store("sqlite", path=there)
    bus = get_event_bus("memory") if not encrypted else get_event_bus("sqlite", path=there)
    config = RunnerConfig(max_retries=1, limits=limits(SpendPool("acme", usd=1)))
    async with AgentRunner(queue, bus, state, config) as runner:
        begun = asyncio.Event()

        async def hang(number: int) -> None:
            if number == 1:
                begun.set()
                await asyncio.Event().wait()

        client = Client(hang)
        going = asyncio.ensure_future(runner.execute(Script(ask(client)), "r"))
        await until(begun)
        going.cancel()
        await asyncio.gather(going, return_exceptions=True)
        assert (await runner.execute(Script(ask(client)), "r")).status == "succeeded"
        [found] = await runner.pools()
        assert (found.spent["usd"], found.spent["requests"], found.reserved["usd"]) == (0.1, 1, 0)


@pytest.mark.parametrize(
    "kind", [pytest.param("redis", marks=pytest.mark.redis), pytest.param("postgres", marks=pytest.mark.postgres)]
)
async def test_servers_measure_periods_by_their_clock(kind: str, request: pytest.FixtureRequest) -> None:
    """The clock of this process does not decide when a day ends."""
    async with AgentRunner.open(
        request.getfixturevalue(f"{kind}_url"),
        config=RunnerConfig(limits=limits(SpendPool("acme", usd=0.25), SpendPool("sliding", usd=1, per=3600))),
    ) as runner:
        assert (await runner.execute(Script(ask(Client())), "r")).status == "succeeded"
        late = Op("queue.spend", (["acme"], "r/none", (1, 1, 1), 4e9))  # a wall clock far in the future
        await runner.queue.commits.commit(None, [late])
        assert {each.name: each.spent["usd"] for each in await runner.pools()} == {"acme": 0.1, "sliding": 0.1}


def test_the_command_lists_pools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, pools = tmp_path / "runs.db", limits(SpendPool("of {tenant}", usd=1), SpendPool("all", tokens=5000, per=3600))

    async def spend() -> None:
        async with AgentRunner.open(path, config=RunnerConfig(limits=pools)) as runner:
            await runner.execute(Script(ask(Client())), "r", tenant="ada")

    asyncio.run(spend())
    commands = Commands(capsys, str(path))
    code, shown, _ = commands("pools")
    assert (code, shown.split()[:4]) == (0, ["NAME", "TENANT", "PER", "SPENT"])
    for text in ("usd 0.1000, tokens 100, requests 1", "usd 0.9000", "3600 s", "tokens 4,900", "of ada"):
        assert text in shown
    [own] = commands.json("pools", "--tenant", "ada")
    assert (own["name"], own["left"], own["reserved"]["usd"]) == ("of ada", {"usd": 0.9}, 0)
