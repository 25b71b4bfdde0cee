"""Each command has help, an example that parses and `--json`; wrong names are answered with the right ones."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_runtime_core.cli.arguments import point_in_time, retention, seconds_in
from agent_runtime_core.cli.help import SECTIONS, Parser
from agent_runtime_core.cli.main import main
from agent_runtime_core.cli.parser import parsed, parser
from tests.support.cases import for_each

REPOSITORY = Path(__file__).parents[2]


def walked(command: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, command
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below, each in action.choices.items():
                yield from walked(each, f"{name} {below}".strip())


PARSERS = dict(walked(parser()))
GROUPS = {name for each in PARSERS for name in (each.rpartition(" ")[0],)}  # those with commands below them
COMMANDS = {name: each for name, each in PARSERS.items() if name not in GROUPS}


def test_the_parser_has_the_commands() -> None:
    assert set(COMMANDS) == {
        "worker", "submit", "runs", "show", "events", "export", "cancel", "send", "signal", "approve", "resume", "fork",
        "dead list", "dead requeue", "dead discard", "vacuum", "doctor", "check", "conformance", "completion",
        "carry-over", "help", "version", "inspect", "serve", "backup", "verify", "restore", "mark-restored", "restored",
        "copy", "erase", "reencrypt", "workers", "pools", "migrate", "index",
        "tenant set", "schedule list", "schedule show", "schedule put", "schedule pause", "schedule resume",
        "schedule run", "schedule delete", "schedule next",
    }  # fmt: skip


@for_each("name", PARSERS)
def test_each_argument_has_help(name: str) -> None:
    command = PARSERS[name]
    assert command.description
    for action in command._actions:
        assert action.help, f"{name}: {action.option_strings or action.metavar}"
        assert action.help != argparse.SUPPRESS
        assert action.help % {"prog": "agent-runtime"}, "a % in it must be doubled"
        for sub in getattr(action, "_choices_actions", ()):
            assert sub.help
    assert command.format_help()


def examples(command: argparse.ArgumentParser) -> list[str]:
    return re.findall(r"^  agent-runtime (.*)$", command.epilog or "", re.MULTILINE)


@for_each("name", PARSERS)
def test_each_command_has_an_example_that_parses(name: str) -> None:
    found = examples(PARSERS[name])
    assert found
    for example in found:
        arguments = shlex.split(example.partition(" > ")[0])
        args = parsed(arguments)
        if name in COMMANDS:
            assert args.command == COMMANDS[name].get_default("command"), "an example of this very command"


@for_each("name", COMMANDS)
def test_each_command_has_json_and_is_there(name: str) -> None:
    assert "--json" in COMMANDS[name].format_usage()
    module, _, function = COMMANDS[name].get_default("command").partition(":")
    found = getattr(importlib.import_module(f"agent_runtime_core.cli{module}"), function)
    assert inspect.iscoroutinefunction(found)


@for_each("name", COMMANDS)
def test_each_command_for_runs_has_the_option_of_their_tenant(name: str) -> None:
    names_runs = any(action.metavar == "RUN" for action in COMMANDS[name]._actions)
    if names_runs or name in ("submit", "runs", "dead list"):
        assert "--tenant" in COMMANDS[name].format_usage()


def test_the_help_of_the_whole_command_tells_the_exit_codes() -> None:
    assert re.findall(r"^  (\d+) ", parser().epilog or "", re.MULTILINE) == ["0", "1", "2", "130"]


def test_each_command_is_in_one_section_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = [name for section in SECTIONS.values() for name in section]
    assert sorted(names) == sorted({name.partition(" ")[0] for name in COMMANDS})
    lines = parser().format_help().splitlines()
    actions = [each for each in parser()._actions if isinstance(each, argparse._SubParsersAction)]
    for each in actions[0]._choices_actions:
        assert lines.count(f"  {each.dest:<13}  {each.help}") == 1
    assert [line for line in lines if line.endswith(":") and line[:-1] in SECTIONS] == [f"{name}:" for name in SECTIONS]


@for_each("columns", [74, 80, 120, 200])
def test_help_wraps_at_the_width_of_the_terminal(columns: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        for name, each in PARSERS.items():
            text = each.format_help()
            assert [line for line in text.splitlines() if len(line) > columns] == [], name
            joined = re.sub(r" \\\n +", " ", text)  # as a shell reads them
            assert [example for example in examples(each) if f"\n  agent-runtime {example}\n" not in joined] == []


def test_help_in_a_pipe_has_80_columns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agent_runtime_core", "serve", "--help"]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment["PYTHONPATH"] = str(REPOSITORY / "src")
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path).stdout
    assert 70 < max(map(len, out.splitlines())) <= 80


@for_each("name", GROUPS)
def test_without_a_command_the_help_is_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (name.split(), ["help", *name.split()]):
        assert main(words) == 0
        assert capsys.readouterr() == (PARSERS[name].format_help(), "")


@for_each("name", COMMANDS)
def test_help_and_the_option_print_the_same(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", *name.split()]) == 0
    shown = capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main([*name.split(), "--help"])
    assert (end.value.code, capsys.readouterr().out) == (0, shown)
    assert main(["help", *name.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)  # secrets of URLs are replaced there, also in an example
    assert (found["command"], found["help"].splitlines()[0]) == (name, shown.splitlines()[0])


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    shown = capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == shown
    assert main(["version", "--json"]) == 0
    assert f"agent-runtime {json.loads(capsys.readouterr().out)['version']}\n" == shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["shwo"], "unknown command 'shwo'. Did you mean 'show'? List the commands with: agent-runtime help"),
        (["dead", "requeu"], "unknown command 'requeu'. Did you mean 'requeue'?"),
        (["show", "order-7"], "unknown command 'order-7'."),
    ],
)
def test_help_for_an_unknown_command(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, said in err) == ("", True)


def test_help_imports_no_runner() -> None:
    code = (
        "import sys\nfrom agent_runtime_core.cli.main import main\n"
        "try: main(['show', '--help'])\nexcept SystemExit: pass\n"
        "print(*sorted(each for each in sys.modules if each.startswith('agent_runtime_core.')), sep='\\n')"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {line.split(".")[1] for line in out.splitlines() if line.startswith("agent_runtime_core.")}
    assert "cli" in loaded
    assert loaded.isdisjoint({"runner", "queue", "state", "events", "persistence", "llm", "_engines"})


def test_the_reference_page_is_that_of_the_parser() -> None:
    written = runpy.run_path(str(REPOSITORY / "scripts" / "command_line_reference.py"))["page"]()
    page = (REPOSITORY / "docs" / "reference" / "command-line.md").read_text("utf-8")
    assert page == written, "run: python scripts/command_line_reference.py"


# -- wrong arguments


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["shwo"], "agent-runtime: unknown command 'shwo'. Did you mean 'show'? (see agent-runtime --help)"),
        (
            ["dead", "requeu"],
            "agent-runtime dead: unknown command 'requeu'. Did you mean 'requeue'? (see agent-runtime dead -",
        ),
        (
            ["--url", "runs.db", "runs"],
            "options must follow the command, got --url before it. Example: agent-runtime runs",
        ),
        (["zzz"], "unknown command 'zzz'. Known: approve, backup, cancel, carry-over, check and 32 more."),
        (["runs", "--status", "faild"], "argument --status: unknown value 'faild'. Did you mean 'failed'?"),
        (["runs", "--lmit", "3"], "unrecognized arguments: --lmit 3. Did you mean '--limit'?"),
        (["runs", "--zzz"], "unrecognized arguments: --zzz (see agent-runtime runs --help)"),
        (["completion", "csh"], "argument SHELL: unknown value 'csh'. Did you mean"),
        (["worker", "m:a", "--grace", "soon"], "--grace: must be a duration such as 500ms, 25s, 1h30m or 30d, got"),
        (["submit", "a", "--input", "[]"], "--input: must be a JSON object, got '[]'"),
        (["submit", "a", "--priority", "4000000000"], "--priority: must be a 32-bit integer, got"),
        (["submit", "a", "--deadline", "noon"], "must be a duration from now or an ISO 8601 time, got 'noon'"),
        (["events", "r", "--since", "-1"], "--since: must be an integer of at least 0, got '-1'"),
    ],
)
def test_a_wrong_argument_is_answered_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    assert (end.value.code, out, len(err.splitlines())) == (2, "", 1)
    assert said in err


def test_a_secret_in_a_wrong_command_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["redis://me:secret@host/0"])
    assert "secret" not in capsys.readouterr().err


def test_parsers_of_commands_report_errors_themselves() -> None:
    assert all(isinstance(each, Parser) for each in PARSERS.values())


# -- durations and times


@for_each(
    ("text", "seconds"),
    [
        ("25", 25), ("0", 0), ("1e3", 1000), ("2.5", 2.5), ("500ms", 0.5), ("25s", 25), ("10m", 600), ("12h", 43_200),
        ("30d", 2_592_000), ("2w", 1_209_600), ("1h30m", 5400), ("1d12h", 129_600), ("1m500ms", 60.5), ("1.5h", 5400),
        (" 30D ", 2_592_000),
    ],
)  # fmt: skip
def test_a_duration(text: str, seconds: float) -> None:
    assert seconds_in(text) == pytest.approx(seconds)


@for_each(
    "text", ["", "s", "-1", "-1s", "1x", "30m1h", "1h1h", "1h-30m", "1h 30m", "inf", "nan", "1e400", "1,5s", "h1"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        seconds_in(text)


def test_a_retention_has_a_unit() -> None:
    assert retention("succeeded=30d") == ("succeeded", 2_592_000.0)
    assert retention("failed=86400") == ("failed", 86_400.0)


def test_a_point_in_time() -> None:
    assert point_in_time("2026-11-25T19:41Z") == point_in_time("2026-11-25T20:41+01:00") == 1_795_635_660.0
    assert point_in_time("2h") - point_in_time("1h") == pytest.approx(3600, abs=60)
