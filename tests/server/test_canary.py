"""A secret in keys, prompts, inputs and results is in no log line, no metric and no error body."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_runtime_core.runner import AgentRunner
from tests.server.conftest import Served
from tests.support.processes import until
from tests.support.runs import Script

CANARY = "quetzal-7731"
RUNS = "/api/v1/runs"
NAMED = "order-7"  # the log of the worker has the names of runs
PLAN = {"prompt": f"add a to-do: {CANARY}"}

Request = tuple[str, str, dict[str, Any]]


def bad_requests(run: str) -> Iterator[Request]:
    """Requests with the secret everywhere, each of which fails."""
    yield "POST", RUNS, {"json": {"prompt": 5, CANARY: CANARY}}
    yield "POST", RUNS, {"json": {"prompt": [CANARY]}}
    yield "POST", RUNS, {"json": {"prompt": CANARY, "max_steps": CANARY}}
    yield "POST", RUNS, {"json": {"prompt": CANARY, "agent": CANARY}}
    yield "POST", RUNS, {"json": {"agent": CANARY, "input": {CANARY: CANARY}}}
    yield "POST", RUNS, {"json": {"agent": "orchestrator", "input": {"messages": CANARY}}}
    yield "POST", RUNS, {"json": {"agent": "orchestrator", "run_id": CANARY * 100}}
    yield "POST", RUNS, {"json": {"agent": "orchestrator", "run_id": f"{CANARY}\n"}}
    yield "POST", RUNS, {"json": {"agent": "orchestrator", "deadline": CANARY, "metadata": CANARY}}
    yield "POST", RUNS, {"json": {"agent": "orchestrator", "concurrency_key": f"{CANARY}\x00"}}
    yield "POST", RUNS, {"json": PLAN, "headers": {"Idempotency-Key": CANARY * 100}}
    yield "POST", RUNS, {"json": {"prompt": f"other {CANARY}"}, "headers": {"Idempotency-Key": CANARY}}
    yield "POST", RUNS, {"content": f'{{"prompt": "{CANARY}"'}
    yield "POST", RUNS, {"content": json.dumps(CANARY), "headers": {"Content-Type": f"text/{CANARY}"}}
    yield "POST", RUNS, {"json": [CANARY]}
    yield "GET", f"{RUNS}/{CANARY}", {}
    yield "GET", f"{RUNS}/{CANARY}%2f..%2f{CANARY}", {}
    yield "GET", f"/{CANARY}", {}
    yield "GET", f"{RUNS}/{run}/compare/{CANARY}", {}
    yield "GET", f"{RUNS}/{run}/events", {"headers": {"Last-Event-ID": CANARY}}
    yield "GET", f"{RUNS}/{run}/steps", {"params": {"after": CANARY, CANARY: CANARY}}
    yield "GET", RUNS, {"params": {"state": CANARY}}
    yield "GET", RUNS, {"params": {"cursor": CANARY, "limit": CANARY}}
    yield "GET", RUNS, {"params": {"since": CANARY}}
    yield "GET", "/api/v1/usage", {"params": {"by": CANARY}}
    yield "GET", f"/api/v1/turns/{CANARY}", {}
    yield "POST", "/api/v1/turns", {"json": {"user_id": {CANARY: 1}, CANARY: 1}}
    yield "POST", f"{RUNS}/{run}/cancel", {"json": {"wait": CANARY}}
    yield "POST", f"{RUNS}/{run}/resume", {"json": {CANARY: CANARY}}
    yield "POST", f"{RUNS}/{run}/fork", {"json": {"after_step": CANARY, "new_run_id": CANARY}}
    yield "POST", f"{RUNS}/{run}/signals/{CANARY}", {"json": {CANARY: CANARY}}
    yield "POST", f"{RUNS}/{run}/approvals/{CANARY}", {"json": {"answer": CANARY, "request_id": CANARY}}
    yield "POST", "/api/v1/dead/requeue", {"json": {"all": True, "state": CANARY, "expect": CANARY}}
    yield "POST", "/api/v1/session", {"json": {"code": CANARY}}
    yield "GET", RUNS, {"headers": {"Authorization": f"Bearer {CANARY}"}}
    yield "GET", RUNS, {"headers": {"Host": f"{CANARY}.example"}}
    yield "GET", RUNS, {"headers": {"Origin": f"https://{CANARY}.example"}}


def test_a_secret_is_in_no_log_line_no_metric_and_no_error_body(
    serve: Callable[..., Served], capfd: pytest.CaptureFixture[str]
) -> None:
    served = serve("--log-level", "debug", "--metrics", "token")
    with served.client() as client:
        stored = client.post(RUNS, json=PLAN, headers={"Idempotency-Key": CANARY, "X-Request-Id": CANARY})
        assert stored.status_code == 201
        named = client.post(RUNS, json={"agent": "orchestrator", "run_id": NAMED, "input": {
            "messages": [{"role": "user", "content": PLAN["prompt"]}],
        }, "metadata": {CANARY: CANARY}})  # fmt: skip
        assert named.status_code == 201
        for run in (stored.json()["run_id"], NAMED):
            until(lambda run=run: client.get(f"{RUNS}/{run}/result").status_code == 200, "the run has finished")  # type: ignore[misc]
        answered = client.get(f"{RUNS}/{NAMED}").json()
        assert answered["status"] == "completed"
        assert CANARY in json.dumps(answered["result"])  # so that the secret went through
        for method, path, how in bad_requests(stored.json()["run_id"]):
            response = client.request(method, path, **how)
            assert 400 <= response.status_code < 500, (method, path, how, response.text)
            assert response.headers["content-type"] == "application/problem+json"
            assert CANARY not in response.text, (method, path, how, response.text)
            assert not [name for name, value in response.headers.items() if CANARY in value]
        metrics = client.get("/metrics").text
        assert 'agent_runtime_runs_total{agent="orchestrator",state="succeeded"}' in metrics
        assert CANARY not in metrics
    served.send(signal.SIGTERM)
    assert served.ended() == 0
    log = capfd.readouterr().err
    assert log.count("/api/v1/runs/{id}") > 5
    assert [line for line in log.splitlines() if CANARY in line] == []


@pytest.mark.parametrize(
    ("damage", "path", "named"),
    [
        ("UPDATE arc_runs SET metadata = CAST(metadata AS BLOB)", "", "metadata"),
        ("UPDATE arc_journal SET result = result || ' '", "/steps", "checksum"),
        ("UPDATE arc_events SET payload = CAST(payload AS BLOB)", "/events?follow=false", "payload"),
    ],
)
async def test_a_damaged_run_is_named_in_the_log_without_its_content(
    client: httpx.AsyncClient, runner: AgentRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    damage: str, path: str, named: str,
) -> None:  # fmt: skip
    async def secretive(ctx: Any) -> Any:
        await ctx.emit("note", {"text": CANARY})
        return await ctx.step("one", str, CANARY)

    runner.registry.register(Script(secretive, "secretive"))
    await runner.execute("secretive", "r", {"text": CANARY}, metadata={"text": CANARY})
    run_id = (await runner.queue.require("r")).run_id
    with contextlib.closing(sqlite3.connect(tmp_path / "agents.db")) as connection, connection:
        assert connection.execute(damage).rowcount > 0
    caplog.set_level(logging.DEBUG)
    async with client:
        response = await client.get(f"/api/v1/runs/r{path}")
    assert response.status_code == 500
    assert response.json().keys() == {"type", "title", "status", "request_id"}
    [told] = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert f"request {response.json()['request_id']} failed with StorageCorrupt: " in told
    assert all(each in told for each in (run_id, named, "a backup"))
    assert CANARY not in caplog.text
