"""Vectors are searched exactly, whatever holds them; an index keeps up with what is put in and taken out."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import math
import random
from array import array
from collections.abc import Callable

import pytest

from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.persistence import vectors
from agent_runtime_core.persistence.vectors import (
    AT_ONCE,
    NumpyRows,
    PlainRows,
    QuantizedRows,
    VectorIndex,
    VectorRows,
    dot,
    floats,
    unit,
)


def _numpy_rows() -> VectorRows:
    return NumpyRows(importlib.import_module("numpy"))


KINDS: list[Callable[[], VectorRows]] = [PlainRows]
KINDS += [QuantizedRows] * hasattr(math, "sumprod") + [_numpy_rows] * (importlib.util.find_spec("numpy") is not None)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], VectorRows]:
    monkeypatch.setattr(vectors, "choose_rows", request.param)
    return request.param  # type: ignore[no-any-return]


def spread(chance: random.Random, length: int) -> list[float]:
    return [chance.gauss(0, 1) for _ in range(length)]


def clustered(chance: random.Random, length: int) -> list[float]:
    """So near each other that bytes cannot tell them apart."""
    return [1.0 + chance.random() * 1e-7 for _ in range(length)]


def spiked(chance: random.Random, length: int) -> list[float]:
    """One component far above the rest, which bytes lose."""
    vector = [chance.gauss(0, 1e-4) for _ in range(length)]
    vector[chance.randrange(length)] = chance.choice([-1.0, 1.0])
    return vector


def doubled(chance: random.Random, length: int) -> list[float]:
    """One of a few vectors, so that many are as near as each other."""
    return [float(chance.randrange(1, 3)), *[1.0] * (length - 1)]


@pytest.mark.parametrize("length", [1, 2, 17, 200])
@pytest.mark.parametrize("shape", [spread, clustered, spiked, doubled])
def test_the_nearest_are_those_of_the_definition(
    kind: Callable[[], VectorRows], shape: Callable[[random.Random, int], list[float]], length: int
) -> None:
    chance, rows = random.Random(f"{shape.__name__} {length}"), kind()
    held = [unit(floats(shape(chance, length), "")) for _ in range(120)]
    for each in held:
        rows.append(each)
    for number in (119, 3, 0, 50):
        rows.drop(number)
        held[number] = held[-1]
        held.pop()
    assert len(rows) == len(held) == 116
    for count in (1, 10, 115, 116, 500):
        query = unit(floats(shape(chance, length), ""))
        exact = sorted((math.fsum(a * b for a, b in zip(each, query, strict=True)) for each in held), reverse=True)
        worst = exact[min(count, len(exact)) - 1]
        found = rows.frozen().nearest(query, count)
        assert len(found) >= min(count, len(held))
        for score, number in found:
            truth = math.fsum(a * b for a, b in zip(held[number], query, strict=True))
            assert score == pytest.approx(truth, abs=1e-12)
            assert truth >= worst - 1e-11, "none is given that is farther than those left out"
        numbers = {number for _, number in found}
        assert len(numbers) == len(found)
        left = [held[number] for number in range(len(held)) if number not in numbers]
        assert all(math.fsum(a * b for a, b in zip(each, query, strict=True)) <= worst + 1e-12 for each in left)


def test_a_unit_has_the_length_of_one() -> None:
    for vector in ([3.0, 4.0], [1e308, -1e308], [5e-324, 0.0], [-1e-200] * 300):
        assert math.hypot(*unit(floats(vector, ""))) == pytest.approx(1.0, abs=1e-12)
    assert unit(array("d", [3.0, 4.0])).tolist() == [0.6, 0.8]
    assert dot(unit(array("d", [1.0, 1.0])), unit(array("d", [1.0, 1.0]))) <= 1.0


@pytest.mark.parametrize(
    ("vector", "said"),
    [
        ([], "query_vector must have .*, got an empty sequence"),
        ([0.0, -0.0], "query_vector must have .*, got 2 zeros"),
        ([1.0, math.nan], "query_vector must be a finite number, got nan at index 1"),
        ([-math.inf], "query_vector must be a finite number, got -inf at index 0"),
        (["1"], "query_vector must be a sequence of numbers"),
        (None, "query_vector must be a sequence of numbers"),
        ([10**400], "query_vector must be a sequence of numbers"),
    ],
)
def test_what_has_no_direction_is_named(vector: list[float], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        floats(vector, "query_vector")


async def test_an_index_follows_what_is_put_in_and_taken_out(kind: Callable[[], VectorRows]) -> None:
    chance, index = random.Random(5), VectorIndex()
    truth: dict[str, tuple[str, float, list[float]]] = {}
    for turn in range(400):
        key = str(chance.randrange(60))
        if chance.random() < 0.3:
            index.drop(key)
            truth.pop(key, None)
        else:
            truth[key] = (chance.choice("ab"), float(turn), spread(chance, 8))
            index.put(key, *truth[key][:2], array("d", truth[key][2]))
        assert len(index) == len(truth)
        if turn % 20 == 0 and truth:
            query, content_type = unit(floats(spread(chance, 8), "")), chance.choice(["a", "b", None])
            rated = sorted(
                (-round(dot(unit(floats(vector, "")), query), 12), age, each)
                for each, (of, age, vector) in truth.items()
                if content_type in (None, of)
            )
            assert await index.search(query, 5, content_type) == [each for _, _, each in rated[:5]]


async def test_a_search_in_a_thread_sees_the_vectors_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "choose_rows", PlainRows)
    index, length = VectorIndex(), 64
    chance = random.Random(9)
    for n in range(AT_ONCE // length + 50):
        index.put(str(n), "text", float(n), array("d", spread(chance, length)))
    query = array("d", spread(chance, length))
    before = await index.search(query, 20, None)
    searching = asyncio.ensure_future(index.search(query, 20, None))
    await asyncio.sleep(0)  # it is under way in its thread
    for n in range(0, len(index), 2):
        index.drop(str(n))
    assert await searching == before
