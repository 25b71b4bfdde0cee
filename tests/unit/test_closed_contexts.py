"""Where steps, waits and runs end: what comes after, beside, or in the place of an end."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._execution.run_control import Stop
from agent_runtime_core.errors import (
    IdempotencyConflict,
    IllegalTransition,
    StepCancelledError,
    StepExecutionError,
    StorageClosed,
    UnknownTool,
    UnserialisableResult,
)
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.runner import AgentRunner, open_run
from agent_runtime_core.state import InMemoryStateStore
from agent_runtime_core.steps import Step, StepExecutor
from tests.support.runs import Rig, Script, soon, twice


def ways(ran: list[str]) -> list[Any]:
    """Each way to have a step run, by a name that says which."""

    def noted(name: str) -> Any:
        return lambda *_: ran.append(name)

    return [
        lambda ctx: StepExecutor(ctx).run([Step("chain", noted("chain"))]),
        lambda ctx: StepExecutor(ctx).run([Step("a", noted("a")), Step("b", noted("b"), depends_on=["a"])]),
        lambda ctx: StepExecutor(ctx).map("map", noted("map"), [1, 2]),
        lambda ctx: ctx.step("step", noted("step")),
    ]


async def test_no_step_runs_on_a_context_whose_block_was_left(tmp_path: Path) -> None:
    ran: list[str] = []
    async with open_run(tmp_path / "runs.db", "r") as ctx:
        pass
    for way in ways(ran):
        with pytest.raises(StorageClosed):
            await way(ctx)
    assert ran == []


async def test_no_step_runs_in_a_run_that_has_succeeded(tmp_path: Path) -> None:
    ran: list[str] = []
    async with open_run(tmp_path / "runs.db", "r") as ctx:
        assert await ctx.step("known", lambda: 1) == 1
    async with open_run(tmp_path / "runs.db", "r") as ctx:
        assert await ctx.step("known", lambda: 2) == 1
        for way in [*ways(ran), lambda ctx: ctx.sleep(1), lambda ctx: ctx.wait_for_signal("go")]:
            with pytest.raises(IllegalTransition, match="Use another run_id"):
                await way(ctx)
    assert ran == []


async def test_what_an_attempt_left_behind_begins_no_step_beside_the_next_one(place: Path | None) -> None:
    ran: list[int] = []
    ended = asyncio.Event()
    refused: list[BaseException] = []
    left: list[asyncio.Future[None]] = []

    async def body(ctx: Any) -> None:
        async def late() -> None:
            await ended.wait()
            try:
                await StepExecutor(ctx).run([Step("late", lambda *_: ran.append(ctx.attempt))])
            except Exception as error:  # noqa: BLE001 - looked at below
                refused.append(error)

        if ctx.attempt == 1:
            left.append(asyncio.ensure_future(late()))
            await asyncio.sleep(0)
            raise ValueError("the attempt fails")
        ended.set()
        while not refused:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async with Rig(place, max_retries=2) as rig:
        await rig.value(body)
    assert (ran, len(refused)) == ([], 1)


# -- transactions


async def test_an_error_of_ours_that_a_transaction_raises_is_recorded_as_of_a_step(tmp_path: Path) -> None:
    async def body(ctx: Any) -> Any:
        def wrong(conn: Any) -> None:
            raise UnknownTool("no such tool")

        try:
            await ctx.transaction("book", wrong)
        except StepExecutionError as error:
            return [error.step_name, await ctx.step("without", lambda: "it")]

    async with Rig(tmp_path / "runs.db", max_retries=2) as rig:
        first, again = await twice(rig, body)
    assert first == again == ["book", "it"]


async def test_the_result_of_a_transaction_that_has_no_json_form_is_told_with_its_step(tmp_path: Path) -> None:
    async with Rig(tmp_path / "runs.db") as rig:
        result = await rig.go(lambda ctx: ctx.transaction("book", lambda conn: object()))
    assert result.error is not None
    assert result.error.type == UnserialisableResult.__name__
    assert "'book'" in result.error.message


async def test_no_transaction_begins_in_a_run_that_was_cancelled(tmp_path: Path) -> None:
    ran: list[int] = []

    async def body(ctx: Any) -> None:
        ctx.control.stop(Stop.CANCEL)
        with pytest.raises(StepCancelledError):
            await ctx.transaction("book", lambda conn: ran.append(1))

    async with Rig(tmp_path / "runs.db") as rig:
        await rig.go(body)
    assert ran == []


# -- tries


@pytest.mark.parametrize(
    "policy",
    [
        {"retry_on": lambda error: error.code == 500},
        {"backoff": lambda attempt, random: None},
        {"backoff": lambda attempt, random: "soon"},
        {"backoff": lambda attempt, random: float("nan")},
    ],
)
async def test_a_mistake_in_what_decides_on_another_try_leaves_the_error_of_the_step(
    place: Path | None, policy: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def slow() -> None:
        raise TimeoutError("slow")

    async def body(ctx: Any) -> None:
        with pytest.raises(StepExecutionError, match="slow") as raised:
            await ctx.step("fetch", slow, retries=2, **policy)
        assert isinstance(raised.value.__cause__, TimeoutError)

    with caplog.at_level(logging.ERROR):
        async with Rig(place) as rig:
            await rig.value(body)
            assert [record.kind for record in await rig.records()][-2:] == ["failed", "ended"]
    assert "the step is not retried" in caplog.text


async def test_steps_of_a_child_that_are_called_as_one_of_its_parent_run_one_at_a_time(place: Path | None) -> None:
    log: list[str] = []

    async def child(ctx: Any) -> None:
        async def fetch() -> int:
            log.append("begin")
            await asyncio.sleep(0)
            log.append("end")
            return len(log)

        await asyncio.gather(*(ctx.step("fetch", fetch, key="a") for _ in range(2)))

    async def parent(ctx: Any) -> None:
        await ctx.step("fetch", lambda: ctx.call(Script(child, "child"), {}), key="a", returns=RunResult)

    async with Rig(place) as rig:
        rig.register(child, "child")
        await rig.go(parent)
    assert log == ["begin", "end"]


# -- waits with keys of their own


async def test_waits_side_by_side_are_told_apart_by_their_keys(place: Path | None) -> None:
    """In the second life the branches come in another order."""

    async def body(ctx: Any) -> list[Any]:
        lives.append(1)

        async def branch(name: str, turns: int) -> list[Any]:
            for _ in range(turns):
                await asyncio.sleep(0)
            return [name, str(await ctx.uuid4(key=name)), await ctx.random(key=name), str(await ctx.now(key=name))]

        turns = (1, 5) if len(lives) == 1 else (5, 1)
        return list(await asyncio.gather(branch("a", turns[0]), branch("b", turns[1])))

    lives: list[int] = []
    async with Rig(place, max_retries=2) as rig:
        first, again = await twice(rig, body)
    assert first == again


async def test_sleeps_and_signals_take_keys(place: Path | None) -> None:
    async def body(ctx: Any) -> None:
        await ctx.sleep(5, key="nap")
        with pytest.raises(TimeoutError):
            await ctx.wait_for_signal("go", timeout=1, key="mine")

    async with Rig(place) as rig:
        await rig.value(body)
        kept = {(record.name, record.key) for record in await rig.records() if record.kind == "done"}
    assert kept == {("sleep", "k:nap"), ("signal:go", "k:mine")}


# -- what people say of a step in doubt


@dataclass
class Receipt:
    id: int


async def test_an_answer_about_a_step_in_doubt_is_read_as_its_result(
    place: Path | None, caplog: pytest.LogCaptureFixture
) -> None:
    begun = asyncio.Event()

    async def pay() -> Receipt:
        begun.set()
        await asyncio.sleep(3600)
        return Receipt(0)

    async def body(ctx: Any) -> list[Any]:
        receipt = await ctx.step("pay", pay, on_in_doubt="review")
        return [type(receipt).__name__, receipt.id]

    async with Rig(place, park_after=60) as rig:
        await rig.cut(body, begun)
        again = asyncio.ensure_future(rig.value(body))
        with caplog.at_level(logging.WARNING):
            for answer in ({"outcome": "Done"}, {"outcome": "done", "result": "no receipt"}):
                await rig.runner.signal("r", "in_doubt:pay", answer)
            await soon(lambda: caplog.text.count("ignored an invalid answer") == 2)
        await rig.runner.signal("r", "in_doubt:pay", {"outcome": "done", "result": {"id": 7}})
        assert await again == ["Receipt", 7]


# -- the queue and the store


async def test_an_idempotency_key_that_would_stand_for_nothing_is_refused(place: Path | None) -> None:
    async with Rig(place) as rig:
        rig.register(lambda ctx: ctx.step("a", lambda: 1))
        await rig.runner.submit("script", {"n": 1}, run_id="order-7")
        with pytest.raises(IdempotencyConflict, match="with another idempotency_key"):
            await rig.runner.submit("script", {"n": 1}, run_id="order-7", idempotency_key="k")
        other = await rig.runner.submit("script", {"n": 1}, idempotency_key="k")
        assert await rig.runner.submit("script", {"n": 1}, idempotency_key="k") == other
        with pytest.raises(IdempotencyConflict, match="with another idempotency_key"):
            await rig.runner.submit("script", {"n": 1}, run_id="order-7", idempotency_key="k")


async def test_what_a_queue_remembers_of_its_claims_goes_with_them() -> None:
    queue = InMemoryQueue()
    for n in range(3):
        await queue.enqueue(f"r{n}", "agent", {})
        run = await queue.claim("worker")
        await queue.cancel(run.run_id)
        row = await queue.require(run.run_id)
        await queue.settle(row.run_id, queue.unchanged_update(row, row.claim_id)._replace(status="cancelled"))
        assert not await queue.extend_lease(run.run_id, "worker", 60)
    assert queue._claim_ids == {}


async def test_a_store_in_memory_that_is_cleared_leaves_published_events_their_numbers() -> None:
    runner = AgentRunner.open("memory://")
    bus, store = runner.event_bus, runner.state_store
    assert isinstance(store, InMemoryStateStore)
    run = "0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2a01"
    for n in range(3):
        await bus.publish(run, "tick", {"n": n})
    await store.save_checkpoint(run, {"n": 1})
    store.clear()
    assert await store.get_checkpoint(run) is None
    assert (await bus.publish(run, "tick", {"n": 3})).sequence == 3
    assert [event.payload["n"] for event in await bus.get_events(run)] == [0, 1, 2, 3]
    await runner.close()
