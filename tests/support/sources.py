"""What the modules of the library consist of, for the tests of their text: each module is parsed once."""

from __future__ import annotations

import ast
import functools
import gc

import pytest

#: Of a test of their text: all of them run in one process of pytest-xdist.
TOGETHER = pytest.mark.xdist_group("sources")


@functools.cache
def parsed(text: str) -> ast.Module:
    """The tree of a module, which no test changes."""
    tree = ast.parse(text)
    gc.freeze()  # each collection would look through all trees
    return tree


@functools.cache
def nodes(text: str) -> list[ast.AST]:
    """All nodes of that tree."""
    return [*ast.walk(parsed(text))]
