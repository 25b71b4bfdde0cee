"""Names that are members of an Enum, or texts of another kind: what is stored is their plain text."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.steps import Step, StepExecutor
from tests.support.runs import Rig


class Name(enum.StrEnum):
    FETCH = "fetch"


class Old(str, enum.Enum):  # noqa: UP042 - whose str() is not its value
    FETCH = "fetch"
    TOLD = "my.event"


def one(*_: Any) -> int:
    return 1


async def chained(ctx: Any, name: Any) -> Any:
    return await StepExecutor(ctx).run([Step(name, one)])


async def mapped(ctx: Any, name: Any) -> Any:
    return await StepExecutor(ctx).map(name, one, [1])


async def stepped(ctx: Any, name: Any) -> Any:
    return await ctx.step(name, one)


async def keyed(ctx: Any, name: Any) -> Any:
    return await ctx.step("step", one, key=name)


@pytest.mark.parametrize("name", [Name.FETCH, Old.FETCH])
@pytest.mark.parametrize("way", [chained, mapped, stepped, keyed])
async def test_a_step_that_is_named_by_a_member_is_found_by_its_text(place: Path | None, way: Any, name: Any) -> None:
    tries = 0

    async def body(ctx: Any) -> Any:
        nonlocal tries
        tries += 1
        value = await way(ctx, name if tries == 1 else "fetch")
        if tries == 1:
            raise ValueError("once more, from what is recorded")
        return value

    async with Rig(place, max_retries=2) as rig:
        await rig.value(body)
        records = await rig.records()
        assert tries == 2
        assert sum(record.kind == "done" for record in records) == 1
        assert all(type(text) is str for record in records for text in (record.name, record.key))


async def test_an_event_of_such_a_type_is_told_by_its_text(place: Path | None) -> None:
    async with Rig(place) as rig:
        await rig.value(lambda ctx: ctx.emit(Old.TOLD, {}))
        kinds = [event.event_type for event in await rig.runner.event_bus.get_events("r")]
        assert "my.event" in kinds
        assert all(type(kind) is str for kind in kinds)
