"""A schedule is stored as a row of the queue: nothing that shows runs shows such a row."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._engines.base import Op
from agent_runtime_core._views.read_routes import OF_RUNS, OF_STORES
from agent_runtime_core.cli import doctor
from agent_runtime_core.cli.help import SECTIONS
from agent_runtime_core.errors import UnknownRun
from agent_runtime_core.inspector.export import run_html
from agent_runtime_core.queue.records import LIVE, SCHEDULE, RunFilter
from agent_runtime_core.runner import AgentRunner
from tests.server.conftest import client_of
from tests.support.command_line import Commands
from tests.support.postgres_servers import PostgresServer
from tests.unit.test_postgres_migration import schema_of

NAMES = ("waiting", "pending", "running", "damaged")
#: The commands of the command line that show or count runs, and those that do not.
SHOW_RUNS: dict[str, list[list[str]]] = {
    "runs": [[], ["--status", "waiting"], ["--search", "schedule"], ["--sort", "age"], ["--agent", SCHEDULE],
             ["--prefix", "schedule:"]],
    "workers": [[]], "doctor": [[]], "check": [["code_among_runs:agents"]],
    "dead": [["list"], ["list", "--status", "failed"]],
    "show": [["r1"], ["schedule:waiting"]], "events": [["r1"], ["schedule:waiting"]],
    "export": [["schedule:waiting"]], "cancel": [["schedule:waiting"]], "resume": [["schedule:waiting"]],
    "fork": [["schedule:waiting"]], "send": [["schedule:waiting", "hello"]], "signal": [["schedule:waiting", "go"]],
    "approve": [["schedule:waiting", "pay"]],
}  # fmt: skip
SHOW_NO_RUNS = {
    "worker", "serve", "submit", "inspect", "conformance", "schedule", "tenant", "vacuum", "erase", "migrate", "backup",
    "restore", "pools", "index", "mark-restored", "restored", "copy", "verify", "reencrypt", "carry-over", "help",
    "version", "completion",
}  # fmt: skip
CODE = """
from agent_runtime_core import AgentRuntime, RunResult

class Echo(AgentRuntime):
    key = "echo"

    async def run(self, ctx):
        return RunResult()

agents = Echo()
"""


async def filled(runner: AgentRunner) -> list[str]:
    """Store a run and schedules in all states, and return what nothing may show."""
    for name in NAMES:
        await runner.schedules.put(name, "echo", {"text": "canary-text"}, every=1e6, overlap="queue")
        if name == "running":
            await runner.submit("echo", run_id="r1")
    hidden = list[str]()
    for name in NAMES:
        row = await runner.schedules.row(name)
        assert row is not None
        hidden += [row.run_id, f"schedule:{name}"]
        now = row.with_values(due_at=row.due_at if name in ("waiting", "damaged") else 1.0)
        now = now.with_values(priority=1 if name == "pending" else now.priority)
        now = now.with_values(reason="schedule x") if name == "damaged" else now
        if now != row:
            end = Op("queue.end", (row.run_id, LIVE, "cancelled", 1.0, ""))
            ops = [end, Op("queue.delete", (row.run_id, row.generation, row.arrival)), Op("queue.insert", (now,))]
            await runner.queue.commits.commit(None, ops)
    await runner.queue.claim_rows("other", agent_keys=[SCHEDULE])
    states = {row.run_key: row.status for row in await runner.queue.find(RunFilter(agent=SCHEDULE))}
    assert states == {f"schedule:{name}": "waiting" if name == "damaged" else name for name in NAMES}
    return [*hidden, SCHEDULE, "canary-text"]


def leaks(text: str, hidden: list[str], *sent: str) -> list[str]:
    """Return what a text shows of the rows of schedules, besides what was sent."""
    found = [each for each in hidden if each in text and each not in sent]
    return found + re.findall(r"\bschedule \d+\.\d* (?:-|\d)|schedule x", text)


async def test_the_lists_of_a_runner(runner: AgentRunner) -> None:
    hidden = await filled(runner)
    both: tuple[dict[str, Any], ...] = (
        {}, {"status": "pending"}, {"newest_first": False}, {"sort": "age"}, {"search": "r1"}, {"limit": 1},
    )  # fmt: skip
    for wanted in both:
        assert [run.run_key for run in await runner.runs(**wanted)] == ["r1"], wanted
    none: tuple[dict[str, Any], ...] = (
        {"agent": SCHEDULE}, {"reason": "schedule"}, {"prefix": "schedule:"}, {"search": "canary-text"},
        {"status": "running"}, {"status": "waiting"},
    )  # fmt: skip
    for wanted in none:
        assert await runner.runs(**wanted) == [], wanted
    for name in hidden:
        with pytest.raises(UnknownRun):
            await runner.get_run(name)
        with pytest.raises(UnknownRun):
            await run_html(runner, name)
    assert {each.id for each in await runner.schedules.list()} == set(NAMES)
    await runner.close()


def test_each_command_is_known_here() -> None:
    assert {each for names in SECTIONS.values() for each in names} == SHOW_RUNS.keys() | SHOW_NO_RUNS


@pytest.mark.parametrize("command", SHOW_RUNS)
def test_the_command_line(
    command: str, runner: AgentRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "_WAITING", -1.0)
    monkeypatch.setattr(doctor, "_LONG", -1.0)
    (tmp_path / "code_among_runs.py").write_text(CODE, "utf-8")
    hidden = asyncio.run(filled(runner))
    asyncio.run(runner.close())
    run = Commands(capsys, str(tmp_path / "agents.db"))
    for args in SHOW_RUNS[command]:
        for form in ([], ["--json"]):
            code, out, err = run(command, *args, *form)
            assert leaks(out + err, hidden, *args) == [], (args, out, err)
            if args[:1] == ["schedule:waiting"]:
                assert (code, out) == (1, ""), (args, err)
                assert "not found" in err
    if command == "runs":
        assert [each["run_key"] for each in run.json("runs")] == ["r1"]
    if command == "doctor":
        assert "1 pending" in run("doctor")[1]


async def test_the_http_api(runner: AgentRunner, make_app: Callable[..., Any]) -> None:
    hidden = await filled(runner)
    queries = ("", "?state=waiting&state=pending&state=running", "?q=schedule", "?search=canary-text", "?sort=age",
               f"?agent={SCHEDULE}", "?limit=1")  # fmt: skip
    async with client_of(make_app()) as client:
        for route in (*OF_RUNS, *OF_STORES):
            if route.path.startswith("schedules"):
                continue
            path = re.sub(r"{step_id}", "x", re.sub(r"{id}|{other}", "r1", route.path))
            for query in queries if route.path == "runs" else ("",):
                shown = await client.get(f"/api/v1/{path}{query}")
                assert shown.status_code in ((200, 202) if "{" not in route.path else (200, 202, 404)), path
                assert leaks(shown.text, hidden) == [], path + query
            for name in hidden if "{id}" in route.path else ():
                path = route.path.replace("{id}", name.replace(":", "%3A"))
                path = path.replace("{other}", "r1").replace("{step_id}", "x")
                assert (await client.get(f"/api/v1/{path}")).status_code == 404, path
        [item] = (await client.get("/api/v1/runs")).json()["items"]
        assert item["key"] == "r1"
        assert (await client.get("/api/v1/queue")).json()["by_status"] == {"pending": 1}
        assert (await client.get("/api/v1/usage")).json()["total"]["runs"] == 1
        for path in ("/metrics", "/health"):
            assert leaks((await client.get(path)).text, hidden) == [], path
        for verb in ("cancel", "resume", "fork", "signals/go", "messages"):
            path = f"/api/v1/runs/schedule%3Awaiting/{verb}"
            body = {"message": "hi"} if verb == "messages" else {}
            assert (await client.post(path, json=body)).status_code == 404, verb
    assert await runner.schedules.get("waiting") is not None


@pytest.mark.postgres
async def test_the_views_of_postgresql(postgres_url: str, postgres_server: PostgresServer) -> None:
    async with AgentRunner.open(postgres_url) as runner:
        hidden = await filled(runner)
    schema = schema_of(postgres_url)
    views = [name for (name,) in postgres_server.ask(
        "SELECT table_name FROM information_schema.views WHERE table_schema = %s", schema)]  # fmt: skip
    assert set(views) >= {"v_runs", "v_steps", "v_waiting", "v_counts"}
    for view in views:
        assert leaks(repr(postgres_server.ask(f"SELECT * FROM {schema}.{view}")), hidden) == [], view
    assert postgres_server.ask(f"SELECT run_key FROM {schema}.v_runs") == [("r1",)]
    assert postgres_server.ask(f"SELECT agent, runs FROM {schema}.v_counts") == [("echo", 1)]
