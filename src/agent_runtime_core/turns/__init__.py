"""Conversation turns: a request, its plan, its steps and the answer; settings in config.toml; personalities."""

from __future__ import annotations

from ..errors import InvalidTurn
from ..planning.plan import StepKind
from .context_manager import ContextManager, Remembered
from .event_topics import EventPublisherSubscriber, TopicStats
from .events import AuditEvent, EventEnvelope, PlanRequest, StepEvent, StepRequest, StepResultChunk, TurnEvent
from .manager import TurnManager
from .personality import MemorySettings, PackSet, PersonalityInstance, PersonalityPackManager, Sampling
from .planner import PlanExecutor
from .processor import StepProcessor
from .settings import (
    ConfigChanged,
    ConfigLoader,
    PersonalitySettings,
    ProviderSettings,
    ProviderSteps,
    Settings,
    TurnSettings,
)
from .turn import StepMetrics, StepState, Turn

__all__ = [
    "AuditEvent",
    "ConfigChanged",
    "ConfigLoader",
    "ContextManager",
    "EventEnvelope",
    "EventPublisherSubscriber",
    "InvalidTurn",
    "MemorySettings",
    "PackSet",
    "PersonalityInstance",
    "PersonalityPackManager",
    "PersonalitySettings",
    "PlanExecutor",
    "PlanRequest",
    "ProviderSettings",
    "ProviderSteps",
    "Remembered",
    "Sampling",
    "Settings",
    "StepEvent",
    "StepKind",
    "StepMetrics",
    "StepProcessor",
    "StepRequest",
    "StepResultChunk",
    "StepState",
    "TopicStats",
    "Turn",
    "TurnEvent",
    "TurnManager",
    "TurnSettings",
]
