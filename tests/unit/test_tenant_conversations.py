"""Runs of two tenants, and of nobody, that name the same conversation, memory and tasks do not meet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, MockRunContext, RunStatus, ToolCallingAgent, ToolRegistry
from agent_runtime_core._views.messages import messages_view
from agent_runtime_core.errors import RunFailed
from agent_runtime_core.persistence import PersistenceConfig, PersistenceManager
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner.conversation_history import MAX_INLINE_HISTORY
from agent_runtime_core.testing import MockLLMClient
from agent_runtime_core.testing.recordings import record
from tests.contract.third_party.plain_records import PlainAudit
from tests.contract.third_party.plain_stores import PlainConversations
from tests.support.backends import POSTGRES, SERVERS
from tests.support.fault_runs import Agent, settings

CHAT = "support-1"
TENANTS = (None, "a", "b")


class Assistant(ToolCallingAgent):
    key = "assistant"
    system_prompt = "Be brief."
    tools = ToolRegistry()

    def __init__(self) -> None:
        self.asked: list[list[Any]] = []
        self.fails = False
        self.client = MockLLMClient(response_fn=self._answer)

    def _answer(self, messages: list[Any]) -> str:
        self.asked.append([each["content"] for each in messages[1:]])
        if self.fails:
            raise ValueError("the model fails")
        return f"answer to {messages[-1]['content']}"

    def get_llm_client(self) -> MockLLMClient:
        return self.client


@pytest.fixture(params=["sqlite", "memory", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in SERVERS:
        return str(request.getfixturevalue(f"{request.param}_url"))
    return "memory://" if request.param == "memory" else str(tmp_path / "app.db")


@asynccontextmanager
async def opened(url: str, *agents: Any, **options: Any) -> AsyncIterator[AgentRunner]:
    registry = Registry()
    for agent in agents:
        registry.register(agent)
    async with AgentRunner.open(url, config=settings(max_retries=1), registry=registry, **options) as runner:
        yield runner


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "conversation_id": CHAT}


async def test_each_tenant_continues_its_own_conversation(url: str) -> None:
    agent = Assistant()
    async with opened(url, agent) as runner:
        for text in ("one", "two"):
            for tenant in TENANTS:
                run_id = await runner.submit("assistant", chat(f"{text} of {tenant}"), tenant=tenant)
                assert await runner.run_once()
                assert (await runner.wait(run_id)).status is RunStatus.SUCCEEDED
                assert agent.asked[-1][-1] == f"{text} of {tenant}"
        for tenant, asked in zip(TENANTS, agent.asked[3:], strict=True):
            assert asked == [f"one of {tenant}", f"answer to one of {tenant}", f"two of {tenant}"]
            store = runner.persistence.for_tenant(tenant).conversations
            assert [len(await store.get_messages(each.id)) for each in await store.list_conversations()] == [4]


async def test_the_omitted_history_of_a_result_is_read_from_the_tenants_conversation(url: str) -> None:
    agent = Assistant()
    long = "x" * (MAX_INLINE_HISTORY + 1)
    async with opened(url, agent) as runner:
        for tenant in TENANTS:
            await runner.execute("assistant", f"first {tenant}", chat(f"{tenant}{long}"), tenant=tenant)
        for tenant in TENANTS:
            await runner.execute("assistant", "second", chat("short"), tenant=tenant)
        for tenant in TENANTS:
            info = await runner.get_run("second", tenant=tenant)
            [ended] = [each for each in await runner.state_store.records(str(info.run_id)) if each.kind == "ended"]
            assert len(ended.result or "") < len(long)
            texts = [each["content"] for each in (await runner.wait(info.run_id)).final_messages]
            assert texts[0] == f"{tenant}{long}"
            row = await runner.queue.require(info.run_id)
            page = await messages_view(runner, row)
            assert page["items"][0]["content"] == texts[0]
            cassette = await record(runner, info.run_id)
            assert texts[0] in str(cassette.exchanges[0].request)


async def test_a_failed_run_keeps_its_messages_for_its_tenant(url: str) -> None:
    agent = Assistant()
    async with opened(url, agent) as runner:
        agent.fails = True
        with pytest.raises(RunFailed):
            await runner.execute("assistant", "r", chat("one"), tenant="a", raise_on_error=True)
        cancelled = await runner.submit("assistant", chat("never"), tenant="b")
        await runner.cancel(cancelled)
        agent.fails = False
        for tenant in TENANTS:
            await runner.execute("assistant", None, chat("two"), tenant=tenant)
        assert agent.asked[1:] == [["two"], ["one", "two"], ["two"]]


async def test_all_stores_of_a_run_are_its_tenants(url: str, tmp_path: Path) -> None:
    seen: dict[Any, list[Any]] = {}

    async def code(ctx: Any) -> list[Any]:
        stores = ctx.persistence
        assert stores is ctx.persistence
        before = [await stores.memory.get("key"), await stores.preferences.get("key")]
        await stores.memory.set("key", ctx.tenant)
        await stores.preferences.set("key", ctx.tenant)
        seen.setdefault(ctx.tenant, []).append(before)
        child = await ctx.call("child", {}) if ctx.run_key == "parent" else None
        return [child and child.final_output["value"]]

    agents = [Agent("parent", code), Agent("child", code)]
    async with opened(url, *agents) as runner:
        for tenant in TENANTS:
            await runner.execute("parent", "parent", tenant=tenant)
        for tenant in TENANTS:
            await runner.execute("parent", "again", tenant=tenant)
        assert seen == {tenant: [[None, None], [tenant, tenant], [tenant, tenant]] for tenant in TENANTS}


async def test_the_audit_log_of_a_run_is_its_tenants(tmp_path: Path) -> None:
    async def code(ctx: Any) -> int:
        return await ctx.step("add", lambda: 1)  # type: ignore[no-any-return]

    manager = PersistenceManager.open(tmp_path / "audit.db")
    async with manager, opened("memory://", Agent("job", code), persistence=manager) as runner:
        for tenant in TENANTS:
            await runner.execute("job", "r", tenant=tenant)
        for tenant in TENANTS:
            audit = manager.for_tenant(tenant).audit
            assert audit is not None
            assert {each.run_id for each in await audit.get_events()} == {
                (await runner.get_run("r", tenant=tenant)).run_id
            }


async def test_a_store_that_knows_no_tenants_serves_none(caplog: pytest.LogCaptureFixture) -> None:
    config = PersistenceConfig.at("memory://", conversation_store=PlainConversations(), audit_store=PlainAudit())
    agent = Assistant()
    manager = PersistenceManager(config)
    async with opened("memory://", agent, persistence=manager) as runner:
        await runner.execute("assistant", None, chat("one"))
        result = await runner.execute("assistant", None, chat("two"), tenant="a")
        assert result.error is not None
        assert (result.error.type, agent.asked) == ("NotSupported", [["one"]])
        assert "for_tenant(tenant), got" in result.error.message
        assert "audit store of tenant 'a' must come from a store with a method for_tenant" in caplog.text


async def test_a_mock_context_of_a_tenant_has_the_tenants_stores() -> None:
    manager = PersistenceManager.open("memory://")
    one, other = MockRunContext(tenant="a"), MockRunContext()
    one.persistence = other.persistence = manager
    await one.persistence.memory.set("key", 1)
    assert (await other.persistence.memory.get("key"), one.persistence.tenant) == (None, "a")
