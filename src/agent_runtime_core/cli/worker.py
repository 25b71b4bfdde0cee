"""`agent-runtime worker`: one process that works off runs until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import platform
import sys
from argparse import Namespace
from dataclasses import replace
from typing import Any

from ..config import get_config
from ..errors import InvalidArgument
from ..runner.runner import AgentRunner
from ..runner.settings import RunnerConfig
from .app_loader import agents_of
from .output import LogFormatter, print_line
from .store import in_memory, named, open_store

log: logging.Logger = logging.getLogger("agent_runtime_core")


async def work(args: Namespace) -> int:
    """Say that it is ready, work until SIGTERM or SIGINT, let running work finish; a second signal skips the wait."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=args.log_level.upper(), handlers=[handler])
    async with _runner(args) as runner:
        await runner.queue.next_due()  # a store that cannot be read is told of before it says that it is ready
        # What is imported by now stays. A full pass of the garbage collector through it holds the loop: where SDKs are
        # among it, for a tenth of a second and more.
        gc.collect()
        gc.freeze()
        working = asyncio.create_task(runner.run_loop(args.poll, concurrency=args.concurrency))
        await asyncio.sleep(0)  # it handles signals from here on
        if not working.done():
            keys = runner.registry.keys()
            print_line(
                f"worker {runner.config.worker_id} is ready: {named(runner, args.url)}, "
                f"{'agent' if len(keys) == 1 else 'agents'} {', '.join(keys)}, concurrency {args.concurrency}"
            )
            sys.stdout.flush()
        await working
    log.info("worker %s has stopped", runner.config.worker_id)
    return 0


def _runner(args: Namespace) -> AgentRunner:
    found = agents_of(args.target, args.agent_path)
    changes: dict[str, Any] = {} if args.grace is None else {"grace_seconds": args.grace}
    if not isinstance(found, AgentRunner):
        config = RunnerConfig.of(get_config())
        name = f"{platform.node() or 'worker'}-{os.getpid()}"
        return open_store(args.url, found, replace(config, worker_id=name, **changes))
    if args.url is not None:
        raise InvalidArgument(f"{args.target} is a runner, which has a store of its own: leave out --url")
    if in_memory(found):
        raise InvalidArgument(
            f"{args.target} is a runner that keeps its runs in memory, where no other process can submit any: "
            "make it with AgentRunner.open('agents.db')"
        )
    found.config = replace(found.config, **changes)
    return found
