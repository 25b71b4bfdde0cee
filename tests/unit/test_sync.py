"""Runs without a loop, beside one, and across threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, RunnerConfig, RunResult, SyncRunContext, portal
from agent_runtime_core.errors import PortalMisuse, UnknownRun
from agent_runtime_core.portal import call, from_thread, in_thread, iterate
from agent_runtime_core.registry import Registry
from tests.support.runs import Script, no_thread, soon

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="nobody")


async def add(a: int, b: int = 0) -> int:
    await asyncio.sleep(0)
    return a + b


def test_a_coroutine_function_is_called_from_a_plain_thread() -> None:
    assert call(add, 1, b=2) == 3
    with pytest.raises(ZeroDivisionError):
        call(_divide)


async def _divide() -> float:
    return 1 / 0


async def test_it_works_while_a_loop_runs_here() -> None:
    assert call(add, 1) == 1


def test_every_call_runs_on_the_one_loop() -> None:
    async def where() -> tuple[int, int]:
        return threading.get_ident(), id(asyncio.get_running_loop())

    first = call(where)
    assert call(where) == first
    assert first[0] != threading.get_ident()
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(call(where)))
    thread.start()
    thread.join()
    assert seen == [first]


def test_from_the_portals_own_loop_it_is_a_misuse() -> None:
    async def inside() -> None:
        call(add, 1)

    with pytest.raises(PortalMisuse, match=r"portal\.call\(add\).*Await the coroutine"):
        call(inside)


@pytest.mark.parametrize("door", [call, from_thread])
def test_a_coroutine_in_place_of_the_function_is_a_misuse_that_shows_the_call(door: Callable[..., Any]) -> None:
    made = add(1)
    with pytest.raises(PortalMisuse, match=rf"{door.__name__}\(add, \.\.\.\), not .*{door.__name__}\(add\(\.\.\.\)\)"):
        door(made)
    assert inspect.getcoroutinestate(made) == inspect.CORO_CLOSED
    with pytest.raises(PortalMisuse, match=r"fn must be a function, got 5\. Write"):
        door(5)


@pytest.mark.parametrize("door", [call, from_thread])
def test_what_gives_many_values_is_refused_with_the_way_out(door: Callable[..., Any]) -> None:
    runner = AgentRunner.open("memory://")
    said = rf"{door.__name__} returns one result, but .*stream yields many.* async for each in stream\(\.\.\.\)"
    with pytest.raises(PortalMisuse, match=said):
        door(runner.stream, "r")

    async def follow() -> list[Any]:
        return [event async for event in runner.stream("r")]

    call(runner.submit, "nobody", run_id="r")
    call(runner.cancel, "r")
    assert [event.event_type for event in call(follow)] == ["run.cancelled"]


def test_context_variables_go_along_and_do_not_come_back() -> None:
    async def look() -> str:
        name = NAME.get()
        NAME.set("changed")
        return name

    token = NAME.set("ada")
    try:
        assert call(look) == "ada"
        assert NAME.get() == "ada"
    finally:
        NAME.reset(token)


def test_a_cancelled_coroutine_is_a_cancelled_call() -> None:
    async def cancels() -> None:
        raise asyncio.CancelledError

    with pytest.raises(concurrent.futures.CancelledError):
        call(cancels)


async def test_in_thread_takes_context_and_hands_back() -> None:
    token = NAME.set("bob")
    try:
        assert await in_thread(lambda: (NAME.get(), threading.current_thread().daemon)) == ("bob", True)
    finally:
        NAME.reset(token)
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await in_thread(next, iter(()))
    with pytest.raises(KeyboardInterrupt):
        await _interrupted()


async def _interrupted() -> None:
    def interrupts() -> None:
        raise KeyboardInterrupt

    # Awaited beside, since a task that ends in KeyboardInterrupt ends its loop.
    future = in_thread(interrupts)
    await future


async def test_a_thread_that_is_left_is_told_and_so_is_its_end() -> None:
    handles: list[asyncio.Handle] = []
    begun, gate = threading.Event(), threading.Event()

    def works() -> None:
        begun.set()
        gate.wait()

    def left() -> asyncio.Handle:
        handles.append(asyncio.get_running_loop().call_later(60, handles.clear))
        return handles[-1]

    task = asyncio.create_task(in_thread(works, left=left))
    await soon(begun.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [handle.cancelled() for handle in handles] == [False]
    gate.set()
    await soon(handles[0].cancelled)
    await in_thread(str, left=left)
    assert len(handles) == 1  # one that ended by itself was never left


async def test_from_thread_reaches_the_loop_the_thread_works_for() -> None:
    here = threading.get_ident()

    async def where() -> int:
        return threading.get_ident()

    def plain() -> tuple[int, int, int]:
        return from_thread(where), from_thread(threading.get_ident), from_thread(add, 1, b=1)

    assert await in_thread(plain) == (here, here, 2)
    with pytest.raises(PortalMisuse, match="plain step function"):
        from_thread(add, 1)


async def test_from_thread_on_the_loop_itself_is_a_misuse() -> None:
    async def nested() -> None:
        from_thread(add, 1)

    def plain() -> None:
        from_thread(nested)

    with pytest.raises(PortalMisuse, match=r"on the event loop would deadlock"):
        await in_thread(plain)


async def test_many_blocking_functions_run_at_once() -> None:
    gate = threading.Barrier(12)
    assert len(await asyncio.gather(*(in_thread(gate.wait, 10) for _ in range(12)))) == 12


async def test_a_cancelled_wait_leaves_its_thread_alone() -> None:
    leave, left = threading.Event(), threading.Event()

    def blocks() -> None:
        leave.wait(10)
        left.set()

    task = asyncio.ensure_future(in_thread(blocks))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    leave.set()
    assert await in_thread(left.wait, 10)


def test_a_thread_that_outlives_its_loop_is_no_error() -> None:
    leave, left = threading.Event(), threading.Event()

    def blocks() -> None:
        leave.wait(10)

    async def short() -> None:
        task = asyncio.ensure_future(in_thread(blocks))
        await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(short())
    leave.set()

    async def next_one() -> None:
        await in_thread(left.set)

    asyncio.run(next_one())
    assert left.is_set()


def test_the_runner_without_a_loop(tmp_path: Path) -> None:
    async def body(ctx: Any) -> str:
        return NAME.get()

    registry = Registry()
    registry.register(Script(body))
    runner = AgentRunner.open(tmp_path / "a.db", config=RunnerConfig(max_retries=1), registry=registry)
    token = NAME.set("eve")
    try:
        assert runner.execute_sync("script", "r").final_output == {"value": "eve"}
        run_id = runner.submit_sync("script", {"n": 1})
        assert call(runner.run_once)
        assert runner.wait_sync(run_id, timeout=5).status == "succeeded"
    finally:
        NAME.reset(token)
        call(runner.close)


async def test_the_runner_beside_a_running_loop() -> None:
    async def body(ctx: Any) -> int:
        return 1

    runner = AgentRunner(config=RunnerConfig())
    assert runner.execute_sync(Script(body)).final_output == {"value": 1}
    call(runner.close)


INTERRUPTED = """
import signal, sys
from agent_runtime_core import open_run_sync

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it, and so do its children

async def waits(ctx):
    print("inside", flush=True)
    try:
        await ctx.sleep(3600)
    finally:
        print("let go", flush=True)

try:
    with open_run_sync(sys.argv[1], "r") as run:
        run.call(waits, run.ctx)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_that_wakes_nobody_is_heard_all_the_same() -> None:
    """One that comes when Python has looked for signals for the last time before it waits for a lock."""
    code = """
import _thread, asyncio, signal
from agent_runtime_core.portal import call

signal.signal(signal.SIGINT, signal.default_int_handler)

async def waits():
    await asyncio.sleep(0.2)
    _thread.interrupt_main()  # sets the flag that a signal sets, and interrupts no call of the system
    try:
        await asyncio.sleep(3600)
    finally:
        print("let go", flush=True)

try:
    call(waits)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split("\n")[:2] == ["let go", "interrupted"]


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="sends a POSIX signal")
@pytest.mark.parametrize("kind", [TimeoutError, RuntimeError, SystemExit, KeyboardInterrupt])
def test_what_a_signal_handler_raises_cancels_the_call_and_is_raised(kind: type[BaseException]) -> None:
    ended: list[str] = []

    def handler(*_: object) -> None:
        raise kind("time is up")

    async def waits() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            ended.append("let go")
            raise

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(kind, match="time is up"):
            call(waits)
        assert ended == ["let go"]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="sends a POSIX signal")
def test_an_alarm_that_goes_off_while_the_loop_is_woken_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio takes an OSError there for its socket's, and a TimeoutError is one."""
    loop: Any = call(_loop)
    socket, hits = loop._csock, []

    class Alarmed:
        def send(self, data: bytes) -> int:
            sent: int = socket.send(data)
            hits.append(threading.current_thread())
            os.kill(os.getpid(), signal.SIGUSR1)
            return sent

    def handler(*_: object) -> None:
        raise TimeoutError("time is up")

    monkeypatch.setattr(loop, "_csock", Alarmed())
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeoutError, match="time is up"):
            call(asyncio.sleep, 20)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert hits


async def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_an_error_that_says_time_is_over_is_the_functions_own() -> None:
    async def late() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        call(late)


@pytest.mark.skipif(not hasattr(signal, "SIGINT") or os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_cancels_and_gives_the_run_back(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            assert process.stdout.readline() == "inside\n"
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=30)[0].split("\n")[:2] == ["let go", "interrupted"]
            assert process.returncode == 0
        finally:
            process.kill()
            process.wait()

    async def look() -> tuple[str, int]:
        async with AgentRunner.open(path) as runner:
            info = await runner.get_run("r")
            return info.status.value, info.attempt

    assert asyncio.run(look()) == ("pending", 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is nothing to fork with")
def test_a_child_forked_while_other_threads_are_in_calls_has_its_own() -> None:
    code = """
import asyncio, os, signal, threading
from agent_runtime_core import portal
from agent_runtime_core._core import threads

async def here():
    return await portal.in_thread(os.getpid)

def forked():
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        os._exit(0 if portal.call(here) == os.getpid() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

async def forks():
    return await portal.in_thread(forked)

# Beside the loop's thread and an idle one, and while others are where the loop and a thread are given out.
print(portal.call(here) == os.getpid(), forked(), portal.call(forks))
with portal._portal._lock, threads._threads._lock:
    print(forked())
print(portal.call(here) == os.getpid())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["True", "0", "0", "0", "True"], done.stderr


def test_a_call_without_a_loop_thread_is_refused_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portal, "_portal", portal._Portal())
    with no_thread("agent-runtime-portal"), pytest.raises(RuntimeError, match="can't start new thread"):
        call(add, 1)
    assert call(add, 1) == 1


def test_an_interrupt_raised_in_a_call_is_its_callers_and_others_are_served() -> None:
    async def interrupts() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(interrupts)
    assert call(add, 1) == 1


LEAVING = """
import sys
from agent_runtime_core import AgentRunner, AgentRuntime, RunnerConfig
from agent_runtime_core.portal import call

class Leaves(AgentRuntime):
    key = "leaves"
    async def run(self, ctx):
        sys.exit(7)

async def leaves():
    sys.exit(3)

async def five():
    return 5

runner = AgentRunner.open(sys.argv[1], config=RunnerConfig(max_retries=2, retry_backoff_base=1))
runner.registry.register(Leaves())
call(runner.submit, "leaves", run_id="queued")
for act in (lambda: call(leaves), lambda: runner.execute_sync("leaves", run_id="here"), lambda: call(runner.run_once)):
    try:
        act()
    except SystemExit as end:
        print(end.code)
print(call(five), *[call(runner.get_run, run_id).status.value for run_id in ("here", "queued")])
call(runner.close)
"""


def test_sys_exit_ends_the_call_of_the_portal_or_the_attempt_of_the_run_and_others_are_served(tmp_path: Path) -> None:
    child = subprocess.run(
        [sys.executable, "-c", LEAVING, str(tmp_path / "a.db")], capture_output=True, text=True, timeout=60, check=True
    )
    assert child.stdout.splitlines() == ["3", "5 failed pending"]


# -- iterating without a loop


async def numbers(count: int, seen: list[str]) -> AsyncIterator[int]:
    try:
        for number in range(count):
            seen.append(f"made {number}")
            yield number
    finally:
        await asyncio.sleep(0)
        seen.append("closed")


def test_an_async_generator_is_iterated_one_value_for_each_request() -> None:
    seen: list[str] = []
    assert list(iterate(numbers, 2, seen)) == [0, 1]
    assert seen == ["made 0", "made 1", "closed"]
    values = iterate(numbers, 3, seen := [])
    assert (next(values), seen) == (0, ["made 0"])


@pytest.mark.parametrize("how", ["break", "error", "close", "dropped"])
def test_leaving_the_loop_closes_the_async_generator(how: str) -> None:
    seen: list[str] = []
    values: Any = iterate(numbers, 3, seen)
    if how == "break":
        for _ in values:
            break
        del values
    elif how == "error":
        with pytest.raises(ZeroDivisionError):
            _ = [1 // number for number in values]
        del values
    else:
        next(values)
        if how == "close":
            values.close()
        del values
    assert seen == ["made 0", "closed"]


def test_an_error_of_the_async_generator_is_raised_in_the_loop() -> None:
    async def fails() -> AsyncIterator[int]:
        yield 1
        raise LookupError("gone")

    values = iterate(fails)
    assert next(values) == 1
    with pytest.raises(LookupError, match="gone"):
        next(values)
    with pytest.raises(StopIteration):
        next(values)


def test_all_steps_of_the_generator_are_made_by_one_task() -> None:
    async def tasks() -> AsyncIterator[Any]:
        async with asyncio.timeout(60):
            token = NAME.set("inside")
            yield asyncio.current_task()
            yield asyncio.current_task()
            NAME.reset(token)

    first, second = iterate(tasks)
    assert first is second


def test_what_cannot_be_iterated_is_a_misuse() -> None:
    with pytest.raises(PortalMisuse, match=r"fn must be a function, got 5\. Write"):
        iterate(5)  # type: ignore[arg-type]

    async def inside() -> None:
        iterate(numbers, 1, [])

    with pytest.raises(PortalMisuse, match=r"portal\.iterate\(numbers\) on the portal's own loop"):
        call(inside)


def test_an_iterator_that_the_loop_itself_drops_is_closed_without_a_wait() -> None:
    seen: list[str] = []
    held = [iterate(numbers, 2, seen)]
    next(held[0])

    async def drops() -> None:
        held.clear()

    call(drops)
    call(soon, lambda: seen == ["made 0", "closed"])


def test_the_events_of_a_run_are_streamed_without_a_loop(tmp_path: Path) -> None:
    runner = AgentRunner.open(tmp_path / "runs.db")

    async def body(ctx: Any) -> None:
        await ctx.emit("note", {"n": 1})

    runner.execute_sync(Script(body), "r")
    kinds = [event.event_type for event in runner.stream_sync("r")]
    assert kinds == ["run.started", "note", "run.succeeded"]
    assert [event.event_type for event in runner.stream_sync("r", 1)] == kinds[1:]
    for event in runner.stream_sync("r", backpressure=True):
        assert event.event_type == "run.started"
        break
    with pytest.raises(UnknownRun):
        next(runner.stream_sync("unknown"))
    call(runner.close)


def test_the_events_of_a_run_are_streamed_while_it_runs(tmp_path: Path) -> None:
    runner = AgentRunner.open(tmp_path / "runs.db")
    gate = threading.Event()

    class Waits(AgentRuntime):
        key = "waits"

        def run(self, ctx: SyncRunContext) -> RunResult:
            ctx.emit("begun", {})
            assert gate.wait(10)
            return RunResult()

    runner.registry.register(Waits())
    runner.submit_sync("waits", run_id="r")
    worker = threading.Thread(target=call, args=(runner.run_once,))
    worker.start()
    seen = []
    for event in runner.stream_sync("r"):
        seen.append(event.event_type)
        if event.event_type == "begun":
            gate.set()
    assert seen == ["run.started", "begun", "run.succeeded"]
    worker.join()
    call(runner.close)


def test_ctrl_c_leaves_the_iteration_and_closes_it() -> None:
    seen: list[str] = []

    async def waits() -> AsyncIterator[int]:
        try:
            yield 1
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            seen.append("closed")

    with pytest.raises(KeyboardInterrupt):
        for _ in iterate(waits):
            pass
    assert seen == ["closed"]
