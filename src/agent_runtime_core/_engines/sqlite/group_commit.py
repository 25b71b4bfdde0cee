"""Commits on the writing connection of a SQLite file: a group of them as one transaction, each whole or not at all."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import LeaseLost, StorageBusy, StorageError
from ..base import Guard, NotApplied, Op, OperationSet
from ..commit_request import CommitRequest
from ..os_errors import storage_error
from .transaction import DRIVER_ERRORS, ConnectionOwner, RowCache, SQLiteTx, translate
from .user_transaction import FunctionFailed

PATIENCE = 6.0  # seconds a caller waits; well under a third of the shortest sensible lease
_WEIGHT = 1 / 8  # of the latest flush in the average of them
_RETRY = 0.002  # seconds between tries where a program outside this library holds the file's lock


class GroupRolledBack(Exception):
    """The statement of a user's function made SQLite roll back the whole transaction; its request has the error."""


class GroupCommitter:
    """Carries out groups of commits; whoever calls has the turn to use the connection, and the commit lock."""

    patience: float = PATIENCE

    def __init__(self, home: ConnectionOwner, conn: sqlite3.Connection, *, path: str, flushes: bool) -> None:
        self.path: str = path
        self.conn: sqlite3.Connection = conn
        self.ops: dict[str, Callable[..., Any]] = {}
        self.applied: dict[str, Callable[..., Any]] = {}
        self.once: frozenset[str] = frozenset()
        self._known: RowCache = home.known
        self._tx: SQLiteTx = SQLiteTx(home, conn)
        self._flushes = flushes
        self._flush = 0.0  # seconds, the moving average: a slow disk shows itself at the first

    def add(self, concern: OperationSet) -> None:
        self.ops.update(concern.operations)
        self.applied.update(concern.replays)
        self.once |= concern.not_repeatable

    def _begin(self, tx: SQLiteTx) -> bool:
        """Begin a transaction; False where a program outside this library is in one."""
        try:
            tx.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                return False
            raise
        return True

    def _wait_to_begin(self, tx: SQLiteTx) -> None:
        until = time.monotonic() + self.patience / 2
        while not self._begin(tx):
            if time.monotonic() > until:
                raise StorageBusy(f"{self.path} is locked by a program outside this library")
            time.sleep(_RETRY)

    def _transact(self, tx: SQLiteTx, batch: list[CommitRequest], once: bool) -> None:
        """Commit a group; as if each request were alone, should one of them fail half-way."""
        try:
            self._known.check(self.conn)
            if once or not self._apply_all(tx, batch):
                self._apply_each(tx, batch)
            self._commit(tx)
        except (*DRIVER_ERRORS, GroupRolledBack) as error:
            # The transaction as a whole failed: nothing of it landed.
            self._roll_back()
            if len(batch) == 1:
                if isinstance(error, sqlite3.IntegrityError) and self._has_once(batch):
                    # A deferred constraint, which SQLite checks at COMMIT, is the function's error as any other is.
                    batch[0].result, batch[0].error = None, error
                elif isinstance(error, DRIVER_ERRORS):
                    batch[0].result, batch[0].error = None, translate(error, self.path)
                return
            for request in batch:
                request.result = request.error = None
                self._wait_to_begin(tx)
                self._transact(tx, [request], once)

    def _has_once(self, batch: list[CommitRequest]) -> bool:
        """Whether somebody's function is run by any of these, which is not run again without need."""
        once = self.once
        if once:
            for request in batch:
                for name, _ in request.ops:
                    if name in once:
                        return True
        return False

    def _commit(self, tx: SQLiteTx) -> None:
        if not self._flushes:
            tx.execute("COMMIT")
            return
        since = time.perf_counter()
        tx.execute("COMMIT")
        self._flush += (time.perf_counter() - since - self._flush) * _WEIGHT

    def _apply_all(self, tx: SQLiteTx, batch: list[CommitRequest]) -> bool:
        """Apply all requests without a savepoint each; False, with nothing applied, if one fails in its operations."""
        for request in batch:
            if not self.apply(tx, request):
                tx.execute("ROLLBACK")
                self._known.forget()
                self._wait_to_begin(tx)
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
                self._known.forget()
            tx.execute("RELEASE arc_one")

    def _failed(self, batch: list[CommitRequest], error: BaseException) -> None:
        self._roll_back()
        if isinstance(error, DRIVER_ERRORS):
            error = translate(error, self.path)
        elif isinstance(error, OSError):
            error = storage_error(error, self.path)
        told = error if isinstance(error, StorageError) else StorageError(f"{self.path}: {error!r}")
        for request in batch:
            request.result, request.error = None, request.error or told

    def _roll_back(self) -> None:
        self._known.forget()
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
            ops, results = self.ops, []
            for name, args in request.ops:
                results.append(ops[name](tx, *args))
            request.result = results
            return True
        except DRIVER_ERRORS as error:
            if not self.conn.in_transaction:
                raise
            request.error = translate(error, self.path)
        except FunctionFailed as failed:
            request.error = failed.error
        except Exception as error:  # noqa: BLE001 - it belongs to the caller of this request, not to the group
            request.error = error
        return False

    def replay(self, tx: SQLiteTx, guard: Guard, ops: Sequence[Op]) -> tuple[list[Any] | None, LeaseLost | None]:
        """The results of a superseded claim's operations if all were applied before, or why not; writes nothing."""
        try:
            return [self.applied[name](tx, *args) for name, args in ops], None
        except (KeyError, NotApplied):
            return None, LeaseLost(guard.key, guard.token)
