"""The tasks of one scope as they were last read, and which of them can be begun."""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import NamedTuple

from ..documents.base import Document
from ..forms import model_of
from ..models import Task, TaskState, moment
from ..readiness import Order, order

SLACK = 1000  # places out of date that a heap may hold
FINAL = frozenset({TaskState.COMPLETE, TaskState.CANCELLED})


class Card(NamedTuple):
    """What is known of a task; of one that has ended no text is kept."""

    document: Document
    name: str
    state: TaskState
    dependencies: tuple[str, ...]
    order: tuple[Order, float, str]
    until: float | None

    @property
    def key(self) -> str:
        return self.document.key


def card(document: Document) -> Card:
    task = model_of(Task, document.text)
    if task.state in FINAL:
        document = document._replace(text="")
    held = task.state is TaskState.IN_PROGRESS and task.claimed_by is not None and task.claimed_until is not None
    return Card(
        document,
        task.name,
        task.state,
        tuple(map(str, task.dependencies)),
        (order(task), document.rank, document.key),
        moment(task.claimed_until) if held and task.claimed_until is not None else None,
    )


class Board:
    """Tasks by key; those to be begun next lie in heaps, one of all and one of each list.

    What lies there may be out of date: it is looked at again when its turn comes.
    """

    def __init__(self) -> None:
        self.cards: dict[str, Card] = {}
        self._waiting_for: defaultdict[str, set[str]] = defaultdict(set)
        self._heaps: defaultdict[str | None, list[tuple[tuple[Order, float, str], int]]] = defaultdict(list)
        self._ends: list[tuple[float, str]] = []
        self._taken: set[str] = set()

    def put(self, document: Document) -> None:
        self.drop(document.key)
        new = self.cards[document.key] = card(document)
        for each in new.dependencies:
            self._waiting_for[each].add(new.key)
        self._place(new)
        if new.state is TaskState.COMPLETE:
            for key in self._waiting_for.get(new.key, ()):
                self._place(self.cards[key])

    def drop(self, key: str) -> None:
        self._taken.discard(key)
        old = self.cards.pop(key, None)
        for each in old.dependencies if old is not None else ():
            self._waiting_for[each].discard(key)

    def offer(self, each: Card) -> None:
        """Have it given again, as nobody has it after all."""
        self._taken.discard(each.key)
        self._place(each)

    def _place(self, each: Card) -> None:
        if each.until is not None:
            heapq.heappush(self._ends, (each.until, each.key))
        elif each.state is TaskState.NOT_STARTED and self._unblocked(each):
            self._push(each)

    def _push(self, each: Card) -> None:
        for group in (None, each.document.group):
            heap = self._heaps[group]
            heapq.heappush(heap, (each.order, each.document.version))
            if len(heap) > 4 * len(self.cards) + SLACK:
                heap[:] = sorted(entry for entry in set(heap) if self._is_current(*entry))

    def _is_current(self, place: tuple[Order, float, str], version: int) -> bool:
        each = self.cards.get(place[2])
        return each is not None and each.document.version == version and each.key not in self._taken

    def _unblocked(self, each: Card) -> bool:
        known = (self.cards.get(key) for key in each.dependencies)
        return all(other is not None and other.state is TaskState.COMPLETE for other in known)

    def _is_ready(self, each: Card, now: float) -> bool:
        begun = each.state is not TaskState.NOT_STARTED and (each.until is None or each.until > now)
        return not begun and self._unblocked(each)

    def take(self, group: str | None, now: float) -> Card | None:
        """The first that is ready, which is not given again before it is put or offered."""
        while self._ends and self._ends[0][0] <= now:
            each = self.cards.get(heapq.heappop(self._ends)[1])
            if each is not None and each.until is not None and self._is_ready(each, now):
                self._push(each)
        heap = self._heaps[group]
        while heap:
            place, version = heapq.heappop(heap)
            if self._is_current(place, version) and self._is_ready(self.cards[place[2]], now):
                self._taken.add(place[2])
                return self.cards[place[2]]
        return None

    def ready(self, group: str | None, now: float) -> list[Card]:
        """All that are ready, in order."""
        found = [each for each in self.cards.values() if group in (None, each.document.group)]
        return sorted((each for each in found if self._is_ready(each, now)), key=lambda each: each.order)
