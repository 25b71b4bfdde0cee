"""A run that sends its spans to a receiver, and whose process is killed at one of its steps.

Arguments: the store, the URL of the receiver, the file of attempts, and the number of the attempt that kills.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult
from agent_runtime_core.runner.settings import RunnerConfig
from agent_runtime_core.tracing import OpenTelemetrySink

STEPS = 4


class Traced(AgentRuntime):
    key = "traced"

    def __init__(self, attempts: Path, kill_at: int, sent: Path) -> None:
        self._attempts, self._kill_at, self._sent = attempts, kill_at, sent

    async def run(self, ctx: RunContext) -> RunResult:
        for number in range(STEPS):
            await ctx.step(f"step-{number}", self._step, number)
        return RunResult(final_output={"steps": STEPS})

    async def _step(self, number: int) -> int:
        with trace.get_tracer("user").start_as_current_span(f"own-{number}"):
            pass
        with self._attempts.open("a") as file:
            file.write(f"{number}\n")
        if len(self._attempts.read_text().split()) == self._kill_at:
            await asyncio.to_thread(self._until_sent, number)
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    def _until_sent(self, steps: int) -> None:
        """Wait until the spans of the steps before have arrived, so that the test knows which are there."""
        while len(self._sent.read_text().split()) < steps:
            time.sleep(0.01)


async def main(store: str, url: str, attempts: str, sent: str, kill_at: int) -> None:
    exporter = OTLPSpanExporter(f"{url}/v1/traces")
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    sink = OpenTelemetrySink(processor=SimpleSpanProcessor(exporter))
    config = RunnerConfig(lease_ttl_seconds=1, heartbeat_interval_seconds=0.2)
    async with AgentRunner.open(store, trace_sinks=[sink], config=config) as runner:
        agent = Traced(Path(attempts), kill_at, Path(sent))
        await runner.execute(agent, "traced-1", {})


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])))
