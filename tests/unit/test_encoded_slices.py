"""A large value is encoded in slices, with the same text and the same refusals as at once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._core.codec.json import MAX_BYTES, LargeValue, encode
from agent_runtime_core._core.codec.json_slices import LARGE, NotSliced, slices
from agent_runtime_core.errors import UnserialisableResult
from agent_runtime_core.runner import open_run
from tests.support.cases import for_each

WORDS = ("plain ", 'says "no"\n', "é", "\U0001f600", "\\", "\x00", "\ud83d")


def text(dice: random.Random, length: int) -> str:
    return "".join(dice.choices(WORDS, k=length // 3))


def tree(dice: random.Random, depth: int) -> Any:
    kind = dice.choice(["text", "long", "list", "dict", "scalar", "many"])
    if depth == 0 or kind == "scalar":
        return dice.choice([None, True, 7, -2.5, "", [], {}])
    if kind == "text":
        return text(dice, 300)
    if kind == "long":
        return text(dice, dice.choice([LARGE // 2, LARGE - 1, 2 * LARGE]))
    if kind == "many":
        return [{"n": n, "s": "x" * 10} for n in range(dice.choice([10, 5000]))]
    items = [tree(dice, depth - 1) for _ in range(dice.randint(0, 5))]
    return items if kind == "list" else {f"{text(dice, 9)}{n}": item for n, item in enumerate(items)}


def sliced(value: Any, max_bytes: int = MAX_BYTES) -> list[str] | None:
    try:
        return list(slices(value, max_bytes))
    except NotSliced:
        return None


@for_each("seed", range(30))
def test_slices_are_the_text_of_the_whole(seed: int) -> None:
    value = [tree(random.Random(seed), 3), {"a": tree(random.Random(-seed), 3)}]
    found = sliced(value)
    if found is not None:
        assert "".join(found) == encode(value, exact=True)
        assert max(map(len, found)) <= 6 * LARGE + 100, "a character takes 6 bytes at most"


def test_a_long_text_and_long_containers_are_sliced() -> None:
    large = "x" * (10 * LARGE)
    for value in (
        large,
        [large],
        {"a": {"b": [1, large, 2]}},
        ["y" * 100] * 30_000,
        {f"{n}": [n] for n in range(30_000)},
    ):
        found = sliced(value)
        assert found is not None
        assert "".join(found) == encode(value)
        assert max(map(len, found)) <= LARGE + 2
        with pytest.raises(LargeValue):
            encode(value, at_once=LARGE)
    for small in ("x" * LARGE, ["y" * 100] * 1000, 5, None, {}, [], {"when": b"x" * LARGE}):
        assert encode(small, at_once=LARGE) == encode(small)


@pytest.mark.parametrize(
    "value",
    [
        ["x" * (LARGE - 1) + "\ud83d", "x" * (LARGE - 1) + "\ud83d\ude00"],
        ["x" * (2 * LARGE), {"\ud83d\ude00": 1}],
        {"$": "x" * (2 * LARGE)},
        ["x" * (2 * LARGE), {1: 2}],
        ["x" * (2 * LARGE), float("nan")],
        ["x" * (2 * LARGE), 2**70],
        ["x" * (2 * LARGE), b"bytes"],
    ],
    ids=["halves", "key", "tag", "int-key", "nan", "large-int", "bytes"],
)
def test_what_needs_a_tag_or_is_refused_is_left_to_encode(value: Any) -> None:
    assert sliced(value) is None


def test_a_value_above_a_limit_is_refused_as_by_encode() -> None:
    for value, most in (("x" * LARGE * 5, LARGE * 4), (["é" * LARGE] * 3, LARGE * 4), ([0] * 600_000, MAX_BYTES)):
        with pytest.raises(UnserialisableResult) as whole:
            encode(value, max_bytes=most)
        with pytest.raises(UnserialisableResult) as refused:
            sliced(value, most)
        assert refused.value.reason == whole.value.reason


async def test_other_tasks_run_while_a_large_result_is_encoded_and_stored(tmp_path: Path) -> None:
    """Also the commit is made by another thread, and the caller gets a copy of what was recorded."""
    ticks, running = 0, True

    async def tick() -> None:
        nonlocal ticks
        while running:
            await asyncio.sleep(0)
            ticks += 1

    mine = {"text": "x" * (20 * LARGE), "list": [1]}
    async with open_run(tmp_path / "runs.db", "large") as ctx:

        async def load() -> dict[str, Any]:
            nonlocal ticks
            ticks = 0
            asyncio.get_running_loop().call_soon(mine["list"].append, 2)  # type: ignore[attr-defined]
            return mine

        ticking = asyncio.create_task(tick())
        found = await ctx.step("load", load, max_result_bytes=MAX_BYTES)
        assert ticks >= 20
        assert mine["list"] == [1, 2]
        assert found == {"text": mine["text"], "list": [1]}
        running = False
        await ticking
    async with open_run(tmp_path / "runs.db", "large") as ctx:
        assert await ctx.step("load", load, max_result_bytes=MAX_BYTES) == found


async def test_a_cancelled_task_records_its_large_result_first(tmp_path: Path) -> None:
    calls = 0
    async with open_run(tmp_path / "runs.db", "large") as ctx:

        async def load() -> str:
            nonlocal calls
            calls += 1
            asyncio.get_running_loop().call_soon(task.cancel)
            return "x" * (20 * LARGE)

        async def step() -> str:
            return await ctx.step("load", load, key="one", max_result_bytes=MAX_BYTES)

        task = asyncio.create_task(step())
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelling() == 1
        assert len(await step()) == 20 * LARGE
        assert calls == 1
