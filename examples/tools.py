"""A model with tools: it reads a folder, calculates, and asks before it writes a note. It survives `kill -9`.

    python examples/tools.py [TASK] [--mock] [--yes] [--folder .] [--provider openai] [--model MODEL] [--slow 0.5]

Every call of the model and of a tool is recorded in tools.db. Kill it anywhere and start it again: what is recorded
is not called again. The same task over the same folder with the same model is the same run, or give it a --run-id.
With --mock a script stands in for the model, and it needs no key.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import logging
import math
import operator
import os
import re
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from agent_runtime_core import (
    AgentRunner,
    AgentRuntimeError,
    EventType,
    LLMClient,
    MissingDependency,
    MockLLMClient,
    MockLLMResponse,
    RunContext,
    RunLimits,
    RunnerConfig,
    RunResult,
    RunStatus,
    Tool,
    ToolCallingAgent,
    ToolRegistry,
)
from agent_runtime_core.errors import NotConfigured
from agent_runtime_core.events import Event
from agent_runtime_core.llm import get_llm_client

TASK = "How large are the files here on average? Make a note of it."
LONGEST, MOST_ENTRIES, MOST_BITS = 1000, 200, 1000
OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip


class Assistant(ToolCallingAgent):
    key = "tools"
    system_prompt = (
        "You answer questions about a folder of files. Look with list_files, calculate with calculate and not in "
        "your head, and keep what you found with write_note if you are asked to. Answer in a sentence or two."
    )
    tools = ToolRegistry()
    model: str | None = None
    # Whatever the model does, one run ends here.
    limits = RunLimits(max_turns=12, max_tool_calls=20, max_tokens=100_000, run_timeout=240)

    def __init__(self, client: LLMClient, model: str | None, tools: ToolRegistry, slow: float) -> None:
        self.client, self.model, self.tools, self.slow = client, model, tools, slow

    def get_llm_client(self) -> LLMClient:
        return self.client

    async def on_tool_call(self, ctx: RunContext, tool_name: str, tool_args: dict[str, Any]) -> None:
        await asyncio.sleep(self.slow)


# -- the tools


def toolbox(folder: Path, notes: Path) -> ToolRegistry:
    """The tools of one run: they read below `folder`, and write to `notes` only."""

    def list_files(place: str = ".") -> str:
        """The files in a folder with their sizes, and the folders in it.

        Args:
            place: the folder, as a path from the one you work in
        """
        there = (folder / place).resolve()
        if not there.is_relative_to(folder):
            raise PermissionError(f"{place!r} is outside of the folder you may read")
        entries = sorted(entry for entry in there.iterdir() if entry.name.isprintable() and entry.name[0] != ".")
        lines = [f"{entry.name}/" if entry.is_dir() else f"{entry.name} ({size(entry)} bytes)" for entry in entries]
        more = [f"and {len(lines) - MOST_ENTRIES} more"] if len(lines) > MOST_ENTRIES else []
        return "\n".join(lines[:MOST_ENTRIES] + more) or "nothing is in it"

    def write_note(text: str, ctx: RunContext) -> str:
        """Keep a note in the notes file. A person is asked first, and may refuse.

        Args:
            text: what to write
        """
        # Killed after the note was written and before that was recorded, it is called again, under the same key.
        mark = f"<!-- {ctx.idempotency_key} -->"
        if not notes.exists() or mark not in notes.read_text("utf-8"):
            with open(notes, "a", encoding="utf-8") as file:
                file.write(f"{mark}\n{text}\n\n")
        return f"written to {notes.name}"

    tools = ToolRegistry()
    tools.register(Tool.from_function(list_files))
    tools.register(Tool.from_function(calculate, timeout=5))
    tools.register(Tool.from_function(write_note, has_side_effects=True, requires_confirmation=True))
    return tools


def size(path: Path) -> int:
    return path.lstat().st_size


def calculate(expression: str) -> float:
    """The value of an arithmetic expression: numbers, + - * / // % ** and parentheses.

    Args:
        expression: for example (3 + 4) * 2.5
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    return value(ast.parse(expression.strip(), mode="eval").body)


def value(node: ast.AST) -> float:
    """The value of a node, if it is arithmetic and stays small: nothing else is ever evaluated."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = value(left), value(right)
            if isinstance(op, ast.Pow) and abs(b) * math.log2(abs(a) + 2) > MOST_BITS:
                raise ValueError("the power is too large")
            found = OPERATORS[type(op)](a, b)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            found = OPERATORS[type(op)](value(operand))
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is no arithmetic")
    if not isinstance(found, int | float) or (isinstance(found, int) and found.bit_length() > MOST_BITS):
        raise ValueError("the result is not a real number, or too large")
    if not math.isfinite(found):
        raise ValueError("the result is not finite")
    return found


# -- the model


def scripted(messages: list[Any]) -> MockLLMResponse:
    """Stands in for a model: what it asks for next follows from the results so far, so it can go on after a kill."""
    results = [str(message["content"]) for message in messages if message["role"] == "tool"]
    sizes = re.findall(r" \((\d+) bytes\)$", results[0], re.M)[:50] if results else []
    match len(results):
        case 0:
            return asks(results, "list_files", place=".")
        case 1 if sizes:
            return asks(results, "calculate", expression=" + ".join(sizes))
        case 2:
            return asks(results, "calculate", expression=f"{results[1]} / {len(sizes)}")
        case 3:
            return asks(
                results, "write_note", text=f"{len(sizes)} files have {float(results[2]):.1f} bytes on average."
            )
    if not sizes:
        return MockLLMResponse("There are no files here.")
    kept = "The note is written." if not results[3].startswith("Error") else "There is no note of it, as you wished."
    return MockLLMResponse(f"The {len(sizes)} files here have {float(results[2]):.1f} bytes on average. {kept}")


def asks(results: Sequence[str], name: str, **arguments: str) -> MockLLMResponse:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return MockLLMResponse(None, [{"id": f"call_{len(results)}", "type": "function", "function": function}])


def client_for(provider: str | None, mock: bool) -> LLMClient:
    """The client to ask; without a key the program ends with a line that says what to do."""
    if mock:
        return MockLLMClient(response_fn=scripted)
    try:
        return get_llm_client(provider)
    except NotConfigured as error:
        sys.exit(f"tools: no key: set {error.provider.upper()}_API_KEY, or try it without one: --mock")
    except MissingDependency as error:
        sys.exit(f"tools: {error}; or try it without: --mock")


# -- the run


async def begin(runner: AgentRunner, agent: Assistant, run_id: str, job: dict[str, Any]) -> dict[str, Any] | None:
    """Store the run, or find it and tell what is kept of it; what it was asking a person when it was left."""
    await runner.submit(agent, job, run_id=run_id)
    run = await runner.get_run(run_id)
    events = await runner.event_bus.get_events(run_id)
    kept = sum(event.event_type == EventType.TOOL_RESULT for event in events)
    before = f"{kept} tool calls kept from before"
    if run.status is RunStatus.SUCCEEDED:
        before = "finished before, nothing is called again (another --run-id is another run)"
    print(f"run {run_id}: {job['messages'][0]['content']}\n{before}" if events else f"run {run_id}", flush=True)
    asked: dict[str, dict[str, Any]] = {}
    for event in events:
        if event.event_type == "approval.requested":
            asked[event.payload["details"]["tool_call_id"]] = event.payload
        elif event.event_type == EventType.TOOL_CALL:
            asked.pop(event.payload["tool_call_id"], None)
    return next(iter(asked.values()), None)


async def work(
    runner: AgentRunner, agent: Assistant, run_id: str, job: dict[str, Any]
) -> tuple[RunResult | None, dict[str, Any] | None]:
    """The run's result; or what it asks a person: then it is given back, and could wait for days."""
    since = await runner.event_bus.head(run_id)
    working = asyncio.ensure_future(runner.execute(agent, run_id, job, if_running="raise"))
    watching = asyncio.ensure_future(watch(runner, run_id, since))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        question = None if working.done() and working.exception() else await watching
        return (await working, None) if question is None else (None, question)
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait({working, watching})


async def watch(runner: AgentRunner, run_id: str, since: int) -> dict[str, Any] | None:
    """Print the tool calls as they happen, until the run has ended or asks a person."""
    async for event in runner.stream(run_id, since):
        if event.event_type == "approval.requested":
            return event.payload
        show(event)
    return None


def show(event: Event) -> None:
    told = event.payload
    if event.event_type == EventType.TOOL_CALL:
        print(called(told), flush=True)
    elif event.event_type == EventType.TOOL_RESULT:
        failed = "no result: it failed or was refused, and the model is told"
        first, *more = str(failed if told["result"] is None else told["result"]).splitlines() or [""]
        print(f"    {first[:100]}{f' … ({len(more)} more lines)' if more else ''}", flush=True)


def called(told: dict[str, Any]) -> str:
    return f"  {told['tool_name']}({', '.join(f'{name}={given!r:.100}' for name, given in told['tool_args'].items())})"


def decided(question: dict[str, Any], yes: bool) -> bool:
    """Ask whoever sits at the terminal; outside of the loop, where Ctrl-C interrupts it."""
    prompt = f"may it call {called(question['details']).strip()}? [y/N] "
    if yes:
        print(f"{prompt}yes", flush=True)
        return True
    try:
        said = input(prompt)
    except EOFError:
        sys.exit("\ntools: nobody is here to answer: start it again in a terminal, or with --yes")
    if not sys.stdin.isatty():
        print(said, flush=True)  # as a terminal would show it
    return said.strip().lower() in ("y", "yes")


def assist(
    loop: asyncio.Runner, runner: AgentRunner, agent: Assistant, run_id: str, job: dict[str, Any], yes: bool
) -> None:
    question, result = loop.run(begin(runner, agent, run_id, job)), None
    while result is None:
        if question is not None:
            # A second answer to the same question changes nothing: one of an id is delivered once.
            mark = question["details"]["tool_call_id"]
            loop.run(runner.approve(run_id, question["name"], decided(question, yes), message_id=mark))
        result, question = loop.run(work(runner, agent, run_id, job))
    if result.error is not None:
        sys.exit(f"tools: {result.error.type}: {result.error.message}")
    print(f"{result.final_output['response']}\n{told_usage(result.usage)}")


def told_usage(usage: dict[str, Any]) -> str:
    return f"({usage['turns']} model calls, {usage['tool_calls']} tool calls, {usage.get('total_tokens', 0)} tokens)"


def close(loop: asyncio.Runner, runner: AgentRunner) -> None:
    """Close the runner. A Ctrl-C that came just before the loop would have stopped has left that for its next turn."""
    turn = loop.get_loop()
    turn.call_soon(turn.stop)
    turn.run_forever()
    loop.run(runner.close())


def main() -> None:
    parser = argparse.ArgumentParser(description="A model with tools; killed, it can go on.")
    parser.add_argument("task", nargs="?", default=TASK, help=TASK)
    parser.add_argument("--folder", type=Path, default=Path(), help="what it may read; default: this one")
    parser.add_argument("--yes", action="store_true", help="approve every note")
    parser.add_argument("--provider", help="openai, anthropic or litellm; default: the configured one")
    parser.add_argument("--model", help="default: the provider's")
    parser.add_argument("--mock", action="store_true", help="a script stands in for the model: no key, no network")
    parser.add_argument("--run-id", help="default: made from task, folder and model")
    parser.add_argument("--slow", type=float, default=0.0, metavar="SECONDS", help="linger before each tool, to watch")
    parser.add_argument("--db", type=Path, default=Path("tools.db"), help="where calls are recorded: tools.db")
    options = parser.parse_args()
    logging.getLogger("agent_runtime_core").setLevel(logging.ERROR)  # nobody here asks for the price of a call
    folder = Path(os.path.realpath(options.folder))
    if not folder.is_dir():
        parser.error(f"{options.folder} is not a folder")
    model = "a script" if options.mock else f"{options.provider or 'default'}/{options.model or 'default'}"
    about = {"folder": os.fsencode(folder).decode("utf-8", "backslashreplace"), "model": model}
    job = {"messages": [{"role": "user", "content": options.task}], "params": about}
    run_id = options.run_id or "tools-" + sha256(json.dumps(job).encode()).hexdigest()[:16]
    try:
        client = client_for(options.provider, options.mock)
        agent = Assistant(client, options.model, toolbox(folder, options.db.with_name("notes.md")), options.slow)
        with asyncio.Runner() as loop:
            runner = AgentRunner.open(options.db, config=RunnerConfig(worker_id=f"tools-{os.getpid()}"))
            try:
                assist(loop, runner, agent, run_id, job, options.yes)
            finally:
                close(loop, runner)
    except (AgentRuntimeError, OSError) as error:
        sys.exit(f"tools: {error}")
    except KeyboardInterrupt:
        print("\ninterrupted: start it again to go on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
