"""What the journal of a run says to one of its claims: which steps are recorded, and which are in doubt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final, cast

from .._journal.record import ATTEMPT, COPIED, DONE, ENDED, LOOKED, RESUMED, Record, is_copied
from .claim_writer import Ledger
from .step_failure import failed_again
from .step_keys import Identity, Uses
from .usage import as_usage, total, used

_POS = itemgetter(10)
_READ = itemgetter(1, 2, 3, 9, 10, 15, 16)  # kind, name, key, state, pos, next and digest of a record

BESIDE: Final = '{"beside":true}'  # the `info` of a step that runs beside other code of its run

#: What the record of a failure says of its step, and so of whom what comes after it tells that it went on.
OWN: Final = "own"  # it was of the run's own task
ALONE: Final = "alone"  # no other was in flight

APART: Final = "~"  # before the number of a step list that ran in a task of its own


def _says(record: Record, word: str) -> bool:
    return record.info is not None and f'"{word}":' in record.info


def is_approval(record: Record) -> bool:
    """Whether that is the record of an approval that was answered."""
    return record.kind == DONE and _says(record, "approval")


def ran_beside(record: Record) -> bool:
    """Whether the step of that record ran beside other code of its run."""
    return _says(record, "beside")


def aside(record: Record) -> Record:
    """The record as that of a step which ran beside other code of its run."""
    if ran_beside(record):
        return record
    return record._replace(info=BESIDE if record.info is None else f"{record.info[:-1]},{BESIDE[1:]}")


class Recorded(Uses):
    """The journal, read once, and what the claim itself has added to it since."""

    def __init__(self, ledger: Ledger, records: Sequence[Record]) -> None:
        super().__init__(ledger)
        self.done: dict[Identity, Record] = {}
        self.begun: dict[Identity, int] = {}  # started by an earlier claim, in which record, and not finished: in doubt
        self.until: dict[Identity, float | None] = {}  # when a wait that was begun is over
        self.reserved: dict[Identity, dict[str, Any]] = {}  # what was held back for a step that was begun
        self.lost: dict[Identity, dict[str, Any]] = {}  # held back for earlier starts that came to no end
        self.resets: dict[str, int] = {}
        self.states: dict[str, tuple[int, str]] = {}  # by key: the state that lists of it have come to, and where
        self._own_states: dict[tuple[str, str | None], tuple[int, str]] = {}  # that of each list as last committed
        self.ended: Record | None = None
        self.reopened: float | None = None  # wall seconds at which this generation began, if it is not the first
        #: The first run of the lineage of forks that this one belongs to; `effects.join_lineage` knows more of a child.
        self.origin: str = ledger.run_id
        self.effects_policy: str = "refuse"  # what becomes of guarded steps that another run of that lineage did
        self.spent_approvals: list[dict[str, str]] = []  # those in what was copied: their names, keys and runs
        self.length: int = 0
        self.ends: int = 0  # ends of steps, waits and values among the records
        self.renames: dict[str, list[str]] = {}  # by name: what it was called before, the name said last first
        self.given_up: dict[Identity, Record] = {}  # imperative steps that failed, and whose caller went on without
        self._failures: list[Record] = []  # of which what follows tells whether their callers went on
        self._ended_tries: set[Identity] = set()
        self._begun_apart: dict[Identity, str] = {}  # steps of lists in tasks of their own, with the list's number
        self._listed: dict[str, dict[str, list[Record]]] | None = None  # see `listed`
        self._unmatched: dict[str, tuple[dict[str, str], set[str]]] = {}  # see `unmatched`
        self._ordered: list[Record] = []  # imperative steps in the order they were begun, one after the other
        self._last = -1  # position of the last end of a step
        self._read(records)
        if self.ended is not None and self.reopened is None:
            self.reopened = self.wall()

    def _read(self, records: Sequence[Record]) -> None:
        done, begun, ordered = self.done, self.begun, dict[Identity, Record]()
        last = carrier = None
        start = of = among = ""  # the start that the record before carries, and the key and digest beside it
        carriers: list[Record] = []
        self.length = self.ends = len(records)
        for record, (kind, name, key, state, pos, carried, number) in zip(records, map(_READ, records), strict=True):
            if self._failures:
                self._went_on(record)
            if kind != "done":
                self.ends -= 1
                self._read_other(record)
                continue
            last, identity = record, (name, key)
            done[identity] = record
            if begun:
                begun.pop(identity, None)
            if state is not None:
                self._own_states[key, number] = record.seq, state
            if key[:2] == "s:" and not ran_beside(record):
                ordered[identity] = record  # the last one: what nobody heard of may land behind another try
            # In a chain, the start is that of the step at the next place: no need to read it.
            if carrier is not None and (f'"pos":{pos},' not in start or key != of or number != among):
                carriers.append(carrier)
            if carried is None:
                carrier = None
            else:
                carrier, start, of, among = record, carried, key, number
        self._ordered = sorted(ordered.values(), key=_POS)
        if last is not None:
            self._last = last.seq
        if carrier is not None:
            carriers.append(carrier)
        self._find_carried(carriers)

    def _went_on(self, after: Record) -> None:
        """A step of the run's own task shows that this went on after its own failures; of one in another task, only
        that which comes right after it does."""
        if after.kind == LOOKED:
            return
        if after.kind in ("started", "done") and not ran_beside(after):
            self.given_up |= {(failure.name, failure.key): failure for failure in self._failures}
            self._failures = []
        elif after.kind == ENDED:
            self._failures = []
        elif after.kind in (ATTEMPT, RESUMED):  # mostly of another claim; that of theirs may have been written late
            self._failures = [failure for failure in self._failures if failure.claim_id == after.claim_id]
        else:
            self._failures = [failure for failure in self._failures if _says(failure, OWN)]

    def _read_other(self, record: Record) -> None:
        identity = (record.name, record.key)
        match record.kind:
            case "started":
                if identity in self.begun:
                    self.lost[identity] = self.doubted(identity)
                    self.reserved.pop(identity, None)
                self.begun[identity] = record.seq
                self._ended_tries.discard(identity)
                if record.info is not None and '"until"' in record.info:
                    self.until[identity] = json.loads(record.info).get("until")
                if record.info is not None and '"reserve"' in record.info:
                    self.reserved[identity] = json.loads(record.info).get("reserve") or {}
                if record.state is not None:
                    self._own_states[record.key, record.digest] = record.seq, record.state
                if record.digest is not None and record.digest.startswith(APART):
                    self._begun_apart[identity] = record.digest
            case "retrying" | "failed":
                self.begun.pop(identity, None)
                if _says(record, ALONE) or _says(record, OWN):
                    self._failures.append(record)
                    if is_copied(record):  # only where the code had gone on without the step
                        self.given_up[identity] = record
                self._ended_tries.add(identity)
            case "forked":
                told = json.loads(record.info or "{}")
                self.origin = told.get("origin") or record.claim_id.removeprefix(COPIED)
                self.effects_policy, self.spent_approvals = told.get("effects", "refuse"), told.get("approvals", [])
            case "reset":
                self.resets[record.key] = self.resets.get(record.key, 0) + 1
            case "attempt" | "resumed":
                if self.ended is not None and self.reopened is None:
                    self.reopened = record.t
            case "ended":
                self.ended, self.reopened = record, None

    def doubted(self, identity: Identity) -> dict[str, Any]:
        """All that was held back for starts of that step whose end nobody knows."""
        found = dict(self.lost.get(identity, {}))
        if identity in self.begun:
            for name, value in self.reserved.get(identity, {}).items():
                found[name] = found.get(name, 0) + value
        return found

    def spent(self) -> dict[str, Any]:
        """What the agent loops of this run have used by its journal, what is in doubt and its children included, and
        what was copied from another run left out."""
        found = [used(record) for record in self.done.values()]
        for identity in self.begun.keys() | self.lost.keys():
            if identity[0] == "model" and identity not in self.done:
                found.append(as_usage(self.doubted(identity)))
        return total(found)

    def _find_carried(self, carriers: Sequence[Record]) -> None:
        """Steps whose start the record of the step before carries, and nothing since then tells more of."""
        for record in carriers:
            after = json.loads(cast(str, record.next))
            identity = (after["name"], after["key"])
            if identity not in self.done and identity not in self._ended_tries:
                self.begun.setdefault(identity, record.seq)

    def recorded(self, name: str, key: str) -> Record | None:
        """The record of that step, under its present or its former name."""
        record = self.done.get((name, key))
        if record is None and name in self.renames:
            found = (self.done.get((old, key)) for old in self.former_names(name))
            record = next((each for each in found if each is not None), None)
        return record

    def former(self, name: str, key: str) -> str:
        """The name under which this step is known to the journal, so that its id stays the same."""
        for old in self.former_names(name):
            if (old, key) in self.done or (old, key) in self.begun:
                return old
        return name

    def former_names(self, name: str) -> list[str]:
        """All that a step of that name was called before, the nearest first."""
        if name not in self.renames:
            return []
        names = [name]
        for each in names:
            names += [old for old in self.renames.get(each, ()) if old not in names]
        return names[1:]

    def take(self, records: Sequence[Record]) -> None:
        """Know the ends of steps among what is in the journal now."""
        for record in records:
            if record.kind != DONE:
                continue
            self.done[record.name, record.key] = record
            if record.state is not None:
                self._own_states[record.key, record.digest] = record.seq, record.state

    def keep_state(self, key: str, number: str, record: Record, state: str) -> None:
        """Know the state that the step list of that number has come to with this record."""
        self._own_states[key, number] = self.states[key] = record.seq, state

    def state_of(self, key: str, number: str) -> str | None:
        """The state that the step list of that number has come to; None for one that has told none yet."""
        own = self._own_states.get((key, number))
        if own is None:
            return None
        if key not in self.states or self.states[key][0] < own[0]:
            self.states[key] = own
        return own[1]

    def state_before(self, key: str) -> str | None:
        """The state that lists of that key have come to last, as far as this claim has."""
        return self.states[key][1] if key in self.states else None

    def listed(self, key: str) -> dict[str, list[Record]]:
        """What earlier claims recorded of the step lists under that key, by the number of the list."""
        if self._listed is None:  # looked at once, by the first list there is
            self._listed, last, among = {}, ("", ""), list[Record]()
            for (_, of), record in self.done.items():
                if of[:2] != "x:" or (number := record.digest) is None:
                    continue
                if (of, number) != last:  # mostly it is that of the record before
                    last, among = (of, number), self._listed.setdefault(of, {}).setdefault(number, [])
                among.append(record)
        return self._listed.get(key, {})

    def unmatched(self, key: str) -> tuple[dict[str, str], set[str]]:
        """Of the lists under that key that ran in tasks of their own in earlier claims: the number of each by the names
        of its steps, and the numbers of those that this claim has not come to yet."""
        found = self._unmatched.get(key)
        if found is None:
            apart = {number: records for number, records in self.listed(key).items() if number.startswith(APART)}
            numbers = {name: number for (name, of), number in self._begun_apart.items() if of == key}
            numbers |= {record.name: number for number, records in apart.items() for record in records}
            found = self._unmatched[key] = (numbers, set(numbers.values()))
        return found

    def fail_again(self, name: str, key: str) -> None:
        """Raise what an imperative step raised where the code went on without it: it is as recorded as a result."""
        for each in (name, *self.former_names(name)) if self.given_up else ():
            failure = self.given_up.get((each, key))
            if failure is not None:
                raise failed_again(name, failure)
