"""Compare large sizes with small ones, and say which bars hold: `python -m benchmarks.growth [names]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from . import growth_queue, growth_runs, growth_steps, growth_streams, report

ROWS: report.Rows = {
    "replay": growth_streams.replay,
    "state": growth_steps.state,
    "many": growth_runs.many,
    "conversation": growth_streams.conversation,
    "long": growth_steps.long,
    "history": growth_steps.history,
    "sdk890": growth_steps.sdk890,
    "large": growth_steps.large,
    "listing": growth_queue.listing,
    "tails": growth_runs.tails,
    "queued": growth_queue.queued,
}


def main(arguments: Sequence[str] | None = None) -> int:
    return report.main("benchmarks.growth", __doc__, ROWS, arguments)


if __name__ == "__main__":
    sys.exit(main())
