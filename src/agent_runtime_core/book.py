"""What a claim knows of its run's journal: which steps are recorded, which are in doubt, what comes next."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final, cast

from ._engines.base import Op
from .errors import JournalMismatch, StepExecutionError, StorageBusy
from .journal.record import ATTEMPT, DONE, ENDED, FAILED, LOOKED, RESUMED, RETRYING, STARTED, Record, is_copied
from .ledger import UNHEARD, Ledger, Question
from .spent import Inside, as_usage, total, used
from .uses import FRAME, Frame, Identity, Uses

_SEQ, _POS = itemgetter(0), itemgetter(10)
_READ = itemgetter(1, 2, 3, 9, 10, 15, 16)  # kind, name, key, state, pos, next and digest of a record

BESIDE: Final = '{"beside":true}'  # the `info` of a step that runs beside other code of its run

#: What the record of a failure says of its step, and so of whom what comes after it tells that it went on.
OWN: Final = "own"  # it was of the run's own task
ALONE: Final = "alone"  # no other was in flight

APART: Final = "~"  # before the number of a step list that ran in a task of its own


def _nobody() -> Any:
    return None


def _says(record: Record, word: str) -> bool:
    return record.info is not None and f'"{word}":' in record.info


def ran_beside(record: Record) -> bool:
    """Whether the step of that record ran beside other code of its run."""
    return _says(record, "beside")


def aside(record: Record) -> Record:
    """The record as that of a step which ran beside other code of its run."""
    if ran_beside(record):
        return record
    return record._replace(info=BESIDE if record.info is None else f"{record.info[:-1]},{BESIDE[1:]}")


class Book(Uses):
    """The journal as the steps of one claim see it, and their way to write to it."""

    def __init__(self, ledger: Ledger, records: Sequence[Record]) -> None:
        super().__init__(ledger)
        self.done: dict[Identity, Record] = {}
        self.begun: dict[Identity, int] = {}  # started by an earlier claim, in which record, and not finished: in doubt
        self.until: dict[Identity, float | None] = {}  # when a wait that was begun is over
        self.reserved: dict[Identity, dict[str, Any]] = {}  # what was held back for a step that was begun
        self.resets: dict[str, int] = {}
        self.states: dict[str, tuple[int, str]] = {}  # by key: the state that lists of it have come to, and where
        self._own_states: dict[tuple[str, str | None], tuple[int, str]] = {}  # that of each list as last committed
        self.lists: dict[str, dict[tuple[str, ...], int]] = {}  # numbers of the step lists it has run, by scope
        self.beside: dict[tuple[str, ...], str] = {}  # and of those in tasks of their own, by key and names
        self.deferred: dict[str, list[Record]] = {}  # ends of steps that wait for a checkpoint, by key of their list
        self.maps: dict[str, list[str | None]] = {}  # digests of their items, of the maps it has run
        self.ended: Record | None = None
        self.reopened: float | None = None  # wall seconds at which this generation began, if it is not the first
        self.length: int = 0
        self.boundary: int = 0  # how many steps this claim has passed
        self.emitted: int = 0  # how many events since then
        self.running: int = 0  # steps in flight; see `step_left`
        self.at_rest: Callable[[], None] | None = None  # hears that the last of them has ended
        self.renames: dict[str, str] = {}
        self.lost: dict[Identity, dict[str, Any]] = {}  # held back for earlier starts that came to no end
        self._begun_apart: dict[Identity, str] = {}  # steps of lists in tasks of their own, with the list's number
        self._listed: dict[str, dict[str, list[Record]]] | None = None  # see `listed`
        self._unmatched: dict[str, tuple[dict[str, str], set[str]]] = {}  # see `unmatched`
        self._inside: Inside = Inside(self.done)
        self.carried: set[Identity] = set()  # items of maps whose start is in a record of this claim, and not yet begun
        self.questions: list[Question] = ledger.questions  # to be settled before anything else is asked
        self._ordered: list[Record] = []  # imperative steps in the order they were begun, one after the other
        self._next = 0
        self._came = self._last = -1  # positions of the last record this claim has come to, and of the last there is
        self.given_up: dict[Identity, Record] = {}  # imperative steps that failed, and whose caller went on without
        self._failures: list[Record] = []  # of which what follows tells whether their callers went on
        self._ended_tries: set[Identity] = set()
        self._failed_tries: dict[Identity, int] = {}  # and the last of each step that this claim has recorded
        self._read(records)
        if self.ended is not None and self.reopened is None:
            self.reopened = self.wall()
        #: The context that owns this book. It knows the book; held here too, each run would wait for the garbage
        #: collector.
        self.owner: Callable[[], Any] = _nobody

    def _read(self, records: Sequence[Record]) -> None:
        done, begun, ordered = self.done, self.begun, dict[Identity, Record]()
        last = carrier = None
        start = of = among = ""  # the start that the record before carries, and the key and digest beside it
        carriers: list[Record] = []
        self.length = len(records)
        for record, (kind, name, key, state, pos, carried, number) in zip(records, map(_READ, records), strict=True):
            if self._failures:
                self._went_on(record)
            if kind != "done":
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

    async def review(self, name: str, key: str, start: int) -> Any:
        """What people say of a step in doubt since the record `start`."""
        owner = self.owner()
        if owner is None:
            raise JournalMismatch(f"step {name!r} is in doubt and nobody here can be asked")
        return await owner.waits.review(name, key, start)

    def step_left(self) -> None:
        """A step is no longer in flight."""
        self.running -= 1
        if not self.running and self.at_rest is not None:
            self.at_rest()

    def about_failure(self, outer: Frame | None, others: int) -> dict[str, Any]:
        """What the record of a failure says of a step in the frame `outer`, with so many others in flight."""
        if (outer is None or outer.book is not self) and not self.is_apart():
            return {OWN: True}
        return {} if others else {ALONE: True}

    def is_beside(self) -> bool:
        """Whether the code that asks runs beside other code of its run: with a step in flight, or in a task of its own,
        whose turn may come sooner or later the next time."""
        return self.running > 0 or self.is_apart()

    def is_apart(self) -> bool:
        """Whether the code that asks runs in a task of its own: what it records does not show that the code of the run
        went on."""
        owner = self.owner()
        return owner is not None and not owner.place.is_here

    # -- what is recorded

    def is_free(self, name: str, key: str) -> bool:
        """Whether that step is not recorded, and nobody does it now."""
        return (name, key) not in self._alone and self.recorded(name, key) is None

    def recorded(self, name: str, key: str) -> Record | None:
        """The record of that step, under its present or its former name."""
        record = self.done.get((name, key))
        if record is None and name in self.renames:
            record = self.done.get((self.renames[name], key))
        return record

    def former(self, name: str, key: str) -> str:
        """The name under which this step is known to the journal, so that its id stays the same."""
        old = self.renames.get(name)
        return old if old is not None and ((old, key) in self.done or (old, key) in self.begun) else name

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
        failure = self.given_up.get((self.renames.get(name, name), key)) or self.given_up.get((name, key))
        if failure is not None:
            raise StepExecutionError(name, json.loads(failure.info or "{}")["error"], failure.attempt)

    def match(self, name: str, record: Record | None) -> None:
        """Refuse an imperative step that is not the one recorded at this place.

        Steps that ran beside others have no place of their own and are matched by identity alone.
        """
        if self._next >= len(self._ordered):
            return
        expected = self._ordered[self._next]
        if record is expected:
            self._next += 1
            return
        if record is not None and ran_beside(record):
            return
        if self.is_beside():
            if record is not None:
                self._ordered.remove(record)
            return
        raise JournalMismatch(
            f"the journal has step {expected.name!r} at this place, the code now asks for {name!r}: "
            f"restore the old order, or say ctx.renamed({expected.name!r}, {name!r}) before it",
            recorded=expected.name,
            found=name,
        )

    @property
    def ahead(self) -> bool:
        """Whether there are records that this claim has not come to yet."""
        return self._came < self._last

    def passed(self, *recorded: Record) -> None:
        """Steps have their results, from these records, or one has it from a new one: later events belong to the next
        stretch of code."""
        frame = FRAME.get()
        if frame is None or frame.book is not self:  # what runs inside of a step is not passed again on a resume
            self.boundary += len(recorded) or 1
            self.emitted = 0
        if recorded and (usage := self._inside.used(recorded, self.ledger.claim_id)):
            self.owner().budget.recalled(usage)
        # A recorded step answers for those that ran inside it, which nobody asks for any more.
        self._came = max(self._came, *map(_SEQ, recorded)) if recorded else self._last

    # -- writing

    def noted(
        self, name: str, key: str, result: str | None, info: str | None = None, mark: str | None = None
    ) -> Record:
        """A DONE record that stands for no events: of a wait, a child, a recorded value."""
        ledger = self.ledger
        record = Record(
            ledger.next_seq(), DONE, name, key, 1, ledger.claim_id, self.wall(), result, info=info, digest=mark
        )
        return aside(record) if self.is_apart() else record

    def defer(self, records: Sequence[Record]) -> None:
        """Have ends of steps wait for the next checkpoint of their list: they did not land with this one."""
        for record in reversed(records):
            self.deferred.setdefault(record.key, []).insert(0, record)

    async def write(self, records: Sequence[Record], waited: Sequence[Record], outer: Frame | None) -> None:
        """Append these ends of steps in the step `outer`, of which some had `waited` for a checkpoint.

        `attempts` has the same in place: it costs each step less.
        """
        try:
            if self.questions:
                records = await self.last(records)
            await self.ledger.record(records)
        except BaseException as error:  # noqa: BLE001 - raised there
            await self.not_written(records, waited, error, outer)
        else:
            last = records[-1]
            self.done[last.name, last.key] = last

    async def not_written(
        self, records: Sequence[Record], waited: Sequence[Record], error: BaseException, outer: Frame | None
    ) -> None:
        """The commit of these ended in `error`: raise that, unless they are in the journal after all.

        Where there was no answer it is a question, and the next use of their names is theirs. What was refused has not
        ended, and what had waited for it waits for another one.
        """
        if isinstance(error, StorageBusy) and error.tries == 1 and self.ledger.is_newest(records):
            try:
                await self.ledger.append(*records)
                return self.take(records)
            except BaseException as later:  # noqa: BLE001 - raised below
                error = later
        if not isinstance(error, UNHEARD):
            self.defer(waited)
            raise error
        self.questions.append(Question(records))
        try:
            if isinstance(error, asyncio.CancelledError) or self.ledger.is_newest(records):
                raise error  # it was repeated as often as is worth it
            await self.settle()
        except BaseException:
            self.ask_again(records[-1].name, records[-1].key, records[-1].digest, outer)
            raise

    async def tell(self, record: Record, queue: Sequence[Op] = ()) -> bool:
        """Append a record that is no end of a step, with what must land in the queue together with it.

        Where that was not answered and others have taken later places, it is looked for behind them. False where it
        is there, and on an engine of its own the queue may not have its part.
        """
        if record.kind in (RETRYING, FAILED):
            self._failed_tries[record.name, record.key] = record.attempt
        try:
            await self.ledger.append(record, queue=queue)
            return True
        except StorageBusy:
            if self.ledger.is_newest((record,)):
                raise  # it was repeated as often as is worth it
        if await self.ledger.landed_at_last(record) is not None:
            await self.ledger.tell(record)
            return False
        await self.ledger.append(*self.placed((record,)), queue=queue)
        return True

    async def last(self, records: Sequence[Record]) -> Sequence[Record]:
        """The same behind all that is in question."""
        await self.settle()
        return self.placed(records)

    async def settle(self) -> None:
        """Find out of the commits that nobody heard of whether they landed, and write again what did not.

        So whoever asks for a step that has run is answered, and nothing is recorded behind what it was built on.
        """
        async with self.only("", "questions"):
            while self.questions:
                question = self.questions[0]
                records = question.records
                landed = await self.ledger.landed_at_last(records[-1])
                if landed is not None:
                    self.take(records := (*records[:-1], landed))
                    if not question.noted:
                        await self.ledger.tell(*records)
                elif question.whole and (records := self.late(records)):
                    self.questions[0] = question._replace(records=records)
                    await self.ledger.append(*records, noted=question.noted)
                    self.take(records)
                del self.questions[0]

    def late(self, records: Sequence[Record]) -> Sequence[Record]:
        """These in places behind others that were to come after them: there they are as of steps beside those, and a
        start whose end or failure is there is none any more."""
        failed = self._failed_tries
        started = [
            each
            for each in records
            if each.kind != STARTED or (each[2:4] not in self.done and each.attempt > failed.get(each[2:4], 0))
        ]
        return [aside(each) if each.kind in (STARTED, DONE) else each for each in self.placed(started)]

    async def conclude(self, error: BaseException | None) -> None:
        """Settle all questions at the end of an attempt, which came to `error`: its result was built on what they are
        of, and the next one need not do that again."""
        if self.questions and (error is None or isinstance(error, Exception)):
            try:
                await self.settle()
            except Exception:
                if error is None:
                    raise
