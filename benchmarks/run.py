"""Run benchmark rows beside their floors and say which bars they keep: `python -m benchmarks.run [names]`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from agent_runtime_core.config import reset_config

from . import (
    chain,
    conversation,
    documents,
    events,
    http_server,
    idle,
    imports,
    inspector,
    jobs,
    loop,
    memory,
    overheads,
    payload,
    queue,
    resume,
    vectors,
)
from .floor import Line, Size

ROWS: dict[str, Callable[[Size], Iterator[Line]]] = {
    "chain": chain.rows,
    "jobs": jobs.rows,
    "memory": memory.rows,
    "loop": loop.rows,
    "resume": resume.rows,
    "payload": payload.rows,
    "queue": queue.rows,
    "idle": idle.rows,
    "imports": imports.rows,
    "overheads": overheads.rows,
    "events": events.rows,
    "documents": documents.rows,
    "conversation": conversation.rows,
    "vectors": vectors.rows,
    "http": http_server.rows,
    "inspector": inspector.rows,
    "drain": queue.drain,
    "claims": queue.claims,
}
PARTS = {"drain", "claims"}  # of another row, there to be asked for alone


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def told(line: Line, slack: float) -> str:
    """One line of the report."""
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


def measure(names: Sequence[str], size: Size, show: Callable[[Line], None]) -> list[Line]:
    lines: list[Line] = []
    for name in names:
        try:
            for line in ROWS[name](size):
                lines.append(line)
                show(line)
        finally:
            reset_config()
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="row", help=f"of {', '.join(ROWS)}; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar is missed")
    parser.add_argument("--slack", type=float, default=1.0, metavar="FACTOR", help="let --check widen every bar")
    parser.add_argument("--tiny", action="store_true", help="only show that the rows work; figures mean nothing")
    parser.add_argument("--dir", type=Path, help="where database files go: a disk to be measured, not a RAM disk")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in ROWS]:
        parser.error(f"no row {', '.join(unknown)}: there are {', '.join(ROWS)}")
    names = options.names or [name for name in ROWS if name not in PARTS]
    about = machine()
    print(*(f"{name} {value}" for name, value in about.items()), sep=", ")
    print(f"{'row':<64} {'ours':>16} {'floor':>9} {'ratio':>8} {'bar':>9}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as folder:
        size = Size(Path(folder), tiny=options.tiny)
        since = time.perf_counter()
        lines = measure(names, size, lambda line: print(told(line, options.slack), flush=True))
    missed = [line for line in lines if not line.holds(options.slack)]
    print(f"{len(lines)} rows in {time.perf_counter() - since:.0f} s, {len(missed)} bars missed")
    if options.json is not None:
        report = {"machine": about, "slack": options.slack, "rows": [line.as_dict() for line in lines]}
        options.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
