"""A guarded step whose function was entered is done or in doubt, until its function raised an ordinary error.

Every way of cutting it off, kind of step and policy, each followed by the same call in the same attempt, a resume, or a
fork.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agent_runtime_core._core.redaction import Redaction
from agent_runtime_core._engines.base import Op
from agent_runtime_core._execution.step import AlreadyDone
from agent_runtime_core._journal.record import Record
from agent_runtime_core.errors import StepExecutionError, StorageFull
from agent_runtime_core.interfaces import RunContext
from agent_runtime_core.loop import run_turn_loop
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.testing.clock import VirtualClock
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.fault_runs import KINDS, Store, drop, settings, store
from tests.support.runs import interrupted
from tests.support.scripted_model import Scripted, asks, call

pytestmark = pytest.mark.parametrize("kind", KINDS)

SETTINGS = settings(max_retries=1, park_after=0)

Call = Callable[[], Awaitable[Any]]


@dataclass
class Receipt:
    number: int


class Bank:
    """Books each payment. The answer to the first one does not arrive as it should: `ending` says how."""

    def __init__(self, ending: Callable[[], Awaitable[Any]] | None) -> None:
        self.paid: list[int] = []
        self.ending = ending
        self.booked: Callable[[], object] = lambda: None

    async def pay(self, amount: int) -> Any:
        self.paid.append(amount)
        if len(self.paid) > 1 or self.ending is None:
            return {"number": len(self.paid)}
        self.booked()
        return await self.ending()

    async def typed(self, amount: int) -> Receipt:
        found: Any = await self.pay(amount)
        return Receipt(**found) if len(self.paid) > 1 else found  # what another version of the bank returned


# -- how the first payment ends


async def hangs() -> Any:
    await asyncio.get_running_loop().create_future()


async def hangs_and_fails() -> Any:
    """The client of the bank makes an error of its own of the cancellation."""
    try:
        await hangs()
    except asyncio.CancelledError:
        raise ConnectionError("connection closed") from None


async def another_type() -> Any:
    return {"id": "receipt 1"}


async def nan() -> Any:
    return {"number": math.nan}


async def too_large() -> Any:
    return "x" * 2_000_000


async def no_json() -> Any:
    return object()


# -- who cuts it off


async def plainly(bank: Bank, pay: Call) -> Any:
    return await pay()


async def by_timeout(bank: Bank, pay: Call) -> Any:
    async with asyncio.timeout(None) as limit:
        bank.booked = lambda: limit.reschedule(asyncio.get_running_loop().time())
        return await pay()


async def by_task_group(bank: Bank, pay: Call) -> Any:
    booked = asyncio.Event()
    bank.booked = booked.set

    async def fails() -> None:
        await booked.wait()
        raise LookupError("the sibling")

    async with asyncio.TaskGroup() as group:
        group.create_task(fails())
        paying = group.create_task(_task(pay))
    return paying.result()


async def by_cancelled_task(bank: Bank, pay: Call) -> Any:
    return await asyncio.gather(await _cancelled(bank, pay))


async def by_task_that_nobody_awaits(bank: Bank, pay: Call) -> Any:
    _ = await _cancelled(bank, pay)
    raise LookupError("too late")


async def _cancelled(bank: Bank, pay: Call) -> asyncio.Task[Any]:
    booked = asyncio.Event()
    bank.booked = booked.set
    paying = asyncio.create_task(_task(pay))
    await booked.wait()
    paying.cancel()
    return paying


async def _task(pay: Call) -> Any:
    return await pay()


@dataclass
class Cut:
    """How the first payment is cut off."""

    ending: Callable[[], Awaitable[Any]]
    cut: Callable[[Bank, Call], Awaitable[Any]] = plainly
    options: dict[str, Any] = field(default_factory=dict)
    typed: bool = False

    @property
    def returns(self) -> bool:
        return self.ending in (nan, too_large, no_json, another_type)


CUTS: dict[str, Cut] = {
    "timeout": Cut(hangs, by_timeout),
    "timeout, own error": Cut(hangs_and_fails, by_timeout),
    "timeout, own error, retries": Cut(hangs_and_fails, by_timeout, {"retries": 2, "retry_delay": 0.0}),
    "task group": Cut(hangs, by_task_group),
    "task group, own error": Cut(hangs_and_fails, by_task_group),
    "cancelled task": Cut(hangs, by_cancelled_task),
    "cancelled task, own error": Cut(hangs_and_fails, by_cancelled_task),
    "task that nobody awaits": Cut(hangs, by_task_that_nobody_awaits),
    "time limit": Cut(hangs, plainly, {"timeout": 0.01, "retries": 2, "retry_delay": 0.0}),
    "time limit, own error": Cut(hangs_and_fails, plainly, {"timeout": 0.01}),
    "NaN": Cut(nan, plainly, {"retries": 2, "retry_delay": 0.0}),
    "too large": Cut(too_large),
    "no JSON": Cut(no_json),
    "another type": Cut(another_type, typed=True),
}

# -- kinds of steps

Way = Callable[[Any, Bank, Cut, Any], Awaitable[Any]]


async def by_step(ctx: Any, bank: Bank, how: Cut, policy: Any) -> Any:
    return await ctx.step("pay", bank.typed if how.typed else bank.pay, 5, on_in_doubt=policy, **how.options)


async def by_key(ctx: Any, bank: Bank, how: Cut, policy: Any) -> Any:
    fn = bank.typed if how.typed else bank.pay
    return await ctx.step("pay", fn, 5, key="order-5", on_in_doubt=policy, **how.options)


def _steps(bank: Bank, how: Cut, policy: Any, **options: Any) -> list[Step]:
    async def order(ctx: Any, state: Any) -> int:
        return 5

    async def pay(ctx: Any, state: Any) -> Any:
        return await bank.pay(5)

    async def pay_typed(ctx: Any, state: Any) -> Receipt:
        return await bank.typed(5)

    fn = pay_typed if how.typed else pay
    return [Step("order", order), Step("pay", fn, on_in_doubt=policy, **how.options, **options)]


async def by_list(ctx: Any, bank: Bank, how: Cut, policy: Any) -> Any:
    return (await StepExecutor(ctx).run(_steps(bank, how, policy)))["pay"]


async def by_graph(ctx: Any, bank: Bank, how: Cut, policy: Any) -> Any:
    return (await StepExecutor(ctx).run(_steps(bank, how, policy, depends_on=["order"])))["pay"]


async def by_map(ctx: Any, bank: Bank, how: Cut, policy: Any) -> Any:
    fn: Any = bank.typed if how.typed else bank.pay
    return (await StepExecutor(ctx).map("pay", fn, [5], on_in_doubt=policy, **how.options))[0]


async def inside_a_step(ctx: Any, bank: Bank, how: Cut, policy: Any) -> Any:
    async def order() -> Any:
        found = await by_step(ctx, bank, how, policy)
        return asdict(found) if isinstance(found, Receipt) else found

    return await ctx.step("order", order)


async def by_tool(ctx: Any, bank: Bank, how: Cut, policy: Any) -> Any:
    async def pay(amount: int) -> Any:
        """Pay."""
        return await bank.pay(amount)

    tools = ToolRegistry()
    about: dict[str, Any] = {"metadata": {"on_in_doubt": policy}, **how.options}
    tools.register(Tool.from_function(pay, has_side_effects=True, **about))
    model = Scripted(say=lambda said: "done" if len(said) > 1 else asks(call("pay", {"amount": 5}, "c")))
    done = await run_turn_loop(ctx, model, tools, messages=[{"role": "user", "content": "pay"}])
    return done.messages[-2]["content"]


WAYS: dict[str, Way] = {
    "step": by_step,
    "key": by_key,
    "list": by_list,
    "graph": by_graph,
    "map": by_map,
    "inside": inside_a_step,
    "tool": by_tool,
}

POLICIES = ("fail", "review", "nothing found", "found")


ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


class Case:
    """One combination, with an agent and a run of the name of the combination."""

    def __init__(self, here: Store, cut: str, way: Way, policy: str) -> None:
        self.name = f"{cut}: {policy}"
        self.here, self.how, self.way, self.policy = here, CUTS[cut], way, policy
        self.bank = Bank(self.how.ending)

    def pay(self, ctx: Any) -> Call:
        found: Any = Receipt(9) if self.how.typed else {"number": 9}
        checks = {"nothing found": lambda: None, "found": lambda: AlreadyDone(found)}
        return lambda: self.way(ctx, self.bank, self.how, checks.get(self.policy, self.policy))

    def paying(self, cut: Callable[[Bank, Call], Awaitable[Any]]) -> None:
        """Let the agent pay in this way."""

        async def body(ctx: Any) -> Any:
            await ctx.step("first", lambda: 1)
            found = await cut(self.bank, self.pay(ctx))
            return asdict(found) if isinstance(found, Receipt) else found

        self.here.agent(self.name, body)

    async def settle(self, runner: AgentRunner) -> None:
        """The run meets its step in doubt: by its policy it fails, asks, pays again, or takes the result."""
        policy, name = self.policy, self.name
        working = asyncio.ensure_future(worked(runner))
        if policy == "review":
            asked: list[str] = []
            async with asyncio.timeout(10):
                while not asked:
                    await asyncio.sleep(0.001)
                    asked = [each.name for each in await runner.approvals() if each.run_key == name]
            assert len(self.bank.paid) == 1
            await runner.approve(name, asked[0], {"outcome": "done", "result": {"number": 0}})
        await working
        await worked(runner)
        result = await runner.wait(name, timeout=5)
        if policy == "fail":
            assert result.error is not None
            assert (result.status, result.error.type) == ("failed", "StepInDoubt"), result.error
        else:
            assert result.status == "succeeded", result.error
            number = {"review": 0, "found": 9, "nothing found": 2}[policy]
            assert f"{number}" in str(result.final_output["value"])
        assert len(self.bank.paid) == (2 if policy == "nothing found" else 1)


@asynccontextmanager
async def cases(kind: str, path: Path, way: Way, policies: Iterable[str]) -> AsyncIterator[tuple[Any, list[Case]]]:
    """All ways of cutting the step off, under each of these policies."""
    async with store(kind, path) as here:
        # The result of a tool that cannot be stored is described to the model: the call is done.
        names = [name for name, how in CUTS.items() if way is not by_tool or not how.returns]
        if way is by_tool:
            names.remove("task that nobody awaits")  # the loop around the guarded call has no lock
        yield here.runner(SETTINGS), [Case(here, name, way, policy) for name in names for policy in policies]


@contextmanager
def noted(what: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(what)
        raise


async def worked(runner: AgentRunner) -> None:
    while await runner.run_once():
        pass


@ways
async def test_the_same_call_in_the_same_attempt(kind: str, way: Way, tmp_path: Path) -> None:
    async def twice(case: Case, bank: Bank, pay: Call) -> Any:
        if not bank.paid:
            with pytest.raises((Exception, asyncio.CancelledError)):
                await case.how.cut(bank, pay)
        return await pay()

    async with cases(kind, tmp_path, way, POLICIES) as (runner, found):
        for case in found:
            with noted(case.name):
                case.paying(partial(twice, case))
                await runner.submit(case.name, run_id=case.name)
                await case.settle(runner)
                records = await runner.state_store.records((await runner.get_run(case.name)).run_id)
                about = [each for each in records if each.name in ("pay", "tool")]
                assert len({each.key for each in about if each.kind == "started"}) == 1
                assert not [each for each in about if each.kind in ("retrying", "failed")]


@ways
async def test_a_resumed_run(kind: str, way: Way, tmp_path: Path) -> None:
    async with cases(kind, tmp_path, way, POLICIES) as (runner, found):
        for case in found:
            with noted(case.name):
                case.paying(case.how.cut)
                await runner.submit(case.name, run_id=case.name)
                await worked(runner)
                assert (await runner.wait(case.name, timeout=5)).status == "failed"
                assert len(case.bank.paid) == 1
                case.paying(plainly)
                await runner.resume(case.name)
                await case.settle(runner)


@ways
async def test_a_fork(kind: str, way: Way, tmp_path: Path) -> None:
    """Neither a fork with the default effects nor one that takes results does it again."""
    async with cases(kind, tmp_path, way, ["nothing found"]) as (runner, found):
        for case in found:
            with noted(case.name):
                case.paying(case.how.cut)
                await runner.submit(case.name, run_id=case.name)
                await worked(runner)
                case.paying(plainly)
                for effects in ("refuse", "reuse"):
                    fork = await runner.fork(case.name, "first", effects=effects)
                    await worked(runner)
                    result = await runner.wait(fork, timeout=5)
                    assert result.error is not None, result
                    assert result.error.type == "EffectAlreadyDone", result.error
                assert len(case.bank.paid) == 1
                fork = await runner.fork(case.name, "first", effects="repeat")
                await worked(runner)
                assert (await runner.wait(fork, timeout=5)).status == "succeeded"
                assert len(case.bank.paid) == 2


@ways
async def test_a_result_whose_commit_is_refused(
    kind: str, way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk: the payment was made, and its result is not in the journal when the worker ends."""
    async with store(kind, tmp_path) as here:
        case = Case(here, "timeout", way, "fail")
        case.bank.ending = None
        runner = here.runner(SETTINGS)
        commit, refused = runner.state_store.commits.commit, list[Any]()

        async def refuse(guard: Any, ops: Sequence[Op]) -> Any:
            if any(_is_end_of_payment(op.args[1]) for op in ops if op.name == "journal.append"):
                refused.append(ops)
                raise StorageFull("the disk is full")
            return await commit(guard, ops)

        case.paying(plainly)
        await runner.submit(case.name, run_id=case.name)
        with monkeypatch.context() as patch:
            patch.setattr(runner.state_store.commits, "commit", refuse)
            await interrupted(runner, refused)
        assert (await runner.get_run(case.name)).attempt == 1
        await worked(runner)
        assert "StepInDoubt" in str((await runner.wait(case.name, timeout=5)).error)
        fork = await runner.fork(case.name, "first")
        await runner.resume(case.name)
        await case.settle(runner)
        assert (await runner.wait(fork, timeout=5)).error.type == "EffectAlreadyDone"  # type: ignore[union-attr]
        assert len(case.bank.paid) == 1


def _is_end_of_payment(record: Record) -> bool:
    return record.kind == "done" and record.name in ("pay", "tool")


@ways
async def test_a_result_that_the_hook_refuses(kind: str, way: Way, tmp_path: Path) -> None:
    def redact(what: str, value: Any) -> Any:
        if what == "result" and "number" in str(value):
            raise LookupError("no key")
        return value

    async with store(kind, tmp_path) as here:
        case = Case(here, "timeout", way, "fail")
        case.bank.ending = None
        runner = here.runner(SETTINGS)
        runner.state_store.redaction = Redaction(redact)
        case.paying(plainly)
        await runner.submit(case.name, run_id=case.name)
        await worked(runner)
        error = (await runner.wait(case.name, timeout=5)).error
        assert error is not None
        assert error.type == "RedactionFailed"
        assert "The step has happened, and is in doubt" in error.message
        runner.state_store.redaction = None
        await runner.resume(case.name)
        await case.settle(runner)


async def test_an_error_of_the_function_is_no_doubt(kind: str, tmp_path: Path) -> None:
    """Also if an `asyncio.timeout` inside it has passed; and each attempt is in doubt while it runs."""
    inside = asyncio.Event()

    async with store(kind, tmp_path) as here:
        attempts: list[int] = []

        async def pay() -> str:
            attempts.append(1)
            if len(attempts) == 1:
                async with asyncio.timeout(0):
                    await hangs()
            if len(attempts) == 2:
                inside.set()
                await hangs()
            return "paid"

        async def body(ctx: Any) -> Any:
            step = ctx.step("pay", pay, on_in_doubt="fail", retries=2, retry_delay=0)
            paying = asyncio.create_task(step)
            await inside.wait()
            paying.cancel()
            await asyncio.wait({paying})
            return await ctx.step("pay", pay, on_in_doubt="fail")

        here.agent("a", body)
        runner = here.runner(SETTINGS)
        run_id = await runner.submit("a")
        await worked(runner)
        error = (await runner.wait(run_id, timeout=5)).error
        assert error is not None
        assert (error.type, len(attempts)) == ("StepInDoubt", 2)
        kinds = [each.kind for each in await runner.state_store.records(run_id) if each.name == "pay"]
        assert kinds == ["started", "retrying", "started"]


# -- several orders under one name


class Orders:
    """Orders that are paid one after the other under one name, each until it is paid or has failed often enough."""

    def __init__(self, seed: int, fates: Sequence[str], **options: Any) -> None:
        self.random, self.fates, self.options = Random(seed), fates, options
        self.booked: dict[str, int] = {}  # by idempotency key
        self.paid: Counter[int] = Counter()
        self.killed = asyncio.Event()
        self.kills = 3
        self.limit: asyncio.Timeout | None = None

    async def pay(self, ctx: RunContext, amount: int) -> int:
        fate = self.random.choice(self.fates)
        if fate == "fails":
            raise ConnectionError("no route to the bank")
        if fate != "never booked":
            self.booked[str(ctx.idempotency_key)] = amount
            self.paid[amount] += 1
        if fate == "killed" and self.kills:
            self.kills -= 1
            self.killed.set()
            await hangs()
        if fate in ("late", "never booked", "late, own error"):
            assert self.limit is not None
            self.limit.reschedule(asyncio.get_running_loop().time())
            await (hangs_and_fails() if fate == "late, own error" else hangs())
        return amount

    def look(self, ctx: RunContext) -> Any:
        found = self.booked.get(str(ctx.idempotency_key))
        return None if found is None else AlreadyDone(found)

    async def __call__(self, ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        receipts, left = {}, [1, 2, 3, 4]
        while left:
            for amount in left.copy():
                key = {"key": str(amount)} if self.options.get("keyed") else {}
                for _ in range(self.options.get("tries", 1)):
                    try:
                        async with asyncio.timeout(None) as self.limit:
                            receipts[str(amount)] = await ctx.step(
                                "pay", self.pay, amount, on_in_doubt=self.look, **key
                            )
                    except (TimeoutError, StepExecutionError):
                        continue
                    left.remove(amount)
                    break
        await ctx.step("last", lambda: 1)
        return receipts

    async def worked(self, here: Store, agent: str, clock: VirtualClock) -> Any:
        """Work the run off, with a new worker after each kill. Returns its result."""
        dead: list[asyncio.Future[Any]] = []
        run_id = await here.runner(SETTINGS).submit(agent)
        try:
            while True:
                runner = here.runner(SETTINGS)
                working = asyncio.ensure_future(worked(runner))
                killed = asyncio.ensure_future(self.killed.wait())
                await asyncio.wait({working, killed}, return_when=asyncio.FIRST_COMPLETED)
                killed.cancel()
                if not self.killed.is_set():
                    return await runner.wait(run_id, timeout=5)
                self.killed.clear()
                dead.append(working)
                await drop(runner, working, run_id)
                clock.advance(61)
        finally:
            for each in dead:
                each.cancel()
            if dead:
                await asyncio.wait(dead)


LATE = ("returns", "late", "late, own error", "killed")


@pytest.mark.parametrize("seeds", [12, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tries", [1, 3])
@pytest.mark.parametrize("fates", [LATE, (*LATE, "never booked"), (*LATE, "never booked", "fails")], ids=len)
@pytest.mark.parametrize("keyed", [False, True])
async def test_orders_under_one_name(
    kind: str, fates: Sequence[str], tries: int, keyed: bool, seeds: int, tmp_path: Path
) -> None:
    """Each order is paid once and has its own receipt, in whatever order payments are late, fail and are killed.

    Without a key, the position of a call may be that of another order after a failure: then the run fails.
    """
    clock, mismatches = VirtualClock(), 0
    async with store(kind, tmp_path, clock) as here:
        for seed in range(seeds):
            orders = Orders(seed, fates, tries=tries, keyed=keyed)
            here.agent(f"a{seed}", orders)
            with noted(f"seed {seed}"):
                result = await orders.worked(here, f"a{seed}", clock)
                if result.status != "succeeded" and not keyed and "fails" in fates:
                    assert result.error is not None
                    assert result.error.type == "JournalMismatch", result.error
                    assert max(orders.paid.values()) == 1
                    mismatches += 1
                    continue
                assert result.status == "succeeded", result.error
                assert result.final_output["value"] == {"1": 1, "2": 2, "3": 3, "4": 4}
                assert orders.paid == {1: 1, 2: 1, 3: 1, 4: 1}
    assert mismatches <= seeds // 4


async def test_a_fork_that_repeats_a_refused_call_is_refused_again(kind: str, tmp_path: Path) -> None:
    """The refused call is no occurrence of its own: the next one would be an effect that nobody has had."""
    async with store(kind, tmp_path) as here:
        case = Case(here, "timeout", by_step, "fail")
        case.bank.ending = None

        async def thrice(bank: Bank, pay: Call) -> Any:
            for _ in range(2):
                with suppress(StepExecutionError):
                    return await pay()
            return await pay()

        case.paying(thrice)
        runner = here.runner(SETTINGS)
        await runner.submit(case.name, run_id=case.name)
        await worked(runner)
        assert (await runner.wait(case.name, timeout=5)).status == "succeeded"
        fork = await runner.fork(case.name, "first")
        await worked(runner)
        result = await runner.wait(fork, timeout=5)
        assert result.error is not None
        assert (result.error.type, len(case.bank.paid)) == ("EffectAlreadyDone", 1)
