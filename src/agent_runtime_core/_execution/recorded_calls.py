"""Steps that the library itself takes for an agent, each under a name and a key of its own: calls of models and tools.

They tell no STEP_* events, and their errors come as they are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from .._core.codec.json import decode
from .._core.event_types import EventType
from .._core.ids import step_id
from .._journal.record import Record, is_copied
from ..errors import StepCancelledError
from .checkpoint_writer import unsaved_steps
from .context import Context
from .journal_view import BESIDE
from .run_control import Place
from .step_failure import as_raised
from .step_journal import Book
from .step_policy import PLAIN_POLICY, Policy
from .step_runner import Work, perform

#: Told apart from None, which is a result.
UNRECORDED: object = object()


class KeyedSteps:
    """Those of one run, or of one agent loop where the context has no journal: there each step is just performed."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        ours = isinstance(ctx, Context)
        self.book: Book = ctx.book if ours else unsaved_steps(ctx)
        self._place: Place = ctx.place if ours else Place()

    def recorded(self, name: str, key: str) -> Any:
        """The result of that step, which the run comes to with this; `UNRECORDED` if it has none."""
        record = self._recorded(name, key)
        if record is None:
            return UNRECORDED
        self.book.passed(record)
        self.book.pos = max(self.book.pos, record.pos)
        return None if record.result is None else decode(record.result)

    def ahead(self, name: str, key: str) -> Any:
        """The same of a step that the run has yet to come to."""
        record = self._recorded(name, key)
        return UNRECORDED if record is None or record.result is None else decode(record.result)

    def _recorded(self, name: str, key: str) -> Record | None:
        return self.book.recorded(name, f"k:{key}")

    def took(self, name: str, key: str) -> float:
        """Seconds that the recorded step took this run; none where another run's was copied."""
        record = self.book.recorded(name, f"k:{key}")
        return 0.0 if record is None or is_copied(record) else record.ms / 1000

    def named(self, name: str, key: str) -> dict[str, str]:
        """What each event of that step says of it, for those that are told outside of it."""
        if not self.book.ledger.has_journal:
            return {}
        return {"step_id": step_id(str(self._ctx.run_id), name, f"k:{key}"), "trace_id": self._ctx.trace_id}

    def copied(self, name: str, key: str) -> bool:
        """Whether that step is recorded, and was paid for by the run that this one was forked from."""
        record = self.book.recorded(name, f"k:{key}")
        return record is not None and is_copied(record)

    def in_doubt(self, name: str, key: str) -> dict[str, Any] | None:
        """What an earlier life of the run reserved for that step, if it began it and nobody knows how it ended."""
        identity, book = (name, f"k:{key}"), self.book
        return book.doubted(identity) if identity in book.begun or identity in book.lost else None

    async def streamed(self, name: str, key: str) -> int:
        """Return how many characters of its answer that step published as ASSISTANT_DELTA events."""
        step = step_id(str(self._ctx.run_id), name, f"k:{key}")
        ledger = self.book.ledger
        events = await ledger.bus.get_events(ledger.run_id)
        deltas = (event.payload for event in events if event.event_type == EventType.ASSISTANT_DELTA.value)
        return sum(len(each["delta"]) for each in deltas if each.get("step_id") == step)

    async def perform(
        self, name: str, key: str, call: Callable[[int], Awaitable[Any]], *, policy: Policy = PLAIN_POLICY,
        tool: dict[str, Any] | None = None, effect: str | None = None, reserve: dict[str, Any] | None = None,
        lazy: bool = False,
    ) -> Any:  # fmt: skip
        """The result of that step, which has no record yet, unless one landed that nobody heard of.

        A `tool` call, {"name", "id", "args"}, tells TOOL_CALL when it starts and TOOL_RESULT when it ends.
        `effect` is the key under which forks know a guarded call.
        `reserve` is kept with its start. The record of a `lazy` one is written together with the next that is not.
        """
        book, place = self.book, self._place
        if place.sealed:
            await place.refuse()
        if place.cancelled:
            raise StepCancelledError(name)
        if book.questions:
            await book.settle()
            if (known := self.recorded(name, key)) is not UNRECORDED:
                return known
        if (failure := book.given_up.pop((name, f"k:{key}"), None)) is not None:
            raise as_raised(name, failure)  # the code went on without it
        started: dict[str, Any] | None = {"tool": tool} if tool is not None else None
        if effect is not None:
            started = {**(started or {}), "effect": effect}
        if reserve:
            started = {**(started or {}), "reserve": reserve}
        info = BESIDE if book.is_apart() else None
        if tool is not None:
            info = f'{{"tool":{{"name":{quote(tool["name"])},"id":{quote(tool["id"])}}}}}'
        work = Work(
            name, f"k:{key}", call, policy, pos=book.take_pos(), info=info, quiet=tool is None,
            started=started, bare=True, lazy=lazy, settled=None if tool is None else _answered,
        )  # fmt: skip
        value = await perform(book, work, book.seal)
        book.passed()
        return value


def _answered(result: Any) -> dict[str, Any]:
    """What somebody says of a tool call in doubt, as its record."""
    return {"content": str(result), "ok": True, "error": None, "result": result}
