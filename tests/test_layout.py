"""The formatter decides the layout. Only a list that it would make much longer keeps a layout by hand."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ruff")

REPOSITORY = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "benchmarks", "examples", "scripts")
SAVED = 3  # lines at least
SKIP = re.compile(r" *# fmt: skip$", re.MULTILINE)


def needless(by_hand: str, formatted: str) -> list[int]:
    """Return the lines of the comments that save less than `SAVED` lines.

    Args:
        by_hand: The text of a module.
        formatted: The same text without the comments, as the formatter changes it.
    """
    marked = [number for number, line in enumerate(by_hand.splitlines(), 1) if SKIP.search(line)]
    saved = dict.fromkeys(marked, 0)
    for old, new in zip(ast.walk(ast.parse(by_hand)), ast.walk(ast.parse(formatted)), strict=True):
        if isinstance(old, ast.stmt) and isinstance(new, ast.stmt):
            first, last = _head(old)
            (new_first, new_last), before = _head(new), last - first
            saved.update({line: new_last - new_first - before for line in marked if first <= line <= last})
    return [line for line, lines in saved.items() if lines < SAVED]


def _head(node: ast.stmt) -> tuple[int, int]:
    """Return the first and last lines of a statement, up to the first statement in it."""
    body: list[ast.stmt] | None = getattr(node, "body", None)
    return _start(node), _start(body[0]) - 1 if body else node.end_lineno or node.lineno


def _start(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(each.lineno for each in decorators)])


def test_a_layout_by_hand_saves_lines() -> None:
    files = {
        path.relative_to(REPOSITORY): text
        for place in FOLDERS
        for path in (REPOSITORY / place).rglob("*.py")
        if SKIP.search(text := path.read_text("utf-8"))
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(SKIP.sub("", text), "utf-8")
        shutil.copy(REPOSITORY / "pyproject.toml", folder)
        subprocess.run([sys.executable, "-m", "ruff", "format", "-q", "--no-cache", "."], cwd=folder, check=True)
        formatted = {path: (folder / path).read_text("utf-8") for path in files}
    found = [f"{path}:{line}" for path, text in files.items() for line in needless(text, formatted[path])]
    assert found == [], "remove `# fmt: skip` there, and format the file"


def test_a_needless_comment_is_found() -> None:
    by_hand = "if x:\n    y = [\n        1, 2, 3, 4, 5,\n    ]  # fmt: skip\n"
    assert needless(by_hand, "if x:\n    y = [\n        1, 2, 3, 4, 5\n    ]\n") == [4]
    in_lines = "".join(f"        {n},\n" for n in range(5))
    assert needless(by_hand, f"if x:\n    y = [\n{in_lines}    ]\n") == []
