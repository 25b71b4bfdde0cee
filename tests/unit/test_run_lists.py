"""`runner.runs()`: each parameter, on a queue that has one run for it."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus
from tests.support.cases import for_each
from tests.support.runs import Script

TALK = UUID(int=7)


async def nothing(ctx: Any) -> None: ...


@pytest.mark.parametrize("url", ["memory://", None], ids=["memory", "sqlite"])
async def test_each_parameter_selects_runs(url: str | None, tmp_path: Path) -> None:
    registry = Registry()
    registry.register(Script(nothing))
    async with AgentRunner.open(url or tmp_path / "runs.db", registry=registry) as runner:
        options: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("order-1", {}, {}),
            ("order-2", {"conversation_id": TALK}, {}),
            ("talk", {"conversation_id": str(TALK).upper()}, {"concurrency_key": ""}),
            ("keyed", {}, {"concurrency_key": "k"}),
        ]
        for run_id, input_data, more in options:
            await runner.submit("script", input_data, run_id=run_id, **more)
        await runner.cancel("order-1")
        await runner.queue.enqueue("child", "other", {}, parent_run_id="order-1")

        first, second, _, fourth = [(await runner.queue.require(run_id)).created_at for run_id, _, _ in options]
        assert first < second < fourth

        async def keys(*args: Any, **wanted: Any) -> list[str | None]:
            return [info.run_key for info in await runner.runs(*args, **wanted)]

        assert await keys() == ["order-1", "order-2", "talk", "keyed", "child"]
        assert await keys(newest_first=True, limit=2) == ["child", "keyed"]
        assert await keys("cancelled") == ["order-1"]
        assert await keys([RunStatus.CANCELLED, "pending"], "script", newest_first=True) == [
            "keyed", "talk", "order-2", "order-1",
        ]  # fmt: skip
        assert await keys([]) == []
        assert await keys(agent="other") == ["child"]
        assert await keys(since=second, until=fourth) == ["order-2", "talk"]
        assert await keys(until=dt.datetime.now(dt.UTC)) == await keys()
        assert await keys(since=second, until=second) == []
        assert await keys(prefix="order") == ["order-1", "order-2"]
        assert await keys(prefix=str((await runner.get_run("talk")).run_id)[:13]) == ["talk"]
        assert await keys(parent="order-1") == ["child"]
        assert await keys(conversation=TALK) == await keys(conversation=str(TALK)) == ["order-2", "talk"]
        assert await keys(conversation="elsewhere") == []
        assert await keys(concurrency_key="k") == ["keyed"]
        assert await keys(concurrency_key=f"conversation:{TALK}") == ["order-2"]
        assert await keys(reason="cancel") == ["order-1"]
        assert await keys(reason="canc") == []


@for_each(
    "wanted",
    [
        {"status": 3}, {"status": [["failed"]]}, {"status": b"failed"}, {"until": "now"}, {"until": -1}, {"prefix": 3},
        {"prefix": "a\ud800"}, {"parent": ""}, {"parent": 3}, {"conversation": ""}, {"conversation": "\ud800"},
        {"concurrency_key": ""}, {"concurrency_key": 3}, {"reason": ""}, {"reason": 3}, {"newest_first": "yes"},
    ],
    ids=str,
)  # fmt: skip
async def test_what_no_run_can_have_is_rejected(wanted: dict[str, Any]) -> None:
    async with AgentRunner.open("memory://", registry=Registry()) as runner:
        with pytest.raises(InvalidArgument, match=next(iter(wanted)).replace("parent", "run_id|parent")):
            await runner.runs(**wanted)
