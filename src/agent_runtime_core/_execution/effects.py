"""Guarded steps: their effect is not repeated silently, by the same run or by another run of the lineage of forks.

A step is guarded if its `on_in_doubt` is not "retry". A guarded step whose function was entered is done or in doubt,
until its own function raised an ordinary error. An error that is raised after a cancellation of the step was requested
is no ordinary error, nor is a result that cannot be stored, a time limit, or a deletion.

So the record of its start puts the step in doubt, in the journal and in `JournalView.started`. Only two records end
that: DONE, and RETRYING or FAILED for an ordinary error. Its effect row in the state store is written in the commits
that record its start and its end. So if two runs reach the step at the same time, only one run starts it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, Protocol

from .._core.codec.json import arguments_digest, encode
from .._core.event_types import EventType
from .._core.ids import child_run_id, step_id
from .._core.timeouts import cancellations, replaced_cancellation
from .._engines.base import Op
from .._engines.payloads import UNREADABLE, Undecoded, why_unreadable
from .._journal.record import STARTED, Record, is_copied
from ..errors import EffectAlreadyDone, RedactionFailed, StepInDoubt, ToolTimeout, UnserialisableResult
from ..queue.base import RunQueue
from ..queue.records import RunRow
from ..state.base import APPROVED, BEGUN, CHILD, HAPPENED, MEMBER, TAKEN, EffectRow, StateStore, rows_of_other_runs
from .claim_writer import ClaimWriter
from .journal_view import is_approval
from .run_writer import ChildCall
from .step import StepOptions
from .step_journal import RunJournal, StepJournal
from .step_keys import LineageKeys

FORKED_FROM: Final = "forked_from"  # in the metadata of a fork

#: How to resume a run with a step in doubt.
CHECK: Final = "Check whether it took effect, then resume with on_in_doubt='retry', 'review' or a check function"

CONFIRM: Final = (
    "If nothing more had happened, run agent-runtime restored RUN --confirm. Otherwise resume with "
    "on_in_doubt='review' or a check function"
)

RESULT_MISSING: Final = (
    "The step has happened, and is in doubt because its result is missing. Resume with on_in_doubt='review' or a check "
    "function, which supply the result"
)

_NO_ARGUMENTS: Final = arguments_digest()


class Guarded(Protocol):
    """What identifies the effect of a step."""

    name: str
    key: str
    digest: str | None
    start_info: dict[str, Any] | None
    options: StepOptions
    errors_before: Sequence[dict[str, Any]]


class TimeLimitPassed(TimeoutError):
    """The time limit of a guarded step was reached, so its outcome is unknown; the text names the limit."""


def effect_row(journal: RunJournal, name: str, key: str, digest: str, status: str) -> EffectRow:
    """Return the row of this run for that step or wait."""
    writer = journal.writer
    return EffectRow(journal.view.origin, f"{name}\t{key}", digest, writer.run_id, status, arrival=writer.arrival)


def membership(origin: str, run_id: str) -> list[Op]:
    """Return operations that keep the rows of a lineage as long as this run exists.

    The deletion of the run finds the lineage by the second row.
    """
    rows = [EffectRow(origin, "", "", run_id, MEMBER)]
    if run_id != origin:
        rows.append(EffectRow(run_id, "", "", run_id, MEMBER, origin))
    return [Op("effect.put", (each,)) for each in rows]


def _adoption(origin: str, child: str) -> list[Op]:
    """Return operations that keep the rows of a child's lineage as long as the lineage of its caller exists.

    A fork of the caller may call the child again. The end of the caller's lineage finds the other lineage by the second
    row.
    """
    rows = (EffectRow(child, "", "", origin, MEMBER), EffectRow(origin, "", CHILD, child, CHILD))
    return [Op("effect.put", (each,)) for each in rows]


async def stored_origin(state: StateStore, run_id: str) -> str:
    """Return the first run of the lineage that a run was recorded to belong to; itself if nothing is recorded."""
    for each in await state.effects(run_id, "", ""):
        if each.run_id == run_id and each.result is not None:
            return each.result
    return run_id


async def is_fork(state: StateStore, row: RunRow) -> bool:
    """Return whether a run is a fork. A process that cannot read its metadata looks for its lineage."""
    if why_unreadable("metadata", row.metadata) is None:
        return FORKED_FROM in row.metadata
    return await stored_origin(state, row.run_id) != row.run_id


async def has_joined(state: StateStore, run_id: str) -> bool:
    """Return whether a child run is recorded to belong to its lineage."""
    return any(each.run_id == run_id for each in await state.effects(run_id, "", ""))


async def join_lineage(journal: RunJournal) -> None:
    """Record that a child run belongs to its lineage, and that the lineage is kept while the lineage of its caller is.

    A child that a fork called is in the lineage of the child that the first run called. Only child runs read
    their parent, at their first guarded step or approval.
    """
    if journal.writer.parent_id is None:
        return
    async with journal.keys.exclusive("", "lineage"):  # concurrent steps need the lineage too
        if (parent_id := journal.writer.parent_id) is not None:
            await _join_lineage(journal, parent_id)
            journal.writer.parent_id = None


async def _join_lineage(journal: RunJournal, parent_id: str) -> None:
    writer, view = journal.writer, journal.view
    run_id, caller_origin = writer.run_id, parent_id
    parent = await writer.queue.row(parent_id)
    if parent is None:
        # Its deletion recorded the lineages of its children, unless no other run could call them again.
        view.origin = await stored_origin(writer.state, run_id)
        return
    in_lineage = parent.parent_id is not None or await is_fork(writer.state, parent)
    try:
        records = await writer.state.records(parent_id)
    except UNREADABLE:  # it can be deleted without its key, and the child does not run here
        if in_lineage:
            raise
        records = []
    call = next((each for each in records if each.kind == STARTED and f'"{run_id}"' in (each.info or "")), None)
    if in_lineage:
        caller_origin = await _join_lineage_of_caller(journal, parent, records, call)
    if call is not None and call.key.startswith("c:"):
        writer.call = _child_call(journal, caller_origin, parent_id, records, call)
    ops = [*_adoption(caller_origin, view.origin), *membership(view.origin, run_id)]
    if has_first := view.origin != run_id and await writer.queue.row(view.origin) is not None:
        ops += membership(view.origin, view.origin)
    await writer.state.commits.commit(None, ops)
    await leave_if_deleted(writer.queue, writer.state, caller_origin, parent_id)
    if has_first:
        await leave_if_deleted(writer.queue, writer.state, view.origin, view.origin)


def _child_call(journal: RunJournal, origin: str, caller: str, records: Sequence[Record], call: Record) -> ChildCall:
    """Return which call of its caller a child run is, by the journal of the caller."""
    text = journal.writer.input
    names = [*dict.fromkeys((call.name, *json.loads(call.info or "{}").get("names", ())))]
    copied = {
        str(child_run_id(step_id(origin, each.name, each.key)))
        for each in records
        if is_copied(each) and each.name in names and json.loads(each.result or "{}").get("status") == "succeeded"
    }
    readable = why_unreadable("input", text) is None  # else the run can be deleted, and does not run here
    input_digest = arguments_digest(json.loads(text)) if readable else None
    return ChildCall(caller, origin, names, input_digest or "", copied, journal.view.origin)


async def _join_lineage_of_caller(
    journal: RunJournal, parent: RunRow, records: Sequence[Record], call: Record | None
) -> str:
    """Set the lineage of a child run from the journal of its caller, and return the lineage of the caller."""
    writer, view = journal.writer, journal.view
    caller = StepJournal(ClaimWriter(parent, writer.queue, writer.bus, writer.state, writer.clock), records)
    await join_lineage(caller)
    if call is not None and caller.view.origin != parent.run_id:
        view.origin = str(child_run_id(step_id(caller.view.origin, call.name, call.key)))
        view.effects_policy = caller.view.effects_policy
        view.spent_approvals = [] if _is_approved(caller) else caller.view.spent_approvals
    return caller.view.origin


async def _marked_runs(journal: RunJournal) -> list[str]:
    """Return which of a run, its callers and the first run of its lineage had steps that the copy of a store may lack.

    A store is marked while no worker executes its runs. So it is enough to look once under each claim.
    """
    writer, found = journal.writer, list[str]()
    rows = [] if journal.view.origin == writer.run_id else [await writer.queue.row(journal.view.origin)]
    caller = writer.caller_id
    while caller is not None and (row := await writer.queue.row(caller)) is not None:
        rows.append(row)
        caller = row.parent_id
    if writer.mail_seq:
        found.append(writer.run_id)
    found += [row.run_id for row in rows if row is not None and row.mail_seq]
    return [each for each in found if await writer.queue.may_lack_steps(each)]


async def leave_if_deleted(queue: RunQueue, state: StateStore, origin: str, run_id: str) -> None:
    """Take back the membership of a run that was deleted in the meantime, since no later deletion does."""
    if await queue.row(run_id) is None:
        await state.commits.commit(None, [Op("effect.leave", (origin, run_id))])


def _is_approved(journal: RunJournal) -> bool:
    """Return whether the run contains an approval that was not copied from another run."""
    return any(is_approval(record) and not is_copied(record) for record in journal.view.completed.values())


async def other_rows(journal: RunJournal, row: EffectRow) -> list[EffectRow]:
    """Return the rows that other runs of the lineage have of the same effect, oldest first."""
    rows = await journal.writer.state.effects(*row[:3])
    return rows_of_other_runs(rows, row)


def _digest(work: Guarded) -> str:
    tool = (work.start_info or {}).get("tool")
    if tool is not None:  # in a fork, the model may request another call in the same position
        return arguments_digest(tool["name"], tool["args"]) or ""
    return "" if work.key.startswith("x:") else work.digest or ""  # in a list, it is the number of the step list


class GuardedStep:
    """A guarded step of one run, and the rows that other runs of the lineage have of it."""

    def __init__(self, journal: RunJournal, work: Guarded) -> None:
        self.journal: RunJournal = journal
        self.name: str = work.name
        self.identity: tuple[str, str] = (work.name, work.key)
        started = work.start_info or {}
        self.tool: dict[str, Any] | None = started.get("tool")
        self.digest: str = _digest(work)
        self.has_arguments: bool = self.digest not in ("", _NO_ARGUMENTS)
        if (lineage := journal.lineage_keys) is None:
            lineage = journal.lineage_keys = LineageKeys(journal.keys, journal.view)
        self._lineage: LineageKeys = lineage
        #: Under which the lineage knows it.
        self.key: str = started.get("effect") or lineage.take(work.name, work.key, self.digest)
        self.other_rows: list[EffectRow] = []
        self.unapproved: list[dict[str, str]] = []
        self._repeats_doubt: bool = work.options.repeats_doubt
        self._is_called_again: bool = bool(work.errors_before)
        self.start: int = -1  # the number of the record of the last start of this claim
        self._cancelling: int = 0  # cancellations of the task that were requested before the function was entered

    # -- done, failed or in doubt

    def doubted_start(self) -> int | None:
        """Return the number of the record of the last start if the step is in doubt, else None."""
        start = self.journal.view.started.get(self.identity)
        if start is not None:
            self.journal.doubts_met.add(self.identity)
        return start

    async def may_have_happened(self) -> bool:
        """Return whether the step may be missing in the copy from which the store was restored.

        That is so for each step without a record, until a person confirms for the run that the copy is complete.
        """
        journal, queue = self.journal, self.journal.writer.queue
        if journal.restored is None:
            journal.restored = await _marked_runs(journal)
        return any([await queue.may_lack_steps(each) for each in journal.restored])

    def enter(self) -> None:
        """Put the step in doubt, because its function is entered now."""
        self.journal.view.started[self.identity] = self.start
        self._cancelling = cancellations()

    @property
    def is_shared(self) -> bool:
        """Whether an earlier call used the key of this call, or of a step around it, perhaps with another effect."""
        found = self.journal.view.errors_before
        scope = self.journal.keys.scope() if found else None
        while scope is not None and (scope.name, scope.key) not in found:
            scope = scope.outer
        return self._is_called_again or scope is not None or self.identity in found

    def share(self) -> None:
        """Leave the row as it is if the step is shared: no run of the lineage may repeat it or take its result."""
        if self.is_shared:
            self.journal.writer.effects.pop(self.identity, None)

    def left(self) -> None:
        """Give the place of the step in its lineage to the next equal call, unless it is done or in doubt."""
        view = self.journal.view
        if self.identity in view.completed or self.identity in view.started:
            return
        if self.start < 0 or not self.is_shared:  # else the earlier call may have had its effect
            self._lineage.release(self.identity)

    @staticmethod
    def time_limit(seconds: float) -> TimeLimitPassed:
        """Return the error for a time limit of so many seconds."""
        return TimeLimitPassed(f"it took longer than its time limit of {seconds:g} s")

    def settled(self) -> None:
        """End the doubt: the result of the step, or an ordinary error of its function, is recorded."""
        self.journal.view.started.pop(self.identity, None)

    def left_in_doubt(self, error: Exception, *, returned: bool) -> BaseException | None:
        """Decide whether an attempt that raised `error` leaves the step in doubt.

        Args:
            error: What the attempt raised.
            returned: The function returned, so the error is about its result.

        Returns:
            The error to raise if the step is in doubt; None if its function raised an ordinary error.
        """
        if cancellations() > self._cancelling:
            return replaced_cancellation(error)
        if not returned and not isinstance(error, TimeLimitPassed | ToolTimeout):
            if not self._lineage.is_last(self.identity):
                # Without its row, another run would look for fewer equal effects than have happened.
                self.journal.writer.effects.pop(self.identity, None)
            return None
        if self._repeats_doubt:  # the run retries; another run of the lineage must not
            self.journal.writer.effects.pop(self.identity, None)
            return None
        if not returned:
            return StepInDoubt(self.name, f"it was cut off, and its outcome is unknown: {error}. {CHECK}")
        if not isinstance(error, UnserialisableResult | RedactionFailed):
            reason = f"it cannot be decoded: {type(error).__name__}: {error}"
            error = UnserialisableResult("$", reason, step_name=self.name)
        error.args = (f"{error}. {RESULT_MISSING}",)
        return error

    # -- other runs

    async def find(self) -> None:
        """Find the effect row of the step, which may have had another name in an earlier run."""
        journal = self.journal
        await join_lineage(journal)
        self.row: EffectRow = effect_row(journal, self.name, self.key, self.digest, BEGUN)
        for old in journal.view.former_names(self.name):
            former = effect_row(journal, old, self.key, self.digest, BEGUN)
            if await journal.writer.state.effects(*former[:3]) or await self._calls(former):
                self.row = former
                break

    async def check_approval(self) -> None:
        """Find out whether the runs that this run was forked from used all of its approvals."""
        journal = self.journal
        if (
            journal.view.spent_approvals
            and journal.view.effects_policy in ("refuse", "ask")
            and not _is_approved(journal)
        ):
            await self.check_others()
            self.unapproved = journal.view.spent_approvals

    async def check_others(self) -> None:
        """Read the rows that other runs have of this effect."""
        call = self.journal.writer.call
        if call is None:
            self.other_rows = await other_rows(self.journal, self.row)
        else:
            await self._check_calls(call)

    async def _calls(self, row: EffectRow) -> list[EffectRow]:
        """Return the rows by which calls of this child, with any number, have this effect."""
        state, call, found = self.journal.writer.state, self.journal.writer.call, list[EffectRow]()
        if call is not None:
            for name in call.names:
                found += await state.effects(call.origin, call.key(name, row), row.digest)
        return found

    async def _check_calls(self, call: ChildCall) -> None:
        """Read the rows of this effect in all calls of this child.

        The caller may call the child less often than the run that it was forked from, because no call fails. Then its
        calls get other numbers. An effect that another run started is repeated or reused by one call of this caller,
        which enters it in the lineage of that effect. A call whose lineage is taken so uses the other lineage.
        """
        writer, row = self.journal.writer, self.row
        taken = dict.fromkeys(call.copied, "")  # lineages, with the lineages of the calls of this caller that took them
        same_input = {row.origin: True}
        self.other_rows = []
        for each in await self._calls(row):
            if each.run_id == writer.run_id:
                continue
            if isinstance(each.result, Undecoded):
                self.other_rows = [each]
                continue
            origin, caller, input_digest, lineage = json.loads(each.result or "")
            if caller == call.caller:
                taken[origin] = lineage
            same_input[origin] = same_input.get(origin, False) or input_digest == call.input
        free = {**taken}
        while lineage := free.pop(row.origin, ""):
            row = self.row = row._replace(origin=lineage)
        if row.origin in taken:  # the lineages of calls that were deleted and made again
            self.row = row._replace(status=TAKEN)
        for origin, is_equal in same_input.items():
            if origin not in taken and (is_equal or self.has_arguments) and not self.other_rows:
                found = await other_rows(self.journal, row._replace(origin=origin))
                # A result is not reused for another input.
                self.other_rows = found if is_equal else [each._replace(digest="") for each in found]

    async def admit(self) -> EffectRow | None:
        """Decide by the policy of the run whether the step may start.

        Returns:
            None if it may start. Otherwise the row whose result is reused.

        Raises:
            EffectAlreadyDone: It may not start.
        """
        writer, row = self.journal.writer, self.row
        if self.other_rows:
            other = max(self.other_rows, key=lambda each: (each.status == HAPPENED, each.t))
            if await self._allowed(other.run_id, other.status, {}):
                row = row._replace(origin=other.origin, status=TAKEN)
                await self._publish("repeated", other.run_id, other.status)
            elif self._can_reuse(other):
                await self._publish("reused", other.run_id, other.status)
                writer.effects.pop(self.identity, None)
                if writer.call is not None:  # otherwise the next call of the child would reuse it too
                    writer.effects[self.identity] = row._replace(origin=other.origin, status=TAKEN)
                return other
            else:
                await self._reject(other.run_id, other.status)
        elif self.unapproved:
            approval = self.unapproved[-1]
            about = {"approval": approval["name"]}
            if not await self._allowed(approval["run_id"], APPROVED, about):
                await self._reject(approval["run_id"], APPROVED, about)
        writer.effects[self.identity] = row
        return None

    def _can_reuse(self, other: EffectRow) -> bool:
        """Return whether the run's policy is to use the result of that row, and the arguments are the same.

        A row whose run was erased contains no result.
        """
        wanted = self.journal.view.effects_policy == "reuse" and other.status == HAPPENED
        if not wanted or other.digest != self.digest or other.result is None:
            return False
        if isinstance(other.result, Undecoded):
            raise other.result.error
        return True

    async def _allowed(self, run_id: str, status: str, about: dict[str, Any]) -> bool:
        """Return whether the step may run again: by the policy, or after asking for approval."""
        journal = self.journal
        if journal.view.effects_policy != "ask":
            return journal.view.effects_policy == "repeat"
        own_step_id = step_id(journal.writer.run_id, *self.identity)
        details = {"step_name": self.name, "step_id": own_step_id, "run_id": run_id, "status": status, **about}
        if (tool := self.tool) is not None:
            details |= {"tool_name": tool["name"], "tool_args": tool["args"], "tool_call_id": tool["id"]}
        answer = await journal.control.approve(f"repeat:{self.name}", details, f"{own_step_id}:{run_id}")
        return bool(answer.get("approved") if isinstance(answer, dict) else answer)

    async def _publish(self, action: str, run_id: str, status: str, about: dict[str, Any] | None = None) -> None:
        """Publish what happened to the step, once for each other run that it refers to."""
        writer, own_step_id = self.journal.writer, step_id(self.journal.writer.run_id, *self.identity)
        about = {
            "step_name": self.name,
            "step_id": own_step_id,
            "action": action,
            "run_id": run_id,
            "status": status,
        } | (about or {})
        kind, now = EventType.STEP_EFFECT.value, writer.clock.wall()
        await writer.emit([(f"effect:{own_step_id}:{action}:{run_id}", kind, encode(about), now)])

    async def _reject(self, run_id: str, status: str, about: dict[str, Any] | None = None) -> None:
        await self._publish("refused", run_id, status, about)
        other = await self.journal.writer.queue.row(run_id)
        run = (other.run_key if other is not None else None) or run_id
        step = f"step {self.name!r}" if self.tool is None else f"call of tool {self.tool['name']!r}"
        where = f"run {run!r}, which shares its history with this run"
        effects = '"ask" or "repeat"' if status == BEGUN else '"reuse", "ask" or "repeat"'
        fix = f"To allow it, fork again with effects={effects}"
        if run_id == self.journal.writer.run_id:
            where = "a run with this id, which was deleted"
            fix = "To allow it, use another run id, or another key= for a child run"
        if about:
            reason = f"{step} must have an approval of this run, got {about['approval']!r}, which run {run!r} used"
        elif status == HAPPENED:
            reason = f"{step} was already done in {where}"
        else:
            reason = f"{step} was started in {where}; its outcome is unknown"
        raise EffectAlreadyDone(self.name, f"{reason}. {fix}.", run_id, status)


async def refuse_again(journal: RunJournal, work: Guarded) -> None:
    """Raise EffectAlreadyDone if another run did the step, for example because its code continued after that error.

    Called for a step that the journal does not have in this position.
    """
    step = GuardedStep(journal, work)
    try:
        await step.find()
        await step.check_others()
        await step.check_approval()
        if (step.other_rows or step.unapproved) and journal.view.effects_policy == "refuse":
            journal.mismatch = None
            await step.admit()
    finally:
        step.left()
