"""Usage of the agent loops of a run: tokens, cost, model calls and tool calls, read from its journal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from .._journal.record import Record, is_copied
from ..limits import COSTS, stored_usage, sum_usd, usd_of
from .step import SCOPE_SUFFIX, Identity, StepScope, scope_id

_CHARGED: Final = '"charged":'
_OF_LOOP: Final = "k:l:"  # begins the key of all model calls, tool calls and child runs of an agent loop


def stored_charges(charged: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a step charged, by model, in the form in which its record contains it."""
    return {model: stored_usage(usage) for model, usage in charged.items()}


def with_charged(info: str | None, charged: dict[str, Any]) -> str:
    """Return the `info` of a DONE record with what its step charged, by model."""
    field = f"{_CHARGED}{json.dumps(stored_charges(charged))}"
    return f"{{{field}}}" if info is None else f"{info[:-1]},{field}}}"


def add_charge(scope: StepScope, model: str, charged: Mapping[str, Any]) -> None:
    """Add to what a step charged for a model; the record of the attempt contains it."""
    if scope.charged is None:
        scope.charged = {}
    scope.charged[model] = total([scope.charged.get(model, {}), charged])


def charged_by_model(record: Record) -> dict[str, dict[str, Any]]:
    """Return what `ctx.charge` counted in the step attempt that this record ends, by model; "" if it is unknown."""
    if record.info is None or _CHARGED not in record.info or is_copied(record):
        return {}
    charged = _dict(json.loads(record.info).get("charged"))
    return {model: total([usage]) for model, usage in charged.items()}


def charged_by(record: Record) -> dict[str, Any]:
    """Return what `ctx.charge` counted in the step attempt that this record ends, for all models together."""
    return total(charged_by_model(record).values())


def usage_of(record: Record) -> dict[str, Any]:
    """Return the usage in the record of a model call or child run, and what another step charged.

    Records that were copied from another run have none.
    """
    if record.name != "model" and not record.name.startswith("call:"):
        return charged_by(record)
    return total([reported_by(record), charged_by(record)])


def reported_by(record: Record) -> dict[str, Any]:
    """Return the usage in the record of a model call or child run, without what its code charged."""
    if is_copied(record):
        return {}
    result = json.loads(record.result or "{}")
    if not isinstance(result, dict) or record.key.startswith("s:"):
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
            if name in COSTS:
                if (cost := usd_of(value)) is not None:
                    added[name] = sum_usd(added.get(name, 0.0), cost)
            elif isinstance(value, (int, float)):
                added[name] = added.get(name, 0) + value
    return added


def reservation_as_usage(reserve: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was reserved for interrupted model calls as the estimates of a usage."""
    return {"estimated_tokens": reserve.get("tokens"), "estimated_cost_usd": reserve.get("usd")}


class RecordedUsage:
    """Usage that recorded steps charged, and the usage of the steps inside them.

    When a step is replayed from its record, the code inside it does not run, so nothing else counts that usage.
    """

    def __init__(self, completed: Mapping[Identity, Record]) -> None:
        self._completed = completed
        self._by_scope: dict[str, list[Record]] | None = None  # records by the scope id of the enclosing step
        self._has_any = False
        self._counted: set[int] = set()  # numbers of the records whose own charges were returned

    def usage_of(self, records: Iterable[Record], claim_id: str) -> dict[str, Any]:
        """Return what these steps have charged, and the usage of the agent loops inside them, at any depth.

        The usage of a record is returned only once.

        Steps that ran under this claim are left out, because their usage was counted when they ran.
        """
        if self._by_scope is None:
            self._has_any = any(
                record.name == "model" or (record.info is not None and _CHARGED in record.info)
                for record in self._completed.values()
            )
            self._by_scope = self._nested_records() if self._has_any else {}
        if not self._has_any:
            return {}
        found = []
        for record in records:
            if record.claim_id != claim_id:
                if record.seq not in self._counted:
                    self._counted.add(record.seq)
                    found.append(charged_by(record))
                found.append(self._used(record))
        return total(found)

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
            self._counted.add(each.seq)
            if each.name.startswith("call:") and not each.key.startswith(_OF_LOOP):
                continue  # what a child run of `ctx.call` uses counts in that run only
            usage = usage_of(each)
            if each.name.startswith("call:"):
                usage.pop("turns", None)  # the model calls of a child run count in that run
            found += [usage, self._used(each)]
        return total(found)
