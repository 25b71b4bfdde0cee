"""Programs with an agent of a framework, killed at each of its model and tool calls, and resumed.

A program is a module `python -m PROGRAM STORE LOG KILL_AT`. It calls `begin()` first, executes its run with a fixed run
id (`AgentRunner.execute` resumes a run that crashed), and passes the final output to `finish(output)`. Each real model
call and tool call calls `called(label)` before it does anything. A label names one call of the run, such as "model 2",
and must be the same in each process: count the messages of the conversation, not the calls of the process.

KILL_AT is "" for none, "3" to die inside the third call, or "3:recorded" to die before the third call begins, when the
results of the first two are recorded.

Importing a framework takes many times as long as a run. So the kills of a test share two processes that imported the
program and run nothing: a fork of the first one is killed, and a fork of the second one resumes the run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.warm import PATIENCE, Warm

OUTPUT = "output: "


@dataclass
class _Calls:
    """Where this process logs its calls, and at which call it dies."""

    log: Path
    kill_at: int
    recorded: bool


_calls: _Calls | None = None


def begin() -> str:
    """Read the command line of a program; the URL of its store."""
    global _calls
    store, log, kill_at = sys.argv[1:4]
    number, _, mode = kill_at.partition(":")
    _calls = _Calls(Path(log), int(number or 0), mode == "recorded")
    return store


def called(label: str) -> None:
    """Log that a real call begins; die here if it is the call to die at."""
    if _calls is None:  # a test in this process uses the same models and tools
        return
    number = len(logged(_calls.log)) + 1
    dies = number == _calls.kill_at
    if dies and _calls.recorded:
        os.kill(os.getpid(), signal.SIGKILL)
    with _calls.log.open("a") as file:
        file.write(label + "\n")
        file.flush()
        os.fsync(file.fileno())
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)


def finish(output: Any) -> None:
    """Print the final output."""
    sys.stdout.write(OUTPUT + json.dumps(output, sort_keys=True) + "\n")
    sys.stdout.flush()


def logged(log: Path) -> list[str]:
    """The labels of the calls that began."""
    return log.read_text().splitlines() if log.exists() else []


class Program(Warm):
    """A process that has imported a program, of which each run is a fork."""

    def __init__(self, program: str) -> None:
        super().__init__(program)
        self._program = program

    def run(self, store: str, log: Path, kill_at: str = "") -> Any:
        """The final output of a new process; None if it was killed."""
        said = log.with_name("output.log")
        said.unlink(missing_ok=True)
        with self.fork(self._program, store, log, kill_at, output=str(said)) as process:
            try:
                returncode = process.wait(PATIENCE)
            finally:
                process.kill()
        text = said.read_text()
        if kill_at and returncode == -signal.SIGKILL:
            return None
        assert returncode == 0, text[-4000:]
        assert not kill_at, f"{self._program} was not killed at call {kill_at}: {logged(log)}"
        printed = [line for line in text.splitlines() if line.startswith(OUTPUT)]
        assert len(printed) == 1, text
        return json.loads(printed[0].removeprefix(OUTPUT))


#: Of a test: whether a program is killed at each call in both ways, or in one, first this way and then that.
WAYS = pytest.mark.parametrize("both_ways", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["one", "both"])


def check_kills(
    program: str, store_url: str, tmp_path: Path, *, both_ways: bool = True, at_least: int = 2
) -> list[str]:
    """Kill a program at each of its calls, resume it, and compare; the labels of the undisturbed calls.

    Each kill has a folder of its own: `{folder}` in `store_url` is replaced by its path, and `{name}` by its name. The
    final output must be that of the undisturbed run, and no call may begin twice except the one that was killed.
    """
    with Program(program) as killed, Program(program) as resumed:
        expected, calls = _undisturbed(killed, resumed, *_place(store_url, tmp_path, "undisturbed"))
        assert len(calls) >= at_least, calls
        assert len(set(calls)) == len(calls), f"labels of calls must differ: {calls}"
        for number in range(1, len(calls) + 1):
            modes = ("", ":recorded")
            for mode in modes if both_ways else [modes[number % 2]]:
                kill_at = f"{number}{mode}"
                store, log = _place(store_url, tmp_path, f"kill-{number}{mode.replace(':', '-')}")
                assert killed.run(store, log, kill_at) is None
                begun = logged(log)
                assert resumed.run(store, log) == expected, f"killed at {kill_at}"
                # A call that was in flight has no result yet, so it is made again. All others are made once.
                again = [] if mode else begun[-1:]
                assert sorted(logged(log)) == sorted(calls + again), f"killed at {kill_at}: {logged(log)}"
    return calls


def _undisturbed(first: Program, second: Program, store: str, log: Path) -> tuple[Any, list[str]]:
    output = first.run(store, log)
    calls = logged(log)
    assert second.run(store, log) == output, "a run that succeeded must return its saved result"
    assert logged(log) == calls, "a run that succeeded must make no call"
    return output, calls


def _place(store_url: str, tmp_path: Path, name: str) -> tuple[str, Path]:
    folder = tmp_path / name
    folder.mkdir()
    return store_url.format(folder=folder, name=name), folder / "calls.log"
