"""The plan of a run as a graph: the steps, what they need, and their states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._core.ids import step_id
from .._journal.record import DONE, Record
from ..errors import InvalidArgument
from ..planning.agent import PLANNING
from ..planning.executor import SCOPE, step_name
from ..planning.plan import Plan, PlanStep
from ..queue.records import RunRow
from ..runner.run_client import RunClient
from .plain import iso_time, plain_value
from .steps import StepTrace, traces_of

_LIST = "x:"  # begins the step key of all steps of one step list
_PLAN = f"{_LIST}{SCOPE}/p:0:"


async def plan_view(runner: RunClient, row: RunRow, records: Sequence[Record] | None = None) -> dict[str, Any]:
    """Return {"goal", "nodes", "edges"}; without nodes if the run has no plan and no list of steps.

    A node is {"id", "name", "list", "state", "started_at", "ended_at", "attempts", "error", "step_id", "kind", "tool",
    "input", "description"}. Its state is that of the step, or pending. An edge is {"from", "to"} with ids of nodes:
    the second step needs the first one. Of a list of steps, only those that have started are known.
    """
    records = await runner.state_store.records(row.run_id) if records is None else records
    traces = traces_of(row, records)
    planned = _plan_in(records)
    if planned is not None:
        return _planned(row, planned, traces)
    listed = [each for each in traces.values() if each.key.startswith(_LIST)]
    nodes = [_node(row, each.name, each.key, each) for each in listed]
    return {"goal": None, "nodes": nodes, "edges": _edges(row, listed)}


def _plan_in(records: Sequence[Record]) -> Plan | None:
    """Return the first plan of a run that its journal has; None if the step `plan` has another result."""
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


def _planned(row: RunRow, plan: Plan, traces: dict[tuple[str, str], StepTrace]) -> dict[str, Any]:
    by_name = {name: trace for (name, key), trace in traces.items() if key.startswith(_PLAN)}
    nodes, edges = [], []
    for step in plan.steps:
        name = step_name(step)
        trace = by_name.get(name)
        key = f"{_PLAN}0" if trace is None else trace.key
        nodes.append(_node(row, name, key, trace) | _described(step))
        edges += [{"from": f"step_{number}", "to": name} for number in step.needs]
    return {"goal": plan.final_goal or None, "nodes": [each | {"id": each["name"]} for each in nodes], "edges": edges}


def _described(step: PlanStep) -> dict[str, Any]:
    return {
        "kind": step.kind.value, "tool": step.tool_name or None, "input": step.tool_input,
        "description": step.reasoning or None,
    }  # fmt: skip


def _node(row: RunRow, name: str, key: str, trace: StepTrace | None) -> dict[str, Any]:
    last = None if trace is None else trace.last
    ended = last is not None and last.kind in ("done", "failed")
    return {
        "id": step_id(row.run_id, name, key), "name": name, "list": key.removeprefix(_LIST),
        "state": "pending" if trace is None else trace.state, "step_id": step_id(row.run_id, name, key),
        "started_at": None if trace is None else iso_time(trace.began),
        "ended_at": iso_time(last.t) if last is not None and ended else None,
        "attempts": 0 if trace is None else 1 if last is None else last.attempt,
        "error": None if trace is None else trace.error,
        "kind": "step", "tool": None, "input": None, "description": None,
    }  # fmt: skip


def _edges(row: RunRow, steps: Sequence[StepTrace]) -> list[dict[str, str]]:
    """Return the edges of step lists. In a list without dependencies each step needs the one before it."""
    lists: dict[tuple[str, str | None], dict[int, StepTrace]] = {}
    for each in steps:
        number = None if each.last is None else each.last.digest
        lists.setdefault((each.key, number), {})[each.start.get("pos", 0)] = each
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
