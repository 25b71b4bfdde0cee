"""Write the measured figures into the pages of docs/.

    python scripts/figures.py            write the pages
    python scripts/figures.py --check    exit with 1 if a page is not up to date

`benchmarks/figures.json` contains the figures. `python -m benchmarks.run --record` and
`python -m benchmarks.growth --record` write it. A page includes them between two comments:
`<!-- figures: NAME -->` and `<!-- figures end -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "benchmarks" / "figures.json"

#: A part of a page that this script writes.
PART = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- figures end -->)", re.DOTALL)
#: Parts of pages with figures: `{name of a row}` is its result, and `{name of a row:floor}` its baseline.
_TEXTS = {
    "sizing": """\
Figures for orientation, measured on {measured} on a virtual machine with {cores} cores ([benchmarks](benchmarks.md)):

| | SQLite, `durability="full"` |
|---|---|
| Runs that do nothing, one worker, concurrency 1 / 16 | {drain FULL, concurrency 1} / {drain FULL, concurrency 16} |
| The same, 4 workers | {drain FULL by 4 processes of 16 against one} |
| A step in a list of 100 | {chain FULL of 100} |
| Disk for 1,000 small steps | {store after 1000 steps} |
| CPU of an idle worker | {idle worker} |""",
    "one_file": """\
These figures are from [the last run of the benchmarks](../benchmarks.md#last-run), \
on a virtual machine with {cores} cores and `durability="full"`:

| Load | One file |
|---|---|
| Runs that do nothing, one worker, concurrency 16 | {drain FULL, concurrency 16} |
| The same, 4 worker processes | {drain FULL by 4 processes of 16 against one} |
| Steps of 200 concurrent jobs | {200 jobs of 10 steps FULL} |
| From `submit` to the start in another process, idle | {idle enqueue to start in another process, p50} |
| A claim with 100,000 queued runs | {claim with 100000 queued, against 100} |
| Disk for 1,000 small steps | {store after 1000 steps} |""",
    "redis": """\
A run needs about {Redis, the server's processor time for a run, concurrency 16} of the server's processor time.
An idle start takes {Redis, idle enqueue to start in another process, p50} instead of \
{idle enqueue to start in another process, p50}.""",
    "codec": """\
With `AESGCMCodec`, a durable step with a small result takes \
{a durable step with a result of 10 characters, encrypted} instead of \
{a durable step with a result of 10 characters, encrypted:floor}.
With a result of 5,000 characters it takes {a durable step with a result of 5000 characters, encrypted} \
instead of {a durable step with a result of 5000 characters, encrypted:floor}.""",
}


def number(value: float) -> str:
    """Return a figure with three digits, or all digits from 1,000 on."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(part: Mapping[str, Any]) -> str:
    """Return the figures of one command as a table, with the machine above it."""
    rows, targets = part["rows"], [each for each in part["rows"] if "most" in each or "least" in each]
    missed = sum(not each["held"] for each in targets)
    machine = part["machine"]
    lines = [
        f"Measured on {part['measured']} with Python {machine['python']}, SQLite {machine['sqlite']} and "
        f"{machine['cores']} cores of a virtual machine.",
        f"{missed} of {len(targets)} targets were missed.",
        "",
        "| Row | Result | Baseline | Ratio | Target | |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        baseline, ratio = (number(row["floor"]), f"{row['figure']:.2f}") if "floor" in row else ("", "")
        target = f"≤ {number(row['most'])}" if "most" in row else f"≥ {number(row['least'])}" if "least" in row else ""
        remark = "; ".join([*(["missed"] if target and not row["held"] else []), *filter(None, [row.get("note")])])
        result = f"{number(row['ours'])} {row['unit']}"
        lines.append(f"| {row['row']} | {result} | {baseline} | {ratio} | {target} | {remark} |")
    return "\n".join(lines)


def text(template: str, part: Mapping[str, Any]) -> str:
    """Return a part of a page with the results of the rows that it names."""
    known = {"measured": part["measured"], "cores": part["machine"]["cores"]}
    for row in part["rows"]:
        known[row["row"]] = f"{number(row['ours'])} {row['unit'].removesuffix('/step')}"
        if "floor" in row:
            known[f"{row['row']}:floor"] = f"{number(row['floor'])} {row['unit']}"
    return re.sub(r"{([^}]+)}", lambda found: known[found[1]], template)


def rendered(page: str, figures: Mapping[str, Any]) -> str:
    """Return a page with the figures in it."""
    parts = {"run": table(figures["run"]), "growth": table(figures["growth"])}
    parts |= {name: text(template, figures["run"]) for name, template in _TEXTS.items()}
    return PART.sub(lambda found: f"{found[1]}\n{parts[found[2]]}\n\n{found[3]}", page)


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or check them; return the exit code."""
    figures = json.loads(SOURCE.read_text("utf-8"))
    texts = {page: page.read_text("utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))}
    old = [page for page, text in texts.items() if rendered(text, figures) != text]
    if arguments == ["--check"]:
        for page in old:
            print(f"{page.relative_to(ROOT)} is not up to date. Run: python scripts/figures.py", file=sys.stderr)
        return 1 if old else 0
    if arguments:
        print("usage: python scripts/figures.py [--check]", file=sys.stderr)
        return 2
    for page in old:
        page.write_text(rendered(texts[page], figures), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
