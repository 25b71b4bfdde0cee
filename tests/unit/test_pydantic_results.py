"""Models of pydantic as results of steps: what is read back is identical, or storing it is refused."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import functools
import json
import pathlib
import subprocess
import sys
import typing
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, TypeVar

import pytest

from agent_runtime_core._core.codec.json import decode, encode
from agent_runtime_core._core.codec.tagged import REGISTRY
from agent_runtime_core._core.codec.typed import codec_for, register_type
from agent_runtime_core._views.plain import plain_json
from agent_runtime_core.errors import InvalidArgument, UnserialisableResult

pytest.importorskip("pydantic")

import pydantic
import pydantic.dataclasses

from tests.support.cases import for_each

T = TypeVar("T")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    lives: int = 1


class Animal(pydantic.BaseModel):
    name: str


class Bird(Animal):
    wings: int = 2


class Owner(pydantic.BaseModel):
    pet: Cat | Dog = pydantic.Field(discriminator="kind")
    others: list[Cat | Dog] = []
    named: dict[str, Cat] = {}


class Aliases(pydantic.BaseModel):
    both: int = pydantic.Field(alias="Both")
    read: str = pydantic.Field(validation_alias=pydantic.AliasChoices("x", "y"), serialization_alias="z")
    deep: int = pydantic.Field(1, validation_alias=pydantic.AliasPath("a", 0))


class Leaves(pydantic.BaseModel):
    amount: Decimal = Decimal("1.50")
    at: dt.datetime = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    took: dt.timedelta = dt.timedelta(seconds=1.5)
    path: pathlib.Path = pathlib.Path("a/b")
    url: pydantic.HttpUrl = pydantic.HttpUrl("https://example.com/")
    tags: set[str] = {"a"}
    pair: tuple[int, str] = (1, "a")
    color: Color = Color.RED


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, frozen=True)
    at: dt.datetime
    pair: tuple[int, int] = (1, 2)


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int


class Computed(pydantic.BaseModel):
    a: int

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return self.a * 2

    @functools.cached_property
    def kept(self) -> int:
        return self.a + 1


class Private(pydantic.BaseModel):
    a: int
    _seen: set[str] = pydantic.PrivateAttr(default_factory=set)


class Doubling(pydantic.BaseModel):
    n: int
    raw: bytes = b"\xff"
    path: pathlib.Path = pathlib.Path("x")
    pets: list[Cat | Dog] = []

    @pydantic.field_validator("n")
    @classmethod
    def twice(cls, n: int) -> int:
        return n * 2


class Hidden(pydantic.BaseModel):
    shown: int
    hidden: Color = pydantic.Field(default=Color.RED, exclude=True)


class Box(pydantic.BaseModel, Generic[T]):
    item: T


class Cats(pydantic.RootModel[list[Cat]]):
    pass


class Tree(pydantic.BaseModel):
    kids: list[Tree] = []


@dataclasses.dataclass
class Holder:
    owner: Owner
    either: Cat | Dog | None = None


class Typed(typing.TypedDict):
    cat: Cat


def private() -> Private:
    model = Private(a=1)
    model._seen.add("x")
    return model


def with_cache() -> Computed:
    model = Computed(a=2)
    assert model.kept == 3
    return model


VALUES: list[tuple[Any, Any]] = [
    (Cat(lives=3), Cat),
    (Owner(pet=Dog(), others=[Cat(), Dog()], named={"a": Cat()}), Owner),
    (Aliases.model_validate({"Both": 1, "x": "q", "a": [7]}), Aliases),
    (Leaves(), Leaves),
    (Strict(at=dt.datetime(2026, 1, 2, tzinfo=dt.UTC)), Strict),
    (Open.model_validate({"a": 1, "b": [1, {"$": 2}]}), Open),
    (Open.model_validate({"a": 1, "$": 2, "v": 3}), Open),
    (with_cache(), Computed),
    (private(), Private),
    (Doubling(n=1, pets=[Dog()]), Doubling),
    (Hidden(shown=1, hidden=Color.BLUE), Hidden),
    (Box[int](item=1), Box[int]),
    (Box[Cat](item=Cat()), Box[Cat]),
    (Box[list[Doubling]](item=[Doubling(n=1, raw=b"a")]), Box[list[Doubling]]),
    (Cats([Cat()]), Cats),
    (Tree(kids=[Tree(), Tree(kids=[Tree()])]), Tree),
    (Dog(), Cat | Dog),
    (Dog(), Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]),
    ([Dog(), None, Cat()], list[Cat | Dog | None]),
    (None, Cat | None),
    (3, int | Cat),
    ({"a": Cat()}, dict[str, Cat]),
    ((1, Cat()), tuple[int, Cat]),
    (Holder(Owner(pet=Cat()), Dog()), Holder),
    ({"cat": Cat()}, Typed),
    (pydantic.HttpUrl("https://example.com/a"), pydantic.HttpUrl),
]


def state_of(value: Any) -> Any:
    """What equality of models leaves out: types of fields, private attributes and extra values."""
    if isinstance(value, pydantic.BaseModel):
        names = type(value).model_fields
        private = {name: state_of(each) for name, each in (value.__pydantic_private__ or {}).items()}
        return type(value), {name: state_of(getattr(value, name)) for name in names}, value.model_extra, private
    if dataclasses.is_dataclass(value):
        return type(value), {field.name: state_of(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: state_of(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [state_of(each) for each in value]
    return type(value), value


@for_each(("value", "annotation"), VALUES, ids=lambda each: str(each)[:60])
def test_a_value_is_read_back_as_it_was(value: Any, annotation: Any) -> None:
    write, read = codec_for(annotation)
    text = write(value)
    again = read(text)
    assert again == value
    assert state_of(again) == state_of(value)
    assert write(again) == text


@for_each(("value", "annotation"), VALUES, ids=lambda each: str(each)[:60])
def test_without_the_annotation_and_for_other_programs_it_is_plain(value: Any, annotation: Any) -> None:
    text = codec_for(annotation)[0](value)
    plain = decode(text)
    assert "pydantic" not in {type(plain).__module__.partition(".")[0]}
    assert '"$":"' not in plain_json(text)
    if isinstance(value, pydantic.BaseModel) and not isinstance(value, pydantic.RootModel):
        assert isinstance(plain, dict)
        assert set(type(value).model_fields) <= plain.keys() == json.loads(plain_json(text)).keys()


def test_a_usual_model_is_stored_by_the_names_of_its_fields_without_tags() -> None:
    assert codec_for(Aliases)[0](Aliases.model_validate({"Both": 1, "x": "q"})) == '{"both":1,"read":"q","deep":1}'
    assert codec_for(Computed)[0](Computed(a=1)) == '{"a":1}'


def test_what_was_not_set_stays_so_in_the_state_of_a_model() -> None:
    write, read = codec_for(Private)
    again = read(write(private()))
    assert isinstance(again, Private)
    assert again.model_fields_set == {"a"}
    assert again.model_dump(exclude_unset=True) == {"a": 1}


def test_a_model_whose_validator_refuses_it_later_is_restored_without_validators() -> None:
    limit = [10]

    class Small(Private):
        @pydantic.field_validator("a")
        @classmethod
        def small(cls, a: int) -> int:
            if a > limit[0]:
                raise ValueError("too large")
            return a

    write, read = codec_for(Small)
    model = Small(a=5)
    model._seen.add("y")
    text, plain = write(model), codec_for(Small)[0](Small(a=5))
    limit[0] = 1
    assert read(text) == model
    with pytest.raises(UnserialisableResult, match=r"\$: not a valid Small: a: Value error, too large"):
        read(plain)


def test_fields_that_were_added_and_removed_since() -> None:
    def version(**fields: Any) -> Any:
        return pydantic.create_model("Version", __base__=Private, **fields)

    first = version(old=(int, 1))
    model = first(a=1)
    model._seen.add("x")
    text = codec_for(first)[0](model)
    later = version(new=(list[int], pydantic.Field(default_factory=list)))
    again: Any = codec_for(later)[1](text)
    assert (again.a, again.new, again._seen) == (1, [], {"x"})
    assert not hasattr(again, "old")
    with pytest.raises(UnserialisableResult, match="Version needs 'new', which is missing"):
        codec_for(version(new=(int, ...)))[1](text)


class Secret(pydantic.BaseModel):
    key: pydantic.SecretStr


class Number(pydantic.BaseModel):
    x: float


class Loose(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    what: Any


@for_each(
    ("value", "annotation", "message"),
    [
        (Secret(key=pydantic.SecretStr("abc")), Secret, "$.key: a SecretStr is not JSON-serializable"),
        (Number(x=float("nan")), Number, "$.x: nan is not JSON-serializable"),
        (Loose(what=print), Loose, "$.what: a builtin_function_or_method is not JSON-serializable"),
        (Loose(what=(1, 2)), Loose | int, "$: a Loose is not JSON-serializable: pydantic reads another value"),
        (Cat(), None, "$: a Cat is not JSON-serializable. Annotate the return type, pass returns=Cat, or call"),
        (Cat(), Dog, "$: the annotation says Dog, got a Cat"),
        (Bird(name="a"), Animal, "$: the annotation says Animal, got a Bird"),
        ({"kind": "cat"}, Cat, "$: the annotation says Cat, got a dict"),
        ([Cat(), 3], list[Cat], "$[1]: the annotation says Cat, got an int"),
        (3, Cat | Dog, "$: an int is not JSON-serializable"),
    ],
)
def test_other_values_are_refused_with_their_place(value: Any, annotation: Any, message: str) -> None:
    with pytest.raises(UnserialisableResult) as caught:
        codec_for(annotation)[0](value)
    assert str(caught.value).startswith(message)
    assert "abc" not in str(caught.value)


def test_a_field_may_have_any_type_if_it_holds_plain_values() -> None:
    write, read = codec_for(Loose)
    for what in ({"a": [1, None]}, (1, 2), {1, 2}, dt.date(2026, 1, 1)):
        assert read(write(Loose(what=what))) == Loose(what=what)


def test_a_model_of_an_earlier_definition_is_named() -> None:
    def define() -> type:
        class Local(pydantic.BaseModel):
            a: int = 1

        return Local

    with pytest.raises(UnserialisableResult, match="the annotation names another definition of Local"):
        codec_for(define())[0](define()())


@pytest.fixture
def registered() -> Any:
    before = dict(REGISTRY.types)
    yield register_type
    for name in REGISTRY.types.keys() - before.keys():
        del REGISTRY.names[REGISTRY.types.pop(name)]


def test_registered_models_may_be_anywhere(registered: Callable[[Any], Any]) -> None:
    for cls in (Cat, Cats, Private, Doubling):
        assert registered(cls) is cls
    value = [Cat(), {"a": Cats([Cat()])}, private(), (Doubling(n=3),)]
    text = encode(value, exact=True)
    assert state_of(decode(text)) == state_of(value)
    assert json.loads(plain_json(text))[:2] == [{"kind": "cat", "lives": 9}, {"a": [{"kind": "cat", "lives": 9}]}]
    write, read = codec_for(Doubling | int)
    assert read(write(Doubling(n=3))) == Doubling.model_construct(n=6, raw=b"\xff", path=pathlib.Path("x"), pets=[])


def test_only_classes_are_registered() -> None:
    for wrong in (Cat(), pydantic.HttpUrl, list[Cat]):
        with pytest.raises(InvalidArgument, match="a dataclass, an Enum class or a model of pydantic"):
            register_type(wrong)  # type: ignore[type-var]


def test_a_model_that_is_not_registered_here_is_named(registered: Callable[[Any], Any]) -> None:
    registered(Cat)
    text = encode(Cat(), exact=True).replace(".Cat", ".Lynx")
    with pytest.raises(UnserialisableResult, match="Lynx' is not registered in this process"):
        decode(text)


def test_a_process_without_pydantic_reads_dicts(registered: Callable[[Any], Any]) -> None:
    for cls in (Cat, Private, Doubling):
        registered(cls)
    texts = [encode([Cat(), private()], exact=True), codec_for(Doubling)[0](Doubling(n=1, raw=b"a"))]
    code = (
        "import sys\n"
        "from agent_runtime_core._core.codec.json import decode\n"
        "for line in sys.stdin: print(ascii(decode(line)))\n"
        "assert 'pydantic' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], input="\n".join(texts), capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "[{'kind': 'cat', 'lives': 9}, {'a': 1}]",
        "{'n': 2, 'raw': b'a', 'path': 'x', 'pets': []}",
    ]
