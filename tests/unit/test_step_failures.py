"""The error of a step that the code went on without: on a later attempt it finds the same one, as far as that goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import open_run
from agent_runtime_core._core.codec.json import encode
from agent_runtime_core._execution.recorded_calls import RecordedCalls
from agent_runtime_core._execution.step_failure import original_error, recorded_error
from agent_runtime_core._journal.record import FAILED, Record
from agent_runtime_core.errors import (
    CircuitOpen,
    InvalidArgument,
    ProviderError,
    RateLimited,
    RunNotFound,
    StepExecutionError,
    WaitTimeout,
    text_of,
)
from tests.support.runs import Rig, twice


class Declined(Exception):
    """As the errors of other libraries are: made of more than a text."""

    def __init__(self, code: int, *, card: str) -> None:
        self.code, self.card = code, card
        super().__init__(f"card {card} was declined: {code}")


class TellsOfItself(Exception):
    def __init__(self, code: int) -> None:
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


class Outer:
    class Inner(Declined):
        pass


def made_in_a_function() -> Exception:
    class Local(Exception):
        pass

    return Local("nobody finds its class")


CAUSES: list[tuple[Callable[[], Exception], type[Exception] | None]] = [
    (lambda: ValueError("no number"), ValueError),
    (lambda: ConnectionResetError("cut"), ConnectionResetError),
    (lambda: FileNotFoundError(2, "No such file", "a.txt"), FileNotFoundError),
    (lambda: KeyError("key"), KeyError),
    (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), UnicodeDecodeError),
    (lambda: WaitTimeout("nobody said anything"), WaitTimeout),
    (lambda: RateLimited("too many", retry_after=3600.0), RateLimited),
    (lambda: Declined(51, card="1234"), Declined),
    (lambda: Outer.Inner(51, card="1234"), Outer.Inner),
    (lambda: TellsOfItself(3), TellsOfItself),
    (made_in_a_function, None),
    (lambda: ValueError("long " * 10_000), ValueError),
    (lambda: ValueError(), ValueError),
]


@pytest.mark.parametrize(("make", "kind"), CAUSES)
async def test_a_failure_has_its_cause_on_every_attempt(
    place: Path | None, make: Callable[[], Exception], kind: type[Exception] | None
) -> None:
    causes: list[BaseException | None] = []

    def fails() -> None:
        raise make()

    async def body(ctx: Any) -> Any:
        try:
            await ctx.step("pay", fails)
        except StepExecutionError as error:
            causes.append(error.__cause__)
            await ctx.step("fall back", lambda: None)
            return [error.step_name, error.message, error.attempts, str(error)]

    async with Rig(place) as rig:
        first, again = await twice(rig, body)
    assert first == again
    assert [type(each) for each in causes] == [kind or type(None)] * 2
    if kind not in (None, KeyError):
        assert (str(causes[1]) or kind.__name__) == first[1]


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (ValueError("no number"), ValueError),
        (RateLimited("too many"), RateLimited),
        (ProviderError("no"), ProviderError),
        (Declined(51, card="1234"), Declined),
        (TellsOfItself(3), TellsOfItself),
        (RunNotFound("x"), RunNotFound),
        (InvalidArgument("bad"), InvalidArgument),
    ],
)
async def test_a_step_of_the_library_itself_raises_the_error_as_it_was(
    place: Path | None, made: Exception, kind: type[Exception]
) -> None:
    async def fails(attempt: int) -> None:
        raise made

    async def body(ctx: Any) -> Any:
        try:
            await RecordedCalls(ctx).run("model", "0", fails)
        except Exception as error:  # noqa: BLE001 - whatever it is
            await RecordedCalls(ctx).run("model", "1", succeeds)
            return [type(error).__name__, text_of(error)]

    async def succeeds(attempt: int) -> None: ...

    async with Rig(place) as rig:
        first, again = await twice(rig, body)
    assert first == [type(made).__name__, text_of(made)]
    assert again[0] == kind.__name__
    assert first[1] in again[1]


@pytest.mark.parametrize("told", [{}, {"class": "nowhere:Error"}, {"class": "builtins:print"}, {"class": "os:sep"}])
def test_a_record_that_names_no_error_is_that_of_its_step(told: dict[str, Any]) -> None:
    record = Record(3, FAILED, "pay", "s:0", 2, info=encode({"error": "down", "type": "Error", **told}))
    for error in (recorded_error("pay now", record), original_error("pay now", record)):
        assert isinstance(error, StepExecutionError)
        assert (error.step_name, error.message, error.attempts, error.__cause__) == ("pay now", "down", 2, None)


OF_0_6_0: list[tuple[dict[str, Any], Exception]] = [
    ({"class": "builtins:ValueError", "error": "bad"}, ValueError("bad")),
    ({"class": "builtins:KeyError", "error": "'key'"}, KeyError("'key'")),
    ({"class": "agent_runtime_core.errors:RateLimited", "error": "slow"}, RateLimited("slow")),
    ({"class": f"{__name__}:Declined", "error": "card 1 was declined: 51"}, Exception("card 1 was declined: 51")),
    (
        {
            "class": "builtins:ExceptionGroup",
            "error": "g (1 sub-exception): ValueError: bad",
            "group": {"message": "g", "errors": [{"class": "builtins:ValueError", "error": "bad"}]},
        },
        ExceptionGroup("g", [ValueError("bad")]),
    ),
]


@pytest.mark.parametrize(("told", "expected"), OF_0_6_0)
def test_a_failure_that_0_6_0_recorded_has_its_class_and_message(told: dict[str, Any], expected: Exception) -> None:
    record = Record(3, FAILED, "pay", "s:0", 2, info=encode({"type": "Error", **told}))
    for error in (recorded_error("pay", record).__cause__, original_error("pay", record)):
        assert type(error) is (Declined if "Declined" in told["class"] else type(expected))
        assert text_of(error) == (repr(told["error"]) if type(expected) is KeyError else told["error"])


@pytest.mark.parametrize(
    "told",
    [
        {"class": f"{__name__}:TellsOfItself", "error": "code 3"},
        {"class": "builtins:ExceptionGroup", "error": "g"},
        {"class": "builtins:ExceptionGroup", "error": "g", "group": {"message": "g", "errors": [{"error": "a"}]}},
    ],
)
def test_a_failure_of_0_6_0_that_cannot_be_built_is_that_of_its_step(told: dict[str, Any]) -> None:
    record = Record(3, FAILED, "pay", "s:0", 2, info=encode({"type": "Error", **told}))
    assert recorded_error("pay", record).__cause__ is None
    assert type(original_error("pay", record)) is StepExecutionError


def test_a_circuit_that_was_open_is_open_for_as_long_as_it_was_said() -> None:
    record = Record(3, FAILED, "model", "k:0", info=encode({"error": "no", "type": "CircuitOpen", "retry_delay": 3.0}))
    error = original_error("model", record)
    assert isinstance(error, CircuitOpen)
    assert (error.after, "no" in str(error)) == (3.0, True)


async def test_a_failure_inside_of_a_step_is_that_of_the_inner_one_on_every_attempt(place: Path | None) -> None:
    causes: list[BaseException | None] = []

    def fails() -> None:
        raise Declined(51, card="1234")

    async def body(ctx: Any) -> Any:
        async def outer() -> None:
            await ctx.step("inner", fails, retries=1, retry_delay=0)

        try:
            await ctx.step("outer", outer)
        except StepExecutionError as error:
            causes.append(error.__cause__)
            await ctx.step("fall back", lambda: None)
            return [error.step_name, error.message, error.attempts, str(error)]

    async with Rig(place) as rig:
        first, again = await twice(rig, body)
    assert first == again == ["inner", "card 1234 was declined: 51", 2, str(StepExecutionError(*first[:3]))]
    assert [type(each) for each in causes] == [Declined, Declined]


async def test_a_step_that_the_code_repeats_after_its_failure_is_also_repeated_when_the_run_resumes(
    tmp_path: Path,
) -> None:
    """The recorded error is raised once. If each call raised it, a retry of the code would never call the function."""
    calls: list[str] = []

    def pay() -> str:
        calls.append("pay")
        if len(calls) < 3:
            raise ConnectionError("the network is down")
        return "paid"

    async def pay_in_a_loop() -> str:
        async with open_run(str(tmp_path / "runs.db"), run_id="one") as ctx:
            for _ in range(4):
                try:
                    return await ctx.step("pay", pay, key="invoice 7")
                except StepExecutionError:
                    if len(calls) == 2 and not crashed:
                        crashed.append(True)
                        raise KeyboardInterrupt from None
                    await ctx.step("note", lambda: None)
        return "never paid"

    crashed: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        await pay_in_a_loop()
    assert await pay_in_a_loop() == "paid"
    assert calls == ["pay", "pay", "pay"]
