"""Names of 0.6.0 that authors of backends use: they work, and warn."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, AlreadyDone, Happened, RunContext, RunResult
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.queue import ClaimRequest, Guard, InMemoryQueue, Op, RunRow
from agent_runtime_core.queue.memory import MemoryTransitions
from agent_runtime_core.state import InMemoryStateStore
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
