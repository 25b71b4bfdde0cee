"""Turns while their settings are edited, half of the edits broken: none sees a mixture of two versions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.planning import PlanStep
from agent_runtime_core.portal import in_thread
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import MockLLMClient
from agent_runtime_core.turns import ConfigChanged, ConfigLoader, Turn, TurnManager
from tests.unit.test_hot_reload import Files
from tests.unit.test_turns import Fixed, House, llm

STEPS = (llm(1, "one"), PlanStep(2, "calculator", {"expression": "1 + 1"}, depends_on=[1]), llm(3, "{{step_2.result}}"))


def edit(files: Files, loader: ConfigLoader, number: int) -> None:
    """One edit: every other one is broken."""
    which, kind = number // 2 % 2, number // 4 % 5
    if number % 2:
        (files.good_pack if which else files.good_config)(number)
    else:
        (files.broken_pack if which else files.broken_config)(kind, number)
    loader.reload()


async def answer(manager: TurnManager, over: asyncio.Event) -> list[Turn]:
    """One turn after the other until it is over."""
    turns = []
    while not over.is_set():
        turns.append(await manager.run_turn("x"))
        await asyncio.sleep(0.005)
    return turns


@pytest.mark.parametrize("edits", [40, pytest.param(200, marks=pytest.mark.slow)])
async def test_edits_while_turns_run(tmp_path: Path, edits: int) -> None:
    files, events = Files(tmp_path), list[ConfigChanged]()
    loader = ConfigLoader(files.config, environ={})
    await in_thread(lambda: loader.subscribe(events.append))

    def version(messages: list[Any]) -> str:
        return str(messages[0]["content"])

    client, over = MockLLMClient(response_fn=version), asyncio.Event()
    async with House() as house:
        manager = house.manager(planner=Fixed(*STEPS), config=loader, client=client)
        answering = [asyncio.create_task(answer(manager, over)) for _ in range(2)]
        for number in range(1, edits + 1):
            await in_thread(edit, files, loader, number)
        over.set()
        turns = [turn for each in answering for turn in await each]
    assert [turn.error for turn in turns if turn.status is not RunStatus.SUCCEEDED] == []
    assert len(events) == edits // 2
    # The model of a pack goes with the prompt of that pack, and both calls of a turn with the same one.
    asked = [(call["model"], f"m-{call['messages'][0]['content']}") for call in client.get_calls()]
    assert len(asked) == 2 * len(turns)
    assert all(model == prompt for model, prompt in asked)
    assert all(turn.steps[0].result == turn.steps[2].result for turn in turns)
    assert len({model for model, _ in asked}) > 1
