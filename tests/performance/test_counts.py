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

#: Each count today, with 2 % for what differs between runs; more for thread changes and script calls, which depend on
#: what else the machine does. A gain lowers its number. A number is raised only with a
#: line in docs/decisions.
CEILINGS: dict[str, float] = {
    "run without steps, memory": 298,
    "submit, memory": 62,
    "drained run at 16, memory": 280,
    "modules from submit to user code, memory": 38,
    "step, async function, memory": 72,
    "step, lambda, memory": 117,
    "step, closure, memory": 72,
    "step of a list, memory": 45,
    "emit, memory": 32,
    "agent turn, memory": 364,
    "step with a trace sink, memory": 118,
    "thread changes of an agent turn, memory": 0,
    "run without steps, SQLite": 430,
    "submit, SQLite": 120,
    "drained run at 16, SQLite": 327,
    "modules from submit to user code, SQLite": 46,
    "step, async function, SQLite": 124,
    "step, lambda, SQLite": 173,
    "step, closure, SQLite": 124,
    "step of a list, SQLite": 102,
    "emit, SQLite": 87,
    "agent turn, SQLite": 510,
    "step with a trace sink, SQLite": 183,
    "thread changes of an agent turn, SQLite": 4,
    "run without steps, Redis": 517,
    "submit, Redis": 172,
    "drained run at 16, Redis": 333,
    "modules from submit to user code, Redis": 45,
    "agent turn, Redis": 640,
    "thread changes of an agent turn, Redis": 6,
    SYSTEM_CALLS: 60,
    "SQL statements of a run": 14.3,
    "transactions of a run": 2.05,
    "log pages of a run": 12.5,
    "tracked objects of a waiting run": 147,
    "Redis commands of a run": 50,
    "script calls of an agent turn": 2.3,
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
