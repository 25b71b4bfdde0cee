"""Steps of a run's own code: `ctx.step`, `ctx.transaction`, and recorded times and random values."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar, cast

from .._core.codec.json import arguments_digest, decode, encode
from .._core.ids import known_uuid, trace_id, unbroken
from .._core.threads import name_of
from .._core.validation import Shown, must
from .._journal.record import FAILED, SKIPPED, Record
from ..errors import (
    EffectAlreadyDone,
    IllegalTransition,
    JournalMismatch,
    NotSupported,
    Postponed,
    StorageError,
    UnserialisableResult,
    brief,
    deciding_error,
    holds,
)
from .effects import refuse_again
from .journal_view import CONCURRENT_INFO, was_concurrent
from .result_codec import redacted_result
from .run_control import RunControl
from .run_writer import OUTCOME_UNKNOWN
from .step import CONTROL_FLOW, CURRENT_STEP, NEVER_RETRIED, StepFunction, StepOptions, StepScope, call, step_function
from .step_failure import Failure, describe_call, error_of_call, failure_info
from .step_journal import RunJournal
from .step_runner import StepCall, result_not_serializable, run_step

T = TypeVar("T")

#: Values that the library records, which have no contents.
_OWN_VALUES: Final = frozenset({"history", "now", "random", "uuid4"})


def _identify(args: tuple[Any, ...], ctx: Any) -> bool:
    """Whether the digest of the arguments tells a step from others of its name: it is made of all of them."""
    own = [each for each in args if each is not ctx]
    return bool(own) and all(arguments_digest(each) is not None for each in own)


def _explicit(name: str, key: str) -> str:
    """Return the key in the journal of a step with an explicit key."""
    return f"k:{unbroken(f'step {name!r}: key', key)}"


async def _never(attempt: int) -> Any:
    raise AssertionError("a refused step is not called")


class ContextSteps:
    """The steps, transactions and recorded values of one run under one claim."""

    def __init__(self, journal: RunJournal, control: RunControl) -> None:
        self._journal, self._writer, self._control = journal, journal.writer, control
        self._patches: dict[str, bool] = {}  # the decisions of this claim, by name

    @property
    def scope(self) -> StepScope | None:
        """The step of this run that the calling code is in."""
        scope = CURRENT_STEP.get()
        return scope if scope is not None and scope.token is self._journal.token else None

    def where(self) -> dict[str, Any]:
        """Return the fields by which an event names the step that the calling code is in; none between steps."""
        scope = self.scope
        return (
            {} if scope is None else {"step_id": scope.step_id, "trace_id": trace_id(known_uuid(self._writer.run_id))}
        )

    # -- steps

    def renamed(self, old: str, new: str) -> None:
        """Declare that what is recorded as `old` is called `new` now; both may have had other names before."""
        if not (isinstance(old, str) and isinstance(new, str) and old and new):
            wanted = "be names of steps, agents, signals or approvals"
            raise must("old and new", wanted, Shown(f"{brief(old)} and {brief(new)}"))
        names = self._journal.view.former_names_by_name.setdefault(new, [])
        if old not in names:
            names.insert(0, old)

    async def step(
        self, ctx: Any, name: str, given_key: str | None, fn: Callable[..., Any], args: tuple[Any, ...],
        function: StepFunction, options: StepOptions,
    ) -> Any:  # fmt: skip
        """Return the recorded result of a step, or run it; functions with a context parameter get `ctx`."""
        digest = arguments_digest(*args)
        name = unbroken("step name", name)
        guarded = options.on_in_doubt != "retry"
        keys = self._journal.keys
        key = keys.next_key("s", name, digest) if given_key is None else _explicit(name, given_key)
        try:
            record = self._next_step(name, key, digest, guarded=guarded)
        except JournalMismatch as mismatch:
            if guarded:
                await self._refuse_again(name, key, digest, options)
            self._journal.leave(mismatch)
            raise
        work = (ctx, name, key, fn, args, function, options, digest)
        # A guarded step that was cut off may still be running: it uses the same key.
        if record is None and (given_key is not None or guarded or self.scope is not None):
            async with keys.exclusive(name, key):
                record = await self._lookup_confirmed(name, key)
                if record is None:
                    return await self._run_step(*work)
        elif record is None and self._journal.unconfirmed.pending:
            record = await self._lookup_confirmed(name, key)
        if record is None:
            return await self._run_step(*work)
        if keys.open_calls:
            keys.close(name, key, digest)
        self._journal.records.position = max(self._journal.records.position, record.pos)
        if record.digest != digest:
            if guarded:
                self._check_arguments(record.name, key, digest)
            await self._arguments_changed(record, options.on_changed_input)
        return None if record.result is None else function.decode(record.result)

    async def _run_step(
        self, ctx: Any, name: str, key: str, fn: Callable[..., Any], args: tuple[Any, ...], function: StepFunction,
        options: StepOptions, digest: str | None,
    ) -> Any:  # fmt: skip
        """Run a step without a record and return its result."""
        journal, keys, guarded, opened = self._journal, self._journal.keys, options.on_in_doubt != "retry", None
        # A flag instead of a call, for the usual run.
        place = partial(journal.position, name, key) if journal.view.opened else journal.records.next_position
        if (guarded and key[:2] == "s:") or (keys.open_calls and keys.has_open_call(name, key, digest)):
            opened = keys.open_call(name, key, digest, place)
        work = StepCall(
            journal.view.journal_name(name, key), key, lambda attempt: call(fn, function, args, ctx), options,
            encode=function.encode, decode=function.decode, position=place() if opened is None else opened.position,
            digest=digest, info=CONCURRENT_INFO if journal.is_concurrent() else None,
        )  # fmt: skip
        if opened is not None and opened.errors and not _identify(args, ctx):
            work.errors_before = opened.errors[len(journal.view.errors_before.get((work.name, key), ())) :]
        ended = None
        try:
            value = await run_step(journal, work, journal.records.completion)
        except BaseException as error:
            if (guarded and not work.failed) or journal.view.holds_doubt(work.name, key):
                ended = describe_call(name, error, journal.redaction)
                if opened is None and key[:2] == "s:" and not keys.has_open_call(name, key, digest):
                    opened = keys.open_call(name, key, digest, lambda: work.position)
            if opened is None and isinstance(error, (asyncio.CancelledError, *CONTROL_FLOW)):
                keys.reuse_key(name, key, digest, CURRENT_STEP.get())  # the caller may call the step again
            raise
        finally:
            if opened is None and keys.open_calls:
                opened = keys.around(name, key, digest)
            if opened is not None:
                keys.end_call(opened, ended)
        journal.advance()
        return value

    def _next_step(self, name: str, key: str, digest: str | None, *, guarded: bool = False) -> Record | None:
        """Return the record of the next step, or None."""
        journal = self._journal
        record = journal.lookup(name, key)
        again = self._error_again(name, key, digest) if journal.view.errors_before else None
        if record is None and again is None:
            if journal.view.swallowed_failures:
                self._raise_recorded_failure(name, key, digest)
            if guarded:
                self._check_arguments(journal.view.journal_name(name, key), key, digest)
        if key[:2] != "k:":
            journal.check_order(name, key, record)
        if journal.view.guarded_inside:
            journal.check_inside(name, key, record)
        if again is not None:
            self._keep_key(name, key, digest, again, record)
            raise error_of_call(name, again)
        if record is not None:
            journal.advance(record)
        return record

    def _error_again(self, name: str, key: str, digest: str | None) -> dict[str, Any] | None:
        """Return what this call raised in an earlier attempt, in which the code then used its key again.

        The outcome of the step is the outcome of the later call, which may be another step: if the arguments do not
        tell them apart, each call must get its own outcome again. Otherwise the later call would get the next key, and
        its effect would be repeated.
        """
        view = self._journal.view
        errors, number = view.errors_before.get((view.journal_name(name, key), key), ()), 0
        if errors:
            number = len(self._journal.keys.errors_of(name, key, digest))
        return errors[number] if number < len(errors) else None

    async def _refuse_again(self, name: str, key: str, digest: str | None, options: StepOptions) -> None:
        """Raise EffectAlreadyDone for a call that was refused before, which gave it no place in the journal."""
        journal = self._journal
        try:
            await refuse_again(
                journal, StepCall(journal.view.journal_name(name, key), key, _never, options, digest=digest)
            )
        except EffectAlreadyDone as error:
            self._keep_key(name, key, digest, describe_call(name, error, journal.redaction))
            raise

    def _keep_key(
        self, name: str, key: str, digest: str | None, error: dict[str, Any], record: Record | None = None
    ) -> None:
        """Let the next equal call be the same step again, as it was the first time."""
        position = self._journal.records.next_position
        if record is not None or self._journal.view.opened:
            position = partial(self._journal.position, name, key) if record is None else lambda: record.pos
        self._journal.keys.keep(name, key, digest, error, position)

    def _raise_recorded_failure(self, name: str, key: str, digest: str | None) -> None:
        """Raise the recorded error of a step after which the code continued."""
        journal = self._journal
        try:
            journal.view.raise_recorded_failure(name, key)
        except Exception as error:
            if key[:2] != "k:" and journal.view.start_in_order(name, key) is not None:
                journal.check_order(name, key, None)
            if journal.view.holds_doubt(journal.view.journal_name(name, key), key):
                self._keep_key(name, key, digest, describe_call(name, error, journal.redaction))
            elif journal.keys.open_calls:
                journal.keys.close(name, key, digest)
            raise

    def _check_arguments(self, name: str, key: str, digest: str | None) -> None:
        """Raise JournalMismatch if the journal contains these arguments of a guarded step under another key only.

        The step would get the outcome of another effect, and the step that had it would take place again.
        """
        view = self._journal.view
        if key[:2] != "s:" or view.digest_of(name, key) in (digest, None):
            return
        for each, other in (*view.completed, *view.started, *view.ended_tries):
            if each == name and other[:2] == "s:" and other != key and view.digest_of(each, other) == digest:
                raise JournalMismatch(
                    f"step {name!r} must have a key, got none. The journal has its arguments in another position, so "
                    f"the calls of that name have another order now. Give each a key, as in "
                    f"ctx.step({name!r}, fn, i, key=str(i)), or a separate name",
                    recorded=name,
                    found=name,
                )

    async def _arguments_changed(self, record: Record, on_changed_input: str) -> None:
        """Publish that a recorded result is used for other arguments, or raise."""
        if self._is_ambiguous(record):
            raise JournalMismatch(
                f"step {record.name!r} must have a key, got none. Several steps of that name ran concurrently without "
                "keys, and the saved result has other arguments, so it may belong to another step. "
                f"Give each a key, as in ctx.step({record.name!r}, fn, i, key=str(i)), or a separate name",
                recorded=record.name,
                found=record.name,
            )
        if on_changed_input == "raise":
            raise JournalMismatch(
                f"step {record.name!r} must have the arguments of its saved result, got other arguments. Restore "
                "them, give the step another key, or drop on_changed_input='raise'",
                recorded=record.name,
                found=record.name,
            )
        skip = [record.name, record.key, record.pos, {"input_changed": True}]
        await self._writer.buffer(self._journal.records.boundary(SKIPPED, nev=1, info={"steps": [skip]}))

    def _is_ambiguous(self, record: Record) -> bool:
        """Return whether the step ran concurrently and only its occurrence identifies it."""
        occurrence, _, scope = record.key.partition("@")
        if not occurrence.startswith("s:") or not was_concurrent(record):
            return False
        for name, key in (*self._journal.view.completed, *self._journal.view.started):
            if name == record.name and key != record.key and key.startswith("s:") and key.partition("@")[2] == scope:
                return True
        return False

    async def _lookup_confirmed(self, name: str, key: str) -> Record | None:
        """Return the record of a step, if there is one once all unconfirmed writes are resolved."""
        if self._journal.unconfirmed.pending:
            await self._journal.unconfirmed.resolve()
        record = self._journal.lookup(name, key)
        if record is not None:
            self._journal.advance(record)
        return record

    # -- transactions

    async def transaction(self, name: str, fn: Callable[..., T], *args: Any) -> T:
        """Return the recorded result of a transaction, or run it."""
        journal = self._journal
        if not self._writer.state.transacts:
            raise NotSupported(
                "ctx.transaction needs the journal on SQLite or PostgreSQL. Use AgentRunner.open('agents.db'), or "
                "ctx.step"
            )
        function = step_function(fn)
        if function.is_async:
            got = Shown(f"the coroutine function {name_of(fn)}")
            raise must(f"transaction {brief(name)}: fn", "be a plain function", got, "It runs in the writer's thread")
        digest = arguments_digest(*args)
        name = unbroken("transaction name", name)
        key = journal.keys.next_key("s", name, digest)
        record = self._next_step(name, key, digest)
        if record is None:
            name = journal.view.journal_name(name, key)
            record = await self._lookup_confirmed(name, key)
        if record is None:
            if self._control.refuses:
                await self._control.refuse(name)
            record = await self._transact(name, key, fn, args, function, digest)
        else:
            journal.records.position = max(journal.records.position, record.pos)
            if record.digest != digest:
                await self._arguments_changed(record, "use")
        return cast(T, None if record.result is None else function.decode(record.result))

    async def _transact(
        self, name: str, key: str, fn: Callable[..., Any], args: tuple[Any, ...], function: StepFunction,
        digest: str | None,
    ) -> Record:  # fmt: skip
        """Run a transaction without a record and return its new record."""
        journal = self._journal
        position = journal.position(name, key)
        # Numbered before the commit: the writer thread only adds the result.
        info = CONCURRENT_INFO if journal.is_concurrent() else None
        record = journal.value_record(name, key, None, info)._replace(pos=position, digest=digest, tries=1, nev=1)

        def completed(value: object) -> Record:
            text = function.encode(value)
            if journal.redaction is not None:
                owner = f"transaction {name!r} of run {self._writer.run_id}"
                text = redacted_result(journal.redaction, owner, text, function.decode)
            return record._replace(result=text)

        try:
            text = await self._writer.transact(fn, args, record, completed)
        except OUTCOME_UNKNOWN:
            journal.unconfirmed.add((record,), repeatable=False)
            journal.keys.reuse_key(name, key, digest, CURRENT_STEP.get())
            raise
        except UnserialisableResult as error:
            raise result_not_serializable(name, error) from None
        except Exception as error:
            if holds(error, (*NEVER_RETRIED, StorageError, Postponed)):
                raise
            cause = deciding_error(error)
            about = failure_info(cause, journal.redaction)
            failure = Failure(name, error, about, 1, journal.redaction)
            await self._record_failure(name, key, position, about | failure.info)
            raise failure.to_raise()  # noqa: B904 - it has its cause, or the context shows what happened
        done = journal.view.completed[name, key] = record._replace(result=text)
        journal.advance()
        await self._writer.publish_events(done)
        return done

    async def _record_failure(self, name: str, key: str, position: int, info: dict[str, Any]) -> None:
        """Record a failed transaction, so that code which continues without it does the same when it is resumed."""
        about = self._journal.about_failure(CURRENT_STEP.get(), self._journal.running_steps)
        record = self._journal.records.failed(
            FAILED, name, key, attempt=1, pos=position, total=0, tries=1, info=info | about
        )
        await self._journal.publish(record)

    # -- recorded values

    async def recorded_value(self, name: str, make: Callable[[], Awaitable[Any]], key: str | None = None) -> Any:
        """Return what `make()` returned when the run first called this."""
        key = self._journal.key_for("v", name, key)
        record = self._journal.lookup(name, key)
        if record is None:
            record = await self._lookup_confirmed(name, key)
        else:
            self._journal.advance(record)
        if record is not None:
            return decode(record.result or "null")
        if self._writer.closed_error is not None:
            raise self._writer.closed_error(name)  # `make` may have effects
        value = await make()
        text = encode(value)
        if (redaction := self._journal.redaction) is not None and name not in _OWN_VALUES:
            text = redaction.stored("result", text, f"value {name!r} of run {self._writer.run_id}")
            value = decode(text)
        record = self._journal.value_record(name, key, text)
        # Durable before it is used: if the record were lost, the step that is run again would get another value.
        await self._journal.write((record,), (), CURRENT_STEP.get())
        self._journal.advance()
        return value

    def started_without(self, name: str) -> bool:
        """Return whether the run recorded steps, but no `recorded_value` of that name."""
        return (
            bool(self._journal.view.completed or self._journal.view.started)
            and self._journal.lookup(name, "v:0") is None
        )

    async def patched(self, name: str) -> bool:
        """Return whether this run takes the new code of that name; record it if it does."""
        if self.scope is not None or not self._control.in_main_task:
            where = "a step" if self.scope is not None else "a task that the run has started"
            raise must(
                f"ctx.patched({brief(name)})",
                "be called between steps, in the main task of the run",
                Shown(f"a call in {where}"),
                "Call it before the step or the task, and pass the answer on",
            )
        name = unbroken("the name of a patch", name)
        if name not in self._patches:
            self._patches[name] = await self._decide(f"patched:{name}", "v:0")
        return self._patches[name]

    async def _decide(self, name: str, key: str) -> bool:
        """Return the recorded decision. A run without a later record takes the new code and records that."""
        journal = self._journal
        record = await self._lookup_confirmed(name, key)
        if record is not None:
            return True
        # "False" needs no record: the later records stay, so every execution of the run decides the same.
        if journal.has_later_records():
            return False
        if self._writer.closed_error is not None:
            # Neither code may run: the lease is lost, or this is a check. But a replay of a succeeded run continues.
            if isinstance(error := self._writer.closed_error(name), IllegalTransition):
                return False
            raise error
        record = journal.value_record(name, key, "true")
        # Durable before the new code runs: if the record were lost, the old code would run after it.
        await journal.write((record,), (), CURRENT_STEP.get())
        journal.advance()
        return True
