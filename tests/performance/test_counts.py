"""What the library does for a run, counted: no count may grow.

Times are noisy, and do not show small losses. Counts repeat within 2 % on any machine with the same versions.
`python -m benchmarks.counts` prints them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.counts import SYSTEM_CALLS

REPOSITORY = Path(__file__).parents[2]
MEASUREMENTS = 3  # at most: a thread that was late adds calls, and never removes one

#: Each count today, with 2 % for what differs between runs; more for thread changes, script calls and the pages of a
#: drained run, which depend on what else the machine does. A gain lowers its number. A number is raised only with a
#: line in docs/decisions.
CEILINGS: dict[str, float] = {
    "run without steps, memory": 303,
    "submit, memory": 61.3,
    "drained run at 16, memory": 286,
    "step, async function, memory": 67.4,
    "step, lambda, memory": 113,
    "step, closure, memory": 67.4,
    "step of a list, memory": 41.1,
    "emit, memory": 29.7,
    "agent turn, memory": 242,
    "step with a trace sink, memory": 117,
    "thread changes of an agent turn, memory": 0.2,
    "run without steps, SQLite": 335,
    "submit, SQLite": 82,
    "drained run at 16, SQLite": 320,
    "step, async function, SQLite": 85.5,
    "step, lambda, SQLite": 132,
    "step, closure, SQLite": 85.6,
    "step of a list, SQLite": 65.9,
    "emit, SQLite": 50.4,
    "agent turn, SQLite": 264,
    "step with a trace sink, SQLite": 140,
    "thread changes of an agent turn, SQLite": 1,
    "run without steps, Redis": 475,
    "submit, Redis": 140,
    "drained run at 16, Redis": 325,
    "agent turn, Redis": 460,
    "thread changes of an agent turn, Redis": 1,
    "modules from submit to user code, memory": 41,
    "modules from submit to user code, SQLite": 48,
    "modules from submit to user code, Redis": 46,
    SYSTEM_CALLS: 40,
    "SQL statements of a run": 9.3,
    "transactions of a run": 2.1,
    "log pages of a run": 4.6,
    "log pages of a drained run": 1.25,
    "tracked objects of a waiting run": 146,
    "Redis commands of a run": 44.2,
    "script calls of an agent turn": 1.6,
}


def measured() -> dict[str, float]:
    # In a separate process: other tests leave threads, and coverage counts calls itself.
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.counts"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the ceilings are of Python 3.11")
def test_no_count_grows() -> None:
    least: dict[str, float] = {}
    for _ in range(MEASUREMENTS):
        found = measured()
        assert found.keys() | {SYSTEM_CALLS} == CEILINGS.keys()
        least = {name: min(count, least.get(name, count)) for name, count in found.items()}
        over = {
            name: f"{count:.2f}, at most {CEILINGS[name]}" for name, count in least.items() if count > CEILINGS[name]
        }
        if not over:
            return
    assert not over, "do less there, or raise the number in CEILINGS and say why in docs/decisions"
