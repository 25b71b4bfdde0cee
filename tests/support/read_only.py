"""A store to be read, all that is read of it, and all that shows whether something was written to its directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any
from uuid import UUID

from agent_runtime_core import AgentRunner, RunnerConfig
from agent_runtime_core._journal.record import DONE
from agent_runtime_core.persistence import Conversation, ConversationMessage
from agent_runtime_core.registry import Registry
from tests.support.runs import Script

CONVERSATION = UUID(int=7)
Listing = dict[str, tuple[tuple[int, int, int], int, int, bytes | None]]


def listing(directory: Path) -> Listing:
    """Owner, mode, size, time and content of a directory and of all that is in it.

    Not the time of the last change of these: as root, SQLite gives each file that it opens to its present owner.
    """
    found: Listing = {}
    for path in (directory, *sorted(directory.rglob("*"))):
        there = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(there.st_mode) else None
        name = path.relative_to(directory).as_posix()
        found[name] = ((there.st_uid, there.st_gid, there.st_mode), there.st_size, there.st_mtime_ns, content)
    return found


async def a_run(ctx: Any) -> int:
    await ctx.emit("seen", {"n": 1})
    value: int = await ctx.step("one", lambda: 1)
    return value


async def a_failure(ctx: Any) -> None:
    raise ValueError("wrong")


async def a_question(ctx: Any) -> Any:
    return await ctx.approve("ship", {"order": 1})


def agents() -> Registry:
    registry = Registry()
    for body in (a_run, a_failure, a_question):
        registry.register(Script(body, body.__name__))
    return registry


async def write_store(url: str | os.PathLike[str], *, conversation: bool = True) -> None:
    """Store a run that succeeded, one that failed, one that waits for an answer, a pending one, and a conversation."""
    config = RunnerConfig(max_retries=1, park_after=0)
    async with AgentRunner.open(url, registry=agents(), config=config) as runner:
        for agent in ("a_run", "a_failure", "a_question"):
            await runner.submit(agent, run_id=agent)
            await runner.run_once()
        await runner.submit("a_run", run_id="pending")
        if conversation:
            await save_conversation(runner)


async def save_conversation(runner: AgentRunner) -> None:
    stores = runner.persistence.conversations
    await stores.save(Conversation(id=CONVERSATION))
    await stores.append(CONVERSATION, [ConversationMessage(role="user", content="hello")])


async def read_all(url: str | os.PathLike[str]) -> dict[str, Any]:
    """Open the store read-only, and return what it has, as JSON values."""
    async with AgentRunner.open(url, read_only=True) as runner:
        return await read(runner)


async def read(runner: AgentRunner) -> dict[str, Any]:
    run_id = str((await runner.get_run("a_run")).run_id)
    ids = [info.run_key for info in await runner.runs()]
    talk = await runner.persistence.conversations.get(CONVERSATION)
    found = await runner.persistence.conversations.search("hello")
    return {
        "runs": {each: str((await runner.get_run(str(each))).status) for each in ids},
        "output": (await runner.wait("a_run", 0)).final_output,
        "streamed": [event.event_type async for event in runner.stream("a_run")],
        "events": [event.event_type for event in await runner.event_bus.get_events("a_question")],
        "done": [each.name for each in await runner.state_store.records(run_id) if each.kind == DONE],
        "messages": [] if talk is None else [each.content for each in talk.messages],
        "found": len(found),
    }


EXPECTED: dict[str, Any] = {
    "runs": {"a_run": "succeeded", "a_failure": "failed", "a_question": "waiting", "pending": "pending"},
    "output": {"value": 1},
    "streamed": ["run.started", "seen", "step.started", "step.completed", "run.succeeded"],
    "events": ["run.started", "approval.requested"],
    "done": ["one"],
    "messages": ["hello"],
    "found": 1,
}
WITHOUT_CONVERSATION = {**EXPECTED, "messages": [], "found": 0}
