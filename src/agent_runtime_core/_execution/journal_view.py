"""The journal of a run as one claim reads it: which steps are recorded, and which are in doubt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import Any, Final, NamedTuple, cast

from .._journal.record import ATTEMPT, COPIED, DONE, ENDED, FAILED, PROBE, RESUMED, RETRYING, STARTED, Record, is_copied
from ..errors import StorageCorrupt
from ..limits import reservation_of
from .step import SCOPE_SUFFIX, Identity, scope_id
from .step_failure import recorded_error
from .usage import charged_by, reservation_as_usage, total, usage_of

# -- states of step lists
#
# Records hold a state whole or as a difference. A step that adds 1 KB to a state of 1 MB records 1 KB: what it
# replaced between the common beginning and the common end of the old and the new text. A state is recorded whole once
# the differences since the last whole state are as large as it, so that a file grows with what the steps change. A
# difference names the state before it by a digest, as records may be renumbered, and copied into forks.

_MARK: Final = "~"  # begins a difference; a whole state is a JSON object and begins with "{"
_COST: Final = 100  # characters that a difference counts in addition to its own, as its record must be read
_MOST: Final = 256  # differences between two whole states, as reading a state copies its text for each


class StateText:
    """The JSON text of a state. What a step adds to a large state is appended without a copy of the text."""

    __slots__ = ("_count", "_parts", "_whole", "added", "size")

    def __init__(self, whole: str) -> None:
        self.size: int = len(whole)
        self.added: str = ""  # the last part, if it is an extension
        self._whole: str | None = whole
        self._parts: list[str] = []  # without the last brace, if there are several parts; shared with later texts
        self._count = 0  # of the parts that belong to this text

    def extended(self, added: str) -> StateText:
        """Return the text of a state with the entries of this state, and then the entries of the object `added`."""
        parts = self._parts[: self._count] if len(self._parts) > self._count else self._parts
        if not parts:
            parts.append(str(self)[:-1])
            self._count = 1
        longer = StateText("")
        longer.added, longer.size, longer._whole = f",{added[1:-1]}", self.size + len(added) - 1, None
        parts.append(longer.added)
        longer._parts, longer._count = parts, len(parts)
        return longer

    def __str__(self) -> str:
        if self._whole is None:
            self._whole = f"{''.join(self._parts[: self._count])}}}"
        return self._whole


class _Recorded(NamedTuple):
    """The last recorded state of the lists under a key."""

    recorded: str  # as in its record
    state: str | StateText
    differences: int  # since the last whole state
    size: int  # of these differences


class _Lists:
    """The states of the lists under one key."""

    def __init__(self) -> None:
        self.own: dict[str | None, tuple[int, str]] = {}  # the number of the record and the state of each list
        self.reached: tuple[int, str] | None = None  # the last state that this claim reached
        self.recorded: list[str] = []  # what differences may refer to
        self.last: _Recorded | None = None

    def add(self, recorded: str) -> None:
        """Add a recorded state.

        Of several whole states in a row the last two are kept: earlier releases recorded no others. The last but one
        is kept for a difference to it, if a write without an answer was applied late.
        """
        self.recorded.append(recorded)
        if not any(each.startswith(_MARK) for each in self.recorded[-3:]):
            del self.recorded[-3:-2]


class ListStates:
    """The last states of the step lists of a run."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._by_key: dict[str, _Lists] = {}

    def _lists(self, key: str) -> _Lists:
        lists = self._by_key.get(key)
        if lists is None:
            lists = self._by_key[key] = _Lists()
        return lists

    def read(self, key: str, number: str | None, seq: int, recorded: str, *, at_start: bool = False) -> None:
        """Note a state that is in the journal.

        Args:
            key: The key of the list.
            number: Identifies the list under this key.
            seq: The number of the record.
            recorded: The state, as recorded.
            at_start: The record is the start of a step. Forks do not copy it, so no difference may refer to it.
        """
        lists = self._lists(key)
        lists.own[number] = seq, recorded
        if not at_start:
            lists.add(recorded)
            lists.last = None

    def set(self, key: str, number: str | None, seq: int, recorded: str, state: str | StateText) -> None:
        """Note the state of a list after its last step, and its form in the record of that number."""
        lists = self._lists(key)
        lists.own[number] = lists.reached = seq, recorded
        lists.add(recorded)
        if not recorded.startswith(_MARK):
            lists.last = _Recorded(recorded, state, 0, 0)
        elif (before := lists.last) is not None:
            lists.last = _Recorded(recorded, state, before.differences + 1, before.size + _COST + len(recorded))

    def begin(self, key: str, state: str) -> None:
        """Set the state with which the lists under a key begin."""
        self._lists(key).reached = -1, state

    def of(self, key: str, number: str) -> str | None:
        """Return the last state of a list; None if no record contains a state."""
        lists = self._lists(key)
        own = lists.own.get(number)
        if own is None:
            return None
        if lists.reached is None or lists.reached[0] < own[0]:
            lists.reached = own
        return self._whole(key, own[1])

    def is_recorded(self, key: str, number: str) -> bool:
        """Whether the last state of this list is also in records that forks copy."""
        lists = self._lists(key)
        return lists.own[number][1] in lists.recorded

    def before(self, key: str) -> str | None:
        """Return the last state of the lists under this key that this claim reached."""
        reached = self._lists(key).reached
        return None if reached is None else self._whole(key, reached[1])

    def to_record(self, key: str, state: StateText, before: StateText | None = None) -> str:
        """Return what the next record of a list contains for this state: the state, or a shorter difference.

        Args:
            key: The key of the list.
            state: The state.
            before: The state that this state extends, if it does so.
        """
        lists, size = self._lists(key), state.size
        if size <= _COST or not lists.recorded:
            return str(state)
        last = lists.last
        if last is None:
            last = lists.last = self._last_recorded(key, lists.recorded[-1])
        if last.differences >= _MOST:
            return str(state)
        if before is not None and last.state is before:
            start, end, between = before.size - 1, 1, state.added
        else:
            old, new = str(last.state), str(state)
            start = _common_start(old, new)
            end = _common_end(old, new, min(len(old), size) - start)
            between = new[start : size - end]
        if last.size + _COST + len(between) >= size:
            return str(state)
        return f"{_MARK}{_digest(last.recorded)}:{start}:{end}:{between}"

    def _whole(self, key: str, recorded: str) -> str:
        return str(self._last_recorded(key, recorded).state) if recorded.startswith(_MARK) else recorded

    def _last_recorded(self, key: str, recorded: str) -> _Recorded:
        """Return a recorded state with its whole text."""
        lists = self._lists(key)
        if (last := lists.last) is not None and last.recorded == recorded:
            return last
        changes: list[tuple[int, int, str]] = []
        digests: dict[str, str] = {}
        state, size = recorded, 0
        try:
            while state.startswith(_MARK):
                digest, first, from_end, between = state[1:].split(":", 3)
                changes.append((int(first), int(from_end), between))
                size += _COST + len(state)
                digests = digests or {_digest(each): each for each in lists.recorded}
                state = digests[digest]
        except (ValueError, KeyError) as wrong:
            raise StorageCorrupt(
                f"run {self._run_id}: a state of its step list is the difference to another state, which must be in an "
                "earlier record, and is not. Restore a backup"
            ) from wrong
        for start, end, between in reversed(changes):
            state = f"{state[:start]}{between}{state[len(state) - end :]}"
        return _Recorded(recorded, state, len(changes), size)


def _digest(recorded: str) -> str:
    return blake2b(recorded.encode(), digest_size=8).hexdigest()


def _common_start(old: str, new: str) -> int:
    """Return how many characters at the beginning of two texts are the same."""
    low, high = 0, min(len(old), len(new))
    while low < high:  # the characters before `low` are the same
        middle = (low + high + 1) // 2
        if old.startswith(new[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def _common_end(old: str, new: str, most: int) -> int:
    """Return how many characters at the end of two texts are the same, at most `most`."""
    low, high = 0, most
    while low < high:  # the last `low` characters are the same
        middle = (low + high + 1) // 2
        if old.endswith(new[len(new) - middle : len(new) - low], 0, len(old) - low):
            low = middle
        else:
            high = middle - 1
    return low


_POS = itemgetter(10)
_READ = itemgetter(1, 2, 3, 9, 10, 15, 16)  # kind, name, key, state, pos, next and digest of a record

CONCURRENT_INFO: Final = '{"beside":true}'  # the `info` of a concurrent step

#: What the record of a failure says of its step. It decides which later records show that the code continued.
MAIN_TASK: Final = "own"  # the step ran in the main task of the run
ONLY_STEP: Final = "alone"  # no other step was running

TASK_LIST_PREFIX: Final = "~"  # before the number of a step list that ran in a separate task

GUARDED_FIELD: Final = "guarded"  # in the `info` of the start of a guarded step
CHILD_IN_DOUBT: Final = "doubt"  # in the `info` of the end of a child run that failed with a guarded step in doubt
POOLS_FIELD: Final = "pools"  # in the `info` of the start of a model call: where it has reserved something
BEFORE_FIELD: Final = "before"  # in the `info` of the start of a step: see `errors_before`
ASIDE_FIELD: Final = "aside"  # in the `info` of what a step calls in a task that it started, if that is guarded

CHILD: Final = "call:"  # before the agent key in the name of a child run
SIGNAL: Final = "signal:"  # before the name of a signal or an approval in the name of its wait

#: How the keys of steps, child runs and waits begin to which the caller gave no key.
_COUNTED: Final = frozenset({"s:", "c:", "w:"})


def _has_info(record: Record, word: str) -> bool:
    return record.info is not None and f'"{word}":' in record.info


def is_approval(record: Record) -> bool:
    """Return whether this is the record of an approval that was answered."""
    return record.kind == DONE and _has_info(record, "approval")


def is_in_doubt(records: Sequence[Record]) -> bool:
    """Return whether a guarded step of a run, or of a child of the run, is in doubt."""
    started: set[Identity] = set()
    for record in records:
        if record.kind == STARTED and _has_info(record, GUARDED_FIELD):
            started.add(record[2:4])
        elif record.kind in (DONE, FAILED, RETRYING):
            started.discard(record[2:4])
            if record.kind == DONE and _has_info(record, CHILD_IN_DOUBT):
                return True
    return bool(started)


def was_concurrent(record: Record) -> bool:
    """Return whether the step of this record ran concurrently with other code of its run."""
    return _has_info(record, "beside")


def has_place(record: Record) -> bool:
    """Return whether the record is of a step, child run or wait that the code reaches in a certain order.

    Concurrent code has no order. Versions up to 0.6.0 gave no positions to child runs and waits.
    """
    return record.pos > 0 and record.key[:2] in _COUNTED and "@" not in record.key and not was_concurrent(record)


def as_concurrent(record: Record) -> Record:
    """Return the record as the record of a concurrent step."""
    if was_concurrent(record):
        return record
    return record._replace(info=CONCURRENT_INFO if record.info is None else f"{record.info[:-1]},{CONCURRENT_INFO[1:]}")


def _call_of(identity: Identity) -> tuple[Identity, int]:
    """Return what calls of a step without a key have in common, name and step around it, and the number of the call."""
    number, _, scope = identity[1][2:].partition("@")
    return (identity[0], scope), int(number)


#: What only the records of earlier claims fill, for an empty journal.
_NOTHING: Final[Any] = frozenset()


class JournalView:
    """The records of a run, read once, and the ends of steps that the claim added since.

    Attributes:
        completed: The DONE record of each step.
        started: Steps in doubt: they were started and no end is recorded. The number of that record. Of this claim only
            guarded steps are included.
        wait_deadlines: Until when a started wait lasts, None if it is not limited, and when it began, in wall seconds.
        reservations: What was reserved for a started step.
        lost_reservations: What was reserved for earlier starts of the step, whose outcome is unknown.
        pools: The names of the pools in which calls of the run have reserved something.
        resets: How often the lists of a scope were restarted.
        states: The last states of the step lists.
        end_record: The last end of the run, or None.
        reopened_at: Wall seconds at which this generation began, if it is not the first.
        origin: The first run of the lineage of forks. `effects.join_lineage` corrects it for a child of a fork.
        effects_policy: What happens to guarded steps that another run of the lineage completed.
        spent_approvals: Approvals in the copied records: their names, keys and runs.
        length: How many records there are.
        ends: How many of them are ends of steps, waits and values.
        former_names_by_name: The names that a step used before, the last name first.
        swallowed_failures: Imperative steps that failed for good and whose caller continued.
        ordered: Imperative steps, child runs and waits that were not concurrent, in the order of their start. Those
            without an end are among them, except at the end of the list, where the code may replace them.
        opened: Entries of `ordered` without an end, and where their last attempt failed.
        shared_waits: Names of waits without a key that tasks of the run called. The next execution may give their keys
            to the main task, so waits of these names have no order.
        guarded: Guarded steps that were started and did not fail. Of child runs and answered approvals, those inside of
            steps. What a step calls in tasks that it started is left out.
        guarded_inside: What of `guarded` is directly or indirectly inside a step, by the id of its scope. Of something
            that is inside another step of it, that step.
        last_seq: The number of the last end of a step.
        ended_tries: Steps whose last attempt failed, and that have not started again.
        charged_by_failures: What was counted in attempts that failed, by step.
        children_in_doubt: Child runs that failed with a guarded step in doubt.
        errors_before: What the calls raised that used the key of a step before its last call, as recorded in the start
            of that call. These calls raise it again: see `StepKeys.next_key`.
    """

    def __init__(self, run_id: str, records: Sequence[Record], wall: Callable[[], float]) -> None:
        self.completed: dict[Identity, Record] = {}
        self.started: dict[Identity, int] = {}
        self.wait_deadlines: dict[Identity, tuple[float | None, float]] = {}
        self.reservations: dict[Identity, dict[str, Any]] = {}
        self.lost_reservations: dict[Identity, dict[str, Any]] = {}
        self.pools: tuple[str, ...] = ()
        self.resets: dict[str, int] = {}
        self.states: ListStates = ListStates(run_id)
        self.end_record: Record | None = None
        self.reopened_at: float | None = None
        self.origin: str = run_id
        self.effects_policy: str = "refuse"
        self.spent_approvals: list[dict[str, str]] = []
        self.length: int = 0
        self.ends: int = 0
        self.former_names_by_name: dict[str, list[str]] = {}
        self.swallowed_failures: dict[Identity, Record] = {}
        self.ordered: list[Record] = []
        self.opened: dict[Identity, Record] = {}
        self.shared_waits: set[str] = set() if records else _NOTHING
        self.guarded: set[Identity] = set() if records else _NOTHING
        self.guarded_inside: dict[str, set[Identity]] = {}
        self.last_seq: int = -1
        self.charged_by_failures: dict[Identity, dict[str, Any]] = {}
        self.children_in_doubt: set[Identity] = set()
        self.errors_before: dict[Identity, list[dict[str, Any]]] = {}
        self._called_again: dict[Identity, int] = {}  # the numbers of the last starts of these steps
        self._start_digests: dict[Identity, str | None] = {}
        self._held: set[Identity] = set() if records else _NOTHING
        self._failures_inside: dict[str, dict[Identity, Record]] = {}  # of guarded steps, by the step around them
        # Steps without keys that are guarded, or contain a guarded step.
        self._guarded_starts: set[Identity] = set() if records else _NOTHING
        self._new_starts: list[Identity] = [] if records else _NOTHING  # that are not in `_scopes` yet
        self._scopes: dict[str, Identity] = {}  # started steps, by the ids of their scopes
        self._guarded_failures: dict[Identity, list[Record]] = {}  # of steps without keys, by name and step around them
        # No record shows yet whether their callers continued.
        self._failures: list[Record] = [] if records else _NOTHING
        self.ended_tries: set[Identity] = set()
        self._started_in_tasks: dict[Identity, str] = {}  # steps of lists in separate tasks; the list's number
        self._listed: dict[str, dict[str, list[Record]]] | None = None  # see `listed`
        self._unmatched: dict[str, tuple[dict[str, str], set[str]]] = {}  # see `unmatched`
        self._journal_names: dict[Identity, str] = {}  # the former names that were found
        if records:
            self._read(records)
        if self.end_record is not None and self.reopened_at is None:
            self.reopened_at = wall()

    def _read(self, records: Sequence[Record]) -> None:
        completed, started, ordered = self.completed, self.started, dict[Identity, Record]()
        last = carrier = None
        # The start that the record before contains, and the key and digest of that record.
        start = start_key = start_digest = ""
        carriers: list[Record] = []
        self.length = self.ends = len(records)
        for record, (kind, name, key, state, pos, carried, digest) in zip(records, map(_READ, records), strict=True):
            if self._failures:
                self._note_progress_after_failure(record)
            if kind != "done":
                self.ends -= 1
                self._read_other(record)
                continue
            last, identity = record, (name, key)
            completed[identity] = record
            if started:
                started.pop(identity, None)
            if state is not None:
                self.states.read(key, digest, record.seq, state)
                completed[identity] = record._replace(state=None)  # earlier releases recorded each state whole
            if key[:2] in _COUNTED:
                if key[0] == "c" and _has_info(record, CHILD_IN_DOUBT):
                    self.children_in_doubt.add(identity)
                if has_place(record):
                    ordered[identity] = record  # the last: an unconfirmed end may be applied after a second attempt
                elif "@" not in key:
                    self._read_unordered(record)
                elif is_approval(record) and not _has_info(record, ASIDE_FIELD):
                    self.guarded.add(identity)
            # In a step list, this is the start of the step at the next position: no need to read it.
            if carrier is not None and (f'"pos":{pos},' not in start or key != start_key or digest != start_digest):
                carriers.append(carrier)
            if carried is None:
                carrier = None
            else:
                carrier, start, start_key, start_digest = record, carried, key, digest
        if last is not None:
            self.last_seq = last.seq
        if carrier is not None:
            carriers.append(carrier)
        self._find_carried(carriers)
        open_steps = (*self.started, *self.ended_tries)
        self._start_digests = {each: self._start_digests.get(each) for each in open_steps}
        self._new_starts.clear()
        self._scopes.clear()
        for identity, seq in self._called_again.items():
            if identity in self.swallowed_failures and self.swallowed_failures[identity].seq < seq:
                del self.swallowed_failures[identity]  # it is one of `errors_before`
        if self.guarded:
            self._find_guarded_inside()
        if self.opened:
            self.opened = {identity: each for identity, each in self.opened.items() if identity not in completed}
        self.ordered = sorted([*ordered.values(), *self.opened.values()], key=_POS)
        if self.shared_waits:
            self.ordered = [each for each in self.ordered if each.key[:2] != "w:" or each.name not in self.shared_waits]
        while self.ordered and self.is_replaceable(self.ordered[-1]):
            self.ordered.pop()

    def _note_progress_after_failure(self, after: Record) -> None:
        """Decide whether the code continued after the failures so far, as this record shows.

        A step of the main task shows that the main task continued after its own failures. After a failure in another
        task, only the record that directly follows it shows that.
        """
        if after.kind == PROBE:
            return
        if after.kind in ("started", "done") and not was_concurrent(after):
            self.swallowed_failures |= {(failure.name, failure.key): failure for failure in self._failures}
            self._failures = []
        elif after.kind == ENDED:
            self._failures = []
        elif after.kind in (ATTEMPT, RESUMED):  # usually of another claim; a claim may also write its own record late
            self._failures = [failure for failure in self._failures if failure.claim_id == after.claim_id]
        else:
            self._failures = [failure for failure in self._failures if _has_info(failure, MAIN_TASK)]

    def _note_progress_inside(self, identity: Identity) -> None:
        """Note that the body of a step started a guarded step: it continued after its failures of guarded steps.

        Otherwise a resumed body would run the failed step again, and pay twice if the other step repeated it.
        """
        inside = SCOPE_SUFFIX.search(identity[1]) if self._failures_inside else None
        if inside is not None and (failures := self._failures_inside.pop(inside[1], None)) is not None:
            failures.pop(identity, None)  # it runs again
            self.swallowed_failures |= failures
            self.swallowed_failures.pop(identity, None)

    def _note_repetition(self, identity: Identity) -> None:
        """Note that a guarded step started: the code continued after failures of equal calls without a key.

        That holds for the steps around it too. Concurrent code and code inside steps show it by nothing else. Without
        it, a resumed run would run the failed call again, and pay twice if the later call repeated it.
        """
        step: Identity | None = identity
        while step is not None:
            if step[1][:2] == "s:":
                self._guarded_starts.add(step)
                call, number = _call_of(step)
                for failure in self._guarded_failures.pop(call, ()):
                    failed = (failure.name, failure.key)
                    if _call_of(failed)[1] < number and self._start_digests[failed] == self._start_digests[step]:
                        self.swallowed_failures[failed] = failure
                self.swallowed_failures.pop(step, None)  # it runs again
            step = self._step_around(step)

    def _step_around(self, identity: Identity) -> Identity | None:
        found = SCOPE_SUFFIX.search(identity[1])
        if found is None:
            return None
        self._scopes |= {scope_id(*each): each for each in self._new_starts}
        self._new_starts.clear()
        return self._scopes.get(found[1])

    def _read_start(self, identity: Identity, record: Record) -> None:
        if identity in self.started:
            self.lost_reservations[identity] = self.in_doubt_usage(identity)
            self.reservations.pop(identity, None)
        self.started[identity] = record.seq
        self._start_digests[identity] = record.digest
        self.ended_tries.discard(identity)
        if record.info is not None and '"until"' in record.info:
            self.wait_deadlines[identity] = (json.loads(record.info).get("until"), record.t)
        if record.info is not None and '"reserve"' in record.info:
            info = json.loads(record.info)
            self.reservations[identity] = info.get("reserve") or {}
            self.pools += tuple(info.get(POOLS_FIELD, ()))
        if record.state is not None:
            self.states.read(record.key, record.digest, record.seq, record.state, at_start=True)
        if record.digest is not None and record.digest.startswith(TASK_LIST_PREFIX):
            self._started_in_tasks[identity] = record.digest
        if record.info is not None and f'"{BEFORE_FIELD}":' in record.info:
            self.add_errors_before(identity, json.loads(record.info)[BEFORE_FIELD])
        if identity in self.errors_before:
            self._called_again[identity] = record.seq
        if has_place(record):
            self.opened[identity] = record
        else:
            self._read_unordered(record)
        self._new_starts.append(identity)
        if _has_info(record, GUARDED_FIELD) or (record.key[:2] == "c:" and "@" in record.key):
            self._note_repetition(identity)
            if not _has_info(record, ASIDE_FIELD):
                self.guarded.add(identity)
                self._note_progress_inside(identity)

    def _read_other(self, record: Record) -> None:
        identity = (record.name, record.key)
        match record.kind:
            case "started":
                self._read_start(identity, record)
            case "retrying" | "failed":
                self.started.pop(identity, None)
                if record.kind == FAILED and identity in self._guarded_starts:
                    self._guarded_failures.setdefault(_call_of(identity)[0], []).append(record)
                if identity in self.guarded:
                    self.guarded.discard(identity)
                    if record.kind == FAILED and (inside := SCOPE_SUFFIX.search(record.key)) is not None:
                        self._failures_inside.setdefault(inside[1], {})[identity] = record
                if identity in self.opened or (_has_info(record, MAIN_TASK) and has_place(record)):
                    self.opened[identity] = record
                if charged := charged_by(record):
                    self.charged_by_failures[identity] = total([self.charged_by_failures.get(identity, {}), charged])
                if _has_info(record, ONLY_STEP) or _has_info(record, MAIN_TASK):
                    self._failures.append(record)
                if is_copied(record):  # a fork copies a failure only if the code continued after it
                    self.swallowed_failures[identity] = record
                self.ended_tries.add(identity)
            case "forked":
                info = json.loads(record.info or "{}")
                self.origin = info.get("origin") or record.claim_id.removeprefix(COPIED)
                self.effects_policy, self.spent_approvals = info.get("effects", "refuse"), info.get("approvals", [])
                for name, key, pos in info.get("left", ()):
                    self.opened[name, key] = Record(record.seq, STARTED, name, key, pos=pos)
                self.guarded.update((name, key) for name, key in info.get("guarded", ()))
                self._held.update((name, key) for name, key in info.get("held", ()))
                for name, key, errors in info.get(BEFORE_FIELD, ()):
                    self.add_errors_before((name, key), errors)
            case "reset":
                self.resets[record.key] = self.resets.get(record.key, 0) + 1
            case "attempt" | "resumed":
                if self.end_record is not None and self.reopened_at is None:
                    self.reopened_at = record.t
            case "ended":
                self.end_record, self.reopened_at = record, None

    def _read_unordered(self, record: Record) -> None:
        if record.key[:2] == "w:" and "@" not in record.key and was_concurrent(record):
            self.shared_waits.add(record.name)

    def _find_carried(self, carriers: Sequence[Record]) -> None:
        """Read the starts in these records; those without a later record of the step are in doubt."""
        for record in carriers:
            after = json.loads(cast(str, record.next))
            identity = (after["name"], after["key"])
            if identity not in self.completed and identity not in self.ended_tries:
                self.started.setdefault(identity, record.seq)

    def _find_guarded_inside(self) -> None:
        identities = (*self.completed, *self.started, *self.ended_tries, *self.opened)
        steps = {scope_id(*each): each for each in identities} if any("@" in key for _, key in self.guarded) else {}
        for each in self.guarded:
            identity: Identity | None = each
            while identity is not None and identity[1][:2] in _COUNTED:  # step lists compare their steps themselves
                found = SCOPE_SUFFIX.search(identity[1])
                if found is None:
                    break
                self.guarded_inside.setdefault(found[1], set()).add(identity)
                identity = steps.get(found[1])

    def is_replaceable(self, record: Record) -> bool:
        """Return whether other code may come instead of what this record of `ordered` started.

        Not if it may have had an effect that must not be repeated under another name. Nor for a wait: the signal or
        the answer to it may have been sent.
        """
        if record.kind == DONE:
            return False
        if self.has_guarded_inside(record):
            return False
        return record.kind != STARTED or (record.key[0] == "s" and (record.name, record.key) not in self.guarded)

    def has_guarded_inside(self, record: Record) -> bool:
        """Return whether something of `guarded` is inside the step of this record."""
        return bool(self.guarded_inside) and scope_id(record.name, record.key) in self.guarded_inside

    # -- usage

    def in_doubt_usage(self, identity: Identity) -> dict[str, Any]:
        """Return all that was reserved for starts of this step whose outcome is unknown."""
        lost, last = self.lost_reservations.get(identity, {}), self.reservations.get(identity, {})
        if not (last and identity in self.started):
            return dict(lost)
        both = total(map(reservation_as_usage, (lost, last)))
        return reservation_of(both.get("estimated_tokens", 0), both.get("estimated_cost_usd"))

    def usage(self) -> dict[str, Any]:
        """Return what the agent loops of this run have used.

        Includes child runs and what is in doubt. Records that were copied from another run do not count.
        """
        found = [usage_of(record) for record in self.completed.values()]
        for identity in self.started.keys() | self.lost_reservations.keys():
            if identity[0] == "model" and identity not in self.completed:
                found.append(reservation_as_usage(self.in_doubt_usage(identity)))
        return total([*found, *self.charged_by_failures.values()])

    # -- steps

    def lookup(self, name: str, key: str) -> Record | None:
        """Return the record of this step, under its present name or a former name."""
        record = self.completed.get((name, key))
        if record is None and self.former_names_by_name:
            found = (self.completed.get((old, key)) for old in self.former_names(name))
            record = next((each for each in found if each is not None), None)
        return record

    def journal_name(self, name: str, key: str) -> str:
        """Return the name of this step in the journal, so that its id stays the same."""
        if not self.former_names_by_name:
            return name
        known = self._journal_names.get((name, key))
        if known is None:
            found = (self.completed, self.started, self.ended_tries, self.opened)
            old_names = (old for old in self.former_names(name) if any((old, key) in each for each in found))
            # Kept, because a step that runs again is no longer in `started`.
            known = self._journal_names[name, key] = next(old_names, name)
        return known

    def keep_name(self, name: str, key: str, former: str) -> None:
        """Have `journal_name` return a former name for this step, which the journal does not have yet."""
        self._journal_names[name, key] = former

    def holds_doubt(self, name: str, key: str) -> bool:
        """Return whether a step inside this step is in doubt, or was in the run that this run was forked from."""
        if (name, key) in self._held:
            return True
        if not self.started and not self.children_in_doubt:
            return False
        wanted, keys = scope_id(name, key), {scope_id(*each): each[1] for each in (*self.started, *self.ended_tries)}
        for each in (*self.started, *self.children_in_doubt):
            inner = each[1]
            if inner[:2] in ("w:", "c:") and each not in self.children_in_doubt:
                continue
            while (found := SCOPE_SUFFIX.search(inner)) is not None:
                if found[1] == wanted:
                    return True
                inner = keys.get(found[1], "")
        return False

    def digest_of(self, name: str, key: str) -> str | None:
        """Return the digest of the arguments of a step that an earlier claim recorded or started."""
        record = self.completed.get((name, key))
        return self._start_digests.get((name, key)) if record is None else record.digest

    def former_names(self, name: str) -> list[str]:
        """Return all names that a step, child run or wait of this name had before, the nearest first."""
        if not self.former_names_by_name:
            return []
        names = [name]
        for each in names:
            names += [old for old in self.former_names_by_name.get(each, ()) if old not in names]
        for prefix in (CHILD, SIGNAL):  # the user's name follows
            if name.startswith(prefix):
                names += [prefix + old for old in self.former_names(name.removeprefix(prefix))]
        return names[1:]

    def start_in_order(self, name: str, key: str) -> Record | None:
        """Return the record of `opened` for this step, child run or wait."""
        return self.opened.get((self.journal_name(name, key), key)) if self.opened else None

    def raise_recorded_failure(self, name: str, key: str) -> None:
        """Raise the recorded error of an imperative step if the code continued after it, as it will again.

        It is raised once. If the code, or the framework that calls it, repeats the step, the step runs again.
        """
        for each in (name, *self.former_names(name)) if self.swallowed_failures else ():
            failure = self.swallowed_failures.pop((each, key), None)
            if failure is not None:
                raise recorded_error(name, failure)

    def add_errors_before(self, identity: Identity, errors: Iterable[dict[str, Any]]) -> None:
        """Add what further calls raised that had the key of this step before its last call."""
        self.errors_before.setdefault(identity, []).extend(errors)

    def add_failure(self, record: Record) -> None:
        """Add the recorded failure of an attempt: the step is not in doubt."""
        self.started.pop(record[2:4], None)
        self.ended_tries.add(record[2:4])

    def add(self, records: Sequence[Record]) -> None:
        """Add the ends of steps from records that are in the journal now."""
        for record in records:
            if record.kind != DONE:
                continue
            self.completed[record.name, record.key] = record
            if record.state is not None:
                self.states.read(record.key, record.digest, record.seq, record.state)

    # -- step lists

    def listed(self, key: str) -> dict[str, list[Record]]:
        """Return what earlier claims recorded of the step lists under this key, by the number of the list."""
        if self._listed is None:  # made once, for the first list
            self._listed, last, records = {}, ("", ""), list[Record]()
            for (_, list_key), record in self.completed.items():
                if list_key[:2] != "x:" or (number := record.digest) is None:
                    continue
                if (list_key, number) != last:  # usually the list of the record before
                    last = (list_key, number)
                    records = self._listed.setdefault(list_key, {}).setdefault(number, [])
                records.append(record)
        return self._listed.get(key, {})

    def unmatched(self, key: str) -> tuple[dict[str, str], set[str]]:
        """Return the lists under this key that ran in separate tasks in earlier claims.

        Returns:
            The number of each list by the names of its steps, and the numbers that this claim did not reach yet.
        """
        found = self._unmatched.get(key)
        if found is None:
            in_tasks = {
                number: records for number, records in self.listed(key).items() if number.startswith(TASK_LIST_PREFIX)
            }
            numbers = {name: number for (name, of), number in self._started_in_tasks.items() if of == key}
            numbers |= {record.name: number for number, records in in_tasks.items() for record in records}
            found = self._unmatched[key] = (numbers, set(numbers.values()))
        return found
