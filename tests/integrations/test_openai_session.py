"""Sessions of OpenAI Agents over conversation stores: items, branches, other writers, and repeated writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("agents")

from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.memory import Session, SessionSettings
from agents.testing import assistant_message, function_call

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    InvalidArgument,
    MockLLMClient,
    RunContext,
    RunResult,
    ToolCallingAgent,
    ToolRegistry,
    open_run,
)
from agent_runtime_core.integrations.openai_agents import ConversationSession, run_agent
from agent_runtime_core.persistence import (
    Conversation,
    ConversationMessage,
    ConversationStore,
    InMemoryConversationStore,
    PersistenceManager,
)
from tests.support.openai_models import FakeModel, results

set_tracing_disabled(True)

ROOM = UUID(int=7)
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Bern"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
ANSWER = {
    "type": "message",
    "role": "assistant",
    "id": "msg_1",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Sunny.", "annotations": []}],
}
ITEMS: list[Any] = [{"role": "user", "content": "Weather?"}, REASONING, CALL, {**CALL, "call_id": "c2"}, OUTPUT, ANSWER]


@pytest.fixture(params=["memory", "sqlite", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ConversationStore:
    if request.param == "memory":
        return InMemoryConversationStore()
    url = tmp_path / "stores.db" if request.param == "sqlite" else f"{tmp_path}/files/"
    return PersistenceManager.open(str(url)).conversations


async def test_items_are_returned_as_they_were_added(store: ConversationStore) -> None:
    session = ConversationSession(ROOM, store=store)
    assert isinstance(session, Session)
    assert await session.get_items() == []
    assert await session.pop_item() is None
    await session.add_items(ITEMS[:4])
    await session.add_items(ITEMS[4:])
    assert await session.get_items() == ITEMS
    assert await session.get_items(limit=2) == ITEMS[-2:]
    assert await session.get_items(limit=0) == []
    for expected in reversed(ITEMS):
        assert await session.pop_item() == expected
    assert await session.get_items() == []
    await session.add_items(ITEMS[:1])
    await session.clear_session()
    assert await session.get_items() == []
    assert await store.get(ROOM) is None
    await store.close()


async def test_messages_can_be_read_without_the_sdk(store: ConversationStore) -> None:
    await ConversationSession(ROOM, store=store).add_items(ITEMS)
    user, calls, output, answer = await store.get_messages(ROOM)
    assert (user.role, user.content, user.metadata) == ("user", "Weather?", {})
    assert [(each.id, each.name, each.arguments) for each in calls.tool_calls] == [
        ("c1", "weather", {"city": "Bern"}),
        ("c2", "weather", {"city": "Bern"}),
    ]
    assert (output.role, output.tool_call_id, output.content) == ("tool", "c1", "sunny")
    assert (answer.role, answer.content) == ("assistant", "Sunny.")
    await store.close()


async def test_messages_of_other_agents_become_items() -> None:
    store = InMemoryConversationStore()
    picture = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    messages = [
        ConversationMessage(role="user", content=[{"type": "text", "text": "What is it?"}, picture]),
        ConversationMessage(role="assistant", content=[{"type": "text", "text": "A cat."}]),
        ConversationMessage(role="assistant", content="A dog."),
    ]
    await store.save(Conversation(id=ROOM, messages=messages))
    assert await ConversationSession(ROOM, store=store).get_items() == [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "What is it?"},
                {"type": "input_image", "detail": "auto", "image_url": "https://example.org/a.png"},
            ],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "A cat."}]},
        {"role": "assistant", "content": "A dog."},
    ]


async def test_the_active_branch_is_continued() -> None:
    store = InMemoryConversationStore()
    session = ConversationSession(ROOM, store=store)
    await session.add_items([{"role": "user", "content": "One"}, {"role": "assistant", "content": "1"}])
    first = (await store.get_messages(ROOM))[0]
    await store.edit_message(ROOM, first.id, "Two")
    await session.add_items([{"role": "assistant", "content": "2"}])
    assert [item["content"] for item in await session.get_items()] == ["Two", "2"]  # type: ignore[typeddict-item]
    await store.switch_branch(ROOM, None)
    assert [item["content"] for item in await session.get_items()] == ["One", "1"]  # type: ignore[typeddict-item]


async def test_a_session_needs_a_conversation_and_a_store() -> None:
    with pytest.raises(InvalidArgument, match="session_id must name a conversation"):
        ConversationSession()
    with pytest.raises(InvalidArgument, match="store must be a conversation store"):
        await ConversationSession("room").get_items()


class Weather(AgentRuntime):
    """Answers in the run's conversation, and crashes as often as it should."""

    key = "weather"

    def __init__(self, crashes: int = 0) -> None:
        self.crashes = crashes
        self.model = FakeModel(self.answer)

    @staticmethod
    def answer(items: list[dict[str, Any]]) -> list[Any]:
        if items[-1].get("type") == "function_call_output":
            return [assistant_message(f"{items[-1]['output']}, item {len(items)}")]
        return [function_call("weather", {"city": "Bern"}, call_id=f"c{len(items)}")]

    async def run(self, ctx: RunContext) -> RunResult:
        @function_tool
        def weather(city: str) -> str:
            return "sunny"

        agent = Agent(name="weather", model=self.model, tools=[weather])
        [question] = ctx.input["messages"]  # type: ignore[attr-defined]
        result = await run_agent(agent, question["content"], session=ConversationSession())
        if self.crashes:
            self.crashes -= 1
            raise ConnectionError("again")
        return RunResult(final_output={"response": result.final_output})


def question(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "conversation_id": str(ROOM)}


async def test_runs_continue_their_conversation(tmp_path: Path) -> None:
    async with AgentRunner.open(str(tmp_path / "runs.db")) as runner:
        agent = Weather()
        first = await runner.execute(agent, input_data=question("Weather?"))
        second = await runner.execute(agent, input_data=question("And now?"))
        assert (first.final_output["response"], second.final_output["response"]) == ("sunny, item 3", "sunny, item 7")
        history = await runner.persistence.conversations.history(ROOM)
    assert [each.role for each in history] == ["user", "assistant", "tool", "assistant"] * 2
    assert [each.content for each in history if each.role == "user"] == ["Weather?", "And now?"]


async def test_a_run_that_is_attempted_again_adds_nothing_twice(tmp_path: Path) -> None:
    async with AgentRunner.open(str(tmp_path / "runs.db")) as runner:
        agent = Weather(crashes=2)
        result = await runner.execute(agent, input_data=question("Weather?"), run_id="one")
        for _ in range(3):
            result = await runner.execute(agent, input_data=question("Weather?"), run_id="one")
        assert result.final_output == {"response": "sunny, item 3"}
        history = await runner.persistence.conversations.history(ROOM)
    assert [each.role for each in history] == ["user", "assistant", "tool", "assistant"]
    assert len(agent.model.asked) == 2


async def test_a_write_that_is_repeated_after_a_crash_adds_nothing(tmp_path: Path) -> None:
    """The process was killed after the write, and before the step was recorded."""

    class Killed(BaseException):
        pass

    class Cut(InMemoryConversationStore):
        cuts = 1

        async def append(self, *args: Any, **kwargs: Any) -> int:
            added = await super().append(*args, **kwargs)
            if self.cuts:
                self.cuts -= 1
                raise Killed
            return added

    store = Cut()
    for _ in range(2):
        try:
            async with open_run(str(tmp_path / "runs.db"), run_id="one"):
                await ConversationSession(ROOM, store=store).add_items(ITEMS[:1])
        except Killed:
            pass
    assert store.cuts == 0
    assert await ConversationSession(ROOM, store=store).get_items() == ITEMS[:1]


async def test_a_session_in_a_run_of_a_tenant_is_the_tenants(tmp_path: Path) -> None:
    store = InMemoryConversationStore()
    for number, tenant in enumerate((None, "a", "b")):
        async with open_run(str(tmp_path / "runs.db"), run_id="one", tenant=tenant):
            session = ConversationSession(ROOM, store=store)
            assert await session.get_items() == []
            await session.add_items(ITEMS[number : number + 1])
    assert await ConversationSession(ROOM, store=store).get_items() == ITEMS[:1]
    assert await ConversationSession(ROOM, store=store.for_tenant("b")).get_items() == ITEMS[2:3]


async def test_another_agent_continues_the_conversation(tmp_path: Path) -> None:
    seen: list[Any] = []

    def respond(messages: list[Any]) -> str:
        seen.extend(messages)
        return "Yes."

    class Chat(ToolCallingAgent):
        key = "chat"
        system_prompt = ""
        tools = ToolRegistry()

        def get_llm_client(self) -> Any:
            return MockLLMClient(response_fn=respond)

    async with AgentRunner.open(str(tmp_path / "runs.db")) as runner:
        await runner.execute(Weather(), input_data=question("Weather?"))
        await runner.execute(Chat(), input_data=question("Sure?"))
        result = await runner.execute(Weather(), input_data=question("And now?"))
    assert [(each["role"], each["content"]) for each in seen if each["role"] != "system"] == [
        ("user", "Weather?"),
        ("assistant", ""),
        ("tool", "sunny"),
        ("assistant", "sunny, item 3"),
        ("user", "Sure?"),
    ]
    assert result.final_output == {"response": "sunny, item 9"}


async def test_settings_of_the_sdk_limit_what_a_model_sees() -> None:
    store = InMemoryConversationStore()
    session = ConversationSession("room", store=store)
    session.session_settings = SessionSettings(limit=2)
    model = FakeModel(lambda items: [assistant_message(f"{len(items)} items")])
    for _ in range(3):
        result = await Runner.run(Agent(name="counting", model=model), "How many?", session=session)
    assert result.final_output == "3 items"
    assert len(results(await session.get_items())) == 0  # type: ignore[arg-type]
