"""Errors inside an ExceptionGroup decide as they do alone: for runs, steps, step lists, tools and open_run."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import Step, StepExecutor, open_run
from agent_runtime_core._execution.recorded_calls import RecordedCalls
from agent_runtime_core._execution.step import NEVER_RETRIED
from agent_runtime_core.errors import (
    AuthenticationFailed,
    CircuitOpen,
    IdempotencyConflict,
    InvalidArgument,
    JournalMismatch,
    LeaseLost,
    LimitExceeded,
    MissingDependency,
    NotSupported,
    OutputMismatch,
    PortalMisuse,
    Postponed,
    ProviderUnavailable,
    RateLimited,
    StepCancelledError,
    StepExecutionError,
    StepInDoubt,
    StorageBusy,
    StorageFull,
    UnknownPrice,
    UnserialisableResult,
    deciding_error,
    holds,
    leaves_of,
    text_of,
)
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.llm._retries import Breakers
from agent_runtime_core.planning.executor import AS_THEY_ARE, _is_worth_retrying
from agent_runtime_core.runner.outcomes import FINAL_ERRORS
from agent_runtime_core.status import RunStatus
from agent_runtime_core.steps.worker_pool import STOPS
from agent_runtime_core.testing import MockRunContext, VirtualClock
from agent_runtime_core.tools.invocation import answer_call
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.cases import for_each
from tests.support.runs import Rig

Wrap = Callable[[BaseException], Awaitable[None]]


async def _raise(error: BaseException) -> None:
    raise error


async def in_task_group(error: BaseException) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_raise(error))
        group.create_task(asyncio.sleep(60))


async def in_nested_groups(error: BaseException) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(in_task_group(error))


async def with_a_cancellation(error: BaseException) -> None:
    raise BaseExceptionGroup("as of other libraries", [asyncio.CancelledError(), error])


WRAPS: list[Wrap] = [in_task_group, in_nested_groups, with_a_cancellation]


def _partial() -> LimitExceeded:
    error = LimitExceeded("max_tokens", 10, 12)
    error.result = RunResult({"response": "half"})
    return error


def _mismatch() -> OutputMismatch:
    error = OutputMismatch("no JSON", "what it said")
    error.result = RunResult({"response": "what it said"})
    return error


ERRORS: list[Callable[[], Exception]] = [
    lambda: ValueError("bad"),
    lambda: CircuitOpen("down", after=5.0),
    lambda: RateLimited("slow", retry_after=7.0),
    lambda: RateLimited("much slower", retry_after=7200.0),
    lambda: RateLimited("slow"),
    lambda: ProviderUnavailable("500"),
    lambda: AuthenticationFailed("401"),
    lambda: JournalMismatch("other code"),
    lambda: StepInDoubt("pay", "who knows"),
    lambda: UnserialisableResult("$", "a set"),
    lambda: InvalidArgument("no"),
    lambda: NotSupported("no"),
    lambda: UnknownPrice("no"),
    lambda: MissingDependency("no"),
    lambda: IdempotencyConflict("no"),
    lambda: PortalMisuse("no"),
    lambda: StepCancelledError("later"),
    lambda: StorageBusy("away"),
    lambda: StorageFull("full"),
    lambda: StepExecutionError("pay", "declined", 3),
    _partial,
    _mismatch,
]


#: Without an outage of the store, for whose end a run waits: see `tests/fault/test_outages.py`.
ENDING = [make for make in ERRORS if not isinstance(make(), StorageBusy | StorageFull)]


def _named(make: Callable[[], Exception]) -> str:
    error = make()
    return f"{type(error).__name__}-{error}"[:40]


# -- runs


async def _outcome(error: Exception, wrap: Wrap) -> Any:
    async with Rig(max_retries=3, retry_backoff_base=2.0) as rig:

        async def body(ctx: Any) -> None:
            await wrap(error)

        rig.register(body)
        run_id = await rig.runner.submit("script", {})
        began = rig.clock.wall()
        await rig.runner.run_once()
        row = await rig.runner.queue.require(str(run_id))
        info = await rig.runner.get_run(run_id)
        due = row.due_at and round(row.due_at - began)
        told: Any = row.error and [json.loads(row.error)[each] for each in ("type", "message", "retriable")]
        output = None
        if info.status is RunStatus.FAILED:
            result = await rig.runner.wait(run_id)
            assert result.error is not None
            output, told = result.final_output, [result.error.type, result.error.message, result.error.retriable]
        return info.status, info.attempt, row.failures, row.parked, info.reason, due, told, output


@for_each("wrap", WRAPS)
@for_each("make", ENDING, ids=map(_named, ENDING))
async def test_a_run_ends_as_with_the_error_alone(make: Callable[[], Exception], wrap: Wrap) -> None:
    alone, grouped = await _outcome(make(), _raise), await _outcome(make(), wrap)
    if alone[3]:  # deferred: by up to a fifth more than asked for
        assert grouped[:5] == alone[:5]
        assert 0 <= grouped[5] - round(getattr(make(), "after", getattr(make(), "retry_after", 0))) <= 2
    else:
        assert grouped == alone


async def test_the_traceback_has_the_whole_group() -> None:
    async with Rig() as rig:
        error = (await rig.go(lambda ctx: in_task_group(ValueError("bad")))).error
    assert error is not None
    assert error.type == "ValueError"
    assert error.message == "bad"
    assert "ExceptionGroup" in error.stack
    assert "in_task_group" in error.stack


async def test_several_errors_of_the_application_are_all_named() -> None:
    async with Rig() as rig:
        group = ExceptionGroup("unhandled errors in a TaskGroup", [ValueError("bad"), KeyError("x")])
        error = (await rig.go(lambda ctx: _raise(group))).error
    assert error is not None
    assert error.type == "ExceptionGroup"
    assert error.message == "unhandled errors in a TaskGroup (2 sub-exceptions): ValueError: bad; KeyError: 'x'"


async def test_on_error_gets_the_group_itself() -> None:
    group, seen = ExceptionGroup("g", [ValueError("bad")]), []
    async with Rig() as rig:
        agent = rig.register(lambda ctx: _raise(group))

        async def on_error(ctx: Any, error: BaseException) -> None:
            seen.append(error)

        agent.on_error = on_error  # type: ignore[method-assign]
        assert (await rig.runner.execute(agent)).status is RunStatus.FAILED
    assert seen == [group]


async def test_a_lost_lease_in_a_group_writes_nothing() -> None:
    async with Rig(max_retries=3) as rig:
        rig.register(lambda ctx: in_task_group(LeaseLost("r", "t")))
        run_id = await rig.runner.submit("script", {})
        await rig.runner.run_once()
        info = await rig.runner.get_run(run_id)
        assert info.status is RunStatus.RUNNING  # its lease runs out, as after LeaseLost alone
        assert not [kind for kind, _ in await rig.told(run_id=str(run_id)) if kind == "run.failed"]


async def test_a_cancelled_run_whose_steps_are_in_a_group_is_cancelled() -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            await rig.runner.cancel(ctx.run_id)
            while not ctx.cancelled():  # noqa: ASYNC110 - as an agent that looks at it between two pieces of work
                await asyncio.sleep(0)
            raise ExceptionGroup("g", [ValueError("in a finally"), StepCancelledError("b")])

        assert (await rig.go(body)).status is RunStatus.CANCELLED


def test_an_interrupt_is_not_swallowed() -> None:
    async def main() -> None:
        async with Rig() as rig:
            await rig.go(lambda ctx: _raise(BaseExceptionGroup("g", [ValueError("bad"), KeyboardInterrupt()])))

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())


async def test_a_hook_that_interrupts_the_process_does() -> None:
    async with Rig() as rig:
        agent = rig.register(lambda ctx: _raise(ValueError("bad")))

        async def on_error(ctx: Any, error: BaseException) -> None:
            raise BaseExceptionGroup("g", [KeyboardInterrupt()])

        agent.on_error = on_error  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            await rig.runner.execute(agent)


async def test_a_group_of_cancellations_is_one() -> None:
    async with Rig() as rig:
        alone = (await rig.go(lambda ctx: _raise(asyncio.CancelledError()))).error
        group = BaseExceptionGroup("g", [asyncio.CancelledError()])
        error = (await rig.go(lambda ctx: _raise(group), "other")).error
    assert alone is not None
    assert error is not None
    assert (error.type, error.message) == (alone.type, alone.message)


# -- which error decides

FORBID: list[Callable[[], Exception]] = [
    make for make in ERRORS if isinstance(make(), FINAL_ERRORS) or type(make()) is AuthenticationFailed
]
ALLOW: list[Callable[[], Exception]] = [
    make
    for make in ERRORS
    if isinstance(make(), (Postponed, RateLimited, ProviderUnavailable, StorageBusy)) or type(make()) is ValueError
]


@for_each("other", ALLOW, ids=map(_named, ALLOW))
@for_each("make", FORBID, ids=map(_named, FORBID))
def test_what_forbids_a_retry_wins(make: Callable[[], Exception], other: Callable[[], Exception]) -> None:
    error = make()
    for errors in ([error, other()], [other(), error], [other(), ExceptionGroup("inner", [other(), error])]):
        assert deciding_error(ExceptionGroup("g", errors)) is error


@for_each("kind", [*FINAL_ERRORS, *NEVER_RETRIED])
def test_all_that_is_never_retried_stands_before_what_is(kind: type[Exception]) -> None:
    error = kind.__new__(kind)
    assert deciding_error(ExceptionGroup("g", [ValueError("bad"), StorageBusy("away"), error])) is error


def test_a_failure_wins_over_a_deferral_and_the_longest_deferral_over_others() -> None:
    bad, short, long = ValueError("bad"), CircuitOpen("a", after=1.0), RateLimited("b", retry_after=9.0)
    assert deciding_error(ExceptionGroup("g", [short, bad, long])) is bad
    assert deciding_error(ExceptionGroup("g", [short, long])) is long
    assert deciding_error(ExceptionGroup("g", [long, CircuitOpen("c", after=99.0)])).args == ("c",)
    assert deciding_error(ExceptionGroup("g", [ProviderUnavailable("500"), short])) is short


def test_several_others_decide_together() -> None:
    group = ExceptionGroup("g", [ValueError("a"), ExceptionGroup("h", [KeyError("b")])])
    assert deciding_error(group) is group
    mixed = BaseExceptionGroup("g", [asyncio.CancelledError(), ValueError("a"), KeyError("b")])
    decided = deciding_error(mixed)
    assert isinstance(decided, ExceptionGroup)
    assert [type(each) for each in leaves_of(decided)] == [ValueError, KeyError]


def test_other_errors_decide_themselves() -> None:
    for error in (ValueError("a"), LeaseLost("r"), KeyboardInterrupt(), asyncio.CancelledError()):
        assert deciding_error(error) is error
        assert leaves_of(error) == [error]
        assert holds(error, type(error))
        assert not holds(error, OSError)


def test_a_group_of_many_and_deep_ones_is_told_briefly() -> None:
    group: Exception = ValueError("x" * 100_000)
    for _ in range(5_000):
        group = ExceptionGroup("g", [group])
    assert len(leaves_of(group)) == 1
    many = ExceptionGroup("g", [ValueError(str(n)) for n in range(1000)])
    assert text_of(many).endswith("ValueError: 4; 995 more")


# -- steps


async def _tries(error: Exception, wrap: Wrap, path: Path, **policy: Any) -> tuple[int, BaseException | None]:
    tries, raised = 0, None

    async def work() -> None:
        nonlocal tries
        tries += 1
        await wrap(error)

    async with Rig(path) as rig:

        async def body(ctx: Any) -> None:
            nonlocal raised
            try:
                await ctx.step("s", work, **{"retries": 3, "retry_delay": 0.01, **policy})
            except BaseException as told:
                raised = told
                raise

        rig.register(body)
        await rig.runner.submit("script", {})
        await rig.runner.run_once()
    return tries, raised


@for_each("wrap", [in_task_group, in_nested_groups])
@for_each("make", ENDING, ids=map(_named, ENDING))
async def test_a_step_is_tried_as_often_as_with_the_error_alone(
    make: Callable[[], Exception], wrap: Wrap, tmp_path: Path
) -> None:
    error = make()
    alone, raised = await _tries(error, _raise, tmp_path / "a.db")
    grouped, told = await _tries(error, wrap, tmp_path / "b.db")
    assert grouped == alone
    assert told is not None
    if raised is error and type(error) is not StepExecutionError:
        assert leaves_of(told) == [error]  # for `except*` of the caller
        assert isinstance(told, ExceptionGroup)
    else:
        assert isinstance(told, StepExecutionError)
        assert text_of(error) in str(told)
        if type(error) is not StepExecutionError:
            assert isinstance(told.__cause__, ExceptionGroup)
            assert leaves_of(told.__cause__) == [error]


async def test_except_star_of_the_agent_still_works(tmp_path: Path) -> None:
    caught: list[BaseException] = []

    async def body(ctx: Any) -> None:
        try:
            await ctx.step("s", in_task_group, CircuitOpen("down", after=1.0))
        except* CircuitOpen as group:
            caught.extend(group.exceptions)

    async with Rig(tmp_path / "a.db") as rig:
        assert (await rig.go(body)).error is None
    assert [type(each) for each in caught] == [CircuitOpen]


@pytest.mark.parametrize(
    ("retry_on", "errors", "tries"),
    [
        (ConnectionError, [ConnectionError("a")], 4),
        (ConnectionError, [ConnectionResetError("a"), ConnectionError("b")], 4),
        (ConnectionError, [ConnectionError("a"), ValueError("b")], 1),
        ((ConnectionError, ValueError), [ConnectionError("a"), ValueError("b")], 4),
        (ExceptionGroup, [ValueError("a")], 4),
        (lambda error: isinstance(error, ConnectionError), [ConnectionError("a")], 4),
        (lambda error: isinstance(error, ExceptionGroup), [ValueError("a")], 4),
        (lambda error: isinstance(error, ConnectionError), [ConnectionError("a"), ValueError("b")], 1),
        (Exception, [ConnectionError("a"), InvalidArgument("b")], 1),
    ],
)
async def test_retry_on_is_asked_about_the_group_and_then_about_each_error(
    retry_on: Any, errors: list[Exception], tries: int, tmp_path: Path
) -> None:
    group = ExceptionGroup("g", errors)
    assert (await _tries(group, _raise, tmp_path / "a.db", retry_on=retry_on))[0] == tries


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    "make", [lambda: InvalidArgument("no"), lambda: StepCancelledError("x"), lambda: KeyError("k")]
)
async def test_step_lists_of_any_context_agree(make: Callable[[], Exception], graph: bool, tmp_path: Path) -> None:
    """Over a durable context and over a plain one."""

    async def tries_of(wrap: Wrap, ctx: Any) -> tuple[int, bool]:
        tries = 0

        async def work(ctx: Any, state: Any) -> None:
            nonlocal tries
            tries += 1
            await wrap(make())

        steps = [Step("a", work, retries=2, retry_delay=0.0)]
        if graph:
            steps.append(Step("b", work, depends_on=["a"]))
        with pytest.raises(Exception) as told:  # noqa: PT011
            await StepExecutor(ctx).run(steps)
        return tries, holds(told.value, type(make())) or isinstance(told.value, StepExecutionError)

    expected = (1 if isinstance(make(), NEVER_RETRIED) else 3, True)
    assert await tries_of(in_task_group, MockRunContext()) == expected
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the run ends with it
        async with open_run(tmp_path / "a.db") as ctx:
            assert await tries_of(in_task_group, ctx) == expected
            raise ZeroDivisionError


# A step that raises StorageError fails as with any error of its own, and what depends on it is skipped.
@pytest.mark.parametrize("kind", [*(each for each in STOPS if issubclass(each, NEVER_RETRIED)), Postponed])
async def test_a_graph_stops_at_what_stops_everything(kind: type[Exception], tmp_path: Path) -> None:
    async def ask(ctx: Any, state: Any) -> None:
        await in_task_group(kind.__new__(kind))

    async def never(ctx: Any, state: Any) -> None:
        raise AssertionError("it depends on a step without a result")

    async def body(ctx: Any) -> None:
        await StepExecutor(ctx).run([Step("a", ask), Step("b", never, depends_on=["a"])])

    async with Rig(tmp_path / "a.db") as rig:
        rig.register(body)
        run_id = await rig.runner.submit("script", {})
        await rig.runner.run_once()
        kinds = [kind for kind, _ in await rig.told(run_id=str(run_id))]
    assert "run.started" in kinds or kind is LeaseLost  # then nothing of it is written
    assert "step.skipped" not in kinds


async def test_a_failure_of_a_group_is_found_again_on_a_later_attempt(tmp_path: Path) -> None:
    told: list[StepExecutionError] = []

    async def body(ctx: Any) -> str:
        async def both() -> None:
            raise ExceptionGroup("two of them", [ValueError("bad"), ExceptionGroup("h", [OSError("x")])])

        try:
            await ctx.step("s", both)
        except StepExecutionError as error:
            told.append(error)
        if len(told) == 1:
            await ctx.step("after", lambda: 1)
            raise RuntimeError("once more")
        return "done"

    async with Rig(tmp_path / "a.db", max_retries=2) as rig:
        assert await rig.value(body) == "done"
    first, again = told
    assert str(first) == str(again)
    assert "two of them (2 sub-exceptions): ValueError: bad; OSError: x" in str(again)
    assert isinstance(again.__cause__, ExceptionGroup)
    assert again.__cause__.message == "two of them"
    assert [(type(each), text_of(each)) for each in leaves_of(again.__cause__)] == [(ValueError, "bad"), (OSError, "x")]


class OwnGroup(ExceptionGroup[Exception]):
    def derive(self, excs: Any) -> Any:
        return OwnGroup(self.message, excs)


def _local() -> Exception:
    class Local(Exception):
        pass

    return Local("its class is found nowhere")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ExceptionGroup("g", [ValueError("a")]), ExceptionGroup),
        (OwnGroup("g", [ValueError("a"), KeyError("b")]), OwnGroup),
        (ExceptionGroup("g", [ValueError("a"), _local()]), None),
        (ExceptionGroup("g", [ValueError(str(n)) for n in range(100)]), None),
    ],
)
async def test_what_cannot_be_made_again_has_no_cause(error: Exception, kind: Any, tmp_path: Path) -> None:
    causes: list[BaseException | None] = []

    async def body(ctx: Any) -> None:
        try:
            await ctx.step("s", _raise, error)
        except StepExecutionError as told:
            causes.append(told.__cause__)
        await ctx.step("after", lambda: 1)
        raise RuntimeError("once more")

    async with Rig(tmp_path / "a.db", max_retries=2) as rig:
        await rig.go(body)
    assert [None if each is None else type(each) for each in causes] == [kind, kind]


async def test_a_recorded_deferral_in_a_group_is_one_when_it_is_read(tmp_path: Path) -> None:
    """Of a step whose last error is raised as it is, as calls of a model are."""
    raised: list[BaseException] = []

    async def body(ctx: Any) -> None:
        try:
            await RecordedCalls(ctx).run("model", "0", lambda attempt: in_task_group(CircuitOpen("down", after=1.0)))
        except Exception as error:  # noqa: BLE001 - of either kind
            raised.append(error)
        await ctx.step("after", lambda: 1)
        if len(raised) < 2:
            raise RuntimeError("once more")

    async with Rig(tmp_path / "a.db", max_retries=2) as rig:
        await rig.go(body)
    assert [type(deciding_error(each)) for each in raised] == [CircuitOpen, CircuitOpen]


async def test_a_transaction_raises_what_it_does_alone(tmp_path: Path) -> None:
    def refuse(conn: Any) -> None:
        raise ExceptionGroup("g", [InvalidArgument("no")])

    def fail(conn: Any) -> None:
        raise ExceptionGroup("g", [ValueError("bad")])

    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the run ends with it
        async with open_run(tmp_path / "a.db") as ctx:
            with pytest.raises(ExceptionGroup):
                await ctx.transaction("t", refuse)
            with pytest.raises(StepExecutionError, match="bad"):
                await ctx.transaction("u", fail)
            raise ZeroDivisionError


# -- open_run


@pytest.mark.parametrize("wrap", WRAPS)
async def test_open_run_gives_a_deferred_run_back(wrap: Wrap, tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(BaseExceptionGroup):  # noqa: PT012 - as an application's block
            async with open_run(tmp_path / "a.db", run_id="r") as ctx:
                await ctx.step("first", lambda: 1)
                await wrap(CircuitOpen("down", after=0.1))
    async with open_run(tmp_path / "a.db", run_id="r") as ctx:
        assert await ctx.step("first", lambda: 2) == 1


async def test_open_run_fails_with_the_error_named(tmp_path: Path) -> None:
    with pytest.raises(BaseExceptionGroup):
        async with open_run(tmp_path / "a.db", run_id="r"):
            raise BaseExceptionGroup("g", [asyncio.CancelledError(), ValueError("bad"), KeyError("x")])
    async with Rig(tmp_path / "a.db") as rig:
        info = await rig.runner.get_run("r")
        assert info.status is RunStatus.FAILED
        error = (await rig.runner.wait("r")).error
        assert error is not None
        assert "ValueError: bad; KeyError: 'x'" in error.message


# -- tools and models


async def _answer(error: BaseException) -> Any:
    async def work() -> None:
        """Work."""
        raise error

    registry = ToolRegistry()
    registry.register(Tool.from_function(work))
    call = type("Call", (), {"id": "1", "name": "work", "arguments": "{}"})()
    return await answer_call(registry, call, MockRunContext())


@pytest.mark.parametrize(
    "kind", [LeaseLost, StepCancelledError, Postponed, LimitExceeded, JournalMismatch, StorageBusy]
)
async def test_what_ends_the_run_ends_it_out_of_a_tool(kind: type[Exception]) -> None:
    error = kind.__new__(kind)
    with pytest.raises(kind) as told:
        await _answer(ExceptionGroup("g", [InvalidArgument("a"), ExceptionGroup("h", [error])]))
    assert told.value is error


async def test_the_model_is_told_what_was_in_the_group() -> None:
    assert (await _answer(ExceptionGroup("g", [ValueError("bad")]))).content == "Error: ValueError: bad"
    both = await _answer(ExceptionGroup("g", [ValueError("bad"), KeyError("x")]))
    assert both.content == "Error: ExceptionGroup: g (2 sub-exceptions): ValueError: bad; KeyError: 'x'"


async def test_a_tool_that_exits_does_not_end_the_process_by_a_group_either() -> None:
    answer = await _answer(BaseExceptionGroup("g", [SystemExit(3)]))
    assert answer.error == "failed"
    assert "SystemExit" in answer.content
    with pytest.raises(BaseExceptionGroup):
        await _answer(BaseExceptionGroup("g", [KeyboardInterrupt()]))


def test_a_fault_in_a_group_counts_for_the_breaker() -> None:
    breakers, key = Breakers(VirtualClock(), after=1), ("p", "", "m")
    breakers.enter(key).failed(ExceptionGroup("g", [ProviderUnavailable("500")]))
    assert breakers.refusal(key) is not None


@pytest.mark.parametrize("kind", [*AS_THEY_ARE, AuthenticationFailed])
def test_a_plan_tries_no_group_again_that_holds_what_another_attempt_cannot_heal(kind: type[Exception]) -> None:
    assert not _is_worth_retrying(ExceptionGroup("g", [ValueError("a"), kind.__new__(kind)]))
    assert _is_worth_retrying(ExceptionGroup("g", [ValueError("a"), ProviderUnavailable("500")]))


async def test_a_task_that_a_group_takes_no_more_does_not_decide() -> None:
    """A group that ends because of another error rejects new tasks with a RuntimeError, which lands in it as well."""

    async def fail() -> None:
        raise CircuitOpen("m", after=1.0)

    async def body() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            late = asyncio.sleep(0)
            try:
                group.create_task(late)
            finally:
                late.close()

    with pytest.raises(ExceptionGroup) as caught:
        await body()
    assert {type(each) for each in leaves_of(caught.value)} == {CircuitOpen, RuntimeError}
    assert isinstance(deciding_error(caught.value), CircuitOpen)
    own = ExceptionGroup("of the agent", [CircuitOpen("m", after=1.0), RuntimeError("the server is shutting down")])
    assert type(deciding_error(own)) is RuntimeError
