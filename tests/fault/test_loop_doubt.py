"""A worker that dies inside a call of an agent loop, before its record: what the next one makes of it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core._execution.claim_writer import ClaimWriter, FlushTimer
from agent_runtime_core._execution.step import AlreadyDone
from agent_runtime_core.config import configure
from agent_runtime_core.interfaces import LLMResponse, RunContext, RunResult
from agent_runtime_core.loop import run_turn_loop
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing.clock import VirtualClock
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.fault_runs import KINDS, Store, drop, eventually, settings, store, until
from tests.support.scripted_model import Scripted, asks, call

COLD = settings(park_after=0)
HELLO = [{"role": "user", "content": "hello"}]
ANSWER = 30  # tokens an answer may have
TURN = 120  # tokens of each scripted answer
PRICE = {"input": 10_000.0, "output": 10_000.0}  # USD for a million tokens

pytestmark = pytest.mark.parametrize("kind", KINDS)


class Dying:
    """An agent, its model and its tools; what `hang` names never returns, the first time it is called."""

    def __init__(self, here: Store, hang: str, *lines: Any, limits: Any = None, metadata: Any = None) -> None:
        self.here, self.hang, self.hung = here, hang, False
        self.model = _Model(self, lines)
        self.keys: list[str] = []  # idempotency keys of the payments that were made
        self.looked = 0
        self.dead: list[asyncio.Task[Any]] = []
        self.limited = limits is not None
        self.lose = False  # what is not written yet when it hangs never is
        self.writer: ClaimWriter | None = None  # of the run that hangs
        self.running: ClaimWriter | None = None  # of the run that runs now

        async def pay(to: str, ctx: RunContext) -> str:
            self.keys.append(str(ctx.idempotency_key))
            await self.maybe_hang("pay")
            return f"paid {len(self.keys)}"

        async def look(at: str) -> dict[str, Any]:
            self.looked += 1
            mine = self.looked
            self.wait_longer()
            await self.maybe_hang(f"look {at}")
            return {"at": at, "time": mine}

        tools = ToolRegistry()
        tools.register(Tool.from_function(pay, has_side_effects=True, metadata=metadata))
        tools.register(Tool.from_function(look))

        async def code(ctx: Any) -> RunResult:
            self.running = ctx.journal.writer
            done = await run_turn_loop(ctx, self.model, tools, limits, max_tokens=ANSWER)
            return RunResult({"response": done.text}, done.messages, done.usage)

        here.agent("a", code)

    async def die(self, runner: AgentRunner, run_id: UUID) -> AgentRunner:
        """Have the worker begin the call and die in it; the next worker."""
        self.hung = False
        records = await runner.state_store.records(run_id)
        task = asyncio.ensure_future(runner.run_once())
        self.dead.append(task)
        await until(lambda: self.hung)

        async def begun() -> bool:
            return await self._begun(runner, run_id, len(records))

        if not self.lose:
            await until(lambda: not self.notes)  # what waits to be written is
            await eventually(begun)  # a start travels behind
        await drop(runner, task, run_id)
        clock = runner.queue.clock
        assert isinstance(clock, VirtualClock)
        clock.advance(61)
        return self.here.runner(COLD)

    async def _begun(self, runner: AgentRunner, run_id: UUID, since: int) -> bool:
        """Whether a call was begun since then that has no record."""
        records = await runner.state_store.records(run_id)
        name = "model" if self.hang.startswith("turn") else "tool"
        if name == "model" and not self.limited:
            return True  # nothing is set aside for it: its start is nowhere
        done = {record.key for record in records if record.kind == "done" and record.name == name}
        return any(r.kind == "started" and r.name == name and r.key not in done for r in records[since:])

    @property
    def notes(self) -> list[Any]:
        return self.writer._buffer.ops if self.writer is not None else []

    def wait_longer(self) -> None:
        """Let what waits to be written wait until it is lost, however slow this machine is."""
        writer = self.running
        assert writer is not None
        buffer = writer._buffer
        if self.lose and writer.max_delay:
            writer.max_delay = buffer.max_delay = 60.0
            if buffer._timer is not None:  # for the start of this call, which would take its end along
                buffer._timer.buffers.pop(buffer, None)
            buffer._timer = FlushTimer(asyncio.get_running_loop())

    async def maybe_hang(self, what: str) -> None:
        if what != self.hang or self.hung:
            return
        self.hung = True
        self.writer = writer = self.running
        assert writer is not None
        if self.lose:
            writer._buffer.ops.clear()
        await asyncio.get_running_loop().create_future()


class _Model(Scripted):
    def __init__(self, dying: Dying, lines: Any) -> None:
        super().__init__(*lines)
        self.dying = dying

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        turn = sum(message["role"] == "assistant" for message in messages)
        lines = list(self.lines)
        try:
            self.lines = [lines[turn]]
            answer = await super().generate(messages, **options)
        finally:
            self.lines = lines
        await self.dying.maybe_hang(f"turn {turn}")
        return answer


@asynccontextmanager
async def dead(
    kind: str, path: Path, hang: str, *lines: Any, **options: Any
) -> AsyncIterator[tuple[AgentRunner, UUID, Dying]]:
    """A run whose worker died in a call, ready for the next worker."""
    clock, lose = VirtualClock(), options.pop("lose", False)
    async with store(kind, path, clock) as here:
        dying = Dying(here, hang, *lines, **options)
        dying.lose = lose
        first = here.runner(COLD)
        run_id = await first.submit("a", {"messages": HELLO})
        try:
            yield await dying.die(first, run_id), run_id, dying
        finally:
            for task in dying.dead:
                task.cancel()
            await asyncio.wait(dying.dead)


async def ended(runner: AgentRunner, run_id: UUID) -> RunResult:
    while await runner.run_once():
        pass
    return await runner.wait(run_id, timeout=5)


async def events(runner: AgentRunner, run_id: UUID, kind: str) -> list[dict[str, Any]]:
    return [e.payload for e in await runner.event_bus.get_events(run_id) if e.event_type == kind]


async def sound(runner: AgentRunner, run_id: UUID) -> None:
    """What holds of an agent loop's run at rest, however it got there."""
    records = await runner.state_store.records(run_id)
    assert [record.seq for record in records] == sorted({record.seq for record in records})
    done = Counter((record.name, record.key) for record in records if record.kind == "done")
    assert set(done.values()) <= {1}, f"recorded twice: {done}"
    told = await runner.event_bus.get_events(run_id)
    assert [event.sequence for event in told] == list(range(len(told)))
    steps = Counter(event.payload["step_id"] for event in told if event.event_type == "tool.result")
    assert set(steps.values()) <= {1}, f"a result is told twice: {steps}"
    assert sum(name == "tool" for name, _ in done) == len(steps)
    begun = {event.payload["step_id"] for event in told if event.event_type == "tool.call"}
    assert steps.keys() <= begun


async def reserved(runner: AgentRunner, run_id: UUID) -> list[int]:
    """Tokens that the starts of calls of the model have set aside, in order."""
    records = await runner.state_store.records(run_id)
    starts = [json.loads(r.info or "{}") for r in records if r.name == "model" and r.kind == "started"]
    return [start["reserve"]["tokens"] for start in starts]


def pay(to: str = "x", id: str = "c1") -> dict[str, Any]:
    return asks(call("pay", {"to": to}, id))


def results(messages: list[Any]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "tool"]


# -- a call of the model


@pytest.mark.parametrize("turn", [0, 1])
async def test_it_is_made_again_and_its_first_call_is_an_estimate(kind: str, turn: int, tmp_path: Path) -> None:
    configure(model_prices={"scripted-1": PRICE})
    limits = {"max_tokens": 5000, "max_cost_usd": 50}
    async with dead(kind, tmp_path, f"turn {turn}", pay(), "done", limits=limits) as (runner, run_id, dying):
        result = await ended(runner, run_id)
        assert result.final_output == {"response": "done"}, result.error
        assert len(dying.model.asked) == 3, "the recorded turn is not asked again, the other one is"
        assert dying.model.asked[turn] == dying.model.asked[turn + 1]
        assert len(dying.keys) == 1
        lost = (await reserved(runner, run_id))[turn]
        assert (result.usage["total_tokens"], result.usage["estimated_tokens"]) == (2 * TURN, lost)
        assert result.usage["cost_usd"] == pytest.approx(2 * TURN / 100)
        assert result.usage["estimated_cost_usd"] == pytest.approx(lost / 100)
        assert (result.usage["turns"], result.usage["tool_calls"]) == (2, 1)
        await sound(runner, run_id)


async def test_an_estimate_alone_ends_no_run(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limits = {"max_tokens": TURN + 100}
    async with dead(kind, tmp_path, "turn 1", pay(), "done", limits=limits) as (runner, run_id, dying):
        assert (await reserved(runner, run_id))[1] >= 100
        result = await ended(runner, run_id)
        assert result.final_output == {"response": "done"}, result.error
        assert len(dying.model.asked) == 3
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert [str(run_id) in each and "max_tokens=220 may be reached" in each for each in warned] == [True], warned


async def test_it_ends_a_run_whose_limits_count_estimates(kind: str, tmp_path: Path) -> None:
    # The first turn takes 120; what is set aside for the second reaches the limit, what it takes would not.
    limits = {"max_tokens": TURN + 100, "count_estimates": True}
    async with dead(kind, tmp_path, "turn 1", pay(), "done", limits=limits) as (runner, run_id, dying):
        assert (await reserved(runner, run_id))[1] >= 100
        result = await ended(runner, run_id)
        assert result.status is RunStatus.FAILED
        assert result.error is not None
        assert result.error.type == "LimitExceeded"
        assert len(dying.model.asked) == 2
        assert result.usage["total_tokens"] + result.usage["estimated_tokens"] >= limits["max_tokens"]
        assert results(result.final_messages) == ["paid 1"]
        await sound(runner, run_id)


async def test_each_time_it_was_lost_counts(kind: str, tmp_path: Path) -> None:
    async with dead(kind, tmp_path, "turn 1", pay(), "done", limits={"max_tokens": 5000}) as (second, run_id, dying):
        runner = await dying.die(second, run_id)
        result = await ended(runner, run_id)
        assert result.final_output == {"response": "done"}, result.error
        _, *starts = await reserved(runner, run_id)
        assert len(starts) == 3
        assert (result.usage["total_tokens"], result.usage["estimated_tokens"]) == (2 * TURN, sum(starts[:2]))


async def test_it_still_counts_once_it_was_made_again(kind: str, tmp_path: Path) -> None:
    """The third worker finds the call recorded: what the first one lost was paid all the same."""
    lines = (pay(), pay("y", "c2"), "done")
    async with dead(kind, tmp_path, "turn 0", *lines, limits={"max_tokens": 5000}) as (second, run_id, dying):
        dying.hang = "turn 1"
        runner = await dying.die(second, run_id)
        result = await ended(runner, run_id)
        starts = await reserved(runner, run_id)
        assert len(starts) == 5
        assert (result.usage["total_tokens"], result.usage["estimated_tokens"]) == (3 * TURN, starts[0] + starts[2])


# -- a tool with side effects


async def test_a_tool_with_side_effects_is_run_again_under_the_same_key(kind: str, tmp_path: Path) -> None:
    async with dead(kind, tmp_path, "pay", pay(), "done") as (runner, run_id, dying):
        result = await ended(runner, run_id)
        assert result.final_output == {"response": "done"}, result.error
        assert len(dying.model.asked) == 2, "the model is not asked again for what it wanted"
        assert len(dying.keys) == 2
        assert len(set(dying.keys)) == 1
        assert results(result.final_messages) == results(dying.model.asked[-1]) == ["paid 2"]
        calls, told = await events(runner, run_id, "tool.call"), await events(runner, run_id, "tool.result")
        assert [each["tool_call_id"] for each in calls] == ["c1", "c1"]
        assert [each["result"] for each in told] == ["paid 2"]
        assert {f"{run_id}:{each['step_id']}" for each in [*calls, *told]} == set(dying.keys)
        await sound(runner, run_id)


async def test_that_it_was_in_doubt_can_be_seen(kind: str, tmp_path: Path) -> None:
    async with dead(kind, tmp_path, "pay", pay(), "done") as (runner, run_id, _):
        assert await runner.run_once()
        calls = await events(runner, run_id, "tool.call")
        assert [each.get("in_doubt", False) for each in calls] == [False, True]


async def test_fail_ends_the_run(kind: str, tmp_path: Path) -> None:
    metadata = {"on_in_doubt": "fail"}
    async with dead(kind, tmp_path, "pay", pay(), "done", metadata=metadata) as (runner, run_id, dying):
        result = await ended(runner, run_id)
        assert result.status is RunStatus.FAILED
        assert result.error is not None
        assert result.error.type == "StepInDoubt"
        assert not result.error.retriable
        assert len(dying.keys) == 1
        assert not await runner.run_once(), "it is not retried"
        await sound(runner, run_id)


@pytest.mark.parametrize("answer", [{"outcome": "done", "result": "paid by hand"}, "retry", "failed"])
async def test_review_parks_the_run_until_somebody_looked(kind: str, answer: Any, tmp_path: Path) -> None:
    metadata = {"on_in_doubt": "review"}
    async with dead(kind, tmp_path, "pay", pay(), "done", metadata=metadata) as (runner, run_id, dying):
        assert await runner.run_once()
        info = await runner.get_run(run_id)
        assert (info.status.value, info.reason) == ("waiting", "in_doubt")
        [asked] = await events(runner, run_id, "step.in_doubt")
        [called] = await events(runner, run_id, "tool.call")
        assert asked["step_id"] == called["step_id"], "whoever looks can tell which call it is"
        assert len(dying.keys) == 1
        await runner.signal(run_id, asked["signal"], answer)
        result = await ended(runner, run_id)
        if answer == "failed":
            assert result.status is RunStatus.FAILED
            assert len(dying.keys) == 1
        elif answer == "retry":
            assert results(result.final_messages) == ["paid 2"]
            assert len(set(dying.keys)) == 1
        else:
            assert result.final_output == {"response": "done"}, result.error
            assert results(result.final_messages) == results(dying.model.asked[-1]) == ["paid by hand"]
            assert [each["result"] for each in await events(runner, run_id, "tool.result")] == ["paid by hand"]
            assert len(dying.keys) == 1
        await sound(runner, run_id)


@pytest.mark.parametrize("happened", [True, False])
async def test_a_check_function_is_asked(kind: str, happened: bool, tmp_path: Path) -> None:
    asked: list[str] = []

    async def check(ctx: RunContext) -> Any:
        asked.append(str(ctx.idempotency_key))
        return AlreadyDone("paid before") if happened else None

    metadata = {"on_in_doubt": check}
    async with dead(kind, tmp_path, "pay", pay(), "done", metadata=metadata) as (runner, run_id, dying):
        result = await ended(runner, run_id)
        assert result.final_output == {"response": "done"}, result.error
        assert results(result.final_messages) == ["paid before" if happened else "paid 2"]
        assert set(dying.keys) == set(asked)
        assert len(dying.keys) == (1 if happened else 2)
        await sound(runner, run_id)


# -- a safe tool


async def test_the_result_that_survives_is_the_one_the_model_goes_on_with(kind: str, tmp_path: Path) -> None:
    """A safe tool's record waits for the next call to be recorded; lost with its worker, the tool is run again."""
    runs = 1 if kind == "memory" else 2  # in memory nothing waits to be written
    line = asks(call("look", {"at": "x"}, "c1"))
    async with dead(kind, tmp_path, "turn 1", line, "done", lose=True) as (runner, run_id, dying):
        assert dying.looked == 1
        result = await ended(runner, run_id)
        assert dying.looked == runs
        seen = {"at": "x", "time": runs}
        assert [each["result"] for each in await events(runner, run_id, "tool.result")] == [seen]
        assert results(result.final_messages) == results(dying.model.asked[-1]) == [json.dumps(seen)]
        await sound(runner, run_id)


@pytest.mark.parametrize("hang", ["look x", "look y", "turn 1"])
async def test_of_safe_tools_side_by_side_only_those_without_a_record_are_run_again(
    kind: str, hang: str, tmp_path: Path
) -> None:
    line = asks(call("look", {"at": "x"}, "c1"), call("look", {"at": "y"}, "c2"))
    async with dead(kind, tmp_path, hang, line, "done") as (runner, run_id, dying):
        assert dying.looked == 2
        result = await ended(runner, run_id)
        again = 0 if hang == "turn 1" else 1
        assert dying.looked == 2 + again
        told = {
            each["tool_call_id"]: json.dumps(each["result"]) for each in await events(runner, run_id, "tool.result")
        }
        assert len(await events(runner, run_id, "tool.result")) == 2, "a result is told once"
        assert results(result.final_messages) == results(dying.model.asked[-1]) == [told["c1"], told["c2"]]
        assert len(await events(runner, run_id, "tool.call")) == 2 + again
        await sound(runner, run_id)
