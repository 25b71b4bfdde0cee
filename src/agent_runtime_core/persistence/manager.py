"""Six stores behind one object, made when they are first asked for."""

from __future__ import annotations

import dataclasses
import inspect
import os
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from .._core.clock import SYSTEM
from .._core.ids import new_ulid
from .._core.lazy_import import load
from .._core.validation import nearest_name
from .._engines.base import Engine
from .._engines.memory import MemoryEngine
from ..config import get_config, place_of
from ..errors import InvalidArgument, UnknownSetting, brief
from .backends.files import FileConversationStore, FileMemoryStore, FilePreferencesStore, FileTaskStore
from .base.audit import AuditStore
from .base.conversations import ConversationStore
from .base.knowledge import KnowledgeStore
from .base.memory import MemoryStore
from .base.preferences import PreferencesStore
from .base.tasks import TaskStore
from .document_stores.base import DocumentBackedStore
from .documents.base import DocumentStore

KINDS = ("memory", "conversation", "task", "preferences", "knowledge", "audit")
_TECHNOLOGIES = {"memory": "InMemory", "sqlite": "SQLite", "redis": "Redis"}


@dataclass
class PersistenceConfig:
    """Where each kind of store comes from: an instance, else a factory, else a class and its keyword arguments.

    Memory, conversations, tasks and preferences are files by default, in `.agent_runtime` of `project_dir` (by default
    the current directory) and of the user's home; knowledge and audit are nothing unless they are named.
    `session_id` names the session whose Scope.SESSION this is; by default it is a new one, gone at close().
    """

    memory_store_class: type[Any] | None = FileMemoryStore
    conversation_store_class: type[Any] | None = FileConversationStore
    task_store_class: type[Any] | None = FileTaskStore
    preferences_store_class: type[Any] | None = FilePreferencesStore
    knowledge_store_class: type[Any] | None = None
    audit_store_class: type[Any] | None = None
    memory_store_kwargs: dict[str, Any] = field(default_factory=dict)
    conversation_store_kwargs: dict[str, Any] = field(default_factory=dict)
    task_store_kwargs: dict[str, Any] = field(default_factory=dict)
    preferences_store_kwargs: dict[str, Any] = field(default_factory=dict)
    knowledge_store_kwargs: dict[str, Any] = field(default_factory=dict)
    audit_store_kwargs: dict[str, Any] = field(default_factory=dict)
    memory_store: Any | None = None
    conversation_store: Any | None = None
    task_store: Any | None = None
    preferences_store: Any | None = None
    knowledge_store: Any | None = None
    audit_store: Any | None = None
    memory_store_factory: Callable[[], Any] | None = None
    conversation_store_factory: Callable[[], Any] | None = None
    task_store_factory: Callable[[], Any] | None = None
    preferences_store_factory: Callable[[], Any] | None = None
    knowledge_store_factory: Callable[[], Any] | None = None
    audit_store_factory: Callable[[], Any] | None = None
    project_dir: str | os.PathLike[str] | None = None
    session_id: str | None = None

    @classmethod
    def at(cls, path_or_url: str | os.PathLike[str], **more: Any) -> PersistenceConfig:
        """All six kinds in one place: `memory://`, `sqlite:///path`, the path of a SQLite file, or `redis://host`."""
        technology, where = place_of(path_or_url)
        return cls._all(technology, {"engine": MemoryEngine()} if technology == "memory" else where, more)

    @classmethod
    def on(cls, engine: Engine, **more: Any) -> PersistenceConfig:
        """All six kinds on an engine that other backends use too."""
        return cls._all(engine.kind, {"engine": engine}, more)

    @classmethod
    def _all(cls, technology: str, options: dict[str, Any], more: dict[str, Any]) -> PersistenceConfig:
        prefix = _TECHNOLOGIES[technology]
        settings: dict[str, Any] = {}
        for kind in KINDS:
            dotted = f".backends.{technology}:{prefix}{kind.capitalize()}Store"
            settings[f"{kind}_store_class"] = load(dotted, package=__package__)
            settings[f"{kind}_store_kwargs"] = dict(options)
        return cls(**settings, **more)

    @classmethod
    def of(cls, **settings: Any) -> PersistenceConfig:
        """A configuration by names; UnknownSetting (a ValueError) for one that nobody reads."""
        known = [each.name for each in dataclasses.fields(cls)]
        for name in settings:
            if name not in known:
                raise UnknownSetting(f"no setting {brief(name)} of persistence: {nearest_name(name, known)}")
        return cls(**settings)


class PersistenceManager:
    """Memory, conversations, tasks, preferences and, where they are configured, knowledge and audit.

    A store is made when it is first asked for, once; an instance is given as it is. `async with` closes it.
    """

    def __init__(self, config: PersistenceConfig | None = None) -> None:
        if config is not None and not isinstance(config, PersistenceConfig):
            raise InvalidArgument(
                f"config is a PersistenceConfig, not {brief(config)}: PersistenceConfig.of(**settings), or "
                "PersistenceManager.open(path_or_url)"
            )
        self.config: PersistenceConfig = config if config is not None else PersistenceConfig()
        self.session_id: str = self.config.session_id or new_ulid(SYSTEM)
        self._made: dict[str, Any] = {}
        self._lock = threading.RLock()

    @classmethod
    def open(cls, path_or_url: str | os.PathLike[str], *, session_id: str | None = None) -> PersistenceManager:
        """All six stores in one place: a SQLite file, `memory://` or `redis://host`, as in `AgentRunner.open`."""
        return cls(PersistenceConfig.at(path_or_url, session_id=session_id))

    @property
    def memory(self) -> MemoryStore:
        return cast(MemoryStore, self._wanted("memory"))

    @property
    def conversations(self) -> ConversationStore:
        return cast(ConversationStore, self._wanted("conversation"))

    @property
    def tasks(self) -> TaskStore:
        return cast(TaskStore, self._wanted("task"))

    @property
    def preferences(self) -> PreferencesStore:
        return cast(PreferencesStore, self._wanted("preferences"))

    @property
    def knowledge(self) -> KnowledgeStore | None:
        """None unless it is configured."""
        return cast("KnowledgeStore | None", self._store("knowledge"))

    @property
    def audit(self) -> AuditStore | None:
        """None unless it is configured."""
        return cast("AuditStore | None", self._store("audit"))

    def has_knowledge(self) -> bool:
        return self._configured("knowledge")

    def has_audit(self) -> bool:
        return self._configured("audit")

    def _configured(self, kind: str) -> bool:
        config = self.config
        return any(getattr(config, f"{kind}_store{how}") is not None for how in ("", "_factory", "_class"))

    def _wanted(self, kind: str) -> Any:
        store = self._store(kind)
        if store is None:
            raise InvalidArgument(
                f"no {kind} store is configured: PersistenceConfig({kind}_store=...), "
                f"{kind}_store_factory= or {kind}_store_class="
            )
        return store

    def _store(self, kind: str) -> Any:
        instance = getattr(self.config, f"{kind}_store")
        if instance is not None:
            return instance
        with self._lock:
            if kind not in self._made and self._configured(kind):
                self._made[kind] = self._make(kind)
            return self._made.get(kind)

    def _make(self, kind: str) -> Any:
        config = self.config
        factory = getattr(config, f"{kind}_store_factory")
        if factory is not None:
            return factory()
        cls = getattr(config, f"{kind}_store_class")
        given = getattr(config, f"{kind}_store_kwargs")
        store = cls(**{**self._ours(cls), **given})
        if isinstance(store, DocumentBackedStore) and "session_id" not in given:
            store.home.shared_session = config.session_id is not None  # one that this manager began ends with it
        return store

    def _ours(self, cls: type[Any]) -> dict[str, Any]:
        """Keywords for a store of ours: somebody else's takes what it is given and no more."""
        if not issubclass(cls, DocumentBackedStore):
            return {}
        known = inspect.signature(cls).parameters
        every = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
        settings: dict[str, Any] = {}
        if self.config.project_dir is not None and "project_dir" in known:
            settings["project_dir"] = Path(self.config.project_dir)
        if every or "session_id" in known:
            settings["session_id"] = self.session_id
        return settings

    def homes(self) -> list[DocumentStore]:
        """The document stores that these stores write to, each once; what only a factory could make is left alone."""
        found: list[DocumentStore] = []
        for kind in KINDS:
            unmade = kind not in self._made and getattr(self.config, f"{kind}_store") is None
            if unmade and getattr(self.config, f"{kind}_store_factory") is not None:
                continue
            store = self._store(kind)
            if isinstance(store, DocumentBackedStore):
                found += [each for each in store.home.document_stores() if not any(each is known for known in found)]
        return found

    async def close(self) -> None:
        """Close the stores made so far; those handed in are their owner's, and closed too, as they always were."""
        with self._lock:
            stores = [*self._made.values(), *(getattr(self.config, f"{kind}_store") for kind in KINDS)]
            self._made = {}
        known: list[Any] = []
        async with AsyncExitStack() as closing:  # one that fails leaves none of the others open
            for store in stores:
                if store is not None and not any(store is each for each in known):
                    known.append(store)
                    closing.push_async_callback(store.close)

    async def __aenter__(self) -> PersistenceManager:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class _Default:
    """The manager of this process, made from the configuration when it is first asked for."""

    def __init__(self) -> None:
        self.config: PersistenceConfig | None = None
        self.manager: PersistenceManager | None = None
        self.lock = threading.Lock()


_default = _Default()


def configure_persistence(**settings: Any) -> PersistenceConfig:
    """Set where this process keeps what it persists, by the fields of PersistenceConfig; the next manager reads it.

    UnknownSetting (a ValueError) for a name nobody reads.
    """
    config = PersistenceConfig.of(**settings)
    with _default.lock:
        _default.config, _default.manager = config, None
    return config


def get_persistence_manager() -> PersistenceManager:
    """The one manager of this process: as configured, else where `backend_url` says, else files."""
    with _default.lock:
        if _default.manager is None:
            config = _default.config
            url = get_config().backend_url
            if config is None and url is not None:
                config = PersistenceConfig.at(url)
            _default.manager = PersistenceManager(config)
        return _default.manager
