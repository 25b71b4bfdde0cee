"""Waiting: in place at first, then parked, so that a run that waits for days holds no worker."""

from __future__ import annotations

import asyncio
import json
import logging
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from ._clock import TOO_LATE, Clock
from ._engines.base import Op
from ._ids import child_run_id, step_id, unbroken
from ._json import MAX_WHOLE, arguments_digest, decode, encode
from .attempts import Happened
from .book import Book
from .errors import InvalidArgument, LeaseLost, RunFailed, WaitTimeout, brief
from .interfaces import AgentRuntime, RunResult
from .journal.record import Record
from .ledger import UNHEARD
from .limits import RunLimits
from .outcome import Before, payload_of, result_of
from .persistence.claim import Claim
from .queue.row import LIVE, Mail, Moved, RunRow, Settle
from .schema import misfit
from .status import RunStatus
from .tools.registry import ToolRegistry
from .tracing.tracer import Tracer
from .uses import FRAME

if TYPE_CHECKING:
    from .persistence.manager import PersistenceManager

log: logging.Logger = logging.getLogger("agent_runtime_core")

ADOPTION = 5.0  # seconds that a child is held to be given to workers

_LATE = object()


class Chronicle(Protocol):
    """Keeps what outlives a run: its part of a conversation, and what is to be audited."""

    async def fence(self, claim: Claim) -> None:
        """Have the claims before this one refused by the stores."""

    async def load(self, ctx: Any) -> None:
        """Give the run what was said before."""

    async def keep(self, result: RunResult) -> None:
        """Append what the run said; it has not ended yet, and may come here again."""

    def before(self, result: RunResult) -> Before | None:
        """The messages of a result that need not be recorded."""

    async def recall(self, text: str) -> RunResult:
        """A recorded result, with the messages that it names."""

    async def tell(self, result: RunResult | None) -> None:
        """Write what happened; `result` is that of a run that has ended."""


@dataclass(repr=False, eq=False)
class Services:
    """What a runner lends to the contexts it makes."""

    clock: Clock
    tools: ToolRegistry
    #: Seconds a wait stays in place before the run is parked; None: always in place.
    park_after: float | None = None
    #: Runs a child in this process: (agent, its run id, input, the parent's id, `recover`); None: workers do.
    call_agent: Callable[[AgentRuntime | str, str, dict[str, Any], str, str], Awaitable[RunResult]] | None = None
    #: RunLimits that no agent loop of these runs may go beyond.
    limits: RunLimits | None = None
    #: Where traces of these runs go, if anywhere.
    tracer: Tracer | None = None
    #: Gives the stores that `ctx.persistence` is; it is asked when they are needed.
    persistence: Callable[[], PersistenceManager] | None = None
    #: What a run says to its conversation and to an audit store, where the runner was given stores for that.
    chronicle: Callable[[RunRow], Chronicle] | None = None
    #: Entered while a run waits in place, so that its worker can do something else.
    idle: Callable[[], AbstractAsyncContextManager[None]] | None = None
    #: Hears of each piece of an answer (run id, sequence, bytes), and says what to wait for before the next.
    told: Callable[[str, int, int], asyncio.Future[None] | None] | None = None


_ANSWER = "arc.answer:"


def answer_id(request_id: str, message_id: str | None = None) -> str:
    """The id of a message that answers this question and no other."""
    return f"{_ANSWER}{request_id}" if message_id is None else f"{_ANSWER}{request_id}:{message_id}"


def answered(msg_id: str) -> str | None:
    """The question that a message with this id answers; None for one that may answer any."""
    return msg_id.removeprefix(_ANSWER).partition(":")[0] if msg_id.startswith(_ANSWER) else None


@dataclass(repr=False, eq=False)
class Place:
    """What a context shares with the runner that drives it."""

    cancelled: bool = False
    parked: bool = False
    sealed: bool = False
    refusal: Callable[[], Exception] | None = None  # of a block of somebody's own, which nobody ends once it is sealed
    mail: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[Any] | None = None
    stopped: bool = False  # the task was told to stop
    waited: float = 0.0  # seconds spent waiting in place
    waiting_since: float | None = None
    _awake: bool = False
    _waker: asyncio.Future[None] | None = None

    @property
    def is_here(self) -> bool:
        """Whether the present task is the one that the run began in."""
        return self.task is None or asyncio.current_task() is self.task

    async def unsealed(self) -> None:
        """Nothing gets past a park or an end: what is called then is refused or never returns, and writes nothing."""
        if self.sealed:
            await self.refuse()

    async def refuse(self) -> None:
        if self.refusal is not None:
            raise self.refusal()
        await asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """Cancel the task, and wake whoever waits for it: it may not listen."""
        self.stopped = True
        self.wake()
        if self.task is not None:
            self.task.cancel()

    def wake(self) -> None:
        """Have the runner look at its task."""
        self._awake = True
        if self._waker is not None and not self._waker.done():
            self._waker.set_result(None)

    async def woken(self) -> None:
        """Wait for the next `wake`, or one since the last time."""
        if not self._awake:
            self._waker = asyncio.get_running_loop().create_future()
            await self._waker
        self._awake = False


class Waits:
    """The waits of one context, and its mailbox."""

    def __init__(self, book: Book, row: RunRow, services: Services, place: Place) -> None:
        self._book, self._row, self._services, self._place = book, row, services, place
        self._clock = services.clock
        self._ledger = book.ledger
        self._mail: dict[tuple[str, str], deque[Mail]] = defaultdict(deque)  # what no wait took yet, by kind and name
        self._cursor = 0
        self._looking = asyncio.Lock()
        self._under_way: dict[object, tuple[Callable[[], Mail | None], float | None]] = {}  # waits: see `_wait`
        self._writing = 0  # ends of waits, and parks, that are being committed
        self._rest = asyncio.Event()  # something that went on beside the waits has ended
        self._unfit: set[int] = set()  # messages that were told of as no answer
        #: Messages that went to waits before this claim.
        self._used = {mail for record in book.done.values() if record.info is not None and (mail := _consumed(record))}

    # -- what agents wait for

    async def sleep(self, seconds: float) -> None:
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds < TOO_LATE:
            raise InvalidArgument(f"a sleep is a number of seconds of at least 0, not {brief(seconds)}")
        name, key = "sleep", self._book.occurrence("w", "sleep")
        async with self._book.only(name, key):
            if await self._replayed(name, key) is not None:
                return
            until = await self._begin(name, key, seconds)
            assert until is not None
            await self._wait(lambda: None, until, "sleep")
            await self._end(name, key, None)

    async def signal(self, name: str, timeout: float | None) -> Any:
        unbroken("a signal's name", name)
        return await self._message("signal", name, timeout, f"signal {name}")

    async def approve(
        self, name: str, details: Any, schema: dict[str, Any] | None, timeout: float | None, known_by: str | None
    ) -> Any:
        unbroken("a signal's name", name)
        request = {**self._book.owner().where(), "name": name, "details": details, "schema": schema}

        def ask(wait: str) -> Awaitable[Any]:
            # Known by the wait, and told also where records lie ahead: a step beside it may have ended since.
            text = encode({**request, "request_id": wait})
            return self._ledger.emit([(f"asked:{wait}", "approval.requested", text, self._clock.wall())])

        def answers(mail: Mail, wait: str) -> bool:
            if (meant := answered(mail.msg_id)) is not None:
                return meant == wait
            wrong = misfit(decode(mail.payload), schema or {})  # it came by another way, or before the question
            if wrong is not None and mail.seq not in self._unfit:
                self._unfit.add(mail.seq)
                log.warning("what came for approval %.100r does not fit, and is no answer: %s", name, wrong)
            return wrong is None

        return await self._message("signal", name, timeout, f"approval {name}", ask, known_by, answers)

    async def review(self, name: str, key: str, start: int) -> Happened | None:
        """Park until somebody says what became of a step in doubt; the answer is about that start and no other."""
        step = step_id(self._row.run_id, name, key)
        request = {"step_name": name, "step_id": step, "signal": f"in_doubt:{name}"}
        # Known by the start, and told also where records lie ahead: a step beside it may have ended since.
        row = (f"doubt:{step}:{start}", "step.in_doubt", encode(request), self._clock.wall())
        answer = await self._message(
            "signal", f"in_doubt:{name}", None, "in_doubt", lambda _: self._ledger.emit([row]), f"{step}:{start}"
        )
        outcome = answer.get("outcome") if isinstance(answer, dict) else answer
        if outcome == "retry":
            return None
        if outcome == "done" and isinstance(answer, dict):
            return Happened(answer.get("result"))
        raise RunFailed(f"step {name!r} was reviewed as failed", "failed", answer)

    async def child(self, agent: AgentRuntime | str, input: dict[str, Any], key: str | None) -> RunResult:
        agent_key = agent if isinstance(agent, str) else getattr(agent, "key", None)
        if not isinstance(agent_key, str) or isinstance(agent, type):
            raise InvalidArgument(f"call() takes an agent or the key of one, not {brief(agent)}")
        book = self._book
        name = f"call:{agent_key}"
        mark, _ = arguments_digest((input,), {})
        place = f"k:{key}" if key is not None else book.occurrence("c", name, mark)
        async with book.only(name, place):
            record = await self._replayed(name, place)
            if record is None:
                try:
                    record = await self._child(name, place, agent, agent_key, input, mark)
                except asyncio.CancelledError:  # by its caller, who may call it once more
                    book.ask_again(name, place, mark, FRAME.get())
                    raise
        result = result_of(cast("dict[str, Any]", decode(record.result or "{}")))
        try:
            return result.raise_for_status()
        except RunFailed:
            book.spoilt.add((name, place))
            raise

    async def _child(
        self, name: str, place: str, agent: AgentRuntime | str, agent_key: str, input: dict[str, Any], mark: str | None
    ) -> Record:
        book, queue = self._book, self._ledger.queue
        child = str(child_run_id(step_id(self._row.run_id, name, place)))
        inline = self._services.call_agent
        row = queue.new_row(
            child, agent_key, input, None, self._row.priority, parent_run_id=self._row.run_id,
            origin="inline" if inline else "",
        )  # fmt: skip
        there = (name, place) in book.begun
        if not there:
            record = book.started(name, place, quiet=True, info={"child": child, **self._apart()})
            there = not await book.tell(record, [] if inline else [Op("queue.insert", (row,))])
            book.begun[name, place] = record.seq
        if there and inline is None and (unheard := await self._again(row)) is not None:
            return await self._end(name, place, unheard, mark=mark)
        if inline is not None:
            # Whoever goes on with this run goes on with it too.
            recover = "inline" if self._row.origin else "worker"
            ended = payload_of(await inline(agent, child, input, self._row.run_id, recover))
            return await self._end(name, place, ended, mark=mark)
        mail = await self._wait(lambda: self._find("child", child), None, f"child {child}")
        return await self._end(name, place, decode(mail.payload), mail, mark=mark)

    async def _again(self, row: RunRow) -> Any:
        """See that a child which was called before is there for workers; what it came to, if it ended unheard.

        That is while this run had ended too, by its own fault or cancelled with it: it told nobody then.
        """
        ledger, child = self._ledger, row.run_id
        while True:
            await self._look()
            mail = self._find("child", child)
            if mail is not None and await self._is_of_before(mail, child):
                self._take(mail)
            elif mail is not None:
                return None  # it has told, and may be deleted since
            there: RunRow = (await ledger.write(queue=[Op("queue.insert", (row,))]))[2][0]
            if there.status in LIVE and self._before(there.cancel_at):
                await self._wait(lambda: self._find("child", child), None, f"child {child}")  # to have let go
                continue
            await self._look()
            if (there.status in LIVE and not there.origin) or self._find("child", child) is not None:
                return None
            if there.status == "succeeded":
                record = await ledger.state.ending(child)
                output = cast("dict[str, Any]", decode(there.output or "{}"))
                return payload_of(RunResult(output)) if record is None else decode(record.result or "{}")
            with suppress(Moved, LeaseLost):
                if there.status in LIVE:
                    await self._adopt(row)
                else:
                    await ledger.write(queue=[Op("queue.reopen", (child, (there.status,), self._clock.wall()))])
                return None

    async def _is_of_before(self, mail: Mail, child: str) -> bool:
        """Whether a child that did not succeed ended, or was cancelled, before this generation of the run began, and
        no earlier one used that: it goes on with this one, or does already."""
        status = result_of(cast("dict[str, Any]", decode(mail.payload))).status
        if status is RunStatus.SUCCEEDED or self._book.reopened is None:
            return False
        if self._before(mail.t) or self._mail["child", child][-1] is not mail:  # it tells each end once
            return True
        there = await self._ledger.queue.row(child)
        if there is None:
            return False
        if mail.msg_id.rpartition(":")[2] != str(there.generation):
            return True
        return status is RunStatus.CANCELLED and self._before(there.cancel_at)

    def _before(self, at: float | None) -> bool:
        """Whether that was before this generation of the run began."""
        since = self._book.reopened
        return at is not None and since is not None and at <= since

    async def _adopt(self, row: RunRow) -> None:
        """Leave to workers a child that was called in place, unless it still runs there."""
        queue = self._ledger.queue
        outcome, child = await queue.take(row, self._row.worker, ADOPTION, insert=False, reopen=False)
        if outcome == "claimed" and child is not None:
            how = queue.keep(child, child.claim_id)._replace(status="pending", parked=child.parked)
            await queue.settle(child.run_id, how)

    # -- records of waits

    async def _replayed(self, name: str, key: str) -> Record | None:
        book = self._book
        if book.questions:
            await book.settle()
        record = book.done.get((name, key))
        if record is not None:
            book.passed(record)
        return record

    async def _begin(self, name: str, key: str, seconds: float | None) -> float | None:
        """When the wait is over at the latest: as first recorded, or from now."""
        book = self._book
        if (name, key) in book.begun:
            return book.until.get((name, key))
        until = None if seconds is None else self._clock.wall() + seconds
        record = book.started(name, key, quiet=True, info={"until": until, **self._apart()})
        # For the next try of the step that this wait is in, too.
        book.begun[name, key], book.until[name, key] = record.seq, until
        await self._ledger.note(record)
        return until

    def _apart(self) -> dict[str, Any]:
        return {"beside": True} if self._book.is_apart() else {}

    async def _end(
        self, name: str, key: str, value: Any, mail: Mail | None = None, *, late: bool = False, mark: str | None = None
    ) -> Record:
        book = self._book
        info: dict[str, Any] = {"mail": mail.seq} if mail is not None else {"late": True} if late else {}
        record = book.noted(name, key, encode(value, max_bytes=MAX_WHOLE), encode(info) if info else None, mark)
        self._writing += 1
        try:
            await book.write((record,), (), FRAME.get())
        except BaseException as error:
            if mail is not None and not isinstance(error, UNHEARD):
                self._put_back(mail)
            raise
        finally:
            self._writing -= 1
            self._rest.set()
        book.begun.pop((name, key), None)
        book.until.pop((name, key), None)
        book.passed()
        return book.done[name, key]

    async def _message(
        self,
        kind: str,
        wanted: str,
        timeout: float | None,
        reason: str,
        ask: Callable[[str], Awaitable[Any]] | None = None,
        known_by: str | None = None,
        answers: Callable[[Mail, str], bool] = lambda mail, wait: True,
    ) -> Any:
        if timeout is not None and (not isinstance(timeout, (int, float)) or not 0 <= timeout < TOO_LATE):
            raise InvalidArgument(f"timeout is a number of seconds of at least 0, not {brief(timeout)}")
        name = f"{kind}:{wanted}"
        key = self._book.occurrence("w", name) if known_by is None else f"k:{known_by}"
        async with self._book.only(name, key):
            record = await self._replayed(name, key)
            if record is None:
                wait = step_id(self._row.run_id, name, key)
                if ask is not None and (name, key) not in self._book.begun:
                    await ask(wait)
                until = await self._begin(name, key, timeout)
                mail = await self._wait(
                    lambda: self._find(kind, wanted, lambda mail: answers(mail, wait)), until, reason
                )
                if mail is _LATE:
                    record = await self._end(name, key, None, late=True)
                else:
                    record = await self._end(name, key, decode(mail.payload), mail)
        if record.info is not None and json.loads(record.info).get("late"):
            self._book.spoilt.add((name, key))
            raise WaitTimeout(f"no {reason:.300} came {'in time' if timeout is None else f'within {timeout:g} s'}")
        return decode(record.result or "null")

    # -- the mailbox

    async def _look(self) -> None:
        async with self._looking:  # who came first looks first, and nothing is read twice
            heard, new = self._place.mail, None
            heard.clear()
            try:
                new = await self._ledger.queue.mail(self._row.run_id, self._cursor)
            finally:
                if new is None or new:  # another wait may just have looked in vain, and is about to listen
                    heard.set()
            for mail in new:
                if mail.seq not in self._used:
                    self._mail[mail.kind, mail.name].append(mail)
                self._cursor = mail.seq

    def _find(self, kind: str, name: str, fits: Callable[[Mail], bool] = lambda mail: True) -> Mail | None:
        return next((mail for mail in self._mail.get((kind, name), ()) if fits(mail)), None)

    def _take(self, mail: Mail) -> None:
        self._mail[mail.kind, mail.name].remove(mail)

    def _put_back(self, mail: Mail) -> None:
        """Have a message that was taken be found again, in its turn."""
        there = self._mail[mail.kind, mail.name]
        there.insert(bisect([each.seq for each in there], mail.seq), mail)

    # -- waiting itself

    async def _wait(self, found: Callable[[], Mail | None], until: float | None, reason: str) -> Any:
        """Until there is such a message, or `until` (wall seconds): the message, or _LATE."""
        this = object()
        self._under_way[this] = (found, until)
        try:
            return await self._waited(found, until, reason)
        finally:
            del self._under_way[this]
            self._rest.set()

    async def _waited(self, found: Callable[[], Mail | None], until: float | None, reason: str) -> Any:
        boot, park_after = self._clock.boot, self._services.park_after
        park_at = None if park_after is None or FRAME.get() is not None else boot() + park_after
        passed = -1
        while True:
            await self._look()
            if self._place.sealed:  # another wait has parked the run
                await asyncio.get_running_loop().create_future()
            mail = found()
            if mail is not None:
                self._take(mail)  # at once: another wait may look for one of that name while this is recorded
                return mail
            left = None if until is None else until - self._clock.wall()
            if left is not None and left <= 0:
                return _LATE
            if park_at is not None and (early := park_at - boot()) > 0:
                await self._pause(early if left is None else min(left, early))
            elif park_at is None or not self._idle():
                await self._pause(left, or_idle=park_at is not None)
            elif passed != self._book.boundary:
                # What was started together with this may wait too, and what has just ended beside it goes on.
                passed = self._book.boundary
                await _turns()
            elif self._book.questions:
                await self._book.settle()
            else:
                cursor = self._cursor
                await self._park(reason)
                await self._look()
                if self._cursor == cursor:
                    park_at = None  # no news, so it is being cancelled: the heart is about to say so

    def _idle(self) -> bool:
        """Whether the run does nothing but wait: no step is in flight, and no wait beside this one is over."""
        if self._book.running or self._writing:
            return False
        now = self._clock.wall()
        return not any(found() or (until is not None and until <= now) for found, until in self._under_way.values())

    async def _until_idle(self) -> None:
        self._book.at_rest = self._rest.set
        while not self._idle():
            self._rest.clear()
            await self._rest.wait()
            await _turns()  # what comes after that which has ended

    async def _pause(self, seconds: float | None, *, or_idle: bool = False) -> None:
        """Until mail comes, or `seconds` on the injected clock, or the run does nothing but wait.

        The worker's slot is free meanwhile.
        """
        waits: list[asyncio.Task[Any]] = [asyncio.ensure_future(self._place.mail.wait())]
        if seconds is not None:
            waits = [*waits, asyncio.ensure_future(self._until(self._clock.boot() + seconds))]
        if or_idle:
            waits = [*waits, asyncio.ensure_future(self._until_idle())]
        place, alone = self._place, self._place.waiting_since is None and self._book.running == 0
        if alone:
            place.waiting_since = self._clock.boot()
        idle = self._services.idle() if alone and self._services.idle is not None else nullcontext()
        try:
            async with idle:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            if alone and place.waiting_since is not None:
                place.waited += self._clock.boot() - place.waiting_since
                place.waiting_since = None

    async def _until(self, at: float) -> None:
        """Until `at` by the boot clock, which may have moved on before this began."""
        if (left := at - self._clock.boot()) > 0:
            await self._clock.sleep(left)

    async def _park(self, reason: str) -> None:
        """Give the run back as waiting, until the first of its waits is over. Returns only if a message or a request
        to cancel came before the commit."""
        row = self._row
        ends = [until for _, until in self._under_way.values()]
        due = min((at for at in (*ends, row.deadline) if at is not None), default=0.0)
        how = Settle(
            row.claim_id, "waiting", self._clock.wall(), due_at=due, parked=1, reason=reason,
            failures=row.failures, crashes=row.crashes, stalls=row.stalls, mark=row.mark, cursor=self._cursor,
        )  # fmt: skip
        self._writing += 1
        try:
            await self._ledger.settle(how)
        except Moved:
            await self._ledger.status("running")
            return
        finally:
            self._writing -= 1
            self._rest.set()
        place = self._place
        place.parked = place.sealed = True
        place.stop()
        await asyncio.get_running_loop().create_future()


async def _turns() -> None:
    """Let other tasks of this loop go on: a few turns, for one task's end reaches another by way of callbacks."""
    for _ in range(5):
        await asyncio.sleep(0)


def _consumed(record: Record) -> int:
    info = record.info
    return int(json.loads(info).get("mail", 0)) if info is not None and '"mail"' in info else 0
