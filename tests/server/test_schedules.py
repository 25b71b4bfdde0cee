"""The routes of schedules: what they store and return, their scopes, tenants and limits, and hidden schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.server.access import Caller
from agent_runtime_core.server.settings import ServerSettings
from tests.server.conftest import client_of

API = "/api/v1/schedules"
DAILY = {"agent": "echo", "cron": "0 9 * * *", "timezone": "Europe/Berlin", "input": {"x": 1}, "metadata": {"of": "me"}}
ALL = frozenset({"run", "act", "read"})


async def test_a_schedule_is_stored_listed_read_and_deleted(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    stored = await client.put(f"{API}/daily", json=DAILY)
    assert stored.status_code == 200
    found = stored.json()
    assert {name: found[name] for name in DAILY} == DAILY
    assert len(found["next_ticks"]) == 5
    assert found["next_ticks"][0] == found["next_tick"]
    schedule = await runner.schedules.get("daily")
    assert schedule is not None
    assert schedule.next_tick is not None
    assert found["next_tick"] == schedule.next_tick.isoformat()
    page = (await client.get(API)).json()
    assert page["next"] is None
    [item] = page["items"]
    assert (item["id"], item["last_state"], item["error"]) == ("daily", None, None)
    assert (await client.get(f"{API}/daily")).json()["runs"] == []
    assert (await client.delete(f"{API}/daily")).status_code == 204
    assert (await client.get(f"{API}/daily")).status_code == 404
    assert (await client.get(API)).json()["items"] == []


async def test_a_schedule_is_paused_resumed_and_run(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    await client.put(f"{API}/a%2Fb", json={"agent": "echo", "every": 3600})
    paused = (await client.post(f"{API}/a%2Fb/pause")).json()
    assert (paused["id"], paused["paused"], paused["next_tick"]) == ("a/b", True, None)
    assert len(paused["next_ticks"]) == 5
    resumed = (await client.post(f"{API}/a%2Fb/resume")).json()
    assert resumed["next_tick"] is not None
    run = await client.post(f"{API}/a%2Fb/run")
    assert run.status_code == 201
    assert run.headers["location"] == f"/api/v1/runs/{run.json()['run_id']}"
    assert await runner.run_once()
    [last] = (await client.get(f"{API}/a%2Fb")).json()["runs"]
    assert (last["run_id"], last["state"]) == (run.json()["run_id"], "succeeded")


async def test_pages_of_schedules(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    for number in range(5):
        await runner.schedules.put(f"s{number}", "echo", every=3600)
    names, cursor = list[str](), None
    while True:
        page = (await client.get(API, params={"limit": 2, **({"cursor": cursor} if cursor else {})})).json()
        names += [each["id"] for each in page["items"]]
        if (cursor := page["next"]) is None:
            break
    assert names == ["s0", "s1", "s2", "s3", "s4"]


@pytest.mark.parametrize(
    ("id", "change", "field"),
    [
        ("daily", {"agent": "other"}, None),
        ("daily", {"cron": "61 * * * *"}, "cron"),
        ("daily", {"cron": None}, "cron"),
        ("daily", {"every": 5}, None),
        ("daily", {"timezone": "Mars/Olympus"}, "timezone"),
        ("daily", {"overlap": "?"}, "overlap"),
        ("daily", {"start": 2_000_000_000, "end": 1_900_000_000}, "end"),
        ("daily", {"priority": 7}, "priority"),
        ("daily", {"concurrency_limit": 0}, "concurrency_limit"),
        ("daily", {"concurrency_key": "k", "overlap": "queue"}, "overlap"),
        ("daily", {"tags": [""]}, "tags"),
        ("daily", {"evry": 7}, "evry"),
        ("a:b", {}, "id"),
        ("%00", {}, "id"),
    ],
)
async def test_a_wrong_schedule_is_refused(
    id: str, change: dict[str, Any], field: str | None, make_app: Callable[..., Any], runner: AgentRunner
) -> None:
    async with client_of(make_app(settings=ServerSettings(max_priority=5))) as client:
        answer = await client.put(f"{API}/{id}", json={**DAILY, **change})
    assert answer.status_code == 422, answer.text
    if field is not None:
        assert [each["field"] for each in answer.json()["errors"]] == [field]
    assert await runner.schedules.list() == []


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [("GET", "", "read"), ("GET", "/daily", "read"), ("PUT", "/daily", "run"), ("POST", "/daily/run", "run"),
     ("POST", "/daily/pause", "act"), ("POST", "/daily/resume", "act"), ("DELETE", "/daily", "act")],
)  # fmt: skip
async def test_each_route_needs_its_scope(
    method: str, path: str, scope: str, make_app: Callable[..., Any], runner: AgentRunner
) -> None:
    await runner.schedules.put("daily", "echo", every=3600)
    body = DAILY if method == "PUT" else None
    for scopes, codes in ((ALL - {scope}, (403,)), ({scope}, (200, 201, 204))):
        app = make_app(authenticate=lambda _, scopes=scopes: Caller("a", frozenset(scopes)))
        async with client_of(app) as client:
            assert (await client.request(method, f"{API}{path}", json=body)).status_code in codes


async def test_a_caller_with_a_tenant_has_its_own_schedules(make_app: Callable[..., Any], runner: AgentRunner) -> None:
    await runner.schedules.put("daily", "echo", every=3600)
    await runner.schedules.put("other", "echo", every=3600, tenant="other")
    async with client_of(make_app(authenticate=lambda _: Caller("a", ALL, tenant="acme"))) as client:
        for path in ("daily", "other"):
            for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/run"), ("POST", "/pause")):
                assert (await client.request(method, f"{API}/{path}{rest}")).status_code == 404
        assert (await client.put(f"{API}/daily", json=DAILY)).json()["tenant"] == "acme"
        assert [each["id"] for each in (await client.get(API)).json()["items"]] == ["daily"]
        run = await client.post(f"{API}/daily/run")
        assert run.json()["tenant"] == "acme"
        assert (await client.put(f"{API}/daily?tenant=other", json=DAILY)).status_code == 403
    async with client_of(make_app()) as client:
        assert len((await client.get(API)).json()["items"]) == 3
        assert (await client.get(f"{API}/daily?tenant=acme")).json()["tenant"] == "acme"
        assert (await client.get(f"{API}/daily")).json()["tenant"] is None


async def test_hidden_schedules(make_app: Callable[..., Any], runner: AgentRunner) -> None:
    """A schedule is visible to a caller like its runs: by its metadata."""
    await runner.schedules.put("hers", "echo", every=3600, metadata={"of": "her"})
    seen = list[str]()

    def may(verb: str, run: Any) -> bool:
        seen.append(verb)
        return bool(run.metadata.get("of") == "me")

    async with client_of(make_app(authenticate=lambda _: Caller("a", ALL, may=may))) as client:
        assert (await client.put(f"{API}/mine", json=DAILY)).status_code == 200
        assert [each["id"] for each in (await client.get(API)).json()["items"]] == ["mine"]
        for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/run"), ("POST", "/pause"), ("POST", "/resume")):
            assert (await client.request(method, f"{API}/hers{rest}")).status_code == 404
        assert (await client.put(f"{API}/hers", json=DAILY)).status_code == 409
        assert (await client.put(f"{API}/new", json={**DAILY, "metadata": {}})).status_code == 403
        run = (await client.post(f"{API}/mine/run")).json()
        assert [each["run_id"] for each in (await client.get(f"{API}/mine")).json()["runs"]] == [run["run_id"]]
        assert (await client.delete(f"{API}/mine")).status_code == 204
    assert {*seen} == {"read", "act", "delete"}
    assert [each.id for each in await runner.schedules.list()] == ["hers"]


async def test_a_full_queue_refuses_to_run_now(make_app: Callable[..., Any], runner: AgentRunner) -> None:
    await runner.schedules.put("daily", "echo", every=3600)
    async with client_of(make_app(settings=ServerSettings(max_pending=1))) as client:
        assert (await client.post(f"{API}/daily/run")).status_code == 201
        assert (await client.post(f"{API}/daily/run")).status_code == 429


async def test_a_run_cannot_use_the_name_of_a_schedule(client: httpx.AsyncClient) -> None:
    assert (await client.post("/api/v1/runs", json={"agent": "echo", "run_id": "schedule:x"})).status_code == 422
