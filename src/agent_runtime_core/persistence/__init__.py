"""Stores for what persists across runs: conversations, tasks, memory, preferences, knowledge and audit records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy_import import lazily

if TYPE_CHECKING:
    from .backends.files import (
        FileAuditStore,
        FileConversationStore,
        FileKnowledgeStore,
        FileMemoryStore,
        FilePreferencesStore,
        FileTaskStore,
    )
    from .backends.memory import (
        InMemoryAuditStore,
        InMemoryConversationStore,
        InMemoryKnowledgeStore,
        InMemoryMemoryStore,
        InMemoryPreferencesStore,
        InMemoryTaskStore,
    )
    from .backends.redis import (
        RedisAuditStore,
        RedisConversationStore,
        RedisKnowledgeStore,
        RedisMemoryStore,
        RedisPreferencesStore,
        RedisTaskStore,
    )
    from .backends.sqlite import (
        SQLiteAuditStore,
        SQLiteConversationStore,
        SQLiteKnowledgeStore,
        SQLiteMemoryStore,
        SQLitePreferencesStore,
        SQLiteTaskStore,
    )
    from .base.audit import AuditStore
    from .base.conversations import ConversationStore
    from .base.knowledge import KnowledgeStore, NoEmbeddings
    from .base.memory import MemoryStore
    from .base.preferences import PreferencesStore
    from .base.tasks import TaskStore
    from .manager import PersistenceConfig, PersistenceManager, configure_persistence, get_persistence_manager
    from .message_tree import Branch, BrokenHistory
    from .models import (
        AuditEntry,
        AuditEventType,
        Conversation,
        ConversationMessage,
        Embedding,
        ErrorRecord,
        ErrorSeverity,
        Fact,
        FactType,
        Message,
        PerformanceMetric,
        Scope,
        Summary,
        Task,
        TaskList,
        TaskState,
        ToolCall,
        ToolResult,
    )

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
    **{name: f".models:{name}" for name in _MODELS.split()},
    **{
        f"{prefix}{kind}Store": f"{module}:{prefix}{kind}Store"
        for module, prefix in TECHNOLOGIES.values()
        for kind in KINDS
    },
}

__all__ = [
    "AuditEntry",
    "AuditEventType",
    "AuditStore",
    "Branch",
    "BrokenHistory",
    "Conversation",
    "ConversationMessage",
    "ConversationStore",
    "Embedding",
    "ErrorRecord",
    "ErrorSeverity",
    "Fact",
    "FactType",
    "FileAuditStore",
    "FileConversationStore",
    "FileKnowledgeStore",
    "FileMemoryStore",
    "FilePreferencesStore",
    "FileTaskStore",
    "InMemoryAuditStore",
    "InMemoryConversationStore",
    "InMemoryKnowledgeStore",
    "InMemoryMemoryStore",
    "InMemoryPreferencesStore",
    "InMemoryTaskStore",
    "KnowledgeStore",
    "MemoryStore",
    "Message",
    "NoEmbeddings",
    "PerformanceMetric",
    "PersistenceConfig",
    "PersistenceManager",
    "PreferencesStore",
    "RedisAuditStore",
    "RedisConversationStore",
    "RedisKnowledgeStore",
    "RedisMemoryStore",
    "RedisPreferencesStore",
    "RedisTaskStore",
    "SQLiteAuditStore",
    "SQLiteConversationStore",
    "SQLiteKnowledgeStore",
    "SQLiteMemoryStore",
    "SQLitePreferencesStore",
    "SQLiteTaskStore",
    "Scope",
    "Summary",
    "Task",
    "TaskList",
    "TaskState",
    "TaskStore",
    "ToolCall",
    "ToolResult",
    "configure_persistence",
    "get_persistence_manager",
]


def __getattr__(name: str) -> object:
    return lazily(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return sorted(__all__)
