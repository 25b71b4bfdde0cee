"""Imports in the library run strictly downward, name module files, and stand at the top of their module."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = "agent_runtime_core"
SOURCE = Path(__file__).parents[1] / "src" / ROOT

# Bottom first. A unit (a module, a package with all in it, or the part `_core.codec`) imports only units listed before
# its own row; two units of one row are siblings and never import each other.
LAYERS: list[set[str]] = [
    {"errors", "_contexts"},
    {"_core"},
    {"_clock"},
    {"_refusals", "_load"},
    {"_core"},
    {"_tags"},
    {"_json", "_ids", "portal"},
    {"_core.codec"},
    {"status", "retry", "event_types", "config", "schema", "limits", "run_tasks"},
    {"tools", "policy"},
    {"interfaces"},
    {"_engines"},
    {"journal"},
    {"queue", "events", "state", "persistence", "llm", "tracing", "notes"},
    {"ledger", "outcome", "failures"},
    {"pen", "place"},
    {"uses"},
    {"spent", "callees"},
    {"recorded"},
    {"book"},
    {"effects"},
    {"attempts", "mailbox"},
    {"waits", "imperative"},
    {"steps", "context"},
    {"outputs", "keyed"},
    {"loop", "planning"},
    {"agents"},
    {"registry", "backends"},
    {"runner"},
    {"orchestrator", "turns"},
    {"testing", "cli"},
    {"__main__"},
    {"__init__"},
]
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
MAY_IMPORT_PACKAGES = {"__init__", "testing", "backends", "agents"}
LOADER = "_load"


def _unit(module: str) -> str:
    return "_core.codec" if f"{module}.".startswith("_core.codec.") else module.split(".")[0]


def violations(files: dict[str, str]) -> list[str]:
    """What breaks the rules in `files`, source text by path relative to the package."""
    modules = {path.removesuffix(".py").replace("/", ".") for path in files}
    return [
        f"{path}:{line}: {problem}"
        for path, text in sorted(files.items())
        for line, problem in _of(path, text, modules)
    ]


def _of(path: str, text: str, modules: set[str]) -> list[tuple[int, str]]:
    module = path.removesuffix(".py").replace("/", ".")
    unit = _unit(module)
    if unit not in LEVEL:
        return [(1, f"{unit!r} stands in no layer")]
    tree = ast.parse(text)
    is_package = module.split(".")[-1] == "__init__"
    at_top, for_types = _top_level(tree)
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if node not in at_top and unit != LOADER:
            found.append((node.lineno, "import inside a function"))
        if is_package and node in for_types:
            continue
        for target in _targets(node, module, modules):
            problem = _problem(target, module, unit, modules)
            if problem and not (problem.startswith("third party") and node in for_types):
                found.append((node.lineno, problem))
    return found


def _top_level(tree: ast.Module) -> tuple[set[ast.stmt], set[ast.stmt]]:
    """The statements run by the import, and among them those only a type checker reads."""
    at_top: set[ast.stmt] = set()
    for_types: set[ast.stmt] = set()

    def visit(body: list[ast.stmt], typing_only: bool) -> None:
        for node in body:
            at_top.add(node)
            if typing_only:
                for_types.add(node)
            if isinstance(node, ast.If):
                visit(node.body, typing_only or "TYPE_CHECKING" in ast.unparse(node.test))
                visit(node.orelse, typing_only)
            elif isinstance(node, ast.Try):
                visit([*node.body, *node.orelse, *node.finalbody], typing_only)
                for handler in node.handlers:
                    visit(handler.body, typing_only)

    visit(tree.body, False)
    return at_top, for_types


def _targets(node: ast.Import | ast.ImportFrom, module: str, modules: set[str]) -> list[str]:
    """Absolute dotted names of what is imported; a package itself ends in `.__init__`."""
    if isinstance(node, ast.Import):
        return [_file(alias.name, modules) for alias in node.names]
    base = (node.module or "").split(".") if node.module else []
    if node.level:
        here = [ROOT, *module.split(".")]
        base = here[: len(here) - node.level] + base
    dotted = ".".join(base)
    inside = f"{dotted}.".removeprefix(f"{ROOT}.").removesuffix(".")
    if node.module and dotted != ROOT and f"{inside}.__init__" in modules:
        # `from ._engines import sqlite` names a module file, `from .queue import RunQueue` a package.
        return [
            f"{dotted}.{alias.name}" if f"{inside}.{alias.name}" in modules else f"{dotted}.__init__"
            for alias in node.names
        ]
    return [f"{dotted}.__init__" if not node.module or dotted == ROOT else dotted]


def _file(dotted: str, modules: set[str]) -> str:
    inside = f"{dotted}.".removeprefix(f"{ROOT}.").removesuffix(".")
    return f"{dotted}.__init__" if dotted == ROOT or f"{inside}.__init__" in modules else dotted


def _problem(target: str, module: str, unit: str, modules: set[str]) -> str | None:
    top, _, inside = target.partition(".")
    if top != ROOT:
        known = top in sys.stdlib_module_names
        return None if known else f"third party package {top!r} is not loaded through {LOADER}"
    package, _, last = inside.rpartition(".")
    if last == "__init__":
        if f"{module}.".startswith(f"{package}." if package else ""):
            return f"imports its own package {(package or ROOT)!r}: name the module file"
        if unit not in MAY_IMPORT_PACKAGES:
            return f"imports the package {package!r}: name the module file"
    other = _unit(inside)
    if other not in LEVEL:
        return f"imports {inside!r}, which stands in no layer"
    if other != unit and LEVEL[other] >= LEVEL[unit]:
        return f"{unit!r} imports {other!r}, which is {'beside' if LEVEL[other] == LEVEL[unit] else 'above'} it"
    return None


def test_the_library_keeps_its_layers() -> None:
    files = {path.relative_to(SOURCE).as_posix(): path.read_text("utf-8") for path in SOURCE.rglob("*.py")}
    assert "__init__.py" in files
    assert violations(files) == []


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("errors.py", "from ._clock import Clock", "'errors' imports '_clock', which is above it"),
        ("status.py", "from .retry import Backoff", "'status' imports 'retry', which is beside it"),
        ("tools/tool.py", "from ..interfaces import RunContext", "'tools' imports 'interfaces', which is above it"),
        ("queue/base.py", "from ..events.base import EventBus", "'queue' imports 'events', which is beside it"),
        ("queue/base.py", "import agent_runtime_core.events.base", "'queue' imports 'events', which is beside it"),
        (
            "_engines/sqlite.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..queue.base import RunQueue",
            "'_engines' imports 'queue', which is above it",
        ),
        ("queue/base.py", "def f():\n    from .memory import InMemoryQueue", "import inside a function"),
        ("queue/base.py", "class C:\n    import json", "import inside a function"),
        ("ledger.py", "from agent_runtime_core import Step", "imports its own package 'agent_runtime_core'"),
        ("ledger.py", "from . import errors", "imports its own package 'agent_runtime_core'"),
        ("ledger.py", "import agent_runtime_core", "imports its own package 'agent_runtime_core'"),
        ("queue/base.py", "from .. import errors", "imports its own package 'agent_runtime_core'"),
        ("queue/memory.py", "from . import RunQueue", "imports its own package 'queue'"),
        ("queue/memory.py", "from ..queue import RunQueue", "imports its own package 'queue'"),
        ("ledger.py", "from .queue import RunQueue", "imports the package 'queue'"),
        ("ledger.py", "from .nowhere import x", "which stands in no layer"),
        ("stray.py", "", "'stray' stands in no layer"),
        ("queue/redis.py", "import redis.asyncio", "third party package 'redis' is not loaded through _load"),
        ("testing/context.py", "from . import MockRunContext", "imports its own package 'testing'"),
    ],
)
def test_a_violation_is_found(path: str, text: str, problem: str) -> None:
    files = {"__init__.py": "", "queue/__init__.py": "", "testing/__init__.py": "", path: text}
    assert len(found := violations(files)) == 1, found
    assert problem in found[0]
    assert found[0].startswith(f"{path}:")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("ledger.py", "from .queue.base import RunQueue\nfrom ._engines import memory\nimport json"),
        ("__init__.py", "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    from .queue import RunQueue"),
        ("testing/context.py", "from ..queue import RunQueue"),
        ("queue/memory.py", "from .base import RunQueue"),
        ("queue/redis.py", "TYPE_CHECKING = False\nif TYPE_CHECKING:\n    import redis.asyncio"),
        ("_load.py", "def f():\n    import importlib"),
        ("_json.py", "try:\n    from .errors import X\nexcept ImportError:\n    import json"),
    ],
)
def test_what_is_allowed_passes(path: str, text: str) -> None:
    files = {
        "__init__.py": "",
        "queue/__init__.py": "",
        "_engines/__init__.py": "",
        "_engines/memory.py": "",
        path: text,
    }
    assert violations(files) == []
