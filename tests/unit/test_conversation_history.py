"""Runs that go on with a conversation, and keep what they said in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.persistence import (
    Conversation,
    ConversationMessage,
    InMemoryAuditStore,
    InMemoryConversationStore,
    PersistenceConfig,
    PersistenceManager,
    ToolCall,
)
from agent_runtime_core.portal import call
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.state import InMemoryStateStore
from agent_runtime_core.status import RunStatus
from tests.support.fault_runs import Agent, settings

CHAT = uuid4()


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


class Talk:
    """A runner with stores, and an agent that answers with what it was told."""

    def __init__(self, path: Path) -> None:
        self.stores = PersistenceManager(
            PersistenceConfig(conversation_store=InMemoryConversationStore(), audit_store=InMemoryAuditStore())
        )
        self.heard: list[list[Any]] = []
        self.agents = Registry()
        self.agents.register(Agent("a", self.answer))
        self.runner = AgentRunner.open(path / "a.db", config=settings(), persistence=self.stores, registry=self.agents)
        self.give: Any = self.whole

    async def answer(self, ctx: Any) -> RunResult:
        self.heard.append(list(ctx.input_messages))
        result: RunResult = self.give(ctx, f"answer {len(self.heard)}")
        return result

    @staticmethod
    def whole(ctx: Any, text: str) -> RunResult:
        return RunResult({"response": text}, [*ctx.input_messages, said("assistant", text)])

    async def run(self, *messages: Any, **more: Any) -> RunResult:
        return await self.runner.execute("a", None, {"messages": list(messages), "conversation_id": str(CHAT), **more})

    async def kept(self) -> list[tuple[str, Any]]:
        return [(each.role, each.content) for each in await self.stores.conversations.get_messages(CHAT)]


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    made = Talk(tmp_path)
    yield made
    call(made.runner.close)


async def test_a_run_goes_on_with_its_conversation(talk: Talk) -> None:
    await talk.run(said("user", "one"))
    await talk.run(said("user", "two"))
    assert talk.heard[1] == [said("user", "one"), said("assistant", "answer 1"), said("user", "two")]
    assert await talk.kept() == [("user", "one"), ("assistant", "answer 1"), ("user", "two"), ("assistant", "answer 2")]
    conversation = await talk.stores.conversations.get(CHAT)
    assert conversation is not None
    assert conversation.agent_key == "a"


PROMPTS = pytest.mark.parametrize("role", ["system", "developer"])


@PROMPTS
async def test_input_that_begins_with_the_history_is_not_loaded_again(talk: Talk, role: str) -> None:
    await talk.run(said("user", "one"))
    before = [said("user", "one"), {**said("assistant", "answer 1"), "metadata": {"seen": 1}}]
    await talk.run(said(role, "be brief"), *before, said("user", "two"))
    assert [each["content"] for each in talk.heard[1]] == ["be brief", "one", "answer 1", "two"]
    assert [content for _, content in await talk.kept()] == ["one", "answer 1", "two", "answer 2"]


async def test_the_prompt_is_the_agents_own_affair(talk: Talk) -> None:
    talk.give = lambda ctx, text: RunResult(
        {}, [said("system", "be kind"), *ctx.input_messages, said("assistant", text)]
    )
    await talk.run(said("user", "one"))
    await talk.run(said("user", "two"))
    assert [role for role, _ in await talk.kept()] == ["user", "assistant"] * 2


@PROMPTS
async def test_a_prompt_of_the_input_is_not_kept_and_not_repeated(talk: Talk, role: str) -> None:
    talk.give = lambda ctx, text: RunResult(
        {}, [said("system", "be kind"), *ctx.input_messages, said("assistant", text)]
    )
    for each in ("one", "two", "three"):
        await talk.run(said(role, "be brief"), said("user", each))
    assert talk.heard[2][0] == said(role, "be brief")
    assert [each["content"] for each in talk.heard[2][1:]] == ["one", "answer 1", "two", "answer 2", "three"]
    assert [kept for kept, _ in await talk.kept()] == ["user", "assistant"] * 3


@PROMPTS
async def test_a_prompt_that_is_stored_stays_and_repeats_nothing(talk: Talk, role: str) -> None:
    prompt = ConversationMessage(role=role, content="be kind")
    await talk.stores.conversations.save(Conversation(id=CHAT, messages=[prompt]))
    for each in ("one", "two", "three"):
        await talk.run(said("user", each))
    assert [each["content"] for each in talk.heard[1]] == ["be kind", "one", "answer 1", "two"]
    assert [kept for kept, _ in await talk.kept()] == [role, *["user", "assistant"] * 3]
    await talk.run(*talk.heard[2], said("assistant", "answer 3"), said("user", "four"))
    assert [each["content"] for each in talk.heard[3]][:2] == ["be kind", "one"]
    assert [content for _, content in await talk.kept()][-3:] == ["answer 3", "four", "answer 4"]


@pytest.mark.parametrize("front", [[], [said("system", "what came before: ...")]])
async def test_an_agent_may_give_the_end_of_a_long_history(talk: Talk, front: list[Any]) -> None:
    talk.give = lambda ctx, text: RunResult({}, [*front, *ctx.input_messages[-3:], said("assistant", text)])
    for each in ("one", "two", "three"):
        await talk.run(said("user", each))
    contents = [content for _, content in await talk.kept()]
    assert contents == ["one", "answer 1", "two", "answer 2", "three", "answer 3"]


async def test_an_agent_that_says_nothing_keeps_what_it_was_told(talk: Talk) -> None:
    talk.give = lambda ctx, text: RunResult({}, ctx.input_messages[-2:])
    for each in ("one", "two", "three"):
        await talk.run(said("user", each))
    assert [content for _, content in await talk.kept()] == ["one", "two", "three"]


async def test_an_answer_that_is_the_same_again_is_kept_again(talk: Talk) -> None:
    talk.give = lambda ctx, text: RunResult({}, [said("assistant", "yes")])
    await talk.run(said("user", "one"))
    await talk.run()
    await talk.run(said("user", "one"))
    assert [content for _, content in await talk.kept()] == ["one", "yes", "yes", "one", "yes"]


# -- histories that a provider would refuse


def calls(*ids: str) -> ConversationMessage:
    return ConversationMessage(role="assistant", tool_calls=[ToolCall(id=each, name="look") for each in ids])


def result_of(call_id: str) -> ConversationMessage:
    return ConversationMessage(role="tool", content=f"of {call_id}", tool_call_id=call_id)


async def test_a_call_without_a_result_is_told_with_one(talk: Talk) -> None:
    stored = [
        result_of("nobody's"), calls("a", "b"), result_of("b"), ConversationMessage(role="user", content="well?"),
        result_of("a"), calls("a"),
    ]  # fmt: skip
    await talk.stores.conversations.save(Conversation(id=CHAT, messages=stored))
    for number in (1, 2):
        await talk.run(said("user", "go on"))
        assert len(await talk.kept()) == len(stored) + 2 * number
    told = [(each["role"], each.get("tool_call_id"), each["content"]) for each in talk.heard[1]]
    missing = "Error: no result of this call is known"
    assert told == [
        ("assistant", None, ""), ("tool", "b", "of b"), ("tool", "a", missing), ("user", None, "well?"),
        ("assistant", None, ""), ("tool", "a", missing),
        ("user", None, "go on"), ("assistant", None, "answer 1"), ("user", None, "go on"),
    ]  # fmt: skip


async def test_a_result_may_come_with_the_next_run(talk: Talk) -> None:
    await talk.stores.conversations.save(Conversation(id=CHAT, messages=[*long()[:20], calls("a", "b")]))
    given = [{"role": "tool", "tool_call_id": "b", "content": "of b"}, said("user", "go on")]
    result = await talk.run(*given)
    missing = {"role": "tool", "tool_call_id": "a", "content": "Error: no result of this call is known"}
    assert talk.heard[0][-3:] == [missing, *given]
    assert result.run_id is not None
    assert await talk.runner.wait(result.run_id) == result
    await talk.run(
        *[each for each in talk.heard[0] if each != missing], said("assistant", "answer 1"), said("user", "x")
    )
    assert [content for _, content in await talk.kept()][-5:] == ["of b", "go on", "answer 1", "x", "answer 2"]


# -- long histories


def long() -> list[ConversationMessage]:
    """More than a record may hold."""
    roles = ["user", "assistant"] * 60
    return [ConversationMessage(role=role, content=f"{n} " + "x" * 10_000) for n, role in enumerate(roles)]


async def test_a_conversation_of_any_length_goes_on(talk: Talk) -> None:
    before = [ConversationMessage(role="system", content="be kind"), *long()]
    await talk.stores.conversations.save(Conversation(id=CHAT, messages=before))
    for number in (1, 2):
        result = await talk.run(said("user", "more"))
        assert result.status is RunStatus.SUCCEEDED, result.error
        assert [each["content"] for each in result.final_messages][-2:] == ["more", f"answer {number}"]
        assert len(await talk.kept()) == len(result.final_messages) == 121 + 2 * number
        assert result.run_id is not None
        assert await talk.runner.wait(result.run_id) == result, "the record gives all of it again"
        record = await talk.runner.state_store.ending(str(result.run_id))
        assert record is not None
        assert record.result is not None
        assert len(record.result) < 2000


async def test_a_result_whose_history_is_gone_is_without_it(talk: Talk, caplog: pytest.LogCaptureFixture) -> None:
    await talk.stores.conversations.save(Conversation(id=CHAT, messages=long()))
    result = await talk.run(said("user", "more"))
    assert result.run_id is not None
    await talk.stores.conversations.delete(CHAT)
    again = await talk.runner.wait(result.run_id)
    assert again.final_messages == [said("user", "more"), said("assistant", "answer 1")]
    assert again.final_output == result.final_output
    assert "does not contain it" in caplog.text


async def test_a_parent_is_told_what_is_new(talk: Talk) -> None:
    await talk.stores.conversations.save(Conversation(id=CHAT, messages=long()))

    async def ask(ctx: Any) -> RunResult:
        more = {"messages": [said("user", "more")], "conversation_id": str(CHAT)}
        return RunResult({}, (await ctx.call("a", more)).final_messages)

    talk.agents.register(Agent("parent", ask))
    result = await talk.runner.execute("parent")
    assert result.final_messages == [said("user", "more"), said("assistant", "answer 1")], result.error
    runner = AgentRunner(*talk.runner.backends, settings(park_after=0), persistence=talk.stores, registry=talk.agents)
    run_id = await runner.submit("parent")
    while await runner.run_once():
        pass
    result = await runner.wait(run_id)
    assert result.final_messages == [said("user", "more"), said("assistant", "answer 2")], result.error


async def test_what_cannot_be_recorded_is_not_kept(talk: Talk) -> None:
    talk.give = lambda ctx, text: RunResult({"response": object()}, [said("assistant", text)])
    result = await talk.run(said("user", "one"))
    assert result.status is RunStatus.FAILED
    assert await talk.kept() == [("user", "one")]


async def test_an_agent_may_give_only_what_is_new(talk: Talk) -> None:
    talk.give = lambda ctx, text: RunResult({}, [said("assistant", text)])
    await talk.run(said("user", "one"))
    await talk.run(said("user", "two"))
    assert [content for _, content in await talk.kept()] == ["one", "answer 1", "two", "answer 2"]


@pytest.mark.parametrize("none", [[], None])
async def test_an_agent_that_gives_no_messages_has_its_response_kept(talk: Talk, none: Any) -> None:
    talk.give = lambda ctx, text: RunResult({"response": text}, none)
    await talk.run(said("user", "one"))
    assert await talk.kept() == [("user", "one"), ("assistant", "answer 1")]


async def test_a_run_without_a_conversation_has_no_history(talk: Talk) -> None:
    await talk.run(said("user", "one"))
    await talk.runner.execute("a", None, {"messages": [said("user", "two")]})
    assert talk.heard[1] == [said("user", "two")]
    assert len(await talk.kept()) == 2


async def test_it_goes_on_with_the_active_branch(talk: Talk) -> None:
    await talk.run(said("user", "one"))
    [one, _] = await talk.stores.conversations.get_messages(CHAT)
    await talk.stores.conversations.edit_message(CHAT, one.id, "won")
    await talk.run(said("user", "two"))
    assert [each["content"] for each in talk.heard[1]] == ["won", "two"]
    path = await talk.stores.conversations.history(CHAT)
    assert [each.content for each in path] == ["won", "two", "answer 2"]


async def test_the_messages_of_a_fork_go_to_a_branch_of_their_own(talk: Talk) -> None:
    first = await talk.run(said("user", "one"))
    assert first.run_id is not None
    forked = await talk.runner.fork(first.run_id)
    assert await talk.runner.run_once()
    result = await talk.runner.wait(forked)
    assert result.status is RunStatus.SUCCEEDED
    main = await talk.stores.conversations.history(CHAT)
    assert [each.content for each in main] == ["one", "answer 1"]
    branches = await talk.stores.conversations.branches(CHAT)
    assert len(branches) == 2


async def test_a_fork_goes_on_behind_a_message_of_the_same_role(talk: Talk) -> None:
    await talk.run(said("user", "one"))
    reminder = await talk.run()
    assert reminder.run_id is not None
    forked = await talk.runner.fork(reminder.run_id)
    assert await talk.runner.run_once()
    assert (await talk.runner.wait(forked)).status is RunStatus.SUCCEEDED
    main = await talk.stores.conversations.history(CHAT)
    assert [each.content for each in main] == ["one", "answer 1", "answer 2"]
    [_, branch] = await talk.stores.conversations.branches(CHAT)
    assert [each.content for each in await talk.stores.conversations.history(CHAT, branch_id=branch.id)] == [
        "one",
        "answer 1",
        "answer 3",
    ]


@pytest.mark.parametrize("given", [[("user", "two")], []])
async def test_it_goes_on_with_an_active_branch_that_has_no_message(talk: Talk, given: list[tuple[str, str]]) -> None:
    await talk.run(said("user", "one"))
    stored = await talk.stores.conversations.get(CHAT)
    assert stored is not None
    stored.active_branch_id = uuid4()
    await talk.stores.conversations.save(stored)
    for _ in range(2):
        await talk.run(*(said(*each) for each in given))
    before = ["one", "answer 1", *(text for _, text in given)]
    assert [each["content"] for each in talk.heard[1]] == before
    path = [each.content for each in await talk.stores.conversations.history(CHAT)]
    assert path == [*before, "answer 2", *(text for _, text in given), "answer 3"]
    assert {each.branch_id for each in (await talk.stores.conversations.history(CHAT))[-2:]} == {
        stored.active_branch_id
    }


async def test_what_is_offered_twice_is_there_once(talk: Talk) -> None:
    """A worker that dies between the append and the end leaves messages that the next one offers again."""
    conversations = talk.stores.conversations
    append, times = conversations.append, 0

    async def dying(*args: Any, **kwargs: Any) -> int:
        nonlocal times
        times += 1
        added = await append(*args, **kwargs)
        if times == 1:
            raise RuntimeError("died right after")
        return added

    conversations.append = dying  # type: ignore[method-assign]
    result = await talk.run(said("user", "one"))
    assert result.status is RunStatus.SUCCEEDED, result.error
    assert times == 2
    assert [role for role, _ in await talk.kept()] == ["user", "assistant"]
    assert talk.heard[0] == talk.heard[1], "what was loaded is pinned"


async def test_a_history_that_grew_meanwhile_is_loaded_as_it_was(talk: Talk) -> None:
    async def grow(ctx: Any) -> RunResult:
        talk.heard.append(list(ctx.input_messages))
        if len(talk.heard) == 1:
            await talk.stores.conversations.save(Conversation(id=CHAT))
            await talk.stores.conversations.add_message(CHAT, ConversationMessage(role="user", content="elsewhere"))
            raise ValueError("once more")
        return talk.whole(ctx, "done")

    talk.answer = grow  # type: ignore[method-assign]
    talk.agents.clear()
    talk.agents.register(Agent("a", grow))
    await talk.run(said("user", "one"))
    assert talk.heard[0] == talk.heard[1] == [said("user", "one")]
    assert [content for _, content in await talk.kept()] == ["elsewhere", "one", "done"]


async def test_a_conversation_by_a_name_of_its_own(talk: Talk) -> None:
    await talk.runner.execute("a", None, {"messages": [said("user", "one")], "conversation_id": "room 7"})
    await talk.runner.execute("a", None, {"messages": [said("user", "two")], "conversation_id": "room 7"})
    assert [each["content"] for each in talk.heard[1]] == ["one", "answer 1", "two"]


# -- what is audited


async def test_a_run_is_audited(talk: Talk) -> None:
    async def work(ctx: Any) -> RunResult:
        await ctx.emit("tool.call", {"tool_name": "look", "tool_call_id": "c1", "tool_args": {}})
        await ctx.emit("tool.result", {"tool_name": "look", "tool_call_id": "c1", "result": None, "error": "gone"})
        return RunResult({}, usage={"prompt_tokens": 3, "cost_usd": 0.5})

    talk.agents.clear()
    talk.agents.register(Agent("a", work))
    result = await talk.run()
    audit = talk.stores.audit
    assert audit is not None
    entries = await audit.get_events(run_id=result.run_id)
    kinds = [each.event_type.value for each in reversed(entries)]
    assert kinds == ["agent_start", "tool_call", "tool_error", "agent_end"]
    assert all(each.agent_key == "a" and each.conversation_id == CHAT for each in entries)
    [error] = await audit.get_errors()
    assert (error.error_type, error.message, error.severity.value) == ("ToolError", "gone", "warning")
    assert (await audit.get_metric_summary("cost_usd"))["sum"] == 0.5
    assert (await audit.get_metric_summary("run_duration_ms"))["count"] == 1
    assert (await audit.get_metric_summary("tool_duration_ms"))["count"] == 1


@pytest.mark.parametrize("apart", [False, True])
async def test_events_of_other_code_are_no_outcomes(apart: bool, tmp_path: Path) -> None:
    """An older library let a run emit these, and any code may publish them on the bus."""
    stores = PersistenceManager(PersistenceConfig(audit_store=InMemoryAuditStore()))
    backends = InMemoryQueue(), InMemoryEventBus(), InMemoryStateStore()
    agents, options = Registry(), dict[str, Any](config=settings(), persistence=stores)
    made = (
        AgentRunner(*backends, registry=agents, **options)
        if apart
        else AgentRunner.open(tmp_path / "a.db", registry=agents, **options)
    )
    async with made as runner:

        async def work(ctx: Any) -> RunResult:
            for kind in ("run.started", "run.failed", "run.cancelled", "run.timed_out", "run.succeeded", "run.resumed"):
                await runner.event_bus.publish(ctx.run_id, kind, {"message": "forged"})
            if ctx.attempt == 1:
                raise ValueError("once")
            return RunResult({})

        agents.register(Agent("a", work))
        result = await runner.execute("a", None, {})
        audit = stores.audit
        assert audit is not None
        # Entries of one instant come in any order.
        actions = sorted(str(each.action) for each in await audit.get_events(run_id=result.run_id))
        assert actions == ["agent 'a' started", "agent 'a' started", "agent 'a' succeeded"]
        assert await audit.get_errors() == []


async def test_a_run_that_tells_no_usage_is_audited(talk: Talk) -> None:
    talk.give = lambda ctx, text: RunResult({}, usage=None)  # type: ignore[arg-type]
    await talk.run()
    audit = talk.stores.audit
    assert audit is not None
    assert [each.event_type.value for each in await audit.get_events()] == ["agent_end", "agent_start"]


async def test_a_failed_run_is_an_error(talk: Talk) -> None:
    def fail(ctx: Any, text: str) -> RunResult:
        raise ValueError("no")

    talk.give = fail
    result = await talk.run()
    audit = talk.stores.audit
    assert audit is not None
    [error] = await audit.get_errors()
    assert (error.error_type, error.message, error.run_id) == ("ValueError", "no", result.run_id)
    assert error.stack_trace
    assert "ValueError" in error.stack_trace


async def test_an_audit_store_that_fails_fails_no_run(talk: Talk, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(InMemoryAuditStore):
        async def log_event(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("no disk")

    talk.stores.config.audit_store = Broken()
    assert (await talk.run()).status is RunStatus.SUCCEEDED
    assert "audit" in caplog.text


async def test_each_entry_is_written_once(talk: Talk) -> None:
    """Also by the second worker of a run, which sees the events of the first."""

    async def work(ctx: Any) -> RunResult:
        await ctx.sleep(1000)
        return RunResult()

    talk.agents.clear()
    talk.agents.register(Agent("a", work))
    runner = AgentRunner(*talk.runner.backends, settings(park_after=0), persistence=talk.stores, registry=talk.agents)
    run_id = await runner.submit("a")
    assert await runner.run_once()
    audit = talk.stores.audit
    assert audit is not None
    assert [each.event_type.value for each in await audit.get_events()] == ["agent_start"]
    await runner.cancel(run_id)
    result = await runner.wait(run_id)
    assert result.status is RunStatus.CANCELLED
    assert len({each.id for each in await audit.get_events()}) == len(await audit.get_events())
