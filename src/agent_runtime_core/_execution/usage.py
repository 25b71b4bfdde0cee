"""What the agent loops of a run have used, by its journal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

from .._journal.record import Record, is_copied
from .step_scope import SCOPE_SUFFIX, Identity, scope_id

_NAME = itemgetter(0)


def usage_of(record: Record) -> dict[str, Any]:
    """What the model, or a called run, used by its record; nothing for others, and for what another run has paid."""
    if (record.name != "model" and not record.name.startswith("call:")) or is_copied(record):
        return {}
    told = json.loads(record.result or "{}")
    if not isinstance(told, dict):
        return {}  # somebody's own step of that name
    own: dict[str, Any] = {}
    if record.name == "model":
        calls = (told.get("message") or {}).get("tool_calls") or ()
        own = {"cost_usd": told.get("cost_usd"), "turns": 1, "tool_calls": len(calls) or None}
    return total([told.get("usage") or {}, own, reservation_as_usage(told.get("doubted") or {})])


def total(usages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Their numbers, added up by name."""
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
    """Recorded steps inside others, whose code does not run again when the other is answered by its record."""

    def __init__(self, done: Mapping[Identity, Record]) -> None:
        self._done = done
        self._by_scope: dict[str, list[Record]] | None = None  # by the mark of the step that they are in

    def usage_of(self, records: Iterable[Record], claim_id: str) -> dict[str, Any]:
        """What loops inside these steps used, at any depth, each told once; those that ran under this claim count
        by themselves.
        """
        if self._by_scope is None:
            self._by_scope = self._marked() if "model" in map(_NAME, self._done) else {}
        if not self._by_scope:
            return {}
        return total([self._used(record) for record in records if record.claim_id != claim_id])

    def _marked(self) -> dict[str, list[Record]]:
        marked: dict[str, list[Record]] = {}
        for (_, key), record in self._done.items():
            if "@" in key and (mark := SCOPE_SUFFIX.search(key)) is not None:
                marked.setdefault(mark[1], []).append(record)
        return marked

    def _used(self, record: Record) -> dict[str, Any]:
        assert self._by_scope is not None
        found = []
        for each in self._by_scope.pop(scope_id(record.name, record.key), ()):
            usage = usage_of(each)
            if each.name != "model":
                usage.pop("turns", None)  # of another run
            found += [usage, self._used(each)]
        return total(found)
