"""Acting on runs over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.server.access import Caller, Tokens
from agent_runtime_core.server.app import create_app
from agent_runtime_core.server.token_file import Token
from agent_runtime_core.testing import VirtualClock
from agent_runtime_core.tools.confirmation import answer_schema
from tests.server.conftest import TOKEN, LiveServer, client_of
from tests.server.documented import documented
from tests.support.backends import backends
from tests.support.fault_runs import eventually
from tests.support.redis_servers import RedisServer
from tests.support.runs import Rig, Script, soon

RUNS = "/api/v1/runs"
JSON = {"Content-Type": "application/json"}
ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


async def _asks(ctx: Any) -> Any:
    return await ctx.approve("plan", {"amount": 7}, schema=ANSWER)


async def _waits(ctx: Any) -> Any:
    return await ctx.wait_for_signal("paid")


async def _asks_twice(ctx: Any) -> Any:
    schema = answer_schema({"type": "object", "properties": {"amount": {"type": "number"}}})
    questions = [ctx.approve("tool:pay", {"tool_args": {"amount": n}}, schema=schema, key=str(n)) for n in (1, 2)]
    return await asyncio.gather(*questions)


async def _cancels(ctx: Any) -> Any:
    asking = asyncio.ensure_future(_asks(ctx))
    await ctx.wait_for_signal("enough")
    asking.cancel()
    return await ctx.wait_for_signal("paid")


async def _fails(ctx: Any) -> Any:
    raise ValueError("no luck")


async def _steps(ctx: Any) -> Any:
    return [await ctx.step(name, int, number) for number, name in enumerate("abc")]


def _registry() -> Registry:
    registry = Registry()
    for key, body in (
        ("asks", _asks),
        ("asks twice", _asks_twice),
        ("waits", _waits),
        ("cancels", _cancels),
        ("fails", _fails),
        ("steps", _steps),
    ):
        registry.register(Script(body, key))
    return registry


def _opened(url: str | Path) -> AgentRunner:
    # A wait parks the run at once, so that `run_once` returns.
    return AgentRunner.open(url, registry=_registry(), config=RunnerConfig(park_after=0.0, max_retries=1))


@pytest.fixture
def runner(tmp_path: Path) -> AgentRunner:
    return _opened(tmp_path / "runs.db")


@pytest.fixture
def client(app: FastAPI) -> httpx.AsyncClient:
    """A client that fails for a response which the OpenAPI document does not have."""
    return client_of(app, event_hooks={"response": [documented(app)]})


async def test_a_live_run_is_cancelled_once(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    await runner.submit("waits", run_id="one")
    await runner.run_once()
    async with client:
        first = await client.post(f"{RUNS}/one/cancel", json={"wait": 60})
        again = await client.post(f"{RUNS}/one/cancel", content="null", headers=JSON)
        unknown = await client.post(f"{RUNS}/two/cancel")
    assert (first.status_code, first.json()["state"]) == (200, "cancelled")
    assert (again.status_code, again.json()["state"]) == (200, "cancelled")
    assert unknown.status_code == 404


async def test_a_request_that_waits_ends_a_run_whose_lease_passes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_runtime_core.runner.run_client.CHECK_INTERVAL", 0.01)
    clock = VirtualClock()
    async with Rig(None, clock) as rig:
        runner = rig.runner
        await runner.submit("script", run_id="one")
        [row] = await runner.queue.claim_rows("gone", 60.0, limit=1)
        app = create_app(runner, authenticate=Tokens([Token.of(TOKEN)], clock=clock))
        async with client_of(app) as client:
            asking = asyncio.ensure_future(client.post(f"{RUNS}/one/cancel", json={"wait": 60}))

            async def requested() -> bool:
                return (await runner.queue.require("one")).cancel_at is not None

            await eventually(requested)
            clock.advance(61)
            cancelled = await asking
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    assert row.status == "running"


async def test_cancelling_a_running_run_is_recorded(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    begun = asyncio.Event()

    async def works(ctx: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    runner.registry.register(Script(works, "works"))
    await runner.submit("works", run_id="one")
    working = asyncio.create_task(runner.run_once())
    await begun.wait()
    async with client:
        recorded = await client.post(f"{RUNS}/one/cancel", json={"wait": 0})
        done = await client.get(f"{RUNS}/one/result", params={"wait": 60})
    await working
    assert recorded.status_code in (200, 202)
    assert done.json()["state"] == "cancelled"


async def test_a_failed_run_is_resumed(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    await runner.execute("fails", "one")
    async with client:
        resumed = await client.post(f"{RUNS}/one/resume")
        again = await client.post(f"{RUNS}/one/resume")
    assert (resumed.status_code, resumed.json()["state"]) == (202, "pending")
    assert (again.status_code, again.json()["type"]) == (409, "urn:agent-runtime:illegal-transition")
    assert (await runner.get_run("one")).generation == 2


async def test_a_run_is_forked_after_a_step(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    await runner.execute("steps", "one", {})
    async with client:
        forked = await client.post(f"{RUNS}/one/fork", json={"after_step": "b", "new_run_id": "two", "input": {"x": 1}})
        changed = await client.post(f"{RUNS}/one/fork", json={"input": {"params": {"x": 1}}, "params": {"y": 2}})
        whole = await client.post(f"{RUNS}/one/fork")
        null = await client.post(f"{RUNS}/one/fork", content="null", headers=JSON)
        pair = await client.post(f"{RUNS}/one/fork", json={"after_step": ["b", 0]})
        wrong = [
            await client.post(f"{RUNS}/one/fork", json=body)
            for body in (
                {"after_step": "d"},
                {"after_step": ["b", 5]},
                {"after_step": 3},
                {"effects": "x"},
                {"input": 3},
                {"input": {"params": 3}, "params": {"y": 2}},
            )
        ]
        taken = await client.post(f"{RUNS}/one/fork", json={"new_run_id": "one"})
        read = await client.get(forked.headers["location"])
    assert [each.status_code for each in (forked, changed, whole, null, pair)] == [201] * 5
    assert changed.json()["input"] == {"params": {"x": 1, "y": 2}}
    assert read.json()["key"] == "two"
    assert [each["name"] for each in read.json()["steps"]] == ["a", "b"]
    assert [each.status_code for each in wrong] == [422] * 6
    assert wrong[5].json()["errors"][0]["field"] == "input"
    assert "'a'" in wrong[0].text or "completed step" in wrong[0].text
    assert taken.status_code == 409
    assert len(await runner.runs()) == 6


async def test_the_run_shows_who_acted_on_it(runner: AgentRunner, make_app: Callable[..., Any]) -> None:
    app = make_app(authenticate=lambda request: Caller(request.headers["x-who"]))
    runner.registry.register(Script(_asks, "asks"))
    await runner.submit("asks", run_id="one")
    await runner.run_once()
    async with client_of(app, None) as client:

        async def post(who: str, path: str, **body: Any) -> int:
            response = await client.post(f"/api/v1/{path}", headers={"x-who": who}, json=body or None)
            return response.status_code

        codes = [
            await post("ada", "runs/one/cancel"),
            await post("ben", "runs/one/resume"),
            await post("ada", "runs/one/approvals/plan", answer={"ok": True}),
            await post("eve", "runs/one/approvals/plan", answer={"ok": False}),
            await post("eve", "runs/one/cancel"),
            await post("carl", "dead/requeue", ids=["one"], state="cancelled"),
            await post("dora", "runs/one/fork", new_run_id="two"),
        ]
        shown = {key: (await client.get(f"{RUNS}/{key}", headers={"x-who": "x"})).json() for key in ("one", "two")}
    assert codes == [200, 202, 200, 409, 200, 200, 201]
    assert [(each["action"], each["name"], each["by"]) for each in shown["one"]["actions"]] == [
        ("cancel", None, "ada"), ("resume", None, "ben"), ("answer", "plan", "ada"), ("cancel", None, "eve"),
        ("resume", None, "carl"),
    ]  # fmt: skip
    assert shown["two"]["metadata"]["forked_from"]["by"] == "dora"


@pytest.mark.parametrize(
    ("first", "same", "others"),
    [
        (("signals/paid", {"n": 1, "of": [2]}), ("signals/paid", {"of": [2], "n": 1}),
         [("signals/paid", {"n": 2}), ("signals/paid", None), ("signals/other", {"n": 1, "of": [2]})]),
        (("messages", {"message": "a"}), ("messages", {"message": "a", "when": "next_turn"}),
         [("messages", {"message": "b"}), ("messages", {"message": "a", "when": "interrupt"})]),
    ],
)  # fmt: skip
async def test_a_used_message_id_with_another_body_or_name_is_a_conflict(
    client: httpx.AsyncClient, runner: AgentRunner, first: Any, same: Any, others: list[Any]
) -> None:
    await runner.submit("echo", run_id="one")
    codes = []
    async with client:
        for path, body in (first, same, *others, same):
            if path == "messages":
                body = {**body, "message_id": "k"}
            response = await client.post(
                f"{RUNS}/one/{path}", content=json.dumps(body), headers={**JSON, "Idempotency-Key": "k"}
            )
            codes.append(response.status_code)
            if response.status_code == 409:
                assert response.json()["type"] == "urn:agent-runtime:idempotency-conflict"
    assert codes == [202, 202, *[409] * len(others), 202]
    assert len(await runner.queue.mail((await runner.queue.require("one")).run_id)) == 1


async def test_a_signal_is_any_json_and_delivered_once(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    await runner.submit("waits", run_id="one")
    await runner.run_once()
    once = {"Idempotency-Key": "payment 1"}
    async with client:
        sent = [await client.post(f"{RUNS}/one/signals/paid", json=[1, None], headers=once) for _ in range(2)]
        empty = await client.post(f"{RUNS}/one/signals/paid")
        null = await client.post(f"{RUNS}/one/signals/other", json=None, content=b"null", headers=JSON)
        broken = await client.post(f"{RUNS}/one/signals/paid", content=b"[1", headers=JSON)
        await runner.run_once()
        done = await client.get(f"{RUNS}/one/result")
        late = await client.post(f"{RUNS}/one/signals/paid", json=1)
    assert [each.status_code for each in sent] == [202, 202]
    assert [each.status_code for each in (empty, null, broken)] == [422, 202, 400]
    assert done.json()["result"] == {"value": [1, None]}
    assert (late.status_code, late.json()["type"]) == (410, "urn:agent-runtime:run-finished")


async def test_a_message_reaches_the_agent_of_a_live_run(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    await runner.submit("waits", run_id="one")
    async with client:
        sent = await client.post(f"{RUNS}/one/messages", json={"message": "hi", "message_id": "m1"})
        again = await client.post(f"{RUNS}/one/messages", json={"message": "hi", "message_id": "m1"})
        chat = await client.post(
            f"{RUNS}/one/messages", json={"message": {"role": "user", "content": "ho"}, "when": "interrupt"}
        )
        wrong = [
            await client.post(f"{RUNS}/one/messages", json=body)
            for body in ({}, {"message": ""}, {"message": 3}, {"message": {"role": "system", "content": "x"}},
                         {"message": "hi", "when": "now"}, {"message": "hi", "message_id": ""})
        ]  # fmt: skip
        await runner.cancel("one")
        late = await client.post(f"{RUNS}/one/messages", json={"message": "hi"})
    assert (sent.status_code, sent.json()["message_id"]) == (202, "m1")
    assert (again.status_code, chat.status_code) == (202, 202)
    assert [each.status_code for each in wrong] == [422] * 6
    assert late.status_code == 410
    mail = [
        each for each in await runner.queue.mail((await runner.queue.require("one")).run_id) if each.kind == "message"
    ]
    assert len(mail) == 2


async def test_a_question_is_answered_once(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    await runner.submit("asks", run_id="one")
    await runner.run_once()
    async with client:
        wrong = [
            await client.post(f"{RUNS}/one/approvals/plan", json=body)
            for body in (
                {"answer": {"ok": "yes"}},
                {"answer": True},
                {},
                {"answer": {"ok": True}, "request_id": "nope"},
            )
        ]
        both = await asyncio.gather(
            *[client.post(f"{RUNS}/one/approvals/plan", json={"answer": {"ok": True}}) for _ in range(2)]
        )
        await runner.run_once()
        done = await client.get(f"{RUNS}/one/result")
        late = await client.post(f"{RUNS}/one/approvals/plan", json={"answer": {"ok": True}})
    assert [each.status_code for each in wrong] == [422] * 4
    assert sorted(each.status_code for each in both) == [200, 409]
    assert {each.json().get("asked") for each in both} == {True, None}
    assert {each.json().get("type") for each in both} == {None, "urn:agent-runtime:already-answered"}
    assert done.json()["result"] == {"value": {"ok": True}}
    assert late.status_code == 410


async def test_of_several_questions_the_request_names_one(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    await runner.submit("asks twice", run_id="one")
    await runner.run_once()
    path = f"{RUNS}/one/approvals/tool:pay"
    edit = {"approved": True, "arguments": {"amount": 3}}
    async with client:
        first, second = (await client.get(f"{RUNS}/one")).json()["questions"]
        unnamed = await client.post(path, json={"answer": True})
        text = await client.post(path, json={"answer": {**edit, "arguments": "{}"}, "request_id": second["request_id"]})
        await runner.signal("one", "tool:pay", "yes")
        problems = [each["problem"] for each in (await client.get("/api/v1/approvals")).json()["items"]]
        stored = [
            await client.post(path, json={"answer": answer, "request_id": each["request_id"]})
            for answer, each in ((edit, second), (False, first))
        ]
        await runner.run_once()
        done = await client.get(f"{RUNS}/one/result")
    assert (unnamed.status_code, text.status_code) == (422, 422)
    assert unnamed.json()["errors"][0]["message"].endswith(f"Known: {first['request_id']}, {second['request_id']}.")
    assert "amount" not in unnamed.text
    assert [each.json()["errors"][0]["field"] for each in (unnamed, text)] == ["request_id", "answer"]
    assert "Known answers: true, false" in text.json()["errors"][0]["message"]
    assert all("Known answers: true, false" in each for each in problems)
    assert [each.status_code for each in stored] == [200, 200]
    assert done.json()["result"] == {"value": [False, edit]}


async def test_a_question_whose_wait_was_cancelled_is_not_answered(
    client: httpx.AsyncClient, runner: AgentRunner
) -> None:
    await runner.submit("cancels", run_id="one")
    await runner.run_once()
    async with client:
        before = (await client.get(f"{RUNS}/one")).json()
        await runner.signal("one", "enough")
        await runner.run_once()
        await eventually(lambda: _asks_nothing(runner, "one"))
        after = (await client.get(f"{RUNS}/one")).json()
        late = await client.post(f"{RUNS}/one/approvals/plan", json={"answer": {"ok": True}})
    assert [each["name"] for each in before["questions"]] == ["plan"]
    assert after["questions"] == []
    assert (late.status_code, late.json()["type"]) == (409, "urn:agent-runtime:illegal-transition")
    assert "has cancelled its wait" in late.json()["detail"]


async def _asks_nothing(runner: AgentRunner, run_id: str) -> bool:
    return not (await runner.get_run(run_id)).open_approvals


async def test_an_answer_says_whether_the_run_has_asked(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    await runner.submit("asks", run_id="one")
    async with client:
        early = await client.post(f"{RUNS}/one/approvals/plan", json={"answer": {"ok": True}})
        other = await client.post(f"{RUNS}/one/approvals/plam", json={"answer": {"ok": True}})
        await runner.run_once()
        done = await client.get(f"{RUNS}/one/result")
    for each in (early, other):
        assert (each.status_code, each.json()["asked"], each.json()["state"]) == (200, False, "pending")
    assert done.json()["result"] == {"value": {"ok": True}}  # the answer was kept


async def test_a_finished_run_is_deleted(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    await runner.submit("waits", run_id="one")
    async with client:
        live = await client.delete(f"{RUNS}/one")
        await runner.cancel("one")
        gone = await client.delete(f"{RUNS}/one")
        again = await client.delete(f"{RUNS}/one")
    assert (live.status_code, live.json()["type"]) == (409, "urn:agent-runtime:illegal-transition")
    assert (gone.status_code, gone.content) == (204, b"")
    assert again.status_code == 404


async def test_dead_letters_are_repaired_by_id_or_all_at_once(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    for number in range(4):
        await runner.execute("fails", f"run-{number}")
    await runner.submit("waits", run_id="live")
    path = "/api/v1/dead"
    async with client:
        some = await client.post(f"{path}/requeue", json={"ids": ["run-0", "live", "nope", "run-0"], "state": "failed"})
        wrong_count = await client.post(f"{path}/discard", json={"all": True, "state": "failed", "expect": 4})
        every = await client.post(f"{path}/discard", json={"all": True, "state": "failed", "expect": 3})
        none = await client.post(f"{path}/requeue", json={"all": True, "expect": 0})
        wrong: list[dict[str, Any]] = [
            {}, {"ids": []}, {"ids": ["a"], "all": True}, {"all": True}, {"all": False}, {"ids": "a"},
            {"all": True, "expect": -1}, {"all": True, "expect": True}, {"ids": ["a"], "expect": 1},
            {"all": True, "expect": 0, "state": "pending"},
        ]  # fmt: skip
        bad = [await client.post(f"{path}/discard", json=body) for body in wrong]
    assert some.status_code == 200
    assert some.json()["done"] == ["run-0"]
    assert [each["id"] for each in some.json()["failed"]] == ["live", "nope"]
    assert all(each["why"] for each in some.json()["failed"])
    assert (wrong_count.status_code, wrong_count.json()["type"]) == (409, "urn:agent-runtime:unexpected-count")
    assert len(every.json()["done"]) == 3
    assert none.json() == {"done": [], "failed": []}
    assert [each.status_code for each in bad] == [422] * 10
    assert [each.run_key for each in await runner.runs()] == ["run-0", "live"]


async def test_repairs_stop_when_the_server_shuts_down(
    app: FastAPI, client: httpx.AsyncClient, runner: AgentRunner
) -> None:
    for number in range(3):
        await runner.execute("fails", f"run-{number}")
    draining, discard = app.state.server.draining, runner.discard

    async def discard_one(run_id: str) -> None:
        await discard(run_id)
        draining.set()

    runner.discard = discard_one  # type: ignore[method-assign, assignment]
    async with client:
        found = await client.post("/api/v1/dead/discard", json={"all": True, "state": "failed", "expect": 3})
    assert [len(found.json()[each]) for each in ("done", "failed")] == [1, 2]
    assert len(await runner.runs()) == 2


@pytest.fixture(params=backends(["sqlite", "redis", "postgres"], default=["sqlite", "redis"]))
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "sqlite":
        yield tmp_path / "shared.db"
    elif request.param == "postgres":
        yield request.getfixturevalue("postgres_url")
    else:
        with RedisServer() as server:
            yield server.url


def _app(runner: AgentRunner) -> FastAPI:
    app = create_app(runner, authenticate=Tokens([Token.of(TOKEN)]))
    # It prepares all routes here. While it does, it changes the warning filters, which all threads share.
    app.openapi()
    return app


async def _followed(client: httpx.AsyncClient, run_id: str) -> list[dict[str, Any]]:
    """Return the data of each frame of a run's event stream, to its end."""
    async with client.stream("GET", f"{RUNS}/{run_id}/events", timeout=60) as response:
        lines = [line async for line in response.aiter_lines()]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


async def test_two_servers_act_on_the_same_runs(url: Any, live_server: Callable[..., LiveServer]) -> None:
    async with _opened(url) as one, _opened(url) as two:
        apps = [live_server(_app(each)) for each in (one, two)]
        header = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            httpx.AsyncClient(base_url=apps[0].url, headers=header) as first,
            httpx.AsyncClient(base_url=apps[1].url, headers=header) as second,
        ):
            await first.post(RUNS, json={"agent": "asks", "run_id": "asked"})
            await first.post(RUNS, json={"agent": "waits", "run_id": "stopped"})
            while await one.run_once():
                pass
            waiting = asyncio.create_task(first.get(f"{RUNS}/asked/result", params={"wait": 60}))
            following = [asyncio.create_task(_followed(each, "asked")) for each in (first, second)]
            open_ = (await second.get("/api/v1/approvals")).json()["items"]
            answered = await second.post(f"{RUNS}/asked/approvals/plan", json={"answer": {"ok": True}})
            twice = await first.post(f"{RUNS}/asked/approvals/plan", json={"answer": {"ok": True}})
            cancelled = await second.post(f"{RUNS}/stopped/cancel", json={"wait": 60})
            await eventually(one.run_once)
            done = await waiting
            frames = [await each for each in following]
            seen = await first.get(f"{RUNS}/stopped")
    assert [each["key"] for each in open_] == ["asked"]
    assert (answered.status_code, twice.status_code) == (200, 409)
    assert frames[0] == frames[1]
    assert "approval.requested" in {each["type"] for each in frames[0]}
    assert (frames[0][-1]["type"], frames[0][-1]["state"]) == ("end", "succeeded")
    assert cancelled.json()["state"] == "cancelled"
    assert seen.json()["state"] == "cancelled"
    assert (done.status_code, done.json()["result"]) == (200, {"value": {"ok": True}})


async def test_a_wait_ends_with_the_server_or_the_client(
    app: FastAPI, runner: AgentRunner, live_server: Callable[..., LiveServer]
) -> None:
    await runner.submit("waits", run_id="one")
    server = live_server(app)
    header = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=server.url, headers=header, timeout=60) as client:
        waiting = asyncio.create_task(client.get(f"{RUNS}/one/result", params={"wait": 60}))
        await soon(lambda: _waits_in(runner) == 1)
        waiting.cancel()
        await soon(lambda: _waits_in(runner) == 0)
        (loop,) = [each for each in runner.watcher._by_loop if each is not asyncio.get_running_loop()]
        waiting = asyncio.create_task(client.get(f"{RUNS}/one/result", params={"wait": 60}))
        await soon(lambda: _waits_in(runner) == 1)
        loop.call_soon_threadsafe(app.state.server.draining.set)
        ended = await waiting
    assert ended.status_code == 202


def _waits_in(runner: AgentRunner) -> int:
    return sum(len(ends) for _, each in runner.watcher._by_loop.items() for ends in each._waiting.values())
