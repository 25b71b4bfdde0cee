"""Usage of the agent loops of a run: tokens, cost, model calls and tool calls, read from its journal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

from .._journal.record import Record, is_copied
from .step_scope import SCOPE_SUFFIX, Identity, scope_id

_NAME = itemgetter(0)


def usage_of(record: Record) -> dict[str, Any]:
    """Return the usage in the record of a model call or child run.

    Other records, and those that were copied from another run, have none.
    """
    if (record.name != "model" and not record.name.startswith("call:")) or is_copied(record):
        return {}
    result = json.loads(record.result or "{}")
    if not isinstance(result, dict):
        return {}  # a user's step happens to be named "model"
    own: dict[str, Any] = {}
    # Such a step may also return an object with these names and any other values.
    if record.name == "model":
        calls = _dict(result.get("message")).get("tool_calls")
        own = {
            "cost_usd": result.get("cost_usd"),
            "turns": 1,
            "tool_calls": (isinstance(calls, list) and len(calls)) or None,
        }
    return total([_dict(result.get("usage")), own, reservation_as_usage(_dict(result.get("doubted")))])


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def total(usages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sum of the numbers under each name."""
    added: dict[str, Any] = {}
    for usage in usages:
        for name, value in usage.items():
            if isinstance(value, (int, float)):
                added[name] = added.get(name, 0) + value
    return added


def reservation_as_usage(reserve: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was reserved for interrupted model calls as the estimates of a usage."""
    return {"estimated_tokens": reserve.get("tokens"), "estimated_cost_usd": reserve.get("usd")}


class NestedUsage:
    """Usage of steps inside recorded steps.

    When a step is replayed from its record, the code inside it does not run, so nothing else counts that usage.
    """

    def __init__(self, completed: Mapping[Identity, Record]) -> None:
        self._completed = completed
        self._by_scope: dict[str, list[Record]] | None = None  # records by the scope id of the enclosing step

    def usage_of(self, records: Iterable[Record], claim_id: str) -> dict[str, Any]:
        """Return the usage of the agent loops inside these steps, at any depth. Each loop is returned only once.

        Steps that ran under this claim are left out, because their usage was counted when they ran.
        """
        if self._by_scope is None:
            self._by_scope = self._nested_records() if "model" in map(_NAME, self._completed) else {}
        if not self._by_scope:
            return {}
        return total([self._used(record) for record in records if record.claim_id != claim_id])

    def _nested_records(self) -> dict[str, list[Record]]:
        nested: dict[str, list[Record]] = {}
        for (_, key), record in self._completed.items():
            if "@" in key and (suffix := SCOPE_SUFFIX.search(key)) is not None:
                nested.setdefault(suffix[1], []).append(record)
        return nested

    def _used(self, record: Record) -> dict[str, Any]:
        assert self._by_scope is not None
        found = []
        for each in self._by_scope.pop(scope_id(record.name, record.key), ()):
            usage = usage_of(each)
            if each.name != "model":
                usage.pop("turns", None)  # the model calls of a child run count in that run
            found += [usage, self._used(each)]
        return total(found)
