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
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

from ..._clock import Clock
from ..._engines.base import NotApplied
from ..._engines.requests import Request
from ..._ids import new_ulid
from ...errors import LeaseLost, StorageBusy, StorageCorrupt, StorageError
from .base import Document, Query
from .file_disk import DRAFTS, Disk, told
from .file_form import VERSION, sealed, unsealed
from .file_lock import LOCK, locked
from .file_shelf import STAMP, Shelf, Stamp, directory_of, read_stamp
from .file_tx import APPLIED, OPS, Edit, FileTx, Move, Remove, Write

INTENT: Final = "intent"
NEVER: Final = "0"  # the stamp of what was never written
_PAUSES: Final = (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016)  # seconds before another look without the lock

T = TypeVar("T")


class _Moved(Exception):
    """What was read may be half of a change: look again."""


class _Interrupted(Exception):
    """A commit was decided, and could not be carried out to its end; its cause says why."""


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
        path = self.disk.path(LOCK)
        with contextlib.ExitStack() as held:
            with told(path):
                held.enter_context(locked(path, writable=writable, patience=patience))
            yield

    # -- writing

    def write(self, batch: Sequence[Request]) -> None:
        """Carry out commits, as if one after the other; what became of each is noted in it."""
        try:
            self.check()
            self.disk.make("")
            with self.lock():
                self.recover()
                turn = Turn(self)
                turn.carry_out([each for each in batch if not each.withdrawn])
                turn.flush()
        except FileNotFoundError:
            self._failed(batch, StorageError(f"{self.disk.root} was removed while it was in use: open a new store"))
        except _Interrupted as error:
            why = f"{self.disk.root}: {error.__cause__}; it is decided, and completed with the next one: repeat it"
            self._failed(batch, StorageBusy(why))
        except Exception as error:  # noqa: BLE001 - it belongs to the callers, and this thread goes on for others
            self._failed(batch, error)

    @staticmethod
    def _failed(batch: Sequence[Request], error: Exception) -> None:
        for request in batch:
            if request.error is None:
                request.result, request.error = None, error

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
        self.follow(renames, removes, again=True)
        self.finish(renames, removes)

    def follow(self, renames: Sequence[Sequence[str]], removes: Sequence[str], *, again: bool = False) -> None:
        """Rename and remove; `again`: some of it may have been done before."""
        for source, target in renames:
            try:
                self.disk.rename(source, target)
            except FileNotFoundError:
                if not again:
                    raise
        for where in removes:
            self.disk.remove(where)

    def finish(self, renames: Sequence[Sequence[str]], removes: Sequence[str]) -> None:
        """Nothing of an intent is left to do."""
        self.disk.flush(*directories_of(renames, removes))
        self.disk.remove(INTENT)  # which the next commit makes durable before it changes anything

    def _sweep(self) -> None:
        for where in self.disk.drafts():
            self.disk.remove(where)

    # -- reading

    def get(self, space: str, kind: str, keys: Sequence[str], now: float) -> list[Document]:
        def look(shelf: Shelf) -> list[Document]:
            return [page.document(place.rank) for place, page in shelf.live(map(shelf.place, keys), now)]

        return self._read(directory_of(space, kind), look, [])

    def find(self, query: Query) -> list[Document]:
        start = min(query.offset, sys.maxsize)
        end = None if query.limit is None else min(start + query.limit, sys.maxsize)

        def look(shelf: Shelf) -> list[Document]:
            found = islice(shelf.live(shelf.ordered(query), query.now), start, end)
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
        with contextlib.ExitStack() as held:
            if writable or self._exists(LOCK):
                held.enter_context(self.lock(writable=writable, patience=self.patience))
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
        self.disk.rename(self.disk.draft(stamp.data()), f"{shelf.directory}/{STAMP}")


class Turn:
    """The commits of one time that the lock is held."""

    def __init__(self, room: Room) -> None:
        self._room, self._disk = room, room.disk
        self._stamps: dict[str, Stamp | None] = {}
        self._later: set[str] = set()  # directories whose names are not durable yet

    def shelf(self, at: str) -> Shelf:
        shelf = self._room.shelf(at)
        if at not in self._stamps:
            stamp = read_stamp(self._disk, shelf.directory)
            shelf.refresh(stamp)
            self._stamps[at] = stamp  # not before: what could not be listed must not pass for empty
        return shelf

    def carry_out(self, batch: Sequence[Request]) -> None:
        """All in one go, so that the disk is flushed for all of them at once; each alone, should that fail."""
        try:
            try:
                self._carry_out(batch)
            except FileNotFoundError:
                # Somebody removed a file by hand: list again.
                self._forget()
                self._carry_out(batch)
        except _Interrupted:
            raise
        except Exception as error:  # noqa: BLE001 - it belongs to the callers of these commits
            self._forget()
            if len(batch) > 1:
                for request in batch:
                    self.carry_out([request])
                return
            gone = isinstance(error, FileNotFoundError)
            for request in batch:
                request.result = None
                request.error = StorageError(f"{error} while it was in use: try again") if gone else error

    def _forget(self) -> None:
        for at in self._stamps:
            self._room.shelf(at).forget()
        self._stamps.clear()

    def _carry_out(self, batch: Sequence[Request]) -> None:
        tx = FileTx(self._disk, self.shelf)
        for request in batch:
            request.result = request.error = None
            before = tx.saved()
            try:
                request.result = self._results(tx, request)
            except FileNotFoundError:
                raise
            except Exception as error:  # noqa: BLE001 - it belongs to the caller of this commit, not to the others
                tx.restore(before)
                request.error = error
        tx.sweep(self._room.clock.wall())
        self._apply(*tx.steps())

    @staticmethod
    def _results(tx: FileTx, request: Request) -> list[Any]:
        guard = request.guard
        if guard is None or tx.fenced(guard.key) == guard.token:
            return [OPS[name](tx, *args) for name, args in request.ops]
        try:
            return [APPLIED[name](tx, *args) for name, args in request.ops]
        except (KeyError, NotApplied):
            raise LeaseLost(guard.key, guard.token) from None

    def _apply(self, steps: Sequence[Write | Move | Remove], edits: Sequence[Edit]) -> None:
        """All steps or none."""
        removes = [each.where for each in steps if isinstance(each, Remove)]
        listed = {id(each.shelf): each.shelf.listed for each in edits}
        changed = sorted({each.shelf.directory for each in edits})
        drafts = list[str]()
        try:
            renames = self._drafted(steps, drafts)
            if len(steps) > 1:
                drafts.append(self._intent(renames, removes, changed))
            self._disk.flush("", *([DRAFTS] if len(steps) > 1 else []), *drafts)
        except BaseException:
            for draft in drafts:
                self._disk.remove(draft)
            raise
        try:
            if len(steps) > 1:
                # From here on these steps are taken, by the next one to have the lock if not by this one.
                self._disk.rename(drafts[-1], INTENT)
                self._disk.flush("")
            for directory in changed:
                self._disk.remove(f"{directory}/{STAMP}")
            self._room.follow(renames, removes)
            self._tell(edits, listed)
            if len(steps) > 1:
                self._room.finish(renames, removes)
        except Exception as error:
            if len(steps) > 1:
                raise _Interrupted from error
            raise
        if len(steps) == 1:
            self._later |= directories_of(renames, removes)

    def _drafted(self, steps: Sequence[Write | Move | Remove], drafts: list[str]) -> list[tuple[str, str]]:
        """The files that steps need, written into `drafts`; what is to be renamed to what."""
        renames = []
        for step in steps:
            if isinstance(step, Remove):
                continue
            target = step.where if isinstance(step, Write) else step.target
            self._disk.make(os.path.dirname(target))
            if isinstance(step, Write):
                drafts.append(self._disk.draft(step.data))
            renames.append((drafts[-1] if isinstance(step, Write) else step.where, target))
        return renames

    def _intent(self, renames: Sequence[tuple[str, str]], removes: Sequence[str], kinds: Sequence[str]) -> str:
        left = {"v": VERSION, "renames": renames, "removes": removes, "kinds": kinds}
        return self._disk.draft(sealed(json.dumps(left).encode()[:-1]))

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
        self._disk.flush(*self._later)


def directories_of(renames: Sequence[Sequence[str]], removes: Sequence[str]) -> set[str]:
    """Those whose names change, but for the one of drafts, which nobody misses."""
    paths = [*(each for pair in renames for each in pair), *removes]
    return {os.path.dirname(each) for each in paths} - {DRAFTS}
