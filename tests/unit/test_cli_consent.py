"""Commands that delete or change more runs than they name accept `--dry-run`. If nothing can undo it, they ask."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import io
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.cli.consent import MANY
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from tests.support.cases import for_each
from tests.support.command_line import Commands
from tests.support.runs import Script
from tests.unit.test_cli_parser import COMMANDS

#: The other commands. If you add a command, decide what it does to the runs of a store.
READS = {
    "runs", "pools", "workers", "show", "events", "export", "inspect", "dead list", "schedule list", "schedule show",
    "schedule next", "doctor", "check", "verify", "backup", "help", "version", "completion", "conformance",
}  # fmt: skip
CHANGES_WHAT_IT_NAMES = {
    "worker", "serve", "submit", "cancel", "send", "signal", "approve", "resume", "fork", "restored", "schedule put",
    "schedule pause", "schedule resume", "schedule run", "schedule delete",
}  # fmt: skip
#: They write a store as a whole, and delete or change no run in it: `copy` needs an empty store, `restore` a new file.
WRITES_A_STORE = {"migrate", "index", "reencrypt", "copy", "restore", "carry-over"}

#: Functions of the library that delete, or that change many runs, wherever a command calls one of them.
DELETES = {"assign_runs", "clear", "delete", "discard", "erase", "forget", "mark_restored", "requeue", "vacuum"}
#: The commands that call such a function for one thing that is named, or for a file that did not exist.
ALLOWED = {"schedule delete": {"delete"}, "restore": {"mark_restored"}}

#: How each command is called in these tests, for the store of `run`.
ARGUMENTS = {
    "dead discard": ["--all", "--status", "failed"],
    "dead requeue": ["--all", "--status", "failed"],
    "erase": ["--run", "bad"],
    "mark-restored": [],
    "tenant set": ["acme"],
    "vacuum": ["--retention", "failed=0"],
}
#: What is asked, for the commands that ask.
QUESTIONS = {
    "dead discard": "Delete 1 failed run from {url}?",
    "erase": "Erase 1 run and 0 documents from {url}?",
    "tenant set": "Give 2 runs without a tenant to tenant 'acme'?",
}


def test_each_command_is_classified_once() -> None:
    names = [*READS, *CHANGES_WHAT_IT_NAMES, *WRITES_A_STORE, *MANY]
    assert sorted(names) == sorted(COMMANDS)
    assert (set(ARGUMENTS), set(QUESTIONS)) == (set(MANY), {name for name, asks in MANY.items() if asks})


def called(module: ast.Module, function: str) -> Iterator[str]:
    """Yield the names of the functions that a function of a module calls, and those that they call there."""
    functions = {each.name: each for each in module.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    waiting, seen = [function], set[str]()
    while waiting:
        if (name := waiting.pop()) in seen or name not in functions:
            continue
        seen.add(name)
        for node in ast.walk(functions[name]):
            if isinstance(node, ast.Call):
                found = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                yield found
                waiting.append(found)


@for_each("name", COMMANDS)
def test_a_command_that_deletes_is_in_the_table(name: str) -> None:
    module, _, function = COMMANDS[name].get_default("command").partition(":")
    text = inspect.getsource(importlib.import_module(f"agent_runtime_core.cli{module}"))
    found = DELETES & set(called(ast.parse(text), function)) - ALLOWED.get(name, set())
    assert bool(found) == (name in MANY), found


@for_each("name", COMMANDS)
def test_the_options_follow_the_rule(name: str) -> None:
    options = {option for action in COMMANDS[name]._actions for option in action.option_strings}
    assert ("--dry-run" in options) == (name in MANY or name == "migrate")
    assert ("--yes" in options) == MANY.get(name, False)


# -- what they do


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Commands on a store with a failed and a pending run, without a terminal."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    url = str(tmp_path / "runs.db")

    async def fails(ctx: Any) -> None:
        raise LookupError

    async def fill() -> None:
        config = RunnerConfig(max_retries=1)
        async with AgentRunner.open(url, config=config, registry=Registry(), persistence=None) as runner:
            runner.registry.register(Script(fails, "fails"))
            await runner.submit("fails", run_id="bad")
            await runner.run_once()
            await runner.submit("fails", run_id="live")

    asyncio.run(fill())
    return Commands(capsys, url)


def content(url: str) -> list[str]:
    """Return what the tables of runs contain. The tables of documents are created when a command opens them."""
    query = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT GLOB 'arc_[ds][oc]*'"
    with sqlite3.connect(url) as connection:
        names = sorted(name for (name,) in connection.execute(query))
        return [f"{name} {row}" for name in names for row in connection.execute(f'SELECT * FROM "{name}"')]


@for_each("name", MANY)
def test_a_dry_run_changes_nothing(name: str, run: Commands) -> None:
    before = content(run.url)
    code, out, err = run(*name.split(), *ARGUMENTS[name], "--dry-run")
    assert (code, err, "would" in out) == (0, "", True)
    assert run.json(*name.split(), *ARGUMENTS[name], "--dry-run")["dry_run"] is True
    assert content(run.url) == before


@pytest.mark.parametrize("name", sorted(MANY))
def test_without_a_terminal_a_command_that_asks_needs_yes(name: str, run: Commands) -> None:
    before = content(run.url)
    if MANY[name]:
        code, out, err = run(*name.split(), *ARGUMENTS[name])
        verb = QUESTIONS[name].format(url=run.url)[1:-1]
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert f"Add --yes to {QUESTIONS[name][0].lower()}{verb}, or --dry-run" in err
        assert content(run.url) == before
    assert run(*name.split(), *ARGUMENTS[name], *["--yes"] * MANY[name])[0] == 0
    assert content(run.url) != before


@pytest.mark.parametrize("answer", ["y", "YES", "n", "", "yess"])
@pytest.mark.parametrize("name", sorted(QUESTIONS))
def test_on_a_terminal_the_answer_decides(
    name: str, answer: str, run: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, agrees = content(run.url), answer in ("y", "YES")
    monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
    code, out, err = run(*name.split(), *ARGUMENTS[name])
    assert err.startswith(f"{QUESTIONS[name].format(url=run.url)} [y/N] ")
    assert (code, "nothing was done" in err, bool(out)) == (0 if agrees else 1, not agrees, agrees)
    assert (content(run.url) != before) == agrees


def test_runs_that_are_named_are_deleted_without_a_question(run: Commands) -> None:
    assert run("dead", "discard", "bad", "--status", "failed") == (0, "1 run discarded\n", "")


def test_a_closed_stdin_is_no_terminal(run: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    code, _, err = run("erase", "--run", "bad")
    assert (code, "--yes" in err) == (2, True)
