"""Steps that depend on each other, on every engine: what one attempt recorded, the next one does not run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.status import RunStatus
from agent_runtime_core.steps import Step, StepExecutor
from tests.support.fault_runs import KINDS, settings, store

pytestmark = pytest.mark.parametrize("kind", KINDS)


async def test_a_graph_goes_on_where_it_was(kind: str, tmp_path: Path) -> None:
    ran: list[str] = []

    def step(name: str, needs: list[str], **options: Any) -> Step:
        async def fn(ctx: Any, state: Any) -> str:
            first = name not in ran
            ran.append(name)
            await asyncio.sleep(0)
            if name == "b" and first:
                raise ConnectionError("b is down")
            return f"{name}({''.join(state.results[each] for each in needs)})"

        return Step(name, fn, depends_on=needs, **options)

    async def body(ctx: Any) -> Any:
        steps = [
            step("a", []), step("b", ["a"]), step("c", ["a"], checkpoint=False), step("d", ["c"]),
            step("e", ["b", "d"]),
        ]  # fmt: skip
        return await StepExecutor(ctx).run(steps)

    async with store(kind, tmp_path) as here:
        here.agent("graph", body)
        runner = here.runner(settings(max_retries=2))
        run_id = await runner.submit("graph", {})
        assert await runner.run_once()
        assert sorted(ran) == ["a", "b", "c", "d"]
        assert await runner.run_once()
        result = await runner.wait(run_id)
        assert result.status is RunStatus.SUCCEEDED
        assert result.final_output["value"]["e"] == "e(b(a())d(c(a())))"
        assert sorted(ran) == ["a", "b", "b", "c", "d", "e"]
        events = await runner.event_bus.get_events(run_id)
        assert [event.sequence for event in events] == list(range(len(events)))
        told = [event.payload for event in events if event.event_type == "step.skipped"]
        assert [(each["step_name"], each["reason"]) for each in told] == [
            ("e", "dependency_failed"),
            ("a", "already_completed"),
            ("c", "already_completed"),
            ("d", "already_completed"),
        ]
