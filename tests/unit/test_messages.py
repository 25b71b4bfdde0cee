"""The messages of errors: one shape, the value that was passed, and the fix.

The tables are of the packages that have no table of their own in `test_messages_stores_and_models.py`.
"""

# mypy: disable-error-code="arg-type, call-arg, list-item, dict-item, call-overload, abstract, type-var"

from __future__ import annotations

import asyncio
import datetime as dt
import inspect
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    Backoff,
    LeaseLost,
    LimitExceeded,
    RunBusy,
    RunLimits,
    RunnerConfig,
    RunResult,
    Step,
    StepCancelledError,
    StepExecutionError,
    StepExecutor,
    configure,
    errors,
    llm,
    open_run,
    persistence,
    register_runtime,
    register_type,
    testing,
)
from agent_runtime_core._core.arguments import messages_in
from agent_runtime_core._core.ids import parse_ulid
from agent_runtime_core._engines.redis.url import redis_place
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.orchestrator import Orchestrator, OrchestratorSettings, RunCreate
from agent_runtime_core.queue import InMemoryQueue, SQLiteQueue, get_queue
from agent_runtime_core.registry import Registry
from tests.support.cases import for_each
from tests.support.messages import Triggered, error_of, literal_messages, problems_of


class Hello(AgentRuntime):
    key = "hello"

    async def run(self, ctx: Any) -> RunResult:
        await ctx.step("fetch", plain)
        return RunResult()


class Nameless(AgentRuntime):
    key = ""

    async def run(self, ctx: Any) -> RunResult:
        return RunResult()


class FakeContext:
    """The methods of a context that a StepExecutor looks for."""

    emit = checkpoint = get_state = cancelled = None


def plain(*_: Any) -> int:
    return 1


async def coroutine(*_: Any) -> int:
    return 1


async def given_a_coroutine(ctx: Any) -> None:
    work = coroutine()
    try:
        await ctx.step("x", work)
    finally:
        work.close()


async def fetch(ctx: Any, state: Any) -> int:
    return 1


async def on_runner(call: Callable[[AgentRunner], Any]) -> None:
    """Await what `call(runner)` returns, on a runner with one agent and one finished run."""
    registry = Registry()
    registry.register(Hello())
    async with AgentRunner.open("memory://", registry=registry) as runner:
        await runner.execute("hello", run_id="done")
        await runner.submit("hello", run_id="queued")
        await call(runner)


async def in_run(call: Callable[[Any], Awaitable[Any]]) -> None:
    """Await what `call(ctx)` returns, in a run."""
    async with open_run("memory://", "report-1") as ctx:
        await call(ctx)


class Faulty(AgentRuntime):
    """An agent that fails in the way that `call(ctx)` does."""

    key = "faulty"

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self.call = call

    async def run(self, ctx: Any) -> Any:
        result = self.call(ctx)
        return await result if inspect.isawaitable(result) else result


async def failed(call: Callable[[Any], Any]) -> None:
    """Raise what `raise_for_status()` says of a run whose code is `call(ctx)`."""
    config = RunnerConfig(max_retries=1)
    async with AgentRunner.open("memory://", registry=Registry(), config=config) as runner:
        (await runner.execute(Faulty(call), run_id="report-1")).raise_for_status()


async def after_close(call: Callable[[AgentRunner], Any]) -> None:
    runner = AgentRunner.open("memory://", registry=Registry())
    await runner.close()
    await call(runner)


async def after_block(call: Callable[[Any], Any]) -> None:
    async with open_run("memory://", "report-1") as ctx:
        pass
    await call(ctx)


async def in_doubt() -> None:
    """Execute a step that an earlier process started and did not complete."""
    async with AgentRunner.open("memory://", registry=Registry()) as runner:
        hold, started = asyncio.Event(), asyncio.Event()

        async def pay() -> int:
            started.set()
            await hold.wait()
            return 1

        agent = Faulty(lambda ctx: ctx.step("pay", pay, on_in_doubt="fail"))
        first = asyncio.ensure_future(runner.execute(agent, run_id="order-7"))
        await started.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        (await runner.execute(agent, run_id="order-7")).raise_for_status()


def broken() -> None:
    raise ZeroDivisionError("division by zero")


def raise_(error: Exception) -> None:
    raise error


ARGUMENTS: list[Triggered] = [
    Triggered(lambda: configure(durability="fast"), "durability must be 'full' or 'normal', got 'fast'."),
    Triggered(
        lambda: configure(backend_url="mysql://x"),
        (
            "backend_url: store URL must be memory://, sqlite:///path, redis://host:port/db, "
            "rediss://host:port/db, unix:///path/of.sock, postgresql://host:port/database or the path of a SQLite "
            "file, got 'mysql://x'."
        ),
    ),
    Triggered(
        lambda: configure(lease_ttl_second=3), "unknown setting 'lease_ttl_second'. Did you mean 'lease_ttl_seconds'?"
    ),
    Triggered(
        lambda: configure(max_retries=0), "max_retries must be an integer of at least 1, where 1 means no retry, got 0."
    ),
    Triggered(lambda: configure(default_model=""), "default_model must be a non-empty string, got ''."),
    Triggered(lambda: configure(trace_sinks=[3]), "trace_sinks must be a list of trace sinks or their names, got [3]."),
    Triggered(
        lambda: AgentRunner.open("mysql://x"),
        (
            "store URL must be memory://, sqlite:///path, redis://host:port/db, rediss://host:port/db, "
            "unix:///path/of.sock, postgresql://host:port/database or the path of a SQLite file, got 'mysql://x'."
        ),
    ),
    Triggered(
        lambda: AgentRunner.open("redis"),
        ("store URL must contain '://', got 'redis'. Use redis://host:6379/0, or ./redis... for a file of that name."),
    ),
    Triggered(
        lambda: AgentRunner.open("sqlite://x.db"),
        (
            "store URL must have three or four slashes after sqlite:, got 'sqlite://x.db'. Use "
            "sqlite:///relative.db or sqlite:////absolute/path.db."
        ),
    ),
    Triggered(
        lambda: AgentRunner.open("sqlite:///x.db?mode=ro"),
        (
            "store URL must have no options after sqlite:, got 'sqlite:///x.db?mode=ro'. Use "
            "sqlite:///x.db, and %3F for a ? in a file name."
        ),
    ),
    Triggered(
        lambda: AgentRunner.open("file:x.db"),
        (
            "store URL must not begin with file:, got 'file:x.db'. Use sqlite:///relative.db or "
            "sqlite:////absolute/path.db, or memory://"
        ),
    ),
    Triggered(lambda: AgentRunner.open(3), "store URL must be a path or a URL string, got 3."),
    Triggered(
        lambda: AgentRunner.open("/"), "path must be a file, got the directory '/'. Add the name of a file in it."
    ),
    Triggered(
        lambda: AgentRunner.open("/nowhere/at/all.db"),
        ("path must be in a directory that exists, got '/nowhere/at/all.db'. Create the directory '/nowhere/at'"),
    ),
    Triggered(lambda: AgentRunner(queue=3), "queue must be a RunQueue, got 3. Extend RunQueue to write a custom one."),
    Triggered(lambda: AgentRunner(config=3), "config must be a RunnerConfig, got an int. Write RunnerConfig(...)"),
    Triggered(
        lambda: AgentRunner(tools=[3]),
        "tools must be a ToolRegistry, got [3]. Register each tool in one with register(tool)",
    ),
    Triggered(
        lambda: AgentRunner(persistence=3),
        (
            "persistence must be a PersistenceManager, None or 'default', got an int. Open one with "
            "PersistenceManager.open(path_or_url)"
        ),
    ),
    Triggered(lambda: RunnerConfig(max_retrys=3), "unknown setting 'max_retrys'. Did you mean 'max_retries'?"),
    Triggered(lambda: RunnerConfig(worker_id=""), "worker_id must be a string of 1 to 512 characters, got ''."),
    Triggered(
        lambda: RunnerConfig(lease_ttl_seconds=0), "lease_ttl_seconds must be a number of seconds above 0, got 0."
    ),
    Triggered(
        lambda: RunnerConfig(retention={"succeded": 1}),
        "retention: unknown final status 'succeded'. Did you mean 'succeeded'?",
    ),
    Triggered(
        lambda: RunLimits(max_turns=0), "max_turns must be an integer of at least 1, or None for no limit, got 0."
    ),
    Triggered(lambda: RunLimits(max_cost=1), "unknown limit 'max_cost'. Did you mean 'max_cost_usd'?"),
    Triggered(lambda: RunLimits.of(3), "limits must be RunLimits or a dict of their fields, got 3."),
    Triggered(lambda: RunLimits.of({"max_cost": 1}), "unknown limit 'max_cost'. Did you mean 'max_cost_usd'?"),
    Triggered(lambda: InMemoryQueue(engine=3), "engine must be a MemoryEngine, got 3. Leave it out for a new one."),
    Triggered(
        lambda: SQLiteQueue("a.db", db_path="b.db"),
        "path and db_path must not both be passed, got 'a.db' and 'b.db'. Pass path alone.",
    ),
    Triggered(lambda: SQLiteQueue("a.db", durability="fast"), "durability must be 'full' or 'normal', got 'fast'."),
    Triggered(
        lambda: SQLiteQueue(":memory:"),
        ("path must be the path of a database file, got ':memory:'. For a store in memory use memory://"),
    ),
    Triggered(
        lambda: get_queue("redsi"),
        "unknown queue 'redsi'. Did you mean 'redis'? Write 'package.module:Class' for a custom one.",
    ),
    Triggered(
        lambda: get_queue("json:Nope"),
        (
            "module 'json': unknown name 'Nope'. Known: JSONDecodeError, JSONDecoder, JSONEncoder, dump, "
            "dumps and 2 more."
        ),
    ),
    Triggered(
        lambda: get_queue("json.decoder:JSONDecoderr"),
        "module 'json.decoder': unknown name 'JSONDecoderr'. Did you mean 'JSONDecoder'?",
    ),
    Triggered(lambda: get_queue("memory", clok=1), "unknown setting 'clok'. Did you mean 'clock'?"),
    Triggered(
        lambda: get_event_bus("memory", poll_interval=0), "poll_interval must be a number of seconds above 0, got 0."
    ),
    Triggered(lambda: redis_place("redis://h:0"), "Redis URL must have a port from 1 to 65535, got 'redis://h:0'."),
    Triggered(
        lambda: redis_place("redis://h?socket_timeout=3"),
        ("Redis URL 'redis://h?socket_timeout=3': unknown option 'socket_timeout'. Known: allow_unsafe, db, prefix."),
    ),
    Triggered(
        lambda: redis_place("localhost:6379"),
        (
            "Redis URL must be redis://host:6379/0, rediss://host:6379/0 (TLS) or unix:///path/of.sock, "
            "got 'localhost:6379'."
        ),
    ),
    Triggered(
        lambda: redis_place("redis://secret@h"),
        "Redis URL must have user:password before the @, or :password alone, got 'redis://***@h'.",
    ),
    Triggered(
        lambda: register_runtime(None),
        ("agent must be an AgentRuntime, got None. get_runtime(key) returns None for a key that is not registered."),
    ),
    Triggered(lambda: register_runtime(Hello), "agent must be an instance, got the class Hello. Pass Hello()"),
    Triggered(
        lambda: type("NoKey", (AgentRuntime,), {"run": Hello.run})(),
        'NoKey must define key, got a class without that. Add key = "..."',
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.submit("hello", {"a": object()})),
        "input.a: an object is not JSON-serializable. Use a dict or a dataclass",
        about="input.a",
        fix="Use a dict or a dataclass",
    ),
    Triggered(
        lambda: in_run(lambda ctx: ctx.emit("mine", {"a": object()})),
        "payload.a: an object is not JSON-serializable. Use a dict or a dataclass",
        about="payload.a",
        fix="Use a dict or a dataclass",
    ),
    Triggered(lambda: register_runtime(Nameless()), "Nameless.key must be a non-empty string, got ''."),
    Triggered(lambda: register_runtime(3), "agent must be an AgentRuntime, got 3."),
    Triggered(
        lambda: register_type(3),
        "the argument of register_type must be a dataclass, an Enum class or a model of pydantic, got 3.",
    ),
    Triggered(lambda: Step("", fetch), "step name must be a non-empty string, got ''."),
    Triggered(lambda: Step("a", 3), "step 'a': fn must be a function of (ctx, state), got 3."),
    Triggered(lambda: Step("a", fetch, retries=-1), "retries must be an integer of at least 0, got -1."),
    Triggered(
        lambda: Step("a", fetch, timeout=0), "timeout must be a number of seconds above 0, or None for no limit, got 0."
    ),
    Triggered(
        lambda: Step("a", fetch, retry_on=3),
        "retry_on must be an exception class, a tuple of them or a function of the error, got 3.",
    ),
    Triggered(
        lambda: Step("a", fetch, backoff=3), "backoff must be Backoff(...) or a function of (attempt, random), got 3."
    ),
    Triggered(
        lambda: Step("a", fetch, on_in_doubt="maybe"),
        "on_in_doubt must be 'retry', 'fail', 'review' or a check function, got 'maybe'.",
    ),
    Triggered(
        lambda: Step("a", fetch, depends_on="load"),
        "step 'a': depends_on must be a list of step names, such as ['load'], got 'load'.",
    ),
    Triggered(
        lambda: Step("a", fetch, max_result_bytes=0), "max_result_bytes must be an integer from 1 to 16,777,216, got 0."
    ),
    Triggered(lambda: Backoff(base=-1), "base must be a finite number of at least 0, got -1."),
    Triggered(
        lambda: Backoff(factor=0.5), "factor must be at least 1, got 0.5. A smaller factor would shorten the delays."
    ),
    Triggered(lambda: Backoff(jitter="some"), "jitter must be 'full' or 'none', got 'some'."),
    Triggered(lambda: RunCreate(3), "prompt must be a string, got 3."),
    Triggered(
        lambda: OrchestratorSettings(max_retries=0),
        "max_retries must be an integer of at least 1, where 1 means no retry, got 0.",
    ),
    Triggered(
        lambda: OrchestratorSettings.of(3), "settings must be OrchestratorSettings or a dict of their fields, got 3."
    ),
    Triggered(
        lambda: messages_in("hi"),
        "messages must be a list of dicts, got 'hi'. Example: [{'role': 'user', 'content': 'hi'}]",
    ),
    Triggered(lambda: parse_ulid("x"), "a ULID must have 26 characters of 0-9 and A-Z without I, L, O and U, got 'x'."),
    Triggered(lambda: StepExecutor(3), "ctx must be the context of a run, got 3 without 'emit'."),
    Triggered(
        lambda: StepExecutor(FakeContext(), max_concurrency=0),
        "max_concurrency must be an integer of at least 1, got 0.",
    ),
    Triggered(lambda: StepExecutor(FakeContext(), checkpoint_key=3), "checkpoint_key must be a string, got 3."),
]

OF_RUNNERS: list[Triggered] = [
    Triggered(
        lambda: on_runner(lambda runner: runner.execute("helo", input_data={})),
        "unknown agent 'helo'. Did you mean 'hello'? Register agents with register_runtime(agent)",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.execute(Hello, input_data={})),
        "agent must be an instance, got the class Hello. Pass Hello()",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.execute("hello", input_data={}, run_id=3)),
        "run_id must be a UUID or a string, got 3. Pass str(run_id)",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.execute("hello", input_data={}, run_id="")),
        "run_id must not be empty, got ''. Pass None for a new run id.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.execute("hello", input_data={}, run_id="x" * 513)),
        "run_id must have at most 512 characters, got 513. Pass a hash of the string.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.execute("hello", input_data={}, run_id="a\x00b")),
        (
            "run_id must not contain control characters or lone surrogates, got '\\x00' at position 1 of "
            "'a\\x00b'. Remove them."
        ),
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.execute("hello", input_data={"messages": "hi"})),
        ("input_data['messages'] must be a list of dicts, got 'hi'. Example: [{'role': 'user', 'content': 'hi'}]"),
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.execute("hello", input_data=[1])), "input_data must be a dict, got [1]."
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.execute("hello", input_data={}, deadline=60)),
        (
            "deadline must be a time after the year 2000, got 60 (1970-01-01). For 60 seconds from now, "
            "pass datetime.now(UTC) + timedelta(seconds=60)"
        ),
    ),
    Triggered(
        lambda: on_runner(
            lambda runner: runner.execute("hello", input_data={}, deadline=dt.datetime(2026, 11, 25, 19, 41))  # noqa: DTZ001
        ),
        "deadline must be timezone-aware, got 2026-11-25 19:41. Use datetime.now(UTC)",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.execute("hello", input_data={}, if_running="no")),
        "if_running must be 'wait' or 'raise', got 'no'.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.execute("hello", input_data={}, recover="no")),
        "recover must be 'inline' or 'worker', got 'no'.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.submit("hello", {}, priority="high")),
        "priority must be an integer of 32 bits, got 'high'.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.submit("hello", {}, idempotency_key=3)),
        "idempotency_key must be a string of 1 to 512 characters, got 3.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.submit("hello", {}, concurrency_key=3)),
        "concurrency_key must be a string of 1 to 512 characters, got 3.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.submit("hello", {}, delay=-1)),
        "delay must be from 0 to 100,000,000,000 seconds, got -1.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.submit("hello", {}, metadata=3)), "metadata must be a dict, got 3."
    ),
    Triggered(lambda: on_runner(lambda runner: runner.runs("deadd")), "unknown status 'deadd'. Did you mean 'dead'?"),
    Triggered(
        lambda: on_runner(lambda runner: runner.runs(["failed", "ded"])), "unknown status 'ded'. Did you mean 'dead'?"
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.runs(since=20, until=10)), "until must be at least since (20), got 10."
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.runs(prefix="")),
        "prefix must be a string of 1 to 512 characters, got ''.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.runs(conversation=3)),
        "conversation must be a UUID or a non-empty string, got 3.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.runs(newest_first=1)), "newest_first must be True or False, got 1."
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.runs(agent=3)), "agent must be an agent key, got 3. Pass agent.key."
    ),
    Triggered(lambda: on_runner(lambda runner: runner.runs(limit=0)), "limit must be an integer of at least 1, got 0."),
    Triggered(
        lambda: on_runner(lambda runner: runner.runs(since=-1)),
        "since must be from 0 to 100,000,000,000 seconds, got -1.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.wait("nope", timeout=-1)),
        "timeout must be from 0 to 100,000,000,000 seconds, got -1.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.signal("nope", "")), "signal name must be a non-empty string, got ''."
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.send("nope", "hi", when="now")),
        "when must be 'next_turn' or 'interrupt', got 'now'.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.send("nope", 3)),
        (
            "message must be a string or a dict with the role 'user', got 3. Example: "
            "runner.send(run_id, 'Use the other file')"
        ),
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.send("nope", {"role": "system", "content": "x"})),
        "message must have the role 'user', got 'system'.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.send("nope", "")),
        "message must have a non-empty string or list of parts as its content, got ''.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.vacuum({"succeded": 1})),
        "retention: unknown final status 'succeded'. Did you mean 'succeeded'?",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.fork("done", effects="no")),
        (
            "effects must be 'refuse', 'reuse', 'ask' or 'repeat', got 'no'. With 'refuse', the fork "
            "fails at a step that was done before."
        ),
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.fork("done", 3)),
        "after_step must be a step's name or id, a pair (name, key or occurrence), or None, got 3.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.fork("done", "fech")),
        "run 'done': unknown completed step 'fech'. Did you mean 'fetch'?",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.fork("done", ("fetch", "9"))),
        "run 'done': unknown key of step 'fetch' '9'. Known: 0.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.resume("done", limits={"max_turn": 1})),
        "unknown limit 'max_turn'. Did you mean 'max_turns'?",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.run_loop(poll_interval=0)),
        "poll_interval must be a number of seconds above 0, got 0.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.run_loop(concurrency=0)),
        "concurrency must be an integer of at least 1, got 0.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.event_bus.get_events(3)),
        "run_id must be a UUID or a string, got 3. Pass str(run_id)",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.state_store.records("done", after="x")),
        "after must be an integer, a position in the journal, got 'x'.",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.state_store.save_checkpoint("done", 3)), "state must be a dict, got 3."
    ),
]

OF_CONTEXTS: list[Triggered] = [
    Triggered(
        lambda: in_run(lambda ctx: ctx.step("x", 3)),
        (
            "fn must be a function, got 3. Pass the function and its arguments without calling it, as in "
            "ctx.step('fetch', fetch, 1)"
        ),
    ),
    Triggered(
        lambda: in_run(lambda ctx: given_a_coroutine(ctx)),
        (
            "fn must be a function, got a coroutine. Pass the function and its arguments without calling "
            "it, as in ctx.step('fetch', fetch, 1)"
        ),
    ),
    Triggered(lambda: in_run(lambda ctx: ctx.step("", fetch)), "step name must be a non-empty string, got ''."),
    Triggered(
        lambda: in_run(lambda ctx: ctx.step("x", plain, key=3)), "step 'x': key must be a non-empty string, got 3."
    ),
    Triggered(
        lambda: in_run(lambda ctx: ctx.step("x", plain, on_changed_input="no")),
        "on_changed_input must be 'use' or 'raise', got 'no'.",
    ),
    Triggered(
        lambda: in_run(lambda ctx: ctx.step("x", plain, retries=-1)),
        "retries must be an integer of at least 0, got -1.",
    ),
    Triggered(
        lambda: in_run(lambda ctx: ctx.step("x", plain, timeout=0)),
        "timeout must be a number of seconds above 0, or None for no limit, got 0.",
    ),
    Triggered(
        lambda: in_run(lambda ctx: ctx.emit("")),
        "event_type must be a string of 1 to 255 printable characters, got ''.",
    ),
    Triggered(lambda: in_run(lambda ctx: ctx.emit("mine", 3)), "payload must be a dict, got an int."),
    Triggered(lambda: in_run(lambda ctx: ctx.checkpoint(3)), "state must be a dict, got 3."),
    Triggered(lambda: in_run(lambda ctx: ctx.sleep(-1)), "seconds must be from 0 to 100,000,000,000 seconds, got -1."),
    Triggered(
        lambda: in_run(lambda ctx: ctx.wait_for_signal("", timeout=1)),
        "signal name must be a non-empty string, got ''.",
    ),
    Triggered(
        lambda: in_run(lambda ctx: ctx.wait_for_signal("go", timeout=-1)),
        "timeout must be from 0 to 100,000,000,000 seconds, or None, got -1.",
    ),
    Triggered(lambda: in_run(lambda ctx: ctx.call(3, {})), "agent must be an agent or an agent key, got 3."),
    Triggered(lambda: in_run(lambda ctx: StepExecutor(ctx).run([3])), "steps must be Step objects, got 3."),
    Triggered(
        lambda: in_run(lambda ctx: StepExecutor(ctx).run([Step("a", fetch), Step("a", fetch)])),
        "step names must be unique in a list, got 'a' twice.",
    ),
    Triggered(
        lambda: in_run(lambda ctx: StepExecutor(ctx).run([Step("load", fetch), Step("b", fetch, depends_on=["lode"])])),
        ("step 'b': depends_on: unknown step 'lode'. Did you mean 'load'? Name a step of the same list."),
    ),
    Triggered(
        lambda: in_run(
            lambda ctx: StepExecutor(ctx).run([Step("a", fetch, depends_on=["b"]), Step("b", fetch, depends_on=["a"])])
        ),
        "depends_on must not form a cycle, got a -> b -> a. Remove one of these dependencies.",
    ),
    Triggered(
        lambda: in_run(lambda ctx: StepExecutor(ctx).run([], initial_state=3)), "initial_state must be a dict, got 3."
    ),
    Triggered(
        lambda: in_run(lambda ctx: StepExecutor(ctx).map("m", plain, 3)),
        "map 'm': items must be a list or another iterable, got 3.",
    ),
    Triggered(
        lambda: in_run(lambda ctx: StepExecutor(ctx).map("m", plain, [1, 1], key=str)),
        "map 'm': keys of items must be unique, got '1' twice.",
    ),
]

STATES: list[Triggered] = [
    Triggered(
        lambda: on_runner(lambda runner: runner.get_run("nope")),
        "run 'nope' not found in memory. List the stored runs with runner.runs()",
        about="'nope'",
        fix="runner.runs()",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.wait("nope")),
        "run 'nope' not found in memory. List the stored runs with runner.runs()",
        about="'nope'",
        fix="runner.runs()",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.signal("nope", "go")),
        "run 'nope' not found in memory. List the stored runs with runner.runs()",
        about="'nope'",
        fix="runner.runs()",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.send("nope", "hi")),
        "run 'nope' not found in memory. List the stored runs with runner.runs()",
        about="'nope'",
        fix="runner.runs()",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.resume("nope")),
        "run 'nope' not found in memory. List the stored runs with runner.runs()",
        about="'nope'",
        fix="runner.runs()",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.resume("done")),
        (
            "cannot resume run 'done': it has succeeded. Only failed, timed-out, cancelled or dead runs "
            "can be resumed. Use runner.wait(run_id) for its result"
        ),
        about="'done'",
        fix="runner.wait(run_id)",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.discard("queued")),
        "cannot delete run 'queued': it is pending. Cancel it first with runner.cancel(run_id)",
        about="'queued'",
        fix="runner.cancel(run_id)",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.send("done", "hi")),
        (
            "run 'done' has succeeded, so it accepts no messages. Start a new run: runner.submit('hello', "
            "{'messages': [...]})"
        ),
        about="'done'",
        fix="runner.submit('hello'",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.wait("queued", timeout=0)),
        "run 'queued' has not finished within 0 s. Wait longer, or look at runner.get_run(run_id)",
        about="'queued'",
        fix="runner.get_run(run_id)",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.submit("hello", {"a": 1}, run_id="done")),
        "run id 'done' was used before with another input.a. Use another run id for another run",
        about="'done'",
        fix="Use another run id",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.submit("other", run_id="done")),
        "run id 'done' was used before with another agent_key. Use another run id for another run",
        about="'done'",
        fix="Use another run id",
    ),
    Triggered(
        lambda: on_runner(lambda runner: runner.fork("done", new_run_id="queued")),
        "run id 'queued' belongs to another run. Use another new_run_id",
        about="'queued'",
        fix="Use another new_run_id",
    ),
    Triggered(
        lambda: on_runner(lambda runner: Orchestrator(runner=runner).get_run("nope")),
        "Run not found: nope",  # the words of the document; a note says how to find other runs
        about="nope",
        fix="not found",
    ),
    Triggered(
        lambda: after_close(lambda runner: runner.submit("hello")),
        "this runner was closed. Create another runner",
        about="this runner",
        fix="Create another runner",
    ),
    Triggered(
        lambda: after_close(lambda runner: runner.execute("hello")),
        "this runner was closed. Create another runner",
        about="this runner",
        fix="Create another runner",
    ),
    Triggered(
        lambda: in_run(lambda ctx: ctx.transaction("t", plain)),
        "ctx.transaction needs the journal on SQLite or PostgreSQL. Use AgentRunner.open('agents.db'), or ctx.step",
        about="ctx.transaction",
        fix="AgentRunner.open('agents.db')",
    ),
    Triggered(
        lambda: after_block(lambda ctx: ctx.step("fetch", plain)),
        (
            "run 'report-1' is closed: its context was used outside of its `async with open_run(...)` "
            "block. Use ctx inside the block, or open the run again"
        ),
        about="'report-1'",
        fix="open the run again",
    ),
    Triggered(
        lambda: in_run(lambda ctx: ctx.wait_for_signal("go", timeout=0)),
        ("signal 'go' did not arrive within 0 s. Catch WaitTimeout to continue without it, or pass a longer timeout"),
        about="'go'",
        fix="Catch WaitTimeout",
    ),
    Triggered(
        lambda: in_run(lambda ctx: ctx.approve("plan", timeout=0)),
        (
            "approval 'plan' did not arrive within 0 s. Catch WaitTimeout to continue without it, or "
            "pass a longer timeout"
        ),
        about="'plan'",
        fix="Catch WaitTimeout",
    ),
    Triggered(
        lambda: in_run(lambda ctx: ctx.step("fetch", object)),
        (
            "step 'fetch' returned a value that cannot be stored, at $: an object is not "
            "JSON-serializable. Use a dict or a dataclass"
        ),
        about="'fetch'",
        fix="Use a dict",
    ),
    Triggered(
        lambda: in_run(lambda ctx: ctx.step("fetch", broken)),
        "step 'fetch' failed after 1 attempt: division by zero",
        about="'fetch'",
        fix="division by zero",
    ),
    Triggered(
        lambda: in_run(lambda ctx: ctx.step("fetch", broken, retries=1, retry_delay=0)),
        "step 'fetch' failed after 2 attempts: division by zero",
        about="'fetch'",
        fix="after 2 attempts",
    ),
    Triggered(
        lambda: failed(lambda ctx: "x"),
        (
            "run 'report-1' failed: InvalidArgument: run() of agent 'faulty' must return a RunResult, "
            "got 'x'. Return RunResult(final_output={...})"
        ),
        about="'report-1'",
        fix="Return RunResult(final_output={...})",
    ),
    Triggered(
        lambda: failed(lambda ctx: RunResult(error="x")),
        (
            "run 'report-1' failed: InvalidArgument: error of the RunResult of agent 'faulty' must be an "
            "ErrorInfo, got 'x'. Write ErrorInfo(type, message)"
        ),
        about="'report-1'",
        fix="Write ErrorInfo(type, message)",
    ),
    Triggered(
        lambda: failed(lambda ctx: ctx.step("fetch", broken)),
        ("run 'report-1' failed: StepExecutionError: step 'fetch' failed after 1 attempt: division by zero"),
        about="'report-1'",
        fix="division by zero",
    ),
    Triggered(
        lambda: in_doubt(),
        (
            "run 'order-7' failed: StepInDoubt: step 'pay' was interrupted, and its outcome "
            "is unknown (on_in_doubt='fail'). Check whether it took effect, then resume with "
            "on_in_doubt='retry', 'review' or a check function"
        ),
        about="'pay'",
        fix="on_in_doubt='retry'",
    ),
    Triggered(
        lambda: raise_(RunBusy("busy", "worker-1", 1_795_635_680.151, ago="3 min")),
        (
            "run 'busy' is already running in worker-1 (since 2026-11-25 19:41 UTC, 3 min ago). Wait for "
            "it with runner.wait('busy'), or cancel it with runner.cancel('busy')"
        ),
        about="'busy'",
        fix="runner.wait('busy')",
    ),
    Triggered(
        lambda: raise_(RunBusy("busy", None, None, "customer-4")),
        (
            "concurrency key 'customer-4' is in use by run 'busy' in another process. Wait for it with "
            "runner.wait('busy'), or cancel it with runner.cancel('busy')"
        ),
        about="'customer-4'",
        fix="runner.wait('busy')",
    ),
    Triggered(
        lambda: raise_(LeaseLost("c90469da-0000-4000-8000-000000000000", "01A", "report-1")),
        (
            "claim 01A of run 'report-1' is no longer valid: another worker claimed the run, or it has "
            "finished. Nothing was written. Wait for the run with runner.wait('report-1')"
        ),
        about="'report-1'",
        fix="runner.wait('report-1')",
    ),
    Triggered(
        lambda: raise_(StepCancelledError("pay")),
        "the run was cancelled before step 'pay'. Let this error end run()",
        about="'pay'",
        fix="Let this error end run()",
    ),
    Triggered(
        lambda: raise_(LimitExceeded("max_turns", 1, 1)),
        "limit reached: max_turns=1, used 1",
        about="max_turns=1",
        fix="used 1",  # customers read it, so it contains no advice
    ),
    Triggered(
        lambda: raise_(StepExecutionError("pay", "no money", 2)),
        "step 'pay' failed after 2 attempts: no money",
        about="'pay'",
        fix="after 2 attempts",
    ),
]


@for_each("row", [*ARGUMENTS, *OF_RUNNERS, *OF_CONTEXTS, *STATES], ids=lambda row: row.message[:60])
async def test_a_triggered_error_has_the_shape_the_value_and_the_fix(
    row: Triggered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = await error_of(row)
    assert (str(error), problems_of(row)) == (row.message, [])


# -- the check itself


@for_each(
    ("message", "wrong"),
    [
        ("deadline must be a datetime, got 'x'.", []),
        ("run_id must not be empty, got ''.", ["no fix"]),
        ("run_id must not be empty, got ''. Pass None for a new id.", []),
        ("unknown status 'deadd'. Did you mean 'dead'?", []),
        ("unknown tool 'x'. None exist. Register it first.", []),
        ("unknown status 'deadd'.", ["neither `X must …, got …` nor `unknown X …. Did you mean …?`"]),
        ("the deadline is a point in time", ["neither `X must …, got …` nor `unknown X …. Did you mean …?`"]),
        ("since must be a time, got 1795635680.", ["epoch seconds"]),
        ("n must be a int, got 1.", ["a for an"]),
        ("n must be 'a', 'b', 'c', 'd' or 'e', got 1.", []),
        ("n must be 'a', 'b', 'c', 'd', 'e' or 'f', got 1.", ["a list of more than five names"]),
    ],
)
def test_the_check_finds_a_wrong_shape(message: str, wrong: list[str]) -> None:
    assert problems_of(Triggered(lambda: None, message)) == wrong


def test_the_check_finds_a_state_error_without_object_or_fix() -> None:
    message = "run 'c90469da-0000-4000-8000-000000000000' has succeeded"
    assert problems_of(Triggered(lambda: None, message, about="'report-1'", fix="resume")) == [
        "the object \"'report-1'\" is not named",
        "the fix 'resume' is not named",
        "a derived id in place of the name that the user passed",
    ]


# -- every raise


REPOSITORY = Path(__file__).parents[2]
#: Messages that are not made by `must` or `unknown`, each with the reason.
ALLOWED = {
    ("config.py", "{called}: {error}"): "adds the name of the setting to an error that `must` made",
    ("_views/queries.py", "since must not be after until"): "the server leaves out the times that were sent",
    (
        "inspector/local_server.py",
        "port {self._port} of {HOST} cannot be used: {why}. Choose another one",
    ): "the port is valid, and the system has the reason",
}
#: Packages whose messages have another test.
OTHERS = (
    "agents.py",
    "cli",
    "llm",
    "loop",
    "persistence",
    "planning",
    "server",
    "testing",
    "tools",
    "tracing",
    "turns",
)


def test_every_message_about_a_value_is_made_by_must_or_unknown() -> None:
    found = set(literal_messages(lambda package: package not in OTHERS)) - {("_core/validation.py", MUST_ITSELF)}
    assert found == ALLOWED.keys()


MUST_ITSELF = "{name} must {constraint}, got {text}.{(' ' if fix else '')}{sentence(fix)}"


# -- every class


def error_classes() -> Iterator[type[BaseException]]:
    """Yield the public error classes of the package."""
    pending: list[type[BaseException]] = [errors.AgentRuntimeError]
    for public in (
        persistence.BrokenHistory,
        persistence.NoEmbeddings,
        llm.OpenAIConfigurationError,
        testing.CassetteMiss,
    ):
        assert issubclass(public, errors.AgentRuntimeError)  # loads the module
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        if kind.__module__.startswith("agent_runtime_core.") and not kind.__name__.startswith("_"):
            yield kind


def test_every_error_class_has_its_section_in_the_reference() -> None:
    page = (REPOSITORY / "docs" / "reference" / "errors.md").read_text("utf-8")
    tree = (errors.__doc__ or "").partition("\n\n")[2]
    assert f"```text\n{tree.strip()}\n```" in page
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    internal = {"NotDecoded", "NotSent", "RowChanged"}
    names = {kind.__name__ for kind in error_classes()} - internal
    assert names - sections.keys() == set()
    for name in names - {"AgentRuntimeError", "ProviderError", "StorageError"}:
        assert "```text\n" in sections[name], f"{name} has no example"
        assert "**Fix:**" in sections[name], f"{name} has no fix"
