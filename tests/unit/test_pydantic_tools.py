"""Models of pydantic as parameters and results of tools, and as the output type of a loop."""

from __future__ import annotations

import dataclasses
import threading
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, TypeVar

import pytest

from agent_runtime_core._core.json_schema import misfit
from agent_runtime_core.errors import BadArguments, InvalidArgument
from agent_runtime_core.tools import Tool, ToolRegistry
from agent_runtime_core.tools.invocation import answer_of
from agent_runtime_core.tools.structured_output import Output

pytest.importorskip("pydantic")

import pydantic
import pydantic.dataclasses

T = TypeVar("T")


class Place(pydantic.BaseModel):
    city: str
    zip_code: str = pydantic.Field(alias="zip", pattern=r"^\d+$")


class Person(pydantic.BaseModel):
    name: str
    homes: list[Place] = pydantic.Field(default_factory=list)
    age: int = pydantic.Field(default=1, ge=0)

    @pydantic.field_validator("name")
    @classmethod
    def no_spaces(cls, name: str) -> str:
        if " " in name:
            raise ValueError("one word, please")
        return name.title()


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    tricks: list[str]


class Pet(pydantic.RootModel[Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]]):
    pass


class Box(pydantic.BaseModel, Generic[T]):
    content: T


class Node(pydantic.BaseModel):
    next: Node | None = None


def greet(person: Person, pets: list[Pet], box: Box[int] | None = None) -> Place:
    """Greet."""
    assert isinstance(person, Person)
    assert all(isinstance(home, Place) for home in person.homes)
    assert box is None or isinstance(box, Box)
    return Place(city=f"{person.name} {[type(pet.root).__name__ for pet in pets]}", zip="1")


def registry() -> ToolRegistry:
    tools = ToolRegistry()
    tools.register(Tool.from_function(greet))
    return tools


def test_definitions_are_at_the_root_where_references_find_them() -> None:
    parameters = Tool.from_function(greet).parameters
    assert parameters["properties"]["person"]["properties"]["homes"]["items"] == {"$ref": "#/$defs/Place"}
    assert parameters["$defs"]["Place"]["properties"]["zip"]["pattern"] == r"^\d+$"
    assert sorted(parameters["$defs"]) == ["Box_int_", "Cat", "Dog", "Place"]
    assert "$defs" not in str(parameters["properties"]).replace("#/$defs/", "")


def test_two_models_of_one_name_have_two_definitions() -> None:
    def one() -> type:
        class Inner(pydantic.BaseModel):
            a: int

        class Outer(pydantic.BaseModel):
            inner: Inner

        return Outer

    def two() -> type:
        class Inner(pydantic.BaseModel):
            b: str

        class Other(pydantic.BaseModel):
            inner: Inner

        return Other

    def both(first: Any, second: Any) -> None: ...

    both.__annotations__ = {"first": one(), "second": two(), "return": None}
    parameters = Tool.from_function(both).parameters
    assert misfit({"first": {"inner": {"a": 1}}, "second": {"inner": {"b": "x"}}}, parameters) is None
    assert misfit({"first": {"inner": {"b": "x"}}, "second": {"inner": {"b": "x"}}}, parameters) is not None
    assert misfit({"first": {"inner": {"a": 1}}, "second": {"inner": {"a": 1}}}, parameters) is not None


async def test_a_tool_gets_the_models_of_a_call() -> None:
    person = {"name": "ada", "homes": [{"city": "Paris", "zip": "75"}]}
    pets = [{"kind": "dog", "tricks": []}, {"kind": "cat", "lives": 9}]
    found = await registry().execute("greet", {"person": person, "pets": pets, "box": {"content": 1}})
    assert found.city == "Ada ['Dog', 'Cat']"


@pytest.mark.parametrize(
    ("person", "said"),
    [
        ({"name": "ada", "age": -1}, "person.age must be at least 0, got -1"),
        ({"name": "ada", "homes": [{"city": "Paris"}]}, "person.homes[0]: missing required property 'zip' (string)"),
        ({"name": "ada l"}, "one word, please"),
    ],
)
async def test_a_call_that_does_not_fit_is_refused(person: object, said: str) -> None:
    with pytest.raises((BadArguments, InvalidArgument)) as caught:
        await registry().execute("greet", {"person": person, "pets": []})
    assert said in str(caught.value)


def test_an_answer_becomes_the_model() -> None:
    output = Output(Person)
    text = '{"name": "ada", "homes": [{"city": "Paris", "zip": "75"}]}'
    assert output.problem(text) is None
    assert output.values(text)[0] == Person(name="ada", homes=[Place(city="Paris", zip="75")])
    assert "one word, please" in (output.problem('{"name": "a b"}') or "")


def test_an_answer_becomes_a_union_of_models() -> None:
    assert Output(Cat | Dog).values('{"result": {"kind": "cat", "lives": 9}}')[0] == Cat(kind="cat", lives=9)
    assert Output(list[Pet]).values('[{"kind": "cat", "lives": 9}]')[0][0].root.lives == 9


def test_a_model_may_contain_itself() -> None:
    output = Output(Node)
    assert output.values('{"next": {"next": null}}')[0] == Node(next=Node())
    assert output.schema["type"] == "object"
    assert output.problem('{"next": {"next": 1}}') == "$.next.next must match a schema in anyOf, got 1"


@pydantic.dataclasses.dataclass
class Size:
    width: Annotated[int, pydantic.Field(ge=1)]
    unit: str = pydantic.Field("cm", alias="in")


@dataclasses.dataclass
class Parcel:
    owner: Person
    size: Size


def pack(parcel: Parcel, animal: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]) -> Parcel:
    """Pack."""
    assert isinstance(animal, (Cat, Dog))
    return parcel


async def test_models_in_dataclasses_and_unions_are_built() -> None:
    tools = ToolRegistry()
    tools.register(Tool.from_function(pack))
    parcel = {"owner": {"name": "ada"}, "size": {"width": 3, "in": "mm"}}
    found = await tools.execute("pack", {"parcel": parcel, "animal": {"kind": "cat", "lives": 2}})
    assert found == Parcel(Person(name="ada"), Size(3, **{"in": "mm"}))
    with pytest.raises(BadArguments, match=r"parcel\.size\.width must be at least 1, got 0"):
        await tools.execute("pack", {"parcel": parcel | {"size": {"width": 0}}, "animal": {"kind": "cat", "lives": 2}})


class Total(pydantic.BaseModel):
    amount: Decimal
    secret: pydantic.SecretStr = pydantic.SecretStr("hidden")

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> Decimal:
        return self.amount * 2


def total() -> Total:
    """Total."""
    return Total(amount=Decimal("1.5"))


def test_the_model_gets_the_json_that_pydantic_writes_of_a_result() -> None:
    answer = answer_of(Tool.from_function(total), total())
    assert answer.content == '{"amount": "1.5", "secret": "**********", "double": "3.0"}'
    assert answer.ok


def test_a_type_without_a_schema_is_refused_with_the_reason_of_pydantic() -> None:
    class Odd(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        thread: threading.Thread

    with pytest.raises(InvalidArgument, match="the output type must have a type with a JSON Schema, got Odd"):
        Output(Odd)
