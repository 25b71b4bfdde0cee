"""What each command prints and how it ends; workers as processes are in tests/fault/test_worker_command.py."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import io
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import __version__
from agent_runtime_core._core.ids import stored_id
from agent_runtime_core._core.validation import redacted
from agent_runtime_core._engines.base import Op
from agent_runtime_core._journal.record import ENDED, Record
from agent_runtime_core.cli.app_loader import agents_of
from agent_runtime_core.cli.main import main
from agent_runtime_core.cli.output import LogFormatter
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.errors import UnknownRun
from agent_runtime_core.interfaces import ErrorInfo, RunResult
from agent_runtime_core.queue.records import RunUpdate
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from tests.support.runs import Script

MODULE = """
from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
from agent_runtime_core.registry import Registry


class Greeter(AgentRuntime):
    key = "greeter"

    async def run(self, ctx):
        return RunResult()


class Writer(Greeter):
    key = "writer"


class Needy(Greeter):
    def __init__(self, name):
        self.name = name


one = Writer()
several = [Greeter, one]
pair = (Greeter(), Writer())
twice = [Greeter, Greeter]
registry = Registry()
registry.register(one)
empty = Registry()
settings = {"a": 1}
inner = AgentRunner.open("memory://", registry=registry)
kept = AgentRunner.open("kept.db", registry=registry)


def made():
    return several


def broken():
    raise LookupError("no such thing")


async def later():
    return one


def nothing():
    return None
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of agents in a directory that is also the present one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"agents_of_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "torn.py").write_text("def broken(:\n")
    (tmp_path / "program.py").write_text("import asyncio\nasyncio.run(None)\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "lacking.py").write_text("import no_such_package_anywhere\n")
    return name


Said = tuple[int, str, str]
Run = Callable[..., Said]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("runs", "--json")`: exit code, output, errors."""

    def call(*args: str) -> Said:
        capsys.readouterr()
        try:
            code = main(args)
        except SystemExit as end:
            code = int(str(end.code))
        out, err = capsys.readouterr()
        return code, out, err

    return call


async def _good(ctx: Any) -> Any:
    await ctx.step("fetch", lambda: "page")
    await ctx.step("count", lambda: 4, key="words")
    return 4


async def _bad(ctx: Any) -> Any:
    await ctx.step("fetch", lambda: "page")

    def fail() -> None:
        raise ConnectionError("no \x1b[31mroute\nto host")

    await ctx.step("send", fail)


class Failing(Script):
    async def on_error(self, ctx: Any, error: BaseException) -> ErrorInfo:
        return ErrorInfo(type(error).__name__, str(error), retriable=False)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A store with runs called good, bad (failed), poison (dead), toxic (dead), queued."""
    path = tmp_path / "runs.db"

    async def fill(runner: AgentRunner) -> None:
        runner.registry.register(Script(_good, "good"))
        runner.registry.register(Failing(_bad, "bad"))
        for name in ("good", "bad"):
            await runner.submit(name, {"n": 1}, run_id=name)
            assert await runner.run_once()
        for name in ("poison", "toxic"):
            await runner.submit("poison", {}, run_id=name)
            claimed = await runner.queue.claim("w", 60, agent_keys=["poison"])
            how = RunUpdate(claimed.claim_id, "dead", runner.queue.clock.wall(), crashes=3, reason="Poisoned",
                         error='{"type":"Poisoned","message":"3 crashes in a row"}')  # fmt: skip
            await runner.queue.settle(str(claimed.run_id), how)
        await runner.submit("nobody", {}, run_id="queued")

    on(path, fill)
    return str(path)


def on(path: str | Path, act: Callable[..., Awaitable[Any]], **options: Any) -> Any:
    async def acted() -> Any:
        async with AgentRunner.open(path, config=RunnerConfig(park_after=0), registry=Registry()) as runner:
            return await act(runner, **options)

    return asyncio.run(acted())


def statuses(url: str) -> dict[str | None, str]:
    async def look(runner: AgentRunner) -> dict[str | None, str]:
        return {info.run_key: info.status.value for info in await runner.runs()}

    found: dict[str | None, str] = on(url, look)
    return found


# -- looking


def test_runs_are_listed_and_filtered(run: Run, url: str) -> None:
    code, out, err = run("runs", "--url", url)
    lines = out.splitlines()
    assert (code, err, len(lines)) == (0, "", 6)
    assert lines[0].split() == [
        "RUN_ID", "RUN_KEY", "AGENT_KEY", "STATUS", "ATTEMPT", "CREATED_AT", "ENDED_AT", "REASON", "WHY",
    ]  # fmt: skip
    assert [line.split()[1] for line in lines[1:]] == ["good", "bad", "poison", "toxic", "queued"]

    def keys(*options: str) -> list[str]:
        code, out, _ = run("runs", "--url", url, "--json", *options)
        assert code == 0
        return [each["run_key"] for each in json.loads(out)]

    assert keys("--status", "dead") == ["poison", "toxic"]
    both = ("--status", "dead", "--status", "failed", "--status", "dead")
    assert sorted(keys(*both)) == sorted([*keys("--status", "dead"), *keys("--status", "failed")])
    assert keys("--status", "failed")
    assert keys("--agent", "bad") == ["bad"]
    assert keys("--limit", "2") == ["toxic", "queued"], "the last ones"
    assert keys("--agent", "stranger") == []


def test_runs_are_found_by_their_contents_and_sorted(run: Run, url: str, tmp_path: Path) -> None:
    def keys(*options: str) -> list[str]:
        code, out, _ = run("runs", "--url", url, "--json", *options)
        assert code == 0
        return [each["run_key"] for each in json.loads(out)]

    assert run("submit", "good", "--run-id", "tagged", "--tag", "a", "--tag", "b", "--url", url)[0] == 0
    assert keys("--tag", "b") == ["tagged"]
    assert keys("--search", "AFTER 1 attempt", "--since", "365d") == ["bad"]
    assert keys("--error-type", "StepExecutionError") == ["bad"]
    assert keys("--metadata", "k=v") == []
    assert keys("--min-attempts", "1000") == []
    assert keys("--code-version", "v1") == []
    assert keys("--sort", "age")[-1] == "tagged"
    assert keys("--parent", "tagged") == []
    code, out, err = run("runs", "--search", "nothing has this text", "--url", url)
    assert (code, out.splitlines()[1:]) == (0, [])
    assert err.startswith("agent-runtime: Only runs since ")
    assert "tags              a, b\n" in run("show", "tagged", "--url", url)[1]
    code, _, err = run("runs", "--metadata", "k", "--url", url)
    assert code == 2
    assert "--metadata: must be KEY=VALUE, got 'k'" in err


def test_more_runs_than_a_page_are_listed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_runtime_core.cli.store._PAGE", 3)

    async def fill(runner: AgentRunner) -> None:
        for n in range(10):
            await runner.submit("a", run_id=f"r{n}")

    on(tmp_path / "runs.db", fill)
    _, out, _ = run("runs", "--url", str(tmp_path / "runs.db"), "--json", "--limit", "8")
    assert [each["run_key"] for each in json.loads(out)] == [f"r{n}" for n in range(2, 10)]


def test_show_tells_the_steps_and_the_error(run: Run, url: str) -> None:
    code, out, _ = run("show", "bad", "--url", url)
    assert code == 0
    assert "status            failed\n" in out
    assert "error             StepExecutionError: step 'send' failed after 1 attempt: no ?[31mroute to host" in out
    assert "\x1b" not in out, "nothing a terminal would act upon"
    done, failed = (line.split() for line in out.split("STATE")[1].splitlines()[1:3])
    assert (done[:3], failed[:3]) == (["done", "fetch", "0"], ["failed", "send", "0"])
    assert "run.failed" not in out

    code, out, _ = run("show", "good", "--url", url, "--json", "--events")
    told = json.loads(out)
    assert (told["status"], told["error"], told["input"], told["agent_key"]) == ("succeeded", None, {"n": 1}, "good")
    assert [(each["state"], each["name"], each["step_key"]) for each in told["steps"]] == [
        ("done", "fetch", "0"),
        ("done", "count", "words"),
    ]
    assert [each["sequence"] for each in told["events"]] == list(range(len(told["events"])))
    assert told["events"][-1]["event_type"] == "run.succeeded"
    # The id and the key of a step are what `fork` takes.
    for after in (told["steps"][1]["step_id"], ("count", "words")):
        assert on(url, lambda runner: runner.fork("good", after))  # noqa: B023


def test_json_has_the_names_and_values_of_the_api(run: Run, url: str) -> None:
    def as_json(value: Any) -> Any:
        if isinstance(value, dt.datetime):
            return value.replace(microsecond=0).isoformat()
        if isinstance(value, tuple):
            return list(value)
        return str(value) if isinstance(value, UUID) else value

    for run_key in ("good", "bad", "queued"):
        info = dataclasses.asdict(on(url, lambda runner: runner.get_run(run_key)))  # noqa: B023
        told = json.loads(run("show", run_key, "--json", "--url", url)[1])
        assert set(told) - set(info) == {"error", "usage", "steps", "waiting_for", "questions", "why"}
        assert {name: told[name] for name in info} == {
            name: None if (name, value) == ("reason", "") else as_json(value) for name, value in info.items()
        }
        listed = json.loads(run("runs", "--json", "--url", url)[1])
        [row] = [each for each in listed if each["run_key"] == run_key]
        assert set(info) - set(row) == {"input", "metadata"}
        assert set(row) - set(info) == {"why"}
    told = json.loads(run("show", "good", "--events", "--json", "--url", url)[1])
    assert set(told["events"][0]) == {"sequence", "event_type", "payload", "timestamp"}
    assert set(told["steps"][0]) == {
        "state", "name", "step_key", "step_id", "attempts", "duration_ms", "timestamp", "error",
    }  # fmt: skip
    for command in (["cancel", "queued"], ["resume", "bad"], ["fork", "good"]):
        run_id = json.loads(run(*command, "--json", "--url", url)[1])["run_id"]
        assert run_id == str(UUID(run_id))


@pytest.mark.parametrize(("encoding", "shown"), [("utf-8", "Größe ?"), ("ascii", "Gr??e ?")])
def test_what_an_output_has_no_character_for_stops_no_command(
    encoding: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "Größe \ud83d"

    async def fill(runner: AgentRunner) -> None:
        await runner.submit("a", {"said": said}, run_id="r")

    on(tmp_path / "runs.db", fill)

    def out(*options: str) -> str:
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, write_through=True))
        assert main(["show", "r", "--events", "--url", str(tmp_path / "runs.db"), *options]) == 0
        return written.getvalue().decode(encoding)

    assert json.loads(out("--json"))["input"] == {"said": said}
    assert shown in out()


def test_events_with_a_type_that_is_not_known_here_are_shown_as_they_are_stored(run: Run, tmp_path: Path) -> None:
    theirs = {"$": "theirs.Odd", "v": {"x": 1}}

    async def fill(runner: AgentRunner) -> None:
        await runner.submit("a", {}, run_id="r")
        key = (await runner.get_run("r")).run_id
        row = ("e", "mine", json.dumps({"odd": theirs}), 10.0)
        ended = Record(0, ENDED, "succeeded", claim_id="01A", result=json.dumps({"final_output": theirs}), nev=1)
        ops = [Op("events.publish", (str(key), (row,))), Op("journal.append", (str(key), ended))]
        await runner.event_bus.commit(None, ops)

    on(tmp_path / "runs.db", fill)
    code, out, err = run("show", "r", "--json", "--events", "--url", str(tmp_path / "runs.db"))
    assert (code, err) == (0, "")
    assert [each["payload"] for each in json.loads(out)["events"]] == [
        {"odd": theirs},
        {"final_output": theirs, "usage": {}},
    ]


def test_show_tells_of_steps_that_have_no_end(run: Run, url: str) -> None:
    begun = asyncio.Event()

    async def cut(runner: AgentRunner) -> None:
        async def body(ctx: Any) -> None:
            await ctx.step("first", lambda: 1)

            async def hang() -> None:
                begun.set()
                await asyncio.Event().wait()

            await ctx.step("second", hang, on_in_doubt="fail")

        task = asyncio.ensure_future(runner.execute(Script(body), "cut"))
        await begun.wait()
        task.cancel()
        await asyncio.wait({task})

    on(url, cut)
    _, out, _ = run("show", "cut", "--url", url, "--json")
    assert [(each["state"], each["name"]) for each in json.loads(out)["steps"]] == [
        ("done", "first"),
        ("in doubt", "second"),
    ]
    on(url, lambda runner: runner.fork("cut", new_run_id="copy"))
    _, out, _ = run("show", "copy", "--url", url, "--json")
    assert [each["state"] for each in json.loads(out)["steps"]] == ["copied"]


def test_show_tells_what_an_ended_run_used(run: Run, url: str) -> None:
    async def paid(ctx: Any) -> RunResult:
        return RunResult(final_output={"a": 1}, usage={"total_tokens": 12, "cost_usd": 0.25})

    async def fill(runner: AgentRunner) -> None:
        await runner.execute(Script(paid, "paid"), "paid")

    on(url, fill)
    assert json.loads(run("show", "paid", "--json", "--url", url)[1])["usage"] == {"total_tokens": 12, "cost_usd": 0.25}
    assert 'usage             {"total_tokens": 12, "cost_usd": 0.25}\n' in run("show", "paid", "--url", url)[1]
    for name in ("good", "queued"):
        assert "usage" not in run("show", name, "--url", url)[1]


def test_cancel(run: Run, url: str) -> None:
    assert run("cancel", "queued", "--url", url)[:2] == (0, "run queued cancelled\n")
    assert run("cancel", "queued", "--url", url) == (
        1,
        "",
        "agent-runtime: run 'queued' has finished (cancelled) and cannot be cancelled\n",
    )
    code, out, err = run("cancel", "nix", "--url", url)
    assert (code, out) == (1, "")
    assert err.startswith("agent-runtime: run 'nix' not found. The newest runs are 'good', ")
    assert json.loads(run("cancel", "good", "--url", url, "--json")[1])["recorded"] is False


# -- acting on runs


@pytest.fixture
def parked(tmp_path: Path) -> str:
    """A store with a run called asks that waits for an approval, and then for a signal."""
    path = tmp_path / "parked.db"
    on(path, _go_on_with_asks, submit=True)
    return str(path)


async def _asks(ctx: Any) -> Any:
    answer = await ctx.approve("plan", schema={"type": "object", "required": ["ok"]})
    return [answer, await ctx.wait_for_signal("go")]


async def _go_on_with_asks(runner: AgentRunner, *, submit: bool = False) -> str:
    runner.registry.register(Script(_asks, "asks"))
    if submit:
        await runner.submit("asks", run_id="asks")
    assert await runner.run_once()
    info = await runner.get_run("asks")
    return f"{info.status.value} {info.reason}".strip()


def test_a_run_that_waits_is_answered(run: Run, parked: str) -> None:
    code, out, err = run("approve", "asks", "plan", "--url", parked)
    assert (code, out) == (2, "")
    assert "agent-runtime: answer to approval 'plan' must match the schema of the" in err
    assert run("approve", "asks", "plan", '{"ok": 1}', "--url", parked) == (
        0,
        "the answer to 'plan' is stored for run asks\n",
        "",
    )
    assert on(parked, _go_on_with_asks) == "waiting signal go"
    code, out, _ = run("signal", "asks", "go", "[1, null]", "--json", "--url", parked)
    assert (code, {**json.loads(out), "run_id": ""}) == (
        0,
        {"run_id": "", "name": "go", "stored": True, "status": "pending"},
    )
    assert on(parked, _go_on_with_asks) == "succeeded"
    result = on(parked, lambda runner: runner.wait("asks"))
    assert result.final_output == {"value": [{"ok": 1}, [1, None]]}

    for verb in ("signal", "approve"):
        what = "signal" if verb == "signal" else "answer"
        over = (1, "", f"agent-runtime: run 'asks' has finished (succeeded), so it accepts no {what}\n")
        assert run(verb, "asks", "go", "--url", parked) == over
        missing = "run 'nix' not found. The newest run is 'asks'."
        assert run(verb, "nix", "go", "--url", parked)[::2] == (1, f"agent-runtime: {missing}\n")


def test_what_is_not_said_is_true_for_an_approval_and_null_for_a_signal(run: Run, url: str) -> None:
    async def asks(ctx: Any) -> Any:
        return [await ctx.wait_for_signal("go"), await ctx.approve("plan")]

    on(url, lambda runner: runner.submit("plain", run_id="plain"))
    assert run("signal", "plain", "go", "--url", url)[0] == 0
    assert run("approve", "plain", "plan", "--force", "--url", url)[0] == 0

    async def finish(runner: AgentRunner) -> Any:
        runner.registry.register(Script(asks, "plain"))
        assert await runner.run_once()
        return (await runner.wait("plain")).final_output

    assert on(url, finish) == {"value": [None, True]}


def test_a_message_is_sent_to_an_agent(run: Run, url: str) -> None:
    async def reads(ctx: Any) -> Any:
        return await ctx.messages()

    on(url, lambda runner: runner.submit("reader", run_id="reads"))
    assert run("send", "reads", "one", "--url", url) == (0, "the message is stored for run reads\n", "")
    for _ in range(2):
        code, out, _ = run("send", "reads", "two", "--interrupt", "--message-id", "2", "--url", url, "--json")
        sent = {**json.loads(out), "id": ""}
        assert (code, sent) == (0, {"id": "", "message_id": "2", "stored": True, "status": "pending"})

    async def finish(runner: AgentRunner) -> Any:
        runner.registry.register(Script(reads, "reader"))
        assert await runner.run_once()
        received = [
            each.payload["when"]
            for each in await runner.event_bus.get_events(stored_id("reads"))
            if each.event_type == "message.received"
        ]
        return received, (await runner.wait("reads")).final_output

    user = [{"role": "user", "content": text} for text in ("one", "two")]
    assert on(url, finish) == (["next_turn", "interrupt"], {"value": user})
    code, out, err = run("send", "reads", "three", "--url", url)
    assert (code, out) == (1, "")
    assert err == (
        "agent-runtime: run 'reads' has succeeded, so it accepts no messages. "
        "Start a new run: runner.submit('reader', {'messages': [...]})\n"
    )
    assert run("send", "nix", "text", "--url", url)[0] == 1
    code, _, err = run("send", "reads", "", "--url", url)
    assert (code, "must have a non-empty string" in err) == (2, True)


def test_the_version_needs_no_command(run: Run) -> None:
    assert run("--version") == (0, f"agent-runtime {__version__}\n", "")


@pytest.mark.parametrize("text", ["yes", "{'ok': 1}", "NaN", "[" * 100_000])
@pytest.mark.parametrize("verb", ["signal", "approve"])
def test_what_is_no_json_is_refused(verb: str, text: str, run: Run, url: str) -> None:
    code, out, err = run(verb, "queued", "go", text, "--url", url)
    assert (code, out) == (2, "")
    assert "must be JSON, got" in err
    assert err.endswith(f"Put quotes around a string: '\"yes\"' (see agent-runtime {verb} --help)\n")
    assert len(err) < 400


def test_a_run_that_ended_is_resumed(run: Run, url: str) -> None:
    assert run("resume", "bad", "--url", url) == (0, "run bad is pending, in generation 2\n", "")
    code, out, err = run("resume", "good", "--json", "--url", url)
    assert (code, json.loads(out)["resumed"]) == (1, False)
    assert err.startswith("agent-runtime: cannot resume run 'good': it has succeeded. Only failed")
    assert run("resume", "nix", "--url", url)[0] == 1
    assert statuses(url)["bad"] == "pending"


def test_a_run_is_forked(run: Run, url: str) -> None:
    code, out, _ = run("fork", "good", "--after", "fetch", "--new-run-id", "copy", "--url", url)
    assert (code, out.partition(" starts ")[2]) == (0, "from the state after step 'fetch' of run good\n")
    _, told, _ = run("show", "copy", "--url", url, "--json")
    assert [(each["state"], each["name"]) for each in json.loads(told)["steps"]] == [("copied", "fetch")]
    assert out.split()[1] == "copy" == json.loads(told)["run_key"]

    steps = json.loads(run("show", "good", "--url", url, "--json")[1])["steps"]
    code, out, _ = run("fork", "good", "--after", steps[1]["step_id"], "--json", "--url", url)
    assert (code, json.loads(out)["after_step"]) == (0, steps[1]["step_id"])
    assert run("fork", "good", "--url", url)[1].endswith("starts from the present state of run good\n")

    code, _, err = run("fork", "good", "--after", "fetsch", "--url", url)
    assert (code, "Did you mean 'fetch'?" in err) == (2, True)
    assert run("fork", "nix", "--url", url)[0] == 1


def test_old_runs_are_deleted(run: Run, url: str) -> None:
    assert run("vacuum", "--retention", "failed=3600", "--url", url) == (0, "0 runs deleted\n", "")
    would = run("vacuum", "--retention", "failed=0", "--dry-run", "--url", url)
    assert would == (0, "1 run would be deleted\n", "")
    assert run("vacuum", "--retention", "failed=0", "--url", url) == (0, "1 run deleted\n", "")
    code, out, _ = run("vacuum", "--retention", "dead=0", "--retention", "succeeded=1e9", "--json", "--url", url)
    assert (code, json.loads(out)) == (0, {"deleted": 2, "dry_run": False})
    assert statuses(url) == {"good": "succeeded", "queued": "pending"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "the following arguments are required: --retention"),
        (["--retention", "failed"], "must be STATUS=DURATION, got 'failed'"),
        (["--retention", "failed=soon"], "must be STATUS=DURATION, got 'failed=soon'"),
        (["--retention", "failled=1d"], "unknown final status 'failled'. Did you mean 'failed'?"),
        (["--retention", "running=1"], "unknown final status 'running'. Known: cancelled, dead, failed, "),
    ],
)
def test_a_retention_that_is_none_is_refused(options: list[str], told: str, run: Run, url: str) -> None:
    code, out, err = run("vacuum", *options, "--url", url)
    assert (code, out) == (2, "")
    assert told in err


# -- dead letters


def test_dead_letters_are_listed(run: Run, url: str) -> None:
    _, out, _ = run("dead", "list", "--url", url)
    assert [line.split()[1] for line in out.splitlines()] == ["RUN_KEY", "poison", "toxic"]
    assert "3 crashes in a row" in out
    _, out, _ = run("dead", "list", "--url", url, "--json", "--status", "failed")
    [told] = json.loads(out)
    assert (told["run_key"], told["error"]["type"]) == ("bad", "StepExecutionError")


@pytest.mark.parametrize("command", [("resume", "bad"), ("dead", "requeue", "bad", "--status", "failed")])
def test_limits_of_a_run_are_raised(run: Run, url: str, command: tuple[str, ...]) -> None:
    options = ("--max-cost-usd", "0.5", "--max-turns", "20", "--run-timeout", "60")
    assert run(*command, "--url", url, *options)[0] == 0

    async def set_for_it() -> list[dict[str, Any]]:
        async with AgentRunner.open(url) as runner:
            row = await runner.get_run("bad")
            assert row.status == "pending"
            return [json.loads(mail.payload) for mail in await runner.queue.mail(str(row.run_id))]

    assert asyncio.run(set_for_it()) == [{"max_turns": 20, "max_cost_usd": 0.5, "run_timeout": 60.0}]


def test_a_wrong_limit_changes_nothing(run: Run, url: str) -> None:
    code, _, err = run("resume", "bad", "--url", url, "--max-turns", "0")
    assert code == 2
    assert "--max-turns" in err
    assert "failed" in run("show", "bad", "--url", url)[1]


def test_a_dead_letter_is_requeued_and_keeps_its_steps(run: Run, url: str) -> None:
    assert run("dead", "requeue", "poison", "--url", url) == (0, "1 run requeued\n", "")
    assert statuses(url)["poison"] == "pending"
    assert run("dead", "requeue", "bad", "--url", url, "--status", "failed")[0] == 0

    async def finish(runner: AgentRunner) -> tuple[int, Any]:
        ran = list[int]()

        async def mended(ctx: Any) -> Any:
            await ctx.step("fetch", lambda: ran.append(1))
            await ctx.step("send", lambda: ran.append(2))

        runner.registry.register(Script(mended, "bad"))
        assert await runner.run_once()
        return (await runner.get_run("bad")).generation, ran

    assert on(url, finish) == (2, [2])


def test_a_dead_letter_is_discarded_with_all_that_was_kept_of_it(run: Run, url: str) -> None:
    assert run("dead", "discard", "bad", "--url", url, "--status", "failed") == (0, "1 run discarded\n", "")

    async def gone(runner: AgentRunner) -> tuple[Any, Any]:
        with pytest.raises(UnknownRun):
            await runner.get_run("bad")
        key = stored_id("bad")
        return await runner.state_store.records(key), await runner.event_bus.get_events(key)

    assert on(url, gone) == ([], [])


@pytest.mark.parametrize("verb", ["requeue", "discard"])
def test_ids_that_are_not_there_or_not_dead_are_told_and_the_others_done(verb: str, run: Run, url: str) -> None:
    code, out, err = run("dead", verb, "good", "toxic", "nix", "toxic", "--url", url)
    assert (code, out) == (1, f"1 run {verb}{'d' if verb == 'requeue' else 'ed'}\n")
    refused, missing = err.splitlines()
    assert refused == "agent-runtime: run 'good' must be dead, got succeeded"
    assert missing.startswith("agent-runtime: run 'nix' not found. ")
    assert statuses(url)["good"] == "succeeded"
    code, out, _ = run("dead", verb, "good", "--url", url, "--json")
    assert (code, json.loads(out)["refused"]) == (1, {"good": "run 'good' must be dead, got succeeded"})


@pytest.mark.parametrize(("verb", "left"), [("requeue", {"poison": "pending", "toxic": "pending"}), ("discard", {})])
def test_all_dead_letters_at_once(verb: str, left: dict[str, str], run: Run, url: str) -> None:
    before = statuses(url)
    yes = ["--yes"] if verb == "discard" else []
    would = f"2 runs would be {verb}{'d' if verb == 'requeue' else 'ed'}\n"
    assert run("dead", verb, "--all", "--dry-run", "--url", url) == (0, would, "")
    assert statuses(url) == before
    code, out, _ = run("dead", verb, "--all", *yes, "--url", url)
    assert (code, out.split()[:2]) == (0, ["2", "runs"])
    assert statuses(url) == {k: v for k, v in before.items() if v != "dead"} | left
    assert run("dead", verb, "--all", *yes, "--url", url)[1].split()[0] == "0"
    assert run("dead", verb, "--url", url)[0] == 2
    assert run("dead", verb, "--all", "bad", "--url", url)[0] == 2
    assert statuses(url) == {k: v for k, v in before.items() if v != "dead"} | left


# -- where


def test_the_store_is_the_configured_one_unless_it_is_said(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_RUNTIME_BACKEND_URL", f"sqlite:///{url}")
    reset_config()
    assert run("runs", "--json")[0] == 0
    code, _, err = run("runs", "--url", "sqlite:///nowhere.db")
    assert (code, err) == (2, "agent-runtime: store 'nowhere.db' not found. Use --url to name an existing file\n")
    assert not Path("nowhere.db").exists()


def test_what_is_configured_one_by_one_serves_too(run: Run, url: str) -> None:
    configure(queue_backend="sqlite", event_bus_backend="sqlite", state_store_backend="sqlite", sqlite_path=url)
    assert len(json.loads(run("runs", "--json")[1])) == 5


@pytest.mark.parametrize(
    "command",
    [
        ["runs"],
        ["dead", "list"],
        ["show", "x"],
        ["cancel", "x"],
        ["signal", "x", "go"],
        ["send", "x", "text"],
        ["approve", "x", "plan"],
        ["resume", "x"],
        ["fork", "x"],
        ["vacuum", "--retention", "dead=1"],
    ],
)
@pytest.mark.parametrize("options", [[], ["--url", "memory://"]])
def test_nothing_is_looked_for_in_memory(command: list[str], options: list[str], run: Run) -> None:
    code, out, err = run(*command, *options)
    assert (code, out) == (2, "")
    problem = "other processes cannot see the runs of a store in memory" if options else "no store was named"
    assert err == f"agent-runtime: {problem}. Pass --url agents.db, or set AGENT_RUNTIME_BACKEND_URL\n"


# -- workers: what is worked for


@pytest.mark.parametrize(
    ("attr", "keys"),
    [("Greeter", ["greeter"]), ("one", ["writer"]), ("several", ["greeter", "writer"]), ("pair", ["greeter", "writer"]),
     ("registry", ["writer"]), ("made", ["greeter", "writer"])],
)  # fmt: skip
def test_agents_are_named_in_many_ways(attr: str, keys: list[str], module: str) -> None:
    found = agents_of(f"{module}:{attr}", ".")
    assert isinstance(found, Registry)
    assert found.keys() == keys


def test_a_runner_is_taken_as_it_is(module: str) -> None:
    found = agents_of(f"{module}:kept", ".")
    assert isinstance(found, AgentRunner)
    asyncio.run(found.close())


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("{m}", "target must be module:attr"),
        ("{m}:", "target must be module:attr"),
        ("{m}:Greter", "has no 'Greter'. Did you mean 'Greeter'?"),
        ("{m}:severl", "has no 'severl'. Did you mean 'several'?"),
        ("{m}.py:several", "must be module:attr, got '{m}.py:several'. Use '{m}:several'"),
        ("x{m}:Greeter", "no module 'x{m}' in {d}: did you mean '{m}'?"),
        ("{m}.inside:Greeter", "unknown module 'inside'."),
        ("{m}:settings", "got an object of type dict. Use {m}:"),
        ("{m}:nothing", "got an object of type NoneType"),
        ("{m}:Registry", "an AgentRunner, an Orchestrator or a TurnManager, got the class Registry"),
        ("{m}:empty", "must have at least one agent"),
        ("{m}:twice", "must name each agent once, got 'greeter' twice"),
        ("{m}:Needy", "() failed: TypeError: "),
        ("{m}:broken", "() failed: LookupError: no such thing"),
        ("{m}:later", "must be a sync function"),
        ("{m}:inner", "must not store runs in memory"),
        ("torn:x", "module 'torn' cannot be imported: SyntaxError"),
        (
            "program:x",
            "module 'program' runs a program when it is imported (asyncio.run). Move that line under `if __na",
        ),
        ("script:x", "module 'script' runs a program when it is imported (sys.exit). Move that line under `if __na"),
        ("lacking:x", "needs the module 'no_such_package_anywhere', which"),
    ],
)
def test_what_cannot_be_worked_for_is_told_in_one_line(
    target: str, told: str, module: str, run: Run, tmp_path: Path
) -> None:
    names = {"m": module, "d": str(tmp_path)}
    url = [] if target.endswith(":inner") else ["--url", "runs.db"]
    code, out, err = run("worker", target.format(**names), *url)
    assert (code, out) == (2, "")
    assert told.format(**names) in err
    assert len(err.splitlines()) == 1
    assert not Path("runs.db").exists()


@pytest.mark.redis
def test_a_worker_on_a_server_that_is_not_there_says_so(module: str, run: Run) -> None:
    with contextlib.closing(socket.socket()) as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        port = nobody.getsockname()[1]
        code, out, err = run("worker", f"{module}:Greeter", "--url", f"redis://me:secret@127.0.0.1:{port}/0")
    assert (code, out) == (2, "")
    assert f"redis://127.0.0.1:{port}/0 cannot be reached" in err
    assert "secret" not in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--url", "memory://"], "other processes cannot see the runs of a store in memory"),
        ([], "no store was named. Pass --url"),
        (["--url", "http://me:secret@host/0"], "'http://***@host/0'"),
        (["--url", "torn.py"], "torn.py is not a readable database"),
        (["--url", "no/such/runs.db"], "no/such"),
        (["--url", "runs.db", "--agent-path", "nowhere"], "directory 'nowhere' not found"),
        (["--url", "runs.db", "--concurrency", "0"], "must be an integer above 0, got '0'"),
        (["--url", "runs.db", "--grace", "-1"], "must be a duration such as 500ms, 25s, 1h30m or 30d, got '-1'"),
        (["--url", "runs.db", "--poll", "0"], "must be a duration above 0, such as 500ms, 25s, 1h30m or 30d, got '0'"),
        (["--url", "runs.db", "--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_a_worker_that_cannot_work_says_why(options: list[str], told: str, module: str, run: Run) -> None:
    code, out, err = run("worker", f"{module}:Greeter", *options)
    assert (code, out) == (2, "")
    assert told in err
    assert "secret" not in err
    assert len(err.splitlines()) == 1


def test_a_wrong_amount_is_named_as_one(run: Run) -> None:
    code, _, err = run("resume", "one", "--max-cost-usd", "-1", "--url", "runs.db")
    assert (code, "must be an amount in USD of at least 0, got '-1'" in err) == (2, True)


def test_a_runner_has_a_store_of_its_own(module: str, run: Run) -> None:
    code, _, err = run("worker", f"{module}:kept", "--url", "runs.db")
    assert (code, "--url must not be used" in err) == (2, True)


def test_a_traceback_is_shown_with_debug_only(module: str, run: Run) -> None:
    code, out, err = run("worker", f"{module}:broken", "--url", "runs.db")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    code, out, err = run("worker", f"{module}:broken", "--url", "runs.db", "--debug")
    assert (code, out) == (2, "")
    assert err.startswith("Traceback (most recent call last):\n")
    assert "LookupError" in err


@pytest.mark.parametrize(
    ("options", "found"), [(["--limit", "1" + "0" * 30], 5), (["--agent", "\udcff"], 0), (["--agent", "good"], 1)]
)
def test_what_no_store_can_be_asked_for_is_no_failure(options: list[str], found: int, run: Run, url: str) -> None:
    code, out, err = run("runs", "--json", "--url", url, *options)
    assert (code, len(json.loads(out)), err) == (0, found, "")


@pytest.mark.parametrize("command", [["runs"], ["show", "none"]])
def test_an_output_that_was_closed_is_no_failure(command: list[str], url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main([*command, "--url", url]) == (0 if command == ["runs"] else 1)
    for written in (sys.stdout, sys.stderr):
        written.close()


def test_who_stops_reading_ends_the_listing(url: str) -> None:
    command = [sys.executable, "-m", "agent_runtime_core", "runs", "--json", "--url", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait(30) == 1


@pytest.mark.parametrize("threads", [False, True])
def test_ctrl_c_in_the_last_moment_of_a_command_ends_it_like_any_other(
    threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop was told to stop and has not yet, so that its next turn would stop at once."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def command(args: object) -> int:
        if threads:
            await asyncio.to_thread(len, "")  # whose end the loop waits for
        asyncio.get_running_loop().call_soon(interrupt)
        return 0

    monkeypatch.setattr("agent_runtime_core.cli.runs.runs", command)
    assert main(["runs"]) == 130


def test_ctrl_c_while_the_arguments_are_read_ends_the_command_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("agent_runtime_core.cli.main.parsed", interrupted)
    assert main(["runs"]) == 130


# -- approvals


async def _asks_twice(ctx: Any) -> Any:
    first = await ctx.approve("plan")
    return [first, *await asyncio.gather(ctx.approve("pay"), ctx.wait_for_signal("go"))]


def _waiting(url: str, fn: Callable[[Any], Awaitable[Any]], run_id: str, *, submit: bool = True) -> None:
    async def work(runner: AgentRunner) -> None:
        runner.registry.register(Script(fn, "waiting"))
        if submit:
            await runner.submit("waiting", run_id=run_id)
        assert await runner.run_once()

    on(url, work)


def test_an_answer_that_no_question_waits_for_is_rejected(run: Run, url: str) -> None:
    _waiting(url, _asks_twice, "order-7")
    before = run("show", "order-7", "--url", url, "--json")[1]
    hint = "Use --force to store an answer for 'plann'"
    code, out, err = run("approve", "order-7", "plann", "--url", url)
    assert (code, out) == (1, "")
    assert err == f"agent-runtime: run 'order-7' is waiting for approval 'plan', got 'plann'. {hint}\n"
    code, out, _ = run("approve", "order-7", "plann", "--url", url, "--json")
    assert (code, json.loads(out)["stored"], json.loads(out)["status"]) == (1, False, "waiting")
    assert run("show", "order-7", "--url", url, "--json")[1] == before  # the run is not woken
    assert run("approve", "order-7", "plann", "--force", "--url", url)[0] == 0
    told = json.loads(run("show", "order-7", "--url", url, "--json")[1])
    assert (told["status"], [each["state"] for each in told["steps"]]) == ("pending", ["waiting"])
    assert run("approve", "order-7", "plan", "--url", url)[0] == 0
    assert run("approve", "order-7", "plan", "--url", url)[::2] == (
        1,
        "agent-runtime: approval 'plan' of run 'order-7' was already answered\n",
    )


def test_all_open_waits_of_a_run_are_shown(run: Run, url: str) -> None:
    _waiting(url, _asks_twice, "order-7")
    assert run("approve", "order-7", "plan", "--url", url)[0] == 0
    _waiting(url, _asks_twice, "order-7", submit=False)
    told = json.loads(run("show", "order-7", "--url", url, "--json")[1])
    assert told["waiting_for"] == [{"kind": "approval", "name": "pay"}, {"kind": "signal", "name": "go"}]
    text = run("show", "order-7", "--url", url)[1]
    assert "waiting for       approval 'pay'\n" in text
    assert "waiting for       signal 'go'\n" in text
    _, _, err = run("approve", "order-7", "x", "--url", url)
    assert "waiting for approval 'pay', signal 'go', got 'x'" in err
    assert run("approve", "order-7", "go", "--url", url)[0] == 0  # a run may take an answer as a signal


def test_a_run_that_has_not_asked_yet_takes_an_answer_with_force_only(run: Run, url: str) -> None:
    on(url, lambda runner: runner.submit("waiting", run_id="early"))
    code, _, err = run("approve", "early", "plan", "--url", url)
    told = "run 'early' is pending and has not requested 'plan'. Use --force to store an answer for 'plan'"
    assert (code, err) == (1, f"agent-runtime: {told}\n")
    assert run("approve", "early", "plan", "--force", "--url", url)[0] == 0
    assert run("signal", "early", "go", "--url", url)[0] == 0


def test_a_run_that_failed_takes_no_answer(run: Run, url: str) -> None:
    for options in ([], ["--force"]):
        code, _, err = run("approve", "bad", "plan", *options, "--url", url)
        assert (code, err) == (
            1,
            "agent-runtime: run 'bad' has finished (failed), so it accepts no answer. To continue it, use "
            "agent-runtime resume bad\n",
        )


# -- secrets, and characters that terminals act on

SECRET = "CANARY-pw"
ODD = "\x1b[31m \x9b2J \x7f \u202e \u2066 \u2028 \x85 \U000e0001"


@pytest.mark.parametrize(
    "arguments",
    [
        ["runs", f"redis://app:{SECRET}@db.internal:6379/0"],
        ["runs", "--urll", f"redis://app:{SECRET}@db.internal/0"],
        ["runs", f"--urll=redis://:{SECRET}@db.internal/0"],
        ["runs", "--urll", f"app:{SECRET}@db.internal"],
        ["runs", "--urll", f"redis://db.internal/0?password={SECRET}"],
        ["runs", "--limit", f"redis://app:{SECRET}@db.internal"],
        ["runs", "--limit", f"redis://app:{SECRET}{'x' * 100}@db.internal"],
        ["runs", "--status", f"redis://app:{SECRET}@db.internal"],
        ["vacuum", "--retention", f"redis://app:{SECRET}{'x' * 100}@db.internal"],
        ["signal", "one", "go", f"redis://app:{SECRET}{'x' * 100}@db.internal"],
        [f"redis://app:{SECRET}@db.internal"],
        ["worker", f"redis://app:{SECRET}@db.internal"],
        ["worker", "app:A", "--grace", f"redis://app:{SECRET}@db.internal"],
        ["runs", "--url", f"redis://app:{SECRET}@127.0.0.1:1/0"],
        ["runs", "--url", f"redis://app:{SECRET}@127.0.0.1:1/0", "--debug"],
        ["runs", "--url", f"app:{SECRET}@db.internal:6379/0"],
        ["runs", "--url", f"redsi://app:{SECRET}@127.0.0.1:1/0"],
        ["carry-over", f"redis://app:{SECRET}@127.0.0.1:1/0"],
    ],
)
def test_no_output_has_the_password_of_a_url(arguments: list[str], run: Run) -> None:
    code, out, err = run(*arguments)
    assert code
    assert SECRET not in out + err


@pytest.mark.parametrize("options", [[], ["--json"], ["--events"], ["--events", "--json"]])
def test_text_of_others_acts_on_no_terminal_and_shows_no_secret(options: list[str], run: Run, url: str) -> None:
    async def fails(ctx: Any) -> Any:
        await ctx.emit("said", {"text": ODD, "store": f"redis://a:{SECRET}@h?x=1"})
        raise ValueError(f"{ODD} at redis://app:{SECRET}@db.internal:6379/0")

    async def submit(runner: AgentRunner) -> None:
        runner.config = RunnerConfig(max_retries=1)
        await runner.execute(Script(fails, "odd"), input_data={"text": ODD, "ä": "ü"}, run_id="odd")

    on(url, submit)
    code, out, err = run("show", "odd", "--url", url, *options)
    assert (code, err) == (0, "")
    assert all(each.isprintable() or each == "\n" for each in out)
    assert SECRET not in out
    if "--json" in options:
        told = json.loads(out)
        assert told["input"] == {"text": ODD, "ä": "ü"}
        assert "ä" in out
        assert told["error"]["message"] == f"{ODD} at redis://***@db.internal:6379/0"


def test_what_is_hidden_once_hides_no_more_the_second_time() -> None:
    told = "Error at redis://u:pw@h/0?password=x, then mail a@b"
    assert redacted(redacted(told)) == redacted(told)


def test_a_log_line_shows_no_secret_and_is_one_line() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogFormatter("%(levelname)s %(message)s"))
    logger = logging.Logger("some")
    logger.addHandler(handler)
    try:
        raise ValueError(f"{ODD} redis://u:{SECRET}@h")
    except ValueError:
        logger.exception("a\nb %s", f"redis://u:{SECRET}@h")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "ERROR a b redis://***@h"
    assert lines[1] == "Traceback (most recent call last):"
    assert all(each.isprintable() for each in lines)
    assert SECRET not in stream.getvalue()


def test_an_unexpected_error_shows_no_secret(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise LookupError(f"redis://u:{SECRET}@h \x9b")

    monkeypatch.setattr("agent_runtime_core.cli.runs.summary", broken)
    code, out, err = run("runs", "--url", url)
    assert (code, out) == (1, "")
    assert "LookupError: redis://***@h ?\n" in err
