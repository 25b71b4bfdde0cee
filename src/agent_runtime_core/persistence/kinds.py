"""The kinds of documents that stores are made of, as they stand in every store ever written."""

from __future__ import annotations

from typing import Final

MEMORY: Final = "memory"  # key: the key
PREFERENCE: Final = "preference"  # key: the key
CONVERSATION: Final = "conversation"  # key: its id; rank: updated_at
MESSAGE: Final = "message"  # key: "<conversation id>/<message id>"; group: the conversation's id
TASK_LIST: Final = "task_list"  # key: its id; rank: updated_at; group: the conversation's id
TASK: Final = "task"  # key: its id; group: the list's id
