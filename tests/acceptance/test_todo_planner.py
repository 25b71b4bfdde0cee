"""The planner's example as a reader starts it: by rules, killed, by a model over a wire, and asked for too much."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.test_examples import EXAMPLES, run, started, until
from tests.support.provider_server import script, serving

NAME = "todo_planner.py"
#: Runs the example with sums that never end.
HELD = """
import asyncio, sys
sys.path.insert(0, sys.argv.pop(1))
import todo_planner
from agent_runtime_core.tools import CalculatorTool
async def forever(*_, **__):
    await asyncio.sleep(600)
CalculatorTool.execute = forever
todo_planner.main()
"""


def test_words_become_a_plan_and_to_dos_are_kept(tmp_path: Path) -> None:
    said = run(NAME, cwd=tmp_path).stdout.splitlines()
    assert said[0].endswith(": add 12 and 30, then remember the result as a to-do, list my to-dos")
    assert said[1:] == [
        "  1. calculator(operation='add', a=12, b=30)",
        "     42",
        "  2. todo_store(action='add', text='Result: 42')",
        "     [ ] 1: Result: 42",
        "  3. todo_store(action='list')",
        "     [ ] 1: Result: 42",
        "[ ] 1: Result: 42",
    ]
    more = run(NAME, "remind me to call Bob, complete to-do 1, list my to-dos", cwd=tmp_path).stdout
    assert more.endswith("\n[x] 1: Result: 42\n[ ] 2: call Bob\n")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["what is love?"], "failed: PlanningError: no plan for 'what is love?'. This planner understands sums"),
        (["add 1 and 2", "--max-steps", "0"], "todo_planner: max_steps must be an integer from 1 to 100, got 0"),
    ],
)
def test_what_cannot_be_done_is_said(given: list[str], says: str, tmp_path: Path) -> None:
    assert run(NAME, *given, cwd=tmp_path, code=1).stderr.startswith(says)


def test_killed_it_finishes_what_was_left(tmp_path: Path) -> None:
    said = tmp_path / "said.txt"
    with started(["-c", HELD, EXAMPLES, "remind me to call Bob, then divide 1 by 0"], tmp_path, said) as process:
        until(process, said, lambda: "run " in said.read_text())
        process.send_signal(signal.SIGKILL)
        process.wait()
    again = run(NAME, "list my to-dos", cwd=tmp_path)
    assert again.stdout.startswith("going on with: remind me to call Bob, then divide 1 by 0\n")
    assert again.stderr == (
        "failed: ToolFailed: step 'step_2' failed after 3 attempts: "
        "tool 'calculator' did not succeed: division by zero: the divisor must be other than 0, got 0.\n"
    )
    # Killed between taking its number and being stored, it takes the next one.
    assert re.search(r"to-dos\n.*\n\[ \] [12]: call Bob\n$", again.stdout, re.DOTALL)
    assert again.stdout.splitlines()[-1].startswith("[ ]")
    assert not again.stdout.splitlines()[-2].startswith("[ ]")
    assert again.stdout.count("call Bob'") == 1


async def test_with_a_key_a_model_makes_the_plan(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    plan = {
        "final_goal": "the product",
        "steps": [
            {"step_number": 1, "kind": "tool_call", "tool_name": "calculator", "tool_input": {"expression": "6 * 7"}},
            {"step_number": 2, "kind": "llm_call", "tool_name": "", "tool_input": {"prompt": "say {{step_1.result}}"}},
        ],
    }

    def answer(text: str) -> dict[str, object]:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return {
            "id": "1", "object": "chat.completion", "created": 1, "model": "m-1", "choices": [choice], "usage": usage,
        }  # fmt: skip

    async with serving(script(answer(json.dumps(plan))), script(answer("forty-two"))) as server:
        more: dict[str, Any] = {"OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": "k", "NO_PROXY": "127.0.0.1"}

        def start() -> subprocess.CompletedProcess[str]:
            return run(NAME, "six times seven, in words", "--model", "m-1", cwd=tmp_path, **more)

        said = (await asyncio.to_thread(start)).stdout
    assert said.endswith("\nforty-two\n")
    assert [asked["model"] for asked in server.asked] == ["m-1"] * 2
    assert [asked["messages"][-1]["content"] for asked in server.asked] == ["six times seven, in words", "say 42"]
