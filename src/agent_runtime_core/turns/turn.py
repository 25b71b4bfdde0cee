"""A turn as it is told: what was asked, the plan, each step, what it cost, and the answer."""

from __future__ import annotations

import dataclasses
import datetime as _dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..planning.plan import Plan, StepKind
from ..status import RunStatus, StepStatus


@dataclass(frozen=True)
class StepMetrics:
    """What a step took: milliseconds, tokens, US dollars. They add up with `+`."""

    latency_ms: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: StepMetrics) -> StepMetrics:
        return StepMetrics(*(getattr(self, name) + getattr(other, name) for name in _METRICS))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepMetrics:
        return cls(**{name: data[name] for name in _METRICS if data.get(name) is not None})

    @classmethod
    def of(cls, latency_ms: float, usage: Mapping[str, Any]) -> StepMetrics:
        """From the usage that a model told."""
        counted = {name: usage.get(name) or 0 for name in ("prompt_tokens", "completion_tokens", "cost_usd")}
        return cls(latency_ms=round(latency_ms, 3), **counted)


_METRICS = tuple(each.name for each in dataclasses.fields(StepMetrics))


@dataclass
class StepState:
    """Where one step of a turn stands; `step_id` is that of the journal."""

    step_number: int
    step_id: str
    kind: StepKind = StepKind.TOOL_CALL
    tool_name: str = ""
    status: StepStatus = StepStatus.PENDING
    result: Any = None
    error: str | None = None
    attempt: int = 0
    metrics: StepMetrics = field(default_factory=StepMetrics)
    #: The result that the turn's store has in a place of its own, by which it need not be written again.
    apart: Any = field(default=None, repr=False, compare=False)

    @property
    def ended(self) -> bool:
        return self.status not in (StepStatus.PENDING, StepStatus.RUNNING)

    def to_dict(self) -> dict[str, Any]:
        plain = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "apart"}
        return plain | {"kind": self.kind.value, "status": self.status.value, "metrics": self.metrics.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepState:
        kept = {**data, "kind": StepKind(data["kind"]), "status": StepStatus(data["status"])}
        return cls(**{**kept, "metrics": StepMetrics.from_dict(data["metrics"])})


@dataclass
class Turn:
    """One turn; its id is the id of its run. `stale` marks one that is told from memory because its store is away."""

    id: str
    trace_id: str
    messages: list[Any] = field(default_factory=list)
    conversation_id: str | None = None
    user_id: str | None = None
    personality: str | None = None
    status: RunStatus = RunStatus.PENDING
    plan: Plan | None = None
    steps: list[StepState] = field(default_factory=list)
    #: What planning took; `metrics` counts it in.
    planning: StepMetrics = field(default_factory=StepMetrics)
    response: str | None = None
    error: dict[str, Any] | None = None
    created_at: _dt.datetime | None = None
    updated_at: _dt.datetime | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    stale: bool = field(default=False, compare=False)

    @property
    def metrics(self) -> StepMetrics:
        """The sum of its planning and its steps."""
        return summed([self.planning, *(step.metrics for step in self.steps)])

    def step(self, number: int) -> StepState | None:
        return next((each for each in self.steps if each.step_number == number), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, except for results, which keep their types; `metrics` is told, and not read back."""
        plain = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "stale"}
        return plain | {
            "status": self.status.value,
            "plan": None if self.plan is None else self.plan.to_dict(),
            "steps": [step.to_dict() for step in self.steps],
            "planning": self.planning.to_dict(),
            "metrics": self.metrics.to_dict(),
            "created_at": None if self.created_at is None else self.created_at.isoformat(),
            "updated_at": None if self.updated_at is None else self.updated_at.isoformat(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Turn:
        """The turn that `to_dict` wrote."""
        kept = {name: value for name, value in data.items() if name != "metrics"}
        return cls(**{
            **kept,
            "status": RunStatus(data["status"]),
            "plan": None if data["plan"] is None else Plan.from_dict(data["plan"]),
            "steps": [StepState.from_dict(each) for each in data["steps"]],
            "planning": StepMetrics.from_dict(data["planning"]),
            "created_at": _when(data["created_at"]),
            "updated_at": _when(data["updated_at"]),
        })  # fmt: skip


def summed(metrics: Iterable[StepMetrics]) -> StepMetrics:
    return sum(metrics, StepMetrics())


def _when(text: str | None) -> _dt.datetime | None:
    return None if text is None else _dt.datetime.fromisoformat(text)
