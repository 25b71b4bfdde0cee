"""Stores for what persists across runs: conversations, tasks, memory, preferences, knowledge and audit records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy_import import lazily

if TYPE_CHECKING:
    from .backends.files import FileAuditStore as FileAuditStore
    from .backends.files import FileConversationStore as FileConversationStore
    from .backends.files import FileKnowledgeStore as FileKnowledgeStore
    from .backends.files import FileMemoryStore as FileMemoryStore
    from .backends.files import FilePreferencesStore as FilePreferencesStore
    from .backends.files import FileTaskStore as FileTaskStore
    from .backends.memory import InMemoryAuditStore as InMemoryAuditStore
    from .backends.memory import InMemoryConversationStore as InMemoryConversationStore
    from .backends.memory import InMemoryKnowledgeStore as InMemoryKnowledgeStore
    from .backends.memory import InMemoryMemoryStore as InMemoryMemoryStore
    from .backends.memory import InMemoryPreferencesStore as InMemoryPreferencesStore
    from .backends.memory import InMemoryTaskStore as InMemoryTaskStore
    from .backends.redis import RedisAuditStore as RedisAuditStore
    from .backends.redis import RedisConversationStore as RedisConversationStore
    from .backends.redis import RedisKnowledgeStore as RedisKnowledgeStore
    from .backends.redis import RedisMemoryStore as RedisMemoryStore
    from .backends.redis import RedisPreferencesStore as RedisPreferencesStore
    from .backends.redis import RedisTaskStore as RedisTaskStore
    from .backends.sqlite import SQLiteAuditStore as SQLiteAuditStore
    from .backends.sqlite import SQLiteConversationStore as SQLiteConversationStore
    from .backends.sqlite import SQLiteKnowledgeStore as SQLiteKnowledgeStore
    from .backends.sqlite import SQLiteMemoryStore as SQLiteMemoryStore
    from .backends.sqlite import SQLitePreferencesStore as SQLitePreferencesStore
    from .backends.sqlite import SQLiteTaskStore as SQLiteTaskStore
    from .base.audit import AuditStore as AuditStore
    from .base.conversations import ConversationStore as ConversationStore
    from .base.knowledge import KnowledgeStore as KnowledgeStore
    from .base.knowledge import NoEmbeddings as NoEmbeddings
    from .base.memory import MemoryStore as MemoryStore
    from .base.preferences import PreferencesStore as PreferencesStore
    from .base.tasks import TaskStore as TaskStore
    from .documents.base import Collection as Collection
    from .documents.base import Document as Document
    from .documents.base import DocumentMissing as DocumentMissing
    from .documents.base import DocumentStore as DocumentStore
    from .documents.base import Entry as Entry
    from .documents.base import Query as Query
    from .documents.base import VersionConflict as VersionConflict
    from .documents.operations import DocumentTransaction as DocumentTransaction
    from .documents.operations import document_operations as document_operations
    from .documents.operations import document_replays as document_replays
    from .manager import PersistenceConfig as PersistenceConfig
    from .manager import PersistenceManager as PersistenceManager
    from .manager import configure_persistence as configure_persistence
    from .manager import get_persistence_manager as get_persistence_manager
    from .message_tree import Branch as Branch
    from .message_tree import BrokenHistory as BrokenHistory
    from .models import AuditEntry as AuditEntry
    from .models import AuditEventType as AuditEventType
    from .models import Conversation as Conversation
    from .models import ConversationMessage as ConversationMessage
    from .models import Embedding as Embedding
    from .models import ErrorRecord as ErrorRecord
    from .models import ErrorSeverity as ErrorSeverity
    from .models import Fact as Fact
    from .models import FactType as FactType
    from .models import Message as Message
    from .models import PerformanceMetric as PerformanceMetric
    from .models import Scope as Scope
    from .models import Summary as Summary
    from .models import Task as Task
    from .models import TaskList as TaskList
    from .models import TaskState as TaskState
    from .models import ToolCall as ToolCall
    from .models import ToolResult as ToolResult
    from .open_documents import open_document_store as open_document_store

#: The module of each backend, and the prefix of its class names. `KINDS` are the rest of the names.
TECHNOLOGIES = {
    "files": (".backends.files", "File"),
    "sqlite": (".backends.sqlite", "SQLite"),
    "memory": (".backends.memory", "InMemory"),
    "redis": (".backends.redis", "Redis"),
}
KINDS = ("Memory", "Conversation", "Task", "Preferences", "Knowledge", "Audit")

_MODELS = (
    "AuditEntry AuditEventType Conversation ConversationMessage Embedding ErrorRecord ErrorSeverity Fact FactType "
    "Message PerformanceMetric Scope Summary Task TaskList TaskState ToolCall ToolResult"
)
_DOCUMENTS = "Collection Document DocumentMissing DocumentStore Entry Query VersionConflict"
_OPERATIONS = "DocumentTransaction document_operations document_replays"
_LAZY = {
    "AuditStore": ".base.audit:AuditStore",
    "Branch": ".message_tree:Branch",
    "BrokenHistory": ".message_tree:BrokenHistory",
    "ConversationStore": ".base.conversations:ConversationStore",
    "KnowledgeStore": ".base.knowledge:KnowledgeStore",
    "MemoryStore": ".base.memory:MemoryStore",
    "NoEmbeddings": ".base.knowledge:NoEmbeddings",
    "PersistenceConfig": ".manager:PersistenceConfig",
    "PersistenceManager": ".manager:PersistenceManager",
    "PreferencesStore": ".base.preferences:PreferencesStore",
    "TaskStore": ".base.tasks:TaskStore",
    "configure_persistence": ".manager:configure_persistence",
    "get_persistence_manager": ".manager:get_persistence_manager",
    "open_document_store": ".open_documents:open_document_store",
    **{name: f".documents.base:{name}" for name in _DOCUMENTS.split()},
    **{name: f".documents.operations:{name}" for name in _OPERATIONS.split()},
    **{name: f".models:{name}" for name in _MODELS.split()},
    **{
        f"{prefix}{kind}Store": f"{module}:{prefix}{kind}Store"
        for module, prefix in TECHNOLOGIES.values()
        for kind in KINDS
    },
}


if not TYPE_CHECKING:  # type checkers see the imports above
    __all__ = sorted(_LAZY)


def __getattr__(name: str) -> object:
    return lazily(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return sorted(_LAZY)
