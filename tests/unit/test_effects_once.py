"""With `effects="refuse"`, no effect happens twice in a lineage, whatever happens to its runs."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from agent_runtime_core._engines.payloads import Payloads
from agent_runtime_core._execution import effects
from agent_runtime_core._execution.effects import GuardedStep, TimeLimitPassed
from agent_runtime_core._execution.journal_view import JournalView
from agent_runtime_core._execution.run_control import RunControl
from agent_runtime_core._execution.step_journal import StepJournal
from agent_runtime_core._execution.step_keys import LineageKeys
from agent_runtime_core._journal.record import Record
from agent_runtime_core.errors import EffectAlreadyDone, JournalMismatch, StepExecutionError, StepInDoubt
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.runner import forking
from tests.support.random_payments import History, Node, histories, programs
from tests.support.reencryption import Place
from tests.support.runs import Body, Rig

OPTIONS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "phases": (Phase.generate,),  # an example takes too long for shrinking
    "suppress_health_check": list(HealthCheck),
}


def played(kind: str, examples: int, also: str = "fork") -> int:
    """Play random histories of random programs, and return how many were played."""
    count = 0

    @settings(max_examples=examples, **OPTIONS)
    @given(programs(), histories(also))
    def holds(program: list[Node], actions: list[tuple[Any, ...]]) -> None:
        nonlocal count
        count += 1
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(History(Place(kind, Path(folder)), program).play(actions))

    try:
        holds()
    except AssertionError as error:
        error.add_note(f"after {count} examples")
        raise
    return count


@pytest.mark.parametrize(
    ("kind", "also", "examples"), [("memory", "fork", 20), ("sqlite", "fork", 5), ("memory", "deploy", 10)]
)
def test_no_effect_happens_twice(kind: str, also: str, examples: int) -> None:
    played(kind, examples, also)


@pytest.mark.slow
@pytest.mark.parametrize("also", ["fork", "deploy"])
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_no_effect_happens_twice_in_many_histories(kind: str, also: str) -> None:
    played(kind, 400, also)


# -- the same without one of the safeguards


def _only_the_current_key(patch: pytest.MonkeyPatch) -> None:
    """Digests are compared under the current key of the codec only."""
    digests = Payloads.digests
    patch.setattr(Payloads, "digests", lambda self, plain: digests(self, plain)[:1])


def _no_adoption(patch: pytest.MonkeyPatch) -> None:
    """The rows of a child go with the child, although its caller is stored."""
    patch.setattr(effects, "_adoption", lambda origin, child: [])


def _no_doubt_in_the_attempt(patch: pytest.MonkeyPatch) -> None:
    """A step that `asyncio.timeout` cut off is not in doubt in the same attempt."""
    patch.setattr(GuardedStep, "enter", lambda self: None)


def _failure(patch: pytest.MonkeyPatch, wrong: Callable[[Any, Exception, bool], bool]) -> None:
    decided = GuardedStep.left_in_doubt

    def decide(self: GuardedStep, error: Exception, *, returned: bool) -> BaseException | None:
        return None if wrong(self, error, returned) else decided(self, error, returned=returned)

    patch.setattr(GuardedStep, "left_in_doubt", decide)


def _own_error_is_ordinary(patch: pytest.MonkeyPatch) -> None:
    """An error that the function raises after its cancellation is an ordinary one."""
    _failure(patch, lambda self, error, returned: isinstance(error, ConnectionError))


def _bad_result_is_a_failure(patch: pytest.MonkeyPatch) -> None:
    """A result that cannot be stored is a failure."""
    _failure(patch, lambda self, error, returned: returned)


def _time_limit_is_a_failure(patch: pytest.MonkeyPatch) -> None:
    """A time limit is a failure."""
    _failure(patch, lambda self, error, returned: isinstance(error, TimeLimitPassed))


def _key_with_occurrence(patch: pytest.MonkeyPatch) -> None:
    """An effect is found by the key of its step, which counts calls that failed."""
    patch.setattr(LineageKeys, "take", lambda self, name, key, digest: self._keys.shared_key(key))


def _failures_inside_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A step inside another one runs again after its recorded failure."""
    patch.setattr(JournalView, "_note_progress_inside", lambda self, identity: None)


def _rows_go_with_the_first_run(patch: pytest.MonkeyPatch) -> None:
    """The rows of a lineage go with its first run, although a fork is stored."""
    patch.setattr(forking, "membership", lambda origin, run_id: [])


def _stop_is_not_refused(patch: pytest.MonkeyPatch) -> None:
    """Code that was stopped, as in a drain, goes on with its steps."""

    async def goes_on(self: RunControl, step: str | None = None) -> None:
        pass

    patch.setattr(RunControl, "refuse", goes_on)


def _children_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A child run of the main line under another name is a new one."""
    check = StepJournal.check_order

    def lenient(self: StepJournal[Any], name: str, key: str, record: Record | None) -> None:
        try:
            check(self, name, key, record)
        except JournalMismatch:
            if key[:2] != "c:":
                raise

    patch.setattr(StepJournal, "check_order", lenient)


def _steps_inside_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    """A guarded step inside another one, under another name, is a new one."""
    patch.setattr(StepJournal, "check_inside", lambda self, name, key, record: None)


SEEDED = (
    _stop_is_not_refused,
    _only_the_current_key, _no_adoption, _no_doubt_in_the_attempt, _own_error_is_ordinary, _bad_result_is_a_failure,
    _time_limit_is_a_failure, _key_with_occurrence, _failures_inside_are_forgotten, _rows_go_with_the_first_run,
)  # fmt: skip
SEEDED_BEFORE_A_DEPLOY = (_children_are_not_compared, _steps_inside_are_not_compared)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDED + SEEDED_BEFORE_A_DEPLOY, ids=lambda seed: seed.__name__[1:])
def test_the_property_finds_a_missing_safeguard(seed: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        seed(patch)
        with pytest.raises(AssertionError, match=r"has paid back|paid too often"):
            played("memory", *((1000, "deploy") if seed in SEEDED_BEFORE_A_DEPLOY else (2000, "fork")))


# -- what the property has found


class Shop:
    """Pays orders. The bank refuses the first requests."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals, self.paid = refusals, list[int]()

    async def pay(self, order: int) -> str:
        if self.refusals:
            self.refusals -= 1
            raise ConnectionError("not paid")
        self.paid.append(order)
        return f"order {order}"

    async def paying(self, ctx: Any, order: int) -> Any:
        return await ctx.step("pay", self.pay, order, on_in_doubt="fail")

    async def until_paid(self, ctx: Any, order: int) -> Any:
        for _ in range(3):
            try:
                return await self.paying(ctx, order)
            except (StepExecutionError, EffectAlreadyDone) as error:
                refused = error
        raise refused


async def forked(rig: Rig, body: Body, after: str = "first", source: Any = "r") -> RunResult:
    """Return the result of a new fork, which executes this code."""
    rig.register(body)
    fork = await rig.runner.fork(source, after)
    while await rig.runner.run_once():
        pass
    return await rig.runner.wait(fork, timeout=0)


def error_of(result: RunResult) -> str:
    return "" if result.error is None else result.error.type


async def test_a_fork_refuses_what_was_paid_after_a_failure() -> None:
    """In the fork the payment has another key: no call failed before it."""
    shop = Shop(refusals=1)

    async def body(ctx: Any) -> Any:
        await ctx.step("first", int)
        return await shop.until_paid(ctx, 5)

    async with Rig(park_after=0) as rig:
        await rig.value(body)
        assert error_of(await forked(rig, body)) == "EffectAlreadyDone"
    assert shop.paid == [5]


async def test_a_fork_refuses_what_was_paid_after_the_step_around_it_failed() -> None:
    shop = Shop(refusals=1)

    async def body(ctx: Any) -> Any:
        await ctx.step("first", int)
        with contextlib.suppress(StepExecutionError):
            await ctx.step("order", shop.paying, ctx, 5)
        return await ctx.step("order", shop.paying, ctx, 5)

    async with Rig(park_after=0) as rig:
        await rig.value(body)
        assert error_of(await forked(rig, body)) in ("EffectAlreadyDone", "StepExecutionError")
    assert shop.paid == [5]


@pytest.mark.parametrize("inside", [False, True])
async def test_a_concurrent_payment_that_was_repeated_after_its_failure_is_not_paid_again(inside: bool) -> None:
    """A resumed run gets the failure first, as its code did then."""
    shop, cut = Shop(refusals=1), [True]

    async def orders(ctx: Any) -> Any:
        async def later() -> None:  # so that others run while the payment fails and is repeated
            await ctx.step("later", asyncio.sleep, 0.02)

        async with asyncio.TaskGroup() as tasks:
            paying = tasks.create_task(shop.until_paid(ctx, 5))
            tasks.create_task(later())
        if cut:
            cut.clear()
            raise ValueError
        return paying.result()

    async def body(ctx: Any) -> Any:
        return await (ctx.step("orders", orders, ctx) if inside else orders(ctx))

    async with Rig(park_after=0) as rig:
        await rig.go(body)
        assert await rig.value(body) == "order 5"
    assert shop.paid == [5]


async def test_a_payment_in_a_step_that_was_repeated_inside_another_one_is_not_paid_again() -> None:
    shop, cut = Shop(refusals=1), [True]

    async def orders(ctx: Any) -> Any:
        with contextlib.suppress(StepExecutionError):
            return await ctx.step("order", shop.paying, ctx, 5)
        paid = await ctx.step("order", shop.paying, ctx, 5)
        if cut:
            cut.clear()
            raise ValueError
        return paid

    async def body(ctx: Any) -> Any:
        return await ctx.step("orders", orders, ctx)

    async with Rig(park_after=0) as rig:
        await rig.go(body)
        assert await rig.value(body) == "order 5"
    assert shop.paid == [5]


async def test_equal_payments_without_keys_are_counted() -> None:
    shop = Shop()

    async def body(ctx: Any) -> Any:
        await ctx.step("first", int)
        await shop.paying(ctx, 5)
        await ctx.step("second", int)
        return await shop.paying(ctx, 5)

    async with Rig(park_after=0) as rig:
        await rig.value(body)
        assert shop.paid == [5, 5]
        for after in ("first", "second"):
            assert error_of(await forked(rig, body, after)) == "EffectAlreadyDone"
    assert shop.paid == [5, 5]


async def test_a_fork_pays_what_the_run_has_not_paid_yet() -> None:
    shop, cut = Shop(), [True]

    async def body(ctx: Any) -> Any:
        await ctx.step("order", shop.paying, ctx, 5)
        if cut:
            cut.clear()
            raise ValueError
        return await ctx.step("order", shop.paying, ctx, 5)

    async with Rig(park_after=0) as rig:
        await rig.go(body)
        assert error_of(await forked(rig, body, "order")) == ""
        assert shop.paid == [5, 5]
        assert error_of(await rig.go(body)) == "EffectAlreadyDone", "the fork has paid it"
    assert shop.paid == [5, 5]


async def test_a_step_inside_another_one_is_not_paid_again_after_its_failure() -> None:
    """The body called it again after the failure; a resumed body gets the failure first, as it did then."""
    shop, cut = Shop(refusals=1), [True]

    async def order(ctx: Any) -> Any:
        found = await shop.until_paid(ctx, 5)
        if cut:
            cut.clear()
            raise ValueError
        return found

    async def body(ctx: Any) -> Any:
        await ctx.step("first", int)
        return await ctx.step("order", order, ctx)

    async with Rig(park_after=0) as rig:
        await rig.go(body)
        assert await rig.value(body) == "order 5"
    assert shop.paid == [5]


async def test_a_fork_continues_after_a_refusal_and_is_resumed() -> None:
    shop, cut = Shop(), [True]

    async def body(ctx: Any) -> Any:
        await ctx.step("first", int)
        for order in (5, 6):
            with contextlib.suppress(EffectAlreadyDone):
                await shop.paying(ctx, order)
            if order == 5 and cut:
                raise ValueError
        await ctx.step("last", int)
        if len(shop.paid) == 2 and not cut:
            cut.append(True)
            raise ValueError
        return "done"

    async with Rig(park_after=0) as rig:
        await rig.go(body)
        cut.clear()
        rig.register(body)
        fork = await rig.runner.fork("r", "first", new_run_id="fork")
        await rig.runner.run_once()
        assert error_of(await rig.runner.wait(fork, timeout=0)) == "ValueError"
        cut.clear()
        shop.paid.append(0)  # so that the code does not fail again
        await rig.runner.resume(fork)
        await rig.runner.run_once()
        assert error_of(await rig.runner.wait(fork, timeout=0)) == ""
    assert shop.paid == [5, 6, 0]


async def test_a_fork_repeats_a_step_that_contained_a_step_in_doubt() -> None:
    """The code called it twice under one key, because its first call was not over."""
    paid: list[int] = []

    async def pay() -> None:
        paid.append(5)
        await asyncio.get_running_loop().create_future()

    async def order(ctx: Any) -> None:
        async with asyncio.timeout(0.01):
            await ctx.step("pay", pay, on_in_doubt="fail")

    async def body(ctx: Any) -> str:
        for _ in range(2):
            with contextlib.suppress(StepExecutionError, StepInDoubt, EffectAlreadyDone):
                await ctx.step("order", order, ctx)
        await ctx.step("last", int)
        return "done"

    async with Rig(park_after=0) as rig:
        await rig.value(body)
        assert error_of(await forked(rig, body, "last")) == ""
    assert paid == [5]


async def test_concurrent_steps_of_a_child_of_a_fork_wait_for_its_lineage(tmp_path: Path) -> None:
    shop = Shop()

    async def kid(ctx: Any) -> None:
        found = await asyncio.gather(
            *(ctx.step(f"pay {order}", shop.pay, order, on_in_doubt="fail") for order in (5, 6)), return_exceptions=True
        )
        assert shop.paid == [5, 6], found

    async def body(ctx: Any) -> None:
        await ctx.step("first", int)
        await ctx.call("kid", {})

    async with Rig(tmp_path / "runs.db", park_after=0) as rig:
        rig.register(kid, "kid")
        rig.register(body)
        await rig.runner.submit("script", run_id="r")
        while await rig.runner.run_once():
            pass
        await forked(rig, body)
    assert sorted(shop.paid) == [5, 6]
