"""Names of 0.6.0 that authors of backends use: they work, and warn."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any, cast

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, AlreadyDone, Happened, RunContext, RunResult
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.queue import ClaimRequest, Guard, InMemoryQueue, Op, RunFilter, RunRow, RunUpdate
from agent_runtime_core.queue.memory import MemoryTransitions
from agent_runtime_core.queue.records import COLUMNS
from agent_runtime_core.state import EffectRow, InMemoryStateStore
from tests.contract.third_party.their_queue import TheirQueue
from tests.support.cases import for_each

RENAMED = {
    "queue": ("Rows RunTransitions", "Settle RunUpdate", "Mail MailboxMessage", "News RunSnapshot", "Moved RowChanged"),
    "persistence.documents.base": ("Table Collection", "Changed VersionConflict", "Absent DocumentMissing"),
    "testing.contracts.llm": (
        "Says TextReply", "Echoes Echo", "Breaks Disconnect", "Stalls Hang", "Refuses HttpError", "Judges Verdict",
        "Embeds Embedding", "Counts TokenUsage",
    ),
}  # fmt: skip


@for_each(("module", "names"), [(module, names) for module, several in RENAMED.items() for names in several])
def test_an_old_name_is_the_new_class_and_warns(module: str, names: str) -> None:
    package: Any = importlib.import_module(f"agent_runtime_core.{module}")
    old, new = names.split()
    with pytest.warns(DeprecationWarning, match=f"{old} is now called {new}"):
        assert getattr(package, old) is getattr(package, new)


ROW = RunRow("a-run", "an-agent", concurrency_key="k", blocked=1, crashes_in_row=2, min_step_count=3, arrival=4)
UPDATE = RunUpdate("a-claim", "running", 0.0, crashes_in_row=2, min_step_count=3)
FIELDS: list[tuple[tuple[Any, ...], str, str]] = [
    (ROW, "lane", "concurrency_key"), (ROW, "held", "blocked"), (ROW, "stalls", "crashes_in_row"),
    (ROW, "mark", "min_step_count"), (ROW, "n", "arrival"), (UPDATE, "stalls", "crashes_in_row"),
    (UPDATE, "mark", "min_step_count"), (RunFilter(concurrency_key="k"), "lane", "concurrency_key"),
    (EffectRow("origin", "key", "digest", "a-run", "done", arrival=4), "n", "arrival"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "old", "new"), FIELDS)
def test_a_field_is_read_by_its_old_name(row: tuple[Any, ...], old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"{type(row).__name__}\.{old} is now called {new}") as warned:
        assert getattr(row, old) == getattr(row, new)
    assert [each.filename for each in warned] == [__file__]


def test_fields_are_given_by_their_old_names() -> None:
    row, wanted = cast("Any", ROW), cast("Any", RunFilter)
    with pytest.warns(DeprecationWarning, match="RunRow.n is now called arrival") as warned:
        assert row._replace(n=5, blocked=0) == ROW._replace(arrival=5, blocked=0)
    with pytest.warns(DeprecationWarning, match="RunFilter.lane is now called concurrency_key") as also:
        assert wanted(("pending",), lane="k") == RunFilter(("pending",), concurrency_key="k")
    assert {each.filename for each in [*warned, *also]} == {__file__}
    with pytest.raises(TypeError, match="colour"):
        wanted(colour="red")


def test_columns_of_stores_keep_their_names() -> None:
    by_field = dict(zip(RunRow._fields, COLUMNS, strict=True))
    renamed = {field: column for field, column in by_field.items() if field != column}
    assert renamed == {new: old for row, old, new in FIELDS if row is ROW}


def test_promised_names_do_not_warn() -> None:
    assert Happened is AlreadyDone
    assert AgentRunner.beside is AgentRunner.worker_for


def test_row_stores_with_old_method_names_work() -> None:
    with pytest.warns(DeprecationWarning, match="Old.ready is now called claimable") as warned:

        class Old(MemoryTransitions):
            def ready(self, want: ClaimRequest, limit: int) -> list[RunRow]:
                return super().claimable(want, limit)[:0]

    assert vars(Old)["claimable"] is vars(Old)["ready"]
    assert [each.filename for each in warned] == [__file__]


class OldEngine(MemoryEngine):
    """An engine that queues writes and names its process as one of 0.6.0 did."""

    commit_nowait: Any = None
    process_id: Any = None
    holder = "a-process"
    posted = 0

    def post(self, guard: Guard | None, ops: Sequence[Op]) -> None:
        self.posted += 1
        MemoryEngine.commit_nowait(self, guard, ops)


class Steps(AgentRuntime):
    key = "steps"

    async def run(self, ctx: RunContext) -> RunResult:
        await ctx.step("one", lambda: 1)
        return RunResult({})


def test_an_engine_names_its_process_as_before() -> None:
    queue = InMemoryQueue(engine=OldEngine())
    with pytest.warns(DeprecationWarning, match="OldEngine.holder is now called process_id"):
        assert queue.holder == "a-process"


@pytest.mark.filterwarnings("ignore:OldEngine.holder")
async def test_an_engine_queues_writes_as_before() -> None:
    engine = OldEngine()
    # With a second engine, events are queued and not part of the commit.
    runner = AgentRunner(InMemoryQueue(engine=engine), InMemoryEventBus(engine=engine), InMemoryStateStore())
    with pytest.warns(DeprecationWarning, match="OldEngine.post is now called commit_nowait"):
        await runner.execute(Steps(), "a-run")
    assert engine.posted > 0
    await runner.close()


def test_old_methods_can_be_called() -> None:
    transitions: Any = MemoryTransitions.__new__(MemoryTransitions)
    with pytest.warns(DeprecationWarning, match="mailed is now called message_number"):
        assert transitions.mailed == transitions.message_number
    with pytest.raises(AttributeError, match="'MemoryTransitions' object has no attribute 'nothing'"):
        _ = transitions.nothing


def test_old_fields_of_requests_and_rows() -> None:
    queue = TheirQueue()
    request: Any = queue.claim_request("w", 60, None, ready_only=True)
    for old, value in (("light", True), ("standing", None), ("seconds", 0.0)):
        with pytest.warns(DeprecationWarning, match=f"ClaimRequest.{old} is now called"):
            assert getattr(request, old) == value
    row: Any = RunRow("a-run", "an-agent", input="{}")
    with pytest.warns(DeprecationWarning, match="RunRow.changed is now called with_values"):
        assert row.changed(status="running").status == "running"
    asyncio.run(queue.close())
