#!/usr/bin/env python3
"""Run what repeats a kind of test that CI runs once: scripts/slow/run.py [LEG]...

Run it before you resolve an issue. Needs `pip install -e '.[dev]'`, and the network for the legs that build an
environment. Each leg writes its output to build/slow; at the end there is a table. Exits with 1 if a leg failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "build" / "slow"
PYTEST = [sys.executable, "-m", "pytest", "-q", "--durations=10"]
PARALLEL = ["-n", "auto", "--maxprocesses", "4", "--dist", "loadgroup", "--no-loadscope-reorder"]


def slow() -> list[str]:
    """The long forms, and the cases that repeat a kind of test; one at a time, as each uses all cores."""
    return [*PYTEST, "-m", "slow"]


def backends() -> list[str]:
    """The cases that are repeated on each backend."""
    return [*PYTEST, "-m", "all_backends and not slow", *PARALLEL]


def python_3_13() -> list[str]:
    """The tests without extras on the newest Python."""
    return [".ci/run", "core", "3.13"]


def lowest_versions() -> list[str]:
    """The tests of what uses an extra, with the lowest versions of its packages."""
    return [sys.executable, "scripts/slow/lowest_versions.py"]


def crewai() -> list[str]:
    """The example with a real CrewAI."""
    return [sys.executable, "scripts/slow/crewai.py"]


def langgraph_conformance() -> list[str]:
    """LangGraph's conformance suite for checkpointers on all stores."""
    return [sys.executable, "scripts/slow/langgraph_conformance.py"]


def mcp_conformance() -> list[str]:
    """The conformance suite of MCP against the server and the client. Needs npm."""
    return [sys.executable, "scripts/slow/mcp_conformance.py"]


def coverage() -> list[str]:
    """The whole check, and what the tests execute."""
    return ["scripts/check", "--coverage"]


LEGS: dict[str, Callable[[], list[str]]] = {
    "slow": slow,
    "all-backends": backends,
    "python-3.13": python_3_13,
    "lowest-versions": lowest_versions,
    "crewai": crewai,
    "langgraph-conformance": langgraph_conformance,
    "mcp-conformance": mcp_conformance,
    "coverage": coverage,
}


def run(name: str, environment: dict[str, str]) -> tuple[bool, float, str]:
    """Run a leg; return whether it passed, its seconds, and the last line that it printed."""
    began, log = time.monotonic(), LOGS / f"{name}.log"
    print(f"{name}: {LEGS[name].__doc__} Log: {log.relative_to(ROOT)}", flush=True)
    try:
        command = LEGS[name]()
    except subprocess.CalledProcessError as error:
        return False, time.monotonic() - began, str(error)
    with log.open("wb") as output:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    lines = log.read_text("utf-8", "replace").split("\n")
    last = next((each.strip() for each in reversed(lines) if each.strip()), "no output")
    return done.returncode == 0, time.monotonic() - began, last


def main() -> int:
    names = sys.argv[1:] or [*LEGS]
    if unknown := set(names) - LEGS.keys():
        sys.exit(f"unknown leg {min(unknown)!r}. Legs: {', '.join(LEGS)}")
    LOGS.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHON": sys.executable}
    # Each process that a test starts would compile the library again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    rows = {name: run(name, environment) for name in names}
    print(f"\n{'leg':21} {'result':7} {'minutes':>7}  last line")
    for name, (passed, seconds, last) in rows.items():
        print(f"{name:21} {'passed' if passed else 'FAILED':7} {seconds / 60:7.1f}  {last}")
    return 0 if all(passed for passed, _, _ in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
