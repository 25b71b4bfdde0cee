"""Errors: whatever they are made of, a copy says the same, as one that comes from another process has to."""

from __future__ import annotations

import copy
import datetime as dt
import functools
import inspect
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from agent_runtime_core import errors
from agent_runtime_core._core.clock import shown_duration
from agent_runtime_core.config import RuntimeConfig
from agent_runtime_core.errors import AgentRuntimeError, brief
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.interfaces import AgentRuntime, RunContext, RunResult
from agent_runtime_core.limits import RunLimits
from agent_runtime_core.llm import LiteLLMClient, Retries, Timeouts
from agent_runtime_core.loop import agent_tool
from agent_runtime_core.persistence import (
    AuditEntry,
    AuditEventType,
    Conversation,
    ConversationMessage,
    FileMemoryStore,
    PersistenceManager,
    Summary,
)
from agent_runtime_core.queue import InMemoryQueue, SQLiteQueue, get_queue
from agent_runtime_core.registry import Registry, get_runtime, unregister_runtime
from agent_runtime_core.retry import Backoff
from agent_runtime_core.runner import AgentRunner, RunnerConfig, open_run
from agent_runtime_core.state import InMemoryStateStore, SQLiteStateStore
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.testing import MockLLMClient, MockRunContext, RecordingLLMClient
from agent_runtime_core.tools import Tool, ToolRegistry
from agent_runtime_core.turns import ConfigLoader, PersonalityPackManager
from tests.support.cases import for_each

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


@for_each("kind", TREE, ids=lambda kind: kind.__name__)
@for_each("again", [copy.copy, copy.deepcopy, piped], ids=lambda again: again.__name__)
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


class Named(AgentRuntime):
    key = "named"

    async def run(self, ctx: RunContext) -> RunResult:
        await ctx.step("done", lambda: 1)
        return RunResult()


@functools.cache
def _deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


@for_each(
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


@for_each(
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
    with pytest.raises(errors.InvalidArgument, match=r"retry_delay must be .* -1"):
        Step("a", print, retry_delay=-1)


@for_each("path", [5, None, b"there.db", "a\0b", "\ud800", "", "y" * 10**6, Mute()], ids=range(8))
@for_each(
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


WRONG_KEYS: Any = ([[]], [None], [1], ["a", {}])


async def test_a_claim_for_agents_that_are_no_texts_is_refused() -> None:
    for keys in WRONG_KEYS:
        with pytest.raises(errors.InvalidArgument, match="agent_keys must be a list of strings"):
            await InMemoryQueue().claim("w", agent_keys=keys)


@pytest.mark.parametrize("make", [InMemoryQueue, SQLiteQueue, InMemoryEventBus])
def test_what_is_no_engine_is_refused_as_that(make: Callable[..., Any]) -> None:
    with pytest.raises(errors.InvalidArgument, match="engine must be a"):
        make(engine="agents.db")


LATE = dt.datetime.max.replace(tzinfo=dt.UTC)  # its timestamp is rounded up into the year 10000


@pytest.mark.parametrize("deadline", [LATE, LATE.replace(tzinfo=dt.timezone(dt.timedelta(hours=-1)))])
@pytest.mark.parametrize("place", ["memory://", "sqlite:///runs.db"])
async def test_a_deadline_past_the_calendar_is_refused_before_it_makes_runs_unreadable(
    place: str, deadline: dt.datetime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with AgentRunner.open(place) as runner:
        with pytest.raises(
            errors.InvalidArgument, match="deadline must be before the year 10000 in UTC, got 9999-12-31"
        ):
            await runner.submit("a", deadline=deadline)
        run_id = await runner.submit("a", deadline=dt.datetime(9999, 12, 31, tzinfo=dt.UTC))
        assert [run.run_id for run in await runner.runs()] == [run_id]


@pytest.mark.parametrize("make", [InMemoryQueue, lambda: SQLiteQueue("queue.db")])
async def test_an_agent_whose_key_no_store_keeps_stops_no_claim(
    make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    queue = make()
    run = await queue.enqueue(None, "a", {})
    assert await queue.claim("w", agent_keys=["\ud800"]) is None
    assert (await queue.claim("w", agent_keys=["\ud800", "a"])).run_id == run.run_id
    asked: list[Callable[[], Any]] = [
        lambda: queue.post(run.run_id, "signal", "s", "null", "\ud800"),
        lambda: queue.release(run.run_id, [], True),
        lambda: queue.extend_lease(run.run_id, 5, 60),
    ]
    for ask in asked:
        with pytest.raises(errors.InvalidArgument):
            await ask()
    with pytest.raises(errors.LeaseLost) as lost:
        await queue.release(run.run_id, "w", True, claim_id="y" * 10**6)
    assert len(str(lost.value)) < 400
    await queue.close()


@pytest.mark.parametrize("make", [InMemoryStateStore, lambda: SQLiteStateStore("state.db")])
async def test_a_status_with_half_a_character_is_refused_on_every_store(
    make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = make()
    with pytest.raises(errors.InvalidArgument, match="Remove it: stores cannot keep it"):
        await state.update_run_status("r", "\ud800")
    assert await state.get_run_status("r") is None
    await state.close()


async def test_a_closed_runner_takes_no_run_in_memory_either() -> None:
    runner = AgentRunner.open("memory://")
    await runner.close()
    asked: list[Callable[[], Any]] = [lambda: runner.submit("a"), lambda: runner.execute("a"), runner.run_once]
    for ask in asked:
        with pytest.raises(errors.StorageClosed, match=r"this runner was closed\. Create another runner"):
            await ask()
    await runner.close()


@pytest.mark.parametrize("value", [5, 10**5000, Mute(), _deep(), int, None, "y\ud800"], ids=range(7))
async def test_a_context_refuses_what_is_no_name_and_no_agent(value: Any) -> None:
    async with open_run("memory://") as ctx:
        asked: list[Callable[[], Any]] = [
            lambda: ctx.emit(value, {}),
            lambda: ctx.wait_for_signal(value, timeout=0),
            lambda: ctx.approve(value, timeout=0),
        ]
        if not isinstance(value, str):
            asked.append(lambda: ctx.call(value, {}))
        for ask in asked:
            with pytest.raises(errors.InvalidArgument) as refused:
                await ask()
            assert len(str(refused.value)) < 300


async def test_a_mock_context_refuses_what_a_run_does() -> None:
    ctx = MockRunContext()
    deep: dict[str, Any] = {"a": _deep()}
    asked: list[Callable[[], Any]] = [lambda: ctx.emit("x", deep), lambda: ctx.checkpoint(deep)]
    for ask in asked:
        with pytest.raises(errors.UnserialisableResult, match="nested deeper than 100 levels"):
            await ask()
    wrong: Any = Mute()
    for refuse in (
        lambda: ctx.emit(wrong, {}),
        lambda: ctx.emit("x", wrong),
        lambda: ctx.checkpoint(wrong),
        lambda: ctx.step("s", wrong),
        lambda: ctx.wait_for_signal(wrong),
    ):
        with pytest.raises(errors.InvalidArgument):
            await refuse()
    assert not ctx.events
    assert not ctx.checkpoints


@pytest.mark.parametrize("place", ["memory://", "sqlite:///kept.db"])
async def test_filters_and_data_that_are_none_are_refused_by_stores(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stores = PersistenceManager.open(place)
    assert await cast(Any, stores.audit).get_events(run_id="\ud800") == []
    memory, tasks, audit = cast(Any, stores.memory), cast(Any, stores.tasks), cast(Any, stores.audit)
    asked: list[Callable[[], Any]] = [
        lambda: memory.get("k", _deep()),
        lambda: memory.get("k", Mute()),
        lambda: tasks.claim("w", lease_seconds=2**63),
        lambda: audit.get_events(event_types=5),
        lambda: audit.get_events(run_id=10**5000),
        lambda: audit.get_metrics("m", tags="abc"),
        lambda: audit.prune(older_than=10**400),
    ]
    for ask in asked:
        with pytest.raises(errors.InvalidArgument):
            await ask()
    await stores.close()


LONG = "y" * 10**6


@for_each("place", ["memory://", "sqlite:///kept.db"])
@for_each("value", [["b"], 7, 10**5000, {"a": 1}, _deep(), Mute()], ids=range(6))
async def test_a_message_that_leads_to_no_message_is_refused_and_breaks_no_conversation(
    place: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with PersistenceManager.open(place) as stores:
        conversations, audit, knowledge = (
            cast(Any, each) for each in (stores.conversations, stores.audit, stores.knowledge)
        )
        first = ConversationMessage(role="user", content="hi")
        kept = Conversation(messages=[first])
        await conversations.save(kept)

        def wrong(**fields: Any) -> ConversationMessage:
            return ConversationMessage(role="user", content="x", **fields)

        asked: list[Callable[[], Any]] = [
            lambda: conversations.add_message(kept.id, wrong(branch_id=value)),
            lambda: conversations.append(kept.id, [wrong(), wrong(parent_message_id=value)]),
            lambda: conversations.append(kept.id, value if not isinstance(value, list | dict) else None),
            lambda: conversations.save(Conversation(messages=[wrong(branch_id=value)])),
            lambda: conversations.save(Conversation(active_branch_id=value)),
            lambda: conversations.edit_message(kept.id, value, "x"),
            lambda: conversations.regenerate(kept.id, value, "x"),
            lambda: conversations.switch_branch(kept.id, value),
            lambda: conversations.history(kept.id, branch_id=value),
            lambda: conversations.history(kept.id, leaf=value),
            lambda: conversations.fork(kept.id, at=value),
            lambda: conversations.list_conversations(offset=None),
            lambda: audit.log_event(AuditEntry(event_type=AuditEventType.CUSTOM, action="a", run_id=value)),
            lambda: audit.log_event(AuditEntry(event_type=AuditEventType.CUSTOM, action="a", conversation_id=value)),
            lambda: audit.get_events(conversation_id=value),
            lambda: knowledge.save_summary(Summary(content="s", conversation_ids=[value])),
        ]
        for ask in asked:
            with pytest.raises(errors.InvalidArgument) as refused:
                await ask()
            assert len(str(refused.value)) < 300
        assert await conversations.history(kept.id) == [first]
        assert len(await conversations.list_conversations()) == 1
        assert await conversations.append(kept.id, (wrong() for _ in range(2))) == 2


async def test_ids_of_megabytes_are_not_repeated() -> None:
    async with PersistenceManager.open("memory://") as stores:
        conversations = cast(Any, stores.conversations)
        kept = Conversation(messages=[ConversationMessage(role="user", parent_message_id=cast(Any, LONG))])
        await conversations.save(kept)
        asked: list[Callable[[], Any]] = [
            lambda: conversations.edit_message(kept.id, LONG, "x"),
            lambda: conversations.switch_branch(kept.id, LONG),
            lambda: conversations.history(kept.id),
        ]
        for ask in asked:
            with pytest.raises(errors.InvalidArgument) as refused:
                await ask()
            assert len(str(refused.value)) < 300


@for_each("place", ["memory://", "sqlite:///runs.db"])
@for_each("value", [["x"], 2**63, "x\ud800", _deep(), Mute()], ids=range(5))
async def test_what_is_no_id_is_refused_by_runners_queues_and_states(
    place: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with AgentRunner.open(place) as runner:
        await runner.submit("a", run_id="k")
        await runner.event_bus.publish("k", "approval.requested", {"name": "n", "request_id": ["mine"]})
        asked: list[Callable[[], Any]] = [
            lambda: runner.approve("k", "n", request_id=value),
            lambda: runner.approve("k", "n", message_id=value),
            lambda: runner.queue.extend_lease("k", "w", 1, claim_id=value),
            lambda: runner.queue.release("k", "w", True, claim_id=value),
            lambda: runner.queue.requeue_for_retry("k", "w", None, claim_id=value),
        ]
        if value != 2**63:
            asked.append(lambda: runner.state_store.records("k", value))
        for ask in asked:
            with pytest.raises(errors.InvalidArgument) as refused:
                await ask()
            assert len(str(refused.value).encode()) < 300
        assert await runner.state_store.records("k", 2**63) == []
        assert await runner.state_store.records("k", -(2**63) - 1) == []


@pytest.mark.parametrize("value", [10**5000, _deep(), Mute()], ids=range(3))
async def test_a_conversation_id_that_has_no_text_is_refused(value: Any) -> None:
    async with AgentRunner.open("memory://") as runner:
        for ask in (runner.submit("a", {"conversation_id": value}), runner.submit("a", {"conversation_id": [value]})):
            with pytest.raises((errors.InvalidArgument, errors.UnserialisableResult)) as refused:
                await ask
            assert len(str(refused.value)) < 300
        assert await runner.runs() == []


@pytest.mark.parametrize("take", [AgentRunner.open, PersistenceManager.open, SQLiteQueue])
def test_a_link_that_leads_round_in_a_circle_is_refused(
    take: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one").symlink_to("two")
    Path("two").symlink_to("one")
    with pytest.raises(errors.InvalidArgument, match="path must not be a symbolic link to itself, got 'one'"):
        (lambda made: getattr(made, "memory", None))(take("one"))


def test_a_claim_that_is_no_plain_text_can_be_printed() -> None:
    for token in ("x\ud800", "a\nb", ["x"], LONG, 10**5000):
        text = str(errors.LeaseLost("run", cast(Any, token)))
        assert len(text.encode()) < 300
        assert text.isprintable()


@pytest.mark.parametrize("name", ["y" * 1_000_000, "ab" * 500_000])
async def test_no_name_of_megabytes_holds_the_loop_for_a_hint(name: str) -> None:
    async def nothing() -> None: ...

    def compared(text: str, *_: Any, **__: Any) -> list[str]:
        assert len(text) <= 100
        return []

    registry = Registry()
    registry.register(Named())
    runner = AgentRunner.open("memory://", registry=registry)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("difflib.get_close_matches", compared)
        with pytest.raises(errors.UnknownAgent):
            await runner.execute(name)
        with pytest.raises(errors.InvalidArgument):
            await StepExecutor(MockRunContext()).run([Step("a", nothing), Step("b", nothing, depends_on=[name])])
        run_id = (await runner.execute("named")).run_id
        with pytest.raises(errors.InvalidArgument, match="unknown completed step"):
            await runner.fork(cast(Any, run_id), name)
    await runner.close()


def test_a_stand_in_for_litellm_needs_no_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "litellm", types.ModuleType("litellm"))
    LiteLLMClient("some-model")


@pytest.mark.parametrize(
    ("passed", "shown"), [(-3, "0 s"), (12.4, "12 s"), (60, "1 min"), (3599, "59 min"), (7300, "2 h"), (200_000, "2 d")]
)
def test_a_busy_run_shows_a_date_and_how_long_ago_it_was(passed: float, shown: str) -> None:
    error = errors.RunBusy("order-7", "host-1", 1_764_000_000.25, ago=shown_duration(passed))
    assert f"in host-1 (since 2025-11-24 16:00 UTC, {shown} ago). Wait for it" in str(error)
    assert "1764000000" not in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
