"""Answers of a model as typed values: what it is shown, what is accepted, and what it is told of the rest."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NotRequired, Optional, TypedDict

import pytest

from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.tools.structured_output import Output


class Mood(Enum):
    GOOD = "good"
    BAD = "bad"


@dataclass
class Place:
    name: str
    height: float = 0.0


@dataclass
class Trip:
    """A dataclass with everything in it."""

    to: Place
    mood: Mood
    stops: list[Place] = field(default_factory=list)
    guide: Place | None = None
    kind: Literal["walk", "ride"] = "walk"


class Person(TypedDict):
    name: str
    age: int
    email: NotRequired[str]


class Team(TypedDict):
    lead: Person
    moods: dict[str, Mood]


@dataclass
class Even:
    n: int

    def __post_init__(self) -> None:
        if self.n % 2:
            raise ValueError(f"{self.n} is odd")


SCHEMA: dict[str, Any] = {
    "type": "object",
    "title": "count",
    "properties": {"n": {"type": "integer", "minimum": 1}, "unit": {"enum": ["m", "km"]}},
    "required": ["n"],
    "additionalProperties": False,
}
ULM = {"name": "Ulm", "height": 478}


# -- what fits


@pytest.mark.parametrize(
    ("wanted", "said", "value"),
    [
        (Place, {"name": "Ulm", "height": 478}, Place("Ulm", 478.0)),
        (Place, {"name": "Ulm"}, Place("Ulm")),
        (
            Trip,
            {"to": ULM, "mood": "bad", "stops": [ULM, {"name": "Bonn"}], "guide": None, "kind": "ride"},
            Trip(Place("Ulm", 478.0), Mood.BAD, [Place("Ulm", 478.0), Place("Bonn")], None, "ride"),
        ),
        (
            Trip,
            {"to": ULM, "mood": "good", "guide": ULM},
            Trip(Place("Ulm", 478.0), Mood.GOOD, [], Place("Ulm", 478.0)),
        ),
        (Person, {"name": "Ada", "age": 36}, {"name": "Ada", "age": 36}),
        (Person, {"name": "Ada", "age": 36, "email": "a@b"}, {"name": "Ada", "age": 36, "email": "a@b"}),
        (
            Team,
            {"lead": {"name": "Ada", "age": 36.0}, "moods": {"now": "good"}},
            {"lead": {"name": "Ada", "age": 36}, "moods": {"now": Mood.GOOD}},
        ),
        (Mood, "bad", Mood.BAD),
        (list[Place], [ULM, ULM], [Place("Ulm", 478.0)] * 2),
        (list[int], [], []),
        (tuple[int, str], [1, "a"], (1, "a")),
        (set[str], ["a", "b"], {"a", "b"}),
        (dict[str, Place], {"x": ULM}, {"x": Place("Ulm", 478.0)}),
        (Optional[Place], None, None),  # noqa: UP045 - people write it
        (Place | None, ULM, Place("Ulm", 478.0)),
        (int | str, "7", "7"),
        (int, 7, 7),
        (float, 7, 7.0),
        (str, "just text", "just text"),
        (bool, True, True),
        (Even, {"n": 4}, Even(4)),
        (SCHEMA, {"n": 3, "unit": "km"}, {"n": 3, "unit": "km"}),
    ],
)
def test_json_of_the_type_becomes_a_value_of_it(wanted: Any, said: Any, value: Any) -> None:
    output = Output(wanted)
    text = json.dumps(said)
    assert output.problem(text) is None
    typed, plain = output.values(text)
    assert typed == value
    assert type(typed) is type(value)
    assert plain == said


@pytest.mark.parametrize(
    "text",
    [
        '{"n": 3}',
        '  \n{"n": 3}\n ',
        '```json\n{"n": 3}\n```',
        '```\n{"n": 3}\n```',
        '``` json\n{"n": 3}```',
        '```JSON\n{"n": 3}\n```',
        '\n```json\r\n{"n": 3}\r\n```\n',
    ],
)
def test_a_fence_around_it_is_taken_off(text: str) -> None:
    output = Output(SCHEMA)
    assert output.problem(text) is None
    assert output.values(text) == ({"n": 3}, {"n": 3})


def test_a_fence_inside_a_text_is_part_of_it() -> None:
    said = {"name": "```json\n1\n```"}
    assert Output(Place).values(f"```json\n{json.dumps(said)}\n```")[0] == Place("```json\n1\n```")


# -- what does not


@pytest.mark.parametrize(
    ("wanted", "text", "problem"),
    [
        (Place, "", "is not JSON"),
        (Place, "Ulm lies at 478 m", "is not JSON"),
        (Place, '{"name": "Ulm"', "is not JSON"),
        (Place, '```json\n{"name": "Ulm"', "is not JSON"),
        (Place, "{'name': 'Ulm'}", "is not JSON"),
        (Place, 'Here it is:\n```json\n{"name": "Ulm"}\n```', "is not JSON"),
        (Place, '{"name": "Ulm"} {"name": "Bonn"}', "is not JSON"),
        (float, "NaN", "NaN"),
        (Place, '{"name": "Ulm", "height": Infinity}', "Infinity"),
        (Place, '{"name": "Ulm", "height": 1e999}', "1e999 is larger than any float"),
        (Place, "[" * 100_000, "is not JSON"),
        (list, "[" * 99 + "]" * 99, "is nested deeper than 100 levels"),
        ({"type": "object"}, '{"a":' + "[" * 200 + "]" * 200 + "}", "$.a[0][0]"),
        (Place, "null", "$ is NoneType"),
        (Place, '"Ulm"', "$ is str"),
        (Place, "{}", "$ lacks 'name'"),
        (Place, '{"name": 7}', "$.name is int"),
        (Place, '{"name": "Ulm", "height": "478"}', "$.height is str"),
        (Place, '{"name": "Ulm", "heigth": 478}', "'heigth'"),
        (Trip, '{"to": {"name": "Ulm"}, "mood": "glad"}', "$.mood is 'glad'"),
        (Trip, '{"to": {"name": "Ulm"}, "mood": "bad", "stops": [{"name": "a"}, {}]}', "$.stops[1] lacks 'name'"),
        (Trip, '{"to": {"name": "Ulm"}, "mood": "bad", "guide": {"name": null}}', "$.guide"),
        (Trip, '{"to": {"name": "Ulm"}, "mood": "bad", "kind": "fly"}', "'fly'"),
        (Person, '{"name": "Ada"}', "$ lacks 'age'"),
        (Person, '{"name": "Ada", "age": true}', "$.age is bool"),
        (Person, '{"name": "Ada", "age": 1.5}', "$.age is float"),
        (Mood, '"glad"', "['good', 'bad']"),
        (list[Place], '{"name": "Ulm"}', "$ is dict"),
        (list[int], '[1, "2"]', "$[1] is str"),
        (tuple[int, str], "[1]", "1 items"),
        (int, "true", "$ is bool"),
        (Even, '{"n": 3}', "3 is odd"),
        (SCHEMA, '{"n": 0}', "$.n is 0"),
        (SCHEMA, '{"n": 1, "unit": "mile"}', "'mile'"),
        (SCHEMA, '{"n": 1, "u": 1}', "'u'"),
    ],
)
def test_what_is_wrong_is_named_to_the_model(wanted: Any, text: str, problem: str) -> None:
    output = Output(wanted)
    found = output.problem(text)
    assert found is not None
    assert problem in found
    told = output.repair(found)
    assert found in told
    assert json.dumps(output.schema) in told, "and what is wanted"
    assert len(told) < 5000, "a long answer is not told back"


# -- what the model is shown


@pytest.mark.parametrize(
    ("wanted", "name"), [(Trip, "Trip"), (Team, "Team"), (SCHEMA, "count"), ({"type": "object"}, "answer")]
)
def test_its_schema_is_sent_under_its_name(wanted: Any, name: str) -> None:
    asked = Output(wanted).response_format
    assert asked["type"] == "json_schema"
    assert asked["json_schema"]["name"] == name
    assert asked["json_schema"]["schema"] == Output(wanted).schema
    assert json.loads(json.dumps(asked)) == asked


@pytest.mark.parametrize("wanted", [list[Place], Place | None, dict[str, int], Optional[int], Mood])  # noqa: UP045
def test_a_name_is_one_that_providers_take(wanted: Any) -> None:
    name = Output(wanted).response_format["json_schema"]["name"]
    assert name
    assert name.replace("_", "").replace("-", "").isalnum()
    assert name.isascii()
    assert len(name) <= 64


def test_a_title_that_is_no_name_is_made_one() -> None:
    name = Output({**SCHEMA, "title": "A count, with its unit"}).response_format["json_schema"]["name"]
    assert name.replace("_", "").replace("-", "").isalnum()


def test_the_schema_of_a_dataclass() -> None:
    assert Output(Trip).schema == {
        "type": "object",
        "properties": {
            "to": (place := Output(Place).schema),
            "mood": {"enum": ["good", "bad"], "type": "string"},
            "stops": {"type": "array", "items": place},
            "guide": {"anyOf": [place, {"type": "null"}], "default": None},
            "kind": {"enum": ["walk", "ride"], "type": "string", "default": "walk"},
        },
        "required": ["to", "mood"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize("wanted", [object(), Output, lambda: 0, bytes, 7, "Place"])
def test_a_type_that_has_no_json_form_is_refused_at_once(wanted: Any) -> None:
    with pytest.raises(InvalidArgument, match="the output type"):
        Output(wanted)


def test_a_schema_that_is_given_stays_as_it_is() -> None:
    given = json.loads(json.dumps(SCHEMA))
    output = Output(given)
    output.schema["more"] = 1
    assert given == SCHEMA
