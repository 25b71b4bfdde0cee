"""What `agent-runtime serve` serves in the tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from agent_runtime_core.orchestrator import Orchestrator
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.turns import TurnManager
from tests.support.processes import becomes
from tests.support.runs import Script


async def gated(ctx: Any) -> Any:
    """Create the file `started`, and end when there is a file `gate`."""
    params = ctx.params
    Path(params["started"]).touch()

    async def is_open() -> bool:
        return Path(params["gate"]).exists()

    await becomes(is_open, "the gate is open")
    return {"done": True}


async def failing(ctx: Any) -> Any:
    raise ValueError(ctx.input_data["secret"])


registry = Registry()
registry.register(Script(gated, "gated"))
registry.register(Script(failing, "failing"))
empty = Registry()


def runner() -> AgentRunner:
    return AgentRunner.open(os.environ["TEST_STORE"], registry=Registry())


def orchestrator() -> Orchestrator:
    return Orchestrator(runner=runner(), key="planner")


def turns() -> TurnManager:
    return TurnManager(runner())
