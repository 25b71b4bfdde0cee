"""Every event bus in the table, and one as a third party would write it, keeps the contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.errors import LeaseLost
from agent_runtime_core.events import BACKENDS, EventBus, Guard, Op, get_event_bus
from agent_runtime_core.events.base import StoredEvent
from agent_runtime_core.testing.contracts.events import CASES, Case


class ForeignEventBus(EventBus):
    """No engine of ours below: only what EventBus asks for."""

    def __init__(self) -> None:
        super().__init__(poll_interval=0.005)
        self.store: dict[str, dict[str, Any]] = {"fences": {}, "events": {}, "heads": {}}

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        if guard is not None and self.store["fences"].get(guard.key) != guard.token:
            return [self._repeated(guard, op) for op in ops]
        before = deepcopy(self.store)
        try:
            return [self._apply(op) for op in ops]
        except BaseException:
            self.store = before
            raise

    def _repeated(self, guard: Guard, op: Op) -> list[int]:
        ids = {row.event_id: row.sequence for row in self.store["events"].get(op.args[0], [])}
        if op.name != "events.publish" or not all(row[0] in ids for row in op.args[1]):
            raise LeaseLost(guard.key, guard.token)
        return [ids[row[0]] for row in op.args[1]]

    def _apply(self, op: Op) -> Any:
        fences, key = self.store["fences"], op.args[0]
        match op:
            case Op("events.publish", (run_id, rows)):
                return self._publish(run_id, rows)
            case Op("events.delete"):
                self.store["events"].pop(key, None)
            case Op("fence.install", (_, token)):
                if fences.get(key, "") > token:
                    raise LeaseLost(key, token)
                fences[key] = token
                return True
            case Op("fence.forget"):
                fences.pop(key, None)
        return None

    def _publish(self, run_id: str, rows: Sequence[tuple[str, str, str, float]]) -> list[int]:
        events = self.store["events"].setdefault(run_id, [])
        ids = {row.event_id: row.sequence for row in events}
        for event_id, event_type, payload, t in rows:
            if event_id not in ids:
                ids[event_id] = sequence = self.store["heads"].get(run_id, 0)
                self.store["heads"][run_id] = sequence + 1
                events.append(StoredEvent(sequence, event_type, payload, t, event_id))
        return [ids[row[0]] for row in rows]

    async def _rows(self, run_id: str, since: int, limit: int) -> list[StoredEvent]:
        return [row for row in self.store["events"].get(run_id, []) if row.sequence >= since][:limit]

    async def _head(self, run_id: str) -> int:
        head: int = self.store["heads"].get(run_id, 0)
        return head


@pytest.fixture(params=[*BACKENDS, "foreign"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], EventBus]:
    if request.param == "foreign":
        return ForeignEventBus
    options = {"path": tmp_path / "events.db"} if request.param == "sqlite" else {}
    return lambda: get_event_bus(request.param, **options)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_contract(case: Case, make: Callable[[], EventBus]) -> None:
    await case(make)


def test_a_backend_of_ones_own_stays_small() -> None:
    assert len(inspect.getsource(ForeignEventBus).splitlines()) < 150
