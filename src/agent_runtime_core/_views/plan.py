"""The plan of a run as a graph: the steps, what they need, and their states."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from .._core.ids import step_id
from .._execution.step import Identity
from .._journal.record import DONE, SKIPPED, Record
from ..errors import InvalidArgument
from ..interfaces import AgentRuntime
from ..planning.agent import PLANNING, PlanningAgent, built_in_tools, tried_steps
from ..planning.executor import SCOPE, step_name
from ..planning.plan import Plan, PlanStep
from ..queue.records import RunRow
from ..runner.run_client import RunClient
from .attempts import LIST, TracedStep, traced_steps
from .plain import iso_time, plain_value

MOST_NODES: Final = 1_000
_PLAN = f"{LIST}{SCOPE}/p:0:"


async def plan_view(runner: RunClient, row: RunRow, records: Sequence[Record] | None = None) -> dict[str, Any]:
    """Return {"goal", "nodes", "edges", "not_started", "complete"}; no nodes for a run without plan and step list.

    A node is {"id", "name", "list", "state", "started_at", "ended_at", "attempts", "error", "step_id", "kind", "tool",
    "input", "description"}. Its state is the state of the step, or pending, or skipped (because a dependency failed).
    An edge is {"from", "to"} with ids of nodes: the second step needs the first step. Of a step list the journal stores
    the number of steps, but no names of steps that have not started: `not_started` counts these. `complete` is False if
    there are more than `MOST_NODES`, and the others are left out.
    """
    records = await runner.state_store.records(row.run_id) if records is None else records
    traces = traced_steps(row, records)
    planned = plan_in(records)
    view = _listed(row, records, traces) if planned is None else _planned(row, planned, traces)
    kept = view["nodes"][:MOST_NODES]
    if complete := len(kept) == len(view["nodes"]):
        return {**view, "complete": complete}
    known = {each["id"] for each in kept}
    edges = [each for each in view["edges"] if each["from"] in known and each["to"] in known]
    return {**view, "nodes": kept, "edges": edges, "complete": complete}


def _listed(row: RunRow, records: Sequence[Record], traces: dict[Identity, TracedStep]) -> dict[str, Any]:
    """Return the steps of all step lists."""
    listed = [each for each in traces.values() if each.key.startswith(LIST)]
    nodes = [_node(row, each.name, each.key, each) for each in listed]
    edges = _edges(row, listed)
    for (name, key), dependency in _skipped(records).items():
        if (name, key) in traces:
            continue  # the list ran again
        nodes.append(_node(row, name, key, None) | {"state": "skipped"})
        edges.append({"from": step_id(row.run_id, dependency, key), "to": step_id(row.run_id, name, key)})
    return {"goal": None, "nodes": nodes, "edges": edges, "not_started": max(_total(records) - len(nodes), 0)}


def _skipped(records: Sequence[Record]) -> dict[Identity, str]:
    """Return the failed dependency of each step that was skipped for this reason."""
    found: dict[Identity, str] = {}
    for record in records:
        if record.kind == SKIPPED and '"dependency"' in (record.info or ""):
            for name, key, _, *reason in json.loads(record.info or "{}")["steps"]:
                if reason and "dependency" in reason[0]:
                    found[name, key] = reason[0]["dependency"]
    return found


def _total(records: Sequence[Record]) -> int:
    """Return how many steps the step lists contain that have begun."""
    totals = {(each.key, each.digest): each.total for each in records if each.key.startswith(LIST) and each.digest}
    return sum(totals.values())


def plan_in(records: Sequence[Record]) -> Plan | None:
    """Return the first plan of a run in its journal; None if the result of the step `plan` is not a plan."""
    for record in records:
        if record.kind == DONE and record.name == PLANNING and record.key == "s:0":
            found = plain_value(record.result)
            if isinstance(found, dict) and isinstance(found.get("plan"), dict):  # of a conversation turn
                found = found["plan"]
            try:
                return Plan.from_dict(found) if isinstance(found, dict) else None
            except InvalidArgument:
                return None
    return None


def _planned(row: RunRow, plan: Plan, traces: dict[Identity, TracedStep]) -> dict[str, Any]:
    by_name = {name: trace for (name, key), trace in traces.items() if key.startswith(_PLAN)}
    nodes, edges = [], []
    for step in plan.steps:
        name = step_name(step)
        trace = by_name.get(name)
        key = f"{_PLAN}0" if trace is None else trace.key
        nodes.append(_node(row, name, key, trace) | _described(step))
        edges += [{"from": f"step_{number}", "to": name} for number in step.needs]
    nodes = [each | {"id": each["name"]} for each in nodes]
    return {"goal": plan.final_goal or None, "nodes": nodes, "edges": edges, "not_started": 0}


def _described(step: PlanStep) -> dict[str, Any]:
    return {
        "kind": step.kind.value,
        "tool": step.tool_name or None,
        "input": step.tool_input,
        "description": step.reasoning or None,
    }


def _node(row: RunRow, name: str, key: str, trace: TracedStep | None) -> dict[str, Any]:
    return {
        "id": step_id(row.run_id, name, key), "name": name, "list": key.removeprefix(LIST),
        "state": "pending" if trace is None else trace.state, "step_id": step_id(row.run_id, name, key),
        "started_at": None if trace is None else iso_time(trace.began),
        "ended_at": None if trace is None else iso_time(trace.ended),
        "attempts": 0 if trace is None else trace.number,
        "error": None if trace is None else trace.error,
        "kind": "step", "tool": None, "input": None, "description": None,
    }  # fmt: skip


def _edges(row: RunRow, steps: Sequence[TracedStep]) -> list[dict[str, str]]:
    """Return the edges of step lists. In a list without dependencies each step needs the step before it."""
    lists: dict[tuple[str, str | None], dict[int, TracedStep]] = {}
    for each in steps:
        lists.setdefault((each.key, each.digest), {})[each.start.get("pos", 0)] = each
    edges = []
    for by_position in lists.values():
        is_graph = any("completed" in each.start for each in by_position.values())
        for position, each in by_position.items():
            for other in each.start.get("needs", ()) if is_graph else (position - 1,):
                if other in by_position:
                    ends = (by_position[other], each)
                    first, second = (step_id(row.run_id, end.name, end.key) for end in ends)
                    edges.append({"from": first, "to": second})
    return edges


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
