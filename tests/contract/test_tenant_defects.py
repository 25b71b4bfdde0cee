"""A store that mixes up tenants is found by the case that guards them."""

from __future__ import annotations

from typing import Any, Self

import pytest

from agent_runtime_core.persistence.backends.memory import InMemoryPlace
from agent_runtime_core.persistence.document_stores.audit import StoredAudit
from agent_runtime_core.persistence.document_stores.base import DocumentBackedStore, DocumentHome
from agent_runtime_core.persistence.document_stores.conversations import StoredConversations
from agent_runtime_core.persistence.document_stores.knowledge import (
    StoredKnowledge,
    StoredMemory,
    StoredPreferences,
    Vectors,
)
from agent_runtime_core.persistence.document_stores.tasks import StoredTasks
from agent_runtime_core.persistence.documents.base import Collection
from agent_runtime_core.persistence.models import Scope
from agent_runtime_core.testing.contracts.persistence import audit, conversations, knowledge, memory, preferences, tasks

STORES: dict[type[DocumentBackedStore], list[Any]] = {
    StoredMemory: [memory.tenants_use_the_same_keys_apart],
    StoredPreferences: [preferences.tenants_use_the_same_preferences_apart],
    StoredConversations: [
        conversations.tenants_use_the_same_conversation_ids_apart,
        conversations.a_conversation_moves_to_a_tenant,
    ],
    StoredTasks: [tasks.tenants_use_the_same_task_ids_apart],
    StoredKnowledge: [
        knowledge.tenants_use_the_same_facts_and_summaries_apart,
        knowledge.tenants_use_the_same_embeddings_apart,
    ],
    StoredAudit: [audit.tenants_use_the_same_ids_apart],
}
EACH = [(store, case) for store, cases in STORES.items() for case in cases]


class Shared(DocumentHome):
    def for_tenant(self, tenant: str) -> Self:
        return self


class IgnoresCase(DocumentHome):
    def for_tenant(self, tenant: str) -> Self:
        return super().for_tenant(tenant.lower())


class CutsNames(DocumentHome):
    def for_tenant(self, tenant: str) -> Self:
        return super().for_tenant(tenant[:127])


class _OneScopeShared(DocumentHome):
    shared: Scope

    def table(self, scope: Scope | None, kind: str, default: Scope = Scope.PROJECT) -> Collection:
        if (default if scope is None else scope) is not self.shared:
            return super().table(scope, kind, default)
        return Collection(self.documents(self.shared), self.space(self.shared), kind)


class SharesGlobal(_OneScopeShared):
    shared = Scope.GLOBAL


class SharesProject(_OneScopeShared):
    shared = Scope.PROJECT


class SharesSession(_OneScopeShared):
    shared = Scope.SESSION


HOMES = [Shared, IgnoresCase, CutsNames, SharesGlobal, SharesProject, SharesSession]


def _with_home(store: type[DocumentBackedStore], home: type[DocumentHome]) -> Any:
    place: Any = type(f"{home.__name__}{store.__name__}", (InMemoryPlace, store), {})

    def make(**options: Any) -> Any:
        made = place(**options)
        made.home.__class__ = home
        return made

    return make


@pytest.mark.parametrize(("store", "case"), EACH, ids=[case.__name__ for _, case in EACH])
async def test_a_store_that_mixes_up_tenants_is_found(store: type[DocumentBackedStore], case: Any) -> None:
    await case(_with_home(store, DocumentHome))
    for home in HOMES:
        if case is conversations.a_conversation_moves_to_a_tenant and home not in (Shared, IgnoresCase, SharesProject):
            continue  # it uses two names in one scope
        with pytest.raises(AssertionError):
            await case(_with_home(store, home))


class _OneIndex(InMemoryPlace, StoredKnowledge):
    def _embeddings(self, scope: Scope | None) -> Vectors:
        table = self.home.table(scope, "embedding")
        return self._vectors.setdefault(str(scope), Vectors(table, self.max_vectors))


class _LeavesMessages(InMemoryPlace, StoredConversations):
    async def move_to(self, other: Any, conversation_id: Any) -> bool:
        mine, theirs = await self.get(conversation_id), await other.get(conversation_id)
        if mine is None or theirs is not None:
            return False
        await other.save(mine)
        headers, _ = self._tables(None)
        await headers.write(headers.delete(str(conversation_id)))
        return True


@pytest.mark.parametrize(
    ("store", "case"),
    [
        (_OneIndex, knowledge.tenants_use_the_same_embeddings_apart),
        (_LeavesMessages, conversations.a_conversation_moves_to_a_tenant),
    ],
)
async def test_a_defect_is_found(store: Any, case: Any) -> None:
    with pytest.raises(AssertionError):
        await case(store)
