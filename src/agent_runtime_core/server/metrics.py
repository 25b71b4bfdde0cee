"""`/metrics`: what Prometheus reads of this process."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .._views.visibility import refuse_limited
from ..tracing.prometheus import Sample
from .access import permitted
from .errors import Problem
from .state import ServerState, state_of

router: APIRouter = APIRouter(include_in_schema=False)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics of this process."""
    state = state_of(request)
    if not state.settings.metrics_open:
        refuse_limited(await permitted(request, "metrics"))
    if state.metrics is None:
        raise Problem.of(404, "This server has no metrics. Start it with --metrics, or pass create_app(metrics=...).")
    body, content_type = await state.metrics.exposition(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})


def prepare(state: ServerState) -> None:
    """Let the metrics include the runner, the topics and the streams of a server."""
    metrics, runner = state.metrics, state.runner
    if metrics is None:
        return
    if runner.tracer is None or metrics not in runner.tracer.sinks:
        runner.add_trace_sink(metrics)
    topics = None if state.turns is None else state.turns.topics
    metrics.watch(runner, topics=topics)
    metrics.add_source("server", lambda: _of_server(state))


def _of_server(state: ServerState) -> list[Sample]:
    limits = state.limits
    return [
        Sample("streams", ("sse",), limits.open_streams - limits.open_sockets),
        Sample("streams", ("socket",), limits.open_sockets),
        Sample("streams_cut", (), limits.streams_cut),
    ]
