"""The bare import brings in next to nothing and costs next to no time."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys

import pytest

ALLOWED_MILLISECONDS = 15.0


def _python(code: str) -> str:
    # Measuring coverage in the child would be most of what is measured.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def _milliseconds(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _python(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000


def test_the_bare_import_brings_in_only_importlib() -> None:
    loaded = _python(
        "import sys; before = set(sys.modules); import agent_runtime_core;"
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    ).split()
    assert "agent_runtime_core" in loaded
    foreign = {name for name in loaded if name.partition(".")[0] not in {"importlib", "warnings", "_warnings"}}
    assert foreign == {"agent_runtime_core", "__future__"}


@pytest.mark.alone
def test_the_bare_import_costs_less_than_fifteen_milliseconds() -> None:
    _milliseconds("import agent_runtime_core")  # writes the bytecode
    extra = [_milliseconds("import agent_runtime_core") - _milliseconds("pass") for _ in range(9)]
    assert statistics.median(extra) < ALLOWED_MILLISECONDS, extra


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
