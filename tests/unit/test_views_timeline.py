"""The timeline of a run: rows, attempts, states and pages, and the contents of one step."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import ToolCallingAgent
from agent_runtime_core._journal.record import ENDED, STARTED
from agent_runtime_core._views.problems import Problem
from agent_runtime_core._views.timeline import step_detail, timeline_view
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.loop import agent_tool
from agent_runtime_core.queue.records import RunRow
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.testing import VirtualClock
from agent_runtime_core.tools import Tool, ToolRegistry
from tests.support.runs import Rig
from tests.support.scripted_model import Scripted, asks, call


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "runs.db" if request.param == "sqlite" else None


def opened(place: Path | None) -> Rig:
    return Rig(place, park_after=0)


async def row_of(rig: Rig, run_id: str = "r") -> RunRow:
    return await rig.runner.queue.require(run_id)


async def rows(rig: Rig, run_id: str = "r") -> list[dict[str, Any]]:
    """Return all rows of a run. They are JSON."""
    found = timeline_view(await row_of(rig, run_id), await rig.records(run_id))
    assert json.loads(json.dumps(found)) == found
    assert found["total"] == len(found["items"])
    assert found["next"] is None
    items: list[dict[str, Any]] = found["items"]
    return items


async def by_label(rig: Rig, run_id: str = "r") -> dict[str, dict[str, Any]]:
    return {each["label"]: each for each in await rows(rig, run_id)}


async def detail(rig: Rig, label: str, run_id: str = "r") -> dict[str, Any]:
    """Return the contents of a step, which has all fields of its row."""
    row = (await by_label(rig, run_id))[label]
    found = step_detail(await row_of(rig, run_id), await rig.records(run_id), row["step_id"])
    assert json.loads(json.dumps(found)) == found
    assert {name: found[name] for name in row if name != "error"} == {
        name: each for name, each in row.items() if name != "error"
    }
    return found


async def test_steps_have_attempts_and_name_the_step_around_them(place: Path | None) -> None:
    async with opened(place) as rig:
        tries = 0

        async def flaky() -> int:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise ConnectionError(f"no route {tries}")
            return tries

        async def body(ctx: Any) -> Any:
            async def outer() -> int:
                await ctx.sleep(30)
                return int(await ctx.step("inner", flaky, retries=3, retry_delay=5))

            await ctx.now()
            await ctx.step("outer", outer)
            await StepExecutor(ctx).run([Step("first", lambda ctx, state: 1), Step("second", lambda ctx, state: 2)])
            await StepExecutor(ctx).map("each", lambda item: item, [7, 8])

        await rig.go(body)
        found = await rows(rig)
        assert [(each["sequence"], each["label"], each["kind"], each["state"]) for each in found] == [
            (0, "outer", "step", "done"), (1, "sleep", "sleep", "done"), (2, "inner", "step", "done"),
            (3, "first", "step", "done"), (4, "second", "step", "done"),
            (5, "each", "step", "done"), (6, "each", "step", "done"),
        ]  # fmt: skip
        outer, sleep, inner, *_ = found
        assert [each["parent"] for each in found] == [None, outer["step_id"], outer["step_id"], None, None, None, None]
        assert sleep["duration_ms"] == 30_000
        assert [(each["number"], each["state"]) for each in inner["attempts"]] == [
            (1, "failed"),
            (2, "failed"),
            (3, "done"),
        ]
        assert inner["attempts"][1]["error"] == {"type": "ConnectionError", "message": "no route 2"}
        assert (inner["error"], inner["attempts"][2]["error"]) == (None, None)
        assert inner["duration_ms"] == 10_000
        assert outer["started_at"] <= sleep["started_at"] < sleep["ended_at"] <= inner["started_at"] < outer["ended_at"]
        contents = await detail(rig, "inner")
        assert (contents["input"], contents["output"], len(contents["records"]) >= 5) == (None, 3, True)
        assert contents["idempotency_key"] == f"{(await row_of(rig)).run_id}:{inner['step_id']}"
        assert contents["digest"] == next(each.digest for each in await rig.records() if each.name == "inner")
        assert (await detail(rig, "second"))["digest"] is None  # that of its record is the number of the list


async def test_the_idempotency_key_is_that_of_the_code(place: Path | None) -> None:
    async with opened(place) as rig:

        async def body(ctx: Any) -> Any:
            return await ctx.step("charge", lambda: ctx.idempotency_key)

        await rig.go(body)
        contents = await detail(rig, "charge")
        assert contents["idempotency_key"] == contents["output"] != None  # noqa: E711


async def test_a_failed_step_has_the_traceback_of_the_run(place: Path | None) -> None:
    async with opened(place) as rig:

        async def body(ctx: Any) -> Any:
            def fail(number: int) -> None:
                raise ValueError(f"no {number}")

            try:
                await ctx.step("first", fail, 1)
            except Exception:  # noqa: BLE001 - the step may fail
                await ctx.step("second", fail, 2)

        await rig.go(body)
        found = await by_label(rig)
        assert [each["state"] for each in found.values()] == ["failed", "failed"]
        first, second = await detail(rig, "first"), await detail(rig, "second")
        assert first["error"] == {"type": "ValueError", "message": "no 1", "traceback": None}
        assert "in fail" in second["error"].pop("traceback")
        assert second["error"] == found["second"]["error"] == {"type": "ValueError", "message": "no 2"}


async def test_a_repeated_run_adds_attempts(place: Path | None) -> None:
    async with opened(place) as rig:

        async def body(ctx: Any) -> Any:
            def fail() -> None:
                raise ConnectionError("no")

            await ctx.step("send", fail)

        await rig.go(body)
        await rig.runner.resume("r")
        await rig.go(body)
        [send] = await rows(rig)
        assert [(each["number"], each["state"]) for each in send["attempts"]] == [(1, "failed"), (2, "failed")]


async def test_waits_and_approvals_are_told_apart(place: Path | None) -> None:
    async with opened(place) as rig:
        clock = rig.clock
        assert isinstance(clock, VirtualClock)

        async def body(ctx: Any) -> Any:
            await ctx.approve("pay", {"amount": 3})
            await ctx.wait_for_signal("go")
            await ctx.messages(timeout=3600)
            await ctx.wait_for_signal("never", timeout=60, key="n")

        rig.register(body)
        await rig.runner.submit("script", {}, run_id="r")
        await rig.runner.run_once()
        [pay] = await rows(rig)
        assert (pay["kind"], pay["name"], pay["state"], pay["ended_at"]) == ("approval", "signal:pay", "waiting", None)
        await rig.runner.approve("r", "pay", {"approved": True})
        [pay] = await rows(rig)
        assert pay["state"] == "waiting"  # the run has not taken the answer
        await rig.runner.run_once()
        await rig.runner.signal("r", "go", 7)
        await rig.runner.send("r", "hello")
        await rig.runner.run_once()
        found = await rows(rig)
        assert [(each["label"], each["kind"], each["state"]) for each in found] == [
            ("pay", "approval", "done"),
            ("go", "wait", "done"),
            ("messages", "wait", "done"),
            ("never", "wait", "waiting"),
        ]
        contents = await detail(rig, "pay")
        assert (contents["output"], contents["input"], contents["idempotency_key"]) == ({"approved": True}, None, None)
        assert (await detail(rig, "never"))["input"]["until"] > found[-1]["started_at"]
        clock.advance(61)
        await rig.runner.run_once()
        never = (await by_label(rig))["never"]
        assert (never["state"], never["error"]["type"]) == ("timed_out", "WaitTimeout")


async def test_open_rows_of_a_cancelled_run_do_not_look_open(place: Path | None) -> None:
    async with opened(place) as rig:

        async def waits(ctx: Any) -> Any:
            await ctx.wait_for_signal("go")

        rig.register(waits)
        await rig.runner.submit("script", {}, run_id="r")
        await rig.runner.run_once()
        assert (await rows(rig))[0]["state"] == "waiting"
        await rig.runner.cancel("r")
        [wait] = await rows(rig)
        assert (wait["state"], wait["ended_at"]) == ("cancelled", None)
        assert wait["attempts"][0]["state"] == "cancelled"
        contents = await detail(rig, "go")
        assert (contents["error"], contents["output"]) == (None, None)


async def test_a_step_that_was_cancelled_with_its_run_is_cancelled(place: Path | None) -> None:
    async with opened(place) as rig:
        begun = asyncio.Event()

        async def hang() -> None:
            begun.set()
            await asyncio.get_running_loop().create_future()

        async def body(ctx: Any) -> Any:
            await ctx.step("hang", hang)

        rig.register(body)
        await rig.runner.submit("script", {}, run_id="r")
        task = asyncio.ensure_future(rig.runner.run_once())
        await begun.wait()
        running = await rows(rig)
        await rig.runner.cancel("r")
        await task
        [row] = await rows(rig)
        assert [(each["state"], each["ended_at"]) for each in running] in ([], [("running", None)])
        assert (await row_of(rig)).status == "cancelled"
        assert (row["state"], row["attempts"][0]["state"]) == ("cancelled", "cancelled")


async def crash(rig: Rig, policy: str) -> None:
    """Leave the step "pay" of a run in doubt."""
    begun = asyncio.Event()

    async def pay() -> int:
        if begun.is_set():
            return 1
        begun.set()
        await asyncio.get_running_loop().create_future()
        return 0

    async def body(ctx: Any) -> Any:
        await ctx.step("pay", pay, on_in_doubt=policy)

    rig.register(body)
    await rig.runner.submit("script", {}, run_id="r")
    task = asyncio.ensure_future(rig.runner.run_once())
    await begun.wait()
    task.cancel()
    await asyncio.wait({task})


async def test_a_step_that_a_crash_interrupted_is_in_doubt(place: Path | None) -> None:
    async with opened(place) as rig:
        await crash(rig, "retry")
        row, records = await row_of(rig), await rig.records()
        [pay] = await rows(rig)
        assert (pay["state"], pay["ended_at"], pay["attempts"][0]["state"]) == ("in doubt", None, "in doubt")
        # As another claim has the run, before it reaches the step.
        [claimed] = timeline_view(row._replace(status="running", claim_id="another"), records)["items"]
        assert claimed["state"] == "in doubt"
        # As the claim that started the step has not ended.
        started = next(each for each in records if each.kind == STARTED)
        [own] = timeline_view(row._replace(status="running", claim_id=started.claim_id), records)["items"]
        assert own["state"] == "running"
        await rig.runner.run_once()
        [pay] = await rows(rig)
        assert (pay["state"], [each["state"] for each in pay["attempts"]]) == ("done", ["interrupted", "done"])
        assert pay["attempts"][0]["ended_at"] is None


async def test_a_step_that_is_reviewed_is_in_doubt_and_its_review_waits(place: Path | None) -> None:
    async with opened(place) as rig:
        await crash(rig, "review")
        await rig.runner.run_once()
        assert (await row_of(rig)).status == "waiting"
        pay, review = await rows(rig)
        assert (pay["kind"], pay["state"]) == ("step", "in doubt")
        assert (review["kind"], review["label"], review["state"]) == ("wait", "in_doubt:pay", "waiting")
        await rig.runner.approve("r", "in_doubt:pay", {"outcome": "done", "result": 5})
        await rig.runner.run_once()
        pay, review = await rows(rig)
        assert (pay["state"], review["state"]) == ("done", "done")
        assert (await detail(rig, "pay"))["output"] == 5


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: The city.
    """
    return f"sunny in {city}"


class Agent(ToolCallingAgent):
    """Answers by a script."""

    system_prompt = "You know the weather."

    def __init__(self, key: str, tools: ToolRegistry, *lines: Any) -> None:
        self.agent_key, self.client, self.registry = key, Scripted(*lines, cost=0.5), tools

    @property
    def key(self) -> str:
        return self.agent_key

    @property
    def tools(self) -> ToolRegistry:
        return self.registry

    def get_llm_client(self) -> Any:
        return self.client


def registry(*tools: Tool) -> ToolRegistry:
    made = ToolRegistry()
    for each in tools:
        made.register(each)
    return made


QUESTION = {"messages": [{"role": "user", "content": "How is it?"}]}


async def test_an_agent_loop_has_rows_for_model_calls_tools_and_child_agents(place: Path | None) -> None:
    def broken() -> str:
        raise LookupError("no station")

    async with opened(place) as rig:
        helper = Agent("helper", registry(), "I helped.")
        tools = registry(Tool.from_function(weather), Tool.from_function(broken), agent_tool("helper"))
        agent = Agent(
            "asker",
            tools,
            asks(call("weather", {"city": "Rome"}), call("broken")),
            asks(call("helper", {"task": "x"})),
            "Done.",
        )
        for each in (helper, agent):
            rig.registry.register(each)
        await rig.runner.execute(agent, "r", QUESTION)
        found = await rows(rig)
        found[1:3] = sorted(found[1:3], key=lambda each: each["label"] == "broken")  # the two tools run side by side
        assert [(each["label"], each["kind"], each["state"]) for each in found] == [
            ("scripted-1", "model", "done"), ("weather", "tool", "done"), ("broken", "tool", "failed"),
            ("scripted-1", "model", "done"), ("helper", "child", "done"), ("helper", "tool", "done"),
            ("scripted-1", "model", "done"),
        ]  # fmt: skip
        assert [each["tokens"] for each in found] == [120, None, None, 120, 120, None, 120]
        assert [each["cost_usd"] for each in found] == [0.5, None, None, 0.5, 0.5, None, 0.5]
        assert "no station" in found[2]["error"]["message"]
        child = await rig.runner.queue.require(found[4]["child_run_id"])
        assert (child.agent, child.parent_id) == ("helper", (await row_of(rig)).run_id)
        row, records = await row_of(rig), await rig.records()
        details = [step_detail(row, records, each["step_id"]) for each in found]
        requests = [each["input"] for each in details if each["kind"] == "model"]
        assert requests == [{"messages": each, "complete": True} for each in agent.client.asked]
        assert details[0]["output"]["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert "asked" not in details[0]["output"]
        assert (details[1]["input"], details[1]["output"]) == ({"city": "Rome"}, "sunny in Rome")
        assert (details[5]["input"], details[5]["output"]) == ({"task": "x"}, "I helped.")
        with pytest.raises(Problem):
            step_detail(row, records, "no-such-step")


async def test_a_model_call_that_failed_and_was_repeated_is_one_row(place: Path | None) -> None:
    async with opened(place) as rig:
        agent = Agent("asker", registry(), ConnectionError("cut"), "Here.")
        rig.registry.register(agent)
        await rig.runner.execute(agent, "r", QUESTION)
        [failed] = await rows(rig)
        assert (failed["state"], failed["error"]) == ("failed", {"type": "ConnectionError", "message": "cut"})
        assert failed["started_at"] == failed["ended_at"]  # the journal has no start of a model call
        assert failed["attempts"][0]["started_at"] is None
        await rig.runner.resume("r")
        await rig.runner.execute(agent, "r", QUESTION)
        [row] = await rows(rig)
        assert (row["state"], row["error"], row["tokens"]) == ("done", None, 120)
        assert [each["state"] for each in row["attempts"]] == ["failed", "done"]


async def test_a_tool_that_needs_approval_has_two_rows(place: Path | None) -> None:
    async with opened(place) as rig:
        tools = registry(Tool.from_function(weather, requires_confirmation=True))
        agent = Agent("asker", tools, asks(call("weather", {"city": "Rome"})), "Done.")
        rig.registry.register(agent)
        await rig.runner.submit("asker", QUESTION, run_id="r")
        await rig.runner.run_once()
        _, approval = await rows(rig)
        assert (approval["kind"], approval["label"], approval["state"]) == ("approval", "tool:weather", "waiting")
        await rig.runner.approve("r", "tool:weather")
        await rig.runner.run_once()
        assert [(each["kind"], each["state"]) for each in await rows(rig)] == [
            ("model", "done"), ("approval", "done"), ("tool", "done"), ("model", "done"),
        ]  # fmt: skip


async def test_rows_of_a_fork_are_copied_up_to_its_first_own_step(place: Path | None) -> None:
    async def child(ctx: Any) -> Any:
        return RunResult(usage={"total_tokens": 3})

    async def body(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        await ctx.call("child", {})
        await ctx.step("second", lambda: 2)

    async with opened(place) as rig:
        rig.register(child, "child")
        agent = rig.register(body)
        await rig.runner.execute(agent, "r")
        source = await by_label(rig)
        await rig.runner.fork("r", after_step="call:child", new_run_id="f")
        await rig.runner.execute(agent, "f")
        found = await by_label(rig, "f")
        assert {label: each["state"] for label, each in found.items()} == {
            "first": "copied",
            "child": "copied",
            "second": "done",
        }
        assert [each["started_at"] is None for each in found.values()] == [True, True, False]
        assert [each["ended_at"] is None for each in found.values()] == [True, True, False]
        assert found["child"]["child_run_id"] == source["child"]["child_run_id"]
        assert (source["child"]["tokens"], found["child"]["tokens"]) == (3, None)  # the source has paid for it


async def test_a_child_run_that_failed_is_a_failed_row(place: Path | None) -> None:
    async def child(ctx: Any) -> Any:
        raise ValueError("no luck")

    async def body(ctx: Any) -> Any:
        await ctx.call("child", {})

    async with opened(place) as rig:
        rig.register(child, "child")
        await rig.runner.execute(rig.register(body), "r")
        [row] = await rows(rig)
        assert (row["state"], row["error"]) == ("failed", {"type": "ValueError", "message": "no luck"})


async def test_a_step_without_an_end_of_a_finished_run_is_in_doubt(place: Path | None) -> None:
    async def body(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)

    async with opened(place) as rig:
        await rig.go(body)
        row, records = await row_of(rig), await rig.records()
        end = next(each for each in records if each.kind == ENDED)
        lost = end._replace(seq=end.seq - 1, kind=STARTED, name="lost", key="s:0", info=None, claim_id="dead")
        for status in ("dead", "failed", "cancelled", "succeeded"):
            [*_, last] = timeline_view(row._replace(status=status), [*records[:-1], lost, end])["items"]
            assert (last["label"], last["state"]) == ("lost", "in doubt")


async def test_a_retry_that_never_came_does_not_look_like_one(place: Path | None) -> None:
    async def body(ctx: Any) -> Any:
        async def fail() -> None:
            raise ConnectionError("no")

        await ctx.step("send", fail, retries=1)

    async with opened(place) as rig:
        await rig.go(body)
        row, records = await row_of(rig), await rig.records()
        cut = [each for each in records if each.seq <= next(one.seq for one in records if one.kind == "retrying")]
        states = {
            status: timeline_view(row._replace(status=status), cut)["items"][0]["state"]
            for status in ("running", "pending", "cancelled", "dead")
        }
        assert states == {"running": "retrying", "pending": "retrying", "cancelled": "cancelled", "dead": "failed"}


async def test_pages_go_both_ways(place: Path | None) -> None:
    async def body(ctx: Any) -> Any:
        for number in range(5):
            await ctx.step("count", lambda: 1, key=str(number))

    async with opened(place) as rig:
        await rig.go(body)
        row, records = await row_of(rig), await rig.records()
    whole = timeline_view(row, records)["items"]
    for newest_first in (False, True):
        paged, after = list[Any](), -1
        while True:
            page = timeline_view(row, records, after, 2, newest_first)
            assert (page["total"], len(page["items"]) <= 2) == (5, True)
            paged += page["items"]
            if page["next"] is None:
                break
            after = page["next"]
        assert paged == (whole[::-1] if newest_first else whole)
    assert timeline_view(row, records, 99) == {"items": [], "next": None, "total": 5}
    assert timeline_view(row, records, 0, 2, newest_first=True)["items"] == []
    assert timeline_view(row, [], -1, 2) == {"items": [], "next": None, "total": 0}
