"""The tasks of one scope: how they are written, and the board that is kept up with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..._engines.base import Op
from ...errors import InvalidArgument, StorageBusy
from ..documents.base import CHANGE_TRIES, Changed, Document, Entry, Table
from ..forms import model_of
from ..models import Task, new_id
from ..readiness import circle
from .board import Board, Card, card
from .feed import Feed, Mark
from .pages import pages
from .seen import Seen

_PART = 1000  # documents read at once for the board


@dataclass
class Change:
    """Tasks to be put, each over the document there is; keys of those to be deleted; what else is to be committed."""

    puts: list[tuple[Entry, Document | None]] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)
    more: list[Op] = field(default_factory=list)


class TaskSpace:
    """The lists and tasks of one scope."""

    def __init__(self, lists: Table, tasks: Table) -> None:
        self.lists: Table = lists
        self.tasks: Table = tasks
        #: The text of a task as its holder last read or saved it; of a list also the keys of its tasks.
        self.seen: Seen[str] = Seen()
        self.read: Seen[tuple[str, frozenset[str]]] = Seen()
        self._graph = replace(tasks, kind="task_graph")
        self._feed = Feed(tasks)
        self._board: Board | None = None
        self._mark: Mark | None = None
        self._readers = 0  # who may hold documents that are older than what is written meanwhile

    async def board(self) -> Board:
        """Every task, with all changes that were committed before."""
        self._readers += 1
        try:
            board = self._board
            changes = None if board is None else await self._feed.since(self._mark)
            if board is None or changes is None:
                return await self._load()
            keys, mark = changes
            found = {each.key: each for each in await self.tasks.many(sorted(keys))}
            for key in keys:
                if key in found:
                    board.put(found[key])
                else:
                    board.drop(key)
            if board is self._board:
                self._mark = mark
            return board
        finally:
            self._readers -= 1

    async def _load(self) -> Board:
        mark, board = await self._feed.last(), Board()
        async for page in pages(self.tasks, size=_PART):
            for document in page:
                board.put(document)
        self._board, self._mark = board, mark
        return board

    async def write(self, change: Change) -> list[Any]:
        """Commit it all or nothing; what was answered, the documents put first. Changed: one there has changed.

        InvalidArgument: dependencies would go in a circle, be it one that another commit closes at the same time:
        all that add a dependency in this scope compare and set one document.
        """
        ops = [self.tasks.put(entry, 0 if there is None else there.version) for entry, there in change.puts]
        ops += [*(self.tasks.delete(key) for key in change.drops), *change.more]
        if adding := [entry.key for entry, there in change.puts if _adds(entry, there)]:
            graph = await self._graph.get("edges")
            self._refuse_circles(await self.board(), adding, change)
            ops.append(self._graph.put(Entry("edges", f'"{new_id().hex}"'), 0 if graph is None else graph.version))
        notes = self._feed.note([*(entry.key for entry, _ in change.puts), *change.drops])
        answers = await self.tasks.write(*ops, *notes)
        for number, (entry, _) in enumerate(change.puts):
            version, rank = answers[number]
            answers[number] = _document(entry)._replace(version=version, rank=rank)
        ranks = answers[len(ops) :]
        self._know(answers[: len(change.puts)], change.drops, ranks)
        await self._feed.trim(ranks)
        return answers

    def _know(self, documents: Sequence[Document], drops: Sequence[str], ranks: Sequence[float]) -> None:
        if self._board is None:
            return
        for key in drops:
            self._board.drop(key)
        for document in documents:
            self._board.put(document)
        if not self._readers:
            self._feed.known(ranks, self._mark)

    def _refuse_circles(self, board: Board, adding: Sequence[str], change: Change) -> None:
        new = {entry.key: card(_document(entry)) for entry, _ in change.puts}

        def known(key: str) -> Card | None:
            return new.get(key) or (None if key in change.drops else board.cards.get(key))

        def dependencies(key: str) -> Sequence[str]:
            found = known(key)
            return () if found is None else found.dependencies

        found = circle(adding, dependencies)
        if found:
            names = [each.name for each in map(known, [*found, found[0]]) if each is not None]
            raise InvalidArgument(f"tasks would wait for each other in a circle: {' -> '.join(names)}; leave one out")

    async def delete(self, group: str) -> bool:
        """Delete a list and its tasks; whether there was one."""
        found = False
        while True:
            there = await self.tasks.find(group)
            if found and (not there or await self.lists.get(group) is not None):
                return True  # what is there now was saved after that
            change = Change(drops=[each.key for each in there], more=[self.lists.delete(group)])
            answers = await self.write(change)
            if not (found or answers[len(there)]):
                return False
            found = True

    async def change(self, key: str, decide: Callable[[Document], Entry]) -> Document:
        """Put what `decide` makes of a task. InvalidArgument: there is none."""
        for _ in range(CHANGE_TRIES):
            there = await self.tasks.get(key)
            if there is None:
                raise InvalidArgument(f"there is no task {key} here")
            try:
                document: Document = (await self.write(Change([(decide(there), there)])))[0]
                return document
            except Changed:
                continue
        raise StorageBusy(f"task {key} was changed by others {CHANGE_TRIES} times in a row; try again")


def _document(entry: Entry) -> Document:
    return Document(entry.key, entry.text, 0, entry.rank or 0.0, entry.group, entry.expires)


def _adds(entry: Entry, there: Document | None) -> bool:
    """Whether the task depends on more than it did."""
    new = set(model_of(Task, entry.text).dependencies)
    return bool(new and (there is None or not new <= set(model_of(Task, there.text).dependencies)))
