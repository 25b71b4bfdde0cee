"""Retired names stay out of the library and its documentation, and idioms out of its docstrings, messages and pages.

`retired_words.txt` holds the words, each with what to write instead.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import TOGETHER, nodes

pytestmark = TOGETHER

REPOSITORY = Path(__file__).parents[1]
SOURCE = REPOSITORY / "src" / "agent_runtime_core"
#: Idioms in 1,000 words of docstrings and of pages, and comments with an idiom in 100, at most.
DOCSTRING_LIMIT, PAGE_LIMIT, COMMENT_LIMIT = 0.5, 0.5, 1.5
#: What a comment is in the other languages of the library.
COMMENTS = {".lua": r"--[^\n]*", ".js": r"(?<!:)//[^\n]*|/\*.*?\*/"}
_NO_PROSE = ("# noqa", "# type:", "# fmt", "#!")


def sections() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for line in Path(__file__).with_name("retired_words.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            found[line.strip("[]")] = current = {}
        elif line and not line.startswith("#"):
            word, _, replacement = line.partition(" = ")
            current[word] = replacement
    return found


WORDS = sections()
IDIOM = re.compile(rf"\b({'|'.join(map(re.escape, WORDS['idioms']))})\b", re.IGNORECASE)
PHRASE = re.compile(rf"\b({'|'.join(map(re.escape, {**WORDS['idioms'], **WORDS['phrases']}))})\b", re.IGNORECASE)
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
#: Functions whose arguments are messages to users, in addition to exceptions.
MESSAGE_CALLS = frozenset(
    {"must", "unknown", "warn", "report", "print_line", "debug", "info", "warning", "error", "exception"}
)


def docstrings(text: str) -> Iterator[str]:
    for node in nodes(text):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def comments(text: str, suffix: str = ".py") -> Iterator[str]:
    if suffix != ".py":
        yield from re.findall(COMMENTS[suffix], text, re.DOTALL)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(_NO_PROSE):
            yield token.string


def prose(page: str) -> str:
    """Return the text of a page without code."""
    return re.sub(r"`[^`]*`", "", re.sub(r"^ *(`{3,}).*?^ *\1 *$", "", page, flags=re.MULTILINE | re.DOTALL))


def messages(text: str) -> Iterator[str]:
    """Return the strings of errors, warnings, log records and command-line help."""
    for node in nodes(text):
        if isinstance(node, ast.Raise) and node.exc is not None:
            message: ast.AST = node.exc
        elif isinstance(node, ast.Call) and _called(node) in MESSAGE_CALLS:
            message = node
        elif isinstance(node, ast.keyword) and node.arg in {"help", "epilog", "description"}:
            message = node.value
        else:
            continue
        strings = (each.value for each in ast.walk(message) if isinstance(each, ast.Constant))
        # A single word is a value, not a message.
        yield " ".join(each for each in strings if isinstance(each, str) and " " in each.strip())


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def modules() -> Iterator[tuple[str, str]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), path.read_text("utf-8")


def test_docstrings_have_few_idioms() -> None:
    words, found = 0, Counter[str]()
    for path, text in modules():
        for each in docstrings(text):
            words += len(each.split())
            found[path] += len(IDIOM.findall(each))
    assert 1000 * found.total() / words <= DOCSTRING_LIMIT, found.most_common(20)


@pytest.mark.parametrize("suffix", [".py", *COMMENTS])
def test_comments_have_few_idioms(suffix: str) -> None:
    total, found = 0, Counter[str]()
    for path in sorted(SOURCE.rglob(f"*{suffix}")):
        if "vendor" in path.parts:  # the page's libraries, as others wrote them
            continue
        for each in comments(path.read_text("utf-8"), suffix):
            total += 1
            found[path.name] += IDIOM.search(each) is not None
    assert 100 * found.total() / total <= COMMENT_LIMIT, found.most_common(20)


def test_pages_have_few_idioms() -> None:
    words, found = 0, Counter[str]()
    for path in PAGES:
        text = prose(path.read_text("utf-8"))
        words += len(text.split())
        found[path.relative_to(REPOSITORY).as_posix()] += len(PHRASE.findall(text))
    assert 1000 * found.total() / words <= PAGE_LIMIT, found.most_common(30)


def test_messages_have_no_idiom() -> None:
    found = [
        (path, sorted(set(PHRASE.findall(each))), each)
        for path, text in modules()
        for each in messages(text)
        if PHRASE.search(each)
    ]
    assert found == []


def test_no_module_has_a_retired_name() -> None:
    names = {path.removesuffix(".py") for path, _ in modules()}
    assert names & set(WORDS["modules"]) == set()


def test_the_library_uses_no_retired_name() -> None:
    found = []
    for path, text in modules():
        for node in nodes(text):
            name = next((getattr(node, field) for field in ("id", "attr", "name", "arg") if hasattr(node, field)), None)
            if name in WORDS["names"]:
                found.append(f"{path}: {name} is {WORDS['names'][name]}")
    assert found == []


def test_the_documentation_uses_no_retired_name() -> None:
    names = re.compile(rf"`({'|'.join(map(re.escape, WORDS['names']))})[`.(]")
    found = [
        f"{path.relative_to(REPOSITORY)}: {name} is {WORDS['names'][name]}"
        for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
        for name in names.findall(path.read_text("utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(("text", "count"), [("it is told", 1), ("Nobody knows; meanwhile", 2), ("a behindness", 0)])
def test_an_idiom_is_found(text: str, count: int) -> None:
    assert len(IDIOM.findall(text)) == count
