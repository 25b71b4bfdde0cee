"""A kill inside a call of the model does not use up the budget of its run, and a limit can be raised for one run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.config import reset_config
from agent_runtime_core.errors import IllegalTransition, InvalidArgument
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.limits import UNSEEN_TOKENS, RunLimits
from agent_runtime_core.loop import run_turn_loop
from agent_runtime_core.portal import call as wait_for
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing.clock import VirtualClock
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.fault_runs import KINDS, Agent, drop, settings, store
from tests.support.scripted_model import Scripted, asks, call

from .jobs.costly import PRICE, STREAMED, Support, runner

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
TURN = 120  # tokens of each scripted answer
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def configured() -> Iterator[None]:
    yield
    reset_config()


# -- a kill


def killed(path: Path, attributes: dict[str, Any], times: int = 1) -> tuple[Path, Path]:
    """The store and the effects of a run that was killed so often in its second call of the model."""
    db, effects = path / "runs.db", path / "effects"
    argv = [sys.executable, "-m", "tests.fault.jobs.costly", str(db), str(effects), json.dumps(attributes)]
    for _ in range(times):
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "inside\n"
            os.kill(process.pid, signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
    return db, effects


async def finished(db: Path, effects: Path, attributes: dict[str, Any]) -> RunResult:
    async with runner(db, Support(str(effects), hangs=False, **attributes)) as mine:
        await mine.run_once()
        result = await mine.wait("r", timeout=10)
    assert effects.read_text() == "refund\n", "it is paid once"
    return result


@pytest.mark.parametrize(
    ("attributes", "answer"),
    [
        ({}, UNSEEN_TOKENS),
        ({"max_tokens": 50}, 50),
        ({"stream": True, "max_tokens": 50}, 50),
        ({"stream": True}, UNSEEN_TOKENS + 2 * len(STREAMED) // 3 + 1),
    ],
)
async def test_a_kill_is_an_estimate_that_ends_no_run(attributes: dict[str, Any], answer: int, tmp_path: Path) -> None:
    result = await finished(*killed(tmp_path, attributes), attributes)
    assert result.final_output == {"response": "refunded"}, result.error
    usage = result.usage
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (200, 40, 240)
    assert usage["cost_usd"] == pytest.approx((200 * PRICE["input"] + 40 * PRICE["output"]) / 1e6)
    assert 0 < usage["estimated_tokens"] - answer < 200, "and the prompt"
    assert usage["estimated_cost_usd"] > answer * PRICE["output"] / 1e6


async def test_several_kills_add_up_and_one_warning_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    attributes = {"max_tokens": 600}
    result = await finished(*killed(tmp_path, attributes, 2), attributes)
    assert result.final_output == {"response": "refunded"}, result.error
    assert 1200 < result.usage["estimated_tokens"] < 1600
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert len(warned) == 1, warned
    assert "run r: max_cost_usd=0.01 may be reached" in warned[0]


async def test_it_ends_a_run_whose_limits_count_estimates_and_resume_raises_the_limit(tmp_path: Path) -> None:
    limits = {"max_cost_usd": 0.01, "count_estimates": True}
    attributes = {"limits": limits}
    db, effects = killed(tmp_path, attributes)
    result = await finished(db, effects, attributes)
    assert result.status is RunStatus.FAILED
    assert result.error is not None
    assert result.error.type == "LimitExceeded"
    assert result.error.message.startswith("limit reached: max_cost_usd=0.01, used ")
    async with runner(db, Support(str(effects), hangs=False)) as mine:
        await mine.resume("r", limits={"max_cost_usd": 0.05})
    result = await finished(db, effects, attributes)
    assert result.final_output == {"response": "refunded"}, result.error


# -- limits of one run


def endless(limits: Any, client: Scripted, ran: list[str]) -> Any:
    tools = ToolRegistry()

    def look(at: str) -> str:
        ran.append(at)
        return at

    tools.register(Tool.from_function(look))

    async def code(ctx: Any) -> RunResult:
        done = await run_turn_loop(ctx, client, tools, limits)
        return RunResult({"response": done.text}, done.messages, done.usage)

    return code


def looks(count: int) -> Scripted:
    return Scripted(*[asks(call("look", {"at": str(n)}, f"c{n}")) for n in range(count)], "done", cost=0.01)


@kinds
@pytest.mark.parametrize("where", ["loop", "run", "runner"])
@pytest.mark.parametrize(
    ("limit", "small", "enough"),
    [("max_turns", 2, 9), ("max_tool_calls", 2, 9), ("max_tokens", 2 * TURN, 9 * TURN), ("max_cost_usd", 0.02, 0.09)],
)
@pytest.mark.parametrize("verb", ["resume", "requeue"])
async def test_a_limit_is_raised_wherever_it_was_set(
    kind: str, where: str, limit: str, small: float, enough: float, verb: str, tmp_path: Path
) -> None:
    client, ran = looks(4), list[str]()
    given: dict[str, Any] = {limit: small, "max_tokens": small if limit == "max_tokens" else 10**6}
    config = settings(limits=RunLimits(**given)) if where == "runner" else settings()
    async with store(kind, tmp_path) as here:
        here.agent("a", endless(given if where == "loop" else None, client, ran))
        first = here.runner(config)
        run_id = await first.submit("a", HELLO | ({"limits": given} if where == "run" else {}), run_id="r")
        assert await first.run_once()
        failed = await first.wait(run_id)
        assert failed.error is not None
        assert failed.error.type == "LimitExceeded"
        # What the run has used still counts.
        info = await first.resume("r")
        assert await here.runner(config).run_once()
        assert (await first.get_run("r")).status is RunStatus.FAILED
        info = await getattr(first, verb)("r", limits={limit: enough})
        assert (info.status, info.generation) == (RunStatus.PENDING, 3)
        assert await here.runner(config).run_once(), "any worker applies it"
        result = await first.wait(run_id)
        assert result.final_output == {"response": "done"}, result.error
        assert (len(client.asked), ran) == (5, ["0", "1", "2", "3"])


@kinds
async def test_a_raised_limit_survives_a_kill_and_later_generations(kind: str, tmp_path: Path) -> None:
    clock, client, ran = VirtualClock(), looks(6), list[str]()
    hang, budgets = list[bool](), list[RunLimits]()
    loop = endless({"max_turns": 1}, client, ran)

    async def code(ctx: Any) -> Any:
        budgets.append(ctx.budget.limits)
        if hang:
            hang.clear()
            await began.wait()
        return await loop(ctx)

    began = asyncio.Event()
    async with store(kind, tmp_path, clock) as here:
        here.agent("a", code)
        runner = here.runner()
        await runner.submit("a", HELLO, run_id="r")
        assert await runner.run_once()
        await runner.resume("r", limits=RunLimits(max_turns=3, max_tokens=10**6))
        hang.append(True)
        dying = asyncio.ensure_future(runner.run_once())
        try:
            while hang:  # noqa: ASYNC110 - it is about to begin
                await asyncio.sleep(0.001)
            await drop(runner, dying, (await runner.get_run("r")).run_id)
            clock.advance(61)
            second = here.runner()
            assert await second.run_once()
        finally:
            dying.cancel()
            await asyncio.wait([dying])
        assert (len(client.asked), (await second.get_run("r")).status) == (3, RunStatus.FAILED)
        # Another call replaces the limits that it names, and keeps the others.
        await second.resume("r", limits={"max_turns": 5})
        assert await second.run_once()
        assert (len(client.asked), (await second.get_run("r")).status) == (5, RunStatus.FAILED)
        await second.resume("r", limits={"max_turns": None})
        result = await second.execute("a", "r", HELLO)
        assert result.final_output == {"response": "done"}, result.error
        assert budgets[-1] == RunLimits(max_tokens=10**6)


@kinds
@pytest.mark.parametrize("limits", [{"max_turn": 3}, {"max_turns": 0}, {"max_cost_usd": "much"}, 7])
async def test_a_wrong_limit_leaves_the_run_as_it_is(kind: str, limits: Any, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        here.agent("a", endless({"max_turns": 1}, looks(3), []))
        runner = here.runner()
        await runner.execute("a", "r", HELLO)
        with pytest.raises(InvalidArgument):
            await runner.resume("r", limits=limits)
        assert (await runner.get_run("r")).status is RunStatus.FAILED


@kinds
async def test_a_run_that_has_not_ended_keeps_its_limits(kind: str, tmp_path: Path) -> None:
    async with store(kind, tmp_path) as here:
        here.agent("a", endless({"max_turns": 1}, looks(3), []))
        runner = here.runner()
        run_id = await runner.submit("a", HELLO)
        with pytest.raises(IllegalTransition):
            await runner.resume(run_id, limits={"max_turns": 9})
        assert await runner.run_once()
        assert (await runner.get_run(run_id)).status is RunStatus.FAILED


def test_limits_are_raised_without_a_loop_too(tmp_path: Path) -> None:
    mine = AgentRunner.open(tmp_path / "runs.db", config=settings())
    agent = Agent("a", endless({"max_turns": 1}, looks(2), []))
    try:
        assert mine.execute_sync(agent, "r", HELLO).status is RunStatus.FAILED
        assert mine.resume_sync("r", limits={"max_turns": 2}).status is RunStatus.PENDING
        assert mine.execute_sync(agent, "r", HELLO).status is RunStatus.FAILED
        assert mine.requeue_sync("r", limits={"max_turns": 3}).status is RunStatus.PENDING
        assert mine.execute_sync(agent, "r", HELLO).final_output == {"response": "done"}
    finally:
        wait_for(mine.close)
