"""A planner that asks a model for a plan as JSON, and sends errors in the answer back to the model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from .._core.settings import COUNT
from .._core.validation import must, sentence
from ..errors import InvalidArgument, PlanningError
from ..interfaces import LLMClient
from ..llm._openai_format import text_of_answer
from ..loop.answers import flaw_of
from ..tools.registry import ToolRegistry
from ..tools.structured_output import Output
from ..tools.tool import Tool
from .plan import MOST_STEPS, BasePlanner, Plan, PlanStep, StepKind, as_list

_SCHEMA: Final[dict[str, Any]] = {
    "title": "plan",
    "type": "object",
    "properties": {
        "final_goal": {"type": "string", "description": "What the whole plan is for."},
        "steps": {
            "type": "array",
            "minItems": 1,
            "maxItems": MOST_STEPS,
            "items": {
                "type": "object",
                "properties": {
                    "step_number": {"type": "integer", "minimum": 1},
                    "kind": {"type": "string", "enum": [kind.value for kind in StepKind], "default": "tool_call"},
                    "tool_name": {"type": "string", "description": "The tool or memory operation; empty for llm_call."},
                    "tool_input": {"type": "object", "description": 'Its arguments; for llm_call {"prompt": …}.'},
                    "depends_on": {"type": "array", "items": {"type": "integer"}},
                    "reasoning": {"type": "string", "description": "Why this step, in a few words."},
                },
                "required": ["step_number", "tool_name", "tool_input"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["final_goal", "steps"],
    "additionalProperties": False,
}

_TASK: Final = """\
You make plans. Answer with nothing but JSON that fits the schema below: the steps that do what the user asks for, as
few as will do, numbered from 1.

A step is of one kind: "tool_call" calls a tool, "memory_op" a memory operation, "llm_call" asks a model with the
"prompt" in its tool_input. Use only the tools and memory operations listed here, with arguments that fit their
parameters. "{{step_1.result}}" in a tool_input stands for the result of step 1, "{{step_1.result.name}}" for a field of
it; a step may refer only to earlier ones, and waits for those. Steps that need not wait for each other run side by
side: name in "depends_on" only those that a step must wait for without referring to them."""

#: Example prompts and plans that are sent before the user's prompt.
EXAMPLES: Final[Sequence[tuple[str, Plan]]] = (
    (
        "Multiply 6 by 7 and say the result in French.",
        Plan(
            [
                PlanStep(1, "calculator", {"expression": "6 * 7"}, "the product"),
                PlanStep(
                    2, "", {"prompt": "Write the number {{step_1.result}} in French words."}, "say it",
                    kind=StepKind.LLM_CALL,
                ),
            ],
            "6 times 7, in French words",
        ),
    ),
)  # fmt: skip


class LLMPlanner(BasePlanner):
    """Asks a model for a plan as JSON.

    An invalid answer is sent back with its exact problems. After the last answer, a PlanningError contains it. An
    answer that was truncated or refused is not sent back. Inside a run, call `create_plan` in a step: it is not
    recorded itself.

    Args:
        client: The model client.
        max_repairs: How often an invalid answer is sent back.
        examples: Pairs of a prompt and its plan to show to the model.
        memory: The operations that a memory_op may use, as tools.
        **options: Options of `client.generate`, such as `model` or `response_format={"type": "json_object"}`.
    """

    def __init__(
        self,
        client: LLMClient,
        *,
        max_repairs: int = 2,
        examples: Sequence[tuple[str, Plan | Mapping[str, Any]]] = EXAMPLES,
        memory: ToolRegistry | Iterable[Tool] = (),
        **options: Any,
    ) -> None:
        COUNT.check("max_repairs", max_repairs)
        self.client = client
        self.max_repairs = max_repairs
        self.memory: list[Tool] = as_list(memory)
        self.examples: list[tuple[str, Plan]] = [
            (prompt, plan if isinstance(plan, Plan) else Plan.from_dict(plan)) for prompt, plan in examples
        ]
        self._output = Output(_SCHEMA)
        self._options: dict[str, Any] = options

    async def create_plan(self, prompt: str, available_tools: ToolRegistry | Iterable[Tool]) -> Plan:
        if not isinstance(prompt, str) or not prompt.strip():
            raise PlanningError(str(must("the prompt", "not be empty", prompt, "Pass the request to plan for")))
        tools = as_list(available_tools)
        messages = [*self._system_messages(tools), {"role": "user", "content": prompt}]
        problems: list[str] = []
        text = ""
        for _ in range(self.max_repairs + 1):
            response = await self.client.generate(list(messages), **self._options)
            if (flaw := flaw_of(response.message, response.finish_reason)) is not None:
                # The model cannot repair it: the next answer would be truncated or refused in the same way.
                raise PlanningError(f"the model returned no plan: {sentence(flaw.message)}", [flaw.message], flaw.text)
            text = text_of_answer(response.message.get("content"))
            plan, problems = self._parse(text, tools)
            if plan is not None:
                return plan
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": self._output.repair("; ".join(problems))},
            ]
        answers = self.max_repairs + 1
        raise PlanningError(
            f"the model returned no valid plan after {answers} attempt{'s' if answers > 1 else ''}: "
            f"{sentence('; '.join(problems))}",
            problems,
            text,
        )

    def _system_messages(self, tools: Sequence[Tool]) -> list[dict[str, Any]]:
        """Return the messages before the prompt: the task, and the examples."""
        sections = [
            _TASK,
            f"Tools:\n{_described(tools)}",
            f"Memory operations:\n{_described(self.memory)}",
            f"Schema:\n{json.dumps(_SCHEMA, ensure_ascii=False)}",
        ]
        messages: list[dict[str, Any]] = [{"role": "system", "content": "\n\n".join(sections)}]
        for prompt, plan in self.examples:
            answer = json.dumps(plan.to_dict(), ensure_ascii=False)
            messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return messages

    def _parse(self, text: str, tools: Sequence[Tool]) -> tuple[Plan | None, list[str]]:
        """Return the plan in an answer, or None and the problems of the answer."""
        problem = self._output.problem(text)
        if problem is not None:
            return None, [problem]
        try:
            plan = Plan.from_dict(self._output.values(text)[0])
            problems = plan.problems(tools, self.memory)
        except InvalidArgument as error:
            return None, [str(error)]
        return (None, problems) if problems else (plan, [])


def _described(tools: Sequence[Tool]) -> str:
    descriptions = [
        {"name": each.name, "description": each.description, "parameters": each.parameters} for each in tools
    ]
    return "\n".join(json.dumps(each, ensure_ascii=False, default=str) for each in descriptions) or "none"
