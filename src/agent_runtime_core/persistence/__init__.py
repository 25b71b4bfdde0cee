"""Stores for what persists across runs: conversations, tasks, memory, preferences, knowledge and audit records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy_exports import lazy_exports

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
    from .backends.postgres import PostgresAuditStore as PostgresAuditStore
    from .backends.postgres import PostgresConversationStore as PostgresConversationStore
    from .backends.postgres import PostgresKnowledgeStore as PostgresKnowledgeStore
    from .backends.postgres import PostgresMemoryStore as PostgresMemoryStore
    from .backends.postgres import PostgresPreferencesStore as PostgresPreferencesStore
    from .backends.postgres import PostgresTaskStore as PostgresTaskStore
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
    from .base.knowledge import MemoryStore as MemoryStore
    from .base.knowledge import NoEmbeddings as NoEmbeddings
    from .base.knowledge import PreferencesStore as PreferencesStore
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
    from .manager import conversation_uuid as conversation_uuid
    from .manager import get_persistence_manager as get_persistence_manager
    from .manager import open_document_store as open_document_store
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
else:
    __all__, __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            ".backends.files": "FileAuditStore FileConversationStore FileKnowledgeStore FileMemoryStore "
            "FilePreferencesStore FileTaskStore",
            ".backends.memory": "InMemoryAuditStore InMemoryConversationStore InMemoryKnowledgeStore "
            "InMemoryMemoryStore InMemoryPreferencesStore InMemoryTaskStore",
            ".backends.postgres": "PostgresAuditStore PostgresConversationStore PostgresKnowledgeStore "
            "PostgresMemoryStore PostgresPreferencesStore PostgresTaskStore",
            ".backends.redis": "RedisAuditStore RedisConversationStore RedisKnowledgeStore RedisMemoryStore "
            "RedisPreferencesStore RedisTaskStore",
            ".backends.sqlite": "SQLiteAuditStore SQLiteConversationStore SQLiteKnowledgeStore SQLiteMemoryStore "
            "SQLitePreferencesStore SQLiteTaskStore",
            ".base.audit": "AuditStore",
            ".base.conversations": "ConversationStore",
            ".base.knowledge": "KnowledgeStore MemoryStore NoEmbeddings PreferencesStore",
            ".base.tasks": "TaskStore",
            ".documents.base": "Collection Document DocumentMissing DocumentStore Entry Query VersionConflict",
            ".documents.operations": "DocumentTransaction document_operations document_replays",
            ".manager": "PersistenceConfig PersistenceManager configure_persistence conversation_uuid "
            "get_persistence_manager open_document_store",
            ".message_tree": "Branch BrokenHistory",
            ".models": "AuditEntry AuditEventType Conversation ConversationMessage Embedding ErrorRecord "
            "ErrorSeverity Fact FactType Message PerformanceMetric Scope Summary Task TaskList TaskState ToolCall "
            "ToolResult",
        },
    )
