"""An event bus as somebody else would write it: a list for each run, copies to go back to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from agent_runtime_core.errors import LeaseLost
from agent_runtime_core.events import EventBus, Guard, Op, StoredEvent


class Logs:
    """What is kept: the log of each run, its next sequence, and the claim that may write it."""

    def __init__(self) -> None:
        self.logs: dict[str, list[StoredEvent]] = {}
        self.heads: dict[str, int] = {}
        self.claims: dict[str, str] = {}


class TheirBus(EventBus):
    """The bus itself: one commit at a time, since nothing in it awaits; followers poll."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"poll_interval": 0.005, **options})
        self.store = Logs()

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        if guard is not None and self.store.claims.get(guard.key) != guard.token:
            return [self.repeated(guard, op) for op in ops]
        before = copy.deepcopy(self.store)
        try:
            return [self.apply(op) for op in ops]
        except BaseException:
            self.store = before
            raise

    def ids(self, run_id: str) -> dict[str, int]:
        return {event.event_id: event.sequence for event in self.store.logs.get(run_id, [])}

    def repeated(self, guard: Guard, op: Op) -> list[int] | bool:
        ids = self.ids(op.args[0])
        if op.name == "fence.install" and self.store.claims.get(op.args[0], "") >= op.args[1]:
            return True
        if op.name != "events.publish" or not all(row[0] in ids for row in op.args[1]):
            raise LeaseLost(guard.key, guard.token)
        return [ids[row[0]] for row in op.args[1]]

    def apply(self, op: Op) -> Any:
        store, key = self.store, op.args[0]
        match op:
            case Op("events.publish", (_, rows)):
                return self.append(key, rows)
            case Op("events.delete"):
                store.logs.pop(key, None)
                store.heads.pop(key, None)
            case Op("events.trim", (_, sequence)):
                log = store.logs.get(key, [])
                store.logs[key] = [event for event in log if event.sequence >= sequence or event is log[-1]]
                return len(log) - len(store.logs[key])
            case Op("fence.install", (_, token)):
                if store.claims.get(key, "") > token:
                    raise LeaseLost(key, token)
                store.claims[key] = token
                return True
            case Op("fence.forget"):
                store.claims.pop(key, None)
            case _:
                raise LookupError(op.name)
        return None

    def append(self, run_id: str, rows: Sequence[tuple[str, str, str, float]]) -> list[int]:
        log, ids = self.store.logs.setdefault(run_id, []), self.ids(run_id)
        for event_id, event_type, payload, t in rows:
            if event_id not in ids:
                ids[event_id] = sequence = self.next_sequence(run_id)
                log.append(StoredEvent(sequence, event_type, payload, t, event_id))
        return [ids[row[0]] for row in rows]

    def next_sequence(self, run_id: str) -> int:
        sequence = self.store.heads.get(run_id, 0)
        self.store.heads[run_id] = sequence + 1
        return sequence

    async def _rows(self, run_id: str, since: int, limit: int) -> list[StoredEvent]:
        return [event for event in self.store.logs.get(run_id, []) if event.sequence >= since][:limit]

    async def _head(self, run_id: str) -> int:
        return self.store.heads.get(run_id, 0)
