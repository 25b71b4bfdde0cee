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

REPOSITORY = Path(__file__).parents[2]
MEASUREMENTS = 3  # at most: a thread that was late adds calls, and never removes one

#: Each count today, with 2 % for what differs between runs. A gain lowers its number. A number is raised only with a
#: line in docs/decisions.
CEILINGS: dict[str, float] = {}


def measured() -> dict[str, float]:
    # In a process of its own: other tests leave threads, and coverage counts calls itself.
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
        assert found.keys() == CEILINGS.keys()
        least = {name: min(count, least.get(name, count)) for name, count in found.items()}
        over = {
            name: f"{count:.2f}, at most {CEILINGS[name]}" for name, count in least.items() if count > CEILINGS[name]
        }
        if not over:
            return
    assert not over, "do less there, or raise the number in CEILINGS and say why in docs/decisions"
