"""A runner that was opened from a URL keeps the conversations of its runs in the stores at that URL."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    InvalidArgument,
    MockRunContext,
    RunResult,
    RunStatus,
    ToolCallingAgent,
    configure,
    open_run,
)
from agent_runtime_core._execution.context import conversation_id
from agent_runtime_core.config import reset_config
from agent_runtime_core.errors import StorageBusy
from agent_runtime_core.persistence import PersistenceManager
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.registry import Registry
from agent_runtime_core.testing import MockLLMClient
from agent_runtime_core.tools import ToolRegistry
from tests.support.backends import POSTGRES, SERVERS
from tests.support.cases import for_each
from tests.support.fault_runs import Agent, settings

CHAT = "room 7"
KINDS = ["path", "sqlite", "memory", "configured", pytest.param("redis", marks=pytest.mark.redis), POSTGRES]


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), "conversation_id": CHAT, **more}


class Assistant(ToolCallingAgent):
    key = "assistant"
    system_prompt = "Be brief."
    tools = ToolRegistry()

    def __init__(self) -> None:
        self.client = MockLLMClient(response_fn=lambda messages: f"answer to {messages[-1]['content']}")
        self.asked: list[list[tuple[str, Any]]] = []

    def get_llm_client(self) -> MockLLMClient:
        return self.client

    def trim(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.asked.append([(each["role"], each["content"]) for each in messages])
        return messages


class Plain(AgentRuntime):
    """Answers each message, and remembers what it was given."""

    key = "plain"

    def __init__(self) -> None:
        self.given: list[list[Any]] = []

    async def run(self, ctx: Any) -> RunResult:
        self.given.append([each["content"] for each in ctx.input_messages])
        return RunResult({"response": f"answer {len(self.given)}"})


@asynccontextmanager
async def opened(place: str, *agents: AgentRuntime, **options: Any) -> AsyncIterator[AgentRunner]:
    registry = Registry()
    for agent in agents:
        registry.register(agent)
    async with AgentRunner.open(place, config=settings(), registry=registry, **options) as runner:
        yield runner


async def contents(runner: AgentRunner, name: str = CHAT) -> list[Any]:
    known = conversation_id(name)
    assert known is not None
    store = runner.persistence.conversations
    return [] if await store.get(known) is None else [each.content for each in await store.history(known)]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings, without those about the settings of the test's Redis server."""
    records = [each for each in caplog.records if each.levelno >= logging.WARNING]
    return [each.getMessage() for each in records if each.module != "safety_checks"]


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    kind = request.param
    if kind == "configured":
        configure(backend_url=f"sqlite:///{tmp_path / 'app.db'}")
    if kind in SERVERS:
        yield str(request.getfixturevalue(f"{kind}_url"))
    else:
        urls = {"path": str(tmp_path / "app.db"), "sqlite": f"sqlite:///{tmp_path / 'app.db'}", "memory": "memory://"}
        yield urls.get(kind, kind)
    reset_config()


@pytest.mark.parametrize("place", KINDS, indirect=True)
async def test_the_second_message_reaches_the_model_after_the_first(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    agent, registry = Assistant(), Registry()
    registry.register(agent)
    if place == "configured":
        runner = AgentRunner(config=settings(), registry=registry)
    else:
        runner = AgentRunner.open(place, config=settings(), registry=registry)
    async with runner:
        for text in ("one", "two"):
            run_id = await runner.submit("assistant", chat(said("user", text)))
            assert await runner.run_once()
            assert (await runner.wait(run_id)).status is RunStatus.SUCCEEDED
        assert agent.asked == [
            [("system", "Be brief."), ("user", "one")],
            [("system", "Be brief."), ("user", "one"), ("assistant", "answer to one"), ("user", "two")],
        ]
        assert await contents(runner) == ["one", "answer to one", "two", "answer to two"]
    assert not warned(caplog)


async def test_another_runner_at_the_url_continues_the_conversation(tmp_path: Path) -> None:
    place, agent = str(tmp_path / "app.db"), Plain()
    async with opened(place, agent) as runner:
        await runner.execute("plain", None, chat(said("user", "one")))
    async with opened(place, agent) as runner, opened(place) as submitter:
        run_id = await submitter.submit("plain", chat(said("user", "two")))
        assert await runner.run_once()
        assert (await submitter.wait(run_id)).final_output == {"response": "answer 2"}
    assert agent.given == [["one"], ["one", "answer 1", "two"]]


async def test_a_worker_for_other_agents_keeps_them_too(tmp_path: Path) -> None:
    agent, others = Plain(), Registry()
    others.register(agent)
    async with opened(str(tmp_path / "app.db")) as runner, runner.worker_for(others) as worker:
        for text in ("one", "two"):
            await runner.submit("plain", chat(said("user", text)))
            assert await worker.run_once()
    assert agent.given == [["one"], ["one", "answer 1", "two"]]


async def test_runs_of_one_conversation_never_interleave(tmp_path: Path) -> None:
    place, agent = str(tmp_path / "app.db"), Plain()
    async with opened(place, agent) as runner, opened(place) as submitter:
        runs = await asyncio.gather(*(submitter.submit("plain", chat(said("user", str(n)))) for n in range(6)))
        working = asyncio.create_task(runner.run_loop(0.01, concurrency=4, handle_signals=False))
        for each in runs:
            assert (await submitter.wait(each)).status is RunStatus.SUCCEEDED
        runner.stop()
        await working
        kept = await contents(runner)
    assert [len(each) for each in agent.given] == [1, 3, 5, 7, 9, 11]
    assert kept == [*agent.given[-1], "answer 6"]


# -- what costs nothing


@pytest.mark.parametrize("input_", [{}, {"messages": [said("user", "one")]}, {"conversation_id": None}])
async def test_a_run_without_a_conversation_opens_no_store(tmp_path: Path, input_: dict[str, Any]) -> None:
    agent = Plain()
    async with opened(str(tmp_path / "app.db"), agent) as runner:
        for _ in range(2):
            await runner.execute("plain", None, input_)
        assert not await contents(runner, "None")
    assert agent.given[0] == agent.given[1]


def test_a_run_without_a_conversation_imports_no_stores(tmp_path: Path) -> None:
    code = f"""
import sys
from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
class Plain(AgentRuntime):
    key = "plain"
    async def run(self, ctx):
        return RunResult()
runner = AgentRunner.open({str(tmp_path / "app.db")!r})
assert runner.execute_sync(Plain()).status == "succeeded"
named = [each for each in sys.modules if each.startswith("agent_runtime_core.persistence.backends")]
assert not named and "agent_runtime_core.runner.run_recorder" not in sys.modules, named
assert runner.execute_sync(Plain(), input_data={{"conversation_id": "a"}}).status == "succeeded"
assert "agent_runtime_core.runner.run_recorder" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# -- turned off, or not possible


async def test_persistence_none_keeps_nothing_and_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent, registry = Plain(), Registry()
    registry.register(agent)
    async with (
        opened(str(tmp_path / "app.db"), agent, persistence=None) as at_url,
        AgentRunner(InMemoryQueue(), config=settings(), persistence=None, registry=registry) as made,
    ):
        for runner in (at_url, made):
            for _ in range(2):
                await runner.execute("plain", None, chat(said("user", "one")))
        assert await contents(at_url) == []
    assert agent.given == [["one"]] * 4
    assert not warned(caplog)


@pytest.mark.parametrize("queue", [InMemoryQueue, lambda: None])
async def test_a_runner_without_a_url_warns_once_for_each_agent(queue: Any, caplog: pytest.LogCaptureFixture) -> None:
    agent, registry = Plain(), Registry()
    registry.register(agent)
    registry.register(Agent("other", agent.run))
    for _ in range(2):
        caplog.clear()
        async with AgentRunner(queue(), config=settings(), registry=registry) as runner:
            await runner.execute("plain", None, {"messages": [said("user", "no conversation")]})
            results = [
                await runner.execute(key, None, chat(said("user", "one"))) for key in ("plain", "other") for _ in "ab"
            ]
        texts = warned(caplog)
        assert len(texts) == 2
        for text, result, key in zip(texts, results[::2], ("plain", "other"), strict=True):
            assert f"run {result.run_id} (agent {key})" in text
            assert "persistence=PersistenceManager.open(" in text
            assert "persistence=None" in text
    assert all(len(each) == 1 for each in agent.given)


async def test_a_manager_that_is_passed_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    agent, registry = Plain(), Registry()
    registry.register(agent)
    async with (
        PersistenceManager.open("memory://") as stores,
        opened(str(tmp_path / "app.db"), agent, persistence=stores) as at_url,
        AgentRunner(InMemoryQueue(), config=settings(), persistence=stores, registry=registry) as made,
    ):
        await at_url.execute("plain", None, chat(said("user", "one")))
        await made.execute("plain", None, chat(said("user", "two")))
        assert agent.given[1] == ["one", "answer 1", "two"]
    assert not warned(caplog)


@pytest.mark.parametrize("wrong", ["Default", "app.db", 5, {}])
def test_other_values_are_rejected(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="PersistenceManager"):
        AgentRunner.open("memory://", persistence=wrong)


async def test_nothing_is_audited_by_default(tmp_path: Path) -> None:
    async with opened(str(tmp_path / "app.db"), Plain()) as runner:
        await runner.execute("plain", None, chat(said("user", "one")))
        audit = runner.persistence.audit
        assert audit is not None
        assert await audit.get_events() == []
        assert await contents(runner) == ["one", "answer 1"]


async def test_a_block_of_code_keeps_no_conversation(tmp_path: Path) -> None:
    place = str(tmp_path / "app.db")
    async with open_run(place, "block", input=chat(said("user", "one"))) as ctx:
        assert [each["content"] for each in ctx.input_messages] == ["one"]
        ctx.own_conversation()
    async with opened(place) as runner:
        assert await contents(runner) == []


# -- an agent that keeps the conversation itself


async def test_the_agent_keeps_the_conversation_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[list[Any]] = []

    async def code(ctx: Any) -> RunResult:
        heard.append([each["content"] for each in ctx.input_messages])
        if ctx.params:
            await ctx.step("work", lambda: 1)
            for _ in range(2):
                ctx.own_conversation()
        return RunResult({"response": "answer"})

    agent = Agent("a", code)
    async with opened(str(tmp_path / "app.db"), agent) as runner, AgentRunner(InMemoryQueue()) as made:
        await runner.execute("a", None, chat(said("user", "one")))
        for _ in range(2):
            result = await runner.execute("a", None, chat(said("user", "two"), params={"own": True}))
            assert result.status is RunStatus.SUCCEEDED, result.error
        await made.execute(agent, None, chat(said("user", "two"), params={"own": True}))
        assert await contents(runner) == ["one", "answer"]
    assert heard == [["one"], ["one", "answer", "two"], ["one", "answer", "two"], ["two"]]
    assert not warned(caplog)


@pytest.mark.parametrize(("owns", "kept"), [((True, False), ["one", "answer"]), ((False, True), [])])
async def test_the_last_attempt_decides(tmp_path: Path, owns: tuple[bool, bool], kept: list[str]) -> None:
    async def code(ctx: Any) -> RunResult:
        if owns[ctx.attempt - 1]:
            ctx.own_conversation()
        if ctx.attempt == 1:
            raise ValueError("once more")
        return RunResult({"response": "answer"})

    async with opened(str(tmp_path / "app.db"), Agent("a", code)) as runner:
        result = await runner.execute("a", None, chat(said("user", "one")))
        assert result.status is RunStatus.SUCCEEDED, result.error
        assert await contents(runner) == kept


async def test_a_step_cannot_declare_it(tmp_path: Path) -> None:
    """A resumed run does not execute a completed step again: the runner would append after all."""

    async def code(ctx: Any) -> RunResult:
        if ctx.params:
            ctx.own_conversation()
        await ctx.step("session", inside, ctx.params)
        return RunResult({"response": "answer"})

    async def inside(ctx: Any, _: Any) -> None:
        ctx.own_conversation()

    inside.__annotations__["ctx"] = "RunContext"
    async with opened(str(tmp_path / "app.db"), Agent("a", code)) as runner:
        failed = await runner.execute("a", None, chat(said("user", "one")))
        assert failed.error is not None
        assert "between steps" in failed.error.message
        result = await runner.execute("a", None, chat(said("user", "one"), params={"own": True}))
        assert result.status is RunStatus.SUCCEEDED, result.error
        assert await contents(runner) == ["one"]  # of the failed run


async def test_the_messages_of_an_owned_conversation_are_recorded_whole(tmp_path: Path) -> None:
    """Its agent may delete from the store what the result would refer to."""
    long = "x" * 70_000

    async def code(ctx: Any) -> RunResult:
        if ctx.params:
            ctx.own_conversation()
        return RunResult({"response": "answer"}, [*ctx.input_messages, said("assistant", "answer")])

    async with opened(str(tmp_path / "app.db"), Agent("a", code)) as runner:
        await runner.execute("a", None, chat(said("user", long)))
        run_id = (await runner.execute("a", None, chat(said("user", "two"), params={"own": True}))).run_id
        known = conversation_id(CHAT)
        assert known is not None
        assert run_id is not None
        assert await runner.persistence.conversations.delete(known)
        result = await runner.wait(run_id)
        assert [each["content"] for each in result.final_messages] == [long, "answer", "two", "answer"]


def test_a_mock_context_notes_the_call() -> None:
    ctx = MockRunContext()
    assert not ctx.owns_conversation
    ctx.own_conversation()
    assert ctx.owns_conversation
    ctx.clear()
    assert not ctx.owns_conversation


# -- children, forks, resumes


async def test_a_child_keeps_what_it_says_once(tmp_path: Path) -> None:
    child = Plain()

    async def code(ctx: Any) -> RunResult:
        named = ctx.params.get("child")
        input_ = {"messages": [said("user", "for the child")]} | ({"conversation_id": named} if named else {})
        answer = await ctx.call("plain", input_)
        return RunResult({"response": f"child said {answer.final_output['response']}"})

    async with opened(str(tmp_path / "app.db"), child, Agent("a", code)) as runner:
        await runner.execute("a", None, chat(said("user", "one")))
        assert child.given == [["for the child"]]
        assert await contents(runner) == ["one", "child said answer 1"]
        run_id = await runner.submit("a", chat(said("user", "two"), params={"child": CHAT}))
        working = asyncio.create_task(runner.run_loop(0.01, concurrency=2, handle_signals=False))
        assert (await runner.wait(run_id)).status is RunStatus.SUCCEEDED
        runner.stop()
        await working
        assert child.given[1] == ["one", "child said answer 1", "for the child"]
        assert await contents(runner) == [
            "one", "child said answer 1", "for the child", "answer 2", "two", "child said answer 2",
        ]  # fmt: skip


async def test_a_fork_appends_to_a_branch_of_its_own(tmp_path: Path) -> None:
    agent = Plain()
    async with opened(str(tmp_path / "app.db"), agent) as runner:
        await runner.execute("plain", None, chat(said("user", "one")))
        run_id = (await runner.execute("plain", None, chat(said("user", "two")))).run_id
        assert run_id is not None
        forked = await runner.fork(run_id)
        assert await runner.run_once()
        assert (await runner.wait(forked)).status is RunStatus.SUCCEEDED
        assert agent.given[1] == agent.given[2] == ["one", "answer 1", "two"]
        assert await contents(runner) == ["one", "answer 1", "two", "answer 2"]


class Flaky:
    """Works in steps, emits between them, and fails after the second one until it is repaired."""

    def __init__(self) -> None:
        self.repaired = False
        self.given: list[list[Any]] = []

    async def run(self, ctx: Any) -> RunResult:
        self.given.append([each["content"] for each in ctx.input_messages])
        await ctx.emit("began", {})
        count = await ctx.step("count", lambda: len(ctx.input_messages))
        await ctx.emit("counted", {})
        await ctx.step("more", lambda: 1)
        if not self.repaired:
            raise ValueError("not yet")
        return RunResult({"response": f"{count} messages"})


@pytest.mark.parametrize("options", [{}, {"persistence": None}])
async def test_a_resumed_run_sees_the_messages_it_began_with(tmp_path: Path, options: dict[str, Any]) -> None:
    """Also one that began under a runner that kept no conversations, as all did by default once."""
    place, flaky, plain = str(tmp_path / "app.db"), Flaky(), Plain()
    agents = (Agent("flaky", flaky.run), plain)
    async with opened(place, *agents) as runner:
        await runner.execute("plain", None, chat(said("user", "one")))
    async with opened(place, *agents, **options) as runner:
        run_id = (await runner.execute("flaky", None, chat(said("user", "two")))).run_id
        assert run_id is not None
    async with opened(place, *agents) as runner:
        await runner.execute("plain", None, chat(said("user", "three")))
        flaky.repaired = True
        await runner.resume(run_id)
        assert await runner.run_once()
        result = await runner.wait(run_id)
        assert result.status is RunStatus.SUCCEEDED, result.error
        began = ["two"] if options else ["one", "answer 1", "two"]
        assert flaky.given == [began] * len(flaky.given)
        assert result.final_output == {"response": f"{len(began)} messages"}
        later = ["three", "answer 2"]
        # With a conversation, the message was kept when the run failed.
        between = [*later, "two"] if options else ["two", *later]
        assert await contents(runner) == ["one", "answer 1", *between, f"{len(began)} messages"]
        events = [each.event_type for each in await runner.event_bus.get_events(run_id)]
        assert events.count("counted") == 1


async def test_a_run_that_waited_under_a_runner_without_conversations_resumes(tmp_path: Path) -> None:
    place, given = str(tmp_path / "app.db"), list[list[Any]]()

    async def code(ctx: Any) -> RunResult:
        given.append([each["content"] for each in ctx.input_messages])
        return RunResult({"response": await ctx.wait_for_signal("go")})

    agent = Agent("a", code)
    async with opened(place, agent, Plain()) as runner:
        await runner.execute("plain", None, chat(said("user", "one")))
    async with opened(place, agent, persistence=None) as runner:
        runner.config = settings(park_after=0)
        run_id = await runner.submit("a", chat(said("user", "two")))
        assert await runner.run_once()
        assert (await runner.get_run(run_id)).status is RunStatus.WAITING
    async with opened(place, agent) as runner:
        await runner.signal(run_id, "go", "answer")
        assert await runner.run_once()
        assert (await runner.wait(run_id)).final_output == {"response": "answer"}
        assert await contents(runner) == ["one", "answer 1", "two", "answer"]
    assert given == [["two"], ["two"]]


async def test_an_outage_of_the_store_uses_no_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Plain()
    async with opened(str(tmp_path / "app.db"), agent) as runner:
        store = runner.persistence.conversations
        real, failures = store.get, [StorageBusy("the store is away", 1)]

        async def away(*args: Any) -> Any:
            if failures:
                raise failures.pop()
            return await real(*args)

        monkeypatch.setattr(store, "get", away)
        run_id = await runner.submit("plain", chat(said("user", "one")))
        assert await runner.run_once()
        info = await runner.get_run(run_id)
        assert (info.status, info.attempt) == (RunStatus.SUCCEEDED, 1)
        assert (len(agent.given), failures) == (1, [])


# -- clients that send the earlier messages themselves


TOOL_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
}
TOOL_RESULT = {"role": "tool", "tool_call_id": "c1", "content": "found"}


@for_each("text", ["", "I look."])
@for_each(
    "sent",
    [
        pytest.param([0, 1, 2, 3], id="everything"),
        pytest.param([0, 3], id="without the tool calls"),
        pytest.param([0, 1, 3], id="with the text of the tool calls"),
        pytest.param([2, 3], id="a part that starts inside the tool calls"),
        pytest.param([3], id="the last answer"),
        pytest.param([], id="nothing"),
    ],
)
async def test_messages_that_a_client_sends_again_are_neither_loaded_nor_kept_twice(
    tmp_path: Path, sent: list[int], text: str
) -> None:
    given: list[list[Any]] = []
    first = [said("user", "look"), TOOL_CALL | {"content": text}, TOOL_RESULT, said("assistant", "I found it")]

    async def code(ctx: Any) -> RunResult:
        given.append(list(ctx.input_messages))
        new = first[1:] if len(given) == 1 else [said("assistant", "welcome")]
        return RunResult({}, [*ctx.input_messages, *new])

    shown = [{"role": first[n]["role"], "content": first[n]["content"]} for n in sent]
    if text == "" and sent == [0, 1, 3]:
        del shown[1]
    if 2 in sent:
        shown = [first[n] for n in sent]
    async with opened(str(tmp_path / "app.db"), Agent("a", code)) as runner:
        await runner.execute("a", None, chat(first[0]))
        await runner.execute("a", None, chat(*shown, said("user", "thanks")))
        assert given[1] == [*first, said("user", "thanks")]
        assert await contents(runner) == [*(each["content"] for each in first), "thanks", "welcome"]


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param([said("user", "one")], id="the same question again"),
        pytest.param([said("assistant", "Hello."), said("user", "one")], id="another answer in front"),
        pytest.param(
            [said("user", "one"), said("assistant", "another answer"), said("user", "two")], id="another past"
        ),
    ],
)
async def test_messages_that_are_not_the_end_of_the_conversation_are_new(
    tmp_path: Path, sent: list[dict[str, Any]]
) -> None:
    agent = Plain()
    async with opened(str(tmp_path / "app.db"), agent) as runner:
        await runner.execute("plain", None, chat(said("user", "one")))
        await runner.execute("plain", None, chat(*sent))
        assert agent.given[1] == ["one", "answer 1", *(each["content"] for each in sent)]
        assert await contents(runner) == [*agent.given[1], "answer 2"]
