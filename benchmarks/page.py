"""Write docs/benchmarks.md from figures of both commands: `python -m benchmarks.page run.json growth.json`."""
# ruff: noqa: E501 - a sentence of the page is one line

from __future__ import annotations

import datetime as dt
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .report import number

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"

INTRODUCTION = """\
# Benchmarks

This page has the last run of all benchmarks.
Each result is compared with a baseline measured in the same run, and the target applies to the ratio of the two.
Ratios are comparable across machines, microseconds are not.

<!-- docs: skip-run it takes minutes, and needs a checkout -->
```bash
python -m benchmarks.run
python -m benchmarks.growth
```

Each command takes about five to ten minutes; [benchmarks/README.md](../benchmarks/README.md) describes each row and its baseline.
`python -m benchmarks.peers` compares queues and event buses with those of other libraries.
Earlier runs are in `benchmarks/history`.

"""

TABLE = """\
## {title}

{about}
{missed} of {targets} targets were missed.

| Row | Result | Baseline | Ratio | Target | |
|---|---|---|---|---|---|
"""

TITLES = "Last run", "Where work grows"

READING = """
## Read the table

- A row without a target shows a cost that you may want to know.
- A target `≤` applies to times and sizes, a target `≥` to rates. If the row has a baseline, the target applies to the ratio.
- FULL and NORMAL are the settings of [`durability`](reference/configuration.md). FULL flushes the disk in each commit, so its figures depend most on the disk.
- All rows include the events of the runs.
"""


def page(reports: Sequence[tuple[dict[str, Any], str]]) -> str:
    """Return the page.

    Args:
        reports: The JSON of `python -m benchmarks.run --json` and of `python -m benchmarks.growth --json`, each with
            the day of the run.
    """
    tables = (_table(title, report, day) for title, (report, day) in zip(TITLES, reports, strict=True))
    return INTRODUCTION + "\n".join(tables) + READING


def _table(title: str, report: dict[str, Any], day: str) -> str:
    machine, rows = report["machine"], report["rows"]
    targets = [each for each in rows if "most" in each or "least" in each]
    about = (
        f"Measured on {day} with Python {machine['python']}, SQLite {machine['sqlite']} and {machine['cores']} cores "
        "of a virtual machine."
    )
    missed = sum(not each["held"] for each in targets)
    head = TABLE.format(title=title, about=about, missed=missed, targets=len(targets))
    return head + "".join(f"{line}\n" for line in _lines(rows))


def _lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    for each in rows:
        floor = number(each["floor"]) if "floor" in each else ""
        ratio = f"{each['figure']:.2f}" if "floor" in each else ""
        target = (
            f"≤ {number(each['most'])}" if "most" in each else f"≥ {number(each['least'])}" if "least" in each else ""
        )
        mark = "" if each["held"] else "missed"
        name = each["row"].replace("|", "\\|")
        yield f"| {name} | {number(each['ours'])} {each['unit']} | {floor} | {ratio} | {target} | {mark} |"


def main(arguments: list[str]) -> int:
    """Write the page from the files of figures, whose dates are the days of the runs."""
    PAGE.write_text(page([_read(Path(each)) for each in arguments]), "utf-8")
    return 0


def _read(file: Path) -> tuple[dict[str, Any], str]:
    day = dt.datetime.fromtimestamp(file.stat().st_mtime, dt.UTC).date().isoformat()
    return json.loads(file.read_text("utf-8")), day


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
