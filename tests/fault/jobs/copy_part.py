"""`agent-runtime copy OLD NEW`, which stands still after that many commits to the new store."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from agent_runtime_core._engines.base import Guard, Op
from agent_runtime_core.cli.main import main
from agent_runtime_core.runner import moving

COMMIT = moving._Side.commit
left = int(sys.argv[1])


async def commit(side: moving._Side, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
    global left
    left -= 1
    if left == 0:
        sys.stdout.write("stands still\n")
        sys.stdout.flush()
    if left <= 0:
        await asyncio.Event().wait()
    return await COMMIT(side, guard, ops)


moving._Side.commit = commit  # type: ignore[method-assign,assignment]
sys.exit(main(["copy", *sys.argv[2:]]))
