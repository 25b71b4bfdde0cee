"""The data of a turn: its messages, plan, steps, metrics and answer."""

from __future__ import annotations

import dataclasses
import datetime as _dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from .._core.codec.typed import PLAIN, build, to_plain
from ..limits import sum_usd
from ..planning.plan import Plan, StepKind
from ..status import RunStatus, StepStatus


@dataclass(frozen=True)
class StepMetrics:
    """Time in milliseconds, tokens and cost in US dollars of a step. Add them with `+`.

    Attributes:
        latency_ms: How long it took, in milliseconds.
        prompt_tokens: Tokens of prompts.
        completion_tokens: Tokens of answers.
        cost_usd: The cost in USD.

    Examples:
        >>> from agent_runtime_core.turns import StepMetrics
        >>> (StepMetrics(prompt_tokens=10) + StepMetrics(prompt_tokens=5)).prompt_tokens
        15
    """

    latency_ms: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: StepMetrics) -> StepMetrics:
        return StepMetrics(
            self.latency_ms + other.latency_ms,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            sum_usd(self.cost_usd, other.cost_usd),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, which `from_dict` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepMetrics:
        """Return the metrics that `to_dict` wrote.

        Args:
            data: What `to_dict` returned.
        """
        return cls(**{name: data[name] for name in _METRICS if data.get(name) is not None})

    @classmethod
    def of(cls, latency_ms: float, usage: Mapping[str, Any]) -> StepMetrics:
        """Return metrics from the usage that a model reports.

        Args:
            latency_ms: How long the call took, in milliseconds.
            usage: The usage, as in `LLMResponse`.
        """
        counted = {name: usage.get(name) or 0 for name in ("prompt_tokens", "completion_tokens", "cost_usd")}
        return cls(latency_ms=round(latency_ms, 3), **counted)


_METRICS = tuple(each.name for each in dataclasses.fields(StepMetrics))


@dataclass
class StepState:
    """The state of one step of a turn. `step_id` is its id in the journal.

    Attributes:
        step_number: The number of the step in its plan.
        step_id: Its id in the journal.
        kind: The kind of step.
        tool_name: The tool, or memory operation.
        status: The status of the step.
        result: What the step returned.
        error: Why the step failed, or None.
        attempt: The number of the last attempt; 0 before the first.
        metrics: The metrics of the step.
        apart: The result as stored under a separate key, or True if it was not loaded. It need not be written again.
    """

    step_number: int
    step_id: str
    kind: StepKind = StepKind.TOOL_CALL
    tool_name: str = ""
    status: StepStatus = StepStatus.PENDING
    result: Any = None
    error: str | None = None
    attempt: int = 0
    metrics: StepMetrics = field(default_factory=StepMetrics)
    apart: Any = field(default=None, repr=False, compare=False)

    @property
    def ended(self) -> bool:
        """Whether the status of the step is final."""
        return self.status not in (StepStatus.PENDING, StepStatus.RUNNING)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, which `from_dict` reads."""
        plain: dict[str, Any] = to_plain(self, StepState, PLAIN)
        del plain["apart"]
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StepState:
        """Return the state that `to_dict` wrote.

        Args:
            data: What `to_dict` returned.
        """
        return cast(StepState, build(dict(data), cls, PLAIN))


@dataclass
class Turn:
    """One turn. `id` is the id of its run.

    `stale` means: its store was unavailable, this is the last known state. `stale_history` means: when the turn
    started, its conversation could not be read, so the model got the last known messages of it.

    Attributes:
        id: The id of the turn, which is the id of its run.
        trace_id: The trace of the turn.
        messages: The messages of the request, in chat format.
        conversation_id: The conversation that the turn belongs to, or None.
        user_id: The user, or None.
        personality: The name of the personality, or None.
        status: The status of the run.
        plan: The plan, if it exists.
        steps: The steps of the plan.
        planning: The metrics of planning, included in `metrics`.
        response: The answer of the turn, or None.
        error: Why the turn failed, or None.
        created_at: When the turn was requested.
        updated_at: When the turn was last saved.
        metadata: Further data of the application.
        tenant: Whose turn it is, or None.
        stale: Whether the store was unavailable, so that this is the last known state.
        stale_history: Whether the conversation could not be read when the turn started, so that the model got the last
            known messages of it.
    """

    id: str
    trace_id: str
    messages: list[Any] = field(default_factory=list)
    conversation_id: str | None = None
    user_id: str | None = None
    personality: str | None = None
    status: RunStatus = RunStatus.PENDING
    plan: Plan | None = None
    steps: list[StepState] = field(default_factory=list)
    planning: StepMetrics = field(default_factory=StepMetrics)
    response: str | None = None
    error: dict[str, Any] | None = None
    created_at: _dt.datetime | None = None
    updated_at: _dt.datetime | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tenant: str | None = None
    stale: bool = field(default=False, compare=False)
    stale_history: bool = False

    @property
    def event_ids(self) -> dict[str, str | None]:
        """What the envelope of each event of the turn contains."""
        return {"trace_id": self.trace_id, "turn_id": self.id, "tenant": self.tenant}

    @property
    def metrics(self) -> StepMetrics:
        """The sum over planning and all steps."""
        return summed([self.planning, *(step.metrics for step in self.steps)])

    def step(self, number: int) -> StepState | None:
        """Return the step with that number, or None.

        Args:
            number: The number of the step in its plan.
        """
        return next((each for each in self.steps if each.step_number == number), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, except for results, which keep their types. `from_dict` ignores `metrics`."""
        plain: dict[str, Any] = to_plain(self, Turn, PLAIN)
        del plain["stale"]
        if not self.stale_history:
            del plain["stale_history"]
        if self.tenant is None:
            del plain["tenant"]
        for step in plain["steps"]:
            del step["apart"]
        return plain | {"metrics": self.metrics.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Turn:
        """Return the turn that `to_dict` wrote.

        Args:
            data: What `to_dict` returned.
        """
        return cast(Turn, build(dict(data), cls, PLAIN))


def summed(metrics: Iterable[StepMetrics]) -> StepMetrics:
    """Return the sum of metrics."""
    return sum(metrics, StepMetrics())
