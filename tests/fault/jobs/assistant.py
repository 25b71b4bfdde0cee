"""An agent for `agent-runtime worker` whose model answers with what it was asked.

With DIE_AFTER_APPEND=PATH the process kills itself once, after the messages of a run were appended to its conversation
and before the run's end is committed; then there is a file PATH.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from agent_runtime_core import ToolCallingAgent, ToolRegistry
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.runner.conversation_history import ConversationHistory
from agent_runtime_core.testing import MockLLMClient

_keep = ConversationHistory.save


async def _keep_and_die(self: ConversationHistory, result: RunResult) -> None:
    await _keep(self, result)
    died = Path(os.environ["DIE_AFTER_APPEND"])
    if not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


if "DIE_AFTER_APPEND" in os.environ:
    ConversationHistory.save = _keep_and_die  # type: ignore[method-assign]


def _answer(messages: list[Any]) -> str:
    return json.dumps([each["content"] for each in messages])


class Assistant(ToolCallingAgent):
    key = "assistant"
    system_prompt = "Be brief."
    tools = ToolRegistry()
    client = MockLLMClient(response_fn=_answer)

    def get_llm_client(self) -> MockLLMClient:
        return self.client
