"""The conversation of a turn while its store is away: read again, then as it was last, marked as stale."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._execution.context import conversation_id
from agent_runtime_core.errors import PlanningError, StorageBusy
from agent_runtime_core.interfaces import LLMStreamChunk
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import MockLLMClient
from agent_runtime_core.turns import AuditEvent, TurnManager
from agent_runtime_core.turns.events import AUDIT
from tests.unit.test_turns import Fixed, House


class Away:
    """Lets the next `failures` reads of a conversation fail: of the built-in store, or of a custom one."""

    def __init__(self, store: Any, read: str) -> None:
        self.failures, self.reads, self._read = 0, 0, getattr(store, read)
        setattr(store, read, self.read)

    async def read(self, *args: Any) -> Any:
        self.reads += 1
        if self.failures:
            self.failures -= 1
            raise StorageBusy("the store does not answer")
        return await self._read(*args)


def manager_of(house: House, answers: list[str], **options: Any) -> tuple[TurnManager, MockLLMClient]:
    client = MockLLMClient(answers)
    return house.manager(planner=Fixed(error=PlanningError("none")), client=client, **options), client


async def said(manager: TurnManager, text: str) -> Any:
    """The turn `text` of the conversation c, executed."""
    turn = await manager.start_turn({"text": text, "conversation_id": "c", "turn_id": text})
    await manager.runner.run_once()
    return await manager.get_turn(turn.id)


@pytest.mark.sentence("001", "ContextManager: retries with stale-read fallback")
@pytest.mark.parametrize("read", ["read_history", "get"])
@pytest.mark.parametrize("failures", range(4))
async def test_a_failed_read_is_repeated_and_then_the_last_known_history_counts(
    place: Path | None, caplog: pytest.LogCaptureFixture, read: str, failures: int
) -> None:
    async with House(place) as house:
        manager, client = manager_of(house, ["one", "two", "three"])
        away = Away(house.stores.conversations, read)
        for text in ("a", "b"):
            assert (await said(manager, text)).status is RunStatus.SUCCEEDED
        reads, away.failures = away.reads, failures
        turn = await said(manager, "c")
        stale = failures >= 3
        assert (turn.status, turn.response, turn.stale_history) == (RunStatus.SUCCEEDED, "three", stale)
        assert away.reads >= reads + min(failures + 1, 3)
        # The turn b read the conversation before it added to it.
        known = ["a", "one"] if stale else ["a", "one", "b", "two"]
        assert [each["content"] for each in client.get_calls()[-1]["messages"]] == [*known, "c"]
        details = [
            each.payload.details["stale"]
            async for each in manager.topics.subscribe(AUDIT, 0, follow=False)
            if isinstance(each.payload, AuditEvent)
            if (each.turn_id, each.payload.action) == (turn.id, "turn.started")
        ]
        assert details == [stale]
        assert ("using its last known value" in caplog.text) is stale
        whole = [each["content"] for each in (await manager.contexts.history("c")).value]
        assert whole == ["a", "one", "b", "two", "c", "three"]


@pytest.mark.parametrize("before", [False, True])
async def test_a_turn_waits_for_a_store_of_which_no_message_is_known(place: Path | None, before: bool) -> None:
    async with House(place) as house:
        manager, _ = manager_of(house, ["one", "two"])
        away = Away(house.stores.conversations, "read_history")
        if before:  # it read that there was no conversation yet
            await said(manager, "first")
        away.failures = 3
        await manager.start_turn({"text": "a", "conversation_id": "c", "turn_id": "a"})
        await manager.runner.run_once()
        assert away.failures == 0
        turn = await manager.get_turn("a")
        assert turn is not None
        assert (turn.status, turn.stale_history) == (RunStatus.SUCCEEDED, False)


async def test_a_resumed_turn_does_not_continue_with_less_than_it_began_with(tmp_path: Path) -> None:
    began = asyncio.Event()

    class Stuck(MockLLMClient):
        async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
            began.set()
            await asyncio.Event().wait()
            yield LLMStreamChunk("never")

    async with House(tmp_path / "turns.db", max_retries=5) as house:
        store, id_ = house.stores.conversations, conversation_id("c")
        assert id_ is not None
        manager, _ = manager_of(house, ["one", "two"])
        later, client = manager_of(house, ["three"], runner=house.another())
        await said(manager, "a")
        await later.contexts.conversation(store, id_)  # knows only the first turn
        await said(manager, "b")
        cut = house.manager(house.another(), planner=Fixed(error=PlanningError("none")), client=Stuck())
        turn = await cut.start_turn({"text": "c", "conversation_id": "c", "turn_id": "c"})
        task = asyncio.ensure_future(cut.runner.run_once())
        await began.wait()
        task.cancel()
        await asyncio.wait({task})
        away = Away(store, "read_history")
        away.failures = 3
        await house.clock.sleep(3600)
        await later.runner.run_once()
        assert (await later.wait(turn.id)).response == "three"
        [call] = client.get_calls()
        assert [each["content"] for each in call["messages"]] == ["a", "one", "b", "two", "c"]
