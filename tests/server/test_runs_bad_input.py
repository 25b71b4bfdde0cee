"""What callers send that is wrong. Each is refused with its status, and nothing is stored."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.server.documents import AgentRun
from tests.server.conftest import client_of
from tests.server.documented import documented

RUNS = "/api/v1/runs"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def client(app: FastAPI) -> httpx.AsyncClient:
    """A client that fails for a response which the OpenAPI document does not have."""
    return client_of(app, event_hooks={"response": [documented(app)]})


def _deep(levels: int) -> str:
    return '{"agent": "echo", "input": ' + '{"a":' * (levels - 1) + "1" + "}" * (levels - 1) + "}"


# body, status, field or a part of the detail
BODIES: list[tuple[str, str | bytes, int, str]] = [
    ("empty", b"", 422, ""),
    ("not JSON", b"{", 400, "JSON"),
    ("a form", b"prompt=hi", 400, "JSON"),
    ("a list", b"[]", 422, "prompt or agent"),
    ("a string", b'"hi"', 422, "prompt or agent"),
    ("null", b"null", 422, ""),
    ("neither form", b"{}", 422, "prompt or agent"),
    ("both forms", b'{"prompt": "hi", "agent": "echo"}', 422, "prompt or agent"),
    ("unknown field", b'{"prompt": "hi", "max_step": 3}', 422, "max_steps"),
    ("unknown field of an agent run", b'{"agent": "echo", "inputs": {}}', 422, "'input'"),
    ("prompt a number", b'{"prompt": 5}', 422, "prompt"),
    ("prompt null", b'{"prompt": null}', 422, "prompt"),
    *[
        (f"max_steps {each}", json.dumps({"prompt": "hi", "max_steps": each}), 422, "max_steps")
        for each in (0, 101, True, 1.5, "3", None)
    ],
    ("unknown agent", b'{"agent": "ecko"}', 422, "echo"),
    ("agent empty", b'{"agent": ""}', 422, "agent"),
    ("agent a number", b'{"agent": 3}', 422, "agent"),
    ("input a list", b'{"agent": "echo", "input": []}', 422, "input"),
    ("messages a string", b'{"agent": "echo", "input": {"messages": "hi"}}', 422, "be a list"),
    ("NaN", b'{"agent": "echo", "input": {"n": NaN}}', 400, "JSON"),
    ("infinity", b'{"agent": "echo", "input": {"n": 1e999}}', 400, "JSON"),
    ("lone surrogate", b'{"agent": "echo", "input": {"n": "\\ud800"}}', 422, "surrogate"),
    ("not UTF-8", b'{"agent": "echo", "input": {"n": "\xff"}}', 400, "UTF-8"),
    ("depth 101", _deep(101), 422, "100"),
    ("depth 10,000", _deep(10_000), 422, "100"),
    ("oversized", b'{"prompt": "' + b"x" * (1 << 20) + b'"}', 413, "1048576"),
    ("deadline passed", b'{"agent": "echo", "deadline": "2020-01-01T00:00:00Z"}', 422, "deadline"),
    ("deadline without an offset", b'{"agent": "echo", "deadline": "2099-01-01T00:00:00"}', 422, "deadline"),
    ("deadline a word", b'{"agent": "echo", "deadline": "soon"}', 422, "deadline"),
    ("deadline true", b'{"agent": "echo", "deadline": true}', 422, "deadline"),
    ("run_id empty", b'{"agent": "echo", "run_id": ""}', 422, "run_id"),
    ("run_id too long", json.dumps({"agent": "echo", "run_id": "x" * 513}), 422, "run_id"),
    ("run_id with a line break", b'{"agent": "echo", "run_id": "a\\nb"}', 422, "run_id"),
    ("run_id with a NUL", b'{"agent": "echo", "run_id": "a\\u0000b"}', 422, "run_id"),
    ("concurrency_key too long", json.dumps({"agent": "echo", "concurrency_key": "x" * 513}), 422, "concurrency_key"),
    ("concurrency_key broken", b'{"agent": "echo", "concurrency_key": "a\\nb"}', 422, "concurrency_key"),
    ("priority a text", b'{"agent": "echo", "priority": "1"}', 422, "priority"),
    ("priority too large", b'{"agent": "echo", "priority": 2147483648}', 422, "priority"),
    ("delay negative", b'{"agent": "echo", "delay": -1}', 422, "delay"),
    ("delay too large", b'{"agent": "echo", "delay": 1e300}', 422, "delay"),
    ("two conversations", b'{"agent": "echo", "conversation_id": "a", "input": {"conversation_id": "b"}}', 422, "conv"),
    ("a number of 5,000 digits", b'{"agent": "echo", "input": {"n": ' + b"9" * 5000 + b"}}", 400, "JSON"),
    ("a type tag", b'{"agent": "echo", "input": {"n": {"$": "nope", "v": 1}}}', 201, ""),
]


@pytest.mark.parametrize(("body", "status", "part"), [each[1:] for each in BODIES], ids=[each[0] for each in BODIES])
async def test_a_bad_body_is_refused(
    client: httpx.AsyncClient, runner: AgentRunner, body: str | bytes, status: int, part: str
) -> None:
    async with client:
        answer = await client.post(RUNS, content=body, headers=JSON)
        listed = await client.get(RUNS)
    assert answer.status_code == status, answer.text
    assert listed.status_code == 200
    if status == 201:
        return
    problem = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["status"] == status
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert part in json.dumps(problem)
    if part in AgentRun.model_fields:
        assert [each["field"] for each in problem["errors"]] == [part]
    assert "Traceback" not in answer.text
    assert await runner.runs() == []


@pytest.mark.parametrize("key", ["", "x" * 513, "tab\there"])
async def test_a_bad_idempotency_key_is_refused(client: httpx.AsyncClient, runner: AgentRunner, key: str) -> None:
    async with client:
        answer = await client.post(RUNS, json={"agent": "echo"}, headers={"Idempotency-Key": key})
    assert answer.status_code == 422, answer.text
    assert await runner.runs() == []


async def test_a_path_with_a_slash_at_its_end_is_not_found(client: httpx.AsyncClient) -> None:
    async with client:
        found = [await client.get(f"{RUNS}{end}") for end in ("/", "//", "//result", "/x/steps/")]
    assert [each.status_code for each in found] == [404] * 4


async def test_other_media_types_are_refused(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    async with client:
        answer = await client.post(RUNS, content=b'{"prompt": "hi"}', headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415
    assert await runner.runs() == []


@pytest.mark.parametrize(
    ("id", "status"),
    [
        ("nope", 404),
        ("%2f", 404),
        ("%2e%2e", 404),
        ("%2e%2e%2f%2e%2e%2fetc%2fpasswd", 404),
        ("%00", 404),
        ("a%0ab", 404),
        ("%ff", 404),
        ("%ed%a0%80", 404),
        ("x" * 513, 404),
        ("x" * 10_000, 414),
        ("00000000-0000-0000-0000-000000000000", 404),
        ("{id}", 404),
    ],
)
async def test_an_id_of_no_run_is_not_found(client: httpx.AsyncClient, id: str, status: int) -> None:
    async with client:
        found = [await client.get(f"{RUNS}/{id}{end}") for end in ("", "/result", "/steps", "/journal", "/plan")]
        acted = [
            await client.post(f"{RUNS}/{id}/cancel"),
            await client.post(f"{RUNS}/{id}/signals/x", json=1),
            await client.delete(f"{RUNS}/{id}"),
        ]
    assert [each.status_code for each in (*found, *acted)] == [status] * 8
    assert {each.headers["content-type"] for each in (*found, *acted)} == {"application/problem+json"}


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=x", "limit"),
        ("limit=1.5", "limit"),
        ("state=nope", "state"),
        ("state=running&state=", "state"),
        ("since=x", "since"),
        ("since=nan", "since"),
        ("since=-1", "since"),
        ("until=1e400", "until"),
        ("until=2026-01-01", "until"),
        ("since=2026-01-02T00:00:00Z&until=2026-01-01T00:00:00Z", "since"),
        ("parent=%00", "parent"),
        ("cursor=x", "cursor"),
        ("cursor=", "cursor"),
        ("cursor=%00%ff", "cursor"),
        ("cursor=" + "A" * 5000, "cursor"),
        ("stat=failed", "stat"),
        ("q=" + "x" * 513, "q"),
    ],
)
async def test_a_bad_query_is_refused(client: httpx.AsyncClient, query: str, field: str) -> None:
    async with client:
        answer = await client.get(f"{RUNS}?{query}")
    assert answer.status_code == 422, answer.text
    assert field in {each["field"].partition(".")[0] for each in answer.json()["errors"]}


async def test_an_unknown_parameter_names_the_nearest_one(client: httpx.AsyncClient) -> None:
    async with client:
        answer = await client.get(f"{RUNS}?stat=failed")
    assert answer.json()["detail"] == "stat is not a known field. Did you mean 'state'?"


@pytest.mark.parametrize(
    ("path", "body", "messages"),
    [
        ("", {"prompt": 5, "max_steps": 101}, ["prompt must be a string.", "max_steps must be at most 100."]),
        ("", {"prompt": None, "max_steps": 0}, ["prompt must be a string.", "max_steps must be at least 1."]),
        ("", {"prompt": "x", "max_steps": 1.5}, ["max_steps must be an integer."]),
        ("", {"agent": "", "delay": "1"}, ["agent must not be empty.", "delay must be a number."]),
        ("", {"agent": "x" * 513}, ["agent must have at most 512 characters."]),
        ("", {"agent": "echo", "deadline": "so"}, ["deadline must be a time of RFC 3339 or seconds since 1970."]),
        ("", {}, ["body must be an object with either prompt or agent. Send one of the two."]),
        ("/r/messages", {}, ["message is missing."]),
        ("/r/messages", {"message": 1}, ["message must be a string or an object."]),
        ("/r/messages", [], ["body must be an object."]),
        ("/r/messages", {"message": "x", "when": "now"}, ["when must be 'next_turn' or 'interrupt'."]),
        ("/r/cancel", {"wait": 61}, ["wait must be at most 60."]),
        ("?limit=x", None, ["limit must be an integer."]),
        ("?state=failed&state=x&limit=0", None, [
            "state.1 must be 'pending', 'running', 'waiting', 'succeeded', 'failed', 'cancelled', 'timed_out', 'dead', "
            "'retrying' or 'in_doubt'.", "limit must be at least 1.",
        ]),
        ("/r/events?follow=x", None, ["follow must be true or false."]),
    ],
)  # fmt: skip
async def test_what_a_value_must_be_is_said_as_elsewhere(
    client: httpx.AsyncClient, path: str, body: Any, messages: list[str]
) -> None:
    async with client:
        answer = await (client.get(RUNS + path) if body is None else client.post(RUNS + path, json=body))
    assert [each["message"] for each in answer.json()["errors"]] == messages
    assert answer.json()["detail"] == " ".join(messages)


async def test_a_value_that_is_not_in_a_list_gets_the_list(client: httpx.AsyncClient) -> None:
    async with client:
        answer = await client.get(f"{RUNS}?state=secret")
    assert "'succeeded'" in answer.json()["detail"]
    assert "secret" not in answer.text


async def test_a_cursor_belongs_to_its_filter(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    for _ in range(3):
        await runner.submit("echo")
    async with client:
        cursor = (await client.get(f"{RUNS}?limit=1&agent=echo")).json()["next"]
        kept = await client.get(f"{RUNS}?limit=2&agent=echo&cursor={cursor}")
        other = await client.get(f"{RUNS}?limit=1&cursor={cursor}")
        changed = await client.get(f"{RUNS}?limit=1&agent=echo&cursor={cursor[:-2]}AA")
    assert (kept.status_code, len(kept.json()["items"])) == (200, 2)
    assert (other.status_code, changed.status_code) == (422, 422)
    assert other.json()["errors"][0]["field"] == "cursor"


@pytest.mark.parametrize("text", ["\x00", "ü" * 200, "%", "_", "'", "*", "[", "\\"])
async def test_any_prefix_and_agent_can_be_looked_for(
    client: httpx.AsyncClient, runner: AgentRunner, text: str
) -> None:
    await runner.submit("echo", run_id="a%_'*[\\")
    async with client:
        by_prefix = await client.get(RUNS, params={"q": text})
        by_agent = await client.get(RUNS, params={"agent": text})
    assert (by_prefix.status_code, by_agent.status_code) == (200, 200)
    assert by_prefix.json()["items"] == by_agent.json()["items"] == []


async def test_waits_have_a_limit(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    await runner.submit("echo", run_id="one")
    async with client:
        found = [await client.get(f"{RUNS}/one/result?wait={each}") for each in ("61", "-1", "x", "nan", "inf")]
        cancelled = await client.post(f"{RUNS}/one/cancel", json={"wait": 61})
    assert [each.status_code for each in (*found, cancelled)] == [422] * 6
    assert (await runner.get_run("one")).status == "pending"


async def test_without_an_orchestrator_prompts_are_refused(make_app: Any) -> None:
    async with client_of(make_app(orchestrator=None, turns=None)) as client:
        prompt = await client.post(RUNS, json={"prompt": "add 1 and 2"})
        turn = await client.post("/api/v1/turns", json={"text": "hi"})
    assert (prompt.status_code, turn.status_code) == (422, 422)
    assert prompt.json()["errors"][0]["field"] == "prompt"


async def test_a_closed_store_is_a_problem(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    await runner.submit("echo", run_id="one")
    await runner.close()
    async with client:
        found = [
            await client.post(RUNS, json={"agent": "echo"}),
            await client.post(f"{RUNS}/one/cancel"),
            await client.get(RUNS),
            await client.get(f"{RUNS}/one"),
            await client.get(f"{RUNS}/one/result", params={"wait": 1}),
            await client.get("/api/v1/queue"),
        ]
    assert {(each.status_code, each.json()["type"]) for each in found} == {(503, "urn:agent-runtime:storage-closed")}
    assert {each.headers["retry-after"] for each in found} == {"1"}
