"""What single parts add: the JSON codec, concurrent step lists, traces, slow followers, a cancel between processes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import socket
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from uuid import uuid4

from agent_runtime_core._core.codec.json import decode, encode
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.encryption import AESGCMCodec
from agent_runtime_core.errors import UnserialisableResult
from agent_runtime_core.events import EventBus
from agent_runtime_core.interfaces import AgentRuntime, RunContext, RunResult, TraceSink
from agent_runtime_core.runner import AgentRunner, open_run
from agent_runtime_core.runner.backends import open_url
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.tracing import NoopTraceSink, OpenTelemetrySink, PrometheusSink, Tracer

from .floor import Line, Size, in_turns, percentile
from .growth_steps import noise

CODEC = 2.0  # times what the json module takes
REFUSED = 300.0  # milliseconds
CONCURRENT = 2.5  # times what the same lists take one after the other
TRACED = 1000.0  # microseconds of a run for one trace event
NOTHING = 1.01  # times a durable step without a trace sink
OBSERVED = 1.05
CLOSING = 3.0  # seconds for traces that cannot be delivered
SLOWED = 1.1  # times the 99th percentile of a publisher without a slow follower
HEARD = 250.0  # milliseconds until the slowest step is cancelled

_CANCELLED = """
import asyncio, sys, time
from agent_runtime_core.interfaces import AgentRuntime
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner

async def step():
    print("began", flush=True)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        print(time.monotonic(), flush=True)

class Waits(AgentRuntime):
    key = "waits"
    async def run(self, ctx):
        await ctx.step("wait", step)

async def main(path):
    registry = Registry()
    registry.register(Waits())
    async with AgentRunner.open(path, registry=registry) as runner:
        await runner.run_loop()

asyncio.run(main(sys.argv[1]))
"""
_TRACED = """
import sys, time
from uuid import uuid4
from agent_runtime_core.tracing import LangfuseTraceSink, Tracer

tracer = Tracer([LangfuseTraceSink("pk", "sk", sys.argv[1])])
for _ in range(300):
    run = uuid4()
    tracer.start_run(run, {"agent_key": "a", "input": ["x" * 100]})
    tracer.event(run, "llm.call", {"model": "m", "input": ["x" * 1000]})
    tracer.end_run(run, "succeeded")
print(time.monotonic(), flush=True)
"""


def _cpu(call: Callable[[], object], times: int) -> Callable[[], float]:
    """Processor seconds of so many calls."""

    def measure() -> float:
        since = time.process_time()
        for _ in range(times):
            call()
        return time.process_time() - since

    return measure


def _codec(size: Size) -> Iterator[Line]:
    large, small = "x" * 100_000, {"ok": True, "n": 3}
    written = encode({"t": large})
    pairs: list[tuple[str, Callable[[], object], Callable[[], object], int]] = [
        ("encode a string of 100,000", lambda: encode(large), lambda: json.dumps(large), 50),
        ("decode a string of 100,000", lambda: decode(written), lambda: json.loads(written), 50),
        ("encode a small result", lambda: encode(small), lambda: json.dumps(small), 2000),
        ("decode a small result", lambda: decode('{"ok":true,"n":3}'), lambda: json.loads('{"ok":true,"n":3}'), 2000),
    ]
    for name, ours, floor, full in pairs:
        times = size.of(full, full // 10)
        mine, bare = in_turns(size.rounds(21), _cpu(ours, times), _cpu(floor, times))
        yield Line(name, mine / times * 1e6, "µs", bare / times * 1e6, most=CODEC)


def _refusals(size: Size) -> Iterator[Line]:
    """Values that are too large or too deep, which a caller should not wait for."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    values = {"deep": deep, "a shared string": ["x" * 1_000_000] * 100, "many digits": [10**4000] * 100_000}
    for name, value in values.items():
        took = []
        for _ in range(size.rounds(5)):
            since = time.process_time()
            with contextlib.suppress(UnserialisableResult):
                encode(value)
            took.append(time.process_time() - since)
        yield Line(f"refuse a value, {name}", max(statistics.median(took) * 1e3, 1e-3), "ms", most=REFUSED)
    while deep:  # the interpreter would free it by recursion
        deep = deep.pop()


def _lists(size: Size) -> Iterator[Line]:
    count = size.of(300, 5)

    async def fn(ctx: Any, state: Any) -> None: ...

    async def run(concurrent: bool) -> None:
        async with open_run("memory://", "r") as ctx:
            lists = [[Step(f"{n}-a", fn), Step(f"{n}-b", fn)] for n in range(count)]
            if concurrent:
                await asyncio.gather(*(StepExecutor(ctx).run(each) for each in lists))
            else:
                for each in lists:
                    await StepExecutor(ctx).run(each)

    ours, floor = in_turns(
        size.rounds(9),
        _cpu(lambda: asyncio.run(run(concurrent=True)), 1),
        _cpu(lambda: asyncio.run(run(concurrent=False)), 1),
    )
    yield Line(f"{count} concurrent step lists", ours * 1e3, "ms", floor * 1e3, most=CONCURRENT)


def _trace(tracer: Tracer, count: int) -> float:
    """Mean microseconds of a run for one trace event of 200 messages."""
    payload = {"input": [{"role": "user", "content": "x" * 1000}] * 200, "output": {}, "usage": {}}
    run = uuid4()
    tracer.event(run, "llm.call", payload)  # imports what the sink needs
    since = time.perf_counter()
    for _ in range(count):
        tracer.event(run, "llm.call", payload)
    return (time.perf_counter() - since) / count * 1e6


@contextmanager
def _silent() -> Iterator[str]:
    """The URL of a server that accepts connections and never answers."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(100)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


def _traces(size: Size) -> Iterator[Line]:
    count = size.of(2000, 20)
    tracer = Tracer([NoopTraceSink()])
    yield Line("a trace event", _trace(tracer, count), "µs", most=TRACED)
    tracer.close()
    if find_spec("langfuse") is None:
        return
    from agent_runtime_core.tracing import LangfuseTraceSink  # an extra

    with _silent() as url:
        tracer = Tracer([LangfuseTraceSink("pk", "sk", url)])
        yield Line("a trace event, Langfuse does not answer", _trace(tracer, count // 10), "µs", most=TRACED)
        since = time.monotonic()
        tracer.close()
        yield Line("close the tracer, Langfuse does not answer", time.monotonic() - since, "s", most=CLOSING)
        done = subprocess.run([sys.executable, "-c", _TRACED, url], capture_output=True, text=True, check=True)
        took = time.monotonic() - float(done.stdout)
        yield Line("end of the process, Langfuse does not answer", took, "s", most=CLOSING)


class _Chain(AgentRuntime):
    """Makes durable steps, and measures how long they take together."""

    key = "chain"

    def __init__(self, count: int) -> None:
        self.count, self.seconds = count, 0.0

    async def run(self, ctx: RunContext) -> RunResult:
        since = time.perf_counter()
        for n in range(self.count):
            await ctx.step(f"step-{n}", int, n)
        self.seconds = time.perf_counter() - since
        return RunResult()


def _sinks(size: Size) -> Iterator[Line]:
    """A durable step with each trace sink, beside one without."""
    count = size.of(300, 5)

    def chain(*sinks: Callable[[], TraceSink]) -> float:
        async def measured() -> float:
            agent = _Chain(count)
            with size.file() as path:
                async with AgentRunner.open(path, trace_sinks=[make() for make in sinks]) as runner:
                    await runner.execute(agent)
            return agent.seconds / count * 1e6

        return asyncio.run(measured())

    makers: dict[str, tuple[Callable[[], TraceSink], float]] = {"NoopTraceSink": (NoopTraceSink, NOTHING)}
    if find_spec("prometheus_client") is not None:
        makers["PrometheusSink"] = (PrometheusSink, OBSERVED)
    if find_spec("opentelemetry.sdk") is not None:
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        makers["OpenTelemetrySink"] = (lambda: OpenTelemetrySink(InMemorySpanExporter()), OBSERVED)
    without, *others = in_turns(
        size.rounds(15), chain, *(functools.partial(chain, make) for make, _ in makers.values())
    )
    for (name, (_, most)), ours in zip(makers.items(), others, strict=True):
        yield Line(f"a durable step with {name}", ours, "µs", without, most=most)


def _encrypted(size: Size) -> Iterator[Line]:
    """A durable step whose contents are encrypted, beside one without."""
    if find_spec("cryptography") is None:
        return
    count = size.of(300, 5)

    async def returns(text: str) -> dict[str, str]:
        return {"text": text}

    def chain(codec: AESGCMCodec | None, text: str) -> float:
        async def measured() -> float:
            async with open_run(str(path), "bench") as ctx:
                since = time.perf_counter()
                for n in range(count):
                    await ctx.step(f"step-{n}", returns, text)
                return (time.perf_counter() - since) / count * 1e6

        configure(durability="full", payload_codec=codec)
        with size.file() as path:
            return asyncio.run(measured())

    codec = AESGCMCodec({"k": bytes(32)}, "k")
    for characters in (10, 5_000):
        text = noise(1, characters)
        plain, ours = in_turns(size.rounds(15), lambda: chain(None, text), lambda: chain(codec, text))  # noqa: B023
        yield Line(f"a durable step with a result of {characters} characters, encrypted", ours, "µs", plain)
    reset_config()


def _guarded(size: Size) -> Iterator[Line]:
    """A guarded step, beside one with the default policy; and the row of its effect."""
    count = size.of(1000, 200)  # a file grows by pages: fewer rows would take none

    async def pays(amount: int) -> dict[str, int]:
        return {"paid": amount}

    async def chain(path: str, policy: str) -> float:
        async with open_run(path, "bench") as ctx:
            since = time.perf_counter()
            for n in range(count):
                await ctx.step("pay", pays, n, on_in_doubt=policy)
            return (time.perf_counter() - since) / count * 1e6

    def measure(policy: str) -> float:
        with size.file() as path:
            return asyncio.run(chain(str(path), policy))

    configure(durability="full")
    guarded, plain = in_turns(size.rounds(9), lambda: measure("fail"), lambda: measure("retry"))
    yield Line("a guarded step", guarded, "µs", plain)
    with size.file() as path:
        asyncio.run(chain(str(path), "fail"))
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
            sizes = []
            for statement in ("VACUUM", "DELETE FROM arc_effects"):
                conn.execute(statement)
                conn.execute("VACUUM")
                size_of = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
                sizes.append(conn.execute(size_of).fetchone()[0])
    yield Line("the row of an effect with a small result, in a file", (sizes[0] - sizes[1]) / count, "B")
    reset_config()


async def _publish(bus: EventBus, count: int, reads: int) -> float:
    """The 99th percentile of a publication, with a follower that reads one event of `reads`."""
    run, took = uuid4(), []
    follower = bus.subscribe(run, 0)
    for n in range(count):
        since = time.perf_counter()
        await bus.publish(run, "counted", {"n": n})
        took.append(time.perf_counter() - since)
        await asyncio.sleep(0)
        if n % reads == 0:
            await anext(follower)
    await follower.aclose()
    return percentile(took, 0.99)


def _followers(size: Size) -> Iterator[Line]:
    count = size.of(5000, 200)

    def measure(url: str, reads: int) -> float:
        async def run() -> float:
            queue, bus, state = open_url(url)
            try:
                return await _publish(bus, count, reads)
            finally:
                for backend in (queue, bus, state):
                    await backend.close()

        return asyncio.run(run())

    def on_sqlite(reads: int) -> float:
        with size.file() as path:
            return measure(f"sqlite:///{path}", reads)

    def in_memory(reads: int) -> float:
        return measure("memory://", reads)

    for kind, p99 in (("memory", in_memory), ("SQLite", on_sqlite)):
        ours, floor = in_turns(size.rounds(9), functools.partial(p99, 100), functools.partial(p99, 1))
        yield Line(f"publish with a slow follower, p99, {kind}", ours * 1e6, "µs", floor * 1e6, most=SLOWED)


def _cancels(size: Size) -> Iterator[Line]:
    async def cancelled(path: str, count: int) -> list[float]:
        took = []
        async with AgentRunner.open(path) as runner:
            command = [sys.executable, "-c", _CANCELLED, path]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:  # noqa: ASYNC220
                assert worker.stdout is not None
                for _ in range(count):
                    run = await runner.submit("waits", {})
                    assert await asyncio.to_thread(worker.stdout.readline) == "began\n"
                    asked = time.monotonic()
                    await runner.cancel(run)
                    took.append(float(await asyncio.to_thread(worker.stdout.readline)) - asked)
                    await runner.wait(run)
                worker.terminate()
        return [each * 1e3 for each in took]

    with size.file() as path:
        took = asyncio.run(cancelled(str(path), size.of(50, 2)))
    note = f"median {statistics.median(took):.1f} ms"
    yield Line("a cancel reaches a step in another process, slowest", max(took), "ms", most=HEARD, note=note)


def rows(size: Size) -> Iterator[Line]:
    for part in (_codec, _refusals, _lists, _sinks, _encrypted, _guarded, _traces, _followers, _cancels):
        yield from part(size)
