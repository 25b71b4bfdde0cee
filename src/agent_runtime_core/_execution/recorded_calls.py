"""Model and tool calls of an agent loop, recorded as steps with explicit names and keys.

They publish no STEP_* events, and their errors are raised unwrapped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from .._core.codec.json import decode
from .._core.context_vars import restore
from .._core.event_types import EventType
from .._core.ids import step_id
from .._journal.record import is_copied
from ..limits import Budget, ModelLimits
from ..llm._prices import provider_of
from ..tools.results import text_of_result
from .checkpoint_writer import unsaved_steps
from .context import Context
from .journal_view import CONCURRENT_INFO, POOLS_FIELD
from .mailbox import with_consumed
from .pools import PooledCalls
from .run_control import RunControl
from .step import CURRENT_STEP, DEFAULT_OPTIONS, StepOptions, StepScope, run_body
from .step_failure import original_error
from .step_journal import StepJournal
from .step_runner import StepCall, run_step
from .usage import add_charge, charged_by, total

#: Returned for a step without a saved result. None would be a result.
UNRECORDED: object = object()


class RecordedCalls:
    """The recorded calls of one run. In a context without a journal, the calls run and nothing is saved."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        has_journal = isinstance(ctx, Context)
        self.journal: StepJournal[Any] = ctx.journal if has_journal else unsaved_steps(ctx)
        self._control: RunControl = ctx.control if has_journal else RunControl()

    def recorded(self, name: str, key: str) -> Any:
        """Return the saved result of a step, and replay the run up to it; `UNRECORDED` if there is none."""
        record = self.journal.lookup(name, f"k:{key}")
        if record is None:
            return UNRECORDED
        self.journal.advance(record)
        self.journal.records.position = max(self.journal.records.position, record.pos)
        return None if record.result is None else decode(record.result)

    def replayed(self, name: str, key: str) -> Any:
        """Return the saved result of a step that the run reaches later, without replaying up to it."""
        record = self.journal.lookup(name, f"k:{key}")
        return UNRECORDED if record is None or record.result is None else decode(record.result)

    def has_ended(self, name: str, key: str) -> bool:
        """Return whether the result of the step is saved, or the step failed and the code continued after it."""
        identity = (name, f"k:{key}")
        return self.journal.lookup(*identity) is not None or identity in self.journal.view.swallowed_failures

    def has_begun(self, name: str, key: str) -> bool:
        """Return whether the journal contains a start or a result of the step or wait."""
        identity = (name, f"k:{key}")
        return identity in self.journal.view.started or self.journal.lookup(*identity) is not None

    @property
    def is_replaying(self) -> bool:
        """Whether the journal contains records that this claim did not replay yet."""
        return self.journal.is_replaying

    def duration(self, name: str, key: str) -> float:
        """Return the seconds that the recorded step took; 0 if this run did not record or only copied it."""
        record = self.journal.lookup(name, f"k:{key}")
        return 0.0 if record is None or is_copied(record) else record.ms / 1000

    def event_fields(self, name: str, key: str) -> dict[str, str]:
        """Return the fields by which an event names the step, for events that are published outside of it."""
        if not self.journal.writer.has_journal:
            return {}
        return {"step_id": step_id(str(self._ctx.run_id), name, f"k:{key}"), "trace_id": self._ctx.trace_id}

    def from_fork(self, name: str, key: str) -> bool:
        """Return whether the record of the step was copied from the run that this run was forked from.

        That run paid for the call.
        """
        record = self.journal.lookup(name, f"k:{key}")
        return record is not None and is_copied(record)

    def pooled(self, budget: Budget, client: Any, model: Callable[[], str]) -> PooledCalls | None:
        """Return what reserves model calls in pools; None without pools, and in a context without a store.

        Args:
            budget: The budget of the calls.
            client: The model client, which may have `limits`.
            model: Returns the requested model.
        """
        pools, limits = tuple(budget.strictest.pools), getattr(client, "limits", None)
        pools += (limits,) if isinstance(limits, ModelLimits) else ()
        if not pools or not isinstance(self._ctx, Context):
            return None
        return PooledCalls(self._ctx.pools, pools, lambda: f"{provider_of(client)}:{model()}")

    def in_doubt(self, name: str, key: str) -> dict[str, Any] | None:
        """Return what an earlier execution of the run reserved for the step, if the step is in doubt."""
        identity, journal = (name, f"k:{key}"), self.journal
        return (
            journal.view.in_doubt_usage(identity)
            if identity in journal.view.started or identity in journal.view.lost_reservations
            else None
        )

    def loop_name(self, digest: Callable[[], str | None]) -> str:
        """Return the name of the next agent loop, the first part of the keys of its calls.

        Args:
            digest: Returns the digest of what the loop is called with.
        """
        keys = self.journal.keys
        return keys.next_key("l", "loop", digest() if keys.reusable_keys else None)

    def leave_loop(self, name: str, digest: Callable[[], str | None]) -> None:
        """Give the name of a finished loop to the next loop with that digest, if a call of it is in doubt."""
        if any(key.startswith(f"k:{name}:") for _, key in self.journal.view.started):
            self.journal.keys.reuse_key("loop", name, digest(), CURRENT_STEP.get())

    def charge(self, model: str, usage: Mapping[str, Any]) -> None:
        """Add to the record of the step that the calling code is in what an answer without a record used."""
        if (scope := CURRENT_STEP.get()) is not None and not scope.ended:
            add_charge(scope, model, usage)

    def charged(self, name: str, key: str) -> dict[str, Any]:
        """Return what the step charged in earlier executions. The budget of the run includes it."""
        record = self.journal.lookup(name, f"k:{key}")
        failed = self.journal.view.charged_by_failures.get((name, f"k:{key}"), {})
        return failed if record is None else total([failed, charged_by(record)])

    async def streamed(self, name: str, key: str) -> int:
        """Return how many characters of its answer that step published as ASSISTANT_DELTA events."""
        step = step_id(str(self._ctx.run_id), name, f"k:{key}")
        writer = self.journal.writer
        events = await writer.bus.get_events(writer.run_id)
        deltas = (event.payload for event in events if event.event_type == EventType.ASSISTANT_DELTA.value)
        return sum(len(each["delta"]) for each in deltas if each.get("step_id") == step)

    async def between(self, name: str, key: str, code: Callable[[], Awaitable[Any]], *, lazy: bool = False) -> Any:
        """Run code between steps and record what it returns. Its calls are counted separately, as inside a step.

        A wait in it can park the run. If it is cut off, it runs again, with the recorded results of its calls.
        """
        if self._control.refuses:
            await self._control.refuse()
        if self.journal.unconfirmed.pending:
            await self.journal.unconfirmed.resolve()
            if (known := self.recorded(name, key)) is not UNRECORDED:
                return known
        scope = StepScope(self.journal.token, name, f"k:{key}", 1, CURRENT_STEP.get(), between_steps=True)
        token = CURRENT_STEP.set(scope)
        try:
            value = await run_body(scope, code)
        finally:
            restore(CURRENT_STEP, token)

        async def returned(attempt: int) -> Any:
            return value

        return await self.run(name, key, returned, lazy=lazy)

    async def run(
        self, name: str, key: str, call: Callable[[int], Awaitable[Any]], *, options: StepOptions = DEFAULT_OPTIONS,
        tool: dict[str, Any] | None = None, effect: str | None = None, reserve: dict[str, Any] | None = None,
        lazy: bool = False, mail: Sequence[int] = (), given: dict[str, Any] | None = None, pools: Sequence[str] = (),
    ) -> Any:  # fmt: skip
        """Run a step without a saved result, unless an unconfirmed write turns out to have saved it.

        Args:
            name: Name of the step.
            key: Key of the step, without the prefix that explicit keys have in the journal.
            call: Makes one attempt. Receives the number of the attempt, counted from 1.
            options: How the step is retried.
            tool: For a tool call {"name", "id", "args"}: its start publishes TOOL_CALL, its end TOOL_RESULT.
            effect: The key by which forks find the effect of a guarded call.
            reserve: Usage that is reserved for the call, recorded with its start.
            lazy: Write the DONE record with the next record that is not lazy.
            mail: Numbers of the mailbox messages that the DONE record consumes.
            given: The arguments with which the tool runs, if they are not those in `tool`. A review shows them.
            pools: The names of the pools in which the call has reserved something.

        Returns:
            The result.

        Raises:
            StepCancelledError: The run is being cancelled.
        """
        journal = self.journal
        if self._control.refuses:
            await self._control.refuse(name)
        if journal.unconfirmed.pending:
            await journal.unconfirmed.resolve()
            if (known := self.recorded(name, key)) is not UNRECORDED:
                return known
        if (failure := journal.view.swallowed_failures.pop((name, f"k:{key}"), None)) is not None:
            raise original_error(name, failure)  # the code continued after it, and will again
        start_info: dict[str, Any] = {}
        if tool is not None:
            info: str | None = f'{{"tool":{{"name":{quote(tool["name"])},"id":{quote(tool["id"])}}}}}'
            start_info["tool"] = tool
        else:
            info = CONCURRENT_INFO if journal.in_child_task() else None
        if effect is not None:
            start_info["effect"] = effect
        if reserve:
            start_info["reserve"] = reserve
        if pools:
            start_info[POOLS_FIELD] = list(pools)
        work = StepCall(
            name,
            f"k:{key}",
            call,
            options,
            position=journal.records.next_position(),
            info=with_consumed(info, mail) if mail else info,
            no_events=tool is None,
            start_info=start_info or None,
            raise_unwrapped=True,
            defer_record=lazy,
            adapt_review_result=None if tool is None else _reviewed_tool_result,
            reviewed_tool=tool if tool is None or given is None else {**tool, "args": given},
        )
        value = await run_step(journal, work, journal.records.completion)
        journal.advance()
        return value


def _reviewed_tool_result(result: Any) -> dict[str, Any]:
    """Return the saved result of a tool call in doubt for the result that a reviewer entered."""
    return {"content": text_of_result(result), "ok": True, "error": None, "result": result}
