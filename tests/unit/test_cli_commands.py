"""Submit runs, follow their events, answer them, and check the installation."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._core.validation import redacted
from agent_runtime_core.cli import doctor
from agent_runtime_core.cli.completion import commands_of
from agent_runtime_core.cli.doctor import file_system_of
from agent_runtime_core.cli.output import human_size, human_time
from agent_runtime_core.cli.parser import parser
from agent_runtime_core.cli.store import answer_command
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.orchestrator import Orchestrator
from agent_runtime_core.planning import RuleBasedPlanner
from agent_runtime_core.queue.records import RunUpdate
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.turns import TurnManager
from tests.support.backends import POSTGRES, SERVERS
from tests.support.cases import for_each
from tests.support.command_line import ROOT, Commands, on, process
from tests.support.runs import Script

AGENTS = """
from agent_runtime_core import AgentRuntime, RunResult


class Greeter(AgentRuntime):
    key = "greeter"

    async def run(self, ctx):
        if ctx.params.get("fail"):
            raise LookupError("no such name")
        if ctx.params.get("calls"):
            await ctx.step("calls", lambda: ctx.charge(turns=0, tool_calls=ctx.params["calls"]))
        return RunResult({"hello": ctx.params.get("name"), "messages": ctx.input_messages})


class Asker(AgentRuntime):
    key = "asker"

    async def run(self, ctx):
        return RunResult({"answer": await ctx.approve("plan")})


agents = [Greeter, Asker]
"""


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
def run(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Commands:
    """Commands on an empty store; the module of `AGENTS` is in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"agents_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(AGENTS)
    url = request.getfixturevalue(f"{request.param}_url") if request.param in SERVERS else str(tmp_path / "runs.db")
    return Commands(capsys, url, name)


def started(*args: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    """A command in a process of its own, whose output is read while it works."""
    return subprocess.Popen(
        [sys.executable, "-m", "agent_runtime_core", *args], cwd=cwd, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def worked_off(url: str) -> Any:
    """Execute all runs that can be executed."""
    namespace: dict[str, Any] = {}
    exec(AGENTS, namespace)

    async def work(runner: AgentRunner) -> None:
        for each in namespace["agents"]:
            runner.registry.register(each())
        while await runner.run_once():
            pass

    on(url, work)


# -- submit


def test_a_run_is_submitted_by_agent_key(run: Commands) -> None:
    code, out, err = run(
        "submit", "greeter", "--run-id", "hello", "--params", '{"name": "Ada"}', "--message", "Hi", "--input",
        '{"params": {"x": 1}, "messages": [{"role": "system", "content": "Be kind."}]}', "--priority", "5",
        "--max-turns", "3", "--max-cost-usd", "0.5", "--concurrency-key", "ada",
    )  # fmt: skip
    assert (code, out, err) == (0, "run hello of agent greeter submitted\n", "")
    shown = run.json("show", "hello")
    assert shown["input"] == {
        "params": {"x": 1, "name": "Ada"},
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
        "limits": {"max_turns": 3, "max_cost_usd": 0.5},
    }
    assert (shown["priority"], shown["concurrency_key"], shown["agent_key"]) == (5, "ada", "greeter")
    worked_off(run.url)
    assert run.json("show", "hello")["status"] == "succeeded"


def test_a_run_id_is_stored_once(run: Commands) -> None:
    first = run.json("submit", "greeter", "--run-id", "hello")
    assert (first["run_key"], first["status"], first["existed"]) == ("hello", "pending", False)
    assert run.json("submit", "greeter", "--run-id", "hello") == {**first, "existed": True}
    _, out, _ = run("submit", "greeter", "--run-id", "hello")
    assert out == "run hello of agent greeter exists already and is pending\n"
    code, out, err = run("submit", "greeter", "--run-id", "hello", "--input", '{"a": 1}')
    assert (code, out, "another input" in err) == (1, "", True)
    assert len(run.json("runs")) == 1


def test_an_idempotency_key_is_stored_once(run: Commands) -> None:
    first = run.json("submit", "greeter", "--idempotency-key", "order 7")
    assert (first["status"], first["existed"]) == ("pending", False)
    assert run.json("submit", "greeter", "--idempotency-key", "order 7") == {**first, "existed": True}
    _, out, _ = run("submit", "greeter", "--idempotency-key", "order 7", "--run-id", "another")
    assert out == f"run {first['run_id']} of agent greeter exists already and is pending\n"
    code, out, err = run("submit", "greeter", "--idempotency-key", "order 7", "--input", '{"a": 1}')
    assert (code, out, "another input" in err) == (1, "", True)
    other = run.json("submit", "greeter", "--idempotency-key", "order 7", "--tenant", "acme")
    assert (other["existed"], len(run.json("runs"))) == (False, 2)


def test_a_run_is_submitted_by_module(run: Commands) -> None:
    module = run.module
    assert run.json("submit", f"{module}:Greeter")["agent_key"] == "greeter"
    assert run.json("submit", f"{module}:agents", "--agent", "asker")["agent_key"] == "asker"
    code, _, err = run("submit", f"{module}:agents")
    assert (code, "must have one agent, got 2. Use --agent KEY: greeter, asker" in err) == (2, True)
    code, _, err = run("submit", f"{module}:agents", "--agent", "askr")
    assert (code, "unknown agent 'askr'. Did you mean 'asker'?" in err) == (2, True)
    code, _, err = run("submit", "greeter", "--agent", "greeter")
    assert (code, "--agent must be used with module:attr" in err) == (2, True)
    code, _, err = run("submit", f"{module}:Greter")
    assert (code, "Did you mean 'Greeter'?" in err) == (2, True)


def test_a_mistyped_agent_key_is_reported(run: Commands) -> None:
    run("submit", "greeter")
    code, _, err = run("submit", "greter")
    assert (code, err) == (0, "agent-runtime: no other run has agent 'greter'. Did you mean 'greeter'?\n")
    code, _, err = run("runs", "--agent", "asker")
    assert (code, err) == (0, "")
    code, _, err = run("runs", "--agent", "greterr")
    assert (code, "Did you mean" in err) == (0, True)


@pytest.mark.parametrize(
    ("given", "option", "kind"),
    [
        ('{"params": [1]}', ("--params", "{}"), "object"),
        ('{"messages": 3}', ("--message", "Hi"), "array"),
        ('{"limits": "few"}', ("--max-turns", "3"), "object"),
    ],
)
def test_an_option_cannot_add_to_another_type(run: Commands, given: str, option: tuple[str, str], kind: str) -> None:
    code, out, err = run("submit", "greeter", "--input", given, *option)
    assert (code, out, f"in --input must be a JSON {kind}, got" in err) == (2, "", True)
    assert len(err.splitlines()) == 1


def test_an_empty_agent_key(run: Commands) -> None:
    code, _, err = run("submit", "")
    assert (code, "AGENT must be an agent key" in err) == (2, True)


def test_a_url_without_scheme_keeps_its_password(tmp_path: Path) -> None:
    done = process("submit", "greeter", "--url", "ada:hunter2@host/0", cwd=tmp_path)
    assert (done.returncode, "hunter2" in done.stderr, "redis://" in done.stderr) == (2, False, True)


NOISY = """
import sys
from agent_runtime_core import AgentRuntime, RunResult
from agent_runtime_core.events import EventBus

print("noise of the import")
if "exits" in __name__:
    sys.exit(4)


class Noisy(AgentRuntime):
    key = "noisy"

    async def run(self, ctx):
        await ctx.step("one", int)
        print("noise of the code")
        await ctx.approve("plan")
        return RunResult()


class Bus(EventBus):
    def __init__(self):
        print("noise of the backend")
"""


def test_what_user_code_prints_is_not_in_the_output(tmp_path: Path) -> None:
    url = str(tmp_path / "runs.db")
    (tmp_path / "noisy.py").write_text(NOISY)
    done = process("submit", "noisy:Noisy", "--run-id", "r", "--json", "--url", url, cwd=tmp_path)
    assert (json.loads(done.stdout)["run_key"], "noise of the import" in done.stderr) == ("r", True)
    on(url, _one_attempt)
    done = process("check", "noisy:Noisy", "--json", "--url", url, cwd=tmp_path)
    assert (json.loads(done.stdout)["resumes"], "noise of the code" in done.stderr) == (1, True)
    done = process("conformance", "noisy:Bus", "--case", "closing", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["contract"] == "events"


async def _one_attempt(runner: AgentRunner) -> None:
    async def code(ctx: Any) -> None:
        await ctx.step("one", int)
        await ctx.approve("plan")

    runner.registry.register(Script(code, "noisy"))
    assert await runner.run_once()


def test_a_module_that_exits(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text(NOISY)
    done = process("conformance", "exits:Bus", cwd=tmp_path)
    assert (done.returncode, "module 'exits' runs a program when it is imported" in done.stderr) == (2, True)


def test_a_delay_and_a_deadline(run: Commands) -> None:
    run("submit", "greeter", "--run-id", "later", "--delay", "2h", "--deadline", "2099-01-01T00:00Z")
    shown = run.json("show", "later")
    assert shown["deadline"] == "2099-01-01T00:00:00+00:00"
    assert "(in 1 h)" in run("show", "later")[1].split("scheduled at")[1].splitlines()[0]
    assert shown["created_at"] < shown["scheduled_at"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_run_is_awaited(run: Commands, fails: bool) -> None:
    params = '{"fail": true}' if fails else '{"name": "Ada"}'
    submitting = ("submit", "greeter", "--run-id", "hello", "--params", params, "--wait")
    with started(*submitting, "--url", run.url) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "run hello of agent greeter submitted\n"
        worked_off(run.url)
        out, err = child.communicate(timeout=60)
    if fails:
        assert (child.returncode, out) == (1, "")
        assert err.endswith("agent-runtime: run 'hello' is failed: LookupError: no such name\n")
    else:
        assert (child.returncode, "agent-runtime:" in err) == (0, False)
        assert out == 'run hello succeeded: {"hello": "Ada", "messages": []}\n'
    code, out, _ = run(*submitting, "--json")
    assert (code, json.loads(out)["status"]) == ((1, "failed") if fails else (0, "succeeded"))


def test_ctrl_c_ends_the_wait_and_not_the_run(run: Commands) -> None:
    with started("submit", "greeter", "--run-id", "hello", "--wait", "--url", run.url) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=60)
    assert child.returncode == 130
    assert run.json("show", "hello")["status"] == "pending"


def test_an_agent_key_with_a_colon(run: Commands) -> None:
    assert run.json("submit", "--agent", "acme:importer")["agent_key"] == "acme:importer"
    code, _, err = run("submit")
    assert (code, "AGENT must be an agent key or module:attr, got none" in err) == (2, True)


# -- events and waits


def test_events_are_shown(run: Commands) -> None:
    run("submit", "greeter", "--run-id", "hello", "--params", '{"name": "Ada"}')
    worked_off(run.url)
    code, out, err = run("events", "hello")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["0", "1"]
    assert re.search(r"^1 +\d{4}-\d\d-\d\d \d\d:\d\d UTC \(\d+ s ago\) +run\.succeeded +\{\"final_output\"", out, re.M)
    found = run.json("events", "hello")
    assert [each["event_type"] for each in found] == ["run.started", "run.succeeded"]
    assert found == run.json("show", "hello", "--events")["events"]
    assert [each["sequence"] for each in run.json("events", "hello", "--since", "1")] == [1]
    assert [each["event_type"] for each in run.json("events", "hello", "--type", "run.s*")] == [
        "run.started",
        "run.succeeded",
    ]
    code, out, err = run("events", "hello", "--type", "run.succeded")
    assert (code, out) == (0, "")
    assert err == "agent-runtime: run 'hello' has no event of type 'run.succeded'. Did you mean 'run.succeeded'?\n"
    assert run("events", "nix")[0] == 1


def test_events_after_a_sequence_number_begin_with_the_next_one(run: Commands) -> None:
    run("submit", "greeter", "--run-id", "hello", "--params", '{"name": "Ada"}')
    worked_off(run.url)
    assert [each["sequence"] for each in run.json("events", "hello", "--after", "0")] == [1]
    code, out, _ = run("events", "hello", "--follow", "--after", "0", "--json")
    assert (code, [json.loads(line)["sequence"] for line in out.splitlines()]) == (0, [1])
    code, out, err = run("events", "hello", "--after", "0", "--since", "1")
    assert (code, out) == (2, "")
    assert "not allowed with argument" in err


def test_a_run_is_exported_line_by_line(run: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_runtime_core._views.export._PAGE", 1)
    message = "caf\u00e9 \u202e redis://me:hunter2@host/0"
    given = {"messages": [{"role": "user", "content": message}]}
    run("submit", "greeter", "--run-id", "hello", "--input", json.dumps(given))
    worked_off(run.url)
    code, out, err = run("export", "hello", "--jsonl")
    assert (code, err) == (0, "")
    assert "\u202e" not in out
    assert "hunter2" not in out
    lines = [json.loads(line) for line in out.splitlines()]
    assert [*dict.fromkeys(each["kind"] for each in lines)] == ["run", "record", "event", "message"]
    assert (lines[0]["key"], lines[0]["state"], lines[0]["input"]["messages"][0]["role"]) == (
        "hello",
        "succeeded",
        "user",
    )
    assert [each["type"] for each in lines if each["kind"] == "event"] == ["run.started", "run.succeeded"]
    assert lines[-1]["message"]["content"].startswith("caf\u00e9")
    assert run("export", "nix", "--jsonl")[0] == 1


def test_runs_are_filtered_by_time_conversation_and_prefix(run: Commands) -> None:
    conversation = "5f0a3c1e-7d44-4b7e-9a53-2c1f0b6e8d91"
    run("submit", "greeter", "--run-id", "order-1", "--input", json.dumps({"conversation_id": conversation}))
    run("submit", "greeter", "--run-id", "order-2")
    run("submit", "greeter", "--run-id", "100%")

    def keys(*options: str) -> list[str]:
        return [each["run_key"] for each in run.json("runs", *options)]

    assert keys() == ["order-1", "order-2", "100%"]
    assert keys("--limit", "2") == ["order-2", "100%"]
    assert keys("--prefix", "order-") == ["order-1", "order-2"]
    assert keys("--prefix", "100%") == ["100%"]
    assert keys("--prefix", "%") == []
    assert keys("--conversation", conversation) == ["order-1"]
    assert keys("--since", "1h") == ["order-1", "order-2", "100%"]
    assert keys("--until", "1h") == []
    assert keys("--since", "2020-01-01", "--until", "2020-02-01") == []
    assert run("runs", "--since", "soon")[0] == 2


def test_events_are_followed_until_the_run_has_finished(run: Commands) -> None:
    run("submit", "greeter", "--run-id", "hello", "--params", '{"name": "Ada"}')
    with started("events", "hello", "--follow", "--json", "--url", run.url) as child:
        worked_off(run.url)
        out, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    assert [json.loads(line)["event_type"] for line in out.splitlines()] == ["run.started", "run.succeeded"]


def test_ctrl_c_ends_the_following(run: Commands) -> None:
    run("submit", "asker", "--run-id", "asks")
    worked_off(run.url)
    with started("events", "asks", "--follow", "--url", run.url) as child:
        assert child.stdout is not None
        assert "run.started" in child.stdout.readline()
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=60)
    assert child.returncode == 130


def test_a_waiting_run_shows_the_command_that_answers_it(run: Commands) -> None:
    run("submit", "asker", "--run-id", "order 7")
    worked_off(run.url)
    out = run("show", "order 7")[1]
    [command] = re.findall(r"^answer with +(.*)$", out, re.M)
    assert command == f"agent-runtime approve 'order 7' plan --url {_shell_word(redacted(run.url))}"
    code, out, _ = run("approve", "order 7", "plan")
    assert (code, out) == (0, "the answer to 'plan' is stored for run order 7\n")
    assert "answer with" not in run("show", "order 7")[1]


def test_a_run_that_a_limit_ended_shows_the_command_that_raises_it(run: Commands) -> None:
    run("submit", "greeter", "--run-id", "order 7", "--params", '{"calls": 3}', "--max-tool-calls", "2")
    worked_off(run.url)
    out = run("show", "order 7")[1]
    assert "LimitExceeded: limit reached: max_tool_calls=2, used 3\n" in out
    [command] = re.findall(r"^raise it with +(.*)$", out, re.M)
    assert command == f"agent-runtime resume --max-tool-calls HIGHER 'order 7' --url {_shell_word(redacted(run.url))}"
    words = shlex.split(command.replace("HIGHER", "5").replace(redacted(run.url), run.url))
    assert run(*words[1:])[0] == 0
    assert "raise it with" not in run("show", "order 7")[1]


def _shell_word(text: str) -> str:
    return f"'{text}'" if "?" in text else text


def test_the_answer_shows_no_password() -> None:
    args = parser().parse_args(["show", "-", "--url", "redis://me:secret@host/0"])
    assert answer_command(args, {"kind": "signal", "name": "paid"}) == (
        "agent-runtime signal --url 'redis://***@host/0' -- - paid PAYLOAD"
    )


def test_a_signal_that_the_run_does_not_wait_for_is_stored_with_a_warning(run: Commands) -> None:
    async def fill(runner: AgentRunner) -> None:
        async def waits(ctx: Any) -> Any:
            return await ctx.wait_for_signal("paid")

        runner.registry.register(Script(waits))
        await runner.submit("script", run_id="waits")
        assert await runner.run_once()

    on(run.url, fill)
    code, out, err = run("signal", "waits", "payd")
    assert (code, out) == (0, "signal 'payd' is stored for run waits\n")
    assert err == (
        "agent-runtime: run 'waits' is waiting for signal 'paid'. Signal 'payd' is kept until the run waits for it\n"
    )
    assert run("signal", "waits", "paid")[2] == ""


def test_an_unknown_run_is_answered_with_the_nearest_or_the_newest(run: Commands) -> None:
    run("submit", "greeter")
    assert run("show", "nix")[2].startswith("agent-runtime: run 'nix' not found. The newest run is '")
    for n in range(6):
        run("submit", "greeter", "--run-id", f"order-{n}")
    assert run("show", "oder-3")[2] == "agent-runtime: run 'oder-3' not found. Did you mean 'order-3'?\n"
    newest = "'order-1', 'order-2', 'order-3', 'order-4', 'order-5'"
    assert run("show", "nix")[2] == f"agent-runtime: run 'nix' not found. The newest runs are {newest}.\n"
    run_id = run.json("runs")[0]["run_id"]
    assert run("show", run_id[:13])[2] == f"agent-runtime: run '{run_id[:13]}' not found. Did you mean '{run_id}'?\n"


# -- times


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the zone cannot be changed")
@pytest.mark.parametrize(
    ("zone", "shown"),
    [
        ("UTC", "2026-11-25 19:41 UTC ("),
        ("CET-1", "2026-11-25 19:41 UTC (20:41 local, "),
        ("JST-9", "2026-11-25 19:41 UTC (2026-11-26 04:41 local, "),
    ],
)
def test_a_time_for_people(zone: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert human_time("2026-11-25T19:41:30+00:00").startswith(shown)
        assert human_time("2026-11-25T20:41:30+01:00").startswith(shown)
        assert "local" not in human_time("2026-11-25T19:41:30+00:00", local=False)
        assert human_time("2999-01-01T00:00:00+00:00", local=False).startswith("2999-01-01 00:00 UTC (in 35")
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_size_for_people() -> None:
    sizes = (0, 1023, 1024, 86_016, 3 * 1024**3, 5 * 1024**4)
    assert [*map(human_size, sizes)] == ["0 bytes", "1023 bytes", "1.0 KiB", "84.0 KiB", "3.0 GiB", "5.0 TiB"]


# -- doctor


def findings(run: Commands, *options: str) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for each in run.json("doctor", *options)["checks"]:
        found.setdefault(each["check"], []).append(each)
    return found


def test_a_healthy_store(run: Commands) -> None:
    run("submit", "asker", "--run-id", "asks")
    worked_off(run.url)
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    assert re.search(r"^ok +runs +1 waiting$", out, re.M)
    assert re.search(r"^\d+ errors?, \d+ warnings?$", out.splitlines()[-1])
    found = findings(run)
    for check in ("library", "python", "sqlite", "extras", "settings", "store"):
        assert [each["status"] for each in found[check]] == ["ok"]
    extras = set(metadata.metadata("agent-runtime-core").get_all("Provides-Extra") or ()) - {"all", "dev", "docs"}
    shown = found["extras"][0]["detail"].replace(";", ",").split(", ")
    assert {each.removeprefix("not ").removeprefix("installed: ").split(" ")[0] for each in shown} - {"none"} == extras
    if "://" not in run.url:
        assert found["journal mode"][0]["detail"] == "wal"
        assert found["permissions"][0]["status"] == "ok"
        assert out.endswith("0 errors, 0 warnings\n")


@pytest.mark.redis
def test_unsafe_settings_of_redis(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(Commands(capsys, redis_url))["redis"]
    assert any("appendonly is 'no'" in each["detail"] and "CONFIG SET" in each["fix"] for each in found)
    assert {each["status"] for each in found} == {"warning"}


API, SDK, EXPORTER = "opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"
EXTRA, NEEDS = "'agent-runtime-core[otel]'", "needs: pip install"


@for_each(
    ("there", "sinks", "status", "said"),
    [
        ([API, SDK, EXPORTER], [], "ok", f"installed: {API} 7, {SDK} 7, {EXPORTER} 7; not installed: none"),
        ([API, SDK], [], "ok", f"not installed: {EXPORTER}. OpenTelemetrySink without exporter= {NEEDS} {EXPORTER}"),
        ([API, SDK], ["opentelemetry"], "error", f"not installed: {EXPORTER}. OpenTelemetrySink {NEEDS} {EXPORTER}"),
        ([API], [], "ok", f"not installed: {SDK}, {EXPORTER}. OpenTelemetrySink {NEEDS} {EXTRA} {EXPORTER}"),
        (
            [],
            ["agent_runtime_core.tracing:OpenTelemetrySink"],
            "error",
            f"installed: none; not installed: {API}, {SDK}, {EXPORTER}. OpenTelemetrySink {NEEDS} {EXTRA} {EXPORTER}",
        ),
        ([EXPORTER, API, SDK], ["opentelemetry"], "ok", "not installed: none"),
        ([], ["langfuse"], "", ""),
        ([], [], "", ""),
    ],
)
def test_doctor_shows_which_parts_of_opentelemetry_are_there(
    there: list[str], sinks: list[str], status: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: "7" if package in there else None)
    configure(trace_sinks=sinks)
    try:
        found = [(each.status, f"{each.detail}. {each.fix}".rstrip(". ")) for each in doctor._opentelemetry()]
    finally:
        reset_config()
    assert [each[0] for each in found] == [status] * bool(said)
    assert all(each[1].endswith(said) for each in found)


def test_doctor_of_a_copy_that_is_not_installed_knows_no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(package: str) -> list[str]:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "requires", requires)
    [extras] = [each.detail for each in doctor._versions() if each.check == "extras"]
    assert extras == "unknown, because this copy of the library was not installed"


def test_doctor_suggests_only_similar_variables(tmp_path: Path) -> None:
    variables = {
        "AGENT_RUNTIME_FOO": "1",
        "AGENT_RUNTIME_OPENAI_API_KEY": "sk-hunter2",
        "AGENT_RUNTIME_MAX_RETRYS": "3",
    }
    done = process("doctor", "--json", cwd=tmp_path, **variables)
    fixes = {each["detail"].split()[2]: each["fix"] for each in json.loads(done.stdout)["checks"]
             if each["check"] == "variable"}  # fmt: skip
    assert fixes == {
        "AGENT_RUNTIME_FOO": "Remove it, unless another program reads it",
        "AGENT_RUNTIME_OPENAI_API_KEY": "Did you mean 'OPENAI_API_KEY'?",
        "AGENT_RUNTIME_MAX_RETRYS": "Did you mean 'AGENT_RUNTIME_MAX_RETRIES'?",
    }
    assert "hunter2" not in done.stdout + done.stderr


def test_doctor_prints_an_infinite_limit_as_json(tmp_path: Path) -> None:
    done = process("doctor", "--json", cwd=tmp_path, AGENT_RUNTIME_RUN_TIMEOUT_SECONDS="inf")
    settings = json.loads(done.stdout, parse_constant=pytest.fail)["settings"]
    assert [each["value"] for each in settings if each["name"] == "run_timeout_seconds"] == ["inf"]


def test_doctor_does_not_write_to_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    done = process("doctor", "--url", "empty.db", cwd=tmp_path)
    assert (done.returncode, "empty.db is empty: no process has stored a run in it" in done.stdout) == (0, True)
    assert [(each.name, each.stat().st_size) for each in tmp_path.iterdir()] == [("empty.db", 0)]


def test_doctor_of_a_directory(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    done = process("doctor", "--url", str(tmp_path), cwd=tmp_path)
    assert (done.returncode, "must be a file" in done.stdout, "chmod" in done.stdout) == (1, True, False)


def test_doctor_in_a_process_of_its_own(tmp_path: Path) -> None:
    variables = {"AGENT_RUNTIME_PARK_AFTR": "3", "AGENT_RUNTIME_PARK_AFTER": "7", "OPENAI_API_KEY": "sk-very-secret"}
    done = process("doctor", cwd=tmp_path, **variables)
    assert done.returncode == 0
    assert "very-secret" not in done.stdout + done.stderr
    assert "park_after=7 (AGENT_RUNTIME_PARK_AFTER)" in done.stdout
    assert "openai_api_key='***' (OPENAI_API_KEY)" in done.stdout
    assert "environment variable AGENT_RUNTIME_PARK_AFTR is not a setting. Did you mean" in done.stdout
    assert "warning  store         runs are in memory" in done.stdout
    done = process("doctor", "--url", "nowhere.db", cwd=tmp_path)
    assert (done.returncode, "error    store         store 'nowhere.db' not found" in done.stdout) == (1, True)
    assert not (tmp_path / "nowhere.db").exists()
    done = process("doctor", cwd=tmp_path, AGENT_RUNTIME_MAX_RETRIES="many")
    assert (done.returncode, "error    settings" in done.stdout) == (1, True)


def test_settings_have_a_source(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_RUNTIME_MAX_RETRIES", "5")
    configure(park_after=9)
    try:
        told = Commands(capsys).json("doctor")
    finally:
        reset_config()
    sources = {each["name"]: (each["value"], each["source"]) for each in told["settings"]}
    assert sources["max_retries"] == (5, "AGENT_RUNTIME_MAX_RETRIES")
    assert sources["park_after"] == (9, "configure")
    assert sources["durability"] == ("full", "default")


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
def test_files_that_others_can_read_or_replace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = tmp_path / "inside" / "runs.db"
    url.parent.mkdir()
    on(str(url), lambda runner: runner.submit("a"))
    url.chmod(0o644)
    url.parent.chmod(0o777)
    found = findings(Commands(capsys, str(url)))
    assert [each["status"] for each in found["permissions"]] == ["warning", "warning"]
    assert [each["fix"] for each in found["permissions"]] == [f"chmod 600 {url}", f"chmod o-w {url.parent}"]


def test_a_file_that_is_no_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs.db").write_text("no database, but long enough to be read as a header of one" * 20)
    run = Commands(capsys, str(tmp_path / "runs.db"))
    assert run("doctor")[0] == 1
    assert {each["status"] for each in findings(run)["store"]} == {"error"}


@pytest.mark.redis
def test_a_server_that_cannot_be_reached(capsys: pytest.CaptureFixture[str]) -> None:
    run = Commands(capsys, "redis://me:secret@127.0.0.1:1/0")
    code, out, err = run("doctor")
    assert (code, "secret" in out + err) == (1, False)
    assert "redis://127.0.0.1:1/0 cannot be reached" in out


def test_runs_that_need_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Commands(capsys, str(tmp_path / "runs.db"))

    async def fill(runner: AgentRunner) -> None:
        clock = runner.queue.clock
        real, clock.wall = clock.wall, lambda: real() - 30 * 86_400
        try:
            await runner.submit("asker", run_id="asks")
            await runner.submit("poison", run_id="poison")
            claimed = await runner.queue.claim("w", 60, agent_keys=["poison"])
            assert claimed is not None
            await runner.queue.settle(str(claimed.run_id), RunUpdate(claimed.claim_id, "dead", clock.wall()))
            await runner.submit("slow", run_id="first", concurrency_key="k")
            await runner.submit("slow", run_id="second", concurrency_key="k")
            for name, reason in (("older", "code of another version"), ("sealed", "UnknownEncryptionKey")):
                await runner.submit("poison", run_id=name)
                claimed = await runner.queue.claim("w", 60, agent_keys=["poison"])
                assert claimed is not None
                update = RunUpdate(claimed.claim_id, "pending", clock.wall(), due_at=clock.wall() + 60, reason=reason)
                await runner.queue.settle(str(claimed.run_id), update)
        finally:
            clock.wall = real

    on(run.url, fill)
    told = [(each["status"], each["detail"]) for each in findings(run)["runs"]]
    assert told == [
        ("ok", "5 pending, 1 dead"),
        ("warning", "asks, first: pending for more than 1 h"),
        ("warning", "second: blocked by their concurrency key for more than 1 h"),
        ("warning", "older: left by workers whose code is of another version"),
        ("warning", "sealed: left by workers that lack their key"),
        ("warning", "1 in the dead-letter queue"),
    ]


def test_the_file_system_of_a_path(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "22 21 0:45 / /home/my\\040share rw - nfs4 server:/share rw\n"
        "torn line\n"
    )
    assert file_system_of("/var/lib/runs.db", str(mounts)) == "ext4"
    assert file_system_of("/home/my share/runs.db", str(mounts)) == "nfs4"
    assert file_system_of("/home/my shared/runs.db", str(mounts)) == "ext4"
    assert file_system_of("/runs.db", str(tmp_path / "none")) is None


# -- conformance


def test_a_good_queue_conforms(tmp_path: Path) -> None:
    target = "tests.contract.third_party.their_queue:TheirQueue"
    done = process("conformance", target, "--agent-path", str(ROOT), "--case", "claim", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    *cases, of_objects, of_names, queues = done.stdout.splitlines()[1:]
    passed, total = re.fullmatch(r"(\d+) of (\d+) queue tests passed", queues).groups()  # type: ignore[union-attr]
    assert passed == total != "0"
    assert {line.split()[0] for line in cases} == {"ok"}
    assert re.fullmatch(
        r"not run: \d+ tests with several objects, because no --option names a new store .*", of_objects
    )
    assert re.fullmatch(r"not run: \d+ tests without 'claim' in their name", of_names)


BROKEN = """
from agent_runtime_core.events import SQLiteEventBus
from agent_runtime_core.queue import SQLiteQueue
from agent_runtime_core.state import InMemoryStateStore, SQLiteStateStore

PLACES = []


class Forgetful(InMemoryStateStore):
    def __init__(self, **options):
        super().__init__(**options)

    async def read(self, what, *args):
        found = await super().read(what, *args)
        return [] if what == "records" else found


class InFile(SQLiteStateStore):
    def __init__(self, path, flag=None, **options):
        PLACES.append((path, flag))
        super().__init__(path, **options)


def make(**options):
    return InMemoryStateStore(**options)


class OfOneObject(InMemoryStateStore):
    def __init__(self, path, **options):
        super().__init__(**options)


def three(path, **options):
    return SQLiteQueue(path, **options), SQLiteEventBus(path, **options), SQLiteStateStore(path, **options)
"""


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / f"broken_{tmp_path.name}.py").write_text(BROKEN)
    return f"broken_{tmp_path.name}"


def test_a_broken_store_does_not_conform(broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = Commands(capsys)
    code, out, err = run("conformance", f"{broken}:Forgetful")
    assert (code, err) == (1, "")
    failed = [line for line in out.splitlines() if line.startswith("failed ")]
    assert failed
    told = run.json("conformance", f"{broken}:Forgetful")
    assert (told["contract"], told["failed"]) == ("state", len(failed))
    assert all(each["error"] for each in told["cases"] if each["outcome"] == "failed")
    assert "tests of whole runs, because other tests failed" in [each["what"] for each in told["not_run"]]


def test_a_document_store_conforms(capsys: pytest.CaptureFixture[str]) -> None:
    target = "agent_runtime_core.persistence.documents.sqlite:SQLiteDocuments"
    code, out, err = Commands(capsys)("conformance", target, "--option", "path={tmp}/a.db", "--case", "claim")
    assert (code, err) == (0, ""), out
    assert "documents tests passed" in out
    assert "a_superseded_claim_writes_nothing" in out


def test_options_of_a_backend(broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = Commands(capsys)
    options = ("--option", "path={tmp}/{n}.db", "--option", "flag=[1]", "--case", "checkpoint")
    code, out, err = run("conformance", f"{broken}:InFile", *options)
    assert (code, err) == (0, ""), out
    places = sys.modules[broken].PLACES
    assert len({path for path, _ in places}) == len(places) > 1
    assert {str(flag) for _, flag in places} == {"[1]"}
    assert not any(Path(path).parent.exists() for path, _ in places), "the directories are deleted"
    assert run("conformance", f"{broken}:make", "--contract", "state", "--case", "checkpoint")[0] == 0


def test_objects_that_share_nothing_do_not_conform(broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("conformance", f"{broken}:OfOneObject", "--option", "path={tmp}/a.db")
    told = Commands(capsys).json(*arguments, "--case", "opened_again")
    assert [(each["outcome"], each["contract"]) for each in told["cases"]] == [("failed", "state")]
    assert "after the first object was closed" in told["cases"][0]["error"]
    assert not any("several objects" in each["what"] for each in told["not_run"])
    assert Commands(capsys)(*arguments, "--case", "through_both")[0] == 1


def test_whole_runs_of_a_function_that_opens_three_backends(broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = Commands(capsys)(
        "conformance", f"{broken}:three", "--contract", "runs", "--option", "path={tmp}/a.db", "--case", "by_another"
    )
    assert (code, err) == (0, ""), out
    assert "4 of 4 runs tests passed" in out, "two of them with a second set of objects"


@pytest.mark.parametrize("url", ["sqlite:///{tmp}/a.db", "memory://", pytest.param("", marks=pytest.mark.redis)])
def test_a_url_conforms(url: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    url = url or f"{request.getfixturevalue('redis_url')}-{{n}}"
    for case in ("opened_again", "superseded", "together", "by_another"):
        code, out, err = Commands(capsys)("conformance", url, "--case", case)
        assert (code, err) == (0, ""), out
    assert re.search(r"not run: \d+ tests of a document store, because its class must be named", out)
    assert "4 of 4 runs tests passed" in out
    one = Commands(capsys).json("conformance", url, "--case", "opened_again", "--contract", "events")
    assert [each["contract"] for each in one["cases"]] == ["events"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sqlite:///a.db"], "URL must contain {tmp} or {n}, so that each test has an empty store"),
        (["sqlite:///{tmp}/a.db", "--option", "a=1"], "--option must be used with a class"),
        (["sqlite:///{tmp}/a.db", "--contract", "llm"], "must be one of queue, events, state, runs, got llm"),
        (["nowhere://{n}"], "store URL must be memory://"),
        (["{m}:make"], "--contract must be used with a function"),
        (["{m}:Forgetfull"], "has no 'Forgetfull'. Did you mean 'Forgetful'?"),
        (["{m}:PLACES"], "--contract must be used with a function"),
        (["{m}:Forgetful", "--case", "zzz"], "--case must be part of the name of a test, got 'zzz'"),
        (["{m}:Forgetful", "--option", "x"], "--option must be NAME=VALUE, got 'x'"),
        (["pathlib:Path"], "must have a base class such as RunQueue, EventBus or StateStore"),
        (["agent_runtime_core.testing:MockLLMClient"], "is a model client, and its tests need a provider"),
    ],
)
def test_what_cannot_be_tested(
    arguments: list[str], said: str, broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = Commands(capsys)("conformance", *(each.replace("{m}", broken) for each in arguments))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert said in err


# -- completion


def completed(shell: str, script: Path, words: list[str]) -> list[str]:
    """What the shell offers for the last word."""
    quoted = " ".join(f"'{each}'" for each in words)
    if shell == "bash":
        code = (
            f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _agent_runtime; "
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        call = ["bash", "--norc", "-c", code]
    else:
        call = ["fish", "--no-config", "-c", f'source {script}; complete -C "{" ".join(words)}"']
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return [line.partition("\t")[0] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_shell_completes_commands_options_and_values(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    done = process("completion", shell, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    script = tmp_path / f"completion.{shell}"
    script.write_text(done.stdout)
    for words, offered in (
        (["s"], ["schedule", "send", "serve", "show", "signal", "submit"]),
        (["dead", ""], ["discard", "list", "requeue"]),
        (["dead", "req"], ["requeue"]),
        (["dead", "requeue", "--al"], ["--all"]),
        (["runs", "--status", "fa"], ["failed"]),
        (["show", "order-7", "--ev"], ["--events"]),
        (["completion", ""], ["bash", "fish", "zsh"]),
        (["--v"], ["--version"]),
    ):
        assert sorted(completed(shell, script, ["agent-runtime", *words])) == offered, words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_has_all_commands_and_no_help_breaks_it(shell: str, tmp_path: Path) -> None:
    script = process("completion", shell, cwd=tmp_path).stdout
    for each in commands_of(parser()):
        assert all(word in script for word in each.words)
        assert all(option.lstrip("-") in script for option in each.options)
    (tmp_path / "script").write_text(script)
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True, timeout=60)


def test_a_script_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    told = Commands(capsys).json("completion", "bash")
    assert (told["shell"], told["script"].splitlines()[-1]) == (
        "bash",
        "complete -o default -F _agent_runtime agent-runtime",
    )


# -- a worker


def test_a_worker_writes_json(tmp_path: Path) -> None:
    (tmp_path / "my_agents.py").write_text(AGENTS)
    options = ("my_agents:agents", "--url", "runs.db", "--json", "--grace", "1s", "--poll", "500ms")
    with started("worker", *options, cwd=tmp_path) as child:
        assert child.stdout is not None
        ready = json.loads(child.stdout.readline())
        assert {**ready, "worker": ""} == {
            "worker": "", "ready": True, "store": "runs.db", "agents": ["greeter", "asker"], "concurrency": 1,
        }  # fmt: skip
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, "")
    logged = [json.loads(line) for line in err.splitlines()]
    assert logged[-1]["message"] == f"worker {ready['worker']} has stopped"
    assert {*logged[-1]} == {"time", "level", "logger", "message"}


TURNS = """
from agent_runtime_core import AgentRunner
from agent_runtime_core.orchestrator import Orchestrator
from agent_runtime_core.planning import RuleBasedPlanner
from agent_runtime_core.turns import TurnManager

def turns():
    return TurnManager(AgentRunner.open("runs.db"), planner=RuleBasedPlanner())

def prompts():
    return Orchestrator(runner=AgentRunner.open("runs.db"))

def in_memory():
    return TurnManager(AgentRunner())
"""


@pytest.mark.parametrize(("target", "key"), [("turns", "turn"), ("prompts", "orchestrator")])
async def test_a_worker_executes_turns_and_prompts(target: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(TURNS)
    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        with started("worker", f"served:{target}", "--json", "--log-level", "error", cwd=tmp_path) as child:
            assert child.stdout is not None
            ready = json.loads(await asyncio.to_thread(child.stdout.readline))
            assert (ready["ready"], key in ready["agents"]) == (True, True)
            if target == "turns":
                turn = await TurnManager(runner, planner=RuleBasedPlanner()).start_turn("add 1 and 2")
                done: Any = (await runner.wait(turn.id, 60)).final_output["response"]
            else:
                orchestrator = Orchestrator(runner=runner, work=False)
                run = await orchestrator.create_run(prompt="add 1 and 2")
                done = (await orchestrator.wait(run.run_id, 60)).result
            child.send_signal(signal.SIGTERM)
            await asyncio.to_thread(child.communicate, timeout=60)
    assert (str(done), child.returncode) == ("3", 0)


def test_a_worker_needs_turns_that_are_stored(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(TURNS)
    done = process("worker", "served:in_memory", cwd=tmp_path)
    assert (done.returncode, "must not store runs in memory" in done.stderr) == (2, True)
