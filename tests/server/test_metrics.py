"""`/metrics`: who may read it, and what the server counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.server.access import Caller, Tokens
from agent_runtime_core.server.settings import ServerSettings
from agent_runtime_core.server.token_file import Token
from agent_runtime_core.tracing import PrometheusSink
from tests.server.conftest import TOKEN, LiveServer, client_of

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

CANARY = "canary-7c41"


@pytest.fixture
def metrics() -> PrometheusSink:
    return PrometheusSink()


@pytest.fixture
def measured(make_app: Any, metrics: PrometheusSink) -> Any:
    return make_app(metrics=metrics)


async def scraped(app: Any) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples of `/metrics` by name and by the values of their labels, in order of the labels' names."""
    response = await client_of(app).get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    assert response.headers["cache-control"] == "no-store"
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(response.text):
        assert family.name.startswith("agent_runtime_")
        for sample in family.samples:
            labels = tuple(value for _, value in sorted(sample.labels.items()))
            found.setdefault(sample.name.removeprefix("agent_runtime_"), {})[labels] = sample.value
    return found


async def test_a_token_needs_the_scope_metrics(make_app: Any, metrics: PrometheusSink) -> None:
    tokens = Tokens([Token.of("sk-reader-of-the-tests", "reader", frozenset({"read"})),
                     Token.of("sk-scraper-of-the-tests", "scraper", frozenset({"metrics"}))])  # fmt: skip
    app = make_app(metrics=metrics, authenticate=tokens)
    for token, status in (
        (None, 401),
        ("wrong", 401),
        ("sk-reader-of-the-tests", 403),
        ("sk-scraper-of-the-tests", 200),
    ):
        assert (await client_of(app, token).get("/metrics")).status_code == status


async def test_a_caller_that_may_see_some_of_the_runs_gets_no_totals(make_app: Any, metrics: PrometheusSink) -> None:
    """An open `/metrics` asks nobody who they are."""
    for may, is_open, status in (
        (lambda verb, run: True, False, 403),
        (None, False, 200),
        (lambda *_: True, True, 200),
    ):
        caller = Caller("ada", may=may)
        settings = ServerSettings(metrics_open=is_open)
        app = make_app(metrics=metrics, settings=settings, authenticate=lambda request, caller=caller: caller)
        assert (await client_of(app).get("/metrics")).status_code == status


async def test_open_metrics_need_no_token(make_app: Any, metrics: PrometheusSink) -> None:
    app = make_app(metrics=metrics, settings=ServerSettings(metrics_open=True))
    assert (await client_of(app, None).get("/metrics")).status_code == 200
    assert (await client_of(app, None).get("/api/v1/runs")).status_code == 401


async def test_a_server_without_metrics_says_how_to_get_them(app: Any) -> None:
    response = await client_of(app).get("/metrics")
    assert response.status_code == 404
    assert "--metrics" in response.json()["detail"]


async def test_responses_are_counted_by_method_route_and_status(measured: Any) -> None:
    client = client_of(measured)
    await client.get(f"/api/v1/runs/{CANARY}")
    await client.get("/api/v1/runs?limit=5")
    await client.get("/api/v1/runs?limit=x")
    await client.post("/api/v1/runs", json={"agent": "echo", "input": {"text": CANARY}})
    await client.get(f"/{CANARY}")
    await client.request("BREW", "/api/v1/runs")
    await client_of(measured, None).get("/api/v1/runs")
    await client.get("/static/app.js")
    found = await scraped(measured)
    assert found["http_requests_total"] == {
        ("GET", "/api/v1/runs/{id}", "404"): 1,
        ("GET", "/api/v1/runs", "200"): 1,
        ("GET", "/api/v1/runs", "422"): 1,
        ("POST", "/api/v1/runs", "201"): 1,
        ("GET", "-", "404"): 1,
        ("-", "/api/v1/runs", "405"): 1,
        ("GET", "/api/v1/runs", "401"): 1,
    }
    assert found["http_seconds_count"]["POST", "/api/v1/runs"] == 1
    assert found["http_seconds_count"]["GET", "/api/v1/runs"] == 3


async def test_runs_of_the_served_runner_are_counted(measured: Any, runner: AgentRunner) -> None:
    await client_of(measured).post("/api/v1/runs", json={"agent": "echo", "input": {"text": CANARY}, "run_id": CANARY})
    await client_of(measured).post("/api/v1/runs", json={"agent": "echo", "input": {}})
    assert (await scraped(measured))["queue_depth"]["echo", "pending"] == 2
    await runner.run_once()
    assert runner.tracer is not None
    await asyncio.to_thread(runner.tracer.close)
    assert (await scraped(measured))["runs_total"]["echo", "succeeded"] == 1
    text = (await client_of(measured).get("/metrics")).text
    assert CANARY not in text


async def test_open_streams_and_sockets_are_counted(measured: Any) -> None:
    limits = measured.state.server.limits
    with limits.stream("anyone"), limits.stream("anyone"), limits.stream("anyone", socket=True):
        assert (await scraped(measured))["streams"] == {("sse",): 2, ("socket",): 1}


async def test_a_socket_is_counted_when_it_opens(measured: Any) -> None:
    def connect(port: int) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with websockets.connect(f"ws://127.0.0.1:{port}/api/v1/socket", additional_headers=headers):
            pass

    websockets = pytest.importorskip("websockets.sync.client")
    with LiveServer(measured) as server:
        await asyncio.to_thread(connect, server.port)
    assert (await scraped(measured))["http_requests_total"]["WS", "/api/v1/socket", "101"] == 1


async def test_the_sink_is_not_added_twice(make_app: Any, runner: AgentRunner, metrics: PrometheusSink) -> None:
    for _ in range(2):
        make_app(metrics=metrics)
    assert runner.tracer is not None
    assert runner.tracer.sinks == (metrics,)


def test_something_else_is_rejected(make_app: Any) -> None:
    with pytest.raises(InvalidArgument, match="metrics must be a PrometheusSink"):
        make_app(metrics="open")
