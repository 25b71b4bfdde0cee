"""What importing costs, and a whole process that runs one durable agent."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

from .floor import Line, Size, in_turns

IMPORT = 15.0  # milliseconds over bare Python
PROCESS = 150.0  # milliseconds

_FOREIGN = (
    "import sys\n"
    "before = {name.partition('.')[0] for name in sys.modules}\n"
    "import agent_runtime_core as it\n"
    "for name in it.__all__: getattr(it, name)\n"
    "after = {name.partition('.')[0] for name in sys.modules}\n"
    "print(*(after - before - set(sys.stdlib_module_names) - {'agent_runtime_core'}))"
)
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


def _milliseconds(code: str, *arguments: str) -> float:
    since = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - since) * 1000


def rows(size: Size) -> Iterator[Line]:
    def hello() -> float:
        with size.file() as path:
            return _milliseconds(_HELLO, str(path))

    def standard() -> float:
        return _milliseconds("import asyncio, json, sqlite3")

    hello()  # writes the bytecode
    imported, bare, whole, library = in_turns(
        size.rounds(21),
        lambda: _milliseconds("import agent_runtime_core"),
        lambda: _milliseconds("pass"),
        hello,
        standard,
    )
    yield Line("import agent_runtime_core, over bare Python", imported - bare, "ms", most=IMPORT)
    note = "beside: a process that imports asyncio, json, sqlite3"
    yield Line("process of a durable hello agent", whole, "ms", most=PROCESS, beside=library, note=note)
    done = subprocess.run([sys.executable, "-c", _FOREIGN], check=True, capture_output=True, text=True)
    foreign = done.stdout.split()
    yield Line("third-party modules behind all public names", len(foreign), "", most=0.0, note=" ".join(foreign))
