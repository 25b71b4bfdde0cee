"""What our stores share: where the documents of a scope are, and who lets go of them."""

from __future__ import annotations

import logging
from typing import Any

from ..._clock import SYSTEM, Clock
from ..._ids import new_ulid
from ...errors import InvalidArgument, StorageError, brief
from ..documents.base import DocumentStore, Table, storable
from ..models import Scope

log: logging.Logger = logging.getLogger("agent_runtime_core")

SESSION_TTL = 30 * 24 * 3600.0  # seconds after its last write that a session is kept where it outlives its process


class Home:
    """Where a store keeps its documents: a mixin of each technology, to be named before the store's body.

    `session_id` tells this session from others on the same store; without one it is a new session.
    `project` tells projects apart that share a store.
    """

    def __init__(
        self, *, session_id: str | None = None, project: str = "", session_ttl: float = SESSION_TTL,
        clock: Clock = SYSTEM,
    ) -> None:  # fmt: skip
        for name, value in (("session_id", session_id or ""), ("project", project)):
            storable(value, name, "store")
        self.clock: Clock = clock
        #: Whether the session is another's too: then it does not end with this store.
        self.shared_session: bool = session_id is not None
        self.session_id: str = session_id if session_id is not None else new_ulid(clock)
        self.project = project
        self.session_ttl = session_ttl
        self._session_begun = False
        self._closed = False

    def follow(self, documents: DocumentStore) -> None:
        """Take the clock of the documents, which is that of their engine, where no other one was given."""
        if self.clock is SYSTEM:
            self.clock = documents.clock

    def documents(self, scope: Scope) -> DocumentStore:
        """Where the documents of that scope are."""
        raise NotImplementedError

    def expires(self, scope: Scope) -> float | None:
        """Seconds after its last write that a document is kept there; None where a session ends with this store."""
        return None

    def table(self, scope: Scope | None, kind: str, default: Scope = Scope.PROJECT) -> Table:
        where = default if scope is None else _scope(scope)
        self._session_begun |= where is Scope.SESSION
        return Table(self.documents(where), self.space(where), kind, self.expires(where))

    def space(self, scope: Scope) -> str:
        match scope:
            case Scope.GLOBAL:
                return "global"
            case Scope.PROJECT:
                return f"project:{self.project}" if self.project else "project"
            case Scope.SESSION:
                return f"session:{self.session_id}"

    def homes(self) -> list[DocumentStore]:
        """The document stores it may write to, each once."""
        found: list[DocumentStore] = []
        for scope in Scope:
            documents = self.documents(scope)
            if not any(documents is known for known in found):
                found.append(documents)
        return found

    async def close(self) -> None:
        """Let go of where the documents are, once; a session of this store alone ends with it."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._session_begun and not self.shared_session:
                await self._end_session()
        finally:
            for documents in self.homes():
                await documents.close()

    async def _end_session(self) -> None:
        try:
            await self.documents(Scope.SESSION).drop(self.space(Scope.SESSION))
        except StorageError as error:
            if self.expires(Scope.SESSION) is None:
                raise
            log.warning("session %s is left to expire, it could not be cleared: %s", self.session_id, error)


def _scope(scope: Any) -> Scope:
    try:
        return Scope(scope)
    except Exception:  # noqa: BLE001 - ValueError, or what the repr raises that Enum puts into it
        raise InvalidArgument(f"there is no scope {brief(scope)}: GLOBAL, PROJECT and SESSION") from None
