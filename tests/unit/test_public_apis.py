"""Trace sinks use only public names of other packages."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.cases import for_each

TRACING = Path(__file__).parents[2] / "src/agent_runtime_core/tracing"


@for_each("path", sorted(TRACING.glob("*.py")), ids=lambda path: path.stem)
def test_private_attributes_are_only_read_from_self(path: Path) -> None:
    found = [
        f"{path.name}:{node.lineno} {ast.unparse(node)}"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_")
        if node.attr != "_replace" and not node.attr.startswith("__")
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]
    assert found == []
