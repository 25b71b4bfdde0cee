"""Runs that send their spans to a receiver, and whose process is killed when each of them is inside a step.

Arguments: the store, the URL of the receiver, the file of the spans that arrived, the number of runs, and "kill" or
"resume".
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner.settings import RunnerConfig
from agent_runtime_core.tracing import OpenTelemetrySink

STEPS = 4


class Traced(AgentRuntime):
    """The run with the number n stops in its step n % 4, until the process is killed."""

    key = "traced"

    def __init__(self, runs: int, sent: Path, kill: bool) -> None:
        self._runs, self._sent, self._kill = runs, sent, kill
        self._stopped, self._all_stopped = 0, asyncio.Event()

    async def run(self, ctx: RunContext) -> RunResult:
        for step in range(STEPS):
            await ctx.step(f"step-{step}", self._step, step, ctx.params["number"])
        return RunResult()

    async def _step(self, step: int, number: int) -> int:
        if self._kill and step == number % STEPS:
            self._stopped += 1
            if self._stopped == self._runs:
                self._all_stopped.set()
            await self._all_stopped.wait()
            # The test knows which spans are there: those of all steps before.
            completed = sum(each % STEPS for each in range(self._runs))
            await asyncio.to_thread(until_sent, self._sent, completed)
            os.kill(os.getpid(), signal.SIGKILL)
        return step


def until_sent(sent: Path, count: int) -> None:
    while len(sent.read_text().split()) < count:
        time.sleep(0.05)


async def main(store: str, url: str, sent: str, runs: int, mode: str) -> None:
    exporter = OTLPSpanExporter(f"{url}/v1/traces")
    sink = OpenTelemetrySink(processor=BatchSpanProcessor(exporter, schedule_delay_millis=100))
    registry = Registry()
    registry.register(Traced(runs, Path(sent), mode == "kill"))
    config = RunnerConfig(lease_ttl_seconds=5, heartbeat_interval_seconds=1)
    async with AgentRunner.open(store, trace_sinks=[sink], config=config, registry=registry) as runner:
        ids = [await runner.submit("traced", params={"number": n}, run_id=f"run-{n}") for n in range(runs)]
        working = asyncio.create_task(runner.run_loop(0.1, concurrency=runs))
        await asyncio.gather(*(runner.wait(each) for each in ids))
        runner.stop()
        await working
        await asyncio.to_thread(until_sent, Path(sent), runs * (STEPS + 2))  # each run was executed twice


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]))
