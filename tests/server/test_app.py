from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.server.access import Caller
from agent_runtime_core.testing import VirtualClock
from tests.server.conftest import client_of


async def test_health_is_open_and_tells_more_with_a_token(client: httpx.AsyncClient, app: Any) -> None:
    async with client, client_of(app, None) as anonymous:
        live = await anonymous.get("/api/v1/health/live")
        ready = await anonymous.get("/api/v1/health/ready")
        plain = await anonymous.get("/api/v1/health")
        full = await client.get("/api/v1/health")
    assert [each.status_code for each in (live, ready, plain, full)] == [200] * 4
    assert plain.json() == {"status": "ok"}
    assert {"version", "worker", "problems"} <= set(full.json())


async def test_the_openapi_document_needs_the_scope_read(make_app: Callable[..., Any]) -> None:
    app = make_app(authenticate=lambda request: Caller("ada", frozenset({request.headers["x-scope"]})))
    async with client_of(app) as client:
        allowed = await client.get("/openapi.json", headers={"x-scope": "read"})
        refused = await client.get("/openapi.json", headers={"x-scope": "run"})
        pages = [await client.get(each, headers={"x-scope": "read"}) for each in ("/docs", "/redoc")]
    assert allowed.json()["openapi"].startswith("3.")
    assert refused.status_code == 403
    assert [each.status_code for each in pages] == [404, 404]
    assert refused.headers["content-type"] == "application/problem+json"


async def test_unknown_paths_and_methods_are_problems(client: httpx.AsyncClient) -> None:
    async with client:
        unknown = await client.get("/api/v1/nothing")
        method = await client.put("/api/v1/health")
    for response, status in ((unknown, 404), (method, 405)):
        assert response.status_code == status
        body = response.json()
        assert body["status"] == status
        assert body["type"].startswith("urn:agent-runtime:")
        assert body["request_id"] == response.headers["x-request-id"]
    assert method.headers["allow"] == "GET"


async def test_health_reads_the_store_at_most_once_per_second(
    make_app: Callable[..., Any], runner: AgentRunner
) -> None:
    clock = runner.queue.clock = VirtualClock()
    reads = []

    async def next_due() -> None:
        reads.append(clock.boot())

    runner.queue.next_due = next_due  # type: ignore[method-assign]
    async with client_of(make_app(), None) as client:
        for path in ("health", "health/ready", "health/live", "health/ready"):
            assert (await client.get(f"/api/v1/{path}")).status_code == 200
        assert len(reads) == 1
        clock.advance(1)
        await client.get("/api/v1/health/ready")
    assert len(reads) == 2
