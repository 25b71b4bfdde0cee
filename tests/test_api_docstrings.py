"""The docstrings of public callables name each parameter, the result, the errors and the units; their examples run.

`pytest tests/test_api_docstrings.py` prints the callables that lack most if too few are complete.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

import pytest

from scripts import site_pages
from tests.support.sources import TOGETHER

pytestmark = TOGETHER

ROOT = site_pages.PACKAGE
#: Percent of the callables that are complete, at least: those of the root package, and the others. A number only rises.
COMPLETE_AT_ROOT, COMPLETE_ELSEWHERE = 95, 90
EXAMPLES = 15  # percent of the docstrings with an example, at least
_HEADING = re.compile(r"^(?P<name>Args|Attributes|Returns|Yields|Raises|Examples?):$", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(?P<names>[\w*, .]+?)(?: \([^)]*\))?:", re.MULTILINE)
#: Parameters that are an amount without a unit in their names, and the units of which the docstring must name one.
_AMOUNT = re.compile(r"(timeout|ttl|delay|interval|backoff_max|max_age)$")
_UNIT = re.compile(r"seconds|milliseconds|bytes|KiB|MiB|characters", re.IGNORECASE)
_NO_RESULT = {"None", "NoReturn", "Never", "Self", "<class 'inspect._empty'>"}
#: What a class raises to take part in the data model or in iteration.
_PROTOCOLS = {"AttributeError", "NotImplementedError", "StopAsyncIteration", "StopIteration"}


class Public(NamedTuple):
    """A public function, class or method, and what is wrong with its docstring."""

    name: str
    at_root: bool
    value: Any
    missing: list[str]

    @property
    def docstring(self) -> str:
        return inspect.cleandoc(self.value.__doc__ or "")


def sections(docstring: str) -> dict[str, str]:
    """Return the text of each section of a docstring in Google style."""
    found = [*_HEADING.finditer(docstring)]
    ends = [each.start() for each in found[1:]] + [len(docstring)]
    return {each["name"]: docstring[each.end() : end] for each, end in zip(found, ends, strict=False)}


def missing(value: Any, docstring: str) -> list[str]:
    """Return what the docstring of a function or class does not say."""
    if not docstring:
        return ["docstring"]
    parts = sections(docstring)
    entries = "".join(parts.get(each, "") for each in ("Args", "Attributes"))
    described = {name.strip(" *") for each in _ENTRY.finditer(entries) for name in each["names"].split(",")}
    if "**" in entries:  # it may name the options
        described |= set(re.findall(r"`(\w+)`", entries))
    found, signature = [], _signature(value)
    for name, parameter in {} if signature is None else signature.parameters.items():
        if name in {"self", "cls"} or name.startswith("_"):
            continue
        if name not in described:
            found.append(name)
        elif _AMOUNT.search(name) and "bool" not in str(parameter.annotation) and not _UNIT.search(docstring):
            found.append(f"unit of {name}")
    result = _NO_RESULT if signature is None or isinstance(value, type) else {str(signature.return_annotation)}
    # As Google's guide has it: a first sentence that begins with "Return" may be all.
    if not (result & _NO_RESULT or {"Returns", "Yields"} & parts.keys() or re.match("Return|Yield", docstring)):
        found.append("Returns")
    return found + [each for each in sorted(_raised(value)) if not re.search(rf"\b{each}\b", docstring)]


def _signature(value: Any) -> inspect.Signature | None:
    """Return the signature; None for a class whose base class describes the parameters."""
    own = not isinstance(value, type) or "__init__" in vars(value) or hasattr(value, "_fields")
    own = own and not getattr(value, "_is_protocol", False)
    return inspect.signature(value) if own else None


def _raised(value: Any) -> set[str]:
    """Return the errors that the body of a function raises itself."""
    bodies = [value]
    if isinstance(value, type):  # a protocol raises in the constructor that it gets from `typing`
        own = () if getattr(value, "_is_protocol", False) else vars(value)
        bodies = [vars(value)[each] for each in ("__init__", "__post_init__") if each in own]
    names = set()
    for each in bodies:
        try:
            pending: list[ast.AST] = [*ast.parse(textwrap.dedent(inspect.getsource(each))).body[0].body]  # type: ignore[attr-defined]
        except (OSError, TypeError):  # the `__init__` of a dataclass
            continue
        while pending:
            node = pending.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            pending += ast.iter_child_nodes(node)
            if isinstance(node, ast.Raise) and node.exc is not None:
                error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                name = getattr(error, "id", getattr(error, "attr", ""))
                names.add("InvalidArgument" if name in {"must", "unknown"} else name)
    return {each for each in names if each[:1].isupper()} - _PROTOCOLS


def _members(owner: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods that the library gives to a class; an override without a docstring is its base's."""
    internal = site_pages.internal_methods(owner)
    for base in owner.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith(ROOT) else ():
            function = getattr(value, "__func__", value)
            if not isinstance(function, FunctionType) or name.startswith("_") or function.__name__ != name:
                continue
            if name not in internal and (
                function.__doc__ or not any(getattr(vars(each).get(name), "__doc__", None) for each in owner.__mro__)
            ):
                yield f"{base.__name__}.{name}", function


@cache
def callables() -> list[Public]:
    found: dict[int, Public] = {}

    def add(name: str, module: str, value: Any) -> None:
        if id(value) not in found:
            found[id(value)] = Public(name, module == ROOT, value, [])
            found[id(value)].missing.extend(missing(value, found[id(value)].docstring))

    for module in (ROOT, *(f"{ROOT}.{each}" for each in site_pages.public_modules())):
        package = importlib.import_module(module)
        for name in site_pages.public_names(package):
            value = getattr(package, name)
            if isinstance(value, FunctionType):
                add(f"{module}.{name}", module, value)
            elif isinstance(value, type) and value.__module__.startswith(ROOT):
                if not issubclass(value, Enum):
                    add(f"{module}.{name}", module, value)
                for method, function in _members(value):
                    add(f"{module}.{method}", module, function)
    return [*found.values()]


@pytest.mark.parametrize(("at_root", "least"), [(True, COMPLETE_AT_ROOT), (False, COMPLETE_ELSEWHERE)])
def test_the_docstrings_of_public_callables_are_complete(at_root: bool, least: int) -> None:
    there = [each for each in callables() if each.at_root is at_root]
    worst = sorted((each for each in there if each.missing), key=lambda each: -len(each.missing))
    complete = 100 * (len(there) - len(worst)) / len(there)
    shown = "".join(f"\n  {each.name}: {', '.join(each.missing)}" for each in worst[:40])
    assert complete >= least, f"{complete:.1f} % of {len(there)} are complete. The worst lack:{shown}"


def test_docstrings_have_examples() -> None:
    there = [each for each in callables() if ">>>" in each.docstring or re.search("^ *```python", each.docstring, re.M)]
    percent = 100 * len(there) / len(callables())
    assert percent >= EXAMPLES, f"{percent:.1f} % of {len(callables())} docstrings have an example"


def _examples() -> Iterator[doctest.DocTest]:
    parser = doctest.DocTestParser()
    for module in (ROOT, *(f"{ROOT}.{each}" for each in site_pages.public_modules())):
        package = importlib.import_module(module)
        for name in site_pages.public_names(package):
            value = getattr(package, name)
            docstrings = {name: value.__doc__ or ""} if isinstance(value, type | FunctionType) else {}
            if isinstance(value, type):
                docstrings |= {each: function.__doc__ or "" for each, function in _members(value)}
            for each, text in docstrings.items():
                if ">>>" in text:
                    yield parser.get_doctest(text, {}, f"{module}.{each}", None, None)


def test_the_examples_of_docstrings_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    seen: set[str] = set()
    for each in _examples():
        if each.docstring not in seen:
            seen.add(each.docstring or "")
            runner.run(each, out=printed.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(printed)
    assert runner.tries > 300


def test_an_incomplete_docstring_is_found() -> None:
    def wait(count: int, wake: object, timeout: float) -> int:
        if not count:
            raise ValueError
        return 1

    assert missing(wait, "") == ["docstring"]
    incomplete = "Wait.\n\nArgs:\n    count: How often.\n    timeout: How long.\n"
    assert missing(wait, incomplete) == ["wake", "unit of timeout", "Returns", "ValueError"]
    complete = (
        "Return how often.\n\nArgs:\n    count, timeout: In seconds.\n    wake: X.\n\nRaises:\n    ValueError: 0.\n"
    )
    assert missing(wait, complete) == []
