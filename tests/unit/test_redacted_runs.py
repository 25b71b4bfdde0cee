"""With `redact_stored`: no kind of content reaches a store, and each execution of a run sees the same values."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, Tool, ToolCallingAgent, ToolRegistry
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.registry import Registry
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.testing import MockLLMClient
from agent_runtime_core.turns import TurnManager
from agent_runtime_core.turns.events import AUDIT, TOPICS, AuditEvent
from tests.support.backends import POSTGRES, SERVERS
from tests.support.runs import Script
from tests.unit.test_redaction import CANARY, SAFE, bytes_under, redact


@pytest.fixture(autouse=True)
def _config() -> Iterator[None]:
    configure(park_after=0, max_retries=2, retry_backoff_base=1.0, redact=redact, redact_stored=True)
    yield
    reset_config()


@pytest.fixture(params=["sqlite", "redis", "memory", POSTGRES])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in SERVERS:
        return str(request.getfixturevalue(f"{request.param}_url"))
    return "memory://" if request.param == "memory" else str(tmp_path / "runs.db")


class Seen:
    """An agent that uses each kind of step, and what its executions saw."""

    def __init__(self) -> None:
        self.executions: list[dict[str, Any]] = []

    async def __call__(self, ctx: Any) -> RunResult:
        seen: dict[str, Any] = {}
        self.executions.append(seen)

        async def tell(*_: Any) -> str:
            return CANARY

        async def graph(ctx: Any, state: Any) -> dict[str, Any]:
            return {"state": dict(state), "results": dict(state.results)}

        async def fail() -> None:
            try:
                raise KeyError(CANARY)
            except KeyError as error:
                raise OSError(7, CANARY) from error

        async def group() -> None:
            raise ExceptionGroup(CANARY, [ValueError(CANARY), TypeError(1)])

        async def effect() -> str:
            return CANARY

        seen["input"], seen["metadata"] = ctx.input, ctx.metadata
        seen["guarded"] = await ctx.step("guarded", effect, on_in_doubt="fail")
        executor = StepExecutor(ctx)
        seen["graph"] = await executor.run(
            [Step("a", graph), Step("b", graph, depends_on=["a"])], initial_state={"begin": CANARY}
        )
        seen["map"] = await executor.map("each", tell, [CANARY, "x"])
        for name, failing in (("fail", fail), ("group", group)):
            try:
                await ctx.step(name, failing)
            except Exception as error:  # noqa: BLE001 - each kind is looked at
                cause = error.__cause__
                seen[name] = [type(error).__name__, str(error), type(cause).__name__, str(cause), repr(cause)]
        child = await ctx.call("child", {"text": CANARY})
        seen["child"] = [child.final_output, child.final_messages]
        seen["approval"] = await ctx.approve("ship", {"order": CANARY})
        await ctx.checkpoint({"at": CANARY})
        seen["state"] = await ctx.get_state()
        return RunResult({"answer": CANARY}, artifacts={"file": CANARY})


async def child(ctx: Any) -> RunResult:
    assert ctx.input == {"text": SAFE}
    return RunResult({"answer": CANARY}, final_messages=[{"role": "assistant", "content": CANARY}])


def opened(url: str, seen: Seen) -> AgentRunner:
    registry = Registry()
    registry.register(Script(seen, "seen"))
    registry.register(Script(child, "child"))
    return AgentRunner.open(url, registry=registry)


async def drained(runner: AgentRunner) -> None:
    for _ in range(20):
        await runner.run_once()


async def test_each_execution_sees_the_same(url: str, tmp_path: Path) -> None:
    seen = Seen()
    first = opened(url, seen)
    try:
        await first.submit("seen", {"text": CANARY}, run_id="r", metadata={"note": CANARY})
        await drained(first)
        second = first if url == "memory://" else opened(url, seen)
        [asked] = await second.approvals()
        assert asked.details == {"order": SAFE}
        await second.approve("r", "ship", {"yes": CANARY})
        await drained(second)
        result = await second.wait("r", timeout=5)
        result.raise_for_status()
        assert (result.final_output, result.artifacts) == ({"answer": SAFE}, {"file": SAFE})
        run = await second.get_run("r")
        records = await second.state_store.records(run.run_id)
        payloads = [each.payload for each in await second.event_bus.get_events(run.run_id)]
        assert CANARY not in repr([records, payloads])
        if second is not first:
            await second.close()
    finally:
        await first.close()
    assert CANARY.encode() not in bytes_under(tmp_path)
    assert len(seen.executions) > 1
    last = seen.executions[-1]
    assert CANARY not in json.dumps(last, default=repr)
    assert last["guarded"] == SAFE
    assert last["map"] == [SAFE, SAFE]
    assert last["graph"]["b"]["state"] == {"begin": SAFE}
    assert last["fail"][2:4] == ["OSError", f"[Errno 7] {SAFE}"]
    assert last["child"] == [{"answer": SAFE}, [{"role": "assistant", "content": SAFE}]]
    assert last["approval"] == {"yes": SAFE}
    for execution in seen.executions:
        assert execution == {name: last[name] for name in execution}


async def test_a_transaction_is_redacted(tmp_path: Path) -> None:
    def pay(tx: sqlite3.Connection) -> str:
        return CANARY

    async def body(ctx: Any) -> Any:
        return await ctx.transaction("pay", pay)

    async with AgentRunner.open(tmp_path / "runs.db", registry=Registry()) as runner:
        result = await runner.execute(Script(body, "body"), "r")
        assert result.final_output["value"] == SAFE
    assert CANARY.encode() not in bytes_under(tmp_path)


async def test_an_attempt_that_failed_leaves_no_content(tmp_path: Path) -> None:
    async def body(ctx: Any) -> Any:
        raise LookupError(CANARY)

    registry = Registry()
    registry.register(Script(body, "body"))
    async with AgentRunner.open(tmp_path / "runs.db", registry=registry) as runner:
        await runner.submit("body", run_id="r")
        await runner.run_once()
        run = await runner.queue.require((await runner.get_run("r")).run_id)
        assert (run.status, json.loads(run.error or "{}")["message"]) == ("pending", SAFE)
    assert CANARY.encode() not in bytes_under(tmp_path)


async def test_an_agent_with_tools_is_redacted(tmp_path: Path) -> None:
    tools, heard = ToolRegistry(), list[str]()

    def look(name: str) -> str:
        """Look it up."""
        heard.append(name)
        return f"{name} {CANARY}"

    tools.register(Tool.from_function(look))
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": json.dumps({"name": CANARY})}}
    client = MockLLMClient([{"role": "assistant", "content": CANARY, "tool_calls": [call]}, CANARY])
    kind = type(
        "Looker",
        (ToolCallingAgent,),
        {"key": "looker", "tools": tools, "system_prompt": "Look.", "get_llm_client": lambda self: client},
    )
    registry = Registry()
    registry.register(kind())
    async with AgentRunner.open(tmp_path / "runs.db", registry=registry) as runner:
        asked = {"messages": [{"role": "user", "content": CANARY}], "conversation_id": "talk"}
        result = await runner.execute("looker", "r", asked)
        result.raise_for_status()
        assert CANARY not in json.dumps(result.final_messages)
        assert heard == [SAFE]
        assert CANARY not in json.dumps(client.get_calls(), default=str)
    assert CANARY.encode() not in bytes_under(tmp_path)


async def test_topics_are_redacted(tmp_path: Path) -> None:
    async with AgentRunner.open(tmp_path / "runs.db", registry=Registry()) as runner:
        manager = TurnManager(runner)
        await manager.run_turn({"text": f"add a to-do: {CANARY}", "turn_id": "t", "metadata": {"note": CANARY}})
        await manager.topics.tell(AuditEvent(action="said", details={"text": CANARY}), turn_id="t")
        told = [each.to_dict() for topic in TOPICS async for each in manager.topics.subscribe(topic, 0, follow=False)]
        assert {each["topic"] for each in told} >= {AUDIT}
        assert CANARY not in json.dumps(told)
    assert CANARY.encode() not in bytes_under(tmp_path)
