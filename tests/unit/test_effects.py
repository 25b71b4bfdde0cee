"""A guarded step that one run of a lineage of forks did: what the others do at it, by the policy of the fork."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import EffectAlreadyDone
from agent_runtime_core._engines.base import Op
from agent_runtime_core._execution.step import AlreadyDone
from agent_runtime_core._journal.record import FORKED
from agent_runtime_core.errors import IdempotencyConflict, InvalidArgument, StepInDoubt
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.runner import open_run
from agent_runtime_core.state.base import StateStore
from tests.support.effects import (
    WAYS,
    Paid,
    Way,
    by_model,
    by_step,
    by_tool,
    inside_another_step,
    nothing_known,
    stored_effects,
)
from tests.support.runs import Body, Rig
from tests.support.scripted_model import call


async def worked(rig: Rig, run_id: Any) -> RunResult:
    while await rig.runner.run_once():
        pass
    return await rig.runner.wait(run_id, timeout=5)


async def forked(rig: Rig, body: Body, after: Any = "first", source: Any = "r", **how: Any) -> RunResult:
    """What comes of a new fork, as far as it gets without anybody's answer."""
    rig.register(body)
    new = await rig.runner.fork(source, after, **how)
    while await rig.runner.run_once():
        pass
    try:
        return await rig.runner.wait(new, timeout=0)
    except TimeoutError:
        return RunResult(run_id=new)


async def effects(rig: Rig, run_id: Any) -> list[tuple[str, str]]:
    """What the run told of its guarded steps: the action, and the run that the step was done in."""
    told = await rig.told("step.effect", str(run_id))
    runs = {str(info.run_id): info.run_key or str(info.run_id) for info in await rig.runner.runs()}
    return [(payload["action"], runs[payload["run_id"]]) for _, payload in told]


def kind(result: RunResult) -> str | None:
    return None if result.error is None else result.error.type


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_a_fork_refuses_what_was_done(way: Way, place: Path | None) -> None:
    paid = Paid()
    async with Rig(place, max_retries=3) as rig:
        await rig.value(way(paid))
        result = await forked(rig, way(paid))
        assert len(paid.by) == 1
        assert (result.status, kind(result)) == ("failed", "EffectAlreadyDone")
        assert result.error is not None
        assert result.error.retriable is False
        assert "was already done in run 'r'" in result.error.message
        assert 'fork again with effects="reuse", "ask" or "repeat"' in result.error.message
        assert await effects(rig, result.run_id) == [("refused", "r")]
        await rig.runner.resume(result.run_id)  # type: ignore[arg-type]
        assert kind(await worked(rig, result.run_id)) == "EffectAlreadyDone"
        assert await effects(rig, result.run_id) == [("refused", "r")]
        assert len(paid.by) == 1


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_a_fork_takes_the_recorded_result(way: Way, place: Path | None) -> None:
    paid = Paid()
    async with Rig(place) as rig:
        before = await rig.value(way(paid))
        result = await forked(rig, way(paid), effects="reuse")
        assert result.raise_for_status().final_output["value"] == before
        assert len(paid.by) == 1
        assert await effects(rig, result.run_id) == [("reused", "r")]
        told = [kind for kind, _ in await rig.told(None, str(result.run_id)) if kind.startswith(("step", "tool"))]
        ends = [each for each in told if each.endswith((".completed", ".result"))]
        starts = [each for each in told if each.endswith((".started", ".call"))]
        # The start of a step that waits for a checkpoint would make it one in doubt.
        assert len(starts) == len(ends) - (way is WAYS["no checkpoint"]), told
        again = await forked(rig, way(paid), source=result.run_id, after=None)
        assert again.raise_for_status().final_output["value"] == before, "it is recorded in the fork"


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_a_fork_repeats_what_it_may(way: Way, place: Path | None) -> None:
    paid = Paid()
    async with Rig(place) as rig:
        await rig.value(way(paid))
        result = await forked(rig, way(paid), effects="repeat")
        assert result.raise_for_status().final_output["value"]["number"] == 2
        assert await effects(rig, result.run_id) == [("repeated", "r")]
        third = await forked(rig, way(paid), source=result.run_id)
        assert kind(third) == "EffectAlreadyDone"
        assert len(paid.by) == 2


@pytest.mark.parametrize("answer", [True, False, {"approved": True}, {"approved": False}])
@pytest.mark.parametrize("way", [way for name, way in WAYS.items() if name != "inside"])
async def test_a_fork_asks(way: Way, answer: Any, place: Path | None) -> None:
    paid, allowed = Paid(), answer is True or answer == {"approved": True}
    async with Rig(place) as rig:
        await rig.value(way(paid))
        new = (await forked(rig, way(paid), effects="ask")).run_id
        assert new is not None
        assert len(paid.by) == 1
        [asked] = [payload for _, payload in await rig.told("approval.requested", str(new))]
        assert asked["name"].startswith("repeat:")
        assert asked["details"]["status"] == "done"
        await rig.runner.approve(new, asked["name"], answer)
        result = await worked(rig, new)
        assert (len(paid.by), kind(result)) == ((2, None) if allowed else (1, "EffectAlreadyDone"))
        assert await effects(rig, new) == [("repeated" if allowed else "refused", "r")]


async def test_a_fork_asks_inside_another_step(place: Path | None) -> None:
    """Such a wait is not parked: the worker that is in it goes on."""
    paid = Paid()
    async with Rig(place) as rig:
        await rig.value(inside_another_step(paid))
        rig.register(inside_another_step(paid))
        new = await rig.runner.fork("r", "first", effects="ask")
        working = asyncio.ensure_future(rig.runner.run_once())
        async with asyncio.timeout(10):
            while not await rig.told("approval.requested", str(new)):  # noqa: ASYNC110 - nothing rings for it
                await asyncio.sleep(0.001)
        await rig.runner.approve(new, "repeat:pay", True)
        await working
        assert (await rig.runner.wait(new, timeout=0)).status == "succeeded"
        assert len(paid.by) == 2


async def test_what_is_in_doubt_is_refused(place: Path | None) -> None:
    inside, paid = asyncio.Event(), Paid()

    async def hanging(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)

        async def pay() -> None:
            inside.set()
            await asyncio.Event().wait()

        return await ctx.step("pay", pay, on_in_doubt="fail")

    async with Rig(place) as rig:
        await rig.cut(hanging, inside)
        assert kind(await rig.go(by_step(paid))) == StepInDoubt.__name__
        for policy in ("refuse", "reuse"):
            result = await forked(rig, by_step(paid), effects=policy)
            assert kind(result) == "EffectAlreadyDone"
            assert result.error is not None
            assert "its outcome is unknown" in result.error.message
            assert '"reuse"' not in result.error.message
            assert await effects(rig, result.run_id) == [("refused", "r")]
        assert paid.by == []
        assert (await forked(rig, by_step(paid), effects="repeat")).status == "succeeded"


async def test_a_failed_step_may_be_done_by_a_fork(place: Path | None) -> None:
    paid = Paid()
    for way in WAYS.values():
        paid.fails = True
        async with Rig(None if place is None else place.with_name(f"{len(paid.by)}.db")) as rig:
            await rig.go(way(paid))
            paid.fails = False
            if way is by_tool:
                continue  # the failure is the tool's answer, and recorded as such
            result = await forked(rig, way(paid))
            assert (result.status, await effects(rig, result.run_id)) == ("succeeded", []), kind(result)


async def test_a_failed_repetition_does_not_free_the_effect(place: Path | None) -> None:
    paid = Paid()
    async with Rig(place) as rig:
        await rig.value(by_step(paid))
        paid.fails = True
        assert kind(await forked(rig, by_step(paid), effects="repeat")) == "StepExecutionError"
        paid.fails = False
        assert kind(await forked(rig, by_step(paid))) == "EffectAlreadyDone"


async def test_a_reviewed_failure_may_be_done_by_a_fork(place: Path | None) -> None:
    inside, paid = asyncio.Event(), Paid()

    async def hanging(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)

        async def pay() -> None:
            inside.set()
            await asyncio.Event().wait()

        return await ctx.step("pay", pay, on_in_doubt="review")

    async with Rig(place, park_after=0) as rig:
        rig.register(hanging)
        await rig.runner.submit("script", run_id="r")
        working = asyncio.ensure_future(rig.runner.run_once())
        await inside.wait()
        working.cancel()
        await asyncio.wait({working})
        rig.register(by_step(paid, "review"))
        while await rig.runner.run_once():
            pass
        await rig.runner.signal("r", "in_doubt:pay", {"outcome": "failed"})
        assert (await worked(rig, "r")).status == "failed"
        assert (await forked(rig, by_step(paid, "review"))).status == "succeeded"


async def test_the_original_refuses_what_a_fork_did_first(place: Path | None) -> None:
    paid, ready = Paid(), False

    async def body(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        if str(ctx.run_key or "") == "r" and not ready:
            raise ConnectionError("not yet")
        return await ctx.step("pay", lambda: paid.pay(ctx.run_id), on_in_doubt="fail")

    async with Rig(place) as rig:
        await rig.go(body)
        done = await forked(rig, body, new_run_id="fork")
        assert done.status == "succeeded"
        ready = True
        result = await rig.go(body)
        assert (kind(result), len(paid.by)) == ("EffectAlreadyDone", 1)
        assert await effects(rig, result.run_id) == [("refused", "fork")]


async def test_of_two_forks_at_once_one_does_it(place: Path | None) -> None:
    paid, both = Paid(), asyncio.Event()
    waiting: list[Any] = []

    async def body(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        if ctx.run_key == "r":
            return None
        waiting.append(ctx.run_id)
        if len(waiting) == 2:
            both.set()
        await both.wait()
        return await ctx.step("pay", lambda: paid.pay(ctx.run_id), on_in_doubt="fail")

    async with Rig(place) as rig:
        await rig.go(body)
        rig.register(body)
        forks = [await rig.runner.fork("r", "first") for _ in range(2)]
        await asyncio.gather(*(rig.runner.run_once() for _ in forks))
        results = [await rig.runner.wait(each) for each in forks]
        assert sorted(each.status or "" for each in results) == ["failed", "succeeded"]
        assert len(paid.by) == 1


async def test_a_crash_after_a_repetition_was_begun_leaves_it_in_doubt(place: Path | None) -> None:
    """The policy of the fork allowed it once: it does not repeat its own start."""
    inside, paid = asyncio.Event(), Paid()

    async def hanging(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)

        async def pay() -> None:
            inside.set()
            await asyncio.Event().wait()

        return await ctx.step("pay", pay, on_in_doubt="fail")

    async with Rig(place) as rig:
        await rig.value(by_step(paid))
        rig.register(hanging)
        new = await rig.runner.fork("r", "first", effects="repeat")
        working = asyncio.ensure_future(rig.runner.run_once())
        await inside.wait()
        working.cancel()
        await asyncio.wait({working})
        rig.register(by_step(paid))
        assert kind(await worked(rig, new)) == "StepInDoubt"
        assert await effects(rig, new) == [("repeated", "r")]
        assert len(paid.by) == 1


async def test_a_check_that_finds_nothing_does_not_allow_what_another_run_did_since(place: Path | None) -> None:
    inside, paid = asyncio.Event(), Paid()

    async def hanging(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)

        async def pay() -> None:
            inside.set()
            await asyncio.Event().wait()

        return await ctx.step("pay", pay, on_in_doubt=nothing_known)

    async with Rig(place) as rig:
        await rig.cut(hanging, inside)
        body = by_step(paid, nothing_known)
        assert (await forked(rig, body, effects="repeat", new_run_id="fork")).status == "succeeded"
        result = await rig.go(body)
        assert (kind(result), len(paid.by)) == ("EffectAlreadyDone", 1)
        assert await effects(rig, result.run_id) == [("refused", "fork")]


async def test_a_check_that_finds_the_effect_counts_as_done(place: Path | None) -> None:
    inside, paid = asyncio.Event(), Paid()

    async def hanging(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)

        async def pay() -> None:
            inside.set()
            await asyncio.Event().wait()

        return await ctx.step("pay", pay, on_in_doubt="fail")

    async with Rig(place) as rig:
        await rig.cut(hanging, inside)
        found = by_step(paid, lambda: AlreadyDone({"number": 7}))
        assert await rig.value(found) == {"number": 7}
        result = await forked(rig, by_step(paid), effects="reuse")
        assert result.final_output["value"] == {"number": 7}
        assert paid.by == []


# -- what is another effect, and what is none


async def test_other_arguments_are_another_effect(place: Path | None) -> None:
    paid = Paid()

    def paying(amount: int) -> Body:
        async def body(ctx: Any) -> Any:
            await ctx.step("first", lambda: 1)

            async def pay(amount: int) -> Any:
                return await paid.pay(ctx.run_id, amount)

            return await ctx.step("pay", pay, amount, on_in_doubt="fail")

        return body

    async with Rig(place) as rig:
        await rig.value(paying(1))
        assert (await forked(rig, paying(2))).status == "succeeded"
        assert kind(await forked(rig, paying(1))) == "EffectAlreadyDone"
        assert kind(await forked(rig, paying(2))) == "EffectAlreadyDone"


LOOK, PAY, ASK = call("look", {}, "a"), call("pay", {"amount": 5}, "b"), call("ask", {"amount": 5}, "c")


async def test_a_call_that_a_model_makes_in_another_turn_is_the_same_effect(place: Path | None) -> None:
    paid = Paid()
    async with Rig(place) as rig:
        await rig.value(by_model(paid, PAY))
        result = await forked(rig, by_model(paid, LOOK, PAY))
        assert kind(result) == "EffectAlreadyDone"
        assert result.error is not None
        assert "call of tool 'pay' was already done" in result.error.message
        assert (await forked(rig, by_model(paid, LOOK, LOOK, PAY), effects="reuse")).status == "succeeded"
        assert len(paid.by) == 1


async def test_calls_with_the_same_arguments_are_counted(place: Path | None) -> None:
    paid = Paid()
    async with Rig(place) as rig:
        await rig.value(by_model(paid, PAY, LOOK, PAY))
        assert len(paid.by) == 2
        assert (await forked(rig, by_model(paid, LOOK, PAY, PAY), effects="reuse")).status == "succeeded"
        assert len(paid.by) == 2
        after = await forked(rig, by_model(paid, PAY, PAY, PAY), ("tool", "l:0:0:0"), effects="reuse")
        assert after.status == "succeeded"  # its third call is one that the first run never made
        assert len(paid.by) == 3


async def answered(rig: Rig, run_id: Any, *answers: Any) -> RunResult:
    """Give the run these answers to its confirmations, and work it off."""
    for answer in answers:
        while await rig.runner.run_once():
            pass
        await rig.runner.approve(run_id, "tool:ask", answer)
    return await worked(rig, run_id)


async def test_the_arguments_that_a_person_gave_are_those_of_the_effect(place: Path | None) -> None:
    paid, other = Paid(), {"approved": True, "arguments": {"amount": 7}}
    async with Rig(place, park_after=0) as rig:
        rig.register(by_model(paid, ASK, ASK))
        await rig.runner.submit("script", run_id="r")
        assert (await answered(rig, "r", other, other)).status == "succeeded"
        rig.register(by_model(paid, LOOK, ASK))
        assert kind(await answered(rig, await rig.runner.fork("r", "first"), other)) == "EffectAlreadyDone"
        assert len(paid.by) == 2
        rig.register(by_model(paid, ASK, ASK, ASK))
        third = await rig.runner.fork("r", ("tool", "l:0:1:0"), effects="reuse")
        assert (await answered(rig, third, other)).status == "succeeded"
        assert len(paid.by) == 3


async def test_a_call_that_a_person_refused_is_not_counted(place: Path | None) -> None:
    paid = Paid()
    async with Rig(place, park_after=0) as rig:
        rig.register(by_model(paid, ASK, ASK))
        await rig.runner.submit("script", run_id="r")
        assert (await answered(rig, "r", False, True)).status == "succeeded"
        for after, turns in (("first", [LOOK, ASK]), (("tool", "l:0:0:0"), [ASK, LOOK, ASK])):
            rig.register(by_model(paid, *turns))
            assert kind(await answered(rig, await rig.runner.fork("r", after), True)) == "EffectAlreadyDone"
        assert len(paid.by) == 1


async def test_who_is_asked_is_shown_the_call(place: Path | None) -> None:
    paid = Paid()
    async with Rig(place) as rig:
        await rig.value(by_tool(paid))
        new = (await forked(rig, by_tool(paid), effects="ask")).run_id
        [asked] = [payload for _, payload in await rig.told("approval.requested", str(new))]
        assert asked["details"]["tool_name"] == "pay"
        assert asked["details"]["tool_args"] == {"amount": 5}


async def test_a_step_that_was_renamed_is_the_same_effect(place: Path | None) -> None:
    paid = Paid()

    async def renamed(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        ctx.renamed("pay", "charge")
        return await ctx.step("charge", lambda: paid.pay(ctx.run_id), on_in_doubt="fail")

    async with Rig(place) as rig:
        await rig.value(by_step(paid))
        assert kind(await forked(rig, renamed)) == "EffectAlreadyDone"
        assert (await forked(rig, renamed, effects="reuse")).final_output["value"]["number"] == 1


async def test_a_plain_run_writes_and_reads_no_effects(place: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    paid, asked = Paid(), list[Any]()

    async def noted(self: StateStore, *args: Any) -> Any:
        asked.append(args)
        return []

    monkeypatch.setattr(StateStore, "effects", noted)
    async with Rig(place) as rig:
        engine: Any = rig.runner.state_store.commits
        commit = engine.commit

        def written(guard: Any, ops: Any) -> Awaitable[Any]:
            asked.extend(op for op in ops if op.name.startswith("effect."))
            return commit(guard, ops)  # type: ignore[no-any-return]

        engine.commit = written
        await rig.value(by_step(paid, "retry"))
        assert asked == []
        assert (await forked(rig, by_step(paid, "retry"))).status == "succeeded"
        assert {each.args[0].status for each in asked if isinstance(each, Op)} == {"member"}
        asked.clear()
        await rig.value(by_step(paid), "guarded")
        assert [each.name for each in asked] == ["effect.begin", "effect.put"]


# -- approvals


def approving(paid: Paid, *names: str, pays: bool = True) -> Body:
    async def body(ctx: Any) -> Any:
        for name in names:
            assert await ctx.approve(name, {"amount": 5})
        await ctx.step("between", lambda: 1)
        if not pays:
            raise ConnectionError("no route")
        return await ctx.step("pay", lambda: paid.pay(ctx.run_id), on_in_doubt="fail")

    return body


async def approved(rig: Rig, body: Body, run_id: str = "r", names: tuple[str, ...] = ("pay",)) -> RunResult:
    rig.register(body)
    await rig.runner.submit("script", run_id=run_id)
    for name in names:
        while await rig.runner.run_once():
            pass
        assert await rig.runner.approve(run_id, name, True)
    return await worked(rig, run_id)


@pytest.mark.parametrize("after", ["signal:pay", "between"])
async def test_an_approval_in_the_prefix_is_spent(after: str, place: Path | None) -> None:
    paid = Paid()
    async with Rig(place, park_after=0) as rig:
        assert (await approved(rig, approving(paid, "pay", pays=False))).status == "failed"
        body = approving(paid, "pay")
        result = await forked(rig, body, after)
        assert (kind(result), paid.by) == ("EffectAlreadyDone", [])
        assert result.error is not None
        assert "step 'pay' must have an approval of this run" in result.error.message
        [(_, payload)] = await rig.told("step.effect", str(result.run_id))
        assert (payload["action"], payload["status"], payload["approval"]) == ("refused", "approved", "pay")
        further = await forked(rig, body, after, source=result.run_id, effects="ask")
        [(_, asked)] = await rig.told("approval.requested", str(further.run_id))
        assert asked["name"] == "repeat:pay"
        details = {name: asked["details"][name] for name in ("approval", "status", "run_id")}
        source = str((await rig.runner.get_run("r")).run_id)
        assert details == {"approval": "pay", "status": "approved", "run_id": source}, "the run that it was given to"
        await rig.runner.approve(further.run_id, "repeat:pay", True)  # type: ignore[arg-type]
        assert (await worked(rig, further.run_id)).status == "succeeded"
        assert len(paid.by) == 1


@pytest.mark.parametrize("policy", ["reuse", "repeat"])
async def test_a_spent_approval_is_no_hindrance_to_a_fork_that_is_told_so(policy: str, place: Path | None) -> None:
    paid = Paid()
    async with Rig(place, park_after=0) as rig:
        await approved(rig, approving(paid, "pay", pays=False))
        assert (await forked(rig, approving(paid, "pay"), "between", effects=policy)).status == "succeeded"


async def test_a_fork_asks_again_and_its_own_answer_counts(place: Path | None) -> None:
    paid = Paid()
    names = ("plan", "pay")
    async with Rig(place, park_after=0) as rig:
        await approved(rig, approving(paid, *names, pays=False), names=names)
        new = (await forked(rig, approving(paid, *names), "signal:plan")).run_id
        assert new is not None
        [(_, asked)] = await rig.told("approval.requested", str(new))
        assert asked["name"] == "pay"
        assert asked["approved_before"] == str((await rig.runner.get_run("r")).run_id)
        assert paid.by == []
        await rig.runner.approve(new, "pay", True)
        assert (await worked(rig, new)).status == "succeeded"
        assert len(paid.by) == 1
        told = await rig.told("approval.requested", "r")
        assert all("approved_before" not in payload for _, payload in told)


async def test_a_renamed_approval_names_the_run_that_got_it_under_its_former_name(place: Path | None) -> None:
    async def plan(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        return await ctx.approve("pay", {"amount": 5})

    async def renamed(ctx: Any) -> Any:
        ctx.renamed("pay", "transfer")
        await ctx.step("first", lambda: 1)
        return await ctx.approve("transfer", {"amount": 5})

    async with Rig(place, park_after=0) as rig:
        await approved(rig, plan)
        new = (await forked(rig, renamed)).run_id
        [(_, asked)] = await rig.told("approval.requested", str(new))
        assert (asked["name"], asked["approved_before"]) == ("transfer", str((await rig.runner.get_run("r")).run_id))


async def test_one_approval_and_two_forks_make_one_payment(place: Path | None) -> None:
    paid = Paid()
    async with Rig(place, park_after=0) as rig:
        assert (await approved(rig, approving(paid, "pay"))).status == "succeeded"
        for _ in range(2):
            assert kind(await forked(rig, approving(paid, "pay"), "signal:pay")) == "EffectAlreadyDone"
        assert len(paid.by) == 1


# -- children


def calling(key: str = "payer") -> Body:
    async def body(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        return (await ctx.call(key, {"n": 1})).final_output["value"]

    return body


async def test_a_child_of_a_fork_belongs_to_the_lineage_of_the_child_before(place: Path | None) -> None:
    paid = Paid()
    async with Rig(place, park_after=0) as rig:
        rig.register(by_step(paid), "payer")
        rig.register(calling())
        await rig.runner.submit("script", run_id="r")
        assert (await worked(rig, "r")).status == "succeeded"
        refused = await forked(rig, calling())
        assert (refused.status, len(paid.by)) == ("failed", 1)
        assert refused.error is not None
        assert "EffectAlreadyDone" in str(refused.error)
        reused = await forked(rig, calling(), effects="reuse")
        assert (reused.status, len(paid.by)) == ("succeeded", 1)
        repeated = await forked(rig, calling(), effects="repeat")
        assert (repeated.status, len(paid.by)) == ("succeeded", 2)
        further = await forked(rig, calling(), source=repeated.run_id)
        assert (further.status, len(paid.by)) == ("failed", 2)


async def test_a_child_of_a_fork_has_no_approval_of_the_prefix(place: Path | None) -> None:
    paid = Paid()

    async def body(ctx: Any) -> Any:
        await ctx.approve("go")
        if ctx.run_key == "r":
            raise ConnectionError("not yet")
        return (await ctx.call("payer", {"n": 1})).final_output["value"]

    async with Rig(place, park_after=0) as rig:
        rig.register(by_step(paid), "payer")
        await approved(rig, body, names=("go",))
        assert (await forked(rig, body, "signal:go")).status == "failed"
        assert paid.by == []
        assert (await forked(rig, body, "signal:go", effects="repeat")).status == "succeeded"


# -- the fork itself


async def test_the_policy_is_part_of_the_fork(place: Path | None) -> None:
    paid = Paid()
    async with Rig(place) as rig:
        await rig.value(by_step(paid))
        for wrong in ("Repeat", "", None, 1, True):
            with pytest.raises(InvalidArgument, match="effects must be 'refuse', 'reuse', 'ask' or 'repeat'"):
                await rig.runner.fork("r", "first", effects=wrong)  # type: ignore[arg-type]
        new = await rig.runner.fork("r", "first", new_run_id="fork", effects="reuse")
        assert (await rig.runner.get_run(new)).metadata["forked_from"]["effects"] == "reuse"
        assert await rig.runner.fork("r", "first", new_run_id="fork", effects="reuse") == new
        for other in ("refuse", "ask", "repeat"):
            with pytest.raises(IdempotencyConflict):
                await rig.runner.fork("r", "first", new_run_id="fork", effects=other)
        [first, *_] = await rig.records("fork")
        source = str((await rig.runner.get_run("r")).run_id)
        assert first.kind == FORKED
        assert json.loads(first.info or "") == {"origin": source, "effects": "reuse", "approvals": []}


async def test_a_fork_of_an_earlier_release_refuses(place: Path | None) -> None:
    """Its first record says nothing of a lineage: the run that it was copied from is the first one."""
    paid = Paid()
    async with Rig(place) as rig:
        await rig.value(by_step(paid))
        rig.register(by_step(paid))
        state = rig.runner.state_store
        new = str(await rig.runner.fork("r", "first"))
        [first, *others] = await rig.records(new)
        records = [first._replace(info=None), *others]
        ops = [Op("state.delete", (new,)), *(Op("journal.append", (new, each)) for each in records)]
        await state.commits.commit(None, ops)
        assert kind(await worked(rig, new)) == "EffectAlreadyDone"
        assert len(paid.by) == 1


async def test_a_block_of_open_run_refuses_as_well(tmp_path: Path) -> None:
    paid, path = Paid(), tmp_path / "jobs.db"
    async with open_run(path, "one") as ctx:
        await by_step(paid)(ctx)
    async with Rig(path) as rig:
        await rig.runner.fork("one", "first", new_run_id="two")
    with pytest.raises(EffectAlreadyDone) as told:
        async with open_run(path, "two") as ctx:
            await by_step(paid)(ctx)
    assert (told.value.step_name, told.value.status, len(paid.by)) == ("pay", "done", 1)
    assert isinstance(UUID(told.value.run_id), UUID)


# -- deletion


async def kept(rig: Rig) -> int:
    origin = str((await rig.runner.queue.require("r")).run_id)
    return len(await rig.runner.state_store.effects(origin, "pay\ts:0", "c"))


async def test_effects_go_with_the_last_run_of_the_lineage(place: Path | None) -> None:
    paid = Paid()
    async with Rig(place) as rig:
        await rig.value(by_step(paid))
        runner = rig.runner
        one = (await forked(rig, by_step(paid))).run_id
        two = (await forked(rig, by_step(paid), source=one)).run_id
        assert one is not None
        assert two is not None
        await runner.discard("r")
        await runner.discard(one)
        assert kind(await forked(rig, by_step(paid), source=two, new_run_id="three")) == "EffectAlreadyDone"
        await runner.discard(two)
        assert kind(await forked(rig, by_step(paid), source="three", new_run_id="four")) == "EffectAlreadyDone"
        await runner.discard("three")
        await runner.discard("four")
        assert await _rows(rig) == 0


async def test_the_effects_of_a_run_that_was_never_forked_go_with_it(place: Path | None) -> None:
    paid = Paid()
    async with Rig(place, park_after=0) as rig:
        await rig.value(by_step(paid))
        assert await _rows(rig) == 1
        await rig.runner.discard("r")
        assert await _rows(rig) == 0
        rig.register(by_step(paid), "payer")
        rig.register(calling())
        await rig.runner.submit("script", run_id="r")
        await worked(rig, "r")
        await forked(rig, calling(), effects="repeat")
        assert await _rows(rig) > 2
        rig.clock.advance(1000)  # type: ignore[attr-defined]
        assert await rig.runner.vacuum({"succeeded": 10}) == 4
        assert await _rows(rig) == 0


async def _rows(rig: Rig) -> int:
    engine: Any = rig.runner.state_store.commits
    if rig.path is None:
        return stored_effects(engine.tables["effects"])
    return await engine.read(lambda view: view.execute("SELECT count(*) FROM arc_effects").fetchone()[0])  # type: ignore[no-any-return]
