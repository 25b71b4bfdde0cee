"""`agent-runtime worker`: one process that executes runs until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import platform
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .._core.lazy_import import load
from .._core.log import log
from ..config import get_config
from ..errors import InvalidArgument, brief
from ..runner.runner import AgentRunner
from ..runner.settings import RunnerConfig
from ..tracing.logs import JsonFormatter
from ..tracing.prometheus import PrometheusSink
from .app_loader import agents_of
from .output import LogFormatter, json_line, print_line
from .store import display_name, is_in_memory, open_store, refuse_url


def metrics_of(runner: AgentRunner) -> PrometheusSink:
    """Return the Prometheus sink of a runner. A runner without a sink gets a new sink."""
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


#: Of the garbage collector: new objects before it visits the youngest, how often it does so before it visits those that
#: stayed once, and how often it visits these before it visits all.
THRESHOLDS = 2_000, 5, 200
_DEFAULT_THRESHOLDS = gc.get_threshold()  # this module is imported before that of the agents
LAST_SECONDS = 0.5  # seconds for tasks that are cancelled when all runs were released


async def work(args: Namespace) -> int:
    """Print a line when ready, execute runs until SIGTERM or SIGINT, then let active runs finish.

    A second signal does not wait for active runs.
    """
    set_up_logging(args)
    async with _runner(args) as runner:
        await runner.queue.next_due()  # raises for an unreadable store before the ready line
        with served_metrics(args, runner) as metrics:
            freeze_imports()
            collect_less_often()
            working = asyncio.create_task(runner.run_loop(args.poll, concurrency=args.concurrency))
            await asyncio.sleep(0)  # from here on it handles signals
            if not working.done():
                _print_ready(args, runner, metrics)
            await working
    log.info("worker %s has stopped", runner.config.worker_id)
    await end_in_spite_of_tasks()
    return 0


def _print_ready(args: Namespace, runner: AgentRunner, metrics: str | None) -> None:
    keys, place = runner.registry.keys(), display_name(runner, args.url)
    if args.json:
        more = {} if metrics is None else {"metrics": metrics}
        json_line({
            "worker": runner.config.worker_id, "ready": True, "store": place, "agents": list(keys),
            "concurrency": args.concurrency, **more,
        })  # fmt: skip
    else:
        print_line(
            f"worker {runner.config.worker_id} is ready: {place}, "
            f"{'agent' if len(keys) == 1 else 'agents'} {', '.join(keys)}, concurrency {args.concurrency}"
        )
        if metrics is not None:
            print_line(f"metrics on {metrics}")
        sys.stdout.flush()


def set_up_logging(args: Namespace) -> None:
    """Write the log of the process to stderr, as text or JSON."""
    handler = logging.StreamHandler()
    text = LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    as_json = args.json if args.log_format is None else args.log_format == "json"
    handler.setFormatter(JsonFormatter() if as_json else text)
    logging.basicConfig(level=args.log_level.upper(), handlers=[handler])


def freeze_imports() -> None:
    """Exclude the imported modules, which stay, from garbage collection.

    A full collection of them would block the event loop, with SDKs for 0.1 s or more.
    """
    gc.collect()
    gc.freeze()


def collect_less_often() -> None:
    """Raise the thresholds of the garbage collector, unless the module of the agents has set them.

    Each open run needs about 100 objects, which stay. With the default of 700 new objects the collector visits all of
    them again and again while runs are opened. A visit to all objects of 4,000 runs holds the event loop for 80 ms.
    """
    if gc.get_threshold() == _DEFAULT_THRESHOLDS:
        gc.set_threshold(*THRESHOLDS)


def worker_name() -> str:
    """Return the worker id of this process: the machine and the process id."""
    return f"{platform.node() or 'worker'}-{os.getpid()}"


async def end_in_spite_of_tasks() -> None:
    """End the process if a task ignores its cancellation, or blocks in `asyncio.to_thread`.

    Closing the event loop would wait for it without limit. The runner has released the run of such a task, and another
    worker may execute it already.
    """
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        _, pending = await asyncio.wait(tasks, timeout=LAST_SECONDS)
        if pending:
            _end(f"{len(pending)} running tasks, which ignore their cancellation")
    joined = asyncio.create_task(asyncio.get_running_loop().shutdown_default_executor())
    if not (await asyncio.wait({joined}, timeout=LAST_SECONDS))[0]:
        _end("a thread of asyncio.to_thread, which cannot be cancelled")


def _end(running: str) -> None:
    log.warning("ends with %s", running)
    sys.stdout.flush()
    logging.shutdown()
    os._exit(0)


def _runner(args: Namespace) -> AgentRunner:
    found = agents_of(args.target, args.agent_path)
    changes: dict[str, Any] = {} if args.grace is None else {"grace_seconds": args.grace}
    if not isinstance(found, AgentRunner):
        config = RunnerConfig.of(get_config())
        return open_store(args.url, found, replace(config, worker_id=worker_name(), **changes))
    refuse_url(args)
    if is_in_memory(found):
        raise InvalidArgument(
            f"the runner {args.target} must not store runs in memory, where other processes cannot submit any. "
            "Create it with AgentRunner.open('agents.db')"
        )
    found.config = replace(found.config, **changes)
    return found
