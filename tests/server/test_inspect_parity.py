"""`agent-runtime inspect` answers as `agent-runtime serve` does, with the same data and the same errors."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core.registry import Registry
from agent_runtime_core.server.access import Caller
from agent_runtime_core.server.app import create_app
from agent_runtime_core.server.settings import ServerSettings
from tests.server.conftest import client_of
from tests.support.inspector_data import STORY, many_runs, story
from tests.support.local_client import LocalClient, inspecting

#: They depend on the time of the request, on the process, or on what the server may do.
DIFFERENT = {
    "age_seconds", "duration_seconds", "oldest_pending_seconds", "request_id", "live", "scopes", "read_only",
    "durability", "signed_in", "since", "until", "streams", "at",
}  # fmt: skip

UNLIMITED = ServerSettings(request_burst=100_000)
LISTS = (
    "about", "queue", "workers", "pools", "agents", "schedules", "schedules?limit=1", "schedules?tenant=acme",
    "schedules/daily", "health", "health/live", "health/ready", "usage", "usage?by=model", "usage?by=tenant",
    "usage?by=day", "dashboard?window=week",
    "usage?since=2020-01-01T00:00:00Z&until=2030-01-01T00:00:00Z", "approvals", "approvals?limit=1",
    "approvals?agent=support", "runs", "runs?limit=3", "runs?state=failed&state=retrying&state=in_doubt",
    "runs?q=order",     "runs?state=waiting&agent=order", "runs?conversation=6f1d1f9e-52a7-4a6e-9d3f-0c5f3f3c1a01",
    "runs?parent=report-november", "runs?since=1&until=2030-01-01T00:00:00%2B01:00", "runs?limit=2&limit=1",
)  # fmt: skip
OF_A_RUN = (
    "", "/result", "/steps", "/steps?limit=2", "/timeline", "/timeline?newest_first=yes&limit=2",
    "/timeline?limit=25000", "/journal",
    "/journal?after=2&limit=3", "/messages", "/messages?after=0&limit=1", "/plan", "/compare/report-november",
    "/events?follow=false", "/steps/none",
)  # fmt: skip
WRONG = (
    "runs?stat=failed", "runs?state=lost&limit=0", "runs?limit=201", "runs?limit=x", "runs?limit=", "runs?limit=1.5",
    "runs?q=" + "x" * 513, "runs?parent=", "runs?conversation=", "runs?since=yesterday", "runs?since=-1",
    "runs?since=nan", "runs?since=2026-01-01T00:00:00", "runs?since=2&until=1", "runs?cursor=x", "runs?cursor=",
    "runs?x%0ay=1",
    "runs/order-77/steps?after=-2", "runs/order-77/steps?limit=1001", "runs/order-77/timeline?newest_first=perhaps",
    "runs/order-77/timeline?limit=25001",
    "runs/order-77/result?wait=61", "runs/order-77/result?wait=-1", "runs/order-77/result?wait=x",
    "runs/order-77/result?wait=nan", "runs/order-77/events?after=x", "runs/order-77/events?after=-1",
    "runs/order-77/events?" + "types=x&" * 21, "usage?by=hour", "usage?since=2&until=1", "approvals?limit=0",
    "approvals?cursor=x", "schedules?cursor=x", "schedules?limit=0", "schedules/none", "schedules/a%3Ab",
    "runs/none", "runs/none/compare/order-77", "runs/order-77/compare/none", "runs/%00", "none",
    "runs/" + "x" * 600, "runs/a%2Fb",
)  # fmt: skip


def comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: comparable(each) for name, each in value.items() if name not in DIFFERENT}
    return [comparable(each) for each in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "agents.db"

    async def write() -> None:
        now = time.time()
        await story(path, now - STORY)
        await many_runs(path, 60, now)
        async with AgentRunner.open(path, registry=Registry()) as runner:
            await runner.schedules.put("daily", "echo", {"x": 1}, every=1e6)
            await runner.schedules.run_now("daily")

    asyncio.run(write())
    return path


async def answers_of_the_server(store: Path) -> dict[str, tuple[int, Any]]:
    """What `serve` answers to all requests, and to those for the next pages of lists."""
    async with AgentRunner.open(store, registry=Registry()) as runner:
        client = client_of(create_app(runner, authenticate=lambda _: Caller("anyone"), settings=UNLIMITED), None)
        pending = [*LISTS, *WRONG]
        found: dict[str, tuple[int, Any]] = {}
        while pending:
            path = pending.pop(0)
            response = await client.get(f"/api/v1/{path}", headers={"Accept": "application/json"})
            found[path] = response.status_code, response.json()
            if path == "runs":
                runs = [each["key"] or each["run_id"] for each in found[path][1]["items"]]
                pending += [f"runs/{each}{rest}" for each in runs for rest in OF_A_RUN]
            if path.startswith(("runs?", "approvals")) and (following := found[path][1].get("next")):
                base = path.partition("&cursor=")[0]
                pending.append(f"{base}{'&' if '?' in base else '?'}cursor={following}")
        await client.aclose()
        return found


def test_both_servers_give_the_same_answers(store: Path) -> None:
    expected = asyncio.run(answers_of_the_server(store))
    assert len(expected) > 500
    assert {status for status, _ in expected.values()} == {200, 202, 400, 404, 422}
    with inspecting(store) as server:
        client = LocalClient(server.port)
        different = {}
        for path, (status, body) in expected.items():
            response = client.data(path.replace("?follow=false", ""))
            found, wanted = comparable(response.json), comparable(body)
            if path == "none":  # there is no document of the endpoints to name
                wanted["detail"] = found["detail"]
            if (response.status, found) != (status, wanted):
                different[path] = (response.status, found), (status, wanted)
        client.close()
    assert different == {}
