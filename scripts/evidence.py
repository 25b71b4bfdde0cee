"""Write docs/evidence.md: which tests prove which promise.

    python scripts/evidence.py            write the page
    python scripts/evidence.py --check    exit with 1 if the page is not up to date

The promises are the rows of the tables "Promise | Limit" in docs/guarantees.md. `tests/evidence.toml` has the tests of
each, and the results of the long test runs. docs/evidence/suites has a file for each suite of other projects, which
scripts/slow writes.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "tests" / "evidence.toml"
PAGE = ROOT / "docs" / "evidence.md"
SUITES = ROOT / "docs" / "evidence" / "suites"
#: The pages with promises, in the order of the written page.
PROMISES = ("guarantees.md",)

_HEADER = "| Promise | Limit |"
_INTRO = """\
# Evidence

At least one test proves each promise of [Guarantees](guarantees.md).
`scripts/evidence.py` writes this page from `tests/evidence.toml`, and a test checks that every named test exists.

To run a test, pass it to pytest:

<!-- docs: skip-run the tests are in the repository -->
```bash
pytest tests/fault/test_kill.py
```

A `-k` names a case of the conformance tests.
These run over memory, SQLite, Redis, mixtures of them, and third-party backends.
A case of the runner runs on SQLite by default, and `pytest -m all_backends` repeats many cases on the other backends.
`python -m benchmarks.run overheads` measures the time of trace sinks.
"""
_LONG = """\
## Long test runs

Some tests exist in a long form, for `-m slow`: for example 300 kills instead of 9, or 8 processes instead of 4.
The numbers below come from one run of each command, in 0.6.0.
With `-o log_cli=true --log-cli-level=INFO`, a test prints its numbers.
Times depend on the machine, and chance decides how often a kill hits a step in flight.
The tests assert everything that must hold.
Other long forms count nothing as their result:

- 10,000 values for the codec
- 2,000 runs against their limits
- a kill at every commit of every arrangement of the stores

`pytest -m slow` runs all of them.
"""
_SUITES = """\
## Suites of other projects

These suites run with parts of this library in the place of the parts that they test.
`scripts/slow/run.py` runs them, and the table shows the last run of each.

| Suite | Version | Date | Passed | Failed | Skipped |
|---|---|---|---|---|---|
"""


def promises(page: str) -> dict[str, list[str]]:
    """Return the promises of a page by the title of their section."""
    found: dict[str, list[str]] = {}
    section, in_table = "", False
    for line in page.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        in_table = line == _HEADER or (in_table and line.startswith("|"))
        if in_table and line != _HEADER and not line.startswith("|---"):
            found.setdefault(section, []).append(line.removeprefix("| ").partition(" | ")[0])
    return found


def rendered(source: Mapping[str, Any], pages: Mapping[str, str], suites: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the page.

    Args:
        source: The parsed `tests/evidence.toml`.
        pages: The text of the pages with promises, by file name.
        suites: The results of the suites of other projects.

    Raises:
        ValueError: A promise has no tests, or tests have no promise.
    """
    tests: dict[str, Sequence[str]] = source["promises"]
    known = {name: promises(text) for name, text in pages.items()}
    stated = [each for sections in known.values() for rows in sections.values() for each in rows]
    problems = [f"no test in tests/evidence.toml: {each}" for each in stated if not tests.get(each)]
    problems += [f"no row in {' or '.join(pages)}: {each}" for each in tests if each not in stated]
    problems += [f"two rows: {each}" for each in sorted(set(stated)) if stated.count(each) > 1]
    if problems:
        raise ValueError("\n".join(problems))
    parts = [_INTRO]
    for name, sections in known.items():
        title = pages[name].partition("\n")[0].removeprefix("# ")
        parts.append(f"## {title}\n")
        for section, rows in sections.items():
            entries = (f"- {each}\n" + "".join(f"    - `{test}`\n" for test in tests[each]) for each in rows)
            parts.append(f"### {section}\n\n" + "".join(entries))
    parts.append(_LONG)
    parts += [_long_run(each) for each in source["long"]]
    if suites:
        columns = ("suite", "version", "date", "passed", "failed", "skipped")
        lines = (f"| {' | '.join(str(each[column]) for column in columns)} |\n" for each in suites)
        parts.append(_SUITES + "".join(lines))
        parts += [_differences(each) for each in suites if each["differences"]]
    return "\n".join(parts)


def _long_run(run: Mapping[str, Any]) -> str:
    results = "".join(f"- {each}\n" for each in run["found"])
    return f"### {run['title']}\n\n`{run['command']}`\n\n{run['does']}\n\n{results}"


def _differences(suite: Mapping[str, Any]) -> str:
    return f"### What differs in {suite['suite']}\n\n" + "".join(f"- {each}\n" for each in suite["differences"])


def current() -> str:
    """Return the page as the files say it is now."""
    pages = {name: (ROOT / "docs" / name).read_text("utf-8") for name in PROMISES}
    suites = [json.loads(each.read_text("utf-8")) for each in sorted(SUITES.glob("*.json"))]
    return rendered(tomllib.loads(SOURCE.read_text("utf-8")), pages, suites)


def main(arguments: Sequence[str]) -> int:
    """Write the page, or check it; return the exit code."""
    page = current()
    if arguments == ["--check"]:
        if PAGE.exists() and PAGE.read_text("utf-8") == page:
            return 0
        print("docs/evidence.md is not up to date. Run: python scripts/evidence.py", file=sys.stderr)
        return 1
    if arguments:
        print("usage: python scripts/evidence.py [--check]", file=sys.stderr)
        return 2
    PAGE.write_text(page, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
