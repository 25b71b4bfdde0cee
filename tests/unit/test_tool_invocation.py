"""What a model's call of a tool comes to: an answer it can act on, and never a tool called with something else."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import threading
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from agent_runtime_core import register_type
from agent_runtime_core.errors import (
    AgentRuntimeError,
    CircuitOpen,
    InvalidArgument,
    JournalMismatch,
    LeaseLost,
    LimitExceeded,
    Postponed,
    StepCancelledError,
    StorageBusy,
)
from agent_runtime_core.interfaces import ToolCallDict
from agent_runtime_core.testing import MockRunContext
from agent_runtime_core.tools import (
    BadArguments,
    BaseTool,
    Tool,
    ToolAnswer,
    ToolRegistry,
    ToolResult,
    ToolTimeout,
    answer_call,
    tool,
)
from tests.support.cases import for_each
from tests.support.tool_corpus import BAD, GOOD, Bad, Good, registry

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)

if TYPE_CHECKING:
    from agent_runtime_core.interfaces import RunContext


def _call(name: str, arguments: Any = "{}") -> ToolCallDict:
    return ToolCallDict(id="c1", type="function", function={"name": name, "arguments": arguments})


def _only(fn: Callable[..., Any], **options: Any) -> ToolRegistry:
    made = ToolRegistry()
    made.register(Tool.from_function(fn, **options))
    return made


async def _answer(fn: Callable[..., Any], arguments: Any = "{}", **hooks: Any) -> ToolAnswer:
    return await answer_call(_only(fn, name="t"), _call("t", arguments), MockRunContext(), **hooks)


def _label(case: Bad | Good) -> str:
    text = ascii(case.arguments)
    return f"{case.tool}-{text if len(text) < 60 else text[:20] + '...' + text[-30:]}"


# -- the corpus


def test_the_corpus_has_two_hundred_different_malformed_calls() -> None:
    assert len({(case.tool, repr(case.arguments)) for case in BAD}) == len(BAD) >= 200
    assert len({(case.tool, repr(case.arguments)) for case in GOOD}) == len(GOOD) >= 60


@for_each("case", BAD, ids=_label)
async def test_a_malformed_call_is_answered_and_never_made(case: Bad) -> None:
    seen: list[Any] = []
    asked: list[Any] = []

    async def before(name: str, arguments: dict[str, Any]) -> None:
        asked.append(name)

    tools, ctx = registry(seen), MockRunContext()
    answer = await answer_call(tools, _call(case.tool, case.arguments), ctx)
    assert (answer.ok, answer.error, answer.result, seen) == (False, "bad_arguments", None, [])
    assert answer.content.startswith(f"Error: tool {case.tool!r}: ")
    assert case.said in answer.content
    assert len(answer.content) < 2000
    assert answer.content.encode()  # it goes out in the next request
    assert ctx.events == []
    with pytest.raises(BadArguments) as caught:
        await tools.execute(case.tool, case.arguments)
    assert f"Error: {caught.value}" == answer.content
    # A dict and its text are the same call, but that keys become text.
    if isinstance(case.arguments, dict) and "strings as keys" not in case.said:
        again = await answer_call(tools, _call(case.tool, json.dumps(case.arguments)), ctx, before=before)
        assert (again.ok, again.error, seen) == (False, "bad_arguments", [])
        # Only a constructor's refusal comes after the hook.
        assert asked == [] or "could not be constructed" in again.content or "must fit a float" in again.content


@for_each("case", GOOD, ids=_label)
async def test_a_good_call_is_made_with_typed_values(case: Good) -> None:
    seen: list[Any] = []
    answer = await answer_call(registry(seen), _call(case.tool, case.arguments), MockRunContext())
    assert answer == ToolAnswer("done", True, "done", None)
    assert seen == [dict(case.values)]
    # True is not 1 and 3 is not 3.0, though they are equal.
    assert repr(seen[0]) == repr(dict(case.values))


def test_every_wrong_argument_is_named_in_one_message() -> None:
    with pytest.raises(BadArguments) as caught:
        asyncio.run(registry([]).execute("city", {"nam": "Oslo", "days": "3", "detail": 1, "ratio": []}))
    assert str(caught.value) == (
        "tool 'city': missing required argument 'name' (string); days must be an integer, got '3'; "
        "detail must be a boolean, got 1; ratio must be a number, got an array; "
        "unexpected argument 'nam'. Did you mean 'name'?"
    )
    assert caught.value.tool == "city"


async def test_a_long_list_of_problems_is_cut() -> None:
    answer = await answer_call(registry([]), _call("draw", {f"k{i}": 1 for i in range(10_000)}), None)
    assert answer.content.endswith("; and more")
    assert len(answer.content) < 2000


# -- good answers


@for_each(
    ("result", "content"),
    [
        ("plain", "plain"),
        ("", ""),
        ('"quoted"', '"quoted"'),
        ({"a": [1, None, True], "ü": "é"}, '{"a": [1, null, true], "ü": "é"}'),
        ([{"b": 1.5}], '[{"b": 1.5}]'),
        ((1, "a"), '[1, "a"]'),
        ({3, 1, 2}, "[1, 2, 3]"),
        (None, "null"),
        (True, "true"),
        (3.5, "3.5"),
        (7, "7"),
        ([], "[]"),
        (datetime(2026, 1, 2, 12, tzinfo=UTC), "2026-01-02T12:00:00+00:00"),
        ({"at": date(2026, 1, 2), "cost": Decimal("1.50")}, '{"at": "2026-01-02", "cost": "1.50"}'),
        ({"raw": b"text", "id": UUID(int=0)}, '{"raw": "text", "id": "00000000-0000-0000-0000-000000000000"}'),
        (b"\xff\xfe", "//4="),
    ],
)
async def test_the_content_is_the_result_as_json(result: Any, content: str) -> None:
    assert await _answer(lambda: result) == ToolAnswer(content, True, result, None)


@dataclass
class Unregistered:
    city: str
    inner: Any = None


class Level(Enum):
    HIGH = 3


class Model:
    """An object like a pydantic model."""

    def model_dump(self) -> dict[str, Any]:
        return {"at": NOON, "level": Level.HIGH}


class Attrs:
    __attrs_attrs__ = (types.SimpleNamespace(name="a"),)
    a = 1


class Struct:
    __struct_fields__ = ("a",)
    a = 1


class Array:
    dtype = "int"

    def tolist(self) -> list[int]:
        return [1, 2]


@for_each(
    ("result", "plain"),
    [
        (float("nan"), "NaN"),
        ({"a": [float("inf"), float("-inf")]}, {"a": ["Infinity", "-Infinity"]}),
        (Unregistered("Oslo", Unregistered("Ulm")), {"city": "Oslo", "inner": {"city": "Ulm", "inner": None}}),
        (Level.HIGH, 3),
        (
            {1: "a", None: "b", 2.5: "c", Level.HIGH: "d", UUID(int=0): "e"},
            {"1": "a", "null": "b", "2.5": "c", "3": "d", "00000000-0000-0000-0000-000000000000": "e"},
        ),
        ([Model()], [{"at": "2026-01-02T12:00:00+00:00", "level": 3}]),
        (Attrs(), {"a": 1}),
        (Struct(), {"a": 1}),
        (Array(), [1, 2]),
        (range(3), [0, 1, 2]),
        ({"a": 1}.keys(), ["a"]),
        (deque([1]), [1]),
        (Path("a/b"), "a/b"),
        (bytearray(b"a"), "a"),
        (types.MappingProxyType({"a": Level.HIGH}), {"a": 3}),
    ],
)
async def test_a_result_with_an_obvious_json_form_is_converted(result: Any, plain: Any) -> None:
    answer = await _answer(lambda: result)
    assert (answer.ok, answer.error, answer.result) == (True, None, plain)
    assert answer.content == (plain if isinstance(plain, str) else json.dumps(plain))


async def test_a_plain_function_may_return_a_tool_result() -> None:
    seen: list[Any] = []

    async def after(name: str, result: Any) -> Any:
        seen.append(result)
        return result

    assert (await _answer(lambda: ToolResult(True, {"a": 1}), after=after)).content == '{"a": 1}'
    assert seen == [{"a": 1}]
    failed = await _answer(lambda: ToolResult(False, error="no such city"))
    assert (failed.ok, failed.error) == (False, "failed")
    assert failed.content == "Error: ToolFailed: tool 't' did not succeed: no such city"


async def test_the_context_reaches_the_handler() -> None:
    ctx = MockRunContext()

    def who(word: str, ctx: RunContext) -> str:
        return f"{word} {ctx.run_id}"

    answer = await answer_call(_only(who), _call("who", '{"word": "run"}'), ctx)
    assert answer.result == f"run {ctx.run_id}"


async def test_a_call_is_any_object_with_a_name_and_arguments() -> None:
    class Plain:
        id = "1"
        name = "t"
        arguments: Any = None

    assert (await answer_call(_only(lambda: 1, name="t"), Plain(), None)).result == 1


@pytest.mark.parametrize(
    ("result", "kind", "why"),
    [
        (object(), "object", "$: an object is not JSON-serializable"),
        ({"a": [object()]}, "dict", "$.a[0]: "),
        (Level, "EnumType", "the class Level is not JSON-serializable"),
        ("x" * 2**21, "str", "larger than 1,048,576 bytes"),
        (json.loads("[" * 100 + "]" * 100), "list", "nested deeper than 100 levels"),  # where the call's record has it
    ],
)
async def test_a_tool_that_ran_did_not_fail_if_its_result_cannot_be_stored(result: Any, kind: str, why: str) -> None:
    answer = await _answer(lambda: result)
    assert (answer.ok, answer.error, answer.result) == (True, "no_result", None)
    assert answer.content.startswith(f"Tool 't' ran, but its result of type {kind} cannot be stored: ")
    assert why in answer.content


def _same(_value: Any) -> Any:
    return _value


async def test_a_cycle_and_a_conversion_that_fails_are_described() -> None:
    cycle: list[Any] = []
    cycle.append({"a": cycle})

    class Broken:
        def model_dump(self) -> Any:
            raise ValueError("secret")

    for result, why in ((cycle, "a cycle"), (Broken(), "a Broken is not JSON-serializable")):
        answer = await _answer(functools.partial(_same, _value=result))
        assert (answer.ok, answer.error) == (True, "no_result")
        assert why in answer.content
        assert "secret" not in answer.content


async def test_an_object_whose_attributes_raise_is_described() -> None:
    class Detached:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("secret")

    answer = await _answer(lambda: Detached())
    assert (answer.ok, answer.error) == (True, "no_result")
    assert answer.content.endswith("cannot be stored: $: converting it failed with RuntimeError")


@dataclass
class Reading:
    city: str
    colour: Colour
    at: datetime
    inner: Reading | None = None


@register_type
@dataclass
class Registered:
    a: int


class Colour(Enum):
    RED = "red"


def one() -> Reading:
    return Reading("Oslo", Colour.RED, NOON)


async def some() -> list[Reading] | None:
    return [one()]


def colour() -> Colour:
    return Colour.RED


def known() -> Registered:
    return Registered(1)


async def test_a_result_is_kept_by_the_annotated_return_type() -> None:
    plain = {"city": "Oslo", "colour": "RED", "at": NOON, "inner": None}
    for fn, result in ((one, plain), (some, [plain]), (colour, "RED"), (functools.partial(one), plain)):
        answer = await _answer(fn)
        assert (answer.ok, answer.result) == (True, result)
        assert answer.content == (result if isinstance(result, str) else json.dumps(result, default=datetime.isoformat))
    assert await _answer(known) == ToolAnswer('{"a": 1}', True, Registered(1), None)


async def test_a_hook_is_given_the_result_as_the_tool_gave_it() -> None:
    async def after(name: str, result: Reading) -> Any:
        assert result == one()
        return replace(result, city="Bergen")

    answer = await _answer(one, after=after)
    assert answer.result["city"] == "Bergen"


async def test_a_result_that_does_not_fit_its_annotated_type_is_described() -> None:
    def wrong() -> Reading:
        return object()  # type: ignore[return-value]

    def inside() -> Reading:
        return Reading(object(), Colour.RED, NOON)  # type: ignore[arg-type]

    def large() -> list[Reading]:
        return [Reading("x" * 2**21, Colour.RED, NOON)]

    class Given(BaseTool):
        def name(self) -> str:
            return "t"

        def description(self) -> str:
            return "Gives an object."

        def parameters(self) -> dict[str, Any]:
            return {"type": "object"}

        async def execute(self) -> ToolResult:
            return ToolResult(True, object())

    for fn, why in (
        (wrong, "$: the annotation says Reading, got an object"),
        (inside, "$.city: an object is not JSON-serializable"),
        (large, "larger than 1,048,576 bytes"),
        (Given().as_tool().handler, "$: an object is not JSON-serializable"),
    ):
        answer = await _answer(fn)
        assert (answer.ok, answer.error, answer.result) == (True, "no_result", None)
        assert answer.content.startswith("Tool 't' ran, but its result of type ")
        assert why in answer.content


async def test_half_a_character_does_not_get_into_the_content() -> None:
    answer = await _answer(lambda: "a\ud800b")
    assert (answer.content, answer.result) == ("a\\ud800b", "a\ud800b")

    def broken() -> None:
        raise OSError("no file \udcff")

    assert (await _answer(broken)).content == "Error: OSError: no file \\udcff"


# -- what goes back to the model


async def test_an_unknown_tool_is_answered_with_the_nearest_names() -> None:
    answer = await answer_call(registry([]), _call("functions.city"), None)
    assert (answer.ok, answer.error) == (False, "unknown_tool")
    assert answer.content == "Error: unknown tool 'functions.city'. Did you mean 'city'?"
    far = await answer_call(registry([]), _call("zzz", "{broken"), None)
    assert far.content.startswith("Error: unknown tool 'zzz'. Known: by_hand, city, draw, figure, free and 5 more.")
    assert (
        await answer_call(ToolRegistry(), _call(""), None)
    ).content == "Error: unknown tool '': no tools are registered"
    assert len((await answer_call(registry([]), _call("c" * 10**6), None)).content) < 500


async def test_what_a_handler_raises_is_answered_without_a_traceback() -> None:
    def broken() -> None:
        raise ValueError("no such city: 'Atlantis'")

    answer = await _answer(broken)
    assert answer == ToolAnswer("Error: ValueError: no such city: 'Atlantis'", False, None, "failed")


async def leaves() -> None:
    sys.exit(2)


@pytest.mark.parametrize("timeout", [None, 5])
@pytest.mark.parametrize("fn", [lambda: sys.exit(2), leaves, lambda: leaves()])
async def test_a_function_that_leaves_the_process_has_failed(fn: Callable[..., Any], timeout: float | None) -> None:
    """As one around a command line does; other runs of the process go on."""
    answer = await answer_call(_only(fn, name="t", timeout=timeout), _call("t"), None)
    assert (answer.content, answer.error) == (
        "Error: RuntimeError: tool 't' must not end the process, got SystemExit: 2. Handle it in the code",
        "failed",
    )


@pytest.mark.parametrize(
    ("error", "content"),
    [
        (KeyError("k"), "Error: KeyError: 'k'"),
        (RuntimeError(), "Error: RuntimeError"),
        (TimeoutError("slow"), "Error: TimeoutError: slow"),
        (InvalidArgument("the handler's own"), "Error: InvalidArgument: the handler's own"),
        (BadArguments("another's", "other"), "Error: BadArguments: tool 'other': another's"),
        (ToolTimeout("other", 1), "Error: ToolTimeout: tool 'other' took longer than 1 s"),
        (
            ExceptionGroup("two", [ValueError("a"), KeyError("b")]),
            "Error: ExceptionGroup: two (2 sub-exceptions): ValueError: a; KeyError: 'b'",
        ),
        (StopIteration("odd"), "Error: RuntimeError: StopIteration: odd"),
    ],
)
async def test_every_failure_of_a_handler_is_one(error: Exception, content: str) -> None:
    def broken() -> None:
        raise error

    assert await _answer(broken) == ToolAnswer(content, False, None, "failed")


async def test_an_error_that_cannot_even_say_so_is_named() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("mute")

    def broken() -> None:
        raise Mute

    assert (await _answer(broken)).content == "Error: Mute"


async def test_a_very_long_error_is_cut() -> None:
    def broken() -> None:
        raise ValueError("x" * 10**6)

    answer = await _answer(broken)
    assert len(answer.content) < 4100
    assert answer.content.endswith("more characters)")


# -- what ends the run


@pytest.mark.parametrize(
    "error",
    [
        LeaseLost("run"),
        StepCancelledError("s"),
        Postponed("later"),
        CircuitOpen("open", after=3),
        LimitExceeded("max_turns", 3, 3),
        JournalMismatch("changed"),
        StorageBusy("busy"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_no_model_can_mend_goes_on(error: BaseException) -> None:
    async def broken() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await _answer(broken)
    assert caught.value is error


@pytest.mark.parametrize("timeout", [None, 60.0])
async def test_a_cancellation_that_was_not_meant_for_the_tool_is_told(timeout: float | None) -> None:
    async def impatient() -> None:
        other = asyncio.ensure_future(asyncio.Event().wait())
        asyncio.get_running_loop().call_soon(other.cancel, "enough")
        await other

    answer = await answer_call(_only(impatient, timeout=timeout), _call("impatient"), None)
    assert (answer.ok, answer.error) == (False, "failed")
    assert answer.content.startswith("Error: CancelledError")


@pytest.mark.parametrize("timeout", [None, 60.0])
async def test_a_cancellation_of_the_call_goes_on(timeout: float | None) -> None:
    begun = asyncio.Event()

    async def endless() -> None:
        begun.set()
        await asyncio.Event().wait()

    running = asyncio.ensure_future(answer_call(_only(endless, timeout=timeout), _call("endless"), None))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_an_interrupt_goes_on() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    async def interrupted_here() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await _answer(interrupted_here)
    assert (await _answer(interrupted)).error == "failed"  # no Ctrl-C, since that reaches the main thread only


async def test_a_lost_lease_is_found_in_a_group() -> None:
    lost = LeaseLost("run")

    async def broken() -> None:
        raise ExceptionGroup("outer", [ValueError("x"), ExceptionGroup("inner", [lost])])

    with pytest.raises(LeaseLost) as caught:
        await _answer(broken)
    assert caught.value is lost


async def test_cancelling_a_call_cancels_its_handler() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    for timeout in (None, 60):
        begun.clear()
        ended.clear()
        tools = _only(endless, timeout=timeout)
        running = asyncio.create_task(answer_call(tools, _call("endless"), None))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ended.is_set()


# -- hooks


async def test_hooks_see_the_call_and_replace_the_result() -> None:
    seen: list[Any] = []

    async def before(name: str, arguments: dict[str, Any]) -> None:
        seen.append((name, dict(arguments)))
        arguments["a"] = 5

    async def after(name: str, result: Any) -> Any:
        seen.append((name, result))
        return {"doubled": result * 2}

    def echo(a: int) -> int:
        return a

    answer = await _answer(echo, '{"a": 1.0}', before=before, after=after)
    assert answer == ToolAnswer('{"doubled": 10}', True, {"doubled": 10}, None)
    assert seen == [("t", {"a": 1.0}), ("t", 5)]


async def test_arguments_that_a_hook_spoils_are_refused() -> None:
    async def before(name: str, arguments: dict[str, Any]) -> None:
        arguments["a"] = "five"

    answer = await _answer(_echo, '{"a": 1}', before=before)
    assert (answer.error, answer.content) == ("bad_arguments", "Error: tool 't': a must be an integer, got 'five'")


def _echo(a: int) -> int:
    return a


async def test_after_is_for_results_only_and_may_make_one_fit() -> None:
    seen: list[Any] = []

    async def after(name: str, result: Any) -> Any:
        seen.append(result)
        return repr(type(result))

    def broken() -> None:
        raise ValueError("x")

    assert not (await _answer(broken, after=after)).ok
    assert not (await _answer(_echo, "{}", after=after)).ok
    assert seen == []
    assert (await _answer(object, after=after)).content == "<class 'object'>"


async def test_what_a_hook_raises_goes_on() -> None:
    async def before(name: str, arguments: dict[str, Any]) -> None:
        raise ValueError("before")

    async def after(name: str, result: Any) -> Any:
        raise BadArguments("after", "t")

    called: list[int] = []
    with pytest.raises(ValueError, match=r"^before$"):
        await _answer(lambda: called.append(1), before=before)
    assert called == []
    with pytest.raises(BadArguments, match="after"):
        await _answer(lambda: 1, after=after)


async def test_a_registry_that_executes_in_its_own_way_is_asked() -> None:
    class Elsewhere(ToolRegistry):
        async def execute(self, name: str, arguments: Any, ctx: Any = None, **extra: Any) -> Any:
            return f"{name} elsewhere"

    tools = Elsewhere()
    tools.register(Tool.from_function(_echo, name="t"))
    assert (await answer_call(tools, _call("t", '{"a": 1}'), None)).content == "t elsewhere"
    assert (await answer_call(tools, _call("t"), None)).error == "bad_arguments"


# -- time limits


async def test_a_coroutine_that_takes_too_long_is_cancelled() -> None:
    ended: list[str] = []

    @tool(timeout=0.01)
    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    tools = ToolRegistry()
    tools.register(endless)
    answer = await answer_call(tools, _call("endless"), None)
    assert answer == ToolAnswer("Error: tool 'endless' took longer than 0.01 s", False, None, "timed_out")
    assert ended == ["cancelled"]
    with pytest.raises(TimeoutError, match=r"tool 'endless' took longer than 0\.01 s") as caught:
        await tools.execute("endless", {})
    assert isinstance(caught.value, AgentRuntimeError)
    assert isinstance(caught.value, ToolTimeout)
    assert (caught.value.tool, caught.value.seconds) == ("endless", 0.01)


async def test_a_thread_that_takes_too_long_is_left_behind() -> None:
    free, ended = threading.Event(), threading.Event()

    @tool(timeout=0.01)
    def blocking() -> None:
        free.wait(30)
        ended.set()

    tools = ToolRegistry()
    tools.register(blocking)
    answer = await answer_call(tools, _call("blocking"), None)
    assert answer.error == "timed_out"
    assert answer.content.endswith("longer than 0.01 s. It continues in its thread and may still have effects")
    assert not ended.is_set()
    free.set()
    assert ended.wait(30)


async def test_a_tool_within_its_time_is_not_touched() -> None:
    for fn in (_echo, _later):
        tools = _only(fn, timeout=60, name="t")
        assert (await answer_call(tools, _call("t", '{"a": 4}'), None)).result == 4


async def _later(a: int) -> int:
    await asyncio.sleep(0)
    return a


async def test_what_fails_within_its_time_fails_as_it_is() -> None:
    async def broken() -> None:
        raise TimeoutError("its own")

    answer = await answer_call(_only(broken, timeout=60), _call("broken"), None)
    assert (answer.error, answer.content) == ("failed", "Error: TimeoutError: its own")
