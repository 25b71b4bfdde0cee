"""A caller with a tenant: every operation with the names of another tenant, lists, equal names, and memory."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import sqlite3
import tracemalloc
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import quote
from uuid import UUID

import httpx
import pytest
from fastapi import FastAPI
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from agent_runtime_core._engines.base import Op
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.orchestrator import Orchestrator
from agent_runtime_core.queue.pools import PoolLimit, end_of
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.server.access import Caller, Tokens
from agent_runtime_core.server.app import create_app
from agent_runtime_core.server.settings import ServerSettings
from agent_runtime_core.server.socket import Socket
from agent_runtime_core.server.token_file import Token, TokenFile
from agent_runtime_core.tracing.prometheus import PrometheusSink
from agent_runtime_core.turns import TurnManager
from tests.server.conftest import Served, client_of
from tests.server.documented import documented
from tests.server.streaming import frames_in, serving
from tests.server.test_socket import Client, connected, url
from tests.support.runs import Script

API = "/api/v1"
SECRET = "the secret of the owner"
UNKNOWN = str(UUID(int=1))
TALK = "6f1d1f9e-52a7-4a6e-9d3f-0c5f3f3c1a01"
DIFFERENT = {"request_id", "age_seconds", "oldest_pending_seconds", "since", "until", "at"}


async def _asks(ctx: Any) -> Any:
    secret = ctx.input["secret"]
    await ctx.step("look up", lambda: secret)
    await ctx.call("returns", {"secret": secret})
    return await ctx.approve("plan", {"of": secret})


async def _returns(ctx: Any) -> Any:
    return ctx.input["secret"]


async def _fails(ctx: Any) -> Any:
    raise ValueError(ctx.input["secret"])


@pytest.fixture
def runner(tmp_path: Path) -> AgentRunner:
    registry = Registry()
    for body, key in ((_asks, "asks"), (_returns, "returns"), (_fails, "fails")):
        registry.register(Script(body, key))
    return AgentRunner.open(tmp_path / "runs.db", registry=registry, config=RunnerConfig(park_after=0.0, max_retries=1))


def _who(connection: Any) -> Caller:
    """The token is the tenant; "admin" has none."""
    offered = next((each for each in connection.scope.get("subprotocols", ()) if each.startswith("bearer.")), "")
    name = connection.headers.get("authorization", "").removeprefix("Bearer ") or offered.removeprefix("bearer.")
    return Caller(name, tenant=None if name == "admin" else name)


@pytest.fixture
def app(runner: AgentRunner) -> FastAPI:
    return create_app(
        runner, orchestrator=Orchestrator(runner=runner, work=False), turns=TurnManager(runner), authenticate=_who,
        metrics=PrometheusSink(), settings=ServerSettings(request_burst=100_000),
    )  # fmt: skip


class Named(NamedTuple):
    """The names of the owner's runs, which another caller knows."""

    ids: tuple[str, ...]
    keys: tuple[str, ...]
    turn: str
    step: str
    cursors: Mapping[str, str]


async def _owned(app: FastAPI, runner: AgentRunner, owner: str | None) -> Named:
    """Store runs of each kind of a tenant, or of none."""
    async with client_of(app, "admin") as client:
        of = {} if owner is None else {"tenant": owner}
        given = {"secret": SECRET}
        for agent, key in (("asks", "order"), ("asks", "a/b"), ("fails", "broken"), ("returns", "done")):
            body = {
                "agent": agent, "input": given, "run_id": key, "conversation_id": TALK, "metadata": given,
                "concurrency_key": f"line of {key}", **of,
            }  # fmt: skip
            await client.post(f"{API}/runs", json=body, headers={"Idempotency-Key": f"idem {key}"})
        await client.post(
            f"{API}/runs", json={"prompt": f"add 1 and 2 {SECRET}", **of}, headers={"Idempotency-Key": "p"}
        )
        turn = {"text": SECRET, "turn_id": "turn-1", "conversation_id": TALK}
        await client.post(f"{API}/turns", json=turn, params=of)
        while await runner.run_once():
            pass
        await client.post(
            f"{API}/runs", json={"agent": "returns", "input": given, "run_id": "late", "delay": 90_000, **of}
        )
        await client.post(f"{API}/runs/order/messages", json={"message": SECRET, "message_id": "m-1"}, params=of)
        while await runner.run_once():  # the agent gets the message
            pass
        runs = (await client.get(f"{API}/runs", params={"limit": 200})).json()["items"]
        assert {each["tenant"] for each in runs} == {owner}
        assert {each["state"] for each in runs} == {"waiting", "failed", "succeeded", "pending"}
        [order] = [each["run_id"] for each in runs if each["key"] == "order"]
        timeline = (await client.get(f"{API}/runs/{order}/timeline")).json()["items"]
        pages = {
            path: (await client.get(f"{API}/{path}", params={"limit": 1, **of})).json()["next"]
            for path in ("runs", "approvals")
        }
        turns = [each["run_id"] for each in runs if each["agent"] == "turn"]
        schedule = {"agent": "returns", "input": given, "every": 86_400, "paused": True}
        stored = await client.put(f"{API}/schedules/nightly", json=schedule, params=of)
        assert stored.status_code == 200, stored.text
    keys = tuple(each["key"] for each in runs if each["key"])
    return Named(tuple(each["run_id"] for each in runs), keys, turns[0], timeline[0]["step_id"], pages)


def _stored(path: Path) -> set[str]:
    """All rows of the store."""
    with sqlite3.connect(path) as store:
        return {line for line in store.iterdump() if "sqlite_sequence" not in line}


def _same(response: httpx.Response) -> Any:
    """What two answers have in common that say the same."""
    kind = response.headers.get("content-type", "")
    body = response.json() if "json" in kind else response.text
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if name not in DIFFERENT}
    return response.status_code, kind, body


#: What a run's routes are called with. Each is called with each id and key of the owner, and answers 404 as for no run.
OF_A_RUN: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("GET", ""): [{}],
    ("GET", "/result"): [{}, {"params": {"wait": 0}}],
    ("GET", "/steps"): [{}],
    ("GET", "/steps/{step_id}"): [{}],
    ("GET", "/timeline"): [{}, {"params": {"newest_first": "true"}}],
    ("GET", "/journal"): [{}, {"params": {"after": 0}}],
    ("GET", "/messages"): [{}],
    ("GET", "/plan"): [{}],
    ("GET", "/compare/{other}"): [{}],
    ("GET", "/events"): [
        {}, {"headers": {"Accept": "text/event-stream"}}, {"headers": {"Accept": "application/json"}},
        {"headers": {"Last-Event-ID": "1"}}, {"params": {"after": "0", "follow": "false"}},
    ],
    ("POST", "/messages"): [{"json": {"message": "hi"}}, {"json": {"message": "hi", "message_id": "m-1"}}],
    ("POST", "/cancel"): [{}, {"json": {"wait": 0}}],
    ("POST", "/resume"): [{}],
    ("POST", "/fork"): [{}, {"json": {"new_run_id": "order"}}, {"json": {"after_step": "look up"}}],
    ("POST", "/signals/{name}"): [{"json": 1}, {"json": 1, "headers": {"Idempotency-Key": "idem order"}}],
    ("POST", "/approvals/{name}"): [{"json": {"answer": True}}],
    ("DELETE", ""): [{}],
}  # fmt: skip


def _lists(named: Named) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What the routes of many runs are called with. They answer as if no run were stored."""
    run = named.ids[0]
    dead: list[dict[str, Any]] = [
        {"json": {"ids": [*named.ids, *named.keys], "state": "failed"}},
        {"json": {"all": True, "expect": 0, "state": "failed"}},
        {"json": {"all": True, "expect": 1, "state": "failed"}},
    ]
    return {
        ("GET", "/runs"): [
            {}, {"params": {"conversation": TALK}}, {"params": {"parent": run}}, {"params": {"parent": "order"}},
            {"params": {"q": run[:4]}}, {"params": {"q": run}}, {"params": {"q": "ord"}}, {"params": {"agent": "asks"}},
            {"params": {"state": ["failed", "waiting", "retrying", "in_doubt"]}}, {"params": {"limit": 200}},
            {"params": {"since": 1}}, {"params": {"cursor": named.cursors["runs"], "limit": 1}},
        ],
        ("GET", "/schedules"): [{}],
        ("GET", "/approvals"): [{}, {"params": {"agent": "asks"}}, {"params": {"cursor": named.cursors["approvals"]}}],
        ("GET", "/queue"): [{}],
        ("GET", "/workers"): [{}],
        ("GET", "/pools"): [{}],
        ("GET", "/agents"): [{}],
        ("GET", "/dashboard"): [{}, {"params": {"window": "week"}}],
        ("GET", "/usage"): [{}, *({"params": {"by": by, "since": 1}} for by in ("tenant", "model", "day"))],
        ("GET", "/about"): [{}],
        ("POST", "/dead/requeue"): dead,
        ("POST", "/dead/discard"): dead,
        ("GET", "/health"): [{}],
        ("GET", "/health/live"): [{}],
        ("GET", "/health/ready"): [{}],
        ("POST", "/session"): [{"json": {"token": "anna"}}],
        ("DELETE", "/session"): [{}],
    }  # fmt: skip


#: Operations that store runs or schedules, which have their own tests below, and in `test_schedules.py`.
STORING = {("POST", "/runs"), ("POST", "/turns"), ("PUT", "/schedules/{id}")}
OF_A_SCHEDULE = [("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/run")]


def _operations(app: FastAPI) -> set[tuple[str, str]]:
    return {
        (method.upper(), path.removeprefix(API))
        for path, operations in app.openapi()["paths"].items()
        for method in operations
    }


def test_each_operation_is_called_with_the_names_of_others(app: FastAPI) -> None:
    called = {(method, f"/runs/{{id}}{end}") for method, end in OF_A_RUN} | {("GET", "/turns/{id}")}
    called |= {(method, f"/schedules/{{id}}{end}") for method, end in OF_A_SCHEDULE}
    called |= _lists(Named(("x",), (), "", "", {"runs": "", "approvals": ""})).keys() | STORING
    assert _operations(app) == called


OWNERS = pytest.mark.parametrize("owner", ["anna", None], ids=["another tenant", "no tenant"])


@OWNERS
async def test_a_run_of_others_is_unknown(app: FastAPI, runner: AgentRunner, tmp_path: Path, owner: str | None) -> None:
    named = await _owned(app, runner, owner)
    async with client_of(app, "ben", event_hooks={"response": [documented(app)]}) as ben:
        await ben.post(f"{API}/runs", json={"agent": "returns", "run_id": "own"})
        before = _stored(tmp_path / "runs.db")
        for (method, end), requests in OF_A_RUN.items():
            fill = end.replace("{step_id}", named.step).replace("{name}", "plan")
            paths = [f"/runs/%s{fill.replace('{other}', 'own')}"]
            if "{other}" in end:
                paths += ["/runs/own/compare/%s", "/runs/%s/compare/%s"]
            if not end:
                paths += ["/turns/%s"] if method == "GET" else []
            for path in paths:
                for request in requests:
                    unknown = await ben.request(method, API + path.replace("%s", UNKNOWN), **request)
                    assert unknown.status_code == 404, (method, path, unknown.text)
                    for name in (*named.ids, named.ids[0].upper(), *named.keys, "turn-1"):
                        hidden = await ben.request(method, API + path.replace("%s", quote(name, safe="")), **request)
                        assert _same(hidden) == _same(unknown), (method, path, name)
        for method, end in OF_A_SCHEDULE:
            unknown = await ben.request(method, f"{API}/schedules/other{end}")
            assert unknown.status_code == 404, (method, end, unknown.text)
            hidden = await ben.request(method, f"{API}/schedules/nightly{end}")
            assert str(_same(hidden)).replace("nightly", "other") == str(_same(unknown)), (method, end)
        assert _stored(tmp_path / "runs.db") == before


@OWNERS
async def test_lists_and_totals_are_those_of_an_empty_store(
    app: FastAPI, runner: AgentRunner, tmp_path: Path, owner: str | None
) -> None:
    """A caller of a tenant without runs gets the same before and after the owner has runs, and changes none of them."""

    async def answers(named: Named, *, also_cursors: bool = True) -> dict[str, Any]:
        found = {}
        async with client_of(app, "ben") as ben:
            for (method, path), requests in _lists(named).items():
                for number, request in enumerate(requests):
                    response = await ben.request(method, API + path, **request)
                    assert SECRET not in response.text
                    if "cursor" not in request.get("params", {}):
                        found[f"{method} {path} {number}"] = _same(response)
                    elif also_cursors:
                        assert response.status_code == 422, (path, response.text)
        return found

    some = str(UUID(int=7))
    empty = await answers(Named((some,), (), "", "", {"runs": "", "approvals": ""}), also_cursors=False)
    named = await _owned(app, runner, owner)
    before = _stored(tmp_path / "runs.db")
    found = await answers(named)
    for repair in ("requeue", "discard"):
        _, _, body = found.pop(f"POST /dead/{repair} 0")
        empty.pop(f"POST /dead/{repair} 0")
        assert body["done"] == []
        assert {each["why"] for each in body["failed"]} == {"No run has this id."}
    assert found == empty
    assert found["GET /runs 0"][2] == {"items": [], "next": None, "note": None}
    assert found["GET /workers 0"][0] == 403
    assert _stored(tmp_path / "runs.db") == before
    async with client_of(app, "ben") as ben:
        assert (await ben.get("/metrics")).status_code == 403
        assert (await ben.get("/metrics", params={"tenant": "ben"})).status_code == 403
    async with client_of(app, "admin") as admin:
        assert (await admin.get("/metrics")).status_code == 200


def _refused(run_id: str) -> int:
    """The status of a new run with the id of a run of another tenant. All ids that are made of keys are refused."""
    return 422 if UUID(run_id).version == 5 else 409


def _assert_refused(answer: Any, run_id: str) -> None:
    assert answer.status_code == _refused(run_id), answer.text
    if answer.status_code == 409:
        assert answer.json()["detail"] == "The run id or idempotency key is in use. Use another one."


@OWNERS
async def test_new_runs_with_the_names_of_others(
    app: FastAPI, runner: AgentRunner, tmp_path: Path, owner: str | None
) -> None:
    named = await _owned(app, runner, owner)
    before = _stored(tmp_path / "runs.db")
    async with client_of(app, "ben", event_hooks={"response": [documented(app)]}) as ben:
        for run_id in named.ids:
            body: dict[str, Any] = {"agent": "returns", "run_id": run_id}
            answers = [
                await ben.post(f"{API}/runs", json=body),
                await ben.post(f"{API}/runs", json={**body, "input": {"secret": SECRET}}),
                await ben.post(f"{API}/turns", json={"text": "hi", "turn_id": run_id}),
            ]
            for each in answers:
                _assert_refused(each, run_id)
                assert SECRET not in each.text
        assert _stored(tmp_path / "runs.db") == before
        for key in ("order", "a/b", "broken"):
            line = f"line of {key}"
            body = {"agent": "returns", "input": {"secret": "mine"}, "run_id": key, "concurrency_key": line}
            new = await ben.post(f"{API}/runs", json=body, headers={"Idempotency-Key": f"idem {key}"})
            assert new.status_code == 201, new.text
            assert not new.json()["queued_behind_key"]
            again = await ben.post(f"{API}/runs", json=body, headers={"Idempotency-Key": f"idem {key}"})
            assert (again.status_code, again.json()["run_id"]) == (200, new.json()["run_id"])
            other = await ben.post(f"{API}/runs", json={**body, "agent": "asks"})
            assert other.status_code == 409
            assert "agent_key" in other.json()["detail"], "a conflict with a run of its own tenant says what differs"
            assert new.json()["tenant"] == "ben"
            for run_id in named.ids:
                fork = await ben.post(f"{API}/runs/{quote(key, safe='')}/fork", json={"new_run_id": run_id})
                _assert_refused(fork, run_id)
        assert {_refused(run_id) for run_id in named.ids} == {409, 422}
        turn = await ben.post(f"{API}/turns", json={"text": "hi", "turn_id": "turn-1"})
        assert turn.status_code == 201, turn.text
        prompt = await ben.post(f"{API}/runs", json={"prompt": "add 3 and 4"}, headers={"Idempotency-Key": "p"})
        assert prompt.status_code == 201, prompt.text
        assert SECRET not in new.text + again.text + other.text + turn.text + prompt.text
        while await runner.run_once():
            pass
        listed = (await ben.get(f"{API}/runs")).json()["items"]
        assert {each["tenant"] for each in listed} == {"ben"}
        assert not {each["run_id"] for each in listed} & {*named.ids}
        for path in ("runs/order", f"turns/{turn.json()['id']}", "usage", "queue", "agents"):
            assert SECRET not in (await ben.get(f"{API}/{path}")).text, path
        forked = await ben.post(f"{API}/runs/order/fork", json={"new_run_id": "done"})
        assert (forked.status_code, forked.json()["tenant"]) == (201, "ben")
    assert before - _stored(tmp_path / "runs.db") == set(), "no row of the owner has changed"


@OWNERS
async def test_a_conversation_is_a_name_within_a_tenant(
    app: FastAPI, runner: AgentRunner, tmp_path: Path, owner: str | None
) -> None:
    await _owned(app, runner, owner)
    before = _stored(tmp_path / "runs.db")
    async with client_of(app, "ben") as ben:
        body = {"agent": "returns", "input": {"secret": "mine"}, "run_id": "order", "conversation_id": TALK}
        await ben.post(f"{API}/runs", json=body)
        await ben.post(f"{API}/turns", json={"text": "hi", "turn_id": "turn-1", "conversation_id": TALK})
        while await runner.run_once():
            pass
        assert before - _stored(tmp_path / "runs.db") == set()
        for path in ("runs/order/messages", "turns/turn-1", "runs/turn-1/messages"):
            found = await ben.get(f"{API}/{path}")
            assert found.status_code == 200
            assert SECRET not in found.text, path


async def test_a_caller_with_a_tenant_may_name_no_other_one(app: FastAPI, tmp_path: Path, runner: AgentRunner) -> None:
    await _owned(app, runner, "anna")
    before = _stored(tmp_path / "runs.db")
    async with client_of(app, "ben") as ben:
        for method, path in _operations(app):
            if "/health" in path or "/session" in path:
                continue
            path = path.replace("{id}", "order").replace("{other}", "order").replace("{name}", "plan")
            answer = await ben.request(method, API + path.replace("{step_id}", "x"), params={"tenant": "anna"}, json={})
            assert answer.status_code == 403, (method, path, answer.text)
        body = {"agent": "returns", "tenant": "anna"}
        assert (await ben.post(f"{API}/runs", json=body)).status_code == 403
        assert (await ben.post(f"{API}/runs", json={"prompt": "add", "tenant": "anna"})).status_code == 403
        turn = await ben.post(f"{API}/turns", json={"text": "hi", "turn_id": "x", "tenant": "anna"})
        assert turn.status_code == 422
        assert _stored(tmp_path / "runs.db") == before
        own = await ben.post(f"{API}/runs", json={**body, "tenant": "ben"}, params={"tenant": "ben"})
        assert own.json()["tenant"] == "ben"


async def test_the_same_names_of_two_tenants_are_two_runs(app: FastAPI, runner: AgentRunner) -> None:
    body = {"agent": "asks", "run_id": "order", "conversation_id": TALK, "concurrency_key": "line"}
    async with client_of(app, "anna") as anna, client_of(app, "ben") as ben, client_of(app, "admin") as admin:
        both = await asyncio.gather(
            *(
                client.post(f"{API}/runs", json={**body, "input": {"secret": name}}, headers={"Idempotency-Key": "key"})
                for client, name in ((anna, "of anna"), (ben, "of ben"))
            )
        )
        ids = [each.json()["run_id"] for each in both]
        assert [each.status_code for each in both] == [201, 201]
        assert len(set(ids)) == 2
        keys = (await admin.get(f"{API}/queue")).json()["concurrency_keys"]
        assert [(each["concurrency_key"], each["tenant"], each["run_id"], each["queued"]) for each in keys] == [
            ("line", "anna", ids[0], 0),
            ("line", "ben", ids[1], 0),
        ]
        assert [each["run_id"] for each in (await ben.get(f"{API}/queue")).json()["concurrency_keys"]] == [ids[1]]
        while await runner.run_once():
            pass
        for client, name, run_id in ((anna, "of anna", ids[0]), (ben, "of ben", ids[1])):
            [asked] = (await client.get(f"{API}/approvals")).json()["items"]
            assert (asked["run_id"], asked["details"]) == (run_id, {"of": name})
            listed = (await client.get(f"{API}/runs", params={"conversation": TALK})).json()["items"]
            assert [each["run_id"] for each in listed] == [run_id]
        assert (await anna.post(f"{API}/runs/order/approvals/plan", json={"answer": True})).status_code == 200
        assert (await ben.post(f"{API}/runs/order/cancel")).status_code in (200, 202)
        while await runner.run_once():
            pass
        states = [(await client.get(f"{API}/runs/order")).json()["state"] for client in (anna, ben)]
        assert states == ["succeeded", "cancelled"]

        # A caller without a tenant sees both, and has to say which of them a key means.
        unclear = await admin.get(f"{API}/runs/order")
        assert unclear.status_code == 422
        assert "Several tenants have a run with this key: anna, ben." in unclear.json()["detail"]
        assert unclear.json()["errors"][0]["field"] == "tenant"
        repaired = await admin.post(f"{API}/dead/requeue", json={"ids": ["order"], "state": "cancelled"})
        assert "anna, ben" in repaired.json()["failed"][0]["why"]
        for tenant, state, run_id in (("anna", "succeeded", ids[0]), ("ben", "cancelled", ids[1])):
            of = {"tenant": tenant}
            found = (await admin.get(f"{API}/runs/order", params=of)).json()
            assert (found["run_id"], found["state"], found["tenant"]) == (run_id, state, tenant)
            listed = (await admin.get(f"{API}/runs", params=of)).json()["items"]
            assert {each["tenant"] for each in listed} == {tenant}
            assert (await admin.get(f"{API}/queue", params=of)).json()["by_status"][state] >= 1
            usage = (await admin.get(f"{API}/usage", params=of)).json()
            assert usage["total"]["runs"] == len(listed)
        repaired = await admin.post(
            f"{API}/dead/requeue", json={"all": True, "expect": 1, "state": "cancelled"}, params={"tenant": "ben"}
        )
        assert repaired.json() == {"done": [ids[1]], "failed": []}
        everything = (await admin.get(f"{API}/runs")).json()["items"]
        assert {each["tenant"] for each in everything} == {"anna", "ben"}
        for wrong in ("", "x" * 129, "a\nb"):
            assert (await admin.get(f"{API}/runs", params={"tenant": wrong})).status_code == 422
            assert (await admin.post(f"{API}/runs", json={"agent": "returns", "tenant": wrong})).status_code == 422


async def test_no_caller_takes_the_id_that_a_key_of_another_tenant_will_have(app: FastAPI, runner: AgentRunner) -> None:
    [of_key] = {str(runner.new_run("returns", run_id="order", tenant="anna").run_id)}
    async with client_of(app, "anna") as anna, client_of(app, "ben") as ben:
        own = await ben.post(f"{API}/runs", json={"agent": "returns", "run_id": "mine"})
        for path, body in (
            ("runs", {"agent": "returns", "run_id": of_key}),
            ("runs", {"agent": "returns", "run_id": of_key.upper()}),
            ("runs/mine/fork", {"new_run_id": of_key}),
            ("turns", {"text": "hello", "turn_id": of_key}),
        ):
            refused = await ben.post(f"{API}/{path}", json=body)
            assert refused.status_code == 422, path
            assert "be text, or a UUID that is not of version 5" in refused.json()["detail"]
        chosen = str(UUID(int=7 << 76 | 1 << 63 | 5))
        assert (await ben.post(f"{API}/runs", json={"agent": "returns", "run_id": chosen})).status_code == 201
        assert (await ben.post(f"{API}/runs/mine/fork", json={})).status_code == 201
        taken = await anna.post(f"{API}/runs", json={"agent": "returns", "run_id": "order"})
        assert (own.status_code, taken.status_code, taken.json()["run_id"]) == (201, 201, of_key)


async def test_children_and_parents_of_another_tenant_are_not_named(app: FastAPI, runner: AgentRunner) -> None:
    parent = await runner.submit("asks", run_id="parent", tenant="anna")
    await runner.submit("asks", run_id="child", tenant="ben", parent_run_id=parent)
    async with client_of(app, "anna") as anna, client_of(app, "ben") as ben:
        assert (await anna.get(f"{API}/runs/parent")).json()["children"] == []
        assert (await ben.get(f"{API}/runs/child")).json()["parent"] is None
        assert [each["parent"] for each in (await ben.get(f"{API}/runs")).json()["items"]] == [None]


async def test_a_caller_with_may_gets_no_names_of_tenants(runner: AgentRunner) -> None:
    for tenant in ("anna", "ben"):
        await runner.submit("asks", run_id="order", tenant=tenant)
    app = create_app(runner, authenticate=lambda _: Caller("carl", may=lambda verb, run: run.tenant == "ben"))
    async with client_of(app) as client:
        assert (await client.get(f"{API}/runs/order")).status_code == 404
        assert (await client.get(f"{API}/runs/order", params={"tenant": "ben"})).status_code == 200
        assert (await client.get(f"{API}/runs/order", params={"tenant": "anna"})).status_code == 404


async def test_both_limits_of_a_caller_apply(runner: AgentRunner) -> None:
    for tenant, user in (("anna", "u"), ("anna", "v"), ("ben", "u")):
        await runner.submit("asks", run_id=user, tenant=tenant, metadata={"user": user})
    caller = Caller("u of anna", tenant="anna", may=lambda verb, run: bool(run.metadata.get("user") == "u"))
    async with client_of(create_app(runner, authenticate=lambda _: caller)) as client:
        listed = (await client.get(f"{API}/runs")).json()["items"]
        assert [(each["tenant"], each["key"]) for each in listed] == [("anna", "u")]
        for path in ("queue", "usage", "dashboard", "workers"):
            assert (await client.get(f"{API}/{path}")).status_code == 403


async def test_a_tenant_sees_only_its_own_pools_and_names_none(app: FastAPI, runner: AgentRunner) -> None:
    now = runner.queue.clock.wall()
    for name, tenant in (("all", ""), ("of anna", "anna"), ("of ben", "ben")):
        want = PoolLimit(name, tenant, "day", (5_000_000_000, -1, -1), (2_000_000_000, 7, 1))
        await runner.queue.commits.commit(None, [Op("queue.reserve", (f"{name}/1", [want], now, False))])
    async with client_of(app, "admin") as admin:
        assert [each["name"] for each in (await admin.get(f"{API}/pools")).json()["items"]] == [
            "all",
            "of anna",
            "of ben",
        ]
    async with client_of(app, "ben") as ben:
        [own] = (await ben.get(f"{API}/pools")).json()["items"]
        assert (own["name"], own["tenant"], own["per"], own["left"]) == ("of ben", "ben", "day", {"usd": 3.0})
        assert own["reserved"] == {"usd": 2.0, "tokens": 7, "requests": 1}
        assert dt.datetime.fromisoformat(own["ends_at"]).timestamp() == end_of("day", now)
        given = {"limits": {"pools": [{"name": "of anna", "usd": 1}]}}
        rejected = [
            await ben.post(f"{API}/runs", json={"agent": "asks", "input": given}),
            await ben.put(f"{API}/schedules/s", json={"agent": "asks", "input": given, "every": 60}),
        ]
        assert [each.status_code for each in rejected] == [422, 422]
        assert "pools" in rejected[0].text


def _frames(run_id: str) -> dict[str, dict[str, Any]]:
    """The fields of each type of frame that names a run."""
    return {
        "follow": {"run_id": run_id},
        "unfollow": {"run_id": run_id},
        "cancel": {"run_id": run_id},
        "signal": {"run_id": run_id, "name": "plan", "payload": True, "message_id": "m-1"},
        "approve": {"run_id": run_id, "name": "plan", "answer": True},
        "turn": {"turn": {"text": "hi", "turn_id": run_id}},
    }


@OWNERS
async def test_a_socket_follows_runs_of_its_tenant(
    app: FastAPI, runner: AgentRunner, tmp_path: Path, owner: str | None
) -> None:
    named = await _owned(app, runner, owner)
    before = _stored(tmp_path / "runs.db")
    offered = partial(lambda name: {"subprotocols": ["agent-runtime", f"bearer.{name}"]})
    async with serving(app) as port:
        async with connected(port, **offered("ben")) as ben:
            for kind in _commands():
                unknown = await ben.ask(kind, **_frames(UNKNOWN)[kind]) if kind != "turn" else None
                for name in (*named.ids, *named.keys):
                    if kind == "turn" and name in named.keys:
                        continue
                    found = await ben.ask(kind, **_frames(name)[kind])
                    assert SECRET not in json.dumps(found)
                    if unknown is None:
                        assert (found["type"], found["status"]) == ("error", _refused(name))
                    else:
                        assert found == unknown
                        assert found["status"] == 404
            assert _stored(tmp_path / "runs.db") == before
            # Two runs with the same names as those of the owner, followed at the same time.
            await runner.submit("returns", {"secret": "mine"}, run_id="order", tenant="ben")
            runs = [await ben.ask("follow", run_id="order")]
            runs.append(await ben.ask("turn", turn={"text": "add 1 and 2", "turn_id": "turn-1"}))
            own = {each["run_id"] for each in runs}
            assert not own & {*named.ids}
            while await runner.run_once():
                pass
            frames: list[dict[str, Any]] = []
            while [each["type"] for each in frames].count("done") < 2:
                frames.append(await ben.get())
            assert {each["run_id"] for each in frames} == own
            assert SECRET not in json.dumps(frames)
        if owner is not None:
            async with connected(port, **offered("admin")) as admin:
                # "order" is a key of two tenants by now.
                assert (await admin.ask("unfollow", run_id="order"))["status"] == 422


async def test_a_socket_is_opened_in_a_tenant(app: FastAPI, runner: AgentRunner) -> None:
    for tenant in ("anna", "ben"):
        await runner.submit("returns", {"secret": "x"}, run_id="order", tenant=tenant)
    async with serving(app) as port:
        for tenant, ends in (("ben", None), ("admin", "anna"), ("admin", "ben")):
            query = "" if ends is None else f"?tenant={ends}"
            offered = ["agent-runtime", f"bearer.{tenant}"]
            async with connect(url(port) + query, subprotocols=cast("Any", offered), compression=None) as connection:
                found = await Client(connection).ask("cancel", run_id="order")
            wanted = await runner.get_run("order", tenant=ends or tenant)
            assert (found["type"], found["run_id"]) == ("ack", str(wanted.run_id))
            assert wanted.status == "cancelled"
        with pytest.raises(WebSocketException):
            async with connect(
                f"{url(port)}?tenant=anna", subprotocols=cast("Any", ["agent-runtime", "bearer.ben"])
            ) as one:
                await one.recv()


def _commands() -> list[str]:
    """The types of frames, as the socket knows them."""
    known = _SOCKET._commands
    assert known.keys() == _frames("").keys()
    return [*known]


_SOCKET: Any = None


@pytest.fixture(autouse=True)
def _noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Socket.__init__

    def noticing(self: Socket, *args: Any) -> None:
        global _SOCKET
        before(self, *args)
        _SOCKET = self

    monkeypatch.setattr(Socket, "__init__", noticing)


async def test_streams_of_the_same_key_are_those_of_two_runs(app: FastAPI, runner: AgentRunner) -> None:
    for tenant in ("anna", "ben"):
        await runner.submit("returns", {"secret": f"of {tenant}"}, run_id="same", tenant=tenant)
    while await runner.run_once():
        pass
    for tenant, other in (("anna", "ben"), ("ben", "anna")):
        async with client_of(app, tenant) as client:
            text = (await client.get(f"{API}/runs/same/events")).text
        assert frames_in(text)[-1]["state"] == "succeeded"
        assert f"of {tenant}" in text
        assert f"of {other}" not in text


BIG, SMALL, RUNS = 900_000, 1_000, 200


async def _peaks(tmp_path: Path, size: int) -> dict[str, int]:
    """The memory that requests of a tenant need, which has runs of a size. Another tenant has as many."""
    registry = Registry()
    registry.register(Script(_asks, "asks"))
    runner = AgentRunner.open(tmp_path / f"{size}.db", registry=registry, durability="normal")
    for number in range(RUNS):
        state = ("failed", "waiting", "pending")[number % 3]
        for tenant in ("anna", "ben"):
            row = runner.queue.new_row(
                None, "asks", {"secret": "x" * size}, {}, concurrency_key=f"k{number}", tenant=tenant
            )
            await runner.queue.insert(row)
            if state == "failed":
                await runner.cancel(row.run_id)
    app = create_app(runner, authenticate=_who, settings=ServerSettings(request_burst=100_000))
    peaks = {}
    async with runner, client_of(app, "ben") as ben:
        for path in (
            "runs?limit=200",
            "runs?limit=200&agent=asks",
            "approvals",
            "queue",
            "usage",
            "dashboard",
            "agents",
        ):
            await ben.get(f"{API}/{path}")
            tracemalloc.start()
            assert (await ben.get(f"{API}/{path}")).status_code == 200
            peaks[path] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        tracemalloc.start()
        dead = await ben.post(f"{API}/dead/requeue", json={"all": True, "expect": 9, "state": "cancelled"})
        peaks["dead"] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert "which is 67" in dead.json()["detail"]
    return peaks


async def test_lists_of_a_tenant_need_no_memory_for_inputs(tmp_path: Path) -> None:
    small, big = await _peaks(tmp_path, SMALL), await _peaks(tmp_path, BIG)
    more = {path: big[path] - small[path] for path in small if big[path] - small[path] > BIG}
    assert not more


# -- tokens


def test_a_token_file_names_tenants(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("one first run,read tenant=anna\ntwo second read tenant=Ben & Söhne \nthree third\n", "utf-8")
    path.chmod(0o600)
    found = [(each.name, each.tenant) for each in TokenFile(path).tokens]
    assert found == [("first", "anna"), ("second", "Ben & Söhne"), ("third", None)]
    tokens = Tokens(path)
    signed_in = tokens.sign_in(token="one")
    assert signed_in is not None
    assert signed_in[1] == Caller("first", {"run", "read"}, tenant="anna")
    for line in (
        "one first run read",
        "one first run tenant=",
        f"one first run tenant={'x' * 129}",
        "one a run, tenant=b",
    ):
        path.write_text(line + "\n")
        with pytest.raises(InvalidArgument):
            TokenFile(path)


@pytest.mark.parametrize("tenant", ["", "x" * 129, "a\nb", 7])
def test_a_caller_has_a_valid_tenant(tenant: Any) -> None:
    with pytest.raises(InvalidArgument, match="tenant"):
        Caller("x", tenant=tenant)
    with pytest.raises(InvalidArgument, match="tenant"):
        Token.of("x", tenant=tenant)


def test_a_served_token_file_separates_tenants(tmp_path: Path, serve: Callable[..., Served]) -> None:
    path = tmp_path / "tokens"
    path.write_text("ta anna run,read,result tenant=anna\ntb ben run,read,result tenant=ben\nto ops\n")
    path.chmod(0o600)
    served = serve("--token-file", path)
    with served.client("ta") as anna, served.client("tb") as ben, served.client("to") as ops:
        for client in (anna, ben):
            body = {"prompt": "add 1 and 2"}
            assert client.post(f"{API}/runs", json=body, headers={"Idempotency-Key": "same"}).status_code == 201
        [one], [two] = [client.get(f"{API}/runs").json()["items"] for client in (anna, ben)]
        assert (one["tenant"], two["tenant"]) == ("anna", "ben")
        assert anna.get(f"{API}/runs/{two['run_id']}").status_code == 404
        assert len(ops.get(f"{API}/runs").json()["items"]) == 2
        assert len(ops.get(f"{API}/runs", params={"tenant": "ben"}).json()["items"]) == 1
