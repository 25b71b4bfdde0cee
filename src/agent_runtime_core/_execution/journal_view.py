"""What the journal of a run says to one of its claims: which steps are recorded, and which are in doubt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final, cast

from .._journal.record import ATTEMPT, COPIED, DONE, ENDED, PROBE, RESUMED, Record, is_copied
from .claim_writer import ClaimWriter
from .step_failure import recorded_error
from .step_keys import Identity, StepKeys
from .usage import reservation_as_usage, total, usage_of

_POS = itemgetter(10)
_READ = itemgetter(1, 2, 3, 9, 10, 15, 16)  # kind, name, key, state, pos, next and digest of a record

CONCURRENT_INFO: Final = '{"beside":true}'  # the `info` of a step that runs beside other code of its run

#: What the record of a failure says of its step, and so of whom what comes after it tells that it went on.
MAIN_TASK: Final = "own"  # it was of the run's own task
ONLY_STEP: Final = "alone"  # no other was in flight

TASK_LIST_PREFIX: Final = "~"  # before the number of a step list that ran in a task of its own


def _has_info(record: Record, word: str) -> bool:
    return record.info is not None and f'"{word}":' in record.info


def is_approval(record: Record) -> bool:
    """Whether that is the record of an approval that was answered."""
    return record.kind == DONE and _has_info(record, "approval")


def was_concurrent(record: Record) -> bool:
    """Whether the step of that record ran beside other code of its run."""
    return _has_info(record, "beside")


def as_concurrent(record: Record) -> Record:
    """The record as that of a step which ran beside other code of its run."""
    if was_concurrent(record):
        return record
    return record._replace(info=CONCURRENT_INFO if record.info is None else f"{record.info[:-1]},{CONCURRENT_INFO[1:]}")


class JournalView(StepKeys):
    """The journal, read once, and what the claim itself has added to it since."""

    def __init__(self, ledger: ClaimWriter, records: Sequence[Record]) -> None:
        super().__init__(ledger)
        self.completed: dict[Identity, Record] = {}
        self.started: dict[
            Identity, int
        ] = {}  # started by an earlier claim, in which record, and not finished: in doubt
        self.wait_deadlines: dict[Identity, float | None] = {}  # when a wait that was begun is over
        self.reservations: dict[Identity, dict[str, Any]] = {}  # what was held back for a step that was begun
        self.lost_reservations: dict[Identity, dict[str, Any]] = {}  # held back for earlier starts that came to no end
        self.resets: dict[str, int] = {}
        self.states: dict[str, tuple[int, str]] = {}  # by key: the state that lists of it have come to, and where
        self._own_states: dict[tuple[str, str | None], tuple[int, str]] = {}  # that of each list as last committed
        self.end_record: Record | None = None
        self.reopened_at: float | None = None  # wall seconds at which this generation began, if it is not the first
        #: The first run of the lineage of forks that this one belongs to; `effects.join_lineage` knows more of a child.
        self.origin: str = ledger.run_id
        self.effects_policy: str = "refuse"  # what becomes of guarded steps that another run of that lineage did
        self.spent_approvals: list[dict[str, str]] = []  # those in what was copied: their names, keys and runs
        self.length: int = 0
        self.ends: int = 0  # ends of steps, waits and values among the records
        self.former_names_by_name: dict[
            str, list[str]
        ] = {}  # by name: what it was called before, the name said last first
        self.swallowed_failures: dict[
            Identity, Record
        ] = {}  # imperative steps that failed, and whose caller went on without
        self._failures: list[Record] = []  # of which what follows tells whether their callers went on
        self._ended_tries: set[Identity] = set()
        self._started_in_tasks: dict[Identity, str] = {}  # steps of lists in tasks of their own, with the list's number
        self._listed: dict[str, dict[str, list[Record]]] | None = None  # see `listed`
        self._unmatched: dict[str, tuple[dict[str, str], set[str]]] = {}  # see `unmatched`
        self._ordered: list[Record] = []  # imperative steps in the order they were begun, one after the other
        self._last = -1  # position of the last end of a step
        self._read(records)
        if self.end_record is not None and self.reopened_at is None:
            self.reopened_at = self.wall()

    def _read(self, records: Sequence[Record]) -> None:
        done, begun, ordered = self.completed, self.started, dict[Identity, Record]()
        last = carrier = None
        start = of = among = ""  # the start that the record before carries, and the key and digest beside it
        carriers: list[Record] = []
        self.length = self.ends = len(records)
        for record, (kind, name, key, state, pos, carried, number) in zip(records, map(_READ, records), strict=True):
            if self._failures:
                self._note_progress_after_failure(record)
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
            if key[:2] == "s:" and not was_concurrent(record):
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

    def _note_progress_after_failure(self, after: Record) -> None:
        """A step of the run's own task shows that this went on after its own failures; of one in another task, only
        that which comes right after it does."""
        if after.kind == PROBE:
            return
        if after.kind in ("started", "done") and not was_concurrent(after):
            self.swallowed_failures |= {(failure.name, failure.key): failure for failure in self._failures}
            self._failures = []
        elif after.kind == ENDED:
            self._failures = []
        elif after.kind in (ATTEMPT, RESUMED):  # mostly of another claim; that of theirs may have been written late
            self._failures = [failure for failure in self._failures if failure.claim_id == after.claim_id]
        else:
            self._failures = [failure for failure in self._failures if _has_info(failure, MAIN_TASK)]

    def _read_other(self, record: Record) -> None:
        identity = (record.name, record.key)
        match record.kind:
            case "started":
                if identity in self.started:
                    self.lost_reservations[identity] = self.in_doubt_usage(identity)
                    self.reservations.pop(identity, None)
                self.started[identity] = record.seq
                self._ended_tries.discard(identity)
                if record.info is not None and '"until"' in record.info:
                    self.wait_deadlines[identity] = json.loads(record.info).get("until")
                if record.info is not None and '"reserve"' in record.info:
                    self.reservations[identity] = json.loads(record.info).get("reserve") or {}
                if record.state is not None:
                    self._own_states[record.key, record.digest] = record.seq, record.state
                if record.digest is not None and record.digest.startswith(TASK_LIST_PREFIX):
                    self._started_in_tasks[identity] = record.digest
            case "retrying" | "failed":
                self.started.pop(identity, None)
                if _has_info(record, ONLY_STEP) or _has_info(record, MAIN_TASK):
                    self._failures.append(record)
                    if is_copied(record):  # only where the code had gone on without the step
                        self.swallowed_failures[identity] = record
                self._ended_tries.add(identity)
            case "forked":
                told = json.loads(record.info or "{}")
                self.origin = told.get("origin") or record.claim_id.removeprefix(COPIED)
                self.effects_policy, self.spent_approvals = told.get("effects", "refuse"), told.get("approvals", [])
            case "reset":
                self.resets[record.key] = self.resets.get(record.key, 0) + 1
            case "attempt" | "resumed":
                if self.end_record is not None and self.reopened_at is None:
                    self.reopened_at = record.t
            case "ended":
                self.end_record, self.reopened_at = record, None

    def in_doubt_usage(self, identity: Identity) -> dict[str, Any]:
        """All that was held back for starts of that step whose end nobody knows."""
        found = dict(self.lost_reservations.get(identity, {}))
        if identity in self.started:
            for name, value in self.reservations.get(identity, {}).items():
                found[name] = found.get(name, 0) + value
        return found

    def usage(self) -> dict[str, Any]:
        """What the agent loops of this run have used by its journal, what is in doubt and its children included, and
        what was copied from another run left out."""
        found = [usage_of(record) for record in self.completed.values()]
        for identity in self.started.keys() | self.lost_reservations.keys():
            if identity[0] == "model" and identity not in self.completed:
                found.append(reservation_as_usage(self.in_doubt_usage(identity)))
        return total(found)

    def _find_carried(self, carriers: Sequence[Record]) -> None:
        """Steps whose start the record of the step before carries, and nothing since then tells more of."""
        for record in carriers:
            after = json.loads(cast(str, record.next))
            identity = (after["name"], after["key"])
            if identity not in self.completed and identity not in self._ended_tries:
                self.started.setdefault(identity, record.seq)

    def lookup(self, name: str, key: str) -> Record | None:
        """The record of that step, under its present or its former name."""
        record = self.completed.get((name, key))
        if record is None and name in self.former_names_by_name:
            found = (self.completed.get((old, key)) for old in self.former_names(name))
            record = next((each for each in found if each is not None), None)
        return record

    def journal_name(self, name: str, key: str) -> str:
        """The name under which this step is known to the journal, so that its id stays the same."""
        for old in self.former_names(name):
            if (old, key) in self.completed or (old, key) in self.started:
                return old
        return name

    def former_names(self, name: str) -> list[str]:
        """All that a step of that name was called before, the nearest first."""
        if name not in self.former_names_by_name:
            return []
        names = [name]
        for each in names:
            names += [old for old in self.former_names_by_name.get(each, ()) if old not in names]
        return names[1:]

    def add(self, records: Sequence[Record]) -> None:
        """Know the ends of steps among what is in the journal now."""
        for record in records:
            if record.kind != DONE:
                continue
            self.completed[record.name, record.key] = record
            if record.state is not None:
                self._own_states[record.key, record.digest] = record.seq, record.state

    def set_state(self, key: str, number: str, record: Record, state: str) -> None:
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
            for (_, of), record in self.completed.items():
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
            apart = {
                number: records for number, records in self.listed(key).items() if number.startswith(TASK_LIST_PREFIX)
            }
            numbers = {name: number for (name, of), number in self._started_in_tasks.items() if of == key}
            numbers |= {record.name: number for number, records in apart.items() for record in records}
            found = self._unmatched[key] = (numbers, set(numbers.values()))
        return found

    def raise_recorded_failure(self, name: str, key: str) -> None:
        """Raise what an imperative step raised where the code went on without it: it is as recorded as a result."""
        for each in (name, *self.former_names(name)) if self.swallowed_failures else ():
            failure = self.swallowed_failures.get((each, key))
            if failure is not None:
                raise recorded_error(name, failure)
