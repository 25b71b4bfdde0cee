"""An agent's view of its run: events, checkpoints, steps, waits, children, all under one claim."""

from __future__ import annotations

import asyncio
import datetime as _dt
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import UUID
from weakref import ref

from ._clock import Clock, aware
from ._ids import known_uuid, trace_id, unbroken
from ._json import MAX_RESULT, arguments_digest, decode, digest, encode
from .attempts import Work, perform
from .book import Book
from .callees import Callee, call, callee
from .errors import (
    InvalidArgument,
    JournalMismatch,
    NotSupported,
    StepCancelledError,
    StepExecutionError,
    brief,
    text_of,
)
from .event_types import EventType
from .interfaces import AgentRuntime, RunResult
from .journal.record import FAILED, SKIPPED, Record
from .ledger import UNHEARD, Question
from .limits import Budget, RunLimits
from .place import Place, Services
from .policy import PLAIN_POLICY, InDoubt, Policy, RetryOn
from .queue.row import RunRow
from .recorded import BESIDE, ran_beside
from .retry import Delay
from .tools.registry import ToolRegistry
from .uses import FRAME, Frame
from .waits import Waits

if TYPE_CHECKING:
    from .persistence.manager import PersistenceManager

T = TypeVar("T")

_DELTA = EventType.ASSISTANT_DELTA.value


class Context:
    """One claim's view of one run; see `interfaces.RunContext` for what agents rely on."""

    def __init__(self, row: RunRow, book: Book, services: Services, place: Place) -> None:
        self._row, self._services = row, services
        self.book: Book = book
        self.place: Place = place
        self._ledger, self._clock = book.ledger, services.clock
        book.owner = ref(self)
        input_ = cast("dict[str, Any]", decode(row.input))
        self.run_id: UUID = known_uuid(row.run_id)
        self.run_key: str | None = row.run_key
        self.input = input_
        self.input_messages: list[Any] = input_.get("messages") or []
        self.params: dict[str, Any] = input_.get("params") or {}
        self.conversation_id: UUID | None = conversation_id(input_.get("conversation_id"))
        self.metadata: dict[str, Any] = cast("dict[str, Any]", decode(row.metadata))
        self.attempt: int = row.attempt
        self.failures: int = row.failures  # of the attempts before; the others crashed
        #: Whether what this run says becomes part of its conversation.
        self.remembered: bool = True
        #: What was said before in the run's conversation and its own messages, once that was read.
        self.heard: list[Any] | None = None
        self._budget: Budget | None = None
        self.tools: ToolRegistry = services.tools
        self._waits: Waits | None = None

    @property
    def tool_registry(self) -> ToolRegistry:
        return self.tools

    @property
    def clock(self) -> Clock:
        return self._clock

    @property
    def given(self) -> list[Any]:
        """The messages that the run began with, whatever its agent has made of `input_messages` since."""
        if self.heard is not None:
            return self.heard
        return cast("dict[str, Any]", decode(self._row.input)).get("messages") or []

    @property
    def persistence(self) -> PersistenceManager:
        """Conversations, tasks, memory, preferences, knowledge and audit, written under this run's claim."""
        stores = self._services.persistence
        if stores is None:
            raise NotSupported("this context was made without stores: runner.services() lends them")
        return stores()

    @property
    def waits(self) -> Waits:
        """The waits of this run; many have none."""
        if self._waits is None:
            self._waits = Waits(self.book, self._row, self._services, self.place)
        return self._waits

    @property
    def budget(self) -> Budget:
        """What all agent loops of this run may use: by its runner's limits and by those of its input."""
        if self._budget is None:
            limits = RunLimits.of(self._services.limits).stricter(self.input.get("limits"))
            self._budget = Budget(limits)
        return self._budget

    @property
    def trace_id(self) -> str:
        return trace_id(self.run_id)

    @property
    def _frame(self) -> Frame | None:
        frame = FRAME.get()
        return frame if frame is not None and frame.book is self.book else None

    @property
    def step_id(self) -> str | None:
        """The step this code runs in, or None between steps."""
        frame = self._frame
        return None if frame is None else frame.step_id

    def where(self) -> dict[str, Any]:
        """What an event says of the step this code runs in; nothing between steps."""
        frame = self._frame
        return {} if frame is None else {"step_id": frame.step_id, "trace_id": self.trace_id}

    @property
    def idempotency_key(self) -> str | None:
        """`run_id:step_id`, the same on every attempt of the step this code runs in; None between steps."""
        step = self.step_id
        return None if step is None else f"{self.run_id}:{step}"

    @property
    def used(self) -> dict[str, Any]:
        """The usage of all agent loops of this run so far; nothing where there was none."""
        return {} if self._budget is None or not self._budget.begun else self._budget.told()

    def cancelled(self) -> bool:
        return self.place.cancelled

    def is_cancelled(self) -> bool:
        return self.place.cancelled

    def trace(self, kind: str, payload: dict[str, Any]) -> None:
        """Tell the trace sinks what is no event of the run."""
        tracer = self._services.tracer
        if tracer is not None:
            tracer.event(self.run_id, kind, payload)

    @property
    def traced(self) -> bool:
        """Whether anybody hears of a trace."""
        return self._services.tracer is not None

    # -- events and checkpoints

    async def emit(self, event_type: EventType | str, payload: dict[str, Any] | None = None) -> None:
        """Publish an event of this run; returns when it is durable.

        Code between steps that runs again on resume publishes nothing twice.
        """
        if self.place.sealed:
            await self.place.refuse()
        if not isinstance(event_type, str):
            unbroken("an event's type", event_type)
        kind = event_type.value if isinstance(event_type, EventType) else str(event_type)
        if not (kind and kind.isascii()):
            unbroken("an event's type", event_type)
        if payload is not None and not isinstance(payload, dict):
            raise InvalidArgument(f"an event's payload is a dict, not {type(payload).__name__}")
        row = self._event(kind, payload or {})
        if row is not None:
            [sequence] = await self._ledger.emit([row])
            told = self._services.told
            if told is not None and kind == _DELTA:
                await self._slowed(told(self._row.run_id, sequence, len(row[2].encode())))

    async def _slowed(self, until: asyncio.Future[None] | None) -> None:
        """Wait for an output that is too far behind, which is no time of the run's own."""
        place = self.place
        if until is None:
            return
        alone = place.waiting_since is None
        if alone:
            place.waiting_since = self._clock.boot()
        try:
            await until
        finally:
            if alone and place.waiting_since is not None:
                place.waited += self._clock.boot() - place.waiting_since
                place.waiting_since = None

    def _event(self, kind: str, payload: dict[str, Any]) -> tuple[str, str, str, float] | None:
        frame, book = self._frame, self.book
        if frame is not None:
            payload = {**self.where(), **payload}
            mark = f"s:{frame.step_id}:{self._ledger.claim_id}.{frame.attempt}:{frame.emitted}"
            frame.emitted += 1
        elif book.ahead:
            return None
        else:
            mark = f"b:{book.boundary}:{book.emitted}:{self._row.generation}.{self._row.failures}"
            book.emitted += 1
        text = encode(payload)
        return (f"{mark}:{digest(kind + text)[:8]}", kind, text, self._clock.wall())

    async def checkpoint(self, state: dict[str, Any]) -> None:
        """Save `state` for `get_state`, and publish it as a STATE_CHECKPOINT event."""
        await self.place.unsealed()
        if not isinstance(state, dict):
            raise InvalidArgument(f"a checkpoint is a dict, not {type(state).__name__}: {brief(state)}")
        text = encode(state)
        row = self._event(EventType.STATE_CHECKPOINT.value, {"state": state})
        if row is not None:
            await self._ledger.checkpoint(text, row[0], row)

    async def get_state(self) -> dict[str, Any] | None:
        """The last checkpoint, or None."""
        await self.place.unsealed()
        return await self._ledger.state.get_checkpoint(self._row.run_id)

    # -- steps

    def renamed(self, old: str, new: str) -> None:
        """The step called `old` when it was recorded is `new` now."""
        if not (isinstance(old, str) and isinstance(new, str) and old and new):
            raise InvalidArgument(f"renamed() takes two names, not {brief(old)} and {brief(new)}")
        self.book.renames[new] = old

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
        if retries or timeout is not None or on_in_doubt != "retry" or retry_delay != 1.0:
            policy = Policy(retries, retry_delay, timeout, retry_on, backoff, on_in_doubt)
        if on_changed_input not in ("use", "raise"):
            raise InvalidArgument(f"on_changed_input is 'use' or 'raise', not {brief(on_changed_input)}")
        how = callee(fn, returns, max_result_bytes)
        mark, _ = arguments_digest(args, {})
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
        if self.place.cancelled:
            raise StepCancelledError(name)
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

    def _identify(self, name: str, key: str | None, mark: str | None, space: str = "s") -> tuple[str, Record | None]:
        """The key of the next step of that name, and its record if there is one."""
        unbroken("a step's name", name)
        if key is not None:
            unbroken(f"the key of step {name!r}", key)
            record = self.book.recorded(name, place := f"k:{key}")
        else:
            place = self.book.occurrence(space, name, mark)
            record = self.book.recorded(name, place)
        if record is None:
            self.book.fail_again(name, place)
        if key is None and space == "s":
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
        place, record = self._identify(name, None, mark)
        if record is None:
            name = self.book.former(name, place)
            record = await self._settled(name, place)
        if record is None:
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
            except Exception as error:
                if type(error).__module__.startswith("agent_runtime_core"):
                    raise
                message = text_of(error)
                await self._transaction_failed(name, place, pos, message, type(error).__name__)
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

    async def pinned(self, name: str, make: Callable[[], Awaitable[Any]]) -> Any:
        """What `make()` gave when this run first came here."""
        await self.place.unsealed()
        place = self.book.occurrence("v", name)
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

    async def _recorded(self, name: str, make: Callable[[], Any]) -> Any:
        async def made() -> Any:
            return make()

        return await self.pinned(name, made)

    async def now(self) -> _dt.datetime:
        """The time in UTC, the same again when the run is resumed."""
        return cast(_dt.datetime, await self._recorded("now", lambda: aware(self._clock.wall())))

    async def random(self) -> float:
        """A number in [0, 1), the same again when the run is resumed."""
        return cast(float, await self._recorded("random", self._clock.random.random))

    async def uuid4(self) -> UUID:
        """A fresh UUID, the same again when the run is resumed."""
        return cast(
            UUID,
            await self._recorded("uuid4", lambda: UUID(int=self._clock.random.getrandbits(128), version=4)),
        )

    # -- waiting

    async def sleep(self, seconds: float) -> None:
        """Wait; a crash or a park in between does not begin the wait anew."""
        await self.place.unsealed()
        await self.waits.sleep(seconds)

    async def wait_for_signal(self, name: str, *, timeout: float | None = None) -> Any:
        """The payload of the next signal of that name; WaitTimeout after `timeout` seconds."""
        await self.place.unsealed()
        return await self.waits.signal(name, timeout)

    async def approve(
        self,
        name: str,
        details: Any = None,
        *,
        schema: dict[str, Any] | None = None,
        timeout: float | None = None,
        key: str | None = None,
    ) -> Any:
        """Ask for a decision, as an "approval.requested" event, and wait for its answer.

        `schema` (JSON Schema) says what an answer looks like; `runner.approve` checks it. On a resume an
        approval is known by its name and how often that name was used before, or by `key`.
        """
        await self.place.unsealed()
        return await self.waits.approve(name, details, schema, timeout, key)

    async def call(self, agent: AgentRuntime | str, input: dict[str, Any], *, key: str | None = None) -> RunResult:
        """Run another agent as a child of this run and wait for it; RunFailed unless it succeeds.

        The child has an id of its own that is the same on every attempt, so it is never run twice.
        """
        await self.place.unsealed()
        return await self.waits.child(agent, input, key)


def _sealing(record: Record, to_text: Callable[[object], str]) -> Callable[[object], Record]:
    return lambda value: record._replace(result=to_text(value))


def conversation_id(value: Any) -> UUID | None:
    """The id of the conversation that a run names; for a text that is no UUID, always the same one. "" names none."""
    if isinstance(value, UUID):
        return value
    if value is None or value == "":
        return None
    try:
        return UUID(str(value))
    except ValueError:
        return UUID(digest(f"conversation:{value}"))


#: The name under which 0.5.2 knew the one concrete context class.
RunContextImpl = Context
