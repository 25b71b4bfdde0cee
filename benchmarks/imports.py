"""What importing costs, and a whole process that runs one durable agent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

from .floor import Line, Size, in_turns

IMPORT = 15.0  # milliseconds over bare Python
PROCESS = 150.0  # milliseconds

_FOREIGN = """
import sys
before = set(sys.modules)
import agent_runtime_core as it
for name in it.__all__:
    getattr(it, name)
new = [sys.modules[name] for name in set(sys.modules) - before]
print(*{each.__name__ for each in new if "-packages" in (getattr(each, "__file__", None) or "")
        and each.__name__.partition(".")[0] != "agent_runtime_core"})
"""
_HELLO = """
import asyncio, sys
from agent_runtime_core import AgentRunner, AgentRuntime, RunResult, register_runtime

class Hello(AgentRuntime):
    key = "hello"
    async def run(self, ctx):
        return RunResult(final_output={"hello": await ctx.step("greet", lambda: "world")})

async def main():
    register_runtime(Hello())
    async with AgentRunner.open(sys.argv[1]) as runner:
        result = await runner.execute("hello", "first", {})
        assert result.final_output == {"hello": "world"}, result

asyncio.run(main())
"""


class _Processes:
    """Python processes whose bytecode is kept, whatever the settings of this one."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self.environment["PYTHONPYCACHEPREFIX"] = str(size.where / "bytecode")

    def output(self, code: str, *arguments: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, env=self.environment, check=True, capture_output=True, text=True).stdout

    def milliseconds(self, code: str) -> float:
        since = time.perf_counter()
        self.output(code)
        return (time.perf_counter() - since) * 1000

    def hello(self) -> float:
        with self.size.file() as path:
            since = time.perf_counter()
            self.output(_HELLO, str(path))
            return (time.perf_counter() - since) * 1000


def rows(size: Size) -> Iterator[Line]:
    run = _Processes(size)
    run.hello()  # writes the bytecode
    imported, bare, whole, library = in_turns(
        size.rounds(21),
        lambda: run.milliseconds("import agent_runtime_core"),
        lambda: run.milliseconds("pass"),
        run.hello,
        lambda: run.milliseconds("import asyncio, json, sqlite3"),
    )
    yield Line("import agent_runtime_core, over bare Python", imported - bare, "ms", most=IMPORT)
    note = "beside: a process that imports asyncio, json, sqlite3"
    yield Line("process of a durable hello agent", whole, "ms", most=PROCESS, beside=library, note=note)
    foreign = run.output(_FOREIGN).split()
    yield Line("third-party modules behind all public names", len(foreign), "", most=0.0, note=" ".join(foreign))
