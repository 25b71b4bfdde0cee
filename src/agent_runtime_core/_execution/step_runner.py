"""One step, performed: its tries, their records, and what to do when nobody knows how an earlier try ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final

from .._core.codec.json import MAX_BYTES, decode, encode
from .._core.context_vars import restore
from .._core.timeouts import with_time_limit
from .._engines.base import Op
from .._journal.record import FAILED, RETRYING, Record
from ..errors import (
    InvalidArgument,
    LeaseLost,
    Postponed,
    RunFailed,
    StepExecutionError,
    StepInDoubt,
    UnserialisableResult,
    brief,
    deciding_error,
    holds,
)
from ..state.base import EffectExists
from .effects import GuardedStep
from .journal_view import CONCURRENT_INFO
from .run_writer import StepWriter
from .step_failure import cause_info, failure_info
from .step_function import call, step_function
from .step_journal import RunJournal, StepJournal, has_run
from .step_policy import NEVER_RETRIED, AlreadyDone, Policy
from .step_scope import CURRENT_STEP, StepScope


@dataclass(slots=True, eq=False, repr=False)
class StepCall:
    """What `perform` needs to know of a step.

    Attributes:
        call: Makes one attempt; it receives the number of the attempt.
        begun: An earlier record of this claim carries its start.
        started: What its STARTED records tell besides.
        bare: Its last error is raised as it is.
        lazy: Its record may wait for the next one. After a crash in between it runs again, and nothing was built on it.
        settled: Makes the result of what a reviewer says of it when it is in doubt.
        noted: The record of its start, while that may still wait to be written.
        state: What the list begins with whose first step it is, where that has to be told.
    """

    name: str
    key: str
    call: Callable[[int], Awaitable[Any]]
    policy: Policy
    _: KW_ONLY
    encode: Callable[[object], str] = encode
    decode: Callable[[str], object] = decode
    position: int = 0
    total: int = 0
    description: str | None = None
    digest: str | None = None
    info: str | None = None
    start_recorded: bool = False
    no_events: bool = False
    start_info: dict[str, Any] | None = None
    raise_unwrapped: bool = False
    defer_record: bool = False
    adapt_review_result: Callable[[Any], Any] | None = None
    start_record: Record | None = None
    state: str | None = None


#: The records to write for (work, encoded result, attempt, ms): its DONE record, with what waited for it, or none yet.
Seal = Callable[[StepCall, str, int, int], Sequence[Record]]


def run_step(journal: StepJournal[StepWriter], work: StepCall, seal: Seal) -> Coroutine[Any, Any, Any]:
    """Run a step that has no record yet until it has one; its result as a resumed run would read it.

    StepExecutionError after the last try, StepInDoubt or EffectAlreadyDone where a policy says so.
    """
    if journal.writer.closed_error is not None:
        raise journal.writer.closed_error(work.name)
    start = (
        journal.view.started.pop((work.name, work.key), None)
        if journal.view.started and not work.start_recorded
        else None
    )
    if work.policy.on_in_doubt != "retry" and has_run(journal):
        return _run_guarded(journal, work, seal, start)
    return _run_tries(journal, work, seal, start is not None)


def result_not_serializable(name: str, error: UnserialisableResult) -> UnserialisableResult:
    """The refusal of a result as that of the step of that name, with the way out that a step has."""
    more = error.max_bytes is not None and error.max_bytes < MAX_BYTES
    out = f", or let the step have more with max_result_bytes=, up to {MAX_BYTES:,}" if more else ""
    return UnserialisableResult(error.path, error.reason + out, max_bytes=error.max_bytes, step_name=name)


async def _run_guarded(journal: RunJournal, work: StepCall, seal: Seal, start: int | None) -> Any:
    """Run a step whose effect must not be repeated silently, or find its result by the policies for that.

    `start` is the record of an earlier start, if the step is in doubt.
    """
    step = GuardedStep(journal, work)
    await step.find()
    if start is None:
        await step.check_approval()
    else:
        journal.writer.effects[step.identity] = step.row
        if (known := await _apply_in_doubt_policy(journal, work, start, step)) is not None:
            try:
                text = work.encode(
                    known.result if work.adapt_review_result is None else work.adapt_review_result(known.result)
                )
            except UnserialisableResult as error:
                raise result_not_serializable(work.name, error) from None
            return await _record_completion(journal, work, seal, text)
        await step.check_others()
    while True:
        if (done := await step.admit()) is not None:
            # With a start, as readers of events expect; its row is that of the other run.
            return await _record_completion(
                journal, work, seal, done.result or "null", _start_record(journal, work, 1, False)
            )
        journal.running_steps += 1
        try:
            await journal.regain_slot()
            await _record_start(journal, work, 1, start is not None)
            break
        except EffectExists:
            await step.check_others()
        finally:
            journal.step_finished()
    work.start_recorded = True
    return await _run_tries(journal, work, seal, start is not None)


async def _record_completion(journal: RunJournal, work: StepCall, seal: Seal, text: str, *started: Record) -> Any:
    """Record a result that running the step did not give."""
    if records := seal(work, text, 1, 0):
        await journal.write((*started, *records), records[:-1], CURRENT_STEP.get())
    return work.decode(text)


async def _run_tries(journal: StepJournal[StepWriter], work: StepCall, seal: Seal, doubtful: bool) -> Any:
    boot, timeout = journal.writer.clock.boot, work.policy.timeout
    outer = CURRENT_STEP.get()
    frame = StepScope(journal.token, work.name, work.key, 1, outer)
    journal.running_steps += 1
    token = CURRENT_STEP.set(frame)
    try:
        if journal.slot_released:
            await journal.regain_slot()
        if not work.start_recorded:
            await _record_start(journal, work, 1, doubtful)
        while True:
            attempt, since = frame.attempt, boot()
            try:
                if timeout is None:
                    value = await work.call(attempt)
                else:
                    value = await with_time_limit(work.call(attempt), timeout, f"step {work.name!r}")
                try:
                    text = work.encode(value)
                except UnserialisableResult as error:
                    raise result_not_serializable(work.name, error) from None
                # Before anything is awaited: whoever holds the value may go on changing it. And in here: what cannot
                # be read again is no result.
                handed = _as_read(work, value, text)
                records = seal(work, text, attempt, int((boot() - since) * 1000))
                break
            except Exception as error:  # noqa: BLE001 - raised by what is done of it, or tried again
                await _record_failure(journal, work, attempt, error)
                # What is recorded inside answers for the next try as well, as it would on a resume. A frame of its own:
                # tasks that this try left behind go on counting in theirs.
                frame = StepScope(journal.token, work.name, work.key, attempt + 1, outer)
                CURRENT_STEP.set(frame)
                await _record_start(journal, work, attempt + 1, doubtful)
        work.start_record = None
        if records:
            await journal.write(records, records[:-1], outer, lazy=work.defer_record)
    finally:
        journal.step_finished()
        restore(CURRENT_STEP, token)
    return handed


#: Kinds of values that are as their text says, and that nobody who holds on to one can change.
IMMUTABLE: Final = frozenset({str, int, float, bool, type(None)})
_all_plain = IMMUTABLE.issuperset


class _NotPlain(Exception):
    """There is something in the value that only its encoding can copy."""


def _as_read(work: StepCall, value: Any, text: str) -> Any:
    """The result as a resumed run would read it: of a plain tree, a copy is what decoding its text would give."""
    if work.decode is not decode:
        return work.decode(text)
    try:
        return _copy(value)
    except _NotPlain:
        return decode(text)


def _copy(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        made = value.copy()
        if not _all_plain(map(type, made.values())):
            for key, item in made.items():
                made[key] = _copy(item)
        return made
    if kind is list:
        return value.copy() if _all_plain(map(type, value)) else [_copy(item) for item in value]
    if kind in IMMUTABLE:
        return value
    raise _NotPlain


async def _record_start(journal: StepJournal[StepWriter], work: StepCall, attempt: int, doubtful: bool) -> None:
    if work.policy.on_in_doubt != "retry":
        await journal.publish(_start_record(journal, work, attempt, doubtful))
    elif (
        work.start_info or not work.no_events
    ):  # else nobody would be told of it, and nothing depends on whether it began
        work.start_record = record = _start_record(journal, work, attempt, doubtful)
        await journal.writer.buffer(record)


def _start_record(journal: StepJournal[StepWriter], work: StepCall, attempt: int, doubtful: bool) -> Record:
    about: dict[str, Any] = {} if work.start_info is None else {**work.start_info}
    if work.description is not None:
        about["description"] = work.description
    if doubtful and attempt == 1:
        about["in_doubt"] = True
    if work.info == CONCURRENT_INFO:
        about["beside"] = True
    return journal.records.started(
        work.name, work.key, attempt=attempt, pos=work.position, total=work.total, tries=work.policy.retries + 1,
        info=about, digest=work.digest, quiet=work.no_events, state=work.state,
    )  # fmt: skip


async def _record_failure(journal: StepJournal[StepWriter], work: StepCall, attempt: int, error: Exception) -> None:
    """Record a failed try and wait for the next one, or raise."""
    delay = work.policy.delay(error, attempt, journal.writer.clock.random)
    cause = deciding_error(error)
    about = failure_info(cause)
    if isinstance(cause, LeaseLost):
        raise error
    # Without a journal, no runner resumes the run later.
    postponed = cause.after if isinstance(cause, Postponed) and journal.writer.has_journal else None
    if delay is not None or postponed is not None:
        about["retry_delay"] = delay if postponed is None else postponed
    ends = delay is None and (postponed is None or work.raise_unwrapped)  # of a bare one, the code may go on without it
    if ends and work.key[:2] in ("s:", "k:") and not holds(error, NEVER_RETRIED):
        frame = CURRENT_STEP.get()
        about |= cause_info(error) | journal.about_failure(
            None if frame is None else frame.outer, journal.running_steps - 1
        )
    record: Record = journal.records.failed(
        FAILED if delay is None and postponed is None else RETRYING,
        work.name,
        work.key,
        attempt=attempt,
        pos=work.position,
        total=work.total,
        tries=work.policy.retries + 1,
        info=about,
        quiet=work.no_events,
    )
    await journal.publish(record)
    if postponed is not None:
        raise error  # the run is taken up again when it is time
    if delay is not None:
        await journal.writer.clock.sleep(delay)
        return
    if work.raise_unwrapped or isinstance(error, StepExecutionError) or holds(error, NEVER_RETRIED):
        raise error
    raise StepExecutionError(work.name, about["error"], attempt) from error


async def _apply_in_doubt_policy(
    journal: RunJournal, work: StepCall, start: int, step: GuardedStep
) -> AlreadyDone | None:
    """What the policy says of a step that was begun, with the record `start`, and never ended; None: run it again."""
    policy = work.policy.on_in_doubt
    if policy == "fail":
        raise StepInDoubt(
            work.name, "it was begun by an earlier process and its end was not recorded (on_in_doubt='fail')", 1
        )
    if policy == "review":
        try:
            answer = await journal.control.review(work.name, work.key, start, lambda told: work.decode(encode(told)))
        except RunFailed:  # a person knows that it had no effect
            await journal.writer.write([Op("effect.drop", step.row[:4])])
            raise
    else:
        assert callable(policy)
        journal.running_steps += 1
        token = CURRENT_STEP.set(StepScope(journal.token, work.name, work.key, 1, CURRENT_STEP.get()))
        try:
            await journal.regain_slot()
            answer = await call(policy, step_function(policy), (), journal.control.context())
        finally:
            journal.step_finished()
            restore(CURRENT_STEP, token)
    if answer is None or isinstance(answer, AlreadyDone):
        return answer
    raise InvalidArgument(
        f"the check function of step {work.name!r} must return None (run it again) or AlreadyDone(result), "
        f"got {brief(answer)}"
    )
