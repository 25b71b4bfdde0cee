"""Steps whose results are models of pydantic, in a run that is opened again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import Step, StepExecutor, open_run
from agent_runtime_core.errors import UnserialisableResult

pytest.importorskip("pydantic")

import pydantic


class Item(pydantic.BaseModel):
    name: str
    price: float = pydantic.Field(default=1.0, alias="Price")
    _seen: int = pydantic.PrivateAttr(0)


class Page(pydantic.BaseModel):
    items: list[Item]

    @pydantic.field_validator("items")
    @classmethod
    def longer(cls, items: list[Item]) -> list[Item]:
        return [*items, Item(name="added")]


async def test_a_run_that_is_opened_again_gets_the_same_models(tmp_path: Path) -> None:
    calls: list[Any] = []

    async def fetch(number: int) -> Item:
        calls.append(number)
        item = Item(name=f"item {number}")
        item._seen = number
        return item

    def page(state: Any) -> Page:
        calls.append("page")
        return Page(items=[Item(name="first", Price=2)])

    async def execute() -> tuple[Any, ...]:
        async with open_run(str(tmp_path / "runs.db"), run_id="a") as ctx:
            one = await ctx.step("one", fetch, 3)
            bare = await ctx.step("bare", lambda: Item(name="bare"), returns=Item)
            many = await StepExecutor(ctx).map("many", fetch, [1, 2])
            steps = await StepExecutor(ctx).run([Step("page", lambda ctx, state: page(state), returns=Page)])
        return one, bare, many, steps

    first = await execute()
    made = list(calls)
    second = await execute()
    assert second == first
    assert second[0]._seen == 3
    assert [item.name for item in second[3]["page"].items] == ["first", "added"]
    assert (sorted(map(str, made)), calls) == (["1", "2", "3", "page"], made)


async def test_a_model_without_an_annotation_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(UnserialisableResult, match=r"Annotate the return type, pass returns=Item, or call register_ty"):
        async with open_run(str(tmp_path / "runs.db"), run_id="a") as ctx:
            await ctx.step("bare", lambda: Item(name="bare"))
