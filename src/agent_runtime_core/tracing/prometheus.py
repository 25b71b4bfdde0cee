"""A trace sink that counts what happens to runs, and reads the state of the queue, for Prometheus."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol, cast
from uuid import UUID

from .._core.clock import SYSTEM
from .._core.event_types import EventType
from .._core.lazy_import import load
from .._core.log import log
from .._core.validation import must
from ..interfaces import TraceSink
from ..portal import call
from ..queue.base import RunQueue
from .tracer import Tracer

PREFIX: Final = "agent_runtime_"
MOST_NAMES: Final = 100  # agents, models, tenants and consumers with a separate label
MOST_OPEN: Final = 10_000  # executions of this process that may be open at the same time
LONGEST_NAME: Final = 200  # characters of a label
READ_SECONDS: Final = 5.0  # for which what was read of the queue and the topics counts
OTHER: Final = "other"  # the label of further agents and models
UNKNOWN: Final = "unknown"  # the label of a run whose start was not reported

_SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG: Final = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

#: Counters, which Prometheus shows with `_total` after the name, and their labels.
_COUNTERS: Final = {
    "runs": ("Runs that this process has ended", ("agent", "state")),
    "step_failures": ("Attempts of steps, model calls and tool calls that failed", ("agent", "kind")),
    "tokens": ("Tokens that model providers have reported", ("model", "kind")),
    "cost_usd": ("Cost of model calls in USD, by the configured prices", ("model",)),
    "http_requests": ("HTTP requests and sockets that were answered", ("method", "route", "status")),
    "topic_errors": ("Events of a topic that could not be published or read", ("topic",)),
}
#: Counters and histograms of what runs do, which have the label `tenant` if that is asked for.
_OF_RUNS: Final = frozenset({"runs", "step_failures", "tokens", "cost_usd", "run_seconds", "step_seconds"})
#: Histograms: their labels and the upper bounds of their buckets in seconds.
_HISTOGRAMS: Final = {
    "run_seconds": ("Time for which this process executed a run, without waits after which it was resumed",
                    ("agent",), _LONG),
    "step_seconds": ("Duration of an attempt of a step, model call or tool call", ("agent", "kind"), _LONG),
    "http_seconds": ("Time from a request to the start of its response", ("method", "route"), _SHORT),
    "topic_publish_seconds": ("Duration of the commit that publishes events", ("topic",), _SHORT),
}  # fmt: skip
#: Values that are read at each scrape: their type and their labels.
_READ: Final = {
    "queue_depth": ("gauge", "Stored runs that have not finished", ("agent", "state")),
    "queue_oldest_seconds": ("gauge", "Age of the oldest run that waits for a worker since it was stored", ("agent",)),
    "dead": ("gauge", "Stored runs that are dead", ()),
    "streams": ("gauge", "Open event streams and sockets", ("kind",)),
    "streams_cut": ("counter", "Streams and sockets that were closed because their client accepted nothing", ()),
    "backpressure_seconds": ("counter", "Time that runs have waited for readers of their answers", ()),
    "traces_dropped": ("counter", "Traces that were lost because the trace sinks are too slow", ()),
    "topic_lag": ("gauge", "Events of a topic that a consumer has not committed", ("topic", "consumer")),
    "iggy_consumer_lag": (
        "gauge",
        "Events of a topic that were not copied to Iggy or read there",
        ("topic", "consumer"),
    ),
}
_FINAL: Final = frozenset({"succeeded", "failed", "cancelled", "timed_out", "dead"})
_LIVE: Final = ("pending", "running", "waiting")
#: The kinds of tokens by the names that responses use. Cached tokens are input tokens, thoughts are output tokens.
_TOKENS: Final = {
    "prompt_tokens": "input", "completion_tokens": "output", "cached_tokens": "cache_read",
    "cache_write_tokens": "cache_write", "reasoning_tokens": "reasoning",
}  # fmt: skip
_STEP_ENDS: Final = {
    EventType.STEP_COMPLETED.value: True,
    EventType.STEP_RETRYING.value: False,
    EventType.STEP_FAILED.value: False,
}
_CALLS: Final = {"llm.call": "model", "tool.done": "tool"}


class Sample(NamedTuple):
    """A value that is read: the name of the metric without its prefix, the values of its labels, and the value."""

    name: str
    labels: tuple[str, ...]
    value: float


class _Execution(NamedTuple):
    """An execution of this process: labels of its run, and when it started."""

    agent: str
    start: float | None
    tenant: tuple[str, ...]  # no label, or a single label


class WatchedRunner(Protocol):
    """The parts of an `AgentRunner` that are read."""

    @property
    def queue(self) -> RunQueue:
        """Its queue."""

    @property
    def tracer(self) -> Tracer | None:
        """Its tracer."""

    @property
    def backpressure_seconds(self) -> float:
        """How long its runs have waited for readers."""


class WatchedTopics(Protocol):
    """The part of an `EventPublisherSubscriber` that is read."""

    async def stats(self) -> Mapping[str, Any]:
        """Return the `TopicStats` of each topic."""


#: Reads some values. It may be a coroutine function.
Source = Callable[[], "Iterable[Sample] | Awaitable[Iterable[Sample]]"]


class PrometheusSink(TraceSink):
    """Counts runs, steps, model calls, tool calls and events of topics of this process.

        metrics = PrometheusSink()
        runner = AgentRunner.open("agents.db", trace_sinks=[metrics])
        metrics.watch(runner)
        prometheus_client.start_http_server(9464, addr="127.0.0.1", registry=metrics.registry)

    All names begin with `agent_runtime_`. No label contains the id of a run, step, user or worker. After 100 agents,
    further agents are counted as "other"; the same goes for models, for tenants and for consumers of topics.

    Args:
        registry: A `prometheus_client.CollectorRegistry` for the metrics. If None, a new registry, `sink.registry`.
        tenant: Whether the counts of runs, steps and model calls contain the label `tenant`, which is empty for a run
            without a tenant. What is read of the queue is not divided by tenant.

    Raises:
        MissingDependency: prometheus-client is not installed.
        InvalidArgument: `registry` is no registry.
        ValueError: The registry already contains the metrics of another sink.
    """

    service: str = "prometheus"
    content: bool = False

    def __init__(self, registry: Any = None, *, tenant: bool = False) -> None:
        library = cast("Any", load("prometheus_client", needed_by="PrometheusSink"))
        if registry is not None and not isinstance(registry, library.CollectorRegistry):
            raise must("registry", "be a CollectorRegistry of prometheus_client", registry)
        #: The registry that contains the metrics.
        self.registry: Any = library.CollectorRegistry() if registry is None else registry
        self._by_tenant = tenant
        self._counters = {
            name: library.Counter(PREFIX + name, text, self._labels(name, labels), registry=self.registry)
            for name, (text, labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: library.Histogram(
                PREFIX + name, text, self._labels(name, labels), buckets=bounds, registry=self.registry
            )
            for name, (text, labels, bounds) in _HISTOGRAMS.items()
        }
        self._children: dict[tuple[str, ...], Any] = {}  # the object of a metric for some labels
        self._agent, self._model, self._consumer, self._tenant = _Names(), _Names(), _Names(), _Names()
        self._open: dict[UUID, _Execution] = {}
        self._values = _ReadValues(self._consumer, self._agent)
        families = cast("ModuleType", load("prometheus_client.core", needed_by="PrometheusSink"))
        self.registry.register(_Collector(families, self._values))

    def _labels(self, name: str, labels: tuple[str, ...]) -> tuple[str, ...]:
        return (*labels, "tenant") if self._by_tenant and name in _OF_RUNS else labels

    def watch(self, runner: WatchedRunner, *, topics: WatchedTopics | None = None) -> None:
        """Export the state of the queue of `runner` too, and the lag of the consumers of `topics`.

        They are read when Prometheus asks, at most every 5 seconds. If the store does not answer, their metrics are
        missing. Values of an earlier call are replaced.

        Args:
            runner: An `AgentRunner`. Its queue is read, and how long its runs have waited for readers.
            topics: `TurnManager.topics`. Only consumers that this process knows have a lag.
        """
        self._values.clock = runner.queue.clock
        self.add_source("runner", lambda: _of_runner(runner))
        if topics is not None:
            self.add_source("topics", lambda: _of_topics(topics))

    def add_source(self, name: str, read: Source) -> None:
        """Export what `read` returns. It replaces the source with the same name. For the HTTP server."""
        self._values.sources[name] = read

    async def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics as Prometheus reads them, and their content type.

        Args:
            accept: The `Accept` header of the request. It chooses between the text format and OpenMetrics.
        """
        await self._values.refresh()
        choose: Any = load("prometheus_client.exposition:choose_encoder", needed_by="PrometheusSink")
        encode, content_type = choose(accept)
        return encode(self.registry), content_type

    # -- called by the tracer

    def start_run(self, run_id: UUID, metadata: dict[str, Any]) -> None:
        """Remember the agent of a run, and when this process began to execute it."""
        if len(self._open) >= MOST_OPEN:
            self._open.pop(next(iter(self._open)))
        agent = self._agent(metadata.get("agent_key") or UNKNOWN)
        tenant = (self._tenant(metadata.get("tenant") or ""),) if self._by_tenant else ()
        self._open[run_id] = _Execution(agent, metadata["time"], tenant)
        if ("runs", agent, "failed", *tenant) not in self._children:  # a rate does not see the step from nothing to 1
            for state in _FINAL:
                self._count("runs", 0, agent, state, *tenant)
            for kind in ("step", *_CALLS.values()):
                self._count("step_failures", 0, agent, kind, *tenant)

    def end_run(self, run_id: UUID, outcome: str, metadata: dict[str, Any] | None = None) -> None:
        """Count a run that ended, and how long this process executed it."""
        run = self._run(run_id)
        self._open.pop(run_id, None)
        if run.start is not None and metadata is not None:
            self._observe("run_seconds", max(metadata["time"] - run.start, 0.0), run.agent, *run.tenant)
        if outcome in _FINAL:
            self._count("runs", 1, run.agent, outcome, *run.tenant)

    def log_event(self, run_id: UUID, event_type: str, payload: dict[str, Any]) -> None:
        """Count a step, a model call, a tool call or an event of a topic."""
        if event_type in _STEP_ENDS:
            duration = payload.get("duration_ms")
            self._ended(run_id, "step", None if duration is None else duration / 1000, _STEP_ENDS[event_type])
        elif event_type in _CALLS:
            start, end = payload.get("started_at"), payload.get("ended_at")
            # `ctx.charge` reports no duration.
            duration = end - start if start is not None and end is not None and end > start else None
            self._ended(run_id, _CALLS[event_type], duration, payload.get("error") is None)
            if event_type == "llm.call":
                self._count_usage(payload, self._run(run_id).tenant)
        elif event_type == "topic.published":
            latency, topic = payload["latency_ms"], payload["topic"]
            self._count("topic_errors", latency is None, topic)
            if latency is not None:
                self._observe("topic_publish_seconds", latency / 1000, topic)
        elif event_type == "topic.invalid":
            self._count("topic_errors", 1, payload["topic"])

    # -- called by the HTTP server

    def http_response(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a response that began.

        Args:
            method: The method of the request; "WS" for a socket.
            route: The path with its parameters as names.
            status: The status; 101 for an accepted socket.
            seconds: The time since the request.
        """
        self._count("http_requests", 1, method, route, str(status))
        self._observe("http_seconds", seconds, method, route)

    # -- counting

    def _ended(self, run_id: UUID, kind: str, seconds: float | None, succeeded: bool) -> None:
        run = self._run(run_id)
        if seconds is not None:
            self._observe("step_seconds", seconds, run.agent, kind, *run.tenant)
        if not succeeded:
            self._count("step_failures", 1, run.agent, kind, *run.tenant)

    def _run(self, run_id: UUID) -> _Execution:
        found = self._open.get(run_id)
        return _Execution(UNKNOWN, None, ("",) if self._by_tenant else ()) if found is None else found

    def _count_usage(self, payload: Mapping[str, Any], tenant: tuple[str, ...]) -> None:
        model, usage = self._model(payload.get("model") or UNKNOWN), payload.get("usage") or {}
        for name, kind in _TOKENS.items():
            if tokens := usage.get(name):
                self._count("tokens", tokens, model, kind, *tenant)
        if cost := payload.get("cost_usd"):
            self._count("cost_usd", cost, model, *tenant)

    def _count(self, name: str, amount: float, *labels: str) -> None:
        self._child(self._counters, name, labels).inc(amount)

    def _observe(self, name: str, seconds: float, *labels: str) -> None:
        self._child(self._histograms, name, labels).observe(seconds)

    def _child(self, metrics: Mapping[str, Any], name: str, labels: tuple[str, ...]) -> Any:
        # The library looks labels up with a lock and checks, which takes as long as counting.
        key = (name, *labels)
        found = self._children.get(key)
        if found is None:
            found = self._children[key] = metrics[name].labels(*labels)
        return found


class _Names:
    """Labels for the first 100 names; further names are "other"."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        found = self._known.get(name)
        if found is None:
            if len(self._known) >= MOST_NAMES:
                return OTHER
            # A lone surrogate cannot be sent.
            found = self._known[name] = name[:LONGEST_NAME].encode("utf-8", "replace").decode()
        return found


class _ReadValues:
    """What was last read of the queue, the topics and the server."""

    def __init__(self, consumer: _Names, agent: _Names) -> None:
        self.clock = SYSTEM
        self.sources: dict[str, Source] = {}
        self.samples: list[Sample] = []
        self._names = {"consumer": consumer, "agent": agent}
        self._read_at = float("-inf")
        self._failed: set[str] = set()

    async def refresh(self) -> None:
        """Read all sources, if the last time was 5 seconds ago or more."""
        now = self.clock.boot()
        if now - self._read_at < READ_SECONDS:
            return
        self._read_at = now
        found: dict[tuple[str, tuple[str, ...]], float] = {}
        for name, read in tuple(self.sources.items()):
            for sample in await self._read(name, read):
                key = (sample.name, self._labels(sample))
                # Several agents may be "other". The age of the oldest run is no sum.
                known = found.get(key, 0.0)
                ages = sample.name == "queue_oldest_seconds"
                found[key] = max(known, sample.value) if ages else known + sample.value
        self.samples = [Sample(name, labels, value) for (name, labels), value in found.items()]

    async def _read(self, name: str, read: Source) -> Iterable[Sample]:
        try:
            found = read()
            samples = [*(await found if inspect.isawaitable(found) else found)]
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                log.warning("metrics of the %s are missing, because they cannot be read", name, exc_info=error)
            return ()
        self._failed.discard(name)
        return samples

    def _labels(self, sample: Sample) -> tuple[str, ...]:
        _, _, names = _READ[sample.name]
        limits = self._names
        return tuple(
            limits[name](value) if name in limits else value for name, value in zip(names, sample.labels, strict=True)
        )


class _Collector:
    """Gives the values that were read to the registry."""

    def __init__(self, families: ModuleType, values: _ReadValues) -> None:
        self._types: dict[str, Any] = {"gauge": families.GaugeMetricFamily, "counter": families.CounterMetricFamily}
        self._values = values

    def describe(self) -> list[Any]:
        """Return the names, so that a registry can find duplicates."""
        return [*self._families().values()]

    def collect(self) -> Iterator[Any]:
        """Return the values."""
        self._refresh()
        families = self._families()
        for name, labels, value in self._values.samples:
            families[name].add_metric(labels, value)
        yield from (family for family in families.values() if family.samples)

    def _refresh(self) -> None:
        """Read the values again, if that is due and the calling thread may wait."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # a thread may wait; on an event loop, `exposition` read them before
            call(self._values.refresh)

    def _families(self) -> dict[str, Any]:
        return {
            # Autoscalers of Iggy's users look for that name.
            name: self._types[kind](name if name.startswith("iggy_") else PREFIX + name, text, labels=labels)
            for name, (kind, text, labels) in _READ.items()
        }


async def _of_runner(runner: WatchedRunner) -> list[Sample]:
    counts, now = await runner.queue.counts(), runner.queue.clock.wall()
    found = [
        Sample("queue_depth", (agent, status), count)
        for (status, agent), count in counts.runs.items()
        if status in _LIVE
    ]
    found += [
        Sample("queue_oldest_seconds", (agent,), max(now - at, 0.0)) for agent, at in counts.oldest_pending.items()
    ]
    found.append(Sample("dead", (), sum(number for (status, _), number in counts.runs.items() if status == "dead")))
    found.append(Sample("backpressure_seconds", (), runner.backpressure_seconds))
    found.append(Sample("traces_dropped", (), 0 if runner.tracer is None else runner.tracer.dropped))
    return found


async def _of_topics(topics: WatchedTopics) -> list[Sample]:
    stats = await topics.stats()
    return [
        Sample("topic_lag", (topic, consumer), lag)
        for topic, each in stats.items()
        for consumer, lag in each.lag.items()
    ]
