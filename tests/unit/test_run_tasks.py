"""Which tasks of a run work, which wait, and which join others."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any

import pytest

from agent_runtime_core._core import run_tasks
from agent_runtime_core._core.context_vars import RUN, queued, start_helper
from agent_runtime_core._core.run_tasks import RunTasks, context_of, run_of, scan, tasks_of
from tests.support.cases import for_each
from tests.support.runs import soon

anyio: Any = None
with suppress(ImportError):
    anyio = importlib.import_module("anyio")


@pytest.fixture(autouse=True)
def framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has these functions taken for those of a framework whose events are set by other tasks of the run."""
    names = ("waits", "receives", "joins", "works")
    monkeypatch.setattr(run_tasks, "EVENT_WAITERS", {f"{__name__}:framework_{name}" for name in names})


class Run:
    """Tasks that name this object as their run, some of which are inside a wait."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.waits: set[asyncio.Task[Any]] = set()
        self.queued: frozenset[asyncio.Task[Any]] = frozenset()
        self.main: asyncio.Task[Any] | None = None
        self.thread = threading.Event()

    def cut_off(self) -> bool:
        return False

    def lacks_key(self, error: Exception) -> None:
        raise NotImplementedError

    async def wait(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.waits.add(task)
        try:
            await self.gate.wait()
        finally:
            self.waits.discard(task)

    async def begin(self, body: Callable[[Run], Coroutine[Any, Any, Any]]) -> RunTasks:
        context = copy_context()
        context.run(RUN.set, self)
        self.main = asyncio.get_running_loop().create_task(body(self), context=context)
        for _ in range(10):
            await asyncio.sleep(0)
        return self.scan()

    def scan(self) -> RunTasks:
        return scan(asyncio.get_running_loop(), {self: self.waits})[self]

    @property
    def only_waits(self) -> bool:
        return self.scan().only_wait(self.main)

    async def end(self) -> None:
        self.thread.set()
        for task in tasks_of(asyncio.get_running_loop(), self):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def waits(run: Run) -> None:
    await run.wait()


async def awaits_a_task(run: Run) -> None:
    await asyncio.create_task(run.wait())


async def gathers(run: Run) -> None:
    await asyncio.gather(run.wait(), run.wait())


async def gathers_gathered(run: Run) -> None:
    await asyncio.gather(run.wait(), asyncio.gather(run.wait(), run.wait()))


async def groups(run: Run) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(run.wait())
        group.create_task(awaits_a_task(run))


async def waits_for_the_first(run: Run) -> None:
    tasks = {asyncio.create_task(run.wait()), asyncio.create_task(gathers(run))}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def joins_what_has_ended_in_part(run: Run) -> None:
    await asyncio.gather(run.wait(), asyncio.sleep(0), fails(), return_exceptions=True)


async def fails() -> None:
    raise ValueError


async def waits_until_a_helper_ends(run: Run) -> None:
    """As code does that is given a token by which it can be cancelled."""
    tasks = {asyncio.create_task(run.wait()), start_helper(asyncio.sleep(60))}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)


async def queues_behind_another_task(run: Run) -> None:
    async def second() -> None:
        with queued():
            await asyncio.Event().wait()

    await asyncio.gather(run.wait(), second())


async def reads_what_a_task_sends(run: Run) -> None:
    """Through a chain of async generators, as frameworks read the events of their agents."""

    async def results() -> AsyncIterator[None]:
        await asyncio.create_task(run.wait())
        yield

    async def passed_on() -> AsyncIterator[None]:
        async for each in results():
            yield each

    async for _ in passed_on():
        pass


async def closes_what_joins_a_task(run: Run) -> None:
    async def lasts() -> AsyncGenerator[None]:
        try:
            yield
        finally:
            await asyncio.create_task(run.wait())

    lasting = lasts()
    await anext(lasting)
    await lasting.aclose()


async def framework_waits(event: asyncio.Event) -> None:
    """As a task of a framework does until another one has run the agent."""
    await event.wait()


async def framework_receives(received: asyncio.Future[Any]) -> None:
    """As a queue of a framework does."""
    await received


async def framework_joins(tasks: set[asyncio.Task[Any]]) -> None:
    """As a framework does that joins tools, and passes on what they emit."""
    event = asyncio.ensure_future(asyncio.Event().wait())
    await asyncio.wait({*tasks, event}, return_when=asyncio.FIRST_COMPLETED)


async def waits_in_a_framework(run: Run) -> None:
    await asyncio.gather(run.wait(), framework_waits(asyncio.Event()))


async def receives_in_a_framework(run: Run) -> None:
    await asyncio.gather(run.wait(), framework_receives(asyncio.get_running_loop().create_future()))


async def joins_in_a_framework(run: Run) -> None:
    await framework_joins({asyncio.create_task(run.wait())})


async def groups_of_anyio(run: Run) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(run.wait)
        group.start_soon(run.wait)


@pytest.mark.parametrize(
    "body",
    [
        waits, awaits_a_task, gathers, gathers_gathered, groups, waits_for_the_first, joins_what_has_ended_in_part,
        waits_until_a_helper_ends, queues_behind_another_task, reads_what_a_task_sends, closes_what_joins_a_task,
        waits_in_a_framework, receives_in_a_framework, joins_in_a_framework,
        pytest.param(groups_of_anyio, marks=pytest.mark.skipif(anyio is None, reason="needs anyio")),
    ],
)  # fmt: skip
async def test_a_run_that_waits_or_joins_tasks_that_wait_only_waits(body: Any) -> None:
    run = Run()
    try:
        tasks = await run.begin(body)
        assert tasks.working == []
        assert tasks.only_wait(run.main)
    finally:
        await run.end()


def beside(work: Callable[[Run], Awaitable[Any]]) -> Callable[[Run], Coroutine[Any, Any, None]]:
    async def body(run: Run) -> None:
        await asyncio.gather(run.wait(), work(run))

    body.__name__ = work.__name__
    return body


async def sleeps(run: Run) -> None:
    await asyncio.sleep(60)


async def waits_for_an_event(run: Run) -> None:
    await asyncio.Event().wait()


async def waits_for_a_queue(run: Run) -> None:
    await asyncio.Queue[int]().get()


async def runs_a_thread(run: Run) -> None:
    await asyncio.to_thread(run.thread.wait, 10)


def runs_an_executor(run: Run) -> asyncio.Future[Any]:
    return asyncio.get_running_loop().run_in_executor(None, run.thread.wait, 10)


async def waits_for_an_executor(run: Run) -> None:
    await asyncio.wait({runs_an_executor(run), asyncio.create_task(run.wait())})


async def waits_with_a_time_limit(run: Run) -> None:
    await asyncio.wait({asyncio.create_task(run.wait())}, timeout=60)


async def joins_a_task_of_no_run(run: Run) -> None:
    await asyncio.get_running_loop().create_task(asyncio.sleep(60), context=Context())


async def awaits_a_helper(run: Run) -> None:
    await start_helper(asyncio.sleep(60))


async def groups_a_task_of_no_run(run: Run) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(60), context=Context())


async def reads_a_stream(run: Run) -> None:
    async def stream() -> AsyncIterator[int]:
        await asyncio.wait({asyncio.get_running_loop().create_future()})
        yield 1

    async for _ in stream():
        pass


async def framework_works(work: Awaitable[Any]) -> None:
    await work


async def sleeps_in_a_framework(run: Run) -> None:
    await framework_works(asyncio.sleep(60))


async def waits_for_an_event_in_a_hook(run: Run) -> None:
    await framework_works(waits_for_an_event(run))


async def joins_a_tool_that_waits_for_an_event(run: Run) -> None:
    await framework_joins({asyncio.create_task(waits_for_an_event(run))})


async def starts_a_task_that_waits_for_an_event(run: Run) -> None:
    event = asyncio.create_task(asyncio.Event().wait())
    await asyncio.wait({event})


async def joins_a_task_of_no_run_in_a_framework(run: Run) -> None:
    await framework_receives(asyncio.get_running_loop().create_task(asyncio.sleep(60), context=Context()))


async def is_busy(run: Run) -> None:
    while True:  # noqa: ASYNC110 - it is never found at rest
        await asyncio.sleep(0)


@for_each(
    "body",
    [
        *map(beside, [
            sleeps, waits_for_an_event, waits_for_a_queue, runs_a_thread, runs_an_executor, waits_for_an_executor,
            waits_with_a_time_limit, joins_a_task_of_no_run, awaits_a_helper,
            groups_a_task_of_no_run, reads_a_stream, sleeps_in_a_framework, waits_for_an_event_in_a_hook,
            joins_a_tool_that_waits_for_an_event, starts_a_task_that_waits_for_an_event,
            joins_a_task_of_no_run_in_a_framework, is_busy,
        ]),
        sleeps,
    ],
)  # fmt: skip
async def test_a_run_that_does_anything_else_works(body: Any) -> None:
    run = Run()
    try:
        assert (await run.begin(body)).working
        assert not run.only_waits
    finally:
        await run.end()


async def test_a_side_task_that_works_or_waits_is_seen() -> None:
    run, go = Run(), asyncio.Event()

    async def body(run: Run) -> None:
        side = asyncio.create_task(run.wait())
        await go.wait()
        await side

    try:
        assert not (await run.begin(body)).only_wait(run.main)
        go.set()
        await soon(lambda: run.only_waits)
    finally:
        await run.end()


async def test_what_joins_only_tasks_that_have_ended_is_about_to_continue() -> None:
    run, go, seen = Run(), asyncio.Event(), list[bool]()

    async def body(run: Run) -> None:
        side = asyncio.create_task(run.wait())
        await asyncio.gather(go.wait(), go.wait())
        side.cancel()

    try:
        await run.begin(body)
        go.set()
        for _ in range(5):
            seen.append(run.only_waits)
            await asyncio.sleep(0)
        assert seen == [False] * 5
    finally:
        await run.end()


async def test_one_scan_tells_runs_apart() -> None:
    one, other = Run(), Run()
    try:
        await one.begin(gathers)
        await other.begin(beside(sleeps))
        found = scan(asyncio.get_running_loop(), {one: one.waits, other: other.waits})
        assert found[one].only_wait(one.main)
        assert [len(found[each].working) for each in (one, other)] == [0, 1]
        assert len(found[one].resting) == 3
    finally:
        await one.end()
        await other.end()


async def test_a_task_is_known_by_its_context() -> None:
    context: Context = copy_context()
    mine = Run()
    context.run(RUN.set, mine)
    tasks = [
        asyncio.get_running_loop().create_task(asyncio.sleep(60), context=context),
        asyncio.create_task(asyncio.sleep(60)),
        asyncio.get_running_loop().create_task(asyncio.sleep(60), context=Context()),
    ]
    try:
        await asyncio.sleep(0)
        assert context_of(tasks[0]) is context
        assert [run_of(task) for task in tasks] == [mine, None, None]
        assert tasks_of(asyncio.get_running_loop(), mine) == [tasks[0]]
    finally:
        for task in tasks:
            task.cancel()


async def test_a_helper_is_no_task_of_the_run_that_starts_it() -> None:
    run = Run()

    async def body(run: Run) -> None:
        helper = start_helper(asyncio.sleep(60))
        try:
            await run.wait()
        finally:
            helper.cancel()

    try:
        assert (await run.begin(body)).only_wait(run.main)
    finally:
        await run.end()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks need Python 3.12")
async def test_eager_tasks_are_found() -> None:
    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
    run = Run()
    try:
        assert (await run.begin(gathers)).only_wait(run.main)
        assert not (await Run().begin(beside(sleeps))).only_wait(run.main)
    finally:
        asyncio.get_running_loop().set_task_factory(None)
        await run.end()
