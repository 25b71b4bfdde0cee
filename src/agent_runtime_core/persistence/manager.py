"""The six stores of a process as one object, and document stores by URL. Each store is created on first use."""

from __future__ import annotations

import dataclasses
import inspect
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote
from uuid import UUID

from .._core.arguments import checked_tenant
from .._core.clock import SYSTEM
from .._core.ids import conversation_id as id_of_conversation
from .._core.ids import new_ulid
from .._core.lazy_import import load, load_scheme
from .._core.validation import Shown, must, type_name, unknown
from .._engines.base import Engine
from .._engines.memory import MemoryEngine
from ..config import INSTALLED, SETTINGS, get_config, place_of
from ..errors import InvalidArgument, NotSupported, UnknownSetting
from .backends.files import FileConversationStore, FileMemoryStore, FilePreferencesStore, FileTaskStore
from .base.audit import AuditStore
from .base.conversations import ConversationStore
from .base.knowledge import KnowledgeStore, MemoryStore, PreferencesStore
from .base.tasks import TaskStore
from .document_stores.base import DocumentBackedStore
from .documents.base import DocumentStore

KINDS = ("memory", "conversation", "task", "preferences", "knowledge", "audit")
_PREFIXES = {"memory": "InMemory", "sqlite": "SQLite", "redis": "Redis", "postgres": "Postgres"}
_STORES_ON_DOCUMENTS = {
    "memory": "knowledge:StoredMemory", "conversation": "conversations:StoredConversations",
    "task": "tasks:StoredTasks", "preferences": "knowledge:StoredPreferences",
    "knowledge": "knowledge:StoredKnowledge", "audit": "audit:StoredAudit",
}  # fmt: skip
_DOCUMENT_STORES = {
    "memory": "memory:MemoryDocuments",
    "sqlite": "sqlite:SQLiteDocuments",
    "redis": "redis:RedisDocuments",
    "postgres": "postgres:PostgresDocuments",
    "files": "files:FileDocuments",
}
_FILES = "files:///"


@dataclass
class PersistenceConfig:
    """The configuration of the six stores.

    Each kind of store can be set in three ways: `<kind>_store` is an instance, `<kind>_store_factory` a function that
    creates one, and `<kind>_store_class` a class, called with `<kind>_store_kwargs`. The first setting that is not None
    is used.

    By default memory, conversations, tasks and preferences are files, and there is no knowledge or audit store.

    Attributes:
        memory_store_class: The class of that store.
        conversation_store_class: The class of that store.
        task_store_class: The class of that store.
        preferences_store_class: The class of that store.
        knowledge_store_class: The class of that store.
        audit_store_class: The class of that store.
        memory_store_kwargs: The arguments of that class.
        conversation_store_kwargs: The arguments of that class.
        task_store_kwargs: The arguments of that class.
        preferences_store_kwargs: The arguments of that class.
        knowledge_store_kwargs: The arguments of that class.
        audit_store_kwargs: The arguments of that class.
        memory_store: The store for the memory of agents, as an instance.
        conversation_store: The store for conversations, as an instance.
        task_store: The store for lists of tasks, as an instance.
        preferences_store: The store for preferences, as an instance.
        knowledge_store: The store for facts, summaries and embeddings, as an instance.
        audit_store: The store for audit entries, errors and metrics, as an instance.
        memory_store_factory: A function that creates that store.
        conversation_store_factory: A function that creates that store.
        task_store_factory: A function that creates that store.
        preferences_store_factory: A function that creates that store.
        knowledge_store_factory: A function that creates that store.
        audit_store_factory: A function that creates that store.
        project_dir: The files of a project are in `<project_dir>/.agent_runtime`. None is the current directory. The
            files of Scope.GLOBAL are in `.agent_runtime` of the user's home directory.
        session_id: The session of Scope.SESSION. None starts a new session, which `close()` deletes.
        documents: The document store that `at` opened at the URL of an installed package. `close()` closes it.

    Examples:
        >>> from agent_runtime_core import PersistenceConfig
        >>> PersistenceConfig.at("memory://").memory_store_class.__name__
        'InMemoryMemoryStore'
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
    documents: DocumentStore | None = field(default=None, repr=False)

    @classmethod
    def at(
        cls, path_or_url: str | os.PathLike[str], *, durability: str | None = None, **more: Any
    ) -> PersistenceConfig:
        """Configure all six stores with one store URL.

        Args:
            path_or_url: `memory://`, `sqlite:///path`, the path of a SQLite file, `redis://host`,
                `postgresql://host/database`, or a URL of an installed package that provides document stores.
            durability: Of a SQLite file, "full" or "normal". None means the configured durability.
            **more: Further settings.

        Returns:
            The configuration.

        Raises:
            InvalidArgument: The file is open in this process with another durability.
        """
        backend, options = place_of(path_or_url)
        if durability is not None:
            SETTINGS["durability"].check("durability", durability)
        if backend == INSTALLED:
            documents = open_document_store(options["url"])
            return cls.on(documents, documents=documents, **more)
        if backend == "sqlite":
            options["durability"] = get_config().durability if durability is None else durability
            # The stores open the file on first use, which may be in the middle of a run.
            engine = cast(Any, load(".._engines.sqlite.engine:SQLiteEngine", package=__package__))
            engine.check_durability(**options)
        return cls._all(backend, {"engine": MemoryEngine()} if backend == "memory" else options, more)

    @classmethod
    def on(cls, engine: Engine | DocumentStore, **more: Any) -> PersistenceConfig:
        """Configure all six stores on an engine or a document store.

        Args:
            engine: The engine of a queue, an event bus or a state store, or a document store. The stores do not close a
                document store.
            **more: Further settings.

        Returns:
            The configuration.
        """
        if isinstance(engine, DocumentStore):
            return cls._all("documents", {"documents": engine}, more)
        return cls._all(engine.kind, {"engine": engine}, more)

    @classmethod
    def _all(cls, backend: str, options: dict[str, Any], more: dict[str, Any]) -> PersistenceConfig:
        settings: dict[str, Any] = {}
        for kind in KINDS:
            class_path = (
                f".document_stores.{_STORES_ON_DOCUMENTS[kind]}"
                if backend == "documents"
                else f".backends.{backend}:{_PREFIXES[backend]}{kind.capitalize()}Store"
            )
            settings[f"{kind}_store_class"] = load(class_path, package=__package__)
            settings[f"{kind}_store_kwargs"] = dict(options)
        return cls(**settings, **more)

    @classmethod
    def of(cls, **settings: Any) -> PersistenceConfig:
        """Return a configuration with these settings.

        Args:
            **settings: Fields of `PersistenceConfig`.

        Raises:
            UnknownSetting: A setting does not exist. It is also a ValueError.

        Examples:
            >>> from agent_runtime_core import PersistenceConfig
            >>> PersistenceConfig.of(session_id="s-1").session_id
            's-1'
        """
        known = [each.name for each in dataclasses.fields(cls)]
        for name in settings:
            if name not in known:
                raise UnknownSetting(f"PersistenceConfig: {unknown('setting', name, known)}")
        return cls(**settings)


class PersistenceManager:
    """The stores of a process: memory, conversations, tasks, preferences and, if configured, knowledge and audit.

    A store is created on first use, once. `async with` closes all of them.

    Args:
        config: The configuration. None uses files in the current directory and the user's home directory.

    Raises:
        InvalidArgument: `config` is not a PersistenceConfig.
    """

    def __init__(self, config: PersistenceConfig | None = None) -> None:
        if config is not None and not isinstance(config, PersistenceConfig):
            raise must(
                "config",
                "be a PersistenceConfig",
                config,
                "Use PersistenceConfig.of(**settings) or PersistenceManager.open(path_or_url)",
            )
        self.config: PersistenceConfig = config if config is not None else PersistenceConfig()
        self.session_id: str = self.config.session_id or new_ulid(SYSTEM)
        #: Whose data the stores contain. If None, the data without a tenant.
        self.tenant: str | None = None
        self._created: dict[str, Any] = {}
        self._of_tenants: weakref.WeakValueDictionary[str, PersistenceManager] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls, path_or_url: str | os.PathLike[str], *, session_id: str | None = None, durability: str | None = None
    ) -> PersistenceManager:
        """Open all six stores with one store URL, as `AgentRunner.open` does.

        Args:
            path_or_url: The path of a SQLite file, `sqlite:///path`, `memory://`, `redis://host` or
                `postgresql://host/database`.
            session_id: The session of Scope.SESSION. None starts a new session, which `close()` deletes.
            durability: Of a SQLite file: "full" survives a power loss, "normal" a crash of the process. None means the
                configured durability.

        Returns:
            The manager. Close it with `await manager.close()`, or use it in `async with`.

        Raises:
            InvalidArgument: The file is open in this process with another durability.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import PersistenceManager
            >>> async def main():
            ...     async with PersistenceManager.open("memory://") as stores:
            ...         await stores.memory.set("city", "Ulm")
            ...         return await stores.memory.get("city")
            >>> asyncio.run(main())
            'Ulm'
        """
        return cls(PersistenceConfig.at(path_or_url, session_id=session_id, durability=durability))

    @property
    def memory(self) -> MemoryStore:
        """The store for the memory of agents."""
        return cast(MemoryStore, self._require("memory"))

    @property
    def conversations(self) -> ConversationStore:
        """The store for conversations."""
        return cast(ConversationStore, self._require("conversation"))

    @property
    def tasks(self) -> TaskStore:
        """The store for lists of tasks."""
        return cast(TaskStore, self._require("task"))

    @property
    def preferences(self) -> PreferencesStore:
        """The store for preferences."""
        return cast(PreferencesStore, self._require("preferences"))

    @property
    def knowledge(self) -> KnowledgeStore | None:
        """The store for facts, summaries and embeddings. None if it is not configured."""
        return cast("KnowledgeStore | None", self._store("knowledge"))

    @property
    def audit(self) -> AuditStore | None:
        """The store for audit entries, errors and metrics. None if it is not configured."""
        return cast("AuditStore | None", self._store("audit"))

    def has_knowledge(self) -> bool:
        """Return whether a knowledge store is configured."""
        return self._configured("knowledge")

    def has_audit(self) -> bool:
        """Return whether an audit store is configured.

        Examples:
            >>> from agent_runtime_core import PersistenceConfig, PersistenceManager
            >>> PersistenceManager(PersistenceConfig()).has_audit()
            False
        """
        return self._configured("audit")

    def _configured(self, kind: str) -> bool:
        config = self.config
        return any(getattr(config, f"{kind}_store{how}") is not None for how in ("", "_factory", "_class"))

    def _require(self, kind: str) -> Any:
        store = self._store(kind)
        if store is None:
            raise InvalidArgument(
                f"PersistenceManager has no {kind} store. Set {kind}_store, {kind}_store_factory or "
                f"{kind}_store_class of its PersistenceConfig."
            )
        return store

    def _store(self, kind: str) -> Any:
        instance = getattr(self.config, f"{kind}_store")
        if instance is not None:
            return instance
        with self._lock:
            if kind not in self._created and self._configured(kind):
                self._created[kind] = self._make(kind)
            return self._created.get(kind)

    def _make(self, kind: str) -> Any:
        config = self.config
        factory = getattr(config, f"{kind}_store_factory")
        if factory is not None:
            return factory()
        cls = getattr(config, f"{kind}_store_class")
        options = getattr(config, f"{kind}_store_kwargs")
        store = cls(**{**self._default_options(cls), **options})
        if isinstance(store, DocumentBackedStore) and "session_id" not in options:
            store.home.shared_session = config.session_id is not None  # close() deletes a session of this manager
        return store

    def _default_options(self, cls: type[Any]) -> dict[str, Any]:
        """Return arguments for a built-in store. A custom store receives only its own `kwargs`."""
        if not issubclass(cls, DocumentBackedStore):
            return {}
        parameters = inspect.signature(cls).parameters
        has_kwargs = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        options: dict[str, Any] = {}
        if self.config.project_dir is not None and "project_dir" in parameters:
            options["project_dir"] = Path(self.config.project_dir)
        if has_kwargs or "session_id" in parameters:
            options["session_id"] = self.session_id
        return options

    def for_tenant(self, tenant: str | None) -> PersistenceManager:
        """Return these stores with only the data of a tenant. `ctx.persistence` of a tenant's run is such a manager.

        Keys and ids are names within a tenant: two tenants can use the same names. The returned manager uses the stores
        of this manager, which closes them. If you configure your own store class, add a method `for_tenant(tenant)` to
        it that returns the store of a tenant.

        Args:
            tenant: The tenant. None returns this manager.

        Raises:
            InvalidArgument: The name of the tenant is not valid, or this manager is the manager of another tenant.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import PersistenceManager
            >>> async def main():
            ...     async with PersistenceManager.open("memory://") as stores:
            ...         await stores.for_tenant("acme").memory.set("city", "Ulm")
            ...         return await stores.for_tenant("initech").memory.get("city")
            >>> asyncio.run(main()) is None
            True
        """
        if not (name := checked_tenant(tenant)):
            return self
        with self._lock:
            found = self._of_tenants.get(name)
            if found is None:
                found = self._of_tenants[name] = _TenantManager(self, name)
            return found

    async def assign_conversation(self, conversation_id: UUID | str, tenant: str) -> bool:
        """Move a conversation without a tenant to a tenant, with its messages.

        Built-in stores move it in one commit. A crash during the move of another store leaves the conversation in both
        places until you call this again.

        Args:
            conversation_id: The conversation, as a run names it.
            tenant: The tenant.

        Returns:
            Whether the conversation was moved. False if it does not exist, or if the tenant has a conversation with
            this id.

        Raises:
            NotSupported: The conversation store lacks the method `for_tenant`.
            InvalidArgument: `tenant` is the tenant of this manager, or a name is invalid.
        """
        named = conversation_uuid(conversation_id)
        ours, theirs = self.conversations, self.for_tenant(tenant).conversations
        if ours is theirs:
            raise must("tenant", "be the tenant that gets the conversation", tenant)
        return await ours.move_to(theirs, named)

    def document_stores(self) -> list[DocumentStore]:
        """Return the document stores that the stores write to, each once.

        It calls no factory: a store that only a factory can create, and that is not in use yet, is left out.
        """
        found: list[DocumentStore] = []
        for kind in KINDS:
            missing = kind not in self._created and getattr(self.config, f"{kind}_store") is None
            if missing and getattr(self.config, f"{kind}_store_factory") is not None:
                continue
            store = self._store(kind)
            if isinstance(store, DocumentBackedStore):
                found += [each for each in store.home.document_stores() if not any(each is known for known in found)]
        return found

    async def close(self) -> None:
        """Close all stores that were created so far, and those that were passed as instances."""
        with self._lock:
            stores = [*self._created.values(), *(getattr(self.config, f"{kind}_store") for kind in KINDS)]
            self._created = {}
        closed: list[Any] = []
        async with AsyncExitStack() as closing:  # if one close fails, the others are still closed
            if self.config.documents is not None:
                closing.push_async_callback(self.config.documents.close)
            for store in stores:
                if store is not None and not any(store is each for each in closed):
                    closed.append(store)
                    closing.push_async_callback(store.close)

    async def __aenter__(self) -> PersistenceManager:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def conversation_uuid(name: UUID | str, tenant: str | None = None) -> UUID:
    """Return the id of the conversation that runs name in their input as `conversation_id`.

    A UUID, or a string that is a UUID, is the id. Any other string always yields the same id.

    Args:
        name: The name.
        tenant: The tenant. It is only checked: the conversations of each tenant are stored apart. Conversations of two
            tenants with the same name get the same id.

    Raises:
        InvalidArgument: The name is empty or no string, or the name of the tenant is not valid.

    Examples:
        >>> from agent_runtime_core import conversation_uuid
        >>> conversation_uuid("chat-1") == conversation_uuid("chat-1")
        True
    """
    checked_tenant(tenant)
    found = id_of_conversation(name) if isinstance(name, str | UUID) else None
    if found is None:
        raise must("the name of a conversation", "be a non-empty string or a UUID", name)
    return found


class _TenantManager(PersistenceManager):
    """The stores of another manager, with only the data of a tenant."""

    def __init__(self, manager: PersistenceManager, tenant: str) -> None:
        super().__init__(manager.config)
        self.session_id, self.tenant = manager.session_id, tenant
        self._manager = manager

    def for_tenant(self, tenant: str | None) -> PersistenceManager:
        if checked_tenant(tenant) not in ("", self.tenant):
            raise must("tenant", f"be {self.tenant!r}, whose stores these are", tenant)
        return self

    def _store(self, kind: str) -> Any:
        store = self._manager._store(kind)
        if store is None:
            return None
        with self._lock:
            known, found = self._created.get(kind, (None, None))
            if known is not store:  # the other manager was closed since, and opened a new store
                found = store_of_tenant(kind, store, cast(str, self.tenant))
                self._created[kind] = (store, found)
            return found

    def document_stores(self) -> list[DocumentStore]:
        return self._manager.document_stores()

    async def close(self) -> None:
        """Do nothing: the other manager closes the stores."""


def store_of_tenant(kind: str, store: Any, tenant: str) -> Any:
    """Return the store of a tenant.

    Raises:
        NotSupported: The store serves no tenants.
    """
    if not callable(getattr(store, "for_tenant", None)):
        raise NotSupported(
            f"the {kind} store of tenant {tenant!r} must come from a store with a method for_tenant(tenant), got "
            f"{type_name(type(store))}. Add the method, or configure a built-in store"
        )
    return store.for_tenant(tenant)


class _Default:
    """The manager of this process, created from the configuration on first use."""

    def __init__(self) -> None:
        self.config: PersistenceConfig | None = None
        self.manager: PersistenceManager | None = None
        self.lock = threading.Lock()


_default = _Default()


def configure_persistence(**settings: Any) -> PersistenceConfig:
    """Configure the stores of this process. The next call of `get_persistence_manager` creates a new manager.

    Args:
        **settings: Fields of PersistenceConfig.

    Returns:
        The configuration.

    Raises:
        UnknownSetting: A setting does not exist. It is also a ValueError.
    """
    config = PersistenceConfig.of(**settings)
    with _default.lock:
        _default.config, _default.manager = config, None
    return config


def get_persistence_manager() -> PersistenceManager:
    """Return the manager of this process.

    It uses the configuration of `configure_persistence`, or else the setting `backend_url`. Without both, or if the
    installed package that adds the scheme of the URL provides no document stores, it uses files.
    """
    with _default.lock:
        if _default.manager is None:
            config = _default.config
            url = get_config().backend_url
            if config is None and url is not None and (place_of(url)[0] != INSTALLED or has_documents(url)):
                config = PersistenceConfig.at(url)
            _default.manager = PersistenceManager(config)
        return _default.manager


def open_document_store(url: str, *, durability: str = "full") -> DocumentStore:
    """Return the document store at `url`. Close it with `await store.close()`.

    Args:
        url: `memory://`, `sqlite:///path`, the path of a SQLite file, `redis://host`,
            `postgresql://host/database`, `files:///path` for a directory of files, or a URL of an installed package
            that provides document stores.
        durability: "full" or "normal": the `synchronous` setting of SQLite. Other stores ignore it.

    Raises:
        InvalidArgument: It is no such URL.
    """
    options: dict[str, Any]
    if isinstance(url, str) and url.startswith(_FILES):
        name, options = "files", {"root": unquote(url.removeprefix(_FILES))}
    else:
        name, options = place_of(url)
    if name == "sqlite":
        options["durability"] = durability
    if name == INSTALLED:
        opened = _installed(url)
    else:
        store: Any = load(f".documents.{_DOCUMENT_STORES[name]}", package=__package__)
        opened = store(**options)
    get_config().encode_contents(opened)
    return opened


def has_documents(url: str) -> bool:
    """Return whether the package that adds the scheme of `url` provides document stores."""
    return callable(getattr(load_scheme(url).opener, "open_documents", None))


def _installed(url: str) -> DocumentStore:
    found = load_scheme(url)
    if not has_documents(url):
        raise must(found.called, "have a method open_documents(url)", Shown("an object without it"))
    opened = found.opener.open_documents(url)
    if not isinstance(opened, DocumentStore):
        raise must(f"{found.called}: open_documents", "return a DocumentStore", opened)
    return opened
