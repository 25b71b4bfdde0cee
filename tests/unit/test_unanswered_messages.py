"""A run that fails leaves the messages of its user in the conversation, marked as unanswered."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core._execution.context import conversation_id
from agent_runtime_core.errors import ContextOverflow, RequestRefused, StorageBusy
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.persistence import ConversationMessage
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus
from tests.support.fault_runs import Agent, settings

ROOM = "room 7"


class Chat:
    """An agent that answers with the number of its messages, or raises the errors of `failures` first."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.seen: list[list[Any]] = []
        self.owns = False

    async def run(self, ctx: Any) -> RunResult:
        self.seen.append([each["content"] for each in ctx.input_messages])
        if self.owns:
            ctx.own_conversation()
        if self.failures:
            raise self.failures.pop(0)
        return RunResult({"response": f"answer to {ctx.input_messages[-1]['content']}"})


@asynccontextmanager
async def opened(path: Path, chat: Chat, **options: Any) -> AsyncIterator[AgentRunner]:
    registry = Registry()
    registry.register(Agent("chat", chat.run))
    config = settings(max_retries=options.pop("max_retries", 1), **options)
    async with AgentRunner.open(path / "app.db", config=config, registry=registry) as runner:
        yield runner


def said(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts], "conversation_id": ROOM}


async def messages(runner: AgentRunner) -> list[ConversationMessage]:
    known = conversation_id(ROOM)
    assert known is not None
    store = runner.persistence.conversations
    return [] if await store.get(known) is None else await store.history(known)


async def kept(runner: AgentRunner) -> list[tuple[str, bool]]:
    return [(str(each.content), "unanswered" in each.metadata) for each in await messages(runner)]


async def test_the_message_of_a_failed_run_is_kept_and_the_next_run_sees_it(tmp_path: Path) -> None:
    chat = Chat()
    async with opened(tmp_path, chat) as runner:
        chat.failures = [ValueError("no")]
        assert (await runner.execute("chat", None, said("one"))).status is RunStatus.FAILED
        [one] = await messages(runner)
        assert (one.role, one.content, one.metadata) == ("user", "one", {"unanswered": True})
        await runner.execute("chat", None, said("two"))
        assert chat.seen[1] == ["one", "two"]
        assert await kept(runner) == [("one", True), ("two", False), ("answer to two", False)]
        await runner.execute("chat", None, said("three"))
        assert chat.seen[2] == ["one", "two", "answer to two", "three"]


async def test_a_run_that_fails_with_no_conversation_before_creates_one_for_its_agent(tmp_path: Path) -> None:
    chat = Chat()
    chat.failures = [ValueError("no")]
    async with opened(tmp_path, chat) as runner:
        await runner.execute("chat", None, said("one", "and one more"))
        assert await kept(runner) == [("one", True), ("and one more", True)]
        known = conversation_id(ROOM)
        assert known is not None
        conversation = await runner.persistence.conversations.get(known)
        assert conversation is not None
        assert conversation.agent_key == "chat"


async def test_a_resumed_run_that_succeeds_adds_its_answer_and_removes_the_mark(tmp_path: Path) -> None:
    chat = Chat()
    async with opened(tmp_path, chat) as runner:
        await runner.execute("chat", None, said("zero"))
        chat.failures = [ValueError("no"), ValueError("no")]
        run_id = (await runner.execute("chat", None, said("one"))).run_id
        assert run_id is not None
        for _ in range(2):
            await runner.resume(run_id)
            assert await runner.run_once()
        assert (await runner.wait(run_id)).status is RunStatus.SUCCEEDED
        assert chat.seen[1:] == [["zero", "answer to zero", "one"]] * 3
        texts = ["zero", "answer to zero", "one", "answer to one"]
        assert await kept(runner) == [(text, False) for text in texts]


async def test_a_retry_in_the_same_run_keeps_nothing_before_the_run_ends(tmp_path: Path) -> None:
    chat = Chat()
    chat.failures = [ValueError("no"), ValueError("no")]
    async with opened(tmp_path, chat, max_retries=3) as runner:
        result = await runner.execute("chat", None, said("one"))
        assert result.status is RunStatus.SUCCEEDED
        assert await kept(runner) == [("one", False), ("answer to one", False)]


async def test_a_client_that_sends_the_whole_conversation_sends_nothing_twice(tmp_path: Path) -> None:
    chat = Chat()
    async with opened(tmp_path, chat) as runner:
        chat.failures = [ValueError("no")]
        await runner.execute("chat", None, said("one"))
        await runner.execute("chat", None, said("one", "two"))
        assert chat.seen[1] == ["one", "two"]
        assert await kept(runner) == [("one", True), ("two", False), ("answer to two", False)]


@pytest.mark.parametrize("error", [RequestRefused("bad image"), ContextOverflow("too long")])
async def test_a_message_that_the_provider_rejects_is_kept_and_not_sent_again(tmp_path: Path, error: Exception) -> None:
    """Otherwise it would end the conversation: the provider would reject every later run too."""
    chat = Chat()
    async with opened(tmp_path, chat) as runner:
        await runner.execute("chat", None, said("zero"))
        chat.failures = [error]
        run_id = (await runner.execute("chat", None, said("one"))).run_id
        assert run_id is not None
        await runner.execute("chat", None, said("two"))
        assert chat.seen[2] == ["zero", "answer to zero", "two"]
        assert ("one", True) in await kept(runner)
        await runner.resume(run_id)  # with another model, it may succeed
        assert await runner.run_once()
        assert (await runner.wait(run_id)).status is RunStatus.SUCCEEDED
        assert all(not each.metadata for each in await messages(runner))


async def test_it_can_be_turned_off_and_an_agent_that_owns_the_conversation_keeps_nothing(tmp_path: Path) -> None:
    chat = Chat()
    async with opened(tmp_path, chat, keep_unanswered=False) as runner:
        chat.failures = [ValueError("no")]
        await runner.execute("chat", None, said("one"))
        assert await kept(runner) == []
    async with opened(tmp_path, chat) as runner:
        chat.owns, chat.failures = True, [ValueError("no")]
        await runner.execute("chat", None, said("one"))
        assert await kept(runner) == []


async def test_a_run_that_times_out_keeps_its_message(tmp_path: Path) -> None:
    chat = Chat()
    async with opened(tmp_path, chat, run_timeout_seconds=0.05) as runner:

        async def busy(ctx: Any) -> RunResult:
            while True:
                await ctx.step("wait", lambda: None)

        agent = Agent("busy", busy)
        result = await runner.execute(agent, None, said("one"))
        assert result.status is RunStatus.TIMED_OUT
        assert await kept(runner) == [("one", True)]


async def test_a_store_that_fails_does_not_change_how_the_run_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat()
    chat.failures = [ValueError("the reason")]

    async def away(*args: Any, **options: Any) -> None:
        raise StorageBusy("the store is away")

    async with opened(tmp_path, chat) as runner:
        monkeypatch.setattr(runner.persistence.conversations, "append", away)
        with caplog.at_level(logging.WARNING):
            result = await runner.execute("chat", None, said("one"))
        assert result.error is not None
        assert result.error.message == "the reason"
    assert any("are not in its conversation: the store is away" in each.getMessage() for each in caplog.records)
    assert isinstance(result.run_id, UUID)
