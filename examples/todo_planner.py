"""Says what to do in plain words: a plan is made of it, carried out step by step, and kept.

    python examples/todo_planner.py ["add 12 and 30, then remember the result as a to-do, list my to-dos"]
        [--rules] [--model MODEL] [--max-steps 10] [--db todo_planner.db]

Without a key, or with --rules, the plan is made by rules, which know sums and to-dos. With OPENAI_API_KEY set a model
makes it, of any words, and a step of the plan may ask the model too. To-dos are kept from one start to the next. What a
start that was killed left unfinished is finished first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from agent_runtime_core import AgentRunner, AgentRuntimeError, LLMClient
from agent_runtime_core.llm import get_llm_client
from agent_runtime_core.orchestrator import Orchestrator, RunResponse, RunStatus
from agent_runtime_core.planning import BasePlanner, LLMPlanner, RuleBasedPlanner, memory_operations

PROMPT = "add 12 and 30, then remember the result as a to-do, list my to-dos"
UNFINISHED = ("pending", "running", "waiting")


def client_for(rules: bool, model: str | None) -> LLMClient | None:
    """The model to ask, where there is a key."""
    if rules or not os.environ.get("OPENAI_API_KEY"):
        return None
    return get_llm_client("openai", **({} if model is None else {"default_model": model}))


def planner_for(client: LLMClient | None) -> BasePlanner:
    return RuleBasedPlanner() if client is None else LLMPlanner(client, memory=memory_operations())


async def carry_out(orchestrator: Orchestrator, prompt: str, max_steps: int) -> bool:
    """Finish what was left, then do what is asked; False if that failed."""
    runner, key = orchestrator.runner, orchestrator.agent.key
    left = {each.run_id: each for status in UNFINISHED for each in await runner.runs(status, key)}
    for run_id, info in left.items():
        print(f"going on with: {info.input['messages'][0]['content']}", flush=True)
        show(await orchestrator.wait(run_id))
    created = await orchestrator.create_run(prompt=prompt, max_steps=max_steps)
    print(f"run {created.run_id}: {prompt}", flush=True)
    return show(await orchestrator.wait(created.run_id))


def show(run: RunResponse) -> bool:
    for step in run.steps:
        given = ", ".join(f"{name}={value!r:.60}" for name, value in step["tool_input"].items())
        print(f"  {step['step_number']}. {step['tool_name']}({given})")
        result = step["result"]
        print(f"     {plain(result['output']) if result['success'] else result['error']}")
    if run.status is RunStatus.FAILED:
        print(f"failed: {run.error}", file=sys.stderr)
        return False
    print(plain(run.result))
    return True


def plain(value: Any) -> str:
    """A result for people: to-dos one to a line."""
    if isinstance(value, list):
        return "\n".join(map(plain, value)) or "nothing"
    if isinstance(value, dict) and {"number", "text", "done"} <= value.keys():
        return f"[{'x' if value['done'] else ' '}] {value['number']}: {value['text']}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


async def start(options: argparse.Namespace) -> bool:
    client = client_for(options.rules, options.model)
    async with (
        AgentRunner.open(options.db) as runner,
        Orchestrator(planner_for(client), runner=runner, client=client) as orchestrator,
    ):
        return await carry_out(orchestrator, options.prompt, options.max_steps)


def run(work: Coroutine[Any, Any, bool]) -> bool:
    """As asyncio.run. A Ctrl-C that came just before the loop would have stopped has left that for its next turn."""
    with asyncio.Runner() as loop:
        try:
            return loop.run(work)
        finally:
            turn = loop.get_loop()
            turn.call_soon(turn.stop)
            turn.run_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="Plans what you say, and does it.")
    parser.add_argument("prompt", nargs="?", default=PROMPT, help=PROMPT)
    parser.add_argument("--rules", action="store_true", help="make the plan by rules, also where there is a key")
    parser.add_argument("--model", help="default: the configured one")
    parser.add_argument("--max-steps", type=int, default=10, help="a plan of more steps is refused: 10")
    parser.add_argument("--db", type=Path, default=Path("todo_planner.db"), help="where all is kept: todo_planner.db")
    logging.getLogger("agent_runtime_core").setLevel(logging.ERROR)  # this program reports a failed run itself
    try:
        if not run(start(parser.parse_args())):
            sys.exit(1)
    except (AgentRuntimeError, OSError) as error:
        sys.exit(f"todo_planner: {error}")
    except KeyboardInterrupt:
        print("\ninterrupted: start it again to go on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
