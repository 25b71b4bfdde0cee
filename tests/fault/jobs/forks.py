"""A process that forks while it holds a run, and what its child can do: forks.py DB RUN_ID
[inside | closed | opening | half-open | half-closed].

The child says what became of each thing it tried and ends; the parent says "parent went on" when it has
taken another step. With "inside", it forks while a commit is under way, and dies while its child lives on; with
"closed", it forks when it has closed what it had opened, and with "opening" while another thread is opening something;
with "half-open" and "half-closed", while another thread opens or closes this very file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from agent_runtime_core import AgentRunner, open_run
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core._engines.sqlite.transaction import SQLiteTx
from tests.fault.jobs.effects import say


async def tried(runner: AgentRunner, ctx: Any, db: str) -> None:
    """In the child, on a loop of its own."""
    things: dict[str, Callable[[], Awaitable[Any]]] = {
        "read": lambda: runner.get_run("other"),
        "submit": lambda: runner.submit("x", {}),
        "step": lambda: ctx.step("in the child", lambda: 1),
        "emit": lambda: ctx.emit("in the child", {}),
        "close": runner.close,
        "again": lambda: opened(db),
    }
    for name, thing in things.items():
        try:
            said = await thing()
            say(f"{name}: {said or 'done'}")
        except Exception as error:  # noqa: BLE001 - told to the test
            say(f"{name}: {type(error).__name__}")
    if "://" not in db:
        say(f"another: {await opened(f'{db}.another')}")


async def opened(db: str) -> Any:
    """What a step gives in a run that this process opens itself."""
    async with open_run(db, "of the child") as own:
        return await own.step("x", lambda: 7)


def closed(db: str, *, opening: bool = False) -> None:
    asyncio.run(opened(db))
    with SQLiteEngine._open_lock if opening else contextlib.nullcontext():
        pid = os.fork()
        if pid == 0:
            say(f"again: {asyncio.run(opened(db))}")
            os._exit(0)
    os.waitpid(pid, 0)


def half(db: str, how: str) -> None:
    there, forked = threading.Event(), threading.Event()

    def stands(*_: Any) -> None:
        there.set()
        forked.wait()

    asyncio.run(opened(db))
    if how == "half-open":
        SQLiteEngine.add = stands  # type: ignore[method-assign, assignment]
        threading.Thread(target=SQLiteEngine.open, args=[db]).start()
    else:
        engine = SQLiteEngine.open(db)
        engine.writer.run_job(stands)
        there.wait()
        threading.Thread(target=engine.close_now).start()
        while SQLiteEngine._open:
            time.sleep(0.001)
    there.wait()
    pid = os.fork()
    if pid == 0:
        try:
            say(f"again: {asyncio.run(opened(db))}")
        except Exception as error:  # noqa: BLE001 - told to the test
            say(f"again: {type(error).__name__}")
        os._exit(0)
    os.waitpid(pid, 0)
    forked.set()


def main(db: str, run_id: str) -> None:
    loop = asyncio.Runner()

    async def begin() -> tuple[AgentRunner, Any, Any]:
        run = open_run(db, run_id)
        ctx = await run.__aenter__()
        await ctx.step("first", lambda: 1)
        return AgentRunner.open(db), run, ctx

    async def go_on() -> None:
        await ctx.step("second", lambda: 2)
        await ctx.emit("in the parent", {})
        say("parent went on")
        sys.stdin.readline()
        await run.__aexit__(None, None, None)
        await runner.close()

    runner, run, ctx = loop.run(begin())
    pid = os.fork()
    if pid == 0:
        asyncio.run(tried(runner, ctx, db))
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    say(f"child ended: {status}")
    loop.run(go_on())
    loop.close()


def lives_on(tx: SQLiteTx) -> None:
    """Fork inside a commit; the child outlives its parent, which dies there."""
    pid = os.fork()
    if pid == 0:
        os.close(1)
        select.select([0], [], [], 45)  # until the test is over
        os._exit(0)
    say(f"forked {pid}")
    os.kill(os.getpid(), signal.SIGKILL)


async def inside(db: str, run_id: str) -> None:
    async with open_run(db, run_id) as ctx:
        await ctx.step("first", lambda: 1)
        engine: SQLiteEngine = ctx._writer.queue.engine  # type: ignore[attr-defined]
        ops: dict[str, Callable[..., Any]] = engine.writer.committer.operations
        ops["events.publish"] = lambda tx, *args: lives_on(tx)
        await ctx.emit("x", {})


if __name__ == "__main__":
    if sys.argv[3:] in (["half-open"], ["half-closed"]):
        half(sys.argv[1], sys.argv[3])
    elif sys.argv[3:] in (["closed"], ["opening"]):
        closed(sys.argv[1], opening=sys.argv[3] == "opening")
    elif sys.argv[3:]:
        asyncio.run(inside(sys.argv[1], sys.argv[2]))
    else:
        main(sys.argv[1], sys.argv[2])
