"""The metrics of `agent-runtime worker` and `serve`."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from .._core.lazy_import import load
from ..errors import InvalidArgument, brief
from ..runner.runner import AgentRunner
from ..tracing.prometheus import PrometheusSink


def metrics_of(runner: AgentRunner) -> PrometheusSink:
    """Return the Prometheus sink of a runner, which gets one if it has none."""
    known = () if runner.tracer is None else runner.tracer.sinks
    found = next((sink for sink in known if isinstance(sink, PrometheusSink)), None)
    if found is None:
        found = PrometheusSink()
        runner.add_trace_sink(found)
    return found


@contextlib.contextmanager
def served_metrics(args: Namespace, runner: AgentRunner) -> Iterator[str | None]:
    """Serve the metrics of a worker on `--metrics-port` inside the block. Yield their URL, None without that option."""
    if args.metrics_port is None:
        yield None
        return
    metrics = metrics_of(runner)
    metrics.watch(runner)
    start: Any = load("prometheus_client:start_http_server", needed_by="--metrics-port")
    host, port = args.metrics_host, args.metrics_port
    try:
        server, thread = start(port, addr=host, registry=metrics.registry)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is not a valid name"
        raise InvalidArgument(
            f"port {port} of {brief(host)} cannot be used for metrics: {why}. Choose another one with --metrics-host "
            "and --metrics-port"
        ) from None
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
