"""A job of thirty steps that depend on each other, in one run: graph.py graph DB RUN_ID EFFECTS PAUSE."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from random import Random
from typing import Any

from agent_runtime_core import Step, StepExecutor
from tests.fault.jobs.effects import effect, say
from tests.fault.jobs.twenty import taken

STEPS = 30
AT_ONCE = 4


def _edges() -> dict[str, list[str]]:
    chance = Random(30)
    return {f"s{i}": [f"s{j}" for j in range(i) if chance.random() < 2.5 / i] for i in range(STEPS)}


EDGES = _edges()


def step(name: str, effects: str, pause: float) -> Callable[..., Any]:
    place = int(name[1:])

    def finish(state: Any) -> int:
        return (sum(int(state.results[each]) * 31 for each in EDGES[name]) + place) % 1_000_003

    async def in_the_loop(ctx: Any, state: Any) -> int:
        effect(effects, name, ctx.idempotency_key)
        await asyncio.sleep(pause * (1 + place % 4))
        return finish(state)

    def in_a_thread(ctx: Any, state: Any) -> int:
        effect(effects, name, ctx.idempotency_key)
        time.sleep(pause)
        return finish(state)

    return in_a_thread if place % 3 == 0 else in_the_loop


async def main(db: str, run_id: str, effects: str, pause: float) -> None:
    async with taken(db, run_id) as ctx:
        steps = [Step(name, step(name, effects, pause), depends_on=needs) for name, needs in EDGES.items()]
        results = await StepExecutor(ctx, max_concurrency=AT_ONCE).run(steps)
    say("done " + json.dumps(results))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5])))
