"""`agent-runtime export`: write a run with all that is stored of it."""

from __future__ import annotations

import contextlib
from argparse import Namespace

from .._views.export import export as exported
from .output import json_line
from .store import existing_store, require_run


async def export(args: Namespace) -> int:
    async with existing_store(args) as runner:
        row = await require_run(runner, args.id)
        async with contextlib.aclosing(exported(runner, row)) as lines:
            async for each in lines:
                json_line(each, flush=False)
    return 0
