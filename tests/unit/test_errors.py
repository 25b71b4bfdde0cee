"""Errors: whatever they are made of, a copy says the same, as one that comes from another process has to."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any, cast

import pytest

from agent_runtime_core import errors
from agent_runtime_core.config import RuntimeConfig
from agent_runtime_core.errors import AgentRuntimeError, brief
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.limits import RunLimits
from agent_runtime_core.llm import Retries, Timeouts
from agent_runtime_core.loop import agent_tool
from agent_runtime_core.persistence import FileMemoryStore, PersistenceManager
from agent_runtime_core.queue import InMemoryQueue, SQLiteQueue, get_queue
from agent_runtime_core.registry import get_runtime, unregister_runtime
from agent_runtime_core.retry import Backoff
from agent_runtime_core.runner.settings import RunnerConfig
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.testing import MockLLMClient, MockRunContext, RecordingLLMClient
from agent_runtime_core.tools import Tool, ToolRegistry
from agent_runtime_core.turns import ConfigLoader, PersonalityPackManager

TREE = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, AgentRuntimeError)]


def made(kind: type[AgentRuntimeError]) -> AgentRuntimeError:
    """One with something for everything its constructor takes."""
    if not inspect.isfunction(kind.__init__):
        return kind("it broke")
    numbers = {"float": 3.5, "float | None": 3.5, "int": 3, "int | None": 3, "Mapping[str, str]": {"a": "b"}}
    parameters = inspect.signature(kind).parameters.values()
    given: dict[str, Any] = {each.name: numbers.get(str(each.annotation), f"the {each.name}") for each in parameters}
    return kind(**given)


def piped(error: Any) -> Any:
    """As it comes from another process."""
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, piped], ids=lambda again: again.__name__)
def test_a_copy_says_the_same(kind: type[AgentRuntimeError], again: Callable[[Any], Any]) -> None:
    error = made(kind)
    error.add_note("and so on")
    if hasattr(error, "result"):
        error.result = RunResult({"response": "half"})
    copied = again(error)
    assert type(copied) is kind
    assert (str(copied), copied.args, vars(copied)) == (str(error), error.args, vars(error))
    assert copied is not error


def test_what_the_builtin_class_keeps_is_copied_too() -> None:
    error = errors.MissingDependency("no redis", name="redis")
    assert piped(error).name == "redis"


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def _deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (1.5, "1.5"),
        ("a\0b", r"'a\x00b'"),
        ("\ud800", r"'\ud800'"),
        ("y" * 10**6, "'" + "y" * 78 + "…"),
        (b"y" * 10**6, "b'" + "y" * 77 + "…"),
        ([0] * 1000, "[" + "0, " * 26 + "…"),
        (10**5000, "<int of 16610 bits>"),
        (-(10**5000), "<int of 16610 bits>"),
        ([10**5000], "<list>"),
        (Mute(), "<Mute>"),
        ({"a": Mute()}, "<dict>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_somebodys_value_is_told_briefly_whatever_it_is(value: Any, said: str) -> None:
    assert brief(value) == said


@pytest.mark.parametrize("value", [Mute(), _deep(), [10**5000], "y" * 10**6], ids=["mute", "deep", "huge", "long"])
@pytest.mark.parametrize("take", [lambda v: Step("a", print, retries=v), lambda v: RunnerConfig(max_retries=v)])
def test_what_cannot_be_used_is_refused_in_few_words(take: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(errors.InvalidArgument) as refused:
        take(value)
    assert len(str(refused.value)) < 200


HUGE = 10**400  # no float is as large: clocks and loops end on it with an OverflowError


@pytest.mark.parametrize(
    "take",
    [
        lambda: Step("a", print, timeout=HUGE),
        lambda: Step("a", print, retry_delay=HUGE),
        lambda: RunnerConfig(lease_ttl_seconds=HUGE),
        lambda: RunnerConfig(retention={"failed": HUGE}),
        lambda: RunLimits(max_tokens=HUGE),
        lambda: RuntimeConfig(park_after=HUGE),
        lambda: Timeouts(total=HUGE),
        lambda: Retries(cap=HUGE),
        lambda: Backoff(base=HUGE),
        lambda: StepExecutor(MockRunContext(), cancel_check_interval=HUGE),
        lambda: InMemoryEventBus(poll_interval=HUGE),
        lambda: InMemoryEventBus(poll_interval=cast(Any, None)),
        lambda: Tool("t", "", {}, print, timeout=HUGE),
    ],
)
def test_a_number_that_no_clock_can_count_with_is_refused(take: Callable[[], Any]) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"<int of 1329 bits>|None"):
        take()


def test_a_wrong_retry_delay_is_told_by_its_name() -> None:
    with pytest.raises(errors.InvalidArgument, match="retry_delay=-1 "):
        Step("a", print, retry_delay=-1)


@pytest.mark.parametrize("path", [5, None, b"there.db", "a\0b", "\ud800", "", "y" * 10**6, Mute()], ids=range(8))
@pytest.mark.parametrize(
    "take",
    [
        lambda path: SQLiteQueue(path) if path is not None else SQLiteQueue(""),
        lambda path: PersistenceManager.open("" if path is None else path).memory,
        lambda path: FileMemoryStore("" if path is None else path),
        lambda path: ConfigLoader("" if path is None else path),
        lambda path: PersonalityPackManager("" if path is None else path),
        lambda path: RecordingLLMClient(MockLLMClient(), path),
    ],
)
def test_what_is_no_path_is_refused_as_that(take: Callable[[Any], Any], path: Any) -> None:
    with pytest.raises(errors.InvalidArgument) as refused:
        take(path)
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("name", [["a"], 10**5000, Mute(), None, "y" * 10**6], ids=range(5))
async def test_what_is_no_name_names_nothing(name: Any) -> None:
    assert get_runtime(name) is None
    assert unregister_runtime(name) is False
    assert ToolRegistry().get(name) is None
    with pytest.raises(errors.UnknownTool):
        await ToolRegistry().execute(name, {})
    for asked in (lambda: get_queue(name or "none"), lambda: agent_tool(5)):
        with pytest.raises(errors.InvalidArgument) as refused:
            asked()
        assert len(str(refused.value)) < 300


async def test_a_claim_for_agents_that_are_no_texts_is_refused() -> None:
    for keys in ([[]], [None], [1], ["a", {}]):
        with pytest.raises(errors.InvalidArgument, match="agent_keys is a list of agent keys, which are texts"):
            await InMemoryQueue().claim("w", agent_keys=cast(Any, keys))


@pytest.mark.parametrize("make", [InMemoryQueue, SQLiteQueue, InMemoryEventBus])
def test_what_is_no_engine_is_refused_as_that(make: Callable[..., Any]) -> None:
    with pytest.raises(errors.InvalidArgument, match="engine is "):
        make(engine="agents.db")
