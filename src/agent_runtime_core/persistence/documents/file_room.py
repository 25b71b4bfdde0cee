"""A directory of documents: how commits are carried out there, and how it is read meanwhile.

    <root>/lock                                        held by whoever writes
    <root>/intent                                      a commit of several files on its way
    <root>/drafts/                                     files that have not got their names yet
    <root>/fences/<run>.json                           the claim that a run's writes need
    <root>/documents/<space>/<kind>/<rank>~<key>.json  a document
    <root>/documents/<space>/<kind>/<group>/...        those of a group

A commit of one file is one rename. One of several is decided by the file `intent`, which names the renames and
removals that are left to do; whoever takes the lock next does them, if its writer could not. Nothing is acknowledged
before the disk has it.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, TypeVar

from ..._clock import Clock
from ..._engines.base import NotApplied
from ..._engines.requests import Request
from ..._ids import new_ulid
from ...errors import LeaseLost, StorageCorrupt, StorageError
from .base import Document, Query
from .file_disk import DRAFTS, Disk, told
from .file_form import VERSION, sealed, unsealed
from .file_lock import locked
from .file_shelf import STAMP, Shelf, Stamp, directory_of, read_stamp
from .file_tx import APPLIED, OPS, Edit, FileTx, Move, Remove, Write

INTENT: Final = "intent"
NEVER: Final = "0"  # the stamp of what was never written
_LOCK: Final = "lock"
_PAUSES: Final = (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016)  # seconds before another look without the lock

T = TypeVar("T")


class _Moved(Exception):
    """What was read may be half of a change: look again."""


class Room:
    """What is below `root`; `ready()` is asked before anything there is read or written, until it raises nothing."""

    def __init__(self, root: str, clock: Clock, ready: Callable[[], None], patience: float) -> None:
        self.disk: Disk = Disk(root)
        self.clock: Clock = clock
        self.patience: float = patience
        self._ready: Callable[[], None] | None = ready
        self._shelves: dict[str, Shelf] = {}
        self._making = threading.Lock()

    def shelf(self, at: str) -> Shelf:
        """The kind whose directory that is."""
        with self._making:
            if at not in self._shelves:
                self._shelves[at] = Shelf(self.disk, at)
            return self._shelves[at]

    def check(self) -> bool:
        """Whether there is anything; the errors of a place that cannot be used."""
        if self._ready is not None:
            self._ready()
            self._ready = None
        return self.disk.there()

    @contextlib.contextmanager
    def lock(self, *, writable: bool = True, patience: float | None = None) -> Iterator[None]:
        path = self.disk.path(_LOCK)
        with contextlib.ExitStack() as held:
            with told(path):
                held.enter_context(locked(path, writable=writable, patience=patience))
            yield

    # -- writing

    def write(self, batch: Sequence[Request]) -> None:
        """Carry out commits one after the other; what became of each is noted in it."""
        try:
            self.check()
            self.disk.make("")
            with self.lock():
                self.recover()
                turn = Turn(self)
                try:
                    for request in batch:
                        turn.carry_out(request)
                finally:
                    turn.flush()
        except Exception as error:  # noqa: BLE001 - it belongs to the callers, and this thread goes on for others
            lost = StorageError(f"{self.disk.root} was removed while it was in use: open a new store")
            for request in batch:
                if request.error is None:
                    request.result, request.error = None, lost if isinstance(error, FileNotFoundError) else error

    def recover(self) -> None:
        """Do what a commit that was interrupted left to do."""
        try:
            data = self.disk.read(INTENT)
        except FileNotFoundError:
            self._sweep()
            return
        path = self.disk.path(INTENT)
        try:
            left = json.loads(unsealed(data, path) + b"}")
            renames, removes, kinds = left["renames"], left["removes"], left["kinds"]
        except (ValueError, KeyError) as error:
            raise StorageCorrupt(
                f"{path} is no commit of this library ({error!r}): restore it from a backup"
            ) from error
        for shelf in self._shelves.values():
            shelf.forget()
        for directory in kinds:
            self.disk.remove(f"{directory}/{STAMP}")
        self.follow(renames, removes)

    def follow(self, renames: Sequence[Sequence[str]], removes: Sequence[str]) -> None:
        """Carry out what an intent says, as often as it takes."""
        for source, target in renames:
            with contextlib.suppress(FileNotFoundError):  # it has been renamed before
                self.disk.rename(source, target)
        for where in removes:
            self.disk.remove(where)
        for directory in {os.path.dirname(each) for pair in renames for each in pair} | set(
            map(os.path.dirname, removes)
        ):
            self.disk.flush(directory)
        self.disk.remove(INTENT)
        self.disk.flush("")

    def _sweep(self) -> None:
        for where in self.disk.drafts():
            self.disk.remove(where)

    # -- reading

    def get(self, space: str, kind: str, keys: Sequence[str], now: float) -> list[Document]:
        def look(shelf: Shelf) -> list[Document]:
            return [page.document(place.rank) for place, page in shelf.live(map(shelf.place, keys), now)]

        return self._read(directory_of(space, kind), look, [])

    def find(self, query: Query) -> list[Document]:
        end = None if query.limit is None else query.offset + query.limit

        def look(shelf: Shelf) -> list[Document]:
            found = islice(shelf.live(shelf.ordered(query), query.now), query.offset, end)
            return [page.document(place.rank) for place, page in found]

        return self._read(directory_of(query.space, query.kind), look, [])

    def words(self, space: str, kind: str, now: float) -> list[tuple[str, float, str]]:
        def look(shelf: Shelf) -> list[tuple[str, float, str]]:
            found = shelf.live(shelf.places(None), now)
            return [(page.key, place.rank, page.words) for place, page in found if page.words]

        return self._read(directory_of(space, kind), look, [])

    def stamp(self, space: str, kind: str) -> str:
        return self._read(directory_of(space, kind), lambda shelf: shelf.token or NEVER, NEVER)

    def _read(self, at: str, look: Callable[[Shelf], T], nothing: T) -> T:
        if not self.check():
            return nothing
        shelf = self.shelf(at)
        for pause in _PAUSES:
            time.sleep(pause)
            if not self._exists(INTENT) and not self._exists(shelf.directory):
                return nothing
            with contextlib.suppress(_Moved):
                return self._glance(shelf, look)
        return self._read_locked(shelf, look)

    def _exists(self, where: str) -> bool:
        return os.path.lexists(self.disk.path(where))

    def _glance(self, shelf: Shelf, look: Callable[[Shelf], T]) -> T:
        """Read without the lock; _Moved where somebody wrote meanwhile."""
        stamp = read_stamp(self.disk, shelf.directory)
        if stamp is None:
            raise _Moved
        try:
            shelf.refresh(stamp)
            found = look(shelf)
        except FileNotFoundError:
            shelf.forget()
            raise _Moved from None
        except StorageCorrupt:
            shelf.forget()
            if read_stamp(self.disk, shelf.directory) == stamp:
                raise
            raise _Moved from None
        if read_stamp(self.disk, shelf.directory) != stamp:
            raise _Moved
        return found

    def _read_locked(self, shelf: Shelf, look: Callable[[Shelf], T]) -> T:
        writable = os.access(self.disk.root, os.W_OK)
        with self.lock(writable=writable, patience=self.patience):
            if writable:
                self.recover()
                self._heal(shelf)
            elif self._exists(INTENT):
                raise StorageError(
                    f"{self.disk.path(INTENT)} is a commit that was interrupted, and may not be carried out here: "
                    f"grant writing to {self.disk.root}, or open it once where it may be written"
                )
            shelf.refresh(read_stamp(self.disk, shelf.directory))
            return look(shelf)

    def _heal(self, shelf: Shelf) -> None:
        """Give a kind the stamp that a writer who was interrupted left it without."""
        if read_stamp(self.disk, shelf.directory) is None and self._exists(shelf.directory):
            self.put_stamp(shelf, Stamp(((self.token(), frozenset()),)))

    def token(self) -> str:
        return new_ulid(self.clock)

    def put_stamp(self, shelf: Shelf, stamp: Stamp) -> None:
        self.disk.rename(self.disk.draft(stamp.data(), durable=False), f"{shelf.directory}/{STAMP}")


class Turn:
    """The commits of one time that the lock is held."""

    def __init__(self, room: Room) -> None:
        self._room, self._disk = room, room.disk
        self._stamps: dict[str, Stamp | None] = {}
        self._flush: set[str] = set()

    def shelf(self, at: str) -> Shelf:
        shelf = self._room.shelf(at)
        if at not in self._stamps:
            self._stamps[at] = read_stamp(self._disk, shelf.directory)
            shelf.refresh(self._stamps[at])
        return shelf

    def carry_out(self, request: Request) -> None:
        try:
            try:
                self._carry_out(request)
            except FileNotFoundError:
                # Somebody removed a file by hand: list again.
                for at in self._stamps:
                    self._room.shelf(at).forget()
                self._stamps.clear()
                self._carry_out(request)
        except FileNotFoundError as error:
            request.error = StorageError(f"{error.filename} was removed while it was in use: try again")
        except Exception as error:  # noqa: BLE001 - it belongs to the caller of this commit, not to the others
            request.error = error

    def _carry_out(self, request: Request) -> None:
        tx = FileTx(self._disk, self.shelf)
        guard = request.guard
        if guard is not None and tx.fenced(guard.key) != guard.token:
            try:
                request.result = [APPLIED[name](tx, *args) for name, args in request.ops]
            except (KeyError, NotApplied):
                raise LeaseLost(guard.key, guard.token) from None
            return
        results = [OPS[name](tx, *args) for name, args in request.ops]
        self._apply(*tx.steps())
        request.result = results

    def _apply(self, steps: Sequence[Write | Move | Remove], edits: Sequence[Edit]) -> None:
        """All steps or none."""
        removes = [each.where for each in steps if isinstance(each, Remove)]
        listed = {id(each.shelf): each.shelf.listed for each in edits}
        renames, drafts = list[tuple[str, str]](), list[str]()
        changed = sorted({each.shelf.directory for each in edits})
        try:
            for step in steps:
                if isinstance(step, Remove):
                    continue
                target = step.where if isinstance(step, Write) else step.target
                self._disk.make(os.path.dirname(target))
                if isinstance(step, Write):
                    drafts.append(self._disk.draft(step.data))
                renames.append((drafts[-1] if isinstance(step, Write) else step.where, target))
            if len(steps) > 1:
                self._decide(renames, removes, changed)
        except BaseException:
            for draft in drafts:
                self._disk.remove(draft)
            raise
        for directory in changed:
            self._disk.remove(f"{directory}/{STAMP}")
        if len(steps) > 1:
            self._room.follow(renames, removes)
        else:
            self._one(renames, removes)
        self._tell(edits, listed)

    def _decide(self, renames: Sequence[tuple[str, str]], removes: Sequence[str], kinds: Sequence[str]) -> None:
        self._disk.flush(DRAFTS)
        intent = {"v": VERSION, "renames": renames, "removes": removes, "kinds": kinds}
        draft = self._disk.draft(sealed(json.dumps(intent).encode()[:-1]))
        self._disk.rename(draft, INTENT)
        self._disk.flush("")

    def _one(self, renames: Sequence[tuple[str, str]], removes: Sequence[str]) -> None:
        for source, target in renames:
            self._disk.rename(source, target)
            self._flush |= {os.path.dirname(source), os.path.dirname(target)} - {DRAFTS}
        for where in removes:
            self._disk.remove(where)
            self._flush.add(os.path.dirname(where))

    def _tell(self, edits: Sequence[Edit], listed: dict[int, int]) -> None:
        """Write the stamps of what changed; without one, others have to look again, which is right too."""
        for at, stamp in list(self._stamps.items()):
            shelf = self._room.shelf(at)
            mine = [each for each in edits if each.shelf is shelf]
            if not mine:
                continue
            groups = frozenset(place.group for each in mine for place in (each.old, each.new) if place is not None)
            token = self._room.token()
            new = stamp.after(token, groups) if stamp is not None else Stamp(((token, frozenset()),))
            shelf.moved([(each.old, each.new) for each in mine], new, listed[id(shelf)])
            self._stamps[at] = new
            try:
                self._room.put_stamp(shelf, new)
            except (StorageError, OSError):
                shelf.forget()

    def flush(self) -> None:
        for directory in self._flush:
            self._disk.flush(directory)
