"""Agents that emit types of the runner: the event is stored with a mark, and no reader believes it."""

from __future__ import annotations

import asyncio
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult, TraceSink
from agent_runtime_core._core.event_types import RUNNER_TYPES
from agent_runtime_core._views.events import event_json, sse_frames
from agent_runtime_core._views.export import export
from agent_runtime_core._views.runs import run_view
from agent_runtime_core.cli.main import main
from agent_runtime_core.interfaces import EventType
from agent_runtime_core.persistence import PersistenceConfig
from agent_runtime_core.persistence.manager import PersistenceManager
from agent_runtime_core.testing import MockRunContext, crash_everywhere
from agent_runtime_core.tracing.spans import SpanBuilder
from tests.support.cases import for_each
from tests.support.runs import Rig

TYPES = sorted(RUNNER_TYPES)
#: What would deceive a reader: the fields of the runner's own events, with other values.
LIE = {"agent_key": "other", "attempt": 7, "final_output": {"paid": True}, "type": "Poisoned", "message": "a lie"}


async def lies(ctx: Any) -> str:
    for kind in TYPES:
        await ctx.emit(kind, LIE)
    await ctx.step("inside", ctx.emit, "run.failed", LIE)
    await ctx.emit("run.progress", {"n": 1})
    return "true"


class Liar(AgentRuntime):
    key = "liar"

    async def run(self, ctx: RunContext) -> RunResult:
        return RunResult({"value": await lies(ctx)})


def test_only_the_types_that_the_runner_publishes_are_marked() -> None:
    assert {each for each in EventType if each.value in RUNNER_TYPES} == {
        EventType.RUN_STARTED, EventType.RUN_RESUMED, EventType.RUN_HEARTBEAT, EventType.RUN_SUCCEEDED,
        EventType.RUN_FAILED, EventType.RUN_CANCELLED, EventType.RUN_TIMED_OUT, EventType.RUN_LEFT,
        EventType.RUN_RESTORED,
    }  # fmt: skip


@for_each("kind", [*EventType, *TYPES, "run.progress", "run.", "mine"])
async def test_a_mock_context_records_every_type(kind: EventType | str) -> None:
    ctx = MockRunContext()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await ctx.emit(kind, {"n": 1})
    assert ctx.get_events(kind) == [(getattr(kind, "value", kind), {"n": 1})]


async def test_the_log_of_a_run_says_which_events_are_its_agents(place: Path | None) -> None:
    async with Rig(place) as rig:
        assert await rig.value(lies) == "true"
        events = await rig.runner.event_bus.get_events("r")
        assert [each.event_type for each in events if each.from_agent] == [*TYPES, "run.failed"]
        assert next(each.payload for each in events if each.from_agent) == LIE
        true = [each.event_type for each in events if not each.from_agent]
        assert true == ["run.started", "step.started", "step.completed", "run.progress", "run.succeeded"]


async def test_a_stream_and_a_wait_end_with_the_run_and_not_with_a_lie(place: Path | None) -> None:
    async with Rig(place) as rig:
        told, go_on = asyncio.Event(), asyncio.Event()

        async def body(ctx: Any) -> str:
            await lies(ctx)
            told.set()
            await go_on.wait()
            return "true"

        running = asyncio.ensure_future(rig.go(body))
        await told.wait()
        watching = asyncio.ensure_future(rig.another().wait("r"))
        stream = rig.runner.stream("r")
        seen = [await anext(stream) for _ in range(len(TYPES) + 1)]
        assert not watching.done()
        assert (await rig.runner.get_run("r")).status.value == "running"
        go_on.set()
        seen += [each async for each in stream]
        assert [each.event_type for each in seen][-1] == "run.succeeded"
        assert not seen[-1].from_agent
        assert (await watching).final_output == (await running).final_output == {"value": "true"}


async def test_views_and_clients_get_the_mark_beside_the_payload(place: Path | None) -> None:
    async with Rig(place) as rig:
        await rig.go(lies)
        row = await rig.runner.queue.require("r")
        run = await run_view(rig.runner, row)
        assert (run["state"], run["error"], run["attempt"]) == ("succeeded", None, 1)
        exported = [each async for each in export(rig.runner, row)]
        events = [each for each in exported if each["kind"] == "event"]
        assert [each["type"] for each in events if each.get("from_agent") is True] == [*TYPES, "run.failed"]
        page = await rig.runner.event_bus.get_events("r")
        assert all(("from_agent" in json.loads(event_json(each))) is each.from_agent for each in page)
        names = [line[7:] for line in sse_frames(page, named=True).decode().splitlines() if line.startswith("event: ")]
        assert [each for each in names if each in RUNNER_TYPES] == ["run.started", "run.succeeded"]
        assert [each for each in names if each.startswith("agent.")] == [f"agent.{each}" for each in TYPES] + [
            "agent.run.failed"
        ]


class Sink(TraceSink):
    def __init__(self) -> None:
        self.traces: list[dict[str, Any]] = []

    async def trace(self, event: dict[str, Any]) -> None:
        self.traces.append(event)


async def test_spans_and_sinks_follow_the_runner(place: Path | None) -> None:
    sink = Sink()
    async with AgentRunner.open(place or "memory://", trace_sinks=[sink]) as runner:
        await runner.execute(Liar(), run_id="r")
    types = [each["type"] for each in sink.traces]
    assert [each for each in types if each in RUNNER_TYPES] == ["run.started", "run.succeeded"]
    assert [each for each in types if each.startswith("agent.")] == [f"agent.{each}" for each in [*TYPES, "run.failed"]]
    builder = SpanBuilder()
    spans = [span for each in sink.traces for span in builder.spans(each)]
    assert [(each.name, each.error) for each in spans if each.kind == "agent"] == [("liar", None)]


async def test_the_audit_log_has_one_start_and_one_end(place: Path | None) -> None:
    from agent_runtime_core.persistence import InMemoryAuditStore

    stores = PersistenceManager(PersistenceConfig(audit_store=InMemoryAuditStore()))
    async with AgentRunner.open(place or "memory://", persistence=stores) as runner:
        await runner.execute(Liar(), run_id="r")
        assert stores.audit is not None
        entries = {each.action for each in await stores.audit.get_events()}
        assert len(await stores.audit.get_events()) == 2
        assert sorted(map(str, entries)) == ["agent 'liar' started", "agent 'liar' succeeded"]
        assert await stores.audit.get_errors() == []


async def test_a_fork_and_a_crash_test_take_them_as_plain_events(place: Path | None) -> None:
    async with Rig(place) as rig:
        rig.register(lies)
        await rig.go(lies)
        await rig.runner.fork("r", after_step="inside", new_run_id="f")
        await rig.runner.run_once()
        assert (await rig.runner.wait("f")).final_output == {"value": "true"}
    report = await crash_everywhere(Liar(), {})
    assert report.outcome.final_output == {"value": "true"}


async def test_one_warning_of_each_kind_for_an_agent(place: Path | None, caplog: pytest.LogCaptureFixture) -> None:
    async with Rig(place) as rig:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            await rig.go(lies, "one")
            await rig.go(lies, "two")
        assert [each.category for each in caught] == [DeprecationWarning]
        assert caught[0].filename == __file__
        records = [each for each in caplog.records if each.levelno == logging.WARNING]
        assert [each.getMessage() for each in records] == [
            "run 'one' of agent 'script' emitted 'run.cancelled', a type of the runner. The runner stores such an "
            "event with the mark from_agent. Use another name, such as 'myapp.started'"
        ]


async def test_a_run_succeeds_if_warnings_are_errors(place: Path | None) -> None:
    async with Rig(place) as rig:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert await rig.value(lies) == "true"


async def test_a_resumed_run_publishes_each_of_them_once(place: Path | None) -> None:
    async with Rig(place, max_retries=3, retry_backoff_base=0) as rig:

        async def body(ctx: Any) -> str:
            await ctx.emit("run.started", LIE)
            await ctx.step("a", lambda: 1)
            if ctx.attempt == 1:
                raise ConnectionError("once")
            await ctx.emit("run.succeeded", LIE)
            return "true"

        rig.register(body)
        await rig.runner.submit("script", {}, run_id="r")
        while await rig.runner.run_once():
            pass
        assert (await rig.runner.wait("r")).final_output == {"value": "true"}
        marked = [each.event_type for each in await rig.runner.event_bus.get_events("r") if each.from_agent]
        assert marked == ["run.started", "run.succeeded"]


def test_the_command_line_shows_the_mark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def made() -> None:
        async with AgentRunner.open(tmp_path / "a.db") as runner:
            await runner.execute(Liar(), run_id="r")

    asyncio.run(made())
    assert main(["events", "r", "--url", str(tmp_path / "a.db")]) == 0
    shown = capsys.readouterr().out
    assert shown.count(" run.succeeded ") == 1
    assert shown.count(" agent.run.succeeded ") == 1
    assert main(["events", "r", "--url", str(tmp_path / "a.db"), "--json"]) == 0
    events = json.loads(capsys.readouterr().out)
    assert [each["event_type"] for each in events if each.get("from_agent")] == [*TYPES, "run.failed"]
    assert main(["show", "r", "--url", str(tmp_path / "a.db"), "--events"]) == 0
    assert "agent.run.succeeded" in capsys.readouterr().out
