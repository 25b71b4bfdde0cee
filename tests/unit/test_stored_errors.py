"""An error that code catches is the same in the first execution and in a later one: class, attributes and causes."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import importlib
import json
import re
import sqlite3
import sys
import traceback
import types
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import Step, StepExecutor
from agent_runtime_core._execution.recorded_calls import RecordedCalls
from agent_runtime_core._execution.step_failure import (
    MAX_CAUSES,
    MAX_GROUP_ERRORS,
    MAX_VALUE,
    MAX_VALUES,
    Description,
    rebuilt,
)
from agent_runtime_core.errors import (
    CircuitOpen,
    ProviderUnavailable,
    RateLimited,
    StepExecutionError,
    WaitTimeout,
    leaves_of,
    text_of,
)
from agent_runtime_core.steps import register_type
from tests.support.cases import for_each
from tests.support.runs import Rig, twice, twice_values


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


@register_type
@dataclasses.dataclass
class Point:
    x: int


class HasAttributes(Exception):
    def __init__(self, status: int, *, body: Any, session: Any = None) -> None:
        super().__init__(f"status {status}")
        self.status, self.body, self.session = status, body, session


class HasSlots(Exception):
    __slots__ = ("__hidden", "code", "empty", "lock")

    def __init__(self, code: int, lock: object = None) -> None:
        self.code, self.__hidden, self.lock = code, "h", lock
        super().__init__("slots")

    @property
    def hidden(self) -> str:
        return self.__hidden


class PrintsItself(Exception):
    def __init__(self, code: int, response: object) -> None:
        self.code, self.response = code, response

    def __str__(self) -> str:
        return f"{self.code}: {self.response.text}"  # type: ignore[attr-defined]


class Frozen(Exception):
    def __init__(self, code: int) -> None:
        self.__dict__["code"] = code

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("__"):
            raise AttributeError("frozen")
        super().__setattr__(name, value)


class Computed(Exception):
    """Its property has the name of an entry of `__dict__`, which code of other libraries does for lazy values."""

    def __init__(self) -> None:
        super().__init__("computed")
        self.__dict__["code"] = 5

    @property
    def code(self) -> int:
        return int(self.__dict__["code"]) + 1


class NewAndInit(Exception):
    built = 0

    def __new__(cls, *args: Any) -> NewAndInit:
        cls.built += 1
        return super().__new__(cls, *args)

    def __init__(self, code: int) -> None:
        type(self).built += 1
        self.code = code


class OwnGroup(ExceptionGroup[Exception]):
    code: int


class _Disguised(HasAttributes):
    """Has the name of its base class, as private classes of Pydantic AI have."""


_Disguised.__name__ = _Disguised.__qualname__ = "HasAttributes"


def disguised_in_a_function() -> Exception:
    class Local(HasAttributes):
        pass

    Local.__name__ = Local.__qualname__ = "HasAttributes"
    return Local(503, body=1)


def with_cause(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def with_attributes(error: Exception, **attributes: Any) -> Exception:
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def with_note() -> Exception:
    error = ValueError("a")
    error.add_note("seen on Monday")
    return error


def not_found() -> Exception:
    try:
        Path("no such file").read_text()
    except OSError as error:
        return error
    raise AssertionError


def bad_json() -> Exception:
    try:
        json.loads("{")
    except ValueError as error:
        return error
    raise AssertionError


def no_attribute() -> Exception:
    try:
        object().code  # type: ignore[attr-defined]  # noqa: B018
    except AttributeError as error:
        return error
    raise AssertionError


def bad_sql() -> Exception:
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute("select nothing from nowhere")
    except sqlite3.Error as error:
        return error
    finally:
        connection.close()
    raise AssertionError


def no_syntax() -> Exception:
    try:
        compile("a b", "f.py", "exec")
    except SyntaxError as error:
        return error
    raise AssertionError


def group(*errors: Exception) -> Exception:
    return ExceptionGroup("g", list(errors))


#: Errors of which everything is stored, so the first execution raises the object itself.
COMPLETE: list[Callable[[], Exception]] = [
    lambda: ValueError("a"),
    lambda: ValueError(),
    lambda: ValueError("a", 1, None, (2, [3]), {"b": b"\xff"}, {4}),
    lambda: KeyError("key"),
    lambda: StopAsyncIteration(3),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    lambda: ImportError("no module", name="m", path="p.py"),
    lambda: OSError(2, "no such file", "a.txt", None, "b.txt"),
    lambda: ConnectionResetError("cut"),
    lambda: WaitTimeout("no answer"),
    lambda: RateLimited("too many", retry_after=3600.0, status=429),
    lambda: HasAttributes(503, body={"error": [1, None, "é\ud800"]}),
    lambda: HasAttributes(503, body=[UUID(int=1), datetime(2026, 1, 1, tzinfo=UTC), Decimal("1.50"), Point(3)]),
    lambda: _Disguised(503, body=1),
    lambda: HasSlots(3),
    lambda: Frozen(3),
    lambda: Computed(),
    lambda: NewAndInit(3),
    lambda: with_attributes(ValueError("a"), code=7),
    lambda: with_cause(ValueError("a"), with_cause(HasAttributes(1, body=2), KeyError("b"))),
    lambda: with_cause(ValueError("a"), asyncio.CancelledError("stop")),
    lambda: group(HasAttributes(1, body=2), group(KeyError("b"), with_cause(ValueError("c"), HasSlots(1)))),
    lambda: with_attributes(OwnGroup("own", [ValueError("a")]), code=3),
    with_note,
    not_found,
    bad_json,
    bad_sql,
    no_syntax,
]

#: Errors of which a part is not stored, so that both executions raise it without that part.
INCOMPLETE: list[Callable[[], Exception]] = [
    lambda: HasAttributes(503, body=1, session=object()),
    lambda: HasAttributes(503, body=Color.RED),
    lambda: HasAttributes(503, body=Level.HIGH),
    lambda: HasAttributes(503, body=float("nan")),
    lambda: HasSlots(3, lock=object()),
    lambda: ValueError(object()),
    lambda: ValueError("long " * 20_000),
    lambda: with_cause(HasAttributes(1, body=2), HasAttributes(503, body=1, session=object())),
    lambda: group(HasAttributes(1, body=2), HasAttributes(503, body=1, session=object())),
    lambda: with_attributes(ValueError("a"), password="x", header={"Authorization": "x", "accept": "y"}),
    lambda: with_attributes(ValueError("a"), **{"$": "x", "v": 1}),
    no_attribute,
]


def local() -> Exception:
    class Local(Exception):
        pass

    return with_attributes(Local("of a function", 3), code=5)


#: Errors that cannot be built from what is stored.
LOST: list[Callable[[], Exception]] = [
    local,
    disguised_in_a_function,
    lambda: PrintsItself(3, types.SimpleNamespace(text="down")),
    lambda: group(ValueError("a"), local()),
    lambda: group(*(ValueError(str(n)) for n in range(MAX_GROUP_ERRORS + 1))),
]


def picture(error: BaseException | None) -> Any:
    """Everything of an error that code can read, without its traceback and its context."""
    if error is None:
        return None
    slots = [name for kind in type(error).__mro__ for name in vars(kind) if hasattr(vars(kind)[name], "__objclass__")]
    read = {name: getattr(error, name) for name in slots if not name.startswith("__") and hasattr(error, name)}
    values = {name: value for name, value in read.items() if not callable(value)}
    inside = [picture(each) for each in error.exceptions] if isinstance(error, BaseExceptionGroup) else None
    for name in ("exceptions", "recorded_cause"):
        values.pop(name, None)
    own = {name: picture(each) if isinstance(each, BaseException) else each for name, each in vars(error).items()}
    args = None if inside is not None else list(map(repr, error.args))
    return [type(error), args, str(error), repr(values), repr(own), inside, picture(error.__cause__)]


def wrapped(error: StepExecutionError) -> Any:
    """The picture of the error of a step; addresses of objects differ in each execution."""
    return picture(error)


async def in_both(place: Path | None, make: Callable[[], Exception], **options: Any) -> tuple[Any, Any, list[Any]]:
    """The picture of what a step raises in the first execution and in the next one, and the raised objects."""
    raised: list[Any] = []

    def fails() -> None:
        raise make()

    async def body(ctx: Any) -> Any:
        try:
            await ctx.step("call", fails, **options)
        except StepExecutionError as error:
            raised.append(error)
            await ctx.step("after", lambda: 1)
            return wrapped(error)

    async with Rig(place) as rig:
        first, again = await twice_values(rig, body)
    return first, again, raised


@pytest.mark.parametrize("make", [*COMPLETE, *INCOMPLETE, *LOST])
async def test_both_executions_raise_the_same(place: Path | None, make: Callable[[], Exception]) -> None:
    first, again, raised = await in_both(place, make)
    assert first == again
    assert raised[0] is not raised[1]


@for_each("make", COMPLETE)
async def test_an_error_that_is_stored_in_full_stays_the_object_it_was(make: Callable[[], Exception]) -> None:
    error = make()
    _, _, raised = await in_both(None, lambda: error)
    assert raised[0].__cause__ is error
    assert picture(raised[1].__cause__) == picture(error)
    assert raised[1].__cause__.__traceback__ is None


@for_each("make", INCOMPLETE)
async def test_an_error_that_is_not_stored_in_full_keeps_its_class_and_traceback(make: Callable[[], Exception]) -> None:
    error = make()
    _, _, raised = await in_both(None, lambda: error)
    assert raised[0].__cause__ is not error
    assert [type(each.__cause__) for each in raised] == [type(error)] * 2
    assert raised[0].__cause__.__traceback__ is error.__traceback__ is not None


async def test_causes_and_errors_of_a_group_keep_their_tracebacks() -> None:
    def inner() -> None:
        raise KeyError("inner")

    def fails() -> None:
        try:
            inner()
        except KeyError as error:
            cause = with_cause(HasAttributes(1, body=2, session=object()), error)
        raise ExceptionGroup("g", [cause])

    raised: list[BaseException] = []

    async def body(ctx: Any) -> None:
        with pytest.raises(StepExecutionError) as caught:
            await ctx.step("call", fails)
        raised.append(caught.value)

    async with Rig() as rig:
        await rig.value(body)
    group_of_step = raised[0].__cause__
    assert isinstance(group_of_step, ExceptionGroup)
    assert not hasattr(group_of_step.exceptions[0], "session")
    assert "in inner" in "".join(traceback.format_exception(group_of_step))


@pytest.mark.parametrize("make", LOST)
async def test_an_error_that_cannot_be_built_is_described(make: Callable[[], Exception]) -> None:
    _, _, raised = await in_both(None, make)
    for error in raised:
        assert error.__cause__ is None
        assert error.error_type.rpartition(".")[2] == type(make()).__name__
    assert type(raised[0].__context__) is not type(None)  # the traceback shows it
    assert raised[0].__suppress_context__ is False


def test_a_reloaded_class_is_the_one_that_its_module_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    error = HasAttributes(503, body=1)

    class Reloaded(Exception):
        pass

    monkeypatch.setitem(globals(), "HasAttributes", Reloaded)
    made: Any = rebuilt(Description(error).info, "status 503")
    assert (type(made), made.status) == (Reloaded, 503)


async def test_the_description_has_class_arguments_and_attributes(place: Path | None) -> None:
    _, _, raised = await in_both(place, local)
    for error in raised:
        assert error.error_type == f"{__name__}.local.<locals>.Local"
        assert (error.error_args, error.error_attributes) == (("of a function", 3), {"code": 5})
        assert error.message == "('of a function', 3)"


async def test_the_description_is_also_there_when_the_cause_is() -> None:
    _, _, raised = await in_both(None, lambda: with_attributes(ValueError("a", 2), code=5))
    for error in raised:
        assert (error.error_type, error.error_args, error.error_attributes) == ("ValueError", ("a", 2), {"code": 5})


def test_no_constructor_is_called_to_build_an_error() -> None:
    description, before = Description(NewAndInit(3)), NewAndInit.built
    error = rebuilt(description.info, "3")
    assert isinstance(error, NewAndInit)
    assert (NewAndInit.built, error.code, error.args) == (before, 3, (3,))


def test_no_module_is_imported_to_build_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone_library.py").write_text("class Broken(Exception): pass")
    monkeypatch.syspath_prepend(tmp_path)
    description = Description(importlib.import_module("gone_library").Broken("no"))
    assert isinstance(rebuilt(description.info, "no"), Exception)
    monkeypatch.delitem(sys.modules, "gone_library")
    assert rebuilt(description.info, "no") is None
    assert "gone_library" not in sys.modules


async def test_in_a_process_without_the_class_the_error_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "absent_library.py").write_text("class Broken(Exception): pass")
    monkeypatch.syspath_prepend(tmp_path)
    causes: list[Any] = []

    def fails() -> None:
        raise with_attributes(importlib.import_module("absent_library").Broken("no"), status_code=503)

    async def body(ctx: Any) -> None:
        try:
            await ctx.step("call", fails)
        except StepExecutionError as error:
            causes.append((error.__cause__, error.error_type, error.error_args, error.error_attributes))
        await ctx.step("after", lambda: 1)
        sys.modules.pop("absent_library", None)
        if len(causes) == 1:
            raise ConnectionError("cut")

    async with Rig(tmp_path / "a.db") as rig:
        await rig.go(body)
        await rig.value(body)
    assert type(causes[0][0]).__name__ == "Broken"
    assert causes[1][0] is None
    assert causes[0][1:] == causes[1][1:] == ("absent_library.Broken", ("no",), {"status_code": 503})


def test_a_value_of_a_type_that_is_not_registered_here_leaves_the_error_undescribed() -> None:
    info = Description(ValueError("a")).info | {"values": '{"args":[{"$":"nowhere.Type","v":1}],"attributes":{}}'}
    assert rebuilt(info, "a") is None


def test_a_class_that_changed_its_slots_is_not_built() -> None:
    info = Description(HasSlots(3)).info
    read_only = info | {"class": "builtins:UnicodeDecodeError", "values": '{"args":["a"],"attributes":{"start":"x"}}'}
    assert rebuilt(read_only, "a") is None


# -- limits and secrets


@for_each(
    "name",
    ["api_key", "apikey", "x-api-key", "Authorization", "access_token", "token", "_Client__secret", "set-cookie",
     "client_secret", "secret_key", "PASSWORD", "db_passwd", "credentials"],
)  # fmt: skip
def test_secrets_are_not_stored(name: str) -> None:
    error = HasAttributes(1, body={"deep": [({name: "hunter2"},)], "kept": 1})
    if name.isidentifier():
        setattr(error, name, "hunter2")
    description = Description(error)
    assert "hunter2" not in str(description.info)
    assert not description.is_complete
    assert rebuilt(description.info, "status 1").body == {"deep": [({},)], "kept": 1}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["max_tokens", "input_tokens", "tokens", "key", "monkey", "code", "secretary"])
def test_names_that_only_resemble_secrets_are_stored(name: str) -> None:
    assert Description(with_attributes(ValueError("a"), **{name: "v"})).is_complete


def test_a_large_value_is_left_out_and_a_long_string_is_shortened() -> None:
    error = with_attributes(ValueError("a"), rows=["x"] * MAX_VALUE, text="y" * 1_000_000, code=3)
    made: Any = rebuilt(Description(error).info, "a")
    assert not hasattr(made, "rows")
    assert "characters left out" in made.text
    assert made.code == 3


def test_all_values_together_are_limited() -> None:
    many = {f"n{n}": ["x" * (MAX_VALUE // 2)] for n in range(100)}
    description = Description(with_cause(with_attributes(ValueError("a"), **many), with_attributes(KeyError(), **many)))
    assert len(json.dumps(description.info)) < 2 * MAX_VALUES
    assert rebuilt(description.info, "a") is not None


def test_a_chain_of_causes_is_cut_and_a_circle_ends() -> None:
    error: Exception = ValueError("0")
    for n in range(20):
        error = with_cause(ValueError(str(n)), error)
    made, length = rebuilt(Description(error).info, "19"), 0
    while made is not None:
        made, length = made.__cause__, length + 1
    assert length == MAX_CAUSES + 1
    circle = with_cause(ValueError("a"), with_cause(ValueError("b"), ValueError("c")))
    circle.__cause__.__cause__ = circle  # type: ignore[union-attr]
    assert not Description(circle).is_complete


def test_an_attribute_that_refers_to_its_error_is_left_out() -> None:
    error = ValueError("a")
    made = rebuilt(Description(with_attributes(error, me=error, code=1)).info, "a")
    assert (hasattr(made, "me"), getattr(made, "code", None)) == (False, 1)


class Hostile:
    def __getattribute__(self, name: str) -> Any:
        raise SystemError(name)


def test_a_value_that_raises_at_every_access_is_left_out() -> None:
    made = rebuilt(Description(with_attributes(ValueError("a"), hostile=Hostile())).info, "a")
    assert not hasattr(made, "hostile")


# -- where steps fail


@pytest.mark.parametrize("make", [COMPLETE[11], INCOMPLETE[0], local])
async def test_a_step_around_it_raises_the_same(place: Path | None, make: Callable[[], Exception]) -> None:
    def fails() -> None:
        raise make()

    async def of_step(run: Any) -> None:
        await run.step("inner", fails, retries=1, retry_delay=0)

    async def of_list(run: Any) -> None:
        await StepExecutor(run).run([Step("inner", lambda ctx, state: fails(), retries=1, retry_delay=0)])

    async def of_graph(run: Any) -> None:
        steps = [Step("inner", lambda ctx, state: fails()), Step("last", lambda ctx, s: 1, depends_on=["inner"])]
        await StepExecutor(run).run(steps)

    async def of_map(run: Any) -> None:
        await StepExecutor(run).map("inner", lambda item: fails(), [1])

    async def body(ctx: Any) -> Any:
        found: list[Any] = []
        for inner in (of_step, of_list, of_graph, of_map):
            try:
                await ctx.step(f"outer {inner.__name__}", functools.partial(inner, ctx))
            except StepExecutionError as error:
                found += [error.step_name, error.attempts, wrapped(error)]
        await ctx.step("after", lambda: 1)
        return found

    async with Rig(place) as rig:
        first, again = await twice_values(rig, body)
    assert first == again
    assert [first[0], first[1], first[3], first[4]] == ["inner", 2, "inner", 2]
    assert len(first) == 12


async def test_steps_of_lists_and_maps_raise_the_same_when_they_run_again(place: Path | None) -> None:
    def fails(*_: Any) -> None:
        raise HasAttributes(503, body=1, session=object())

    async def body(ctx: Any) -> Any:
        found = []
        for run in (lambda: StepExecutor(ctx).run([Step("a", fails)]), lambda: StepExecutor(ctx).map("b", fails, [1])):
            with pytest.raises(StepExecutionError) as caught:
                await run()
            found.append(wrapped(caught.value))
            assert not hasattr(caught.value.__cause__, "session")
        await ctx.step("after", lambda: 1)
        return found

    async with Rig(place) as rig:
        first, again = await twice_values(rig, body)
    assert first == again


async def test_a_transaction_raises_the_same(tmp_path: Path) -> None:
    def fails(conn: Any) -> None:
        conn.execute("select nothing from nowhere")

    async def body(ctx: Any) -> Any:
        with pytest.raises(StepExecutionError) as caught:
            await ctx.transaction("sql", fails)
        await ctx.step("after", lambda: 1)
        cause = caught.value.__cause__
        assert isinstance(cause, sqlite3.OperationalError)
        return [wrapped(caught.value), cause.sqlite_errorname]

    async with Rig(tmp_path / "a.db") as rig:
        first, again = await twice_values(rig, body)
    assert first == again


@for_each("make", [*COMPLETE, *INCOMPLETE, lambda: CircuitOpen("no", after=2.0, provider="p")])
async def test_a_call_of_the_library_raises_the_same_unwrapped(make: Callable[[], Exception]) -> None:
    async def fails(attempt: int) -> None:
        raise make()

    async def succeeds(attempt: int) -> None: ...

    async def body(ctx: Any) -> Any:
        try:
            await RecordedCalls(ctx).run("model", "0", fails)
        except Exception as error:  # noqa: BLE001 - whatever it is
            await RecordedCalls(ctx).run("model", "1", succeeds)
            return picture(error)

    async with Rig() as rig:
        first, again = await twice_values(rig, body)
    assert first == again
    assert first[0] is type(make())


class OwnStepError(StepExecutionError):
    pass


async def test_a_subclass_of_the_steps_own_error_is_not_wrapped(place: Path | None) -> None:
    first, again, raised = await in_both(place, lambda: OwnStepError("other", "down", 4))
    assert first == again
    assert [type(each) for each in raised] == [OwnStepError, OwnStepError]
    assert raised[1].attempts == 4


def local_step_error() -> Exception:
    class Local(StepExecutionError):
        pass

    return Local("other", "down", 4)


async def test_a_subclass_of_a_function_is_described_by_the_steps_own_error() -> None:
    first, again, raised = await in_both(None, local_step_error)
    assert first == again
    assert [type(each) for each in raised] == [StepExecutionError] * 2
    assert raised[1].error_type.endswith("Local")


@pytest.mark.parametrize("make", [COMPLETE[0], INCOMPLETE[0], local])
async def test_a_step_that_raises_the_steps_own_error_is_not_wrapped(make: Callable[[], Exception]) -> None:
    first, again, raised = await in_both(None, lambda: with_cause(StepExecutionError("other", "down", 4), make()))
    assert first == again
    assert [(each.step_name, each.message, each.attempts) for each in raised] == [("other", "down", 4)] * 2
    assert raised[0].error_type == raised[1].error_type != ""


async def test_an_error_of_a_plain_run_is_the_same() -> None:
    from agent_runtime_core._execution.sync_context import run_plain

    def fails() -> None:
        raise HasAttributes(503, body=1, session=object())

    def plain(ctx: Any) -> Any:
        try:
            ctx.step("call", fails)
        except StepExecutionError as error:
            ctx.step("after", lambda: 1)
            return wrapped(error)

    async with Rig() as rig:
        first, again = await twice_values(rig, lambda ctx: run_plain(plain, ctx))
    assert first == again


async def test_the_provider_of_an_unavailable_model_is_known_after_a_restart(place: Path | None) -> None:
    def fails() -> None:
        raise ProviderUnavailable("down", provider="openai", model="gpt", status=503, code="overloaded")

    async def body(ctx: Any) -> Any:
        with pytest.raises(StepExecutionError) as caught:
            await ctx.step("call", fails)
        await ctx.step("after", lambda: 1)
        cause = caught.value.__cause__
        assert isinstance(cause, ProviderUnavailable)
        return [cause.provider, cause.model, cause.status, cause.code]

    async with Rig(place) as rig:
        first, again = await twice(rig, body)
    assert first == again == ["openai", "gpt", 503, "overloaded"]


async def test_events_and_messages_have_no_attribute_of_an_error(place: Path | None) -> None:
    def fails() -> None:
        raise HasAttributes(503, body="confidential")

    async def body(ctx: Any) -> None:
        with pytest.raises(StepExecutionError):
            await ctx.step("call", fails)
        await ctx.step("after", lambda: 1)

    async with Rig(place) as rig:
        await rig.value(body)
        assert "confidential" not in str(await rig.told())
        assert re.search("confidential", str(await rig.records()))


def test_a_group_in_a_group_keeps_its_shape() -> None:
    error = group(ValueError("a"), group(KeyError("b"), group(OSError(2, "c"))))
    made = rebuilt(Description(error).info, text_of(error))
    assert isinstance(made, ExceptionGroup)
    assert picture(made) == picture(error)
    assert [type(each) for each in leaves_of(made)] == [ValueError, KeyError, FileNotFoundError]
