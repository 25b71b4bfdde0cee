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
from .claim_writer import UNHEARD, Question
from .journal_view import BESIDE, ran_beside
from .run_control import Place
from .step_function import Callee, call, callee
from .step_journal import Book
from .step_keys import FRAME, Frame
from .step_policy import NEVER_RETRIED, PLAIN, PLAIN_POLICY, InDoubt, Policy, RetryOn
from .step_runner import Work, perform, refused_of

T = TypeVar("T")


class Imperative:
    """The steps, transactions, and recorded times and chance of one claim."""

    def __init__(self, book: Book, clock: Clock, place: Place) -> None:
        self.book: Book = book
        self.place: Place = place
        self._ledger, self._clock = book.ledger, clock

    @property
    def _frame(self) -> Frame | None:
        frame = FRAME.get()
        return frame if frame is not None and frame.book is self.book else None

    # -- steps

    def renamed(self, old: str, new: str) -> None:
        """The step called `old` when it was recorded is `new` now; both may have had other names before."""
        if not (isinstance(old, str) and isinstance(new, str) and old and new):
            raise InvalidArgument(f"renamed() takes two names, not {brief(old)} and {brief(new)}")
        names = self.book.renames.setdefault(new, [])
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
        if self.place.sealed:
            await self.place.refuse()
        policy = PLAIN_POLICY
        given = (retries, retry_delay, timeout, retry_on, backoff, on_in_doubt)
        if given != PLAIN:
            policy = Policy(*given)
        if on_changed_input not in ("use", "raise"):
            raise InvalidArgument(f"on_changed_input is 'use' or 'raise', not {brief(on_changed_input)}")
        how = callee(fn, returns, max_result_bytes)
        mark, _ = arguments_digest(args, {})
        name = unbroken("a step's name", name)
        place, record = self._identify(name, key, mark)
        asked = (name, place, fn, args, how, policy, mark, description)
        if record is None and (key is not None or self._frame is not None):
            async with self.book.only(name, place):
                record = await self._settled(name, place)
                if record is None:
                    return await self._perform(*asked)
        elif record is None and self.book.questions:
            record = await self._settled(name, place)
        if record is None:
            return await self._perform(*asked)
        await self._reuse(record, mark, on_changed_input)
        return None if record.result is None else how.decode(record.result)

    async def _perform(
        self, name: str, place: str, fn: Callable[..., Any], args: tuple[Any, ...], how: Callee, policy: Policy,
        mark: str | None, description: str | None,
    ) -> Any:  # fmt: skip
        """The result of a step that has no record yet."""
        self._may_begin(name)
        book = self.book
        work = Work(
            book.former(name, place), place, lambda attempt: call(fn, how, args, self), policy,
            encode=how.encode, decode=how.decode, pos=book.take_pos(), description=description, digest=mark,
            info=BESIDE if book.is_beside() else None,
        )  # fmt: skip
        try:
            value = await perform(book, work, book.seal)
        except asyncio.CancelledError:  # by its caller, who may ask for it once more
            book.ask_again(name, place, mark, FRAME.get())
            raise
        book.passed()
        return value

    def _may_begin(self, name: str) -> None:
        if self.place.cancelled:
            raise StepCancelledError(name)

    def _identify(self, name: str, key: str | None, mark: str | None) -> tuple[str, Record | None]:
        """The key of the next step of that name, and its record if there is one."""
        if key is not None:
            record = self.book.recorded(name, place := f"k:{unbroken(f'the key of step {name!r}', key)}")
        else:
            place = self.book.occurrence("s", name, mark)
            record = self.book.recorded(name, place)
        if record is None:
            self.book.fail_again(name, place)
        if key is None:
            self.book.match(name, record)
        if record is not None:
            self.book.passed(record)
        return place, record

    async def _reuse(self, record: Record, mark: str | None, on_changed: str) -> None:
        self.book.pos = max(self.book.pos, record.pos)
        if record.digest == mark:
            return
        if self._is_one_of_several(record):
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
        await self._ledger.note(self.book.boundary_record(SKIPPED, nev=1, info={"steps": [skip]}))

    def _is_one_of_several(self, record: Record) -> bool:
        """Whether that step ran beside other code, and more than one of its name is told from others by its turn."""
        turn, _, within = record.key.partition("@")
        if not turn.startswith("s:") or not ran_beside(record):
            return False
        for name, key in (*self.book.done, *self.book.begun):
            if name == record.name and key != record.key and key.startswith("s:") and key.partition("@")[2] == within:
                return True
        return False

    async def transaction(self, name: str, fn: Callable[..., T], *args: Any) -> T:
        """A step whose plain `fn(conn, *args)` runs inside the commit of its own record: exactly once.

        `conn.execute` and `conn.executemany` reach the SQLite file the journal is on, not the tables of
        this library; more than a second of SQL is stopped. NotSupported where the journal is elsewhere.
        """
        await self.place.unsealed()
        if not self._ledger.state.transacts:
            raise NotSupported(
                "ctx.transaction needs the journal on SQLite: AgentRunner.open('agents.db'), or a SQLiteStateStore"
            )
        how = callee(fn)
        if how.is_async:
            raise InvalidArgument(f"transaction {brief(name)}: fn runs on the writer thread and cannot be a coroutine")
        mark, _ = arguments_digest(args, {})
        name = unbroken("a step's name", name)
        place, record = self._identify(name, None, mark)
        if record is None:
            name = self.book.former(name, place)
            record = await self._settled(name, place)
        if record is None:
            self._may_begin(name)
            pos = self.book.take_pos()

            # Its place is taken here: the writer thread only fills in the result.
            info = BESIDE if self.book.is_beside() else None
            record = self.book.noted(name, place, None, info)._replace(pos=pos, digest=mark, tries=1, nev=1)
            seal = _sealing(record, how.encode)

            try:
                text = await self._ledger.transact(fn, args, record, seal)
            except UNHEARD:
                self.book.questions.append(Question((record,), whole=False))
                self.book.ask_again(name, place, mark, FRAME.get())
                raise
            except UnserialisableResult as error:
                raise refused_of(name, error) from None
            except Exception as error:
                if holds(error, (*NEVER_RETRIED, StorageError, Postponed)):
                    raise
                cause = deciding_error(error)
                message = text_of(cause)
                await self._transaction_failed(name, place, pos, message, type(cause).__name__)
                raise StepExecutionError(name, message, 1) from error
            record = self.book.done[name, place] = record._replace(result=text)
            self.book.passed()
            await self._ledger.tell(record)
        else:
            await self._reuse(record, mark, "use")
            text = record.result
        return cast(T, None if text is None else how.decode(text))

    async def _settled(self, name: str, place: str) -> Record | None:
        """The record of that step, if there is one by now, or when all questions are settled."""
        if self.book.questions:
            await self.book.settle()
        record = self.book.recorded(name, place)
        if record is not None:
            self.book.passed(record)
        return record

    async def _transaction_failed(self, name: str, place: str, pos: int, message: str, kind: str) -> None:
        """Record it, so that code that goes on without it takes the same way again."""
        about = {"error": message, "type": kind, **self.book.about_failure(FRAME.get(), self.book.running)}
        record = self.book.unfinished(FAILED, name, place, attempt=1, pos=pos, total=0, tries=1, info=about)
        await self.book.tell(record)

    # -- recorded chance and time

    async def pinned(self, name: str, make: Callable[[], Awaitable[Any]], key: str | None = None) -> Any:
        """What `make()` gave when this run first came here."""
        await self.place.unsealed()
        place = self.book.turn("v", name, key)
        record = self.book.recorded(name, place)
        if record is None:
            record = await self._settled(name, place)
        else:
            self.book.passed(record)
        if record is not None:
            return decode(record.result or "null")
        value = await make()
        record = self.book.noted(name, place, encode(value))
        # Durable before anybody can use it: a lost note would give another value to the step that is run again.
        await self.book.write((record,), (), FRAME.get())
        self.book.passed()
        return value

    def began_without(self, name: str) -> bool:
        """Whether steps of this run are recorded, and no value `pinned` under that name before them."""
        return bool(self.book.done or self.book.begun) and self.book.recorded(name, "v:0") is None

    async def _recorded(self, name: str, make: Callable[[], Any], key: str | None) -> Any:
        async def made() -> Any:
            return make()

        return await self.pinned(name, made, key)

    async def now(self, *, key: str | None = None) -> _dt.datetime:
        """The time in UTC, the same again when the run is resumed; `key` as for `step`."""
        return cast(_dt.datetime, await self._recorded("now", lambda: aware(self._clock.wall()), key))

    async def random(self, *, key: str | None = None) -> float:
        """A number in [0, 1), the same again when the run is resumed; `key` as for `step`."""
        return cast(float, await self._recorded("random", self._clock.random.random, key))

    async def uuid4(self, *, key: str | None = None) -> UUID:
        """A fresh UUID, the same again when the run is resumed; `key` as for `step`."""

        def made() -> UUID:
            return UUID(int=self._clock.random.getrandbits(128), version=4)

        return cast(UUID, await self._recorded("uuid4", made, key))


def _sealing(record: Record, to_text: Callable[[object], str]) -> Callable[[object], Record]:
    return lambda value: record._replace(result=to_text(value))
