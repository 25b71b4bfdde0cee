"""What the six stores share: the place of their documents, and the kinds of documents that they consist of."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any, ClassVar, Final

from ..._core.clock import SYSTEM, Clock
from ..._core.ids import new_ulid
from ...errors import InvalidArgument, StorageError, brief
from ..documents.base import Collection, DocumentStore, storable
from ..models import Scope

log: logging.Logger = logging.getLogger("agent_runtime_core")

SESSION_TTL = 30 * 24 * 3600.0  # seconds after its last write that a session is kept, if it can outlive its process

# Kinds of documents, as they are written in every store.
MEMORY: Final = "memory"  # key: the key
PREFERENCE: Final = "preference"  # key: the key
CONVERSATION: Final = "conversation"  # key: its id; rank: updated_at
MESSAGE: Final = "message"  # key: "<conversation id>/<message id>"; group: the conversation's id
TASK_LIST: Final = "task_list"  # key: its id; rank: updated_at; group: the conversation's id
TASK: Final = "task"  # key: its id; group: the list's id


class DocumentHome:
    """The document stores of the three scopes, and which part of them belongs to this project and session.

    Args:
        session_id: Names the session. By default it is a new one, which ends when the home is closed.
        project: Separates projects that share a document store.
        session_ttl: Seconds after its last write that a session is kept, if it can outlive its process.
        clock: By default that of the documents, which is that of their engine.

    A subclass calls `keep_in` once its arguments were checked.
    """

    sessions_expire: ClassVar[bool] = False
    """Whether a session can outlive its process, so that its documents must expire."""

    def __init__(
        self, *, session_id: str | None = None, project: str = "", session_ttl: float = SESSION_TTL,
        clock: Clock = SYSTEM,
    ) -> None:  # fmt: skip
        for name, value in (("session_id", session_id or ""), ("project", project)):
            storable(value, name, "store")
        self.clock: Clock = clock
        #: Whether others use the session too. Then it does not end with this home.
        self.shared_session: bool = session_id is not None
        self.session_id: str = session_id if session_id is not None else new_ulid(clock)
        self.project = project
        self.session_ttl = session_ttl
        self._session_begun = False
        self._closed = False

    def keep_in(
        self, documents: DocumentStore, *, in_home: DocumentStore | None = None, in_session: DocumentStore | None = None
    ) -> None:  # fmt: skip
        """Use this document store, and if they are given, another one for Scope.GLOBAL and for Scope.SESSION."""
        self._documents = {
            Scope.GLOBAL: in_home or documents, Scope.PROJECT: documents, Scope.SESSION: in_session or documents
        }  # fmt: skip
        if self.clock is SYSTEM:
            self.clock = documents.clock

    def documents(self, scope: Scope) -> DocumentStore:
        return self._documents[scope]

    def expires(self, scope: Scope) -> float | None:
        """Return the seconds after its last write that a document is kept, or None for all time."""
        return self.session_ttl if self.sessions_expire and scope is Scope.SESSION else None

    def table(self, scope: Scope | None, kind: str, default: Scope = Scope.PROJECT) -> Collection:
        where = default if scope is None else _scope(scope)
        self._session_begun |= where is Scope.SESSION
        return Collection(self.documents(where), self.space(where), kind, self.expires(where))

    def space(self, scope: Scope) -> str:
        match scope:
            case Scope.GLOBAL:
                return "global"
            case Scope.PROJECT:
                return f"project:{self.project}" if self.project else "project"
            case Scope.SESSION:
                return f"session:{self.session_id}"

    def document_stores(self) -> list[DocumentStore]:
        """Return the document stores, each once."""
        return list({id(each): each for each in self._documents.values()}.values())

    async def close(self) -> None:
        """Close the document stores once. A session that only this home uses is deleted."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._session_begun and not self.shared_session:
                await self._end_session()
        finally:
            for documents in self.document_stores():
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


class DocumentBackedStore:
    """A store of documents. `class SQLiteTaskStore(StoredTasks, home=SQLiteHome)` names where they are.

    The arguments of such a class are those of its home, and the options of the store.
    """

    home_class: ClassVar[type[Any]]

    def __init_subclass__(cls, home: type[DocumentHome] | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if home is not None:
            cls.home_class = home
            cls.__init__ = _with_signature_of(home, cls.__init__)  # type: ignore[method-assign]

    def __init__(self, *place: Any, **options: Any) -> None:
        self.home: DocumentHome = self.home_class(*place, **options)
        self.clock: Clock = self.home.clock

    def documents(self, scope: Scope) -> DocumentStore:
        return self.home.documents(scope)

    async def close(self) -> None:
        await self.home.close()


def _with_signature_of(home: type[Any], init: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *place: Any, **options: Any) -> None:
        init(self, *place, **options)

    # So that help() and PersistenceManager see which arguments there are.
    __init__.__signature__ = inspect.signature(home.__init__)  # type: ignore[attr-defined]
    return __init__
