"""Read and consume the messages of one run: signals, answers, results of child runs, messages to its agent."""

from __future__ import annotations

import json
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

from .._core.arguments import messages_in
from .._core.codec.json import decode, encode
from .._core.event_types import EventType
from .._core.log import log
from .._core.validation import must
from ..queue.base import RunQueue
from ..queue.records import MESSAGE, QUESTION, MailboxMessage, answered_request
from .run_control import MailEvent
from .step import Identity
from .step_journal import RunJournal


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


#: Seconds for which the number of messages that a commit returned stands for a read.
COUNT_SECONDS: Final = 0.001


class MailboxReader:
    """The unread messages of one run, in the order of their numbers.

    A message stays in the store until the run is deleted. A wait takes it from this reader with `consume`, and the
    record of that wait names its number, so a later claim does not read it again.

    Args:
        queue: The queue that keeps the messages.
        run_id: The run that they are addressed to.
        arrived: Set when there are new messages for the run.
        consumed: Numbers of the messages that are named by records of the run's journal.
    """

    def __init__(self, queue: RunQueue, run_id: str, arrived: MailEvent, consumed: set[int]) -> None:
        self.cursor: int = 0  # number of the last message read
        self.arrived: MailEvent = arrived
        self._queue, self._run_id = queue, run_id
        self._consumed = consumed
        self._unread: dict[tuple[str, str], deque[MailboxMessage]] = defaultdict(deque)  # by kind and name
        self._rejected: set[int] = set()  # numbers of messages whose rejection is logged
        self._decided: set[str] = set()  # ids of requests that were answered or closed
        #: The number of messages in the store, when a commit returned it, and how many this process had posted then.
        self._counted: tuple[int, float, int] | None = None

    def counted(self, number: int) -> None:
        """Receive how many messages the mailbox had at a commit of the run; used once, by `has_read_all`."""
        self._counted = number, self._queue.clock.monotonic(), self._queue.live_claims.posts

    def has_read_all(self) -> bool:
        """Return whether no message is unread in the store, without reading it: as of a commit of the run just now.

        A message that another process sends within this millisecond is read one time later, as if it had been sent
        after it.
        """
        counted, self._counted = self._counted, None
        if counted is None or self.arrived.is_set():
            return False
        number, at, posts = counted
        is_new = self._queue.clock.monotonic() - at <= COUNT_SECONDS and posts == self._queue.live_claims.posts
        return is_new and number <= self.cursor

    async def read(self) -> None:
        """Read the messages that arrived since the last read."""
        messages: list[MailboxMessage] | None = None
        self.arrived.clear()
        try:
            messages = await self._queue.mail(self._run_id, self.cursor)
        finally:
            if messages is None or messages:  # another wait may have read before these, and is about to wait
                self.arrived.set()
        for message in messages:
            if message.seq <= self.cursor:  # another wait read it at the same time, or `passed` it
                continue
            self.cursor = message.seq
            if self._counts(message) and message.seq not in self._consumed:
                self._unread[message.kind, message.name].append(message)

    def _counts(self, message: MailboxMessage) -> bool:
        """Return whether a wait of the run can receive the message. Only the first answer to a request counts."""
        request = answered_request(message.msg_id)
        if request is not None:
            if request in self._decided:
                return False
            self._decided.add(request)
        return message.kind != QUESTION

    def passed(self, number: int) -> None:
        """Do not read the message of that number, which the run itself posted, if it is the next message."""
        if number == self.cursor + 1:
            self.cursor = number

    def find(
        self, kind: str, *names: str, fits: Callable[[MailboxMessage], bool] | None = None
    ) -> MailboxMessage | None:
        """Return the first unread message of that kind and the first of these names that `fits`."""
        for name in names:
            for message in self._unread.get((kind, name), ()):
                if fits is None or fits(message):
                    return message
        return None

    def unread(self, kind: str, name: str) -> Sequence[MailboxMessage]:
        """Return all unread messages of that kind and name."""
        return tuple(self._unread.get((kind, name), ()))

    def consume_all(self, kind: str, name: str) -> list[MailboxMessage]:
        """Remove all unread messages of that kind and name, and return them."""
        return list(self._unread.pop((kind, name), ()))

    def is_last(self, message: MailboxMessage) -> bool:
        """Return whether no later message of the same kind and name is unread."""
        return self._unread[message.kind, message.name][-1] is message

    def consume(self, message: MailboxMessage) -> None:
        """Remove a message from the unread messages."""
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


# -- messages to the agent of a run

#: When the agent gets a message: before its next model call, or immediately, by an end of the model call in flight.
NEXT_TURN, INTERRUPT = "next_turn", "interrupt"

_ID: Final = "arc.message:"  # before the caller's id: a signal with the same id is another message


def mailbox_id(message_id: str) -> str:
    """Return the id in the mailbox for a message with this id of the caller."""
    return _ID + message_id


def user_message(message: Any) -> dict[str, Any]:
    """Return a message to an agent as a chat message.

    Raises:
        InvalidArgument: It is neither a text nor a chat message of the user.
    """
    if isinstance(message, str):
        message = {"role": "user", "content": message}
    if not isinstance(message, Mapping):
        example = "Example: runner.send(run_id, 'Use the other file')"
        raise must("message", "be a string or a dict with the role 'user'", message, example)
    [chat] = messages_in([message])
    if chat.get("role") != "user":
        raise must("message", "have the role 'user'", chat.get("role"))
    if not _has_content(chat.get("content")):
        raise must("message", "have a non-empty string or list of parts as its content", chat.get("content"))
    return dict(chat)


def _has_content(content: Any) -> bool:
    """Return whether a message says something. Some providers reject a text of spaces, which would end the run."""
    return bool(content.strip()) if isinstance(content, str) else isinstance(content, list) and bool(content)


def checked_when(when: Any) -> str:
    """Return `when`, or raise InvalidArgument."""
    if when not in (NEXT_TURN, INTERRUPT):
        raise must("when", f"be {NEXT_TURN!r} or {INTERRUPT!r}", when)
    return str(when)


def mailbox_payload(message: Mapping[str, Any], when: str) -> str:
    """Return the payload of a message in the mailbox."""
    return encode({"message": dict(message), "when": when})


def message_of(stored: MailboxMessage) -> dict[str, Any]:
    """Return the chat message in a mailbox message."""
    return cast("dict[str, Any]", _payload(stored)["message"])


def interrupts(stored: MailboxMessage) -> bool:
    """Return whether the message ends the model call in flight."""
    return _payload(stored).get("when") == INTERRUPT


def _payload(stored: MailboxMessage) -> dict[str, Any]:
    return cast("dict[str, Any]", decode(stored.payload))


class Inbox:
    """The unread messages to the agent of one run, under one claim.

    `take` returns them once. The record of what they were taken for names their numbers, so a later claim does not
    take them again. Without that record they were not received, and the next claim takes them.
    """

    def __init__(self, journal: RunJournal, mailbox: MailboxReader) -> None:
        self._journal, self._mailbox = journal, mailbox
        #: Messages of failed calls whose record may be part of an unconfirmed write, by the identity of that record.
        self._uncertain: list[tuple[Identity, Sequence[MailboxMessage]]] = []
        self._interrupted: set[int] = set()  # numbers of messages that have ended a model call

    def first(self) -> MailboxMessage | None:
        """Return the first unread message that was read from the store."""
        return self._mailbox.find(MESSAGE, "")

    async def has_new(self) -> bool:
        """Return whether the store contains an unread message now."""
        journal, control = self._journal, self._journal.control
        if journal.writer.closed_error is not None:  # the run succeeded before, and is only replayed
            return False
        if control.refuses:
            await control.refuse()
        if journal.unconfirmed.pending:
            await journal.unconfirmed.resolve()
        uncertain, self._uncertain = self._uncertain, []
        for step, messages in uncertain:
            if step not in journal.view.completed:
                for message in messages:
                    self._mailbox.put_back(message)
        if not self._mailbox.has_read_all():
            journal.writer.count_mail(self._mailbox.counted)
            await self._mailbox.read()
        if control.refuses:  # a call of an ended run must not take messages that are lost then
            await control.refuse()
        return self._mailbox.find(MESSAGE, "") is not None

    async def take(self) -> Sequence[MailboxMessage]:
        """Return the unread messages in the order in which they were sent, and publish an event for each."""
        writer = self._journal.writer
        # Before the first wait: of concurrent loops that know of a message, only this loop must call its model for it.
        taken = self._mailbox.consume_all(MESSAGE, "") if writer.closed_error is None else []
        try:
            if await self.has_new():
                taken += self._mailbox.consume_all(MESSAGE, "")
            if taken:
                taken.sort(key=lambda each: each.seq)
                # The id of the message is the id of the event, so a message that is taken again publishes no second
                # event.
                await writer.emit([_event(each, writer.clock.wall()) for each in taken])
        except BaseException:
            for message in taken:
                self._mailbox.put_back(message)
            raise
        return taken

    def put_back(self, messages: Sequence[MailboxMessage], step: Identity) -> None:
        """Make messages unread again, because the step that they were taken for failed."""
        if self._journal.unconfirmed.pending:
            self._uncertain.append((step, messages))
        else:
            for message in messages:
                self._mailbox.put_back(message)

    def on_arrival(self, notice: Callable[[], None]) -> Callable[[], None]:
        """Have `notice` called when messages may have arrived, and now if some are unread; return what ends that."""
        arrived = self._mailbox.arrived
        if arrived.is_set() or self._mailbox.find(MESSAGE, "") is not None:
            notice()
        arrived.listeners.append(notice)
        return partial(arrived.listeners.remove, notice)

    async def interrupted(self) -> None:
        """Return when there is an unread message that ends the model call in flight; once for each such message."""
        while True:
            for message in self._mailbox.unread(MESSAGE, ""):
                if message.seq not in self._interrupted and interrupts(message):
                    self._interrupted.add(message.seq)
                    return
            await self._mailbox.arrived.wait()
            await self._mailbox.read()


def _event(stored: MailboxMessage, now: float) -> tuple[str, str, str, float]:
    content = message_of(stored).get("content")
    payload = {
        "content": content,
        "message_id": stored.msg_id.removeprefix(_ID),
        "when": INTERRUPT if interrupts(stored) else NEXT_TURN,
    }
    return (f"message:{stored.seq}", EventType.MESSAGE_RECEIVED.value, encode(payload), now)
