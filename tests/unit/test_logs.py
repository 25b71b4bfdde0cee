"""Log records about a run name the run, the step and the attempt; JsonFormatter writes them as JSON."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, RunContext, RunResult, open_run, tool
from agent_runtime_core._core.ids import step_id
from agent_runtime_core._core.log import log
from agent_runtime_core.planning import BasePlanner, Plan, PlanStep
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner.settings import RunnerConfig
from agent_runtime_core.tracing import JsonFormatter, RunFields
from agent_runtime_core.turns import TurnManager

OWN = logging.getLogger("tests.my_agent")


def registry_of(*agents: AgentRuntime) -> Registry:
    registry = Registry()
    for agent in agents:
        registry.register(agent)
    return registry


class Lines(logging.Handler):
    """Keeps what is logged: the records, and their JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.lines: list[dict[str, Any]] = []
        self.setFormatter(JsonFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.lines.append(json.loads(self.format(record)))

    def of(self, message: str) -> dict[str, Any]:
        [found] = [line for line in self.lines if line["message"].startswith(message)]
        return found


@pytest.fixture
def logged() -> Iterator[Lines]:
    handler = Lines()
    before = {each: each.level for each in (log, OWN)}
    for each in before:
        each.setLevel(logging.DEBUG)
        each.addHandler(handler)
    yield handler
    for each, level in before.items():
        each.removeHandler(handler)
        each.setLevel(level)


class Worker(AgentRuntime):
    key = "worker"

    async def run(self, ctx: RunContext) -> RunResult:
        OWN.info("between steps")
        await ctx.step("fetch", self.fetch)
        await ctx.step("count", self.count)
        await ctx.call("child", {})
        OWN.info("after steps")
        return RunResult()

    async def fetch(self) -> None:
        OWN.info("in a step")
        await asyncio.create_task(self.in_task())

    async def in_task(self) -> None:
        OWN.info("in a task of a step")

    def count(self) -> None:
        OWN.info("in a thread of a step")


class Child(AgentRuntime):
    key = "child"

    async def run(self, ctx: RunContext) -> RunResult:
        OWN.info("in the child")
        return RunResult()


async def test_what_an_agent_logs_has_the_fields_of_its_run_and_step(logged: Lines, tmp_path: Path) -> None:
    async with AgentRunner.open(tmp_path / "agents.db", registry=registry_of(Worker(), Child())) as runner:
        result = await runner.execute(Worker(), input_data={})
    assert result.run_id is not None
    run = {"run_id": str(result.run_id), "trace_id": result.run_id.hex, "attempt": 1}
    for message, step in (
        ("between steps", None), ("in a step", "fetch"), ("in a task of a step", "fetch"),
        ("in a thread of a step", "count"), ("after steps", None),
    ):  # fmt: skip
        line = logged.of(message)
        assert {name: line.get(name) for name in run} == run
        assert line.get("step") == step
        key = "s:0" if step else ""
        assert line.get("step_id") == (step_id(str(result.run_id), step, key) if step else None)
        assert "turn_id" not in line
    child = logged.of("in the child")
    assert child["run_id"] != run["run_id"]
    assert logged.of(f"run {result.run_id} of agent 'worker' finished")["run_id"] == run["run_id"]


async def test_every_record_of_the_library_about_a_run_has_its_fields(logged: Lines, tmp_path: Path) -> None:
    async with AgentRunner.open(tmp_path / "agents.db", registry=registry_of(Worker(), Child())) as runner:
        await runner.execute(Worker(), input_data={})
    about = [record for record in logged.records if record.name == log.name and "run " in record.getMessage()]
    assert about
    for record in about:
        run_id = record.__dict__["run_id"]
        assert run_id in record.getMessage()
        assert record.__dict__["trace_id"] == run_id.replace("-", "")
        assert record.__dict__["attempt"] == 1
        assert "step" in record.__dict__


class Flaky(AgentRuntime):
    key = "flaky"
    failures = 0

    async def run(self, ctx: RunContext) -> RunResult:
        OWN.info("attempt of the run")
        await ctx.step("unreliable", self.unreliable, retries=1, retry_delay=0.0)
        if ctx.attempt == 1:
            raise ValueError("once")
        return RunResult()

    async def unreliable(self) -> None:
        OWN.info("attempt of the step")
        if not Flaky.failures:
            Flaky.failures += 1
            raise ValueError("once")


async def test_attempt_is_that_of_the_step_and_between_steps_that_of_the_run(
    logged: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Flaky, "failures", 0)
    config = RunnerConfig(retry_backoff_base=0.001, retry_backoff_max=0.001)
    async with AgentRunner.open("memory://", registry=registry_of(Flaky()), config=config) as runner:
        await runner.execute(Flaky(), input_data={})
    assert [each["attempt"] for each in logged.lines if each["message"] == "attempt of the run"] == [1, 2]
    assert [each["attempt"] for each in logged.lines if each["message"] == "attempt of the step"] == [1, 2]


@pytest.mark.parametrize("remote", [False, True])
async def test_what_a_turn_logs_has_the_ids_of_turn_and_step(logged: Lines, remote: bool) -> None:
    @tool
    async def look() -> str:
        """Look."""
        OWN.info("in a tool")
        return "seen"

    class Looks(BasePlanner):
        async def create_plan(self, prompt: str, available_tools: Any) -> Plan:
            OWN.info("in the planner")
            return Plan([PlanStep(1, "look", {}, "")], "look")

    class Hook:
        async def on_turn_start(self, turn: Any) -> None:
            OWN.info("in a hook")

    async with AgentRunner.open("memory://", registry=Registry(), config=RunnerConfig()) as runner:
        manager = TurnManager(runner, planner=Looks(), tools=[look], hooks=[Hook()], remote_steps=remote)
        turn = await manager.run_turn("look")
    OWN.info("outside")
    for message in ("in a tool", "in the planner", "in a hook"):
        line = logged.of(message)
        assert line["turn_id"] == turn.id
        assert line["step_id"]
    assert logged.of("in a tool")["step_id"] == turn.steps[0].step_id
    started = logged.of(f"turn {turn.id}: started")
    assert (started["turn_id"], started["run_id"], started["trace_id"]) == (turn.id, turn.id, turn.trace_id)
    assert started["step_id"]
    assert "turn_id" not in logged.of("outside")


async def test_an_open_run_is_named_inside_its_block_only(logged: Lines, tmp_path: Path) -> None:
    async with open_run(tmp_path / "agents.db", "report-1") as ctx:
        OWN.info("inside")
    OWN.info("outside")
    assert logged.of("inside")["run_id"] == str(ctx.run_id)
    assert set(logged.of("outside")) == {"time", "level", "logger", "message"}


def test_a_record_outside_of_runs_has_none_in_each_field() -> None:
    record = logging.LogRecord("any", logging.INFO, "file", 1, "hello", None, None)
    assert RunFields().filter(record)
    assert [record.__dict__[name] for name in ("run_id", "step", "attempt", "trace_id")] == [None] * 4


def test_json_has_one_line_with_time_exception_and_no_password() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("my.app")
    logger.addHandler(handler)
    try:
        raise ValueError("cannot reach redis://me:s3cret@host/0\nnow")
    except ValueError:
        logger.exception("failed at %s with \x1b[31m\ud800", "redis://me:s3cret@host/0")
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert text.isascii()
    assert "s3cret" not in text
    line = json.loads(text)
    assert set(line) == {"time", "level", "logger", "message", "exception"}
    assert (line["level"], line["logger"]) == ("error", "my.app")
    assert line["time"][10] == "T"
    assert line["time"].endswith("Z")
    assert "ValueError: cannot reach" in line["exception"]


CANARY = "canary-7c41"


class Leaking(AgentRuntime):
    """Fails with contents in each error, in the way that `params["how"]` names."""

    key = "leaking"

    async def run(self, ctx: RunContext) -> RunResult:
        how = ctx.params["how"]
        if how == "step":
            await ctx.step("one", self.fail, retries=1, retry_delay=0)
        elif how == "run":
            self.fail()
        elif how == "child":
            await ctx.call(Leaking(), {"params": {"how": "run", "text": CANARY}})
        elif how == "result":
            return RunResult({CANARY: object()})
        elif how == "event":
            await ctx.emit("note", {"text": CANARY})
        return RunResult({"text": CANARY})

    def fail(self) -> None:
        raise ConnectionError(CANARY)


@pytest.mark.parametrize("how", ["step", "run", "child", "result", "event"])
async def test_no_record_has_inputs_results_or_texts_of_errors(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    registry = Registry()
    registry.register(Leaking())
    async with AgentRunner.open(tmp_path / "agents.db", registry=registry) as runner:
        run = await runner.submit(
            "leaking",
            {"messages": [{"role": "user", "content": CANARY}]},
            params={"how": how},
            metadata={"text": CANARY},
        )
        await runner.run_once()
        assert CANARY in str((await runner.get_run(run)).input)
    lines = [JsonFormatter().format(record) for record in caplog.records]
    assert lines
    assert [line for line in lines if CANARY in line] == []


@pytest.mark.parametrize("tenant", ["acme", None])
async def test_a_record_about_a_run_names_its_tenant(logged: Lines, tmp_path: Path, tenant: str | None) -> None:
    async with AgentRunner.open(tmp_path / "agents.db", registry=registry_of(Worker(), Child())) as runner:
        await runner.execute(Worker(), input_data={}, tenant=tenant)
    for message in ("between steps", "in a step", "in a thread of a step", "in the child", "after steps"):
        assert logged.of(message).get("tenant") == tenant
    about = [record for record in logged.records if record.name == log.name and "run " in record.getMessage()]
    assert {record.__dict__["tenant"] for record in about} == {tenant}
