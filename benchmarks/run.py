"""Run benchmark rows beside their floors and say which bars they keep: `python -m benchmarks.run [names]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from . import (
    chain,
    conversation,
    counts,
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
    redis_jobs,
    report,
    resume,
    vectors,
)

ROWS: report.Rows = {
    "chain": chain.rows,
    "jobs": jobs.rows,
    "memory": memory.rows,
    "loop": loop.rows,
    "resume": resume.rows,
    "payload": payload.rows,
    "queue": queue.rows,
    "redis": redis_jobs.rows,
    "idle": idle.rows,
    "imports": imports.rows,
    "overheads": overheads.rows,
    "events": events.rows,
    "documents": documents.rows,
    "conversation": conversation.rows,
    "vectors": vectors.rows,
    "http": http_server.rows,
    "inspector": inspector.rows,
    "counts": counts.rows,
    "drain": queue.drain,
    "claims": queue.claims,
}
PARTS = {"drain", "claims"}  # of another row, there to be asked for alone


def main(arguments: Sequence[str] | None = None) -> int:
    return report.main("benchmarks.run", __doc__, ROWS, arguments, parts=PARTS)


if __name__ == "__main__":
    sys.exit(main())
