"""Stores in this process, gone when it ends."""

from __future__ import annotations

from ..homes.memory import InMemoryHome
from ..stored.conversations import StoredConversations
from ..stored.memory import StoredMemory
from ..stored.preferences import StoredPreferences


class InMemoryMemoryStore(InMemoryHome, StoredMemory):
    """What an agent remembers, in this process."""


class InMemoryConversationStore(InMemoryHome, StoredConversations):
    """Conversations in this process."""


class InMemoryPreferencesStore(InMemoryHome, StoredPreferences):
    """Preferences in this process."""
