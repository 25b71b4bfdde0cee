"""Typed answers of a model: the schema that it gets, and the conversion of its text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from .._core.codec.json import MAX_PARSED, encode, loads_strict
from .._core.json_schema import misfit, require_references
from ..errors import InvalidArgument, UnserialisableResult
from .annotations import schema_of, typed
from .names import INVALID_PART

__all__ = ["after_thoughts", "json_texts", "prose_of"]

_MOST: Final = 1000  # values in one text
_DEEPEST: Final = 200  # levels; a value nested more deeply is refused anyway
_THOUGHTS: Final = "(?:think|thinking|thought|thoughts|reasoning|reflection)"
# The templates of other models: <seed:think>, [THINK] and <|channel|>; the answer follows the channel "final".
_CLOSING: Final = (
    rf"</(?:\w{{1,20}}:)?{_THOUGHTS}>|\[/think\]|\u25c1/think\u25b7|<channel\|>|"
    r"<\|channel\|>final\b[^<]{0,50}<\|message\|>"
)
_OPENING: Final = rf"<(?:\w{{1,20}}:)?{_THOUGHTS}(?:\s[^<>\n]{{0,100}})?>|\[think\]|\u25c1think\u25b7"
#: A tag, a code fence, or the start of a JSON object or array. Prose in brackets, such as [see below], is no start.
_START: Final = re.compile(
    rf"({_CLOSING})|({_OPENING})|"
    rf"(?:^|(?<=\n))[ \t]*(```+|~~~+)|(\{{)(?=\s*(?:[\"'}}]|//|/\*|\w+\s*:))|(\[)(?=\s*[\[\]{{\"\-0-9tfnNI])",
    re.IGNORECASE,
)
# Possessive, so that an unterminated string takes linear time.
_STRING: Final = r'"(?:[^"\\\x00-\x1f]++|\\.)*+"'
_WHOLE_STRING: Final = re.compile(_STRING)
_TOKEN: Final = re.compile(
    rf"[ \t\r\n]*+(?:({_STRING})|(-?[0-9][0-9.eE+\-]*+|true\b|false\b|null\b|NaN\b|-?Infinity\b)|([\[\]{{}},:]))"
)
_OPEN_STRING: Final = re.compile(r'[ \t\r\n]*+"(?:[^"\\\x00-\x1f]++|\\.)*+')
#: What ends a value that is no JSON: its closing bracket, or a tag or a code fence outside of it.
_BROKEN: Final = re.compile(
    rf"{_STRING}|({_CLOSING}|{_OPENING})|([\[{{])|([\]}}])|(?:\n[ \t]*(?:```|~~~))", re.IGNORECASE
)
_FENCE: Final = re.compile(r"[ \t]*(```+|~~~+)[ \t]*([\w+-]*)[ \t]*")
_CLOSERS: Final = {"{": "}", "[": "]"}


def json_texts(text: str) -> tuple[list[str], list[str]]:
    """Return the parts of an answer that may be its JSON value, likeliest first, and then the parts of its thoughts.

    The first are the whole text, each JSON object, array and code block outside of <think> tags, and the text after the
    thoughts. A part of a larger object or array is never returned, whether that is complete or not.
    """
    whole = text.strip()
    fenced = _without_fence(whole)
    if _WHOLE_STRING.fullmatch(fenced):
        return [fenced, *_encoded_twice(fenced)], []
    answers: list[str] = []
    thoughts: list[str] = []
    inside = False
    after = 0  # where the last thought ends
    for kind, start, end in _parts(text):
        if kind == "open":
            inside = True
        elif kind == "close":
            # The opening tag may be missing, because some chat templates put it into the prompt.
            if not inside:
                thoughts, answers = thoughts + answers, []
            inside, after = False, end
        else:
            (thoughts if inside else answers).append(text[start:end].strip())
    rest = [] if inside or not after else [_without_fence(text[after:].strip())]
    found = list(dict.fromkeys([fenced, *filter(None, [*answers, *rest])]))
    return found, list(dict.fromkeys(filter(None, thoughts)))


def after_thoughts(text: str) -> str:
    """Return the text after the last of its thoughts; empty if the last thought is not closed."""
    inside, after = False, 0
    for kind, _, end in _parts(text):
        if kind != "value":
            inside, after = kind == "open", end
    return "" if inside else text[after:].strip()


def prose_of(text: str) -> str:
    """Return the text after the thoughts if it is no JSON and no code block, and otherwise an empty text."""
    prose = after_thoughts(text)
    return "" if prose[:1] in ("{", "[", '"', "<", "`", "~") else prose


def _encoded_twice(string: str) -> list[str]:
    """Return the object or array that a JSON string contains, if any."""
    try:
        inner = json.loads(string).strip()
    except ValueError:
        return []
    return [inner] if inner[:1] in ("{", "[") else []


def _without_fence(text: str) -> str:
    """Return the text without a code fence around all of it."""
    fence = _FENCE.match(text)
    if fence is None or not text.endswith(fence[1]) or len(text) < fence.end() + len(fence[1]):
        return text
    start = fence.end() if "\n" in text[fence.end() : fence.end() + 2] or fence[2].lower() == "json" else fence.end(1)
    return text[start : -len(fence[1])].strip()


def _parts(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the tags and the possible values of a text, each as its kind, its start and its end."""
    return islice(_all_parts(text), _MOST)


def _all_parts(text: str) -> Iterator[tuple[str, int, int]]:
    position = 0
    while (start := _START.search(text, position)) is not None:
        position = start.end()
        if start[1] or start[2]:
            yield "close" if start[1] else "open", start.start(), position
        elif start[3]:
            # The content of a code block may be a value of any type.
            line = text.find("\n", position)
            end = -1 if line < 0 else text.find(start[3], line)
            if end >= 0 and text[line:end].strip()[:1] not in ("{", "[", ""):
                yield "value", line, end
                position = end + len(start[3])
        else:
            position, complete = _end_of(text, start.start())
            if complete:
                yield "value", start.start(), position


def _end_of(text: str, start: int) -> tuple[int, bool]:
    """Return where the object or array at `start` ends, and whether it may be JSON."""
    closers: list[str] = []
    position, may_be_value = start, True
    while (token := _TOKEN.match(text, position)) is not None:
        mark = token[3]
        if mark is None or mark in "{[":
            if not may_be_value:
                break
            may_be_value = mark is not None
            if mark is not None:
                closers.append(_CLOSERS[mark])
                if len(closers) > _DEEPEST:
                    return len(text), False
        elif mark in ",:":
            may_be_value = True
        elif closers.pop() != mark:
            return _end_of_broken(text, token.end(), len(closers)), False
        else:
            may_be_value = False
            if not closers:
                return token.end(), True
        position = token.end()
    return _end_of_broken(text, position, len(closers)), False


def _end_of_broken(text: str, position: int, depth: int) -> int:
    """Return where a value ends that is no JSON from `position` on, inside `depth` brackets."""
    if depth == 0:
        return position
    opened = _OPEN_STRING.match(text, position)
    if opened is not None and text[opened.end() : opened.end() + 1] != '"':
        position = opened.end()  # a string without an end: the brackets in it count for nothing
    for found in _BROKEN.finditer(text, position):
        if found[1]:
            return found.start()
        if found[2]:
            depth += 1
        elif found[3]:
            depth -= 1
            if depth <= 0:
                return found.end()
        elif not found[0].startswith('"'):
            return found.start()
    return len(text)


#: The property that contains an answer whose schema does not describe an object.
RESULT: Final = "result"
_NOT_AT_THE_ROOT: Final = frozenset({"anyOf", "oneOf", "allOf", "enum", "const", "not", "$ref"})
#: A reference into a schema, except into its definitions, which stay at the root.
_ELSEWHERE: Final = re.compile(r"#$|#/(?!(\$defs|definitions)/)")
_DEFINITIONS: Final = ("$defs", "definitions", "$schema")


class Output:
    """The type of an answer: a dataclass, a TypedDict, any type with a JSON form, or a JSON Schema.

    If it is not an object, the model gets the schema of an object with the value in its property `result`, because
    providers accept no other schemas. Answers with and without that object are valid. The model client changes what
    else its provider does not accept.
    """

    def __init__(self, wanted: Any) -> None:
        self._type: Any = None if isinstance(wanted, Mapping) else wanted
        self._value_schema: dict[str, Any] = (
            dict(wanted) if isinstance(wanted, Mapping) else schema_of(wanted, "the output type")
        )
        require_references(self._value_schema, "output_type")
        self.schema: dict[str, Any]
        self.schema, self._wrapped = _as_object(self._value_schema)
        # Providers accept only such names of schemas.
        title = self._value_schema.get("title") or getattr(wanted, "__name__", "answer")
        name = INVALID_PART.sub("_", str(title))[:64]
        self.response_format: dict[str, Any] = {
            "type": "json_schema",
            "json_schema": {"name": name or "answer", "schema": self.schema},
        }

    def problem(self, text: str) -> str | None:
        """Return why the text does not contain a value of the requested type, or None."""
        return self._find(text)[0]

    def values(self, text: str) -> tuple[Any, Any]:
        """Return the typed value and the plain JSON of a valid text."""
        plain = self._find(text)[1]
        return self._converted(plain), plain

    def repair(self, problem: str) -> str:
        """Return the message that asks the model to correct an invalid answer."""
        end = "" if problem.endswith(("?", ".")) else "."
        return (
            f"Your answer cannot be used: {problem}{end} Answer again with nothing but JSON that fits this schema: "
            f"{json.dumps(self.schema)}"
        )

    def _find(self, text: str) -> tuple[str | None, Any]:
        """Return None and the first JSON value in the text with the right type; else what is wrong with the longest."""
        if len(text) > MAX_PARSED:
            return f"it must have at most {MAX_PARSED:,} characters, got {len(text):,}", None
        problems: list[tuple[int, str]] = []
        for texts in json_texts(text):
            values = _parsed(texts, problems)
            if self._wrapped:
                # First, because prose may contain values of many types, such as [1], but no such object.
                for size, value in values:
                    if isinstance(value, dict) and value.keys() == {RESULT}:
                        problem = self._problem_of(value[RESULT], f"$.{RESULT}")
                        if problem is None:
                            return None, value[RESULT]
                        problems.append((size + 1, problem))
            for size, value in values:
                problem = self._problem_of(value, "$")
                if problem is None:
                    return None, value
                problems.append((size, problem))
        # Models that ignore the schema answer with the bare word or text.
        prose = prose_of(text) if self._value_schema.get("type") == "string" else ""
        if prose and self._problem_of(prose, "$") is None:
            return None, prose
        return max(problems, key=lambda each: each[0])[1], None

    def _problem_of(self, found: Any, path: str) -> str | None:
        """Return why a JSON value does not have the requested type, or None."""
        mismatch = misfit(found, self._value_schema, path)
        if mismatch is not None:
            return mismatch
        try:
            self._converted(found)
        except (InvalidArgument, UnserialisableResult, TypeError, ValueError) as error:
            return str(error)
        try:
            encode([[found]])  # nested as in the result of a run
        except UnserialisableResult as error:
            return f"{error.path.replace('$[0][0]', path, 1)} is {error.reason}"
        return None

    def _converted(self, found: Any) -> Any:
        return found if self._type is None else typed(found, self._type)


def _parsed(texts: Sequence[str], problems: list[tuple[int, str]]) -> list[tuple[int, Any]]:
    """Return the value and the length of each text that is JSON; add the problem of the others."""
    values = []
    for text in texts:
        try:
            values.append((len(text), loads_strict(text)))
        except (ValueError, RecursionError) as error:
            problems.append((-1, f"invalid JSON: {error}"))
    return values


def _as_object(schema: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the schema of an object, and whether that is a new object with the value in its property `result`."""
    if schema.get("type") == "object" and _NOT_AT_THE_ROOT.isdisjoint(schema):
        return dict(schema), False
    inner = {name: each for name, each in schema.items() if name not in _DEFINITIONS}
    outer = {name: _moved(schema[name]) for name in _DEFINITIONS if name in schema}
    wrapped = {
        "type": "object",
        "properties": {RESULT: _moved(inner)},
        "required": [RESULT],
        "additionalProperties": False,
    }
    return wrapped | outer, True


def _moved(tree: Any) -> Any:
    """Return part of a schema with references to its former root changed to the new place."""
    if isinstance(tree, (list, tuple)):
        return [_moved(each) for each in tree]
    if not isinstance(tree, Mapping):
        return tree
    made = {name: _moved(each) for name, each in tree.items()}
    target = made.get("$ref")
    if isinstance(target, str) and _ELSEWHERE.match(target):
        made["$ref"] = f"#/properties/{RESULT}{target[1:]}"
    return made
