"""A program with its own signal handlers that runs worker loops: hosts.py HOW DB.

Each loop has one run. It says "begun", waits until its loop was asked to stop, and says "finished". A handler of the
host says "host" and the signal. "returned" is the end of the last loop, and "closed" that of its runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

from agent_runtime_core import AgentRunner, AgentRuntime, RunnerConfig, RunResult
from agent_runtime_core.registry import Registry
from tests.fault.jobs.effects import say

SERVER = {"port": 0, "log_level": "warning"}


class Finishes(AgentRuntime):
    """Finishes its work after its loop was asked to stop."""

    key = "finishes"
    runner: AgentRunner

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    async def run(self, ctx: Any) -> RunResult:
        say("begun")
        self.begun.set()
        while not self.runner._worker._stopping:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0.005)
        await self.finish()
        return RunResult()

    async def finish(self) -> None:
        await asyncio.sleep(0.05)
        say("finished")


class Endless(Finishes):
    """Says "stopping", and then runs until it is cancelled."""

    key = "endless"

    async def finish(self) -> None:
        say("stopping")
        try:
            await asyncio.Event().wait()
        finally:
            say("released")


def host(number: int, frame: Any = None) -> None:
    say(f"host {signal.Signals(number).name}")


def exits(number: int, frame: Any) -> None:
    sys.exit(7)


@contextlib.asynccontextmanager
async def a_loop(db: str, kind: type[Finishes] = Finishes) -> AsyncIterator[tuple[AgentRunner, asyncio.Task[None]]]:
    """A runner on this file whose loop has begun to execute one run."""
    agent, registry = kind(), Registry()
    registry.register(agent)
    config = RunnerConfig(grace_seconds=600)
    async with AgentRunner.open(db, config=config, registry=registry) as runner:
        agent.runner = runner
        await runner.submit(agent.key)
        loop = asyncio.create_task(runner.run_loop())
        await agent.begun.wait()
        yield runner, loop


async def work(db: str) -> None:
    async with a_loop(db) as (_, loop):
        await loop
        say("returned")
    say("closed")


async def with_a_loop_handler(db: str) -> None:
    called = asyncio.Event()

    def handler() -> None:
        host(signal.SIGTERM)
        called.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, handler)
    async with a_loop(db) as (_, loop):
        await loop
        await called.wait()
        say("returned")
        called.clear()
        os.kill(os.getpid(), signal.SIGTERM)
        await called.wait()


async def two(db: str, kind: type[Finishes] = Finishes) -> None:
    async with a_loop(db, kind) as (_, first), a_loop(f"{db}2", kind) as (_, second):
        await asyncio.gather(first, second)
        say("returned")


async def in_thread_too(db: str) -> None:
    async with a_loop(db) as (_, loop):
        other = threading.Thread(target=lambda: asyncio.run(slower(f"{db}2")))
        other.start()
        await loop
        await asyncio.to_thread(other.join)
        say("returned")


class Slower(Finishes):
    key = "slower"

    async def finish(self) -> None:
        await asyncio.sleep(0.3)
        say("finished")


async def slower(db: str) -> None:
    async with a_loop(db, Slower) as (_, loop):
        await loop


async def one_is_stopped(db: str) -> None:
    async with a_loop(db) as (runner, first), a_loop(f"{db}2") as (_, second):
        runner.stop()
        await first
        say("stopped")
        await second
        say("returned")


async def after_the_drain(db: str) -> None:
    async with a_loop(db) as (_, loop):
        await loop
        os.kill(os.getpid(), signal.SIGTERM)  # does not interrupt what the program does before it closes the runner
        say("returned")
    say("closed")
    os.kill(os.getpid(), signal.SIGTERM)
    say("still there")


async def forks(db: str) -> None:
    async with a_loop(db) as (_, loop):
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(3)
        _, status = os.waitpid(child, 0)
        say(f"child {os.waitstatus_to_exitcode(status)}")
        await loop


@contextlib.asynccontextmanager
async def lifespan(app: Any) -> AsyncIterator[None]:
    async with a_loop(app.state.db) as (runner, loop):
        yield
        runner.stop()
        await loop
    say("closed")


def an_app(db: str) -> Any:
    from starlette.applications import Starlette

    app = Starlette(lifespan=lifespan)
    app.state.db = db
    return app


def under_uvicorn(db: str) -> None:
    import uvicorn

    uvicorn.run(an_app(db), **SERVER)  # type: ignore[arg-type]


async def with_uvicorn(db: str, server_first: bool) -> None:
    import uvicorn
    from starlette.applications import Starlette

    server = uvicorn.Server(uvicorn.Config(Starlette(), **SERVER))  # type: ignore[arg-type]

    async def serve() -> asyncio.Task[None]:
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - no event says so
            await asyncio.sleep(0.005)
        say("serving")
        return task

    serving = await serve() if server_first else None
    async with a_loop(db) as (_, loop):
        serving = serving or await serve()
        await loop
        await serving
        say("returned")
    say("closed")


def main(how: str, db: str) -> None:
    match how:
        case "default":
            asyncio.run(work(db))
        case "handler" | "exits" | "interrupts" | "dies":
            handler = {"handler": host, "exits": exits, "interrupts": signal.default_int_handler}.get(
                how, signal.SIG_DFL
            )
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, handler)
            asyncio.run(work(db))
        case "ignored":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            asyncio.run(work(db))
        case "loop handler":
            asyncio.run(with_a_loop_handler(db))
        case "two" | "two endless" | "in thread":
            signal.signal(signal.SIGTERM, host)
            asyncio.run(in_thread_too(db) if how == "in thread" else two(db, Endless if "endless" in how else Finishes))
        case "one is stopped":
            asyncio.run(one_is_stopped(db))
        case "after the drain":
            asyncio.run(after_the_drain(db))
        case "forks":
            asyncio.run(forks(db))
        case "under uvicorn":
            under_uvicorn(db)
        case "uvicorn first" | "uvicorn last":
            asyncio.run(with_uvicorn(db, how == "uvicorn first"))


if __name__ == "__main__":
    main(*sys.argv[1:])
