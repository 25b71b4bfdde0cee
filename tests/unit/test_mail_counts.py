"""A commit of a step returns how many messages the run has, and the agent loop then does not ask for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("redis")

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult
from agent_runtime_core._engines.base import Guard, Op
from agent_runtime_core._execution.mailbox import COUNT_SECONDS, MailboxReader
from agent_runtime_core._execution.run_control import MailEvent
from agent_runtime_core._journal.record import PROBE, Record
from agent_runtime_core.interfaces import LLMClient, LLMResponse, LLMStreamChunk
from agent_runtime_core.loop import Hooks, run_turn_loop
from agent_runtime_core.queue.memory import InMemoryQueue
from agent_runtime_core.queue.redis import RedisQueue
from agent_runtime_core.runner import open_run
from agent_runtime_core.testing.clock import VirtualClock
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool

TURNS = 5


class Listening(LLMClient):
    """Requests a tool a few times, and keeps the user's messages of each call."""

    def __init__(self, received: list[list[str]]) -> None:
        self._received = received

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        self._received.append([each["content"] for each in messages if each["role"] == "user"])
        turn = len(self._received)
        if turn > TURNS:
            return LLMResponse({"role": "assistant", "content": "done"}, {}, "m", "stop")
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "work", "arguments": "{}"}}
        return LLMResponse({"role": "assistant", "content": None, "tool_calls": [call]}, {}, "m", "tool_calls")

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        yield LLMStreamChunk(response=await self.generate(messages, **options), finish_reason="stop")


class Chatty(AgentRuntime):
    """Acts in each call of its tool, or after it."""

    key = "chatty"

    def __init__(self, act: Callable[[int], Any] = lambda turn: None, where: str = "tool") -> None:
        self.received: list[list[str]] = []  # by each model call
        self._act, self._where = act, where

    async def run(self, ctx: RunContext) -> RunResult:
        async def work() -> str:
            """Work."""
            if self._where == "tool":
                await self._acted()
            return "worked"

        async def after(name: str, result: Any) -> Any:
            if self._where == "hook":
                await self._acted()
            return result

        tools = ToolRegistry()
        tools.register(Tool.from_function(work))
        await run_turn_loop(ctx, Listening(self.received), tools, hooks=Hooks(after_tool=after))
        return RunResult()

    async def _acted(self) -> None:
        if (done := self._act(len(self.received))) is not None:
            await done


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Receives an entry for each read of a mailbox."""
    found: list[int] = []
    mail = RedisQueue.mail

    async def counted(queue: RedisQueue, run_id: str, after: int = 0) -> Any:
        found.append(after)
        return await mail(queue, run_id, after)

    monkeypatch.setattr(RedisQueue, "mail", counted)
    return found


@pytest.mark.redis
async def test_turns_without_messages_read_no_mailbox(
    redis_url: str, reads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime_core._execution.mailbox.COUNT_SECONDS", 60.0)  # however busy the machine is
    agent = Chatty()
    async with AgentRunner.open(redis_url) as runner:
        await runner.execute(agent)
    assert len(agent.received) == TURNS + 1
    assert reads == [0], "only before the first call"


@pytest.mark.redis
@pytest.mark.parametrize("where", ["tool", "hook"])
@pytest.mark.parametrize("by", ["the runner", "another runner", "another process"])
async def test_a_message_is_in_the_next_model_call(
    where: str, by: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_runtime_core._execution.mailbox.COUNT_SECONDS", 60.0 if by != "another process" else 0.0)
    async with AgentRunner.open(redis_url) as runner, AgentRunner.open(redis_url) as other:
        sender = runner if by == "the runner" else other
        agent = Chatty(lambda turn: sender.send("chat", f"m{turn}"), where)
        await runner.execute(agent, "chat")
    assert len(agent.received) == TURNS + 1
    for turn, received in enumerate(agent.received):
        assert received == [f"m{n}" for n in range(1, turn + 1)]


@pytest.mark.redis
async def test_the_count_of_a_commit_is_that_of_the_mailbox(redis_url: str) -> None:
    queue = RedisQueue(redis_url)
    try:
        run = str((await queue.enqueue(None, "a", {})).run_id)
        count = [Op(queue.mail_count, (run,))]
        for number in range(3):
            assert await queue.commits.commit(None, count) == [number]
            await queue.post(run, "signal", "go", "1")
        [row] = await queue.claim_rows("w", agent_keys=["a"])
        assert await queue.commits.commit(Guard(run, row.claim_id), count) == [3]
        # The reply was lost, and the claim is superseded: all of the commit was applied.
        assert await queue.commits.commit(Guard(run, "0" * 26), count) == [3]
    finally:
        await queue.close()


def reader() -> tuple[MailboxReader, InMemoryQueue, VirtualClock]:
    clock = VirtualClock()
    queue = InMemoryQueue(clock=clock)
    return MailboxReader(queue, "run", MailEvent(), set()), queue, clock


def test_a_count_stands_for_one_read() -> None:
    mailbox, _, _ = reader()
    assert not mailbox.has_read_all()
    mailbox.counted(0)
    assert mailbox.has_read_all()
    assert not mailbox.has_read_all()


def _more(mailbox: MailboxReader, queue: InMemoryQueue, clock: VirtualClock) -> None:
    mailbox.counted(1)


def _notified(mailbox: MailboxReader, queue: InMemoryQueue, clock: VirtualClock) -> None:
    mailbox.arrived.set()


def _posted(mailbox: MailboxReader, queue: InMemoryQueue, clock: VirtualClock) -> None:
    queue.post_op("another", "signal", "go", "1")


def _waited(mailbox: MailboxReader, queue: InMemoryQueue, clock: VirtualClock) -> None:
    clock.advance(COUNT_SECONDS * 1.01)


@pytest.mark.parametrize("since", [_more, _notified, _posted, _waited])
def test_a_count_stands_for_no_read(since: Callable[..., None]) -> None:
    mailbox, queue, clock = reader()
    mailbox.counted(0)
    since(mailbox, queue, clock)
    assert not mailbox.has_read_all()


@pytest.mark.redis
async def test_a_commit_under_way_does_not_return_a_number_that_is_asked_for_meanwhile(redis_url: str) -> None:
    received: list[int] = []
    async with open_run(redis_url, "both") as ctx:
        writer: Any = ctx.journal.writer
        probes = [Record(writer.next_seq(), PROBE, claim_id=writer.claim_id, t=1.0) for _ in range(2)]
        first = asyncio.create_task(writer.append(probes[0]))
        await asyncio.sleep(0)  # until it waits for its commit
        writer.count_mail(received.append)
        assert await first == []
        assert received == []
        assert await writer.append(probes[1]) == []
        assert received == [0]
