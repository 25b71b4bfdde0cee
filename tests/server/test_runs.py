"""Runs over HTTP: submit, list and read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI

from agent_runtime_core.errors import NotSupported
from agent_runtime_core.orchestrator import Orchestrator
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.server.access import Caller
from agent_runtime_core.server.app import create_app
from agent_runtime_core.server.documents import Outcome, Run
from agent_runtime_core.server.reads import preferred_wait
from agent_runtime_core.server.settings import ServerSettings
from tests.server.conftest import LiveServer, client_of, echo
from tests.server.documented import documented
from tests.support.backends import backends
from tests.support.cases import for_each
from tests.support.fault_runs import eventually
from tests.support.redis_servers import RedisServer
from tests.support.runs import Script

RUNS = "/api/v1/runs"


async def _raises(ctx: Any) -> Any:
    raise NotSupported("no luck")  # which no other attempt can change


@pytest.fixture(params=backends(["sqlite", "redis", "postgres", "memory"], default=["sqlite"]))
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AgentRunner]:
    registry = Registry()
    registry.register(Script(echo, "echo"))
    with contextlib.ExitStack() as opened:
        url = str(tmp_path / "runs.db") if request.param == "sqlite" else "memory://"
        if request.param == "redis":
            url = opened.enter_context(RedisServer()).url
        if request.param == "postgres":
            url = request.getfixturevalue("postgres_url")
        yield AgentRunner.open(url, registry=registry)


@pytest.fixture
def client(app: FastAPI) -> httpx.AsyncClient:
    """A client that fails for a response which the OpenAPI document does not have."""
    return client_of(app, event_hooks={"response": [documented(app)]})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RUNS, {"prompt": "add 12 and 30"}),
        (RUNS, {"agent": "echo", "input": {}}),
        ("/api/v1/turns", {"messages": [{"role": "user", "content": "hello"}]}),
    ],
)
async def test_a_run_belongs_to_the_trace_of_its_request(
    client: httpx.AsyncClient, runner: AgentRunner, path: str, body: dict[str, Any]
) -> None:
    given, sent = f"00-{'1' * 32}-{'2' * 16}-01", []
    async with client:
        for header in (given, "00-none-1"):
            made = await client.post(path, json=body, headers={"traceparent": header})
            assert made.status_code == 201
            run = made.headers["location"].rpartition("/")[2]
            sent.append((await runner.get_run(run)).metadata.get("traceparent"))
    assert sent == [given, None]


@pytest.mark.sentence(
    "003", "`RunResponse`: `run_id`, `status`, `steps`, `result`, `error`, `created_at`, `updated_at`"
)
async def test_a_prompt_completes_as_in_spec_003(client: httpx.AsyncClient, orchestrator: Orchestrator) -> None:
    async with client, orchestrator:
        made = await client.post(RUNS, json={"prompt": "add 12 and 30"})
        done = await client.get(f"{made.headers['location']}/result", params={"wait": 60})
        run = await client.get(made.headers["location"])
    assert made.status_code == 201
    assert made.json()["status"] == "pending"
    assert made.headers["location"] == f"{RUNS}/{made.json()['run_id']}"
    assert done.status_code == 200
    assert run.json()["status"] == "completed"
    assert run.json()["result"] == 42
    assert [each["tool_name"] for each in run.json()["steps"]] == ["calculator"]
    Run.model_validate(made.json())
    Run.model_validate(run.json())


async def test_a_repeated_request_returns_the_stored_run(client: httpx.AsyncClient) -> None:
    key = {"Idempotency-Key": "order 7"}
    body = {"agent": "echo", "input": {"n": 1}, "metadata": {"a": 1}, "priority": 3, "delay": 60, "expires_in": 90}
    async with client:
        first = await client.post(RUNS, json=body, headers=key)
        again = await client.post(RUNS, json=body, headers=key)
        other = await client.post(RUNS, json={**body, "input": {"n": 2}}, headers=key)
        named = await client.post(RUNS, json={"agent": "echo", "run_id": "a/b c"})
        named_again = await client.post(RUNS, json={"agent": "echo", "run_id": "a/b c"})
        by_key = await client.get(f"{RUNS}/a%2Fb%20c")
    assert [each.status_code for each in (first, again, other)] == [201, 200, 409]
    assert first.json()["run_id"] == again.json()["run_id"]
    assert other.json()["type"] == "urn:agent-runtime:idempotency-conflict"
    assert [named.status_code, named_again.status_code] == [201, 200]
    assert {**named.json(), "why": by_key.json()["why"]} == by_key.json()
    assert by_key.json()["key"] == "a/b c"


async def test_a_repeated_prompt_returns_the_stored_run(client: httpx.AsyncClient, orchestrator: Orchestrator) -> None:
    key = {"Idempotency-Key": "order 7"}
    async with client, orchestrator:
        first = await client.post(RUNS, json={"prompt": "add 1 and 2"}, headers=key)
        again = await client.post(RUNS, json={"prompt": "add 1 and 2"}, headers=key)
    assert [first.status_code, again.status_code] == [201, 200]
    assert first.json()["run_id"] == again.json()["run_id"]


async def test_of_many_equal_requests_one_stores_the_run(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    key = {"Idempotency-Key": "order 7"}
    async with client:
        named = await asyncio.gather(*[client.post(RUNS, json={"agent": "echo", "run_id": "a"}) for _ in range(20)])
        keyed = await asyncio.gather(*[client.post(RUNS, json={"agent": "echo"}, headers=key) for _ in range(20)])
    for found in (named, keyed):
        assert sorted(each.status_code for each in found) == [200] * 19 + [201]
        assert len({each.json()["run_id"] for each in found}) == 1
    assert len(await runner.runs()) == 2


async def test_the_caller_may_wait_for_the_end(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    async with client:
        waiting = asyncio.create_task(
            client.post(RUNS, json={"agent": "echo", "input": {"n": 5}}, headers={"Prefer": "respond-async, wait=500"})
        )
        await eventually(runner.run_once)
        made = await waiting
    assert made.status_code == 201
    assert made.headers["preference-applied"] == "wait=60"
    assert made.json()["state"] == "succeeded"
    assert made.json()["result"] == {"value": {"n": 5}}


async def test_a_full_queue_refuses_runs(make_app: Callable[..., FastAPI], runner: AgentRunner) -> None:
    async with client_of(make_app(settings=ServerSettings(max_pending=2))) as client:
        found = [await client.post(RUNS, json={"agent": "echo"}) for _ in range(3)]
    assert [each.status_code for each in found] == [201, 201, 429]
    assert found[2].headers["retry-after"] == "5"
    assert found[2].json()["type"] == "urn:agent-runtime:queue-full"
    assert len(await runner.runs()) == 2


async def test_links_are_relative_to_the_place_of_a_mounted_server(make_app: Callable[..., FastAPI]) -> None:
    outer = FastAPI()
    outer.mount("/agents", make_app())
    async with client_of(outer) as client:
        made = await client.post(f"/agents{RUNS}", json={"agent": "echo", "run_id": "a/b"})
        read = await client.get(made.headers["location"])
        by_key = await client.get(f"/agents{RUNS}/a%2Fb")
    assert made.headers["location"] == f"/agents{RUNS}/{made.json()['run_id']}"
    assert read.json() == by_key.json() == {**made.json(), "why": by_key.json()["why"]}


async def test_a_result_is_202_until_the_run_has_finished(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    runner.registry.register(Script(_raises, "fails"))
    async with client:
        await client.post(RUNS, json={"agent": "echo", "run_id": "one", "input": {"n": 1}})
        before = await client.get(f"{RUNS}/one/result")
        await runner.run_once()
        after = await client.get(f"{RUNS}/one/result")
        await runner.execute("fails", "two")
        failed = await client.get(f"{RUNS}/two/result")
        unknown = await client.get(f"{RUNS}/three/result")
    assert (before.status_code, before.headers["retry-after"]) == (202, "1")
    assert before.json()["result"] is None
    assert after.status_code == 200
    assert after.json()["result"] == {"value": {"n": 1}}
    assert (failed.status_code, failed.json()["state"]) == (200, "failed")
    assert "no luck" in failed.json()["error"]
    assert unknown.status_code == 404
    for each in (before, after, failed):
        Outcome.model_validate(each.json())


@for_each(
    ("header", "seconds"),
    [
        (None, 0), ("", 0), ("wait", 0), ("wait=x", 0), ("wait=-1", 0), ("wait=5", 5), ("Wait = 7", 7),
        ("return=minimal, wait=10; x=1", 10), ('wait="20"', 20), ("wait=60", 60), ("wait=61", 60), ("await=5", 0),
        ("wait=99999999999", 0),
    ],
)  # fmt: skip
def test_a_preference_that_is_not_understood_is_ignored(header: str | None, seconds: int) -> None:
    assert preferred_wait(header) == seconds


async def test_an_agent_of_another_process_is_accepted_by_a_server_without_agents(tmp_path: Path) -> None:
    async with AgentRunner.open(tmp_path / "runs.db", registry=Registry()) as runner:
        app = create_app(runner, authenticate=lambda request: Caller("ada"))
        async with client_of(app) as client:
            made = await client.post(RUNS, json={"agent": "elsewhere", "conversation_id": "room 7"})
            listed = (await client.get(RUNS)).json()["items"]
        info = await runner.get_run(made.json()["run_id"])
    assert made.status_code == 201
    assert listed[0]["conversation_id"] == "room 7"
    assert (info.input, info.concurrency_key) == ({"conversation_id": "room 7"}, "conversation:room 7")


async def test_the_agent_of_the_orchestrator_is_known(client: httpx.AsyncClient) -> None:
    body = {"agent": "orchestrator", "input": {"messages": [{"role": "user", "content": "add 1 and 2"}]}}
    async with client:
        made = await client.post(RUNS, json=body)
        unknown = await client.post(RUNS, json={**body, "agent": "orchestra"})
    assert (made.status_code, unknown.status_code) == (201, 422)
    assert "'orchestrator'" in unknown.json()["detail"]


async def _page_through(client: httpx.AsyncClient, **query: Any) -> list[str]:
    found, cursor = [], None
    while True:
        page = await client.get(RUNS, params=[*_pairs(query), *([("cursor", cursor)] if cursor else [])])
        assert page.status_code == 200, page.text
        found += [each["key"] for each in page.json()["items"]]
        cursor = page.json()["next"]
        if cursor is None:
            return found


def _pairs(query: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(name, each) for name, value in query.items() for each in (value if isinstance(value, list) else [value])]


async def test_lists_are_newest_first_and_complete(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    names = [f"run-{number}" for number in range(7)]
    for name in names:
        await runner.submit("echo", {"n": 1}, run_id=name)
    await runner.cancel("run-3")
    await runner.execute("echo", "run-5", {"n": 1})
    await runner.submit("echo", {"conversation_id": "room 7"}, run_id="child", parent_run_id="run-1")
    async with client:
        for limit in (1, 2, 3, 50):
            assert await _page_through(client, limit=limit) == ["child", *reversed(names)]
        assert await _page_through(client, state=["cancelled", "succeeded"]) == ["run-5", "run-3"]
        assert await _page_through(client, state=["retrying"]) == []
        assert await _page_through(client, state=["retrying", "succeeded"], limit=1) == ["run-5"]
        assert await _page_through(client, q="run-", agent="echo", limit=4) == [*reversed(names)]
        assert await _page_through(client, agent="other") == []
        assert await _page_through(client, parent="run-1") == ["child"]
        assert await _page_through(client, conversation="room 7") == ["child"]
        assert await _page_through(client, conversation="room 7", state=["failed", "in_doubt"]) == []
        assert await _page_through(client, conversation="room") == []
        created = (await runner.queue.require("run-4")).created_at
        assert await _page_through(client, since=repr(created), q="run-") == ["run-6", "run-5", "run-4"]
        assert await _page_through(client, until=repr(created)) == ["run-3", "run-2", "run-1", "run-0"]
        assert await _page_through(client, until="2001-02-03T04:05:06+05:00") == []
        assert len(await _page_through(client, since="2001-02-03T04:05:06Z")) == 8
        assert (await client.get(f"{RUNS}?since=2001-02-03T04:05:06+02:00")).status_code == 200  # a space, once decoded
        last = (await client.get(RUNS, params={"limit": 1, "state": "succeeded"})).json()
    assert last["next"] is None
    assert {"attempt", "age_seconds", "duration_seconds", "tokens", "cost_usd"} <= last["items"][0].keys()
    assert "input" not in last["items"][0]


async def test_steps_records_and_conversations_are_read_in_pages(
    client: httpx.AsyncClient, runner: AgentRunner
) -> None:
    async def three(ctx: Any) -> Any:
        return [await ctx.step(name, int, number) for number, name in enumerate("abc")]

    runner.registry.register(Script(three, "three"))
    message = {"role": "user", "content": "hi"}
    await runner.execute("three", "one", {"messages": [message]})
    await runner.execute("three", "two", {"messages": [message]})
    async with client:
        names, after = [], -1
        while True:
            page = await client.get(
                f"{RUNS}/one/steps", params={"limit": 2, **({} if after is None else {"after": after})}
            )
            names += [each["name"] for each in page.json()["items"]]
            after = page.json()["next"]
            if after is None:
                break
        journal = (await client.get(f"{RUNS}/one/journal", params={"limit": 1000})).json()
        messages = (await client.get(f"{RUNS}/one/messages")).json()
        plan = await client.get(f"{RUNS}/one/plan")
        compared = await client.get(f"{RUNS}/one/compare/two")
    assert names == ["a", "b", "c"]
    assert len(journal["items"]) >= 4
    assert message["content"] in str(messages)
    assert plan.status_code == 200
    assert compared.status_code == 200
    assert "same" in compared.text


async def test_the_timeline_is_read_in_pages_and_by_step(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    async def three(ctx: Any) -> Any:
        return [await ctx.step(name, int, number) for number, name in enumerate("abc")]

    runner.registry.register(Script(three, "three"))
    await runner.execute("three", "one")
    await runner.execute("three", "two")
    async with client:
        page = (await client.get(f"{RUNS}/one/timeline", params={"limit": 2})).json()
        rest = (await client.get(f"{RUNS}/one/timeline", params={"after": page["next"]})).json()
        newest = (await client.get(f"{RUNS}/one/timeline", params={"limit": 1, "newest_first": True})).json()
        wrong = await client.get(f"{RUNS}/one/timeline", params={"newest": True})
        step = (await client.get(f"{RUNS}/one/steps/{page['items'][1]['step_id']}")).json()
        missing = [
            await client.get(f"{RUNS}/{path}")
            for path in (
                f"two/steps/{step['step_id']}",
                "one/steps/b",
                f"none/steps/{step['step_id']}",
                "none/timeline",
            )
        ]
    assert [each["name"] for each in page["items"] + rest["items"]] == ["a", "b", "c"]
    assert (page["total"], rest["next"], newest["items"]) == (3, None, rest["items"])
    assert {"kind": "step", "state": "done", "key": "0"}.items() <= page["items"][0].items()
    assert (step["sequence"], step["output"], step["records"][-1]["kind"]) == (1, 1, "done")
    assert step["idempotency_key"].endswith(step["step_id"])
    assert wrong.status_code == 422
    assert [each.status_code for each in missing] == [404] * 4
    assert [each.json()["type"].rpartition(":")[2] for each in missing] == [
        "not-found", "not-found", "unknown-run", "unknown-run"
    ]  # fmt: skip


async def test_the_timeline_hides_child_runs_that_the_caller_may_not_see(
    make_app: Callable[..., FastAPI], runner: AgentRunner
) -> None:
    async def outer(ctx: Any) -> Any:
        await ctx.call("echo", {}, key="c")

    runner.registry.register(Script(outer, "outer"))
    await runner.execute("outer", "one")
    answers = {}
    for hidden in ("echo", "nothing"):

        def may(verb: str, run: Any, hidden: str = hidden) -> bool:
            return bool(run.agent_key != hidden)

        caller = Caller("someone", may=may)
        async with client_of(make_app(authenticate=lambda request, caller=caller: caller)) as client:
            [row] = (await client.get(f"{RUNS}/one/timeline")).json()["items"]
            step = (await client.get(f"{RUNS}/one/steps/{row['step_id']}")).json()
        answers[hidden] = (row["kind"], row["child_run_id"], step["child_run_id"])
    child = answers["nothing"][1]
    assert child is not None
    assert answers == {"echo": ("child", None, None), "nothing": ("child", child, child)}


async def test_a_later_page_of_the_journal_reads_only_later_records(
    client: httpx.AsyncClient, runner: AgentRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def three(ctx: Any) -> Any:
        return [await ctx.step(name, int, number) for number, name in enumerate("abc")]

    runner.registry.register(Script(three, "three"))
    await runner.execute("three", "one")
    read, asked = runner.state_store.records, list[int]()

    async def counted(run_id: Any, after: int = -1) -> Any:
        asked.append(after)
        return await read(run_id, after)

    monkeypatch.setattr(runner.state_store, "records", counted)
    async with client:
        first = (await client.get(f"{RUNS}/one/journal", params={"limit": 1})).json()
        rest = (await client.get(f"{RUNS}/one/journal", params={"after": first["next"]})).json()
    assert [each["seq"] for each in first["items"] + rest["items"]] == [
        each.seq for each in await read((await runner.get_run("one")).run_id)
    ]
    assert asked == [-1, first["next"]]


@pytest.mark.parametrize("key", ["a/b", "a%2Fb", "100%", "ü ✓", "..", ".", "a?b#c", "a//b/", "steps", "x/steps"])
async def test_any_run_key_fits_into_a_path(
    key: str, app: FastAPI, runner: AgentRunner, live_server: Callable[..., LiveServer]
) -> None:
    await runner.submit("echo", run_id=key)
    path = quote(key, safe="").replace(".", "%2E")
    server = live_server(app)
    token = client_of(app).headers["authorization"]
    for end, status in (("", 200), ("/result", 202), ("/steps", 200)):
        # A client library would normalize the path.
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = (
            f"GET {RUNS}/{path}{end} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nAuthorization: {token}\r\n\r\n"
        )
        writer.write(head.encode())
        answer = await reader.read()
        writer.close()
        assert answer.startswith(f"HTTP/1.1 {status}".encode()), (end, answer[:200])


async def test_a_stored_lone_surrogate_and_odd_types_are_sent(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    import datetime as dt

    async def odd(ctx: Any) -> Any:
        return {"half": "\ud800", "when": dt.datetime(2026, 1, 2, tzinfo=dt.UTC)}

    runner.registry.register(Script(odd, "odd"))
    await runner.execute("odd", "one")
    async with client:
        read = await client.get(f"{RUNS}/one")
        result = await client.get(f"{RUNS}/one/result")
    assert (read.status_code, result.status_code) == (200, 200)
    assert "2026-01-02T00:00:00+00:00" in result.text
