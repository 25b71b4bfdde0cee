"""Prometheus itself reads the metrics of a server, the alert rules and the queries of the dashboard."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from agent_runtime_core import portal
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.tracing import PrometheusSink
from tests.support.processes import PATIENCE, ROOT, until
from tests.support.redis_servers import free_port
from tests.support.runs import Script

PROMETHEUS = shutil.which("prometheus")
if PROMETHEUS is None:
    pytest.skip("needs Prometheus", allow_module_level=True)
client = pytest.importorskip("prometheus_client")

ASSETS = ROOT / "docs" / "assets" / "prometheus"
#: What its configuration in the guide says, with other times and addresses.
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - job_name: agent-runtime
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


class Asked:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1/"

    def ask(self, path: str, **parameters: str) -> Any:
        with urlopen(f"{self._url}{path}?{urlencode(parameters)}", timeout=PATIENCE) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        return answer["data"]

    def found(self, expression: str) -> list[Any]:
        """The result of a query; nothing while Prometheus starts."""
        with contextlib.suppress(OSError):
            result: list[Any] = self.ask("query", query=expression)["result"]
            return result
        return []


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[[int], Asked]]:
    """`prometheus(port)`: a Prometheus that reads the metrics on this port, until the end of the test."""
    with contextlib.ExitStack() as stack:

        def start(port: int) -> Asked:
            config, own = tmp_path / "prometheus.yml", free_port()
            config.write_text(CONFIG.format(rules=json.dumps(str(ASSETS / "alerts.yml")), port=port))
            log = stack.enter_context((tmp_path / "prometheus.log").open("wb"))
            process = subprocess.Popen(
                [
                    str(PROMETHEUS), f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}",
                    f"--web.listen-address=127.0.0.1:{own}",
                ], stdout=log, stderr=log,
            )  # fmt: skip
            stack.callback(process.wait, PATIENCE)
            stack.callback(process.send_signal, signal.SIGKILL)
            return Asked(own)

        yield start


@pytest.fixture
def metrics_port(tmp_path: Path) -> Iterator[int]:
    """The port of a process that has executed a run and has a pending one."""
    metrics, registry = PrometheusSink(), Registry()

    async def echo(ctx: Any) -> Any:
        await ctx.step("say", lambda: ctx.charge(model="m-1", input_tokens=7, output_tokens=2, cost_usd=0.25))

    registry.register(Script(echo, "echo"))
    runner = AgentRunner.open(tmp_path / "agents.db", registry=registry, trace_sinks=[metrics])
    metrics.watch(runner)
    portal.call(runner.execute, "echo")
    portal.call(runner.submit, "echo", {})
    metrics.http_response("GET", "/api/v1/runs", 200, 0.01)
    server, thread = client.start_http_server(0, addr="127.0.0.1", registry=metrics.registry)
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join(PATIENCE)
    portal.call(runner.close)


def test_prometheus_reads_the_metrics_and_evaluates_alerts_and_dashboard(
    prometheus: Callable[[int], Asked], metrics_port: int
) -> None:
    asked = prometheus(metrics_port)
    until(lambda: asked.found('agent_runtime_runs_total{state="succeeded"} == 1') != [], "it has read the metrics")
    until(
        lambda: {rule["health"] for group in asked.ask("rules")["groups"] for rule in group["rules"]} == {"ok"},
        "it has evaluated all rules",
    )
    board = json.loads((ASSETS / "grafana-dashboard.json").read_text("utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for expression in expressions:
        asked.ask("query", query=expression.replace("$__rate_interval", "1m"))
    assert len(expressions) >= len(board["panels"]) >= 10
    for expression, value in (
        ('sum by (kind) (agent_runtime_tokens_total{kind="input"})', "7"),
        ("sum(agent_runtime_cost_usd_total)", "0.25"),
        ("sum by (state) (max by (agent, state) (agent_runtime_queue_depth))", "1"),
        ("sum by (status) (agent_runtime_http_requests_total)", "1"),
    ):
        [found] = asked.found(expression)
        assert found["value"][1] == value
