"""A process that ends with work in flight: exits.py HOW DB RUN_ID.

"left": its loop ends and nothing was closed. "sys.exit": in the middle of a loop. "synchronous": the main thread
ends while another one waits in `execute_sync`. "plain": its loop ends while the plain `run` of an agent computes in its
thread; "plain worker": the same in a worker that gets SIGTERM. "thread": the main thread ends while another one has a
loop, finishes its run and closes the file. "abandoned": a loop is closed in the middle of everything, the runner in
another after it.

The others call the library when the program has ended. "generator": one that was not used up is closed, with an open
run inside. "stream": the same for the events of a run that does not end. "__del__ NAME": the finalizer of an object
closes a runner by `portal.call`, or by `asyncio.run`. "atexit": a function of `atexit` submits a run and closes the
runner; "atexit close" only closes it. "executing": another thread, which the interpreter waits for, is in
`execute_sync`.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    RunnerConfig,
    RunResult,
    SyncRunContext,
    open_run,
    open_run_sync,
    register_runtime,
)
from agent_runtime_core._core import timeouts
from agent_runtime_core.portal import call
from tests.fault.jobs.effects import say

begun = threading.Event()


class Endless(AgentRuntime):
    key = "endless"

    async def run(self, ctx: Any) -> RunResult:
        for i in range(1_000_000):
            await ctx.step("s", lambda: 1, key=str(i))
            begun.set()
            await asyncio.sleep(0.005)
        return RunResult()


async def working(db: str, run_id: str) -> tuple[AgentRunner, asyncio.Task[None]]:
    register_runtime(Endless())
    runner = AgentRunner.open(db)
    await runner.submit("endless", {}, run_id=run_id)
    task = asyncio.create_task(runner.run_loop(handle_signals=False))
    await asyncio.to_thread(begun.wait)
    return runner, task


class EndlessPlain(AgentRuntime):
    key = "endless"

    def run(self, ctx: SyncRunContext) -> RunResult:
        ctx.step("s", lambda: 1, key="0")
        begun.set()
        threading.Event().wait()
        return RunResult()


async def leave_plain(db: str, run_id: str) -> None:
    runner = AgentRunner.open(db)
    task = asyncio.ensure_future(runner.execute(EndlessPlain(), run_id, {}))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    await asyncio.wait({task})


async def stop_worker(db: str, run_id: str) -> None:
    register_runtime(EndlessPlain())
    runner = AgentRunner.open(db, config=RunnerConfig(grace_seconds=0.1))
    await runner.submit("endless", {}, run_id=run_id)
    worker = asyncio.ensure_future(runner.run_loop())
    await asyncio.to_thread(begun.wait)
    os.kill(os.getpid(), signal.SIGTERM)
    await worker


async def leave(db: str, run_id: str) -> None:
    await working(db, run_id)


async def leave_at_once(db: str, run_id: str) -> None:
    await working(db, run_id)
    sys.exit(3)


async def a_run(db: str, run_id: str) -> None:
    async with open_run(db, run_id) as ctx:
        begun.set()
        for i in range(20):
            await ctx.step("s", lambda: 1, key=str(i))
            await asyncio.sleep(0.02)
    say("closed")


def abandon(db: str, run_id: str) -> None:
    loop = asyncio.new_event_loop()
    runner, _ = loop.run_until_complete(working(db, run_id))
    loop.set_exception_handler(lambda loop, context: None)  # that its tasks are destroyed is no wonder
    loop.close()
    asyncio.run(runner.close())
    say("closed")


class Finite(AgentRuntime):
    key = "endless"

    async def run(self, ctx: Any) -> RunResult:
        begun.set()
        while threading.main_thread().is_alive():  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0.005)
        return RunResult(final_output={"first": await ctx.step("s", lambda: 1, key="0")})


def numbers(db: str, run_id: str) -> Iterator[int]:
    with open_run_sync(db, run_id) as run:
        for i in range(3):
            yield run.call(run.ctx.step, "s", lambda: i, key=str(i))  # noqa: B023


class Finalized:
    def __init__(self, close: Callable[[], Any]) -> None:
        self.close = close

    def __del__(self) -> None:
        self.close()


def at_exit(runner: AgentRunner, run_ids: list[str]) -> None:
    for run_id in run_ids:
        runner.submit_sync("endless", run_id=run_id)
    call(runner.close)
    say("closed")


def executed(runner: AgentRunner, run_id: str) -> None:
    runner.execute_sync(Finite(), run_id, {}).raise_for_status()
    say("succeeded")
    call(runner.close)
    say("closed")


kept: list[Any] = []


def main(how: str, db: str, run_id: str) -> None:
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # that a machine is busy is no fault of ours
    match how:
        case "left":
            asyncio.run(leave(db, run_id))
        case "sys.exit":
            asyncio.run(leave_at_once(db, run_id))
        case "synchronous":
            runner = AgentRunner.open(db)
            threading.Thread(target=lambda: runner.execute_sync(Endless(), run_id, {}), daemon=True).start()
            begun.wait()
        case "thread":
            threading.Thread(target=lambda: asyncio.run(a_run(db, run_id))).start()
            begun.wait()
        case "abandoned":
            abandon(db, run_id)
        case "plain":
            timeouts.GRACE = 0.2  # type: ignore[misc]
            asyncio.run(leave_plain(db, run_id))
        case "plain worker":
            asyncio.run(stop_worker(db, run_id))
        case "stream":
            runner = AgentRunner.open(db)
            threading.Thread(target=lambda: runner.execute_sync(EndlessPlain(), run_id, {}), daemon=True).start()
            begun.wait()
            kept.append(runner.stream_sync(run_id))
            say(f"first {next(kept[0]).event_type}")
        case "generator":
            kept.append(numbers(db, run_id))
            say(f"number {next(kept[0])}")
        case "__del__ call" | "__del__ asyncio":
            runner = AgentRunner.open(db)
            runner.submit_sync("endless", run_id=run_id)
            kept.append(
                Finalized((lambda: call(runner.close)) if "call" in how else lambda: asyncio.run(runner.close()))
            )
        case "atexit" | "atexit close":
            runner = AgentRunner.open(db)
            runner.submit_sync("endless", run_id="another" if how == "atexit" else run_id)
            atexit.register(at_exit, runner, [run_id] if how == "atexit" else [])
        case "executing":
            runner = AgentRunner.open(db)
            threading.Thread(target=executed, args=(runner, run_id)).start()
            begun.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
