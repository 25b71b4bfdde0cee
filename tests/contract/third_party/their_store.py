"""A state store as somebody else would write it: lists and dicts, one change at a time, copies to go back to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from agent_runtime_core.errors import LeaseLost
from agent_runtime_core.state import EffectExists, EffectRow, Guard, Op, Record, StateRow, StateStore, same_digest


class Journals:
    """What is kept: journals as lists, the state of each run, and the claim that may write it."""

    def __init__(self) -> None:
        self.journals: dict[str, list[Record]] = {}
        self.rows: dict[str, StateRow] = {}
        self.claims: dict[str, str] = {}
        self.effects: list[EffectRow] = []


class TheirStore(StateStore):
    """The state store itself: one commit at a time, since nothing in it awaits."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.store = Journals()

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        if guard is not None and self.store.claims.get(guard.key) != guard.token:
            if not all(self.landed(op) for op in ops):
                raise LeaseLost(guard.key, guard.token)
            return [op.args[1].seq if op.name == "journal.append" else op.name == "fence.install" or None for op in ops]
        before = copy.deepcopy(self.store)
        try:
            return [self.apply(op) for op in ops]
        except BaseException:
            self.store = before
            raise

    def landed(self, op: Op) -> bool:
        row = self.store.rows.get(op.args[0], StateRow())
        match op:
            case Op("journal.append", (run_id, record)):
                return self.there(run_id, record)
            case Op("state.checkpoint", (_, text, mark, now)):
                return (row.checkpoint, row.mark, row.t) == (text, mark, now)
            case Op("state.status", (_, text, now)):
                return (row.status, row.t) == (text, now)
            case Op("effect.begin", (effect, *others)):
                return bool(self.effects_of_run(effect, *others))
            case Op("effect.put", (effect, *_)):
                return effect in self.store.effects
            case Op("effect.drop", (effect, *others)):
                return not self.effects_of_run(effect, *others)
            case Op("fence.install", (key, token)):
                return bool(self.store.claims.get(key, "") >= token)
        return False

    def there(self, run_id: str, record: Record) -> bool:
        journal = self.store.journals.get(run_id, [])
        mine = (record.seq, record.claim_id, record.kind, record.key)
        return any(mine == (each.seq, each.claim_id, each.kind, each.key) for each in journal)

    def apply(self, op: Op) -> Any:
        store, key = self.store, op.args[0]
        row = store.rows.get(key, StateRow())
        match op:
            case Op("journal.append", (_, record)):
                return self.append(key, record)
            case Op("state.checkpoint", (_, text, mark, now)):
                store.rows[key] = row._replace(checkpoint=text, mark=mark, t=now)
            case Op("state.status", (_, text, now)):
                store.rows[key] = row._replace(status=text, t=now)
            case Op("state.delete"):
                store.journals.pop(key, None)
                store.rows.pop(key, None)
            case Op("effect.begin", (effect, *others)):
                self.begin(effect, *others)
            case Op("effect.put" | "effect.drop" as name, (effect, *others)):
                mine = self.effects_of_run(effect, *others)
                store.effects = [each for each in store.effects if each not in mine]
                store.effects += [effect] if name == "effect.put" else []
            case Op("effect.leave", (_, run_id)):
                self.leave(key, run_id)
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

    def rows_of(self, origin: str, key: str, digests: Sequence[str]) -> list[EffectRow]:
        return [each for each in self.store.effects if each[:2] == (origin, key) and same_digest(each.digest, digests)]

    def effects_of_run(self, effect: EffectRow, others: Sequence[str] = ()) -> list[EffectRow]:
        found = [each for each in self.store.effects if each[:2] == effect[:2] and each.run_id == effect.run_id]
        return [each for each in found if each.arrival == effect.arrival and each.digest in (effect.digest, *others)]

    def begin(self, effect: EffectRow, others: Sequence[str] = ()) -> None:
        if not self.effects_of_run(effect, others):
            there = self.rows_of(effect.origin, effect.key, (effect.digest, *others))
            if any((each.run_id, each.arrival) != (effect.run_id, effect.arrival) for each in there):
                raise EffectExists
            self.store.effects.append(effect)

    def leave(self, origin: str, run_id: str) -> None:
        left = [each for each in self.store.effects if each[:4] != (origin, "", "", run_id)]
        self.store.effects = left
        if not self.rows_of(origin, "", ("",)):
            self.store.effects = [each for each in left if each.origin != origin]
            for each in (each for each in left if each[:3] == (origin, "", "child")):
                self.leave(each.run_id, origin)

    def same_end(self, last: Record, record: Record) -> bool:
        mine = (record.kind, record.claim_id, record.attempt)
        return mine == ("ended", "", last.attempt) and not last.claim_id

    def end(self, run_id: str) -> int:
        journal = self.store.journals.get(run_id)
        return journal[-1].seq if journal else -1

    def append(self, run_id: str, record: Record) -> int:
        journal = self.store.journals.setdefault(run_id, [])
        if record.seq < 0:
            last = next((each for each in reversed(journal) if each.kind == "ended"), None)
            if last is not None and self.same_end(last, record):
                return last.seq
            record = record._replace(seq=self.end(run_id) + 1)
        if record.seq > self.end(run_id):
            journal.append(record)
        elif not self.there(run_id, record):
            raise LeaseLost(run_id, record.claim_id)
        return record.seq

    async def read(self, what: str, *args: Any) -> Any:
        if what == "endings":
            ends = {run_id: await self.read("ending", run_id) for run_id in args[0]}
            return {run_id: end for run_id, end in ends.items() if end is not None}
        journal = self.store.journals.get(args[0], [])
        match what, args:
            case "records", (_, after):
                return [record for record in journal if record.seq > after]
            case "ending", _:
                return next((record for record in reversed(journal) if record.kind == "ended"), None)
            case "state", (run_id,):
                return self.store.rows.get(run_id, StateRow())
            case "effects", (origin, key, digests):
                return self.rows_of(origin, key, digests)
        raise LookupError(what)
