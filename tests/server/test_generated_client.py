"""A client that openapi-python-client generates from the OpenAPI document calls every operation of a real server."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from agent_runtime_core.orchestrator import Orchestrator
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.server.access import Tokens
from agent_runtime_core.server.app import create_app
from agent_runtime_core.server.token_file import Token
from agent_runtime_core.turns import TurnManager
from tests.server.conftest import TOKEN, LiveServer, echo
from tests.support.processes import PATIENCE, ROOT
from tests.support.runs import Script

pytest.importorskip("openapi_python_client")

NAME: Final = "generated_client"
METHODS: Final = ("get", "put", "post", "patch", "delete")
#: Arguments of a call, and the documented status that it must get.
Call = tuple[int, dict[str, Any]]
LISTED: Final = {"limit": 5}


async def failing(ctx: Any) -> Any:
    raise ValueError("no luck")


async def asking(ctx: Any) -> Any:
    return await ctx.approve("pay", {"amount": 3})


async def listening(ctx: Any) -> Any:
    return await ctx.wait_for_signal("paid")


def opened(path: Path) -> AgentRunner:
    registry = Registry()
    for body, key in ((echo, "echo"), (failing, "failing"), (asking, "asking"), (listening, "listening")):
        registry.register(Script(body, key))
    return AgentRunner.open(path, registry=registry, config=RunnerConfig(park_after=0, max_retries=1))


async def with_runs(path: Path) -> dict[str, str]:
    """Store the runs that the calls need; return the id of a step, of a plan and of a turn."""
    async with opened(path) as runner:
        for number in range(5):
            await runner.execute("echo", f"done {number}", {"text": "x"})
            await runner.execute("failing", f"a/failed {number}")
        for key in ("asking", "listening"):
            await runner.submit(key, run_id=key)
            await runner.run_once()
        await runner.submit("echo", run_id="pending")
        await runner.submit("echo", run_id="running", priority=1)
        async with Orchestrator(runner=runner) as orchestrator:
            planned = await orchestrator.create_run(prompt="add 1 and 2")
            await orchestrator.wait(planned.run_id)
        turn = await TurnManager(runner).run_turn({"text": "add 2 and 3"})
    return {"planned": str(planned.run_id), "turn": turn.id}


def calls_of(models: Any, ids: dict[str, str], step_id: str) -> dict[str, list[Call]]:
    """By operation id: the calls to make, in this order, with every documented status of success."""
    dead, states = models.DeadLettersType0, models.ListRunsStateItem
    return {
        "read_liveness": [(200, {})],
        "read_readiness": [(200, {})],
        "read_health": [(200, {})],
        "read_about": [(200, {})],
        "read_queue": [(200, {})],
        "list_pools": [(200, {})],
        "list_workers": [(200, {})],
        "list_agents": [(200, {})],
        "read_dashboard": [(200, {"window": models.ReadDashboardWindow.WEEK})],
        "read_usage": [(200, {"by": models.ReadUsageBy.DAY, "since": 0.0})],
        "list_approvals": [(200, {"agent": "asking", **LISTED})],
        "list_runs": [(200, {"state": [states.SUCCEEDED, states.FAILED], **LISTED})],
        "put_schedule": [
            (200, {"id": "a/b", "body": models.IntervalSchedule(agent="echo", every=3600.0, paused=False)})
        ],
        "list_schedules": [(200, LISTED)],
        "read_schedule": [(200, {"id": "a/b"})],
        "pause_schedule": [(200, {"id": "a/b"})],
        "resume_schedule": [(200, {"id": "a/b"})],
        "run_schedule": [(201, {"id": "a/b"})],
        "delete_schedule": [(204, {"id": "a/b"})],
        "submit_run": [
            (201, {"body": models.AgentRun(agent="echo", run_id="new", delay=3600.0), "idempotency_key": "k"}),
            (200, {"body": models.AgentRun(agent="echo", run_id="new", delay=3600.0), "idempotency_key": "k"}),
            (201, {"body": models.PromptRun(prompt="add 1 and 2", max_steps=3)}),
        ],
        "read_run": [(200, {"id": ids["planned"]}), (200, {"id": "a/failed 0"})],
        "read_result": [(200, {"id": "done 0", "wait": 1.0}), (202, {"id": "pending"})],
        "read_steps": [(200, {"id": ids["planned"], **LISTED})],
        "read_step": [(200, {"id": ids["planned"], "step_id": step_id})],
        "read_timeline": [(200, {"id": ids["planned"], "newest_first": True, **LISTED})],
        "read_journal": [(200, {"id": ids["planned"], **LISTED})],
        "read_messages": [(200, {"id": ids["turn"], **LISTED})],
        "read_plan": [(200, {"id": ids["planned"]})],
        "compare_runs": [(200, {"id": "done 0", "other": "a/failed 0"})],
        "stream_events": [
            (200, {"id": "a/failed 0", "follow": False, "types": ["run.*"]}),
            (204, {"id": "done 0", "last_event_id": "1000"}),
        ],
        "send_message": [
            (202, {"id": "pending", "body": models.SentMessage(message="hello", when=models.SentMessageWhen.INTERRUPT)})
        ],
        "send_signal": [(202, {"id": "listening", "name": "paid", "body": {"n": 1}, "idempotency_key": "s"})],
        "answer_approval": [(200, {"id": "asking", "name": "pay", "body": models.Answer(answer={"ok": True})})],
        "fork_run": [(201, {"id": ids["planned"]}), (201, {"id": "done 0", "body": models.Fork(new_run_id="forked")})],
        "cancel_run": [(202, {"id": "running", "body": models.Cancel(wait=0.0)}), (200, {"id": "pending"})],
        "resume_run": [(202, {"id": "a/failed 1"})],
        "requeue_dead_letters": [
            (200, {"body": dead(ids=["a/failed 2", "none"], state="failed")}),
            (200, {"body": models.DeadLettersType1(all_=True, expect=0)}),
        ],
        "discard_dead_letters": [(200, {"body": dead(ids=["a/failed 3"], state="failed")})],
        "delete_run": [(204, {"id": "done 1"})],
        "start_turn": [(201, {"body": models.StartTurnTextTurn(text="hello", turn_id="first")})],
        "read_turn": [(200, {"id": ids["turn"]})],
        "sign_in": [(200, {"body": models.SignInType0(token=TOKEN)})],
        "sign_out": [(204, {})],
    }


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """`generated(document)`: the package that the command makes of it, imported. A warning fails the test."""

    def generate(document: dict[str, Any]) -> Any:
        path, config = tmp_path / "openapi.json", tmp_path / "config.json"
        path.write_text(json.dumps(document))
        config.write_text('{"post_hooks": []}')  # it formats nothing
        done = subprocess.run(
            [
                sys.executable, "-m", "openapi_python_client", "generate", "--meta", "none", "--fail-on-warning",
                "--path", path, "--config", config, "--output-path", tmp_path / NAME,
            ], cwd=ROOT, capture_output=True, text=True, timeout=4 * PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        monkeypatch.syspath_prepend(str(tmp_path))
        return importlib.import_module(NAME)

    yield generate
    for name in [each for each in sys.modules if each.partition(".")[0] == NAME]:
        del sys.modules[name]


async def test_a_generated_client_calls_every_operation(
    tmp_path: Path, live_server: Callable[..., LiveServer], generated: Callable[[dict[str, Any]], Any]
) -> None:
    ids = await with_runs(tmp_path / "agents.db")
    runner = opened(tmp_path / "agents.db")
    await runner.queue.claim_rows("worker", 3600.0, limit=1)  # "running", which nothing ends
    app = create_app(
        runner,
        orchestrator=Orchestrator(runner=runner, work=False),
        turns=TurnManager(runner),
        authenticate=Tokens([Token.of(TOKEN)]),
    )
    await asyncio.to_thread(call_all, live_server(app).url, ids, generated)
    await runner.close()


def call_all(url: str, ids: dict[str, str], generated: Callable[[dict[str, Any]], Any]) -> None:
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        document = http.get("/openapi.json").json()
        step_id = http.get(f"/api/v1/runs/{ids['planned']}/timeline").json()["items"][0]["step_id"]
    package = generated(document)
    models = importlib.import_module(f"{NAME}.models")
    calls = calls_of(models, ids, step_id)
    operations = {
        operation["operationId"]: operation
        for path in document["paths"].values()
        for method, operation in path.items()
        if method in METHODS
    }
    assert sorted(calls) == sorted(operations), "each operation needs a call"
    with (
        package.AuthenticatedClient(url, TOKEN, raise_on_unexpected_status=True) as client,
        package.Client(url, raise_on_unexpected_status=True) as stranger,
    ):
        for name, each in calls.items():
            operation = operations[name]
            answers = {int(code): answer for code, answer in operation["responses"].items() if code.startswith("2")}
            assert {status for status, _ in each} == set(answers), f"{name} needs a call with each documented status"
            module = importlib.import_module(f"{NAME}.api.{operation['tags'][0]}.{name}")
            security = operation.get("security", document["security"])
            if security and {} not in security:
                refused = module.sync_detailed(client=stranger, **each[0][1])
                assert (refused.status_code, type(refused.parsed)) == (401, models.Problem), name
            for status, arguments in each:
                response = module.sync_detailed(client=client, **arguments)
                assert response.status_code == status, (name, response.content)
                check_parsed(name, response, answers[status], models)


def check_parsed(name: str, response: Any, answer: dict[str, Any], models: Any) -> None:
    """Fail unless an answer is the documented model, and the model contains all of the answer."""
    media = answer.get("content")
    if media is None:
        assert (response.parsed, response.content) == (None, b""), name
        return
    reference = media["application/json"]["schema"]["$ref"]
    assert type(response.parsed) is getattr(models, reference.rpartition("/")[2]), name
    assert response.parsed.to_dict() == json.loads(response.content), name
