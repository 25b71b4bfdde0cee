"""Everything that this library does with a database file, in one process that notes who opens it: opens.py FOLDER.

Says a line for each time that Python opened the database or the index of its log, and "watched" at the end. What SQLite
opens is not seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
import traceback
from pathlib import Path
from typing import Any, cast

from agent_runtime_core import AgentRunner
from agent_runtime_core.cli.main import main as command
from agent_runtime_core.config import configure
from agent_runtime_core.persistence import Conversation, ConversationMessage, PersistenceConfig, PersistenceManager
from agent_runtime_core.registry import Registry
from agent_runtime_core.turns import ConfigLoader
from tests.fault.jobs.effects import say
from tests.support.fault_runs import Agent, settings

OPENED: list[str] = []


def watch(db: Path) -> None:
    """Note each opening of the database and of the index of its log: to close it again drops this process's locks."""
    kept = (db, Path(f"{db}-shm"))

    def heard(event: str, args: tuple[Any, ...]) -> None:
        # Exclusively, a file that is there is not opened at all.
        if (
            event not in ("open", "os.truncate")
            or isinstance(args[0], int)
            or (event == "open" and args[2] & os.O_EXCL)
        ):
            return
        with contextlib.suppress(OSError, ValueError):
            if any(os.path.samefile(args[0], each) for each in kept if each.exists()):
                frames = traceback.extract_stack()[:-1]
                OPENED.append(" < ".join(f"{Path(each.filename).name}:{each.name}" for each in frames[::-1][:4]))

    sys.addaudithook(heard)


async def runs(db: Path, durability: str) -> None:
    configure(durability=durability)
    agents = Registry()

    async def steps(ctx: Any) -> int:
        for i in range(20):
            await ctx.step(f"s{i}", lambda: "x" * 120_000)
        await ctx.transaction("rows", lambda tx: tx.execute("CREATE TABLE IF NOT EXISTS mine (a)"))
        return 1

    agents.register(Agent("steps", steps))
    agents.register(Agent("parks", lambda ctx: ctx.wait_for_signal("go")))
    runner = AgentRunner.open(db, config=settings(park_after=0), registry=agents)
    async with runner, PersistenceManager(PersistenceConfig.on(cast("Any", runner.queue).engine)) as stores:
        await runner.execute("steps")
        parked, run_id = await runner.submit("parks"), await runner.submit("steps")
        working = asyncio.create_task(runner.run_loop(0.05, concurrency=2, handle_signals=False))
        await runner.wait(run_id)
        await runner.signal(parked, "go", 1)
        await runner.wait(parked)
        _ = [event async for event in runner.stream(parked)]
        await runner.fork(run_id, new_run_id=None)
        await stores.memory.set("k", 1)
        talk = Conversation()
        await stores.conversations.save(talk)
        await stores.conversations.append(talk.id, [ConversationMessage(role="user", content="words")])
        await stores.conversations.search("words")
        await read_only(db)
        runner.stop()
        await working
        await asyncio.to_thread(commands, db, parked)
        await runner.vacuum({"succeeded": 0})


async def read_only(db: Path) -> None:
    async with AgentRunner.open(db, read_only=True) as runner:
        for info in await runner.runs():
            await runner.event_bus.get_events(info.run_id)


def commands(db: Path, run_id: Any) -> None:
    """What people do while it is open here."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for args in (["runs"], ["show", str(run_id)], ["dead", "list"], ["cancel", str(run_id)]):
            command([*args, "--url", str(db)])


async def main(folder: str) -> None:
    db = Path(folder) / "runs.db"
    watch(db)
    await runs(db, "full")
    for each in Path(f"{db}.live").iterdir():
        each.unlink()
    Path(f"{db}.live").rmdir()
    await runs(db, "normal")  # a file that may be somebody else's is looked at first
    (Path(folder) / "config.toml").write_text("")
    ConfigLoader(Path(folder) / "config.toml")
    seen = len(OPENED)
    db.read_bytes()
    for opened in OPENED[:seen]:
        say(opened)
    say("watched" if len(OPENED) > seen else "blind")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
