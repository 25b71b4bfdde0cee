"""The views of a store: runs, steps, journals, messages, plans, comparisons, usage, the queue and agents."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, ToolCallingAgent, register_type
from agent_runtime_core._core.codec.tagged import REGISTRY
from agent_runtime_core._journal.record import ENDED, STARTED, Record
from agent_runtime_core._views import plan, runs
from agent_runtime_core._views.attempts import step_views, steps_of
from agent_runtime_core._views.compare import compare_view
from agent_runtime_core._views.export import export
from agent_runtime_core._views.journal import journal_view
from agent_runtime_core._views.messages import messages_view
from agent_runtime_core._views.overview import agents_view, queue_view
from agent_runtime_core._views.plain import iso_time
from agent_runtime_core._views.plan import plan_view
from agent_runtime_core._views.runs import list_items, run_view, summary, usage_view
from agent_runtime_core._views.timeline import timeline_view
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.orchestrator import Orchestrator
from agent_runtime_core.planning import Plan, PlanStep, RuleBasedPlanner
from agent_runtime_core.queue.records import RunFilter, RunRow
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import RunnerConfig
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.tools import Tool, ToolRegistry
from tests.support.backends import SERVERS, backends
from tests.support.runs import Script
from tests.support.scripted_model import Scripted, asks, call

HOSTILE = "x'\"; DROP TABLE arc_runs; -- \u202e%_*?[a]{b}\U0001f600"
Work = Callable[[Any], Awaitable[Any]]


class Store:
    """A runner on one store, and the agents that are registered in it."""

    def __init__(self, runner: AgentRunner) -> None:
        self.runner = runner

    async def run(self, body: Work, run_id: str = "r", key: str = "script", **options: Any) -> RunRow:
        """Execute a run and return its row."""
        agent = Script(body, key)
        self.runner.registry.unregister(key)
        self.runner.registry.register(agent)
        await self.runner.execute(agent, run_id, **options)
        return await self.row(run_id)

    async def row(self, run_id: str) -> RunRow:
        return await self.runner.queue.require(run_id)

    async def records(self, row: RunRow) -> Any:
        return await self.runner.state_store.records(row.run_id)


@pytest.fixture(params=backends(["memory", "sqlite", "redis", "postgres"], default={"sqlite", "redis"}))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in SERVERS:
        return str(request.getfixturevalue(f"{request.param}_url"))
    return "memory://" if request.param == "memory" else str(tmp_path / "runs.db")


def opened(place: str) -> AgentRunner:
    config = RunnerConfig(max_retries=1, park_after=0, lease_ttl_seconds=600)
    return AgentRunner.open(place, config=config, registry=Registry())


async def _two_steps(ctx: Any) -> Any:
    await ctx.step("fetch", lambda: {"page": 1})
    await ctx.step("count", lambda: 4, key="words")
    return 4


async def _failing(ctx: Any) -> Any:
    await ctx.step("fetch", lambda: {"page": 1})

    def fail() -> None:
        raise ConnectionError("no route to host")

    await ctx.step("send", fail)


async def test_a_run_has_the_fields_of_the_api_and_no_type_tags(place: str) -> None:
    async def body(ctx: Any) -> Any:
        await ctx.step("when", lambda: Decimal("1.50"))
        return RunResult({"sum": Decimal("2.5"), "raw": b"\x00\x01", "some": {3}}, usage={"total_tokens": 7})

    async with opened(place) as runner:
        store = Store(runner)
        conversation = "5f0a3c1e-7d44-4b7e-9a53-2c1f0b6e8d91"
        given = {"amount": Decimal("9.99"), "limits": {"max_tokens": 100}, "conversation_id": conversation}
        row = await store.run(body, HOSTILE, input_data=given, metadata={"tag": HOSTILE})
        found = await run_view(runner, row)
    assert json.loads(json.dumps(found)) == found
    assert (found["run_id"], found["key"], found["agent"]) == (row.run_id, HOSTILE, "script")
    assert (found["status"], found["state"], found["error"]) == ("completed", "succeeded", None)
    assert found["result"] == {"sum": "2.5", "raw": "AAE=", "some": [3]}
    assert (found["input"]["amount"], found["metadata"]) == ("9.99", {"tag": HOSTILE})
    assert (found["usage"], found["limits"]) == ({"total_tokens": 7}, {"max_tokens": 100})
    assert (found["trace_id"], found["conversation_id"]) == (row.run_id.replace("-", ""), conversation)
    assert [each["name"] for each in found["steps"]] == ["history", "when"]
    assert {"attempt", "generation", "reason", "worker", "parent", "children", "priority", "waiting_for"} < found.keys()
    assert found["created_at"].endswith("+00:00")


async def test_a_run_that_failed_says_why(place: str) -> None:
    async with opened(place) as runner:
        store = Store(runner)
        row = await store.run(_failing)
        found = await run_view(runner, row)
        [item] = await list_items(runner, await runner.queue.find(RunFilter(limit=5)))
    assert (found["status"], found["state"], found["result"]) == ("failed", "failed", None)
    assert found["error"].startswith("StepExecutionError: ")
    assert found["error_info"]["message"] in found["error"]
    assert (item["state"], item["error"]["type"]) == ("failed", "StepExecutionError")
    assert item["error"].keys() == {"type", "message"}


async def test_types_that_are_not_registered_here_are_shown(place: str) -> None:
    @dataclass
    class Order:
        number: int
        price: Decimal

    register_type(Order)

    async def body(ctx: Any) -> Any:
        await ctx.step("order", lambda: Order(1, Decimal("2")))
        return RunResult({"order": Order(2, Decimal("3"))}, final_messages=[{"role": "user", "content": "hello"}])

    async with opened(place) as runner:
        row = await Store(runner).run(body, input_data={"order": Order(3, Decimal("4"))})
        del REGISTRY.types[REGISTRY.names.pop(Order)]  # as in a process that does not know the type
        found = await run_view(runner, row)
        records = await runner.state_store.records(row.run_id)
        stored = journal_view(records)["items"]
        messages = await messages_view(runner, row)
        compared = await compare_view(runner, row, row)
    assert found["input"]["order"] == {"number": 3, "price": "4"}
    assert found["result"]["order"] == {"number": 2, "price": "3"}
    assert next(each for each in stored if (each["name"], each["kind"]) == ("order", "done"))["result"] == {
        "number": 1,
        "price": "2",
    }
    assert messages["items"] == [{"role": "user", "content": "hello"}]
    assert compared["steps"][0]["run"]["result"] == {"number": 1, "price": "2"}
    assert compared["runs"]["other"]["input"] == found["input"]
    assert compared["input_changed"] is False


async def test_a_planned_run_has_the_steps_and_the_result_of_its_orchestrator(place: str) -> None:
    async with opened(place) as runner, Orchestrator(planner=RuleBasedPlanner(), runner=runner) as orchestrator:
        for prompt in ("add 12 and 30, then remember the result as a to-do", "divide 1 by 0"):
            created = await orchestrator.create_run(prompt=prompt)
            answer = (await orchestrator.wait(created.run_id)).to_dict()
            row = await runner.queue.require(created.run_id)
            found = await run_view(runner, row)
            assert {name: found[name] for name in ("run_id", "status", "steps", "result", "error")} == {
                name: answer[name] for name in ("run_id", "status", "steps", "result", "error")
            }
            assert answer["steps"]


async def test_a_page_of_runs_needs_three_reads(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(ctx: Any) -> Any:
        return RunResult({"text": "t" * 20_000}, usage={"total_tokens": 5, "cost_usd": 0.25})

    async with opened(place) as runner:
        store, reads = Store(runner), list[str]()
        for number in range(3):
            await store.run(body, f"done-{number}", f"{HOSTILE}{number}")
        await store.runner.submit("nobody", {"x": 1}, run_id="later")
        for each in (runner.queue, runner.state_store):
            monkeypatch.setattr(each, "read", _counted(each.read, reads))
        wanted = RunFilter(limit=3, newest_first=True, light=True)
        rows = await runner.queue.find(wanted)
        page = await list_items(runner, rows)
        assert reads == ["find", "endings", "processes"]
        before = (rows[-1].created_at, rows[-1].arrival)
        rest = await list_items(runner, await runner.queue.find(wanted._replace(before=before)))
    assert [each["key"] for each in page + rest] == ["later", "done-2", "done-1", "done-0"]
    waiting, done = page[:2]
    assert (waiting["state"], waiting["tokens"], waiting["duration_seconds"]) == ("pending", None, None)
    assert (done["agent"], done["tokens"], done["cost_usd"]) == (f"{HOSTILE}2", 5, 0.25)
    assert done["age_seconds"] >= done["duration_seconds"] >= 0


def _counted(read: Callable[..., Awaitable[Any]], reads: list[str]) -> Callable[..., Awaitable[Any]]:
    async def counting(what: str, *args: Any) -> Any:
        reads.append(what)
        return await read(what, *args)

    return counting


@pytest.mark.redis
async def test_the_ends_of_runs_come_without_their_results(redis_url: str) -> None:
    async def body(ctx: Any) -> Any:
        return RunResult({"text": "t" * 20_000}, usage={"total_tokens": 5})

    async with opened(redis_url) as runner:
        row = await Store(runner).run(body)
        [record] = (await runner.state_store.read("endings", (row.run_id,))).values()
    assert (record.name, record.result) == ("succeeded", None)


async def test_the_end_of_an_earlier_generation_is_not_that_of_the_run(place: str) -> None:
    async def body(ctx: Any) -> Any:
        raise ValueError("first")

    async with opened(place) as runner:
        row = await Store(runner).run(body)
        await runner.resume(row.run_id)
        [item] = await list_items(runner, await runner.queue.find(RunFilter(limit=5)))
        found = await run_view(runner, await runner.queue.require(row.run_id))
        short = await summary(runner, await runner.queue.require(row.run_id), end=True)
    assert (item["state"], item["error"]) == ("pending", None)
    assert (found["state"], found["error"], found["generation"]) == ("pending", None, 2)
    assert (short["status"], short["error"], short["usage"]) == ("pending", None, None)


async def test_steps_are_paged_and_name_the_step_around_them(place: str) -> None:
    async def body(ctx: Any) -> Any:
        async def outer() -> int:
            await ctx.step("inner", lambda: 1)
            return 2

        await ctx.step("outer", outer)
        await ctx.step("last", lambda: 3, key=HOSTILE)

    async with opened(place) as runner:
        store = Store(runner)
        row = await store.run(body)
        records = await store.records(row)
    whole = step_views(row, records)
    assert whole["next"] is None
    by_name = {each["name"]: each for each in whole["items"]}
    assert by_name["inner"]["parent"] == by_name["outer"]["step_id"]
    assert (by_name["last"]["key"], by_name["last"]["parent"], by_name["last"]["state"]) == (HOSTILE, None, "done")
    paged, after = list[Any](), -1
    while True:
        page = step_views(row, records, after, 1)
        paged += page["items"]
        if page["next"] is None:
            break
        after = page["next"]
    assert paged == whole["items"]
    assert [each["sequence"] for each in paged] == [0, 1, 2]


async def test_a_journal_is_paged(place: str) -> None:
    async with opened(place) as runner:
        store = Store(runner)
        row = await store.run(_two_steps)
        records = await store.records(row)
    whole = journal_view(records)
    assert [each["seq"] for each in whole["items"]] == [each.seq for each in records]
    first = journal_view(records, limit=2)
    later = journal_view(records, first["next"])
    assert first["items"] + later["items"] == whole["items"]
    assert (whole["next"], later["next"]) == (None, None)
    done = next(each for each in whole["items"] if each["name"] == "fetch" and each["kind"] == "done")
    assert done["result"] == {"page": 1}


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: The city.
    """
    return f"sunny in {city}"


class Weather(ToolCallingAgent):
    """Answers questions about the weather.

    It knows no more.
    """

    key = "weather"
    system_prompt = "You know the weather."
    tools = ToolRegistry()

    def __init__(self, *lines: Any) -> None:
        self.client = Scripted(*lines, cost=0.5)

    def get_llm_client(self) -> Any:
        return self.client


Weather.tools.register(Tool.from_function(weather))


async def test_messages_have_tool_calls_and_results_while_the_run_is_executed_and_after_it(place: str) -> None:
    question = {"role": "user", "content": "How is it in Rome?"}
    agent = Weather(asks(call("weather", {"city": "Rome"})), "It is sunny.")
    async with opened(place) as runner:
        runner.registry.register(agent)
        await runner.execute(agent, "r", input_data={"messages": [question]})
        row = await runner.queue.require("r")
        final = (await messages_view(runner, row))["items"]
        live = (await messages_view(runner, row._replace(status="running")))["items"]
        page = await messages_view(runner, row, after=0, limit=2)
        by_model = await usage_view(runner, "model")
        found = await run_view(runner, row)
        steps = step_views(row, await runner.state_store.records(row.run_id))["items"]
    assert [each["role"] for each in final] == ["user", "assistant", "tool", "assistant"]
    assert final[2]["content"] == "sunny in Rome"
    assert live == final
    assert (page["items"], page["next"]) == (final[1:3], 2)
    assert by_model["items"] == [
        {
            "model": "scripted-1",
            "runs": 1,
            "tokens": 240,
            "prompt_tokens": 200,
            "completion_tokens": 40,
            "cost_usd": 1.0,
        }
    ]
    assert found["usage"]["cost_usd"] == 1.0
    assert [each["cost_usd"] for each in steps if each["name"] == "model"] == [0.5, 0.5]


async def test_the_messages_of_a_conversation_are_whole(place: str) -> None:
    conversation = "5f0a3c1e-7d44-4b7e-9a53-2c1f0b6e8d91"
    long = "word " * 20_000  # so long that the result of the second run refers to the conversation
    async with opened(place) as runner:
        agent = Weather(long, "And again.")
        runner.registry.register(agent)
        for number in range(2):
            given = {"messages": [{"role": "user", "content": f"q{number}"}], "conversation_id": conversation}
            await runner.execute(agent, f"r{number}", input_data=given)
        row = await runner.queue.require("r1")
        messages = (await messages_view(runner, row))["items"]
        live = (await messages_view(runner, row._replace(status="running")))["items"]
        expected = (await runner.wait("r1")).final_messages
    assert [each["content"] for each in messages] == ["q0", long, "q1", "And again."]
    assert messages == expected
    assert [each["content"] for each in live] == ["q0", long, "q1", "And again."]


async def test_the_plan_of_a_run_is_a_graph(place: str) -> None:
    async with opened(place) as runner, Orchestrator(planner=RuleBasedPlanner(), runner=runner) as orchestrator:
        created = await orchestrator.create_run(prompt="add 12 and 30, then remember the result as a to-do")
        await orchestrator.wait(created.run_id)
        found = await plan_view(runner, await runner.queue.require(created.run_id))
        none = await plan_view(runner, await Store(runner).run(_two_steps))
    assert [(each["id"], each["state"], each["tool"]) for each in found["nodes"]] == [
        ("step_1", "done", "calculator"),
        ("step_2", "done", "todo_store"),
    ]
    assert found["edges"] == [{"from": "step_1", "to": "step_2"}]
    assert (none["nodes"], none["edges"]) == ([], [])


async def test_a_graph_of_steps_has_its_dependencies_as_edges(place: str) -> None:
    def step(name: str, *needs: str) -> Step:
        return Step(name, lambda ctx, state: name, depends_on=needs)

    async def graph(ctx: Any) -> Any:
        steps = [step("a"), step("b"), step("c", "a", "b"), step("d", "c"), step("e", "b")]
        await StepExecutor(ctx, max_concurrency=2).run(steps)

    async def sequence(ctx: Any) -> Any:
        await StepExecutor(ctx).run([step("x"), step("y"), step("z")])

    async with opened(place) as runner:
        store = Store(runner)
        views = [
            await plan_view(runner, await store.run(body, run_id)) for body, run_id in ((graph, "g"), (sequence, "s"))
        ]
    assert [_named_edges(each) for each in views] == [
        {("a", "c"), ("b", "c"), ("c", "d"), ("b", "e")},
        {("x", "y"), ("y", "z")},
    ]
    assert {each["state"] for view in views for each in view["nodes"]} == {"done"}


async def test_a_list_that_stopped_has_the_skipped_steps_and_the_number_of_the_others(place: str) -> None:
    def fail(ctx: Any, state: Any) -> None:
        raise ValueError("no")

    def good(ctx: Any, state: Any) -> int:
        return 1

    async def graph(ctx: Any) -> Any:
        steps = [Step("a", good), Step("b", fail, depends_on=["a"])]
        steps += [Step("c", good, depends_on=["b"]), Step("d", good, depends_on=["c"])]
        await StepExecutor(ctx, max_concurrency=1).run(steps)

    async def sequence(ctx: Any) -> Any:
        await StepExecutor(ctx).run([Step("x", good), Step("y", fail), Step("z", good)])

    async with opened(place) as runner:
        store = Store(runner)
        failed = await plan_view(runner, await store.run(graph, "g"))
        listed = await plan_view(runner, await store.run(sequence, "s"))
    assert {each["name"]: each["state"] for each in failed["nodes"]} == {
        "a": "done", "b": "failed", "c": "skipped", "d": "skipped",
    }  # fmt: skip
    assert _named_edges(failed) == {("a", "b"), ("b", "c"), ("b", "d")}
    assert (failed["not_started"], failed["complete"]) == (0, True)
    assert [each["name"] for each in listed["nodes"]] == ["x", "y"]
    assert (listed["not_started"], listed["complete"]) == (1, True)


async def test_a_plan_has_only_so_many_nodes(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def sequence(ctx: Any) -> Any:
        await StepExecutor(ctx).run([Step(name, lambda ctx, state: 1) for name in "abcde"])

    monkeypatch.setattr(plan, "MOST_NODES", 3)
    async with opened(place) as runner:
        found = await plan_view(runner, await Store(runner).run(sequence))
    assert ([each["name"] for each in found["nodes"]], found["complete"]) == (["a", "b", "c"], False)
    assert _named_edges(found) == {("a", "b"), ("b", "c")}


def _named_edges(view: dict[str, Any]) -> set[tuple[str, str]]:
    names = {each["id"]: each["name"] for each in view["nodes"]}
    return {(names[each["from"]], names[each["to"]]) for each in view["edges"]}


async def test_two_runs_are_compared_step_by_step(place: str) -> None:
    def steps(*named: tuple[str, Any]) -> Work:
        async def body(ctx: Any) -> Any:
            for name, value in named:
                await ctx.step(name, lambda value=value: value)

        return body

    async with opened(place) as runner:
        store = Store(runner)
        row = await store.run(steps(("a", 1), ("b", 2), ("c", 3)), "one")
        other = await store.run(steps(("a", 1), ("b", 5), ("d", 4), ("c", 3)), "two")
        found = await compare_view(runner, row, other)
        same = await compare_view(runner, row, row)
    assert [(each["name"], each["outcome"]) for each in found["steps"]] == [
        ("a", "same"), ("b", "changed"), ("d", "only_in_other"), ("c", "same"),
    ]  # fmt: skip
    assert found["first_difference"] == 1
    assert found["steps"][1]["changed"][0] == "result"
    assert (found["steps"][1]["run"]["result"], found["steps"][1]["other"]["result"]) == (2, 5)
    assert (same["first_difference"], same["counts"]["same"]) == (None, 3)


async def test_a_fork_is_the_same_up_to_its_first_new_step(place: str) -> None:
    async with opened(place) as runner:
        store = Store(runner)
        row = await store.run(_failing, "one")
        other = await runner.queue.require(await runner.fork("one", new_run_id="two"))
        found = await compare_view(runner, row, other)
    assert [(each["name"], each["outcome"]) for each in found["steps"]] == [("fetch", "same"), ("send", "only_in_run")]


async def test_a_comparison_says_which_run_is_the_fork(place: str) -> None:
    async with opened(place) as runner:
        store = Store(runner)
        row = await store.run(_two_steps, "one")
        fork = await runner.queue.require(await runner.fork("one", "fetch", new_run_id="two"))
        unrelated = await store.run(_two_steps, "three")
        views = [await compare_view(runner, *pair) for pair in ((row, fork), (fork, row), (row, unrelated))]
    expected = {"fork": fork.run_id, "source": row.run_id, "step": "fetch"}
    for view in views[:2]:
        assert expected.items() <= view["fork_of"].items()
        assert view["steps"][view["fork_of"]["index"]]["name"] == "fetch"
    assert views[2]["fork_of"] is None


async def test_open_steps_have_the_states_of_the_timeline(place: str) -> None:
    async def body(ctx: Any) -> Any:
        await ctx.wait_for_signal("go")

    async with opened(place) as runner:
        runner.registry.register(Script(body))
        await runner.submit("script", {}, run_id="r")
        assert await runner.run_once()
        states = []
        for _ in range(2):
            row = await runner.queue.require("r")
            records = await runner.state_store.records(row.run_id)
            views = step_views(row, records)["items"], timeline_view(row, records)["items"], steps_of(row, records)
            states.append([each[-1]["state"] for each in views])
            await runner.cancel("r")
    assert states == [["waiting"] * 3, ["cancelled"] * 3]


async def test_a_recorded_value_is_a_step_without_a_row_in_the_timeline(place: str) -> None:
    async def body(ctx: Any) -> Any:
        await ctx.step("one", lambda: 1)
        await ctx.now()

    async with opened(place) as runner:
        row = await Store(runner).run(body)
        records = await runner.state_store.records(row.run_id)
        assert [each["name"] for each in timeline_view(row, records)["items"]] == ["one"]
        first, second = step_views(row, records)["items"]
        assert [each["state"] for each in (first, second)] == ["done", "done"]
        assert [each["name"] for each in steps_of(row, records)] == [first["name"], second["name"]]


async def test_usage_is_summed_by_agent_and_day(place: str) -> None:
    async def body(ctx: Any) -> Any:
        return RunResult(usage={"total_tokens": 5, "prompt_tokens": 3, "completion_tokens": 2, "cost_usd": 0.25})

    async with opened(place) as runner:
        store = Store(runner)
        for number in range(3):
            await store.run(body, f"r{number}", "cheap" if number else HOSTILE)
        by_agent = await usage_view(runner)
        by_day = await usage_view(runner, "day")
        before = await usage_view(runner, until=1.0, since=0.0)
    assert [(each["agent"], each["runs"], each["tokens"], each["cost_usd"]) for each in by_agent["items"]] == [
        ("cheap", 2, 10, 0.5),
        (HOSTILE, 1, 5, 0.25),
    ]
    assert by_agent["complete"]
    [day] = by_day["items"]
    assert (day["runs"], day["cost_usd"], day["day"]) == (3, 0.75, by_day["until"][:10])
    assert (before["items"], before["total"]["runs"]) == ([], 0)


async def test_the_queue_tells_what_waits_and_who_works(place: str) -> None:
    async with opened(place) as runner:
        for number in range(3):
            await runner.submit("sender", {"n": number}, concurrency_key=HOSTILE)
        await runner.submit("later", {}, delay=3600)
        [claimed] = await runner.queue.claim_rows(HOSTILE, 600, agent_keys=["sender"])
        found = await queue_view(runner)
    assert found["by_status"] == {"pending": 3, "running": 1}
    assert found["by_agent"]["sender"] == {"pending": 2, "running": 1}
    assert (found["due_later"], found["complete"], found["total"]) == (1, True, 4)
    assert found["oldest_pending_seconds"] is None, "no run waits for a worker"
    [key] = found["concurrency_keys"]
    assert (key["concurrency_key"], key["run_id"], key["queued"]) == (HOSTILE, claimed.run_id, 2)
    [worker] = found["workers"]
    assert (worker["worker"], worker["runs"], worker["expired"]) == (HOSTILE, 1, 0)
    assert worker["lease_ends_at"] > iso_time(claimed.created_at)


async def test_the_oldest_pending_run_is_one_that_is_due(place: str) -> None:
    async with opened(place) as runner:
        await runner.submit("later", {}, delay=3600)
        assert (await queue_view(runner))["oldest_pending_at"] is None
        await runner.submit("sender", {}, run_id="first", concurrency_key="k")
        await runner.queue.claim_rows("w", 600)
        await runner.submit("sender", {}, run_id="blocked", concurrency_key="k")
        assert (await queue_view(runner))["oldest_pending_at"] is None
        await runner.submit("sender", {}, run_id="due")
        await runner.submit("sender", {})
        found, row = await queue_view(runner), await runner.queue.require("due")
    assert found["oldest_pending_at"] == iso_time(row.created_at)


async def test_agents_have_tools_and_schemas(place: str) -> None:
    async with opened(place) as runner:
        runner.registry.register(Weather())
        await runner.submit("elsewhere", {})
        found = await agents_view(runner, runner.registry)
    assert [(each["key"], each["registered"]) for each in found] == [("weather", True), ("elsewhere", False)]
    assert found[0]["description"] == "Answers questions about the weather."
    assert found[0]["tools"][0]["parameters"]["required"] == ["city"]
    assert found[1]["runs"] == {"pending": 1}


async def test_a_property_that_fails_hides_no_agent(place: str) -> None:
    class Needy(Weather):
        key = "needy"

        @property
        def tools(self) -> Any:  # type: ignore[override]
            raise LookupError("no run")

    async with opened(place) as runner:
        runner.registry.register(Needy())
        [found] = await agents_view(runner, runner.registry)
    assert (found["key"], found["tools"], found["description"]) == ("needy", [], None)


async def test_a_run_that_waits_for_a_person_says_for_what(place: str) -> None:
    schema = {"type": "boolean"}

    async def body(ctx: Any) -> Any:
        await ctx.approve(HOSTILE, {"amount": 3}, schema=schema)

    async with opened(place) as runner:
        runner.registry.register(Script(body))
        await runner.submit("script", {}, run_id="r")
        assert await runner.run_once()
        [asked] = await runner.approvals()
        row = await runner.queue.require("r")
        found = await run_view(runner, row)
        [item] = await list_items(runner, await runner.queue.find(RunFilter(limit=5, light=True)))
        counted = await queue_view(runner)
        await runner.approve("r", HOSTILE, True)
        answered = await run_view(runner, await runner.queue.require("r"))
    assert (found["state"], found["status"]) == ("waiting", "running")
    assert found["waiting_for"] == [{"kind": "approval", "name": HOSTILE}]
    [question] = found["questions"]
    assert (question["run_id"], question["request_id"]) == (row.run_id, asked.request_id)
    assert (question["name"], question["details"], question["schema"]) == (HOSTILE, {"amount": 3}, schema)
    assert answered["questions"] == []
    assert item["waiting_for"] == [HOSTILE]
    assert counted["waiting"] == {"approval": 1}
    assert answered["waiting_for"] == []


async def test_a_run_and_its_child_name_each_other(place: str) -> None:
    async def inner(ctx: Any) -> Any:
        return RunResult(usage={"total_tokens": 3})

    async def outer(ctx: Any) -> Any:
        await ctx.call("inner", {}, key="c")

    async with opened(place) as runner:
        runner.registry.register(Script(inner, "inner"))
        row = await Store(runner).run(outer)
        found = await run_view(runner, row)
        [child] = found["children"]
        below = await run_view(runner, await runner.queue.require(child["run_id"]))
        [item] = await list_items(runner, await runner.queue.find(RunFilter(limit=5, parent=row.run_id)))
    assert (child["agent"], child["state"]) == ("inner", "succeeded")
    assert (below["parent"], item["parent"], item["run_id"]) == (row.run_id, row.run_id, child["run_id"])


async def test_a_run_that_was_cancelled_before_its_start_has_failed(place: str) -> None:
    async with opened(place) as runner:
        await runner.submit("nobody", {}, run_id="r")
        await runner.cancel("r")
        found = await run_view(runner, await runner.queue.require("r"))
        [item] = await list_items(runner, await runner.queue.find(RunFilter(limit=5)))
    assert (found["status"], found["state"], found["error"], found["usage"]) == ("failed", "cancelled", "cancelled", {})
    assert (item["state"], item["error"], item["tokens"]) == ("cancelled", None, None)


async def test_limits_are_the_strictest_and_then_those_of_resume(place: str) -> None:
    async def body(ctx: Any) -> Any:
        raise ValueError("no")

    async with opened(place) as runner:
        store = Store(runner)
        row = await store.run(body, input_data={"limits": {"max_tokens": 100, "max_turns": 3}})
        first = await run_view(runner, row)
        await runner.resume("r", limits={"max_tokens": 500})
        second = await run_view(runner, await store.row("r"))
    assert first["limits"] == {"max_tokens": 100, "max_turns": 3}
    assert second["limits"] == {"max_tokens": 500, "max_turns": 3}


async def test_steps_of_a_plan_that_have_not_started_are_pending(place: str) -> None:
    made = Plan([PlanStep(1, "calculator", {"a": 1}), PlanStep(2, "calculator", {"a": "{{step_1.result}}"})], HOSTILE)

    async def body(ctx: Any) -> Any:
        await ctx.step("plan", lambda: {"plan": made.to_dict(), "skipped": []})  # as a conversation turn records it

    async with opened(place) as runner:
        found = await plan_view(runner, await Store(runner).run(body))
    assert (found["goal"], [each["state"] for each in found["nodes"]]) == (HOSTILE, ["pending", "pending"])
    assert found["edges"] == [{"from": "step_1", "to": "step_2"}]


async def test_a_step_without_an_end_is_in_doubt_after_its_run_has_failed(place: str) -> None:
    async with opened(place) as runner:
        store = Store(runner)
        row = await store.run(_two_steps)
        records = [each for each in await store.records(row) if each.kind != ENDED]
        started = Record(records[-1].seq + 1, STARTED, "lost", "s:1", 1, t=row.created_at)
        [*_, last] = step_views(row._replace(status="dead"), [*records, started])["items"]
    assert (last["name"], last["state"], last["ended_at"], last["attempts"]) == ("lost", "in doubt", None, 1)


async def test_usage_that_counts_only_the_newest_runs_says_so(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(runs.MOST_RUNS, "agent", 2)
    monkeypatch.setattr(runs, "_PAGE", 2)
    async with opened(place) as runner:
        for number in range(3):
            await runner.submit("a", {"n": number})
        found = await usage_view(runner)
    assert (found["complete"], found["total"]["runs"]) == (False, 2)
    with pytest.raises(InvalidArgument, match="unknown by 'week'"):
        await usage_view(runner, "week")


async def test_the_events_of_an_export_are_read_in_pages(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(ctx: Any) -> Any:
        for number in range(100):
            await ctx.emit("row.read", {"n": number, "amount": Decimal("1.5")})

    asked = list[tuple[int, int | None]]()
    async with opened(place) as runner:
        row = await Store(runner).run(body)
        read = runner.event_bus.get_events

        async def counted(run_id: Any, since: int = 0, limit: int | None = None) -> Any:
            asked.append((since, limit))
            return await read(run_id, since, limit)

        monkeypatch.setattr(runner.event_bus, "get_events", counted)
        lines = [each async for each in export(runner, row)]
    events = [each for each in lines if each["kind"] == "event"]
    assert [each["sequence"] for each in events] == list(range(102))
    assert events[1]["payload"] == {"n": 0, "amount": "1.5"}
    assert {limit for _, limit in asked} == {32}
    assert len({since for since, _ in asked}) == len(asked) > 3
    assert lines[0]["kind"] == "run"
    assert json.loads(json.dumps(lines)) == lines
