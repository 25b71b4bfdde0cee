"""What a caller with `may` sees: the runs of its tenant, in every route."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunInfo, RunnerConfig
from agent_runtime_core.server.access import Caller
from agent_runtime_core.server.app import create_app
from agent_runtime_core.turns import TurnManager
from tests.server.conftest import client_of
from tests.server.streaming import serving
from tests.server.test_socket import connected
from tests.support.runs import Script

API = "/api/v1"


async def _asks(ctx: Any) -> Any:
    return await ctx.approve("plan")


async def _fails(ctx: Any) -> Any:
    raise ValueError("no luck")


def _caller(request: Any) -> Caller:
    tenant = request.headers["authorization"].removeprefix("Bearer ")

    def may(verb: str, run: RunInfo) -> bool:
        assert verb in ("read", "act", "delete")
        return bool(run.metadata.get("tenant") == tenant)

    return Caller(tenant, may=may)


def _with_scopes(scopes: set[str], request: Any) -> Caller:
    return Caller("ada", scopes)


@pytest.fixture
def runner(tmp_path: Path) -> AgentRunner:
    registry = Registry()
    registry.register(Script(_asks, "asks"))
    registry.register(Script(_fails, "fails"))
    config = RunnerConfig(park_after=0.0, max_retries=1)
    return AgentRunner.open(tmp_path / "runs.db", registry=registry, config=config)


@pytest.fixture
def app(runner: AgentRunner) -> FastAPI:
    return create_app(runner, turns=TurnManager(runner), authenticate=_caller)


async def _fill(runner: AgentRunner, count: int = 6) -> None:
    """Runs of two tenants in turn, which wait for an answer."""
    for number in range(count):
        tenant = ("anna", "ben")[number % 2]
        await runner.submit("asks", {"secret": tenant}, run_id=f"{tenant}-{number}", metadata={"tenant": tenant})
    while await runner.run_once():
        pass


async def test_lists_are_filled_up_with_visible_runs(app: FastAPI, runner: AgentRunner) -> None:
    await _fill(runner, 20)
    async with client_of(app, "anna") as client:
        for path in ("runs", "approvals"):
            keys, cursor, sizes = list[str](), "", list[int]()
            while cursor is not None:
                query = {"limit": "4", **({"cursor": cursor} if cursor else {})}
                page = (await client.get(f"{API}/{path}", params=query)).json()
                keys, cursor = keys + [each["key"] for each in page["items"]], page["next"]
                sizes.append(len(page["items"]))
            assert sorted(keys) == sorted(f"anna-{number}" for number in range(0, 20, 2)), path
            assert sizes[:2] == [4, 4]
    async with client_of(app, "carl") as client:
        found = [(await client.get(f"{API}/{path}")).json() for path in ("runs", "approvals")]
    assert found == [{"items": [], "next": None, "note": None}, {"items": [], "next": None}]


async def test_children_and_parents_of_others_are_not_named(app: FastAPI, runner: AgentRunner) -> None:
    for name, tenant, parent in (("p", "anna", None), ("c1", "anna", "p"), ("c2", "ben", "p")):
        await runner.submit("asks", run_id=name, metadata={"tenant": tenant}, parent_run_id=parent)
    async with client_of(app, "anna") as client:
        mine = (await client.get(f"{API}/runs/p")).json()
    async with client_of(app, "ben") as client:
        theirs = (await client.get(f"{API}/runs/c2")).json()
        listed = (await client.get(f"{API}/runs")).json()["items"]
    assert [each["key"] for each in mine["children"]] == ["c1"]
    assert theirs["parent"] is None
    assert [each["parent"] for each in listed] == [None]


def _api_routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Yield method and path of each operation in the OpenAPI document."""
    for path, operations in app.openapi()["paths"].items():
        for method in operations:
            yield method.upper(), path


#: Bodies with which a request reaches its run.
BODIES: dict[str, Any] = {"/approvals/{name}": {"answer": True}, "/messages": {"message": "hi"}, "/signals/{name}": 1}


async def test_every_route_hides_a_hidden_run(app: FastAPI, runner: AgentRunner) -> None:
    await _fill(runner, 2)
    routes = [each for each in _api_routes(app) if "{id}" in each[1] and "/schedules/" not in each[1]]
    wanted = {each[1] for each in SCOPES if "{id}" in each[1] and not each[1].startswith("/schedules/")}
    assert {each[1].removeprefix(API) for each in routes} >= wanted
    async with client_of(app, "anna") as anna, client_of(app, "ben") as ben:
        for method, template in sorted(routes, key=lambda each: each[0] == "DELETE"):
            end = template.partition("{id}")[2]
            body = {"json": BODIES[end]} if end in BODIES and method == "POST" else {}
            path = re.sub(r"\{\w+\}", "plan", template.replace("{id}", "anna-0").replace("{other}", "anna-0"))
            hidden = await ben.request(method, path, **body)
            unknown = await ben.request(method, path.replace("anna-0", "nobody"), **body)
            assert hidden.status_code == 404, (method, template, hidden.text)
            same = {name: value for name, value in hidden.json().items() if name != "request_id"}
            assert same == {name: value for name, value in unknown.json().items() if name != "request_id"}
        row = await runner.get_run("anna-0")
        assert (row.status, row.generation, row.cancel_requested) == ("waiting", 1, False)
        assert [each.kind for each in await runner.queue.mail(str(row.run_id))] == ["question"]
        crossed = await anna.get(f"{API}/runs/anna-0/compare/ben-1")
        assert crossed.status_code == 404
        [first, *_] = (await anna.get(f"{API}/runs/anna-0/timeline")).json()["items"]
        for template in {each[1] for each in routes if each[0] == "GET"} - {"/api/v1/turns/{id}"}:
            if not template.endswith("/events"):
                path = template.replace("{id}", "anna-0").replace("{other}", "anna-0")
                path = path.replace("{step_id}", first["step_id"])
                own = await anna.get(path)
                assert own.status_code in (200, 202), (template, own.text)


#: The scopes of each route that needs another one than `read`. One of them is enough.
SCOPES = {
    ("POST", "/runs"): {"run"},
    ("POST", "/turns"): {"run"},
    ("DELETE", "/runs/{id}"): {"admin"},
    ("POST", "/dead/requeue"): {"admin"},
    ("POST", "/dead/discard"): {"admin"},
    **{("POST", f"/runs/{{id}}/{each}"): {"act"} for each in ("cancel", "resume", "fork")},
    **{("POST", f"/runs/{{id}}/{each}"): {"send", "act"} for each in ("messages", "signals/{name}")},
    ("POST", "/runs/{id}/approvals/{name}"): {"approve"},
    ("GET", "/approvals"): {"approve", "read"},
    **{("GET", f"/runs/{{id}}{each}"): {"result", "read"} for each in ("", "/result", "/events", "/messages")},
    ("GET", "/turns/{id}"): {"result", "read"},
    ("PUT", "/schedules/{id}"): {"run"},
    ("POST", "/schedules/{id}/run"): {"run"},
    **{("POST", f"/schedules/{{id}}/{each}"): {"act"} for each in ("pause", "resume")},
    ("DELETE", "/schedules/{id}"): {"act"},
}
OTHERS = ("/health", "/session", "/metrics")


async def test_every_route_needs_its_scope(runner: AgentRunner) -> None:
    def authenticate(request: Any) -> Caller | None:
        scope = request.headers.get("authorization", "").removeprefix("Bearer ")
        return Caller("ada", frozenset(scope.split("+"))) if scope else None

    app = create_app(runner, authenticate=authenticate)
    routes = [each for each in _api_routes(app) if not each[1].removeprefix(API).startswith(OTHERS)]
    assert SCOPES.keys() <= {(method, path.removeprefix(API)) for method, path in routes}
    everything = {"run", "result", "send", "approve", "read", "act", "metrics", "admin"}
    for method, path in routes:
        scopes = SCOPES.get((method, path.removeprefix(API)), {"read"})
        url = re.sub(r"\{\w+\}", "x", path)
        async with client_of(app, None) as client:
            assert (await client.request(method, url)).status_code == 401, path
        async with client_of(app, "+".join(everything - scopes)) as client:
            refused = await client.request(method, url)
        assert refused.status_code == 403, (method, path, refused.text)
        assert all(scope in refused.json()["detail"] for scope in scopes)
        for scope in scopes:
            more = "+result" if path.endswith("/fork") else ""
            async with client_of(app, scope + more) as client:
                assert (await client.request(method, url)).status_code in (200, 404, 422), (method, path, scope)


async def test_an_end_user_neither_approves_nor_reads_the_journal(runner: AgentRunner) -> None:
    await _fill(runner, 1)
    known = {"end": {"run", "result", "send"}, "bot": {"act"}, "fork": {"act", "result"}, "staff": {"read", "approve"}}
    app = create_app(runner, authenticate=lambda request: Caller("ada", known[request.headers["x-who"]]))
    async with client_of(app, None) as client:

        async def ask(who: str, method: str, path: str, **body: Any) -> Any:
            return await client.request(method, f"{API}/runs{path}", headers={"x-who": who}, **body)

        run = await ask("end", "GET", "/anna-0")
        answered = [
            await ask(who, "POST", "/anna-0/approvals/plan", json={"answer": True})
            for who in ("end", "bot", "fork", "staff")
        ]
        forks = [await ask(who, "POST", "/anna-0/fork") for who in ("bot", "fork")]
        again = await ask("end", "POST", "", json={"agent": "asks", "run_id": "anna-0", "input": {"secret": "anna"}})
        whole = await ask("staff", "GET", "/anna-0")
    assert [each.status_code for each in answered] == [403, 403, 403, 200]
    assert [each.status_code for each in forks] == [403, 201]
    assert whole.json()["metadata"] == {"tenant": "anna"}
    for shown in (run, forks[1], again):
        assert shown.json()["state"] in ("waiting", "pending")
        hidden = {name: shown.json()[name] for name in ("steps", "children", "questions", "metadata", "input")}
        assert hidden == {"steps": [], "children": [], "questions": [], "metadata": None, "input": None}


@pytest.mark.parametrize("asked", [False, True], ids=["before the question", "after it"])
@pytest.mark.parametrize("over", ["http", "socket"])
async def test_a_signal_of_a_caller_who_may_not_approve_answers_no_question(
    runner: AgentRunner, over: str, asked: bool
) -> None:
    """Neither an approval nor a review of a step in doubt, although a plain signal has its name."""
    await runner.submit("asks", {"secret": "x"}, run_id="one")
    if asked:
        await runner.run_once()
    for scope in ("send", "act"):
        app = create_app(runner, authenticate=partial(_with_scopes, {"run", scope}))
        if over == "http":
            async with client_of(app, None) as client:
                for headers in ({}, {"Idempotency-Key": "k"}):
                    sent = await client.post(f"{API}/runs/one/signals/plan", json=True, headers=headers)
                    assert sent.status_code == 202
        else:
            async with serving(app) as port, connected(port) as client:
                assert (await client.ask("signal", run_id="one", name="plan", payload=True))["type"] == "ack"
        await runner.run_once()
    assert (await runner.get_run("one")).status == "waiting"
    app = create_app(runner, authenticate=lambda request: Caller("ada", {"act", "approve"}))
    async with client_of(app, None) as client:
        assert (await client.post(f"{API}/runs/one/signals/plan", json=True)).status_code == 202
    await runner.run_once()
    assert (await runner.get_run("one")).status == "succeeded"


async def test_the_totals_of_all_runs_are_not_shown(app: FastAPI, runner: AgentRunner) -> None:
    await _fill(runner)
    await runner.submit("of ben", metadata={"tenant": "ben"})
    async with client_of(app, "anna") as client:
        totals = [await client.get(f"{API}/{each}") for each in ("queue", "usage", "dashboard", "workers", "pools")]
        agents = (await client.get(f"{API}/agents")).json()["items"]
    assert [each.status_code for each in totals] == [403] * 5
    assert "of ben" not in {each["key"] for each in agents}
    assert all(each["runs"] == {} for each in agents)


async def test_a_run_of_another_tenant_cannot_be_made_or_taken(app: FastAPI, runner: AgentRunner) -> None:
    ben = {"tenant": "ben"}
    async with client_of(app, "ben") as client:
        key = {"Idempotency-Key": "order 7"}
        made = await client.post(
            f"{API}/runs", json={"agent": "asks", "run_id": "one", "metadata": ben, "input": {"a": 1}}, headers=key
        )
    async with client_of(app, "anna") as client:
        found = []
        for body, headers in (
            ({"run_id": "one", "input": {"a": 1}}, {}), ({"run_id": "one"}, {}), ({"input": {"a": 1}}, key), ({}, key),
        ):  # fmt: skip
            body = {"agent": "asks", "metadata": {"tenant": "anna"}, **body}
            found.append(await client.post(f"{API}/runs", json=body, headers=headers))
        foreign = await client.post(f"{API}/runs", json={"agent": "asks", "metadata": ben})
        nobody = await client.post(f"{API}/runs", json={"agent": "asks"})
        turn = await client.post(f"{API}/turns", json={"text": "hi", "metadata": ben})
        taken_turn = await client.post(
            f"{API}/turns", json={"text": "hi", "turn_id": "one", "metadata": {"tenant": "anna"}}
        )
        await client.post(f"{API}/runs", json={"agent": "asks", "run_id": "mine", "metadata": {"tenant": "anna"}})
        fork = await client.post(f"{API}/runs/mine/fork", json={"new_run_id": "one"})
    assert made.status_code == 201
    assert [each.status_code for each in found] == [409] * 4
    assert len({each.json()["detail"] for each in found}) == 1
    assert taken_turn.status_code == 409
    assert (foreign.status_code, nobody.status_code, turn.status_code) == (403, 403, 403)
    assert fork.status_code == 409
    assert [each.run_key for each in await runner.runs()] == ["one", "mine"]


async def test_dead_letters_of_others_are_neither_counted_nor_changed(app: FastAPI, runner: AgentRunner) -> None:
    for tenant in ("anna", "ben"):
        await runner.execute("fails", f"of {tenant}", metadata={"tenant": tenant})
    async with client_of(app, "anna") as client:
        named = await client.post(f"{API}/dead/discard", json={"ids": ["of ben"], "state": "failed"})
        both = await client.post(f"{API}/dead/requeue", json={"all": True, "state": "failed", "expect": 2})
        own = await client.post(f"{API}/dead/discard", json={"all": True, "state": "failed", "expect": 1})
    assert named.json() == {"done": [], "failed": [{"id": "of ben", "why": "No run has this id."}]}
    assert both.status_code == 409
    assert len(own.json()["done"]) == 1
    assert [each.run_key for each in await runner.runs()] == ["of ben"]


@pytest.mark.parametrize("scopes", [{"run", "result"}, {"run", "read"}])
async def test_the_events_of_a_failure_show_the_stack_only_to_callers_with_the_scope_read(
    scopes: set[str], runner: AgentRunner
) -> None:
    async def emits_and_fails(ctx: Any) -> Any:
        await ctx.emit("run.failed", {"stack": "of the agent", "message": "a lie"})
        raise ValueError("no")

    runner.registry.register(Script(emits_and_fails, "breaks"))
    await runner.submit("breaks", {}, run_id="broken")
    while await runner.run_once():
        pass
    app = create_app(runner, authenticate=partial(_with_scopes, scopes))
    async with client_of(app) as client:
        page = (await client.get("/api/v1/runs/broken/events", headers={"Accept": "application/json"})).json()["items"]
        lines = (await client.get("/api/v1/runs/broken/events")).text.splitlines()
    streamed = [json.loads(each[6:]) for each in lines if each.startswith('data: {"sequence"')]
    async with serving(app) as port, connected(port) as socket:
        assert (await socket.ask("follow", run_id="broken"))["type"] == "ack"
        frames = [await socket.get() for _ in page]
    for events in (page, streamed, [each["event"] for each in frames]):
        lie, truth = (each["payload"] for each in events if each["type"] == "run.failed")
        assert lie == {"stack": "of the agent", "message": "a lie"}
        assert (truth["type"], truth["message"], "stack" in truth) == ("ValueError", "no", "read" in scopes)
