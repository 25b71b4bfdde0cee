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
#: Wordings that a reader has to read twice, each with its pattern. The count of "has" includes the auxiliary.
_AFTER_PRONOUN = (
    "that|which|who|whose|with|without|is|was|are|has|had|does|did|can|cannot|must|may|will|in|on|for|from|to|before"
    "|if|when|at(?! a time)|by(?! one)|after(?! (?:another|the other))"
)
_PARTICIPLE = (
    r"(?:(?:not|never|already|just|since|only|all|both|yet|ever|no longer|also|then|been|had|\w+ly) )*"
    r"(?:\w+ed|been|begun|become|built|brought|caught|chosen|come|cut|done|drawn|fallen|forgotten|found|given|gone|got"
    r"|grown|had|heard|held|hidden|kept|known|left|lost|made|met|paid|put|read|run|said|seen|sent|set|shut|slept|spent"
    r"|split|stood|sunk|taken|thrown|told|understood|woken|won|(?:over|re)?written|broken|rebuilt)\b"
)
WORDINGS = {
    "a pronoun for a noun": (
        r"\b(?:(?:those|that) of|ones|(?:an?|the) (?!one\b)[\w-]+ one"
        r"|(?:this|that|another|which|each|every|any) one(?! of)"
        rf"|(?<!\bby )one(?=[.,;:)?]| \|| (?:{_AFTER_PRONOUN})\b))\b"
    ),
    '"has"': r"\bhas\b",
    '"has" and "have" as main verbs': rf"\b(?:has|have|had|having)\b(?! {_PARTICIPLE})",
    '"of its own"': r"\bof (?:its|their|his|your|one's|our) own\b",
    '"at once"': r"\bat once\b",
    '", also"': r", also\b",
}
#: How often each of them may be in 1,000 words, in the order of `WORDINGS`.
PAGE_CEILINGS = (0.5, 1, 1, 0.5, 0.5, 0.5)
DOCSTRING_CEILINGS = (0.4, 1.1, 2, 0.1, 0.1, 0.1)
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


def counted(wording: str, texts: Iterator[tuple[str, str]]) -> tuple[float, list[tuple[str, int]]]:
    """Return how often a wording is in 1,000 words, and where it is most often."""
    pattern = re.compile(WORDINGS[wording], re.IGNORECASE)
    words, found = 0, Counter[str]()
    for where, text in texts:
        words += len(text.split())
        found[where] += len(pattern.findall(text))
    return 1000 * found.total() / words, found.most_common(20)


@pytest.mark.parametrize(("wording", "ceiling"), list(zip(WORDINGS, PAGE_CEILINGS, strict=True)))
def test_pages_repeat_the_noun_and_name_the_verb(wording: str, ceiling: float) -> None:
    pages = (path for path in PAGES if "archive" not in path.parts)
    texts = ((path.relative_to(REPOSITORY).as_posix(), prose(path.read_text("utf-8"))) for path in pages)
    frequency, worst = counted(wording, texts)
    assert frequency <= ceiling, worst


@pytest.mark.parametrize(("wording", "ceiling"), list(zip(WORDINGS, DOCSTRING_CEILINGS, strict=True)))
def test_docstrings_repeat_the_noun_and_name_the_verb(wording: str, ceiling: float) -> None:
    frequency, worst = counted(wording, ((path, prose(each)) for path, text in modules() for each in docstrings(text)))
    assert frequency <= ceiling, worst


@pytest.mark.parametrize(
    ("wording", "text", "count"),
    [
        ("a pronoun for a noun", "a new one, the one that waits, those of the run", 3),
        ("a pronoun for a noun", "another one takes over\nthe old one\n| one |\nthat of its agent", 4),
        ("a pronoun for a noun", "one run, one of the runs, one by one, one at a time, one after another", 0),
        ('"has" and "have" as main verbs', "it has a name, they have no key, it had to wait", 3),
        (
            '"has" and "have" as main verbs',
            "it has ended, has not yet been read, had already written, have finally run",
            0,
        ),
    ],
)
def test_a_wording_is_found(wording: str, text: str, count: int) -> None:
    assert len(re.findall(WORDINGS[wording], text)) == count


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
