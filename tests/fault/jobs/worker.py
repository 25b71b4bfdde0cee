"""A worker process: worker.py '{"places": […], "concurrency": 1, "poll": 1.0, "ahead": 0, "config": {…}}'.

Says "ready" once its runner is open and works, and "stopped" when it was told to stop and has. With "once" it
claims one run and drives it; with "execute" it executes that one run of that agent.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tests.fault.jobs.agents import open_runner
from tests.fault.jobs.effects import say


async def main(how: dict[str, Any]) -> None:
    async with open_runner(how["places"], how.get("ahead", 0.0), **how.get("config", {})) as runner:
        if "execute" in how:
            say("ready")
            result = await runner.execute(**how["execute"])
            say(f"{result.status.value if result.status else None} {json.dumps(result.final_output)}")
        elif how.get("once"):
            say("ready")
            say(f"once {await runner.run_once()}")
        else:
            working = asyncio.create_task(runner.run_loop(how.get("poll", 1.0), concurrency=how.get("concurrency", 1)))
            await asyncio.sleep(0)  # it handles signals from here on
            say("ready")
            await working
    say("stopped")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
