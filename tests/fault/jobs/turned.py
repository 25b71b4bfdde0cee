"""A turn with a plan of thirty steps that use each other's results: turned.py turned DB RUN_ID EFFECTS PAUSE."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter

from agent_runtime_core import AgentRunner
from agent_runtime_core.turns import TurnManager
from agent_runtime_core.turns.events import TOPICS
from tests.fault.jobs.effects import ready, say
from tests.fault.jobs.graph import AT_ONCE
from tests.fault.jobs.planned import Fixed, tools


async def main(db: str, run_id: str, effects: str, pause: float) -> None:
    async with AgentRunner.open(db) as runner:
        manager = TurnManager(runner, planner=Fixed(), tools=tools(effects, pause), max_in_flight=AT_ONCE)
        await runner.runs(limit=1)  # so that most of its life is spent on the turn
        ready()
        turn = await manager.run_turn({"text": "mix", "turn_id": run_id})
        steps = [[step.step_number, step.status.value, step.result] for step in turn.steps]
        told: Counter[str] = Counter()
        for topic in TOPICS:
            async for envelope in manager.topics.subscribe(topic, 0, follow=False):
                told[envelope.type] += 1
    say("done " + json.dumps([turn.status.value, turn.response, steps, sorted(told.items())]))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5])))
