"""Stores of tasks, knowledge and audit as somebody writes them: the abstract methods on plain dicts."""

from __future__ import annotations

import copy
import datetime as dt
import math
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from agent_runtime_core.persistence.base.audit import AuditStore
from agent_runtime_core.persistence.base.knowledge import KnowledgeStore
from agent_runtime_core.persistence.base.tasks import TaskStore
from agent_runtime_core.persistence.models import (
    AuditEntry,
    AuditEventType,
    Embedding,
    ErrorRecord,
    ErrorSeverity,
    Fact,
    FactType,
    PerformanceMetric,
    Scope,
    Summary,
    Task,
    TaskList,
    TaskState,
    moment,
    now,
)


class _ByScope:
    def __init__(self, user: str = "alice") -> None:
        self.user = user
        self.kept: dict[Scope, dict[Any, Any]] = {scope: {} for scope in Scope}


class PlainTasks(_ByScope, TaskStore):
    async def save(self, task_list: TaskList, scope: Scope = Scope.PROJECT) -> None:
        task_list.updated_at = now()
        self.kept[scope][task_list.id] = copy.deepcopy(task_list)

    async def get(self, task_list_id: UUID, scope: Scope = Scope.PROJECT) -> TaskList | None:
        return copy.deepcopy(self.kept[scope].get(task_list_id))

    async def delete(self, task_list_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        return self.kept[scope].pop(task_list_id, None) is not None

    async def get_by_conversation(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> TaskList | None:
        found = [each for each in self.kept[scope].values() if each.conversation_id == conversation_id]
        return copy.deepcopy(found[0]) if found else None

    async def update_task(
        self, task_list_id: UUID, task_id: UUID, state: TaskState | None = None, name: str | None = None,
        description: str | None = None, scope: Scope = Scope.PROJECT,
    ) -> None:  # fmt: skip
        task = self._task(task_list_id, task_id, scope)
        given = {"state": state, "name": name, "description": description}
        for field, value in given.items():
            if value is not None:
                setattr(task, field, value)

    def _task(self, task_list_id: UUID, task_id: UUID, scope: Scope) -> Task:
        if task_list_id not in self.kept[scope]:
            raise ValueError(f"Task list {task_list_id} not found")
        task: Task | None = next((task for task in self.kept[scope][task_list_id].tasks if task.id == task_id), None)
        if task is None:
            raise ValueError(f"Task {task_id} not found")
        return task


class PlainKnowledge(_ByScope, KnowledgeStore):
    def _of(self, kind: type[Any], scope: Scope) -> list[Any]:
        return [each for each in self.kept[scope].values() if isinstance(each, kind)]

    async def _save(self, model: Any, scope: Scope) -> None:
        self.kept[scope][model.id] = copy.deepcopy(model)

    async def save_fact(self, fact: Fact, scope: Scope = Scope.PROJECT) -> None:
        await self._save(fact, scope)

    async def get_fact(self, fact_id: UUID, scope: Scope = Scope.PROJECT) -> Fact | None:
        return copy.deepcopy(self.kept[scope].get(fact_id))

    async def get_fact_by_key(self, key: str, scope: Scope = Scope.PROJECT) -> Fact | None:
        return copy.deepcopy(next((fact for fact in self._of(Fact, scope) if fact.key == key), None))

    async def list_facts(
        self, scope: Scope = Scope.PROJECT, fact_type: FactType | None = None, limit: int = 100
    ) -> list[Fact]:
        facts = [fact for fact in self._of(Fact, scope) if fact_type in (None, fact.fact_type)]
        return copy.deepcopy(facts[:limit])

    async def delete_fact(self, fact_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        return self.kept[scope].pop(fact_id, None) is not None

    async def save_summary(self, summary: Summary, scope: Scope = Scope.PROJECT) -> None:
        await self._save(summary, scope)

    async def get_summary(self, summary_id: UUID, scope: Scope = Scope.PROJECT) -> Summary | None:
        return copy.deepcopy(self.kept[scope].get(summary_id))

    async def get_summaries_for_conversation(
        self, conversation_id: UUID, scope: Scope = Scope.PROJECT
    ) -> list[Summary]:
        found = [each for each in self._of(Summary, scope) if each.conversation_id == conversation_id]
        return copy.deepcopy(found)

    async def delete_summary(self, summary_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        return self.kept[scope].pop(summary_id, None) is not None


class PlainVectors(PlainKnowledge):
    async def save_embedding(self, embedding: Embedding, scope: Scope = Scope.PROJECT) -> None:
        await self._save(embedding, scope)

    async def search_similar(
        self, query_vector: Sequence[float], limit: int = 10, scope: Scope = Scope.PROJECT,
        content_type: str | None = None,
    ) -> list[tuple[Embedding, float]]:  # fmt: skip
        found = [each for each in self._of(Embedding, scope) if content_type in (None, each.content_type)]
        rated = [(copy.deepcopy(each), self._rate(each.vector, query_vector)) for each in found]
        return sorted(rated, key=lambda each: -each[1])[:limit]

    def _rate(self, one: Sequence[float], other: Sequence[float]) -> float:
        product = math.fsum(a * b for a, b in zip(one, other, strict=True))
        return product / math.hypot(*one) / math.hypot(*other)

    async def delete_embedding(self, embedding_id: UUID, scope: Scope = Scope.PROJECT) -> bool:
        return self.kept[scope].pop(embedding_id, None) is not None


class PlainAudit(_ByScope, AuditStore):
    def _newest(self, kind: type[Any], scope: Scope, start: dt.datetime | None, end: dt.datetime | None) -> list[Any]:
        found = [
            each
            for each in self.kept[scope].values()
            if isinstance(each, kind)
            and (start is None or moment(each.timestamp) >= moment(start))
            and (end is None or moment(each.timestamp) <= moment(end))
        ]
        return sorted(copy.deepcopy(found), key=lambda each: moment(each.timestamp), reverse=True)

    async def log_event(self, entry: AuditEntry, scope: Scope = Scope.PROJECT) -> None:
        self.kept[scope][entry.id] = copy.deepcopy(entry)

    async def get_events(
        self, scope: Scope = Scope.PROJECT, conversation_id: UUID | None = None, run_id: UUID | None = None,
        event_types: Sequence[AuditEventType] | None = None, start_time: dt.datetime | None = None,
        end_time: dt.datetime | None = None, limit: int = 100,
    ) -> list[AuditEntry]:  # fmt: skip
        return [
            each
            for each in self._newest(AuditEntry, scope, start_time, end_time)
            if conversation_id in (None, each.conversation_id)
            and run_id in (None, each.run_id)
            and (event_types is None or each.event_type in event_types)
        ][:limit]

    async def log_error(self, error: ErrorRecord, scope: Scope = Scope.PROJECT) -> None:
        self.kept[scope][error.id] = copy.deepcopy(error)

    async def get_errors(
        self, scope: Scope = Scope.PROJECT, severity: ErrorSeverity | None = None, resolved: bool | None = None,
        start_time: dt.datetime | None = None, end_time: dt.datetime | None = None, limit: int = 100,
        conversation_id: UUID | None = None,
    ) -> list[ErrorRecord]:  # fmt: skip
        found = self._newest(ErrorRecord, scope, start_time, end_time)
        return [each for each in found if severity in (None, each.severity) and resolved in (None, each.resolved)][
            :limit
        ]

    async def resolve_error(
        self, error_id: UUID, resolution_notes: str | None = None, scope: Scope = Scope.PROJECT
    ) -> bool:
        error = self.kept[scope].get(error_id)
        if error is not None:
            error.resolved, error.resolved_at, error.resolution_notes = True, now(), resolution_notes
        return error is not None

    async def record_metric(self, metric: PerformanceMetric, scope: Scope = Scope.PROJECT) -> None:
        self.kept[scope][metric.id] = copy.deepcopy(metric)

    async def get_metrics(
        self, name: str, scope: Scope = Scope.PROJECT, start_time: dt.datetime | None = None,
        end_time: dt.datetime | None = None, tags: Mapping[str, Any] | None = None, limit: int = 1000,
    ) -> list[PerformanceMetric]:  # fmt: skip
        found = self._newest(PerformanceMetric, scope, start_time, end_time)
        return [each for each in found if each.name == name and each.tags.items() >= (tags or {}).items()][:limit]

    async def get_metric_summary(
        self, name: str, scope: Scope = Scope.PROJECT, start_time: dt.datetime | None = None,
        end_time: dt.datetime | None = None,
    ) -> dict[str, float]:  # fmt: skip
        values = sorted(each.value for each in await self.get_metrics(name, scope, start_time, end_time))
        if not values:
            return dict.fromkeys(("count", "min", "max", "avg", "sum", "p50", "p95", "p99"), 0.0)
        shares = {f"p{share}": values[round((len(values) - 1) * share / 100)] for share in (50, 95, 99)}
        total = math.fsum(values)
        rest = {"min": values[0], "max": values[-1], "avg": total / len(values), "sum": total}
        return {"count": len(values), **rest, **shares}


# -- what each of them may get wrong


class _ForgetsDependencies(PlainTasks):
    async def save(self, task_list: TaskList, scope: Scope = Scope.PROJECT) -> None:
        await super().save(task_list, scope)
        for task in self.kept[scope][task_list.id].tasks:
            task.dependencies = []


class _AnyConversation(PlainTasks):
    async def get_by_conversation(self, conversation_id: UUID, scope: Scope = Scope.PROJECT) -> TaskList | None:
        return next(iter(self.kept[scope].values()), None)


class _WritesNone(PlainTasks):
    async def update_task(
        self, task_list_id: UUID, task_id: UUID, state: TaskState | None = None, name: str | None = None,
        description: str | None = None, scope: Scope = Scope.PROJECT,
    ) -> None:  # fmt: skip
        task = self._task(task_list_id, task_id, scope)
        task.state, task.name, task.description = state, name, description  # type: ignore[assignment]


class _KeepsTheCallers(PlainTasks):
    async def save(self, task_list: TaskList, scope: Scope = Scope.PROJECT) -> None:
        task_list.updated_at = now()
        self.kept[scope][task_list.id] = task_list


class _PassesOverWhatIsUnknown(PlainTasks):
    async def update_task(self, *args: Any, **options: Any) -> None:
        try:
            await super().update_task(*args, **options)
        except ValueError:
            return


class _KeepsOldKeys(PlainKnowledge):
    async def save_fact(self, fact: Fact, scope: Scope = Scope.PROJECT) -> None:
        self.kept[scope][fact.id, fact.key] = copy.deepcopy(fact)
        await super().save_fact(fact, scope)


class _AllFacts(PlainKnowledge):
    async def list_facts(
        self, scope: Scope = Scope.PROJECT, fact_type: FactType | None = None, limit: int = 100
    ) -> list[Fact]:
        return await super().list_facts(scope, None, limit)


class _FarthestFirst(PlainVectors):
    def _rate(self, one: Sequence[float], other: Sequence[float]) -> float:
        return -super()._rate(one, other)


class _NotByLength(PlainVectors):
    def _rate(self, one: Sequence[float], other: Sequence[float]) -> float:
        return math.fsum(a * b for a, b in zip(one, other, strict=True))


class _HalfOfIt(PlainVectors):
    search_similar = KnowledgeStore.search_similar


class _EndIsOut(PlainAudit):
    def _newest(self, kind: type[Any], scope: Scope, start: dt.datetime | None, end: dt.datetime | None) -> list[Any]:
        found = super()._newest(kind, scope, start, end)
        return [each for each in found if end is None or moment(each.timestamp) < moment(end)]


class _OldestFirst(PlainAudit):
    def _newest(self, *args: Any) -> list[Any]:
        return super()._newest(*args)[::-1]


class _ResolvesNothing(PlainAudit):
    async def resolve_error(
        self, error_id: UUID, resolution_notes: str | None = None, scope: Scope = Scope.PROJECT
    ) -> bool:
        return error_id in self.kept[scope]


class _AnyTag(PlainAudit):
    async def get_metrics(self, *args: Any, tags: Mapping[str, Any] | None = None, **options: Any) -> Any:
        found = await super().get_metrics(*args, **options)
        return [each for each in found if not tags or each.tags.items() & tags.items()]


DEFECTS: dict[type[Any], list[type[Any]]] = {
    PlainTasks: [_ForgetsDependencies, _AnyConversation, _WritesNone, _KeepsTheCallers, _PassesOverWhatIsUnknown],
    PlainKnowledge: [_KeepsOldKeys, _AllFacts, _FarthestFirst, _NotByLength, _HalfOfIt],
    PlainAudit: [_EndIsOut, _OldestFirst, _ResolvesNothing, _AnyTag],
}
