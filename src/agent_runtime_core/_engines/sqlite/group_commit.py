"""Commit a group of requests as one transaction on the writing connection of a SQLite file."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import LeaseLost, StorageBusy, StorageError
from ..base import MARK, FunctionFailed, Guard, NotApplied, Op, OperationSet, moved
from ..commit_request import CommitRequest
from ..os_errors import storage_error
from .transaction import DRIVER_ERRORS, ConnectionOwner, SQLiteTx, translate

COMMIT_TIMEOUT = 6.0  # seconds a caller waits; well under a third of the shortest sensible lease
_WEIGHT = 1 / 8  # of the latest flush in the moving average
_RETRY = 0.002  # seconds between two tries while a program outside this library holds the file's lock


class GroupRolledBack(Exception):
    """The statement of a user's function made SQLite roll back the transaction. Its request contains the error."""


class GroupCommitter:
    """Commits groups of requests; each request is applied whole or not at all.

    The caller alone uses the connection, and holds the commit lock.
    """

    def __init__(self, owner: ConnectionOwner, conn: sqlite3.Connection, *, path: str, flushes: bool) -> None:
        self.path: str = path
        self.conn: sqlite3.Connection = conn
        self.timeout: float = COMMIT_TIMEOUT
        self.operations: dict[str, Callable[..., Any]] = {}
        self.replays: dict[str, Callable[..., Any]] = {}
        self.not_repeatable: frozenset[str] = frozenset()
        self.transaction: SQLiteTx = SQLiteTx(owner, conn)
        #: Moving average of the time a flush takes. One flush of a slow disk is enough to raise it.
        self.flush_seconds: float = 0.0
        self._cache = owner.known
        self._flushes = flushes

    def add(self, operation_set: OperationSet) -> None:
        self.operations.update(operation_set.operations)
        self.replays.update(operation_set.replays)
        self.not_repeatable |= operation_set.not_repeatable

    def begin(self) -> bool:
        """Begin a transaction; False if a program outside this library already began a transaction."""
        try:
            self.transaction.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                return False
            raise
        return True

    def wait_to_begin(self) -> None:
        until = time.monotonic() + self.timeout / 2
        while not self.begin():
            if time.monotonic() > until:
                raise StorageBusy(
                    f"{self.path} is locked by a program outside this library. Close it there, then try again"
                )
            time.sleep(_RETRY)

    def commit(self, batch: list[CommitRequest], *, once: bool = False) -> None:
        """Commit a group in the open transaction, and set the result or the error of each request.

        If a request fails half-way, the others are applied as if each were alone. With `once`, each request begins with
        a savepoint from the start, so that no user function runs again because another request failed.
        """
        tx = self.transaction
        try:
            self._cache.check(self.conn)
            if once or not self._apply_all(tx, batch):
                self._apply_each(tx, batch)
            self._end(tx)
        except (*DRIVER_ERRORS, GroupRolledBack) as error:
            # The transaction failed as a whole: nothing of it was stored.
            self._roll_back()
            if len(batch) == 1:
                if isinstance(error, sqlite3.IntegrityError) and self.runs_user_function(batch):
                    # SQLite checks a deferred constraint at COMMIT: it is the error of the user's function.
                    batch[0].result, batch[0].error = None, error
                elif isinstance(error, DRIVER_ERRORS):
                    batch[0].result, batch[0].error = None, translate(error, self.path)
                return
            for request in batch:
                request.result = request.error = None
                self.wait_to_begin()
                self.commit([request], once=once)

    def runs_user_function(self, batch: list[CommitRequest]) -> bool:
        """Whether any of the requests runs a user's function, which must not be repeated without need."""
        not_repeatable = self.not_repeatable
        if not_repeatable:
            for request in batch:
                for name, _ in request.ops:
                    if name in not_repeatable:
                        return True
        return False

    def fail(self, batch: list[CommitRequest], error: BaseException) -> None:
        """Roll back, and set `error` on each request without an error, as a StorageError."""
        self._roll_back()
        if isinstance(error, DRIVER_ERRORS):
            error = translate(error, self.path)
        elif isinstance(error, OSError):
            error = storage_error(error, self.path)
        failure = error if isinstance(error, StorageError) else StorageError(f"{self.path}: {error!r}")
        for request in batch:
            request.result, request.error = None, request.error or failure

    def _end(self, tx: SQLiteTx) -> None:
        if not self._flushes:
            tx.execute("COMMIT")
            return
        since = time.perf_counter()
        tx.execute("COMMIT")
        self.flush_seconds += (time.perf_counter() - since - self.flush_seconds) * _WEIGHT

    def _apply_all(self, tx: SQLiteTx, batch: list[CommitRequest]) -> bool:
        """Apply all requests without savepoints; False, with nothing applied, if one fails in its operations."""
        for request in batch:
            if not self.apply(tx, request):
                tx.execute("ROLLBACK")
                self._cache.forget()
                self.wait_to_begin()
                for each in batch:
                    each.result = each.error = None
                return False
        return True

    def _apply_each(self, tx: SQLiteTx, batch: list[CommitRequest]) -> None:
        for request in batch:
            tx.execute("SAVEPOINT arc_one")
            if not self.apply(tx, request):
                if not self.conn.in_transaction:
                    raise GroupRolledBack
                tx.execute("ROLLBACK TO arc_one")
                self._cache.forget()
            tx.execute("RELEASE arc_one")

    def _roll_back(self) -> None:
        self._cache.forget()
        if self.conn.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self.conn.execute("ROLLBACK")

    def apply(self, tx: SQLiteTx, request: CommitRequest) -> bool:
        """Apply one request; False if it failed where it may have written."""
        guard = request.guard
        try:
            if guard is not None and tx.fenced(guard.key) != guard.token:
                request.result, request.error = self.replay(tx, guard, request.ops)
                return True
            if (
                self._cache.mark is not None
                and (guard is None or guard.key != MARK)
                and (mark := tx.mark()) is not None
            ):
                request.error = moved(self.path, mark)
                return True
            operations, results = self.operations, []
            for name, args in request.ops:
                results.append(operations[name](tx, *args))
            request.result = results
            return True
        except DRIVER_ERRORS as error:
            if not self.conn.in_transaction:
                raise
            request.error = translate(error, self.path)
        except FunctionFailed as failed:
            request.error = failed.error
        except Exception as error:  # noqa: BLE001 - raised to the caller of this request, not to the whole group
            request.error = error
        return False

    def replay(self, tx: SQLiteTx, guard: Guard, ops: Sequence[Op]) -> tuple[list[Any] | None, LeaseLost | None]:
        """Return the results of a superseded claim's operations if all were applied before, else LeaseLost.

        Writes nothing.
        """
        try:
            return [self.replays[name](tx, *args) for name, args in ops], None
        except (KeyError, NotApplied):
            return None, LeaseLost(guard.key, guard.token)
