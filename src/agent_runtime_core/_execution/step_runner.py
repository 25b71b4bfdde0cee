"""Run one step: its attempts, their records, and the policy for an earlier attempt whose outcome is unknown."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, Final

from .._core.codec.json import MAX_BYTES, LargeValue, decode, encode
from .._core.codec.json_slices import LARGE, NotSliced, slices
from .._core.codec.tagged import MANY_PARTS, MAX_PARTS
from .._core.codec.typed import size_limit
from .._core.context_vars import restore
from .._core.redaction import Redaction
from .._core.timeouts import contain, contained, replaced_cancellation, with_time_limit
from .._core.validation import must
from .._engines.base import Op
from .._engines.outages import OUTAGE
from .._journal.record import FAILED, RETRYING, Record
from ..errors import (
    LeaseLost,
    LimitExceeded,
    Postponed,
    RunFailed,
    StepCancelledError,
    StepInDoubt,
    UnserialisableResult,
    deciding_error,
    holds,
)
from ..state.base import EffectExists
from .effects import CHECK, CONFIRM, GuardedStep
from .journal_view import BEFORE_FIELD, CONCURRENT_INFO, GUARDED_FIELD
from .result_codec import redacted_result
from .run_writer import StepWriter
from .step import (
    BODIES,
    CONTROL_FLOW,
    CURRENT_STEP,
    NEVER_RETRIED,
    AlreadyDone,
    StepOptions,
    StepScope,
    call,
    run_body,
    step_function,
)
from .step_failure import Failure, failure_info
from .step_journal import RunJournal, StepJournal, has_run
from .usage import stored_charges, with_charged


@dataclass(slots=True, eq=False, repr=False)
class StepCall:
    """A step to run.

    Attributes:
        call: Makes one attempt. Receives the number of the attempt, counted from 1.
        encode: Encodes the result.
        decode: Decodes the result.
        position: The position of the step in its list, or of an imperative step in the run.
        total: How many steps are in its list; 0 for an imperative step.
        digest: The digest of the arguments, or the number of the step list.
        info: The `info` of the DONE record.
        start_recorded: A record of this claim already contains the start.
        no_events: The records stand for no events.
        start_info: Additional fields of the STARTED records.
        needs: The positions of the steps that it depends on, which its start names.
        raise_unwrapped: The last error is raised as it is, not as a StepExecutionError.
        defer_record: The DONE record is written with the next record. After a crash in between the step runs again;
            nothing depends on its result by then.
        adapt_review_result: Makes the result of the step from the result in a reviewer's answer.
        reviewed_tool: The tool call that a review shows: {"name", "id", "args"}.
        start_record: The record of the start, while it may still be buffered.
        state: The encoded state at the start of its list, if this record must contain it.
        failed: Its function raised an ordinary error for the last time, and that is recorded.
        errors_before: For `JournalView.errors_before`, until they are recorded in a start.
    """

    name: str
    key: str
    call: Callable[[int], Awaitable[Any]]
    options: StepOptions
    _: KW_ONLY
    encode: Callable[[object], str] = encode
    decode: Callable[[str], object] = decode
    position: int = 0
    total: int = 0
    digest: str | None = None
    info: str | None = None
    start_recorded: bool = False
    no_events: bool = False
    start_info: dict[str, Any] | None = None
    needs: Sequence[int] = ()
    raise_unwrapped: bool = False
    defer_record: bool = False
    adapt_review_result: Callable[[Any], Any] | None = None
    reviewed_tool: dict[str, Any] | None = None
    start_record: Record | None = None
    state: str | None = None
    failed: bool = False
    errors_before: Sequence[dict[str, Any]] = ()


#: Returns the records to write for (step, encoded result, attempt, milliseconds): the DONE record comes last,
#: after the deferred records; or no records while the step itself is deferred.
Seal = Callable[[StepCall, str, int, int], Sequence[Record]]


def run_step(
    journal: StepJournal[StepWriter], work: StepCall, seal: Seal, *, is_admitted: bool = False
) -> Coroutine[Any, Any, Any]:
    """Run a step without a record until it is recorded.

    A guarded step is done or in doubt from the moment in which its function is entered, until the function raises an
    ordinary error: see `GuardedStep`.

    Args:
        journal: The journal of the run.
        work: The step.
        seal: Makes its records.
        is_admitted: The step may start although its attempt is stopped.

    Returns:
        The result, as a resumed run decodes it.

    Raises:
        StepExecutionError: The last attempt failed.
        StepInDoubt: The outcome of an earlier attempt is unknown and the policy is "fail", or the time limit of a
            guarded step was reached.
        EffectAlreadyDone: Another run of the lineage did the step, and the policy does not repeat it.
    """
    if journal.writer.closed_error is not None:
        raise journal.writer.closed_error(work.name)
    if journal.control.refuses and not is_admitted:
        return _run_unless_stopped(journal, work, seal)
    if work.options.on_in_doubt != "retry" and has_run(journal):
        return _run_guarded(journal, work, seal)
    start = (
        journal.view.started.pop((work.name, work.key), None)
        if journal.view.started and not work.start_recorded
        else None
    )
    return _run_tries(journal, work, seal, start is not None)


async def _run_unless_stopped(journal: StepJournal[StepWriter], work: StepCall, seal: Seal) -> Any:
    await journal.control.refuse(work.name)
    return await run_step(journal, work, seal, is_admitted=True)


def result_not_serializable(name: str, error: UnserialisableResult) -> UnserialisableResult:
    """Return the error as an error of the step `name`, and add how to raise the size limit."""
    # From MAX_PARTS on, a larger limit does not allow more parts.
    most = MAX_PARTS if error.reason.startswith(MANY_PARTS) else MAX_BYTES
    can_raise_limit = error.max_bytes is not None and error.max_bytes < most
    fix = f", or raise the limit of the step with max_result_bytes=, up to {most:,}" if can_raise_limit else ""
    return UnserialisableResult(error.path, error.reason + fix, max_bytes=error.max_bytes, step_name=name)


async def _run_guarded(journal: RunJournal, work: StepCall, seal: Seal) -> Any:
    """Run a step whose effect must not be repeated silently, or find its result by its policies."""
    step = GuardedStep(journal, work)
    try:
        return await _run_once_in_lineage(journal, work, seal, step)
    finally:
        step.left()


async def _run_once_in_lineage(journal: RunJournal, work: StepCall, seal: Seal, step: GuardedStep) -> Any:
    await step.find()
    start = step.doubted_start()
    if start is None and await step.may_have_happened():
        start = -1
    if start is None:
        if journal.writer.call is not None:
            await step.check_others()
        await step.check_approval()
    else:
        journal.writer.effects[step.identity] = step.row
        if (known := await _apply_in_doubt_policy(journal, work, start, step)) is not None:
            adapt = work.adapt_review_result
            text = _text(work, known.result if adapt is None else adapt(known.result))
            if journal.redaction is not None:
                text = _redacted(journal.redaction, journal.writer.run_id, work, text)
            started = (_start_record(journal, work, 1, True),) if work.errors_before else ()
            step.share()
            return await _record_completion(journal, work, seal, step, text, *started)
        await step.check_others()
    while True:
        if (done := await step.admit()) is not None:
            # With a start, since readers of events expect a start. The effect row of the other run is not modified.
            return await _record_completion(
                journal, work, seal, step, done.result or "null", _start_record(journal, work, 1, False)
            )
        journal.running_steps += 1
        journal.executed = True
        try:
            await journal.regain_slot()
            step.start = await _record_start(journal, work, 1, start is not None)
            break
        except EffectExists:
            await step.check_others()
        finally:
            journal.step_finished()
    work.start_recorded = True
    step.share()
    return await _run_tries(journal, work, seal, start is not None, step)


async def _record_completion(
    journal: RunJournal, work: StepCall, seal: Seal, step: GuardedStep, text: str, *started: Record
) -> Any:
    """Record a result that was found without running the step, and return it."""
    if records := seal(work, text, 1, 0):
        await journal.write((*started, *records), records[:-1], CURRENT_STEP.get())
    _errors_recorded(journal, work)
    step.settled()
    return work.decode(text)


async def _run_tries(
    journal: StepJournal[StepWriter], work: StepCall, seal: Seal, in_doubt: bool, guarded: GuardedStep | None = None
) -> Any:
    """Run the attempts of a step, and record its end. The first start of a `guarded` step is already recorded."""
    boot, timeout = journal.writer.clock.boot, work.options.timeout
    outer = CURRENT_STEP.get()
    scope = StepScope(journal.token, work.name, work.key, 1, outer, digest=work.digest, position=work.position)
    journal.running_steps, journal.executed = journal.running_steps + 1, True
    token = CURRENT_STEP.set(scope)
    late = None if guarded is None or timeout is None else guarded.time_limit(timeout)
    try:
        if journal.slot_released:
            await journal.regain_slot()
        if not work.start_recorded:
            await _record_start(journal, work, 1, in_doubt)
        while True:
            attempt, since, returned = scope.attempt, boot(), False
            call_step = work.call if journal.around_step is None else journal.around_step(scope, work.call)
            try:
                if guarded is not None:
                    guarded.enter()
                if timeout is None:
                    value = await call_step(attempt)
                else:
                    body = _body(journal, work, scope, call_step)
                    value = await with_time_limit(body, timeout, f"step {work.name!r}", late)
                returned = True
                # Before the next await, since other tasks may change the value. Inside this block, since a result that
                # cannot be decoded is a failed attempt.
                try:
                    text = _text(work, value, at_once=LARGE)
                    result = _decoded(work, value, text)
                except LargeValue:
                    text, result = await _large_result(work, value)
                if journal.redaction is not None:
                    text = _redacted(journal.redaction, journal.writer.run_id, work, text)
                    result = work.decode(text)
                scope.ended = True
                if scope.charged is not None or journal.pools is not None:
                    await _count(journal, work, scope)
                records = seal(work, text, attempt, int((boot() - since) * 1000))
                break
            except BaseException as raised:  # noqa: BLE001 - _record_failure raises it, unless it is tried again
                error = _failure(journal, work, guarded, raised, returned)
                await _record_failure(journal, work, attempt, error)
                # The next attempt uses the records inside the step, as a resumed run does. It needs a separate scope:
                # tasks that this attempt left running still count their calls in the old scope.
                scope = replace(scope, attempt=attempt + 1, emitted=0, counts=None, charged=None, ended=False)
                CURRENT_STEP.set(scope)
                start = await _record_start(journal, work, attempt + 1, in_doubt)
                if guarded is not None:
                    guarded.start = start
        work.start_record = None
        if records:
            await journal.write(records, records[:-1], outer, lazy=work.defer_record)
        if guarded is not None:
            guarded.settled()
    finally:
        journal.step_finished()
        restore(CURRENT_STEP, token)
    return result


async def _count(journal: StepJournal[StepWriter], work: StepCall, scope: StepScope) -> None:
    """Have the record of an attempt that succeeded contain what it has charged, and its commit count it in pools."""
    if scope.charged is not None:
        work.info = with_charged(work.info, scope.charged)
    if journal.pools is not None:
        await journal.pools.settle(work.name, work.key, scope.charged)


def _body(
    journal: StepJournal[StepWriter], work: StepCall, scope: StepScope, call_step: Callable[[int], Awaitable[Any]]
) -> Coroutine[Any, Any, Any]:
    """Return an attempt for a separate task, in which an error that is no Exception would end the event loop."""
    call_it: Callable[[], Awaitable[Any]] = partial(call_step, scope.attempt)
    if journal.control.tracked:
        call_it = partial(contain, call_it, f"step {work.name!r}")
    return run_body(scope, call_it)


def _failure(
    journal: StepJournal[StepWriter], work: StepCall, guarded: GuardedStep | None, raised: BaseException, returned: bool
) -> Exception:
    """Return the error with which an attempt of a step failed.

    Args:
        journal: The journal of the run.
        work: The step.
        guarded: The step, if it is guarded.
        raised: What the attempt raised.
        returned: The function returned, so the error is about its result.

    Raises:
        BaseException: The attempt did not fail: it was cut off, or its outcome is unknown. No failure is recorded, and
            the step is not retried.
    """
    error = contained(raised, f"step {work.name!r}") if journal.control.tracked else raised
    if not isinstance(error, Exception):
        raise raised
    if journal.control.cut_off():
        if isinstance(error, (LeaseLost, StepCancelledError)):
            raise raised
        raise replaced_cancellation(error) from error
    doubt = None if guarded is None else guarded.left_in_doubt(error, returned=returned)
    if doubt is error:
        raise error
    if doubt is not None:
        raise doubt from error
    if error is not raised:
        error.__cause__ = raised
    return error


BODIES.add(_run_tries.__code__)


def _redacted(redaction: Redaction, run_id: str, work: StepCall, text: str) -> str:
    """Return the text of a result that may be stored."""
    most = size_limit(work.encode) or MAX_BYTES
    return redacted_result(redaction, f"step {work.name!r} of run {run_id}", text, work.decode, most)


def _text(work: StepCall, value: Any, at_once: int | None = None) -> str:
    limit = size_limit(work.encode)
    try:
        return work.encode(value) if limit is None else encode(value, max_bytes=limit, exact=True, at_once=at_once)
    except UnserialisableResult as error:
        raise result_not_serializable(work.name, error) from None


#: Types of immutable values that are decoded from their JSON as they were encoded.
IMMUTABLE: Final = frozenset({str, int, float, bool, type(None)})
_all_plain = IMMUTABLE.issuperset


class _NotPlain(Exception):
    """The value contains something that only encoding and decoding can copy."""


def _decoded(work: StepCall, value: Any, text: str) -> Any:
    """Return the result as a resumed run decodes it. Plain values are copied instead, which is faster."""
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
                if type(item) not in IMMUTABLE:
                    made[key] = _copy(item)
        return made
    if kind is list:
        return value.copy() if _all_plain(map(type, value)) else [_copy(item) for item in value]
    if kind in IMMUTABLE:
        return value
    raise _NotPlain


async def _large_result(work: StepCall, value: Any) -> tuple[str, Any]:
    """Return the text of a large result, and what a resumed run decodes from it.

    Other tasks run between the slices of the text. They may change the value, so its copy is encoded.
    """
    result = _copy(value)
    texts: list[str] = []
    task, cancelled = asyncio.current_task(), 0
    try:
        for text in slices(result, size_limit(work.encode) or MAX_BYTES):
            texts.append(text)
            try:
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                cancelled += 1
    except NotSliced:
        return _text(work, result), result
    except UnserialisableResult as error:
        raise result_not_serializable(work.name, error) from None
    finally:
        # Raised by the next await, so that the result is recorded first, as a small result is.
        for _ in range(cancelled):
            assert task is not None
            task.uncancel()
            task.cancel()
    return "".join(texts), result


async def _record_start(journal: StepJournal[StepWriter], work: StepCall, attempt: int, in_doubt: bool) -> int:
    """Record the start of an attempt: durably if its effect must not be repeated, else with the next commit.

    Returns:
        The number of the record; -1 if there is none.
    """
    if work.options.on_in_doubt != "retry" or work.errors_before:
        record = _start_record(journal, work, attempt, in_doubt)
        await journal.publish(record)
        _errors_recorded(journal, work)
        return record.seq
    if work.start_info or not work.no_events:  # else the record would have no reader
        work.start_record = record = _start_record(journal, work, attempt, in_doubt)
        await journal.writer.buffer(record)
        return record.seq
    return -1


def _errors_recorded(journal: StepJournal[StepWriter], work: StepCall) -> None:
    if work.errors_before:
        journal.view.add_errors_before((work.name, work.key), work.errors_before)
        work.errors_before = ()


def _start_record(journal: StepJournal[StepWriter], work: StepCall, attempt: int, in_doubt: bool) -> Record:
    info: dict[str, Any] = {} if work.start_info is None else {**work.start_info}
    if work.needs:
        info["needs"] = work.needs
    if work.options.description is not None:
        info["description"] = work.options.description
    if in_doubt and attempt == 1:
        info["in_doubt"] = True
    if work.info is not None and work.info.startswith(CONCURRENT_INFO[:-1]):
        info["beside"] = True
    if work.options.on_in_doubt != "retry":
        info |= {GUARDED_FIELD: True, **journal.about_flow()}
    if work.errors_before:
        info[BEFORE_FIELD] = list(work.errors_before)
    return journal.records.started(
        work.name, work.key, attempt=attempt, pos=work.position, total=work.total, tries=work.options.retries + 1,
        info=info, digest=work.digest, quiet=work.no_events, state=work.state,
    )  # fmt: skip


async def _record_failure(journal: StepJournal[StepWriter], work: StepCall, attempt: int, error: Exception) -> None:
    """Record a failed attempt and wait for the next attempt, or raise its error."""
    leaves = bool(CONTROL_FLOW) and isinstance(error, tuple(CONTROL_FLOW))
    delay = None if leaves else work.options.delay(error, attempt, journal.writer.clock.random)
    cause = deciding_error(error)
    info = failure_info(cause, journal.redaction)
    if isinstance(cause, LeaseLost):
        raise error
    scope = CURRENT_STEP.get()
    if scope is not None:
        scope.ended = True
        if scope.charged is not None:
            info["charged"] = stored_charges(scope.charged)
        if journal.pools is not None:
            await journal.pools.settle(work.name, work.key, scope.charged)
    # Without a journal, no runner resumes the run later.
    postponed = cause.after if isinstance(cause, Postponed) and journal.writer.has_journal else None
    if delay is None and isinstance(cause, OUTAGE) and journal.writer.has_journal:
        postponed = 0.0  # of a store that the function called: the run resumes when it answers
    if leaves:
        info["retry_delay"] = 0.0
    elif delay is not None or postponed is not None:
        info["retry_delay"] = delay if postponed is None else postponed
    # The code may catch an unwrapped Postponed and continue without the step.
    is_last = delay is None and not leaves and (postponed is None or work.raise_unwrapped)
    failure = None
    is_group_of_limit = isinstance(cause, LimitExceeded) and cause is not error  # `except*` of the caller gets it
    if is_last and not holds(error, NEVER_RETRIED) and not is_group_of_limit:
        failure = Failure(work.name, error, info, attempt, journal.redaction)
        if work.key[:2] in ("s:", "k:"):  # other steps run again when the run is resumed
            info |= failure.info | journal.about_failure(
                None if scope is None else scope.outer, journal.running_steps - 1
            )
    record: Record = journal.records.failed(
        FAILED if delay is None and postponed is None and not leaves else RETRYING,
        work.name,
        work.key,
        attempt=attempt,
        pos=work.position,
        total=work.total,
        tries=work.options.retries + 1,
        info=info,
        quiet=work.no_events,
    )
    await journal.publish(record)
    journal.view.add_failure(record)
    work.failed = record.kind == FAILED
    if failure is not None:
        raise failure.to_raise_unwrapped() if work.raise_unwrapped else failure.to_raise()
    if postponed is not None:
        raise error  # the runner resumes the run later
    if delay is None:
        raise error
    await journal.writer.clock.sleep_for(delay)


async def _apply_in_doubt_policy(
    journal: RunJournal, work: StepCall, start: int, step: GuardedStep
) -> AlreadyDone | None:
    """Decide by the policy what happens to a step in doubt that the record `start` started; -1 if the copy lacks it.

    Returns:
        The result of the step; None to run it again.

    Raises:
        StepInDoubt: The policy is "fail".
        RunFailed: A reviewer answered that the step failed.
        InvalidArgument: The check function returned neither None nor AlreadyDone.
    """
    policy = work.options.on_in_doubt
    if policy == "fail" and start < 0:
        raise StepInDoubt(work.name, f"it was perhaps done after the copy from which the store was restored. {CONFIRM}")
    if policy == "fail":
        raise StepInDoubt(work.name, f"it was interrupted, and its outcome is unknown (on_in_doubt='fail'). {CHECK}")
    if policy == "review":
        try:
            answer = await journal.control.review(
                work.name, work.key, start, lambda given: work.decode(encode(given)), work.reviewed_tool
            )
        except RunFailed:  # a reviewer confirmed that it caused no effect
            await journal.writer.write([Op("effect.drop", (step.row,))])
            raise
    else:
        assert callable(policy)
        journal.running_steps += 1
        token = CURRENT_STEP.set(StepScope(journal.token, work.name, work.key, 1, CURRENT_STEP.get(), ended=True))
        try:
            await journal.regain_slot()
            answer = await call(policy, step_function(policy), (), journal.control.context())
        finally:
            journal.step_finished()
            restore(CURRENT_STEP, token)
    if answer is None or isinstance(answer, AlreadyDone):
        return answer
    raise must(f"the check function of step {work.name!r}", "return None (to run it) or AlreadyDone(result)", answer)
