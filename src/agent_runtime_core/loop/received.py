"""The messages that are sent to a run while its agent loop runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from .._core.context_vars import start_helper
from .._core.log import log
from .._execution.mailbox import message_of
from .._execution.recorded_calls import RecordedCalls
from ..errors import AgentRuntimeError, LimitExceeded
from ..limits import Budget

T = TypeVar("T")

#: The finish_reason of a model call that a message interrupted.
INTERRUPTED = "interrupted"


def was_interrupted(answer: Mapping[str, Any]) -> bool:
    """Return whether this answer is what was streamed of a call that a message interrupted.

    Some providers may use the same finish_reason for an answer of their own.
    """
    metadata = answer["message"].get("metadata")
    return answer["finish_reason"] == INTERRUPTED and isinstance(metadata, Mapping) and metadata.get("partial") is True


def joins_history(answer: Mapping[str, Any]) -> bool:
    """Return whether the message of an answer is added to the conversation: providers reject an empty message."""
    return not was_interrupted(answer) or bool(answer["message"]["content"].strip())


class ReceivedMessages:
    """Takes the messages for a loop, before its model calls.

    The record of a model call names the messages that were taken for it, and has their text. So they are in the history
    once: after a crash before that record they are taken again, and after it they come from the record.

    Args:
        ctx: The context of the run. A context without an `inbox` has no messages.
        steps: The recorded calls of the loop.
        budget: The budget of the loop.
        messages: Its conversation.

    Attributes:
        current: The messages that were taken for the present model call, at the end of the conversation.
    """

    def __init__(self, ctx: Any, steps: RecordedCalls, budget: Budget, messages: list[dict[str, Any]]) -> None:
        self._steps, self._budget, self._messages = steps, budget, messages
        # A loop inside a step takes none: on a resume the step is not executed, and its messages would be lost.
        inside_step = getattr(ctx, "step_id", None) is not None
        inbox = getattr(ctx, "inbox", None)
        # A custom context may have another attribute of that name.
        self._inbox: Any = None if inside_step or not hasattr(inbox, "interrupted") else inbox
        self._run: object = getattr(ctx, "run_id", None)
        self._stored: Sequence[Any] = ()
        self.current: list[dict[str, Any]] = []

    @property
    def numbers(self) -> list[int]:
        """The numbers of the current messages in the mailbox of the run."""
        return [each.seq for each in self._stored]

    async def take(self) -> None:
        """Add the new messages to the conversation, for a model call without a record."""
        self._stored = () if self._inbox is None else await self._inbox.take()
        self.current = [message_of(each) for each in self._stored]
        self._messages += self.current

    def replay(self, recorded: Mapping[str, Any]) -> None:
        """Add the messages that the record of a model call has."""
        self._stored = ()
        self.current = (recorded.get("asked") or {}).get("received") or []
        self._messages += self.current

    def give_back(self, key: str) -> None:
        """Remove the current messages from the conversation, because the model call was not recorded."""
        if self._stored:
            del self._messages[-len(self.current) :]
            self._inbox.put_back(self._stored, ("model", f"k:{key}"))
            self._stored, self.current = (), []

    async def has_more(self, key: str) -> bool:
        """Return whether messages have arrived for another model call, the step `key`, after the model has answered.

        A resumed run does what it did before: if its journal has later records, the loop ended here, or it has the
        record of that call.
        """
        if self._steps.has_ended("model", key):
            return True
        if self._inbox is None or self._steps.is_replaying:
            return False
        with contextlib.suppress(LimitExceeded):
            self._budget.before_turn()
            return bool(await self._inbox.has_new())
        return False  # the run has its answer: it must not fail because another call would exceed a limit

    async def unless_interrupted(self, work: Awaitable[T]) -> T | None:
        """Return the result of a model call, or None if a message interrupted it.

        A call that no other may follow is not interrupted: the run would end without an answer.
        """
        if self._inbox is None or self._budget.is_last_turn:
            return await work
        try:
            async with asyncio.timeout(None) as call:
                watch = start_helper(self._watch(call))
                try:
                    return await work
                finally:
                    watch.cancel()
        except Exception:
            if call.expired():  # some clients raise an error of their own when they are cancelled
                return None
            raise

    async def _watch(self, call: asyncio.Timeout) -> None:
        """End the call when a message interrupts it."""
        try:
            await self._inbox.interrupted()
        except AgentRuntimeError as error:  # the loop takes the message after the call
            log.warning(
                "run %s: waiting for messages that interrupt a model call failed: %s. The model gets them after it",
                self._run,
                error,
            )
        else:
            call.reschedule(asyncio.get_running_loop().time())
