"""Steps as statements: what code of a run has done one by one, each known by its name and its turn."""

from __future__ import annotations

import asyncio
import datetime as _dt
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, cast
from uuid import UUID

from .._core.clock import Clock, aware
from .._core.codec.json import MAX_RESULT, arguments_digest, decode, encode
from .._core.ids import unbroken
from .._journal.record import FAILED, SKIPPED, Record
from ..errors import (
    InvalidArgument,
    JournalMismatch,
    NotSupported,
    Postponed,
    StepCancelledError,
    StepExecutionError,
    StorageError,
    UnserialisableResult,
    brief,
    deciding_error,
    holds,
    text_of,
)
from ..retry import Delay
from .journal_view import CONCURRENT_INFO, was_concurrent
from .run_control import RunControl
from .run_writer import OUTCOME_UNKNOWN
from .step_function import StepFunction, call, step_function
from .step_journal import RunJournal
from .step_policy import DEFAULT_FIELDS, DEFAULT_POLICY, NEVER_RETRIED, InDoubt, Policy, RetryOn
from .step_runner import StepCall, result_not_serializable, run_step
from .step_scope import CURRENT_STEP, StepScope

T = TypeVar("T")


class ContextSteps:
    """The steps, transactions, and recorded times and chance of one claim."""

    def __init__(self, book: RunJournal, clock: Clock, place: RunControl) -> None:
        self.journal: RunJournal = book
        self.control: RunControl = place
        self._ledger, self._clock = book.writer, clock

    @property
    def _scope(self) -> StepScope | None:
        frame = CURRENT_STEP.get()
        return frame if frame is not None and frame.token is self.journal.token else None

    # -- steps

    def renamed(self, old: str, new: str) -> None:
        """The step called `old` when it was recorded is `new` now; both may have had other names before."""
        if not (isinstance(old, str) and isinstance(new, str) and old and new):
            raise InvalidArgument(f"renamed() takes two names, not {brief(old)} and {brief(new)}")
        names = self.journal.view.former_names_by_name.setdefault(new, [])
        if old not in names:
            names.insert(0, old)

    async def step(
        self,
        name: str,
        fn: Callable[..., Any],
        *args: Any,
        key: str | None = None,
        retries: int = 0,
        retry_delay: float = 1.0,
        timeout: float | None = None,
        retry_on: RetryOn = Exception,
        backoff: Delay | None = None,
        on_in_doubt: InDoubt = "retry",
        returns: Any = None,
        on_changed_input: str = "use",
        description: str | None = None,
        max_result_bytes: int = MAX_RESULT,
    ) -> Any:
        """The recorded result of `fn(*args)`, run only if there is no record of it yet.

        A step is known by its name and how often that name was used before, or by `key`; steps of one
        name that run at once need keys. Another name at a recorded place is a JournalMismatch; other
        arguments use the record, and say so in a STEP_SKIPPED event, unless `on_changed_input="raise"`, or
        several of that name ran at once without keys: a JournalMismatch too.
        """
        if self.control.closed:
            await self.control.raise_closed()
        policy = DEFAULT_POLICY
        given = (retries, retry_delay, timeout, retry_on, backoff, on_in_doubt)
        if given != DEFAULT_FIELDS:
            policy = Policy(*given)
        if on_changed_input not in ("use", "raise"):
            raise InvalidArgument(f"on_changed_input is 'use' or 'raise', not {brief(on_changed_input)}")
        how = step_function(fn, returns, max_result_bytes)
        mark, _ = arguments_digest(args, {})
        name = unbroken("a step's name", name)
        place, record = self._next_step(name, key, mark)
        asked = (name, place, fn, args, how, policy, mark, description)
        if record is None and (key is not None or self._scope is not None):
            async with self.journal.keys.exclusive(name, place):
                record = await self._lookup_confirmed(name, place)
                if record is None:
                    return await self._run_step(*asked)
        elif record is None and self.journal.unconfirmed.pending:
            record = await self._lookup_confirmed(name, place)
        if record is None:
            return await self._run_step(*asked)
        await self._use_record(record, mark, on_changed_input)
        return None if record.result is None else how.decode(record.result)

    async def _run_step(
        self, name: str, place: str, fn: Callable[..., Any], args: tuple[Any, ...], how: StepFunction, policy: Policy,
        mark: str | None, description: str | None,
    ) -> Any:  # fmt: skip
        """The result of a step that has no record yet."""
        self._check_may_start(name)
        book = self.journal
        work = StepCall(
            book.view.journal_name(name, place), place, lambda attempt: call(fn, how, args, self), policy,
            encode=how.encode, decode=how.decode, position=book.records.next_position(), description=description,
            digest=mark, info=CONCURRENT_INFO if book.is_concurrent() else None,
        )  # fmt: skip
        try:
            value = await run_step(book, work, book.records.completion)
        except asyncio.CancelledError:  # by its caller, who may ask for it once more
            book.keys.reuse_key(name, place, mark, CURRENT_STEP.get())
            raise
        book.advance()
        return value

    def _check_may_start(self, name: str) -> None:
        if self.control.cancelled:
            raise StepCancelledError(name)

    def _next_step(self, name: str, key: str | None, mark: str | None) -> tuple[str, Record | None]:
        """The key of the next step of that name, and its record if there is one."""
        if key is not None:
            record = self.journal.lookup(name, place := f"k:{unbroken(f'the key of step {name!r}', key)}")
        else:
            place = self.journal.keys.next_key("s", name, mark)
            record = self.journal.lookup(name, place)
        if record is None:
            self.journal.view.raise_recorded_failure(name, place)
        if key is None:
            self.journal.check_order(name, record)
        if record is not None:
            self.journal.advance(record)
        return place, record

    async def _use_record(self, record: Record, mark: str | None, on_changed: str) -> None:
        self.journal.records.position = max(self.journal.records.position, record.pos)
        if record.digest == mark:
            return
        if self._is_concurrent_record(record):
            raise JournalMismatch(
                f"several steps {record.name!r} ran at once without keys, and this one was recorded with other "
                "arguments than it has now, so that which is which is not known: "
                f"give each a key, as in ctx.step({record.name!r}, fn, i, key=str(i)), or a name of its own",
                recorded=record.name,
                found=record.name,
            )
        if on_changed == "raise":
            raise JournalMismatch(
                f"step {record.name!r} was recorded with other arguments than it has now: restore them, "
                "give it another key, or drop on_changed_input='raise'",
                recorded=record.name,
                found=record.name,
            )
        skip = [record.name, record.key, record.pos, {"input_changed": True}]
        await self._ledger.buffer(self.journal.records.boundary(SKIPPED, nev=1, info={"steps": [skip]}))

    def _is_concurrent_record(self, record: Record) -> bool:
        """Whether that step ran beside other code, and more than one of its name is told from others by its turn."""
        turn, _, within = record.key.partition("@")
        if not turn.startswith("s:") or not was_concurrent(record):
            return False
        for name, key in (*self.journal.view.completed, *self.journal.view.started):
            if name == record.name and key != record.key and key.startswith("s:") and key.partition("@")[2] == within:
                return True
        return False

    async def transaction(self, name: str, fn: Callable[..., T], *args: Any) -> T:
        """A step whose plain `fn(conn, *args)` runs inside the commit of its own record: exactly once.

        `conn.execute` and `conn.executemany` reach the SQLite file the journal is on, not the tables of
        this library; more than a second of SQL is stopped. NotSupported where the journal is elsewhere.
        """
        await self.control.ensure_open()
        if not self._ledger.state.transacts:
            raise NotSupported(
                "ctx.transaction needs the journal on SQLite: AgentRunner.open('agents.db'), or a SQLiteStateStore"
            )
        how = step_function(fn)
        if how.is_async:
            raise InvalidArgument(f"transaction {brief(name)}: fn runs on the writer thread and cannot be a coroutine")
        mark, _ = arguments_digest(args, {})
        name = unbroken("a step's name", name)
        place, record = self._next_step(name, None, mark)
        if record is None:
            name = self.journal.view.journal_name(name, place)
            record = await self._lookup_confirmed(name, place)
        if record is None:
            self._check_may_start(name)
            pos = self.journal.records.next_position()

            # Its place is taken here: the writer thread only fills in the result.
            info = CONCURRENT_INFO if self.journal.is_concurrent() else None
            record = self.journal.value_record(name, place, None, info)._replace(pos=pos, digest=mark, tries=1, nev=1)
            seal = _sealing(record, how.encode)

            try:
                text = await self._ledger.transact(fn, args, record, seal)
            except OUTCOME_UNKNOWN:
                self.journal.unconfirmed.add((record,), repeatable=False)
                self.journal.keys.reuse_key(name, place, mark, CURRENT_STEP.get())
                raise
            except UnserialisableResult as error:
                raise result_not_serializable(name, error) from None
            except Exception as error:
                if holds(error, (*NEVER_RETRIED, StorageError, Postponed)):
                    raise
                cause = deciding_error(error)
                message = text_of(cause)
                await self._transaction_failed(name, place, pos, message, type(cause).__name__)
                raise StepExecutionError(name, message, 1) from error
            record = self.journal.view.completed[name, place] = record._replace(result=text)
            self.journal.advance()
            await self._ledger.publish_events(record)
        else:
            await self._use_record(record, mark, "use")
            text = record.result
        return cast(T, None if text is None else how.decode(text))

    async def _lookup_confirmed(self, name: str, place: str) -> Record | None:
        """The record of that step, if there is one by now, or when all questions are settled."""
        if self.journal.unconfirmed.pending:
            await self.journal.unconfirmed.resolve()
        record = self.journal.lookup(name, place)
        if record is not None:
            self.journal.advance(record)
        return record

    async def _transaction_failed(self, name: str, place: str, pos: int, message: str, kind: str) -> None:
        """Record it, so that code that goes on without it takes the same way again."""
        about = {
            "error": message,
            "type": kind,
            **self.journal.about_failure(CURRENT_STEP.get(), self.journal.running_steps),
        }
        record = self.journal.records.failed(FAILED, name, place, attempt=1, pos=pos, total=0, tries=1, info=about)
        await self.journal.publish(record)

    # -- recorded chance and time

    async def recorded_value(self, name: str, make: Callable[[], Awaitable[Any]], key: str | None = None) -> Any:
        """What `make()` gave when this run first came here."""
        await self.control.ensure_open()
        place = self.journal.key_for("v", name, key)
        record = self.journal.lookup(name, place)
        if record is None:
            record = await self._lookup_confirmed(name, place)
        else:
            self.journal.advance(record)
        if record is not None:
            return decode(record.result or "null")
        value = await make()
        record = self.journal.value_record(name, place, encode(value))
        # Durable before anybody can use it: a lost note would give another value to the step that is run again.
        await self.journal.write((record,), (), CURRENT_STEP.get())
        self.journal.advance()
        return value

    def started_without(self, name: str) -> bool:
        """Whether steps of this run are recorded, and no value `pinned` under that name before them."""
        return (
            bool(self.journal.view.completed or self.journal.view.started) and self.journal.lookup(name, "v:0") is None
        )

    async def _recorded_call(self, name: str, make: Callable[[], Any], key: str | None) -> Any:
        async def made() -> Any:
            return make()

        return await self.recorded_value(name, made, key)

    async def now(self, *, key: str | None = None) -> _dt.datetime:
        """The time in UTC, the same again when the run is resumed; `key` as for `step`."""
        return cast(_dt.datetime, await self._recorded_call("now", lambda: aware(self._clock.wall()), key))

    async def random(self, *, key: str | None = None) -> float:
        """A number in [0, 1), the same again when the run is resumed; `key` as for `step`."""
        return cast(float, await self._recorded_call("random", self._clock.random.random, key))

    async def uuid4(self, *, key: str | None = None) -> UUID:
        """A fresh UUID, the same again when the run is resumed; `key` as for `step`."""

        def made() -> UUID:
            return UUID(int=self._clock.random.getrandbits(128), version=4)

        return cast(UUID, await self._recorded_call("uuid4", made, key))


def _sealing(record: Record, to_text: Callable[[object], str]) -> Callable[[object], Record]:
    return lambda value: record._replace(result=to_text(value))
