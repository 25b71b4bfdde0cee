"""What turns are read from: tried again, then told as it was last, marked as stale."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from agent_runtime_core._core.codec.json import encode
from agent_runtime_core.errors import LeaseLost, StorageBusy
from agent_runtime_core.persistence import Conversation, ConversationMessage, PersistenceManager, ToolCall
from agent_runtime_core.planning import Plan, PlanStep
from agent_runtime_core.status import RunStatus, StepStatus
from agent_runtime_core.turns import ContextManager, StepMetrics, StepState, Turn
from tests.support.runs import Hurried

TURN = Turn(
    "t", "trace", [{"role": "user", "content": "x"}], user_id="u", status=RunStatus.RUNNING,
    plan=Plan([PlanStep(1, "calculator", {"expression": "1"})], "one"),
    steps=[StepState(1, "S", status=StepStatus.COMPLETED, result=1, metrics=StepMetrics(2.0, 3, 4, 0.5))],
    planning=StepMetrics(1.0, 1, 1, 0.25),
)  # fmt: skip


class Flaky:
    """A store whose reads fail as often as they are told to."""

    def __init__(self, store: Any) -> None:
        self._store, self.failures, self.reads, self.written = store, 0, 0, 0
        self.error: Exception = StorageBusy("no answer")

    def __getattr__(self, name: str) -> Any:
        async def called(*args: Any, **options: Any) -> Any:
            if name in ("get", "get_all", "history"):
                self.reads += 1
                if self.failures:
                    self.failures -= 1
                    raise self.error
            if name == "set":
                self.written += len(encode(args[1]))
            return await getattr(self._store, name)(*args, **options)

        return called


class Stores:
    """Those of a manager, of which some are flaky."""

    def __init__(self) -> None:
        manager = PersistenceManager.open("memory://")
        self.memory, self.conversations = Flaky(manager.memory), Flaky(manager.conversations)
        self.preferences = Flaky(manager.preferences)


@pytest.fixture
def stores() -> Stores:
    return Stores()


@pytest.fixture
def contexts(stores: Stores) -> ContextManager:
    return ContextManager(lambda: stores, clock=Hurried())  # type: ignore[arg-type,return-value]


async def test_a_turn_is_read_as_it_was_saved(contexts: ContextManager) -> None:
    await contexts.save_turn(TURN)
    found = await contexts.get_turn("t")
    assert found == TURN
    assert found is not None
    assert not found.stale
    assert found.metrics == StepMetrics(3.0, 4, 5, 0.75)
    assert await contexts.get_turn("other") is None


def _of(count: int) -> Turn:
    """A turn whose steps have not ended."""
    return Turn("t", "trace", steps=[StepState(number, f"S{number}") for number in range(1, count + 1)])


async def test_a_turn_writes_each_large_result_once(contexts: ContextManager, stores: Stores) -> None:
    """What is written grows with the results, not with their number times that."""
    turn, large = _of(20), "x" * 50_000
    for step in turn.steps:
        step.status, step.result = StepStatus.COMPLETED, {"number": step.step_number, "text": large}
        await contexts.save_turn(turn)
    assert await contexts.get_turn("t") == turn
    assert 20 * 50_000 < stores.memory.written < 20 * 50_000 * 1.2
    before = stores.memory.written
    found = await contexts.get_turn("t")
    assert found is not None
    await contexts.save_turn(found)  # by a later life
    assert stores.memory.written < before + 10_000
    turn.steps[3].result = {"again": large}
    turn.steps[4].result = None
    await contexts.save_turn(turn)
    assert await contexts.get_turn("t") == turn


async def test_a_change_of_a_turn_keeps_its_large_results(contexts: ContextManager) -> None:
    turn = _of(3)
    turn.steps[0].status, turn.steps[0].result = StepStatus.COMPLETED, ["x" * 5_000]
    turn.steps[2].status, turn.steps[2].result = StepStatus.COMPLETED, ["z" * 5_000]
    await contexts.save_turn(turn)

    def change(saved: Turn) -> None:
        saved.steps[1].status, saved.steps[1].result = StepStatus.COMPLETED, "y" * 5_000
        saved.steps[2].status, saved.steps[2].result, saved.steps[2].apart = StepStatus.FAILED, None, None

    changed = await contexts.change_turn("t", change)
    assert changed is not None
    assert [step.result for step in changed.steps] == [["x" * 5_000], "y" * 5_000, None]
    assert await contexts.get_turn("t") == changed


async def test_a_turn_that_is_forgotten_leaves_nothing(contexts: ContextManager, stores: Stores) -> None:
    turn = _of(2)
    turn.steps[0].result = ["x" * 5_000]
    await contexts.save_turn(turn)
    assert len(await stores.memory.list_keys()) == 2
    assert await contexts.forget_turn("t")
    assert await stores.memory.list_keys() == []
    assert await contexts.get_turn("t") is None
    assert not await contexts.forget_turn("t")


async def test_a_large_result_of_a_store_that_is_away_is_as_it_was(contexts: ContextManager, stores: Stores) -> None:
    turn = _of(1)
    turn.steps[0].result = ["x" * 5_000]
    await contexts.save_turn(turn)
    stores.memory.failures = 6
    found = await contexts.get_turn("t")
    assert found == turn
    assert found is not None
    assert found.stale


@pytest.mark.parametrize("failures", [1, 2])
async def test_a_read_that_fails_is_tried_three_times(contexts: ContextManager, stores: Stores, failures: int) -> None:
    await contexts.save_turn(TURN)
    stores.memory.failures = failures
    found = await contexts.get_turn("t")
    assert found is not None
    assert not found.stale
    assert stores.memory.reads == failures + 1


async def test_a_store_that_is_away_gives_the_last_turn_marked_as_stale(
    contexts: ContextManager, stores: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    await contexts.save_turn(TURN)
    stores.memory.failures = 3
    found = await contexts.get_turn("t")
    assert found == TURN
    assert found is not None
    assert found.stale
    assert stores.memory.reads == 3
    assert "turn/t failed" in caplog.text
    [record] = caplog.records
    about = {name: vars(record)[name] for name in ("run_id", "turn_id", "trace_id", "step", "step_id")}
    assert about == {"run_id": "t", "turn_id": "t", "trace_id": "t", "step": None, "step_id": None}
    found.steps.clear()  # the caller's own
    stores.memory.failures = 3
    assert await contexts.get_turn("t") == TURN


async def test_with_nothing_read_before_the_error_is_raised(contexts: ContextManager, stores: Stores) -> None:
    stores.memory.failures = 3
    with pytest.raises(StorageBusy):
        await contexts.get_turn("t")


async def test_a_lost_lease_is_no_store_that_is_away(contexts: ContextManager, stores: Stores) -> None:
    await contexts.save_turn(TURN)
    stores.memory.failures, stores.memory.error = 1, LeaseLost("r", "c")
    with pytest.raises(LeaseLost):
        await contexts.get_turn("t")
    assert stores.memory.reads == 1


@pytest.mark.sentence("001", "ContextManager: read/write conversation history and user prefs; provide short-term cache")
async def test_history_and_preferences_are_stale_too(contexts: ContextManager, stores: Stores) -> None:
    id_ = uuid4()
    said = [ConversationMessage(role="user", content=str(n)) for n in range(3)]
    await stores.conversations.save(Conversation(id=id_, messages=said))
    await stores.preferences.set("u/language", "fr")
    await stores.preferences.set("v/language", "de")
    history = await contexts.history(id_, 2)
    assert [each["content"] for each in history.value] == ["1", "2"]
    assert (await contexts.preferences("u")).value == {"language": "fr"}
    assert (await contexts.preferences()).value == {"u/language": "fr", "v/language": "de"}
    stores.conversations.failures = stores.preferences.failures = 3
    again, preferred = await contexts.history(id_, 2), await contexts.preferences("u")
    assert (again.value, again.stale) == (history.value, True)
    assert (preferred.value, preferred.stale) == ({"language": "fr"}, True)
    assert (await contexts.history(uuid4())).value == []


async def test_only_so_many_answers_are_kept(stores: Stores) -> None:
    contexts = ContextManager(lambda: stores, clock=Hurried(), cached=1)  # type: ignore[arg-type,return-value]
    await contexts.save_turn(TURN)
    await contexts.preferences()
    stores.memory.failures = 3
    with pytest.raises(StorageBusy):
        await contexts.get_turn("t")


async def test_a_long_history_is_told_whole_and_its_end_begins_with_no_stray_result(
    contexts: ContextManager, stores: Stores
) -> None:
    id_ = uuid4()
    said = [
        ConversationMessage(role="user", content="x" * 2_000_000),
        ConversationMessage(role="assistant", tool_calls=[ToolCall(id="c", name="look")]),
        ConversationMessage(role="tool", content="found", tool_call_id="c"),
        ConversationMessage(role="assistant", content="there"),
    ]
    await stores.conversations.save(Conversation(id=id_, messages=said))
    assert len((await contexts.history(id_)).value) == 4
    assert [each["content"] for each in (await contexts.history(id_, 2)).value] == ["there"]
    stores.conversations.failures = 99
    assert (await contexts.history(id_)).stale
    assert (await contexts.history(id_, 2)).stale
