#!/usr/bin/env python3
"""Execute examples/crewai_crew.py with a real CrewAI: scripts/slow/crewai.py [FOLDER]

Builds an environment in FOLDER (build/crewai) with this library and CrewAI, which takes about 1 GB and some minutes; a
later call uses it again. Then the example must print what examples/README.md shows, repeat no recorded call after
kill -9, and stop at its limit of model calls. Needs the network only to install. Prints one line for each check.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "crewai_crew.py"
REQUIREMENT = "crewai>=1.15,<2"


def built(folder: Path) -> Path:
    """Return the Python of an environment with this library and CrewAI."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", ROOT, REQUIREMENT], check=True)
    return python


def shown() -> str:
    """Return the output of the example in examples/README.md."""
    section = (ROOT / "examples" / "README.md").read_text("utf-8").partition("$ python examples/crewai_crew.py\n")[2]
    return section.partition("```")[0]


def started(python: Path, folder: Path, *args: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "HOME": str(folder), "PYTHONUNBUFFERED": "1"}
    command: list[str | Path] = [python, EXAMPLE, "--db", folder / f"{args[0]}.db", *args[1:]]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def check(what: str, ok: bool, found: str) -> None:
    print(f"{'ok' if ok else 'FAILED'}: {what}", flush=True)
    if not ok:
        sys.exit(found)


def main() -> None:
    python = built(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "crewai").resolve())
    version = "import importlib.metadata as m; print(m.version('crewai'))"
    print("CrewAI", subprocess.run([python, "-c", version], capture_output=True, text=True, check=True).stdout.strip())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out, err = started(python, folder, "whole").communicate()
        check("the output is that of examples/README.md", _lines(out) == _lines(shown()), out + err)

        process = started(python, folder, "killed", "--slow", "1")
        assert process.stdout is not None
        first: list[str] = []
        with contextlib.closing(process.stdout):
            for line in process.stdout:
                first.append(line)
                if line.startswith("model call with 1"):  # one answer and one price are recorded
                    process.send_signal(signal.SIGKILL)
                    break
        process.wait()
        out, err = started(python, folder, "killed").communicate()
        expected = _lines(shown())[_lines(shown()).index("model call with 1 results") :]
        check("after kill -9 no recorded call is made again", _lines(out) == expected, "".join(first) + out + err)

        limited = started(python, folder, "limited", "--max-turns", "1")
        out, err = limited.communicate()
        stopped = limited.returncode != 0 and "model call with 1" not in out and "LimitExceeded" in err + out
        check("the limit of model calls stops the crew", stopped, out + err)


def _lines(text: str) -> list[str]:
    """Return the lines of the example, without what CrewAI prints around them."""
    known = ("model call with", "  price(", "Together", "(")
    return [line for line in text.splitlines() if line.startswith(known)]


if __name__ == "__main__":
    main()
