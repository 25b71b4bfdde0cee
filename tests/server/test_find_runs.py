"""`GET /runs` finds runs by their contents, sorts them, and says why each is where it is, within a caller's rights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import pytest

from agent_runtime_core import RateLimit
from agent_runtime_core._core.clock import aware
from agent_runtime_core._views import reasons
from agent_runtime_core._views.reasons import reasons_of
from agent_runtime_core._views.runs import list_items, run_view
from agent_runtime_core.queue.records import RunFilter, RunRow, RunUpdate
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunInfo, RunnerConfig, finding
from agent_runtime_core.server.access import Caller
from agent_runtime_core.server.app import create_app
from agent_runtime_core.testing import VirtualClock
from tests.server.conftest import BASE, client_of
from tests.support.runs import Rig, Script

if TYPE_CHECKING:
    import httpx

API: Final = f"{BASE}/api/v1"


async def _fails(ctx: Any) -> Any:
    raise ConnectionError(f"connection reset by {ctx.params.get('peer', 'peer')}")


async def _works(ctx: Any) -> Any:
    await ctx.step("read", lambda: {"page": "A needle in the text"})
    return {"done": True}


async def _calls(ctx: Any) -> Any:
    return await ctx.call("asks", {})


async def _asks(ctx: Any) -> Any:
    return await ctx.approve("plan")


@pytest.fixture
def runner() -> AgentRunner:
    registry = Registry()
    for body, key in ((_fails, "fails"), (_works, "works"), (_asks, "asks"), (_calls, "calls")):
        registry.register(Script(body, key))
    return AgentRunner.open("memory://", registry=registry, config=RunnerConfig(max_retries=1, park_after=0.0))


async def executed(runner: AgentRunner) -> None:
    while await runner.run_once():
        pass


async def keys(client: httpx.AsyncClient, **query: Any) -> list[str]:
    answer = await client.get(f"{API}/runs", params=query)
    assert answer.status_code == 200, answer.text
    return [each["key"] for each in answer.json()["items"]]


async def test_runs_are_found_by_their_contents(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    for number in range(3):
        body: Any = {"agent": "works", "run_id": f"w{number}", "tags": ["even"] if number % 2 == 0 else []}
        body |= {"metadata": {"customer": "acme", "n": number}}
        assert (await client.post(f"{API}/runs", json=body)).json()["tags"] == body["tags"]
    await runner.submit("fails", run_id="f", params={"peer": "b=c"})
    await executed(runner)
    assert await keys(client, search="RESET BY b=c") == ["f"]
    assert await keys(client, search="needle") == ["w2", "w1", "w0"], "the result of a step"
    assert await keys(client, tag="even") == ["w2", "w0"]
    assert await keys(client, metadata=["customer=acme", "n=1"]) == ["w1"]
    assert await keys(client, error_type="ConnectionError") == ["f"]
    assert await keys(client, error_type="ConnectionError", state="succeeded") == []
    assert await keys(client, search="w1", state=["succeeded", "retrying"]) == ["w1"]
    assert await keys(client, min_attempts=2) == []
    assert await keys(client, sort="age") == ["w0", "w1", "w2", "f"]
    [item] = (await client.get(f"{API}/runs", params={"q": "w0"})).json()["items"]
    assert (item["tags"], item["why"]) == (["even"], [])
    run = (await client.get(f"{API}/runs/w0")).json()
    assert (run["tags"], run["metadata"]) == (["even"], {"customer": "acme", "n": 0})


async def test_a_sorted_list_is_read_page_by_page(client: httpx.AsyncClient, runner: AgentRunner) -> None:
    for number in range(5):
        await runner.submit("works", run_id=f"w{number}")
    found, query = list[str](), {"sort": "age", "limit": "2"}
    while True:
        page = (await client.get(f"{API}/runs", params=query)).json()
        found += [each["key"] for each in page["items"]]
        assert page["note"].startswith("Only runs since ")
        if page["next"] is None:
            break
        query["cursor"] = page["next"]
    assert found == ["w0", "w1", "w2", "w3", "w4"]
    answer = await client.get(f"{API}/runs", params={"sort": "cost", "cursor": query["cursor"]})
    assert answer.status_code == 422, "the cursor of another order"


async def test_a_search_continues_after_its_bound(
    client: httpx.AsyncClient, runner: AgentRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "MOST_ROWS", 2)
    monkeypatch.setattr(finding, "_LARGE_PAGE", 2)
    for number in range(4):
        await runner.submit("works", {"text": "needle"} if number == 0 else {}, run_id=f"w{number}")
    page = (await client.get(f"{API}/runs", params={"search": "needle"})).json()
    assert page["items"] == []
    assert "2 runs were read back to" in page["note"]
    page = (await client.get(f"{API}/runs", params={"search": "needle", "cursor": page["next"]})).json()
    assert [each["key"] for each in page["items"]] == ["w0"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"metadata": "x"}, "metadata.0"),
        ({"metadata": "=x"}, "metadata.0"),
        ({"search": ""}, "search"),
        ({"sort": "name"}, "sort"),
        ({"min_attempts": "0"}, "min_attempts"),
        ({"tag": "x" * 129}, "tag"),
        ({"serch": "x"}, "serch"),
    ],
)
async def test_an_invalid_filter_is_named(client: httpx.AsyncClient, query: Any, field: str) -> None:
    answer = await client.get(f"{API}/runs", params=query)
    assert answer.status_code == 422
    assert [each["field"] for each in answer.json()["errors"]] == [field]


async def test_a_search_shows_nothing_that_the_caller_may_not_see(runner: AgentRunner) -> None:
    for name in ("mine", "theirs"):
        source = await runner.submit("asks", {"text": "needle"}, run_id=name, concurrency_key="key")
        await runner.fork(source, new_run_id=f"{name}-fork")
    await executed(runner)

    def may(verb: str, run: RunInfo) -> bool:
        return (run.run_key or "").startswith("mine") == own

    own = True
    app = create_app(runner, authenticate=lambda _: Caller("ada", may=may))
    async with client_of(app, None) as client:
        assert await keys(client, search="needle") == ["mine-fork", "mine"]
        assert await keys(client, sort="age") == ["mine", "mine-fork"]
        own = False
        answer = await client.get(f"{API}/runs", params={"search": "needle"})
        assert "mine" not in answer.text.replace("theirs", "")
        blocked = [each["text"] for item in answer.json()["items"] for each in item["why"] if each["kind"] == "blocked"]
        assert blocked == ["blocked by another run of concurrency key 'key'"] * 2


async def test_a_search_needs_the_scope_read(make_app: Callable[..., Any], runner: AgentRunner) -> None:
    app = create_app(runner, authenticate=lambda _: Caller("ada", frozenset({"run", "result"})))
    async with client_of(app, None) as client:
        answer = await client.get(f"{API}/runs", params={"search": "needle"})
    assert answer.status_code == 403


# -- reasons


async def why(runner: AgentRunner, run_id: str) -> list[str]:
    """Return the reasons of a run without its error, which a list and the page of the run state in the same words."""
    row = await runner.queue.require(run_id)
    [listed] = await list_items(runner, [RunFilter(without_input=True).shortened(row)])
    assert (await run_view(runner, row))["why"] == listed["why"]
    return [each["text"] for each in listed["why"] if each["kind"] != "error"]


async def test_each_reason_is_named() -> None:
    async with Rig(park_after=0.0) as rig:
        runner = rig.runner
        rig.register(_calls, "calls")
        rig.register(_asks, "asks")
        await runner.submit("later", run_id="later", delay=60)
        assert (await why(runner, "later"))[0].startswith("due at 20")
        await runner.submit("asks", run_id="asks", concurrency_key="k")
        await runner.submit("asks", run_id="second", concurrency_key="k")
        await executed(runner)
        assert await why(runner, "asks") == ["waits for the answer to 'plan'"]
        assert await why(runner, "second") == ["blocked by run asks (asks, waiting) of concurrency key 'k'"]
        await runner.submit("calls", run_id="calls")
        await executed(runner)
        await executed(runner)
        [child] = await runner.runs(parent="calls")
        assert await why(runner, "calls") == [f"waits for run {child.run_id} (asks, waiting)"]
        assert await why(runner, str(child.run_id)) == [
            "waits for the answer to 'plan'",
            "child of run calls (calls, waiting)",
        ]
        fork = await runner.fork("asks", new_run_id="fork")
        assert fork is not None
        assert (await why(runner, "fork"))[-1] == "fork of run asks (asks, waiting)"
        await runner.submit("nobody", run_id="nobody")
        assert await why(runner, "nobody") == ["no living worker executes agent 'nobody'"]


async def test_the_runs_that_hold_the_slots_of_a_key_are_named() -> None:
    async with Rig() as rig:
        runner = rig.runner
        for number in range(6):
            await runner.submit("a", run_id=f"r{number}", concurrency_key="k", concurrency_limit=4 if number < 5 else 5)
        holders = "run r0 (a, pending), run r1 (a, pending), run r2 (a, pending) and 1 more"
        assert await why(runner, "r4") == [f"blocked by {holders} of concurrency key 'k' (4 of 4 slots)"]
        behind = "blocked by run r4 (a, pending), which comes first for concurrency key 'k'"
        assert await why(runner, "r5") == [behind], "a run with a larger limit waits for the runs before it"
        assert await why(runner, "r0") == ["no living worker executes agent 'a'"]


async def test_a_run_that_is_due_later_is_not_blocked_yet() -> None:
    async with Rig() as rig:
        await rig.runner.submit("a", run_id="first", concurrency_key="k")
        await rig.runner.submit("a", run_id="later", concurrency_key="k", delay=60)
        [due] = await why(rig.runner, "later")
        assert due.startswith("due at ")
        cast(VirtualClock, rig.clock).advance(60)
        assert await why(rig.runner, "later") == ["blocked by run first (a, pending) of concurrency key 'k'"]


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (RateLimit(1, per=60), "the rate limit of agent 'a' (1 per 60 s)"),
        (RateLimit(1, per=0.5, key="mail"), "the rate limit 'mail' (1 per 0.5 s)"),
        (RateLimit(1, per=60, key="mail", per_tenant=True), "the rate limit 'mail' for tenant 'acme' (1 per 60 s)"),
        (RateLimit(1, per=60, key="*"), "the rate limit of all agents (1 per 60 s)"),
    ],
)
async def test_the_rate_limit_that_delays_a_run_is_named(limit: RateLimit, words: str) -> None:
    async with Rig(clock=VirtualClock()) as rig:
        for number in range(2):
            await rig.runner.submit("a", run_id=f"r{number}", rate_limit=limit, tenant="acme")
        await rig.runner.queue.claim_rows("w", 600, agent_keys=["a"], limit=2)
        row = await rig.runner.queue.require("r1")
        due = f"{aware(row.due_at):%Y-%m-%d %H:%M:%S} UTC"
        assert await why(rig.runner, "r1") == [f"delayed by {words}, due at {due}"]
        cast(VirtualClock, rig.clock).advance(60)
        assert await why(rig.runner, "r1") == ["no living worker executes agent 'a'"]


async def test_the_pool_that_a_parked_run_waits_for_is_named() -> None:
    async with Rig() as rig:
        await rig.runner.submit("a", run_id="r")
        [row] = await rig.runner.queue.claim_rows("w", 600, agent_keys=["a"])
        due = rig.clock.wall() + 60
        parked = RunUpdate(row.claim_id, "waiting", rig.clock.wall(), due, 1, "pool 'budget of acme'")
        await rig.runner.queue.settle(row.run_id, parked)
        first, then = await why(rig.runner, "r")
        assert (first, then[:7]) == ("waits for room in pool 'budget of acme'", "due at ")


async def test_a_list_looks_up_a_bounded_number_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasons, "_MOST_LOOKED_UP", 3)
    async with Rig() as rig:
        parents = [str(await rig.runner.submit("p")) for _ in range(10)]
        rows = [RunRow(str(number), "a", parent_id=parent, origin="x") for number, parent in enumerate(parents)]
        reads, read = list[Any](), rig.runner.queue.read

        async def counted(name: str, *args: Any) -> Any:
            reads.append(name)
            return await read(name, *args)

        monkeypatch.setattr(rig.runner.queue, "read", counted)
        found = await reasons_of(rig.runner, rows, [None] * 10)
        assert len(reads) == 3
        assert [each[-1]["text"] for each in found[2:4]] == [
            f"child of run {parents[2]} (p, pending)",
            f"child of run {parents[3]}",
        ]
