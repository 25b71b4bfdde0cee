"""Stores in this process, gone when it ends."""

from __future__ import annotations

from ..homes.memory import InMemoryHome
from ..stored.audit import StoredAudit
from ..stored.knowledge import StoredKnowledge
from ..stored.tasks import StoredTasks


class InMemoryAuditStore(InMemoryHome, StoredAudit):
    """What happened in this process, gone when it ends."""


class InMemoryKnowledgeStore(InMemoryHome, StoredKnowledge):
    """What was learned in this process, gone when it ends."""


class InMemoryTaskStore(InMemoryHome, StoredTasks):
    """Tasks in this process, gone when it ends."""
