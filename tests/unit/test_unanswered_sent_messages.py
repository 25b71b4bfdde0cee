"""The messages to a run that fails stay in its conversation; after a later success each of them is there once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._execution.context import conversation_id
from agent_runtime_core.errors import RequestRefused, StorageBusy
from agent_runtime_core.interfaces import RunResult, ToolRegistry
from agent_runtime_core.loop import run_turn_loop
from agent_runtime_core.persistence import ConversationMessage
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus
from tests.support.backends import SERVERS, backends
from tests.support.fault_runs import Agent, settings
from tests.support.scripted_model import Scripted

ROOM = "room 7"
KINDS = backends(["memory", "sqlite", "redis", "postgres"], default=["memory", "sqlite"])


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in SERVERS:
        return str(request.getfixturevalue(f"{request.param}_url"))
    return "memory://" if request.param == "memory" else str(tmp_path / "app.db")


class Chat:
    """An agent with a loop. Each line of `model` is an answer, or an error of the model."""

    def __init__(self, *lines: Any) -> None:
        self.model = Scripted(*lines)
        self.before: Callable[[Any], Awaitable[None]] | None = None
        self.after: Callable[[Any], Awaitable[None]] | None = None

    async def run(self, ctx: Any) -> RunResult:
        if self.before is not None:
            await self.before(ctx)
        done = await run_turn_loop(ctx, self.model, ToolRegistry())
        if self.after is not None:
            await self.after(ctx)
        return RunResult({"response": done.text}, done.messages, done.usage)


@asynccontextmanager
async def opened(url: str, chat: Chat, **options: Any) -> AsyncIterator[AgentRunner]:
    registry = Registry()
    registry.register(Agent("chat", chat.run))
    async with AgentRunner.open(url, config=settings(max_retries=1, **options), registry=registry) as runner:
        yield runner


def said(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts], "conversation_id": ROOM}


async def start(runner: AgentRunner, *sent: str, run_id: str = "r", question: str = "one") -> None:
    await runner.submit("chat", said(question), run_id=run_id)
    for text in sent:
        await runner.send(run_id, text)
    assert await runner.run_once()


async def again(runner: AgentRunner, *sent: str, run_id: str = "r") -> RunStatus:
    """Resume the run, and return how it ended."""
    await runner.resume(run_id)
    for text in sent:
        await runner.send(run_id, text)
    assert await runner.run_once()
    return RunStatus((await runner.get_run(run_id)).status)


async def messages(runner: AgentRunner) -> list[ConversationMessage]:
    known = conversation_id(ROOM)
    assert known is not None
    store = runner.persistence.conversations
    return [] if await store.get(known) is None else await store.history(known)


async def kept(runner: AgentRunner) -> list[str]:
    """Return the texts of the conversation; those without an answer end with "?"."""
    return [f"{each.content}{'?' if 'unanswered' in each.metadata else ''}" for each in await messages(runner)]


async def test_a_success_has_each_message_of_the_failed_executions_once(url: str) -> None:
    chat = Chat(ValueError("no"), ValueError("no"), "answer")
    async with opened(url, chat) as runner:
        await start(runner, "two", "three")
        assert await kept(runner) == ["one?", "two?", "three?"]
        assert await again(runner, "four") is RunStatus.FAILED
        assert await kept(runner) == ["one?", "two?", "three?", "four?"]
        assert await again(runner, "five") is RunStatus.SUCCEEDED
        assert [each["content"] for each in chat.model.asked[-1]] == ["one", "two", "three", "four", "five"]
        assert await kept(runner) == ["one", "two", "three", "four", "five", "answer"]
        assert not any(each.metadata for each in await messages(runner))


async def test_a_message_between_two_answers_keeps_its_position(url: str) -> None:
    chat = Chat("first", ValueError("no"), "second")
    async with opened(url, chat) as runner:
        generate = chat.model.generate

        async def answered(messages: list[Any], **options: Any) -> Any:
            if len(messages) == 1:
                await runner.send("r", "two")
            return await generate(messages, **options)

        chat.model.generate = answered  # type: ignore[method-assign]
        await start(runner)
        assert await kept(runner) == ["one?", "two?"]
        assert await again(runner) is RunStatus.SUCCEEDED
        assert await kept(runner) == ["one", "first", "two", "second"]


async def test_two_failed_runs_of_a_conversation_can_both_be_resumed(url: str) -> None:
    """The history of the second run ends with a message to the first one, which must not disappear."""
    chat = Chat(ValueError("no"), ValueError("no"), "answer", "another")
    async with opened(url, chat) as runner:
        await start(runner, "two")
        await start(runner, "four", run_id="s", question="three")
        assert await kept(runner) == ["one?", "two?", "three?", "four?"]
        assert await again(runner) is RunStatus.SUCCEEDED
        assert await again(runner, run_id="s") is RunStatus.SUCCEEDED
        assert [each["content"] for each in chat.model.asked[-1]] == ["one", "two", "three", "four"]
        assert await kept(runner) == ["one", "two", "three", "four", "answer", "another"]


async def test_an_edit_of_a_message_survives_the_success_of_its_run(url: str) -> None:
    chat = Chat(ValueError("no"), "answer")
    async with opened(url, chat) as runner:
        await start(runner, "two")
        known = conversation_id(ROOM)
        assert known is not None
        store = runner.persistence.conversations
        edited = await store.edit_message(known, (await messages(runner))[1].id, "two, edited")
        assert await again(runner) is RunStatus.SUCCEEDED
        assert [each.content for each in await store.history(known, leaf=edited.id)] == ["one", "two, edited"]
        assert [each.content for each in await store.history(known, branch_id=None)] == ["one", "two", "answer"]


async def test_a_message_without_an_answer_keeps_its_mark_after_a_resume(url: str) -> None:
    chat = Chat(ValueError("no"), "answer")
    async with opened(url, chat) as runner:
        await start(runner)

        async def late(ctx: Any) -> None:
            await ctx.step("send", runner.send, "r", "too late")

        chat.after = late
        assert await again(runner) is RunStatus.SUCCEEDED
        assert await kept(runner) == ["one", "answer", "too late?"]


async def test_an_agent_that_reads_no_messages_leaves_them_marked_after_a_resume(url: str) -> None:
    chat = Chat(ValueError("no"), "answer")

    async def run(ctx: Any) -> RunResult:
        response = await chat.model.generate(ctx.input_messages)
        return RunResult({"response": response.message["content"]})

    chat.run = run  # type: ignore[method-assign]
    async with opened(url, chat) as runner:
        await start(runner, "two")
        assert await kept(runner) == ["one?", "two?"]
        assert await again(runner) is RunStatus.SUCCEEDED
        assert await kept(runner) == ["one", "answer", "two?"]


async def test_two_messages_with_the_same_text_are_two(url: str) -> None:
    chat = Chat(ValueError("no"), "answer")
    async with opened(url, chat) as runner:
        await start(runner, "one", "one")
        assert await kept(runner) == ["one?", "one?", "one?"]
        assert await again(runner) is RunStatus.SUCCEEDED
        assert await kept(runner) == ["one", "one", "one", "answer"]


async def test_a_rejected_message_is_no_longer_hidden_after_a_success(url: str) -> None:
    chat = Chat(RequestRefused("bad image"), "answer to x", "answer", "last")
    async with opened(url, chat) as runner:
        await start(runner, "two")
        await runner.execute("chat", None, said("x"))
        assert [each["content"] for each in chat.model.asked[-1]] == ["x"]
        assert await again(runner) is RunStatus.SUCCEEDED
        await runner.execute("chat", None, said("y"))
        assert [each["content"] for each in chat.model.asked[-1]] == ["one", "two", "x", "answer to x", "answer", "y"]


@pytest.mark.parametrize("ends", ["failed", "succeeded"])
async def test_an_outage_between_the_two_writes_changes_nothing(url: str, ends: str) -> None:
    """The messages are in the conversation, and the end of the run is not recorded: the next claim does both again."""
    chat = Chat(ValueError("no"), "answer", "answer")
    async with opened(url, chat) as runner:
        commit, failing = runner.queue.commits.commit, [ends]

        async def unavailable(guard: Any, ops: Any) -> Any:
            if any(op.name == "queue.settle" and op.args[1].status in failing for op in ops):
                raise StorageBusy("the store is away")
            return await commit(guard, ops)

        runner.queue.commits.commit = unavailable  # type: ignore[method-assign]
        if ends == "succeeded":
            await start(runner, "two")
            await runner.resume("r")
        else:
            await runner.submit("chat", said("one"), run_id="r")
            await runner.send("r", "two")
        with pytest.raises(StorageBusy):  # a worker would wait for the store
            await runner.execute("chat", "r", said("one"))
        assert (await runner.get_run("r")).status not in ("failed", "succeeded")
        failing.clear()
        assert [each.rstrip("?") for each in await kept(runner)][:2] == ["one", "two"]
        assert (await runner.execute("chat", "r", said("one"))).status is RunStatus.SUCCEEDED
        assert await kept(runner) == ["one", "two", "answer"]


async def test_a_crash_between_the_messages_and_their_marks_changes_nothing(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = Chat(ValueError("no"), "answer")
    async with opened(url, chat) as runner:
        await start(runner, "two")
        store = runner.persistence.conversations
        with monkeypatch.context() as patched:

            async def unavailable(*args: Any) -> None:
                raise StorageBusy("the store is away")

            patched.setattr(store, "save", unavailable)
            await runner.resume("r")
            with pytest.raises(StorageBusy):
                await runner.execute("chat", "r", said("one"))
            assert (await runner.get_run("r")).status == "pending"
        await runner.execute("chat", "r", said("one"))
        assert await kept(runner) == ["one", "two", "answer"]
