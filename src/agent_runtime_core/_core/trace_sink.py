"""The base class of trace sinks, which receive what runs report."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from uuid import UUID


class TraceSink:
    """Base class of trace sinks. Every method does nothing by default; override the ones you need.

        class PrintSink(TraceSink):
            def log_event(self, run_id, event_type, payload):
                print(run_id, event_type)

        runner = AgentRunner(trace_sinks=[PrintSink()])

    Most methods are called by a thread of the tracer, not by the run itself.
    """

    def start_run(self, run_id: UUID, metadata: dict[str, Any]) -> None:
        """A process began to execute the run; `metadata` has `time` in seconds since 1970."""

    def log_event(self, run_id: UUID, event_type: str, payload: dict[str, Any]) -> None:
        """An event of the run, a model call (`llm.call`) or a tool call (`tool.done`)."""

    def end_run(self, run_id: UUID, outcome: str, metadata: dict[str, Any] | None = None) -> None:
        """The process stopped executing the run; `outcome` says why."""

    def flush(self) -> None:
        """Send what is buffered; called when the tracer closes."""

    def activate(self, traceparent: str) -> AbstractContextManager[object] | None:
        """Return a context manager that makes this span the current one, for code of the run.

        Unlike the other methods, it is called by the run: around each execution and each attempt of a step.

        Args:
            traceparent: The span of the execution or of the step, as in a W3C `traceparent` header.
        """

    def current_traceparent(self) -> str | None:
        """Return the span in which a run is being submitted, or None. Called by `submit` and `execute`."""

    async def trace(self, event: dict[str, Any]) -> None:
        """Handle any of these as one dict.

        Args:
            event: `type` ("start_run", "end_run" or the event type), `run_id`, `time` in seconds since 1970, and the
                payload.
        """
