"""The command line of the benchmarks: measure rows, print each beside its floor, and write the figures to a file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from agent_runtime_core.config import reset_config

from .floor import Line, Size

#: The figures of the last complete run.
FIGURES = Path(__file__).with_name("figures.json")
Rows = Mapping[str, Callable[[Size], Iterator[Line]]]


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def formatted(line: Line, slack: float) -> str:
    """Return one line of the report."""
    ours = f"{number(line.ours)} {line.unit}"
    floor = f"{number(line.floor)}" if line.floor is not None else ""
    ratio = f"{line.figure:.2f} x" if line.floor is not None else ""
    bar = ""
    if line.most is not None:
        bar = f"<= {number(line.most)}"
    elif line.least is not None:
        bar = f">= {number(line.least)}"
    mark = "" if not bar else "ok" if line.holds() else "ok with slack" if line.holds(slack) else "MISSED"
    notes = [line.note] if line.note else []
    if line.beside is not None:
        notes.append(f"beside {number(line.beside)}")
    return f"{line.row:<64} {ours:>16} {floor:>9} {ratio:>8} {bar:>9} {mark:<13} {'; '.join(notes)}".rstrip()


def machine() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "system": platform.platform(),
        "cores": str(os.cpu_count()),
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()) if hasattr(os, "getloadavg") else "",
    }


def measure(rows: Rows, names: Sequence[str], size: Size, show: Callable[[Line], None]) -> list[Line]:
    """Measure the rows with these names, and pass each figure to `show` as soon as it is there."""
    lines: list[Line] = []
    for name in names:
        try:
            for line in rows[name](size):
                lines.append(line)
                show(line)
        finally:
            reset_config()
    return lines


def main(
    module: str, about: str | None, rows: Rows, arguments: Sequence[str] | None, *, parts: Collection[str] = ()
) -> int:
    """Measure the rows that the command line names, and return the exit code.

    Args:
        module: The module that was started with `python -m`.
        about: What the command does.
        rows: All rows by name.
        arguments: Those of the command line. None: those of the process.
        parts: Rows that are part of another row, so that only their names select them.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("names", nargs="*", metavar="row", help=f"of {', '.join(rows)}; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--slack", type=float, default=1.0, metavar="FACTOR", help="let --check widen every bar")
    parser.add_argument("--tiny", action="store_true", help="only show that the rows work; figures mean nothing")
    parser.add_argument("--dir", type=Path, help="where database files go: a disk to be measured, not a RAM disk")
    parser.add_argument("--record", action="store_true", help=f"write all figures to {FIGURES.name}, for the pages")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in rows]:
        parser.error(f"no row {', '.join(unknown)}: there are {', '.join(rows)}")
    if options.record and (options.names or options.tiny):
        parser.error("--record needs all rows in full")
    names = options.names or [name for name in rows if name not in parts]
    here = machine()
    print(*(f"{name} {value}" for name, value in here.items()), sep=", ")
    print(f"{'row':<64} {'ours':>16} {'floor':>9} {'ratio':>8} {'bar':>9}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as folder:
        size = Size(Path(folder), tiny=options.tiny)
        since = time.perf_counter()
        lines = measure(rows, names, size, lambda line: print(formatted(line, options.slack), flush=True))
    missed = [line for line in lines if not line.holds(options.slack)]
    print(f"{len(lines)} rows in {time.perf_counter() - since:.0f} s, {len(missed)} bars missed")
    if options.json is not None:
        report = {"machine": here, "slack": options.slack, "rows": [line.as_dict() for line in lines]}
        options.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.record:
        record(FIGURES, module.rpartition(".")[2], here, lines)
    return 1 if options.check and missed else 0


def record(path: Path, part: str, here: Mapping[str, str], lines: Sequence[Line]) -> None:
    """Replace the figures of one command in the data file, from which `scripts/figures.py` writes the pages."""
    figures = json.loads(path.read_text("utf-8")) if path.exists() else {}
    measured = time.strftime("%Y-%m-%d")
    figures[part] = {"measured": measured, "machine": dict(here), "rows": [line.as_dict() for line in lines]}
    path.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n", "utf-8")
