"""Compare two runs step by step, such as a run and its fork."""

from __future__ import annotations

from typing import Any

from ..queue.records import RunRow
from ..runner.run_client import RunClient
from .plain import plain_value
from .results import outcome_in
from .steps import StepTrace, traces_of


async def compare_view(runner: RunClient, row: RunRow, other: RunRow) -> dict[str, Any]:
    """Compare the steps of two runs by name and key.

    Returns:
        {"run_id", "other_id", "first_difference", "runs", "counts", "steps"}. Each of `steps` is {"name", "key",
        "outcome", "changed", "run", "other"}: the outcome is same, changed, only_in_run or only_in_other, and `changed`
        names what differs of state, digest (of the arguments), result, duration and cost. Durations and costs differ
        between runs that do the same, so they do not make a step `changed`. `first_difference` is the index of the
        first step with another outcome than same, None if there is none.
    """
    store = runner.state_store
    mine, theirs = traces_of(row, await store.records(row.run_id)), traces_of(other, await store.records(other.run_id))
    ends = await store.endings([row.run_id, other.run_id])
    steps = [_compared(mine.get(identity), theirs.get(identity)) for identity in _merged([*mine], [*theirs])]
    outcomes = [each["outcome"] for each in steps]
    different = (index for index, outcome in enumerate(outcomes) if outcome != "same")
    return {
        "run_id": row.run_id, "other_id": other.run_id, "first_difference": next(different, None),
        "runs": {
            name: {"state": each.status, "agent": each.agent, "error": error, "usage": usage}
            for name, each in (("run", row), ("other", other))
            for error, usage in [outcome_in(each, ends.get(each.run_id))]
        },
        "counts": {each: outcomes.count(each) for each in ("same", "changed", "only_in_run", "only_in_other")},
        "steps": steps,
    }  # fmt: skip


def _merged(mine: list[tuple[str, str]], theirs: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the steps of both in the order of the first run; those only in the other one follow their predecessor."""
    known, merged, before = set(mine), dict[tuple[str, str] | None, list[tuple[str, str]]](), None
    for each in theirs:
        if each in known:
            before = each
        else:
            merged.setdefault(before, []).append(each)
    found = merged.get(None, [])
    for each in mine:
        found = [*found, each] if each not in merged else [*found, each, *merged[each]]
    return found


def _compared(mine: StepTrace | None, theirs: StepTrace | None) -> dict[str, Any]:
    step = mine or theirs
    assert step is not None
    views = {"run": _side(mine), "other": _side(theirs)}
    fields: dict[str, Any] = {"name": step.name, "key": step.key.partition(":")[2], "changed": []}
    if mine is None or theirs is None:
        return {**fields, "outcome": "only_in_run" if theirs is None else "only_in_other", **views}
    content = [name for name in ("state", "digest", "result") if _value(mine, name) != _value(theirs, name)]
    measured = [name for name in ("duration_ms", "cost_usd") if views["run"][name] != views["other"][name]]  # type: ignore[index]
    changed = [*content, *(name.partition("_")[0] for name in measured)]
    return {**fields, "changed": changed, "outcome": "changed" if content else "same", **views}


def _value(step: StepTrace, what: str) -> Any:
    if what == "state":
        return "done" if step.state == "copied" else step.state
    return None if step.last is None else getattr(step.last, what)


def _side(step: StepTrace | None) -> dict[str, Any] | None:
    if step is None:
        return None
    last = step.last
    return {
        "state": step.state, "digest": None if last is None else last.digest,
        "result": None if last is None else plain_value(last.result),
        "duration_ms": None if last is None or last.kind != "done" else last.ms,
        "cost_usd": step.usage.get("cost_usd"), "attempts": 1 if last is None else last.attempt, "error": step.error,
    }  # fmt: skip
