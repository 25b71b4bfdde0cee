"""The constructors of the 24 stores have precise signatures, for type checkers, editors and `help()`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agent_runtime_core import persistence
from agent_runtime_core.persistence.document_stores.base import DocumentBackedStore
from tests.support.cases import for_each

if TYPE_CHECKING:
    from agent_runtime_core.persistence import FileMemoryStore, InMemoryKnowledgeStore, RedisAuditStore, SQLiteTaskStore

KINDS = ("Memory", "Conversation", "Task", "Preferences", "Knowledge", "Audit")
ARGUMENTS = {
    "File": ["project_dir"],
    "InMemory": ["engine"],
    "Redis": ["url", "redis_url", "engine"],
    "SQLite": ["path", "db_path", "durability", "engine"],
}
OF_KIND = {"Knowledge": ["max_vectors"], "Audit": ["max_age", "max_entries"]}


@for_each("kind", KINDS)
@for_each("prefix", ARGUMENTS)
def test_arguments_are_named(prefix: str, kind: str) -> None:
    store: Any = getattr(persistence, f"{prefix}{kind}Store")
    parameters = inspect.signature(store).parameters
    assert [*parameters] == [*ARGUMENTS[prefix], *OF_KIND.get(kind, []), "options"]
    assert parameters["options"].annotation == "Unpack[HomeOptions]"
    with pytest.raises(TypeError, match="sesion_id"):
        store(sesion_id="s")


@for_each("kind", KINDS)
@for_each("prefix", ARGUMENTS)
def test_at_most_two_classes_are_above_a_store(prefix: str, kind: str) -> None:
    store: Any = getattr(persistence, f"{prefix}{kind}Store")
    place, *above = store.__mro__[1:]
    assert place.__bases__ == (object,)
    assert [each for each in above if issubclass(each, DocumentBackedStore)] == above[:2]


def checked_by_mypy(path: Path) -> None:  # an ignore that is not needed is an error there
    SQLiteTaskStore(path, durability="normal", session_id="s", project="p", session_ttl=1.0)
    SQLiteTaskStore(1)  # type: ignore[arg-type]
    SQLiteTaskStore(path, durability=True)  # type: ignore[arg-type]
    SQLiteTaskStore(url="redis://host")  # type: ignore[call-arg]
    RedisAuditStore("redis://host", max_age=1.0, max_entries=2)
    RedisAuditStore(path)  # type: ignore[arg-type]
    RedisAuditStore(max_entries="many")  # type: ignore[arg-type]
    FileMemoryStore(path, session_id=1)  # type: ignore[arg-type]
    FileMemoryStore(path="a")  # type: ignore[call-arg]
    InMemoryKnowledgeStore(max_vectors=10)
    InMemoryKnowledgeStore(max_age=1.0)  # type: ignore[call-arg]
