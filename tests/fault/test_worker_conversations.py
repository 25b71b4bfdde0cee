"""`agent-runtime worker` as a real process keeps the conversations of runs that another process submits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core._execution.context import conversation_id
from tests.support.backends import POSTGRES, SERVERS
from tests.support.processes import PATIENCE, ROOT, Command

AGENT = "tests.fault.jobs.assistant:Assistant"
CHAT = "room 7"


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in SERVERS:
        return str(request.getfixturevalue(f"{request.param}_url"))
    return f"sqlite:///{tmp_path / 'app.db'}"


def worker(url: str) -> Command:
    return Command("agent_runtime_core", "worker", AGENT, "--agent-path", ROOT, "--url", url, "--log-level", "error")


async def say(runner: AgentRunner, text: str, **more: Any) -> UUID:
    message = {"role": "user", "content": text}
    return await runner.submit("assistant", {"messages": [message], "conversation_id": CHAT, **more})


async def answer(runner: AgentRunner, run_id: UUID) -> str:
    result = await runner.wait(run_id, PATIENCE)
    assert result.error is None, result.error
    return str(result.final_output["response"])


async def history(runner: AgentRunner) -> list[Any]:
    known = conversation_id(CHAT)
    assert known is not None
    return [each.content for each in await runner.persistence.conversations.history(known)]


async def test_the_model_sees_the_first_message_when_it_is_asked_the_second(url: str) -> None:
    async with AgentRunner.open(url) as runner:
        with worker(url) as child:
            child.expect("worker")
            runs = [await say(runner, text) for text in ("one", "two")]  # at once: the second one waits for the first
            first, second = [await answer(runner, each) for each in runs]
        assert json.loads(first) == ["Be brief.", "one"]
        assert json.loads(second) == ["Be brief.", "one", first, "two"]
        with worker(url) as child:
            child.expect("worker")
            third = await answer(runner, await say(runner, "three"))
        assert json.loads(third) == ["Be brief.", "one", first, "two", second, "three"]
        assert await history(runner) == ["one", first, "two", second, "three", third]


async def test_a_kill_between_the_append_and_the_end_repeats_no_message(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = tmp_path / "died"
    monkeypatch.setenv("DIE_AFTER_APPEND", str(died))
    monkeypatch.setenv(
        "AGENT_RUNTIME_LEASE_TTL_SECONDS", "1"
    )  # on Redis the next worker waits for the end of the lease
    async with AgentRunner.open(url) as runner:
        with worker(url) as child:
            child.expect("worker")
            run_id = await say(runner, "one")
            assert await child.aended() == -9
            assert died.exists()
        assert (await runner.get_run(run_id)).ended_at is None
        assert len(await history(runner)) == 2
        with worker(url) as child:
            child.expect("worker")
            first = await answer(runner, run_id)
            second = await answer(runner, await say(runner, "two"))
        assert json.loads(second) == ["Be brief.", "one", first, "two"]
        assert await history(runner) == ["one", first, "two", second]


async def test_a_kill_mixes_up_no_conversations_of_tenants(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = tmp_path / "died"
    monkeypatch.setenv("DIE_AFTER_APPEND", str(died))
    monkeypatch.setenv("AGENT_RUNTIME_LEASE_TTL_SECONDS", "1")
    tenants = (None, "a", "b")

    async def ask(text: str, tenant: str | None) -> UUID:
        message = {"role": "user", "content": f"{text} of {tenant}"}
        given = {"messages": [message], "conversation_id": CHAT}
        return await runner.submit("assistant", given, run_id=text, tenant=tenant)

    async with AgentRunner.open(url) as runner:
        runs = [await ask("one", tenant) for tenant in tenants]
        with worker(url) as child:
            child.expect("worker")
            assert await child.aended() == -9
            assert died.exists()
        with worker(url) as child:
            child.expect("worker")
            first = [await answer(runner, each) for each in runs]
            second = [await answer(runner, await ask("two", tenant)) for tenant in tenants]
        known = conversation_id(CHAT)
        assert known is not None
        for number, tenant in enumerate(tenants):
            said = ["Be brief.", f"one of {tenant}", first[number], f"two of {tenant}"]
            assert json.loads(first[number]) == said[:2]
            assert json.loads(second[number]) == said
            store = runner.persistence.for_tenant(tenant).conversations
            assert [each.content for each in await store.history(known)] == [*said[1:], second[number]]
