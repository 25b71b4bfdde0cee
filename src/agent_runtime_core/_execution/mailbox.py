"""Read and consume the messages of one run: signals, answers, results of child runs."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from .._core.log import log
from ..queue.base import RunQueue
from ..queue.records import QUESTION, MailboxMessage, answered_request


def consumed_numbers(info: str | None) -> Sequence[int]:
    """Return the numbers of the messages that a record names in its `info`."""
    mail = json.loads(info).get("mail") if info is not None and '"mail"' in info else None
    return mail if isinstance(mail, list) else [mail] if mail else []


def with_consumed(info: str | None, numbers: Sequence[int]) -> str | None:
    """Return the `info` of a record that names these messages as consumed."""
    if not numbers:
        return info
    field = f'"mail":{json.dumps([*numbers])}'
    return f"{{{field}}}" if info is None else f"{info[:-1]},{field}}}"


class MailboxReader:
    """The unread messages of one run, in the order of their numbers.

    A message stays in the store until the run is deleted. A wait takes it from this reader with `consume`, and the
    record of that wait names its number, so a later claim does not read it again.

    Args:
        queue: The queue that keeps the messages.
        run_id: The run that they are addressed to.
        arrived: Set when the run has new messages.
        consumed: Numbers of the messages that are named by records of the run's journal.
    """

    def __init__(self, queue: RunQueue, run_id: str, arrived: asyncio.Event, consumed: set[int]) -> None:
        self.cursor: int = 0  # number of the last message read
        self.arrived: asyncio.Event = arrived
        self._queue, self._run_id = queue, run_id
        self._consumed = consumed
        self._unread: dict[tuple[str, str], deque[MailboxMessage]] = defaultdict(deque)  # by kind and name
        self._rejected: set[int] = set()  # numbers of messages whose rejection is logged
        self._decided: set[str] = set()  # ids of requests that were answered or closed
        self._reading = asyncio.Lock()

    async def read(self) -> None:
        """Read the messages that arrived since the last read."""
        async with self._reading:  # else two waits would read the same messages
            messages: list[MailboxMessage] | None = None
            self.arrived.clear()
            try:
                messages = await self._queue.mail(self._run_id, self.cursor)
            finally:
                if messages is None or messages:  # another wait may have read before these, and is about to wait
                    self.arrived.set()
            for message in messages:
                if self._counts(message) and message.seq not in self._consumed:
                    self._unread[message.kind, message.name].append(message)
                self.cursor = max(self.cursor, message.seq)  # `passed` may have moved it during the read

    def _counts(self, message: MailboxMessage) -> bool:
        """Return whether a wait of the run can receive the message. Only the first answer to a request counts."""
        request = answered_request(message.msg_id)
        if request is not None:
            if request in self._decided:
                return False
            self._decided.add(request)
        return message.kind != QUESTION

    def passed(self, number: int) -> None:
        """Do not read the message of that number, which the run itself has posted, if it is the next one."""
        if number == self.cursor + 1:
            self.cursor = number

    def find(
        self, kind: str, *names: str, fits: Callable[[MailboxMessage], bool] = lambda message: True
    ) -> MailboxMessage | None:
        """Return the first unread message of that kind and the first of these names that `fits`."""
        unread = (message for name in names for message in self._unread.get((kind, name), ()))
        return next((message for message in unread if fits(message)), None)

    def unread(self, kind: str, name: str) -> Sequence[MailboxMessage]:
        """Return all unread messages of that kind and name."""
        return tuple(self._unread.get((kind, name), ()))

    def is_last(self, message: MailboxMessage) -> bool:
        """Return whether no later message of the same kind and name is unread."""
        return self._unread[message.kind, message.name][-1] is message

    def consume(self, message: MailboxMessage) -> None:
        """Remove a message from the unread ones."""
        self._unread[message.kind, message.name].remove(message)

    def put_back(self, message: MailboxMessage) -> None:
        """Make a consumed message unread again, because its wait could not be recorded."""
        unread = self._unread[message.kind, message.name]
        unread.insert(bisect([each.seq for each in unread], message.seq), message)

    def reject(self, message: MailboxMessage, waiting: str, reason: object) -> None:
        """Log, once for each message, why it is no answer for `waiting`. It stays unread."""
        if message.seq not in self._rejected:
            self._rejected.add(message.seq)
            log.warning("ignored an invalid answer for %.120s of run %s: %s", waiting, self._run_id, reason)
