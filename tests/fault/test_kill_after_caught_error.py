"""A process that caught the error of a step and was then killed: the next process catches the same error."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import asyncio, importlib, json, os, signal, sys
from agent_runtime_core import StepExecutionError, open_run
{imports}

path, log, make = sys.argv[1:4]


def fails():
    with open(log, "a") as file:
        file.write("called\\n")
    module = importlib.import_module("service_errors")
    raise getattr(module, make)(503, body={{"reason": "busy", "session_token": "hunter2"}}, session=object())


async def main():
    async with open_run(path, run_id="r") as ctx:
        try:
            await ctx.step("call", fails)
        except StepExecutionError as error:
            cause = error.__cause__
            seen = [str(error), error.error_type, error.error_args, error.error_attributes]
            if cause is None:
                seen += [None, None]
            else:
                values = [cause.args, cause.status, cause.body, hasattr(cause, "session")]
                seen += [[type(cause).__name__, *values], repr(cause.__cause__)]
            print(json.dumps(seen), flush=True)
        await ctx.step("after", int)
        if os.environ.get("KILL"):
            os.kill(os.getpid(), signal.SIGKILL)


asyncio.run(main())
"""

ERRORS = """
class ServiceError(Exception):
    def __init__(self, status, *, body, session):
        super().__init__(f"status {status}")
        self.status, self.body, self.session = status, body, session
        self.__cause__ = ConnectionResetError(104, "reset")


def local(status, **more):
    class Local(ServiceError):
        pass

    return Local(status, **more)
"""


def run(folder: Path, make: str, monkeypatch: pytest.MonkeyPatch, *, kill: bool) -> Any:
    monkeypatch.setenv("KILL", "1" if kill else "")
    arguments = [sys.executable, "program.py", "runs.db", "log.txt", make]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (-signal.SIGKILL if kill else 0), done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("make", ["ServiceError", "local"])
@pytest.mark.parametrize("imports", ["import service_errors", ""])
def test_the_next_process_catches_the_same_error(
    tmp_path: Path, make: str, imports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(imports=imports))
    (tmp_path / "service_errors.py").write_text(ERRORS)
    first = run(tmp_path, make, monkeypatch, kill=True)
    again = run(tmp_path, make, monkeypatch, kill=False)
    assert (tmp_path / "log.txt").read_text() == "called\n"
    if imports or make == "local":
        assert first == again
    else:  # only the function of the step imports the class
        assert first[:4] == again[:4]
    name = "service_errors.ServiceError" if make == "ServiceError" else "service_errors.local.<locals>.Local"
    assert again[1:4] == [name, ["status 503"], {"status": 503, "body": {"reason": "busy"}}]
    built = ["ServiceError", ["status 503"], 503, {"reason": "busy"}, False]
    assert again[4] == (built if imports and make == "ServiceError" else None)
    assert again[5] == ("ConnectionResetError(104, 'reset')" if again[4] else None)
