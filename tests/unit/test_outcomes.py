"""What the outcome of an attempt means for its run: one table, and no run."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
from dataclasses import replace
from typing import Any

import pytest

from agent_runtime_core._execution.run_control import Stop
from agent_runtime_core.errors import (
    InvalidArgument,
    LimitExceeded,
    Postponed,
    ProviderError,
    RateLimited,
    StepCancelledError,
    StepInDoubt,
    UnserialisableResult,
)
from agent_runtime_core.interfaces import ErrorInfo, RunResult, describe
from agent_runtime_core.queue.records import RunRow
from agent_runtime_core.runner import outcomes
from agent_runtime_core.runner.outcomes import (
    AskAgent,
    AttemptFacts,
    Cancelled,
    Decision,
    End,
    Released,
    RetryHere,
    RetryLater,
    TimeLimitReached,
    without_result,
)
from agent_runtime_core.runner.settings import RunnerConfig
from tests.support.cases import for_each

NOW = 1_000.0
ROW = RunRow("run", "agent", created_at=NOW - 10)
CONFIG = RunnerConfig(
    max_retries=3, run_timeout_seconds=100, stall_timeout_seconds=50, retry_backoff_base=2, retry_backoff_max=60
)


def facts(row: RunRow = ROW, *, time_left: float = 100.0, **more: Any) -> AttemptFacts:
    return AttemptFacts(row, NOW, CONFIG, time_left, **more)


def short(decision: Decision | None) -> Any:
    """Return a decision in a form that a table can show."""
    match decision:
        case End(status, result):
            return (status.value, result.error.type if result.error else None)
        case RetryHere(delay, error, failures, deferred):
            return ("here", delay, error.type, failures, deferred)
        case RetryLater(delay, error, failures, deferred):
            return ("later", delay, error.type, failures, deferred)
        case None:
            return None
    return type(decision).__name__


FAILED = RunResult(error=ErrorInfo("NoStock", "none left"))
FINAL = RunResult(error=ErrorInfo("NoStock", "none left", retriable=False))
RETURNED: list[tuple[Any, dict[str, Any], Any]] = [
    (RunResult({"a": 1}), {}, ("succeeded", None)),
    (None, {}, "AskAgent"),
    ({"a": 1}, {}, "AskAgent"),
    (RunResult(error="no"), {}, "AskAgent"),  # type: ignore[arg-type]
    (FAILED, {}, ("later", 2.0, "NoStock", 1, False)),
    (FAILED, {"inline": True}, ("here", 2.0, "NoStock", 1, False)),
    (FAILED, {"row": ROW._replace(failures=1)}, ("later", 4.0, "NoStock", 2, False)),
    (FAILED, {"row": ROW._replace(failures=2)}, ("failed", "NoStock")),
    (FINAL, {}, ("failed", "NoStock")),
]


@pytest.mark.parametrize(("result", "about", "expected"), RETURNED)
def test_of_result(result: Any, about: dict[str, Any], expected: Any) -> None:
    assert short(outcomes.of_result(result, facts(**about))) == expected


def postponed(seconds: float) -> Postponed:
    error = Postponed("later")
    error.after = seconds
    return error


RAISED: list[tuple[BaseException, dict[str, Any], Any]] = [
    (ValueError("x"), {}, "AskAgent"),
    (StepCancelledError("s"), {}, "AskAgent"),
    (TimeLimitReached(), {}, ("timed_out", "TimedOut")),
    (TimeLimitReached(), {"stop": Stop.LOST}, "NothingToDo"),
    (TimeLimitReached(), {"stop": Stop.RELEASE}, "Released"),
    (postponed(5), {}, ("later", 5.0, "Postponed", 0, True)),
    (postponed(5), {"inline": True}, ("here", 5.0, "Postponed", 0, True)),
    (postponed(5), {"jitter": lambda: 0.2}, ("later", 6.0, "Postponed", 0, True)),
    (ExceptionGroup("g", [postponed(5)]), {}, ("later", 5.0, "Postponed", 0, True)),
    (postponed(9), {"time_left": 10.0, "jitter": lambda: 0.2}, ("later", 9.0, "Postponed", 0, True)),
    (postponed(10), {"time_left": 10.0}, ("timed_out", "TimedOut")),
    (postponed(10), {"time_left": 10.0, "progressed": True}, ("later", 10.0, "Postponed", 0, True)),
    (postponed(5), {"row": ROW._replace(deadline=NOW + 5)}, ("timed_out", "DeadlineExceeded")),
    (postponed(4), {"row": ROW._replace(deadline=NOW + 5)}, ("later", 4.0, "Postponed", 0, True)),
    (RateLimited("slow", retry_after=5), {}, ("later", 5.0, "RateLimited", 0, True)),
    (RateLimited("slow", retry_after=61), {}, "AskAgent"),
    (RateLimited("slow"), {}, "AskAgent"),
]


@for_each(("error", "about", "expected"), RAISED)
def test_of_error(error: BaseException, about: dict[str, Any], expected: Any) -> None:
    assert short(outcomes.of_error(error, facts(**about))) == expected


FAILURES: list[tuple[Exception, Any]] = [
    (ValueError("x"), ("later", 2.0, "ValueError", 1, False)),
    (ProviderError("bad"), ("failed", "ProviderError")),
    (StepInDoubt("s", "k"), ("failed", "StepInDoubt")),
    (InvalidArgument("x"), ("failed", "InvalidArgument")),
    (ExceptionGroup("g", [ValueError("x"), InvalidArgument("y")]), ("failed", "InvalidArgument")),
]


@pytest.mark.parametrize(("error", "expected"), FAILURES)
def test_of_failure(error: Exception, expected: Any) -> None:
    assert short(outcomes.of_failure(error, describe(error), facts())) == expected


def test_a_failure_keeps_the_partial_result_of_a_limit_and_else_what_was_used() -> None:
    limited = LimitExceeded("max_turns", 3, 3)
    limited.result = RunResult({"so": "far"})
    decision = outcomes.of_failure(limited, describe(limited), facts())
    assert isinstance(decision, End)
    assert decision.result.final_output == {"so": "far"}
    row = ROW._replace(failures=2)
    decision = outcomes.of_failure(
        ValueError("x"), describe(ValueError("x")), facts(row, usage=lambda: {"total_tokens": 3})
    )
    assert isinstance(decision, End)
    assert decision.result.usage == {"total_tokens": 3}


STOPPED: dict[Stop, Any] = {
    Stop.RELEASE: "Released",
    Stop.LOST: "NothingToDo",
    Stop.TIME_LIMIT: ("timed_out", "TimedOut"),
    Stop.STALLED: ("timed_out", "Stalled"),
    Stop.DEADLINE: ("timed_out", "DeadlineExceeded"),
    Stop.CANCEL: "Cancelled",
    Stop.OTHER_CODE: "Left",
    Stop.OUTAGE: "StoreAway",
    Stop.MISSING_KEY: "Left",
}


@pytest.mark.parametrize("stop", list(Stop))
def test_the_cause_of_a_stop_decides_alone(stop: Stop) -> None:
    assert short(outcomes.of_stop(stop, facts(ROW._replace(deadline=NOW)))) == STOPPED[stop]


def test_only_a_cancelled_run_keeps_what_its_code_returned() -> None:
    assert outcomes.of_stop(Stop.CANCEL, facts(), FINAL) == Cancelled(FINAL)
    assert outcomes.of_stop(Stop.RELEASE, facts(), FINAL) == Released()


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ({}, Stop.TIME_LIMIT),
        ({"time_left": 0.0, "stall_left": 1.0}, Stop.TIME_LIMIT),
        ({"time_left": 1.0, "stall_left": 0.0}, Stop.STALLED),
        ({"time_left": -1.0, "stall_left": -2.0}, Stop.STALLED),
        ({"time_left": -1.0, "stall_left": -2.0, "row": ROW._replace(deadline=NOW)}, Stop.DEADLINE),
        ({"row": ROW._replace(deadline=NOW)}, Stop.DEADLINE),
        ({"row": ROW._replace(deadline=NOW), "stop": Stop.CANCEL}, Stop.CANCEL),
    ],
)
def test_an_attempt_that_is_late_passed_a_limit_or_was_stopped_before(about: dict[str, Any], expected: Stop) -> None:
    assert outcomes.passed_limit(facts(**about)) is expected


@pytest.mark.parametrize("owner", ["agent", "runner"])
@pytest.mark.parametrize(
    ("decide", "name"),
    [
        (lambda about: outcomes.of_stop(Stop.TIME_LIMIT, about), "run_timeout_seconds"),
        (lambda about: outcomes.of_stop(Stop.STALLED, about), "stall_timeout_seconds"),
        (lambda about: outcomes.of_error(postponed(1000), about), "run_timeout_seconds=100"),
    ],
)
def test_a_timeout_names_whose_limit_it_was(owner: str, decide: Any, name: str) -> None:
    other = "run_timeout_seconds" if name.startswith("stall") else "stall_timeout_seconds"
    own = {name.partition("=")[0]} if owner == "agent" else {other}
    end = decide(facts(own_limits=own))
    assert f"{name} of the {owner}" in end.result.error.message


def test_a_deferral_without_a_limit_counts_no_more_than_its_delay() -> None:
    endless = facts(time_left=float("inf"))._replace(config=replace(CONFIG, run_timeout_seconds=float("inf")))
    decision = outcomes.of_error(postponed(1e6), endless)
    assert isinstance(decision, RetryLater)
    assert decision.error.details == {"deferred_seconds": 1e6}


def test_a_timeout_names_what_deferred_the_run() -> None:
    error = json.dumps({"type": "RateLimited", "message": "slow down", "details": {"deferred_seconds": 40.0}})
    decision = outcomes.of_stop(Stop.TIME_LIMIT, facts(ROW._replace(error=error), deferred_seconds=40.0))
    assert isinstance(decision, End)
    assert decision.result.error is not None
    assert decision.result.error.message == (
        "the attempt took more than 100 s (run_timeout_seconds of the runner), "
        "40 s of which it was deferred by RateLimited: slow down"
    )


BEFORE: list[tuple[dict[str, Any], int, int, Any]] = [
    # changes of the row, crashes without progress, records
    ({}, 0, 0, None),
    ({}, 2, 0, None),
    ({}, 3, 0, ("dead", "Poisoned")),
    ({"cancel_at": NOW}, 0, 4, "Cancelled"),
    ({"cancel_at": NOW}, 0, 0, ("cancelled", None)),
    ({"cancel_at": NOW}, 3, 4, ("cancelled", None)),
    ({"expires_at": NOW - 1}, 0, 0, ("timed_out", "Expired")),
    ({"expires_at": NOW - 1}, 0, 1, None),
    ({"expires_at": NOW}, 0, 0, None),
    ({"deadline": NOW}, 0, 0, ("timed_out", "DeadlineExceeded")),
    ({"deadline": NOW + 1}, 0, 0, None),
]


@for_each(("changes", "crashes", "recorded", "expected"), BEFORE)
def test_before_start(changes: dict[str, Any], crashes: int, recorded: int, expected: Any) -> None:
    assert short(outcomes.before_start(facts(ROW._replace(**changes)), crashes, recorded)) == expected


def test_an_inline_run_is_never_poisoned_and_a_cancelled_one_does_not_start() -> None:
    assert outcomes.before_start(facts(inline=True), 3, 0) is None
    assert short(outcomes.before_start(facts(stop=Stop.CANCEL), 0, 0)) == ("cancelled", None)


def test_a_result_that_cannot_be_stored_is_left_out_of_a_failed_run() -> None:
    end = outcomes.of_result(FINAL, facts())
    assert isinstance(end, End)
    left = without_result(end, UnserialisableResult("$.at", "a socket"))
    assert left.result.error is not None
    assert left.result.error.details == {"left_out": "$.at: a socket"}
    assert left.event is not None
    assert left.event["type"] == "NoStock"


def test_an_error_that_cannot_be_stored_is_shortened() -> None:
    result = RunResult(error=ErrorInfo("NoStock", "none", details={"at": object()}))
    decision = outcomes.of_result(result, facts())
    assert isinstance(decision, RetryLater)
    assert "left_out" in decision.error.details
    assert json.loads(decision.error_text)["type"] == "NoStock"


def test_the_policy_knows_no_event_loop_no_engine_and_no_claim() -> None:
    tree = ast.parse(inspect.getsource(outcomes))
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert not [name for name in imported if name.split(".")[-1] in {"asyncio", "claim", "heartbeat", "backends"}]
    assert not [name for name in imported if "_engines" in name]


def test_a_cancellation_that_no_stop_explains_is_an_error_of_the_code() -> None:
    assert isinstance(outcomes.of_error(asyncio.CancelledError(), facts()), AskAgent)
