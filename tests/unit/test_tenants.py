"""Two tenants, and runs of no tenant, in one store: the same names, and what one can reach of another."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, IdempotencyConflict, InvalidArgument, RunResult, open_run
from agent_runtime_core.errors import UnknownRun
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import RunnerConfig
from agent_runtime_core.runner.run_client import RunClient
from tests.support.backends import POSTGRES, SERVERS

KEY = "order-1"
TENANTS = (None, "a", "b")


class Shop(AgentRuntime):
    key = "shop"

    async def run(self, ctx: Any) -> RunResult:
        mine = {"tenant": ctx.tenant, "key": ctx.run_key}
        if ctx.params.get("child"):
            child = await ctx.call("shop", {"params": {"n": 1}})
            return RunResult(final_output={**mine, "child": child.final_output})
        if ctx.params.get("ask"):
            mine["answer"] = await ctx.approve("pay", {"amount": 1})
        return RunResult(final_output=mine)


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[AgentRunner]:
    registry = Registry()
    registry.register(Shop())
    async with AgentRunner.open(url, config=RunnerConfig(park_after=0), registry=registry) as runner:
        yield runner


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in SERVERS:
        return str(request.getfixturevalue(f"{request.param}_url"))
    return "memory://" if request.param == "memory" else str(tmp_path / "runs.db")


#: What is done with the run of a name: each method of the runner that takes the id of a run.
ACTS: dict[str, Callable[..., Awaitable[Any]]] = {
    "get_run": lambda r, name, **t: r.get_run(name, **t),
    "wait": lambda r, name, **t: r.wait(name, 0, **t),
    "stream": lambda r, name, **t: _first(r.stream(name, **t)),
    "event_pages": lambda r, name, **t: _first(r.event_pages(name, **t)),
    "cancel": lambda r, name, **t: r.cancel(name, **t),
    "signal": lambda r, name, **t: r.signal(name, "go", **t),
    "send": lambda r, name, **t: r.send(name, "hello", **t),
    "approve": lambda r, name, **t: r.approve(name, "pay", **t),
    "resume": lambda r, name, **t: r.resume(name, **t),
    "requeue": lambda r, name, **t: r.requeue(name, **t),
    "discard": lambda r, name, **t: r.discard(name, **t),
    "fork": lambda r, name, **t: r.fork(name, **t),
}


async def _first(found: Any) -> Any:
    async with contextlib.aclosing(found):
        return await anext(found, None)


async def everything(runner: AgentRunner) -> list[Any]:
    rows = [(await runner.queue.require(str(each.run_id))) for each in await runner.runs()]
    return [(row, await runner.queue.mail(row.run_id), await runner.event_bus.get_events(row.run_id)) for row in rows]


def test_each_method_that_takes_a_run_id_takes_a_tenant() -> None:
    takes = {
        name
        for name, method in inspect.getmembers(RunClient, inspect.isfunction)
        if not name.startswith("_") and "run_id" in inspect.signature(method).parameters
    }
    assert takes - {"stream_sync"} == set(ACTS)
    for name in takes:
        assert "tenant" in inspect.signature(getattr(RunClient, name)).parameters


@pytest.mark.parametrize("act", ACTS)
async def test_a_tenant_reaches_no_run_of_another(url: str, act: str) -> None:
    async with opened(url) as runner:
        ended = await runner.execute("shop", KEY, tenant="a")
        assert ended.final_output == {"tenant": "a", "key": KEY}
        asking = await runner.submit("shop", {"params": {"ask": True}}, run_id="order-2", tenant="a")
        await runner.run_once()
        of_nobody = await runner.submit("shop", run_id="order-3")
        before = await everything(runner)
        for name in (KEY, ended.run_id, "order-2", asking, "order-3", str(of_nobody).upper()):
            with pytest.raises(UnknownRun):
                await ACTS[act](runner, name, tenant="b")
        assert await everything(runner) == before
        assert await runner.runs(tenant="b") == []
        assert await runner.approvals(tenant="b") == []
        assert len(await runner.approvals(tenant="a")) == len(await runner.approvals()) == 1


async def test_tenants_use_the_same_names_without_noticing(url: str) -> None:
    names: dict[str, Any] = {"run_id": KEY, "idempotency_key": "key", "concurrency_key": "lane"}
    async with opened(url) as runner:
        ids = [await runner.submit("shop", {"params": {"ask": True}}, tenant=each, **names) for each in TENANTS]
        assert len({*ids}) == 3
        assert [await runner.run_once() for _ in TENANTS] == [True] * 3
        for tenant, run_id in zip(TENANTS, ids, strict=True):
            assert await runner.submit("shop", {"params": {"ask": True}}, tenant=tenant, **names) == run_id
            info = await runner.get_run(KEY, tenant=tenant)
            assert (info.run_id, info.tenant, info.run_key, info.concurrency_key) == (run_id, tenant, KEY, "lane")
            assert await runner.approve(KEY, "pay", str(tenant), tenant=tenant)
        while await runner.run_once():
            pass
        for tenant in TENANTS:
            done = await runner.wait(KEY, 0, tenant=tenant)
            assert done.final_output == {"tenant": tenant, "key": KEY, "answer": str(tenant)}
            with pytest.raises(IdempotencyConflict, match="run id 'order-1' was used before with another input"):
                await runner.submit("shop", {"params": {"n": 2}}, run_id=KEY, tenant=tenant)
        assert [each.run_id for each in await runner.runs(tenant="a")] == [ids[1]]
        assert len(await runner.runs(prefix=KEY)) == 3


async def test_a_run_key_of_several_tenants_is_refused(url: str) -> None:
    async with opened(url) as runner:
        mine = await runner.submit("shop", run_id=KEY, tenant="a")
        assert (await runner.get_run(KEY)).run_id == mine
        await runner.submit("shop", run_id=KEY, tenant="b")
        for act in ACTS.values():
            with pytest.raises(InvalidArgument, match=r"run 'order-1' must be of one tenant, got runs of 'a', 'b'\."):
                await act(runner, KEY)
        of_nobody = await runner.submit("shop", run_id=KEY)
        assert (await runner.get_run(KEY)).run_id == of_nobody


async def test_children_and_forks_have_the_tenant_of_their_run(url: str) -> None:
    async with opened(url) as runner:
        for how in ("inline", "queued"):
            if how == "inline":
                await runner.execute("shop", how, {"params": {"child": True}}, tenant="a")
            else:
                await runner.submit("shop", {"params": {"child": True}}, run_id=how, tenant="a")
                while await runner.run_once():
                    pass
            parent = await runner.get_run(how, tenant="a")
            output = (await runner.wait(how, 0, tenant="a")).final_output
            assert output == {"tenant": "a", "key": how, "child": {"tenant": "a", "key": None}}
            [child] = await runner.runs(parent=parent.run_id, tenant="a")
            assert child.tenant == "a"
            fork = await runner.fork(how, new_run_id="again", tenant="a", input={"params": {"how": how}})
            assert (await runner.get_run("again", tenant="a")).run_id == fork
            await runner.cancel(fork)
            await runner.discard(fork)
            later = await runner.submit("shop", parent_run_id=parent.run_id, run_id=f"of {how}")
            assert (await runner.get_run(f"of {how}", tenant="a")).run_id == later
        assert {each.tenant for each in await runner.runs()} == {"a"}


async def test_runs_of_two_tenants_do_not_wait_for_each_other(url: str) -> None:
    """Code that holds the concurrency slot of a tenant may execute a run with the same key of another tenant."""
    async with opened(url) as runner:

        class Outer(AgentRuntime):
            key = "outer"

            async def run(self, ctx: Any) -> RunResult:
                done = await runner.execute("shop", concurrency_key="lane", tenant="b", if_running="raise")
                return RunResult(final_output=done.final_output)

        done = await asyncio.wait_for(runner.execute(Outer(), concurrency_key="lane", tenant="a"), 60)
        assert done.final_output == {"tenant": "b", "key": None}


async def test_the_block_of_an_open_run_has_its_tenant(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    for tenant in TENANTS:
        async with open_run(path, KEY, tenant=tenant) as ctx:
            assert (ctx.tenant, ctx.run_key) == (tenant, KEY)
            assert await ctx.step("who", lambda name=tenant: name) == tenant
    for tenant in TENANTS:
        async with open_run(path, KEY, tenant=tenant) as ctx:
            assert await ctx.step("who", lambda: "repeated") == tenant


@pytest.mark.parametrize("tenant", ["", "x" * 129, "a\0b", "a\nb", "\udc80", 7, b"a"])
async def test_a_tenant_is_a_name(tenant: Any) -> None:
    async with opened("memory://") as runner:
        for act in (
            lambda: runner.submit("shop", tenant=tenant),
            lambda: runner.execute("shop", tenant=tenant),
            lambda: runner.get_run(KEY, tenant=tenant),
            lambda: runner.runs(tenant=tenant),
            lambda: runner.approvals(tenant=tenant),
        ):
            with pytest.raises(InvalidArgument, match="tenant"):
                await act()
        assert await runner.runs() == []
        await runner.submit("shop", tenant="x" * 128)
