"""What the view of a run has for a run of a PlanningAgent. Loaded by name, because it imports all of `planning`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._journal.record import DONE, Record
from ..interfaces import AgentRuntime
from ..planning.agent import PLANNING, PlanningAgent, built_in_tools, tried_steps
from .plain import plain_value


def planned_steps(records: Sequence[Record], agent: AgentRuntime | None) -> list[dict[str, Any]] | None:
    """Return the step attempts of a planned run as `Orchestrator.get_run` does, None for another run.

    Without the agent, the journal says whether the run is planned.
    """
    if not (isinstance(agent, PlanningAgent) if agent is not None else _has_plan(records)):
        return None
    return tried_steps(records, agent.tools if isinstance(agent, PlanningAgent) else built_in_tools(), plain_value)


def _has_plan(records: Sequence[Record]) -> bool:
    made = (each for each in records if each.kind == DONE and (each.name, each.key) == (PLANNING, "s:0"))
    plan = plain_value(record.result) if (record := next(made, None)) is not None else None
    return isinstance(plan, dict) and plan.keys() == {"final_goal", "steps"}
