"""A process is killed inside a step that was begun and not recorded: its policy decides, in every door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import RunStatus
from tests.fault.jobs.agents import open_runner
from tests.support.processes import Child, lines

KILLED = -9
DOORS = pytest.mark.parametrize("door", ["chain", "map", "step"])


async def killed_inside(where: Path, door: str, policy: str) -> tuple[UUID, list[Path], Path]:
    """A run whose process was killed in its step 1, after the effect; its files, and its effects."""
    places, effects = [where / "all.db"] * 3, where / "effects"
    async with open_runner(places) as runner:
        params = {"door": door, "policy": policy, "effects": str(effects)}
        run_id = await runner.submit("doubt", {"params": params})
    how = {"places": [str(place) for place in places], "config": {"park_after": 0}, "once": True}
    with Child("worker", json.dumps(how)) as child:
        child.expect("ready")
        assert await child.aended() == KILLED
    assert ran(effects) == ["s0", "s1"]
    return run_id, places, effects


def ran(effects: Path) -> list[str]:
    return [words[0] for words in lines(effects)]


@DOORS
@pytest.mark.parametrize(
    ("policy", "out", "then"),
    [
        ("retry", [0, 1, 2], ["s1", "s2"]),
        ("again", [0, 1, 2], ["asked", "s1", "s2"]),
        ("happened", [0, 41, 2], ["asked", "s2"]),
    ],
)
async def test_a_step_in_doubt_goes_on_as_its_policy_says(
    door: str, policy: str, out: list[int], then: list[str], tmp_path: Path
) -> None:
    run_id, places, effects = await killed_inside(tmp_path, door, policy)
    async with open_runner(places, park_after=0) as runner:
        assert await runner.run_once()
        result = await runner.wait(run_id, timeout=5)
    assert result.status is RunStatus.SUCCEEDED
    assert result.final_output == {"out": out}
    assert ran(effects) == ["s0", "s1", *then]
    keys = {words[1] for words in lines(effects) if words[0] == "s1"}
    assert len(keys) == 1, "the same idempotency key on every attempt"


@DOORS
async def test_a_step_in_doubt_fails_its_run_where_the_policy_says_so(door: str, tmp_path: Path) -> None:
    run_id, places, effects = await killed_inside(tmp_path, door, "fail")
    async with open_runner(places, park_after=0) as runner:
        assert await runner.run_once()
        result = await runner.wait(run_id, timeout=5)
    assert result.status is RunStatus.FAILED
    assert result.error is not None
    assert result.error.type == "StepInDoubt"
    assert ran(effects) == ["s0", "s1"], "it is not retried either"


@DOORS
@pytest.mark.parametrize(
    ("answer", "status", "out", "then"),
    [
        ({"outcome": "retry"}, RunStatus.SUCCEEDED, [0, 1, 2], ["s1", "s2"]),
        ({"outcome": "done", "result": 41}, RunStatus.SUCCEEDED, [0, 41, 2], ["s2"]),
        ({"outcome": "failed"}, RunStatus.FAILED, None, []),
    ],
    ids=["retry", "done", "failed"],
)
async def test_a_step_in_doubt_is_parked_for_review(
    door: str, answer: dict[str, Any], status: RunStatus, out: list[int] | None, then: list[str], tmp_path: Path
) -> None:
    run_id, places, effects = await killed_inside(tmp_path, door, "review")
    async with open_runner(places, park_after=0, max_retries=1) as runner:
        assert await runner.run_once()
        info = await runner.get_run(run_id)
        assert (info.status, info.reason) == (RunStatus.WAITING, "in_doubt")
        asked = [e for e in await runner.event_bus.get_events(run_id) if e.event_type == "step.in_doubt"]
        assert len(asked) == 1
        assert await runner.signal(run_id, asked[0].payload["signal"], answer)
        assert await runner.run_once()
        result = await runner.wait(run_id, timeout=5)
    assert result.status is status
    assert ran(effects) == ["s0", "s1", *then]
    if out is not None:
        assert result.final_output == {"out": out}
