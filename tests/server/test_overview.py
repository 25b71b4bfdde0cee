"""Open questions, the queue, agents, usage and turns over HTTP."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.turns import TurnManager
from tests.server.conftest import client_of
from tests.server.documented import documented
from tests.support.runs import Script

API = "/api/v1"
SCHEMA = {"type": "string", "enum": ["yes", "no"]}


async def _asks(ctx: Any) -> Any:
    return await ctx.approve("plan", {"amount": 7}, schema=SCHEMA)


class _Described(Script):
    """Asks whether to go on."""


@pytest.fixture
def runner(tmp_path: Path) -> AgentRunner:
    registry = Registry()
    for key in ("asks", "asks too"):
        registry.register(_Described(_asks, key))
    return AgentRunner.open(tmp_path / "runs.db", registry=registry, config=RunnerConfig(park_after=0.0))


async def _ask(runner: AgentRunner, *agents: str) -> None:
    for number, agent in enumerate(agents):
        await runner.submit(agent, run_id=f"run-{number}")
        await runner.run_once()


@pytest.fixture
def client(app: FastAPI) -> httpx.AsyncClient:
    """A client that fails for a response which the OpenAPI document does not have."""
    return client_of(app, event_hooks={"response": [documented(app)]})


async def test_open_questions_are_listed_oldest_first_in_pages(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    await _ask(runner, "asks", "asks too", "asks", "asks too", "asks")
    async with client:
        for limit in (1, 2, 50):
            found, cursor = list[Any](), ""
            while cursor is not None:
                query = {"limit": limit, "agent": "asks", **({"cursor": cursor} if cursor else {})}
                page = (await client.get(f"{API}/approvals", params=query)).json()
                found, cursor = found + page["items"], page["next"]
            assert [each["key"] for each in found] == ["run-0", "run-2", "run-4"]
        first = await client.get(f"{API}/approvals", params={"limit": 1})
        wrong = [
            await client.get(f"{API}/approvals", params=query)
            for query in (
                {"cursor": "x"},
                {"cursor": first.json()["next"], "agent": "asks"},
                {"limit": 0},
                {"agents": 1},
            )
        ]
        runs = await client.get(f"{API}/runs", params={"limit": 1})
        crossed = await client.get(f"{API}/approvals", params={"cursor": runs.json()["next"]})
        item = first.json()["items"][0]
        await client.post(f"{API}/runs/run-0/approvals/plan", json={"answer": "yes", "request_id": item["request_id"]})
        left = (await client.get(f"{API}/approvals")).json()["items"]
    assert item["details"] == {"amount": 7}
    assert item["schema"] == SCHEMA
    assert item["agent"] == "asks"
    assert [each.status_code for each in (*wrong, crossed)] == [422] * 5
    assert [each["key"] for each in left] == ["run-1", "run-2", "run-3", "run-4"]


async def test_the_queue_the_agents_and_the_usage_are_shown(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    await _ask(runner, "asks")
    await runner.submit("asks too", concurrency_key="one at a time")
    await runner.submit("unknown here", concurrency_key="one at a time")
    async with client:
        queue = (await client.get(f"{API}/queue")).json()
        agents = (await client.get(f"{API}/agents")).json()["items"]
        usage = [await client.get(f"{API}/usage", params={"by": by}) for by in ("agent", "model", "day")]
        wrong = [
            await client.get(f"{API}/usage?{query}")
            for query in ("by=month", "since=x", "until=2026-13-01", "by=", "sinse=1", "since=2&until=1")
        ]
    assert queue["by_status"] == {"waiting": 1, "pending": 2}
    assert queue["concurrency_keys"][0]["concurrency_key"] == "one at a time"
    described = {each["key"]: each["description"] for each in agents}
    assert described["asks"] == "Asks whether to go on."
    assert described["unknown here"] is None
    assert [each.status_code for each in usage] == [200] * 3
    assert usage[0].json()["by"] == "agent"
    assert [each.status_code for each in wrong] == [422] * 6


async def test_the_workers_are_shown(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    async with client:
        nobody = (await client.get(f"{API}/workers")).json()
        working = asyncio.ensure_future(runner.run_loop(handle_signals=False, concurrency=3))
        async with asyncio.timeout(10):
            while not (page := (await client.get(f"{API}/workers")).json())["items"]:  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(0.001)
        runner.stop()
        await working
    assert nobody == {"items": [], "next": None}
    [found] = page["items"]
    assert (found["worker"], found["pid"], found["slots"]) == (runner.config.worker_id, os.getpid(), 3)
    assert (found["living"], found["agents"]) == (True, runner.registry.keys())
    assert dt.datetime.fromisoformat(found["last_seen_at"]) >= dt.datetime.fromisoformat(found["started_at"])


async def test_a_turn_is_started_once_and_read(
    client: httpx.AsyncClient, runner: AgentRunner, turns: TurnManager
) -> None:
    body = {"turn_id": "chat/1", "text": "add 1 and 2", "metadata": {"a": 1}}
    async with client:
        started = await client.post(f"{API}/turns", json=body)
        again = await client.post(f"{API}/turns", json=body)
        other = await client.post(f"{API}/turns", json={**body, "text": "add 1 and 3"})
        await runner.run_once()
        read = await client.get(started.headers["location"])
        by_key = await client.get(f"{API}/turns/chat%2F1")
        await runner.submit("asks", run_id="no turn")
        wrong = [await client.get(f"{API}/turns/{each}") for each in ("no%20turn", "nope")]
    assert (started.status_code, again.status_code, other.status_code) == (201, 201, 409)
    assert started.json()["id"] == again.json()["id"]
    assert read.json() == by_key.json()
    assert read.json()["status"] == "succeeded"
    assert "3" in read.json()["response"]
    assert [each.status_code for each in wrong] == [404, 404]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"text": ""}, "text"),
        ({"text": 3}, "text"),
        ({"text": "hi", "messages": []}, "text"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "nobody", "content": "hi"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "messages"),
        ({"text": "hi", "turn_id": ""}, "turn_id"),
        ({"text": "hi", "turn_id": "a\nb"}, "turn_id"),
        ({"text": "hi", "params": []}, "params"),
        ({"text": "hi", "personality": "nobody"}, "personality"),
        ({"text": "hi", "extra": 1}, "extra"),
        ([], ""),
        ("hi", ""),
    ],
)
async def test_an_invalid_turn_names_its_field(
    client: httpx.AsyncClient, runner: AgentRunner, body: Any, field: str
) -> None:
    async with client:
        answer = await client.post(f"{API}/turns", json=body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0]["field"].startswith(field)
    assert await runner.runs() == []
