"""Ask about stored runs and act on them, from any process."""

from __future__ import annotations

import contextlib
import datetime as _dt
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, cast
from uuid import UUID

from .._core.arguments import checked_int, checked_name, checked_seconds, checked_tenant, run_input
from .._core.codec.json import decode_dict, encode
from .._core.ids import is_uuid, new_ulid, stored_id, unbroken
from .._core.lazy_import import load
from .._core.log import about_run, log
from .._core.validation import must
from .._engines.base import LOWEST_TOKEN, Committer, Op, end_fence
from .._execution.mailbox import checked_when, mailbox_id, mailbox_payload, message_of, user_message
from .._execution.run_control import RunRecorder
from ..errors import IllegalTransition, LeaseLost, brief, text_of
from ..events.base import EventBus
from ..events.event import Event, size_of
from ..interfaces import RunResult
from ..limits import RunLimits, named_limits
from ..portal import call, iterate
from ..queue.base import RunQueue
from ..queue.records import (
    ANSWER,
    CODE_VERSION,
    LIMITS,
    LIVE,
    MESSAGE,
    SCHEDULE,
    SIGNAL_ONLY,
    RowChanged,
    RunRow,
    answer_id,
    same_message,
    unreadable,
)
from ..registry import Registry
from ..state.base import StateStore
from ..status import TERMINAL, RunStatus, status_words
from .approvals import ApprovalRequest, AskedRequests, decisions, open_requests
from .backends import Backends, result_of
from .backpressure import Backpressure, Reader
from .cancellation import AbandonedRuns, cancel_tree, cancel_with_children
from .finding import Finder, RunList, checked_sort
from .forking import fork
from .pools import PoolInfo, pools
from .retention import forget, vacuum
from .run_watcher import CHECK_INTERVAL, RunWatcher, closed, pages_until_ended
from .schedules import Schedules
from .search_index import SearchIndex
from .settings import RunInfo, RunnerConfig, content_filter, no_messages_reason, run_filter

if TYPE_CHECKING:
    from ..persistence.documents.base import DocumentStore
    from ..persistence.manager import PersistenceManager
    from .erasure import Erasure


def _manager(name: str) -> Any:
    return load(f"..persistence.manager:{name}", package=__package__)


class RunClient:
    """The part of `AgentRunner` that asks about runs and acts on them, whichever process executes them."""

    #: The schedules of the store, which start runs at their times.
    schedules: Schedules

    def __init__(
        self,
        backends: Backends,
        config: RunnerConfig,
        registry: Registry,
        persistence: PersistenceManager | Literal["default"] | None,
    ) -> None:
        self.backends = backends
        self.config = config
        self.registry = registry
        self._flow = Backpressure(config.max_unsent_bytes, lambda: self.event_bus)
        self._stores = None if isinstance(persistence, str) else persistence
        self._keeps_conversations: bool = persistence is not None
        self._warned_of: set[str] = set()  # keys of agents whose conversations are not kept
        self._own_stores: PersistenceManager | None = None
        #: Queue, events and state are at one URL, so the stores are there too.
        self.stores_at_url: bool = False

    @property
    def backpressure_seconds(self) -> float:
        """How long runs of this process have waited for readers of their answers."""
        return self._flow.waited_seconds

    @cached_property
    def search_index(self) -> SearchIndex:
        """The full-text index that `runs(search=…)` uses, once `search_index.build()` has created it."""
        return SearchIndex(self.queue, self.state_store)

    def _prepare(self) -> None:
        self.watcher: RunWatcher = RunWatcher(self.queue)
        self._closed = False

    def _refuse_closed(self) -> None:
        if self._closed:  # also over stores in memory, which are never closed: no process would execute the run
            raise closed()

    def _require_writable(self) -> None:
        """Raise StorageClosed if the runner was closed, and NotSupported if its store was opened read-only."""
        self._refuse_closed()
        self.backends.require_writable()

    # -- stores

    @property
    def persistence(self) -> PersistenceManager:
        """The stores that agents use as `ctx.persistence`.

        They are the stores that you passed, else the stores at the URL of the runner, else the stores of the process.
        """
        if self._stores is not None:
            return self._stores
        if not self.stores_at_url:
            return cast("PersistenceManager", _manager("get_persistence_manager")())
        if self._own_stores is None:
            config = _manager("PersistenceConfig").on(cast(Any, self.queue).engine)
            self._own_stores = _manager("PersistenceManager")(config)
        return cast("PersistenceManager", self._own_stores)

    @property
    def keeps_conversations(self) -> bool:
        """Whether the runner appends the messages of runs to conversations in `persistence`."""
        return self._conversation_services()[0] is not None

    def document_stores(self) -> list[DocumentStore]:
        """Return the stores of `persistence` that belong to this runner: none if it uses the stores of the process."""
        return [] if self._stores is None and not self.stores_at_url else self.persistence.document_stores()

    def _fenced_stores(self) -> list[Committer]:
        """Where else the claims of runs may be known."""
        return [] if self._stores is None else [each.commits for each in self._stores.document_stores()]

    def _recorder(self, row: RunRow, *, audited: bool = True) -> RunRecorder:
        make = cast("Any", load(".run_recorder:StoredRunRecorder", package=__package__))
        stores = self.persistence.for_tenant(row.tenant or None)
        return cast(RunRecorder, make(stores, self.backends, row, audited=audited))

    def _conversation_services(
        self,
    ) -> tuple[Callable[[RunRow], RunRecorder | None] | None, Callable[[RunRow], None] | None]:
        """Return `Services.recorder` and `Services.not_kept` of this runner."""
        if self._stores is not None:
            return self._recorder, None
        if not self._keeps_conversations:
            return None, None
        return (self._default_recorder, None) if self.stores_at_url else (None, self._warn_not_kept)

    def _default_recorder(self, row: RunRow) -> RunRecorder | None:
        """Keep the conversation of the run in the stores at the runner's URL.

        A run that names no conversation opens no store: it must not pay for what it does not use.
        """
        return self._recorder(row, audited=False) if '"conversation_id"' in row.input else None

    def _warn_not_kept(self, row: RunRow) -> None:
        """Warn once per agent that its runs name conversations which are not stored."""
        if row.agent not in self._warned_of:
            self._warned_of.add(row.agent)
            log.warning(
                "conversation of run %s (agent %s) is not stored: its runner was not opened from a URL and has no "
                "persistence. Pass persistence=PersistenceManager.open(path_or_url) to AgentRunner to keep "
                "conversations, or persistence=None to turn this warning off",
                row.run_id,
                row.agent,
                extra=about_run(row.run_id, row.attempt, row.tenant),
            )

    @property
    def queue(self) -> RunQueue:
        """The run queue."""
        return self.backends.queue

    @property
    def event_bus(self) -> EventBus:
        """The event bus."""
        return self.backends.bus

    @property
    def state_store(self) -> StateStore:
        """The state store."""
        return self.backends.state

    # -- asking

    async def get_run(self, run_id: UUID | str, *, tenant: str | None = None) -> RunInfo:
        """Return the status and description of a run.

        Args:
            run_id: The run, by its id or its key.
            tenant: The tenant whose run it is. Every method that takes a run id takes it too: a run key is a name
                within its tenant. None means the run without a tenant, or else the only tenant's run with that key.

        Raises:
            InvalidArgument: `tenant` is None, and several tenants use the run key.
            UnknownRun: No such run is stored.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         await runner.submit("report", {"month": "May"}, run_id="report-1")
            ...         return (await runner.get_run("report-1")).input
            >>> asyncio.run(main())
            {'month': 'May'}
        """
        return RunInfo.of(await self.queue.require(run_id, tenant))

    async def runs(
        self,
        status: RunStatus | str | Sequence[RunStatus | str] | None = None,
        agent: str | None = None,
        since: _dt.datetime | float | None = None,
        *,
        limit: int = 1000,
        until: _dt.datetime | float | None = None,
        prefix: str | None = None,
        parent: UUID | str | None = None,
        conversation: UUID | str | None = None,
        concurrency_key: str | None = None,
        reason: str | None = None,
        newest_first: bool = False,
        tenant: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        tag: str | None = None,
        min_attempts: int = 1,
        error_type: str | None = None,
        code_version: str | None = None,
        search: str | None = None,
        sort: str | None = None,
    ) -> RunList:
        """List runs in order of submission.

        No index of a store has what `metadata`, `tag`, `min_attempts`, `error_type`, `code_version`, `search` and
        `sort` need. With one of them at most 10,000 runs and 64 MiB of contents are read. The `note` of the list says
        which runs were not read. After `search_index.build()`, `search` with at least 3 characters reads only runs
        that may have the text, of any time.

        Args:
            status: Only runs with this status, or with one of these. Dead letters have the status "dead".
            agent: Only runs of the agent with this key.
            since: Only runs created at this time or later.
            limit: How many runs at most.
            until: Only runs created before this time.
            prefix: Only runs whose run id, or the id that you passed as `run_id`, begins with this.
            parent: Only child runs of this run.
            conversation: Only runs whose input has this `conversation_id`.
            concurrency_key: Only runs with this concurrency key.
            reason: Only runs with this reason. "signal" is also the reason of runs that wait for the signal "go",
                which have the reason "signal go".
            newest_first: List the runs by the time of their submission instead, the newest first.
            tenant: Only runs of this tenant.
            metadata: Only runs whose metadata has these keys with these values. 3 and "3" are equal.
            tag: Only runs with this tag.
            min_attempts: Only runs with at least so many attempts.
            error_type: Only runs whose last error has this type, such as "ConnectionError".
            code_version: Only runs that code of this version began, or continues after `resume(code_version=…)`.
            search: Only runs with this text in their id, input, output, errors, messages, results of steps or metadata.
                Upper and lower case are equal. Names of fields are not searched. Without `since`, the runs of the last
                day.
            sort: "age", "duration", "cost" or "attempts": the greatest value first. Without `since`, the runs of the
                last day.

        Returns:
            The runs; an empty list if there are none.

        Raises:
            InvalidArgument: An argument is not of its type, or `until` is before `since`.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         for month in ("April", "May"):
            ...             await runner.submit("report", {"month": month})
            ...         return [run.input["month"] for run in await runner.runs("pending", newest_first=True)]
            >>> asyncio.run(main())
            ['May', 'April']
        """
        wanted = run_filter(
            status, agent, since, until, prefix, parent, conversation, concurrency_key, reason, newest_first, limit,
            tenant, min_attempts=min_attempts,
            contents=content_filter(metadata, tag, error_type, code_version, search),
        )  # fmt: skip
        if checked_sort(sort) is None and wanted == wanted.of_store:
            return RunList(RunInfo.of(row) for row in await self.queue.find_runs(wanted))
        if sort is not None:
            wanted = wanted._replace(newest_first=True)
        found = await Finder(self.queue, self.state_store, wanted, sort).find(limit)
        runs = RunList(RunInfo.of(row) for row in found.rows)
        runs.note = found.note
        return runs

    async def approvals(
        self, limit: int = 100, after: str | None = None, *, agent: str | None = None, tenant: str | None = None
    ) -> list[ApprovalRequest]:
        """List the open questions of all runs to people, the oldest first: approvals and reviews of steps in doubt.

        Questions of a finished run are not open, nor are questions that timed out.

        Args:
            limit: How many at most. A page with fewer questions is the last page.
            after: The `cursor` of the last request of the page before. None means the first page.
            agent: Only questions of runs of the agent with this key.
            tenant: Only questions of runs of this tenant.

        Returns:
            The questions of one page.

        Raises:
            InvalidArgument: An argument is invalid, such as an `after` that is no cursor.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         return await runner.approvals()
            >>> asyncio.run(main())
            []
        """
        if agent is not None and not isinstance(agent, str):
            raise must("agent", "be an agent key", agent, "Pass agent.key")
        found = await open_requests(self.queue, checked_int("limit", limit), after, agent, checked_tenant(tenant))
        return [each for _, each in found]

    async def wait(self, run_id: UUID | str, timeout: float | None = None, *, tenant: str | None = None) -> RunResult:
        """Return the run's result, waiting up to `timeout` seconds for it to finish.

        Args:
            run_id: The run.
            timeout: Seconds. 0 only checks whether the run is finished; None waits without a limit.
            tenant: As in `get_run`.

        Raises:
            TimeoutError: The run did not finish in that time.
            UnknownRun: No such run is stored.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         await runner.submit("report", run_id="report-1")
            ...         try:
            ...             await runner.wait("report-1", timeout=0)
            ...         except TimeoutError:
            ...             return "not finished"
            >>> asyncio.run(main())
            'not finished'
        """
        if timeout is not None:
            timeout = checked_seconds("timeout", timeout)
        key = await self._id_of(run_id, tenant)
        ended = await self._until_ended(key, at_most=timeout)
        if ended is None:
            raise TimeoutError(
                f"run {str(run_id)!r} has not finished within {timeout:g} s. Wait longer, or look at "
                "runner.get_run(run_id)"
            )
        return await self._result(ended)

    async def _until_ended(self, run_id: str, at_most: float | None = None) -> RunRow | None:
        return await self.watcher.until_ended(run_id, at_most)

    async def _result(self, row: RunRow) -> RunResult:
        return await result_of(self.backends, row, self._recorder)

    async def stream(
        self, run_id: UUID | str, since_sequence: int = 0, backpressure: bool = False,
        *, max_unsent_bytes: int | None = None, tenant: str | None = None,
    ) -> AsyncGenerator[Event, None]:  # fmt: skip
        """Yield the run's events, stored events and then live events, until the run is finished.

        Args:
            run_id: The run.
            since_sequence: The sequence number of the first event.
            backpressure: Slow the run down. It waits before it publishes more of an answer while more than
                `max_unsent_bytes` are not read here. An event counts as read when the next event is requested. The run
                may be executed by another process, which waits only for readers that live.
            max_unsent_bytes: Bytes. None means the runner's setting.
            tenant: As in `get_run`.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
            >>> class Hello(AgentRuntime):
            ...     key = "hello"
            ...     async def run(self, ctx):
            ...         await ctx.emit("hello.said", {"to": "Ada"})
            ...         return RunResult()
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         await runner.execute(Hello(), run_id="hello-1")
            ...         return [event.event_type async for event in runner.stream("hello-1")]
            >>> asyncio.run(main())
            ['run.started', 'hello.said', 'run.succeeded']
        """
        key = (await self.queue.require(run_id, tenant)).run_id
        async with self._following(key, since_sequence, backpressure, max_unsent_bytes) as (pages, output):
            async for page in pages:
                for event in page:
                    yield event
                    if output is not None:
                        output.read_up_to(event.sequence, size_of(event))

    async def event_pages(
        self, run_id: UUID | str, since_sequence: int = 0, backpressure: bool = False,
        *, max_unsent_bytes: int | None = None, tenant: str | None = None,
    ) -> AsyncGenerator[Sequence[Event], None]:  # fmt: skip
        """Yield the events of `stream` in pages of at most 256 KiB, for code that sends them to many readers.

        Do not modify a page: readers in one event loop that are at the same sequence get the same object.

        Args:
            run_id: The run.
            since_sequence: The sequence number of the first event.
            backpressure: As in `stream`. The events of a page count as read when the next page is requested.
            max_unsent_bytes: Bytes. None means the runner's setting.
            tenant: As in `get_run`.
        """
        key = (await self.queue.require(run_id, tenant)).run_id
        async with self._following(key, since_sequence, backpressure, max_unsent_bytes) as (pages, output):
            async for page in pages:
                yield page
                if output is not None:
                    output.read_up_to(page[-1].sequence, sum(map(size_of, page)))

    @contextlib.asynccontextmanager
    async def _following(
        self, key: str, since: int, backpressure: bool, max_unsent_bytes: int | None
    ) -> AsyncIterator[tuple[AsyncGenerator[Sequence[Event], None], Reader | None]]:
        checked_int("since_sequence", since, least=0)
        most = None if max_unsent_bytes is None else checked_int("max_unsent_bytes", max_unsent_bytes)
        async with contextlib.AsyncExitStack() as stack:
            output = None
            if backpressure:
                output = stack.enter_context(self._flow.attached(key, since, most))
                await stack.enter_async_context(self._flow.reporting(key, output))
            pages = await stack.enter_async_context(pages_until_ended(self.watcher, self.event_bus, key, since))
            yield pages, output

    # -- acting on runs

    async def cancel(
        self, run_id: UUID | str, *, wait: bool = False, by: str | None = None, tenant: str | None = None
    ) -> bool | RunStatus:
        """Cancel a run and its child runs.

        If the process of a run ended, a worker with its agent takes the run over. If there is none, or none takes it
        over within a heartbeat interval, this call ends the run without its `cancel` hook.

        Args:
            run_id: The run.
            wait: Wait until the run is finished.
            by: Who cancels it. The name is stored with the run, and shown by its page.
            tenant: As in `get_run`.

        Returns:
            True if the request is stored, False if the run had finished before. With `wait`, the final status.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         await runner.submit("report", run_id="report-1")
            ...         return await runner.cancel("report-1"), await runner.cancel("report-1")
            >>> asyncio.run(main())
            (True, False)
        """
        self._require_writable()
        asked = None
        while True:
            row = await self.queue.require(run_id, tenant)
            if row.status not in LIVE:
                if row.status == "cancelled":
                    await cancel_with_children(self.backends, self.registry, row)
                break
            with contextlib.suppress(RowChanged):
                asked = await cancel_tree(self.backends, self.registry, row, self._keep_turns, by)
            if asked is not None:
                break
        abandoned = self._abandoned()
        if asked is None or any(map(abandoned.may_be_over, asked)):
            await abandoned.end_tree(row.run_id, waiting=wait)
        if not wait:
            return asked is not None
        while (ended := await self._until_ended(row.run_id, at_most=CHECK_INTERVAL)) is None:
            await abandoned.end_tree(row.run_id, waiting=True)
        return ended.decoded("status", RunStatus)

    def _abandoned(self) -> AbandonedRuns:
        stores, interval = self._fenced_stores(), self.config.heartbeat_interval
        return AbandonedRuns(self.backends, self.registry, stores, interval, self._keep_turns)

    async def _keep_turns(self, row: RunRow) -> None:
        """Keep what the tools of a run did in its conversation, before it is cancelled without a claim."""
        make = self._conversation_services()[0]
        if row.claimed_at is None or row.conversation is None or make is None:
            return
        try:
            if (error := unreadable(row)) is not None:
                raise error
            if (recorder := make(row)) is not None:
                mail = await self.queue.mail(row.run_id) if row.mail_seq else []
                sent = [message_of(each) for each in mail if each.kind == MESSAGE]
                await recorder.keep(RunResult(), sent, rejected=False, unanswered=False)
        except Exception as error:  # noqa: BLE001 - a store of the application may raise anything
            log.warning(
                "the messages of run %s are not in its conversation: %s",
                row.run_key or row.run_id,
                text_of(error),
                extra=about_run(row.run_id, row.attempt, row.tenant),
            )

    async def signal(
        self, run_id: UUID | str, name: str, payload: Any = None, *, message_id: str | None = None,
        answers: bool = True, tenant: str | None = None,
    ) -> bool:  # fmt: skip
        """Send a signal to a run. It is kept until the run waits for a signal of that name.

        Args:
            run_id: The run.
            name: Name of the signal.
            payload: Its content, a JSON value.
            message_id: Signals with the same id are delivered once.
            answers: Whether `ctx.approve` of that name may take the signal as its answer. Pass False for a sender who
                may not approve.
            tenant: As in `get_run`.

        Returns:
            False if the run is finished.

        Raises:
            IdempotencyConflict: Another signal with this `message_id` was sent to the run.
            UnknownRun: No such run is stored.
        """
        self._require_writable()
        prefix = "" if answers else SIGNAL_ONLY
        return await self._signal(run_id, name, payload, message_id, prefix=prefix, tenant=tenant)

    async def _id_of(self, run_id: UUID | str, tenant: str | None) -> str:
        """Return the stored id of the run that a caller names. The store is asked only if that may matter."""
        if tenant is None and is_uuid(run_id):
            return stored_id(run_id)
        return (await self.queue.require(run_id, tenant)).run_id

    async def _signal(
        self, run_id: UUID | str, name: str, payload: Any, message_id: str | None, by: str | None = None,
        *, prefix: str = "", tenant: str | None = None,
    ) -> bool:  # fmt: skip
        name = unbroken("signal name", name)
        if message_id:
            message_id = unbroken("message_id", message_id)
            if message_id.startswith(ANSWER):  # it would answer a request without a check against its schema
                fix = "Use runner.approve to answer a request"
                raise must("message_id", f"not begin with {ANSWER!r}", message_id, fix)
        mail_id = prefix + (message_id or new_ulid(self.queue.clock))
        key = await self._id_of(run_id, tenant)
        status, _ = await self._post(key, "signal", name, encode(payload), mail_id, message_id, by)
        return status in LIVE

    async def _post(
        self, key: str, kind: str, name: str, payload: str, mail_id: str, message_id: str | None, by: str | None = None
    ) -> tuple[str, int]:
        """Put a message into the mailbox of a run; return what `RunQueue.post` returns.

        `mail_id` is the id in the mailbox for the `message_id` of the caller. `by` answers a question with it.

        Raises:
            IdempotencyConflict: The caller used the message id before, for another message.
            UnknownRun: No such run is stored.
        """
        op = self.queue.post_op(key, kind, name, payload, mail_id)
        ops = [op, *self.queue.acted_ops(key, "answer", by, mail_id)]
        status, number = (await self.queue.commits.commit(None, ops))[0]
        if status == "unknown":
            raise self.queue.unknown_run(key)
        if message_id and number:
            same_message(message_id, op.args[1], (await self.queue.mail(key, number - 1))[0])
        return status, number

    async def send(
        self,
        run_id: UUID | str,
        message: str | Mapping[str, Any],
        *,
        when: str = "next_turn",
        message_id: str | None = None,
        tenant: str | None = None,
    ) -> str:
        """Send a message to an agent that works on a run. It is stored when this returns.

        An agent loop takes new messages before each model call. If new messages arrive during the last model call, the
        loop continues. Other agents read messages with `ctx.messages()`.

        Args:
            run_id: The run.
            message: The text of the user, or a chat message with the role "user".
            when: "next_turn" waits for the end of the model call in flight, "interrupt" ends it. Running tools are
                never interrupted.
            message_id: Messages with the same id are stored once.
            tenant: As in `get_run`.

        Returns:
            The id of the message, as in the "message.received" event.

        Raises:
            IdempotencyConflict: Another message with this `message_id` was sent to the run.
            IllegalTransition: The run is finished.
            InvalidArgument: The message is empty, or not a message of the user.
            UnknownRun: No such run is stored.
        """
        self._require_writable()
        payload = mailbox_payload(user_message(message), checked_when(when))
        sent_id = unbroken("message_id", message_id) if message_id else new_ulid(self.queue.clock)
        key = await self._id_of(run_id, tenant)
        status, number = await self._post(key, MESSAGE, "", payload, mailbox_id(sent_id), message_id)
        if status not in LIVE and not number:  # with a number, it was stored before the run finished
            raise IllegalTransition(no_messages_reason(await self.queue.require(key), run_id))
        return sent_id

    async def approve(
        self,
        run_id: UUID | str,
        name: str,
        answer: Any = True,
        *,
        request_id: str | None = None,
        message_id: str | None = None,
        by: str | None = None,
        tenant: str | None = None,
    ) -> bool:
        """Answer `ctx.approve(name, …)`.

        Args:
            run_id: The run.
            name: Name of the approval. An answer that arrives before the run asks is kept for it.
            answer: The answer, a JSON value.
            request_id: The id in the "approval.requested" event. None means the only open request of that name.
            message_id: Answers with the same id are delivered once.
            by: Who answers. The name is stored with the run, and shown by its page.
            tenant: As in `get_run`.

        Returns:
            False if the run is finished, or the request was answered before or is closed: its time limit was reached.

        Raises:
            IdempotencyConflict: Another answer with this `message_id` was sent to the request.
            InvalidArgument: The answer does not match the schema of the request, there is no such request, or several
                requests of that name are open and `request_id` is None. The message lists them.
            IllegalTransition: The code of the run cancelled its wait for the answer, so the question is closed.
            UnknownRun: No such run is stored.
        """
        self._require_writable()
        key = await self._id_of(run_id, tenant)
        if message_id:
            message_id = unbroken("message_id", message_id)
        asked = await AskedRequests.of(self.queue, self.event_bus, key, name, run_id)
        requests = asked.payloads
        if request_id is not None and (not isinstance(request_id, str) or request_id not in requests):
            where = f"request_id of approval {brief(name)} of run {str(run_id)!r}"
            raise must(
                where, "be the id of an approval.requested event", request_id, "Leave it out if only one is open"
            )
        if not requests:
            return await self._signal(key, name, answer, message_id, by)
        wanted = asked.chosen(request_id, message_id)
        if wanted is None:
            return False
        asked.check(wanted, answer)
        # A separate id for each answer: the first answer in the mailbox counts, and its caller must know that it does.
        mail_id = answer_id(wanted, message_id or new_ulid(self.queue.clock))
        status, number = await self._post(key, "signal", name, encode(answer), mail_id, message_id, by)
        if status not in LIVE or number <= asked.read + 1:
            return status in LIVE  # as the next message, or a message that was read above, it is the first answer
        return asked.decided_by(wanted, decisions(await self.queue.mail(key, asked.read))) == mail_id

    async def resume(
        self, run_id: UUID | str, *, limits: RunLimits | Mapping[str, Any] | None = None, by: str | None = None,
        tenant: str | None = None, code_version: str | None = None, restored: bool = False,
    ) -> RunInfo:  # fmt: skip
        """Open a new generation of a run that failed, timed out, was cancelled or is dead, for a worker.

        Completed steps keep their results. Counters of attempts and crashes start at 0. What the run used so far still
        counts against its limits.

        Args:
            run_id: The run, by its id or its key.
            limits: New limits of this run. The fields that are named replace the limits of the agent, of the runner and
                of the run's input; a mapping removes a limit with None. They are stored with the run and apply until
                another call replaces them. Child runs that have started keep the limits they started with.
            by: Who resumes it. The name is stored with the run, and shown by its page.
            tenant: As in `get_run`.
            code_version: The `code_version` of the agent whose code continues the run, instead of that which began it.
            restored: Confirm that the run had done nothing more than a restored store knows.

        Returns:
            The run, which is pending.

        Raises:
            IllegalTransition: The run is not finished, or it succeeded.
            InvalidArgument: `limits` contains an unknown name or an invalid value, or `code_version` is no name. The
                run stays as it was.
            UnknownRun: No such run is stored.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         await runner.submit("report", run_id="report-1")
            ...         await runner.cancel("report-1")
            ...         run = await runner.resume("report-1")
            ...         return run.status.value, run.generation
            >>> asyncio.run(main())
            ('pending', 2)
        """
        self._require_writable()
        named = named_limits(limits)
        if code_version is not None:
            checked_name("code_version", code_version)
        ended = await self.queue.require(run_id, tenant)
        key, now = ended.run_id, self.queue.clock.wall()
        expect = tuple(status for status in TERMINAL if status != "succeeded")
        pending = self.state_store.status_ops(self.queue, key, RunStatus.PENDING.value, now)
        queue, state = self.queue.commits, self.state_store.commits
        try:
            ops = [Op("queue.reopen", (key, expect, now)), *(pending if state is queue else [])]
            if named:
                ops.append(self.queue.post_op(key, LIMITS, "", encode(named)))
            if code_version is not None:
                ops.append(self.queue.post_op(key, CODE_VERSION, "", encode(code_version)))
            if restored:
                ops.append(self.queue.confirmed_op(key))
            ops += self.queue.acted_ops(key, "resume", by, f"resume:{ended.generation}")
            await queue.commit(None, ops)
        except RowChanged:
            row = await self.queue.require(key)
            raise IllegalTransition(
                f"cannot resume run {str(run_id)!r}: it {status_words(row.status)}. "
                "Only failed, timed-out, cancelled or dead runs can be resumed. Use runner.wait(run_id) for its result"
            ) from None
        if state is not queue:
            with contextlib.suppress(LeaseLost):  # a worker claimed the run already: its status is newer
                await state.commit(None, [end_fence(key, ended.claim_id or LOWEST_TOKEN), *pending])
        return await self.get_run(key)

    async def requeue(
        self, run_id: UUID | str, *, limits: RunLimits | Mapping[str, Any] | None = None, by: str | None = None,
        tenant: str | None = None, code_version: str | None = None,
    ) -> RunInfo:  # fmt: skip
        """Take a run out of the dead-letter queue. The same as `resume`.

        Args:
            run_id: The run, by its id or its key.
            limits: As in `resume`.
            by: As in `resume`.
            tenant: As in `get_run`.
            code_version: As in `resume`.

        Returns:
            The run, which is pending.

        Raises:
            IllegalTransition: The run is not finished, or it succeeded.
            UnknownRun: No such run is stored.
        """
        return await self.resume(run_id, limits=limits, by=by, tenant=tenant, code_version=code_version)

    async def pools(self, *, tenant: str | None = None) -> list[PoolInfo]:
        """List the pools of the store that count something now, by name.

        Args:
            tenant: Only the pools of this tenant. None lists all pools.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         return await runner.pools()
            >>> asyncio.run(main())
            []
        """
        return await pools(self.queue, checked_tenant(tenant))

    async def vacuum(
        self, retention: Mapping[str, float] | None = None, *, compact: bool | None = None, dry_run: bool = False
    ) -> int:
        """Delete finished runs that are older than the retention of their status.

        First it ends running runs as `cancel` does: cancellation was requested, and no process executes them.

        Args:
            retention: Seconds by final status. A status without an entry is kept. None means the runner's setting.
            compact: Shrink the SQLite file. No process can write to it in that time, so by default (None) a file of
                more than 64 MiB keeps its size and reuses its free space. True always shrinks it, False never.
            dry_run: Only count, and change nothing.

        Returns:
            How many runs were deleted, or would be. Live runs never are.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         await runner.submit("report", run_id="report-1")
            ...         await runner.cancel("report-1")
            ...         return await runner.vacuum({"cancelled": 0}), await runner.vacuum({"failed": 0})
            >>> asyncio.run(main())
            (1, 0)
        """
        kept = RunnerConfig(retention=retention).retention if retention is not None else self.config.retention
        if not dry_run:
            self._require_writable()
            await self._abandoned().end_all()
        return await vacuum(self.backends, kept, self._fenced_stores(), compact, dry_run=dry_run)

    async def discard(self, run_id: UUID | str, *, tenant: str | None = None) -> None:
        """Delete a finished run with its journal, events and messages. Its id can be used again.

        A run that was cancelled and that no process executes is ended first, as `cancel` does it.

        Args:
            run_id: The run.
            tenant: As in `get_run`.

        Raises:
            IllegalTransition: The run is not finished.
            UnknownRun: No such run is stored.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         await runner.submit("report", run_id="report-1")
            ...         await runner.cancel("report-1")
            ...         await runner.discard("report-1")
            ...         return await runner.runs()
            >>> asyncio.run(main())
            []
        """
        self._require_writable()
        row = await self.queue.require(run_id, tenant)
        if row.status in LIVE and row.cancel_at is not None:
            await self._abandoned().end_tree(row.run_id, waiting=False)
            row = await self.queue.require(row.run_id)
        while row.status not in LIVE:
            try:
                return await forget(self.backends, row, self._fenced_stores())
            except RowChanged:  # it was restarted since it was read, and is perhaps finished again
                row = await self.queue.require(row.run_id)
        raise IllegalTransition(
            f"cannot delete run {str(run_id)!r}: it {status_words(row.status)}. Cancel it first with "
            "runner.cancel(run_id)"
        )

    async def erase(
        self, *, tenant: str | None = None, conversation: UUID | str | None = None,
        run_ids: UUID | str | Sequence[UUID | str] = (), cancel: bool = False, dry_run: bool = False,
        compact: bool | None = None,
    ) -> Erasure:  # fmt: skip
        """Erase what a tenant, a conversation or runs have stored, with the child runs and forks of the runs.

        Runs are erased with their journals, events, messages and results in the ledger of effects, whose digests stay.
        So are documents that belong to the tenant, or that name the conversation or a run. A call that was interrupted
        can be repeated. The audit store gets a record without contents.

        Args:
            tenant: The tenant. Alone, all of it is erased. With `conversation` or `run_ids`, these are names within it.
            conversation: The conversation, by its name or its id, with its forks and their runs.
            run_ids: The runs. In a conversation that stays, their messages get another text.
            cancel: Cancel live runs, and wait until they have ended.
            dry_run: Only count.
            compact: Write a SQLite file again afterwards, so that its free pages have no text of before. No process can
                write to it in that time, so by default (None) this is not done for a file of more than 64 MiB.

        Returns:
            The counts, and what is left.

        Raises:
            IllegalTransition: A run is live, and `cancel` is not set. Nothing was erased.
            InvalidArgument: Nothing to erase is named, or a name is not valid.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         await runner.submit("report", tenant="acme")
            ...         return (await runner.erase(tenant="acme", cancel=True)).runs
            >>> asyncio.run(main())
            1
        """
        if not dry_run:
            self._require_writable()
        stores, module = self.document_stores(), cast(Any, load(".erasure", package=__package__))
        manager = self.persistence if stores or self._stores is not None else None
        place = module.StoreParts(self.backends, stores, manager, self._fenced_stores(), self._end)
        found = await module.erase(place, tenant, conversation, run_ids, cancel, dry_run, compact)
        return cast("Erasure", found)

    async def _end(self, row: RunRow) -> None:
        """End the run or delete the schedule in a row, before it is erased."""
        await (self.schedules.drop(row) if row.agent == SCHEDULE else self.cancel(row.run_id, wait=True))

    async def fork(
        self,
        run_id: UUID | str,
        after_step: str | tuple[str, str | int] | None = None,
        *,
        new_run_id: UUID | str | None = None,
        input: Mapping[str, Any] | None = None,
        effects: str = "refuse",
        by: str | None = None,
        tenant: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> UUID:
        """Store a new run that resumes from a step of this run.

        The new run gets the saved results of steps, waits and child runs, with the checkpoint of that point. Steps that
        did not complete are not copied. The new run is pending, with new idempotency keys and no usage yet; its
        metadata contains `forked_from`.

        Args:
            run_id: The run, which may still be executing.
            after_step: A step's name (its last occurrence), a pair (name, key or occurrence) or a step id. None copies
                all saved results.
            new_run_id: Names the new run. Repeating the call with the same id returns the same run.
            input: Another input. Saved results stay as they are.
            effects: What the new run does at a step with `on_in_doubt` other than "retry" that a run of the same
                lineage completed or started: "refuse" raises EffectAlreadyDone, "reuse" takes the saved result, "ask"
                requests the approval `repeat:<step name>`, and "repeat" runs the step again.
            by: Who forks it. The name is stored in `forked_from`, and shown by the page of the new run.
            tenant: As in `get_run`. The new run belongs to the tenant of this run, and `new_run_id` is a name within
                it.
            params: Merged into the "params" of the input of the new run.

        Returns:
            The id of the new run, once it is durable.

        Raises:
            IdempotencyConflict: `new_run_id` belongs to another run.
            InvalidArgument: There is no saved result of the step.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
            >>> class Hello(AgentRuntime):
            ...     key = "hello"
            ...     async def run(self, ctx):
            ...         name = await ctx.step("name", str.title, ctx.params["name"])
            ...         return RunResult(final_output={"response": f"Hello, {name}!"})
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         await runner.execute(Hello(), run_id="hello-1", params={"name": "ada"})
            ...         copy = await runner.fork("hello-1", "name", new_run_id="hello-2")
            ...         return (await runner.get_run(copy)).run_key
            >>> asyncio.run(main())
            'hello-2'
        """
        self._require_writable()
        source = await self.queue.require(run_id, tenant)
        if params is not None:
            input = run_input(source.decoded("input", decode_dict) if input is None else input, params)
        return await fork(self.backends, source, after_step, new_run_id, input, effects, by)

    # -- without a loop

    def stream_sync(
        self, run_id: UUID | str, since_sequence: int = 0, backpressure: bool = False,
        *, max_unsent_bytes: int | None = None, tenant: str | None = None,
    ) -> Iterator[Event]:  # fmt: skip
        """`stream` for code without an event loop, or in a thread next to a loop.

        for event in runner.stream_sync(run_id):
            print(event.event_type)

        Args:
            run_id: The run.
            since_sequence: As in `stream`.
            backpressure: As in `stream`.
            max_unsent_bytes: As in `stream`, in bytes.
            tenant: As in `get_run`.

        Yields:
            The events of the run, until it is finished.

        Examples:
            >>> from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
            >>> class Hello(AgentRuntime):
            ...     key = "hello"
            ...     def run(self, ctx):
            ...         return RunResult()
            >>> runner = AgentRunner.open("memory://")
            >>> _ = runner.execute_sync(Hello(), run_id="hello-1")
            >>> [event.event_type for event in runner.stream_sync("hello-1")]
            ['run.started', 'run.succeeded']
        """
        follow = partial(self.stream, max_unsent_bytes=max_unsent_bytes, tenant=tenant)
        return iterate(follow, run_id, since_sequence, backpressure)

    def wait_sync(self, *args: Any, **kwargs: Any) -> RunResult:
        """`wait` for code without an event loop, or in a thread next to a loop.

        Args:
            *args: The arguments of `wait`.
            **kwargs: The keyword arguments of `wait`.

        Returns:
            What `wait` returns.

        Examples:
            >>> from agent_runtime_core import AgentRunner, AgentRuntime, RunResult
            >>> class Hello(AgentRuntime):
            ...     key = "hello"
            ...     def run(self, ctx):
            ...         return RunResult(final_output={"response": "Hello!"})
            >>> runner = AgentRunner.open("memory://")
            >>> _ = runner.execute_sync(Hello(), run_id="hello-1")
            >>> runner.wait_sync("hello-1").final_output
            {'response': 'Hello!'}
        """
        return call(self.wait, *args, **kwargs)

    def resume_sync(self, *args: Any, **kwargs: Any) -> RunInfo:
        """`resume` for code without an event loop, or in a thread next to a loop.

        Args:
            *args: The arguments of `resume`.
            **kwargs: The keyword arguments of `resume`.

        Returns:
            What `resume` returns.
        """
        return call(self.resume, *args, **kwargs)

    def requeue_sync(self, *args: Any, **kwargs: Any) -> RunInfo:
        """`requeue` for code without an event loop, or in a thread next to a loop.

        Args:
            *args: The arguments of `requeue`.
            **kwargs: The keyword arguments of `requeue`.

        Returns:
            What `requeue` returns.
        """
        return call(self.requeue, *args, **kwargs)
