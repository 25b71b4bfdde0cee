"""Read the finished attempts of a plan's steps from the journal of its run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, cast

from .._core.codec.json import decode
from .._journal.record import DONE, FAILED, RETRYING, Record
from ..errors import InvalidArgument
from ..tools.registry import ToolRegistry
from .agent import PLANNING
from .executor import SCOPE, approved_input, step_input, step_name
from .plan import Plan, PlanStep

_STEPS = f"x:{SCOPE}/p:0:"


def tried_steps(
    records: Iterable[Record], tools: ToolRegistry, read: Callable[[str], Any] = decode
) -> list[dict[str, Any]]:
    """Return the finished attempts of the steps of a PlanningAgent's plan, by step number and then in order.

    Each is {"step_number", "tool_name", "tool_input", "result", "attempt"}, and its result is
    {"success", "output", "error"}. `read` decodes stored results.
    """
    reading = _Reading(tools, read)
    for record in records:
        reading.read(record)
    return sorted(reading.tried, key=lambda each: cast(int, each["step_number"]))


class _Reading:
    def __init__(self, tools: ToolRegistry, read: Callable[[str], Any]) -> None:
        self.tools, self.decode = tools, read
        self.steps: dict[str, PlanStep] = {}
        self.results: dict[int, Any] = {}
        self.approved: dict[str, dict[str, Any]] = {}
        self.tried: list[dict[str, Any]] = []

    def read(self, record: Record) -> None:
        if record.kind == DONE and (record.name, record.key) == (PLANNING, "s:0"):
            plan = Plan.from_dict(cast("dict[str, Any]", self.decode(record.result or "{}")))
            self.steps = {step_name(step): step for step in plan.steps}
        elif record.kind == DONE and record.name.startswith("signal:tool:"):
            unchanged: dict[str, Any] = {}
            approved = approved_input(self.decode(record.result or "null"), unchanged)
            if approved is not unchanged:  # a person changed the arguments, maybe to an empty object
                self.approved[f"step_{record.key.rpartition(':')[2]}"] = approved
        elif record.kind in (DONE, RETRYING, FAILED) and record.key.startswith(_STEPS) and record.name in self.steps:
            self._tried(record, self.steps[record.name])

    def _tried(self, record: Record, step: PlanStep) -> None:
        output, error = None, None
        if record.kind == DONE:
            output = self.decode(record.result or "null")
            self.results[step.step_number] = output
        else:
            error = json.loads(record.info or "{}").get("error") or "it failed"
        self.tried.append(
            {
                "step_number": step.step_number,
                "tool_name": step.tool_name or step.kind.value,
                "tool_input": self._input(record.name, step),
                "result": {"success": error is None, "output": output, "error": error},
                "attempt": record.attempt,
            }
        )

    def _input(self, name: str, step: PlanStep) -> dict[str, Any]:
        if name in self.approved:
            return self.approved[name]
        try:
            return step_input(step, self.results, self.tools)
        except InvalidArgument:
            return step.tool_input  # the step failed with this error
