"""Answers of a model as typed values: what it is shown, what is accepted, and what it is told of the rest."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NotRequired, Optional, TypedDict

import pytest

from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.schema import misfit
from agent_runtime_core.tools.structured_output import Output
from tests.support.cases import for_each


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


@for_each(
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


@for_each(
    ("wanted", "text", "problem"),
    [
        (Place, "", "invalid JSON"),
        (Place, "Ulm lies at 478 m", "invalid JSON"),
        (Place, '{"name": "Ulm"', "invalid JSON"),
        (Place, '```json\n{"name": "Ulm"', "invalid JSON"),
        (Place, "{'name': 'Ulm'}", "invalid JSON"),
        (Place, 'Here it is: {"name": "Ulm", "inner": {"name": "Bonn"}', "invalid JSON"),
        (list[int], 'Here it is: {"list": [1, 2], "n": ', "invalid JSON"),
        (float, "NaN", "NaN"),
        (Place, '{"name": "Ulm", "height": Infinity}', "Infinity"),
        (Place, '{"name": "Ulm", "height": 1e999}', "1e999 is larger than any float"),
        (Place, "[" * 100_000, "invalid JSON"),
        (list, "[" * 99 + "]" * 99, "is nested deeper than 100 levels"),
        ({"type": "object"}, '{"a":' + "[" * 200 + "]" * 200 + "}", "$.a[0][0]"),
        (Place, "null", "$ must be an object, got None"),
        (Place, '"Ulm"', "$ must be an object, got 'Ulm'"),
        (Place, "{}", "$: missing required property 'name'"),
        (Place, '{"name": 7}', "$.name must be a string, got 7"),
        (Place, '{"name": "Ulm", "height": "478"}', "$.height must be a number, got '478'"),
        (Place, '{"name": "Ulm", "heigth": 478}', "'heigth'"),
        (Trip, '{"to": {"name": "Ulm"}, "mood": "glad"}', "$.mood must be one of 'good', 'bad', got 'glad'"),
        (
            Trip,
            '{"to": {"name": "Ulm"}, "mood": "bad", "stops": [{"name": "a"}, {}]}',
            "$.stops[1]: missing required property 'name'",
        ),
        (Trip, '{"to": {"name": "Ulm"}, "mood": "bad", "guide": {"name": null}}', "$.guide"),
        (Trip, '{"to": {"name": "Ulm"}, "mood": "bad", "kind": "fly"}', "'fly'"),
        (Person, '{"name": "Ada"}', "$: missing required property 'age'"),
        (Person, '{"name": "Ada", "age": true}', "$.age must be an integer, got True"),
        (Person, '{"name": "Ada", "age": 1.5}', "$.age must be an integer, got 1.5"),
        (Mood, '"glad"', "$ must be one of 'good', 'bad', got 'glad'"),
        (list[Place], '{"name": "Ulm"}', "$ must be an array, got an object"),
        (list[int], '[1, "2"]', "$[1] must be an integer, got '2'"),
        (tuple[int, str], "[1]", "must have at least 2 items, got 1"),
        (int, "true", "$ must be an integer, got True"),
        (Even, '{"n": 3}', "3 is odd"),
        (SCHEMA, '{"n": 0}', "$.n must be at least 1, got 0"),
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


@pytest.mark.parametrize(
    "text",
    [
        'Here it is:\n```json\n{"name": "Ulm"}\n```\nAnything else?',
        'Here it is: {"name": "Ulm"}',
        '{"name": "Ulm"} {"name": "Bonn"}',
        '{"wrong": [1]} As [1] says: {"name": "Ulm"}',
        '<think>{"name": "Bonn"}? No.</think>{"name": "Ulm"}',
        'It may be {"name": "Bonn"}</think>\n{"name": "Ulm"}',
        '<think>So the answer is {"name": "Ulm"}</think>',
        '<think>So the answer is {"name": "Ulm"}',
        '<think>{"name": "Ulm"}</think>\nThat is it.',
    ],
)
def test_the_value_is_found_in_a_text(text: str) -> None:
    output = Output(Place)
    assert output.problem(text) is None
    assert output.values(text) == (Place("Ulm"), {"name": "Ulm"})


def test_the_problem_is_that_of_the_longest_value() -> None:
    assert Output(Place).problem('As [1] says: {"name": 7}') == "$.name must be a string, got 7"
    assert Output(list[int]).problem('As 1 says: {"result": ["a"]}') == "$.result[0] must be an integer, got 'a'"


NODE: dict[str, Any] = {
    "$ref": "#/$defs/Node",
    "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}, "required": ["n"]}},
}


@for_each(
    ("wanted", "said", "value"),
    [
        (list[str], ["x"], ["x"]),
        (set[int], [1], {1}),
        (int, 7, 7),
        (str, "text", "text"),
        (Mood, "bad", Mood.BAD),
        (Literal["a", "b"], "a", "a"),
        (Place | Person, {"name": "Ulm"}, Place("Ulm")),
        (Optional[Place], None, None),  # noqa: UP045
        (Any, {"a": 1}, {"a": 1}),
        ({"type": "array", "items": {"type": "integer"}}, [1], [1]),
        ({"anyOf": [{"type": "object", "required": ["a"]}, {"type": "null"}]}, {"a": 1}, {"a": 1}),
        ({"type": "object", "oneOf": [{"required": ["a"]}]}, {"a": 1}, {"a": 1}),
        (NODE, {"n": 1, "next": {"n": 2}}, {"n": 1, "next": {"n": 2}}),
        ({"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, [[None]], [[None]]),
    ],
)
def test_the_model_answers_a_type_that_is_no_object_inside_of_one(wanted: Any, said: Any, value: Any) -> None:
    given = json.loads(json.dumps(wanted)) if isinstance(wanted, dict) else None
    output = Output(wanted)
    assert output.schema["type"] == "object"
    assert not {"anyOf", "oneOf", "enum", "$ref"} & output.schema.keys()
    assert list(output.schema["properties"]) == output.schema["required"] == ["result"]
    assert output.schema["additionalProperties"] is False
    for text in (json.dumps({"result": said}), f"<think>[0]</think>As [1] says: {json.dumps({'result': said})}"):
        assert output.problem(text) is None
        assert output.values(text) == (value, said)
        assert misfit(json.loads(text[text.index("{") :]), output.schema) is None
    assert output.problem(json.dumps(said)) is None
    assert output.values(json.dumps(said)) == (value, said)
    assert given is None or wanted == given


def test_references_of_a_schema_inside_of_another_object_still_resolve() -> None:
    output = Output(NODE)
    assert misfit({"result": {"n": 1, "next": {"n": 2}}}, output.schema) is None
    assert misfit({"result": {"n": 1, "next": {}}}, output.schema) == "$.result.next: missing required property 'n'"
    own = Output({"type": "array", "items": {"$ref": "#"}, "maxItems": 1})
    assert misfit({"result": [[[]]]}, own.schema) is None
    assert misfit({"result": [[[], []]]}, own.schema) == "$.result[0] must have at most 1 item, got 2"


def test_an_object_with_a_property_called_result_stays_as_it_is() -> None:
    output = Output({"type": "object", "properties": {"result": {"type": "object"}}, "required": ["result"]})
    assert output.values('{"result": {"result": 1}}')[1] == {"result": {"result": 1}}
    either = Output({"anyOf": [{"type": "object", "properties": {"result": {"type": "integer"}}}, {"type": "null"}]})
    assert either.values('{"result": {"result": 1}}')[1] == {"result": 1}
    assert either.values('{"result": 1}')[1] == {"result": 1}
    assert either.values('{"result": null}')[1] is None


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


@pytest.mark.parametrize(
    ("wanted", "text", "value"),
    [
        (str, "Two plain sentences. Done.", "Two plain sentences. Done."),
        (str, "<think>Say hello.</think>\nhello", "hello"),
        (str, 'A draft.</think>"hello"', "hello"),
        (Literal["yes", "no"], "yes", "yes"),
        (Literal["yes", "no"], "<think>no? yes.</think>\n\nyes\n", "yes"),
        (dict[str, int], '"{\\"a\\": 1}"', {"a": 1}),
        (str, '"[1]"', "[1]"),
    ],
)
def test_a_string_without_quotes_and_a_value_encoded_twice_are_accepted(wanted: Any, text: str, value: Any) -> None:
    output = Output(wanted)
    assert output.problem(text) is None
    assert output.values(text) == (value, value)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (str, ""),
        (str, "<think>Say hello."),
        (str, '{"result": 5}'),
        (str, '{"result": "hel'),
        (Literal["yes", "no"], "I would say yes"),
        (int, "forty-two"),
    ],
)
def test_thoughts_and_broken_json_are_no_string(wanted: Any, text: str) -> None:
    assert Output(wanted).problem(text) is not None
