"""What importing the package imports."""

from __future__ import annotations

import subprocess
import sys

import pytest


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_bare_import_brings_in_only_importlib() -> None:
    loaded = _python(
        "import sys; before = set(sys.modules); import agent_runtime_core;"
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    ).split()
    assert "agent_runtime_core" in loaded
    foreign = {name for name in loaded if name.partition(".")[0] not in {"importlib", "warnings", "_warnings"}}
    assert foreign == {"agent_runtime_core", "__future__"}


def test_every_public_module_imports_without_any_third_party_package() -> None:
    foreign = _python(
        "import sys, agent_runtime_core as it\n"
        "before = {name.partition('.')[0] for name in sys.modules}\n"
        "for name in it.__all__: getattr(it, name)\n"
        "from agent_runtime_core import queue, events, state, steps, testing, tools\n"
        "after = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(after - before - set(sys.stdlib_module_names) - {'agent_runtime_core'}), sep='\\n')"
    ).split()
    # The standard library's record of its own build has a name of its own on each platform.
    assert [name for name in foreign if not name.startswith("_sysconfigdata")] == []


def test_results_of_steps_import_neither_pydantic_nor_jsonschema() -> None:
    loaded = _python(
        "import sys\n"
        "from dataclasses import dataclass\n"
        "from agent_runtime_core.steps import register_type\n"
        "from agent_runtime_core.tools import Tool\n"
        "@register_type\n"
        "@dataclass\n"
        "class A: x: int\n"
        "def f(a: A, n: int) -> A: return a\n"
        "assert Tool.from_function(f).parameters['properties']['a']['properties']\n"
        "print(*sys.modules, sep='\\n')"
    ).split()
    assert not {"pydantic", "jsonschema", "referencing"}.intersection(loaded)


def test_an_installed_pydantic_changes_nothing_about_the_bare_import() -> None:
    pytest.importorskip("pydantic")
    count = (
        "import sys; before = set(sys.modules); import agent_runtime_core; print(*sorted(set(sys.modules) - before))"
    )
    assert _python(f"import pydantic, importlib; {count}").split() == ["agent_runtime_core"]
    assert "pydantic" not in _python(count).split()
