"""Compare two runs step by step, such as a run and its fork."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._core.ids import step_id
from .._execution.effects import FORKED_FROM
from .._execution.step import Identity
from ..queue.records import RunRow
from ..runner.run_client import RunClient
from .attempts import TracedStep, traced_steps
from .journal import outcome_in
from .plain import plain_value


async def compare_view(runner: RunClient, row: RunRow, other: RunRow) -> dict[str, Any]:
    """Compare the steps of two runs by name and key.

    Returns:
        {"run_id", "other_id", "fork_of", "first_difference", "input_changed", "runs", "counts", "steps"}. Each
        of `steps` is {"name", "key", "outcome", "changed", "run", "other"}: the outcome is same, changed,
        only_in_run or only_in_other, and `changed` names what differs of state, digest (of the arguments),
        result, duration and cost. Durations and costs differ between runs that do the same, so they do not make
        a step `changed`. `first_difference` is the index of the first step with another outcome than same, None
        if there is none. If one of the runs was forked from the other, `fork_of` is {"fork", "source", "step",
        "step_id", "index"}: the ids of both runs, and the last step that was copied with its index in `steps`;
        otherwise None. `input_changed` is True if the inputs of the runs differ.
    """
    store = runner.state_store
    mine, theirs = [traced_steps(each, await store.records(each.run_id)) for each in (row, other)]
    ends = await store.endings([row.run_id, other.run_id])
    identities = _merged([*mine], [*theirs])
    steps = [_compared(mine.get(identity), theirs.get(identity)) for identity in identities]
    outcomes = [each["outcome"] for each in steps]
    inputs = [each.decoded("input", plain_value) for each in (row, other)]
    different = (index for index, outcome in enumerate(outcomes) if outcome != "same")
    return {
        "run_id": row.run_id, "other_id": other.run_id,
        "fork_of": _fork(row, other, identities) or _fork(other, row, identities),
        "first_difference": next(different, None), "input_changed": inputs[0] != inputs[1],
        "runs": {
            name: {
                "key": each.run_key, "state": each.status, "agent": each.agent, "input": given, "error": error,
                "usage": usage,
            }
            for name, each, given in (("run", row, inputs[0]), ("other", other, inputs[1]))
            for error, usage in [outcome_in(each, ends.get(each.run_id))]
        },
        "counts": {each: outcomes.count(each) for each in ("same", "changed", "only_in_run", "only_in_other")},
        "steps": steps,
    }  # fmt: skip


def _fork(fork: RunRow, source: RunRow, identities: Sequence[Identity]) -> dict[str, Any] | None:
    """Return after which step `fork` was forked from `source`; None if it was not."""
    metadata = fork.decoded("metadata", plain_value)
    about = metadata.get(FORKED_FROM) if isinstance(metadata, dict) else None
    if not isinstance(about, dict) or about.get("run_id") != source.run_id:
        return None
    after = about.get("step_id")
    ids = [step_id(source.run_id, *each) for each in identities] if after else []
    return {
        "fork": fork.run_id, "source": source.run_id, "step": about.get("step"), "step_id": after,
        "index": ids.index(after) if after in ids else None,
    }  # fmt: skip


def _merged(mine: Sequence[Identity], theirs: Sequence[Identity]) -> list[Identity]:
    """Return the steps of both in the order of the first run; those only in the other run follow their predecessor."""
    known, merged, before = set(mine), dict[Identity | None, list[Identity]](), None
    for each in theirs:
        if each in known:
            before = each
        else:
            merged.setdefault(before, []).append(each)
    found = merged.get(None, [])
    for each in mine:
        found += [each, *merged.get(each, ())]
    return found


def _compared(mine: TracedStep | None, theirs: TracedStep | None) -> dict[str, Any]:
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


def _value(step: TracedStep, what: str) -> Any:
    if what == "state":
        return "done" if step.state == "copied" else step.state
    if what == "digest":
        return step.digest
    return None if step.last is None else step.last.result


def _side(step: TracedStep | None) -> dict[str, Any] | None:
    if step is None:
        return None
    last = step.last
    return {
        "state": step.state, "digest": step.digest,
        "result": None if last is None else plain_value(last.result),
        "duration_ms": None if last is None or last.kind != "done" else last.ms,
        "cost_usd": step.usage.get("cost_usd"), "attempts": step.number, "error": step.error,
    }  # fmt: skip
