"""A run of agents of Pydantic AI that resumes with other code."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pydantic_ai")

from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from agent_runtime_core import open_run
from agent_runtime_core.integrations.pydantic_ai import Durable


async def test_an_agent_that_was_added_before_another_one_leaves_it_its_saved_answers(tmp_path: Path) -> None:
    asked: list[str] = []

    def agent(name: str) -> Agent[None, str]:
        def answer(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
            asked.append(name)
            return ModelResponse([TextPart(f"{name} {len(asked)}")])

        return Agent(FunctionModel(answer), name=name, capabilities=[Durable()])

    added, payer = agent("added"), agent("payer")

    async def answers(*agents: Agent[None, str]) -> list[str]:
        async with open_run(str(tmp_path / "runs.db"), run_id="one"):
            return [(await each.run("Pay!")).output for each in agents]

    with pytest.raises(AttributeError):
        await answers(payer, payer, None)  # type: ignore[arg-type]  # so the run ends before its end
    assert await answers(added, payer, payer) == ["added 3", "payer 1", "payer 2"]
    assert asked == ["payer", "payer", "added"]
