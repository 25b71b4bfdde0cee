"""The types that mypy and Pyright infer for results of steps. `scripts/check` runs both; no test calls these functions.

A comment that ignores an error is itself an error if there is nothing to ignore.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, assert_type

from agent_runtime_core import (
    AgentRuntime,
    Backoff,
    RunContext,
    RunResult,
    Step,
    StepExecutor,
    SyncRunContext,
    create_test_context,
    open_run,
    open_run_sync,
)
from agent_runtime_core.portal import from_thread

T = TypeVar("T")


@dataclass
class Report:
    rows: int


class Reader:
    def __call__(self, path: str) -> bytes:
        return path.encode()

    def read(self, path: str) -> str:
        return path

    async def fetch(self, path: str) -> list[str]:
        return [path]

    @classmethod
    def make(cls) -> Reader:
        return cls()

    @staticmethod
    async def size(path: str) -> int:
        return len(path)


class Fetcher:
    async def __call__(self, path: str) -> float:
        return float(path)


def count(path: str, limit: int = 10) -> dict[str, int]:
    return {path: limit}


async def load(path: str) -> list[str]:
    return [path]


async def with_context(ctx: RunContext, path: str) -> float:
    return float(path)


def with_blocking_context(path: str, ctx: SyncRunContext) -> Report:
    return Report(len(path))


def first(items: list[T]) -> T:
    return items[0]


async def last(items: list[T]) -> T:
    return items[-1]


def anything() -> Any:
    return 1


def nothing() -> None: ...


async def nothing_async() -> None: ...


def as_future(path: str) -> asyncio.Future[int]:
    return asyncio.get_running_loop().create_future()


def as_awaitable(path: str) -> Awaitable[int]:
    return as_future(path)


def with_keywords(path: str, *, encoding: str = "utf-8") -> set[str]:
    return {path, encoding}


async def steps(ctx: RunContext, reader: Reader, fetcher: Fetcher, unknown: Callable[..., Any]) -> None:
    # functions
    assert_type(await ctx.step("s", count, "a"), dict[str, int])
    assert_type(await ctx.step("s", count, "a", 3), dict[str, int])
    assert_type(await ctx.step("s", load, "a"), list[str])
    assert_type(await ctx.step("s", with_context, "a"), float)
    assert_type(await ctx.step("s", with_blocking_context, "a"), Report)
    assert_type(await ctx.step("s", with_keywords, "a"), set[str])
    assert_type(await ctx.step("s", as_future, "a"), int)
    assert_type(await ctx.step("s", as_awaitable, "a"), int)
    assert_type(await ctx.step("s", Report, 3), Report)
    await ctx.step("s", nothing)
    await ctx.step("s", nothing_async)
    # generic functions
    assert_type(await ctx.step("s", first, [1]), int)
    assert_type(await ctx.step("s", last, ["a"]), str)
    # functions without a known type
    assert_type(await ctx.step("s", anything), Any)
    assert_type(await ctx.step("s", unknown, 1, 2), Any)
    assert_type(await ctx.step("s", json.loads, "1"), Any)
    # lambda, partial, methods, objects
    assert_type(await ctx.step("s", lambda: 1), int)
    assert_type(await ctx.step("s", lambda path: len(path), "a"), int)
    assert_type(await ctx.step("s", lambda: load("a")), list[str])
    assert_type(await ctx.step("s", partial(count, "a")), dict[str, int])
    assert_type(await ctx.step("s", partial(load, "a")), list[str])
    assert_type(await ctx.step("s", reader.read, "a"), str)
    assert_type(await ctx.step("s", reader.fetch, "a"), list[str])
    assert_type(await ctx.step("s", Reader.make), Reader)
    assert_type(await ctx.step("s", Reader.size, "a"), int)
    assert_type(await ctx.step("s", reader, "a"), bytes)
    assert_type(await ctx.step("s", fetcher, "1"), float)
    # `returns`
    assert_type(await ctx.step("s", json.loads, "1", returns=int), int)
    assert_type(await ctx.step("s", json.loads, "1", returns=list[Report]), list[Report])
    assert_type(await ctx.step("s", load, "a", returns=tuple[str, ...]), tuple[str, ...])
    assert_type(await ctx.step("s", json.loads, "1", returns=Report, retries=3), Report)
    assert_type(await ctx.step("s", count, "a", returns=None), dict[str, int])


async def options(ctx: RunContext) -> None:
    assert_type(
        await ctx.step(
            "s", load, "a", key="k", retries=3, retry_delay=0.5, timeout=None, retry_on=(OSError, ValueError),
            backoff=Backoff(), on_in_doubt="review", on_changed_input="raise", description="d", max_result_bytes=9,
        ),
        list[str],
    )  # fmt: skip
    await ctx.step("s", load, "a", retry_on=lambda error: isinstance(error, OSError))
    await ctx.step("s", load, "a", backoff=lambda attempt, chance: attempt + chance.random(), on_in_doubt=count)
    await ctx.step("s", load, "a", retrys=3)  # type: ignore[call-overload]
    await ctx.step("s", load, "a", retries="3")  # type: ignore[call-overload]
    await ctx.step("s", "load")  # type: ignore[call-overload]
    await ctx.step(load, "a")  # type: ignore[call-overload]
    result = await ctx.step("s", load, "a")
    result.update({})  # type: ignore[attr-defined]


def blocking(ctx: SyncRunContext, reader: Reader, fetcher: Fetcher) -> None:
    assert_type(ctx.step("s", count, "a"), dict[str, int])
    assert_type(ctx.step("s", load, "a"), list[str])
    assert_type(ctx.step("s", with_context, "a", key="k"), float)
    assert_type(ctx.step("s", with_blocking_context, "a"), Report)
    assert_type(ctx.step("s", first, [1]), int)
    assert_type(ctx.step("s", last, ["a"]), str)
    assert_type(ctx.step("s", lambda: 1), int)
    assert_type(ctx.step("s", partial(load, "a")), list[str])
    assert_type(ctx.step("s", reader.fetch, "a"), list[str])
    assert_type(ctx.step("s", fetcher, "1"), float)
    assert_type(ctx.step("s", json.loads, "1", returns=Report), Report)
    ctx.step("s", nothing, retries=3)
    ctx.step("s", load, "a", retrys=3)  # type: ignore[call-overload]
    assert_type(ctx.transaction("t", rows, "a"), list[tuple[Any, ...]])
    assert_type(ctx.call("agent", {}), RunResult)


def rows(conn: sqlite3.Connection, table: str) -> list[tuple[Any, ...]]:
    return conn.execute("select ?", (table,)).fetchall()


async def contexts() -> None:
    async with open_run("a.db") as ctx:
        assert_type(await ctx.step("s", load, "a", retries=2), list[str])
        assert_type(await ctx.step("s", first, [1]), int)
        assert_type(await ctx.step("s", json.loads, "1", returns=int), int)
        assert_type(await ctx.transaction("t", rows, "a"), list[tuple[Any, ...]])
        assert_type(await ctx.call("agent", {}), RunResult)
        protocol: RunContext = ctx
    with open_run_sync("a.db") as run:
        assert_type(run.sync_ctx.step("s", load, "a"), list[str])
    test = create_test_context()
    assert_type(await test.step("s", load, "a"), list[str])
    protocol = test
    assert_type(await protocol.step("s", load, "a"), list[str])


def in_a_thread(ctx: RunContext) -> None:
    # Pyright infers these types. mypy infers Any, because `from_thread` has overloads too.
    counted: dict[str, int] = from_thread(ctx.step, "s", count, "a")
    loaded: list[str] = from_thread(ctx.step, "s", load, "a", key="k")
    item: int = from_thread(ctx.step, "s", first, [1])
    report: Report = from_thread(ctx.step, "s", json.loads, "1", returns=Report)
    _ = counted, loaded, item, report


async def maps(ctx: RunContext, paths: list[str]) -> None:
    executor = StepExecutor(ctx)
    assert_type(await executor.map("m", len, paths), list[int])
    assert_type(await executor.map("m", load, paths, key=str, retries=2), list[list[str]])
    assert_type(await executor.map("m", with_context, paths), list[float])
    assert_type(await executor.map("m", with_blocking_context, paths, timeout=3.0), list[Report])
    assert_type(await executor.map("m", first, [[1], [2]]), list[int])
    assert_type(await executor.map("m", lambda path: len(path), paths), list[int])
    assert_type(await executor.map("m", partial(load), paths), list[list[str]])
    assert_type(await executor.map("m", json.loads, paths, returns=Report), list[Report])
    assert_type(await executor.map("m", json.loads, paths), list[Any])
    await executor.map("m", load, paths, description="d")  # type: ignore[call-overload]
    await executor.map("m", load, 3)  # type: ignore[call-overload]
    assert_type(executor.map_sync("m", len, paths), list[int])
    assert_type(executor.map_sync("m", load, paths, retries=2), list[list[str]])
    assert_type(executor.map_sync("m", json.loads, paths, returns=Report), list[Report])


async def lists(ctx: RunContext) -> None:
    # The results of a list have several types, so its caller names them.
    results = await StepExecutor(ctx).run([Step("a", count), Step("b", with_context)])
    assert_type(results, dict[str, Any])


class Agent(AgentRuntime):
    key = "agent"

    async def run(self, ctx: RunContext) -> RunResult:
        pages = await asyncio.gather(*(ctx.step("s", load, path, key=path) for path in ("a", "b")))
        assert_type(pages, list[list[str]])
        coroutine: Coroutine[Any, Any, list[str]] = ctx.step("s", load, "a")
        return RunResult({"response": (await coroutine)[0]})
