"""Each sentence of the specifications in README.md has tests, whose markers name it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]

Named = tuple[str, str, str]  # a document, a sentence of it, and the test


def listed() -> Iterator[Named]:
    """Yield what the tables of README.md have."""
    document = ""
    for line in (TESTS / "acceptance" / "README.md").read_text("utf-8").splitlines():
        if line.startswith("## "):
            document = line[3:6]
        elif line.startswith("| ") and document and line != "| Sentence | Tests |":
            sentence, _, tests = line[2:-2].rpartition(" | ")
            yield from ((document, sentence, test.strip("`")) for test in tests.split("<br>"))


def marked() -> Iterator[Named]:
    """Yield what the markers of the tests name."""
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text("utf-8")
        if "mark.sentence(" not in text or path.name == "test_sentences.py":
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for call in node.decorator_list:
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.sentence":
                        document, sentence = map(ast.literal_eval, call.args)
                        yield document, sentence, f"{path.relative_to(TESTS)}::{node.name}"


def test_the_tables_list_the_sentences_that_the_tests_name() -> None:
    found, named = list(listed()), list(marked())
    assert sorted(found) == sorted(named)
    assert len(set(found)) == len(found)
    assert {document for document, *_ in found} == {"001", "003", "004"}
