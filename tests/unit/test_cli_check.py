"""`check` finds the runs that changed code cannot resume, names the cure, and has no effect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import RunResult, Step, StepExecutor
from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.interfaces import AgentRuntime
from agent_runtime_core.llm import use_llm_client
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.runner.resume_check import ResumeCheck, check_resume
from agent_runtime_core.testing import MockLLMClient
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.backends import POSTGRES, SERVERS
from tests.support.command_line import Commands, on, process
from tests.support.runs import Script

Code = Callable[[Any], Awaitable[Any]]


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.getfixturevalue(f"{request.param}_url") if request.param in SERVERS else tmp_path / "runs.db")


async def stored(runner: AgentRunner, run_id: str = "r") -> list[Any]:
    """All that is stored of a run."""
    row = await runner.queue.require(run_id)
    events = [(each.sequence, each.event_type) for each in await runner.event_bus.get_events(row.run_id)]
    return [row, await runner.state_store.records(row.run_id), events, await runner.queue.mail(row.run_id)]


def checked(url: str, old: AgentRuntime | Code, new: AgentRuntime | Code, timeout: float = 10) -> ResumeCheck:
    """Execute a run with the old code as far as it gets, and check the new code. The store must stay as it is."""

    async def check(runner: AgentRunner) -> ResumeCheck:
        before = old if isinstance(old, AgentRuntime) else Script(old)
        after = new if isinstance(new, AgentRuntime) else Script(new)
        runner.registry.register(before)
        await runner.submit(before.key, {"messages": [{"role": "user", "content": "hi"}]}, run_id="r")
        assert await runner.run_once()
        was = await stored(runner)
        found = await check_resume(runner, was[0], after, timeout)
        assert await stored(runner) == was
        return found

    found: ResumeCheck = on(url, check)
    return found


async def order(ctx: Any) -> Any:
    await ctx.step("fetch", int)
    await ctx.step("price", int)
    await ctx.now()
    await ctx.approve("plan")
    return await ctx.step("ship", int)


def test_the_same_code_resumes(url: str) -> None:
    assert checked(url, order, order) == ResumeCheck("resumes")


def test_a_run_that_was_answered_resumes_at_its_approval(url: str) -> None:
    async def check(runner: AgentRunner) -> ResumeCheck:
        runner.registry.register(Script(order))
        await runner.submit("script", {}, run_id="r")
        assert await runner.run_once()
        await runner.signal("r", "plan")
        was = await stored(runner)
        found = await _again(runner, order)
        assert await stored(runner) == was
        return found

    assert on(url, check) == ResumeCheck("resumes", stopped_at="signal:plan")


def test_a_renamed_step(url: str) -> None:
    async def new(ctx: Any) -> Any:
        await ctx.step("fetch", int)
        await ctx.step("cost", int)
        await ctx.now()
        await ctx.approve("plan")

    found = checked(url, order, new)
    assert (found.outcome, found.cure) == ("mismatch", 'ctx.renamed("price", "cost") before the step')
    assert found.reason == "the journal has step 'price' where the code has step 'cost'"


def test_an_inserted_step(url: str) -> None:
    async def new(ctx: Any, patched: bool = False) -> Any:
        await ctx.step("fetch", int)
        if not patched or await ctx.patched("check"):
            await ctx.step("check", int)
        await ctx.step("price", int)
        await ctx.now()
        await ctx.approve("plan")

    found = checked(url, order, new)
    assert (found.outcome, found.cure) == ("mismatch", 'if await ctx.patched("NAME"): new code, else: old code')

    async def cured(ctx: Any) -> Any:
        return await new(ctx, patched=True)

    check = on(url, lambda runner: _again(runner, cured))
    assert check == ResumeCheck("resumes")


async def _again(runner: AgentRunner, code: Code) -> ResumeCheck:
    return await check_resume(runner, await runner.queue.require("r"), Script(code), 10)


@pytest.mark.parametrize("cured", [False, True])
def test_a_renamed_step_of_a_list(url: str, cured: bool) -> None:
    async def one(ctx: Any, state: Any) -> int:
        return 1

    async def fails(ctx: Any, state: Any) -> None:
        raise ConnectionError

    async def old(ctx: Any) -> Any:
        return await StepExecutor(ctx).run([Step("fetch", one), Step("price", one), Step("ship", fails)])

    async def new(ctx: Any) -> Any:
        if cured:
            ctx.renamed("price", "cost")
        return await StepExecutor(ctx).run([Step("fetch", one), Step("cost", one), Step("ship", fails)])

    found = checked(url, old, new)
    if cured:
        assert found == ResumeCheck("resumes", stopped_at="ship")
    else:
        assert (found.outcome, found.cure) == ("mismatch", 'ctx.renamed("price", "cost") before the step')


def test_code_that_fails_between_steps(url: str) -> None:
    async def new(ctx: Any) -> Any:
        await ctx.step("fetch", int)
        raise LookupError("gone")

    assert checked(url, order, new) == ResumeCheck("fails", reason="LookupError: gone")


@dataclass
class Page:
    text: str


def test_a_result_of_another_type(url: str) -> None:
    async def old(ctx: Any) -> Any:
        await ctx.step("fetch", lambda: "text")
        raise ConnectionError

    async def new(ctx: Any) -> Any:
        return await ctx.step("fetch", int, returns=Page)

    found = checked(url, old, new)
    assert (found.outcome, "Page" in str(found.reason)) == ("fails", True)


def test_nothing_new_is_executed(url: str) -> None:
    done: list[str] = []

    async def old(ctx: Any) -> Any:
        await ctx.step("fetch", int)
        raise ConnectionError

    async def new(ctx: Any) -> Any:
        await ctx.step("fetch", lambda: done.append("fetch"))
        await ctx.emit("mine", {"a": 1})
        await ctx.checkpoint({"a": 1})

        async def more() -> None:
            await ctx.step("send", lambda: done.append("send"))
            done.append("after")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(more())
            tasks.create_task(more())
        done.append("end")

    assert checked(url, old, new) == ResumeCheck("resumes", stopped_at="send")
    assert done == []


@pytest.mark.parametrize(
    "new",
    [
        lambda ctx: ctx.now(), lambda ctx: ctx.sleep(60), lambda ctx: ctx.wait_for_signal("go"),
        lambda ctx: ctx.approve("plan"), lambda ctx: ctx.call("script", {}), lambda ctx: ctx.messages(),
        lambda ctx: StepExecutor(ctx).map("size", int, [1, 2]),
    ],
)  # fmt: skip
def test_whatever_is_new_ends_the_check(new: Code, tmp_path: Path) -> None:
    async def old(ctx: Any) -> Any:
        await ctx.step("fetch", int)
        raise ConnectionError

    async def both(ctx: Any) -> Any:
        await ctx.step("fetch", int)
        await new(ctx)

    assert checked(str(tmp_path / "runs.db"), old, both, timeout=30).outcome == "resumes"


@pytest.mark.parametrize("policy", ["retry", "fail"])
def test_a_step_in_doubt_that_the_code_left_out(policy: str, tmp_path: Path) -> None:
    url = str(tmp_path / "runs.db")

    async def cut(runner: AgentRunner) -> ResumeCheck:
        begun = asyncio.Event()

        async def old(ctx: Any) -> Any:
            async def hang() -> None:
                begun.set()
                await asyncio.Event().wait()

            await ctx.step("fetch", int)
            await ctx.step("pay", hang, on_in_doubt=policy)

        task = asyncio.ensure_future(runner.execute(Script(old), "r"))
        await begun.wait()
        task.cancel()
        await asyncio.wait({task})

        async def new(ctx: Any) -> Any:
            await ctx.step("fetch", int)
            await ctx.step("charge", int)

        return await _again(runner, new)

    found: ResumeCheck = on(url, cut)
    if policy == "retry":
        assert (found.outcome, found.stopped_at) == ("resumes", "charge")
        assert found.reason == "step 'pay' has started, and the code goes to 'charge' without it"
    else:  # it is guarded, and may have had its effect
        assert (found.outcome, found.stopped_at) == ("mismatch", None)
        assert found.reason == "the journal has step 'pay' where the code has step 'charge'"


def test_a_run_that_waits_for_its_child(url: str) -> None:
    async def code(ctx: Any) -> Any:
        await ctx.step("fetch", int)
        await ctx.call("kid", {})

    assert checked(url, code, code) == ResumeCheck("resumes", stopped_at="call:kid")


def test_a_run_before_the_change_is_not_checked_against_the_old_code(url: str) -> None:
    async def old(ctx: Any) -> None:
        await ctx.step("fetch", int)
        raise ConnectionError

    async def new(ctx: Any) -> None:
        await ctx.step("fetch", int)
        assert await ctx.patched("check"), "the old code is gone"

    assert checked(url, old, new) == ResumeCheck("resumes", stopped_at="patched:check")


def test_code_that_exits(tmp_path: Path) -> None:
    async def new(ctx: Any) -> Any:
        await ctx.step("fetch", int)
        raise SystemExit(3)

    found = checked(str(tmp_path / "runs.db"), order, new)
    assert found == ResumeCheck("fails", reason="SystemExit: 3")


def test_code_that_ends_before_the_last_recorded_step(url: str) -> None:
    async def new(ctx: Any) -> Any:
        await ctx.step("fetch", int)

    found = checked(url, order, new)
    assert (found.outcome, found.reason) == ("resumes", "the code ends before the last step that is recorded")


def test_stores_are_not_opened(url: str) -> None:
    async def new(ctx: Any) -> Any:
        await ctx.step("fetch", int)
        await ctx.persistence.memory.set("a", 1)

    found = checked(url, order, new)
    assert (found.outcome, "ctx.persistence" in str(found.reason)) == ("unknown", True)


def test_a_wait_does_not_hide_a_mismatch_in_another_task(tmp_path: Path) -> None:
    async def old(ctx: Any) -> Any:
        await ctx.step("fetch", int)
        await ctx.approve("plan")

    async def new(ctx: Any) -> Any:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ctx.approve("plan"))
            await asyncio.sleep(0)
            await ctx.step("get", int)

    assert checked(str(tmp_path / "runs.db"), old, new).outcome == "mismatch"


def test_cleaning_up_writes_nothing(tmp_path: Path) -> None:
    done: list[str] = []

    async def old(ctx: Any) -> Any:
        await ctx.step("fetch", int)
        raise ConnectionError

    async def new(ctx: Any) -> Any:
        try:
            await ctx.step("fetch", int)
            await ctx.step("send", lambda: done.append("send"))
        finally:
            await ctx.step("close", lambda: done.append("close"))

    assert checked(str(tmp_path / "runs.db"), old, new) == ResumeCheck("resumes", stopped_at="send")
    assert done == []


def test_code_that_does_not_end(tmp_path: Path) -> None:
    async def new(ctx: Any) -> Any:
        await ctx.step("fetch", int)
        await asyncio.Event().wait()

    found = checked(str(tmp_path / "runs.db"), order, new, timeout=0.2)
    assert found == ResumeCheck("unknown", reason="the code did not reach a new step in time")


class Plain(AgentRuntime):
    key = "plain"

    def __init__(self, second: str) -> None:
        self.second = second

    def run(self, ctx: Any) -> RunResult:
        ctx.step("fetch", int)
        ctx.step(self.second, int)
        ctx.approve("plan")
        return RunResult()


@pytest.mark.parametrize(("second", "outcome"), [("price", "resumes"), ("cost", "mismatch")])
def test_a_plain_agent(second: str, outcome: str, tmp_path: Path) -> None:
    assert checked(str(tmp_path / "runs.db"), Plain("price"), Plain(second)).outcome == outcome


def look() -> str:
    """Look."""
    return "seen"


class Helper(ToolCallingAgent):
    key = "helper"
    system_prompt = "Help."
    tools = ToolRegistry()
    tools.register(Tool.from_function(look))


def test_an_agent_with_tools_calls_no_model(url: str) -> None:
    call = {"tool_calls": [{"id": "1", "function": {"name": "look", "arguments": "{}"}}]}
    model = MockLLMClient([call, ConnectionError("no answer")])
    with use_llm_client(model):
        found = checked(url, Helper(), Helper())
    assert found == ResumeCheck("resumes", stopped_at="model")
    assert model.get_call_count() == 2


# -- the command

SHOP = """
from agent_runtime_core import AgentRuntime, RunResult


class Order(AgentRuntime):
    key = "order"

    async def run(self, ctx):
        await ctx.step("fetch", lambda: 1)
        await ctx.step("price", lambda: 2)
        await ctx.approve("plan")
        return RunResult()


class Other(Order):
    key = "other"


agents = [Order, Other]
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with two runs that wait, one that has not started, one that failed and one of an unknown agent."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "renamed.py").write_text(SHOP.replace('"price"', '"cost"'))
    url = str(tmp_path / "runs.db")

    async def fill(runner: AgentRunner) -> None:
        async def fails(ctx: Any) -> None:
            await order(ctx)

        async def broken(ctx: Any) -> None:
            await ctx.step("fetch", int)
            await ctx.step("price", int)
            raise ConnectionError

        runner.registry.register(Script(fails, "order"))
        runner.registry.register(Script(broken, "other"))
        for agent, run_id in (("order", "order-1"), ("order", "order-2"), ("other", "broken")):
            await runner.submit(agent, run_id=run_id)
            assert await runner.run_once()
        await runner.submit("other", run_id="new")
        await runner.submit("stranger", run_id="strange")

    on(url, fill)
    return url


def test_the_command_names_runs_and_cure(shop: str, tmp_path: Path) -> None:
    done = process("check", "shop:agents", "--url", shop, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3 runs checked: 3 can resume, 0 cannot, 0 unknown\n", "")
    done = process("check", "renamed:agents", "--url", shop, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == (
        "cannot resume: order-1, order-2 (agent order): the journal has step 'price' where the code has step 'cost'\n"
        '    cure: ctx.renamed("price", "cost") before the step\n'
        "3 runs checked: 1 can resume, 2 cannot, 0 unknown\n"
    )


def test_the_command_in_json(
    shop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    run = Commands(capsys, shop)
    told = run.json("check", "renamed:agents", "--failed")
    assert {each["run_key"]: each["outcome"] for each in told["runs"]} == {
        "order-1": "mismatch", "order-2": "mismatch", "broken": "mismatch", "new": "resumes",
    }  # fmt: skip
    assert (told["mismatch"], told["resumes"], told["fails"], told["unknown"]) == (3, 1, 0, 0)
    [one] = run.json("check", "renamed:agents", "--run", "order-2")["runs"]
    assert (one["run_key"], one["agent_key"], one["status"]) == ("order-2", "order", "waiting")
    code, _, err = run("check", "renamed:agents", "--run", "strange")
    assert (code, "must have agent 'stranger' of run 'strange'" in err) == (2, True)
    assert run("check", "renamed:agents", "--run", "order-3")[0] == 1
