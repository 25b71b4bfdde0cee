from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.server.access import Caller
from agent_runtime_core.testing import VirtualClock
from tests.server.conftest import TOKEN, LiveServer, client_of


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


#: Names of a client's functions: one that is renamed breaks the callers of generated clients.
OPERATIONS = """
answer_approval cancel_run compare_runs delete_run delete_schedule discard_dead_letters fork_run list_agents
list_approvals list_pools list_runs list_schedules list_workers pause_schedule put_schedule read_about read_dashboard
read_health
read_journal read_liveness read_messages read_plan read_queue read_readiness read_result read_run read_schedule
read_step read_steps read_timeline read_turn read_usage requeue_dead_letters resume_run resume_schedule run_schedule
send_message send_signal sign_in sign_out start_turn stream_events submit_run
"""


def test_operations_have_ids_and_typed_models(app: Any) -> None:
    document = app.openapi()
    operations = [each for path in document["paths"].values() for each in path.values()]
    assert sorted(each["operationId"] for each in operations) == OPERATIONS.split()
    for name, model in (
        ("read_plan", "Plan"), ("read_usage", "Usage"), ("read_queue", "Queue"), ("compare_runs", "Comparison"),
    ):  # fmt: skip
        [found] = [each for each in operations if each["operationId"] == name]
        schema = found["responses"]["200"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{model}"}


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
    assert method.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "runs", "GET, HEAD, POST"), ("PATCH", "runs/r", "GET, HEAD, DELETE"),
        ("GET", "session", "POST, DELETE"), ("GET", "runs/r/cancel", "POST"),
        ("HEAD", "runs/r/cancel", "POST"), ("OPTIONS", "queue", "GET, HEAD"),
        ("POST", "runs/a%2Fb/events", "GET, HEAD"), ("BREW", "../../openapi.json", "GET, HEAD"),
    ],
)  # fmt: skip
async def test_405_names_all_methods_of_the_path(
    client: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    async with client:
        response = await client.request(method, f"/api/v1/{path}")
    assert (response.status_code, response.headers["allow"]) == (405, allowed)


async def test_head_is_answered_like_get_without_a_body(
    app: Any, client: httpx.AsyncClient, runner: AgentRunner, live_server: Callable[..., LiveServer],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "agent_runtime_core.access")
    await runner.submit("echo", {"n": 1}, run_id="r")
    server = live_server(app)
    paths = (
        "/", "/static/style.css", "/static/nothing.js", "/openapi.json", "/api/v1/health/live", "/api/v1/runs",
        "/api/v1/runs/r/journal", "/api/v1/runs/r/result", "/api/v1/runs/unknown", "/api/v1/runs?limit=x",
        "/api/v1/runs/r/events?follow=false",
    )  # fmt: skip
    async with client, httpx.AsyncClient(base_url=server.url, headers=client.headers) as real:
        for path in paths:
            wanted = await real.get(path)
            for each in (real, client):
                found = await each.head(path)
                assert (found.status_code, found.content) == (wanted.status_code, b""), path
                for name in ("content-type", "etag", "cache-control", "retry-after"):
                    assert found.headers.get(name) == wanted.headers.get(name), (path, name)
                assert int(found.headers["content-length"]) > 0, path
        stream = await real.head("/api/v1/runs/r/events")  # ends, although the run has not
        anonymous = await real.head("/api/v1/runs", headers={"Authorization": "Bearer wrong"})
    assert (stream.status_code, stream.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert (stream.content, app.state.server.limits.open_streams) == (b"", 0)
    assert anonymous.status_code == 401
    assert any(record.getMessage().startswith("HEAD /api/v1/runs/{id}/journal 200 ") for record in caplog.records)


async def test_every_response_is_neither_stored_nor_guessed(app: Any, runner: AgentRunner) -> None:
    run_id = str(await runner.submit("echo"))
    await runner.cancel(run_id)
    calls = {
        (method.upper(), path.format(id=run_id, other=run_id, step_id="s", name="n"))
        for path, operations in app.openapi()["paths"].items()
        for method in operations
    } | {
        ("GET", "/openapi.json"),
        ("GET", "/"),
        ("GET", "/api/v1/nothing"),
        ("GET", f"/api/v1/runs/{run_id}/events?follow=0"),
    }
    for token in (TOKEN, None):
        async with client_of(app, token) as client:
            for method, path in sorted(calls):
                response = await client.request(method, path, json={} if method == "POST" else None)
                wanted = "no-cache" if path == "/" else "no-store"  # the page has no data
                found = [response.headers.get_list(each) for each in ("cache-control", "x-content-type-options")]
                assert found == [[wanted], ["nosniff"]], (method, path, response.status_code)


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
